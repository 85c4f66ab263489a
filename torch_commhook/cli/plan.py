"""``commhook plan``: what each hook would cost over a link, and whether it pays.

:mod:`torch_commhook.planning` measures the hooks and computes the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch_commhook.cli import plan_sharded
from torch_commhook.cli.plan_parser import build_parser
from torch_commhook.cli.report import format_bytes
from torch_commhook.cli.sharded_options import ShardedOptionError, resolve_sharded
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks.expressions import HookExpressionError
from torch_commhook.planning import BUCKET_CAPS_MB, Cost, HookError, bucket_sizes, measure, plan

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
_CALLS = ("issued", "agreement", "members")


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
