// Block quantisation: schemas, checks, and the reference kernels (plain ATen, every device), which
// give the bits that all others do. The fakes stand in torch_commhook/codecs/blockwise.py.
#include "ops/codecs/blockwise.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "ops/bucket.h"
#include "ops/codecs/blockwise_checks.h"
#include "ops/codecs/blockwise_math.h"
#include "ops/codecs/mutation.h"
#include "ops/codecs/philox.h"
#include "ops/memory_check.h"
#include "ops/memory_overlap.h"
#include "ops/type_names.h"

namespace commhook::blockwise {

Layout::Layout(const Format& format, int64_t numel, int64_t shards)
    : format_(format),
      numel_(numel),
      shards_(shards),
      blocks_((numel + format.block_size - 1) / format.block_size) {}

int64_t Layout::shard_of_block(int64_t block) const {
  // The last shard whose first block is not after it.
  auto shard = std::min(shards_ - 1, ((block + 1) * shards_ - 1) / std::max<int64_t>(blocks_, 1));
  while (first_block(shard) > block) {
    --shard;
  }
  while (shard + 1 < shards_ && first_block(shard + 1) <= block) {
    ++shard;
  }
  return shard;
}

int64_t Layout::first_element(int64_t shard) const {
  return std::min(numel_, first_block(shard) * format_.block_size);
}

int64_t Layout::offset_of_parameters(int64_t shard) const {
  const int64_t blocks = first_block(shard + 1) - first_block(shard);
  const int64_t count = first_element(shard + 1) - first_element(shard);
  if (blocks == 0) {
    return 0;
  }
  const int64_t whole = blocks - 1;
  const int64_t last = count - whole * format_.block_size;
  const int64_t codes = whole * format_.code_bytes(format_.block_size) + format_.code_bytes(last);
  return (codes + 3) / 4 * 4;
}

int64_t Layout::bytes_of_shard(int64_t shard) const {
  const int64_t blocks = first_block(shard + 1) - first_block(shard);
  return offset_of_parameters(shard) +
         blocks * format_.parameters() * static_cast<int64_t>(sizeof(float));
}

int64_t Layout::offset_of_shard(int64_t shard) const {
  int64_t offset = 0;
  for (int64_t i = 0; i < shard; ++i) {
    offset += bytes_of_shard(i);
  }
  return offset;
}

// ---- checks ------------------------------------------------------------------------------------

Format check_format(const char* op, int64_t bits, int64_t block_size, bool is_symmetric) {
  TORCH_CHECK_VALUE(bits == 4 || bits == 8, op, ": bits must be 4 or 8, got ", bits);
  TORCH_CHECK_VALUE(block_size >= 8 && block_size <= kMaxBlockSize && block_size % 8 == 0, op,
                    ": block_size must be a multiple of 8 of at most ", kMaxBlockSize, ", got ",
                    block_size);
  return {bits, block_size, is_symmetric};
}

namespace {

void check_message(const char* op, const char* argument, const at::Tensor& message, int64_t bytes) {
  TORCH_CHECK_TYPE(message.defined(), op, ": ", argument, " must be a tensor, got None");
  TORCH_CHECK_TYPE(message.layout() == at::kStrided, op, ": ", argument,
                   " must be dense (torch.strided), got layout ", layout_name(message.layout()));
  TORCH_CHECK_TYPE(message.scalar_type() == at::kByte, op, ": ", argument,
                   " must be of dtype uint8, got ", dtype_name(message.scalar_type()));
  TORCH_CHECK_VALUE(message.is_contiguous(), op, ": ", argument, " must be contiguous, got sizes ",
                    message.sizes(), " with strides ", message.strides());
  TORCH_CHECK_VALUE(message.numel() == bytes, op, ": ", argument, " must hold ", bytes,
                    " bytes, got ", message.numel());
  check_memory(op, argument, -1, message);
  TORCH_CHECK_VALUE(reinterpret_cast<std::uintptr_t>(message.const_data_ptr()) % sizeof(float) == 0,
                    op, ": ", argument, " must begin at an address that is a multiple of 4");
}

void check_error(const char* op, const std::optional<at::Tensor>& error, int64_t numel,
                 at::Device device) {
  if (!error.has_value() || !error->defined()) {
    return;
  }
  TORCH_CHECK_TYPE(error->layout() == at::kStrided, op,
                   ": error must be dense (torch.strided), got layout ",
                   layout_name(error->layout()));
  TORCH_CHECK_TYPE(error->scalar_type() == at::kFloat, op, ": error must be of dtype float32, got ",
                   dtype_name(error->scalar_type()));
  TORCH_CHECK_VALUE(error->device() == device, op, ": error must be on the device of the values, ",
                    device, ", got ", error->device());
  TORCH_CHECK_VALUE(error->is_contiguous() && error->numel() == numel, op,
                    ": error must be contiguous and hold ", numel, " elements, got sizes ",
                    error->sizes(), " with strides ", error->strides());
  check_memory(op, "error", -1, *error);
}

void check_rounding(const char* op, const std::optional<at::Tensor>& rounding, at::Device device) {
  if (!rounding.has_value() || !rounding->defined()) {
    return;
  }
  TORCH_CHECK_TYPE(rounding->scalar_type() == at::kLong && rounding->layout() == at::kStrided, op,
                   ": rounding must be a dense tensor of dtype int64, got ",
                   dtype_name(rounding->scalar_type()), " of layout ",
                   layout_name(rounding->layout()));
  TORCH_CHECK_VALUE(rounding->numel() == 2 && rounding->is_contiguous(), op,
                    ": rounding must hold two numbers, seed and step, got sizes ",
                    rounding->sizes());
  TORCH_CHECK_VALUE(rounding->device() == device, op,
                    ": rounding must be on the device of the values, ", device, ", got ",
                    rounding->device());
  check_memory(op, "rounding", -1, *rounding);
}

void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                  at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, op, ": ", argument,
                    " must be on the device of the values, ", device, ", got ", tensor.device());
}

