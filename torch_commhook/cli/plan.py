"""``plan``: recommends a hook for a link, and predicts the time of a step with each hook.

:mod:`torch_commhook.planning` measures the hooks and predicts the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_commhook.cli import plan_sharded
from torch_commhook.cli.default_hooks import (
    DEFAULT_HOOKS,
    DEFAULT_REPLICA_HOOKS,
    DEFAULT_SHARD_HOOKS,
)
from torch_commhook.cli.outputs import OutputError, check_picture
from torch_commhook.cli.plan_advice import Advice, advise
from torch_commhook.cli.plan_model import (
    ModelError,
    Subject,
    model_of_factory,
    model_of_shapes,
    model_of_size,
    train_transformer,
)
from torch_commhook.cli.plan_numbers import format_rate
from torch_commhook.cli.plan_parser import build_parser
from torch_commhook.cli.plan_plot import RATES, draw_rates
from torch_commhook.cli.plan_text import Question, sharded_table_of, spread_of, table_of, text_of
from torch_commhook.cli.sharded_options import ShardedOptionError, resolve_sharded
from torch_commhook.cli.train_config import TrainConfig
from torch_commhook.hooks import allreduce
from torch_commhook.hooks.expressions import HookExpressionError, is_file_reference, parse_hook
from torch_commhook.planning import BUCKET_CAPS_MB, Cost, HookError, measure, plan
from torch_commhook.planning.bench_times import with_bench_times
from torch_commhook.wording import pluralize

_PLAIN = "allreduce()"
#: The fields of a cost that ``--json`` omits: the single collectives of a step.
_CALLS = ("issued", "agreement", "members", "beside")
_OPTIONS_OF_DDP = ("delay", "nodes")

_Costs = Sequence[Cost] | Sequence[plan_sharded.Cost]


class PlanError(ValueError):
    """The options do not describe a step that can be planned. The message is one sentence."""


@dataclass(frozen=True)
class _Answer:
    """The result of a plan.

    Attributes:
        costs: the cost of each hook, the plain all-reduce first.
        advice: the recommended hook.
        question: the question in one sentence.
        table: the lines of the table.
        costs_at: computes the costs over a link of another rate, in bits per second.
    """

    costs: _Costs
    advice: Advice
    question: str
    table: list[str]
    costs_at: Callable[[float], _Costs]


def main(argv: Sequence[str]) -> int:
    """Run ``plan argv``; see :func:`torch_commhook.cli.main.main`."""
    options = build_parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    try:
        _check_plot(options)
        _world(options)
        subject = _subject(options)
        layout = _layout(options, subject)
        hooks = _hooks(options, layout)
        _announce(options, subject, hooks)
        question = _question(options, subject)
        if layout is None:
            answer = _of_ddp(options, question, hooks)
        else:
            answer = _of_shards(options, question, hooks, layout)
        if options.plot is not None:
            _draw(options, question, answer)
    except (HookExpressionError, HookError, ShardedOptionError, ModelError, PlanError) as error:
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


def _check_plot(options: argparse.Namespace) -> None:
    """Raise PlanError if ``--plot`` is given and its picture can't be drawn or written."""
    if options.plot is None:
        return
    try:
        check_picture(options.plot)
    except OutputError as error:
        raise PlanError(f"argument --plot: {error}") from error
    if not options.plot.parent.is_dir():
        raise PlanError(f"argument --plot: there is no folder {options.plot.parent}")


def _announce(options: argparse.Namespace, subject: Subject, hooks: Sequence[str]) -> None:
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


def _subject(options: argparse.Namespace) -> Subject:
    """The model that the options name.

    Raises:
        ModelError: the model can't be built or read.
        PlanError: ``--input`` is given without ``--model``, or the time of a step is neither given
            nor can be measured.
    """
    if options.input is not None and options.model is None:
        raise PlanError("argument --input: needs --model MODULE:FACTORY")
    if options.model is not None:
        subject = model_of_factory(options.model, options.input)
    elif options.shapes is not None:
        subject = model_of_shapes(options.shapes)
    elif options.model_size is not None:
        subject = model_of_size(options.model_size)
    else:
        subject = train_transformer()
    if options.compute_ms is None and not subject.is_runnable:
        raise PlanError(
            "argument --compute-ms: how long does a step take without communication? Give it in "
            "ms, or give --model with --input SHAPE to measure it on this machine; 0 compares the "
            "communication alone"
        )
    return subject


