"""``hooks.local_sgd`` that is dropped while ranks are apart: a warning says so, once."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from local_training import MEAN, ROADS, attached, train
from on_ranks import on_processes

from torch_commhook import hooks
from torch_commhook.attachment.road import _local_steps
from torch_commhook.hooks import local_sgd

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


class Dropped:
    """A model that has trained within a round, or to its end, and what then becomes of it."""

    def __init__(self, rank: int, road: str, steps: int, hook: Any = None) -> None:
        self.model, self.handle = attached(local_sgd(4) if hook is None else hook, road)
        train(self.model, torch.optim.SGD(self.model.parameters(), lr=0.01), rank, steps)

    def lose_model(self) -> None:
        del self.model
        gc.collect()
        assert not self.handle.is_attached
        self.handle.remove()

    def lose_handle(self) -> None:
        del self.handle
        gc.collect()
        del self.model
        gc.collect()

    def lose_both(self) -> None:
        del self.model, self.handle
        gc.collect()

    def remove(self) -> None:
        self.handle.remove()
        self.handle.remove()
        self.lose_both()

    def replace(self) -> None:
        self.handle.replace(hooks.allreduce())
        self.remove()

    def synchronize(self) -> None:
        self.handle.synchronize()
        self.lose_both()


def _said(ways: list[Callable[[Dropped], None]], *args: Any) -> list[list[str]]:
    found = []
    gc.collect()
    gc.freeze()  # objects of other tests, which each collection would traverse for seconds
    for way in ways:
        gc.collect()
        dropped = Dropped(*args)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            way(dropped)
        found.append([str(each.message) for each in caught if each.category is RuntimeWarning])
    return found


WAYS = {
    Dropped.lose_model: "lost its model",
    Dropped.lose_handle: "lost its handle",
    Dropped.lose_both: "lost its model",
    Dropped.remove: "was removed",
    Dropped.replace: "was removed",
}


@pytest.mark.parametrize(("steps", "when"), [(1, "1 step after"), (7, "3 steps after"), (4, None)])
@pytest.mark.parametrize("road", ROADS)
@on_processes
def test_what_is_dropped_within_a_round_is_said_once(
    rank: int, road: str, steps: int, when: str | None
) -> None:
    *dropped, synchronized = _said([*WAYS, Dropped.synchronize], rank, road, steps)
    assert synchronized == []
    for said, what in zip(dropped, WAYS.values(), strict=True):
        assert len(said) == (0 if when is None else 1)
        for one in said:
            assert one.startswith(f"torch_commhook: hook 'local_sgd(4)' {what} {when} the ranks")
            assert "HookHandle.synchronize() first, on all ranks" in one


@on_processes
def test_updates_that_were_not_sent(rank: int) -> None:
    """With ``error_reset`` ranks differ after an exchange, too."""
    topk = hooks.error_feedback(hooks.topk(0.01))
    hook = local_sgd(1, outer=MEAN, hook=topk, error_reset=True)
    ways = [*WAYS, Dropped.synchronize]
    *dropped, synchronized = _said(ways, rank, "module", 2, hook)
    assert synchronized == []
    assert [len(said) for said in dropped] == [1] * len(WAYS)
    assert all("while ranks had updates that they had not sent" in said[0] for said in dropped)


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_is_alone() -> None:
    assert _said([*WAYS], 0, "module", 1) == [[]] * len(WAYS)


@on_processes
def test_warnings_that_are_errors(rank: int) -> None:
    """What was asked for is done all the same, and nothing counts steps any more."""
    for way in (Dropped.remove, Dropped.replace, Dropped.lose_model):
        dropped = Dropped(rank, "module", 1)
        model, handle = dropped.model, dropped.handle
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if way is Dropped.lose_model:
                told: list[Any] = []  # a finalizer's go to the one, other errors to the other
                with (
                    patch.object(sys, "unraisablehook", told.append),
                    patch.object(sys, "excepthook", lambda *error: told.append(error)),  # noqa: B023
                ):
                    del model
                    dropped.lose_model()
                assert len(told) == 1
            else:
                with pytest.raises(RuntimeWarning, match="was removed"):
                    handle.remove() if way is Dropped.remove else handle.replace(hooks.cast())
                assert handle.is_attached == (way is Dropped.replace)
                handle.remove()
        assert not handle.is_attached and not _local_steps()


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch_commhook import attach, hooks
rank, folder, end = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
def train():
    model = torch.nn.Linear(2, 2)
    handle = attach(model, hooks.local_sgd(4))
    model(torch.ones(2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, handle
kept = train()
if end == "in a function":
    del kept
elif end == "synchronized":
    kept[1].synchronize()
dist.destroy_process_group()
if end == "an exception":
    raise ValueError("of the user")
"""

ENDS = {
    "in a function": "lost its handle 1 step after",
    "with the process": "was still attached when the process ended, 1 step after",
    "synchronized": None,
    "an exception": None,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_within_a_round(tmp_path: Path, end: str) -> None:
    """Nothing else is said at the interpreter's end."""
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), end], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=120)
            assert rank.returncode == (1 if end == "an exception" else 0), said
            assert said.count("RuntimeWarning") == (0 if ENDS[end] is None else 1), said
            assert ENDS[end] is None or ENDS[end] in said
            assert said.count("Traceback") == (1 if end == "an exception" else 0), said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
