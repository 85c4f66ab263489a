"""Hooks in Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torch_commhook.attachment.handle import HookHandle
from torch_commhook.hooks.base import Hook
from torch_commhook.integrations.attached_model import attach_wrapped

_HOW = "Start the script with accelerate launch or torchrun, and give what prepare() has returned"


def attach_to(
    accelerator: Any, model: nn.Module, hook: str | Callable[..., Any], **options: Any
) -> HookHandle:
    """Attach a hook to a model that ``accelerator.prepare()`` has returned: DDP or FSDP2.

    ``accelerator.save_state()`` then saves what the hook remembers on all ranks, and
    ``load_state()`` reads it.

    Args:
        accelerator: an ``Accelerator``.
        model: what its ``prepare()`` gave.
        hook: one of :mod:`torch_commhook.hooks`, a callable, or an expression such as
            ``"error_feedback(blockwise(bits=4))"``.
        options: of :func:`torch_commhook.attach`. The scaler is the accelerator's.

    Returns:
        The handle. Call its ``synchronize()`` after training with a hook that keeps ranks apart.

    Raises:
        RuntimeError: the accelerator has not wrapped the model so that a hook can take part.
        ValueError: the accelerator was given a hook of this library as ``comm_hook``, which it
            drops.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = attach_to(accelerator, model, "error_feedback(blockwise(bits=4))")
    """
    handler = accelerator.ddp_handler
    given = getattr(handler, "comm_hook", None)
    if isinstance(given, (Hook, str)) and not hasattr(given, "value"):
        raise ValueError(
            f"attach_to: DistributedDataParallelKwargs takes a DDPCommunicationHookType as "
            f"comm_hook, and drops anything else, such as {given!r}; leave it out"
        )
    options = {"scaler": accelerator.scaler, **options}
    handle = attach_wrapped("attach_to", model, hook, _HOW, **options)
    objects = getattr(accelerator, "_custom_objects", [])
    # Those of hooks that were removed, or whose model is gone: each would have a file of its own.
    objects[:] = [each for each in objects if not isinstance(each, _Saved) or each.is_in_use]
    accelerator.register_for_checkpointing(_Saved(handle))
    return handle


class _Saved:
    """What the hooks of all ranks remember, as Accelerate saves and reads it."""

    def __init__(self, handle: HookHandle) -> None:
        self._handle = handle

    @property
    def is_in_use(self) -> bool:
        return self._handle.is_attached

    def state_dict(self) -> dict[str, Any]:
        return self._handle.state_dict(gather=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_in_use:
            self._handle.load_state_dict(state)
