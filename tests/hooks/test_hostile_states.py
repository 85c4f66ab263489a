"""States that somebody else has written: an error that names the entry, or training that goes on.

Whatever is refused, the hook remembers what it did before, on all ranks.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hostile_states import GONE, changed, is_named, some_changes
from nested_values import different_paths
from on_ranks import on_processes, on_ranks
from remembering_hooks import WITH_ERROR_FEEDBACK, hook_of
from torch import nn

from torch_commhook import HookHandle, attach, reshard_states
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")

HOOKS = [
    *WITH_ERROR_FEEDBACK,
    "error_feedback(powersgd(rank=2))",
    "adaptive(20000, every=2)",
    "policy([('dim <= 1', allreduce())], error_feedback(sign()))",
    "after(2, error_feedback(topk(0.1)), before=error_feedback(blockwise()))",
    "hierarchical",
    "local_sgd(3)",
    "local_sgd(2, outer=outer_sgd(1.0, 0.0))",
    "local_sgd(2, hook=error_feedback(blockwise()), error_reset=True)",
    "local_sgd(3, hook=error_feedback(powersgd(rank=2)))",
    "local_sgd(4, fragments=2, delay=1, mix=0.5)",
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def train(model: nn.Module, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=generator)).square().sum().backward()
        optimizer.step()


def begun(rank: int, hook: str) -> tuple[nn.Module, HookHandle, dict[str, Any]]:
    """A model after three steps, and its hook's handle and state."""
    model = net()
    handle = attach(model, hook_of(hook), bucket_cap_mb=0.001)
    train(model, rank, 3)
    return model, handle, handle.state_dict()


def attempt(model: nn.Module, handle: HookHandle, state: Any, path: Any, rank: int) -> str:
    """Try to load a state; returns what is wrong with the outcome, or ""."""
    before = handle.state_dict()
    try:
        handle.load_state_dict(state)
    except ValueError as error:
        wrong = "" if is_named(path, str(error)) else f"it does not name the entry: {error}"
        if len(str(error)) > 2000:
            wrong = f"a message of {len(str(error))} characters"
    except RuntimeError as error:  # of a state that another rank has refused, or loads otherwise
        wrong = "" if str(error).startswith("HookHandle.load_state_dict: ") else f"{error!r}"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error)[:300]}"
    else:
        train(model, rank, 2)
        return ""
    if different_paths(before, handle.state_dict()):
        wrong += "; what the hook remembers has changed"
    return wrong


@pytest.mark.parametrize("hook", HOOKS)
@on_processes
def test_a_hostile_state_is_refused_or_works(rank: int, hook: str) -> None:
    """A third of the states is hostile on one rank alone."""
    model, handle, good = begun(rank, hook)
    alike = {"own" if key == f"rank{rank}" else key: value for key, value in good.items()}
    wrong = []
    for number, (path, change) in enumerate(some_changes(alike, HOOKS.index(hook), 20)):
        if path and path[0] == "own":
            path = (f"rank{rank}", *path[1:])
        state = good if number % 3 == 2 and rank == 0 else changed(good, path, change)
        if said := attempt(model, handle, state, path, rank):
            wrong.append(f"{path} {change}: {said}")
        handle.load_state_dict(good)
    handle.remove()
    assert wrong == []


ADAPTIVE, LOCAL, APART = HOOKS[-9], HOOKS[-5], HOOKS[-3]
POWERSGD = "error_feedback(powersgd(rank=2))"

BITS, ANCHOR = ("choices", "adaptive_bits", "0.weight"), ("shared", "local_sgd_anchor", "0.weight")
ERROR = ("own", "error", "0.weight")

