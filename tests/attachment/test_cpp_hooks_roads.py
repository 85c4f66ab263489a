"""Communication hooks in C++ on every road, with two ranks: as the same hook in Python."""

from __future__ import annotations

import unittest.mock
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from cpp_libraries import library
from gil_calls import count_gil_calls
from gil_per_bucket import NOISE, ddp_alone, gil_calls_per_bucket
from layered_net import Net, differing, gradients_of
from layered_net import batch as net_batch
from mode_cases import TRACED_MODES, Mode, batch, module
from on_ranks import on_processes, on_ranks
from rank_pool import RankPool
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, PeerError, attach, hooks, load_cpp_hooks

PAIRS: dict[str, tuple[Any, Any]] = {
    "allreduce": (lambda: hooks.cpp("allreduce"), hooks.allreduce),
    "cast": (lambda: hooks.cpp("cast"), hooks.cast),
    "gradients": (lambda: hooks.cpp("gradients"), hooks.allreduce),
    "torch_allreduce": (lambda: hooks.cpp("torch_allreduce"), hooks.allreduce),
    "torch_style": (lambda: hooks.cpp("torch_style"), hooks.allreduce),
}


by_model = pytest.mark.parametrize("use_ddp", [False, True])


@pytest.fixture(scope="module")
def comm_hooks() -> str:
    """The path of the tests' hooks, which are loaded in this process."""
    path = library("comm_hooks")
    load_cpp_hooks(path)
    return path


def _train(rank: int, path: str, mode: Mode, hook: Any, options: dict[str, Any]) -> dict[str, Any]:
    load_cpp_hooks(path)
    torch._dynamo.reset()
    counters.clear()
    model = mode.wrap(module())
    handle = attach(model, PAIRS[hook[0]][hook[1]](), **mode.attach_options, **options)
    found = []
    with mode.step_function(model) as step:
        for number in range(3):
            model.zero_grad()
            step(batch(rank, number))
            found.append(gradients_of(model))
    stats = handle.stats()
    handle.remove()
    return {
        "gradients": found,
        "stats": (stats.steps, len(stats.buckets), stats.bytes_sent, stats.bytes_sent_last_step),
        "breaks": sum(
            count for name, count in counters["graph_break"].items() if "_untraced" in name
        ),
    }


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


@pytest.mark.parametrize("mode", [mode for mode in TRACED_MODES if not mode.fullgraph], ids=str)
@pytest.mark.parametrize("name", ["allreduce", "cast"])
def test_the_same_bits_as_in_python(
    two_ranks: RankPool, comm_hooks: str, name: str, mode: Mode
) -> None:
    """Our reducer runs it in C++ in eager code, and compiled code through operators."""
    eager = Mode(mode.model, "eager")
    expected = two_ranks.run(_train, comm_hooks, eager, (name, 1), {})
    got = two_ranks.run(_train, comm_hooks, mode, (name, 0), {})
    for python, cpp in zip(expected, got, strict=True):
        assert same(python["gradients"], cpp["gradients"])
        if mode.runner == "eager":  # else gradients come in another order
            assert python["stats"] == cpp["stats"]
        assert cpp["breaks"] == 0


@pytest.mark.parametrize("model", ["module", "ddp"])
@pytest.mark.parametrize("name", ["gradients", "torch_allreduce", "torch_style"])
def test_hooks_of_a_library(two_ranks: RankPool, comm_hooks: str, name: str, model: str) -> None:
    mode = Mode(model, "eager")
    expected = two_ranks.run(_train, comm_hooks, mode, (name, 1), {})
    got = two_ranks.run(_train, comm_hooks, mode, (name, 0), {})
    for python, cpp in zip(expected, got, strict=True):
        for a, b in zip(python["gradients"], cpp["gradients"], strict=True):
            assert all(torch.allclose(x, y) for x, y in zip(a, b, strict=True))
        sent = python["stats"] if name == "gradients" else (*python["stats"][:2], None, None)
        assert cpp["stats"] == sent


def test_gradients_as_views(two_ranks: RankPool, comm_hooks: str) -> None:
    mode, options = Mode("module", "eager"), {"gradient_as_bucket_view": True}
    expected = two_ranks.run(_train, comm_hooks, mode, ("cast", 1), options)
    got = two_ranks.run(_train, comm_hooks, mode, ("cast", 0), options)
    assert all(same(a["gradients"], b["gradients"]) for a, b in zip(expected, got, strict=True))


