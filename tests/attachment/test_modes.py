"""Every hook in every mode: the gradients of eager, with two ranks and several buckets."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mode_cases import (
    MODES,
    TRACED_MODES,
    CastInTwoStages,
    Mode,
    batch,
    module,
    of_a_work,
    with_futures,
)
from rank_pool import RankPool
from torch import nn
from torch._dynamo.utils import counters

from torch_commhook import GradBucket, attach, collectives, hooks
from torch_commhook.codecs import CODECS
from torch_commhook.hooks.expressions import parse_hook

STEPS = 3


# ---- what users write ----------------------------------------------------------------------------


class Object:
    """Callable, with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state: object, bucket: GradBucket) -> torch.Tensor:
        self.calls += 1
        return collectives.all_reduce(bucket.buffer() / 2, group=bucket.process_group()).wait()


def traced(state: object, bucket: GradBucket) -> torch.Tensor:
    group = bucket.process_group()
    return collectives.all_reduce(bucket.buffer() / group.size(), group=group).wait()


def between_nodes() -> hooks.Hook:
    """Each rank is a node."""
    alone, everybody = dist.new_subgroups(1)[0], dist.new_group()
    hook = hooks.hierarchical(CODECS["blockwise"](), intra_group=alone, inter_group=everybody)
    return hooks.error_feedback(hook)


#: Hooks, and the rounding of their results relative to the largest gradient.
HOOKS: dict[str, tuple[Callable[[], Any], float]] = {
    "allreduce()": (hooks.allreduce, 1e-6),
    "cast(bfloat16)": (lambda: hooks.cast(torch.bfloat16), 2.0**-7),
    "cast(float16)": (lambda: hooks.cast(torch.float16), 2.0**-10),
    "cast in two stages": (CastInTwoStages, 2.0**-7),
    "futures": (lambda: with_futures, 1e-6),
    "Future of a Work": (lambda: of_a_work, 1e-6),
    "object": (Object, 1e-6),
    "traced": (lambda: traced, 1e-6),
    "hierarchical": (between_nodes, 1 / 64),
    "cast(process_group)": (lambda: hooks.cast(process_group=dist.new_group()), 2.0**-7),
}

#: As they are written. Sparse ones say little about the mean of one step.
COMPRESSING = {
    "error_feedback(blockwise(bits=4))": 0.5,
    "error_feedback(powersgd(rank=2))": 1.0,
    "blockwise()": 1 / 64,
    "blockwise(rounding='stochastic')": 1 / 32,
    "fp8()": 2.0**-3,
    "error_feedback(sign())": 2.0,
    "error_feedback(topk(0.1))": 2.0,
    "error_feedback(chunk_topk(8, 64))": 2.0,
    "error_feedback(randomk(0.1))": 2.0,
    "error_feedback(blockwise(bits=4), dtype=torch.bfloat16)": 0.5,
    "error_feedback(powersgd(rank=2), dtype=torch.bfloat16)": 1.0,
    "error_feedback(topk(0.1), dtype=torch.bfloat16)": 2.0,
    "error_feedback(blockwise(bits=4), decay=0.75)": 0.5,
    "error_feedback(blockwise(bits=2))": 2.0,
    "momentum(topk(0.1), beta=0.9, dtype=torch.bfloat16)": 2.0,
    "clip(0.003, cast())": math.inf,
    "clip(0.003)": math.inf,
    "clip(0.003, error_feedback(blockwise(bits=4)))": math.inf,
    "policy([('0.*', allreduce()), ('4.*', sign())], error_feedback(blockwise(bits=4)))": 2.0,
    "adaptive(20000)": 0.5,
}
HOOKS.update(
    (text, (functools.partial(parse_hook, text), rounding))
    for text, rounding in COMPRESSING.items()
)

#: These are tried in every mode; what the others add is theirs alone, and modes that differ in
#: how they trace will do. ``make modes`` tries all in all.
EVERYWHERE = (
    set(HOOKS)
    - set(list(COMPRESSING)[2:])
    - {"cast(float16)", "cast in two stages", "object", "hierarchical", "cast(process_group)"}
)
SOMEWHERE = [
    Mode("ddp", "eager"),
    Mode("module", "compile"),
    Mode("module", "context", fullgraph=True),
]


