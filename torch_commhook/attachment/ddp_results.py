"""What follows DDP's reducer: results in gradients, and static graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C, collectives
from torch_commhook.attachment.parameters import WatchedParameters
from torch_commhook.buckets.grad_bucket import scaled_result
from torch_commhook.memory.bucket_memory import BucketWithMemory
from torch_commhook.memory.unsent import BucketResult, add_unsent_to_errors, make_unsent_table
from torch_commhook.step.attached_hook import Attached

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


# ---- steps that remain once DDP's reducer has written a backward's results into gradients --------


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
        """Forget the copies."""
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


class DdpResults:
    """The hooks' results of one backward, kept while they are needed after DDP has written them.

    DDP scales no results. It leaves gradients that no rank has used, or overwrites them if they
    are views of the buckets.

    Args:
        model: the DDP model.
        watched: its parameters, while they exist.
        buckets: the buckets of this backward, by index.

    Attributes:
        kept: old values of gradients that this rank has not used, if gradients are views, which
            DDP overwrites. Else None.
        follow_a_failure: whether the previous step failed. It may have left gradients that this
            step does not use.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        watched: WatchedParameters,
        buckets: Mapping[int, BucketWithMemory],
    ) -> None:
        self._model = weakref.ref(model)
        self._watched = watched
        self._buckets = buckets
        overwrites_unused = model.find_unused_parameters and model.gradient_as_bucket_view
        self.kept = KeptGradients(model, watched.parameters) if overwrites_unused else None
        # Functions that return results which may have to be kept.
        self._unsent: dict[int, Callable[[], Tensor]] = {}
        # Results of another dtype than the gradients: scaled first, rounded afterwards.
        self._unrounded: dict[int, Callable[[], Tensor]] = {}
        self.follow_a_failure = False

    def keep_for_unused(self, index: int, result: Callable[[], Tensor]) -> None:
        """Keep a bucket's result. The hook is to remember its part for unused parameters."""
        self._unsent[index] = result

    def keep_unrounded(self, index: int, result: Callable[[], Tensor]) -> None:
        """Keep a bucket's result if its dtype differs from the gradients' and it must be scaled."""
        self._unrounded[index] = result

    def forget(self) -> None:
        """Drop the results of a backward that has ended or failed."""
        self._unsent.clear()
        self._unrounded.clear()
        if self.kept is not None:
            self.kept.clear()

    def finish(
        self, attached: Attached, past: Mapping[int, bool] | None, group: dist.ProcessGroup
    ) -> None:
        """Finish the step, once DDP has written the last gradients.

        Args:
            attached: the hook.
            past: as in :meth:`Attached.step_scale`.
            group: the group of the ranks.
        """
        if self._unsent:
            self._keep_unsent()
        model = self._model()
        if self.kept and model is not None:  # last: results may share memory with gradients
            self.kept.put_back(used_by_any_rank(model))
        if attached.scales_steps:
            self._scale_gradients(attached, past)
        if self.follow_a_failure:
            self.follow_a_failure = False
            if model is not None:
                is_used = used_by_any_rank(model).tolist()
                unused = zip(self._parameters(), is_used, strict=True)
                average_own_gradients([p for p, yes in unused if not yes], group)

    def _parameters(self) -> list[Tensor]:
        return [parameter for _, parameter in self._watched.parameters]

    def _keep_unsent(self) -> None:
        """Let the hook remember results that DDP has written to no gradient."""
        results, self._unsent = self._unsent, {}
        model = self._model()
        if model is None:
            return
        used = used_by_any_rank(model)
        if used.all():
            return
        numbers = {id(parameter): i for i, parameter in enumerate(self._parameters())}
        late = []
        for index, result in results.items():
            bucket = self._buckets[index]
            parameters = bucket.parameters()
            members = [numbers[id(parameter)] for parameter in parameters]
            sent = [parameter.grad for parameter in parameters]
            if self.kept:
                sent = [self.kept.before(i, now) for i, now in zip(members, sent, strict=True)]
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
        model = self._model()
        if model is None:
            return []
        parameters = self._parameters()
        if model.find_unused_parameters or model.static_graph:
            used = used_by_any_rank(model).tolist()
            parameters = [p for p, yes in zip(parameters, used, strict=True) if yes]
        return [parameter for parameter in parameters if parameter.grad is not None]
