"""Runs a hook on DDP's C++ reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C, collectives
from torch_commhook.attachment.parameters import WatchedParameters, trainable
from torch_commhook.attachment.road import Road
from torch_commhook.attachment.training_state import BeforeForward
from torch_commhook.buckets.grad_bucket import (
    assign_buckets,
    hook_on_bucket,
    scaled_result,
    split_by_kind,
)
from torch_commhook.collectives.futures import UsedTensors
from torch_commhook.hooks.mean import allreduce
from torch_commhook.memory.bucket_memory import BucketWithMemory
from torch_commhook.memory.unsent import BucketResult, add_unsent_to_errors, make_unsent_table
from torch_commhook.metrics import BucketTraffic
from torch_commhook.native.runtime import skip_dynamo
from torch_commhook.step.attached_hook import DRAIN_SECONDS, Attached
from torch_commhook.step.step_group import StepGroup, check_is_free, parameters_changed

# ---- a static graph of DDP whose first backward has not ended ------------------------------------
#
# In the first backward DDP notes once that it must average all gradients at the end. If an
# exception ends that backward, or it uses no parameter, DDP takes each later backward for the first
# one too. It then averages no gradients, and reports no error.


#: The engine's number of the running backward, outside of one.
NO_BACKWARD = -1


def is_lost(model: DistributedDataParallel) -> bool:
    """Whether DDP would average nothing from now on. Unknown, and False, inside a backward."""
    return (
        model.static_graph
        and getattr(model, "_static_graph_delay_allreduce_enqueued", False)
        and torch._C._current_graph_task_id() == NO_BACKWARD
        and _C.first_backward_is_open(model.reducer)
    )


#: The error where :func:`is_lost`.
LOST = (
    "torch_commhook: an exception ended the first backward() of this DistributedDataParallel with "
    "static_graph=True, or that backward used no parameter. DDP would silently average no "
    "gradients "
    "from now on. Make a new one on all ranks, over a new process group if only some of them "
    "failed"
)


# ---- what remains once DDP's reducer has written a backward's results into gradients -------------


def used_by_any_rank(model: DistributedDataParallel) -> Tensor:
    """For each parameter, whether any rank has used it. Valid once a backward has computed this."""
    return model.reducer._get_local_used_map().cpu()


class KeptGradients:
    """Copies of gradients that DDP is about to overwrite, for one step."""

    def __init__(
        self, model: DistributedDataParallel, parameters: Sequence[tuple[str, Tensor]]
    ) -> None:
        self._reducer = weakref.ref(model.reducer)
        self._numbers = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
        self._members: dict[int, list[int]] = {}  # parameters by bucket
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # gradient, and its old values

    def keep(self, index: int, parameters: Sequence[Tensor], *, rebuilt: bool) -> None:
        """Copy the gradients of a full bucket that this rank has not used."""
        reducer = self._reducer()
        if rebuilt or index not in self._members:
            self._members[index] = [self._numbers[id(parameter)] for parameter in parameters]
        if reducer is None:
            return
        used = _C.locally_used(reducer)[self._members[index]].tolist()
        for number, parameter, is_used in zip(self._members[index], parameters, used, strict=True):
            if not is_used and parameter.grad is not None:
                self._kept[number] = parameter.grad, parameter.grad.detach().clone()

    def before(self, number: int, now: Tensor | None) -> Tensor | None:
        """A parameter's gradient before DDP may have overwritten it."""
        return self._kept[number][1] if number in self._kept else now

    def put_back(self, used: Tensor) -> None:
        """Restore the gradients of parameters that no rank has used."""
        is_used = used.tolist()
        with torch.no_grad():
            for number, (gradient, before) in self._kept.items():
                if not is_used[number]:
                    gradient.copy_(before)
        self.clear()

    def clear(self) -> None:
        self._kept.clear()

    def __bool__(self) -> bool:
        return bool(self._kept)


