"""``plan``: recommends a hook for a link, and predicts the time of a step with each hook.

:mod:`torch_commhook.planning` measures the hooks and predicts the steps.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torch_commhook.cli import plan_advice
from torch_commhook.cli.option_types import OptionError, of_option
from torch_commhook.cli.outputs import check_picture
from torch_commhook.cli.plan_advice import (
    Advice,
    Layout,
    Loss,
    Row,
    advise,
    judge_row,
    own_text,
)
from torch_commhook.cli.plan_advice import Cost as ShardedCost
from torch_commhook.cli.plan_parser import (
    ModelError,
    PlanOptions,
    Subject,
    format_count,
    format_rate,
    format_seconds,
    model_of_factory,
    model_of_shapes,
    parse_options,
    train_transformer,
)
from torch_commhook.cli.report import format_bytes, line_styles
from torch_commhook.cli.train_config import (
    DEFAULT_HOOKS,
    DEFAULT_REPLICA_HOOKS,
    DEFAULT_SHARD_HOOKS,
    TrainConfig,
    resolve_sharded,
)
from torch_commhook.hooks import allreduce
from torch_commhook.hooks.expressions import HookExpressionError, is_file_reference, parse_hook
from torch_commhook.planning import BUCKET_CAPS_MB, Cost, HookError, Model, measure, plan
from torch_commhook.planning.measured import with_bench_times
from torch_commhook.wording import align_columns, pluralize

# ---- draws the time of a step with each hook over links of different rates -----------------------


#: The rates in bits per second: 10 Mbit/s to 100 Gbit/s, two in each factor of ten.
RATES = (*(base * 10**power for power in range(7, 11) for base in (1, 3)), 10**11)
_LABEL_CHARACTERS = 90


def draw_rates(
    path: Path,
    seconds: Mapping[str, Sequence[float]],
    *,
    asked: float,
    title: str,
) -> None:
    """Write a PNG with a line for each hook, and a vertical line at the rate ``asked``.

    ``seconds`` has the time of a step with each hook, at each of :data:`RATES`.
    """
    from matplotlib.figure import Figure  # unlike pyplot, it needs no display
    from matplotlib.ticker import LogLocator, NullFormatter

    labels = ["\n".join(textwrap.wrap(hook, _LABEL_CHARACTERS)) for hook in seconds]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure = Figure(figsize=(8, 5 + 0.2 * lines), layout="constrained")
    axes: Any = figure.subplots()
    for label, times, style in zip(labels, seconds.values(), line_styles(), strict=False):
        axes.plot(RATES, times, label=label, marker="o", markersize=3, **style)
    axes.axvline(asked, color="0.6", linewidth=0.8, label=f"the given rate, {format_rate(asked)}")
    axes.set(xscale="log", yscale="log", xlabel="rate of the link", ylabel="step (s)")
    tens = [rate for rate in RATES if str(round(rate))[0] == "1"]
    axes.set_xticks(tens, [format_rate(rate) for rate in tens], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.set_title("\n".join(textwrap.wrap(title, _LABEL_CHARACTERS)), fontsize="medium")
    # Below the axes, where it covers no line.
    figure.legend(loc="outside lower left", fontsize="small", frameon=False)
    figure.savefig(path, format="png", dpi=110)


# ---- formats the answer of plan: the advice, the question, a table, and warnings -----------------


_WIDTH = 100
#: A hook pays if its step takes less than this share of the plain step.
_LEAST_RATIO = 0.95


@dataclass(frozen=True)
class Question:
    """The training and the link that ``plan`` predicts steps for.

    A rank's link has ``bits_per_second`` each way, perhaps from a file of ``bench``.
    ``compute_seconds`` is the time of a step without communication, given or measured.
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
        """The question in one sentence, with more about the ranks, the link and the step."""
        ranks = f"{self.world} ranks" + (f" on {self.nodes} nodes" if self.nodes else "")
        name = f" ({self.name})" if self.name else ""
        wire = format_rate(self.bits_per_second)
        if self.delay_seconds:
            wire += f" and {self.delay_seconds * 1e3:.3g} ms"
        source = f" ({self.link_file})" if self.link_file else ""
        measured = ", measured here" if self.is_measured else ""
        threads = pluralize(self.threads, "thread")
        optimizer = {"adamw": "AdamW", "sgd": "SGD"}[self.optimizer]
        parameters = "parameter" if self.model.elements == 1 else "parameters"
        return (
            f"{format_count(self.model.elements)} {parameters}{name}, {ranks}{spread}, "
            f"{wire} each way{link}{source}, a step of {format_seconds(self.compute_seconds)} "
            f"without communication{measured}{step}, {optimizer}, {threads}"
        )


