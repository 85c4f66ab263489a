"""The modules with ``fully_shard`` whose forwards and backwards begin and end a model's steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.sharded.step import LEFT, ShardedStep, is_in_backward


class Roots:
    """The outermost modules of a model, or one around it, whose states ``fully_shard`` keeps.

    Args:
        step: the model's.
        ended: called when a backward of one of them has ended.
    """

    def __init__(self, step: ShardedStep, ended: Callable[[], None]) -> None:
        self._step = step
        self._ended = ended
        self._states: list[weakref.ref[Any]] = []
        self._around: list[weakref.ref[nn.Module]] = []

    def listen_to(self, module: nn.Module) -> None:
        """Hear of the ends of backwards of a module, and of those in it."""
        for state in fsdp.states(module):
            if all(reference() is not state for reference in self._states):
                self._states.append(weakref.ref(state))
                fsdp.listen_to_end(state, self._ended)

    def stop(self) -> None:
        """Hear of none."""
        for reference in self._states:
            state = reference()
            if state is not None:
                fsdp.stop_listening(state, self._ended)

    @property
    def are_in_backward(self) -> bool:
        """Whether a backward goes on in one of them."""
        return any(map(fsdp.is_in_backward, self._all()))

    @property
    def are_unfinished(self) -> bool:
        """Whether a forward or a backward of one of them goes on, or was left by an exception."""
        return any(map(fsdp.is_unfinished, self._all()))

    def around(self, model: nn.Module) -> list[nn.Module]:
        """Modules around a model that are roots since its first forward; each is given once.

        An iteration begins with their forward.
        """
        found = []
        for root in self._all():
            module = fsdp.root_module(root)
            if _has(model, module) or any(each() is module for each in self._around):
                continue
            self._around.append(weakref.ref(module))
            self.listen_to(module)
            found.append(module)
        return found

    def recover(self, module: nn.Module) -> None:
        """Have a module go on where its last forward or backward was left by an exception."""
        if is_in_backward():  # activation checkpointing
            return
        inside = [root for root in self._all() if _has(module, fsdp.root_module(root))]
        if not self._step.has_failed:
            if not self._step.is_open and not any(map(fsdp.is_unfinished, inside)):
                return
            self._step.fail(LEFT)
        for root in inside:
            fsdp.reset(root)
        if inside:
            self._step.has_failed = False

    def check(self) -> None:
        """Refuse backwards that reduce no gradients.

        Raises:
            RuntimeError: ``set_manual_backward_finalization(True)`` was called.
        """
        states = [reference() for reference in self._states]
        if any(state is not None and fsdp.is_finalized_by_hand(state) for state in states):
            raise RuntimeError(
                "torch_commhook: set_manual_backward_finalization(True) has gradients reduced "
                "after backward(), where a hook's step has ended; set it to False, or remove() "
                "the hook"
            )

    def reset(self) -> None:
        """Have all forget the step that they are in."""
        for root in self._all():
            fsdp.reset(root)

    def _all(self) -> list[Any]:
        states = [reference() for reference in self._states]
        return fsdp.roots(state for state in states if state is not None)


def _has(module: nn.Module, other: nn.Module) -> bool:
    return module is other or any(each is other for each in module.modules())
