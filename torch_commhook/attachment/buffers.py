"""A model's values that rank 0 sends to the others: which, whether they can be written, and how."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.modules.batchnorm import _NormBase

from torch_commhook.attachment.parameters import ignored_names

#: Integers with as many bytes. Complex values of 16 bytes have none.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_values(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers that rank 0 sends when a hook is attached, by name."""
    ignored = ignored_names(module)
    named = (*module.named_parameters(), *module.named_buffers())
    # Frozen parameters that are DTensors differ among ranks.
    return {
        name: tensor.detach()
        for name, tensor in named
        if name not in ignored and tensor.numel() and not hasattr(tensor, "device_mesh")
    }


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that rank 0 sends in forwards, by name: DDP ignores none of them."""
    ignored = ignored_names(module)
    statistics = {
        id(buffer)
        for each in module.modules()
        if isinstance(each, _NormBase) and each.training
        for buffer in each._buffers.values()
    }
    # Backward does not use the statistics of a training batch norm: .data keeps their version, so
    # that backward of an earlier forward still works.
    return {
        name: buffer.data if id(buffer) in statistics else buffer.detach()
        for name, buffer in module.named_buffers()
        if name not in ignored and buffer.layout is torch.strided and buffer.numel()
    }


def check_values(
    module: nn.Module, *, init_sync: bool, broadcast_buffers: bool
) -> dict[str, object]:
    """Check that rank 0's values can be written.

    Args:
        module: the module.
        init_sync: whether ``attach`` writes parameters and buffers.
        broadcast_buffers: whether forwards write buffers.

    Returns:
        Settings that must be the same on all ranks, as for :func:`agree`.

    Raises:
        RuntimeError: a value cannot be written.
    """
    first = first_values(module) if init_sync else {}
    buffers = buffers_of(module) if broadcast_buffers else {}
    for name, tensor in {**buffers, **first}.items():
        settings = {"init_sync": name in first, "broadcast_buffers": name in buffers}
        why = why_not_written(tensor, in_bytes=name not in first)
        if why is not None:
            without = " and ".join(f"{each}=False" for each, is_set in settings.items() if is_set)
            raise RuntimeError(
                f"attach: {kind_of(module, name)} '{name}' cannot get rank 0's values: {why}. "
                f"Replace it, or pass {without}, so that each rank keeps its own"
            )
    return {
        "the parameters and buffers to send": _described(first),
        "the buffers to send": _described(buffers),
    }


def kind_of(module: nn.Module, name: str) -> str:
    """Whether a name is that of a parameter or of a buffer."""
    return "buffer" if any(name == each for each, _ in module.named_buffers()) else "parameter"


def _described(values: dict[str, Tensor]) -> list[str]:
    return [
        f"'{name}' of shape {tuple(each.shape)}, {each.dtype} and {each.layout}, a "
        f"{type(each).__name__} on {each.device.type}"
        for name, each in values.items()
    ]


@torch.no_grad()
def why_not_written(tensor: Tensor, *, in_bytes: bool = False) -> str | None:
    """Why a tensor cannot take another rank's values; None if it can.

    Args:
        tensor: the tensor, detached.
        in_bytes: whether the values arrive through :func:`unpack`.
    """
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.is_inference():
        return "it was made in torch.inference_mode()"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        try:  # with its own values
            if in_bytes:
                unpack(packed([tensor]), [tensor])
            else:
                tensor.copy_(_flatten_dense_tensors([tensor]).view(tensor.shape))
        except Exception as error:
            return f"its class {type(tensor).__name__} raises {type(error).__name__}: {error}"
    elif torch._debug_has_internal_overlap(tensor) == 1:
        return "it is expanded, so several of its elements share memory"
    return None


@torch.no_grad()
def packed(buffers: Collection[Tensor]) -> Tensor:
    """Returns the bytes of all buffers as a flat uint8 tensor. They must be on one device."""
    pieces = [
        buffer.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for buffer in _in_order(buffers)
    ]
    return torch.cat(pieces)


@torch.no_grad()
def unpack(sent: Tensor, buffers: Collection[Tensor]) -> None:
    """Writes the bytes that another rank's :func:`packed` returned into the buffers."""
    ordered = _in_order(buffers)
    sizes = [buffer.numel() * buffer.element_size() for buffer in ordered]
    for buffer, piece in zip(ordered, sent.split(sizes), strict=True):
        values = piece.view(buffer.dtype).view(buffer.shape)
        if not _has_bits_of(buffer, values):
            buffer.copy_(values)


def _has_bits_of(buffer: Tensor, values: Tensor) -> bool:
    """Whether the buffer has these values already, bit by bit.

    A write would give it a new version, and backward of an earlier graph would fail. False where
    finding out takes long: under a compiler, and on other devices than the CPU.
    """
    if torch.compiler.is_compiling() or type(buffer) is not Tensor or not buffer.is_cpu:
        return False
    bits = _BITS.get(buffer.element_size())  # 0.0 is not -0.0 here, and NaN is NaN
    if bits is None or buffer.is_conj() or buffer.is_neg():
        return False
    return torch.equal(buffer.view(bits), values.view(bits))


def _in_order(buffers: Collection[Tensor]) -> list[Tensor]:
    """Sorts by element size, the largest first, so that each buffer's bytes are aligned."""
    return sorted(buffers, key=lambda buffer: -buffer.element_size())
