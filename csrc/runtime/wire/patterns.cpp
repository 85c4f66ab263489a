#include "runtime/wire/patterns.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "commhook/ops.h"

namespace commhook::wire {
namespace {

using c10d::ReduceOp;

// The most bytes that a rank sends in one round to save another one.
constexpr size_t kOneRound = 64 * 1024;
// Of two ranks: both then sum all elements.
constexpr size_t kOneRoundOfTwo = 4 * 1024 * 1024;
// Of many ranks: the most bytes for each rank for which few rounds matter more than few bytes.
constexpr size_t kFewRounds = 16 * 1024;
// The last stage of a pattern of log2(ranks) stages.
constexpr uint32_t kLast = 33;

constexpr std::array kNames{"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"};

// A rank's place in a tree of which the root sends to all, or gets from all.
struct Place {
  int parent = -1;
  std::vector<int> children;  // those with most descendants first
};

Place place_in_tree(const Operation& operation, int root) {
  Place place;
  const int size = operation.size();
  if (size <= kFewRanks) {
    if (operation.rank() == root) {
      place.children = operation.others();
    } else {
      place.parent = root;
    }
    return place;
  }
  const int from_root = (operation.rank() - root + size) % size;
  for (int bit = 1; bit < size; bit *= 2) {
    if ((from_root & bit) != 0) {
      place.parent = (from_root - bit + root) % size;
      break;
    }
    if (from_root + bit < size) {
      place.children.insert(place.children.begin(), (from_root + bit + root) % size);
    }
  }
  return place;
}

void reduce_directly(Operation& operation, const Tensors& parts, const at::Tensor& result,
                     const Reduction& reduction) {
  const int rank = operation.rank();
  const auto matrix = at::empty({operation.size(), result.numel()}, result.options());
  Tensors rows = matrix.unbind();
  for (const int peer : operation.others()) {
    operation.exchange(peer, parts[peer], rows[peer]);
  }
  if (reduction.adds_rows(result)) {
    operation.then(result.nbytes() * rows.size(), [=] {
      rows[rank].copy_(parts[rank]);
      reduction.add_rows(result, matrix);
      reduction.end(result);
    });
    return;
  }
  rows[rank] = parts[rank];
  operation.then(result.nbytes() * rows.size(), [=] {
    reduction.reduce_rows(result, rows, rank);
    reduction.end(result);
  });
}

void gather_directly(Operation& operation, const Tensors& parts) {
  for (const int peer : operation.others()) {
    operation.exchange(peer, parts[operation.rank()], parts[peer]);
  }
}

void gather_in_ring(Operation& operation, const Tensors& parts, uint32_t stage) {
  const int rank = operation.rank(), size = operation.size();
  for (int step = 0; step + 1 < size; ++step) {
    operation.round();
    operation.stage(stage + step);
    operation.send((rank + 1) % size, parts[(rank - step + size) % size]);
    operation.receive((rank - 1 + size) % size, parts[(rank - step - 1 + size) % size]);
  }
}

// Bruck: after each round a rank has twice as many parts.
void gather_by_doubling(Operation& operation, const Tensors& parts) {
  const int rank = operation.rank(), size = operation.size();
  const auto bytes = static_cast<int64_t>(parts[rank].nbytes());
  const auto rows = at::empty({size, bytes}, at::kByte);  // from the rank's own on
  const auto row = [=](int index) {
    return static_cast<uint8_t*>(rows.mutable_data_ptr()) + index * bytes;
  };
  operation.then(bytes, [=] { std::memcpy(row(0), parts[rank].const_data_ptr(), bytes); });
  uint32_t stage = 0;
  for (int has = 1; has < size; has *= 2) {
    const int count = std::min(has, size - has);
    operation.round();
    operation.stage(stage++);
    operation.send((rank - has + size) % size, rows.narrow(0, 0, count));
    operation.receive((rank + has) % size, rows.narrow(0, has, count));
  }
  operation.then(rows.nbytes(), [=] {
    for (int index = 1; index < size; ++index) {
      std::memcpy(parts[(rank + index) % size].mutable_data_ptr(), row(index), bytes);
    }
  });
}

// Reduces part r of all ranks into rank r's one. Changes all parts.
void reduce_in_ring(Operation& operation, const Tensors& parts, const Reduction& reduction) {
  const int rank = operation.rank(), size = operation.size();
  const auto largest =
      *std::max_element(parts.begin(), parts.end(),
                        [](const auto& a, const auto& b) { return a.numel() < b.numel(); });
  const auto space = at::empty_like(largest);
  for (int step = 0; step + 1 < size; ++step) {
    const auto& own = parts[(rank - step - 2 + 2 * size) % size];
    const auto came = space.narrow(0, 0, own.numel());
    operation.stage(step);
    operation.send((rank + 1) % size, parts[(rank - step - 1 + size) % size]);
    operation.receive((rank - 1 + size) % size, came);
    operation.then(2 * own.nbytes(), [=] { reduction.reduce(own, came, own); });
  }
  operation.then(parts[rank].nbytes(), [=] { reduction.end(parts[rank]); });
}

// Each two ranks make the same sum, the lower one's elements first; then they are one rank of half
// as many. These are a power of two: of each of the first pairs, the second rank stands for both.
void reduce_by_doubling(Operation& operation, const at::Tensor& tensor,
                        const Reduction& reduction) {
  const int rank = operation.rank(), size = operation.size();
  int count = 1;
  while (2 * count <= size) {
    count *= 2;
  }
  const int pairs = size - count;
  const bool is_in_pair = rank < 2 * pairs;
  if (is_in_pair && rank % 2 == 0) {
    operation.send(rank + 1, tensor);
    operation.round();
    operation.stage(kLast);
    operation.receive(rank + 1, tensor);
    return;
  }
  const auto came = at::empty_like(tensor);
  const size_t bytes = 2 * tensor.nbytes();
  if (is_in_pair) {
    operation.receive(rank - 1, came);
    operation.then(bytes, [=] { reduction.reduce(tensor, came, tensor); });
  }
  const int place = is_in_pair ? rank / 2 : rank - pairs;
  uint32_t stage = 0;
  for (int bit = 1; bit < count; bit *= 2) {
    const int other = place ^ bit;
    operation.stage(++stage);
    operation.exchange(other < pairs ? 2 * other + 1 : other + pairs, tensor, came);
    operation.then(bytes, [=] {
      reduction.reduce(tensor, place < other ? tensor : came, place < other ? came : tensor);
    });
  }
  operation.then(bytes, [=] { reduction.end(tensor); });
  if (is_in_pair) {
    operation.stage(kLast);
    operation.send(rank - 1, tensor);
  }
}

bool are_alike(const Tensors& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [&](const at::Tensor& part) { return part.numel() == parts[0].numel(); });
}

bool is_small(const Operation& operation, const at::Tensor& tensor) {
  const size_t bytes = tensor.nbytes(), ranks = operation.size();
  if (ranks > kFewRanks) {
    return bytes <= kFewRounds * ranks;
  }
  // Two ranks send the same bytes in one round as in two.
  return bytes * (ranks - 1) <= kOneRound || (ranks == 2 && bytes <= kOneRoundOfTwo);
}

}  // namespace

