"""What is left of a backward over DDP's reducer once that has written the results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_commhook import _C, collectives
from torch_commhook.attachment.watched_parameters import WatchedParameters
from torch_commhook.buckets.results import scaled_result
from torch_commhook.memory.bucket_with_memory import BucketWithMemory
from torch_commhook.memory.unsent import BucketResult, add_unsent_to_errors, make_unsent_table
from torch_commhook.step.attached_hook import Attached


def used_by_any_rank(model: DistributedDataParallel) -> Tensor:
    """For each parameter whether a rank has used it, once a backward has found that out."""
    return model.reducer._get_local_used_map().cpu()


class KeptGradients:
    """Gradients that DDP is about to overwrite, in one step."""

    def __init__(
        self, model: DistributedDataParallel, parameters: Sequence[tuple[str, Tensor]]
    ) -> None:
        self._reducer = weakref.ref(model.reducer)
        self._numbers = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
        self._members: dict[int, list[int]] = {}  # of each bucket
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # gradient, and what was in it

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
        """A parameter's gradient as it was before DDP may have overwritten it."""
        return self._kept[number][1] if number in self._kept else now

    def put_back(self, used: Tensor) -> None:
        """Restore those that no rank has used."""
        is_used = used.tolist()
        with torch.no_grad():
            for number, (gradient, before) in self._kept.items():
                if not is_used[number]:
                    gradient.copy_(before)
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._kept.clear()

    def __bool__(self) -> bool:
        return bool(self._kept)


def average_own_gradients(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Average gradients that a failed step has left on the ranks, each its own.

    Called on all ranks alike. A rank that has none gets the mean, too, where another has one.
    Sparse ones stay as they are.
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
    """What hooks gave in one backward, as far as it is needed after DDP has written it.

    DDP scales nothing. Gradients that no rank has used it leaves alone, or overwrites, if views.

    Args:
        model: the DDP.
        watched: its parameters, as long as it lives.
        buckets: those that hooks were given, by index.

    Attributes:
        kept: gradients that this rank has not used, as they were: DDP overwrites those that are
            views. None where it does not.
        follow_a_failure: whether the step before has failed, which may have left gradients that
            this one does not use.
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
        # Give the results, where they may have to be kept.
        self._unsent: dict[int, Callable[[], Tensor]] = {}
        # Of other dtypes than the gradients: scaled first, and rounded to those then.
        self._unrounded: dict[int, Callable[[], Tensor]] = {}
        self.follow_a_failure = False

    def keep_for_unused(self, index: int, result: Callable[[], Tensor]) -> None:
        """Keep a bucket's result, whose part for unused parameters the hook is to remember."""
        self._unsent[index] = result

    def keep_unrounded(self, index: int, result: Callable[[], Tensor]) -> None:
        """Keep a bucket's result of another dtype than its gradients, which is to be scaled."""
        self._unrounded[index] = result

    def leaves_some_out(self, attached: Attached) -> bool:
        """Whether DDP may leave gradients alone for which results hold earlier errors."""
        model = self._model()
        return attached.keeps_error and model is not None and model.find_unused_parameters

    def are_needed(self, attached: Attached) -> bool:
        """Whether :meth:`finish` has anything to do."""
        return (
            attached.scales_steps
            or self.leaves_some_out(attached)
            or bool(self.kept)
            or self.follow_a_failure
        )

    def forget(self) -> None:
        """Drop the results of a backward that is over, or has failed."""
        self._unsent.clear()
        self._unrounded.clear()
        if self.kept is not None:
            self.kept.clear()

    def finish(
        self, attached: Attached, past: Mapping[int, bool] | None, group: dist.ProcessGroup
    ) -> None:
        """Do what DDP left undone, once it has written the last gradients.

        Args:
            attached: the hook.
            past: as in :meth:`Attached.step_scale`.
            group: the ranks.
        """
        if self._unsent:
            self._keep_unsent()
        model = self._model()
        if self.kept and model is not None:  # last, since results may lie where gradients do
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
        """Let the hook remember results that DDP has written into no gradient."""
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
        """Scale what has been written, as our own reducer does on the way into the gradients."""
        unrounded, self._unrounded = self._unrounded, {}
        results: dict[int, Tensor] = {}
        for index, result in unrounded.items():
            bucket = self._buckets[index]
            pieces = bucket.pieces(result())
            results.update(zip(map(id, bucket.parameters()), pieces, strict=True))
        parameters = self._parameters_of_this_step()
        if not parameters:
            return
        values = [results.get(id(parameter), parameter.grad) for parameter in parameters]
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
                else:  # whose product in place rounds the factor, too
                    parameter.grad = scaled_result(value, scale, parameter.dtype)
            if as_written:
                torch._foreach_mul_(as_written, scale)

    def _parameters_of_this_step(self) -> list[Any]:
        """Those whose gradients results have been written to; others may have earlier ones."""
        model = self._model()
        if model is None:
            return []
        parameters = self._parameters()
        if model.find_unused_parameters or model.static_graph:
            used = used_by_any_rank(model).tolist()
            parameters = [p for p, yes in zip(parameters, used, strict=True) if yes]
        return [parameter for parameter in parameters if parameter.grad is not None]
