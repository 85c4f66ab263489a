"""Operators that are written in Python, called with what they can't take: errors, and no crash.

The calls are made in a process of their own, which one that is not refused may end.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.codecs.base import decay_error
from torch_commhook.collectives.compressed import bytes_of_floats, floats_of_bytes
from torch_commhook.reducer import compiled_step  # noqa: F401 (makes the operators)
from torch_commhook.reducer.parameters import ReducerState
from torch_commhook.step.step_group import step_groups
from torch_commhook.testing import run_ranks

Arguments = dict[str, Any]
_ops = torch.ops.commhook


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


#: What a tensor is replaced with.
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "freed": freed,
    "sparse": lambda x: x.to_sparse(),
    "complex": lambda x: x.to(torch.complex64),
    "short": lambda x: x.reshape(-1)[: x.numel() // 2 - 1].clone(),
}


def good_calls() -> dict[str, tuple[Any, Arguments]]:
    """Operators that hold only tensors and numbers, and arguments that they take."""
    return {
        "floats_of_bytes": (floats_of_bytes, {"message": torch.zeros(64, dtype=torch.uint8)}),
        "bytes_of_floats": (bytes_of_floats, {"values": torch.randn(16)}),
        "decay_error": (
            decay_error,
            {"error": torch.randn(20), "decay": 0.5, "rounding": torch.tensor([3, 4])},
        ),
    }


#: Any number of values will do, or gradients may be complex.
TAKEN = [
    ("bytes_of_floats", "values", "short"),
    ("decay_error", "error", "short"),
]

#: Other arguments that do not fit: of an operator, the argument's name, and what it is given.
OTHERS: list[tuple[str, str, Any]] = [
    ("floats_of_bytes", "message", torch.zeros(2, 32, dtype=torch.uint8)),
    ("floats_of_bytes", "message", torch.zeros(66, dtype=torch.uint8)[2:]),
    ("bytes_of_floats", "values", torch.zeros(32)[::2]),
    ("decay_error", "decay", 0.0),
    ("decay_error", "decay", 1.5),
    ("decay_error", "decay", float("nan")),
    ("decay_error", "error", torch.zeros(4, 5)),
    ("decay_error", "rounding", torch.zeros(2, 2, dtype=torch.int64)),
]


def hostile_calls() -> Iterator[tuple[str, str, Callable[[], Arguments]]]:
    """A name for each call, the operator, and what makes its arguments."""
    for operator, (_, arguments) in good_calls().items():
        for name, value in arguments.items():
            for kind, make in KINDS.items():
                if (operator, name, kind) in TAKEN:
                    continue
                if isinstance(value, Tensor):
                    change = partial(make, value)
                elif isinstance(value, list) and isinstance(value[0], Tensor):
                    change = partial(_last_made, make, value)
                else:
                    continue
                changed = partial(_with, arguments, name, change)
                yield f"{operator} {name} {kind}", operator, changed
    for i, (operator, name, value) in enumerate(OTHERS):
        changed = partial(_with, good_calls()[operator][1], name, partial(copy.copy, value))
        yield f"{operator} {name} {i}", operator, changed


def _last_made(make: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    return [*tensors[:-1], make(tensors[-1])]


def _with(arguments: Arguments, name: str, make: Callable[[], Any]) -> Arguments:
    return {**arguments, name: make()}


NAMES = [name for name, *_ in hostile_calls()]


def outcome(call: Callable[..., object], arguments: Arguments) -> str:
    try:
        call(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


@cache
def outcomes() -> dict[str, str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=120, env=environment
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    return {"": f"the process ended with {done.returncode}", **found}


@pytest.mark.parametrize("operator", good_calls())
def test_good_arguments_are_taken(operator: str) -> None:
    call, arguments = good_calls()[operator]
    assert outcome(call, arguments) == "taken"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_refused(name: str) -> None:
    got = outcomes().get(name, outcomes()[""])
    operator = name.split()[0]
    assert got.startswith((f"ValueError: {operator}: ", f"TypeError: {operator}: ")), got


def test_keys_of_nothing() -> None:
    token = torch.zeros(1)
    for call in (
        lambda: _ops.note_backward(token, "none"),
        lambda: _ops.start_bucket(token, [], [], 0, "none"),
        lambda: _ops.finish_step(token, [], "none"),
    ):
        with pytest.raises(ValueError, match=r"_(backward|bucket|step): key must be that of a"):
            call()


#: Gradients of a bucket of two parameters, missing places, the bucket's number, and the error.
UNFIT: dict[str, Callable[[], tuple[list[Tensor], list[int], int]]] = {
    "index must be that of the next of 1 buckets, 0, got 1": lambda: (gradients(), [], 1),
    "index must be that of the next of 1 buckets, 0, got -1": lambda: (gradients(), [], -1),
    "must be 2 in all": lambda: (gradients()[:1], [], 0),
    "with places below 2": lambda: (gradients()[:1], [2], 0),
    "must have layout torch.strided": lambda: ([gradients()[0].to_sparse(), gradients()[1]], [], 0),
    "storage": lambda: ([gradients()[0], freed(gradients()[1])], [], 0),
    "elements": lambda: ([gradients()[0], torch.zeros(4)], [], 0),
}


def gradients() -> list[Tensor]:
    return [torch.ones(3), torch.ones(3, 4)]  # the bucket begins with the last parameter


@pytest.mark.parametrize("text", UNFIT)
def test_operators_of_a_reducer_refuse(text: str) -> None:
    def run(rank: int) -> None:
        token = torch.zeros(1)
        model = nn.Linear(4, 3)
        handle = attach(model, hooks.allreduce())
        (key,) = (
            user.key
            for group in step_groups()
            for user in group.users.values()
            if isinstance(user, ReducerState) and user.attached is handle._attached
        )
        with pytest.raises(ValueError, match="finish_step: key must be that of a reducer whose"):
            _ops.finish_step(token, [], key)
        with pytest.raises((TypeError, ValueError), match=text):
            _ops.start_bucket(token, *UNFIT[text](), key)
        _ops.start_bucket(token, gradients(), [], 0, key)
        with pytest.raises(ValueError, match=r"finish_step: gradients must be 2, .* got 1"):
            _ops.finish_step(token, gradients()[:1], key)
        _ops.start_bucket(token, gradients(), [], 0, key)
        written = [torch.zeros(3), torch.zeros(3, 4)]
        _ops.finish_step(token, written, key)
        assert all(map(torch.equal, written, gradients()))
        handle.remove()

    run_ranks(run, 1)


if __name__ == "__main__":
    for name, operator, arguments in hostile_calls():
        print(json.dumps([name, outcome(good_calls()[operator][0], arguments())]), flush=True)