Reduction::Reduction(const c10d::ReduceOp& op, at::ScalarType dtype, int ranks)
    : op_(op.op_), is_integral_(c10::isIntegralType(dtype, false)), ranks_(ranks) {
  TORCH_CHECK(op_ < kNames.size(), "Cannot use ReduceOp.",
              op_ == ReduceOp::PREMUL_SUM ? "PREMUL_SUM" : "UNUSED", " with commhook");
  const bool is_number = is_integral_ || c10::isComplexType(dtype) || dtype == at::kFloat ||
                         dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
  const bool is_order = op_ == ReduceOp::MIN || op_ == ReduceOp::MAX;
  const bool is_bitwise = op_ == ReduceOp::BAND || op_ == ReduceOp::BOR || op_ == ReduceOp::BXOR;
  TORCH_CHECK(!is_bitwise || is_integral_ || dtype == at::kBool, "Cannot use ReduceOp.", name(),
              " with non-integral dtype");
  TORCH_CHECK(!(is_order && c10::isComplexType(dtype)), "Cannot use ReduceOp.", name(),
              " with complex dtype");
  TORCH_CHECK(is_number || (dtype == at::kBool && op_ != ReduceOp::AVG), "Cannot use ReduceOp.",
              name(), " with ", c10::getDtypeNames(dtype).first);
}

