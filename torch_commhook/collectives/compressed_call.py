"""The base of collectives of codecs' messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.codecs.error_decay import decay_error
from torch_commhook.collectives.exchange import Place, exchanges, place_in
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.collectives.issuing import (
    issue_all_gather,
    issue_all_to_all,
    issue_gather_of_sizes,
)
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.stages import timed
from torch_commhook.collectives.streams import is_capturing
from torch_commhook.collectives.sum_arguments import SumArguments
from torch_commhook.collectives.traced_ops import traced_all_gather, traced_all_to_all
from torch_commhook.metrics import note_collective


class CompressedCall:
    """One running collective of messages.

    It does not reference the group: a Gloo thread may release a callback last. If a group were
    destroyed with it, that thread would wait for its own end.
    """

    def __init__(
        self, arguments: SumArguments, destinations: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        self.codec = arguments.codec
        #: What the messages are, for ranks to compare.
        self.form = type(arguments.codec).__name__
        self.destinations = destinations
        self.device = destinations[0].device
        self.buffers = MessageBuffers() if arguments.buffers is None else arguments.buffers
        self.meter = arguments.meter
        self.timeout = arguments.timeout
        self.error_decay = arguments.error_decay
        self.places = arguments.places
        self.world_size: int = group.size()
        self.rank: int = group_rank(group)
        # Read once: later stages run in other threads, which cannot tell whether a compiler traces.
        self.is_traced = torch.compiler.is_compiling()
        if self.is_traced or is_capturing(self.device):  # replays would measure in each step
            self.meter = None
        self._is_inference = not self.is_traced and torch.is_inference_mode_enabled()

    @contextmanager
    def later_stage(self, name: str) -> Iterator[None]:
        """The context of work after a collective, on any thread.

        Tensors made in ``torch.inference_mode()`` can be written only in that mode.

        Args:
            name: the stage's name, for the meter.
        """
        mode = torch.inference_mode() if self._is_inference else torch.no_grad()
        with mode, timed(self.meter, name):
            yield

    def decay(self, error: Tensor | None, rounding: Tensor | None) -> None:
        """Multiply a measured new error by the decay.

        Args:
            error: the caller's tensor.
            rounding: seed and step of the encoding.
        """
        if error is not None and self.error_decay != 1.0:
            decay_error(error, self.error_decay, rounding)

    def decay_own(self, error: Tensor | None, rounding: Tensor | None) -> None:
        """Decay the error of this rank's values, in the ended stage; as :meth:`decay`."""
        if self.error_decay != 1.0:
            with timed(self.meter, "encode"):
                self.decay(error, rounding)

    def buffer(self, name: str, *shape: int) -> Tensor:
        if self.is_traced:  # the compiler plans memory itself
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        return self.buffers.get(name, shape, torch.uint8, self.device)

    def is_exchanged(self, group: dist.ProcessGroup) -> bool:
        """Whether messages have their own lengths, without padding."""
        return self.timeout is None and self.device.type == "cpu" and exchanges(group)

    def issue_all_to_all(
        self, message: Tensor, sizes: Sequence[int], group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        """Send each rank its part of a message, and receive this rank's parts of all.

        Args:
            message: flat bytes.
            sizes: the size of each part in bytes, the same on all ranks.
            group: the process group.

        Returns:
            A Future of the parts, flat, each of ``sizes[self.rank]`` bytes.
        """
        own = [sizes[self.rank]] * self.world_size
        note_collective(sum(sizes) - own[0], sum(own) - own[0])
        if self.is_traced:
            return traced_all_to_all(message, sizes, own, group, self.form)
        out = self.buffer("shards", sum(own))
        return issue_all_to_all(
            message, sizes, own, out, group, self.timeout, place=self.places[0], form=self.form
        )

    def gathered_bytes(self, sizes: Sequence[int], group: dist.ProcessGroup) -> tuple[int, int]:
        """Bytes that this rank sends and receives in :meth:`issue_gather`."""
        others = self.world_size - 1
        if self.is_exchanged(group):
            return sizes[self.rank] * others, sum(sizes) - sizes[self.rank]
        return max(sizes) * others, max(sizes) * others

    def issue_gather(
        self,
        name: str,
        message: Tensor,
        sizes: Sequence[int],
        group: dist.ProcessGroup,
        *,
        is_second: bool = False,
        place: Place | None = None,
    ) -> torch.futures.Future[Tensor]:
        """Send every rank all messages, on any thread. Does not count the bytes.

        Args:
            name: the name of their buffer.
            message: flat bytes, as long as the longest message.
            sizes: the sizes of the messages in bytes, the same on all ranks.
            group: the process group.
            is_second: whether this is a second stage; used while a compiler traces.
            place: its place; None for the next one, if it needs one.

        Returns:
            A Future of the messages for :meth:`without_padding`: one after another, flat, or of
            shape ``(ranks, longest)``.
        """
        is_exchanged = self.is_exchanged(group)
        if self.is_traced:
            exact = list(sizes) if is_exchanged else None
            return traced_all_gather(
                message, group, sizes=exact, is_second=is_second, form=self.form
            )
        if is_exchanged:
            gathered = self.buffer(name, sum(sizes))
            place = place or place_in(group)
            place.form = self.form
            return issue_gather_of_sizes(message, sizes, gathered, place)
        result = self.buffer(name, self.world_size, len(message))
        return issue_all_gather(message, result, group, self.timeout)

    def expect_gather(
        self, name: str, sizes: Sequence[int], place: Place, group: dist.ProcessGroup
    ) -> None:
        """Request the messages that :meth:`issue_gather` will write to the named buffer."""
        if self.is_exchanged(group):
            place.form = self.form
            place.expect_gather(self.buffer(name, sum(sizes)).split(list(sizes)))

    def without_padding(self, name: str, messages: Tensor, sizes: Sequence[int]) -> Tensor:
        """Messages of several lengths, one after another.

        Args:
            name: the name of their buffer, if some are padded.
            messages: shape ``(messages, bytes)``, or flat if none is padded.
            sizes: the sizes of the messages in bytes.

        Returns:
            Flat bytes, ``sum(sizes)`` of them: a view of ``messages`` if none is padded.
        """
        if messages.dim() == 1 or all(size == messages.shape[1] for size in sizes):
            return messages.view(-1)
        pieces = [message[:size] for message, size in zip(messages, sizes, strict=True)]
        return torch.cat(pieces, out=self.buffer(name, sum(sizes)))
