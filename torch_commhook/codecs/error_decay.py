"""Decay of error memory."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.codecs.checks import ERROR_DTYPES
from torch_commhook.native.tensor_checks import check_dense, check_flat

#: Elements whose copies stay in a cache of the CPU; the number that other devices take at a time.
_CHUNK = 1 << 16
_DEVICE_CHUNK = 1 << 20

_WORD = (1 << 32) - 1
#: Separates these random numbers from those with which a codec rounds the same element.
_SALT = 0x6D6F6D65


def check_decay(what: str, decay: object) -> None:
    """Refuse a decay that is not a factor in (0, 1].

    Raises:
        TypeError: ``decay`` is not a number.
        ValueError: it is out of range, or NaN.
    """
    if not isinstance(decay, (int, float, torch.SymFloat)) or isinstance(decay, bool):
        raise TypeError(f"{what} must be a number, got {type(decay).__qualname__}")
    if not 0 < decay <= 1:
        raise ValueError(f"{what} must be greater than 0 and at most 1, got {decay}")


def decays_at_random(error: Tensor | None, decay: float) -> bool:
    """Whether :func:`decay_error` rounds this error at random, if it gets ``rounding``."""
    return error is not None and error.dtype == torch.bfloat16 and decay != 1.0


@torch.library.custom_op("commhook::decay_error", mutates_args=("error",))
def decay_error(error: Tensor, decay: float, rounding: Tensor | None = None) -> None:
    """Multiply an error memory by ``decay``, in place.

    Args:
        error: flat, float32 or bfloat16. Multiplied in float32. Written.
        decay: in (0, 1].
        rounding: int64, ``[seed, step]``, on the same device. A bfloat16 error is then rounded at
            random, without bias. Rounded to the nearest, a factor near 1 would change nothing.

    Raises:
        TypeError, ValueError: a tensor is of another kind, or ``decay`` out of range.
    """
    check_flat("decay_error", "error", error, ERROR_DTYPES)
    check_decay("decay_error: decay", decay)
    if rounding is not None:
        check_dense("decay_error", "rounding", rounding, (torch.int64,))
        if rounding.shape != (2,) or rounding.device != error.device:
            raise ValueError(
                "decay_error: rounding must be [seed, step] on the error's device, got sizes "
                f"{list(rounding.shape)} on {rounding.device}"
            )
    if error.dtype == torch.float32 or rounding is None:
        error.mul_(decay)
        return
    key = _key_of(rounding)
    size = _CHUNK if error.device.type == "cpu" else _DEVICE_CHUNK
    for begin in range(0, len(error), size):
        _decay_at_random(error[begin : begin + size], decay, key, begin)


@decay_error.register_fake
def _decay_error_fake(error: Tensor, decay: float, rounding: Tensor | None = None) -> None:
    return None


def _decay_at_random(piece: Tensor, decay: float, key: Tensor, begin: int) -> None:
    places = torch.arange(begin, begin + len(piece), dtype=torch.int64, device=piece.device)
    noise = _scrambled((places + key).bitwise_and_(_WORD)).bitwise_right_shift_(16)
    value = piece.to(torch.float32).mul_(decay)
    # The sum reaches the upper half with the probability that the magnitude rounds up.
    bits = (value.view(torch.int32) + noise.to(torch.int32)).bitwise_and_(-(1 << 16))
    piece.copy_(torch.where(value.isfinite(), bits.view(torch.float32), value))


def _key_of(rounding: Tensor) -> Tensor:
    """The 32-bit key of a step's random numbers; an element's place is their other input."""
    seed, step = rounding.unbind()
    key = _scrambled(step.bitwise_and(_WORD).bitwise_xor_(_SALT))
    key = _scrambled((seed >> 32).bitwise_and_(_WORD).bitwise_xor_(key))
    return _scrambled(seed.bitwise_and(_WORD).bitwise_xor_(key))


def _scrambled(bits: Tensor) -> Tensor:
    """As ``scrambled`` in ``csrc/ops/codecs/error_math.h``, for 32 bits each; in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits.bitwise_xor_(bits >> shift).mul_(factor).bitwise_and_(_WORD)  # products wrap around
    return bits.bitwise_xor_(bits >> 16)
