"""Ranks that fail while ``local_sgd`` has a fragment's exchange in the background."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from layered_net import batch
from local_failures import Flaky, FlakyTopk, error_of_step
from local_training import attached, backward, farthest, net, parameters_of, same, train
from mode_cases import OwnError
from rank_pool import RankPool
from streaming_reference import Held, Streaming
from torch import Tensor, nn

from torch_commhook import PeerError, attach, hooks
from torch_commhook.hooks import compressed, error_feedback, local_sgd, outer_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

_OUTER = outer_sgd(0.7, 0.5)


def _fails(rank: int, road: str, fails: int) -> Any:
    flaky = Flaky()
    hook = local_sgd(4, outer=_OUTER, hook=flaky, fragments=2, delay=1, mix=0.5)
    model, handle = attached(hook, road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said, exchanges = [], []
    for step in range(9):
        flaky.fails = step == 1 and fails == rank
        said.append(error_of_step(model, optimizer, rank, step))
        exchanges.append(handle.stats().steps)
    anchors = handle.state_dict()["shared"]["local_sgd_anchor"]
    found = said, exchanges, parameters_of(model), anchors
    handle.synchronize()
    handle.remove()
    return found


@pytest.mark.parametrize(("road", "fails"), [("module", 0), ("module", 2), ("ddp", 1)])
def test_a_rank_that_fails_where_an_exchange_begins(
    three_ranks: RankPool, road: str, fails: int
) -> None:
    """All raise where it was to end, nothing has changed, and the next step tries again."""
    results = three_ranks.run(_fails, road, fails)
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
    for rank, (said, exchanges, parameters, anchors) in enumerate(results):
        kind = "OwnError: boo" if rank == fails else "PeerError"
        assert [bool(each) for each in said] == [n == 2 for n in range(9)]
        assert said[2].startswith(kind)
        if rank != fails:
            assert f"on rank {fails}: OwnError: boo" in said[2]
        assert exchanges == [0, 0, 0, 0, 1, 2, 2, 3, 3]
        assert farthest(parameters, parameters_of(wanted.models[rank])) < 2e-6
        named = dict(wanted.anchor.named_parameters())
        assert farthest(list(anchors.values()), [named[name] for name in anchors]) < 2e-6
        assert same(list(anchors.values()), list(results[0][3].values()))


def _tensors(state: dict[str, Any], rank: int) -> dict[str, Tensor]:
    kinds = {**state[f"rank{rank}"], **state["shared"]}
    kinds.pop("local_sgd_parameter")
    return {f"{k} {n}": t for k, tensors in kinds.items() for n, t in tensors.items()}


def _fails_in_background(rank: int, saves: bool) -> tuple[list[str], list[int]]:
    codec = FlakyTopk(0.25)
    hook = local_sgd(4, hook=error_feedback(compressed(codec)), fragments=2, delay=1)
    model, handle = attached(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 7)  # two exchanges, and what they have not sent
    before = _tensors(handle.state_dict(), rank)
    assert any(tensor.any() for name, tensor in before.items() if name.startswith("error"))
    if rank == 1:
        codec.fail_once()
    said = [error_of_step(model, optimizer, rank, 7)]  # one begins
    if saves:  # as not begun, since it has failed
        state = handle.state_dict()
        assert state["local_steps"]["steps_in_flight"] == -1
        now = _tensors(state, rank)
        assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())
    said.append(error_of_step(model, optimizer, rank, 8))
    now = _tensors(handle.state_dict(), rank)
    assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())
    codec.fail_no_more()
    steps = [handle.stats().steps]
    said += [error_of_step(model, optimizer, rank, step) for step in (9, 10)]
    steps.append(handle.stats().steps)
    handle.synchronize()
    handle.remove()
    return said, steps


@pytest.mark.parametrize("saves", [False, True])
def test_a_rank_that_fails_in_the_background(two_ranks: RankPool, saves: bool) -> None:
    """What it has sent is not remembered as sent."""
    (first, *_), (second, *_) = results = two_ranks.run(_fails_in_background, saves)
    assert [bool(each) for each in first] == [bool(each) for each in second]
    assert [bool(each) for each in first] == [False, True, False, False]
    assert first[1].startswith("PeerError") and "on rank 1: OwnError: boo" in first[1]
    assert second[1].startswith("OwnError")
    assert [steps for _, steps in results] == [[3, 4]] * 2


def _beside(rank: int, fails: bool) -> tuple[list[Tensor], list[str]]:
    """Another model's step fails while an exchange is under way."""
    flaky, held = Flaky(), Held()
    hook = local_sgd(4, outer=_OUTER, hook=held, delay=3, mix=0.5)
    (model, handle), other = attached(hook), net()
    beside = attach(other, flaky, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.5)
    said = []
    for step in range(9):
        train(model, optimizer, rank, range(step, step + 1))
        flaky.fails = fails and step == 4 and rank == 0
        other.zero_grad()
        try:
            backward(other, rank, step)
        except (OwnError, PeerError) as error:
            said.append(f"{type(error).__name__} in step {step}")
        if step == 4:
            held.release.set()
    found = parameters_of(model), said
    beside.remove()
    handle.synchronize()
    handle.remove()
    return found


