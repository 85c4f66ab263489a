"""``hooks.local_sgd`` where a rank fails: in its own step, in an exchange, or meanwhile."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from layered_net import batch
from local_training import (
    MEAN,
    Held,
    Streaming,
    Training,
    all_same,
    backward,
    farthest,
    net,
    parameters_of,
    same,
)
from mode_cases import OwnError
from on_ranks import of_all_ranks, on_processes, on_ranks
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import GradBucket, PeerError, attach, hooks
from torch_commhook.codecs import CODECS
from torch_commhook.hooks import compressed, error_feedback, local_sgd, outer_sgd, policy

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_OUTER = outer_sgd(0.7, 0.5)


class Flaky(hooks.allreduce):  # type: ignore[name-defined, misc]
    """Averages, but raises an error on the second bucket if :attr:`fails` is set."""

    fails = False

    def average(self, bucket: GradBucket) -> Any:
        if self.fails and bucket.index() == 1:
            raise OwnError("boo")
        return super().average(bucket)


class FlakyTopk(CODECS["topk"]):  # type: ignore[misc, name-defined]
    """Fails once while it adds messages, after all messages were sent."""

    def fail_once(self) -> None:
        """Makes the next sum fail."""
        self.__dict__["fails"] = True

    def fail_no_more(self) -> None:
        """Cancels a failure that has not happened."""
        self.__dict__.pop("fails", None)

    def decode_sum(self, *args: Any, **kwargs: Any) -> None:
        if self.__dict__.pop("fails", False):
            raise OwnError("boo")
        super().decode_sum(*args, **kwargs)


def error_of_step(run: Training) -> str:
    """Do a step that may fail, and check that a failure leaves the rank's own update.

    Returns:
        The kind of the error and its message; "" after a successful step.
    """
    before = run.parameters
    run.optimizer.zero_grad()
    backward(run.model, run.rank, run.done)
    run.done += 1
    gradients = [parameter.grad for parameter in run.model.parameters()]
    own = [p.add(g, alpha=-0.01) for p, g in zip(before, gradients, strict=True)]
    try:
        run.optimizer.step()
    except (OwnError, PeerError) as error:
        assert farthest(run.parameters, own) == 0
        return f"{type(error).__name__}: {error}"
    return ""


# ---- in a step of its own ------------------------------------------------------------------------


def _fail_backward(run: Training, part: nn.Module) -> None:
    """A backward of this rank alone, in which a stage raises."""

    def refuse(gradients: tuple[Tensor, ...]) -> None:
        raise OwnError("boo")

    stage = run.handle.register_prehook(refuse)
    with pytest.raises(OwnError):
        part(batch(run.rank, 2)).square().sum().backward()
    stage.remove()


@on_ranks(2)
def test_a_stage_that_fails_in_a_step_of_its_own(rank: int) -> None:
    """It is nothing to the other ranks, and the next exchange is as ever."""
    run = Training(rank, local_sgd(4))
    if rank == 0:
        _fail_backward(run, run.model.layers[0])  # in a bucket that lacks gradients
    run.train(2)
    run.end()
    assert all_same(of_all_ranks(run.parameters))


@on_ranks(2)
def test_a_backward_that_fails_while_an_exchange_is_under_way(rank: int) -> None:
    """It is this rank's own, and the exchange goes on."""
    run = Training(rank, local_sgd(3, outer=_OUTER, delay=2))
    run.train(3)
    if rank == 0:
        _fail_backward(run, run.model)
    run.train(1 + rank)  # what has failed counts as a step of its own
    together = run.parameters
    assert run.exchanges == 1
    run.end()
    assert all_same(of_all_ranks(together))  # with one fragment and no mix


@on_ranks(2)
def test_a_forward_that_is_refused_while_an_exchange_is_under_way(rank: int) -> None:
    """The forward of one rank does not end the exchange of the others."""
    run = Training(rank, local_sgd(2, outer=_OUTER, delay=1))
    run.train(2)
    if rank == 0:
        bias = run.model.layers[0].bias
        run.model.layers[0].bias = nn.Parameter(torch.zeros(24))
        with pytest.raises(RuntimeError, match="parameter"):
            run.model(batch(rank))
        run.model.layers[0].bias = bias
    assert error_of_step(run) == ""
    here, anchors = dict(run.model.named_parameters()), run.anchors
    assert same([here[name].detach() for name in anchors], list(anchors.values()))
    run.handle.remove()


@on_processes
def test_another_model_that_fails_while_an_exchange_is_under_way(rank: int) -> None:
    ends = []
    for fails in (False, True):
        flaky, held = Flaky(), Held()
        run = Training(rank, local_sgd(4, outer=_OUTER, hook=held, delay=3, mix=0.5), momentum=0.5)
        other = net()
        beside = attach(other, flaky, bucket_cap_mb=0.004)
        said = []
        for step in range(9):
            run.train()
            flaky.fails = fails and step == 4 and rank == 0
            other.zero_grad()
            try:
                backward(other, rank, step)
            except (OwnError, PeerError) as error:
                said.append((step, type(error)))
            if step == 4:
                held.release.set()
        assert said == ([(4, PeerError if rank else OwnError)] if fails else [])
        ends.append(run.parameters)
        beside.remove()
        run.end()
    assert all_same(ends)