def average_own_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average the gradients that a failed step has left, which differ among ranks.

    All ranks must call this with the same parameters. If a gradient exists on some ranks only, the
    others get the mean too. Sparse gradients stay unchanged.
    """
    if not parameters:
        return
    layouts = [None if p.grad is None else p.grad.layout for p in parameters]
    found = torch.tensor(
        [[layout is torch.strided, layout is torch.sparse_coo] for layout in layouts],
        dtype=torch.float32,
        device=parameters[0].device,
    )
    counts = collectives.all_reduce(found, group=group).wait().tolist()
    with torch.no_grad():
        for parameter, (dense, sparse) in zip(parameters, counts, strict=True):
            if not dense or sparse:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            share = gradient.resolve_conj().contiguous() / group.size()
            own = torch.view_as_real(share) if share.is_complex() else share
            mean = collectives.all_reduce(own, group=group).wait()
            gradient.copy_(torch.view_as_complex(mean) if share.is_complex() else mean)


# ---- runs a hook on DDP's C++ reducer ------------------------------------------------------------


class DdpRoad(Road):
    """The communication hook that DDP's reducer calls; it calls the hook attached at the moment.

    A reducer accepts one communication hook in its life. This one stays registered. Without an
    attached hook it averages as DDP does.
    """

    model: Callable[[], DistributedDataParallel | None]

    def __init__(self, model: DistributedDataParallel, group: StepGroup) -> None:
        super().__init__(model, group)
        named = trainable(model)
        self._device = named[0][1].device
        self._used: list[UsedTensors | None] = []  # for each bucket of this backward
        self._attached: Attached | None = None
        self._running: Attached | None = None  # the hook of this backward
        self._is_first = True  # whether this backward's next bucket is its first
        self._averaged_epoch = self._group.epoch  # of the last step that succeeded
        self._skips_unused = model.find_unused_parameters  # DDP leaves out what no rank has used
        self._seen_in_forward = False  # whether parameters were checked since the last backward
        self._plain = allreduce()
        self._buckets: dict[int, BucketWithMemory] = {}
        self._loaded: list[list[str]] = []  # names by bucket, from a loaded memory
        # The model's reducer owns this object; a handle that outlives the model keeps no model
        # memory.
        buckets = self._buckets
        watched = self._watched = WatchedParameters(model, named, in_ddp=not model.mixed_precision)
        # Old values of gradients that this rank has not used, where DDP overwrites these.
        overwrites_unused = model.find_unused_parameters and model.gradient_as_bucket_view
        self._kept = KeptGradients(model, watched.parameters) if overwrites_unused else None
        # Functions that return results of which the hook is to remember the part that was not sent.
        self._unsent: dict[int, Callable[[], Tensor]] = {}
        # Results of another dtype than the gradients: scaled first, rounded afterwards.
        self._unrounded: dict[int, Callable[[], Tensor]] = {}
        # The previous step failed, and may have left gradients that this step does not use.
        self._follow_a_failure = False

        def model_is_gone(_: object) -> None:
            buckets.clear()
            watched.clear()

        self.model = weakref.ref(model, model_is_gone)

        if model.logger is not None:  # DDP's own statistics
            model.logger._set_comm_hook_name("torch_commhook")
        _C.register_ddp_hook(
            model.reducer,
            self,
            model.gradient_as_bucket_view,
            self._group.timeout.total_seconds(),
            DRAIN_SECONDS,
        )
        road = weakref.ref(self)
        parameters = [parameter for _, parameter in named]
        _C.call_before_capture(parameters, skip_dynamo(lambda: _hand_over(road)))
        self._forward_handle = model.register_forward_pre_hook(BeforeForward(self))

    @property
    def _parameters(self) -> list[Tensor]:
        """The parameters that DDP averages, in its order; none once the model is freed."""
        return [parameter for _, parameter in self._watched.parameters]

    def check_fits(self, attached: Attached) -> None:
        """Accept any hook: DDP averages whole gradients."""

    def parameter_buckets(self) -> list[list[Tensor]]:
        """The parameters of each bucket, in order.

        Before the first backward: the loaded buckets, or else buckets that DDP might form.
        """
        model = self.model()
        if model is None:
            return []
        parameters = self._parameters
        buckets: list[list[Tensor]] = []
        left = len(parameters)
        for _, bucket in sorted(self._buckets.items()):
            if left:  # buckets past this one date from before DDP rebuilt its buckets
                buckets.append(bucket.parameters())
                left -= len(buckets[-1])
        if left == 0:
            return buckets
        loaded = self._loaded_buckets(parameters)
        if loaded:
            return loaded
        parameters.reverse()
        assigned = assign_buckets(parameters, [False] * len(parameters), model.bucket_bytes_cap)
        return [[parameters[i] for i in members] for members in assigned]

    def _loaded_buckets(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        """The loaded memory's buckets; none if they do not cover all parameters."""
        names = None if self._attached is None else self._attached.memory.names_of(parameters)
        by_name = dict(zip(names or (), parameters, strict=False))
        if sorted(by_name) != sorted(name for names in self._loaded for name in names):
            return []
        loaded = [[by_name[name] for name in names] for names in self._loaded]
        return [  # a model of other dtypes has other buckets
            [parameters[place] for place in places]
            for parameters in loaded
            for places in split_by_kind(parameters)
        ]

    @property
    def attached(self) -> Attached | None:
        return self._attached

    @attached.setter
    def attached(self, attached: Attached | None) -> None:
        self._attached = attached
        if self._running is None:  # else that backward continues with its own hook's memory
            self._forget_memory()
        if attached is not None:
            attached.use_group(self._group, self._device)
            self._prepare_memory(self.parameter_buckets())

    def memory_loaded(self, buckets: list[list[str]]) -> None:
        self._loaded = buckets
        self._forget_memory()
        model = self.model()
        if model is not None:
            # Not the present buckets, which DDP may be about to rebuild.
            loaded = self._loaded_buckets(self._parameters)
            self._prepare_memory(loaded or self.parameter_buckets())

    def _prepare_memory(self, buckets: list[list[Tensor]]) -> None:
        """Let the hook ask for memory, so that its state is complete before the first backward."""
        attached = self._attached
        for index, parameters in enumerate(buckets):
            if attached is not None:
                attached.memory_of(parameters, index)

    def _forget_memory(self) -> None:
        """Let buckets ask for the hook's memory again."""
        for bucket in self._buckets.values():
            bucket.memory = None

    def before_forward(self, module: torch.nn.Module) -> None:
        """Check the parameters. The model calls this before its own forward."""
        if not torch.compiler.is_dynamo_compiling():
            self._check_group_of_buffers()
        if not torch.is_grad_enabled():
            return
        if not torch.compiler.is_dynamo_compiling():
            self._check_parameters()
            self._seen_in_forward = self._watched.is_sure
        elif parameters_changed(self.key):
            # The compiler leaves this to Python, which calls this method again.
            raise RuntimeError("torch_commhook: the model's parameters have changed")

    @skip_dynamo
    def _check_group_of_buffers(self) -> None:
        model = self.model()
        if model is not None and model.will_sync_module_buffers():
            check_is_free(self._group.parent)

    @skip_dynamo
    def _check_parameters(self) -> None:
        wrong = self.change_of_parameters()
        if wrong is not None:
            error = RuntimeError(wrong)
            raise error if self._attached is None else self._group.fail_with(error)

    def change_of_parameters(self) -> str | None:
        """The reason why a forward cannot lead to a step, or None."""
        model = self.model()
        if model is not None and is_lost(model):
            return LOST
        return None if self._attached is None else self._watched.change()

    # ---- called by the reducer's hook (csrc/runtime/reducer/ddp_hook.h) --------------------------

    def choose_delivery(self) -> str:
        """Who writes a bucket's result into the gradients (csrc/runtime/reducer/ddp_hook.h)."""
        model = self.model()
        if model is None or model.find_unused_parameters or model.static_graph:
            return "reducer"  # only DDP knows which gradients must stay unchanged
        if any(parameter.is_complex() for parameter in model.parameters()):
            return "reducer"  # the operators support no complex tensors
        return "buffer" if model.gradient_as_bucket_view else "write"

    @skip_dynamo
    def begin_step(self) -> tuple[_C.CppHook, dist.ProcessGroup, dist.ProcessGroup] | None:
        """Begin a backward. Returns the C++ hook and the groups for its buckets, if it has one."""
        attached = self._running = self.attached
        self._is_first = True
        self._used.clear()
        if self._then:  # an exception ended the previous backward
            self._forget_memory()
            self._do_then()
        seen, self._seen_in_forward = self._seen_in_forward, False
        if not seen and attached is not None:
            change = self._watched.change()
            if change is not None:
                raise RuntimeError(change)
        if attached is None:
            check_is_free(self._group.parent)
            return None
        if attached.local_steps is not None:
            attached.local_steps.note_backward()
            return None
        self._group.begin()
        model = self.model()
        self._follow_a_failure = (
            self._group.epoch != self._averaged_epoch
            and self._skips_unused
            and model is not None
            and not model.static_graph
            # In join(), a rank without inputs does not take part in what follows a step.
            and not model._join_config.enable
        )
        attached.look_at_scale(
            in_join=model is not None and model._join_config.enable,
            has_joined=torch._C._current_graph_task_id() == NO_BACKWARD,
        )
        attached.choose()
        native = attached.cpp_hook
        if native is None or self._kept is not None or self._follow_a_failure:
            return None
        own = attached.own_group
        if own is not None:
            return native, own, own
        return native, self._group.group, self._group.parent

    @skip_dynamo
    def run(
        self, torch_bucket: dist.GradBucket, rebuilt: bool
    ) -> tuple[str, Any, torch.dtype, Callable[[Tensor], Tensor] | None]:
        """Run the hook on a full bucket."""
        index = torch_bucket.index()
        if rebuilt:
            bucket = self._buckets[index] = BucketWithMemory.from_torch(torch_bucket)
        else:
            bucket = self._buckets[index]
            bucket._buffer = torch_bucket.buffer()
            bucket._bucket_count = _C.bucket_count(torch_bucket)  # DDP may have rebuilt its buckets
            bucket._sparse_grad_indices = _C.sparse_grad_indices(torch_bucket)
        attached = self._running
        if attached is None:
            bucket._process_group = self._group.parent
            return "none", self._plain.average(bucket), bucket.buffer().dtype, None
        bucket._process_group = self._group.group_for(bucket.device())
        memory = bucket.memory
        if memory is None or memory.owner is not attached.memory:
            bucket.memory = attached.memory_of(bucket.parameters(), index)
        count = bucket.bucket_count()
        where = hook_on_bucket(attached.name, index, count)
        kept = self._kept
        if kept is not None and not attached.keeps_ranks_apart:
            kept.keep(index, bucket.parameters(), rebuilt=rebuilt)
        model = self.model()
        # In the first step of a static graph DDP gives each bucket the number 0.
        in_order = model is not None and not model.static_graph
        call = attached.start(bucket, where, in_order=in_order)
        self._used.append(call.used)
        if call.look is not None:  # the reducer's own callback comes after this one
            call.future.add_done_callback(lambda _, look=call.look: look())
        leaves_some_out = self._skips_unused and attached.keeps_error
        if leaves_some_out:
            self._unsent[index] = call.future.wait
        if not attached.keeps_ranks_apart:
            attached.count_bucket(index, count, call.traffic, first=self._is_first)
        self._is_first = False
        local = call.local
        if local is None:
            if attached.hook.scales_steps and call.dtype != bucket.dtype():
                self._unrounded[index] = call.result
            return attached.name, call.future, call.dtype, None

        def after(result: Tensor) -> Tensor:
            if leaves_some_out:  # post-hooks' changes are no errors of earlier steps
                copied = result.clone()
                self._unsent[index] = lambda: copied
            return attached.bucket_hooks.after(bucket, result, local, where)

        return attached.name, call.future, call.dtype, after

    @skip_dynamo
    def give_up(self, error: BaseException) -> None:
        """Fail collectives that were prepared and that no rank will issue after an error."""
        if self._running is not None:
            self._running.second_stages.give_up(error)

    @skip_dynamo
    def end_step(
        self, error: BaseException | None, sent: list[tuple[int, torch.dtype, int | None]] | None
    ) -> None:
        """End a backward, once all results are written or an error was raised."""
        # Hooks that were removed meanwhile are released.
        attached, self._running = self._running, None
        if error is None:  # the reducer has waited for all results
            for used in self._used:
                if used is not None:
                    used.waited_for()
        self._used.clear()
        if attached is None:
            return
        if self._attached is None:
            self._forget_memory()
            self._do_then()
        if attached.keeps_ranks_apart:  # backward() raises an error by itself
            if error is None and attached.bucket_hooks.has_post_accumulate_hooks:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._gradients_written, attached))
            return
        if error is None:
            self._group.end()
            self._averaged_epoch = self._group.epoch
            past = dict(attached.memory.past)
            attached.memory.count_step()
            for index, (numel, dtype, nbytes) in enumerate(sent or ()):
                traffic = BucketTraffic(numel, dtype, nbytes, nbytes)
                attached.count_bucket(index, len(sent or ()), traffic, first=index == 0)
            if torch._C._current_graph_task_id() == NO_BACKWARD:
                # In join(), where a rank without inputs takes part without gradients.
                self._forget_results()
            elif sent is None and (
                attached.bucket_hooks.has_post_accumulate_hooks
                or attached.hook.scales_steps
                or (self._skips_unused and attached.keeps_error)
                or self._kept
                or self._follow_a_failure
            ):
                # Once the reducer has written the last gradients.
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self._gradients_written, attached, past))
            return
        self._forget_results()
        raised = self._group.fail_with(error)
        if raised is not error:  # backward() raises the error itself
            raise raised

    @skip_dynamo
    def _gradients_written(
        self, attached: Attached, past: Mapping[int, bool] | None = None
    ) -> None:
        self._finish_results(attached, past)
        for index, bucket in sorted(self._buckets.items()):
            where = hook_on_bucket(attached.name, index, bucket.bucket_count())
            attached.bucket_hooks.done(bucket, where)

    def _forget_results(self) -> None:
        """Drop the results of a backward that has ended or failed."""
        self._unsent.clear()
        self._unrounded.clear()
        if self._kept is not None:
            self._kept.clear()

    def _finish_results(self, attached: Attached, past: Mapping[int, bool] | None) -> None:
        """Finish the step, once DDP has written the last gradients.

        DDP scales no results. It leaves gradients that no rank has used, or overwrites them if they
        are views of the buckets.
        """
        if self._unsent:
            self._keep_unsent()
        model = self.model()
        if self._kept and model is not None:  # last: results may share memory with gradients
            self._kept.put_back(used_by_any_rank(model))
        if attached.hook.scales_steps:
            self._scale_gradients(attached, past)
        if self._follow_a_failure:
            self._follow_a_failure = False
            if model is not None:
                is_used = used_by_any_rank(model).tolist()
                unused = zip(self._parameters, is_used, strict=True)
                group = self._group.group_for(self._device)
                average_own_gradients([p for p, yes in unused if not yes], group)

    def _keep_unsent(self) -> None:
        """Let the hook remember results that DDP has written to no gradient."""
        results, self._unsent = self._unsent, {}
        model = self.model()
        if model is None:
            return
        used = used_by_any_rank(model)
        if used.all():
            return
        numbers = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        late = []
        for index, result in results.items():
            bucket = self._buckets[index]
            parameters = bucket.parameters()
            members = [numbers[id(parameter)] for parameter in parameters]
            sent = [parameter.grad for parameter in parameters]
            if self._kept:
                sent = [self._kept.before(i, now) for i, now in zip(members, sent, strict=True)]
            late.append(BucketResult(members, bucket.memory, result(), sent))
        errors, values, gradients, table = make_unsent_table(late)
        if table:
            add_unsent_to_errors(errors, values, gradients, used, table)

    def _scale_gradients(self, attached: Attached, past: Mapping[int, bool] | None) -> None:
        """Scale the written gradients. Our own reducer scales while it writes them."""
        unrounded, self._unrounded = self._unrounded, {}
        results: dict[int, Tensor] = {}
        for index, result in unrounded.items():
            bucket = self._buckets[index]
            pieces = bucket.pieces(result())
            results.update(zip(map(id, bucket.parameters()), pieces, strict=True))
        parameters = self._parameters_of_this_step()
        if not parameters:
            return
        values = [
            results.get(id(parameter), parameter.grad.resolve_conj().resolve_neg())
            for parameter in parameters
        ]
        scale = attached.step_scale(values, past)
        if scale is None:
            return
        with torch.no_grad():
            as_written = []
            for parameter, value in zip(parameters, values, strict=True):
                if value is not parameter.grad:
                    parameter.grad.copy_(scaled_result(value, scale, parameter.dtype))
                elif value.layout is torch.strided:
                    as_written.append(value)
                else:  # an in-place product would round the factor too
                    parameter.grad = scaled_result(value, scale, parameter.dtype)
            if as_written:
                torch._foreach_mul_(as_written, scale)

    def _parameters_of_this_step(self) -> list[Any]:
        """The parameters whose gradients this step has written; others may have older gradients."""
        model = self.model()
        if model is None:
            return []
        parameters = self._parameters
        if model.find_unused_parameters or model.static_graph:
            used = used_by_any_rank(model).tolist()
            parameters = [p for p, yes in zip(parameters, used, strict=True) if yes]
        return [parameter for parameter in parameters if parameter.grad is not None]

    @property
    def _is_running(self) -> bool:
        return self._running is not None

    @torch.inference_mode(False)
    def hand_over(self) -> bool:
        """Let our own reducer replace DDP's for good, if a hook is attached.

        DDP's C++ reducer does not support compiled autograd. This removes its hooks from autograd,
        and tells DDP that it has a Python reducer, so that DDP never asks the C++ one.
        """
        model = self.model()
        if model is None or self.attached is None:
            return False
        if model.static_graph and not getattr(
            model, "_static_graph_delay_allreduce_enqueued", True
        ):
            raise RuntimeError(
                "torch_commhook: compiled autograd must not run the first backward() of a "
                "DistributedDataParallel with static_graph=True; run one eager step first"
            )
        if model._join_config.enable:
            raise RuntimeError(
                "torch_commhook: inside join() of a DistributedDataParallel compiled autograd "
                "must not "
                "run the first backward(); run one compiled step before, and then join() its handle"
            )
        model.reducer._remove_autograd_hooks()
        model._use_python_reducer = True
        self._forward_handle.remove()
        named = list(self._watched.parameters)
        self._watched.clear()
        # Whether a backward under no_sync() has used each parameter since a step.
        if self._group.epoch != self._averaged_epoch:  # a failed step has left different gradients
            used_before = [True] * len(named)
        elif model.find_unused_parameters and not model.static_graph:
            used_before = [bool(used) for used in _C.locally_used(model.reducer).tolist()]
        else:
            # DDP has not counted. Averaging a gradient twice is harmless; not averaging it is not.
            used_before = [parameter.grad is not None for _, parameter in named]
        # Imports torch's compiler, which takes seconds, and which a hook on DDP does not need.
        from torch_commhook.attachment.reducer_road import ReducerRoad

        self.successor = successor = ReducerRoad.of_ddp(model, named, self._group)
        successor.register()
        used = torch.tensor(used_before, dtype=torch.uint8, device="cpu")
        successor.reducer.parameters.touched.copy_(used)
        attached, self.attached = self.attached, None
        successor.attached = attached
        try:
            attached.choose_before_capture()
        except BaseException as error:
            raised = self._group.fail_with(error)
            if raised is error:
                raise
            raise raised from error
        return True

    def no_sync(self) -> AbstractContextManager[None]:
        model = self.model()
        return nullcontext() if model is None else model.no_sync()

    def join(self) -> AbstractContextManager[Any]:
        model = self.model()
        return nullcontext() if model is None else model.join()


@skip_dynamo
def _hand_over(road: weakref.ref[DdpRoad]) -> bool:
    own = road()
    return own is None or own.hand_over()