const char* Reduction::name() const { return kNames[op_]; }

void Reduction::reduce(at::Tensor result, const at::Tensor& first, const at::Tensor& second) const {
  switch (op_) {
    case ReduceOp::PRODUCT:
      at::mul_out(result, first, second);
      break;
    case ReduceOp::MIN:
      at::minimum_out(result, first, second);
      break;
    case ReduceOp::MAX:
      at::maximum_out(result, first, second);
      break;
    case ReduceOp::BAND:
      at::bitwise_and_out(result, first, second);
      break;
    case ReduceOp::BOR:
      at::bitwise_or_out(result, first, second);
      break;
    case ReduceOp::BXOR:
      at::bitwise_xor_out(result, first, second);
      break;
    default:  // SUM and AVG
      at::add_out(result, first, second);
  }
}

void Reduction::reduce_rows(const at::Tensor& result, const Tensors& rows, size_t own) const {
  const auto& sum = own == 0 ? result : rows[0];
  for (size_t row = 1; row < rows.size(); ++row) {
    reduce(row + 1 == rows.size() ? result : sum, row == 1 ? rows[0] : sum, rows[row]);
  }
  if (rows.size() == 1 && !result.is_same(rows[0])) {
    result.copy_(rows[0]);
  }
}

bool Reduction::adds_rows(const at::Tensor& result) const {
  const auto dtype = result.scalar_type();
  return (op_ == ReduceOp::SUM || op_ == ReduceOp::AVG) &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16);
}

void Reduction::add_rows(const at::Tensor& result, const at::Tensor& rows) const {
  static const auto kOperator =
      ops::find_op<void(const at::Tensor&, const at::Tensor&)>("commhook::sum_rows");
  kOperator.call(rows, result);
}

void Reduction::end(at::Tensor result) const {
  if (op_ == ReduceOp::AVG && is_integral_) {
    result.div_(ranks_, "trunc");
  } else if (op_ == ReduceOp::AVG) {
    result.div_(ranks_);
  }
}

Tensors shards_of(const at::Tensor& tensor, int count) {
  Tensors shards;
  for (int64_t index = 0; index < count; ++index) {
    const int64_t begin = index * tensor.numel() / count;
    shards.push_back(tensor.narrow(0, begin, (index + 1) * tensor.numel() / count - begin));
  }
  return shards;
}

void add_all_gather(Operation& operation, const Tensors& parts) {
  if (operation.size() <= kFewRanks) {
    gather_directly(operation, parts);
  } else if (parts[0].nbytes() <= kFewRounds && are_alike(parts)) {
    gather_by_doubling(operation, parts);
  } else {
    gather_in_ring(operation, parts, 0);
  }
}

void add_all_reduce(Operation& operation, const at::Tensor& tensor, const Reduction& reduction) {
  const int rank = operation.rank(), size = operation.size();
  const bool are_few = size <= kFewRanks;
  if (is_small(operation, tensor)) {
    if (are_few) {
      reduce_directly(operation, Tensors(size, tensor), tensor, reduction);
    } else {
      reduce_by_doubling(operation, tensor, reduction);
    }
    return;
  }
  const auto shards = shards_of(tensor, size);
  if (are_few) {
    reduce_directly(operation, shards, shards[rank], reduction);
    operation.stage(1);
    gather_directly(operation, shards);
  } else {
    reduce_in_ring(operation, shards, reduction);
    gather_in_ring(operation, shards, size);
  }
}

