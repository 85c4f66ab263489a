"""One state of all ranks, which one of them writes to a file and each of them loads."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from nested_values import different_paths
from on_ranks import of_all_ranks, on_processes, on_ranks
from remembering_hooks import HOOKS, check_same, hook_of, model_of
from state_training import Run
from torch.distributed.checkpoint.stateful import Stateful

from torch_commhook import HookHandle, attach, reshard_states
from torch_commhook.process_group import RecordingProcessGroup

FEEDBACK = "error_feedback(blockwise(bits=4))"


def begun(
    rank: int, hook: str = FEEDBACK, steps: int = 0, road: str = "module"
) -> tuple[Run, HookHandle]:
    """A model after some steps, and its hook's handle."""
    run = Run(rank, hook, road)
    handle = run.attach()
    run.train(steps)
    return run, handle


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("use_ddp", [False, True])
@on_processes
def test_each_rank_goes_on_from_one_file(
    rank: int, tmp_path: Path, hook: str, use_ddp: bool
) -> None:
    road = "ddp-unused" if use_ddp else "module"  # such a DDP keeps its first buckets
    path = tmp_path / "state.pt"
    first, handle = begun(rank, hook, 3, road)
    state = {"model": first.model.state_dict(), "hook": handle.state_dict(gather=True)}
    if rank == 0:
        torch.save(state, path)
    first.train(3)
    handle.remove()
    dist.barrier()
    read = torch.load(path, weights_only=True)
    second, handle = begun(rank, hook, 0, road)
    second.model.load_state_dict(read["model"])
    handle.load_state_dict(read["hook"])
    second.number = 3
    second.train(3)
    handle.remove()
    check_same([second.parameters], [first.parameters])
    remembers = any(key.startswith("rank") for key in state["hook"])
    assert remembers == (hook not in ("allreduce()", "cast()"))


@on_ranks(2)
def test_what_one_state_has(rank: int) -> None:
    run, handle = begun(rank, steps=2)
    own, gathered = handle.state_dict(), handle.state_dict(gather=True)
    before = copy.deepcopy(gathered)
    run.train(1)
    assert different_paths(gathered, before) == []  # in memory of its own
    handle.remove()
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
    _run, handle = begun(rank, steps=1)
    memory = handle._attached.memory
    state_dict = memory.state_dict
    if rank == 1:
        memory.state_dict = lambda: 1 / 0
    message = "HookHandle.state_dict: it failed on rank 1: ZeroDivisionError: division by zero"
    error, message = (ZeroDivisionError, "division by zero") if rank else (RuntimeError, message)
    with pytest.raises(error, match=f"^{message}$") as raised:
        handle.state_dict(gather=True)
    assert raised.type is error
    memory.state_dict = state_dict
    memory._seen_steps += rank
    message = "the ranks' 'steps' must be the same for one state of all ranks, got 1 and"
    with pytest.raises(Exception, match=message):
        handle.state_dict(gather=True)
    handle.remove()


@on_ranks(2)
def test_a_group_that_nobody_knows(rank: int) -> None:
    group = RecordingProcessGroup(dist.group.WORLD)  # which is not registered
    handle = attach(model_of(), hook_of(FEEDBACK), process_group=group)
    with pytest.raises(RuntimeError, match=r"needs a process group that torch\.distributed knows"):
        handle.state_dict(gather=True)
    handle.remove()


@on_processes
def test_a_handle_in_a_distributed_checkpoint(rank: int, tmp_path: Path) -> None:
    _run, handle = begun(rank, steps=2)
    assert isinstance(handle, Stateful)
    before = copy.deepcopy(handle.state_dict())
    checkpoint.save({"hook": handle}, checkpoint_id=tmp_path)
    handle.remove()
    _other, loaded = begun(rank)
    checkpoint.load({"hook": loaded}, checkpoint_id=tmp_path)
    assert different_paths(loaded.state_dict(), before) == []
    loaded.remove()
    assert before["steps"] == 2
