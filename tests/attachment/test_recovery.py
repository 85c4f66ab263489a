"""Hooks that fail on one rank: an exception on all ranks in that step, and the next one works."""

from __future__ import annotations

import random
import re
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import (
    BUCKET_CAP_MB,
    TRACED_MODES,
    Mode,
    OwnError,
    batch,
    compiled_backward,
    equal,
    gradients,
    module,
    of_a_work,
    outcome,
)
from on_ranks import of_all_ranks, on_processes
from rank_pool import RankPool
from sharded_models import Mesh, by_layer, layers, local
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from torch_commhook import (
    GradBucket,
    HookHandle,
    PeerError,
    attach,
    collectives,
    hooks,
    parse_hook,
)
from torch_commhook.collectives.futures import set_outcome
from torch_commhook.step.step_group import StepGroup, found_by


class Flaky:
    """Averages, and raises on a bucket when it is told to."""

    def __init__(self) -> None:
        self.fails_on = -1

    def __call__(self, state: object, bucket: GradBucket) -> torch.Tensor:
        if bucket.index() == self.fails_on:
            raise OwnError("boo")
        group = bucket.process_group()
        return collectives.all_reduce(bucket.buffer() / group.size(), group=group).wait()


def _healthy(rank: int) -> list[torch.Tensor]:
    model = module()
    with attach(model, Flaky(), bucket_cap_mb=BUCKET_CAP_MB):
        model(batch(rank, 1)).square().sum().backward()
    return gradients(model)


def _fails_often(rank: int, mode: Mode, steps: int) -> None:
    """One rank fails in each of so many steps; steps in between give the right gradients."""
    torch._dynamo.reset()
    want = _healthy(rank)
    model = mode.wrap(module())
    hook = Flaky()
    handle = attach(model, hook, **mode.attach_options)
    dice = random.Random(3)
    with mode.step_function(model) as step:
        for number in range(2):
            model.zero_grad()
            step(batch(rank, number))
        buckets = len(handle.stats().buckets)
        assert buckets > 2
        for number in range(steps):
            fails, bucket = dice.randrange(2), dice.randrange(buckets)
            hook.fails_on = bucket if fails == rank else -1
            model.zero_grad()
            try:
                step(batch(rank, number))
                raise AssertionError("no exception")
            except OwnError as error:
                assert fails == rank, error
            except PeerError as error:
                assert fails != rank, error
                assert f"on rank {fails}: OwnError: boo" in str(error)
            hook.fails_on = -1
            if number % 5 == 0 or number == steps - 1:
                model.zero_grad()
                step(batch(rank, 1))
                assert equal(gradients(model), want), number
    handle.remove()


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


@pytest.mark.parametrize(("mode", "steps"), MANY_STEPS)
def test_many_steps_that_fail(two_ranks: RankPool, mode: Mode, steps: int) -> None:
    two_ranks.run(_fails_often, mode, steps, timeout=180)


# ---- other ways to fail --------------------------------------------------------------------------

TIMEOUT_SECONDS = 600  # far more than the pool waits for an answer
BRIEF_SECONDS = 5  # of collectives, where a test waits for it; compiling takes ranks apart by some


class Broken:
    """Averages, except where it is told not to."""

    def __init__(self) -> None:
        self.how = ""

    def __call__(self, state: object, bucket: GradBucket) -> Any:
        group = bucket.process_group()
        how = self.how if bucket.index() == 1 else ""
        if how == "returns None":
            return None
        future = collectives.all_reduce(bucket.buffer() / group.size(), group=group)
        if how == "never completes":
            return torch.futures.Future()
        if how == "too long":
            return future.then(lambda done: torch.ones(3))
        if how == "callback raises":
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
@on_processes
def test_what_fails_on_one_rank(rank: int, mode: Mode, how: str) -> None:
    torch._dynamo.reset()
    seconds = BRIEF_SECONDS if how == "never completes" else TIMEOUT_SECONDS
    hook = Broken()
    model, handle = _attached_with_timeout(mode, hook, seconds)
    with mode.step_function(model) as step:

        def outcome_of_step(how: str = "") -> str:
            hook.how = how
            model.zero_grad()
            return outcome(lambda: step(batch(rank, 1)))

        assert [outcome_of_step() for _ in range(2)] == ["done"] * 2
        want = gradients(model)
        raised = outcome_of_step(how if rank == 0 else "")
        assert outcome_of_step() == "done"
    assert equal(gradients(model), want)
    handle.remove()
    if rank == 0:
        assert re.match(FAILURES[how], raised), raised
    elif how == "never completes":
        assert raised != "done"
    else:
        assert raised.startswith("PeerError: torch_commhook: this step failed on rank 0: "), raised


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("kind", ["ddp", "python_reducer", "module"])
@pytest.mark.parametrize("inner", [hooks.blockwise(), of_a_work], ids=["blockwise", "of_a_work"])
@on_processes
def test_the_first_step_of_a_hook_around_another(
    rank: int, kind: str, fails: int, inner: Any
) -> None:
    """A function that calls a hook in stages, whose second ones have connections of their own."""
    mode = Mode(kind, "eager")
    happened = ""

    def hook(state: object, bucket: GradBucket) -> Any:
        if rank == fails and not happened:
            raise OwnError("boo")
        return inner(None, bucket)

    model, handle = _attached_with_timeout(mode, hook, TIMEOUT_SECONDS)
    with mode.step_function(model) as step:
        happened = outcome(lambda: step(batch(rank, 0)))
        model.zero_grad()
        step(batch(rank, 0))
        got = gradients(model)
        handle.replace(inner)
        model.zero_grad()
        step(batch(rank, 0))
    assert equal(gradients(model), got)
    handle.remove()
    told = f"PeerError: torch_commhook: this step failed on rank {fails}: OwnError: boo"
    assert happened == ("OwnError: boo" if rank == fails else told)


