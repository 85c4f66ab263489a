"""The form of ``HookHandle.state_dict()``, and the checks of a state before it is loaded.

A state has tensors by kind and parameter name: each rank's own under ``"rank0"``, ``"rank1"`` and
so on, and tensors that are equal on all ranks under ``"shared"``; also plain values.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_commhook.memory.state_values import Refuse, check_tensor, is_number, shown

VERSION = 1

#: The key of the steps since the ranks' last exchange.
LOCAL_STEPS = "local_steps"

#: The kind of a rank's own parameters, if ranks are apart.
PARAMETERS = "local_sgd_parameter"

#: The kind of a fragment's means that have arrived and are applied later: mean distances.
MEANS = "local_sgd_mean"

#: Tensors of ranks that are apart, equal on all ranks, with a parameter's shape: its value after
#: the last exchange, and the momentum of that value.
ANCHOR = "local_sgd_anchor"
MOMENTUM = "local_sgd_momentum"

#: The unsent errors of a parameter's gradients.
ERROR = "error"

#: Memories of a part of the elements, and the kind to which they are added when another rank owns
#: that part.
FOLDED_INTO = {"shard_error": ERROR, "node_error": ERROR, "node_shard_error": ERROR}

#: The numbers of a position with fragments, and the smallest value of each.
_OF_FRAGMENTS = {"steps_of_round": 0, "fragments": 1, "fragment": 0, "steps_in_flight": -1}

#: More steps than any training takes, and few enough to count on.
_MOST_STEPS = 1 << 48


#: The keys of a state; other numbers than a rank's are those of shards, and some hooks have only
#: some keys.
_KEYS = re.compile(
    r"version|steps|world_size|buckets|shards|parts|shard_hook|(choices|shared)[0-9]*|rank(?P<rank>[0-9]{1,9})"
)


class Remembered(NamedTuple):
    """The contents of a hook's memory.

    Attributes:
        own: kinds of tensors of each rank's own, with a parameter's shape.
        shards: kinds of tensors for a part of the elements.
        shared: tensors that are equal on all ranks, by kind and parameter name.
        choices: by kind, the numbers that may have been chosen.
    """

    own: Set[str]
    shards: Set[str]
    shared: Mapping[str, Mapping[str, Tensor]]
    choices: Mapping[str, Sequence[int]]


def checked_state(
    state: Any, by_name: dict[str, Tensor], remembered: Remembered, *, rank: int, world_size: int
) -> dict[str, Any]:
    """Check a state that is to be loaded, and remove entries that the hook does not use.

    Args:
        state: the user's state.
        by_name: the model's parameters.
        remembered: the memory of the hook that loads it.
        rank, world_size: this process's rank and the number of ranks.

    Raises:
        ValueError: it is not a state of these parameters, this rank, this number of ranks, and this
            kind of hook.
    """
    if not isinstance(state, dict) or not is_number(state.get("version"), VERSION):
        got = shown(state)
        if isinstance(state, dict):
            got = f"version {shown(state.get('version'))}"
        raise load_error(f"the state must come from HookHandle.state_dict(), got {got}")
    if not is_number(state.get("world_size"), world_size):
        raise load_error(
            f"the state must be of {world_size} ranks, got one of "
            f"{shown(state.get('world_size'))}; torch_commhook.reshard_states makes states for "
            "another number of ranks"
        )
    own = state.get(f"rank{rank}")
    if not isinstance(own, dict):
        ranks = sorted(key for key in state if type(key) is str and key.startswith("rank"))
        raise load_error(f"the state must be that of rank {rank}, got one with {ranks}")
    unknown = [key for key in state if not _is_known(key, world_size)]
    if unknown:
        raise load_error(
            f"it has {shown(unknown[0])}, which no state of the attached hook has; attach a hook "
            "like the one that the state is of"
        )
    check_common(state, "its ", load_error)
    for names in state["buckets"]:
        for name in names:
            if name not in by_name:
                got = shown(name)
                raise load_error(f"its buckets must be lists of the model's parameters, got {got}")
    folded = {kind for kind, into in FOLDED_INTO.items() if into in remembered.own}
    for kind in own:
        if kind not in remembered.own | remembered.shards | folded:
            raise load_error(
                f"it has {shown(kind)}, which the attached hook does not remember; attach a "
                "hook like the one that the state is of"
            )
    checked_own: dict[str, dict[str, Tensor]] = {}
    for kind, name, value, parameter in _entries(own, own, by_name):
        what, shape = entry_name(kind, name), parameter.shape
        if kind in FOLDED_INTO:  # laid out like the elements
            shape = torch.Size([parameter.numel()])
        value = check_tensor(what, value, shape, torch.float32, load_error)
        checked_own.setdefault(kind, {})[name] = value
    # Other kinds are left out, such as factors of another rank, which restart.
    shared: dict[str, dict[str, Tensor]] = {kind: {} for kind in remembered.shared}
    for kind, name, value, _ in _entries(state["shared"], remembered.shared, by_name):
        what, like = entry_name(kind, name), remembered.shared[kind].get(name)
        if like is None:
            raise load_error(f"it has {what}, which the hook does not remember")
        shared[kind][name] = check_tensor(what, value, like.shape, like.dtype, load_error)
    choices: dict[str, dict[str, int]] = {}
    for kind, name, value, _ in _entries(state["choices"], remembered.choices, by_name):
        if type(value) is not int or value not in remembered.choices[kind]:
            among = ", ".join(map(str, remembered.choices[kind]))
            raise load_error(f"{entry_name(kind, name)} must be one of {among}, got {shown(value)}")
        choices.setdefault(kind, {})[name] = value
    return {
        "version": VERSION,
        "steps": state["steps"],
        "world_size": world_size,
        "buckets": [list(names) for names in state["buckets"]],
        "choices": choices,
        "shared": {kind: values for kind, values in shared.items() if values},
        f"rank{rank}": checked_own,
    }


def _is_known(key: object, world_size: int) -> bool:
    found = _KEYS.fullmatch(key) if type(key) is str else None
    return found is not None and int(found["rank"] or 0) < world_size


def _entries(
    kinds: dict[Any, Any], wanted: Collection[Any], by_name: dict[str, Tensor]
) -> Iterator[tuple[str, str, Any, Tensor]]:
    """The entries of a part of a state: kind, name, value, and the parameter.

    Args:
        kinds: unchecked values by kind and name.
        wanted: the kinds to return.
        by_name: the model's parameters.
    """
    for kind, values in kinds.items():
        if kind not in wanted:
            continue
        if not isinstance(values, dict):
            got = type(values).__qualname__
            raise load_error(f"its {shown(kind)} must be a dict by parameter, got {got}")
        for name, value in values.items():
            if type(name) is not str or name not in by_name:
                raise load_error(f"it has {entry_name(kind, name)}, which the model does not have")
            yield kind, name, value, by_name[name]


def check_common(state: dict[Any, Any], which: str, refuse: Refuse) -> None:
    """Refuse a common part of another form.

    Args:
        state: a rank's state.
        which: prefix of the names of its entries in errors.
        refuse: makes an error from a text.
    """
    for key, kind in (("buckets", list), ("shared", dict), ("choices", dict), ("steps", int)):
        if not isinstance(state.get(key), kind):
            got = shown(state.get(key))
            raise refuse(f"{which}{key} must be of type {kind.__name__}, got {got}")
    if type(state["steps"]) is not int or not 0 <= state["steps"] <= _MOST_STEPS:
        raise refuse(f"{which}steps must be a number of steps, got {shown(state['steps'])}")
    for names in state["buckets"]:
        if not isinstance(names, list) or not names:
            got = "an empty list" if isinstance(names, list) else shown(names)
            raise refuse(f"{which}buckets must be lists of the model's parameters, got {got}")
        for name in names:
            if type(name) is not str:
                got = f"{shown(name)} in one"
                raise refuse(f"{which}buckets must be lists of the model's parameters, got {got}")


def checked_position(state: dict[Any, Any], which: str, refuse: Refuse) -> dict[str, Any]:
    """The position in a round, from a state of a hook that keeps ranks apart.

    It has ``done`` and ``is_open``. With fragments it also has ``steps_of_round``; ``fragments``,
    their number; ``fragment``, the number of the next fragment; and ``steps_in_flight``, the number
    of steps since the running exchange began, or -1.

    Args:
        state: a state with ``LOCAL_STEPS``.
        which: prefix of this key in errors.
        refuse: makes an error from a text.

    Raises:
        ValueError: it has no such position.
    """
    position = state[LOCAL_STEPS]
    done = position.get("done") if isinstance(position, dict) else None
    is_open = position.get("is_open") if isinstance(position, dict) else None
    if not _is_count(done) or type(is_open) is not bool:
        got = shown(position)
        if isinstance(position, dict):
            got = f"done {shown(done)} and is_open {shown(is_open)}"
        raise refuse(
            f"{which}{LOCAL_STEPS} must be a number of steps, done, and a bool, is_open, got {got}"
        )
    found = {"done": done, "is_open": is_open}
    has_fragments = any(key in position for key in _OF_FRAGMENTS)
    for key, least in _OF_FRAGMENTS.items() if has_fragments else ():
        if not _is_count(position.get(key), least):
            got = shown(position.get(key))
            raise refuse(
                f"{which}{LOCAL_STEPS} must have an int from {least} to {_MOST_STEPS}, {key}, got "
                f"{got}"
            )
        found[key] = position[key]
    return found


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= _MOST_STEPS


def comparable_form(state: dict[str, Any]) -> dict[str, str]:
    """The parts of a checked state that ranks compare beside plain values, as short texts."""
    buckets = json.dumps(state["buckets"])
    shared = json.dumps({kind: sorted(state["shared"][kind]) for kind in sorted(state["shared"])})
    tensors = sum(map(len, state["shared"].values()))
    return {
        "buckets": f"{len(state['buckets'])} of form {_digest(buckets)}",
        "shared": f"{tensors} tensors of names {_digest(shared)}",
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def entry_name(kind: object, name: object) -> str:
    return f"{shown(kind)} of parameter {shown(name)}"


def load_error(what: str) -> ValueError:
    """The error of a state that cannot be loaded."""
    return ValueError(f"load_state_dict: {what}")
