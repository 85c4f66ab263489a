"""The scale of mixed precision, which is a factor of a hook's gradients."""

from __future__ import annotations

from typing import Protocol

import torch

from torch_commhook import _C

_LARGEST = torch.finfo(torch.float32).max


class Scaler(Protocol):
    """Scales a loss, such as ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """The factor of the loss."""


def checked_scale(scaler: Scaler) -> float:
    """The scale of a user's scaler; as :func:`scale_of`.

    Raises:
        TypeError: it is no ``torch.amp.GradScaler``, and has no ``get_scale()``.
        ValueError: its scale is not positive and finite.
    """
    if isinstance(scaler, type) or not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(
            "attach: scaler must be a torch.amp.GradScaler, or have its get_scale(), got "
            f"{_C.type_name(scaler)}"
        )
    return scale_of(scaler, "attach")


def scale_of(scaler: Scaler, who: str) -> float:
    """The factor of the next gradients. Waits for the device if that holds the scale.

    Args:
        scaler: the argument of ``attach``.
        who: the caller, for the message.

    Raises:
        TypeError: ``get_scale()`` returns no number.
        ValueError: the scale is not positive and finite.
    """
    given = scaler.get_scale()
    try:
        scale = float(given)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{who}: scaler must give a number as its scale, got {_C.type_name(given)}"
        ) from error
    if not 0.0 < scale <= _LARGEST:
        raise ValueError(f"{who}: scaler must have a positive, finite scale, got {scale}")
    return scale
