"""Formats the answer of ``plan``: the advice, the question, a table, and warnings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from torch_commhook.cli.formatting import align_columns
from torch_commhook.cli.plan_advice import Advice, Loss, judge_row, own_text
from torch_commhook.cli.plan_numbers import format_count, format_rate, format_seconds
from torch_commhook.cli.plan_sharded import Cost as ShardedCost
from torch_commhook.cli.plan_sharded import Layout
from torch_commhook.cli.report import format_bytes
from torch_commhook.planning import Cost, Model
from torch_commhook.wording import pluralize

_WIDTH = 100
#: A hook pays if its step takes less than this share of the plain step.
_LEAST_RATIO = 0.95


@dataclass(frozen=True)
class Question:
    """The training and the link that ``plan`` predicts steps for.

    Attributes:
        model: the sizes of the model.
        name: the name of the model; None if it has none.
        world: the number of ranks.
        nodes: the number of nodes; None if not given.
        connections: the ``connections`` of ``attach``.
        bits_per_second: the rate of each rank's link, each way.
        delay_seconds: the delay of a message, one way.
        link_file: the file that gives the link; None if there is none.
        compute_seconds: the time of a step without communication.
        is_measured: whether ``plan`` has measured this time.
        threads: the threads of a rank.
        optimizer: ``adamw`` or ``sgd``.
    """

    model: Model
    name: str | None
    world: int
    nodes: int | None
    connections: int
    bits_per_second: float
    delay_seconds: float
    link_file: str | None
    compute_seconds: float
    is_measured: bool
    threads: int
    optimizer: str

    def sentence(self, spread: str = "", link: str = "", step: str = "") -> str:
        """The question in one sentence.

        Args:
            spread: the distribution of the model, after the ranks.
            link: more about the link, after its rate.
            step: more about the step, after its time.
        """
        ranks = f"{self.world} ranks" + (f" on {self.nodes} nodes" if self.nodes else "")
        name = f" ({self.name})" if self.name else ""
        wire = format_rate(self.bits_per_second)
        if self.delay_seconds:
            wire += f" and {self.delay_seconds * 1e3:.3g} ms"
        source = f" ({self.link_file})" if self.link_file else ""
        measured = ", measured here" if self.is_measured else ""
        threads = pluralize(self.threads, "thread")
        parameters = "parameter" if self.model.elements == 1 else "parameters"
        return (
            f"{format_count(self.model.elements)} {parameters}{name}, {ranks}{spread}, "
            f"{wire} each way{link}{source}, a step of {format_seconds(self.compute_seconds)} "
            f"without communication{measured}{step}, {self.optimizer_name}, {threads}"
        )

    @property
    def optimizer_name(self) -> str:
        """The name of the optimizer's class in PyTorch."""
        return {"adamw": "AdamW", "sgd": "SGD"}[self.optimizer]


def text_of(advice: Advice, question: str, table: Sequence[str]) -> str:
    """The text that ``plan`` prints.

    Args:
        advice: the recommended hook, and warnings.
        question: the question in one sentence.
        table: the lines of the table.
    """
    warnings = [_wrapped(f"Warning: {each}") for each in advice.warnings]
    return "\n".join([_wrapped(advice.reason), "", question, *table, *warnings])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


# ---- tables --------------------------------------------------------------------------------------


def table_of(costs: Sequence[Cost], question: Question) -> list[str]:
    """The lines of the table for a model under DDP."""
    on_nodes = question.nodes is not None
    is_far = question.delay_seconds > 0 or on_nodes
    has_connections = on_nodes or question.connections > 1
    header = ["hook", "sent per step", *["out of a node", "messages"] * on_nodes]
    header += [*["connections"] * has_connections, *["round trips"] * is_far]
    header += ["wire", "computing", "step", "x plain", "pays"]
    rows = [
        (
            cost.hook,
            format_bytes(cost.bytes_sent),
            *[_bytes_or_unknown(cost.node_bytes), f"{cost.messages:.4g}"] * on_nodes,
            *[str(cost.connections)] * has_connections,
            *[f"{cost.round_trips:.3g}"] * is_far,
            *_times(cost.wire_seconds, cost.compute_seconds, cost.step_seconds),
            f"{cost.ratio:.2f}",
            _pays(cost, question.optimizer, is_first=cost is costs[0]),
        )
        for cost in costs
    ]
    return align_columns(header, rows)


def sharded_table_of(costs: Sequence[ShardedCost], layout: Layout, optimizer: str) -> list[str]:
    """The lines of the table for a sharded model, and notes on the memory of error feedback."""
    has_replicas = layout.replicas is not None
    header = ["hook", "reduce-scatter", "gathers, forward", "backward"]
    header += ["between replicas"] * has_replicas
    header += ["wire", "computing", "step", "x plain", "pays"]
    rows = [
        [
            cost.hook,
            format_bytes(cost.scattered_bytes),
            format_bytes(cost.forward_bytes),
            format_bytes(cost.backward_bytes),
            *[format_bytes(cost.reduced_bytes)] * has_replicas,
            *_times(cost.wire_seconds, cost.compute_seconds, cost.step_seconds),
            f"{cost.ratio:.2f}",
            _pays(cost, optimizer, is_first=cost is costs[0]),
        ]
        for cost in costs
    ]
    return [*align_columns(header, rows), *_memory_notes(costs, layout)]


def spread_of(layout: Layout) -> str:
    """Describe the distribution of a sharded model over the ranks."""
    spread = f"parameters sharded over {layout.shards} ranks"
    if layout.replicas is not None:
        spread = f"{layout.replicas} replicas, {spread} each"
    if layout.after_forward == layout.shards:
        return f", {spread} and freed after the forward"
    if layout.after_forward == 1:
        return f", {spread} and kept after the forward"
    return f", {spread}, over {layout.after_forward} after the forward"


def _memory_notes(costs: Sequence[ShardedCost], layout: Layout) -> list[str]:
    """Sentences on the memory of error feedback."""
    of_all, of_shard = "of all shards", "of the rank's own shard"
    notes = [
        _memory_note(
            own_text(cost.hook), cost.error_bytes, of_all if layout.replicas is None else of_shard
        )
        for cost in costs
        if cost.error_bytes
    ]
    shard_error = max(cost.shard_error_bytes for cost in costs)
    if shard_error:
        notes.append(_memory_note("shard_hook", shard_error, of_all))
    return list(dict.fromkeys(notes))


def _memory_note(hook: str, count: float, shards: str) -> str:
    return (
        f"{hook} keeps {format_bytes(count)} of error memory on each rank, for the gradients "
        f"{shards}"
    )


def _bytes_or_unknown(count: float | None) -> str:
    return "?" if count is None else format_bytes(count)


def _times(*seconds: float) -> list[str]:
    return list(map(format_seconds, seconds))


def _pays(cost: Cost | ShardedCost, optimizer: str, *, is_first: bool) -> str:
    """The cell that says whether a hook makes the step shorter, or hurts the loss."""
    if is_first:
        return ""
    if judge_row(cost.hook, optimizer).loss is Loss.HURTS:
        return "hurts"
    return "yes" if cost.ratio < _LEAST_RATIO else "no"
