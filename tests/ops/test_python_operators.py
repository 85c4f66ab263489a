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
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.codecs.base import decay_error
from torch_commhook.collectives.compressed import bytes_of_floats, floats_of_bytes
from torch_commhook.hooks import low_rank
from torch_commhook.hooks.low_rank import Plan
from torch_commhook.hooks.wrappers import total_norm
from torch_commhook.memory.unsent import keep_unsent, without_unused
from torch_commhook.reducer import compiled_step
from torch_commhook.reducer.parameters import ReducerState
from torch_commhook.step.step_group import step_groups
from torch_commhook.testing import run_ranks

Arguments = dict[str, Any]
PLAN = Plan.of(BucketLayout([torch.zeros(20, 12), torch.zeros(7)]), 1, 0, 0.5)
WIRE = PLAN.vector_numel + PLAN.left_numel


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


def used() -> Tensor:
    return torch.zeros(2, dtype=torch.uint8)


def good_calls() -> dict[str, tuple[Any, Arguments]]:
    """Operators that hold only tensors and numbers, and arguments that they take."""
    work, q, wire = torch.randn(PLAN.numel), torch.randn(PLAN.right_numel), torch.randn(WIRE)
    left, right = torch.randn(PLAN.left_numel), torch.randn(PLAN.right_numel)
    sources, plan = [torch.randn(20, 12), torch.randn(7)], PLAN.text
    encoded = {"work": work, "wire": wire, "plan": plan, "keeps_error": True}
    return {
        "floats_of_bytes": (floats_of_bytes, {"message": torch.zeros(64, dtype=torch.uint8)}),
        "bytes_of_floats": (bytes_of_floats, {"values": torch.randn(16)}),
        "without_unused": (
            without_unused,
            {"result": torch.randn(30), "used": used(), "members": [0, 1], "lengths": [20, 10]},
        ),
        "total_norm": (total_norm, {"results": [torch.randn(4, 5), torch.randn(7)]}),
        "keep_unsent": (
            keep_unsent,
            {name: [torch.randn(4, 5)] for name in ("results", "gradients")}
            | {"errors": [torch.zeros(30)], "used": used(), "table": [1, 0, 3, 20, 0, 0]},
        ),
        "decay_error": (
            decay_error,
            {"error": torch.randn(20), "decay": 0.5, "rounding": torch.tensor([3, 4])},
        ),
        "powersgd_left": (
            low_rank.powersgd_left,
            {"sources": sources, "work": work, "q": q, "plan": plan, "scale": 0.5, "adds": True},
        ),
        "powersgd_right": (low_rank.powersgd_right, {**encoded, "scale": 0.5}),
        "powersgd_restore": (
            low_rank.powersgd_restore,
            {**encoded, "q": q, "left": left, "right": right},
        ),
    }


#: Any number of values will do, or gradients may be complex.
TAKEN = [
    ("bytes_of_floats", "values", "short"),
    ("without_unused", "result", "complex"),
    ("decay_error", "error", "short"),
    ("total_norm", "results", "complex"),
    ("total_norm", "results", "short"),
]

