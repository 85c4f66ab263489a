"""Hooks on what Accelerate has prepared, against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from framework_training import (
    HOOK,
    STEPS,
    WAYS,
    Data,
    How,
    Net,
    Trained,
    loop,
    loss_of,
    shard_on_cpu,
    sharded,
)
from launched_ranks import LaunchedRanks

pytest.importorskip("accelerate")


class _Run:
    """A model that an accelerator has prepared, with a hook."""

    def __init__(
        self, how: How, hook: str | None = HOOK, *, shards: bool = False, **options: Any
    ) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        from torch_commhook.integrations.accelerate import attach_to

        AcceleratorState._reset_state()  # which holds how an earlier one computes
        self.how = how
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=how.accumulate,
            mixed_precision="bf16" if how.bf16 else "no",
            **options,
        )
        if shards:
            shard_on_cpu()
        self.bare = Net()
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, optimizer)
        self.handle = None if hook is None else attach_to(self.accelerator, self.model, hook)

    def steps(self, data: Data) -> None:
        for x, labels in data.batches():
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model(x), labels))
                if self.how.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.how.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()

    @property
    def trained(self) -> Trained:
        return Trained.of(self.model, self.handle)


def _as_a_loop(rank: int, way: str) -> list[bool]:
    how = WAYS[way]
    found = []
    for hook in (HOOK, None):
        run = _Run(how, hook)
        run.steps(Data(rank, STEPS * how.accumulate))
        expected = loop(rank, how, hook)
        found.append(run.trained.is_same(expected))
        if run.handle is not None:
            found.append(run.trained.bytes_sent == expected.bytes_sent != 0)
            run.handle.remove()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_what_is_prepared(launched: LaunchedRanks, way: str) -> None:
    assert launched.run(_as_a_loop, way) == [[True] * 3] * 2


def _in_shards(rank: int) -> list[bool]:
    found = []
    for hook in (HOOK, None):
        run = _Run(How(), hook, shards=True)
        run.steps(Data(rank, STEPS))
        expected = loop(rank, How(), hook, wrap=sharded)
        found.append(run.trained.is_same(expected))
        if run.handle is not None:
            found.append(run.trained.bytes_sent == expected.bytes_sent != 0)
            run.handle.remove()
    return found


def test_shards(launched: LaunchedRanks) -> None:
    assert launched.run(_in_shards) == [[True] * 3] * 2


def _resumed(rank: int, hook: str, folder: str) -> list[bool]:
    """DDP keeps its first buckets where some parameters may be unused."""
    from accelerate import DistributedDataParallelKwargs

    options = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    run = _Run(How(), hook, **options)
    run.steps(Data(rank, 3))
    run.accelerator.save_state(folder)
    run.accelerator.wait_for_everyone()
    run.steps(Data(rank, STEPS))
    straight = run.trained
    run.handle.remove()
    other = _Run(How(), hook, **options)
    other.accelerator.load_state(folder)
    other.steps(Data(rank, STEPS))
    saved = torch.load(Path(folder) / "custom_checkpoint_0.pkl", weights_only=True)
    same = other.trained.is_same(straight)
    other.handle.remove()
    return [same, {"rank0", "rank1"} <= saved.keys()]


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
def test_a_state(launched: LaunchedRanks, hook: str, tmp_path: Path) -> None:
    assert launched.run(_resumed, hook, str(tmp_path)) == [[True] * 2] * 2


def _attached_again(rank: int, folder: str) -> int:
    """A state where an earlier hook was removed; the steps that the later one goes on from."""
    from torch_commhook.integrations.accelerate import attach_to

    run = _Run(How())
    run.steps(Data(rank, 1))
    run.handle.remove()
    run.handle = attach_to(run.accelerator, run.model, HOOK)
    run.steps(Data(rank, 2))
    run.accelerator.save_state(folder)
    run.accelerator.wait_for_everyone()
    other = _Run(How())
    other.accelerator.load_state(folder)
    steps: int = other.handle.state_dict()["steps"]
    for each in (run, other):
        each.handle.remove()
    run.accelerator.load_state(folder)  # of a hook that is off
    return steps


def test_a_hook_that_was_attached_again(launched: LaunchedRanks, tmp_path: Path) -> None:
    assert launched.run(_attached_again, str(tmp_path)) == [2, 2]


def _refused(rank: int) -> list[str]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from torch_commhook import attach, hooks
    from torch_commhook.integrations.accelerate import attach_to

    found = []
    kwargs = DistributedDataParallelKwargs(comm_hook=hooks.cast())
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    for model in (Net(), accelerator.prepare(Net())):
        try:
            attach_to(accelerator, model, HOOK)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    other = Accelerator(cpu=True)
    other.ddp_handler = None
    bare = Net()
    wrapped = other.prepare(bare)
    for call in (lambda: attach_to(other, bare, HOOK), lambda: attach(bare, hooks.cast())):
        try:
            call()
        except RuntimeError as error:
            found.append(str(error))
    assert wrapped is not bare
    return found


def test_what_is_refused(launched: LaunchedRanks) -> None:
    for dropped, again, bare, inner in launched.run(_refused):
        assert dropped == again and "ignores anything else, such as cast" in dropped
        assert "got Net in training on 2 ranks. Start the script with" in bare
        assert "attach the hook to that, the one around " in inner and "Net: attach(ddp" in inner
