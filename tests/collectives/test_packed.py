"""Values of other ranks: which ones a rank reads, and that reading them runs no code."""

from __future__ import annotations

import _codecs
import io
import zipfile
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_commhook.collectives.agreement import (
    check_length,
    gather,
    gather_values,
    packed,
    unpacked,
)
from torch_commhook.testing import run_ranks

ran: list[str] = []


def _run(code: str) -> None:
    ran.append(code)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return _run, ("code of another rank",)


def _gathered(rank: int, value: Any, others: Any) -> tuple[str, list[str]]:
    group = dist.group.WORLD
    assert group is not None
    try:
        found = gather(group, value if rank == 0 else others)
    except ValueError as error:
        return str(error), ran
    return repr(found), ran


def test_values_of_all_ranks_arrive() -> None:
    def on_rank(rank: int) -> tuple[Any, Any]:
        value = {"rank": rank, "at": (rank, "x" * 9 * rank), "tensor": torch.full((rank,), 2.0)}
        return gather_values(value), gather_values(value, only_first=True)

    for rank, (every, firsts) in enumerate(run_ranks(on_rank, 3)):
        assert [each["at"] for each in every] == [(0, ""), (1, "x" * 9), (2, "x" * 18)]
        assert [each["tensor"].tolist() for each in every] == [[], [2.0], [2.0, 2.0]]
        assert (firsts is None) == (rank > 0)


def test_gathering_runs_no_code_of_another_rank() -> None:
    for error, found in run_ranks(lambda rank: _gathered(rank, "plain", _Hostile()), 2):
        assert not found
        assert f"a rank sends objects of {__name__}._run" in error


def test_all_ranks_refuse_a_length_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_commhook.collectives.agreement._MORE", 0)
    long = "x" * 200_000  # more than 64 times as long as the others
    for error, _ in run_ranks(lambda rank: _gathered(rank, long, "short"), 3):
        assert "another rank announces a message of" in error


@pytest.mark.parametrize("nbytes", [0, 10, 700])
def test_damaged_bytes_are_an_error(nbytes: int) -> None:
    with pytest.raises(ValueError, match="another rank has sent damaged bytes"):
        unpacked(packed(["a value"])[:nbytes])


def test_numpy_scalars_arrive_as_numbers() -> None:
    value: list[Any] = [{np.int64(1): np.float64(0.1)}, (np.float32(0.5), [np.bool_(True)])]
    value.append(value[0])
    found = unpacked(packed(value))
    assert repr(found[:2]) == "[{1: 0.1}, (0.5, [True])]" and found[2] is found[0]


@pytest.mark.parametrize("value", [b"a" * 1000, bytearray(b"a" * 1000), {1, 2}, Counter("aab")])
def test_plain_values_that_a_pickle_makes_by_calls(value: Any) -> None:
    assert unpacked(packed([value])) == [value]


class _OwnDict(dict[str, int]):
    pass


@pytest.mark.parametrize("value", [nn.Linear(2, 2), deque([1]), _OwnDict(a=1)])
def test_the_class_that_is_refused_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"a rank sends objects of .*{type(value).__name__}"):
        unpacked(packed([value]))


class _Call:
    """Its pickle calls a function."""

    def __init__(self, *call: Any, state: Any = None) -> None:
        self._call = call
        self._state = state

    def __reduce__(self) -> tuple[Any, ...]:
        function, *arguments = self._call
        return function, tuple(arguments), self._state


_LONG = list(range(1000))
CALLS = {
    "bytearray": _Call(bytearray, 1 << 20),
    "new tensor": _Call(torch.FloatTensor, 1 << 20),
    "new storage": _Call(torch.UntypedStorage, 1 << 20),
    "inner call": _Call(torch._tensor._rebuild_from_type_v2, bytearray, bytearray, (1 << 20,), {}),
    "encoded": _Call(_codecs.encode, b"a" * 100, "hex"),
    "copied": [_Call(set, _LONG) for _ in range(100)],
    "state": [_Call(torch.Size, (1,), state=dict.fromkeys(_LONG)) for _ in range(100)],
    "resized": _Call(
        torch._utils._rebuild_meta_tensor_no_storage, torch.float, (), (), False, state=()
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_pickle_that_allocates_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"damaged bytes: its pickle asks for .* more memory"):
        unpacked(packed(CALLS[kind]))


def test_compressed_bytes_are_refused() -> None:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(bytes(packed(torch.zeros(1000)).numpy()))) as stored,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for name in stored.namelist():
            compressed.writestr(name, stored.read(name))
    with pytest.raises(ValueError, match="damaged bytes: its members are compressed"):
        unpacked(torch.frombuffer(file.getbuffer(), dtype=torch.uint8))


@pytest.mark.parametrize("length", [-1, 1 << 31, 1 << 62])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"announces a message of {length} bytes"):
        check_length(length, own=1 << 20)
