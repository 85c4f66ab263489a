// The largest values of each chunk in few bits: the operators, and their kernels in plain ATen.
// These serve every device; all other kernels give the same bits. chunk_topk_math.h describes a
// message, torch_commhook/codecs/sparse_codec.py has the codec.
//
// Of values of equal magnitude, those at the lowest places are sent; zeros are not sent. The error
// keeps the rounding error of the values that are sent. If a chunk has an infinity or a NaN, all
// values that it sends are NaN, and the error keeps its finite values whole.
#include "ops/codecs/chunk_topk.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <limits>
#include <tuple>
#include <vector>

#include "ops/bucket/bucket.h"
#include "ops/codecs/codec_checks.h"
#include "ops/codecs/codec_reference.h"
#include "ops/cpu/capability.h"
#include "ops/mutation.h"

namespace commhook::chunk_topk {

void check_places(const char* op, bool are_good) {
  TORCH_CHECK_VALUE(are_good, op,
                    ": a message's positions must ascend within each chunk, and be less than the "
                    "chunk's number of values");
}

namespace {

constexpr const char* kEncode = "chunk_topk_encode";
constexpr const char* kDecode = "chunk_topk_decode";
constexpr const char* kDecodeSum = "chunk_topk_decode_sum";

Form check_form(const char* op, int64_t k, int64_t chunk, int64_t bits) {
  TORCH_CHECK_VALUE(chunk >= kLeastChunk && chunk <= kLargestChunk && (chunk & (chunk - 1)) == 0,
                    op, ": chunk must be a power of two from ", kLeastChunk, " to ", kLargestChunk,
                    ", got ", chunk);
  TORCH_CHECK_VALUE(k >= 1 && k <= chunk, op, ": k must be at least 1 and at most chunk, ", chunk,
                    ", got ", k);
  TORCH_CHECK_VALUE(bits == 2 || bits == 4 || bits == 8, op, ": bits must be 2, 4 or 8, got ",
                    bits);
  return {static_cast<int>(k), static_cast<int>(chunk), __builtin_ctzll(chunk),
          static_cast<int>(bits)};
}

// bytes: the bytes of a message of `numel` values.
void check_bytes(const char* op, const char* argument, int64_t bytes, const Form& form,
                 int64_t numel) {
  TORCH_CHECK_VALUE(bytes == form.bytes(numel), op, ": ", argument, " must hold ",
                    form.bytes(numel), " bytes for ", numel, " values, got ", bytes, " bytes");
}

void check_decoded(const char* op, const char* argument, const at::Tensor& messages, int64_t bytes,
                   const Form& form, at::TensorList tensors) {
  check_bytes(op, argument, bytes, form, total_numel(tensors));
  codecs::check_device(op, argument, messages, tensors[0].device());
  check_destinations(op, messages, argument, tensors);
}

}  // namespace

Form check_encode(at::TensorList tensors, const at::Tensor& message, int64_t k, int64_t chunk,
                  int64_t bits, const std::optional<at::Tensor>& error,
                  const std::optional<at::Tensor>& rounding) {
  const auto form = check_form(kEncode, k, chunk, bits);
  check_flatten(kEncode, tensors, at::kFloat);
  const auto device = tensors[0].device();
  const int64_t numel = total_numel(tensors);
  codecs::check_message(kEncode, "message", message, message.numel());
  check_bytes(kEncode, "message", message.numel(), form, numel);
  codecs::check_device(kEncode, "message", message, device);
  codecs::check_error(kEncode, error, numel, device);
  codecs::check_rounding(kEncode, rounding, device);
  codecs::check_encoded_apart(kEncode, tensors, message, error);
  return form;
}

Form check_decode(const at::Tensor& message, at::TensorList tensors, int64_t k, int64_t chunk,
                  int64_t bits) {
  const auto form = check_form(kDecode, k, chunk, bits);
  check_flatten(kDecode, tensors, at::kFloat);
  codecs::check_message(kDecode, "message", message, message.numel());
  check_decoded(kDecode, "message", message, message.numel(), form, tensors);
  return form;
}

Form check_decode_sum(const at::Tensor& messages, at::TensorList tensors, int64_t k, int64_t chunk,
                      int64_t bits) {
  const auto form = check_form(kDecodeSum, k, chunk, bits);
  check_flatten(kDecodeSum, tensors, at::kFloat);
  TORCH_CHECK_VALUE(messages.dim() == 2 && messages.size(0) >= 1, kDecodeSum,
                    ": messages must have two dimensions, one row for each message, got sizes ",
                    messages.sizes());
  codecs::check_message(kDecodeSum, "messages", messages, messages.numel());
  check_decoded(kDecodeSum, "messages", messages, messages.size(1), form, tensors);
  return form;
}

namespace {

// ---- kernels in plain ATen ---------------------------------------------------------------------

// The entries of chunks of one length, [chunks, entries].
struct Entries {
  at::Tensor places;  // repeats the last place if there are fewer
  at::Tensor codes;
  at::Tensor are_there;
};

at::Tensor shifted_left(const at::Tensor& words, const at::Tensor& by) {
  return words.bitwise_left_shift(by);
}

at::Tensor shifted_right(const at::Tensor& words, int64_t by) {
  return words.bitwise_right_shift(at::full_like(words, by));
}

// Packs fields of `bits` bits, [chunks, fields], into words.
at::Tensor packed(const at::Tensor& fields, int64_t bits) {
  const auto begin = at::arange(fields.size(1), fields.options()) * bits;
  const int64_t words = (fields.size(1) * bits + 31) / 32;
  const auto wide = shifted_left(fields, begin.remainder(32).expand_as(fields));
  const auto word = begin.floor_divide(32);
  auto all = at::zeros({fields.size(0), words + 1}, fields.options());
  all = all.index_add(1, word, wide.bitwise_and(0xffffffff));
  return all.index_add(1, word + 1, shifted_right(wide, 32)).narrow(1, 0, words);
}

// words: [chunks, words], as int64 of 32 bits.
at::Tensor unpacked(const at::Tensor& words, int64_t fields, int64_t bits) {
  const auto begin = at::arange(fields, words.options()) * bits;
  const auto word = begin.floor_divide(32);
  const auto padded = at::cat({words, at::zeros({words.size(0), 1}, words.options())}, 1);
  // Enough bits for a field.
  const auto above = padded.index_select(1, word + 1).bitwise_and(0xffff);
  const auto pair = padded.index_select(1, word) + above * (1LL << 32);
  const auto by = begin.remainder(32).expand_as(pair);
  return pair.bitwise_right_shift(by).bitwise_and((1LL << bits) - 1);
}

at::Tensor float_of_bits(const at::Tensor& bits) {
  return (bits - bits.ge(0x80000000LL).to(at::kLong) * (1LL << 32)).to(at::kInt).view(at::kFloat);
}

// word: [chunks, 1]; codes: [chunks, entries].
at::Tensor values_of(const at::Tensor& codes, const at::Tensor& word, const Form& form) {
  const int64_t steps = steps_of(form.bits);
  const auto low = word.bitwise_and(0xffff) * 0x10000;
  const auto high = word.bitwise_and(0xffff0000LL);
  const auto span = shifted_right((high - low).bitwise_and(0xffffffffLL), 8);
  const auto number = codes.bitwise_and(steps);
  const auto between = (span * number + steps / 2).floor_divide(steps);
  const auto magnitude = (low + between * 256).bitwise_and(0xffffffffLL);
  const auto sign = shifted_right(codes, form.bits - 1) * 0x80000000LL;
  return float_of_bits(at::where(magnitude.eq(0), magnitude, magnitude.bitwise_or(sign)));
}

at::Tensor long_of(const at::Tensor& values) {
  return values.contiguous().view(at::kInt).to(at::kLong).bitwise_and(0xffffffffLL);
}

// Rounds a finite, non-negative number to its upper half.
at::Tensor half_of(const at::Tensor& values) {
  return codecs::reference::narrowed(values, std::nullopt).view(at::kShort).to(at::kLong);
}

// ranks, are_there: [chunks, entries]. Each chunk has at least one entry, or its rank is 0.
at::Tensor levels_of(const at::Tensor& ranks, const at::Tensor& are_there, const Form& form) {
  const auto largest = ranks.amax(1, true);
  const auto least = at::where(are_there, ranks, largest).amin(1, true);
  if (form.bits > 2) {
    const auto high = shifted_right(largest + 0xffff, 16).clamp_max(0x7f7f);
    return shifted_right(least, 16) + high * 0x10000;
  }
  const auto exponents = [](const at::Tensor& of) { return shifted_right(of, 23).clamp_min(1); };
  const auto exponent = exponents(largest);
  const auto fixed = [&](const at::Tensor& of) {
    const auto is_normal = of.ge(0x800000).to(at::kLong);
    const auto significand = of.bitwise_and(0x7fffff) + is_normal * 0x800000;
    return (significand * 0x10000).bitwise_right_shift((exponent - exponents(of)).clamp_max(63));
  };
  const auto q = fixed(ranks) * are_there.to(at::kLong);
  const auto first = fixed(least);
  const auto count = are_there.sum(1, true);
  const auto all = q.sum(1, true);
  auto split = first + shifted_right(fixed(largest) - first, 3) * 3;
  at::Tensor low;
  at::Tensor high;
  for (int round = 0; round < kRounds; ++round) {
    const auto is_large = q.gt(split);
    const auto large_count = is_large.sum(1, true);
    const auto large = (q * is_large.to(at::kLong)).sum(1, true);
    const auto is_one = large_count.eq(0).logical_or(large_count.eq(count));
    const auto mean = [](const at::Tensor& sum, const at::Tensor& of) {
      return sum.to(at::kFloat) / of.clamp_min(1).to(at::kFloat);
    };
    low = at::where(is_one, mean(all, count), mean(all - large, count - large_count));
    high = at::where(is_one, mean(all, count), mean(large, large_count));
    split = ((low + high) * 0.5).to(at::kLong);
  }
  const auto unit = (exponent * 0x800000).to(at::kInt).view(at::kFloat);
  return half_of(low * 0x1p-39 * unit) + half_of(high * 0x1p-39 * unit) * 0x10000;
}

at::Tensor codes_of(const at::Tensor& values, const at::Tensor& word, const Form& form) {
  const auto sign = shifted_right(long_of(values), 31) * (1LL << (form.bits - 1));
  const auto low = word.bitwise_and(0xffff) * 0x10000;
  const auto high = word.bitwise_and(0xffff0000LL);
  if (form.bits == 2) {
    const auto middle = float_of_bits(low) * 0.5 + float_of_bits(high) * 0.5;
    return sign + values.abs().gt(middle).to(at::kLong);
  }
  const int64_t steps = steps_of(form.bits);
  const auto magnitude = long_of(values).bitwise_and(static_cast<int64_t>(kAbsolute));
  const auto span = shifted_right(high - low, 8);
  const auto above = shifted_right((magnitude - low).clamp_min(0), 8);
  const auto number = (above * steps + shifted_right(span, 1)).floor_divide(span.clamp_min(1));
  return sign + at::where(span.eq(0), at::zeros_like(number), number.clamp_max(steps));
}

// Encodes chunks of one length, p [chunks, values], into messages [chunks, bytes]. Returns the
// errors.
at::Tensor encode_rows(const at::Tensor& p, const at::Tensor& message, const Form& form) {
  const int64_t entries = form.entries(p.size(1));
  const auto ranks = p.contiguous()
                         .view(at::kInt)
                         .bitwise_and(static_cast<int64_t>(kAbsolute))
                         .clamp_max(static_cast<int64_t>(kInfinity) + 1)
                         .to(at::kLong);
  const auto order = std::get<1>(ranks.sort(/*stable=*/true, /*dim=*/1, /*descending=*/true))
                         .narrow(1, 0, entries);
  const auto is_sent = ranks.gather(1, order).gt(0);
  const auto last = at::where(is_sent, order, 0).amax(1, true);
  const auto places = std::get<0>(at::where(is_sent, order, form.chunk).sort(1)).minimum(last);
  const auto are_there = at::arange(entries, places.options()).lt(is_sent.sum(1, true));
  const auto values = p.gather(1, places);
  const auto is_finite = p.isfinite().all(1, true);
  const auto levels = levels_of(ranks.gather(1, places) * are_there.to(at::kLong), are_there, form);
  const auto word = at::where(is_finite, levels, static_cast<int64_t>(kNoLevels));
  const auto codes = codes_of(values, word, form) * are_there.logical_and(is_finite).to(at::kLong);
  const auto words = at::cat({word, packed(places, form.place_bits), packed(codes, form.bits)}, 1);
  const auto bytes = (words - words.ge(0x80000000LL).to(at::kLong) * (1LL << 32)).to(at::kInt);
  message.copy_(bytes.contiguous().view(at::kByte));
  const auto lost =
      p.scatter_add(1, places, -values_of(codes, word, form) * are_there.to(at::kFloat));
  return at::where(is_finite, lost, at::where(p.isfinite(), p, 0.0)).to(at::kFloat);
}

// Calls visit(begin, chunks, values of each, first byte, bytes of each) for the whole chunks, and
// for the shorter one at the end.
template <typename Visit>
void for_each_length(const Form& form, int64_t numel, const Visit& visit) {
  const int64_t whole = numel / form.chunk;
  const int64_t rest = numel - whole * form.chunk;
  const int64_t bytes = 4 * form.words(form.k);
  if (whole > 0) {
    visit(0, whole, int64_t{form.chunk}, 0, bytes);
  }
  if (rest > 0) {
    visit(whole * form.chunk, 1, rest, whole * bytes, form.bytes(rest));
  }
}

void encode_reference(at::TensorList tensors, const at::Tensor& message, const Form& form,
                      double scale, const std::optional<at::Tensor>& error,
                      const std::optional<at::Tensor>& rounding) {
  const auto p = codecs::reference::compensated(codecs::reference::flat_of(tensors), scale, error);
  const auto lost = at::empty_like(p);
  for_each_length(form, p.numel(),
                  [&](int64_t begin, int64_t chunks, int64_t size, int64_t byte, int64_t bytes) {
                    const auto rows = [&](const at::Tensor& of) {
                      return of.narrow(0, begin, chunks * size).view({chunks, size});
                    };
                    const auto to = message.view(-1).narrow(0, byte, chunks * bytes);
                    rows(lost).copy_(encode_rows(rows(p), to.view({chunks, bytes}), form));
                  });
  if (codecs::is_there(error)) {
    codecs::reference::keep(lost, error->detach().view(-1), codecs::reference::key_of(rounding));
  }
}

// All values of one message.
at::Tensor restored(const char* op, const at::Tensor& message, const Form& form, int64_t numel) {
  const auto flat = at::zeros({numel}, message.options().dtype(at::kFloat));
  for_each_length(
      form, numel, [&](int64_t begin, int64_t chunks, int64_t size, int64_t byte, int64_t bytes) {
        const int64_t entries = form.entries(size);
        const auto words = message.narrow(0, byte, chunks * bytes)
                               .clone()
                               .view(at::kInt)
                               .to(at::kLong)
                               .bitwise_and(0xffffffffLL)
                               .view({chunks, bytes / 4});
        const int64_t place_words = form.place_words(static_cast<int>(entries));
        const auto places = unpacked(words.narrow(1, 1, place_words), entries, form.place_bits);
        const auto codes = unpacked(
            words.narrow(1, 1 + place_words, words.size(1) - 1 - place_words), entries, form.bits);
        const auto differences = places.diff(1, 1);
        check_places(op, !places.ge(size).any().logical_or(differences.lt(0).any()).item<bool>());
        const auto first = at::ones({chunks, 1}, places.options()).to(at::kBool);
        const auto are_there = at::cat({first, differences.gt(0)}, 1);
        const auto values = values_of(codes, words.narrow(1, 0, 1), form);
        const auto rows = at::zeros({chunks, size + 1}, flat.options())
                              .scatter(1, at::where(are_there, places, size), values);
        flat.narrow(0, begin, chunks * size).view({chunks, size}).copy_(rows.narrow(1, 0, size));
      });
  return flat;
}

void decode_sum_reference(const char* op, const at::Tensor& messages, at::TensorList tensors,
                          const Form& form, double scale) {
  const int64_t numel = total_numel(tensors);
  at::Tensor sum;
  for (const auto& message : messages.unbind(0)) {
    const auto values = restored(op, message, form, numel);
    sum = sum.defined() ? sum + values : values;
  }
  reference::unflatten_into(codecs::reference::compensated(sum, scale, {}), tensors, 1.0);
}

// ---- the operators -----------------------------------------------------------------------------

void encode(at::TensorList tensors, const at::Tensor& message, int64_t k, int64_t chunk,
            int64_t bits, double scale, const std::optional<at::Tensor>& error,
            const std::optional<at::Tensor>& rounding) {
  const auto form = check_encode(tensors, message, k, chunk, bits, error, rounding);
  if (cpu::serve(message.device())) {
    return encode_on_cpu(tensors, message, form, scale, error, rounding);
  }
  encode_reference(tensors, message, form, scale, error, rounding);
}

void write_sum_of_messages(const char* op, const at::Tensor& messages, at::TensorList tensors,
                           const Form& form, double scale) {
  if (cpu::serve(messages.device())) {
    return decode_sum_on_cpu(op, messages, tensors, form, scale);
  }
  decode_sum_reference(op, messages, tensors, form, scale);
}

void decode(const at::Tensor& message, at::TensorList tensors, int64_t k, int64_t chunk,
            int64_t bits) {
  const auto form = check_decode(message, tensors, k, chunk, bits);
  write_sum_of_messages(kDecode, message.view({1, message.numel()}), tensors, form, 1.0);
}

void decode_sum(const at::Tensor& messages, at::TensorList tensors, int64_t k, int64_t chunk,
                int64_t bits, double scale) {
  const auto form = check_decode_sum(messages, tensors, k, chunk, bits);
  write_sum_of_messages(kDecodeSum, messages, tensors, form, scale);
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.codecs.sparse_codec");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Writes the message of a bucket: the k values of largest magnitude of each `chunk` values of
  // float32(value) * scale + error, with `bits` bits each. Writes the new error into `error`. A
  // bfloat16 error is rounded at random if `rounding` holds a seed and a step.
  m.def(
      "chunk_topk_encode(Tensor[] tensors, Tensor(a!) message, *, int k, int chunk, int bits, "
      "float scale=1.0, Tensor(b!)? error=None, Tensor? rounding=None) -> ()",
      compliant);
  // Writes a message's values into tensors, and zeros elsewhere.
  m.def(
      "chunk_topk_decode(Tensor message, Tensor(a!)[] tensors, *, int k, int chunk, int bits) -> "
      "()",
      compliant);
  // Writes scale * (sum of the values of several messages) into tensors.
  m.def(
      "chunk_topk_decode_sum(Tensor messages, Tensor(a!)[] tensors, *, int k, int chunk, int bits, "
      "float scale=1.0) -> ()",
      compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("chunk_topk_encode", encode);
  m.impl("chunk_topk_decode", decode);
  m.impl("chunk_topk_decode_sum", decode_sum);
}

}  // namespace
}  // namespace commhook::chunk_topk

COMMHOOK_MUTATING_OPERATOR(commhook, "chunk_topk_encode")
COMMHOOK_MUTATING_OPERATOR(commhook, "chunk_topk_decode")
COMMHOOK_MUTATING_OPERATOR(commhook, "chunk_topk_decode_sum")
