// The places of a message as kernels compute them, for test_block_layout.py.
#include <cstdint>
#include <initializer_list>

#include "ops/codecs/block_layout.h"

using commhook::codecs::BlockLayout;

extern "C" {

int64_t shard_fields() { return 10; }

// shards: [shards, shard_fields()]. Returns the bytes of the message.
int64_t shards_of(int64_t block_size, int64_t bits, int64_t parameters, int64_t numel,
                  int64_t shards, int64_t* fields) {
  const BlockLayout layout({block_size, bits, parameters}, numel, shards);
  for (int64_t shard = 0; shard < shards; ++shard) {
    const auto codes = layout.fill_of_codes(shard);
    const auto rest = layout.fill_of_parameters(shard);
    for (const int64_t field :
         {layout.first_block(shard), layout.first_element(shard), layout.first_element(shard + 1),
          layout.offset_of_shard(shard), layout.offset_of_parameters(shard),
          layout.bytes_of_shard(shard), codes.begin, codes.end, rest.begin, rest.end}) {
      *fields++ = field;
    }
  }
  return layout.bytes();
}

int64_t shard_of_block(int64_t block_size, int64_t numel, int64_t shards, int64_t block) {
  return BlockLayout({block_size, 8, 1}, numel, shards).shard_of_block(block);
}

}  // extern "C"
