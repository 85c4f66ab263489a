// Barriers and gathers among ranks that share memory. These kernels serve the CPU: there ranks are
// threads, or processes that share a file.
#include "ops/symmetric/symmetric.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

#include "ops/autograd_checks.h"
#include "ops/codecs/codec_checks.h"
#include "ops/memory_check.h"
#include "ops/mutation.h"
#include "ops/type_names.h"

namespace commhook::symmetric {

void check_ranks(const char* op, const char* argument, int64_t ranks, int64_t least) {
  TORCH_CHECK_VALUE(ranks >= least && ranks <= kMaxRanks, op, ": ", argument, " must be ", least,
                    " to ", kMaxRanks, " tensors, one for each rank, got ", ranks);
}

void check_failed(const char* op, const std::optional<at::Tensor>& failed, at::Device device) {
  if (!codecs::is_there(failed)) {
    return;
  }
  TORCH_CHECK_TYPE(failed->scalar_type() == at::kLong && failed->layout() == at::kStrided, op,
                   ": failed must be a dense tensor of dtype int64, got ",
                   dtype_name(failed->scalar_type()), " of layout ", layout_name(failed->layout()));
  TORCH_CHECK_VALUE(failed->numel() == 1, op, ": failed must hold one number, got sizes ",
                    failed->sizes());
  codecs::check_device(op, "failed", *failed, device);
  check_memory(op, "failed", -1, *failed);
}

bool has_failed(const std::optional<at::Tensor>& failed) {
  return codecs::is_there(failed) && failed->item<int64_t>() != 0;
}

int64_t check_barrier(at::TensorList controls, int64_t rank, double timeout) {
  constexpr const char* kOp = "symmetric_barrier";
  constexpr double kMostSeconds = 1e9;
  const auto ranks = static_cast<int64_t>(controls.size());
  check_ranks(kOp, "controls", ranks, 2);
  TORCH_CHECK_VALUE(rank >= 0 && rank < ranks, kOp, ": rank must be at least 0 and below ", ranks,
                    ", the number of controls, got ", rank);
  TORCH_CHECK_VALUE(timeout > 0 && timeout <= kMostSeconds, kOp,
                    ": timeout must be above 0 and at most 10^9 seconds, got ", timeout);
  for (int64_t i = 0; i < ranks; ++i) {
    const auto& each = controls[i];
    const auto name = argument_name("controls", i);
    TORCH_CHECK_TYPE(each.layout() == at::kStrided && each.scalar_type() == at::kLong, kOp, ": ",
                     name, " must be a dense tensor of dtype int64, got ",
                     dtype_name(each.scalar_type()), " of layout ", layout_name(each.layout()));
    TORCH_CHECK_VALUE(
        each.dim() == 1 && each.is_contiguous() && each.numel() == control_words(ranks), kOp, ": ",
        name, " must be flat and hold ", control_words(ranks),
        " numbers, two more than there are ranks, got sizes ", each.sizes());
    codecs::check_device(kOp, name.c_str(), each, controls[0].device());
    check_memory(kOp, "controls", i, each);
    const auto past = reinterpret_cast<std::uintptr_t>(each.const_data_ptr()) % sizeof(int64_t);
    TORCH_CHECK_VALUE(past == 0, kOp, ": ", name,
                      " must begin at an address that is a multiple of 8, got a remainder of ",
                      past);
    for (int64_t other = 0; other < i; ++other) {
      codecs::check_apart(kOp, name.c_str(), each, "controls", other, controls[other]);
    }
  }
  return static_cast<int64_t>(std::ceil(timeout * 1e9));
}

void check_gather(at::TensorList shards, const at::Tensor& message,
                  const std::optional<at::Tensor>& failed) {
  constexpr const char* kOp = "symmetric_gather";
  check_ranks(kOp, "shards", static_cast<int64_t>(shards.size()), 1);
  int64_t bytes = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const auto name = argument_name("shards", index);
    codecs::check_message(kOp, name.c_str(), shards[i], shards[i].numel());
    TORCH_CHECK_VALUE(shards[i].numel() % 4 == 0, kOp, ": ", name,
                      " must hold a multiple of 4 bytes, got ", shards[i].numel());
    bytes += shards[i].numel();
  }
  codecs::check_message(kOp, "message", message, bytes);
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    codecs::check_device(kOp, argument_name("shards", index).c_str(), shards[i], message.device());
    codecs::check_apart(kOp, "message", message, "shards", index, shards[i]);
  }
  check_failed(kOp, failed, message.device());
}

namespace {

void barrier(at::TensorList controls, int64_t rank, double timeout) {
  const auto nanoseconds = check_barrier(controls, rank, timeout);
  TORCH_CHECK_NOT_IMPLEMENTED(controls[0].is_cpu(),
                              "symmetric_barrier: controls must be on the CPU or CUDA, got ",
                              controls[0].device());
  const auto ranks = static_cast<int>(controls.size());
  const auto own_rank = static_cast<int>(rank);
  auto* const own = controls[rank].mutable_data_ptr<int64_t>();
  auto& failure = *failure_in(own, ranks);
  auto& count = *count_in(own, ranks);
  const auto send_to_others = [&](int64_t signal) {
    for (int other = 0; other < ranks; ++other) {
      if (other != own_rank) {
        send(signal_from(controls[other].mutable_data_ptr<int64_t>(), own_rank), signal);
      }
    }
  };
  count += failure == 0 ? 1 : 0;
  send_to_others(signal_of(count, failure != 0));
  for (int other = 0; other < ranks && failure == 0; ++other) {
    if (other != own_rank && !wait_for(signal_from(own, other), count, nanoseconds)) {
      failure = 1 + other;
      send_to_others(signal_of(count, true));
    }
  }
}

void gather(at::TensorList shards, const at::Tensor& message,
            const std::optional<at::Tensor>& failed) {
  check_gather(shards, message, failed);
  if (has_failed(failed)) {
    message.fill_(kNoMessage);
    return;
  }
  auto rest = message.view({-1});
  for (const auto& shard : shards) {
    rest.narrow(0, 0, shard.numel()).copy_(shard.view({-1}));
    rest = rest.narrow(0, shard.numel(), rest.numel() - shard.numel());
  }
}

TORCH_LIBRARY_FRAGMENT(commhook, m) {
  m.set_python_module("torch_commhook.collectives.symmetric_memory");
  const std::vector<at::Tag> compliant{at::Tag::pt2_compliant_tag};

  // Waits until all ranks have called it equally often; then the caller sees all that they have
  // written before. controls: shared memory of each rank, initially zeros. It holds one number for
  // each rank, the count of this rank's barriers, and the failure: 0, or 1 + the rank that did not
  // come within `timeout` seconds. A rank that has given up never waits again. The others give up
  // at the first barrier that it does not reach.
  m.def("symmetric_barrier(Tensor(a!)[] controls, int rank, *, float timeout) -> ()", compliant);
  // Writes the ranks' shards into one message, one after another. If `failed` is not zero, it reads
  // no shard and writes bytes that decode as NaN.
  m.def("symmetric_gather(Tensor[] shards, Tensor(a!) message, *, Tensor? failed=None) -> ()",
        compliant);
}

TORCH_LIBRARY_IMPL(commhook, CompositeExplicitAutograd, m) {
  m.impl("symmetric_barrier", barrier);
  m.impl("symmetric_gather", gather);
}

}  // namespace
}  // namespace commhook::symmetric

COMMHOOK_MUTATING_OPERATOR(commhook, "symmetric_barrier")
COMMHOOK_MUTATING_OPERATOR(commhook, "symmetric_gather")