void add_reduce_scatter(Operation& operation, const Tensors& parts, const at::Tensor& result,
                        const Reduction& reduction) {
  if (operation.size() <= kFewRanks) {
    reduce_directly(operation, parts, result, reduction);
    return;
  }
  int64_t numel = 0;
  for (const auto& part : parts) {
    numel += part.numel();
  }
  const auto all = at::empty({numel}, result.options());
  const auto copies = shards_of(all, operation.size());
  operation.then(all.nbytes(), [=] {
    at::Tensor into = all;
    at::cat_out(into, parts);
  });
  if (is_small(operation, all)) {
    reduce_by_doubling(operation, all, reduction);
  } else {
    reduce_in_ring(operation, copies, reduction);
  }
  operation.then(result.nbytes(), [result, own = copies[operation.rank()]] { result.copy_(own); });
}

void add_reduce(Operation& operation, const at::Tensor& tensor, int root,
                const Reduction& reduction) {
  const auto place = place_in_tree(operation, root);
  const bool is_root = place.parent < 0;
  auto ranks = place.children;
  ranks.push_back(operation.rank());
  std::sort(ranks.begin(), ranks.end());
  Tensors rows;
  size_t own = 0;
  for (const int rank : ranks) {
    if (rank == operation.rank()) {
      own = rows.size();
      rows.push_back(tensor);
    } else {
      rows.push_back(at::empty_like(tensor));
      operation.exchange(rank, {}, rows.back());
    }
  }
  const auto result = is_root || rows.size() == 1 ? tensor : at::empty_like(tensor);
  operation.then(tensor.nbytes() * rows.size(), [=] {
    reduction.reduce_rows(result, rows, own);
    if (is_root) {
      reduction.end(result);
    }
  });
  if (!is_root) {
    operation.exchange(place.parent, result, {});
  }
}

void add_broadcast(Operation& operation, const at::Tensor& tensor, int root) {
  const bool is_root = operation.rank() == root;
  if (operation.size() > 3 && operation.size() <= kFewRanks && !is_small(operation, tensor)) {
    // The root sends each rank a shard, which the rank sends to all.
    const auto shards = shards_of(tensor, operation.size());
    const auto& own = shards[operation.rank()];
    add_scatter(operation, is_root ? at::Tensor() : own, shards, root);
    if (!is_root) {
      operation.round();
    }
    operation.stage(1);
    for (const int peer : operation.others()) {
      operation.exchange(peer, peer == root ? at::Tensor() : own,
                         is_root ? at::Tensor() : shards[peer]);
    }
    return;
  }
  const auto place = place_in_tree(operation, root);
  if (!is_root) {
    operation.exchange(place.parent, {}, tensor);
    operation.round();
  }
  for (const int child : place.children) {
    operation.exchange(child, tensor, {});
  }
}

void add_gather(Operation& operation, const at::Tensor& own, const Tensors& parts, int root) {
  if (operation.rank() != root) {
    operation.exchange(root, own, {});
    return;
  }
  for (const int peer : operation.others()) {
    operation.exchange(peer, {}, parts[peer]);
  }
}

void add_scatter(Operation& operation, const at::Tensor& own, const Tensors& parts, int root) {
  if (operation.rank() != root) {
    operation.exchange(root, {}, own);
    return;
  }
  for (const int peer : operation.others()) {
    operation.exchange(peer, parts[peer], {});
  }
}

void add_all_to_all(Operation& operation, const Tensors& sent, const Tensors& received) {
  for (const int peer : operation.others()) {
    operation.exchange(peer, sent[peer], received[peer]);
  }
}

void add_barrier(Operation& operation) {
  const int rank = operation.rank(), size = operation.size();
  if (size <= kFewRanks) {
    for (const int peer : operation.others()) {
      operation.exchange(peer, {}, {});
    }
    return;
  }
  uint32_t stage = 0;
  for (int distance = 1; distance < size; distance *= 2) {
    operation.round();
    operation.stage(stage++);
    operation.send((rank + distance) % size, {});
    operation.receive((rank - distance + size) % size, {});
  }
}

}  // namespace commhook::wire
