#include "runtime/exchange_pieces.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "runtime/torch_release.h"

using c10::ivalue::Future;

namespace commhook {
namespace {

at::Tensor piece_of(const at::Tensor& message, int64_t begin, int64_t length) {
  const int64_t from = std::min(begin, message.numel());
  return message.narrow(0, from, std::min(length, message.numel() - from));
}

c10::intrusive_ptr<c10d::Work> all_to_all(c10d::ProcessGroup& group, at::Tensor& received,
                                          at::Tensor& sent, std::vector<int64_t>& gets,
                                          std::vector<int64_t>& sends) {
#if COMMHOOK_TORCH_AT_LEAST(2, 13)
  return group.all_to_all_single(received, sent, gets, sends);
#else
  return group.alltoall_base(received, sent, gets, sends);
#endif
}

}  // namespace

c10::intrusive_ptr<Future> exchange_pieces(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                           const std::vector<at::Tensor>& inputs,
                                           const std::vector<at::Tensor>& outputs,
                                           const std::vector<int64_t>& ends,
                                           const at::Tensor& result) {
  TORCH_CHECK_VALUE(group, "exchange_pieces: there must be a process group");
  const int64_t size = group->getSize();
  const int64_t rank = group->getRank();
  const auto of_all = [size](const std::vector<at::Tensor>& messages) {
    return static_cast<int64_t>(messages.size()) == size &&
           std::all_of(messages.begin(), messages.end(), [](const at::Tensor& message) {
             return message.defined() && message.dim() == 1 && message.device().is_cpu() &&
                    message.scalar_type() == at::kByte && message.is_contiguous();
           });
  };
  TORCH_CHECK_VALUE(of_all(inputs) && of_all(outputs),
                    "exchange_pieces: there must be flat bytes on the CPU for each rank");
  int64_t reached = 0;
  for (const int64_t end : ends) {
    TORCH_CHECK_VALUE(end > reached, "exchange_pieces: ends must ascend from 0, got ", end,
                      " after ", reached);
    reached = end;
  }
  for (const auto* messages : {&inputs, &outputs}) {
    for (int64_t other = 0; other < size; ++other) {
      const int64_t length = (*messages)[other].numel();
      TORCH_CHECK_VALUE(other == rank || length <= reached,
                        "exchange_pieces: the last piece ends at ", reached,
                        ", before a message of ", length, " bytes does");
    }
  }
  std::vector<c10::intrusive_ptr<Future>> futures;
  for (int64_t distance = 1; distance < size; ++distance) {
    const int64_t to = (rank + distance) % size;
    const int64_t from = (rank + size - distance) % size;
    int64_t begin = 0;
    for (const int64_t end : ends) {
      at::Tensor sent = piece_of(inputs[to], begin, end - begin);
      at::Tensor received = piece_of(outputs[from], begin, end - begin);
      begin = end;
      std::vector<int64_t> sends(size, 0);
      std::vector<int64_t> gets(size, 0);
      sends[to] = sent.numel();
      gets[from] = received.numel();
      futures.push_back(all_to_all(*group, received, sent, gets, sends)->getFuture());
    }
  }
  if (futures.empty()) {
    auto done = c10::make_intrusive<Future>(c10::TensorType::get());
    done->markCompleted(result);
    return done;
  }
  c10::List<c10::intrusive_ptr<Future>> listed(
      c10::FutureType::create(futures.front()->elementType()));
  for (const auto& future : futures) {
    listed.push_back(future);
  }
  return c10::collectAll(listed)->then(
      [futures = std::move(futures), result](Future&) -> c10::IValue {
        for (const auto& future : futures) {
          if (future->hasError()) {
            std::rethrow_exception(future->exception_ptr());
          }
        }
        return result;
      },
      c10::TensorType::get());
}

}  // namespace commhook
