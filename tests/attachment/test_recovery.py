"""Hooks that fail on one rank: an exception on all ranks in that step, and the next one works."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import OwnError, batch, gradients, module
from modes import BUCKET_CAP_MB, TRACED_MODES, Mode
from rank_pool import RankPool
from torch import nn

from torch_commhook import GradBucket, HookHandle, PeerError, attach, collectives, hooks, traceable
from torch_commhook.step.step_group import StepGroup, groups_by_name


class Flaky:
    """Averages, and raises on a bucket when it is told to."""

    def __init__(self) -> None:
        self.fails_on = -1

    def __call__(self, state: object, bucket: GradBucket) -> torch.Tensor:
        if bucket.index() == self.fails_on:
            raise OwnError("boo")
        group = bucket.process_group()
        return collectives.all_reduce(bucket.buffer() / group.size(), group=group).wait()


@traceable
class TracedFlaky(Flaky):
    pass


def _flaky(rank: int, mode: Mode, traced: bool, steps: int) -> dict[str, Any]:
    torch._dynamo.reset()
    model = mode.wrap(module())
    hook = TracedFlaky() if traced else Flaky()
    handle = attach(model, hook, **mode.attach_options)
    dice = random.Random(3)
    own, peers = 0, 0
    with mode.step_function(model) as step:
        for number in range(2):
            model.zero_grad()
            step(batch(rank, number))
        buckets = len(handle.stats().buckets)
        for number in range(steps):
            fails, bucket = dice.randrange(2), dice.randrange(buckets)
            if traced:  # each is compiled anew
                bucket = 0 if bucket % 2 else buckets - 1
            hook.fails_on = bucket if fails == rank else -1
            model.zero_grad()
            try:
                step(batch(rank, number))
                raise AssertionError("no exception")
            except OwnError as error:
                assert fails == rank, error
                own += 1
            except PeerError as error:
                assert fails != rank, error
                assert f"on rank {fails}: OwnError: boo" in str(error)
                peers += 1
            except RuntimeError as error:  # compiled code waits for the collective itself
                assert fails != rank and mode.compiles_backward and traced, error
                assert "by peer" in str(error)
                peers += 1
            hook.fails_on = -1
            if number % 5 == 0 or number == steps - 1:
                model.zero_grad()
                step(batch(rank, 1))
                got = gradients(model)
    handle.remove()
    return {"own": own, "peers": peers, "gradients": got, "buckets": buckets}


def _healthy(rank: int) -> list[torch.Tensor]:
    model = module()
    handle = attach(model, Flaky(), bucket_cap_mb=BUCKET_CAP_MB)
    model(batch(rank, 1)).square().sum().backward()
    got = gradients(model)
    handle.remove()
    return got


#: Each step of a backward that is compiled and fails takes as long as ten of others.
MANY_STEPS = [
    pytest.param(mode, steps, marks=pytest.mark.long if long else [], id=f"{mode}-{steps}")
    for mode in TRACED_MODES
    if not mode.fullgraph
    for steps, long in (
        [(50, False)]
        if not mode.compiles_backward
        else [(10, False), (50, True)]
        if mode.model == "module"
        else [(50, True)]
    )
]


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "traceable"])
@pytest.mark.parametrize(("mode", "steps"), MANY_STEPS)
def test_many_steps_that_fail(two_ranks: RankPool, mode: Mode, steps: int, traced: bool) -> None:
    results = two_ranks.run(_flaky, mode, traced, steps, timeout=180)
    assert results[0]["own"] + results[1]["own"] == steps
    assert results[0]["peers"] + results[1]["peers"] == steps
    for result, want in zip(results, two_ranks.run(_healthy), strict=True):
        assert result["buckets"] > 2
        assert all(torch.equal(a, b) for a, b in zip(result["gradients"], want, strict=True))


# ---- other ways to fail --------------------------------------------------------------------------

TIMEOUT_SECONDS = 600  # far more than the pool waits for an answer
BRIEF_SECONDS = 5  # of collectives, where a test waits for it; compiling takes ranks apart by some


class Broken:
    """Averages, except where it is told not to."""

    def __init__(self) -> None:
        self.how = ""

    def __call__(self, state: object, bucket: GradBucket) -> Any:
        group = bucket.process_group()
        if self.how == "returns None" and bucket.index() == 1:
            return None
        future = collectives.all_reduce(bucket.buffer() / group.size(), group=group)
        if self.how == "never completes" and bucket.index() == 1:
            return torch.futures.Future()
        if self.how == "too long" and bucket.index() == 1:
            return future.then(lambda done: torch.ones(3))
        if self.how == "callback raises" and bucket.index() == 1:
            return future.then(lambda done: 1 / 0)
        return future


FAILURES = {
    "returns None": r"TypeError: hook '.*Broken object' on bucket 1 of \d: must return",
    "too long": r"ValueError: hook '.*Broken object' on bucket 1 of \d: the result must have",
    "callback raises": r"(.|\n)*ZeroDivisionError",
    "never completes": r"(TimeoutError|RuntimeError): hook '.*' on bucket 1 of \d: its Future is",
}


def _attached_with_timeout(mode: Mode, hook: Any, seconds: float) -> tuple[Any, HookHandle]:
    """A model and the handle of its hook, over a group of both ranks with this timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    if mode.model != "module":
        model = mode.wrap(module(), process_group=group)
        return model, attach(model, hook)
    model = mode.wrap(module())
    return model, attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB, process_group=group)


