"""Runs a communication hook on given gradients, with threads as ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_commhook._C import type_name
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.hooks.compressed import check_is_hook
from torch_commhook.hooks.expressions import as_hook
from torch_commhook.native.runtime import check_hook_of, hook_name, parse_hook_result, run_hook
from torch_commhook.process_group.simulated.link import Issued, Links
from torch_commhook.testing.ranks import check_timeout, run_with_links
from torch_commhook.wording import pluralize

Gradients = Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Simulation:
    """The results of a hook on each rank's gradients, for the last step.

    Attributes:
        results: for each rank, one tensor for each of its gradients, with its shape and dtype.
        bytes_sent: the bytes that each rank sent in that step, over all simulated groups; see
            ``SimulatedProcessGroup.bytes_sent``.
        error: the distance of the result from the exact mean of the gradients, relative to the
            length of that mean. Both are one vector in float64. The largest of the ranks. 0 if
            both are zero.
        errors: the same for each step, in order.
        mean_error: the same for the mean of all steps' results. With error feedback it is smaller
            than that of a single step.
        issued: the calls that rank 0 made in that step, in order.

    Example:
        >>> gradients = [[torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([3.0, 2.0, 1.0])]]
        >>> found = simulate(hooks.topk(0.25), gradients)
        >>> found.result, found.bytes_sent, round(found.error, 2)
        ([tensor([1.5000, 0.0000, 1.5000])], [8, 8], 0.61)
    """

    results: list[list[Tensor]]
    bytes_sent: list[int]
    error: float
    errors: list[float] = field(default_factory=list, repr=False)
    mean_error: float = 0.0
    issued: list[Issued] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        """One line."""
        ranks, tensors = len(self.results), len(self.results[0])
        steps = len(self.errors)
        over = f", {self.mean_error:.3g} over {steps} steps" if steps > 1 else ""
        elements = sum(tensor.numel() for tensor in self.results[0])
        return (
            f"{pluralize(ranks, 'rank')}, {pluralize(tensors, 'gradient')} of {elements:,} "
            f"elements: a rank sent {self.wire_bytes:,} bytes, "
            f"relative error {self.error:.3g}{over}"
        )

    @property
    def result(self) -> list[Tensor]:
        """The gradients, equal on all ranks.

        Raises:
            ValueError: the ranks' gradients differ. The message names a gradient and ranks;
                ``results`` has all gradients.
        """
        first = self.results[0]
        for rank, others in enumerate(self.results):
            for i, (one, other) in enumerate(zip(first, others, strict=True)):
                if not torch.equal(_bits(one), _bits(other)):
                    raise ValueError(
                        f"simulate: gradient {i} must be the same on all ranks, but ranks "
                        f"0 and {rank} differ; results has each rank's"
                    )
        return first

    @property
    def wire_bytes(self) -> int:
        """Bytes that a rank sent in that step; if ranks differ, the largest number."""
        return max(self.bytes_sent)


def simulate(
    hook: Callable[..., Any] | str,
    grads_per_rank: Gradients,
    *,
    steps: int = 1,
    state: object = None,
    seed: int = 0,
    timeout: float = 60.0,
) -> Simulation:
    """Run a hook on the gradients of several ranks, without processes.

    Each rank has a copy of the hook and the state. It puts its gradients into buckets, one for each
    dtype and one for each sparse gradient, and calls the hook on these.

    Args:
        hook: one of :mod:`torch_commhook.hooks`, a callable ``hook(state, bucket)``, or a text for
            :func:`torch_commhook.parse_hook`. It communicates over the default group, or over
            groups that it makes.
        grads_per_rank: for each rank a list of gradients, with the same shapes and dtypes on all
            ranks. They are not changed.
        steps: the number of calls on the same gradients, for hooks with memory.
        state: the first argument of a callable hook.
        seed: the seed of the order in which ranks run; see
            :func:`torch_commhook.testing.run_ranks`.
        timeout: the number of seconds that a rank may run without reaching a collective.

    Returns:
        The last step's gradients, traffic and error.

    Raises:
        TypeError: ``hook`` is not a hook, a gradient is not a tensor, or a hook or state
            cannot be copied.
        ValueError: there are no gradients, they differ in shape or dtype among ranks, or a text
            describes no hook.
        BaseException: the hook raised it, as from ``run_ranks``.

    Example:
        >>> gradients = [[torch.linspace(-1, 1, 4096)], [torch.linspace(0, 1, 4096)]]
        >>> found = simulate(hooks.blockwise(bits=8), gradients)
        >>> found.wire_bytes, found.error < 0.01
        (4160, True)
    """
    called = as_hook(hook, "simulate")
    check_is_hook(called, "simulate")
    check_hook_of("simulate", called)
    gradients = _checked(grads_per_rank)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"simulate: steps must be a positive int, got {steps!r}")
    check_timeout("simulate", timeout)
    sent_before = [0] * len(gradients)

    means = [  # over the ranks, of each gradient
        torch.stack([_exact(gradient) for gradient in ranks]).mean(0)
        for ranks in zip(*gradients, strict=True)
    ]

    def run_rank(rank: int, links: Links) -> tuple[list[Tensor], list[float], float]:
        own_hook, own_state = _copies(called, state)
        parameters = [torch.zeros_like(g, requires_grad=True) for g in gradients[rank]]
        results: list[Tensor] = []
        errors: list[float] = []
        sums = [torch.zeros_like(mean) for mean in means]
        for step in range(steps):
            if step == steps - 1:
                sent_before[rank] = _bytes_sent(links, rank)
                if rank == 0:
                    links.issued[0] = []
            results = _one_step(own_hook, own_state, parameters, gradients[rank])
            exact = [_exact(result) for result in results]
            errors.append(_error(exact, means))
            sums = [total + result for total, result in zip(sums, exact, strict=True)]
        return results, errors, _error([total / steps for total in sums], means)

    found, links = run_with_links(run_rank, len(gradients), seed, timeout)
    results, errors, mean_errors = (list(each) for each in zip(*found, strict=True))
    of_steps = [_largest(step) for step in zip(*errors, strict=True)]
    sent = [_bytes_sent(links, rank) - before for rank, before in enumerate(sent_before)]
    return Simulation(results, sent, of_steps[-1], of_steps, _largest(mean_errors), links.issued[0])


def _one_step(
    hook: Callable[..., Any], state: object, parameters: list[Tensor], gradients: Sequence[Tensor]
) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    buckets = _buckets(gradients)
    calls = []
    for index, numbers in enumerate(buckets):
        bucket = GradBucket(
            [parameters[i] for i in numbers],
            [gradients[i].clone() for i in numbers],
            index=index,
            bucket_count=len(buckets),
        )
        calls.append((numbers, bucket, run_hook(hook, state, bucket)))
    for numbers, bucket, future in calls:
        flat = parse_hook_result(future.wait(), bucket)
        for i, piece in zip(numbers, bucket.pieces(flat), strict=True):
            results[i] = piece.detach().clone()
    return [results[i] for i in range(len(gradients))]


def _buckets(gradients: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the gradients that share each bucket."""
    buckets: dict[object, list[int]] = {}
    for i, gradient in enumerate(gradients):
        dense = gradient.layout is torch.strided
        buckets.setdefault(gradient.dtype if dense else i, []).append(i)
    return list(buckets.values())