# ---- in an exchange ------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["module", "ddp"])
@on_processes
def test_a_rank_that_fails_in_the_exchange(rank: int, road: str) -> None:
    """All raise, nothing has changed, and the next step tries again."""
    flaky = Flaky()
    run = Training(rank, local_sgd(2, hook=flaky), road)
    errors = {}
    for step in range(8):
        flaky.fails = step in (1, 2, 5) and step % 2 == rank
        if said := error_of_step(run):
            errors[step] = said
    # Due after steps 1, 2 and 3 (when it is done), and then after 5 and 6.
    kinds = {step: said.partition(":")[0] for step, said in errors.items()}
    assert kinds == {n: "OwnError" if n % 2 == rank else "PeerError" for n in (1, 2, 5)}
    assert rank == 1 or "on rank 1: OwnError: boo" in errors[1]
    assert run.exchanges == 2
    assert not all_same(of_all_ranks(run.parameters))  # one step after the last exchange
    run.handle.remove()


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("fails", [False, True])
@on_processes
def test_what_a_failed_exchange_has_sent_is_not_remembered_as_lost(
    rank: int, fails: bool, in_parts: bool
) -> None:
    """Neither of whole buckets nor, with a policy, of parts of them."""
    codec = FlakyTopk(0.25)
    model = nn.Linear(16, 16, bias=False)
    hook: Any = error_feedback(compressed(codec))
    if in_parts:
        hook = policy([], hook)
    handle = attach(model, local_sgd(1, outer=MEAN, hook=hook))
    begin = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradient = torch.randn(16, 16, generator=torch.Generator().manual_seed(rank))
    (model.weight * gradient).sum().backward()
    if fails and rank == 0:
        codec.fail_once()
    with pytest.raises((OwnError, PeerError)) if fails else nullcontext():
        optimizer.step()
    if fails:
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # tries again
    left = handle.state_dict()[f"rank{rank}"]["error"]["weight"]
    handle.remove()
    mean_left, wanted = (sum(of_all_ranks(each)) / 2 for each in (left, gradient * 0.1))
    assert torch.allclose(begin - model.weight.detach() + mean_left, wanted, atol=1e-6)


def _fails_at_begin(rank: int, road: str, fails: int) -> None:
    """All raise where it was to end, nothing has changed, and the next step tries again."""
    flaky = Flaky()
    hook = local_sgd(4, outer=_OUTER, hook=flaky, fragments=2, delay=1, mix=0.5)
    run = Training(rank, hook, road)
    said, exchanges = [], []
    for step in range(9):
        flaky.fails = step == 1 and fails == rank
        said.append(error_of_step(run))
        exchanges.append(run.exchanges)
    wanted = Streaming(3, 4, 2, 1, 0.5, _OUTER)
    wanted.optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in wanted.models]
    # Fragment 0 begins after step 4, not 2. Fragment 1, due after step 4, waits for its end.
    begins, ends = {4: 0, 5: 1, 7: 0}, {5, 6, 8}
    for step in range(1, 10):
        wanted.train()
        if step in ends:
            wanted.apply()
        if step in begins:
            wanted.begin(begins[step])
    assert [bool(each) for each in said] == [n == 2 for n in range(9)]
    assert said[2].startswith("OwnError: boo" if rank == fails else "PeerError")
    assert rank == fails or f"on rank {fails}: OwnError: boo" in said[2]
    assert exchanges == [0, 0, 0, 0, 1, 2, 2, 3, 3]
    anchors, named = run.anchors, dict(wanted.anchor.named_parameters())
    assert farthest(run.parameters, parameters_of(wanted.models[rank])) < 2e-6
    assert farthest(list(anchors.values()), [named[name] for name in anchors]) < 2e-6
    assert all_same(of_all_ranks(list(anchors.values())))
    run.end()


@pytest.mark.parametrize(("road", "fails"), [("module", 0), ("module", 2), ("ddp", 1)])
def test_a_rank_that_fails_where_an_exchange_begins(
    three_ranks: RankPool, road: str, fails: int
) -> None:
    three_ranks.run(_fails_at_begin, road, fails)


def _tensors(state: dict[str, Any], rank: int) -> dict[str, Tensor]:
    kinds = {**state[f"rank{rank}"], **state["shared"]}
    kinds.pop("local_sgd_parameter")
    return {f"{k} {n}": t for k, tensors in kinds.items() for n, t in tensors.items()}


