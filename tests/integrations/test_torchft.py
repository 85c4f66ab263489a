"""Hooks over torchft's replicas, of which one is killed, and another one joins."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("torchft")

from launched_ranks import launched
from nested_values import different_paths
from repository import ROOT
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupGloo,
    reconfigure_with_store,
)
from torchft_replicas import BACK, KILLED, STEPS, Net, plain, run
from train_processes import finished

from torch_commhook import attach, hooks
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.integrations.torchft import attach_to
from torch_commhook.process_group import RecordingProcessGroup


def of_the_manager(manager: Any) -> Any:
    """A hook that leaves the average to the manager, as torchft's own."""

    def average(state: object, bucket: Any) -> torch.Tensor:
        manager.allreduce(bucket.buffer()).wait()
        return bucket.buffer()

    return average


#: With a replica that is killed: as many before and after, an attempt that fails, and one alone.
KILLS = [
    *[(step, 2, True) for step in range(KILLED)],
    (KILLED, 2, False),
    *[(step, 1, True) for step in range(KILLED, BACK)],
    *[(step, 2, True) for step in range(BACK, STEPS)],
]


@pytest.mark.parametrize(
    ("hook", "kills"), [("allreduce()", False), ("allreduce()", True), (of_the_manager, True)]
)
def test_a_plain_average_to_the_bit(hook: Any, kills: bool) -> None:
    results = run(hook, kills=kills)
    want = plain(kills=kills)
    attempts = KILLS if kills else [(step, 2, True) for step in range(STEPS)]
    assert results[0].attempts == attempts
    assert results[1].attempts == [each for each in attempts if not kills or each[0] >= BACK]
    for result in results.values():
        assert different_paths(result.parameters, want) == []
    assert hook is of_the_manager or results[0].bytes_sent > 0


@pytest.mark.parametrize(
    "hook",
    [
        "error_feedback(topk(0.05))",
        "error_feedback(blockwise(bits=4))",
        "error_feedback(powersgd(rank=1))",
        "randomk(0.3)",
    ],
)
def test_what_a_hook_remembers(hook: str) -> None:
    """A replica that joins goes on from it; a step that failed leaves no trace in it."""
    survivor, joined = run(hook, kills=True).values()
    assert survivor.attempts == KILLS
    assert different_paths(survivor.parameters, joined.parameters) == []
    assert survivor.bytes_sent > 0 < joined.bytes_sent
    # Of the attempt at a step: the survivor has one more.
    failed, repeated = survivor.states[KILLED, KILLED], survivor.states[KILLED, KILLED + 1]
    assert failed["steps"] == repeated["steps"] == KILLED
    if "blockwise" not in hook:  # of which the place of shards has changed
        assert different_paths(failed, repeated) == []
    begins, own = joined.states[BACK, 0], survivor.states[BACK, BACK + 1]
    assert different_paths(begins["shared"], own["shared"]) == []
    assert begins["steps"] == own["steps"] == BACK
    if "error_feedback" in hook:
        errors = begins["rank0"]["error"]
        assert any(error.any() for error in errors.values())
        assert "blockwise" in hook or different_paths(errors, own["rank0"]["error"]) == []


def _manager(**settings: Any) -> Any:
    taken = set()

    def register(key: str, load: Any, state: Any) -> None:
        assert key not in taken
        taken.add(key)

    group = ProcessGroupGloo()
    other = {"_pg": group, "_use_async_quorum": False, "_quorum_future": None}
    return SimpleNamespace(**{**other, "register_state_dict_fn": register, **settings})