def _question(options: argparse.Namespace, subject: Subject) -> Question:
    """The question that the options ask. Measures a step of the model unless its time is given.

    Raises:
        ModelError: the step fails.
    """
    is_measured = options.compute_ms is None
    link = options.link
    return Question(
        model=subject.model,
        name=subject.name,
        world=_world(options),
        nodes=options.nodes,
        connections=options.connections,
        bits_per_second=link.bits_per_second,
        delay_seconds=link.delay_seconds if options.delay is None else options.delay / 1e3,
        link_file=link.path,
        compute_seconds=(
            subject.compute_seconds(options.optimizer) if is_measured else options.compute_ms / 1e3
        ),
        is_measured=is_measured,
        threads=options.threads,
        optimizer=options.optimizer,
    )


def _world(options: argparse.Namespace) -> int:
    """The number of ranks: from ``--world``, the link's file or the default of ``train``.

    Raises:
        PlanError: there is only one rank.
    """
    world: int = options.world or options.link.ranks or TrainConfig().ranks
    if world == 1:
        raise PlanError("argument --world: one rank sends nothing; give all ranks that train")
    return world


def _layout(options: argparse.Namespace, subject: Subject) -> plan_sharded.Layout | None:
    """The layout of a sharded model; None if each rank has the whole model.

    Raises:
        ShardedOptionError: options contradict each other.
    """
    world = _world(options)
    named = ("bucket_cap_mb", "shards", "shard_hook", "weights")
    given = {name: getattr(options, name) for name in named}
    given = {name: value for name, value in given.items() if value is not None}
    config = resolve_sharded(TrainConfig(parallel=options.parallel, ranks=world, **given), given)
    if config.parallel == "ddp":
        if options.nodes is not None and world % options.nodes:
            raise ShardedOptionError(
                f"argument --nodes: must divide the {world} ranks, got {options.nodes}"
            )
        return None
    used = [name for name in _OPTIONS_OF_DDP if getattr(options, name)]
    if options.connections > 1:
        used.append("connections")
    if used:
        raise ShardedOptionError(f"argument --{used[0]}: is for --parallel ddp alone")
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
    return plan_sharded.Layout(subject.model.elements, shards, replicas, after)


def _hooks(options: argparse.Namespace, layout: plan_sharded.Layout | None) -> list[str]:
    """The hooks to compare, each once, the plain all-reduce first.

    Raises:
        HookExpressionError: a text names no hook.
    """
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


def _of_ddp(options: argparse.Namespace, question: Question, hooks: Sequence[str]) -> _Answer:
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
        _advise(costs, [cost.bytes_sent for cost in costs], question),
        question.sentence(step=f", buckets of {' and then '.join(f'{cap:g}' for cap in caps)} MiB"),
        table_of(costs, question),
        costs_at,
    )


def _of_shards(
    options: argparse.Namespace,
    question: Question,
    hooks: Sequence[str],
    layout: plan_sharded.Layout,
) -> _Answer:
    measured = plan_sharded.measure_sharded(
        hooks,
        layout,
        shard_hook=options.shard_hook,
        weights=options.weights,
    )

    def costs_at(rate: float) -> list[plan_sharded.Cost]:
        return plan_sharded.plan_sharded(
            measured,
            layout=layout,
            bits_per_second=rate,
            inner_bits_per_second=options.inner_link or rate,
            compute_seconds=question.compute_seconds,
        )

    costs = costs_at(question.bits_per_second)
    sent = [
        cost.scattered_bytes + cost.forward_bytes + cost.backward_bytes + cost.reduced_bytes
        for cost in costs
    ]
    within = "" if options.inner_link is None else f" ({format_rate(options.inner_link)} within)"
    return _Answer(
        costs,
        _advise(costs, sent, question),
        question.sentence(spread=spread_of(layout), link=within),
        sharded_table_of(costs, layout, question.optimizer),
        costs_at,
    )


def _advise(costs: _Costs, sent: Sequence[float], question: Question) -> Advice:
    return advise(costs, sent, question.compute_seconds, question.optimizer)


def _draw(options: argparse.Namespace, question: Question, answer: _Answer) -> None:
    at_rates = [answer.costs_at(rate) for rate in RATES]
    seconds = {
        costs[0].hook: [cost.step_seconds for cost in costs]
        for costs in zip(*at_rates, strict=True)
    }
    try:
        draw_rates(
            options.plot,
            seconds,
            asked=question.bits_per_second,
            title=f"A step over links of different rates, otherwise as given: {answer.question}",
        )
    except OSError as error:
        raise PlanError(f"argument --plot: {options.plot} can't be written: {error}") from error