class Mixed(nn.Module):
    """Convolutions in channels_last, complex numbers, a sparse embedding, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 12, sparse=True)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.double))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embedding(numbers).view(-1, 3, 4, 1).expand(-1, 3, 4, 4)
        factor = (self.phase * self.phase.conj()).real * self.scale
        return self.conv(x * factor.view(3, 1, 1).float())


@by_model
@on_ranks(2)
def test_layouts_and_dtypes(rank: int, use_ddp: bool) -> None:
    found = []
    for make in (hooks.allreduce, lambda: hooks.cpp("allreduce")):
        torch.manual_seed(0)
        model: nn.Module = DDP(Mixed()) if use_ddp else Mixed()
        with attach(model, make()):
            for step in range(2):
                model.zero_grad()
                model(torch.tensor([rank, 3, step])).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for x, y in zip(*found, strict=True):
        assert x.layout == y.layout and torch.equal(x.to_dense(), y.to_dense())
        assert x.is_sparse or x.stride() == y.stride()


@on_ranks(2)
def test_unused_parameters_and_accumulation(rank: int) -> None:
    models, handles = [], []
    for hook in (hooks.cast(), hooks.cpp("cast")):
        torch.manual_seed(0)
        models.append(Net())
        handles.append(attach(models[-1], hook, bucket_cap_mb=0.004))
    for step in range(4):
        for model, handle in zip(models, handles, strict=True):
            model.zero_grad()
            with handle.no_sync():
                model(net_batch(rank, step), skip=(1,) if step % 2 else ()).sum().backward()
            model(net_batch(rank, step + 9), skip=(rank + 2, 5)).sum().backward()
        assert differing(*map(gradients_of, models)) == []


@by_model
@on_ranks(2)
def test_hooks_around_it(rank: int, use_ddp: bool) -> None:
    """Hooks around it come and go, and so do hooks in its place."""
    model: nn.Module = DDP(module(), bucket_cap_mb=0.01) if use_ddp else module()
    options = {} if use_ddp else {"bucket_cap_mb": 0.01}
    handle = attach(model, hooks.cpp("allreduce"), **options)

    def step() -> list[Any]:
        model.zero_grad()
        model(batch(rank, 0)).square().sum().backward()
        return gradients_of(model)

    first, seen = step(), []
    around = [
        handle.register_posthook(lambda reduced, local: tuple(2 * grad for grad in reduced)),
        handle.register_post_accumulate_hook(lambda bucket: seen.append(bucket.index())),
    ]
    assert differing(step(), [2 * grad for grad in first]) == []
    for each in around:
        each.remove()
    others = [step()]
    for hook in (hooks.allreduce(), hooks.cpp("allreduce")):
        handle.replace(hook)
        others.append(step())
    assert len(seen) > 1 and handle.stats().steps == 1
    handle.remove()
    if use_ddp:
        others.append(step())  # as DDP alone
    assert same([first] * len(others), others)


def _fails(rank: int, path: str, mode: Mode, call: int) -> list[str]:
    load_cpp_hooks(path)
    torch._dynamo.reset()
    model = mode.wrap(module())
    # Ranks compare what they attach: nobody may see that rank 1's never fails.
    hook = hooks.cpp("fails_at", call=call if rank == 0 else 1000)
    printed = "torch_commhook.attachment.road.printed_hook"
    with unittest.mock.patch(printed, return_value="fails_at"):
        handle = attach(model, hook, **mode.attach_options)
    found = []
    with mode.step_function(model) as step:
        for number in range(6):
            model.zero_grad()
            try:
                step(batch(rank, number))
                found.append("good")
            except ValueError as error:
                assert f"call {call}" in str(error) and "raised by hook 'cpp(" in str(error)
                found.append("own")
            except PeerError as error:
                assert "on rank 0: ValueError: call" in str(error)
                found.append("peer")
    got = gradients_of(model)
    handle.replace(hooks.allreduce())
    with mode.step_function(model) as step:
        model.zero_grad()
        step(batch(rank, 5))
    assert all(torch.equal(a, b) for a, b in zip(got, gradients_of(model), strict=True))
    handle.remove()
    return found


@pytest.mark.parametrize("call", [1, 9])
@pytest.mark.parametrize("model", ["module", "ddp", "python_reducer"])
def test_a_hook_that_fails_on_one_rank(
    two_ranks: RankPool, comm_hooks: str, model: str, call: int
) -> None:
    own, peer = two_ranks.run(_fails, comm_hooks, Mode(model, "eager"), call)
    assert own.count("own") == 1 and own.count("good") == 5
    assert peer == ["peer" if step == "own" else step for step in own]


def _error_of_step(rank: int, use_ddp: bool, hook: Any) -> str:
    """What a step through the hook raises. Afterwards a step through another must work."""
    model: nn.Module = module()
    if use_ddp:
        model = DDP(model, bucket_cap_mb=0.01)
    handle = attach(model, hook)
    try:
        model(batch(rank, 0)).sum().backward()
        message = "nothing was raised"
    except Exception as error:  # which one, the tests tell by its name
        message = f"{type(error).__name__}: {error}"
    handle.replace(hooks.cpp("allreduce"))
    model(batch(rank, 0)).sum().backward()
    handle.remove()
    return message


@by_model
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("constructor", "RuntimeError: hook 'cpp('wrong', how='constructor')' on bucket 0 of"),
        ("throws an int", "threw an object that is not a std::exception"),
        ("null", "TypeError: hook 'cpp('wrong', how='null')' on bucket 0 of"),
        ("fails later", "how='fails later')' on bucket 0 of 1: lost on the way"),
        ("short", "ValueError: hook 'cpp('wrong', how='short')' on bucket 0 of"),
        ("undefined", "an undefined tensor"),
        ("two", "got a list of 2"),
        ("throws an int later", "on bucket 0 of"),
        ("sets no buffer", "GradBucket.setBuffer: buffer must be contiguous, of"),
    ],
)
@pytest.mark.usefixtures("one_rank", "comm_hooks")
def test_what_a_hook_can_do_wrong(use_ddp: bool, how: str, message: str) -> None:
    assert message in _error_of_step(0, use_ddp, hooks.cpp("wrong", how=how))


@by_model
@pytest.mark.usefixtures("one_rank", "comm_hooks")
def test_a_buffer_that_is_taken_away(use_ddp: bool) -> None:
    """A module's reducer gathers the gradients again; DDP has no other buffer."""
    raised = _error_of_step(0, use_ddp, hooks.cpp("wrong", how="takes the buffer"))
    expected = "the buffer was moved out of this bucket" if use_ddp else "nothing was raised"
    assert expected in raised


