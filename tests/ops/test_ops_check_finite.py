"""What check_finite counts, and what it refuses. That calls run once: test_ops_check.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ops_reference import (
    DTYPES,
    INF,
    LEVELS,
    NAN,
    SHAPE_CLASSES,
    SOURCE_CLASSES,
    cpu_level,
    make,
    new_count,
    of,
    spoil,
    threads,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_commhook.native.check_ops import check_finite


def counted(*tensors: Tensor) -> int:
    count = new_count()
    assert check_finite(tensors, count) is None
    return int(count)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*SHAPE_CLASSES, *SOURCE_CLASSES])
def test_shapes_and_dtypes(level: str, name: str) -> None:
    with cpu_level(level):
        mixed = []
        for dtype in DTYPES:
            tensors = make(name, dtype)
            assert counted(*tensors) == sum(int((~t.isfinite()).sum()) for t in tensors)
            mixed += [spoil(tensor) for tensor in tensors]
            assert counted(*tensors) == sum(int((~t.isfinite()).sum()) for t in tensors)
        assert counted(*mixed) == sum(int((~tensor.isfinite()).sum()) for tensor in mixed)


@pytest.mark.parametrize("level", LEVELS)
def test_every_16_bit_value(level: str) -> None:
    with cpu_level(level):
        bits = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
        assert counted(bits.view(torch.float16)) == 2 * 1024
        assert counted(bits.view(torch.bfloat16)) == 2 * 128
        # The greatest of each, and the least: all bits of an exponent but one, and none.
        for dtype in DTYPES:
            info = torch.finfo(dtype)
            edges = [info.max, info.min, info.tiny, info.smallest_normal / 2, 0.0, -0.0]
            assert counted(torch.tensor(edges, dtype=dtype)) == 0
        # Blocks of nothing else overflow no lane.
        for dtype in DTYPES:
            assert counted(torch.full((200_003,), NAN, dtype=dtype)[1:]) == 200_002


@pytest.mark.parametrize("count", [1, 2])
def test_threads(count: int) -> None:
    x = torch.zeros(1_000_003)
    x[::1001] = INF
    with threads(count):
        assert counted(x, x[1:], x.view(-1)[:77]) == 1000 + 999 + 1


@pytest.mark.parametrize("level", ["reference", LEVELS[1]])
def test_other_dtypes_and_layouts(level: str) -> None:
    with cpu_level(level):
        z = torch.tensor([1 + 1j, complex(NAN, 1), complex(1, INF), complex(NAN, NAN)])
        assert counted(z, z.conj(), z.to(torch.complex128)[::2]) == 3 + 3 + 1
        assert counted(torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn)) == 1
        assert counted(torch.tensor([1.0, INF, NAN]).to(torch.float8_e5m2)) == 2
        integers = [torch.ones(3, dtype=d) for d in (torch.int8, torch.int64, torch.bool)]
        assert counted(*integers) == 0
        assert counted(*integers, torch.tensor(NAN)) == 1
        dense = torch.tensor([[0.0, NAN], [INF, 1.0]])
        coo = torch.sparse_coo_tensor([[0, 0], [1, 1]], [NAN, NAN], (2, 2))  # stored twice
        assert counted(dense.to_sparse(), coo, dense) == 6
        for layout in (torch.sparse_csr, torch.sparse_csc):
            assert counted(dense.to_sparse(layout=layout)) == 2
        bsr = torch.sparse_bsr_tensor([0, 1], [0], torch.full((1, 2, 2), NAN), (2, 2))
        assert counted(bsr) == 4


def test_counts_add_up() -> None:
    count = torch.full((1, 1), 40)
    version = count._version
    check_finite([torch.tensor([NAN, 1.0])], count)
    assert count.tolist() == [[41]] and count._version == version + 1
    with torch.inference_mode():
        check_finite([torch.tensor([INF])], count)
    check_finite([], count)
    assert count.tolist() == [[42]] and count._version == version + 3
    check_finite([torch.tensor([NAN], requires_grad=True) * 2], count)
    assert count.tolist() == [[43]] and not count.requires_grad


# ---- refusals ------------------------------------------------------------------------------------


FINITE_REFUSED = {
    "dtype": (lambda: ([of()], of(dtype=torch.int32)), TypeError, "count must be of dtype torch.i"),
    "sparse": (lambda: ([], of(1).to_sparse()), TypeError, r"count must be dense .*sparse_coo$"),
    "length": (lambda: ([], of(2)), ValueError, "count must hold one element, got 2$"),
    "empty": (lambda: ([], of(0)), ValueError, "count must hold one element, got 0$"),
    "device": (
        lambda: ([of(3), of(3, device="meta")], of()),
        ValueError,
        r"tensors\[1\] must be on the device of count, cpu, got meta$",
    ),
}


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
@pytest.mark.parametrize("level", ["reference", LEVELS[1]])
@pytest.mark.parametrize("what", FINITE_REFUSED)
def test_check_finite_refuses(what: str, level: str, mode: Any) -> None:
    make_arguments, error, message = FINITE_REFUSED[what]
    with cpu_level(level), mode(), pytest.raises(error, match=f"^check_finite: {message}"):
        check_finite(*make_arguments())


@pytest.mark.parametrize("level", ["reference", LEVELS[1]])
def test_what_only_the_kernel_of_check_finite_sees(level: str) -> None:
    with cpu_level(level):
        count, x = new_count(), torch.full((4,), NAN)
        with pytest.raises(TypeError, match=r"^check_finite: tensors\[1\] must be dense or sparse"):
            check_finite([x, x.to_mkldnn()], count)
        with torch.inference_mode():
            inference = new_count()
        with pytest.raises(RuntimeError, match="count must not be an inference tensor outside of"):
            check_finite([x], inference)
        x.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"^check_finite: tensors\[0\] must have a storage of"):
            check_finite([x], count)
        assert int(count) == 0 and int(inference) == 0
