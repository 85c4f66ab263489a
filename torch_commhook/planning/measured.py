"""Predicts steps from measurements: of the hooks in this process, or of ``bench``."""

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
from torch_commhook.planning.formulas import (
    MODEL,
    MOST_SIMULATED,
    Calls,
    Members,
    Work,
    bytes_out_of_node,
    count_connections,
    count_messages,
    encoding_of,
    formula_of,
    with_ranks_per_node,
    without_memory,
)
from torch_commhook.planning.link_file import LinkFile
from torch_commhook.planning.model import (
    BUCKET_CAPS_MB,
    MOST_MEASURED,
    HookError,
    Model,
    Parameter,
    bucket_sizes,
    measure_pass,
    measure_seconds,
    record_traffic,
    unwrap_hook,
)
from torch_commhook.planning.wire import (
    agreement_of,
    round_trips,
    scaled,
    through_seconds,
)
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.step.link import PAYLOAD
from torch_commhook.wording import warn_user

# ---- measures the computing time and the traffic of hooks in a step ------------------------------
#
# The computing time is measured on this machine, on a bucket of random gradients. These have the
# shapes of the model's parameters, or are square matrices if only the model's size is known. The
# bytes are counted with ranks that are threads. Formulas give the bytes of ``powersgd`` from the
# parameters' shapes, and those of most hooks among more than 16 ranks or on several nodes.
#
# If a hook changes after some steps, the figures describe it after the change. The figures of a
# hook that keeps ranks apart for some steps are means over these steps.


Hook = str | Callable[..., Any]


@dataclass(frozen=True)
class Measured:
    """The work of a hook in one step, independently of the link.

    Attributes:
        hook: the hook's text.
        bytes_sent: the bytes that each rank sends.
        compute_seconds: the time of gathering gradients, encoding, adding up, decoding and writing
            results.
        overlaps: whether it works while the backward computes.
        every: the number of steps from one exchange to the next.
        chains: the calls that a rank issues in an exchange, with all gradients in one bucket: a
            chain for each hook of a ``policy``, else one. In a chain, a call waits for the one
            before it.
        agreement: the calls that a rank issues at the end of a step.
        connections: the number of a rank's connections that attaching the hook adds.
        members: as in :class:`torch_commhook.planning.formulas.Work`; empty if the number of nodes
            is not given, or the hook has no formulas.
        fragments: the number of parts of the model that take turns in ``every`` steps.
        delay: the number of steps during which computing hides the exchange of a part.
        is_ddp: whether this is DDP without a hook. Its buckets wait for one another.
    """

    hook: str
    bytes_sent: float
    compute_seconds: float
    overlaps: bool = True
    every: int = 1
    chains: tuple[Calls, ...] = field(default=(), repr=False)
    agreement: Calls = field(default=(), repr=False)
    connections: int = 0
    members: Members = field(default_factory=dict, repr=False)
    fragments: int = 1
    delay: int = 0
    is_ddp: bool = False

    @property
    def issued(self) -> Calls:
        """Deprecated: the first of :attr:`chains`."""
        warn_user("Measured.issued is deprecated: use chains[0]", DeprecationWarning)
        return self.chains[0] if self.chains else ()

    @property
    def beside(self) -> tuple[Calls, ...]:
        """Deprecated: the further ones of :attr:`chains`."""
        warn_user("Measured.beside is deprecated: use chains[1:]", DeprecationWarning)
        return self.chains[1:]


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
    """Measure the computing time and the traffic of each hook.

    Args:
        hooks: hooks, or their text as for ``train``. Copies of hooks run.
        elements: the number of the model's elements, if nothing else is known of it.
        model: the model's parameters, instead of ``elements``.
        world_size: the number of ranks.
        bucket_cap_mb: the buckets' capacities, as for :meth:`Model.bucket_sizes`.
        nodes: the number of nodes, with equally many consecutive ranks each; None if the traffic
            between nodes does not matter.
        connections: as for :func:`torch_commhook.attach`.
        known_seconds: known computing times of a step, by the hook's text; others are measured.
        device: the device on which hooks compute.

    Returns:
        The figures of each hook, in the same order. ``none`` is DDP's own all-reduce of float32,
        with the computing time of ``allreduce()``.

    Raises:
        HookExpressionError: a text is not a hook.
        HookError: a hook fails, cannot be copied, chooses one of several hooks, or needs names of
            parameters that ``model`` lacks.
        TypeError: an object is not a hook; both or neither of ``elements`` and ``model`` are given.
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
        if isinstance(given, str):
            text, hook = given, parse_hook(given)
        else:
            check_hook(given)
            hook = given
            text = str(given) if isinstance(given, library_hooks.Hook) else hook_name(given)
        is_ddp = hook is None
        if is_ddp:
            hook = library_hooks.allreduce()
        if getattr(hook, "chooses", False):
            raise HookError(
                f"the hook {text!r} can't be planned: it chooses one of several hooks in the first "
                "steps of a training; plan these hooks instead"
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
            unknown = "it needs the names of parameters, which are not known"
            raise HookError.of(text, error, unknown) from error
        found.append(
            Measured(
                hook=text,
                bytes_sent=work.bytes_sent / outer.every,
                compute_seconds=computed,
                overlaps=not getattr(hook, "keeps_ranks_apart", False),
                every=outer.every,
                chains=work.chains,
                agreement=() if is_ddp else agreement,
                connections=0 if is_ddp else added,
                members=work.members,
                fragments=outer.fragments,
                delay=outer.delay,
                is_ddp=is_ddp,
            )
        )
    return found


def _work(hook: Any, model: Model, world_size: int, nodes: int | None) -> Work:
    """The traffic of a hook, by a formula if one applies, else by simulation.

    Formulas apply among many ranks, on nodes, and if the traffic depends on parameters' shapes.
    """
    if isinstance(hook, library_hooks.policy):
        parts = [_work(each, part, world_size, nodes) for each, part in _parts_of(hook, model)]
        chains = tuple(_on_model(chain) for part in parts for chain in part.chains)
        members: Members = {}
        if all(part.members for part in parts):  # each has a formula
            members = {name: each for part in parts for name, each in part.members.items()}
        return Work(sum(part.bytes_sent for part in parts), chains, members, hook)
    if nodes is not None:
        with_ranks_per_node(hook, world_size // nodes)
    goes_by_shape = isinstance(without_memory(hook), library_hooks.powersgd)
    if nodes is not None or world_size > MOST_SIMULATED or goes_by_shape:
        found = formula_of(hook, model, world_size, nodes or 1)
        if found is not None:
            return found if nodes is not None else replace(found, members={})
    sent, issued = record_traffic(hook, model.elements, world_size)
    return Work(sent, (issued,), {}, hook)


def _parts_of(hook: library_hooks.policy, model: Model) -> list[tuple[Any, Model]]:
    """The hooks of a policy that have parameters, each with a model of its parameters."""
    members: dict[int, tuple[Any, list[Parameter]]] = {}
    named = [
        (each, torch.empty(each.shape, dtype=torch.float32, device="meta"))
        for each in model.listed()
    ]
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


def _on_model(chain: Calls) -> Calls:
    """The calls with a common name for the group of all ranks; simulations give it other names."""
    groups = {each.group for each in chain}
    return tuple(replace(each, group=MODEL) if len(groups) == 1 else each for each in chain)


def _all(chains: Sequence[Calls]) -> list[Issued]:
    return [each for chain in chains for each in chain]


def _compute_seconds(
    hook: Any, model: Model, bucket: int, world_size: int, device: torch.device | str
) -> float:
    """Seconds that a hook computes for all gradients, in buckets of ``bucket`` elements.

    A hierarchical hook adds up the gradients of a node, and encodes a share.
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
    """The other work of a rank of a node: gather gradients, add up its share, write results."""
    gradient.copy_(gradient.clone() + gradient)


