"""The parameters of a model whose gradients a hook averages."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from torch_commhook import _C


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The names and parameters that require grad, without those that DDP is told to ignore.

    Raises:
        ValueError: there are none, one has no memory yet, or is stepped by an optimizer in
            backward.
        TypeError: one is a DTensor.
    """
    ignored = ignored_names(model)
    parameters: list[tuple[str, Tensor]] = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
    if not parameters:
        raise ValueError(f"attach: {_C.type_name(model)} has no parameter that requires grad")
    for name, parameter in parameters:
        if parameter.is_meta:
            raise ValueError(
                f"attach: parameter '{name}' is on the meta device; materialise the model "
                "(model.to_empty(device=...), then load or initialise it) before attaching"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"attach: parameter '{name}' is not initialised; run the model once before "
                "attaching"
            )
        if hasattr(parameter, "device_mesh"):
            raise TypeError(
                f"attach: parameter '{name}' is a DTensor, whose gradients its own sharding "
                "communicates; attach takes models whose parameters are whole on each rank"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"attach: parameter '{name}' has an optimizer in backward, which would step "
                "before gradients are averaged; let the optimizer step after backward, or in "
                "HookHandle.register_post_accumulate_hook"
            )
    return parameters


def ignored_names(model: nn.Module) -> Collection[str]:
    """The names of the parameters that DDP is told to ignore."""
    if isinstance(model, DistributedDataParallel):
        return {f"module.{name}" for name in model.parameters_to_ignore}
    return getattr(model, "_ddp_params_and_buffers_to_ignore", ())


def check_not_in_ddp(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse parameters whose gradients DDP averages, which would come after and undo the hook.

    Raises:
        RuntimeError: there is one.
    """
    for name, parameter in parameters:
        hooks: Any = parameter._post_accumulate_grad_hooks or {}
        if _C.has_ddp_hook(parameter) or any(
            getattr(getattr(hook, "func", hook), "__module__", None)
            == DistributedDataParallel.__module__
            for hook in hooks.values()
        ):
            raise RuntimeError(
                f"attach: the gradient of parameter '{name}' is averaged by a "
                "DistributedDataParallel already; attach the hook to that"
            )


#: The models that have claimed each parameter, each with what names the hook attached to it.
_owners: Any = WeakIdKeyDictionary()

_Owners = list[tuple["weakref.ref[nn.Module]", Callable[[], "str | None"]]]


def claim(
    parameters: list[tuple[str, Tensor]], owner: nn.Module, hook: Callable[[], str | None]
) -> None:
    """Take parameters for one model. DDP models may share them, as without a hook.

    Args:
        parameters: names and parameters.
        owner: the model.
        hook: gives the name of the hook that is attached to the model, or None.

    Raises:
        RuntimeError: one belongs to another model, to which a hook is attached.
    """
    taken = _taken(parameters, owner)
    if taken is not None:
        gc.collect()  # a DDP that nobody uses any more may wait for that
        taken = _taken(parameters, owner)
    if taken is not None:
        name, hook_name = taken
        raise RuntimeError(
            f"attach: parameter '{name}' belongs to another module as well, to which hook "
            f"'{hook_name}' is attached already"
        )
    for _, parameter in parameters:
        others = [other for other in _owners_of(parameter) if other[0]() is not owner]
        _owners[parameter] = [*others, (weakref.ref(owner), hook)]


def release(owner: nn.Module) -> None:
    """Give up what a model has claimed."""
    for parameter in owner.parameters():
        others = [other for other in _owners_of(parameter) if other[0]() is not owner]
        if others:
            _owners[parameter] = others
        else:
            _owners.pop(parameter, None)  # its weak reference would be in the way of swap_tensors


def _owners_of(parameter: Tensor) -> _Owners:
    return [entry for entry in _owners.get(parameter, ()) if entry[0]() is not None]


def _taken(parameters: list[tuple[str, Tensor]], owner: nn.Module) -> tuple[str, str] | None:
    for name, parameter in parameters:
        for other, attached in _owners_of(parameter):
            model = other()
            if model is owner or (
                isinstance(owner, DistributedDataParallel)
                and isinstance(model, DistributedDataParallel)
            ):
                continue
            hook_name = attached()
            if hook_name is not None:
                return name, hook_name
    return None