@on_processes
def test_a_peer_that_is_slow(rank: int) -> None:
    """Rank 1 has not come to the bucket yet when rank 0 fails."""
    model = module()
    hook = Flaky()
    handle = attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    model(batch(rank, 0)).square().sum().backward()
    hook.fails_on = 0 if rank == 0 else -1
    if rank == 1:
        time.sleep(1)
    raised = outcome(lambda: model(batch(rank, 0)).square().sum().backward())
    handle.remove()
    assert raised.startswith("PeerError" if rank else "OwnError")


WHOLE, SHARDED = ("module", "ddp", "python_reducer"), ("fsdp", "replicate", "hsdp")
LATE = [(kind, hook) for kind in (*WHOLE, *SHARDED) for hook in ("allreduce()", "blockwise()")]
LATE += [
    (kind, hook)
    for kind in (*WHOLE, "hsdp")
    for hook in ("cpp('allreduce')", "local_sgd(1)", "of_a_work")
]
LATE += [(kind, "at the end") for kind in WHOLE]  # of a step
LATE += [("fsdp", "in forward")]


@pytest.mark.parametrize(("kind", "hook"), LATE)
@on_processes
def test_a_late_rank(rank: int, kind: str, hook: str) -> None:
    """Rank 1 comes when rank 0 has given up. All models raise the same types, and continue."""
    model: Any = layers()
    groups = [dist.group.WORLD]
    if kind in SHARDED:
        mesh = Mesh.of(f"{kind}-2")
        groups = mesh.mesh.get_all_groups()
        by_layer(model, mesh)
    elif kind != "module":
        model = Mode(kind, "eager").wrap(model)
    try:
        for group in groups:
            distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
        own = {"of_a_work": of_a_work, "at the end": hooks.allreduce()}
        own["in forward"] = own["at the end"]
        handle = attach(model, own.get(hook) or parse_hook(hook))
    finally:
        for group in groups:
            distributed_c10d._set_pg_timeout(timedelta(seconds=30), group)
    store = distributed_c10d._get_default_store()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: list[str] = []
    of_steps = []

    def wait(*_: object) -> None:
        if len(found) == 1 and rank == 1:
            store.wait([f"late/{kind}/{hook}"], timedelta(seconds=20))

    if hook == "at the end":
        handle.register_posthook(wait)
    for is_late in (False, True, False):

        def step() -> None:
            optimizer.zero_grad()
            if hook == "in forward":
                wait()
            loss = model(torch.full((2, 5), rank + 1.0)).sum()
            if hook not in ("in forward", "at the end"):
                wait()
            loss.backward()
            optimizer.step()

        found.append(outcome(step))
        if is_late and rank == 0:
            store.set(f"late/{kind}/{hook}", "")
        of_all_ranks(None)
        if not is_late:
            of_steps.append([local(p.grad).clone() for p in model.parameters()])
    handle.remove()
    told = "PeerError: torch_commhook: this step failed on rank 0: " if rank else ""
    assert found[1].startswith(f"{told}TimeoutError: "), found
    assert found[::2] == ["done"] * 2
    assert equal(*of_steps)