def _breaks_on_rank_0(rank: int, mode: Mode, how: str) -> tuple[str, bool]:
    torch._dynamo.reset()
    hook = Broken()
    seconds = BRIEF_SECONDS if how == "never completes" else TIMEOUT_SECONDS
    model, handle = _attached_with_timeout(mode, hook, seconds)
    with mode.step_function(model) as step:
        for _ in range(2):
            model.zero_grad()
            step(batch(rank, 1))
        want = gradients(model)
        hook.how = how if rank == 0 else ""
        model.zero_grad()
        try:
            step(batch(rank, 1))
            raised = "nothing"
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        hook.how = ""
        model.zero_grad()
        step(batch(rank, 1))
    right = all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))
    handle.remove()
    return raised, right


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize(
    "mode",
    [
        Mode("ddp", "eager"),
        Mode("python_reducer", "eager"),
        Mode("module", "eager"),
        Mode("module", "compile", backend="aot_eager"),
        Mode("module", "context", backend="aot_eager"),
    ],
    ids=str,
)
def test_what_fails_on_one_rank(two_ranks: RankPool, mode: Mode, how: str) -> None:
    (own, right), (others, also_right) = two_ranks.run(_breaks_on_rank_0, mode, how)
    assert re.match(FAILURES[how], own), own
    assert others != "nothing"
    if how != "never completes":
        assert others.startswith("PeerError: torch_commhook: this step failed on rank 0: "), others
    assert right and also_right


def _fails_before_a_hook_inside(rank: int, mode: Mode, fails: int) -> tuple[str, bool]:
    """A function that calls a hook in stages, whose second ones have connections of their own."""
    inner = hooks.blockwise()
    happened: list[str] = []

    def hook(state: object, bucket: GradBucket) -> Any:
        if rank == fails and not happened:
            raise OwnError("boo")
        return inner(None, bucket)

    model, handle = _attached_with_timeout(mode, hook, TIMEOUT_SECONDS)
    with mode.step_function(model) as step:
        try:
            step(batch(rank, 0))
        except Exception as error:
            happened.append(f"{type(error).__name__}: {error}")
        model.zero_grad()
        step(batch(rank, 0))
        got = gradients(model)
        handle.replace(hooks.blockwise())
        model.zero_grad()
        step(batch(rank, 0))
    right = all(torch.equal(a, b) for a, b in zip(gradients(model), got, strict=True))
    handle.remove()
    return happened[0], right


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "python_reducer", "module"])
def test_the_first_step_of_a_hook_around_another(
    two_ranks: RankPool, kind: str, fails: int
) -> None:
    results = two_ranks.run(_fails_before_a_hook_inside, Mode(kind, "eager"), fails)
    for rank, (raised, right) in enumerate(results):
        told = f"PeerError: torch_commhook: this step failed on rank {fails}: OwnError: boo"
        assert raised == ("OwnError: boo" if rank == fails else told)
        assert right


def _raises_while_a_peer_is_slow(rank: int) -> str:
    """Rank 1 has not come to the bucket yet when rank 0 fails."""
    model = module()
    hook = Flaky()
    handle = attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    model(batch(rank, 0)).square().sum().backward()
    hook.fails_on = 0 if rank == 0 else -1
    if rank == 1:
        time.sleep(1)
    try:
        model(batch(rank, 0)).square().sum().backward()
        raised = "nothing"
    except Exception as error:
        raised = type(error).__name__
    handle.remove()
    return raised