def _mean_in_gradient(state: object, bucket: GradBucket) -> torch.futures.Future:
    gradient = bucket.parameters()[0].grad
    gradient /= torch.distributed.get_world_size()
    return torch.distributed.all_reduce(gradient.view(-1), async_op=True).get_future()


@pytest.mark.parametrize("views", [False, True])
@by_model
@pytest.mark.usefixtures("comm_hooks")
@on_ranks(2)
def test_a_result_in_the_gradients_own_memory(rank: int, use_ddp: bool, views: bool) -> None:
    found = []
    for hook in (hooks.allreduce(), hooks.cpp("in_gradient"), _mean_in_gradient):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(4, 2, bias=False)
        options = {"gradient_as_bucket_view": views}
        if use_ddp:
            model, options = DDP(model, **options), {}
        with attach(model, hook, **options):
            for step in range(2):
                model(batch(rank, step)[:, :4]).square().sum().backward()
        found.append(gradients_of(model))
    expected, *others = found
    assert same([expected, expected], others)


@by_model
@pytest.mark.usefixtures("comm_hooks")
@on_ranks(2)
def test_complex_gradients_one_by_one(rank: int, use_ddp: bool) -> None:
    found = []
    for cpp in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(3, 2, dtype=torch.cfloat)
        if use_ddp and cpp:
            model = DDP(model)
        with attach(model, hooks.cpp("gradients") if cpp else hooks.allreduce()) as handle:
            handle.register_prehook(lambda gradients: tuple(2 * grad for grad in gradients))
            handle.register_posthook(lambda reduced, local: tuple(grad + 1j for grad in reduced))
            model(torch.full((3,), 1.0 + rank + 2j)).abs().sum().backward()
        found.append(gradients_of(model))
    assert all(torch.allclose(x, y) for x, y in zip(*found, strict=True))


