"""What hooks compute and send, as ``measure`` finds it and ``bench`` has measured it; models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import nn

from torch_commhook import attach, codecs, hooks
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.planning import (
    HookError,
    LinkFile,
    MeasuredLink,
    Model,
    Parameter,
    bucket_sizes,
    measure,
    plan,
)
from torch_commhook.planning.link_file import HookTime
from torch_commhook.planning.measured import with_bench_times
from torch_commhook.planning.model import measure_pass, unwrap_hook
from torch_commhook.testing import run_ranks, simulate

HOOKS = ["allreduce()", "cast()", "blockwise()", "topk(0.01)"]


def test_bytes() -> None:
    found = measure(HOOKS, elements=1_000_000, world_size=2)
    assert [each.hook for each in found] == HOOKS
    sent = [each.bytes_sent for each in found]
    assert sent[:2] == [4_000_000, 2_000_000]
    assert sent[2] == pytest.approx(1_016_000, rel=0.01)
    assert sent[3] == pytest.approx(80_000, rel=0.01)
    assert all(each.compute_seconds >= 0 for each in found)


@pytest.mark.parametrize(("ranks", "bytes_each"), [(7, 24 / 7), (8, 3.5), (64, 3.9375)])
def test_a_cast_sends_its_formula(ranks: int, bytes_each: float) -> None:
    (found,) = measure(["cast()"], elements=20_000, world_size=ranks)
    assert found.bytes_sent / 20_000 == pytest.approx(bytes_each, rel=2e-3)  # and padding


def test_low_rank_factors_are_those_of_matrices_as_models_have_them() -> None:
    (found,) = measure(["powersgd(rank=2)"], elements=480_000, world_size=2)
    # 48 matrices of 100 by 100, whose factors are summed over a ring
    assert found.bytes_sent == 48 * 2 * (100 + 100) * 4


def test_gathered_messages_grow_with_the_ranks() -> None:
    two, eight = (
        measure(["topk(0.01)"], elements=100_000, world_size=ranks)[0] for ranks in (2, 8)
    )
    assert eight.bytes_sent == 7 * two.bytes_sent


def test_hooks_are_planned_as_they_are_in_the_long_run() -> None:
    texts = [
        "after(1000, topk(0.01))",
        "local_sgd(8, hook=after(5, topk(0.01), before=blockwise()))",
        "clip(1.0, topk(0.01))",
        "topk(0.01)",
    ]
    *found, topk = measure(texts, elements=100_000, world_size=2)
    assert [each.bytes_sent / topk.bytes_sent for each in found] == [1.0, 1 / 8, 1.0]
    assert [each.overlaps for each in found] == [True, False, True]


def test_hooks_are_given_as_objects_too() -> None:
    """They are copied, and remember nothing of it."""
    kept = hooks.error_feedback(hooks.topk(0.01))
    (of_object,) = measure([kept], elements=10_000, world_size=2)
    (of_text,) = measure([str(kept)], elements=10_000, world_size=2)
    assert of_object.hook == of_text.hook == str(kept)
    assert of_object.bytes_sent == of_text.bytes_sent


def test_an_object_keeps_its_levels() -> None:
    hook = hooks.hierarchical(codecs.blockwise())
    (found,) = measure([hook], elements=10_000, world_size=4, nodes=2)
    assert len(found.members) == 2
    assert hook.levels == hooks.hierarchical(codecs.blockwise()).levels


def test_a_plain_function_is_a_hook() -> None:
    def mean(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer().div_(2)
        future = torch.distributed.all_reduce(buffer, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    (found,) = measure([mean], elements=10_000, world_size=2)
    assert found.bytes_sent == 40_000
    assert "mean" in found.hook


def test_plain_ddp_is_an_all_reduce() -> None:
    none, plain = measure(["none", "allreduce()"], elements=10_000, world_size=2)
    assert none.hook == "none"
    assert none.chains == plain.chains
    assert none.is_ddp and not plain.is_ddp


def test_hooks_that_cannot_be_measured() -> None:
    with pytest.raises(TypeError, match="hook must be callable"):
        measure([3], elements=10, world_size=2)  # type: ignore[list-item]

    def fails(state: Any, bucket: Any) -> Any:
        raise OSError("no cable")

    with pytest.raises(HookError, match="can't be planned: OSError: no cable"):
        measure([fails], elements=10, world_size=2)


def test_bucket_sizes() -> None:
    of_mebibyte = 1 << 18
    assert bucket_sizes(1, [25]) == [1]
    assert bucket_sizes(25 * of_mebibyte, [25]) == [25 * of_mebibyte]
    assert bucket_sizes(25 * of_mebibyte + 1, [25]) == [25 * of_mebibyte, 1]
    found = bucket_sizes(60 * of_mebibyte, [1, 25])
    assert [size / of_mebibyte for size in found] == [1, 25, 25, 9]
    assert sum(bucket_sizes(10**12, [1e-3])) == 10**12


# ---- models --------------------------------------------------------------------------------------

SHAPES = [(50, 64), (64,), (64, 192), (3, 3, 8, 16), (7,), (64, 2)]
MODEL = Model.of_parameters(
    [Parameter(shape, f"part{number}") for number, shape in enumerate(SHAPES)]
)


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


@on_ranks(2)
@pytest.mark.parametrize("cap", [0.01, 0.05, 25.0])
def test_buckets_are_those_of_a_model(rank: int, cap: float) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 100))
    handle = attach(module, hooks.allreduce(), bucket_cap_mb=cap)
    for _ in range(2):  # in the order of the first backward
        module(torch.ones(1, 64)).sum().backward()
    found = [bucket.numel for bucket in handle.stats().buckets]
    assert found == Model.of(module).bucket_sizes((min(cap, 1.0), cap))
    handle.remove()


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
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(ranks)]
    found = simulate(parse_hook(text), gradients, steps=2)
    (planned,) = measure([text], model=MODEL, world_size=ranks, known_seconds={text: 0.0})
    assert planned.bytes_sent == pytest.approx(found.wire_bytes, rel=1e-3)
    assert [each.traffic for each in planned.chains[0]] == [each.traffic for each in found.issued]


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
    found = measure(["blockwise()", POLICIES[0]], model=MODEL, world_size=2)
    alone, both = plan(found, bits_per_second=1e15, delay_seconds=0.025)
    assert alone.round_trips == both.round_trips == 1.5


def test_a_policy_of_a_size_alone() -> None:
    (found,) = measure(["policy([('dim <= 1', allreduce())], cast())"], elements=480, world_size=2)
    assert found.bytes_sent > 0
    nameless = {"model": Model.of_parameters([Parameter((4, 4))])}
    for given in ({"elements": 480}, nameless):
        with pytest.raises(HookError, match="needs the names of parameters, which are not known"):
            measure(["policy([('*emb*', allreduce())], cast())"], world_size=2, **given)
    with pytest.raises(HookError, match="no parameter matches"):
        measure(["policy([('no_such', allreduce())], cast())"], model=MODEL, world_size=2)


def test_known_computing_is_not_measured() -> None:
    known = {"cast()": 0.25}
    one, other = measure(
        ["cast()", "blockwise()"], elements=1000, world_size=2, known_seconds=known
    )
    assert one.compute_seconds == 0.25 and other.compute_seconds != 0.25


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


LINK_FILE = LinkFile(
    ranks=2,
    backend="gloo",
    device="cpu",
    link=MeasuredLink(1e9, 0.0),
    hooks=[HookTime("no communication", 0.01, 0.0, 0.1), HookTime("cast()", 0.1, 1.0, 1.0)],
    machine={"elements": 1 << 20},
)


def known(hook: str, elements: int = 1 << 20) -> Any:
    """A hook whose computing is not measured."""
    return measure([hook], elements=elements, world_size=2, known_seconds={hook: 0.5})[0]


def test_a_hook_computes_what_bench_shows() -> None:
    """Planned with its own times, a step of bench is as long as bench says."""
    file = replace(LINK_FILE, link=MeasuredLink(1e9, 1e-3))
    found, found4 = (
        with_bench_times([known("cast()", each)], file, elements=each, world_size=2)[0]
        for each in (1 << 20, 4 << 20)
    )
    buckets = Model(1 << 20).bucket_sizes()
    (cost,) = plan(
        [found], bits_per_second=1e9, delay_seconds=1e-3, compute_seconds=0.01, buckets=buckets
    )
    assert cost.step_seconds == pytest.approx(0.1, rel=1e-3)
    # Of a model four times as large, four times as much.
    assert found4.compute_seconds == pytest.approx(4 * found.compute_seconds, rel=1e-2)


def test_bench_times_that_do_not_fit() -> None:
    own, more = known("cast()"), known("fp8()")
    fits = replace(LINK_FILE, hooks=LINK_FILE.hooks[1:])
    for file, given in (
        (replace(fits, link=None), [own]),
        (replace(fits, ranks=4), [own]),
        (replace(fits, machine={}), [own]),
        (replace(fits, machine={"elements": "many"}), [own]),
        (replace(fits, machine={"elements": 10_000}), [own]),  # small, and a larger one is planned
        (replace(fits, hooks=[HookTime("fp8()", 0.1, 1.0, 1.0)]), [own]),
        (replace(fits, link=MeasuredLink(1e8, 0.0)), [own]),  # the wire takes more than there is
        (fits, [own, more]),  # it has one of them
    ):
        assert with_bench_times(given, file, elements=1 << 20, world_size=2) == given
    (found,) = with_bench_times([own], fits, elements=1 << 20, world_size=2)
    assert found.compute_seconds < 0.1