def _copies(hook: Callable[..., Any], state: object) -> tuple[Callable[..., Any], object]:
    try:
        return copy.deepcopy((hook, state))
    except Exception as error:
        raise TypeError(
            f"simulate: hook and state must be copyable for each rank, got "
            f"{hook_name(hook)} with a state of {type_name(state)}"
        ) from error


def _bytes_sent(links: Links, rank: int) -> int:
    return sum(
        link.bytes_sent[link.members.index(rank)] for link in links.all if rank in link.members
    )


def _checked(grads_per_rank: Gradients) -> list[list[Tensor]]:
    lists = (
        "simulate: grads_per_rank must hold a list of gradients for each rank, got {}; write "
        "[[gradient_of_rank_0], [gradient_of_rank_1]]"
    )
    if isinstance(grads_per_rank, str) or not isinstance(grads_per_rank, Iterable):
        raise TypeError(lists.format(type_name(grads_per_rank)))
    for gradients in grads_per_rank:
        if isinstance(gradients, Tensor):  # list() would split it
            raise TypeError(lists.format("a tensor for a rank"))
        if isinstance(gradients, str) or not isinstance(gradients, Iterable):
            raise TypeError(lists.format(f"{type_name(gradients)} for a rank"))
    ranks = [list(gradients) for gradients in grads_per_rank]
    if not ranks or not ranks[0]:
        raise ValueError(
            "simulate: grads_per_rank must have at least one rank with one gradient, got "
            f"{[len(gradients) for gradients in ranks]} gradients"
        )
    kinds = []
    for gradients in ranks:
        for gradient in gradients:
            if not isinstance(gradient, Tensor):
                is_number = isinstance(gradient, (int, float, complex))
                raise TypeError(
                    f"simulate: grads_per_rank must hold tensors, got {type_name(gradient)}"
                    + ("; write [[torch.tensor([...])], ...] for numbers" if is_number else "")
                )
            if not gradient.is_floating_point() and not gradient.is_complex():
                raise TypeError(
                    "simulate: grads_per_rank must hold tensors of a floating or complex dtype, "
                    f"got {gradient.dtype}"
                )
        kinds.append([f"{g.dtype} {list(g.shape)}" for g in gradients])
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"simulate: grads_per_rank must be of the same shapes and dtypes on all ranks, got "
                f"{kinds[0]} on rank 0 and {kind} on rank {rank}"
            )
    return [[gradient.detach() for gradient in gradients] for gradients in ranks]


def _error(results: Sequence[Tensor], means: Sequence[Tensor]) -> float:
    """The distance of one rank's results from the exact means, relative to their length."""
    distance = _length([one - mean for one, mean in zip(results, means, strict=True)])
    length = _length(means)
    if length == 0:
        return distance if distance == 0 or math.isnan(distance) else math.inf
    return distance / length


def _largest(errors: Sequence[float]) -> float:
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _exact(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _length(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(tensor.abs().square().sum().item() for tensor in tensors))


def _bits(tensor: Tensor) -> Tensor:
    """Bits for a comparison in which NaN equals itself."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    flat = dense.contiguous().view(-1) if dense.numel() else dense.new_empty(0)
    return flat.view(torch.uint8)