#: Other arguments that do not fit: of an operator, the argument's name, and what it is given.
OTHERS: list[tuple[str, str, Any]] = [
    ("floats_of_bytes", "message", torch.zeros(2, 32, dtype=torch.uint8)),
    ("floats_of_bytes", "message", torch.zeros(66, dtype=torch.uint8)[2:]),
    ("bytes_of_floats", "values", torch.zeros(32)[::2]),
    ("without_unused", "members", [0, 2]),
    ("without_unused", "members", [0, -1]),
    ("without_unused", "members", [0]),
    ("without_unused", "lengths", [20, 11]),
    ("without_unused", "lengths", [40, -10]),
    ("keep_unsent", "table", [0, 0, 3, 20, 0]),
    ("keep_unsent", "table", [2, 0, 3, 20, 0, 0]),
    ("keep_unsent", "table", [0, 1, 3, 20, 0, 0]),
    ("keep_unsent", "table", [0, 0, 11, 20, 0, 0]),
    ("keep_unsent", "table", [0, 0, -1, 20, 0, 0]),
    ("keep_unsent", "table", [0, 0, 3, 19, 0, 0]),
    ("keep_unsent", "table", [0, 0, 3, 1 << 60, 0, 0]),
    ("keep_unsent", "table", [0, 0, 3, 20, 1, 0]),
    ("keep_unsent", "table", [0, 0, 3, 20, 0, 1]),
    ("keep_unsent", "table", [0, 0, 3, 20, 0, -2]),
    ("keep_unsent", "results", [torch.randn(4, 1).expand(4, 5)]),
    ("total_norm", "results", []),
    ("decay_error", "decay", 0.0),
    ("decay_error", "decay", 1.5),
    ("decay_error", "decay", float("nan")),
    ("decay_error", "error", torch.zeros(4, 5)),
    ("decay_error", "rounding", torch.zeros(2, 2, dtype=torch.int64)),
    ("powersgd_left", "sources", []),
    ("powersgd_left", "sources", [torch.randn(20, 12)]),
    *(
        ("powersgd_left", "plan", plan)
        for plan in (
            "",
            "null",
            "[]",
            "[1, 0, 247, [[20, 12, -1, 0, [0]]], [[1, 240, 7]]]",
            "[1, 0, 247, [[20, 12, 0, 1000, [0, 2]]], [[1, 240, 7]]]",
            "[1, 0, 247, [[20, 12, 0, 0, [5]]], [[1, 240, 7]]]",
            "[1, 0, 247, [[-20, -12, 0, 0, [0]]], [[1, 240, 7]]]",
            "[1, 0, 247, [[20, 12, 0, 0, [0]]], [[1, 241, 7]]]",
            "[0, 0, 247, [[20, 12, 0, 0, [0]]], [[1, 240, 7]]]",
        )
    ),
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


def test_names_and_keys_of_nothing() -> None:
    token, result = torch.zeros(1), torch.zeros(1)
    for call in (
        lambda: compiled_step.begin_step(token, "nothing"),
        lambda: compiled_step.commit_step(used(), [result], "nothing"),
        lambda: compiled_step.count_step(token, [result], "", "none"),
        lambda: compiled_step.note_backward(token, "none"),
        lambda: compiled_step.write_missing(token, used(), [result], [0], "none"),
        lambda: compiled_step.leave_out(used(), used(), [0], False, "none"),
    ):
        with pytest.raises(ValueError, match=r"_(step|backward|missing|out): (name|key) must be"):
            call()


def _key_of(handle: HookHandle) -> str:
    """Of the reducer of a module that a hook is attached to."""
    (key,) = (
        user.key
        for group in step_groups()
        for user in group.users.values()
        if isinstance(user, ReducerState) and user.attached is handle._attached
    )
    return key


def arguments_of(operator: str) -> Arguments:
    """Those that an operator takes for a module of two parameters, without its key."""
    if operator == "leave_out":
        return {"used": used(), "touched": used(), "missing": [0, 1], "needs_all": False}
    gradients = [torch.randn(3, 4), torch.randn(3)]
    return {"token": torch.zeros(1), "used": used(), "gradients": gradients, "numbers": [0, 1]}


#: Of each operator, arguments that do not fit, made when they are used: no test may print them.
UNFIT: dict[str, dict[str, Callable[[], Arguments]]] = {
    "write_missing": {
        "used must be of dtype": lambda: {"used": used().float()},
        "numbers must be numbers from 0 to 0": lambda: {"used": used()[:1].clone()},
        "numbers must be as many as gradients, 2, got 1": lambda: {"numbers": [0]},
        "numbers must be numbers from 0 to 1": lambda: {"numbers": [0, 2]},
        "parameter 1 must have a storage of 12": lambda: {
            "gradients": [torch.randn(3, 4), freed(torch.randn(3))]
        },
        "must be of sizes [3], got [4]": lambda: {"gradients": [torch.randn(3, 4), torch.randn(4)]},
        "must be dense": lambda: {"gradients": [torch.randn(3, 4).to_sparse(), torch.randn(3)]},
    },
    "leave_out": {
        "used must be of dtype": lambda: {"used": used().float()},
        "touched must be of dtype": lambda: {"touched": used().float()},
        "used and touched must have 2 elements, got 4 and 2": lambda: {"used": used().repeat(2)},
        "used and touched must have 2 elements, got 2 and 1": lambda: {
            "touched": used()[:1].clone()
        },
        "missing must be numbers from 0 to 1": lambda: {"missing": [2]},
    },
}


def outcome_in_a_module(operator: str, change: Callable[[], Arguments] = dict) -> str:
    def run(rank: int) -> str:
        model = nn.Linear(4, 3)
        handle = attach(model, hooks.allreduce())
        if operator == "write_missing":
            model(torch.randn(2, 4)).sum().backward()
        arguments = {**arguments_of(operator), **change(), "key": _key_of(handle)}
        got = outcome(getattr(compiled_step, operator), arguments)
        handle.remove()
        return got

    return run_ranks(run, 1)[0]


@pytest.mark.parametrize("operator", UNFIT)
def test_operators_of_a_reducer_take_what_fits(operator: str) -> None:
    assert outcome_in_a_module(operator) == "taken"


@pytest.mark.parametrize(
    ("operator", "expected"), [(op, text) for op in UNFIT for text in UNFIT[op]]
)
def test_operators_of_a_reducer_refuse(operator: str, expected: str) -> None:
    got = outcome_in_a_module(operator, UNFIT[operator][expected])
    assert got.partition(": ")[2].startswith(f"{operator}: ") and expected in got


def test_traffic_that_is_no_text_of_it_counts_no_step() -> None:
    def count(rank: int) -> None:
        handle = attach(nn.Linear(4, 3), hooks.error_feedback(hooks.sign()))
        key = _key_of(handle)
        with pytest.raises(ValueError, match="from_text: text must be what as_text gives, got"):
            compiled_step.count_step(torch.zeros(1), [], "1,load,2,3", key)
        assert handle.stats().steps == 0 and handle.state_dict()["steps"] == 0
        handle.remove()

    run_ranks(count, 1)


if __name__ == "__main__":
    for name, operator, arguments in hostile_calls():
        print(json.dumps([name, outcome(good_calls()[operator][0], arguments())]), flush=True)