void check_apart(const char* op, const char* name, const at::Tensor& one, const char* other_name,
                 int64_t index, const at::Tensor& other) {
  TORCH_CHECK_VALUE(!overlap(extent_of(one, -1), extent_of(other, index)), op, ": ", name,
                    " must share no memory with ", argument_name(other_name, index),
                    ", got one that does");
}

void check_shards(const char* op, int64_t shards) {
  TORCH_CHECK_VALUE(shards >= 1 && shards <= (1 << 20), op,
                    ": shards must be at least 1 and at most 2^20, got ", shards);
}

}  // namespace

Arguments check_encode(at::TensorList tensors, const at::Tensor& message, const Format& format,
                       int64_t shards, const std::optional<at::Tensor>& error,
                       const std::optional<at::Tensor>& rounding) {
  constexpr const char* kOp = "blockwise_encode";
  check_shards(kOp, shards);
  check_flatten(kOp, tensors, at::kFloat);
  const auto device = tensors[0].device();
  const int64_t numel = total_numel(tensors);
  const Layout layout(format, numel, shards);
  check_message(kOp, "message", message, layout.bytes());
  check_device(kOp, "message", message, device);
  check_error(kOp, error, numel, device);
  check_rounding(kOp, rounding, device);
  const bool has_error = error.has_value() && error->defined();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    check_apart(kOp, "message", message, "tensors", index, tensors[i]);
    if (has_error) {
      check_apart(kOp, "error", *error, "tensors", index, tensors[i]);
    }
  }
  if (has_error) {
    check_apart(kOp, "message", message, "error", -1, *error);
  }
  return {layout, numel, shards};
}

Arguments check_decode(const at::Tensor& message, at::TensorList tensors, const Format& format,
                       int64_t shards) {
  constexpr const char* kOp = "blockwise_decode";
  check_shards(kOp, shards);
  check_flatten(kOp, tensors, at::kFloat);
  const int64_t numel = total_numel(tensors);
  const Layout layout(format, numel, shards);
  check_message(kOp, "message", message, layout.bytes());
  check_device(kOp, "message", message, tensors[0].device());
  check_destinations(kOp, message, "message", tensors);
  return {layout, numel, shards};
}

Arguments check_reduce(const at::Tensor& messages, const at::Tensor& message, const Format& format,
                       int64_t numel, const std::optional<at::Tensor>& error,
                       const std::optional<at::Tensor>& rounding) {
  constexpr const char* kOp = "blockwise_reduce";
  TORCH_CHECK_VALUE(numel >= 0, kOp, ": numel must be at least 0, got ", numel);
  const Layout layout(format, numel, 1);
  TORCH_CHECK_VALUE(messages.dim() == 2 && messages.size(0) >= 1, kOp,
                    ": messages must have two dimensions, one row for each message, got sizes ",
                    messages.sizes());
  check_message(kOp, "messages", messages, messages.size(0) * layout.bytes());
  check_message(kOp, "message", message, layout.bytes());
  check_device(kOp, "message", message, messages.device());
  check_error(kOp, error, numel, messages.device());
  check_rounding(kOp, rounding, messages.device());
  check_apart(kOp, "message", message, "messages", -1, messages);
  if (error.has_value() && error->defined()) {
    check_apart(kOp, "message", message, "error", -1, *error);
    check_apart(kOp, "error", *error, "messages", -1, messages);
  }
  return {layout, numel, 1};
}

