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
    Net,
    Trained,
    assert_as_a_loop,
    ended,
    loss_of,
    shard_on_cpu,
    sharded,
)
from on_ranks import on_pool

pytest.importorskip("accelerate")

on_launched = on_pool("launched")


class _Run:
    """A model that an accelerator has prepared, with a hook."""

    def __init__(
        self, hook: str | None = HOOK, way: str = "plain", *, shards: bool = False, **options: Any
    ) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        from torch_commhook.integrations.accelerate import attach_to

        AcceleratorState._reset_state()  # which holds how an earlier one computes
        self.how = WAYS[way]
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=self.how.accumulate,
            mixed_precision="bf16" if self.how.bf16 else "no",
            **options,
        )
        if shards:
            shard_on_cpu()
        bare = Net()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(bare, optimizer)
        self.handle = None if hook is None else attach_to(self.accelerator, self.model, hook)

    def steps(self, rank: int, count: int = STEPS) -> None:
        for x, labels in Data(rank, count * self.how.accumulate).batches():
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model(x), labels))
                if self.how.clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.how.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()


def _trained(rank: int, *arguments: Any, **options: Any) -> Trained:
    run = _Run(*arguments, **options)
    run.steps(rank)
    return ended(run.model, run.handle)


@pytest.mark.parametrize("way", WAYS)
@on_launched
def test_what_is_prepared(rank: int, way: str) -> None:
    assert_as_a_loop(rank, lambda hook: _trained(rank, hook, way), way)


@on_launched
def test_shards(rank: int) -> None:
    assert_as_a_loop(rank, lambda hook: _trained(rank, hook, shards=True), wrap=sharded)


@pytest.mark.parametrize("hook", [HOOK, "error_feedback(topk(0.1))"])
@on_launched
def test_a_state(rank: int, hook: str, tmp_path: Path) -> None:
    """DDP keeps its first buckets where some parameters may be unused."""
    from accelerate import DistributedDataParallelKwargs

    options = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    run = _Run(hook, **options)
    run.steps(rank, 3)
    run.accelerator.save_state(str(tmp_path))
    run.accelerator.wait_for_everyone()
    run.steps(rank)
    straight = ended(run.model, run.handle)
    other = _Run(hook, **options)
    other.accelerator.load_state(str(tmp_path))
    other.steps(rank)
    assert ended(other.model, other.handle).is_same(straight)
    saved = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert {"rank0", "rank1"} <= saved.keys()


@on_launched
def test_a_hook_that_was_attached_again(rank: int, tmp_path: Path) -> None:
    """A state where an earlier hook was removed: the later one goes on from its own steps."""
    from torch_commhook.integrations.accelerate import attach_to

    run = _Run()
    run.steps(rank, 1)
    run.handle.remove()
    run.handle = attach_to(run.accelerator, run.model, HOOK)
    run.steps(rank, 2)
    run.accelerator.save_state(str(tmp_path))
    run.accelerator.wait_for_everyone()
    other = _Run()
    other.accelerator.load_state(str(tmp_path))
    assert other.handle.state_dict()["steps"] == 2
    ended(run.model, run.handle)
    ended(other.model, other.handle)
    run.accelerator.load_state(str(tmp_path))  # of a hook that is off


@on_launched
def test_what_is_refused(rank: int) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from torch_commhook import attach, hooks
    from torch_commhook.integrations.accelerate import attach_to

    kwargs = DistributedDataParallelKwargs(comm_hook=hooks.cast())
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    said = set()
    for model in (Net(), accelerator.prepare(Net())):
        with pytest.raises(ValueError, match="ignores anything else, such as cast") as refused:
            attach_to(accelerator, model, HOOK)
        said.add(str(refused.value))
    assert len(said) == 1
    other = Accelerator(cpu=True)
    other.ddp_handler = None
    bare = Net()
    wrapped = other.prepare(bare)
    assert wrapped is not bare
    with pytest.raises(RuntimeError, match=r"got Net in training on 2 ranks\. Start the script wi"):
        attach_to(other, bare, HOOK)
    inner = r"attach the hook to that, the one around .*Net: attach\(ddp"
    with pytest.raises(RuntimeError, match=inner):
        attach(bare, hooks.cast())
