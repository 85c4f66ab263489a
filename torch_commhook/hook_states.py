"""The form of what ``HookHandle.state_dict()`` gives: checks, and states for other ranks.

Tensors by kind and parameter name: each rank's own under ``"rank0"``, ``"rank1"`` and so on, and
what all have alike under ``"shared"``; beside them plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

VERSION = 1

#: What a rank's own parameters are kept as, where ranks are apart.
PARAMETERS = "local_sgd_parameter"

#: Memories of a part of the elements, and where they belong when another rank has that part.
FOLDED_INTO = {"shard_error": "error", "node_error": "error", "node_shard_error": "error"}


def checked_state(
    state: Any, by_name: dict[str, Tensor], *, rank: int, world_size: int
) -> dict[str, dict[str, Tensor]]:
    """What is this rank's own of a state that is to be loaded.

    Args:
        state: what a user gives.
        by_name: the model's parameters.
        rank, world_size: of this process.

    Raises:
        ValueError: no state of these parameters, this rank, and this number of ranks.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION:
        got = type(state).__qualname__
        if isinstance(state, dict):
            got = f"version {state.get('version')!r}"
        raise _unfit(f"the state must be what HookHandle.state_dict() gives, got {got}")
    if state.get("world_size") != world_size:
        raise _unfit(
            f"the state must be of {world_size} ranks, got one of "
            f"{state.get('world_size')}; torch_commhook.reshard_states makes states for "
            "another number of ranks"
        )
    own = state.get(f"rank{rank}")
    if not isinstance(own, dict):
        raise _unfit(
            f"the state must be that of rank {rank}, got one with "
            f"{sorted(key for key in map(str, state) if key.startswith('rank'))}"
        )
    for key, kind in (("buckets", list), ("shared", dict), ("choices", dict), ("steps", int)):
        if not isinstance(state.get(key), kind):
            raise _unfit(f"its {key} must be a {kind.__name__}, got {state.get(key)!r}")
    if isinstance(state["steps"], bool) or state["steps"] < 0:
        raise _unfit(f"its steps must be a number of steps, got {state['steps']!r}")
    for names in state["buckets"]:
        if not isinstance(names, list) or not set(map(str, names)) <= set(by_name):
            raise _unfit(f"its buckets must be lists of the model's parameters, got {names!r}")
    for kinds in (own, state["shared"], state["choices"]):
        for kind, values in kinds.items():
            if not isinstance(values, dict):
                got = type(values).__qualname__
                raise _unfit(f"its '{kind}' must be a dict by parameter, got {got}")
            for name, value in values.items():
                parameter = by_name.get(name)
                what = f"'{kind}' of parameter '{name}'"
                if parameter is None:
                    raise _unfit(f"it has {what}, which the model does not have")
                if kinds is state["choices"]:
                    if not isinstance(value, int):
                        raise _unfit(f"{what} must be an int, got {type(value).__qualname__}")
                    continue
                if not isinstance(value, Tensor):
                    raise _unfit(f"{what} must be a tensor, got {type(value).__qualname__}")
                # What lies as the elements do, if it is not of the parameter's shape.
                if kinds is own and value.shape not in (parameter.shape, (parameter.numel(),)):
                    raise _unfit(
                        f"{what} must be of shape {list(parameter.shape)}, got {list(value.shape)}"
                    )
    return own


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
    if world_size < 1:
        raise ValueError(f"reshard_states: world_size must be at least 1, got {world_size}")
    if not isinstance(states, (list, tuple)):
        got = type(states).__qualname__
        raise TypeError(f"reshard_states: states must be a list of states, got {got}")
    for rank, state in enumerate(states):
        if not isinstance(state, dict) or not {f"rank{rank}", "world_size", "steps"} <= set(state):
            raise ValueError(f"reshard_states: states[{rank}] must be that of rank {rank}")
        if state["world_size"] != len(states) or state["steps"] != states[0]["steps"]:
            raise ValueError(
                f"reshard_states: states[{rank}] must be of {len(states)} ranks after "
                f"{states[0]['steps']} steps, got one of {state['world_size']} ranks after "
                f"{state['steps']}"
            )
    if not states:
        raise ValueError("reshard_states: states must hold at least one, got none")
    own = [state[f"rank{rank}"] for rank, state in enumerate(states)]
    if world_size != len(states):
        own = _resharded(own, world_size)
    common = {key: value for key, value in states[0].items() if key != "rank0"}
    return [
        {**common, "world_size": world_size, f"rank{rank}": own[rank]} for rank in range(world_size)
    ]


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
                    _add_mean(each.setdefault(kind, {}), tensors, len(own))
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


def _add_mean(total: dict[str, Tensor], tensors: dict[str, Tensor], count: int) -> None:
    for name, tensor in tensors.items():
        total[name] = total.get(name, torch.zeros_like(tensor)) + tensor / count


def _as_it_lies(tensor: Tensor) -> Tensor:
    """A dense tensor as a flat view, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _unfit(what: str) -> ValueError:
    return ValueError(f"load_state_dict: {what}")