Rounding rounding_of(const std::optional<at::Tensor>& rounding) {
  if (!rounding.has_value() || !rounding->defined()) {
    return {false, 0, 0, 0};
  }
  const auto* const values = rounding->const_data_ptr<int64_t>();
  const auto seed = static_cast<uint64_t>(values[0]);
  return {true, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
          static_cast<uint32_t>(values[1])};
}

// ---- the reference kernels ---------------------------------------------------------------------

namespace reference {
namespace {

struct Blocks {
  at::Tensor codes;       // uint8, [blocks, values], one in each byte
  at::Tensor parameters;  // float32, [blocks, parameters]
};

at::Tensor divided(const at::Tensor& numerator, const at::Tensor& denominator) {
  return at::div(numerator, denominator);  // never by a plain number, which CUDA would invert
}

// p: [blocks, values]. Writes what is lost into `error`, of the same shape, if that is defined.
Blocks quantized(const at::Tensor& p, const Format& format, const at::Tensor& dithers,
                 const at::Tensor& error) {
  const auto levels = static_cast<double>((1 << (format.bits - (format.is_symmetric ? 1 : 0))) - 1);
  auto range = p.abs().amax(1, /*keepdim=*/true);
  auto is_good = range.isfinite();
  auto low = at::zeros_like(range);
  if (!format.is_symmetric) {
    low = p.amin(1, /*keepdim=*/true).add(0.0);  // no zero has a sign
    range = (p.amax(1, /*keepdim=*/true) - low).add(0.0);
    is_good = is_good.logical_and(range.isfinite());
  }
  range = at::where(is_good, range, 0.0);
  const auto all_levels = at::full_like(range, levels);
  const auto step = divided(range, all_levels);
  const auto lift = at::where(range.lt(0x1p-100), 0x1p64, 1.0).to(at::kFloat);
  const auto lifted = range * lift;
  const auto factor = at::where(lifted.gt(0), divided(all_levels, lifted), 0.0);
  auto t = (p * lift - low * lift) * factor;
  if (dithers.defined()) {
    t = (t + dithers).clamp_max(levels);
  }
  const auto q = t.round();
  if (error.defined()) {
    const auto restored = format.is_symmetric ? q * step : low + q * step;
    error.copy_(at::where(is_good, p - restored, error));
  }
  auto parameters = at::where(is_good, step, std::numeric_limits<double>::quiet_NaN());
  if (!format.is_symmetric) {
    parameters =
        at::cat({parameters, at::where(is_good, low, std::numeric_limits<double>::quiet_NaN())}, 1);
  }
  const auto integers = at::where(is_good, q, 0.0).to(at::kInt).bitwise_and(255).to(at::kByte);
  return {integers, parameters.to(at::kFloat)};
}

// [blocks, values] in bytes to [blocks, bytes]
at::Tensor packed(const at::Tensor& codes, const Format& format) {
  if (format.bits == 8) {
    return codes;
  }
  const int64_t n = codes.size(1);
  const int64_t half = (n + 1) / 2;
  auto high = at::zeros({codes.size(0), half}, codes.options());
  high.narrow(1, 0, n - half).copy_(codes.narrow(1, half, n - half));
  return codes.narrow(1, 0, half)
      .bitwise_and(15)
      .bitwise_or(at::bitwise_left_shift(high, at::full_like(high, 4)));
}

at::Tensor unpacked(const at::Tensor& bytes, const Format& format, int64_t n) {
  auto codes = bytes;
  if (format.bits == 4) {
    const int64_t half = (n + 1) / 2;
    codes = at::cat(
        {bytes.bitwise_and(15), at::bitwise_right_shift(bytes, at::full_like(bytes, 4))}, 1);
    codes = n == 2 * half ? codes : codes.narrow(1, 0, n);
  }
  auto integers = codes.to(at::kInt);
  if (format.is_symmetric) {
    const int64_t sign = format.bits == 8 ? 128 : 8;
    integers = integers.bitwise_xor(sign) - sign;
  }
  return integers.to(at::kFloat);
}

// The random numbers of the blocks [first, first + count), each of n values.
at::Tensor dithers_of(const Rounding& rounding, int64_t first, int64_t count, int64_t n,
                      at::Device device) {
  if (!rounding.is_stochastic) {
    return {};
  }
  const int64_t counters = (n + 7) / 8;
  auto dithers = at::empty({count, 8, counters}, at::kFloat);
  auto* to = dithers.mutable_data_ptr<float>();
  for (int64_t b = 0; b < count; ++b) {
    const auto block = static_cast<uint64_t>(first + b);
    for (int64_t c = 0; c < counters; ++c) {
      uint32_t words[4] = {static_cast<uint32_t>(c), static_cast<uint32_t>(block),
                           static_cast<uint32_t>(block >> 32), rounding.step};
      philox(words[0], words[1], words[2], words[3], rounding.seed0, rounding.seed1);
      for (int64_t k = 0; k < 8; ++k) {
        to[(b * 8 + k) * counters + c] = dither((words[k / 2] >> (16 * (k % 2))) & 0xffffu);
      }
    }
  }
  return dithers.view({count, 8 * counters}).narrow(1, 0, n).to(device);
}

// Visits the whole blocks of each shard together, and the last one, if it is shorter:
// visit(shard, first block, first element, blocks, values of each)
template <typename Visit>
void for_each_part(const Layout& layout, int64_t shards, const Visit& visit) {
  const int64_t size = layout.format().block_size;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t first = layout.first_block(shard);
    const int64_t begin = layout.first_element(shard);
    const int64_t count = layout.first_element(shard + 1) - begin;
    const int64_t whole = count / size;
    if (whole > 0) {
      visit(shard, first, begin, whole, size);
    }
    if (count > whole * size) {
      visit(shard, first + whole, begin + whole * size, int64_t{1}, count - whole * size);
    }
  }
}

// Where the codes and parameters of such a part lie in a message.
struct Place {
  at::Tensor codes;
  at::Tensor parameters;
};

Place place_of(const at::Tensor& message, const Layout& layout, int64_t shard, int64_t block,
               int64_t blocks, int64_t n) {
  const auto& format = layout.format();
  const int64_t before = block - layout.first_block(shard);
  const int64_t base = layout.offset_of_shard(shard);
  const int64_t width = format.code_bytes(n);
  const int64_t each = format.parameters() * static_cast<int64_t>(sizeof(float));
  const auto flat = message.view(-1);
  return {flat.narrow(0, base + before * format.code_bytes(format.block_size), blocks * width)
              .view({blocks, width}),
          flat.narrow(0, base + layout.offset_of_parameters(shard) + before * each, blocks * each)
              .view({blocks, each})};
}

void encode_flat(const at::Tensor& p, const at::Tensor& message, const Layout& layout,
                 int64_t shards, const Rounding& rounding, const std::optional<at::Tensor>& error) {
  message.zero_();  // what fills up
  const bool has_error = error.has_value() && error->defined();
  for_each_part(
      layout, shards, [&](int64_t shard, int64_t block, int64_t begin, int64_t blocks, int64_t n) {
        const auto values = p.narrow(0, begin, blocks * n).view({blocks, n});
        const auto lost =
            has_error ? error->detach().view(-1).narrow(0, begin, blocks * n).view({blocks, n})
                      : at::Tensor();
        const auto dithers = dithers_of(rounding, block, blocks, n, p.device());
        const auto made = quantized(values, layout.format(), dithers, lost);
        const auto place = place_of(message, layout, shard, block, blocks, n);
        place.codes.copy_(packed(made.codes, layout.format()));
        place.parameters.copy_(made.parameters.contiguous().view(at::kByte));
      });
}

at::Tensor decode_flat(const at::Tensor& message, const Layout& layout, int64_t numel,
                       int64_t shards) {
  auto flat = at::empty({numel}, message.options().dtype(at::kFloat));
  for_each_part(layout, shards,
                [&](int64_t shard, int64_t block, int64_t begin, int64_t blocks, int64_t n) {
                  const auto place = place_of(message, layout, shard, block, blocks, n);
                  const auto parameters = place.parameters.contiguous().view(at::kFloat);
                  const auto q = unpacked(place.codes, layout.format(), n);
                  auto values = q * parameters.narrow(1, 0, 1);
                  if (!layout.format().is_symmetric) {
                    values = parameters.narrow(1, 1, 1) + values;
                  }
                  flat.narrow(0, begin, blocks * n).view({blocks, n}).copy_(values);
                });
  return flat;
}

at::Tensor compensated(const at::Tensor& flat, double scale,
                       const std::optional<at::Tensor>& error) {
  const auto factor = static_cast<double>(static_cast<float>(scale));
  const auto scaled = factor == 1.0 ? flat : flat * factor;
  return error.has_value() && error->defined() ? scaled + error->detach().view(-1) : scaled;
}

Rounding rounding_on_host(const std::optional<at::Tensor>& rounding) {
  return rounding_of(rounding.has_value() && rounding->defined()
                         ? std::optional(rounding->to(at::kCPU))
                         : std::nullopt);
}

}  // namespace