def _train(rank: int, mode: Mode, hook: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    model = mode.wrap(module())
    handle = attach(model, HOOKS[hook][0](), **mode.attach_options)
    gradients: list[list[torch.Tensor]] = []
    captures: list[int] = []
    with mode.step_function(model) as step:
        for number in range(STEPS):
            model.zero_grad()
            step(batch(rank, number))
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            captures.append(
                counters["stats"]["unique_graphs"] + counters["compiled_autograd"]["captures"]
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    stats = handle.stats()
    handle.remove()
    return {
        "gradients": gradients,
        "captures": captures,
        "breaks": sum(counters["graph_break"].values()),
        "buckets": len(stats.buckets),
        "steps": stats.steps,
        "bytes": stats.bytes_sent_last_step,
    }


@pytest.fixture(scope="module")
def expected() -> list[list[torch.Tensor]]:
    """Each step's average of the ranks' own gradients, in float64, trained on without rounding."""
    model = module()
    every = []
    for number in range(STEPS):
        averages = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for rank in range(2):
            model.zero_grad()
            model(batch(rank, number)).square().sum().backward()
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average += parameter.grad.double() / 2
        every.append(averages)
        with torch.no_grad():
            for parameter, average in zip(model.parameters(), averages, strict=True):
                parameter -= 0.1 * average
    return every


@pytest.fixture(scope="module")
def eager(two_ranks: RankPool) -> Callable[..., list[dict[str, Any]]]:
    """What each hook gives in eager on both ranks, on a plain module or on DDP."""
    kept: dict[tuple[str, bool], list[dict[str, Any]]] = {}

    def results(hook: str, on_ddp: bool = False) -> list[dict[str, Any]]:
        if (hook, on_ddp) not in kept:
            mode = Mode("ddp" if on_ddp else "module", "eager")
            kept[hook, on_ddp] = two_ranks.run(_train, mode, hook)
        return kept[hook, on_ddp]

    return results


ALL = "COMMHOOK_ALL_MODES" in os.environ


def compiled(mode: Mode, hook: str) -> Mode:
    """With Inductor where it compiles the hook's own code, and once in each way to compile.

    Elsewhere what it makes of the model is all one to hooks, unless all are asked for.
    """
    inductor = mode.fullgraph or (hook == "allreduce()" and mode.runner != "config")
    return mode if ALL or inductor else replace(mode, backend="aot_eager")


def runs(mode: Mode, hook: str) -> bool:
    return ALL or hook in EVERYWHERE or mode in SOMEWHERE


def is_long(mode: Mode, hook: str) -> bool:
    """Compiles what others compile, too: each hook with ``fullgraph``, two on every model."""
    if mode.fullgraph:
        # Three times; and what is traced as with float32.
        return hook.startswith("adaptive") or (hook.endswith("bfloat16)") and "topk" not in hook)
    return mode.compiles_backward and hook not in (
        "allreduce()",
        "error_feedback(blockwise(bits=4))",
    )


@pytest.mark.parametrize(
    ("mode", "hook"),
    [
        pytest.param(
            compiled(mode, hook),
            hook,
            id=f"{mode}-{hook}",
            marks=pytest.mark.long if not ALL and is_long(mode, hook) else [],
        )
        for mode in MODES
        for hook in HOOKS
        if runs(mode, hook)
    ],
)
def test_every_hook_in_every_mode(
    two_ranks: RankPool, eager: Callable[..., list[dict[str, Any]]], mode: Mode, hook: str
) -> None:
    on_ddp = mode.model == "ddp" and not mode.compiles_backward
    # What shares a bucket is another on DDP's reducer in the first step.
    wanted = eager(hook, on_ddp and (hook in COMPRESSING or hook == "hierarchical"))
    results = two_ranks.run(_train, mode, hook, timeout=180)
    for rank, (result, want) in enumerate(zip(results, wanted, strict=True)):
        assert result["buckets"] > 2
        assert result["steps"] == STEPS
        assert result["bytes"] == want["bytes"]
        for got, bits in zip(result["gradients"], want["gradients"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, bits, strict=True)), rank
        # DDP's own forward is compiled anew once its C++ reducer has given way.
        compiled_once = 1 if mode.model == "ddp" else 0
        if hook.startswith("adaptive"):  # which settles after a step, and is compiled again
            continue
        assert result["captures"][compiled_once] == result["captures"][-1], "compiled again"
        if mode.runner == "eager":
            assert result["captures"][-1] == result["breaks"] == 0
        elif mode.compiles_backward:
            # Forward, backward, and the capture of that.
            assert mode.model == "ddp" or result["captures"][-1] == 3
            # PyTorch's own are those of DDP's forward, and the call of backward() in a function.
            if mode.model != "ddp":
                assert result["breaks"] == (mode.runner == "config")


def _train_apart(rank: int, compiling: int, hook: str) -> list[list[torch.Tensor]]:
    """The gradients of steps that the ranks from ``compiling`` on compile, and others do not."""
    runner = "context" if rank >= compiling else "eager"
    return _train(rank, Mode("module", runner, backend="aot_eager"), hook)["gradients"]


# No hooks whose buckets eager forms anew in the order of arrival: compiled code has another order.
@pytest.mark.parametrize(
    "hook",
    [
        "error_feedback(blockwise(bits=4))",
        "error_feedback(topk(0.1))",
        "momentum(topk(0.1), beta=0.9, dtype=torch.bfloat16)",
        "error_feedback(randomk(0.1))",
        "error_feedback(powersgd(rank=2))",
    ],
)
def test_ranks_in_different_modes(three_ranks: RankPool, hook: str) -> None:
    eager = three_ranks.run(_train_apart, 3, hook)[0]
    for compiling in (0, 1):
        for found in three_ranks.run(_train_apart, compiling, hook, timeout=120):
            for step, want in zip(found, eager, strict=True):
                assert all(map(torch.equal, step, want))


#: With them, each kind of collective and of memory. Tracing the others takes seconds for each.
WITH_DYNAMIC_SHAPES = {
    "allreduce()",
    "cast(bfloat16)",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(powersgd(rank=2))",
}


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(hook, marks=[] if ALL or hook in WITH_DYNAMIC_SHAPES else pytest.mark.long)
        for hook in HOOKS
    ],
)
def test_every_hook_with_dynamic_shapes(
    two_ranks: RankPool, eager: Callable[..., list[dict[str, Any]]], hook: str
) -> None:
    """The compiler makes variables of the numbers that it meets, of which there is no text."""
    mode = Mode("module", "context", fullgraph=True, backend="aot_eager", dynamic=True)
    results = two_ranks.run(_train, mode, hook, timeout=180)
    for result, want in zip(results, eager(hook), strict=True):
        assert result["bytes"] == want["bytes"]
        for got, bits in zip(result["gradients"], want["gradients"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, bits, strict=True))


