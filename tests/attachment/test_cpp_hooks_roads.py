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
from layered_net import Net
from layered_net import batch as net_batch
from mode_cases import batch, module
from modes import TRACED_MODES, Mode
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


@pytest.fixture(scope="module")
def comm_hooks() -> str:
    return library("tests/support/cpp_hooks", "comm_hooks")


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


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
            count for name, count in counters["graph_break"].items() if "_finish_untraced" in name
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
    """Untraced roads run it in C++; traced ones, as one graph break."""
    eager = Mode(mode.model, "eager")
    expected = two_ranks.run(_train, comm_hooks, eager, (name, 1), {})
    got = two_ranks.run(_train, comm_hooks, mode, (name, 0), {})
    for python, cpp in zip(expected, got, strict=True):
        assert same(python["gradients"], cpp["gradients"])
        if mode.runner == "eager":  # else gradients come in another order
            assert python["stats"] == cpp["stats"]
        assert (cpp["breaks"] > 0) == mode.compiles_backward


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


def _train_mixed(rank: int, cpp: bool, use_ddp: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Mixed()
    if use_ddp:
        model = DDP(model)
    handle = attach(model, hooks.cpp("allreduce") if cpp else hooks.allreduce())
    for step in range(2):
        model.zero_grad()
        model(torch.tensor([rank, 3, step])).square().sum().backward()
    handle.remove()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("use_ddp", [False, True])
def test_layouts_and_dtypes(two_ranks: RankPool, use_ddp: bool) -> None:
    expected = two_ranks.run(_train_mixed, False, use_ddp)
    for a, b in zip(expected, two_ranks.run(_train_mixed, True, use_ddp), strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.layout == y.layout and torch.equal(x.to_dense(), y.to_dense())
            assert x.is_sparse or x.stride() == y.stride()


def _unused_and_accumulated(rank: int, cpp: bool) -> list[list[torch.Tensor | None]]:
    torch.manual_seed(0)
    model = Net()
    handle = attach(model, hooks.cpp("cast") if cpp else hooks.cast(), bucket_cap_mb=0.004)
    found = []
    for step in range(4):
        model.zero_grad()
        with handle.no_sync():
            model(net_batch(rank, step), skip=(1,) if step % 2 else ()).sum().backward()
        model(net_batch(rank, step + 9), skip=(rank + 2, 5)).sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    handle.remove()
    return found


def test_unused_parameters_and_accumulation(two_ranks: RankPool) -> None:
    expected, got = (two_ranks.run(_unused_and_accumulated, cpp) for cpp in (False, True))
    for a, b in zip(expected, got, strict=True):
        for step_a, step_b in zip(a, b, strict=True):
            for x, y in zip(step_a, step_b, strict=True):
                assert (x is None) == (y is None) and (x is None or torch.equal(x, y))


def _stages(rank: int, use_ddp: bool) -> dict[str, Any]:
    """Hooks around one in C++, which come and go; other hooks in its place."""
    model: nn.Module = module()
    if use_ddp:
        model = DDP(model, bucket_cap_mb=0.01)
    options = {} if use_ddp else {"bucket_cap_mb": 0.01}
    handle = attach(model, hooks.cpp("allreduce"), **options)
    found = []

    def step() -> None:
        model.zero_grad()
        model(batch(rank, 0)).square().sum().backward()
        found.append(gradients_of(model))

    step()
    seen: list[int] = []
    around = [
        handle.register_posthook(lambda reduced, local: tuple(2 * grad for grad in reduced)),
        handle.register_post_accumulate_hook(lambda bucket: seen.append(bucket.index())),
    ]
    step()
    for each in around:
        each.remove()
    step()
    handle.replace(hooks.allreduce())
    step()
    handle.replace(hooks.cpp("allreduce"))
    step()
    steps = handle.stats().steps
    handle.remove()
    if use_ddp:
        step()  # as DDP alone
    else:
        found.append(found[-1])
    return {"found": found, "seen": seen, "steps": steps}


@pytest.mark.parametrize("use_ddp", [False, True])
def test_hooks_around_it(two_ranks: RankPool, use_ddp: bool) -> None:
    for result in two_ranks.run(_stages, use_ddp):
        first, doubled, *others = result["found"]
        assert all(torch.equal(2 * a, b) for a, b in zip(first, doubled, strict=True))
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        assert len(result["seen"]) > 1 and result["steps"] == 1


def _fails(rank: int, path: str, mode: Mode, call: int) -> list[str]:
    load_cpp_hooks(path)
    torch._dynamo.reset()
    model = mode.wrap(module())
    # Ranks compare what they attach: nobody may see that rank 1's never fails.
    hook = hooks.cpp("fails_at", call=call if rank == 0 else 1000)
    printed = "torch_commhook.attachment.attaching.printed_hook"
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


def _wrong(rank: int, path: str, use_ddp: bool, how: str) -> str:
    load_cpp_hooks(path)
    return _error_of_step(rank, use_ddp, hooks.cpp("wrong", how=how))


@pytest.mark.parametrize("use_ddp", [False, True])
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
def test_what_a_hook_can_do_wrong(
    two_ranks: RankPool, comm_hooks: str, use_ddp: bool, how: str, message: str
) -> None:
    for raised in two_ranks.run(_wrong, comm_hooks, use_ddp, how):
        assert message in raised or raised.startswith("PeerError"), raised


def _takes_the_buffer(rank: int, path: str, use_ddp: bool) -> str:
    """A module's reducer gathers the gradients again; DDP has no other buffer."""
    load_cpp_hooks(path)
    model = DDP(module()) if use_ddp else module()
    handle = attach(model, hooks.cpp("wrong", how="takes the buffer"))
    try:
        model(batch(rank, 0)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        handle.remove()
    return "good"


def test_a_buffer_that_is_taken_away(two_ranks: RankPool, comm_hooks: str) -> None:
    assert two_ranks.run(_takes_the_buffer, comm_hooks, False) == ["good", "good"]
    for raised in two_ranks.run(_takes_the_buffer, comm_hooks, True):
        expected = ("the buffer was moved out of this bucket", "this step failed on rank")
        assert any(text in raised for text in expected)


def _mean_in_gradient(state: object, bucket: GradBucket) -> torch.futures.Future:
    gradient = bucket.parameters()[0].grad
    gradient /= torch.distributed.get_world_size()
    return torch.distributed.all_reduce(gradient.view(-1), async_op=True).get_future()


def _in_gradient(rank: int, path: str, use_ddp: bool, views: bool) -> list[list[torch.Tensor]]:
    load_cpp_hooks(path)
    found = []
    for hook in (hooks.allreduce(), hooks.cpp("in_gradient"), _mean_in_gradient):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(4, 2, bias=False)
        options = {"gradient_as_bucket_view": views}
        if use_ddp:
            model, options = DDP(model, **options), {}
        handle = attach(model, hook, **options)
        for step in range(2):
            model(batch(rank, step)[:, :4]).square().sum().backward()
        found.append(gradients_of(model))
        handle.remove()
    return found


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("use_ddp", [False, True])
def test_a_result_in_the_gradients_own_memory(
    two_ranks: RankPool, comm_hooks: str, use_ddp: bool, views: bool
) -> None:
    for expected, *others in two_ranks.run(_in_gradient, comm_hooks, use_ddp, views):
        assert same([expected, expected], others)


def _complex(rank: int, path: str, use_ddp: bool, cpp: bool) -> list[torch.Tensor]:
    load_cpp_hooks(path)
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 2, dtype=torch.cfloat)
    if use_ddp:
        model = DDP(model)
    handle = attach(model, hooks.cpp("gradients") if cpp else hooks.allreduce())
    handle.register_prehook(lambda gradients: tuple(2 * gradient for gradient in gradients))
    handle.register_posthook(lambda reduced, local: tuple(grad + 1j for grad in reduced))
    model(torch.full((3,), 1.0 + rank + 2j)).abs().sum().backward()
    handle.remove()
    return gradients_of(model)


@pytest.mark.parametrize("use_ddp", [False, True])
def test_complex_gradients_one_by_one(two_ranks: RankPool, comm_hooks: str, use_ddp: bool) -> None:
    expected = two_ranks.run(_complex, comm_hooks, False, False)
    got = two_ranks.run(_complex, comm_hooks, use_ddp, True)
    for a, b in zip(expected, got, strict=True):
        assert all(torch.allclose(x, y) for x, y in zip(a, b, strict=True))


def _never(rank: int, path: str, use_ddp: bool) -> tuple[list[str], list[str]]:
    load_cpp_hooks(path)
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
    return found, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("use_ddp", [False, True])
def test_a_future_that_never_completes(two_ranks: RankPool, comm_hooks: str, use_ddp: bool) -> None:
    for found, warned in two_ranks.run(_never, comm_hooks, use_ddp):
        assert len(found) == 2
        for raised in found:
            assert raised.startswith("TimeoutError: hook '")
            assert "on bucket 0 of 1: its Future is not complete after 1 seconds" in raised
        assert not [text for text in warned if "after another bucket failed" in text]


def _not_a_member(rank: int, use_ddp: bool) -> str:
    alone = torch.distributed.new_group([0])
    return _error_of_step(rank, use_ddp, hooks.cpp("allreduce", process_group=alone))


@pytest.mark.parametrize("use_ddp", [False, True])
def test_a_group_that_a_rank_is_not_in(two_ranks: RankPool, use_ddp: bool) -> None:
    zero, one = two_ranks.run(_not_a_member, use_ddp)
    assert "ValueError: torch_commhook: this rank is not a member" in one
    assert zero.startswith("PeerError") and "on rank 1: ValueError: torch_commhook: this" in zero


def _registered_with_ddp(rank: int) -> bool:
    model = DDP(module(), bucket_cap_mb=0.01)
    model.register_comm_hook(None, hooks.cpp("cast", dtype=torch.float16))
    plain = DDP(module(), bucket_cap_mb=0.01)
    attach(plain, hooks.cast(torch.float16))
    for of in (model, plain):
        for step in range(2):
            of.zero_grad()
            of(batch(rank, step)).sum().backward()
    return same([gradients_of(model)], [gradients_of(plain)])


def test_registered_with_ddp(two_ranks: RankPool) -> None:
    assert two_ranks.run(_registered_with_ddp) == [True, True]


# ---- the GIL -------------------------------------------------------------------------------------


def _cpp_on_ddp(net: nn.Module, bucket_cap_mb: float) -> nn.Module:
    model = ddp_alone(net, bucket_cap_mb)
    attach(model, hooks.cpp("cast"))
    return model


def _cpp_on_module(net: nn.Module, bucket_cap_mb: float) -> nn.Module:
    attach(net, hooks.cpp("cast"), bucket_cap_mb=bucket_cap_mb)
    return net


def _gil_calls(rank: int) -> list[Any]:
    return [gil_calls_per_bucket(make) for make in (ddp_alone, _cpp_on_ddp, _cpp_on_module)]


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
@pytest.mark.parametrize("use_ddp", [False, True])
def test_waiting_takes_the_gil_seldom(two_ranks: RankPool, comm_hooks: str, use_ddp: bool) -> None:
    quick = two_ranks.run(_gil_calls_while_waiting, comm_hooks, 0.001, use_ddp)
    slow = two_ranks.run(_gil_calls_while_waiting, comm_hooks, 0.8, use_ddp)
    for few, many in zip(quick, slow, strict=True):
        # Ctrl-C is looked for twice a second, not each time that a wait ends without a result (20
        # times a second). Without a wait one backward differs from another by up to 5.
        assert many <= few + 9


@pytest.mark.usefixtures("gil_counter")
def test_no_gil_per_bucket(two_ranks: RankPool) -> None:
    for ddp, *ours in two_ranks.run(_gil_calls):
        for cpp in ours:
            assert abs(cpp.per_bucket - ddp.per_bucket) <= NOISE, (ddp, cpp)
