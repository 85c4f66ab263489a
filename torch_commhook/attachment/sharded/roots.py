"""The modules of ``fully_shard`` whose forward and backward begin and end a model's steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from torch_commhook.attachment.sharded import fsdp
from torch_commhook.attachment.sharded.step import LEFT, ShardedStep, is_in_backward


class Roots:
    """The outermost modules of a model, or one around it, that hold the states of ``fully_shard``.

    Args:
        step: the model's step.
        ended: called when a backward of one of them has ended.
    """

    def __init__(self, step: ShardedStep, ended: Callable[[], None]) -> None:
        self._step = step
        self._ended = ended
        self._states: list[weakref.ref[Any]] = []
        self._around: list[weakref.ref[nn.Module]] = []

    def listen_to(self, module: nn.Module) -> None:
        """Watch the ends of backwards of a module and of the modules in it."""
        for state in fsdp.states(module):
            if all(reference() is not state for reference in self._states):
                self._states.append(weakref.ref(state))
                fsdp.listen_to_end(state, self._ended)

    def stop(self) -> None:
        """Watch no module any more."""
        for reference in self._states:
            state = reference()
            if state is not None:
                fsdp.stop_listening(state, self._ended)

    @property
    def are_in_backward(self) -> bool:
        """Whether a backward of one of them is running."""
        return any(map(fsdp.is_in_backward, self._all()))

    @property
    def are_unfinished(self) -> bool:
        """Whether a forward or backward of one of them is running, or was left by an exception."""
        return any(map(fsdp.is_unfinished, self._all()))

    def around(self, model: nn.Module) -> list[nn.Module]:
        """Modules around a model that became roots in its first forward. Each is returned once.

        Their forward begins an iteration.
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
        """Make a module usable again if an exception ended its last forward or backward."""
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
        """Refuse backwards that do not reduce gradients.

        Raises:
            RuntimeError: ``set_manual_backward_finalization(True)`` was called.
        """
        states = [reference() for reference in self._states]
        if any(state is not None and fsdp.is_finalized_by_hand(state) for state in states):
            raise RuntimeError(
                "torch_commhook: with set_manual_backward_finalization(True) gradients are reduced "
                "after backward(), when a hook's step has ended; set it to False, or remove() "
                "the hook"
            )

    def reset(self) -> None:
        """Reset the states of all, so that they leave the present step."""
        for root in self._all():
            fsdp.reset(root)

    def _all(self) -> list[Any]:
        states = [reference() for reference in self._states]
        return fsdp.roots(state for state in states if state is not None)


def _has(module: nn.Module, other: nn.Module) -> bool:
    return module is other or any(each is other for each in module.modules())
