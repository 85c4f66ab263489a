"""The model for all modes, its batches, and hooks in the style of users."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from torch_commhook import GradBucket, hooks


def module() -> nn.Module:
    """Has no biases: Inductor adds their gradients' sums in another order than eager mode."""
    torch.manual_seed(0)
    sizes = [(48, 48), (48, 64), (64, 48)]
    return nn.Sequential(
        *(layer for size in sizes for layer in (nn.Linear(*size, bias=False), nn.ReLU())),
        nn.Linear(48, 4, bias=False),
    )


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(10 * step + rank))


def with_futures(state: object, bucket: GradBucket) -> torch.futures.Future:
    """A hook in PyTorch's style."""
    buffer = bucket.buffer().div_(2)
    work = dist.all_reduce(buffer, group=bucket.process_group(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class CastInTwoStages(hooks.cast):
    """Does the same as :class:`hooks.cast` with many ranks."""

    def has_stages_among(self, ranks: int) -> bool:
        return ranks > 1


class OwnError(Exception):
    pass


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def outcome(step: Callable[[], object]) -> str:
    """``done``, or the type and the message of what a step raises."""
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"