def test_a_peer_that_is_slow(two_ranks: RankPool) -> None:
    assert two_ranks.run(_raises_while_a_peer_is_slow) == ["OwnError", "PeerError"]


def _other_error_in_backward(rank: int) -> tuple[str, bool]:
    """What leaves backward() on rank 0 is no hook's doing, so nobody tells rank 1 at once."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=BRIEF_SECONDS))
    model = module()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=BUCKET_CAP_MB, process_group=group)
    model(batch(rank, 0)).square().sum().backward()
    want = gradients(model)
    model.zero_grad()
    if rank == 0:
        failing = model[2].weight.register_hook(lambda gradient: 1 / 0)
    raised = "nothing"
    try:
        model(batch(rank, 0)).square().sum().backward()
    except Exception as error:
        raised = type(error).__name__
    if rank == 0:
        failing.remove()
    model.zero_grad()
    model(batch(rank, 0)).square().sum().backward()
    right = all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))
    handle.remove()
    return raised, right


def test_an_error_elsewhere_in_backward(two_ranks: RankPool) -> None:
    own, others = two_ranks.run(_other_error_in_backward)
    assert own == ("ZeroDivisionError", True)
    assert others == ("PeerError", True)


def _compiled_then_eager(rank: int) -> list[str]:
    """A backward fails compiled; the next ones run in eager, and compiled again."""
    torch._dynamo.reset()
    model = module()
    hook = TracedFlaky()
    handle = attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    happened = []
    for runner in ("eager", "context", "context", "eager", "eager", "context"):
        hook.fails_on = 1 if len(happened) == 2 and rank == 0 else -1
        with Mode("module", runner, backend="aot_eager").step_function(model) as step:
            model.zero_grad()
            try:
                step(batch(rank, 0))
                happened.append("done")
            except RuntimeError:
                happened.append("ended by a peer")
            except OwnError:
                happened.append("failed")
    handle.remove()
    return happened


def test_compiled_then_eager(two_ranks: RankPool) -> None:
    own, others = two_ranks.run(_compiled_then_eager, timeout=120)
    assert own == ["done", "done", "failed", "done", "done", "done"]
    assert others == ["done", "done", "ended by a peer", "done", "done", "done"]


def _post_accumulate_hook_raises(rank: int, mode: Mode) -> tuple[list[str], bool]:
    model = mode.wrap(module())
    handle = attach(model, hooks.allreduce(), **mode.attach_options)
    happened = []
    with mode.step_function(model) as step:
        for number in range(4):
            registered = None
            if rank == 0 and number in (0, 2):
                registered = handle.register_post_accumulate_hook(lambda bucket: 1 / 0)
            model.zero_grad()
            try:
                step(batch(rank, 1))
                happened.append("done")
            except ZeroDivisionError:
                happened.append("raised")
            if registered is not None:
                registered.remove()
    got = gradients(model)
    handle.remove()
    want = _healthy(rank)
    return happened, all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("mode", [Mode("ddp", "eager"), Mode("module", "eager")], ids=str)
def test_a_post_accumulate_hook_that_raises(two_ranks: RankPool, mode: Mode) -> None:
    """The step has been agreed on by then: the other ranks have theirs, and stay in step."""
    own, others = two_ranks.run(_post_accumulate_hook_raises, mode)
    assert own == (["raised", "done", "raised", "done"], True)
    assert others == (["done"] * 4, True)


def _three(rank: int) -> list[str]:
    model = module()
    hook = Flaky()
    handle = attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    happened = []
    for number in range(6):
        hook.fails_on = number % 3 if rank == number % 3 else -1
        model.zero_grad()
        try:
            model(batch(rank, 0)).square().sum().backward()
            happened.append("done")
        except (OwnError, PeerError) as error:
            happened.append(str(error))
    handle.remove()
    return happened


def test_three_ranks_know_whose_fault_it_was(three_ranks: RankPool) -> None:
    for rank, happened in enumerate(three_ranks.run(_three)):
        for number, text in enumerate(happened):
            fault = number % 3
            assert text == "boo" if fault == rank else f"on rank {fault}: OwnError" in text


# ---- ranks and models that are not in step -------------------------------------------------------


def _late(rank: int) -> list[str]:
    """After a step that failed, one rank comes later than the group's timeout."""
    hook = Flaky()
    model = nn.Linear(4, 4)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=BRIEF_SECONDS))
    handle = attach(model, hook, process_group=group)
    outcomes = []
    good = 0
    for number in range(8):
        hook.fails_on = 0 if number == 1 and rank == 0 else -1
        if number == 2 and rank == 1:
            time.sleep(BRIEF_SECONDS + 1)
        try:
            model(torch.ones(2, 4)).sum().backward()
            good += 1
            outcomes.append("good")
        except (RuntimeError, OwnError) as error:
            outcomes.append(str(error))
        if good == 4:  # a rank that has waited in vain has made one step more
            break
    handle.remove()
    return outcomes