def _to_attach(kind: str, seconds: float) -> tuple[Any, dict[str, Any]]:
    """A model and arguments of ``attach``, over a new group of both ranks with this timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    dist.barrier(group)
    if kind == "module":
        return layers(), {"process_group": group}
    if kind not in SHARDED:
        return Mode(kind, "eager").wrap(layers(), process_group=group), {}
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ranks",))
    model = layers()
    by_layer(model, Mesh(kind, mesh))
    return model, {}


@pytest.mark.parametrize("kind", ["module", "ddp", "fsdp", "replicate"])
@on_processes
def test_a_rank_that_is_late_to_attach(rank: int, kind: str) -> None:
    """All models raise the same type on both ranks, and a hook can be attached to another one."""
    store = distributed_c10d._get_default_store()
    model, options = _to_attach(kind, seconds=1)
    if rank == 1:
        store.wait([f"late to attach/{kind}"], timedelta(seconds=20))
    found = outcome(lambda: attach(model, hooks.allreduce(), **options))
    if rank == 0:
        store.set(f"late to attach/{kind}", "")
    errors = {each.partition(":")[0] for each in of_all_ranks(found)}
    assert errors <= {"RuntimeError", "DistStoreError", "DistBackendError"}, found
    again, options = _to_attach(kind, TIMEOUT_SECONDS)
    with attach(again, hooks.allreduce(), **options):
        again(torch.ones(2, 5)).sum().backward()


@on_processes
def test_an_error_elsewhere_in_backward(rank: int) -> None:
    """What leaves backward() on rank 0 is no hook's doing, so nobody tells rank 1 at once."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=BRIEF_SECONDS))
    model = module()
    handle = attach(model, hooks.allreduce(), bucket_cap_mb=BUCKET_CAP_MB, process_group=group)
    model(batch(rank, 0)).square().sum().backward()
    want = gradients(model)
    model.zero_grad()
    if rank == 0:
        failing = model[2].weight.register_hook(lambda gradient: 1 / 0)
    raised = outcome(lambda: model(batch(rank, 0)).square().sum().backward())
    if rank == 0:
        failing.remove()
    model.zero_grad()
    model(batch(rank, 0)).square().sum().backward()
    assert equal(gradients(model), want)
    handle.remove()
    assert raised.startswith("PeerError" if rank else "ZeroDivisionError")


class TwoSums(hooks.Hook):
    """Sums twice. Between the sums, a callback waits for ``go_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.is_between = threading.Event(), threading.Event()
        self.go_on.set()

    def average(self, bucket: GradBucket) -> torch.futures.Future:
        group, done = self.group(bucket), torch.futures.Future()
        sums = bucket.flatten(scale=0.5)

        def first_is_over(first: torch.futures.Future) -> None:
            self.is_between.set()
            self.go_on.wait(20)
            try:
                first.value()
                second = collectives.all_reduce(sums, group=group)
            except RuntimeError as error:
                done.set_exception(error)
            else:
                second.add_done_callback(lambda future: set_outcome(done, future.value))

        collectives.all_reduce(sums.clone(), group=group).add_done_callback(first_is_over)
        return done

    def __repr__(self) -> str:
        return "two_sums()"


@on_processes
def test_a_callback_of_a_failed_step_takes_no_part_in_the_next(rank: int) -> None:
    hook, model = TwoSums(), nn.Linear(64, 8)
    handle = attach(model, hook)

    def step(value: float, fails: bool = False) -> torch.Tensor:
        model.zero_grad()
        inputs = torch.full((1, 64), value, requires_grad=fails)
        if fails:
            inputs.register_hook(lambda _: hook.is_between.wait(20) and 1 / 0)
        model(inputs * 1.0).sum().backward()
        return model.weight.grad

    step(1.0)
    hook.is_between.clear()
    if rank == 0:
        hook.go_on.clear()
        threading.Timer(0.8, hook.go_on.set).start()
    else:
        time.sleep(0.2)  # else the callback may run at once on rank 0, in backward()
    assert outcome(lambda: step(100.0, rank == 0)) != "done"
    for value in (1.0, 2.0, 3.0, 4.0):
        assert torch.equal(step(value), torch.full((8, 64), value))
        time.sleep(0.4)  # a late callback would come now
    handle.remove()


@on_processes
def test_compiled_then_eager(rank: int) -> None:
    """A backward fails compiled; the next ones run in eager, and compiled again."""
    torch._dynamo.reset()
    model = module()
    hook = Flaky()
    handle = attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    happened = []
    for runner in ("eager", "context", "context", "eager", "eager", "context"):
        hook.fails_on = 1 if len(happened) == 2 and rank == 0 else -1
        with Mode("module", runner, backend="aot_eager").step_function(model) as step:
            model.zero_grad()
            happened.append(outcome(lambda: step(batch(rank, 0))).partition(":")[0])
    handle.remove()
    # What compiled code waits for may fail with the backend's own error.
    failed = {"OwnError"} if rank == 0 else {"PeerError", "RuntimeError", "DistBackendError"}
    assert happened[2] in failed
    assert happened[:2] + happened[3:] == ["done"] * 5


@pytest.mark.parametrize("mode", [Mode("ddp", "eager"), Mode("module", "eager")], ids=str)
@on_processes
def test_a_post_accumulate_hook_that_raises(rank: int, mode: Mode) -> None:
    """The step has been agreed on by then: the other ranks have theirs, and stay in step."""
    model = mode.wrap(module())
    handle = attach(model, hooks.allreduce(), **mode.attach_options)
    happened = []
    with mode.step_function(model) as step:
        for number in range(4):
            registered = None
            if rank == 0 and number in (0, 2):
                registered = handle.register_post_accumulate_hook(lambda bucket: 1 / 0)
            model.zero_grad()
            happened.append(outcome(lambda: step(batch(rank, 1))))
            if registered is not None:
                registered.remove()
    got = gradients(model)
    handle.remove()
    raised = "done" if rank else "ZeroDivisionError: division by zero"
    assert happened == [raised, "done", raised, "done"]
    assert equal(got, _healthy(rank))


def _three(rank: int) -> None:
    model = module()
    hook = Flaky()
    handle = attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    for number in range(6):
        fault = number % 3
        hook.fails_on = fault if rank == fault else -1
        model.zero_grad()
        text = outcome(lambda: model(batch(rank, 0)).square().sum().backward())
        told = f"PeerError: torch_commhook: this step failed on rank {fault}: OwnError: boo"
        assert text == "OwnError: boo" if rank == fault else text.startswith(told)
    handle.remove()


def test_three_ranks_know_whose_fault_it_was(three_ranks: RankPool) -> None:
    three_ranks.run(_three)


# ---- ranks and models that are not in step -------------------------------------------------------


@on_processes
def test_a_rank_that_is_late_after_a_failure(rank: int) -> None:
    """After a step that failed, one rank comes later than the group's timeout."""
    hook = Flaky()
    model = nn.Linear(4, 4)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=BRIEF_SECONDS))
    handle = attach(model, hook, process_group=group)
    outcomes: list[str] = []
    for number in range(8):
        hook.fails_on = 0 if number == 1 and rank == 0 else -1
        if number == 2 and rank == 1:
            time.sleep(BRIEF_SECONDS + 1)
        outcomes.append(outcome(lambda: model(torch.ones(2, 4)).sum().backward()))
        if outcomes.count("done") == 4:  # a rank that has waited in vain has made one step more
            break
    handle.remove()
    if rank == 0:
        assert "could not reach the other ranks again" in outcomes[2]
        del outcomes[2]
    assert outcomes[2:] == ["done"] * 3