def text_of(advice: Advice, question: str, table: Sequence[str]) -> str:
    """The text that ``plan`` prints: the advice, the question, the table, and warnings."""
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
    header += [*["connections"] * has_connections, *["round trips"] * is_far, *_TIMES]
    rows = [
        (
            cost.hook,
            format_bytes(cost.bytes_sent),
            *["?" if cost.node_bytes is None else format_bytes(cost.node_bytes)] * on_nodes,
            *[f"{cost.messages:.4g}"] * on_nodes,
            *[str(cost.connections)] * has_connections,
            *[f"{cost.round_trips:.3g}"] * is_far,
            *_times(cost, question.optimizer, is_first=cost is costs[0]),
        )
        for cost in costs
    ]
    return align_columns(header, rows)


def sharded_table_of(costs: Sequence[ShardedCost], layout: Layout, optimizer: str) -> list[str]:
    """The lines of the table for a sharded model, and notes on the memory of error feedback."""
    has_replicas = layout.replicas is not None
    header = ["hook", "reduce-scatter", "gathers, forward", "backward"]
    header += [*["between replicas"] * has_replicas, *_TIMES]
    rows = [
        [
            cost.hook,
            format_bytes(cost.scattered_bytes),
            format_bytes(cost.forward_bytes),
            format_bytes(cost.backward_bytes),
            *[format_bytes(cost.reduced_bytes)] * has_replicas,
            *_times(cost, optimizer, is_first=cost is costs[0]),
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
    """Sentences on the memory of error feedback, each once."""
    of_all, of_shard = "of all shards", "of the rank's own shard"
    shards = of_all if layout.replicas is None else of_shard
    memories = [(own_text(cost.hook), cost.error_bytes, shards) for cost in costs]
    memories.append(("shard_hook", max(cost.shard_error_bytes for cost in costs), of_all))
    notes = [
        f"{hook} keeps {format_bytes(count)} of error memory on each rank, for the gradients {of}"
        for hook, count, of in memories
        if count
    ]
    return list(dict.fromkeys(notes))


#: The last columns of each table.
_TIMES = ("wire", "computing", "step", "x plain", "pays")


def _times(cost: Row, optimizer: str, *, is_first: bool) -> list[str]:
    """The cells of :data:`_TIMES`. The last one says whether the hook makes the step shorter."""
    seconds = cost.wire_seconds, cost.compute_seconds, cost.step_seconds
    pays = "yes" if cost.ratio < _LEAST_RATIO else "no"
    if is_first:
        pays = ""
    elif judge_row(cost.hook, optimizer).loss is Loss.HURTS:
        pays = "hurts"
    return [*map(format_seconds, seconds), f"{cost.ratio:.2f}", pays]


# ---- plan: recommends a hook for a link, and predicts the time of a step with each hook ----------


_PLAIN = "allreduce()"
#: The fields of a cost that ``--json`` omits: the single collectives of a step.
_CALLS = ("chains", "agreement", "members")


@dataclass(frozen=True)
class _Answer:
    """The result of a plan. ``costs_at`` computes the costs over a link of another rate."""

    costs: Sequence[Row]
    advice: Advice
    question: str
    table: list[str]
    costs_at: Callable[[float], Sequence[Row]]


def main(argv: Sequence[str]) -> int:
    """Run ``plan argv``; see :func:`torch_commhook.cli.main.main`."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    try:
        if options.plot is not None:
            with of_option("--plot"):
                check_picture(options.plot)
                if not options.plot.parent.is_dir():
                    raise ValueError(f"there is no folder {options.plot.parent}")
        world = _world(options)
        subject = _subject(options)
        layout = _layout(options, world, subject)
        hooks = _hooks(options, layout)
        _announce(options, subject, hooks)
        question = _question(options, world, subject)
        if layout is None:
            answer = _of_ddp(options, question, hooks)
        else:
            answer = _of_shards(options, question, hooks, layout)
        if options.plot is not None:
            _draw(options.plot, question, answer)
    except (HookExpressionError, HookError, ModelError, OptionError) as error:
        print(f"commhook plan: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(_plain(question, answer), indent=2))
    else:
        print(text_of(answer.advice, answer.question, answer.table))
    return 0


def _plain(question: Question, answer: _Answer) -> dict[str, Any]:
    """The question and the answer as plain values, for JSON."""
    asked = asdict(question)
    del asked["model"]
    return {
        "take": answer.advice.hook,
        "reason": answer.advice.reason,
        "warnings": answer.advice.warnings,
        "elements": question.model.elements,
        **asked,
        "hooks": [
            {name: value for name, value in asdict(cost).items() if name not in _CALLS}
            for cost in answer.costs
        ],
    }


def _announce(options: PlanOptions, subject: Subject, hooks: Sequence[str]) -> None:
    """Announce the measurements on stderr, because they may take minutes."""
    measured = [pluralize(len(hooks), "hook")]
    if options.compute_ms is None:
        measured.insert(0, f"a step of {subject.name}")
    if options.shard_hook is not None:
        measured.append(f"--shard-hook {options.shard_hook}")
    if options.weights is not None:
        measured.append(f"--weights {options.weights}")
    text = f"commhook plan: measuring on this machine: {', '.join(measured)}"
    print(text, file=sys.stderr, flush=True)


# ---- the question --------------------------------------------------------------------------------


def _subject(options: PlanOptions) -> Subject:
    """The model that the options name."""
    if options.input is not None and options.model is None:
        raise OptionError("argument --input: needs --model MODULE:FACTORY")
    if options.model is not None:
        subject = model_of_factory(options.model, options.input)
    elif options.shapes is not None:
        subject = model_of_shapes(options.shapes)
    elif options.model_size is not None:
        subject = Subject(Model(options.model_size))
    else:
        subject = train_transformer()
    if options.compute_ms is None and not subject.is_runnable:
        raise OptionError(
            "argument --compute-ms: how long does a step take without communication? Give it in "
            "ms, or give --model with --input SHAPE to measure it on this machine; 0 compares the "
            "communication alone"
        )
    return subject


def _question(options: PlanOptions, world: int, subject: Subject) -> Question:
    """The question that the options ask. Measures a step of the model unless its time is given."""
    given, link = options.compute_ms, options.link.link
    return Question(
        model=subject.model,
        name=subject.name,
        world=world,
        nodes=options.nodes,
        connections=options.connections,
        bits_per_second=link.bits_per_second,
        delay_seconds=link.delay_seconds if options.delay is None else options.delay / 1e3,
        link_file=options.link.path,
        compute_seconds=(
            subject.compute_seconds(options.optimizer) if given is None else given / 1e3
        ),
        is_measured=given is None,
        threads=options.threads,
        optimizer=options.optimizer,
    )


def _world(options: PlanOptions) -> int:
    """The number of ranks: from ``--world``, the link's file or the default of ``train``."""
    file = options.link.file
    world = options.world or (TrainConfig().ranks if file is None else file.ranks)
    if world == 1:
        raise OptionError("argument --world: one rank sends nothing; give all ranks that train")
    return world


def _layout(options: PlanOptions, world: int, subject: Subject) -> plan_advice.Layout | None:
    """The layout of a sharded model; None if each rank has the whole model."""
    named = ("parallel", "bucket_cap_mb", "shards", "shard_hook", "weights")
    given = {name: getattr(options, name) for name in named}
    given = {name: value for name, value in given.items() if value is not None}
    config = resolve_sharded(TrainConfig(ranks=world, **given), given)
    if config.parallel == "ddp":
        if options.nodes is not None and world % options.nodes:
            raise OptionError(
                f"argument --nodes: must divide the {world} ranks, got {options.nodes}"
            )
        return None
    of_ddp = {
        "delay": options.delay,
        "nodes": options.nodes,
        "connections": options.connections > 1,
    }
    used = [name for name, is_given in of_ddp.items() if is_given]
    if used:
        raise OptionError(f"argument --{used[0]}: is for --parallel ddp alone")
    shards = config.shard_ranks
    after = {"yes": shards, "no": 1}.get(options.reshard_after_forward)
    if after is None:
        after = int(options.reshard_after_forward)
        if shards % after:
            raise OptionError(
                f"argument --reshard-after-forward: must be yes, no or a number that divides the "
                f"{shards} shards, got {after}"
            )
    replicas = config.replicas if config.parallel == "hsdp" else None
    return plan_advice.Layout(subject.model.elements, shards, replicas, after)


def _hooks(options: PlanOptions, layout: plan_advice.Layout | None) -> list[str]:
    """The hooks to compare, each once, the plain all-reduce first."""
    default = DEFAULT_HOOKS
    if layout is not None:
        default = DEFAULT_SHARD_HOOKS if layout.replicas is None else DEFAULT_REPLICA_HOOKS
    hooks = list(dict.fromkeys(options.hooks or default[options.optimizer]))
    plain = [text for text in hooks if _is_plain(text)] or [_PLAIN]
    return [*plain, *(text for text in hooks if text not in plain)]


def _is_plain(text: str) -> bool:
    if is_file_reference(text):  # parsing it would run the user's file
        return False
    hook = parse_hook(text)
    return hook is None or type(hook) is allreduce


# ---- the answer ----------------------------------------------------------------------------------


def _of_ddp(options: PlanOptions, question: Question, hooks: Sequence[str]) -> _Answer:
    caps = options.bucket_cap_mb or BUCKET_CAPS_MB
    measured = measure(
        hooks,
        model=question.model,
        world_size=question.world,
        bucket_cap_mb=caps,
        nodes=question.nodes,
        connections=question.connections,
    )
    if options.link.file is not None:
        measured = with_bench_times(
            measured,
            options.link.file,
            elements=question.model.elements,
            world_size=question.world,
        )

    def costs_at(rate: float) -> list[Cost]:
        return plan(
            measured,
            bits_per_second=rate,
            compute_seconds=question.compute_seconds,
            buckets=question.model.bucket_sizes(caps),
            delay_seconds=question.delay_seconds,
        )

    costs = costs_at(question.bits_per_second)
    return _Answer(
        costs,
        advise(costs, question.compute_seconds, question.optimizer),
        question.sentence(step=f", buckets of {' and then '.join(f'{cap:g}' for cap in caps)} MiB"),
        table_of(costs, question),
        costs_at,
    )


def _of_shards(
    options: PlanOptions,
    question: Question,
    hooks: Sequence[str],
    layout: plan_advice.Layout,
) -> _Answer:
    measured = plan_advice.measure_sharded(
        hooks,
        layout,
        shard_hook=options.shard_hook,
        weights=options.weights,
    )

    def costs_at(rate: float) -> list[plan_advice.Cost]:
        return plan_advice.plan_sharded(
            measured,
            layout=layout,
            bits_per_second=rate,
            inner_bits_per_second=options.inner_link or rate,
            compute_seconds=question.compute_seconds,
        )

    costs = costs_at(question.bits_per_second)
    within = "" if options.inner_link is None else f" ({format_rate(options.inner_link)} within)"
    return _Answer(
        costs,
        advise(costs, question.compute_seconds, question.optimizer),
        question.sentence(spread=spread_of(layout), link=within),
        sharded_table_of(costs, layout, question.optimizer),
        costs_at,
    )


def _draw(plot: Path, question: Question, answer: _Answer) -> None:
    at_rates = [answer.costs_at(rate) for rate in RATES]
    seconds = {
        costs[0].hook: [cost.step_seconds for cost in costs]
        for costs in zip(*at_rates, strict=True)
    }
    title = f"A step over links of different rates, otherwise as given: {answer.question}"
    try:
        draw_rates(plot, seconds, asked=question.bits_per_second, title=title)
    except OSError as error:
        raise OptionError(f"argument --plot: {plot} can't be written: {error}") from error