@pytest.mark.parametrize("hook", HOOKS)
def test_eager_gives_the_mean(
    eager: Callable[..., list[dict[str, Any]]], expected: list[list[torch.Tensor]], hook: str
) -> None:
    rounding = HOOKS[hook][1]
    for result in eager(hook):
        for got, want in zip(result["gradients"], expected, strict=True):
            for a, b in zip(got, want, strict=True):
                assert (a - b).abs().max() <= 2 * rounding * b.abs().max()


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook.startswith("clip")])
def test_every_clip_of_these_bites(
    eager: Callable[..., list[dict[str, Any]]], expected: list[list[torch.Tensor]], hook: str
) -> None:
    for result in eager(hook):
        for got, whole in zip(result["gradients"], expected, strict=True):
            norm = torch.cat([gradient.view(-1) for gradient in got]).norm().item()
            assert norm == pytest.approx(0.003, rel=1e-3)
            assert torch.cat([gradient.view(-1) for gradient in whole]).norm() > 2 * norm


@pytest.mark.parametrize("hook", ["allreduce()", "hierarchical", "cast(bfloat16)"])
def test_another_thread_may_compile(two_ranks: RankPool, hook: str) -> None:
    """Then PyTorch says of every thread that it compiles."""
    alone, beside = (two_ranks.run(_beside_a_compiler, hook, flag) for flag in (False, True))
    assert all(map(torch.equal, alone[0], beside[0]))


def _beside_a_compiler(rank: int, hook: str, flag: bool) -> list[torch.Tensor]:
    with mock.patch.object(torch.compiler, "_is_compiling_flag", flag):
        assert torch.compiler.is_compiling() == flag
        return _train(rank, Mode("module", "eager"), hook)["gradients"][-1]


class Normed(nn.Module):
    """With running statistics, which rank 0 sends before each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _graphs_of_each_step(rank: int, mode: Mode) -> tuple[list[int], list[torch.Tensor]]:
    torch._dynamo.reset()
    counters.clear()
    model = mode.wrap(Normed())
    attach(model, hooks.allreduce(), **mode.attach_options)
    graphs = []
    with mode.step_function(model) as step:
        for number in range(5):
            model.zero_grad()
            step(batch(rank, number))
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs, [buffer.clone() for buffer in model.buffers()]


@pytest.mark.parametrize("mode", [mode for mode in TRACED_MODES if mode.runner != "eager"], ids=str)
def test_a_model_with_buffers_is_compiled_once(two_ranks: RankPool, mode: Mode) -> None:
    eager = two_ranks.run(_graphs_of_each_step, Mode(mode.model, "eager"))
    for (graphs, buffers), (_, want) in zip(
        two_ranks.run(_graphs_of_each_step, mode), eager, strict=True
    ):
        assert graphs[1:] == [graphs[1]] * 4  # DDP's forward is compiled again in the second
        assert all(torch.allclose(a, b) for a, b in zip(buffers, want, strict=True))
