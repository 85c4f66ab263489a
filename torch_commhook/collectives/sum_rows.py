"""The sum of a matrix's rows, each from one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_commhook.native.bucket_ops import BUCKET_DTYPES


def sum_rows(rows: Tensor, out: Tensor) -> Tensor:
    """Sum the rows of a matrix in float32 and in order, and round the sum once.

    On devices other than the CPU the device chooses the order.

    Args:
        rows: contiguous, of shape ``(rows, columns)``, with at least one row; float32, float16 or
            bfloat16.
        out: contiguous, of shape ``(columns,)``, of any dtype that buckets have. It shares no
            memory with ``rows``. Written.

    Returns:
        ``out``.

    Raises:
        TypeError, ValueError: the tensors are of another kind.
    """
    torch.ops.commhook.sum_rows(rows, out)
    return out


@torch.library.register_fake("commhook::sum_rows")
def _sum_rows_fake(rows: Tensor, out: Tensor) -> None:
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"sum_rows: rows must be of dtype float32, float16 or bfloat16, got {rows.dtype}"
        )
    if out.dtype not in BUCKET_DTYPES:
        raise TypeError(
            f"sum_rows: out must be of dtype float64, float32, float16 or bfloat16, got {out.dtype}"
        )
    torch._check_value(
        rows.dim() == 2 and rows.is_contiguous(),
        lambda: (
            "sum_rows: rows must be contiguous, of two dimensions, with one row or more, got sizes "
            f"{list(rows.shape)} with strides {list(rows.stride())}"
        ),
    )
    torch._check_value(
        out.device == rows.device,
        lambda: (
            f"sum_rows: out must be on the device of the values, {rows.device}, got {out.device}"
        ),
    )
    torch._check_value(
        out.dim() == 1 and out.shape[0] == rows.shape[1] and out.is_contiguous(),
        lambda: (
            f"sum_rows: out must be contiguous, of sizes [{rows.shape[1]}], got sizes "
            f"{list(out.shape)} with strides {list(out.stride())}"
        ),
    )
