"""Training in frameworks, and the same in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, attach
from torch_commhook.hooks.expressions import parse_hook

HOOK = "error_feedback(blockwise(bits=4))"
STEPS = 6
BATCH = 4


class Net(nn.Module):
    """Also accepts and returns the values that the Trainer of transformers needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 300)
        self.second = nn.Linear(300, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        output = self.second(torch.relu(self.first(x)))
        if labels is None:
            return output
        return {"loss": loss_of(output, labels), "logits": output}


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().mean()


class Data(torch.utils.data.Dataset):
    def __init__(self, rank: int, batches: int) -> None:
        generator = torch.Generator().manual_seed(100 + rank)
        self.x = torch.randn(batches * BATCH, 8, generator=generator)
        self.labels = torch.randn(batches * BATCH, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.x.split(BATCH), self.labels.split(BATCH), strict=True)


@dataclass
class How:
    accumulate: int = 1  # batches in a step
    bf16: bool = False  # whether autocast uses bfloat16
    clip: float | None = None  # the largest norm of gradients
    ddp: dict[str, Any] = field(default_factory=dict)


WAYS = {
    "plain": How(),
    "accumulation": How(accumulate=2),
    "bf16-mixed": How(bf16=True),
    "clipping": How(clip=0.1),
    "all": How(accumulate=2, bf16=True, clip=0.1),
}


@dataclass
class Trained:
    """The results of a training: parameters, and bytes that the hook sent."""

    parameters: list[Tensor]
    bytes_sent: int | None

    @classmethod
    def of(cls, model: nn.Module, handle: HookHandle | None) -> Trained:
        sent = None if handle is None else handle.stats().bytes_sent
        return cls([_whole(parameter.detach()) for parameter in model.parameters()], sent)

    def is_same(self, other: Trained) -> bool:
        pairs = zip(self.parameters, other.parameters, strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


def ended(model: nn.Module, handle: HookHandle | None) -> Trained:
    """The results of a training, whose hook is removed."""
    trained = Trained.of(model, handle)
    if handle is not None:
        handle.remove()
    return trained


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.clone()


def loop(
    rank: int,
    how: How,
    hook: str | None = HOOK,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Trained:
    """The same training in a plain loop over the default process group."""
    model = Net()
    wrapped = DDP(model, **how.ddp) if wrap is None else wrap(model)
    handle = None if hook is None else attach(wrapped, parse_hook(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Data(rank, STEPS * how.accumulate)
    for number, (x, labels) in enumerate(data.batches(), 1):
        steps = number % how.accumulate == 0
        alone = nullcontext() if steps or wrap is not None else wrapped.no_sync()
        with alone:
            with torch.autocast("cpu", torch.bfloat16, enabled=how.bf16):
                loss = loss_of(wrapped(x), labels) / how.accumulate
            loss.backward()
        if steps:
            if how.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), how.clip)
            optimizer.step()
            optimizer.zero_grad()
    trained = ended(model, handle)
    dist.barrier()
    return trained


def assert_as_a_loop(
    rank: int,
    train: Callable[[str | None], Trained],
    way: str = "plain",
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> None:
    """Training with a hook, and without one, has a loop's bits; the hook sends a loop's bytes."""
    found = {}
    for hook in (HOOK, None):
        found[hook], expected = train(hook), loop(rank, WAYS[way], hook, wrap)
        assert found[hook].is_same(expected)
        assert found[hook].bytes_sent == expected.bytes_sent != 0
    assert not found[HOOK].is_same(found[None])


def shard_on_cpu() -> None:
    """Makes Accelerate shard models with FSDP2, which it supports only on accelerators.

    Call it after making the ``Accelerator`` and before ``prepare()``: it skips the check of the
    device.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)


def sharded(model: nn.Module) -> nn.Module:
    """A model with ``fully_shard`` applied as a whole."""
    fully_shard(model)
    return model
