"""What hooks compute and send in a step, whatever the link.

A hook's computing is measured on this machine, on a bucket of random gradients: of the shapes of
the model's parameters, or in square matrices where only the model's size is known. Its bytes are
counted with ranks that are threads. Those of ``powersgd`` follow from the parameters' shapes by
formulas. Among more than 16 ranks, or on several nodes, so do the bytes of most other hooks.

A hook that changes after some steps is measured as it is then. The figures of a hook that keeps
ranks apart for some steps are means over these steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_commhook import hooks as library_hooks
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.native.runtime import check_hook, hook_name
from torch_commhook.planning.buckets import BUCKET_CAPS_MB
from torch_commhook.planning.formulas import (
    MODEL,
    MOST_SIMULATED,
    count_connections,
    encoding_of,
    formula_of,
    with_ranks_per_node,
    without_memory,
)
from torch_commhook.planning.hook_work import (
    MOST_MEASURED,
    HookError,
    measure_pass,
    measure_seconds,
    record_traffic,
    unwrap_hook,
)
from torch_commhook.planning.model import Model, Parameter
from torch_commhook.planning.schedule import agreement_of
from torch_commhook.process_group.simulated.link import Issued

Hook = str | Callable[..., Any]
Members = dict[str, list[Sequence[int]]]


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
        beside: what it issues at the same time, a chain of calls for each further hook of a
            ``policy``.
        fragments: parts of the model that travel one by one in those steps.
        delay: steps during which a fragment travels behind computing.
        is_ddp: whether it is no hook, but DDP by itself, whose buckets wait for one another.
    """

    hook: str
    bytes_sent: float
    compute_seconds: float
    overlaps: bool = True
    every: int = 1
    issued: tuple[Issued, ...] = field(default=(), repr=False)
    agreement: tuple[Issued, ...] = field(default=(), repr=False)
    connections: int = 0
    members: Members = field(default_factory=dict, repr=False)
    beside: tuple[tuple[Issued, ...], ...] = field(default=(), repr=False)
    fragments: int = 1
    delay: int = 0
    is_ddp: bool = False

    @property
    def chains(self) -> tuple[tuple[Issued, ...], ...]:
        """All that a rank issues: calls of a chain wait for those before."""
        return (self.issued, *self.beside)


