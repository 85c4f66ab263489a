"""What hooks compute and send in a step, whatever the link.

A hook's computing is measured on this machine, on a bucket of random gradients in square matrices.
Its bytes are counted with ranks that are threads. Among more than 16 ranks, or on several nodes,
the bytes of most hooks follow from formulas instead.

A hook that changes after some steps is measured as it is then. The figures of a hook that keeps
ranks apart for some steps are means over these steps. ``fragments=`` and ``delay=`` of
``local_sgd`` change nothing, although they hide the exchange behind computing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch_commhook import hooks as library_hooks
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.native.runtime import check_hook, hook_name
from torch_commhook.planning.buckets import BUCKET_CAPS_MB, bucket_sizes
from torch_commhook.planning.formulas import (
    MOST_SIMULATED,
    Formula,
    count_connections,
    encoding_of,
    formula_of,
    with_ranks_per_node,
)
from torch_commhook.planning.hook_work import (
    HookError,
    measure_pass,
    measure_seconds,
    record_traffic,
    unwrap_hook,
)
from torch_commhook.planning.schedule import agreement_of
from torch_commhook.process_group.simulated.link import Issued


@dataclass(frozen=True)
class Measured:
    """What a hook does in one step, whatever the link.

    Attributes:
        hook: as it is written.
        bytes_sent: by each rank.
        compute_seconds: gathering gradients, encoding, adding up, decoding and writing results.
        overlaps: whether it does so while a backward computes.
        every: steps in which it communicates once.
        issued: what a rank issues then, for all gradients as one bucket.
        agreement: what it issues at the end of a step.
        connections: of a rank, which the hook adds when it is attached.
        members: as in :class:`torch_commhook.planning.formulas.Formula`; empty where nobody has
            said how many nodes there are, or the hook has no formulas.
    """

    hook: str
    bytes_sent: float
    compute_seconds: float
    overlaps: bool = True
    every: int = 1
    issued: tuple[Issued, ...] = field(default=(), repr=False)
    agreement: tuple[Issued, ...] = field(default=(), repr=False)
    connections: int = 0
    members: dict[str, list[Sequence[int]]] = field(default_factory=dict, repr=False)


def measure(
    hooks: Sequence[str | Callable[..., Any]],
    *,
    elements: int,
    world_size: int,
    bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB,
    nodes: int | None = None,
    connections: int = 1,
) -> list[Measured]:
    """What each hook computes and sends.

    Args:
        hooks: expressions, as ``train`` takes them, or hooks, of which copies are used.
        elements: of the model.
        world_size: ranks.
        bucket_cap_mb: of the buckets, as :func:`torch_commhook.planning.bucket_sizes` takes them.
        nodes: that the ranks are on, as many consecutive ones on each; None where nobody asks.
        connections: as :func:`torch_commhook.attach` takes them.

    Returns:
        One for each hook, in the same order. ``none``, plain DDP, is an all-reduce of float32.

    Raises:
        HookExpressionError: a text that is no hook.
        HookError: a hook that fails when it is run, or cannot be copied.
        TypeError: an object that is no hook.
    """
    bucket = -(-elements // len(bucket_sizes(elements, bucket_cap_mb)))
    agreement = tuple(agreement_of(world_size))
    found = []
    for given in hooks:
        hook = _parsed(given)
        text = given if isinstance(given, str) else _name(given)
        try:
            if not isinstance(given, str):
                hook = copy.deepcopy(given)
            inner, steps, around = unwrap_hook(hook)
            sends = _sends(inner, elements, world_size, nodes)
            computed = _compute_seconds(inner, elements, bucket, world_size)
            computed += sum(measure_pass(one, elements, bucket) for one in around)
        except Exception as error:  # a hook may be a user's, and raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())
            if "attach(model, hook)" in said:
                said = "it asks for more of a model than its size"
            raise HookError(f"the hook {text!r} can't be planned: {said}") from error
        overlaps = not getattr(hook, "keeps_ranks_apart", False)
        found.append(
            Measured(
                text,
                sends.bytes_sent / steps,
                computed / steps,
                overlaps,
                steps,
                sends.issued,
                agreement,
                count_connections(sends.hook, sends.issued, world_size, connections),
                sends.members,
            )
        )
    return found


def _parsed(given: str | Callable[..., Any]) -> Any:
    """The hook of an expression, or the given one."""
    if isinstance(given, str):
        hook = parse_hook(given)
        return library_hooks.allreduce() if hook is None else hook
    check_hook(given)
    return given


def _name(hook: Callable[..., Any]) -> str:
    return str(hook) if isinstance(hook, library_hooks.Hook) else hook_name(hook)


def _sends(hook: Any, elements: int, world_size: int, nodes: int | None) -> Formula:
    """What a hook sends: by formulas among many ranks or on nodes, else by simulation."""

    def simulated(ranks: int) -> tuple[float, tuple[Issued, ...]]:
        return record_traffic(hook, elements, ranks)

    found = None
    if nodes is not None:
        with_ranks_per_node(hook, world_size // nodes)
    if nodes is not None or world_size > MOST_SIMULATED:
        found = formula_of(hook, elements, world_size, nodes or 1, simulated)
    if found is None:
        return Formula(*simulated(world_size), {}, hook)
    return found if nodes is not None else replace(found, members={})


def _compute_seconds(hook: Any, elements: int, bucket: int, world_size: int) -> float:
    """What a hook computes: a hierarchical one adds up exactly, and encodes a share."""
    parts, encoding = encoding_of(hook, world_size)
    computed = measure_seconds(encoding, -(-elements // parts), -(-bucket // parts))
    return computed + (measure_pass(_add_up, elements, bucket) if parts > 1 else 0.0)


def _add_up(gradient: Any) -> None:
    """What a rank of a node does beside: gathers gradients, adds up its share, writes results."""
    gradient.copy_(gradient.clone() + gradient)
