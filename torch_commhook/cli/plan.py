"""``commhook plan``: what each hook would cost over a link, and whether it pays.

The command measures a hook's computing on this machine, on a bucket of random gradients in square
matrices. It counts the hook's bytes with ranks that are threads. Among more than 16 ranks, or on
several nodes, the bytes of most hooks follow from formulas instead. From both it computes a step's
time. A third of the step's computing is the forward, and the rest is the backward, which fills the
buckets in turn. Hooks compute on the same processor. A bucket's messages go on the wire once it is
full, and wait for one another as Gloo's do.

A hook that changes after some steps is planned as it is then. A hook that keeps ranks apart for
some steps is planned as one that sends after the last of them and hides nothing behind computing.
The figures of its steps are means. ``fragments=`` and ``delay=`` of ``local_sgd`` change nothing in
the plan, although they hide the exchange behind computing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch_commhook.cli import plan_sharded
from torch_commhook.cli.hook_cost import (
    PAYLOAD,
    HookError,
    measure_pass,
    measure_seconds,
    record_traffic,
    unwrap_hook,
)
from torch_commhook.cli.plan_formulas import (
    MOST_SIMULATED,
    Formula,
    bytes_out_of_node,
    count_connections,
    count_messages,
    encoding_of,
    formula_of,
    with_ranks_per_node,
)
from torch_commhook.cli.plan_parser import BUCKET_CAPS_MB, build_parser
from torch_commhook.cli.plan_step import agreement_of, round_trips, through_seconds
from torch_commhook.cli.report import format_bytes
from torch_commhook.cli.sharded_options import ShardedOptionError, resolve_sharded
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import HookExpressionError, parse_hook

if TYPE_CHECKING:
    from torch_commhook.process_group.simulated.link import Issued

#: Those that take part in reduce-scatters.
DEFAULT_SHARD_HOOKS = (
    "allreduce()",
    "cast()",
    "blockwise()",
    "fp8()",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(sign())",
)
DEFAULT_HOOKS = (
    "allreduce()",
    "cast()",
    "blockwise()",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(sign())",
    "error_feedback(topk(0.01))",
    "error_feedback(powersgd(rank=2))",
)
_BUCKET_NUMBER_BYTES = 4  # gradients in float32
_MOST_BUCKETS = 10_000  # past which one more makes no difference
_CALLS = ("issued", "agreement", "members")
#: A backward computes the products of a forward twice over.
_FORWARD = 1 / 3


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
        members: as in :class:`torch_commhook.cli.plan_formulas.Formula`; empty where nobody has
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


@dataclass(frozen=True, kw_only=True)
class Cost(Measured):
    """What a hook costs in one step.

    Attributes:
        wire_seconds: that the bytes take on the link, with the headers of their packets.
        round_trips: that follow one another in a step.
        messages: that a rank sends.
        node_bytes: that a node's ranks send to other nodes; None where that is not known.
        step_seconds: with what the step computes anyway, as far as that does not hide the rest.
        ratio: of that to the step of the first hook.
    """

    wire_seconds: float
    round_trips: float
    messages: float
    node_bytes: float | None
    step_seconds: float
    ratio: float


def measure(
    hooks: Sequence[str],
    *,
    elements: int,
    world_size: int,
    bucket_cap_mb: Sequence[float] = BUCKET_CAPS_MB,
    nodes: int | None = None,
    connections: int = 1,
) -> list[Measured]:
    """What each hook computes and sends.

    Args:
        hooks: as ``train`` takes them.
        elements: of the model.
        world_size: ranks.
        bucket_cap_mb: of the buckets, as :func:`bucket_sizes` takes them.
        nodes: that the ranks are on, as many consecutive ones on each; None where nobody asks.
        connections: as :func:`torch_commhook.attach` takes them.

    Raises:
        HookExpressionError: what is no hook.
        HookError: one that fails when it is run.
    """
    bucket = -(-elements // len(bucket_sizes(elements, bucket_cap_mb)))
    agreement = tuple(agreement_of(world_size))
    found = []
    for text in hooks:
        hook = parse_hook(text)
        if hook is None:
            raise HookExpressionError(f"the hook {text!r} is plain DDP: write allreduce()")
        try:
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


def plan(
    measured: Sequence[Measured],
    *,
    bits_per_second: float,
    compute_seconds: float = 0.0,
    buckets: Sequence[int] = (1,),
    delay_seconds: float = 0.0,
) -> list[Cost]:
    """What each hook would cost; the first is what the others are compared with.

    Args:
        measured: what :func:`measure` gives.
        bits_per_second: of each rank's link, each way.
        compute_seconds: of a step without communication.
        buckets: their sizes, as :func:`bucket_sizes` says.
        delay_seconds: of a message, one way.
    """
    costs: list[Cost] = []
    shares = [size / sum(buckets) for size in buckets]
    for each in measured:
        step = _step_seconds(each, compute_seconds, bits_per_second, buckets, delay_seconds)
        first = costs[0].step_seconds if costs else step
        costs.append(
            Cost(
                **vars(each),
                wire_seconds=each.bytes_sent * 8 / bits_per_second / PAYLOAD,
                round_trips=round_trips(each.issued, each.agreement, len(buckets)) / each.every,
                messages=count_messages(each.issued, each.agreement, shares) / each.every,
                node_bytes=_node_bytes(each, shares),
                step_seconds=step,
                ratio=step / first if first else 1.0,
            )
        )
    return costs


def _node_bytes(measured: Measured, shares: Sequence[float]) -> float | None:
    if not measured.members:
        return None
    return bytes_out_of_node(measured.issued, measured.members, shares) / measured.every


def bucket_sizes(elements: int, bucket_cap_mb: Sequence[float]) -> list[int]:
    """Elements of each bucket of a model whose gradients are float32, in the order of a backward.

    Args:
        elements: of the model.
        bucket_cap_mb: of each bucket, in MiB; the last is for all that follow.
    """
    caps = [max(1, int(cap * (1 << 20)) // _BUCKET_NUMBER_BYTES) for cap in bucket_cap_mb]
    sizes: list[int] = []
    left = elements
    while left > 0:
        size = min(left, caps[min(len(sizes), len(caps) - 1)])
        if len(sizes) >= _MOST_BUCKETS:
            size = left
        sizes.append(size)
        left -= size
    return sizes


def _step_seconds(
    measured: Measured,
    compute: float,
    bits_per_second: float,
    buckets: Sequence[int],
    delay: float,
) -> float:
    """A step, in which buckets travel while the next ones are computed."""
    elements = sum(buckets)
    shares = [size / elements for size in buckets]
    ready, computed = [0.0] * len(buckets), 0.0
    if measured.overlaps:
        computed, in_backward = compute * _FORWARD, compute * (1 - _FORWARD)
        for place, share in enumerate(shares):
            computed += (in_backward + measured.compute_seconds) * share
            ready[place] = computed
    through = through_seconds(
        measured.issued,
        measured.agreement,
        ready=ready,
        shares=shares,
        computed=computed,
        bits_per_second=bits_per_second * PAYLOAD,
        latency=delay,
    )
    if measured.overlaps:
        return through
    return compute + measured.compute_seconds + through / measured.every


# ---- the command ---------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; see :func:`torch_commhook.cli.main.main`."""
    options = build_parser().parse_args(argv)
    import torch

    torch.set_num_threads(options.threads)
    try:
        layout = _layout(options)
        costs: Sequence[Cost] | Sequence[plan_sharded.Cost]
        if layout is None:
            costs, table = _of_ddp(options)
        else:
            costs, table = _of_shards(options, layout)
    except (HookExpressionError, HookError, ShardedOptionError) as error:
        print(f"commhook plan: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps([_plain(cost) for cost in costs], indent=2) if options.json else table)
    return 0


def _plain(cost: Cost | plan_sharded.Cost) -> dict[str, Any]:
    """For JSON, without the single calls."""
    return {name: value for name, value in asdict(cost).items() if name not in _CALLS}


def _layout(options: argparse.Namespace) -> plan_sharded.Layout | None:
    """Of the model; None where each rank has all of it.

    Raises:
        ShardedOptionError: options that are wrong together.
    """
    named = ("bucket_cap_mb", "shards", "shard_hook", "weights")
    given = {name: getattr(options, name) for name in named}
    given = {name: value for name, value in given.items() if value is not None}
    config = resolve_sharded(
        TrainConfig(parallel=options.parallel, ranks=options.world, **given), given
    )
    if config.parallel == "ddp":
        if options.nodes is not None and options.world % options.nodes:
            raise ShardedOptionError(
                f"argument --nodes: must divide the {options.world} ranks, got {options.nodes}"
            )
        return None
    for name in ("delay", "nodes"):
        if getattr(options, name):
            raise ShardedOptionError(f"argument --{name}: is for --parallel ddp alone")
    if options.connections > 1:
        raise ShardedOptionError("argument --connections: is for --parallel ddp alone")
    shards = config.shard_ranks
    after = {"yes": shards, "no": 1}.get(options.reshard_after_forward)
    if after is None:
        after = int(options.reshard_after_forward)
        if shards % after:
            raise ShardedOptionError(
                f"argument --reshard-after-forward: must be yes, no or a number that divides the "
                f"{shards} shards, got {after}"
            )
    replicas = config.replicas if config.parallel == "hsdp" else None
    return plan_sharded.Layout(options.model_size, shards, replicas, after)


def _of_ddp(options: argparse.Namespace) -> tuple[list[Cost], str]:
    caps = options.bucket_cap_mb or BUCKET_CAPS_MB
    costs = plan(
        measure(
            options.hooks or DEFAULT_HOOKS,
            elements=options.model_size,
            world_size=options.world,
            bucket_cap_mb=caps,
            nodes=options.nodes,
            connections=options.connections,
        ),
        bits_per_second=options.link,
        compute_seconds=options.compute_ms / 1e3,
        buckets=bucket_sizes(options.model_size, caps),
        delay_seconds=options.delay / 1e3,
    )
    return costs, _table(costs, options, caps)


def _of_shards(
    options: argparse.Namespace, layout: plan_sharded.Layout
) -> tuple[list[plan_sharded.Cost], str]:
    default = DEFAULT_HOOKS if layout.replicas is not None else DEFAULT_SHARD_HOOKS
    costs = plan_sharded.plan_sharded(
        plan_sharded.measure_sharded(
            options.hooks or default,
            layout,
            shard_hook=options.shard_hook,
            weights=options.weights,
        ),
        layout=layout,
        bits_per_second=options.link,
        inner_bits_per_second=options.inner_link or options.link,
        compute_seconds=options.compute_ms / 1e3,
    )
    return costs, _sharded_table(costs, options, layout)


def _sharded_table(
    costs: Sequence[plan_sharded.Cost], options: argparse.Namespace, layout: plan_sharded.Layout
) -> str:
    has_replicas = layout.replicas is not None
    header = ["hook", "reduce-scatter", "gathers, forward", "backward"]
    header += ["between replicas"] * has_replicas
    header += ["wire", "computing", "step", f"x {costs[0].hook}", "pays"]
    rows = [
        [
            cost.hook,
            format_bytes(cost.scattered_bytes),
            format_bytes(cost.forward_bytes),
            format_bytes(cost.backward_bytes),
            *[format_bytes(cost.reduced_bytes)] * has_replicas,
            *_times(cost.wire_seconds, cost.compute_seconds, cost.step_seconds),
            f"{cost.ratio:.2f}",
            _pays(cost.ratio, is_first=cost is costs[0]),
        ]
        for cost in costs
    ]
    spread = f"parameters sharded over {layout.shards} ranks"
    if has_replicas:
        spread = f"{layout.replicas} replicas, {spread} each"
    if layout.after_forward == layout.shards:
        spread += " and freed after the forward"
    elif layout.after_forward == 1:
        spread += " and kept after the forward"
    else:
        spread += f", over {layout.after_forward} after the forward"
    link = f"{options.link / 1e6:g} Mbit/s each way"
    if options.inner_link is not None:
        link += f" ({options.inner_link / 1e6:g} within)"
    what = (
        f"{options.model_size / 1e6:g} M elements, {options.world} ranks, {spread}, {link}, a step "
        f"of {options.compute_ms:g} ms without communication, {_threads(options)}"
    )
    return "\n".join([what, *_aligned(header, rows), *_memory_notes(costs, layout)])


def _memory_notes(costs: Sequence[plan_sharded.Cost], layout: plan_sharded.Layout) -> list[str]:
    """What error feedback costs in memory, in words."""
    of_all = "what it has lost of the gradients of all shards"
    of_shard = "what it has lost of the gradients of the rank's own shard"
    notes: dict[str, None] = {}  # once each, in order
    for cost in costs:
        if cost.error_bytes:
            lost = of_all if layout.replicas is None else of_shard
            hook = cost.hook.partition(", shard_hook=")[0].partition(", weights=")[0]
            notes[f"{hook} remembers {format_bytes(cost.error_bytes)} on each rank: {lost}"] = None
    shard_error = max(cost.shard_error_bytes for cost in costs)
    if shard_error:
        notes[f"shard_hook remembers {format_bytes(shard_error)} on each rank: {of_all}"] = None
    return list(notes)


def _table(
    costs: Sequence[Cost], options: argparse.Namespace, bucket_cap_mb: Sequence[float]
) -> str:
    on_nodes = options.nodes is not None
    has_delay = options.delay > 0
    is_far = has_delay or on_nodes
    has_connections = on_nodes or options.connections > 1
    header = ["hook", "sent per step", *["out of a node", "messages"] * on_nodes]
    header += [*["connections"] * has_connections, *["round trips"] * is_far]
    header += ["wire", "computing", "step", f"x {costs[0].hook}", "pays"]
    rows = [
        (
            cost.hook,
            format_bytes(cost.bytes_sent),
            *[_bytes_or_unknown(cost.node_bytes), f"{cost.messages:.4g}"] * on_nodes,
            *[str(cost.connections)] * has_connections,
            *[f"{cost.round_trips:.3g}"] * is_far,
            *_times(cost.wire_seconds, cost.compute_seconds, cost.step_seconds),
            f"{cost.ratio:.2f}",
            _pays(cost.ratio, is_first=cost is costs[0]),
        )
        for cost in costs
    ]
    link = f"{options.link / 1e6:g} Mbit/s" + f" and {options.delay:g} ms" * has_delay
    ranks = f"{options.world} ranks" + f" on {options.nodes} nodes" * on_nodes
    what = (
        f"{options.model_size / 1e6:g} M elements, {ranks}, "
        f"{link} each way, a step of {options.compute_ms:g} ms without "
        f"communication, buckets of {' '.join(f'{cap:g}' for cap in bucket_cap_mb)} MiB, "
        f"{_threads(options)}"
    )
    return "\n".join([what, *_aligned(header, rows)])


def _bytes_or_unknown(count: float | None) -> str:
    return "?" if count is None else format_bytes(count)


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(line))
        for line in (list(zip(row, widths, strict=True)) for row in (header, *rows))
    ]


def _times(*seconds: float) -> list[str]:
    return list(map(_seconds, seconds))


def _pays(ratio: float, *, is_first: bool) -> str:
    return "" if is_first else "yes" if ratio < 0.95 else "no"


def _threads(options: argparse.Namespace) -> str:
    return f"{options.threads} thread{'s' if options.threads > 1 else ''}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
