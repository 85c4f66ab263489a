// Plays how the CUDA kernels find their work, on the host: runs, tensors, and vectors at addresses
// that are not aligned. Run by test_cuda_partition.py.
#include <algorithm>
#include <cstring>
#include <vector>

#include "host_program.h"
#include "partition.h"
#include "tensor_table.h"

namespace {

using namespace commhook::cuda;

// The search, with positions past 32 bits; no memory stands behind these tensors.
template <int kCapacity>
void check_search(int64_t largest) {
  std::vector<Segment<const void>> segments;
  const int64_t count = 1 + below(kCapacity);
  for (int64_t i = 0; i < count; ++i) {
    segments.push_back({nullptr, 1 + (below(2) == 0 ? below(100) : below(largest)), Dtype::kHalf});
  }
  TensorTable<const void, kCapacity> table;
  EXPECT(fill_table(table, segments.data(), segments.size()) == count, count, "tensors");
  int64_t begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = begin + segments[i].numel;
    for (const int64_t position :
         {begin, begin + segments[i].numel / 2, begin + below(segments[i].numel), end - 1}) {
      EXPECT(find_tensor(table, position) == i, "position", position, "is in", i);
    }
    begin = end;
  }
  EXPECT(table.total == begin, begin);
  for (int i = 0; i < 50; ++i) {
    const int run = kMinRun << below(7);
    const Run part = run_of(below((begin + kWarpsPerBlock * run) / (kWarpsPerBlock * run)),
                            static_cast<int>(below(kWarpsPerBlock)), run, begin);
    int64_t next = part.begin;
    for_each_piece(table, part,
                   [&](const void*, Dtype, int64_t offset, int64_t position, int length) {
                     EXPECT(position == next && length > 0, "piece at", position, "of", length);
                     const int tensor = find_tensor(table, position);
                     const int64_t start = tensor == 0 ? 0 : table.entries[tensor - 1].end;
                     EXPECT(offset == position - start, "offset", offset);
                     EXPECT(position + length <= table.entries[tensor].end, "length", length);
                     next += length;
                   });
    EXPECT(next == std::max(part.begin, part.end), "run ends at", next);
  }
}

// Large totals must neither overflow nor leave a rest.
void check_blocks() {
  for (int shift = 0; shift < 42; ++shift) {
    const int64_t total = (int64_t{1} << shift) + below(int64_t{1} << shift);
    for (const int warps : {1, 64, 448, 6912, 8448}) {
      const int run = run_length(total, warps);
      const int64_t blocks = block_count(total, run);
      EXPECT((blocks - 1) * kWarpsPerBlock * run < total && blocks * kWarpsPerBlock * run >= total,
             blocks, "blocks of runs of", run, "for", total);
      EXPECT(run >= kMaxRun || (total + run - 1) / run <= warps, "more than a wave for", total);
    }
  }
}

// kElement: bytes of an element.
template <int kElement, int kWords>
void check_realign() {
  uint8_t bytes[8 * kWords];
  for (auto& byte : bytes) {
    byte = static_cast<uint8_t>(below(256));
  }
  Granule<kWords> first;
  Granule<kWords> second;
  std::memcpy(&first, bytes, sizeof(first));
  std::memcpy(&second, bytes + sizeof(first), sizeof(second));
  for (int shift = 0; shift < 4 * kWords; shift += kElement) {
    const auto result = realign<kElement>(first, second, shift);
    EXPECT(std::memcmp(&result, bytes + shift, sizeof(result)) == 0, "elements of", kElement,
           "bytes,", kWords, "words, shift", shift);
  }
}

}  // namespace

int main(int argc, char** argv) {
  generator.seed(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 10;
  for (int round = 0; round < rounds; ++round) {
    check_blocks();
    check_realign<1, 4>();
    check_realign<2, 1>();
    check_realign<2, 2>();
    check_realign<2, 4>();
    check_realign<4, 2>();
    check_realign<4, 4>();
    check_realign<8, 4>();
    check_search<8>(int64_t{1} << 20);
    check_search<216>(int64_t{1} << 36);
    check_search<1880>(int64_t{1} << 40);
  }
  std::printf("passed\n");
}
