"""What is planned for the parameters of a model, and what ``bench`` has measured of hooks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from torch_commhook import attach, hooks
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.planning import (
    Cost,
    HookError,
    LinkFile,
    Measured,
    MeasuredLink,
    Model,
    Parameter,
    measure,
    plan,
)
from torch_commhook.planning.bench_times import with_bench_times
from torch_commhook.planning.hook_work import measure_pass, unwrap_hook
from torch_commhook.planning.link_file import HookTime
from torch_commhook.process_group.gloo_messages import Traffic
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.testing import run_ranks, simulate

SHAPES = [(50, 64), (64,), (64, 192), (3, 3, 8, 16), (7,), (64, 2)]
MODEL = Model.of_parameters(
    [Parameter(shape, f"part{number}") for number, shape in enumerate(SHAPES)]
)


def gradients(ranks: int) -> list[list[torch.Tensor]]:
    return [[torch.randn(shape) for shape in SHAPES] for _ in range(ranks)]


def test_a_module_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        module[1].weight.requires_grad_(False)
    found = Model.of(module)
    assert found.parameters == (
        Parameter((4, 3), "0.weight"),
        Parameter((4,), "0.bias"),
        Parameter((4,), "1.bias"),
    )
    with pytest.raises(ValueError, match="must have a parameter with elements"):
        Model.of(nn.Identity())


def test_either_a_model_or_its_size() -> None:
    for given in ({}, {"elements": 3, "model": MODEL}):
        with pytest.raises(TypeError, match="give either elements or model"):
            measure(["cast()"], world_size=2, **given)


@pytest.mark.parametrize("cap", [0.01, 0.05, 25.0])
def test_buckets_are_those_of_a_model(cap: float) -> None:
    def sizes(rank: int) -> list[int]:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 100)]
        module = nn.Sequential(*layers)
        handle = attach(module, hooks.allreduce(), bucket_cap_mb=cap)
        for _ in range(2):  # in the order of the first backward
            module(torch.ones(1, 64)).sum().backward()
        found = [bucket.numel for bucket in handle.stats().buckets]
        expected = Model.of(module).bucket_sizes((min(cap, 1.0), cap))
        assert sum(found) == sum(expected)
        handle.remove()
        return found if found != expected else []

    assert run_ranks(sizes, 2) == [[], []]


@pytest.mark.parametrize("most", [1, 5, 64, 1000, 10**6])
def test_a_sample_is_no_larger_than_asked(most: int) -> None:
    sample = MODEL.sample(most)
    elements = sum(torch.Size(shape).numel() for shape in sample)
    assert 0 < elements <= max(most, 192)  # a row is the least
    assert elements >= min(most, MODEL.elements) * 0.5
    columns = {shape[1:] for shape in SHAPES}
    assert {shape[1:] for shape in sample} <= columns


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "text",
    [
        "powersgd(rank=2)",
        "error_feedback(powersgd(rank=4))",
        "powersgd(rank=2, min_compression_rate=8)",
        "powersgd(rank=1000)",
    ],
)
def test_thin_factors_are_those_of_the_shapes(text: str, ranks: int) -> None:
    found = simulate(parse_hook(text), gradients(ranks), steps=2)
    (planned,) = measure([text], model=MODEL, world_size=ranks, known_seconds={text: 0.0})
    assert planned.bytes_sent == pytest.approx(found.wire_bytes, rel=1e-3)
    assert [each.traffic for each in planned.issued] == [each.traffic for each in found.issued]


POLICIES = [
    "policy([('dim <= 1', allreduce())], blockwise())",
    "policy([('numel < 1000', cast()), ('part2', powersgd(rank=2))], topk(0.1))",
]


@pytest.mark.parametrize("text", POLICIES)
def test_a_policy_sends_what_its_hooks_do(text: str) -> None:
    hook = parse_hook(text)

    def sent(rank: int) -> int:
        own = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        module = nn.ParameterDict({f"part{n}": each for n, each in enumerate(own)})
        handle = attach(module, hook)
        for _ in range(2):
            before = handle.stats().bytes_sent
            sum((each * torch.randn(each.shape)).sum() for each in own).backward()
        found = handle.stats().bytes_sent - before
        handle.remove()
        return found

    (planned,) = measure([text], model=MODEL, world_size=2)
    assert planned.bytes_sent == pytest.approx(max(run_ranks(sent, 2)), rel=0.05)
    assert len(planned.chains) == len(hook.hooks_inside())
    assert planned.compute_seconds > 0
    (on_nodes,) = measure([text], model=MODEL, world_size=8, nodes=4)
    assert on_nodes.members
    (cost,) = plan([on_nodes], bits_per_second=1e9)
    assert cost.node_bytes is not None and cost.node_bytes > 0


def test_hooks_of_a_policy_travel_at_the_same_time() -> None:
    two = POLICIES[0]
    single, policy = measure(["blockwise()", two], model=MODEL, world_size=2)
    far: dict[str, Any] = {"bits_per_second": 1e15, "delay_seconds": 0.025}
    alone, both = plan([single, policy], **far)
    assert alone.round_trips == both.round_trips == 2


def test_a_policy_of_a_size_alone() -> None:
    (found,) = measure(["policy([('dim <= 1', allreduce())], cast())"], elements=480, world_size=2)
    assert found.bytes_sent > 0
    with pytest.raises(HookError, match="needs the names of parameters, which are not known"):
        measure(["policy([('*emb*', allreduce())], cast())"], elements=480, world_size=2)
    nameless = Model.of_parameters([Parameter((4, 4))])
    with pytest.raises(HookError, match="needs the names of parameters, which are not known"):
        measure(["policy([('*emb*', allreduce())], cast())"], model=nameless, world_size=2)
    with pytest.raises(HookError, match="no parameter matches"):
        measure(["policy([('no_such', allreduce())], cast())"], model=MODEL, world_size=2)


def test_known_computing_is_not_measured() -> None:
    known = {"cast()": 0.25}
    one, other = measure(
        ["cast()", "blockwise()"], elements=1000, world_size=2, known_seconds=known
    )
    assert one.compute_seconds == 0.25 and other.compute_seconds != 0.25


# ---- exchanges in the background -----------------------------------------------------------------


def sending(nbytes: float, **more: Any) -> Measured:
    """A hook of two ranks, whose only message takes as many seconds as MB at 8 Mbit/s."""
    payload = 1448 / 1514
    issued = (Issued("", Traffic("all_to_all_single", 2, 2e6 * nbytes, 1e6 * nbytes * payload)),)
    return Measured("a", nbytes, 0.0, overlaps=False, issued=issued, **more)


def step(measured: Measured) -> Cost:
    return plan([measured], bits_per_second=8e6, compute_seconds=1.0)[0]


def test_an_exchange_in_the_background_is_hidden_by_its_steps() -> None:
    assert step(sending(4.0, every=10)).step_seconds == pytest.approx(1.4)
    assert step(sending(4.0, every=10, delay=3)).step_seconds == pytest.approx(1.1)
    assert step(sending(4.0, every=10, delay=5)).step_seconds == pytest.approx(1.0)
    # Two halves, of which each waits for what two steps do not hide.
    halves = sending(8.0, every=10, delay=2, fragments=2)
    assert step(halves).step_seconds == pytest.approx(1.0 + 2 * (4.0 - 2.0) / 10)


def test_local_sgd_in_the_background() -> None:
    text = "local_sgd(10, fragments=2, delay=4, mix=0.5, hook=error_feedback(blockwise(bits=4)))"
    (found,) = measure([text], elements=50_000, world_size=2)
    assert (found.every, found.fragments, found.delay, found.overlaps) == (10, 2, 4, False)
    (cost,) = plan([found], bits_per_second=1e9, delay_seconds=0.01)
    assert cost.round_trips == pytest.approx(2 * 2 / 10)


@pytest.mark.real_time
@pytest.mark.parametrize(
    "text",
    [
        "local_sgd(4)",
        "local_sgd(4, hook=error_feedback(topk(0.01)), error_reset=True)",
        "local_sgd(4, hook=error_feedback(blockwise()), outer=outer_sgd(1.0, 0.0))",
        "local_sgd(8, fragments=4, mix=0.5, hook=powersgd(rank=2))",
        "local_sgd(4, hook=error_feedback(powersgd(rank=2)), error_reset=True)",
        "local_sgd(4, hook=clip(1.0, topk(0.01)))",
    ],
)
def test_what_local_sgd_does_beside_is_measured(text: str) -> None:
    elements = 1 << 20
    around = unwrap_hook(parse_hook(text)).around
    seconds = [measure_pass(each, elements, elements) for each in around]
    assert len(seconds) == (2 if "clip" in text else 1)
    # It reads the parameters and the anchor, and writes both.
    assert seconds[0] > measure_pass(torch.Tensor.clone, elements, elements)
    (found,) = measure([text], elements=elements, world_size=2)
    assert found.compute_seconds > 0


# ---- from bench ----------------------------------------------------------------------------------


def test_a_hook_computes_what_bench_shows() -> None:
    """Planned with its own times, a step of bench is as long as bench says."""
    link = MeasuredLink(1e9, 1e-3)
    (own,) = measure(["cast()"], elements=1 << 20, world_size=2, known_seconds={"cast()": 1e-9})
    file = LinkFile(
        ranks=2,
        backend="gloo",
        device="cpu",
        link=link,
        hooks=[HookTime("no communication", 0.01, 0.0, 0.1), HookTime("cast()", 0.1, 1.0, 1.0)],
        machine={"elements": 1 << 20},
    )
    (found,) = with_bench_times([own], file, elements=1 << 20, world_size=2)
    buckets = Model(1 << 20).bucket_sizes()
    (cost,) = plan(
        [found], bits_per_second=1e9, delay_seconds=1e-3, compute_seconds=0.01, buckets=buckets
    )
    assert cost.step_seconds == pytest.approx(0.1, rel=1e-3)
    # Of a model four times as large, four times as much.
    (larger,) = measure(["cast()"], elements=4 << 20, world_size=2, known_seconds={"cast()": 1e-9})
    (found4,) = with_bench_times([larger], file, elements=4 << 20, world_size=2)
    assert found4.compute_seconds == pytest.approx(4 * found.compute_seconds, rel=1e-2)


def test_bench_times_that_do_not_fit() -> None:
    (own,) = measure(["cast()"], elements=1 << 20, world_size=2, known_seconds={"cast()": 0.5})
    file = LinkFile(
        ranks=2,
        backend="gloo",
        device="cpu",
        link=MeasuredLink(1e9, 0.0),
        hooks=[HookTime("cast()", 0.1, 1.0, 1.0)],
        machine={"elements": 1 << 20},
    )
    slow = replace(file, link=MeasuredLink(1e8, 0.0))  # the wire takes more than there is
    for other in (
        replace(file, link=None),
        replace(file, ranks=4),
        replace(file, machine={}),
        replace(file, machine={"elements": "many"}),
        replace(file, hooks=[HookTime("fp8()", 0.1, 1.0, 1.0)]),
        slow,
    ):
        assert with_bench_times([own], other, elements=1 << 20, world_size=2) == [own]
    # Of two hooks it has one, or its model is small and a larger one is planned.
    (more,) = measure(["fp8()"], elements=1 << 20, world_size=2, known_seconds={"fp8()": 0.5})
    both = [own, more]
    assert with_bench_times(both, file, elements=1 << 20, world_size=2) == both
    small = replace(file, machine={"elements": 10_000})
    assert with_bench_times([own], small, elements=1 << 20, world_size=2) == [own]
    (found,) = with_bench_times([own], file, elements=1 << 20, world_size=2)
    assert found.compute_seconds < 0.1
