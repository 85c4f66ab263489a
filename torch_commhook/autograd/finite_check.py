"""Checks whether gradients are finite, without a wait for the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook import _C
from torch_commhook.autograd.registration import (
    RemovableHandle,
    is_fully_sharded,
    local_part,
    register_hook,
    register_post_accumulate_grad_hook,
)
from torch_commhook.native.bucket_ops import check_finite


class FiniteCheck:
    """Counts the infinities and NaNs in gradients, on their device, until the host reads the count.

    ::

        check = FiniteCheck()
        check.watch(model)  # all parameters, by name
        register_hook(activation, check)  # one tensor: the check is a hook
        loss.backward()
        check.raise_if_nonfinite()  # the host waits for the device here, once

    As a hook it checks the gradient that it gets, or, after accumulation, the parameter's ``.grad``
    (so also that of any leaf that requires grad and has one). It runs in eager code, in compiled
    code and in CUDA graphs, and leaves the gradient unchanged. Of a DTensor it counts the values of
    this rank's part.

    Args:
        device: the device of the checked tensors; by default torch's default device.

    Example:
        >>> x = torch.zeros(2, requires_grad=True)
        >>> check = autograd.FiniteCheck()
        >>> _ = check.watch([("x", x)])
        >>> (x.sqrt() * 1.0).sum().backward()
        >>> int(check.count)
        2
        >>> check.raise_if_nonfinite()
        Traceback (most recent call last):
            ...
        RuntimeError: FiniteCheck: gradients must be finite, got 2 infinite or NaN values: 2...
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._own = _new_count(device)
        self._watched: dict[Hashable, Tensor] = {}

    @property
    def count(self) -> Tensor:
        """Return the number of infinite and NaN values since the last :meth:`reset`.

        int64, 0-dimensional, on the device of the check; the host does not wait.
        """
        return torch.stack(self._counts()).sum()

    def __call__(self, tensor: Tensor | None) -> None:
        if tensor is None:  # a gradient that was not computed
            return
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
            tensor = tensor.grad
        check_finite([local_part(tensor)], self._own)

    def watch(
        self, tensors: torch.nn.Module | Iterable[tuple[Hashable, Tensor]]
    ) -> list[RemovableHandle]:
        """Check each gradient of these tensors when it is computed, before it is accumulated.

        Of a parameter that ``fully_shard()`` or ``replicate()`` has made, this rank's shard of
        ``.grad`` is checked after each reduction, with the gradients that it accumulated before.
        Shard the model first: ``fully_shard()`` replaces the parameters.

        Args:
            tensors: a module, for its parameters that require grad; or pairs of a name and a
                tensor. Tensors of one name share one count.

        Returns:
            A handle for each tensor, in order.

        Raises:
            TypeError: ``tensors`` holds no pairs of a name and a tensor.
            ValueError: a tensor is on another device than the check.
            RuntimeError: a tensor does not require grad.
        """
        named: Sequence[tuple[Hashable, Tensor]]
        if isinstance(tensors, torch.nn.Module):
            named = [(name, p) for name, p in tensors.named_parameters() if p.requires_grad]
        else:
            named = _named(tensors)
        for name, tensor in named:
            if tensor.device != self._own.device:
                raise ValueError(
                    f"FiniteCheck.watch: {name!r} must be on the device of the check, "
                    f"{self._own.device}, got {tensor.device}; make a check for each device"
                )
            if not tensor.requires_grad:
                raise RuntimeError(
                    f"FiniteCheck.watch: {name!r} must require grad, got a tensor that does not"
                )
        return [self._watch(name, tensor) for name, tensor in named]

    def raise_if_nonfinite(self) -> None:
        """Wait for the device, once, and raise if a value was not finite.

        Counts stay unchanged until :meth:`reset`.

        Raises:
            RuntimeError: a value was not finite. The message has the number of such values, and the
                watched tensors.
        """
        own, *watched = torch.stack(self._counts()).tolist()
        parts = [f"{n} of {name!r}" for name, n in zip(self._watched, watched, strict=True) if n]
        if own:
            parts.append(f"{own} of tensors that are not watched by name")
        if not parts:
            return
        if len(parts) > _NAMED_AT_MOST:
            parts[_NAMED_AT_MOST:] = [f"and of {len(parts) - _NAMED_AT_MOST} more"]
        raise RuntimeError(
            "FiniteCheck: gradients must be finite, got "
            f"{own + sum(watched)} infinite or NaN values: {', '.join(parts)}"
        )

    def reset(self) -> None:
        """Set all counts to zero. The host does not wait."""
        torch._foreach_zero_(self._counts())

    def _counts(self) -> list[Tensor]:
        return [self._own, *self._watched.values()]

    def _watch(self, name: Hashable, tensor: Tensor) -> RemovableHandle:
        count = self._watched.get(name)
        if count is None:
            count = self._watched[name] = _new_count(self._own.device)

        def check_finite_hook(grad: Tensor | None) -> None:
            if grad is not None:
                check_finite([local_part(grad)], count)

        if is_fully_sharded(tensor):
            return register_post_accumulate_grad_hook(
                tensor, lambda leaf: check_finite_hook(leaf.grad)
            )
        return register_hook(tensor, check_finite_hook)


_NAMED_AT_MOST = 10


def _named(tensors: Any) -> list[tuple[Hashable, Tensor]]:
    expected = (
        "FiniteCheck.watch: tensors must be a module, or pairs of a name and a tensor, as "
        "model.named_parameters() gives them, got"
    )
    # A tensor is also an iterable of its rows, which is never intended.
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{expected} {_C.type_name(tensors)}")
    named = list(tensors)
    for i, pair in enumerate(named):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{expected} {_C.type_name(pair)} in place {i}")
        name, tensor = pair
        if not isinstance(name, Hashable) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"{expected} ({_C.type_name(name)}, {_C.type_name(tensor)}) in place {i}"
            )
    return named


def _new_count(device: torch.device | str | None) -> Tensor:
    with torch.inference_mode(False):  # otherwise it could be written in that mode only
        count = torch.zeros((), dtype=torch.int64, device=device)
    if count.is_cuda:
        # Without this, compiled code that writes it would not become a CUDA graph.
        torch._dynamo.mark_static_address(count, guard=False)
    return count
