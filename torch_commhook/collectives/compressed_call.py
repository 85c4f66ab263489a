"""What collectives of codecs' messages share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.collectives.exchange import exchange, pays
from torch_commhook.collectives.group_place import group_rank
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.collectives.plain import all_to_all, issue_all_gather
from torch_commhook.collectives.stages import timed
from torch_commhook.collectives.streams import is_capturing
from torch_commhook.collectives.sum_arguments import SumArguments
from torch_commhook.metrics import note_collective


class CompressedCall:
    """One collective of messages on its way.

    It does not keep the group: callbacks have it, which a thread of Gloo's may drop last. A group
    that goes with it then would have that thread wait for its own end.
    """

    def __init__(
        self, arguments: SumArguments, destinations: list[Tensor], group: dist.ProcessGroup
    ) -> None:
        self.codec = arguments.codec
        self.destinations = destinations
        self.device = destinations[0].device
        self.buffers = MessageBuffers() if arguments.buffers is None else arguments.buffers
        self.meter = arguments.meter
        self.timeout = arguments.timeout
        self.world_size: int = group.size()
        self.rank: int = group_rank(group)
        # Asked once: later stages are other threads' work, which cannot tell who compiles.
        self.is_traced = torch.compiler.is_compiling()
        if self.is_traced or is_capturing(self.device):  # replays would measure in each step
            self.meter = None
        self._is_inference = not self.is_traced and torch.is_inference_mode_enabled()

    @contextmanager
    def later_stage(self, name: str) -> Iterator[None]:
        """Around what follows a collective, on whatever thread.

        Tensors that are made in ``torch.inference_mode()`` can be written in that alone.

        Args:
            name: of the stage, for the meter.
        """
        mode = torch.inference_mode() if self._is_inference else torch.no_grad()
        with mode, timed(self.meter, name):
            yield

    def buffer(self, name: str, *shape: int) -> Tensor:
        if self.is_traced:  # by a compiler, which plans memory itself
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        return self.buffers.get(name, shape, torch.uint8, self.device)

    def is_exchanged(self, longest: int, group: dist.ProcessGroup) -> bool:
        if self.is_traced or self.timeout is not None:  # exchanges have the group's timeout
            return False
        return self.device.type == "cpu" and pays(group, longest)

    def issue_all_to_all(
        self, message: Tensor, sizes: Sequence[int], group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        """Send each rank its part of a message, and get this rank's parts of all.

        Args:
            message: flat bytes.
            sizes: of the parts, in bytes, the same on all ranks.
            group: the process group.

        Returns:
            A Future of the parts, flat, each of ``sizes[self.rank]`` bytes.
        """
        own = [sizes[self.rank]] * self.world_size
        if self.is_exchanged(max(sizes), group):
            note_collective(sum(sizes) - own[0], sum(own) - own[0])
            received = self.buffer("shards", sum(own))
            return exchange(message.split(list(sizes)), received.split(own), received, group)
        return all_to_all(
            message,
            input_split_sizes=sizes,
            output_split_sizes=own,
            out=None if self.is_traced else self.buffer("shards", sum(own)),
            group=group,
            timeout=self.timeout,
        )

    def issue_gather(
        self, name: str, message: Tensor, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        """Give every rank the messages of all: not counted, on whatever thread.

        Args:
            name: of the buffer for them.
            message: flat bytes, as many on all ranks.
            group: the process group.

        Returns:
            A Future of the messages, of shape ``(ranks, bytes)``.
        """
        if self.is_traced:
            return issue_all_gather(message, None, group, is_traced=True)
        result = self.buffer(name, self.world_size, len(message))
        if not self.is_exchanged(len(message), group):
            return issue_all_gather(message, result, group, is_traced=False, timeout=self.timeout)
        return exchange([message] * self.world_size, list(result), result, group)

    def without_padding(self, name: str, messages: Tensor, sizes: Sequence[int]) -> Tensor:
        """Messages of several lengths, one after another.

        Args:
            name: of the buffer for them, where some are filled up.
            messages: of shape ``(messages, bytes)``.
            sizes: of the messages, in bytes.

        Returns:
            Flat bytes, ``sum(sizes)`` of them: a view of ``messages`` where none is filled up.
        """
        if all(size == messages.shape[1] for size in sizes):
            return messages.view(-1)
        pieces = [message[:size] for message, size in zip(messages, sizes, strict=True)]
        return torch.cat(pieces, out=self.buffer(name, sum(sizes)))