@pytest.mark.parametrize("saves", [False, True])
@on_processes
def test_a_rank_that_fails_in_the_background(rank: int, saves: bool) -> None:
    """What it has sent is not remembered as sent."""
    codec = FlakyTopk(0.25)
    hook = local_sgd(4, hook=error_feedback(compressed(codec)), fragments=2, delay=1)
    run = Training(rank, hook)
    run.train(7)  # two exchanges, and what they have not sent
    before = _tensors(run.handle.state_dict(), rank)
    assert any(tensor.any() for name, tensor in before.items() if name.startswith("error"))

    def check_unchanged(state: dict[str, Any]) -> None:
        now = _tensors(state, rank)
        assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())

    if rank == 1:
        codec.fail_once()
    said = [error_of_step(run)]  # one begins
    if saves:  # as not begun, since it has failed
        state = run.handle.state_dict()
        assert state["local_steps"]["steps_in_flight"] == -1
        check_unchanged(state)
    said.append(error_of_step(run))
    check_unchanged(run.handle.state_dict())
    codec.fail_no_more()
    steps = [run.exchanges]
    said += [error_of_step(run) for _ in range(2)]
    steps.append(run.exchanges)
    run.end()
    assert [bool(each) for each in said] == [False, True, False, False]
    assert said[1].startswith("OwnError" if rank else "PeerError")
    assert rank == 1 or "on rank 1: OwnError: boo" in said[1]
    assert steps == [3, 4]


@on_processes
def test_ctrl_c_where_an_exchange_ends(rank: int) -> None:
    """Rank 0 is interrupted after all ranks have reported success; all have the exchange."""
    run = Training(rank, local_sgd(2, outer=_OUTER, delay=1, mix=0.5))
    run.train(2)
    background = run.handle._attached.local_steps._background
    inner, calls = background.receive, []

    def receive() -> None:
        calls.append(1)
        if len(calls) == 1 and rank == 0:
            background._agreed.wait()
            raise KeyboardInterrupt
        inner()

    said = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(background, "receive", receive)
        for _ in range(2):
            try:
                run.train()
                said.append("")
            except KeyboardInterrupt as error:
                run.done += 1
                said.append(type(error).__name__)
    run.train()
    assert said == ["" if rank else "KeyboardInterrupt", ""]
    anchors = list(run.anchors.values())
    run.end()
    assert all_same(of_all_ranks([*anchors, *run.parameters]))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way", ["buckets change", "removed"])
def test_ctrl_c_comes_through(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises at once where the outcome is awaited before the exchange's end."""
    run = Training(0, local_sgd(2, outer=_OUTER, delay=1, mix=0.5))
    run.train(2)
    steps = run.handle._attached.local_steps

    def receive() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps._background, "receive", receive)
    with pytest.raises(KeyboardInterrupt):
        if way == "removed":
            run.handle.remove()
        else:
            run.handle._attached.memory.before_change()
    assert steps._background.is_shared == (way != "removed")
    run.handle.remove()


def _outcomes_differ(rank: int, fragments: int, clips: bool) -> None:
    """Rank 0 alone takes an exchange for one that failed.

    All ranks refuse the sums, and go on from a state.
    """
    averages = hooks.clip(1.0) if clips else hooks.allreduce()
    run = Training(rank, local_sgd(4, outer=_OUTER, hook=averages, fragments=fragments, delay=1))
    state = run.handle.state_dict()
    replica = type(run.handle._attached.local_steps._replica)
    said: list[str] = []
    while run.done < 9:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and not said:
                patch.setattr(replica, "share_failure", lambda *_: OwnError("boo"))
            try:
                run.train()
            except (OwnError, RuntimeError) as error:
                run.done += 1
                said.append(f"{error}")
                if "different" in said[-1]:
                    break
    run.handle.load_state_dict(state)
    run.done = 0
    run.train(6)
    run.end()
    assert said[:-1] == ([] if rank else ["boo"])
    assert "local_sgd: ranks exchanged different fragments" in said[-1]
    assert all_same(of_all_ranks(run.parameters))


@pytest.mark.parametrize(("fragments", "clips"), [(1, False), (2, False), (2, True)])
def test_ranks_that_exchange_different_fragments(
    three_ranks: RankPool, fragments: int, clips: bool
) -> None:
    three_ranks.run(_outcomes_differ, fragments, clips)


_ENDS = """
import os, sys
import torch, torch.distributed as dist
from torch_commhook import attach, hooks

rank = int(sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{sys.argv[1]}")
model = torch.nn.Linear(64, 64)
hook = hooks.local_sgd(2, delay=1, hook=hooks.error_feedback(hooks.blockwise(bits=4)))
handle = attach(model, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    if not (rank == 1 and step == 1):  # whose part never comes
        optimizer.step()
print("ends", flush=True)
"""


def test_a_process_that_ends_meanwhile(tmp_path: Any) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _ENDS, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, error = process.communicate(timeout=100)
            assert (process.returncode, out) == (0, b"ends\n"), error.decode()
    finally:
        for process in ranks:
            process.kill()