def _fails_as_soon_as_it_is_connected(rank: int) -> None:
    group = StepGroup()
    for _ in range(100):
        group.fail("at once")
        group.connect()
    group.begin()
    group.end()
    group.close()


def test_a_failure_before_the_others_have_connected(three_ranks: RankPool) -> None:
    """It does not make their connecting fail too."""
    three_ranks.run(_fails_as_soon_as_it_is_connected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("which", [0, 1])
@on_processes
def test_two_models_in_one_backward(rank: int, which: int, compiled: bool) -> None:
    torch._dynamo.reset()
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    flaky = [Flaky(), Flaky()]
    handles = [attach(model, hook) for model, hook in zip(models, flaky, strict=True)]
    outcomes = []
    for number in range(4):
        flaky[which].fails_on = 0 if number == 1 and rank == 0 else -1
        loss = models[1](models[0](torch.ones(2, 4))).sum()
        with compiled_backward(compiled):
            outcomes.append(outcome(loss.backward).partition(":")[0])
    for handle in handles:
        handle.remove()
    # What compiled code waits for may fail with the backend's own error.
    of_peer = {"PeerError", "RuntimeError"} if compiled else {"PeerError"}
    assert outcomes[1] in (of_peer if rank else {"OwnError"})
    assert outcomes[:1] + outcomes[2:] == ["done"] * 3


@on_processes
def test_a_group_that_its_own_thread_drops(rank: int) -> None:
    """What a callback has kept goes with it, on a thread that must not wait for its own end."""
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
    while found_by(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ran and found_by(name) is None


def _fail_in_subgroup(rank: int, is_ddp: bool) -> list[str]:
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    outer, hook = module(), Flaky()
    if is_ddp:
        outer = nn.parallel.DistributedDataParallel(outer, process_group=group)
    handle = attach(outer, hook, process_group=None if is_ddp else group)
    hook.fails_on = 0 if rank == 2 else -1
    return [
        outcome(outer(batch(rank, 0)).sum().backward),
        outcome(lambda: handle.replace(hooks.cast() if rank == 2 else hooks.allreduce())),
    ]


@pytest.mark.parametrize("is_ddp", [False, True])
def test_errors_name_ranks_of_the_world(three_ranks: RankPool, is_ddp: bool) -> None:
    _, (peer, differs), _ = three_ranks.run(_fail_in_subgroup, is_ddp)
    assert peer.startswith("PeerError: torch_commhook: this step failed on rank 2: OwnError: boo")
    assert differs.endswith("rank 1 has allreduce(), rank 2 has cast(bfloat16)")
