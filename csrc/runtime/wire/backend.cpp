#include "runtime/wire/backend.h"

#include <ATen/core/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/wire/patterns.h"

namespace commhook::wire {
namespace {

using c10d::OpType;
using std::chrono::milliseconds;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// In the stage of a message from send(), beside its tag.
constexpr uint32_t kTagged = uint32_t{1} << 31;

// Throws errors of a call's arguments. PyTorch's own checks take it, too.
struct Invalid {
  explicit Invalid(const Request& request) : name(request.name) {}
  void operator()(const std::string& text) const {
    TORCH_CHECK(false, "commhook ", name, ": ", text);
  }
  // Of all tensors.
  void check(const Tensors& tensors) const {
    for (const auto& tensor : tensors) {
      if (tensor.layout() != at::kStrided || tensor.is_meta()) {
        (*this)(c10::str("requires dense tensors, got one of ", tensor.toString()));
      }
      if (tensor.device() != tensors[0].device()) {
        (*this)(c10::str("requires tensors on one device, got ", tensors[0].device(), " and ",
                         tensor.device()));
      }
    }
  }
  void check_alike(const Tensors& tensors, const at::Tensor& model) const {
    Tensors all{model};
    all.insert(all.end(), tensors.begin(), tensors.end());
    check(all);
    c10d::assertTypeAndSizesMatch(*this, tensors, model.options(), model.sizes());
  }
  void check_dtypes(const Tensors& tensors) const {
    check(tensors);
    for (size_t index = 0; index < tensors.size(); ++index) {
      c10d::assertTypeMatch(*this, tensors[0].options(), tensors, index);
    }
  }
  // Of a tensor with a part for each rank.
  void check_whole(const at::Tensor& whole, const at::Tensor& part, int size) const {
    check_dtypes({whole, part});
    if (whole.numel() != part.numel() * size) {
      (*this)(c10::str("requires ", size, " times as many elements on one side, got ",
                       whole.numel(), " and ", part.numel()));
    }
  }
  // A list for each rank that has one: of a tensor for each rank.
  void check_lists(const TensorLists& lists, bool is_there, int size, const char* which) const {
    check_count(lists.size(), is_there ? 1 : 0, which);
    if (is_there) {
      check_count(lists[0].size(), size, "tensors in it");
    }
  }
  void check_count(size_t got, size_t wanted, const char* which) const {
    if (got != wanted) {
      (*this)(c10::str("requires ", wanted, " ", which, ", got ", got));
    }
  }
  const std::string name;
};

std::string form_of(const at::Tensor& tensor) {
  return c10::str(tensor.numel(), " ", c10::getDtypeNames(tensor.scalar_type()).first);
}

// The rows of each rank.
Tensors rows_of_ranks(const at::Tensor& tensor, const at::Tensor& elements,
                      const std::vector<int64_t>& splits, int size) {
  c10d::checkSplitSizes(splits, tensor, size);
  const int64_t rows = tensor.size(0);
  Tensors parts;
  int64_t begin = 0;
  for (int rank = 0; rank < size; ++rank) {
    const int64_t own = splits.empty() ? rows / size : splits[rank];
    const int64_t length = rows == 0 ? 0 : own * (tensor.numel() / rows);
    parts.push_back(elements.narrow(0, begin, length));
    begin += length;
  }
  return parts;
}

class ChannelBackend final : public WireBackend {
 public:
  ChannelBackend(std::shared_ptr<Channel> channel, milliseconds timeout)
      : WireBackend(channel->rank(), channel->size()),
        options_(c10::make_intrusive<Options>("commhook", timeout)),
        session_(std::make_shared<Session>(std::move(channel), 0)) {}

