"""Uneven inputs: a rank without inputs takes part in the others' steps with zeros."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


class _Participant(Protocol):
    """A model whose rank can take part in the others' steps."""

    @property
    def parent_group(self) -> dist.ProcessGroup:
        """The process group."""

    @property
    def rank(self) -> int:
        """This process's rank in the process group."""

    @property
    def device(self) -> torch.device:
        """The first parameter's device."""

    def shadow_step(self) -> None:
        """Take part in the others' step, with gradients of zero."""

    def broadcast_from(self, rank: int) -> None:
        """Broadcast one rank's parameters and buffers to all ranks."""


class ReducerJoinable(Joinable):
    """Lets ``torch.distributed.algorithms.join.Join`` use a model that has a hook."""

    def __init__(self, road: _Participant) -> None:
        super().__init__()
        self.road = road
        self._notified = False

    @property
    def enabled(self) -> bool:
        """Whether a join context is active."""
        enable: bool = self._join_config.enable
        return enable

    @property
    def is_notified(self) -> bool:
        """Whether the ranks that have joined know about this step."""
        return self.enabled and self._notified

    def notify(self) -> None:
        """Notify the ranks that have joined of a step, once."""
        if self.enabled and not self._notified:
            self._notified = True
            Join.notify_join_context(self)

    def take_part(self) -> None:
        """Take part in a step of which another rank has notified this one, which has joined."""
        self._notified = True

    def step_ended(self) -> None:
        """Note that the next step needs a new notification."""
        self._notified = False

    def common_rank(self, candidate: bool) -> int:
        """The highest rank among the candidates."""
        road = self.road
        rank = torch.tensor(
            [road.rank if candidate else -1], dtype=torch.int64, device=self.join_device
        )
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.join_process_group)
        return int(rank.item())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self.road.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.road.parent_group


class _Shadow(JoinHook):
    def __init__(self, joinable: ReducerJoinable) -> None:
        self._joinable = joinable

    def main_hook(self) -> None:
        self._joinable.road.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        joinable = self._joinable
        joinable._join_config = type(joinable._join_config).construct_disabled_join_config()
        joinable.step_ended()
        joinable.road.broadcast_from(joinable.common_rank(is_last_joiner))
