"""The form of what ``HookHandle.state_dict()`` gives: checks, and states for other ranks.

Tensors by kind and parameter name: each rank's own under ``"rank0"``, ``"rank1"`` and so on, and
what all have alike under ``"shared"``; beside them plain values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_commhook.memory.state_values import Refuse, check_tensor, is_number, shown

VERSION = 1

#: Where a state has the steps since the ranks were together.
LOCAL_STEPS = "local_steps"

#: What a rank's own parameters are kept as, where ranks are apart.
PARAMETERS = "local_sgd_parameter"

#: What has been lost of a parameter's gradients, and is to be sent.
ERROR = "error"

#: Memories of a part of the elements, and where they belong when another rank has that part.
FOLDED_INTO = {"shard_error": ERROR, "node_error": ERROR, "node_shard_error": ERROR}


_MOST_RANKS = 1 << 20

#: More steps than anybody takes, and few enough to count on.
_MOST_STEPS = 1 << 48


class Remembered(NamedTuple):
    """What a hook remembers.

    Attributes:
        own: kinds of what each rank has of its own, of a parameter's shape.
        shards: kinds of what a rank has of a part of the elements.
        shared: tensors that all ranks have alike, by kind and parameter name.
        choices: by kind, what may have been settled.
    """

    own: Set[str]
    shards: Set[str]
    shared: Mapping[str, Mapping[str, Tensor]]
    choices: Mapping[str, Sequence[int]]


def checked_state(
    state: Any, by_name: dict[str, Tensor], remembered: Remembered, *, rank: int, world_size: int
) -> dict[str, Any]:
    """A state that is to be loaded, without what the hook does not remember of it.

    Args:
        state: what a user gives.
        by_name: the model's parameters.
        remembered: what the hook remembers that is to load it.
        rank, world_size: of this process.

    Raises:
        ValueError: no state of these parameters, this rank, this number of ranks, and such a hook.
    """
    if not isinstance(state, dict) or not is_number(state.get("version"), VERSION):
        got = shown(state)
        if isinstance(state, dict):
            got = f"version {shown(state.get('version'))}"
        raise unfit(f"the state must be what HookHandle.state_dict() gives, got {got}")
    if not is_number(state.get("world_size"), world_size):
        raise unfit(
            f"the state must be of {world_size} ranks, got one of "
            f"{shown(state.get('world_size'))}; torch_commhook.reshard_states makes states for "
            "another number of ranks"
        )
    own = state.get(f"rank{rank}")
    if not isinstance(own, dict):
        ranks = sorted(key for key in state if type(key) is str and key.startswith("rank"))
        raise unfit(f"the state must be that of rank {rank}, got one with {ranks}")
    _check_common(state, "its ", unfit)
    for names in state["buckets"]:
        for name in names:
            if name not in by_name:
                got = shown(name)
                raise unfit(f"its buckets must be lists of the model's parameters, got {got}")
    folded = {kind for kind, into in FOLDED_INTO.items() if into in remembered.own}
    for kind in own:
        if kind not in remembered.own | remembered.shards | folded:
            raise unfit(
                f"it has {shown(kind)}, which the hook that is attached does not remember; a "
                "state is for a hook like the one that it is of"
            )
    checked_own: dict[str, dict[str, Tensor]] = {}
    for kind, name, value, parameter in _entries(own, own, by_name):
        what, shape = _what(kind, name), parameter.shape
        if kind in FOLDED_INTO:  # which lies as the elements do
            shape = torch.Size([parameter.numel()])
        value = check_tensor(what, value, shape, torch.float32, unfit)
        checked_own.setdefault(kind, {})[name] = value
    # Other kinds are left out, such as factors of another rank, which begin anew.
    shared: dict[str, dict[str, Tensor]] = {kind: {} for kind in remembered.shared}
    for kind, name, value, _ in _entries(state["shared"], remembered.shared, by_name):
        what, like = _what(kind, name), remembered.shared[kind].get(name)
        if like is None:
            raise unfit(f"it has {what}, of which the hook remembers nothing")
        shared[kind][name] = check_tensor(what, value, like.shape, like.dtype, unfit)
    choices: dict[str, dict[str, int]] = {}
    for kind, name, value, _ in _entries(state["choices"], remembered.choices, by_name):
        if type(value) is not int or value not in remembered.choices[kind]:
            among = ", ".join(map(str, remembered.choices[kind]))
            raise unfit(f"{_what(kind, name)} must be one of {among}, got {shown(value)}")
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


def _entries(
    kinds: dict[Any, Any], wanted: Collection[Any], by_name: dict[str, Tensor]
) -> Iterator[tuple[str, str, Any, Tensor]]:
    """What part of a state holds: kind, name, value, and the parameter.

    Args:
        kinds: values by kind and name, such as nobody has looked at yet.
        wanted: the kinds that are to be looked at.
        by_name: the model's parameters.
    """
    for kind, values in kinds.items():
        if kind not in wanted:
            continue
        if not isinstance(values, dict):
            got = type(values).__qualname__
            raise unfit(f"its {shown(kind)} must be a dict by parameter, got {got}")
        for name, value in values.items():
            if type(name) is not str or name not in by_name:
                raise unfit(f"it has {_what(kind, name)}, which the model does not have")
            yield kind, name, value, by_name[name]


def _check_common(state: dict[Any, Any], which: str, refuse: Refuse) -> None:
    """Refuse what all ranks have alike where it is not of its form.

    Args:
        state: of a rank.
        which: said before the names of its entries.
        refuse: makes the error of a text.
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
    """Where in a round a state of a hook that keeps ranks apart is: ``done`` and ``is_open``.

    Args:
        state: has ``LOCAL_STEPS``.
        which: said before that in errors.
        refuse: makes the error of a text.

    Raises:
        ValueError: it has no such position.
    """
    position = state[LOCAL_STEPS]
    done = position.get("done") if isinstance(position, dict) else None
    is_open = position.get("is_open") if isinstance(position, dict) else None
    if type(done) is not int or not 0 <= done <= _MOST_STEPS or type(is_open) is not bool:
        got = shown(position)
        if isinstance(position, dict):
            got = f"done {shown(done)} and is_open {shown(is_open)}"
        raise refuse(
            f"{which}{LOCAL_STEPS} must be a number of steps, done, and a bool, is_open, got {got}"
        )
    return {"done": done, "is_open": is_open}


