"""All-gathers of a sharded model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.sharded.step import ShardedStep
from torch_commhook.attachment.sharded.unit import Unit
from torch_commhook.codecs.base import Codec
from torch_commhook.collectives.compressed_chunks import compressed_all_gather
from torch_commhook.collectives.plain import all_gather
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.spans import active, spans_of
from torch_commhook.step.step_group import StepGroup


def wait_for(future: torch.futures.Future[Tensor], group: StepGroup) -> None:
    """Wait for a collective that ``fully_shard`` has requested.

    Raises:
        Exception: it failed, or did not end within the group's timeout.
    """
    _C.wait_for_result(future, "a collective of fully_shard", group.timeout.total_seconds())
    future.wait()


class Gathers:
    """Gathers parameters, through a codec if there is one.

    Args:
        step: the model's step, with its groups.
        weights: the codec; None gathers parameters uncompressed.
        group: the shards' group, in which gathers use the codec. ``reshard_after_forward=k`` also
            gathers in parts of it; these send parameters that were decoded before.
    """

    def __init__(
        self, step: ShardedStep, weights: Codec | None, group: dist.ProcessGroup | None
    ) -> None:
        self._step = step
        self._weights = weights
        self._group = group

    def issue(
        self, out: Tensor, tensor: Tensor, group: dist.ProcessGroup
    ) -> tuple[torch.futures.Future[Tensor], int]:
        """Start to gather parameters.

        Args:
            out: the parameters of all ranks. Written.
            tensor: this rank's part.
            group: the group that gathers.

        Returns:
            A Future of ``out``, and the number of bytes that this rank sends.

        Raises:
            PeerError: a rank has left the previous step.
        """
        self._step.before_gather()
        step_group = self._step.group_of(group)
        inner = group if step_group is None else step_group.group_for(tensor.device)
        meter = WireMeter()
        try:
            with counting(meter):
                if self._weights is None or tensor.dtype == torch.uint8 or group is not self._group:
                    shape = inner.size(), *tensor.shape
                    future = all_gather(tensor, out=out.view(shape), group=inner)
                else:
                    with active(spans_of(lambda: f"weights, {self._weights!r}")):
                        future = compressed_all_gather(tensor, self._weights, out=out, group=inner)
        except Exception as error:
            raise self._failed(error, step_group) from None
        return future, meter.bytes_sent

    def wait(self, future: torch.futures.Future[Tensor]) -> None:
        """Wait for the Future of :meth:`issue`.

        Raises:
            PeerError: it failed on another rank.
            Exception: it failed on this rank.
        """
        assert self._group is not None
        step_group = self._step.group_of(self._group)
        assert step_group is not None
        try:
            wait_for(future, step_group)
        except Exception as error:
            raise self._failed(error, step_group) from None

    def drop_restored(self, units: Sequence[Unit]) -> None:
        """Drop parameters that a codec has decoded and that are whole since a forward."""
        if self._weights is not None:
            for unit in units:
                if unit.group is not None:
                    fsdp.drop_whole(unit.group)

    def _failed(self, error: Exception, at: StepGroup | None) -> BaseException:
        return error if at is None else self._step.fail_with(error, at)