def measure(
    hooks: Sequence[Hook],
    *,
    elements: int | None = None,
    model: Model | None = None,
    world_size: int,
    bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB,
    nodes: int | None = None,
    connections: int = 1,
    known_seconds: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> list[Measured]:
    """What each hook computes and sends.

    Args:
        hooks: expressions, as ``train`` takes them, or hooks, of which copies are used.
        elements: of the model, where nothing else is known of it.
        model: its parameters; either this or ``elements``.
        world_size: ranks.
        bucket_cap_mb: of the buckets, as :meth:`Model.bucket_sizes` takes them.
        nodes: that the ranks are on, as many consecutive ones on each; None where nobody asks.
        connections: as :func:`torch_commhook.attach` takes them.
        known_seconds: that hooks compute in a step, by their text; others are measured.
        device: that hooks compute on.

    Returns:
        One for each hook, in the same order. ``none`` is DDP's own all-reduce of float32, which
        computes as ``allreduce()`` does.

    Raises:
        HookExpressionError: a text that is no hook.
        HookError: a hook that fails when it is run, cannot be copied, or asks for parameters' names
            that nobody has given.
        TypeError: an object that is no hook; both or neither of ``elements`` and ``model``.
    """
    if (elements is None) == (model is None):
        raise TypeError("measure: give either elements or model")
    if model is None:
        assert elements is not None
        model = Model(elements)
    bucket = -(-model.elements // len(model.bucket_sizes(bucket_cap_mb)))
    known = known_seconds or {}
    agreement = tuple(agreement_of(world_size))
    found = []
    for given in hooks:
        hook = _parsed(given)
        is_ddp = hook is None
        if hook is None:
            hook = library_hooks.allreduce()
        text = given if isinstance(given, str) else _name(given)
        if getattr(hook, "chooses", False):
            raise HookError(
                f"the hook {text!r} can't be planned: it chooses one of several in the first steps "
                "of a training; name these"
            )
        try:
            if not isinstance(given, str):
                hook = copy.deepcopy(given)
            outer = unwrap_hook(hook)
            work = _work(outer.hook, model, world_size, nodes)
            computed = known.get(text)
            if computed is None:
                whole = _compute_seconds(outer.hook, model, bucket, world_size, device)
                passes = sum(measure_pass(one, model.elements, bucket) for one in outer.around)
                computed = (whole + passes) / outer.every
            added = count_connections(work.hook, _all(work.chains), world_size, connections)
        except Exception as error:  # a hook may be a user's, and raise anything
            said = " ".join(f"{type(error).__name__}: {error}".split())
            if "attach(model, hook)" in said:
                said = "it asks for the names of parameters, which nobody has given"
            raise HookError(f"the hook {text!r} can't be planned: {said}") from error
        found.append(
            Measured(
                text,
                work.bytes_sent / outer.every,
                computed,
                not getattr(hook, "keeps_ranks_apart", False),
                outer.every,
                work.chains[0] if work.chains else (),
                () if is_ddp else agreement,
                0 if is_ddp else added,
                work.members,
                work.chains[1:],
                outer.fragments,
                outer.delay,
                is_ddp,
            )
        )
    return found


def _parsed(given: Hook) -> Any:
    """The hook of an expression, or the given one; None of ``none``."""
    if isinstance(given, str):
        return parse_hook(given)
    check_hook(given)
    return given


def _name(hook: Callable[..., Any]) -> str:
    return str(hook) if isinstance(hook, library_hooks.Hook) else hook_name(hook)


@dataclass(frozen=True)
class _Work:
    """What a hook does with all gradients.

    Attributes:
        bytes_sent: by the rank that sends most.
        chains: calls that it issues, those of a chain one after another.
        members: as of :class:`Measured`.
        hook: what does the work.
    """

    bytes_sent: float
    chains: tuple[tuple[Issued, ...], ...]
    members: Members
    hook: Any


def _work(hook: Any, model: Model, world_size: int, nodes: int | None) -> _Work:
    """What a hook sends: by formulas among many ranks, on nodes or by shape, else by simulation."""
    if isinstance(hook, library_hooks.policy):
        parts = [_work(each, part, world_size, nodes) for each, part in _parts_of(hook, model)]
        return _Work(
            sum(part.bytes_sent for part in parts),
            tuple(_on_model(chain) for part in parts for chain in part.chains),
            _members_of(parts),
            hook,
        )
    if nodes is not None:
        with_ranks_per_node(hook, world_size // nodes)
    goes_by_shape = isinstance(without_memory(hook), library_hooks.powersgd)
    if nodes is not None or world_size > MOST_SIMULATED or goes_by_shape:
        found = formula_of(hook, model, world_size, nodes or 1)
        if found is not None:
            members = {} if nodes is None else found.members
            return _Work(found.bytes_sent, (found.issued,), members, found.hook)
    sent, issued = record_traffic(hook, model.elements, world_size)
    return _Work(sent, (issued,), {}, hook)


def _parts_of(hook: library_hooks.policy, model: Model) -> list[tuple[Any, Model]]:
    """The hooks of a policy that have parameters, and these."""
    members: dict[int, tuple[Any, list[Parameter]]] = {}
    named = [(each, torch.empty(each.shape, device="meta")) for each in model.listed()]
    names = [(each.name, tensor) for each, tensor in named if each.name is not None]
    if len(names) == len(named):
        hook.check_parameters(names)
    for each, tensor in named:
        chosen = hook.hook_for(each.name, tensor)
        members.setdefault(id(chosen), (chosen, []))[1].append(each)
    return [
        (chosen, Model.of_parameters(parameters))
        for chosen, parameters in members.values()
        if any(each.numel for each in parameters)
    ]


def _on_model(chain: Sequence[Issued]) -> tuple[Issued, ...]:
    """Calls on one group of all ranks, which each simulation names in its own way."""
    groups = {each.group for each in chain}
    return tuple(replace(each, group=MODEL) if len(groups) == 1 else each for each in chain)


def _members_of(parts: Sequence[_Work]) -> Members:
    """Those of all parts; none where a part has no formulas."""
    if not all(part.members for part in parts):
        return {}
    return {name: members for part in parts for name, members in part.members.items()}


def _all(chains: Sequence[Sequence[Issued]]) -> list[Issued]:
    return [each for chain in chains for each in chain]


def _compute_seconds(
    hook: Any, model: Model, bucket: int, world_size: int, device: torch.device | str
) -> float:
    """What a hook computes for all gradients. A hierarchical one adds up, and encodes a share.

    Args:
        hook: as :func:`unwrap_hook` gives it.
        model: whose gradients these are.
        bucket: elements of one.
        world_size: ranks.
        device: that it computes on.
    """
    if isinstance(hook, library_hooks.policy):
        share = bucket / model.elements
        return sum(
            _compute_seconds(each, part, math.ceil(share * part.elements), world_size, device)
            for each, part in _parts_of(hook, model)
        )
    parts, encoding = encoding_of(hook, world_size)
    shapes = model.sample(min(-(-bucket // parts), MOST_MEASURED))
    computed = measure_seconds(encoding, -(-model.elements // parts), shapes, device)
    return computed + (measure_pass(_add_up, model.elements, bucket) if parts > 1 else 0.0)


def _add_up(gradient: Any) -> None:
    """What a rank of a node does beside: gathers gradients, adds up its share, writes results."""
    gradient.copy_(gradient.clone() + gradient)