def form_of(state: dict[str, Any]) -> dict[str, str]:
    """What ranks compare of a checked state beside plain values, as short texts."""
    buckets = json.dumps(state["buckets"])
    shared = json.dumps({kind: sorted(state["shared"][kind]) for kind in sorted(state["shared"])})
    tensors = sum(map(len, state["shared"].values()))
    return {
        "buckets": f"{len(state['buckets'])} of form {_digest(buckets)}",
        "shared": f"{tensors} tensors of names {_digest(shared)}",
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _what(kind: object, name: object) -> str:
    return f"{shown(kind)} of parameter {shown(name)}"


@torch.inference_mode(False)  # inside, states would be no use elsewhere
def reshard_states(states: Sequence[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """States for another number of ranks, from those of all ranks.

    What the ranks have yet to send is sent all the same: the mean of their error memories stays.
    With fewer ranks, the memories of rank r, r + W, r + 2 W, and so on are added up; with more, the
    new ones begin with none. Each is scaled by new ranks / old ranks, since the mean is over other
    ranks then. What ranks have lost of the sums that they encode goes into these memories. Ranks
    that are apart (:class:`torch_commhook.hooks.local_sgd`) go on from the mean of their
    parameters.

    Args:
        states: what ``HookHandle.state_dict()`` gave on each rank, in order of rank.
        world_size: ranks that are to go on.

    Returns:
        For each of the new ranks, what it is to load.

    Raises:
        TypeError: no list of states, or no number of ranks.
        ValueError: the states are not those of all ranks of one training, no rank is to go on, or
            the states are of a hierarchical hook: what that remembers belongs to nodes.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        got = type(world_size).__qualname__
        raise TypeError(f"reshard_states: world_size must be an int, got {got}")
    if not 1 <= world_size <= _MOST_RANKS:
        raise ValueError(
            f"reshard_states: world_size must be from 1 to {_MOST_RANKS}, got {world_size}"
        )
    if not isinstance(states, (list, tuple)):
        got = type(states).__qualname__
        raise TypeError(f"reshard_states: states must be a list of states, got {got}")
    if not states:
        raise ValueError("reshard_states: states must hold at least one, got none")
    own: list[dict[str, dict[str, Tensor]]] = []
    for rank, state in enumerate(states):
        own.append(_own_tensors(state, rank))
        if own[rank].keys() != own[0].keys():
            raise ValueError(
                f"reshard_states: states[{rank}] must be of the same hook as states[0], which has "
                f"{sorted(own[0])}, got {sorted(own[rank])}"
            )
        if not is_number(state["world_size"], len(states)) or not is_number(
            state["steps"], states[0]["steps"]
        ):
            raise ValueError(
                f"reshard_states: states[{rank}] must be of {len(states)} ranks after "
                f"{shown(states[0]['steps'])} steps, got one of {shown(state['world_size'])} "
                f"ranks after {shown(state['steps'])}"
            )
        _check_alike(state, states[0], rank)
        _check_shapes(own, rank)
    if world_size != len(states):
        own = _resharded(own, world_size)
    common = {key: value for key, value in states[0].items() if key != "rank0"}
    return [
        {**common, "world_size": world_size, f"rank{rank}": own[rank]} for rank in range(world_size)
    ]


def _misfit(what: str) -> ValueError:
    return ValueError(f"reshard_states: {what}")


def _own_tensors(state: Any, rank: int) -> dict[str, dict[str, Tensor]]:
    """A rank's own tensors of its state, by kind and name."""
    which = f"states[{rank}]"
    own_key = f"rank{rank}"
    if not isinstance(state, dict) or not {own_key, "world_size", "steps"} <= state.keys():
        raise _misfit(f"{which} must be that of rank {rank}")
    kinds = state[own_key]
    if not isinstance(kinds, dict) or not all(
        type(kind) is str
        and isinstance(tensors, dict)
        and all(type(name) is str for name in tensors)
        and all(isinstance(tensor, Tensor) for tensor in tensors.values())
        for kind, tensors in kinds.items()
    ):
        raise _misfit(
            f"what {which} has of rank {rank} must be tensors by kind and parameter, got "
            f"{_first_wrong(kinds)}"
        )
    return {
        kind: {
            name: check_tensor(
                f"{which}: {_what(kind, name)}",
                tensor,
                None,
                None if kind == PARAMETERS else torch.float32,
                _misfit,
                is_finite=kind != PARAMETERS,
            )
            for name, tensor in tensors.items()
        }
        for kind, tensors in kinds.items()
    }


def _first_wrong(kinds: object) -> str:
    """Where what is to be tensors by kind and parameter is something else."""
    if not isinstance(kinds, dict):
        return shown(kinds)
    for kind, tensors in kinds.items():
        if type(kind) is not str or not isinstance(tensors, dict):
            return f"{shown(tensors)} for {shown(kind)}"
        for name, tensor in tensors.items():
            if type(name) is not str or not isinstance(tensor, Tensor):
                return f"{shown(tensor)} for {_what(kind, name)}"
    raise AssertionError("all are tensors")


def _check_alike(state: dict[str, Any], first: dict[str, Any], rank: int) -> None:
    """Refuse what all ranks have alike where it is not of its form, or a round of its own."""
    which = f"states[{rank}]: its "
    if not is_number(state.get("version"), VERSION):
        raise _misfit(f"{which}version must be {VERSION}, got {shown(state.get('version'))}")
    _check_common(state, which, _misfit)
    for key, wanted in (("shared", Tensor), ("choices", int)):
        for kind, values in state[key].items():
            if type(kind) is not str or not isinstance(values, dict):
                what = f"{which}{key}: {shown(kind)}"
                raise _misfit(f"{what} must be a dict by parameter, got {shown(values)}")
            for name, value in values.items():
                if type(name) is not str or not isinstance(value, wanted):
                    what = f"{which}{key}: {_what(kind, name)}"
                    raise _misfit(f"{what} must be of type {wanted.__name__}, got {shown(value)}")
    if (LOCAL_STEPS in state) != (LOCAL_STEPS in first):
        raise _misfit(f"states[{rank}] must have {LOCAL_STEPS} where states[0] has, got another")
    if LOCAL_STEPS in state:
        position = checked_position(state, which, _misfit)
        wanted_position = checked_position(first, "states[0]: its ", _misfit)
        if position != wanted_position:
            raise _misfit(f"{which}{LOCAL_STEPS} must be {wanted_position}, got {position}")


def _check_shapes(own: Sequence[dict[str, dict[str, Tensor]]], rank: int) -> None:
    """Refuse tensors of a rank that do not fit those of the first, or those they go into."""
    for kind, tensors in own[rank].items():
        firsts = own[0][kind]
        if kind == PARAMETERS and tensors.keys() != firsts.keys():
            odd = sorted(tensors.keys() ^ firsts.keys())
            raise _misfit(f"'{kind}' must be of the same parameters on all ranks, got {odd} on one")
        for name, tensor in tensors.items():
            what = f"states[{rank}]: {_what(kind, name)}"
            shape = firsts[name].shape if name in firsts else tensor.shape
            into = FOLDED_INTO.get(kind)
            if into is not None:
                target = own[rank].get(into, {}).get(name)
                if target is None:
                    raise _misfit(f"{what} must have {_what(into, name)} beside it, got none")
                shape = torch.Size([target.numel()])
            if tensor.shape != shape:
                raise _misfit(f"{what} must be of shape {list(shape)}, got {list(tensor.shape)}")


def _resharded(own: Sequence[dict[str, dict[str, Tensor]]], world_size: int) -> list[Any]:
    found: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(world_size)]
    for rank, kinds in enumerate(own):
        for kind, tensors in kinds.items():
            if kind.startswith("node_"):
                raise ValueError(
                    "reshard_states: what hierarchical hooks remember belongs to nodes, which "
                    "another number of ranks has not"
                )
            if kind == PARAMETERS:
                for each in found:
                    _add_mean(each.setdefault(kind, {}), tensors, own[0][kind], len(own))
                continue
            into = FOLDED_INTO.get(kind)
            # A sum's own loss counts as often as there are ranks.
            factor = world_size if into else world_size / len(own)
            target = found[rank % world_size].setdefault(into or kind, {})
            for name, tensor in tensors.items():
                piece = target.get(name)
                if piece is None:
                    like = own[rank][into][name] if into else tensor
                    piece = target[name] = torch.zeros_like(like)
                flat = piece if piece.shape == tensor.shape else _as_it_lies(piece)
                flat += factor * tensor
    return found


def _add_mean(
    total: dict[str, Tensor],
    tensors: dict[str, Tensor],
    firsts: dict[str, Tensor],
    count: int,
) -> None:
    # From the first on, so that the mean of what is alike is that.
    for name, first in firsts.items():
        total[name] = total.get(name, first) + (tensors[name] - first) / count


def _as_it_lies(tensor: Tensor) -> Tensor:
    """A dense tensor as a flat view, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def unfit(what: str) -> ValueError:
    """The error of a state that cannot be loaded."""
    return ValueError(f"load_state_dict: {what}")