# ---- predicts the cost of a step with a hook over a link -----------------------------------------
#
# A third of the step's computing is the forward. The rest is the backward, which fills the buckets
# in turn. Hooks compute on the same processor. A full bucket's messages go on the wire at once, and
# wait for one another as Gloo's do.
#
# A hook that keeps ranks apart for some steps sends after the last of them. Computing hides its
# exchange only if that continues in the background of the next steps, as with ``delay=`` of
# ``local_sgd``. The time of a step is then the mean over all steps.


#: A backward computes twice as many products as a forward.
_FORWARD = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Cost(Measured):
    """The cost of a hook in one step.

    Attributes:
        wire_seconds: the time of the bytes on the link, with the headers of their packets.
        round_trips: the number of consecutive round trips in a step, including those that computing
            hides.
        messages: the number of messages that a rank sends.
        node_bytes: the bytes that a node's ranks send to other nodes; None if unknown.
        step_seconds: the time of a step: the computing, and the communication that it does not
            hide.
        ratio: ``step_seconds`` divided by that of the first hook.
    """

    wire_seconds: float
    round_trips: float
    messages: float
    node_bytes: float | None
    step_seconds: float
    ratio: float


def plan(
    measured: Sequence[Measured],
    *,
    bits_per_second: float,
    compute_seconds: float = 0.0,
    buckets: Sequence[int] = (1,),
    delay_seconds: float = 0.0,
) -> list[Cost]:
    """The cost of each hook. The first one is the baseline of the ratios.

    Args:
        measured: the figures of :func:`measure`.
        bits_per_second: the rate of each rank's link, each way.
        compute_seconds: the time of a step without communication.
        buckets: the elements of each bucket, as from :func:`bucket_sizes`.
        delay_seconds: the delay of a message, one way.
    """
    costs: list[Cost] = []
    shares = [size / sum(buckets) for size in buckets]
    for each in measured:
        step = step_seconds(
            each,
            bits_per_second=bits_per_second,
            compute_seconds=compute_seconds,
            buckets=buckets,
            delay_seconds=delay_seconds,
        )
        first = costs[0].step_seconds if costs else step
        calls, exchanges = _all(each.chains), each.fragments / each.every  # of a step
        parts = [share / each.fragments for share in shares]
        trips = round_trips(each.chains, each.agreement, parts, is_ddp=each.is_ddp)
        messages = count_messages(calls, each.agreement, parts, is_ddp=each.is_ddp)
        node_bytes = None
        if each.members:
            node_bytes = bytes_out_of_node(calls, each.members, shares) / each.every
        costs.append(
            Cost(
                **vars(each),
                wire_seconds=each.bytes_sent * 8 / bits_per_second / PAYLOAD,
                round_trips=trips * exchanges,
                messages=messages * exchanges,
                node_bytes=node_bytes,
                step_seconds=step,
                ratio=step / first if first else 1.0,
            )
        )
    return costs