#: Hook, entry, what becomes of it, and what is said; None where the state can be used.
CASES: list[tuple[str, tuple[Any, ...], str, str | None]] = [
    (ADAPTIVE, BITS, "scalar", "one of 4, 8, got torch.Tensor"),
    (ADAPTIVE, BITS, "numbers", "one of 4, 8, got torch.Tensor"),
    (ADAPTIVE, BITS, "float", "must be one of 4, 8, got 8.0"),
    (ADAPTIVE, BITS, "endless", "got an int of 20001 bits"),
    (ADAPTIVE, BITS, "list", "must be one of 4, 8, got list"),
    (ADAPTIVE, ("choices", "adaptive_bits"), "numbers", "its 'adaptive_bits' must be a dict by"),
    (ADAPTIVE, ("choices", "adaptive_bits"), "dict of tensors", "of parameter 3, which the model"),
    (ADAPTIVE, ("choices",), "numbers", "its choices must be of type dict, got torch.Tensor"),
    (ADAPTIVE, ("choices", "adaptive_bits"), GONE, None),
    (ADAPTIVE, ("steps",), "scalar", "its steps must be of type int, got torch.Tensor"),
    (ADAPTIVE, ("steps",), "endless", "its steps must be a number of steps, got an int of 20001"),
    (ADAPTIVE, ("version",), "numbers", "got version torch.Tensor"),
    (ADAPTIVE, ("world_size",), "endless", "got one of an int of 20001 bits"),
    (ADAPTIVE, ("buckets", 0), "odd names", "lists of the model's parameters, got list in one"),
    (ADAPTIVE, ("buckets", 0, 0), "scalar", "the model's parameters, got torch.Tensor in one"),
    (ADAPTIVE, ("buckets", 0, 0), "str of its own", "parameters, got hostile_states.Text in one"),
    (ADAPTIVE, ("buckets", 0, 0), "long str", "lists of the model's parameters, got 'xxx"),
    (ADAPTIVE, ERROR, "float8_e5m2", None),
    (ADAPTIVE, ERROR, "requires grad", None),
    (ADAPTIVE, ERROR, "without memory", "must have its numbers in memory"),
    (ADAPTIVE, ERROR, "quantized", "must be a dense tensor of floating-po"),
    (ADAPTIVE, ("own", "error"), "keys that are no names", "'error' of parameter tuple, which"),
    (POWERSGD, ("shared", "powersgd_q2", "0.weight"), "float8_e4m3fn", None),
    (POWERSGD, ("shared", "powersgd_q2", "0.weight"), "float64", None),
    (POWERSGD, ("shared", "powersgd_q2", "0.weight"), "list", "must be a tensor, got list"),
    (LOCAL, ANCHOR, "float8_e4m3fn", None),
    (LOCAL, ANCHOR, "float8_e8m0fnu", None),
    (LOCAL, ANCHOR, "float16", None),
    (LOCAL, ANCHOR, "complex64", "must be a dense tensor of f"),
    (LOCAL, ANCHOR, "four-bit", "must be "),
    (LOCAL, ANCHOR, GONE, "'local_sgd_anchor' lacks ['0.wei"),
    (LOCAL, ("shared",), GONE, "its shared must be of type dict, got None"),
    (LOCAL, ("own", "local_sgd_parameter", "0.weight"), GONE, "must have parameter '0.weight' of"),
    (LOCAL, ("own", "local_sgd_parameter", "0.weight"), "float8_e5m2", None),
    (LOCAL, ("local_steps",), GONE, "got one without 'local_steps'"),
    (LOCAL, ("local_steps",), "None", "its local_steps must be a number of steps, done, and a"),
    (LOCAL, ("local_steps",), "numbers", "its local_steps must be a number of steps, done, and a"),
    (LOCAL, ("local_steps", "done"), GONE, "its local_steps must be a number of steps, done, and"),
    (LOCAL, ("local_steps", "done"), "str", "its local_steps must be a number of steps, done, and"),
    (LOCAL, ("local_steps", "done"), "scalar", "got done torch.Tensor and is_open False"),
    (LOCAL, ("local_steps", "done"), "huge", "local_steps must be a number of steps, done, and a"),
    (LOCAL, ("local_steps", "is_open"), "scalar", "and is_open torch.Tensor"),
    (LOCAL, ("local_steps", "is_open"), "zero", "and is_open 0"),
    (APART, ("local_steps",), "more tensors", None),
]


@pytest.mark.parametrize(("hook", "path", "change", "message"), CASES)
@on_ranks(2)
def test_what_is_wrong_with_a_state_is_named(
    rank: int, hook: str, path: tuple[Any, ...], change: str, message: str | None
) -> None:
    model, handle, state = begun(rank, hook)
    if path[0] == "own":
        path = (f"rank{rank}", *path[1:])
    wrong = changed(state, path, change)
    if message is None:
        handle.load_state_dict(wrong)
        train(model, rank, 2)
    else:
        with pytest.raises(ValueError, match=f"^load_state_dict: .*{re.escape(message)}"):
            handle.load_state_dict(wrong)
        assert different_paths(state, handle.state_dict()) == []
    handle.synchronize()
    handle.remove()


@pytest.mark.parametrize(
    ("path", "what"),
    [(("shared", "powersgd_q2", "0.weight"), "shared"), (("buckets", 0), "buckets")],
)
@on_ranks(2)
def test_ranks_load_factors_and_buckets_alike(rank: int, path: tuple[Any, ...], what: str) -> None:
    """Else they would add up what does not belong together."""
    _, handle, state = begun(rank, POWERSGD)
    with pytest.raises(RuntimeError, match=f"the state's {what} must be the same on all ranks"):
        handle.load_state_dict(changed(state, path, GONE) if rank else state)
    assert different_paths(state, handle.state_dict()) == []
    handle.remove()