def test_another_model_that_fails_meanwhile(two_ranks: RankPool) -> None:
    wanted = two_ranks.run(_beside, False)
    for rank, (parameters, said) in enumerate(two_ranks.run(_beside, True)):
        assert said == [f"{'OwnError' if rank == 0 else 'PeerError'} in step 4"]
        assert same(parameters, wanted[rank][0])


def _backward_fails(rank: int) -> list[Tensor]:
    """It is this rank's own, and the exchange goes on."""
    model, handle = attached(local_sgd(3, outer=_OUTER, delay=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 3)

    def refuse(gradients: tuple[Tensor, ...]) -> None:
        raise OwnError("boo")

    if rank == 0:
        stage = handle.register_prehook(refuse)
        with pytest.raises(OwnError):
            backward(model, rank, 2)
        stage.remove()
    train(model, optimizer, rank, 1 + rank)  # what has failed counts as a step of its own
    found = parameters_of(model)
    assert handle.stats().steps == 1
    handle.synchronize()
    handle.remove()
    return found


def test_a_backward_that_fails_meanwhile(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_backward_fails)
    assert same(first, second)  # with one fragment and no mix they are together then


def _parameters_change(rank: int) -> list[str]:
    """A forward that is refused on one rank does not end the exchange of the others."""
    model, handle = attached(local_sgd(2, outer=_OUTER, delay=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 2)
    if rank == 0:
        bias = model.layers[0].bias
        model.layers[0].bias = nn.Parameter(torch.zeros(24))
        with pytest.raises(RuntimeError, match="parameter"):
            model(batch(rank))
        model.layers[0].bias = bias
    said = error_of_step(model, optimizer, rank, 2)
    anchors = handle.state_dict()["shared"]["local_sgd_anchor"]
    here = dict(model.named_parameters())
    assert same([here[name].detach() for name in anchors], list(anchors.values()))
    handle.remove()
    return [said]


def test_a_forward_that_is_refused_meanwhile(two_ranks: RankPool) -> None:
    assert two_ranks.run(_parameters_change) == [[""]] * 2


def _interrupted(rank: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Ctrl-C on rank 0 where an exchange ends, after all have told that it went well."""
    model, handle = attached(local_sgd(2, outer=_OUTER, delay=1, mix=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, 2)
    background = handle._attached.local_steps._background
    exchange = background._exchange
    inner, calls = exchange.receive, []

    def receive() -> None:
        calls.append(1)
        if len(calls) == 1 and rank == 0:
            background._agreed.wait()
            raise KeyboardInterrupt
        inner()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(exchange, "receive", receive)
        said = []
        for step in (2, 3):
            try:
                train(model, optimizer, rank, range(step, step + 1))
                said.append("")
            except KeyboardInterrupt as error:
                said.append(type(error).__name__)
    train(model, optimizer, rank, 1)
    anchors = handle.state_dict()["shared"]["local_sgd_anchor"]
    handle.synchronize()
    found = said, list(anchors.values()), parameters_of(model)
    handle.remove()
    return found


def test_ctrl_c_where_an_exchange_ends(two_ranks: RankPool) -> None:
    """The other ranks have it, and so has this one in the end."""
    first, second = two_ranks.run(_interrupted)
    assert (first[0], second[0]) == (["KeyboardInterrupt", ""], ["", ""])
    assert same(first[1], second[1]) and same(first[2], second[2])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way", ["buckets change", "removed"])
def test_ctrl_c_comes_through(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises at once where the outcome is awaited before the exchange's end."""
    model, handle = attached(local_sgd(2, outer=_OUTER, delay=1, mix=0.5))
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 0, 2)
    steps = handle._attached.local_steps

    def receive() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps._background._exchange, "receive", receive)
    with pytest.raises(KeyboardInterrupt):
        if way == "removed":
            handle.remove()
        else:
            handle._attached.memory.before_change()
    assert (steps._background._exchange is None) == (way == "removed")
    handle.remove()


def _outcomes_differ(rank: int, fragments: int, clips: bool) -> tuple[list[str], list[Tensor]]:
    """Rank 0 alone takes an exchange for one that failed."""
    averages = hooks.clip(1.0) if clips else hooks.allreduce()
    hook = local_sgd(4, outer=_OUTER, hook=averages, fragments=fragments, delay=1)
    model, handle = attached(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = handle.state_dict()
    replica = type(handle._attached.local_steps._replica)
    said = []
    for step in range(9):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0 and not said:
                patch.setattr(replica, "share_failure", lambda *_: OwnError("boo"))
            try:
                train(model, optimizer, rank, range(step, step + 1))
            except (OwnError, RuntimeError) as error:
                said.append(f"{error}")
                if "different" in said[-1]:
                    break
    handle.load_state_dict(state)
    train(model, optimizer, rank, 6)
    handle.synchronize()
    handle.remove()
    return said, parameters_of(model)


@pytest.mark.parametrize(("fragments", "clips"), [(1, False), (2, False), (2, True)])
def test_ranks_that_exchange_different_fragments(
    three_ranks: RankPool, fragments: int, clips: bool
) -> None:
    """All ranks refuse the sums, and go on from a state."""
    results = three_ranks.run(_outcomes_differ, fragments, clips)
    for rank, (said, parameters) in enumerate(results):
        assert said[:-1] == ([] if rank else ["boo"])
        assert "local_sgd: ranks exchanged different fragments" in said[-1]
        assert same(parameters, results[0][1])


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