def test_what_is_refused() -> None:
    manager, model = _manager(), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="must be made with use_async_quorum=False"):
        attach_to(_manager(_use_async_quorum=True), model, "cast()")
    with pytest.raises(ValueError, match=r"keeps ranks apart.*DiLoCo"):
        attach_to(manager, model, hooks.local_sgd(4))
    with pytest.raises(ValueError, match="no process group of its own"):
        attach_to(manager, model, hooks.cast(process_group=ProcessGroupGloo()))
    with pytest.raises(TypeError, match="init_sync follows from the manager"):
        attach_to(manager, model, "cast()", init_sync=True)
    with pytest.raises(RuntimeError, match="has no Manager"):
        attach_to(SimpleNamespace(), model, "cast()")
    handle = attach_to(manager, model, "cast()")
    with pytest.raises(ValueError, match="under key 'torch_commhook' already"):
        attach_to(manager, nn.Linear(2, 2), "cast()")
    with pytest.raises(RuntimeError, match="know the step's quorum before the forward"):
        model(torch.ones(2)).sum().backward()
    handle.remove()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("given", ["model's", "hook's", "wrapped"])
def test_a_managed_group_is_refused(given: str) -> None:
    group: dist.ProcessGroup = ManagedProcessGroup(_manager(num_participants=lambda: 1))
    if given == "wrapped":
        group = RecordingProcessGroup(group)
    hook = hooks.allreduce(process_group=group if given == "hook's" else None)
    options = {} if given == "hook's" else {"process_group": group}
    with pytest.raises(ValueError, match=r"integrations\.torchft\.attach_to\(manager, model"):
        attach(nn.Linear(2, 2), hook, **options)


HOOKS = [
    "allreduce()",
    "cast()",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(topk(0.1))",
    "error_feedback(powersgd(rank=1))",
]


def _net() -> Net:
    net = Net()
    net.only_one.requires_grad_(False)  # nobody uses it
    return net


def _gradients(hook: str, group: dist.ProcessGroup | None, steps: int = 2) -> list[torch.Tensor]:
    model = _net()
    handle = attach(model, parse_hook(hook), process_group=group)
    found = []
    for step in range(steps):
        model.zero_grad()
        model(torch.full((4, 8), 1.0 + step + 10 * dist.get_rank())).square().mean().backward()
        found += [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    handle.remove()
    return found


def _without_a_manager(rank: int) -> None:
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)
    own = dist.PrefixStore("default", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
    group = ProcessGroupGloo()
    reconfigure_with_store(group, f"localhost:{port}/1", rank, 2)
    for given in (group, ErrorSwallowingProcessGroupWrapper(group), RecordingProcessGroup(group)):
        for hook in HOOKS:
            assert different_paths(_gradients(hook, given), _gradients(hook, None)) == []
    model, others = _net(), _net()
    attach(model, hooks.error_feedback(hooks.blockwise(bits=4)), process_group=group)
    handle = attach(others, hooks.allreduce(), process_group=group)
    reconfigure_with_store(group, f"localhost:{port}/2", 1 - rank, 2)  # as many, in another order
    others(torch.full((4, 8), 1.0 + rank)).sum().backward()
    mean = others.second.bias.grad
    assert torch.equal(mean, torch.full_like(mean, 4.0))
    ranks = f"this was rank {rank} of 2, and is rank {1 - rank} of 2"
    with pytest.raises(RuntimeError, match=f"the process group's ranks have changed.*{ranks}"):
        model(torch.ones(4, 8)).sum().backward()
    handle.remove()
    dist.destroy_process_group()


def test_its_group_without_a_manager() -> None:
    launched(_without_a_manager)


def test_the_example_runs() -> None:
    done = finished(sys.executable, ROOT / "examples" / "torchft_training.py", seconds=240)
    lines = [line.split() for line in done.stdout.splitlines()]
    steps = {(line[0], int(line[1])): line[2:] for line in lines if line[1:2] and line[1].isdigit()}
    both = [step for replica, step in steps if replica == "1" and ("0", step) in steps]
    assert steps["0", 59] == steps["1", 59] and steps["0", 59][0] == "2"
    together = [step for step in both if steps["0", step][0] == steps["1", step][0] == "2"]
    assert all(steps["0", step] == steps["1", step] for step in together)
    assert any(step < 30 for step in together) and steps["0", 30][0] == "1"
    assert {line[0] for line in lines if line[1:2] == ["sent"] and int(line[2]) > 0} == {"0", "1"}
