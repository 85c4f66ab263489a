"""Hooks in Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torch_commhook.attachment.handle import HookHandle
from torch_commhook.hooks.base import Hook
from torch_commhook.integrations.attached_model import attach_wrapped

_HOW = "Start the script with accelerate launch or torchrun, and pass the result of prepare()"


def attach_to(
    accelerator: Any, model: nn.Module, hook: str | Callable[..., Any], **options: Any
) -> HookHandle:
    """Attach a hook to a model that ``accelerator.prepare()`` has returned: DDP or FSDP2.

    ``accelerator.save_state()`` then saves the hook's memory of all ranks, and ``load_state()``
    loads it.

    Args:
        accelerator: an ``Accelerator``.
        model: the result of its ``prepare()``.
        hook: one of :mod:`torch_commhook.hooks`, a callable, or an expression such as
            ``"error_feedback(blockwise(bits=4))"``.
        options: options of :func:`torch_commhook.attach`. The scaler is the accelerator's.

    Returns:
        The handle. If the hook keeps ranks apart, call its ``synchronize()`` after training.

    Raises:
        RuntimeError: the accelerator has not wrapped the model, so that a hook cannot take part.
        ValueError: the accelerator was given a hook of this library as ``comm_hook``, which it
            ignores.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = attach_to(accelerator, model, "error_feedback(blockwise(bits=4))")
    """
    handler = accelerator.ddp_handler
    given = getattr(handler, "comm_hook", None)
    if isinstance(given, (Hook, str)) and not hasattr(given, "value"):
        raise ValueError(
            f"attach_to: DistributedDataParallelKwargs accepts only a DDPCommunicationHookType as "
            f"comm_hook, and ignores anything else, such as {given!r}; leave it out"
        )
    options = {"scaler": accelerator.scaler, **options}
    handle = attach_wrapped("attach_to", model, hook, _HOW, **options)
    objects = getattr(accelerator, "_custom_objects", [])
    # Not those of removed hooks or freed models: each would have a file of its own.
    objects[:] = [each for each in objects if not isinstance(each, _Saved) or each.is_in_use]
    accelerator.register_for_checkpointing(_Saved(handle))
    return handle


class _Saved:
    """The memory of all ranks' hooks, in the form that Accelerate saves and loads."""

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