  void fail(const std::string& why) override { session()->channel->fail(why); }
  void close(const std::string& why, Failure::Kind kind, std::optional<int> rank) override {
    session()->channel->close(why, kind, rank);
  }
  std::optional<Failure> failure() override { return session()->channel->failure(); }
  std::optional<bool> drain(milliseconds longest) override {
    return session()->channel->drain(longest);
  }
  void use(std::shared_ptr<Channel> channel) override {
    const auto before = session();
    before->channel->close();
    const auto next = std::make_shared<Session>(std::move(channel), before->generation + 1);
    const std::lock_guard lock(mutex_);
    session_ = next;
  }
  std::shared_ptr<Exchanges> exchanges() override {
    const auto found = session();
    return {found, &found->exchanges};
  }
  const std::string getBackendName() const override { return "commhook"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}  // it begins with 0 on all ranks
  uint64_t getSequenceNumberForGroup() override { return session()->number; }
  void abort() override { fail(c10::str("rank ", rank_, " has aborted the group")); }
  void shutdown() override { session()->channel->close(); }

  c10d::ErrorType getError() override {
    const auto failure = this->failure();
    if (!failure) {
      return c10d::ErrorType::SUCCESS;
    }
    switch (failure->kind) {
      case Failure::Kind::kTimeout:
        return c10d::ErrorType::TIMEOUT;
      case Failure::Kind::kMisfit:
      case Failure::Kind::kTold:
        return c10d::ErrorType::REMOTE_ERROR;
      default:
        return c10d::ErrorType::COMM_ERROR;
    }
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Request request{OpType::BROADCAST, "broadcast"};
    const int root = check_rooted(request, tensors, options.rootRank, options.rootTensor);
    const auto operation = begin();
    const auto data = rank_ == root ? operation->input(tensors[0]) : operation->output(tensors);
    add_broadcast(*operation, data, root);
    request.of = c10::str(form_of(data), " from rank ", root);
    request.outputs = {tensors};
    return end(*operation, std::move(request), options.timeout);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Request request{OpType::ALLREDUCE, "all_reduce"};
    c10d::assertSingleElement(Invalid(request), tensors);
    if (tensors[0].is_sparse() && tensors[0].is_cpu()) {
      return sum_sparse(std::move(request), tensors[0], options);
    }
    return all_reduce(std::move(request), tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    Request request{OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced"};
    c10d::assertNonEmpty(Invalid(request), tensors);
    return all_reduce(std::move(request), tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Request request{OpType::REDUCE, "reduce"};
    const int root = check_rooted(request, tensors, options.rootRank, options.rootTensor);
    const Reduction reduction(options.reduceOp, tensors[0].scalar_type(), size_);
    const auto operation = begin();
    const auto data =
        rank_ == root ? operation->output(tensors, true) : operation->input(tensors[0]);
    add_reduce(*operation, data, root, reduction);
    request.of = c10::str(form_of(data), " by ", reduction.name(), " to rank ", root);
    request.outputs = {tensors};
    return end(*operation, std::move(request), options.timeout);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    Request request{OpType::ALLGATHER, "all_gather"};
    const Invalid invalid(request);
    c10d::assertSingleElement(invalid, inputs);
    invalid.check_lists(outputs, true, size_, "output list");
    invalid.check_alike(outputs[0], inputs[0]);
    const auto operation = begin();
    request.outputs = outputs;
    return all_gather(operation, std::move(request), inputs, {outputs_of(*operation, outputs[0])},
                      options);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return all_gather_whole({OpType::_ALLGATHER_BASE, "all_gather_into_tensor"}, {output}, {input},
                            options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return all_gather_whole({OpType::COALESCED, "all_gather_into_tensor_coalesced"}, outputs,
                            inputs, options);
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    Request request{OpType::ALLGATHER_COALESCED, "all_gather_coalesced"};
    const Invalid invalid(request);
    c10d::assertNonEmpty(invalid, inputs);
    invalid.check_count(outputs.size(), size_, "output lists");
    for (const auto& list : outputs) {
      invalid.check_count(list.size(), inputs.size(), "tensors in each output list");
    }
    const auto operation = begin();
    TensorLists parts;
    for (size_t index = 0; index < inputs.size(); ++index) {
      Tensors of_ranks;
      for (const auto& list : outputs) {
        of_ranks.push_back(list[index]);
      }
      invalid.check_alike(of_ranks, inputs[index]);
      parts.push_back(outputs_of(*operation, of_ranks));
    }
    request.outputs = outputs;
    return all_gather(operation, std::move(request), inputs, parts, options);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    Request request{OpType::GATHER, "gather"};
    const Invalid invalid(request);
    const int root = check_rooted(request, inputs, options.rootRank, 0);
    invalid.check_lists(outputs, rank_ == root, size_, "output lists");
    const auto operation = begin();
    const auto own = operation->input(inputs[0]);
    Tensors parts;
    if (rank_ == root) {
      invalid.check_alike(outputs[0], inputs[0]);
      parts = outputs_of(*operation, outputs[0]);
      operation->copy(parts[rank_], own);
    }
    add_gather(*operation, own, parts, root);
    request.of = c10::str(form_of(own), " to rank ", root);
    request.outputs = outputs;
    request.inputs = inputs;
    return end(*operation, std::move(request), options.timeout);
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    Request request{OpType::SCATTER, "scatter"};
    const Invalid invalid(request);
    const int root = check_rooted(request, outputs, options.rootRank, 0);
    invalid.check_lists(inputs, rank_ == root, size_, "input lists");
    const auto operation = begin();
    const auto own = operation->output(outputs);
    Tensors parts;
    if (rank_ == root) {
      invalid.check_alike(inputs[0], outputs[0]);
      parts = inputs_of(*operation, inputs[0]);
      operation->copy(own, parts[rank_]);
      request.inputs = inputs[0];
    }
    add_scatter(*operation, own, parts, root);
    request.of = c10::str(form_of(own), " from rank ", root);
    request.outputs = {outputs};
    return end(*operation, std::move(request), options.timeout);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Request request{OpType::REDUCE_SCATTER, "reduce_scatter"};
    const Invalid invalid(request);
    c10d::assertSingleElement(invalid, outputs);
    invalid.check_lists(inputs, true, size_, "input list");
    invalid.check_alike(inputs[0], outputs[0]);
    request.inputs = inputs[0];
    const auto operation = begin();
    const auto parts = inputs_of(*operation, inputs[0]);
    return reduce_scatter(operation, std::move(request), outputs, parts, options);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_whole({OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor"}, {output},
                                {input}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_whole({OpType::COALESCED, "reduce_scatter_tensor_coalesced"}, outputs,
                                inputs, options);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    Request request{OpType::ALLTOALL_BASE, "all_to_all_single"};
    Invalid(request).check_dtypes({output, input});
    const auto operation = begin();
    request.outputs = {{output}};
    request.inputs = {input};
    return all_to_all(*operation, std::move(request),
                      rows_of_ranks(output, operation->output({output}), output_splits, size_),
                      rows_of_ranks(input, operation->input(input), input_splits, size_), options);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    Request request{OpType::ALLTOALL, "all_to_all"};
    const Invalid invalid(request);
    invalid.check_count(outputs.size(), size_, "outputs");
    invalid.check_count(inputs.size(), size_, "inputs");
    Tensors all = outputs;
    all.insert(all.end(), inputs.begin(), inputs.end());
    invalid.check_dtypes(all);
    const auto operation = begin();
    request.outputs = {outputs};
    request.inputs = inputs;
    return all_to_all(*operation, std::move(request), outputs_of(*operation, outputs),
                      inputs_of(*operation, inputs), options);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    const auto operation = begin();
    add_barrier(*operation);
    return end(*operation, {OpType::BARRIER, "barrier"}, options.timeout);
  }

  // Names the ranks that rank 0 has not heard of, all of them in any case.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) override {
    Request request{OpType::BARRIER, "monitored_barrier"};
    const auto timeout = timeout_of(options.timeout);
    request.timeout = 2 * timeout;  // so that rank 0 is the first to give up
    const auto last = begin();
    request.number = last->session->number++;
    last->stage(1);
    if (rank_ != 0) {
      const auto first = std::make_shared<Begun>(last->session);
      first->send(0, {});
      first->begin(request);
      last->receive(0, {});
      last->begin(request)->wait(kNoTimeout);
      return;
    }
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    std::map<int, c10::intrusive_ptr<WireWork>> works;
    for (int rank = 1; rank < size_; ++rank) {
      const auto first = std::make_shared<Begun>(last->session);
      first->receive(rank, {});
      works[rank] = first->begin(request);
      last->send(rank, {});
    }
    std::vector<int> late;
    for (const auto& [rank, work] : works) {
      if (!work->is_over_by(deadline)) {
        late.push_back(rank);
      }
    }
    if (!late.empty()) {
      // In Gloo's words, which programs may search for.
      const auto text = c10::str(late.size() == 1 ? "Rank " : "Ranks ", c10::Join(", ", late),
                                 " failed to pass monitoredBarrier in ", timeout.count(), " ms");
      fail(text);
      throw PeerError({Failure::Kind::kTimeout, late[0], text});
    }
    for (const auto& [rank, work] : works) {
      work->wait(kNoTimeout);
    }
    last->begin(request)->wait(kNoTimeout);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return message(tensors, peer, tag, true);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return message(tensors, peer, tag, false);
  }
  WorkPtr recvAnysource(Tensors& /*tensors*/, int /*tag*/) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "commhook recv: the rank to receive from must be given (src=)");
  }

 private:
  // A channel, and what was begun there.
  struct Session {
    Session(std::shared_ptr<Channel> with, int64_t of)
        : channel(std::move(with)), generation(of), exchanges(channel, generation) {}

    const std::shared_ptr<Channel> channel;
    const int64_t generation;
    std::atomic<uint64_t> number{0};  // of collectives
    Exchanges exchanges;
    std::map<std::tuple<int, int, bool>, uint64_t> messages;  // their numbers; under mutex_
  };

  [[nodiscard]] std::shared_ptr<Session> session() const {
    const std::lock_guard lock(mutex_);
    return session_;
  }

  // An operation of a session, which gives it its number.
  struct Begun : Operation {
    explicit Begun(std::shared_ptr<Session> of) : Operation(of->channel), session(std::move(of)) {}
    const std::shared_ptr<Session> session;
  };

  [[nodiscard]] std::shared_ptr<Begun> begin() const { return std::make_shared<Begun>(session()); }

  [[nodiscard]] milliseconds timeout_of(milliseconds asked) const {
    return asked > kNoTimeout ? asked : options_->timeout;
  }

  WorkPtr end(Begun& operation, Request request, milliseconds timeout) {
    request.number = operation.session->number++;
    request.timeout = timeout_of(timeout);
    return operation.begin(std::move(request));
  }

  int check_rooted(const Request& request, const Tensors& tensors, int64_t root,
                   int64_t tensor) const {
    const Invalid invalid(request);
    c10d::assertRootRank(invalid, root, size_);
    c10d::assertSingleElement(invalid, tensors);
    c10d::assertRootTensor(invalid, tensor, 1);
    invalid.check(tensors);
    return static_cast<int>(root);
  }

  static Tensors inputs_of(Operation& operation, const Tensors& tensors) {
    return c10::fmap(tensors, [&](const at::Tensor& each) { return operation.input(each); });
  }
  static Tensors outputs_of(Operation& operation, const Tensors& tensors) {
    return c10::fmap(tensors, [&](const at::Tensor& each) { return operation.output({each}); });
  }

  WorkPtr all_reduce(Request request, const Tensors& tensors,
                     const c10d::AllreduceOptions& options) {
    Invalid(request).check_dtypes(tensors);
    const Reduction reduction(options.reduceOp, tensors[0].scalar_type(), size_);
    const auto operation = begin();
    const auto data = operation->output(tensors, true);
    add_all_reduce(*operation, data, reduction);
    request.of = c10::str(form_of(data), " by ", reduction.name());
    request.outputs = {tensors};
    return end(*operation, std::move(request), options.timeout);
  }

  // A sum of sparse tensors, which all ranks gather. It takes a thread, since how long they are is
  // known only when all ranks have said it.
  WorkPtr sum_sparse(Request request, at::Tensor tensor, const c10d::AllreduceOptions& options) {
    const auto op = options.reduceOp;
    const bool has_means = !at::isIntegralType(tensor.scalar_type(), true);
    TORCH_CHECK(op == c10d::ReduceOp::SUM || (op == c10d::ReduceOp::AVG && has_means),
                "commhook all_reduce: of sparse tensors only sums and means are supported");
    const auto found = session();
    request.number = found->number++;
    request.timeout = timeout_of(options.timeout);
    request.of =
        c10::str(tensor.numel(), " sparse ", c10::getDtypeNames(tensor.scalar_type()).first);
    request.outputs = {{tensor}};
    auto work = c10::make_intrusive<WireWork>(found->channel, request, nullptr);
    auto parts = request;
    parts.number = found->number++;
    found->channel->run(
        [this, self = c10::intrusive_ptr<ChannelBackend>::reclaim_copy(this), found, work, request,
         parts, tensor, op] {
          std::exception_ptr error;
          try {
            const at::AutoDispatchBelowADInplaceOrView guard;
            const auto sums = gather_sparse(*found, request, parts, tensor);
            tensor.copy_(op == c10d::ReduceOp::AVG ? sums / size_ : sums);
          } catch (...) {
            error = std::current_exception();
            found->channel->fail(request.text() +
                                 " has failed");  // others wait; else it has failed
          }
          work->complete(error);
        },
        true);
    return work;
  }

  at::Tensor gather_sparse(Session& session, Request request, Request parts,
                           const at::Tensor& tensor) {
    const auto own = tensor.detach().coalesce();
    const auto counts = at::zeros({size_}, at::kLong);
    counts[rank_].fill_(own._nnz());
    auto operation = std::make_shared<Operation>(session.channel);
    request.outputs.clear();
    add_all_gather(*operation, shards_of(counts, size_));
    operation->begin(std::move(request))->wait(kNoTimeout);
    const auto sizes = [&](const at::Tensor& dense, int64_t dim, int64_t length) {
      auto found = dense.sizes().vec();
      found.at(dim) = length;
      return at::empty(found, dense.options());
    };
    Tensors indices;
    Tensors values;
    const auto own_indices = own._indices().contiguous();
    const auto own_values = own._values().contiguous();
    operation = std::make_shared<Operation>(session.channel);
    parts.outputs.clear();
    for (int rank = 0; rank < size_; ++rank) {
      const auto length = counts[rank].item<int64_t>();
      indices.push_back(rank == rank_ ? own_indices : sizes(own_indices, 1, length));
      values.push_back(rank == rank_ ? own_values : sizes(own_values, 0, length));
    }
    for (const auto* tensors : {&indices, &values}) {
      const auto flat = c10::fmap(*tensors, [](const at::Tensor& each) { return each.view(-1); });
      operation->base(tensors == &indices ? 0 : static_cast<uint32_t>(2 * size_ + 64));
      add_all_to_all(*operation, Tensors(size_, flat[rank_]), flat);
    }
    operation->begin(std::move(parts))->wait(kNoTimeout);
    // In the order of ranks, so that all have the same bits.
    at::Tensor sum;
    for (int rank = 0; rank < size_; ++rank) {
      const auto each =
          at::sparse_coo_tensor(indices[rank], values[rank], tensor.sizes(), tensor.options());
      sum = sum.defined() ? sum + each : each;
    }
    return sum.coalesce();
  }

  // parts: of each input, of each rank.
  WorkPtr all_gather(const std::shared_ptr<Begun>& operation, Request request,
                     const Tensors& inputs, const TensorLists& parts,
                     const c10d::AllgatherOptions& options) {
    for (size_t index = 0; index < inputs.size(); ++index) {
      operation->copy(parts[index][rank_], operation->input(inputs[index]));
      operation->base(static_cast<uint32_t>(index * (2 * size_ + 64)));
      add_all_gather(*operation, parts[index]);
      request.of += (index == 0 ? "" : ", ") + form_of(inputs[index]);
    }
    request.inputs = inputs;
    return end(*operation, std::move(request), options.timeout);
  }

  WorkPtr all_gather_whole(Request request, const Tensors& outputs, const Tensors& inputs,
                           const c10d::AllgatherOptions& options) {
    const Invalid invalid(request);
    c10d::assertNonEmpty(invalid, inputs);
    invalid.check_count(outputs.size(), inputs.size(), "outputs");
    const auto operation = begin();
    TensorLists parts;
    for (size_t index = 0; index < inputs.size(); ++index) {
      invalid.check_whole(outputs[index], inputs[index], size_);
      parts.push_back(shards_of(operation->output({outputs[index]}), size_));
    }
    request.outputs = {outputs};
    return all_gather(operation, std::move(request), inputs, parts, options);
  }

  WorkPtr reduce_scatter(const std::shared_ptr<Begun>& operation, Request request,
                         const Tensors& outputs, const Tensors& parts,
                         const c10d::ReduceScatterOptions& options) {
    const Reduction reduction(options.reduceOp, parts[0].scalar_type(), size_);
    const auto result = operation->output(outputs);
    add_reduce_scatter(*operation, parts, result, reduction);
    request.of = c10::str(form_of(result), " by ", reduction.name());
    request.outputs = {outputs};
    return end(*operation, std::move(request), options.timeout);
  }

  WorkPtr reduce_scatter_whole(Request request, const Tensors& outputs, const Tensors& inputs,
                               const c10d::ReduceScatterOptions& options) {
    const Invalid invalid(request);
    c10d::assertNonEmpty(invalid, inputs);
    invalid.check_count(outputs.size(), inputs.size(), "outputs");
    invalid.check_dtypes(outputs);
    Tensors rows;
    for (size_t index = 0; index < inputs.size(); ++index) {
      invalid.check_whole(inputs[index], outputs[index], size_);
      rows.push_back(Operation::elements(inputs[index]).view({size_, outputs[index].numel()}));
    }
    const auto operation = begin();
    const auto all = operation->input(rows.size() == 1 ? rows[0] : at::cat(rows, 1));
    request.inputs = inputs;
    return reduce_scatter(operation, std::move(request), outputs, shards_of(all, size_), options);
  }

  WorkPtr all_to_all(Begun& operation, Request request, const Tensors& received,
                     const Tensors& sent, const c10d::AllToAllOptions& options) {
    TORCH_CHECK(received[rank_].numel() == sent[rank_].numel(), "commhook ", request.name,
                ": requires as many elements from this rank as to it, got ",
                received[rank_].numel(), " and ", sent[rank_].numel());
    operation.copy(received[rank_], sent[rank_]);
    add_all_to_all(operation, sent, received);
    request.of = c10::getDtypeNames(sent[0].scalar_type()).first;
    return end(operation, std::move(request), options.timeout);
  }

  WorkPtr message(const Tensors& tensors, int peer, int tag, bool is_send) {
    Request request{is_send ? OpType::SEND : OpType::RECV, "message"};
    const Invalid invalid(request);
    c10d::assertSingleElement(invalid, tensors);
    invalid.check(tensors);
    TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_,
                "commhook message: requires another rank of ", size_, ", got ", peer);
    TORCH_CHECK(tag >= 0, "commhook message: requires a tag of at least 0, got ", tag);
    const auto operation = begin();
    operation->base(kTagged | static_cast<uint32_t>(tag));
    if (is_send) {
      operation->send(peer, operation->input(tensors[0]));
    } else {
      operation->receive(peer, operation->output(tensors));
    }
    request.of = c10::getDtypeNames(tensors[0].scalar_type()).first;
    request.where = c10::str(" with tag ", tag, is_send ? " to" : " from", " rank ", peer);
    request.outputs = {tensors};
    request.source = is_send ? -1 : peer;
    request.timeout = options_->timeout;
    {
      const std::lock_guard lock(mutex_);
      request.number = operation->session->messages[{peer, tag, is_send}]++;
    }
    return operation->begin(std::move(request));
  }

  const c10::intrusive_ptr<Options> options_;
  mutable std::mutex mutex_;
  std::shared_ptr<Session> session_;
};

}  // namespace

c10::intrusive_ptr<WireBackend> WireBackend::make(std::shared_ptr<Channel> channel,
                                                  milliseconds timeout) {
  return c10::make_intrusive<ChannelBackend>(std::move(channel), timeout);
}

void WireBackend::bind_made(pybind11::module_& m) {
  pybind11::class_<ChannelBackend, WireBackend, c10::intrusive_ptr<ChannelBackend>>(m,
                                                                                    "_WireBackend");
}

}  // namespace commhook::wire