def test_a_rank_that_is_late_after_a_failure(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_late, timeout=60)
    assert "could not reach the other ranks again" in first[2]
    assert first[3:] == ["good"] * 3
    assert second[2:] == ["good"] * 3


def _fails_as_soon_as_it_is_connected(rank: int, times: int) -> None:
    group = StepGroup()
    for _ in range(times):
        group.fail("at once")
        group.connect()
    group.begin()
    group.end()
    group.close()


def test_a_failure_before_the_others_have_connected(three_ranks: RankPool) -> None:
    """It does not make their connecting fail too."""
    three_ranks.run(_fails_as_soon_as_it_is_connected, 100)


def _two_models(rank: int, which: int, compiled: bool) -> list[str]:
    torch._dynamo.reset()
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    flaky = [TracedFlaky(), TracedFlaky()]
    handles = [attach(model, hook) for model, hook in zip(models, flaky, strict=True)]
    outcomes = []
    for number in range(4):
        flaky[which].fails_on = 0 if number == 1 and rank == 0 else -1
        loss = models[1](models[0](torch.ones(2, 4))).sum()
        compiler = torch.compile(backend="aot_eager")
        context: Any = torch._dynamo.compiled_autograd._enable(compiler)
        try:
            with context if compiled else contextlib.nullcontext():
                loss.backward()
            outcomes.append("good")
        except Exception as error:
            outcomes.append(type(error).__name__)
    for handle in handles:
        handle.remove()
    return outcomes


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("which", [0, 1])
def test_two_models_in_one_backward(two_ranks: RankPool, which: int, compiled: bool) -> None:
    first, second = two_ranks.run(_two_models, which, compiled, timeout=60)
    assert first == ["good", "OwnError", "good", "good"]
    assert second[:1] + second[2:] == ["good"] * 3
    # What compiled code waits for may fail with the backend's own error.
    assert second[1] in ({"PeerError", "RuntimeError"} if compiled else {"PeerError"})


def _held_last_by_a_backend(rank: int) -> tuple[bool, bool]:
    step_group = StepGroup()
    name = step_group.name
    runs, may_end = threading.Event(), threading.Event()

    def last(_: object, kept: StepGroup = step_group) -> None:
        runs.set()
        may_end.wait(10)

    future = step_group.group.allreduce([torch.ones(2)]).get_future()
    future.add_done_callback(last)
    del future, last, step_group
    ran = runs.wait(10)
    may_end.set()
    deadline = time.monotonic() + 10
    while name in groups_by_name and time.monotonic() < deadline:
        time.sleep(0.01)
    return ran, name in groups_by_name


def test_a_group_that_its_own_thread_drops(two_ranks: RankPool) -> None:
    """What a callback has kept goes with it, on a thread that must not wait for its own end."""
    assert two_ranks.run(_held_last_by_a_backend) == [(True, False)] * 2


def _fail_in_subgroup(rank: int, is_ddp: bool) -> list[str]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    outer, hook = module(), Flaky()
    if is_ddp:
        outer = nn.parallel.DistributedDataParallel(outer, process_group=group)
    handle = attach(outer, hook, process_group=None if is_ddp else group)
    hook.fails_on = 0 if rank == 2 else -1
    said = []
    try:
        outer(batch(rank, 0)).sum().backward()
    except (OwnError, PeerError) as error:
        said.append(f"{type(error).__name__}: {error}")
    try:
        handle.replace(hooks.cast() if rank == 2 else hooks.allreduce())
    except RuntimeError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("is_ddp", [False, True])
def test_errors_name_ranks_of_the_world(three_ranks: RankPool, is_ddp: bool) -> None:
    _, (peer, differs), _ = three_ranks.run(_fail_in_subgroup, is_ddp)
    assert peer.startswith("PeerError: torch_commhook: this step failed on rank 2: OwnError: boo")
    assert differs.endswith("this one has allreduce(), rank 2 has cast(bfloat16)")
