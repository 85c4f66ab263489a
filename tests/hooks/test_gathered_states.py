"""One state of all ranks, which one of them writes to a file and each of them loads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from nested_values import different_paths
from on_ranks import of_all_ranks, on_ranks
from rank_pool import RankPool
from remembering_hooks import HOOKS, batch, check_same, hook_of, model_of
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, attach, reshard_states
from torch_commhook.process_group import RecordingProcessGroup


class Run:
    """A model with a hook, and its optimizer."""

    def __init__(self, hook: str, use_ddp: bool) -> None:
        self.model: nn.Module = model_of()
        if use_ddp:  # which keeps its first buckets so
            self.model = DDP(self.model, find_unused_parameters=True)
        self.handle: HookHandle = attach(self.model, hook_of(hook))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def steps(self, rank: int, numbers: range) -> list[Tensor]:
        for number in numbers:
            self.optimizer.zero_grad()
            self.model(batch(rank, number)).square().sum().backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def _from_one_file(rank: int, hook: str, use_ddp: bool, folder: str) -> bool:
    path = f"{folder}/state.pt"
    first = Run(hook, use_ddp)
    first.steps(rank, range(3))
    state = {"model": first.model.state_dict(), "hook": first.handle.state_dict(gather=True)}
    if rank == 0:
        torch.save(state, path)
    expected = first.steps(rank, range(3, 6))
    first.handle.remove()
    dist.barrier()
    read = torch.load(path, weights_only=True)
    second = Run(hook, use_ddp)
    second.model.load_state_dict(read["model"])
    second.handle.load_state_dict(read["hook"])
    found = second.steps(rank, range(3, 6))
    second.handle.remove()
    check_same([found], [expected])
    return any(key.startswith("rank") for key in state["hook"])


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("use_ddp", [False, True])
def test_each_rank_goes_on_from_one_file(
    two_ranks: RankPool, tmp_path: Path, hook: str, use_ddp: bool
) -> None:
    remembers = two_ranks.run(_from_one_file, hook, use_ddp, str(tmp_path))
    assert remembers == [hook not in ("allreduce()", "cast()")] * 2


FEEDBACK = "error_feedback(blockwise(bits=4))"


@on_ranks(2)
def test_what_one_state_has(rank: int) -> None:
    run = Run(FEEDBACK, False)
    run.steps(rank, range(2))
    own, gathered = run.handle.state_dict(), run.handle.state_dict(gather=True)
    before = copy.deepcopy(gathered)
    run.steps(rank, range(2, 3))
    assert different_paths(gathered, before) == []  # in memory of its own
    run.handle.remove()
    every = of_all_ranks(gathered)
    for others in every:
        assert different_paths(gathered, others) == []
        assert list(gathered) == list(others)
    states = of_all_ranks(own)
    for number, state in enumerate(states):
        assert different_paths(gathered[f"rank{number}"], state[f"rank{number}"]) == []
    rest, own_rest = (
        {key: value for key, value in state.items() if not key.startswith("rank")}
        for state in (gathered, own)
    )
    assert different_paths(rest, own_rest) == []
    expected = reshard_states(states, 3)
    for given in (gathered, every):
        assert different_paths(reshard_states(given, 3), expected) == []


@on_ranks(2)
def test_a_state_that_cannot_be_gathered(rank: int) -> None:
    run = Run(FEEDBACK, False)
    run.steps(rank, range(1))
    memory = run.handle._attached.memory
    state_dict = memory.state_dict
    if rank == 1:
        memory.state_dict = lambda: 1 / 0
    message = "HookHandle.state_dict: it failed on rank 1: ZeroDivisionError: division by zero"
    error, message = (ZeroDivisionError, "division by zero") if rank else (RuntimeError, message)
    with pytest.raises(error, match=f"^{message}"):
        run.handle.state_dict(gather=True)
    memory.state_dict = state_dict
    memory._seen_steps += rank
    message = "the ranks' 'steps' must be the same for one state of all ranks, got 1 and"
    with pytest.raises(Exception, match=message):
        run.handle.state_dict(gather=True)
    run.handle.remove()


@on_ranks(2)
def test_a_group_that_nobody_knows(rank: int) -> None:
    group = RecordingProcessGroup(dist.group.WORLD)  # which is not registered
    handle = attach(model_of(), hook_of(FEEDBACK), process_group=group)
    with pytest.raises(RuntimeError, match=r"needs a process group that torch\.distributed knows"):
        handle.state_dict(gather=True)
    handle.remove()


def _stateful(rank: int, folder: str) -> bool:
    run = Run(FEEDBACK, False)
    assert isinstance(run.handle, Stateful)
    run.steps(rank, range(2))
    before = copy.deepcopy(run.handle.state_dict())
    checkpoint.save({"hook": run.handle}, checkpoint_id=folder)
    run.handle.remove()
    other = Run(FEEDBACK, False)
    checkpoint.load({"hook": other.handle}, checkpoint_id=folder)
    assert different_paths(other.handle.state_dict(), before) == []
    other.handle.remove()
    return before["steps"] == 2


def test_a_handle_in_a_distributed_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(_stateful, str(tmp_path)) == [True, True]
