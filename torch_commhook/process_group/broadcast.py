"""Broadcasts many tensors from one rank in few messages: in eager code, and as an operator.

``csrc/ops/library.cpp`` has the schema, and ``csrc/runtime/collectives/broadcast_coalesced.cpp``
the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.functional_tensor import FunctionalTensorMode

from torch_commhook import _C
from torch_commhook.collectives.gloo_groups import resolve_group
from torch_commhook.native.bucket_ops import BUCKET_DTYPES, flatten, unflatten_into
from torch_commhook.process_group.wrapper import seen_by_cpp
from torch_commhook.wording import check_type

_NAME = "broadcast_coalesced"
_INT64_MAX = 2**63 - 1


def broadcast_coalesced(
    process_group: dist.ProcessGroup | None,
    tensors: Iterable[Tensor],
    buffer_size: int,
    rank: int = 0,
) -> None:
    """Broadcast one rank's tensors to all ranks, in few messages. Writes the tensors in place.

    The results are those of ``torch.distributed._broadcast_coalesced``. Tensors of one dtype and
    device are sent together, in flat buckets of at most ``buffer_size`` bytes. A large tensor is
    sent alone, without a copy if it is contiguous, and in pieces if it is very large. At most two
    broadcasts are in flight, so the call needs memory for at most two buckets or two such pieces. A
    compiler sees ``torch.ops.commhook.broadcast_coalesced``, and decomposes it into functional
    collectives with constant sizes.

    All ranks must call this with the same number of tensors, of the same shapes and dtypes; strides
    may differ. When it returns, the tensors are written, or on CUDA will be by work on the current
    stream. After an error nothing is in flight, and the tensors' contents are undefined.

    Args:
        process_group: the process group; None for the default one.
        tensors: any number of dense tensors, also none, of any shapes, strides and dtypes, on
            devices that the group supports. They need not agree, and may be empty. A tensor that is
            listed twice, like tied weights, is sent once.
        buffer_size: the size of a bucket in bytes, at least 1.
        rank: the rank within the group that sends its tensors.

    Raises:
        TypeError: ``tensors`` is not a list of tensors, or one of them is sparse or quantized;
            ``buffer_size`` or ``rank`` is not an int; ``process_group`` is none.
        ValueError: ``buffer_size`` or ``rank`` is out of range; tensors share memory, with each
            other or among their own elements (expanded tensors), or have no memory (the meta
            device). Compiled code does not detect all of these.
        RuntimeError: a tensor requires grad while gradients are recorded, or was made in inference
            mode and is written outside of it; torch.distributed is not initialized.
        Exception: the process group raised it.

    Example:
        >>> def share(rank):
        ...     tensors = [torch.full((2,), float(rank)), torch.tensor([10 * rank])]
        ...     broadcast_coalesced(None, tensors, 1 << 20, rank=1)
        ...     return tensors
        >>> run_ranks(share, 2)[0]
        [tensor([1., 1.]), tensor([10])]
    """
    group = resolve_group(process_group)
    tensors = _checked_list(tensors)
    for name, value in (("buffer_size", buffer_size), ("rank", rank)):
        check_type(f"{_NAME}: {name}", value, "an int", int)
        if abs(value) > _INT64_MAX:
            raise ValueError(f"{_NAME}: {name} must be an int of 64 bits, got {value}")
    _check_range(buffer_size, rank)
    if torch.compiler.is_dynamo_compiling():
        torch.ops.commhook.broadcast_coalesced(tensors, buffer_size, rank, group.group_name)
    else:
        _C.broadcast_coalesced(seen_by_cpp(group), tensors, buffer_size, rank)


def _checked_list(tensors: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(
            f"{_NAME}: tensors must be a list of tensors, got {type(tensors).__qualname__}"
        )
    tensors = list(tensors)
    for i, tensor in enumerate(tensors):
        check_type(f"{_NAME}: tensors[{i}]", tensor, "a tensor", Tensor)
        if tensor.is_nested:
            raise TypeError(
                f"{_NAME}: tensors[{i}] must be a dense tensor, got a nested one; pass its values()"
            )
    return tensors


def _check_range(buffer_size: int, rank: int) -> None:
    if buffer_size < 1:
        raise ValueError(f"{_NAME}: buffer_size must be at least 1 byte, got {buffer_size}")
    if rank < 0:
        raise ValueError(f"{_NAME}: rank must be a rank of the group, got {rank}")


# ---- the operator --------------------------------------------------------------------------------


@torch.library.register_fake("commhook::broadcast_coalesced")
def _broadcast_coalesced_fake(
    tensors: Sequence[Tensor], buffer_size: int, rank: int, group_name: str
) -> None:
    _check_range(buffer_size, rank)
    for i, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{_NAME}: tensors[{i}] must be dense (torch.strided), got layout {tensor.layout}"
            )
        if tensor.is_quantized:
            raise TypeError(
                f"{_NAME}: tensors[{i}] must not be quantized, got dtype {tensor.dtype}; pass its "
                "int_repr()"
            )
        if any(map(_is_expanded, tensor.shape, tensor.stride())):
            raise ValueError(
                f"{_NAME}: tensors[{i}] must reach each of its elements once, got sizes "
                f"{list(tensor.shape)} with strides {list(tensor.stride())}; pass "
                "tensor.contiguous()"
            )


def _is_expanded(size: int | torch.SymInt, stride: int | torch.SymInt) -> bool:
    """Whether a tensor is expanded, if known without a guard; the kernel checks the rest."""
    return isinstance(size, int) and isinstance(stride, int) and size > 1 and stride == 0


# The form for compilers. They treat it as the functional collectives that they know: they do not
# remove it, not even if nobody reads the tensors again, as on the source. They do not reorder it
# among other collectives, which must have one order on all ranks.
@torch.ops.commhook.broadcast_coalesced.default.py_impl(FunctionalTensorMode)
def _broadcast_coalesced_traced(
    mode: Any, tensors: Sequence[Tensor], buffer_size: int, rank: int, group_name: str
) -> None:
    _broadcast_coalesced_fake(tensors, buffer_size, rank, group_name)
    size = _resolve_process_group(group_name).size()  # type: ignore[arg-type]
    if rank >= size:
        raise ValueError(f"{_NAME}: rank must be a rank below {size}, got {rank}")
    with mode:
        in_flight: list[tuple[list[Tensor], Tensor]] = []
        different = list({id(tensor): tensor for tensor in tensors}.values())
        for bucket in _buckets(_pieces(different), buffer_size):
            before = _receive(*in_flight.pop(0)) if len(in_flight) == 2 else None
            buffer = _gather(bucket, before).view(_sent_dtype(bucket[0].dtype))
            sent = torch.ops._c10d_functional.broadcast(buffer, rank, group_name)
            in_flight.append((bucket, sent))
        for started in in_flight:
            _receive(*started)


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces: list[Tensor] = []
    for tensor in tensors:
        cut = _C.broadcast_cut([int(size) for size in tensor.shape], tensor.element_size())
        pieces += [tensor] if cut is None else tensor.split(cut[1], cut[0])
    return pieces


def _buckets(tensors: Sequence[Tensor], buffer_size: int) -> list[list[Tensor]]:
    kinds: dict[Any, int] = {}
    numbers = [kinds.setdefault((tensor.dtype, tensor.device), len(kinds)) for tensor in tensors]
    sizes = [int(tensor.numel() * tensor.element_size()) for tensor in tensors]
    return [
        [tensors[i] for i in indices]
        for indices in _C.broadcast_buckets(sizes, numbers, buffer_size)
    ]


def _receive(tensors: list[Tensor], sent: Tensor) -> Tensor:
    """Wait for a bucket, and write its tensors."""
    received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    is_negated = any(tensor.is_neg() for tensor in tensors)
    if tensors[0].dtype in BUCKET_DTYPES and not is_negated:
        unflatten_into(received, tensors)
        return received
    # Traced code cannot write to an alias of another dtype.
    width = received.element_size()
    sizes = [tensor.numel() * tensor.element_size() // width for tensor in tensors]
    for tensor, piece in zip(tensors, received.split(sizes), strict=True):
        tensor.copy_(_from_sent(piece, tensor))
    return received


def _gather(tensors: list[Tensor], before: Tensor | None) -> Tensor:
    """The tensors' bits in one tensor, as :func:`_words`.

    It seems to depend on ``before``, but uses no value of it. So a compiler cannot gather more
    buckets before those in flight have arrived, as Inductor does since torch 2.15.
    """
    words = [_words(tensor) for tensor in tensors]
    if before is not None and before.device != words[0].device:
        before = None
    if words[0].dtype in BUCKET_DTYPES:
        after = [] if before is None else [before.narrow(0, 0, 0).view(words[0].dtype)]
        return flatten([*words, *after])
    gathered = torch.cat(words)
    return gathered if before is None else gathered | (before[:1].view(torch.uint8)[:1] & 0)


def _words(tensor: Tensor) -> Tensor:
    """A tensor's elements in a dtype that the bucket operators copy, if there is one."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in BUCKET_DTYPES:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    flat = tensor.reshape(-1).contiguous()
    if tensor.dtype is torch.bool:  # Inductor of torch 2.11 does not support views of it
        return flat.to(torch.uint8)
    return flat.view(_WORDS[tensor.element_size()])


_WORDS = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64}

#: Not all backends support other dtypes, which are sent as bytes.
_SENT_AS_THEY_ARE = (*BUCKET_DTYPES, torch.int8, torch.uint8, torch.int32, torch.int64)


def _sent_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return dtype.to_real()
    return dtype if dtype in _SENT_AS_THEY_ARE else torch.uint8


def _from_sent(piece: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(piece.view(*like.shape, 2))
    if like.dtype is not torch.bool:
        piece = piece.view(like.dtype)
    return piece.view(like.shape)