def step_seconds(
    measured: Measured,
    *,
    bits_per_second: float,
    compute_seconds: float = 0.0,
    buckets: Sequence[int] = (1,),
    delay_seconds: float = 0.0,
) -> float:
    """The time of a step in seconds. Buckets travel while the backward computes the next ones.

    The arguments are those of :func:`plan`; ``measured`` is what :func:`measure` returns.
    """
    elements = sum(buckets)
    shares = [size / elements for size in buckets]
    ready, computed = [0.0] * len(buckets), 0.0
    if measured.overlaps:
        computed, in_backward = compute_seconds * _FORWARD, compute_seconds * (1 - _FORWARD)
        for place, share in enumerate(shares):
            computed += (in_backward + measured.compute_seconds) * share
            ready[place] = computed
    through = through_seconds(
        measured.chains,
        measured.agreement,
        ready=ready,
        shares=[share / measured.fragments for share in shares],
        computed=computed,
        bits_per_second=bits_per_second * PAYLOAD,
        latency=delay_seconds,
        is_ddp=measured.is_ddp,
    )
    if measured.overlaps:
        return through
    step = compute_seconds + measured.compute_seconds
    waits = max(0.0, through - measured.delay * step)
    return step + waits * measured.fragments / measured.every


# ---- derives hooks' computing times from the steps that commhook bench measured between ranks ----


#: The largest share of a step on the wire. Above it the step says too little about computing.
_MOST_WIRE = 0.5
_HALVINGS = 20
#: A smaller model's step is mostly fixed costs, which do not grow with the model.
_LEAST_ELEMENTS = 1 << 20
#: The name of bench's row without a hook, and the key of its model's number of elements.
_ALONE, _ELEMENTS = "no communication", "elements"


def with_bench_times(
    measured: Sequence[Measured], file: LinkFile, *, elements: int, world_size: int
) -> list[Measured]:
    """The hooks with the computing times of a ``commhook bench`` file, if it fits all of them.

    The file fits a hook if it has a step of the hook among the same number of ranks, with less than
    half of the step on the wire. The hook's computing time is the one with which the planned step
    is as long as the measured one. If the file does not fit one of the hooks, all keep their times:
    ranks that share a machine slow each other, so the two kinds of times do not compare. A file of
    a model that is small, and smaller than this one, fits no hook.

    Args:
        measured: the figures of :func:`torch_commhook.planning.measure` for a model.
        file: a file of ``commhook bench``.
        elements: the number of the model's elements.
        world_size: the number of its ranks.
    """
    there = file.machine.get(_ELEMENTS)
    if isinstance(there, bool) or not isinstance(there, (int, float)) or not 1 <= there < math.inf:
        return list(measured)
    if file.link is None or file.ranks != world_size or there < min(elements, _LEAST_ELEMENTS):
        return list(measured)
    seconds = {each.hook: each.seconds for each in file.hooks}
    alone = seconds.get(_ALONE, 0.0)
    scale = there / elements
    found = []
    for each in measured:
        took = seconds.get(each.hook)
        there_too = replace(  # the same hook on the model of the file
            each,
            bytes_sent=each.bytes_sent * scale,
            chains=tuple(scaled(chain, scale) for chain in each.chains),
        )
        own = None if took is None else _computing(there_too, took, alone, file, there)
        if own is None:
            return list(measured)
        found.append(replace(each, compute_seconds=own / scale))
    return found


def _computing(
    measured: Measured, took: float, alone: float, file: LinkFile, elements: float
) -> float | None:
    """Seconds that a hook computes in a step of ``took`` seconds; None if the step cannot tell."""
    assert file.link is not None
    link, buckets = file.link, bucket_sizes(round(elements))

    def planned(seconds: float) -> float:
        return step_seconds(
            replace(measured, compute_seconds=seconds),
            bits_per_second=link.bits_per_second,
            compute_seconds=alone,
            buckets=buckets,
            delay_seconds=link.delay_seconds,
        )

    if planned(0.0) - alone > _MOST_WIRE * took or planned(0.0) > took:
        return None
    least, most = 0.0, took
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if planned(middle) < took else (least, middle)
    return (least + most) / 2
