"""Values of other ranks: which ones a rank reads, and that reading them runs no code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_commhook.collectives.agreement import gather
from torch_commhook.collectives.packed import check_length, gather_values, packed, unpacked
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
        assert f"has sent objects of {__name__}._run" in error


@pytest.mark.parametrize("nbytes", [0, 10, 700])
def test_damaged_bytes_are_an_error(nbytes: int) -> None:
    with pytest.raises(ValueError, match="another rank has sent damaged bytes"):
        unpacked(packed(["a value"])[:nbytes])


@pytest.mark.parametrize("length", [-1, 1 << 31, 1 << 62])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"announces a message of {length} bytes"):
        check_length(length, own=1 << 20)