void encode(at::TensorList tensors, const at::Tensor& message, const Arguments& arguments,
            double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding) {
  std::vector<at::Tensor> pieces;
  pieces.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    pieces.push_back(tensor.detach().reshape(-1).to(at::kFloat));
  }
  encode_flat(compensated(at::cat(pieces), scale, error), message, arguments.layout,
              arguments.shards, rounding_on_host(rounding), error);
}

void decode(const at::Tensor& message, at::TensorList tensors, const Arguments& arguments) {
  const auto flat = decode_flat(message, arguments.layout, arguments.numel, arguments.shards);
  commhook::reference::unflatten_into(flat, tensors, 1.0);
}

void reduce(const at::Tensor& messages, const at::Tensor& message, const Arguments& arguments,
            double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding) {
  at::Tensor sum;
  for (const auto& each : messages.unbind(0)) {
    const auto values = decode_flat(each, arguments.layout, arguments.numel, 1);
    sum = sum.defined() ? sum + values : values;
  }
  encode_flat(compensated(sum, scale, error), message, arguments.layout, 1,
              rounding_on_host(rounding), error);
}

}  // namespace reference
// ---- the operators -----------------------------------------------------------------------------

namespace {

void encode(at::TensorList tensors, const at::Tensor& message, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards, double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding) {
  const auto format = check_format("blockwise_encode", bits, block_size, symmetric);
  reference::encode(tensors, message,
                    check_encode(tensors, message, format, shards, error, rounding), scale, error,
                    rounding);
}

void decode(const at::Tensor& message, at::TensorList tensors, int64_t bits, int64_t block_size,
            bool symmetric, int64_t shards) {
  const auto format = check_format("blockwise_decode", bits, block_size, symmetric);
  reference::decode(message, tensors, check_decode(message, tensors, format, shards));
}

void reduce(const at::Tensor& messages, const at::Tensor& message, int64_t numel, int64_t bits,
            int64_t block_size, bool symmetric, double scale,
            const std::optional<at::Tensor>& error, const std::optional<at::Tensor>& rounding) {
  const auto format = check_format("blockwise_reduce", bits, block_size, symmetric);
  reference::reduce(messages, message,
                    check_reduce(messages, message, format, numel, error, rounding), scale, error,
                    rounding);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.codecs.blockwise");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Writes the message of a bucket: float32(value) * scale + error, quantised in blocks. Puts what
  // is lost into `error`. Random where `rounding` holds a seed and a step.
  m.def(
      "blockwise_encode(Tensor[] tensors, Tensor(a!) message, *, int bits, int block_size, "
      "bool symmetric, int shards=1, float scale=1.0, Tensor(b!)? error=None, "
      "Tensor? rounding=None) -> ()",
      compliant);
  // Writes a message's values into tensors.
  m.def(
      "blockwise_decode(Tensor message, Tensor(a!)[] tensors, *, int bits, int block_size, "
      "bool symmetric, int shards=1) -> ()",
      compliant);
  // Writes the message of scale * (sum of the values of several messages) + error.
  m.def(
      "blockwise_reduce(Tensor messages, Tensor(a!) message, int numel, *, int bits, "
      "int block_size, bool symmetric, float scale=1.0, Tensor(b!)? error=None, "
      "Tensor? rounding=None) -> ()",
      compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("blockwise_encode", encode);
  m.impl("blockwise_decode", decode);
  m.impl("blockwise_reduce", reduce);
}

}  // namespace
}  // namespace commhook::blockwise

COMMHOOK_MUTATING_OPERATOR(commhook, "blockwise_encode")
COMMHOOK_MUTATING_OPERATOR(commhook, "blockwise_decode")
COMMHOOK_MUTATING_OPERATOR(commhook, "blockwise_reduce")