# ---- states for other ranks ----------------------------------------------------------------------


def _state(rank: int, hook: str) -> dict[str, Any]:
    _, handle, state = begun(rank, hook)
    handle.remove()
    return state


@pytest.mark.parametrize("hook", [HOOKS[0], ADAPTIVE, POWERSGD, APART])
def test_hostile_states_for_other_ranks(hook: str) -> None:
    states = run_ranks(_state, 2, hook)
    wrong = []
    for number, (path, change) in enumerate(some_changes(states[1], 0, 60)):
        hostile = [states[0], changed(states[1], path, change)]
        if path and path[0] in states[0] and number % 2:
            hostile = [changed(states[0], path, change), states[1]]
        try:
            found = reshard_states(hostile, 1 + number % 3)
        except ValueError as error:
            said = str(error)
            if not said.startswith("reshard_states: ") or not is_named(path, said):
                wrong.append(f"{path} {change}: {said}")
        except Exception as error:
            wrong.append(f"{path} {change}: {type(error).__name__}: {error}")
        else:
            assert [state["world_size"] for state in found] == [len(found)] * len(found)
    assert wrong == []


OTHERS_ERROR = ("rank1", "error", "0.weight")

#: Hook, entry of the second rank's state, what becomes of it, and what is said.
FOR_OTHERS = [
    (HOOKS[0], OTHERS_ERROR, "int64", "'error' of parameter '0.weight' must be"),
    (HOOKS[0], OTHERS_ERROR, "sparse", "'error' of parameter '0.weight' must be"),
    (HOOKS[0], OTHERS_ERROR, "meta", "'error' of parameter '0.weight' must be a"),
    (HOOKS[0], OTHERS_ERROR, "str", "'error' of parameter '0.weight'"),
    (HOOKS[0], ("rank1", "error", "1.bias"), "transposed", "must be of shape [16], got [1, 16]"),
    (HOOKS[0], ("rank1", "shard_error", "1.bias"), "scalar", "'shard_error' of parameter '1.bi"),
    (HOOKS[0], OTHERS_ERROR, GONE, "must have 'error' of parameter '0.weight' b"),
    (HOOKS[0], ("rank1",), "keys that are no names", "must be tensors by kind and parameter, got "),
    (HOOKS[0], ("steps",), "numbers", "steps, got one of 2 ranks after torch.Tensor"),
    (HOOKS[0], ("world_size",), "numbers", "got one of torch.Tensor ranks after 3"),
    (HOOKS[0], ("version",), "numbers", "states[1]: its version must be 1, got torch.Tensor"),
    (HOOKS[0], ("buckets",), GONE, "states[1]: its buckets must be of type list, got None"),
    (ADAPTIVE, ("choices", "adaptive_bits", "0.bias"), "numbers", "'adaptive_bits' of parameter"),
    (POWERSGD, ("shared", "powersgd_q2", "0.weight"), "list", "'powersgd_q2' of parameter '0.weig"),
    (LOCAL, ("local_steps", "done"), "scalar", "states[1]: its local_steps must be a number of"),
    (LOCAL, ("local_steps", "is_open"), "true", "states[1]: its local_steps must be {"),
    (LOCAL, ("local_steps",), GONE, "states[1] must have local_steps where states[0] has"),
    (LOCAL, ("rank1", "local_sgd_parameter", "0.bias"), GONE, "of the same parameters on all rank"),
]


@pytest.mark.parametrize(("hook", "path", "change", "message"), FOR_OTHERS)
def test_what_is_wrong_with_a_state_for_other_ranks_is_named(
    hook: str, path: tuple[Any, ...], change: str, message: str
) -> None:
    first, second = run_ranks(_state, 2, hook)
    with pytest.raises(ValueError, match=f"reshard_states: .*{re.escape(message)}"):
        reshard_states([first, changed(second, path, change)], 1)


def test_a_shared_tensor_of_another_size_is_named_before_it_is_cut() -> None:
    entry = "shared", "local_sgd_momentum", "0.bias"
    wrong = [changed(state, entry, "scalar") for state in run_ranks(_state, 2, LOCAL)]
    said = r"reshard_states: .*'local_sgd_momentum' of parameter '0\.bias' must have 16 elements"
    with pytest.raises(ValueError, match=said):
        reshard_states(wrong, 4, shards=2)
