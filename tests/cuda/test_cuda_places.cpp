// Compares what the CUDA kernels of block codecs compute in short ways with the long ones. Run by
// test_cuda_partition.py.
#include "block_places.h"
#include "host_program.h"
#include "instructions.h"
#include "ops/codecs/blockwise_math.h"

namespace {

using namespace commhook;
using namespace commhook::cuda;

void check_block(const codecs::BlockLayout& layout, const ShardPlaces& places, int64_t block) {
  const auto& form = layout.form();
  const auto code_bytes = static_cast<int>(form.code_bytes(form.block_size));
  const auto parameter_bytes = static_cast<int>(form.parameters * 4);
  const auto got =
      place_in_shard(places, static_cast<uint32_t>(block), code_bytes, parameter_bytes);
  const int64_t shard = layout.shard_of_block(block);
  const int64_t before = block - layout.first_block(shard);
  const int64_t offset = layout.offset_of_shard(shard);
  const bool is_right =
      got.codes == offset + before * code_bytes &&
      got.parameters == offset + layout.offset_of_parameters(shard) + before * parameter_bytes &&
      got.end == layout.first_block(shard + 1) &&
      shard_of_block(places, static_cast<uint32_t>(block)).bytes_end ==
          (shard + 1 == layout.shards() ? layout.bytes() : layout.offset_of_shard(shard + 1));
  EXPECT(is_right, "block", block, "of", layout.blocks(), "in", layout.shards(),
         "shards of blocks of", form.block_size);
}

void check_places() {
  for (int i = 0; i < 20000; ++i) {
    const int64_t size = int64_t{128} << below(4);
    const int64_t shards = i % 3 == 0 ? 1 + below(9) : 1 + below(i % 3 == 1 ? 300 : kMostShards);
    const int64_t blocks = 1 + (i % 2 == 0 ? below(4 * shards) : below(kMostBlocks));
    const int64_t numel = (blocks - 1) * size + 1 + below(size);
    const codecs::BlockLayout layout({size, 4 << below(2), 1 + below(2)}, numel, shards);
    EXPECT(has_places(layout), blocks, "blocks");
    const auto places = places_of(layout);
    check_block(layout, places, 0);
    check_block(layout, places, blocks - 1);
    for (int k = 0; k < 4; ++k) {
      check_block(layout, places, below(blocks));
      const int64_t edge = layout.first_block(below(shards + 1));  // of two shards
      check_block(layout, places, edge < blocks ? edge : blocks - 1);
      check_block(layout, places, edge > 0 ? edge - 1 : 0);
    }
  }
}

void check_random_numbers() {
  for (uint32_t r = 0; r < 1u << 16; ++r) {
    const auto noise = static_cast<uint32_t>(generator());
    const uint32_t wanted = bits_of(blockwise::dither(r));
    EXPECT(bits_of(dither_of_half(noise << 16 | r, false)) == wanted, r);
    EXPECT(bits_of(dither_of_half(r << 16 | (noise & 0xffffu), true)) == wanted, r);
  }
}

template <bool kE5M2>
void check_fp8() {
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t wanted = bits_of(fp8::value_of<kE5M2>(static_cast<uint8_t>(code)));
    EXPECT(bits_of(value_of_fp8<kE5M2>(code << 24)) == wanted, code);
  }
  constexpr float kLargest = fp8::Traits<kE5M2>::kLargest;
  for (int i = 0; i < 1000000; ++i) {
    const float value = float_of(static_cast<uint32_t>(generator()));
    if (!(value <= kLargest && value >= -kLargest)) {
      continue;
    }
    const uint32_t pair = pair_of_fp8<kE5M2>(value, -3e38f);
    EXPECT((pair & 0xffu) == fp8::round_to<kE5M2>(value), value);
    EXPECT(pair >> 8 == fp8::round_to<kE5M2>(-kLargest), pair);
  }
}

void check_largest() {
  const float nan = float_of(kNaN);
  const float infinity = float_of(kInfinity);
  EXPECT(largest(1.0f, 2.0f) == 2.0f && largest(2.0f, 1.0f) == 2.0f, "numbers");
  EXPECT(largest(infinity, 1.0f) == infinity && largest(-infinity, 1.0f) == 1.0f, "infinities");
  for (const float other : {0.0f, 1.0f, infinity, -infinity}) {
    EXPECT(largest(nan, other) != largest(nan, other), "NaN first");
    EXPECT(largest(other, nan) != largest(other, nan), "NaN last");
  }
}

}  // namespace

int main() {
  check_places();
  check_random_numbers();
  check_fp8<false>();
  check_fp8<true>();
  check_largest();
  std::printf("passed\n");
  return 0;
}