@by_model
@on_processes
def test_a_future_that_never_completes(rank: int, comm_hooks: str, use_ddp: bool) -> None:
    load_cpp_hooks(comm_hooks)
    brief = torch.distributed.new_group(timeout=timedelta(seconds=1))
    found = []
    for hook in (hooks.cpp("wrong", how="never"), lambda state, bucket: torch.futures.Future()):
        model: nn.Module = module()
        if use_ddp:
            model = DDP(model, process_group=brief)
        handle = attach(model, hook, **({} if use_ddp else {"process_group": brief}))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                model(batch(rank, 0)).sum().backward()
            except Exception as error:  # which one, the tests tell by its name
                found.append(f"{type(error).__name__}: {error}")
        handle.remove()
    assert len(found) == 2
    for raised in found:
        assert raised.startswith("TimeoutError: hook '")
        assert "on bucket 0 of 1: its Future is not complete after 1 seconds" in raised
    warned = [str(warning.message) for warning in caught]
    assert not [text for text in warned if "after another bucket failed" in text]


@by_model
@on_processes
def test_a_group_that_a_rank_is_not_in(rank: int, use_ddp: bool) -> None:
    alone = torch.distributed.new_group([0])
    raised = _error_of_step(rank, use_ddp, hooks.cpp("allreduce", process_group=alone))
    assert raised.startswith("ValueError" if rank else "PeerError")
    of_rank = "" if rank else "on rank 1: ValueError: "
    assert f"{of_rank}torch_commhook: this rank is not a member" in raised


@on_ranks(2)
def test_registered_with_ddp(rank: int) -> None:
    model, plain = (DDP(module(), bucket_cap_mb=0.01) for _ in range(2))
    model.register_comm_hook(None, hooks.cpp("cast", dtype=torch.float16))
    attach(plain, hooks.cast(torch.float16))
    for of in (model, plain):
        for step in range(2):
            of.zero_grad()
            of(batch(rank, step)).sum().backward()
    assert differing(gradients_of(model), gradients_of(plain)) == []


# ---- the GIL -------------------------------------------------------------------------------------


def _cpp_on_ddp(net: nn.Module, bucket_cap_mb: float) -> nn.Module:
    model = ddp_alone(net, bucket_cap_mb)
    attach(model, hooks.cpp("cast"))
    return model


def _cpp_on_module(net: nn.Module, bucket_cap_mb: float) -> nn.Module:
    attach(net, hooks.cpp("cast"), bucket_cap_mb=bucket_cap_mb)
    return net


def _gil_calls_while_waiting(rank: int, path: str, seconds: float, use_ddp: bool) -> int:
    load_cpp_hooks(path)
    model = DDP(module(), bucket_cap_mb=0.01) if use_ddp else module()
    options = {} if use_ddp else {"bucket_cap_mb": 0.01}
    handle = attach(model, hooks.cpp("late", seconds=seconds), **options)
    for _ in range(3):
        loss = model(batch(rank, 0)).sum()
        with count_gil_calls() as calls:
            loss.backward()
    handle.remove()
    return calls.acquired


@pytest.mark.usefixtures("gil_counter")
@by_model
def test_waiting_takes_the_gil_seldom(two_ranks: RankPool, comm_hooks: str, use_ddp: bool) -> None:
    quick = two_ranks.run(_gil_calls_while_waiting, comm_hooks, 0.001, use_ddp)
    slow = two_ranks.run(_gil_calls_while_waiting, comm_hooks, 0.8, use_ddp)
    for few, many in zip(quick, slow, strict=True):
        # Ctrl-C is looked for twice a second, not each time that a wait ends without a result (20
        # times a second). Without a wait one backward differs from another by up to 5.
        assert many <= few + 9


@pytest.mark.usefixtures("gil_counter")
@on_processes
def test_no_gil_per_bucket(rank: int) -> None:
    ddp, *ours = (gil_calls_per_bucket(make) for make in (ddp_alone, _cpp_on_ddp, _cpp_on_module))
    for cpp in ours:
        assert cpp.per_bucket <= ddp.per_bucket + NOISE, (ddp, cpp)
