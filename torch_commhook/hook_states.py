"""The form of what ``HookHandle.state_dict()`` gives: checks, and states for other ranks.

Tensors by kind and parameter name: each rank's own under ``"rank0"``, ``"rank1"`` and so on, and
what all have alike under ``"shared"``; beside them plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


class Known(NamedTuple):
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
    state: Any, by_name: dict[str, Tensor], known: Known, *, rank: int, world_size: int
) -> dict[str, Any]:
    """A state that is to be loaded, without what the hook does not remember of it.

    Args:
        state: what a user gives.
        by_name: the model's parameters.
        known: what the hook remembers that is to load it.
        rank, world_size: of this process.

    Raises:
        ValueError: no state of these parameters, this rank, this number of ranks, and such a hook.
    """
    if not isinstance(state, dict) or not _is_number(state.get("version"), VERSION):
        got = type(state).__qualname__
        if isinstance(state, dict):
            got = f"version {state.get('version')!r}"
        raise _unfit(f"the state must be what HookHandle.state_dict() gives, got {got}")
    if not _is_number(state.get("world_size"), world_size):
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
    if isinstance(state["steps"], bool) or not 0 <= state["steps"] <= _MOST_STEPS:
        raise _unfit(f"its steps must be a number of steps, got {state['steps']!r}")
    for names in state["buckets"]:
        if not isinstance(names, list) or not names or not set(map(str, names)) <= set(by_name):
            raise _unfit(f"its buckets must be lists of the model's parameters, got {names!r}")
    remembered = [
        (
            own,
            known.own | known.shards | {k for k, into in FOLDED_INTO.items() if into in known.own},
        ),
        (state["shared"], known.shared.keys()),
        (state["choices"], known.choices.keys()),
    ]
    for kinds, mine in remembered:
        for kind, values in kinds.items():
            if kind not in mine and kinds is not own:
                continue  # such as factors of another rank, which begin anew
            if kind not in mine:
                raise _unfit(
                    f"it has '{kind}', which the hook that is attached does not remember; a state "
                    "is for a hook like the one that it is of"
                )
            if not isinstance(values, dict):
                got = type(values).__qualname__
                raise _unfit(f"its '{kind}' must be a dict by parameter, got {got}")
            for name, value in values.items():
                parameter = by_name.get(name)
                what = f"'{kind}' of parameter '{name}'"
                if parameter is None:
                    raise _unfit(f"it has {what}, which the model does not have")
                if kinds is state["choices"]:
                    if isinstance(value, bool) or value not in known.choices[kind]:
                        among = ", ".join(map(str, known.choices[kind]))
                        raise _unfit(f"{what} must be one of {among}, got {value!r}")
                    continue
                if not isinstance(value, Tensor):
                    raise _unfit(f"{what} must be a tensor, got {type(value).__qualname__}")
                shape, dtype = parameter.shape, torch.float32
                if kind in FOLDED_INTO:  # which lies as the elements do
                    shape = torch.Size([parameter.numel()])
                elif kinds is not own:
                    like = known.shared[kind].get(name)
                    if like is None:
                        raise _unfit(f"it has {what}, of which the hook remembers nothing")
                    shape, dtype = like.shape, like.dtype
                check_tensor(what, value, shape, dtype)
    return {
        **state,
        "shared": {kind: state["shared"][kind] for kind in known.shared if kind in state["shared"]},
        "choices": {
            kind: state["choices"][kind] for kind in known.choices if kind in state["choices"]
        },
    }


def _is_number(value: object, number: int) -> bool:
    return isinstance(value, int) and value == number


def check_tensor(
    what: str,
    value: Tensor,
    shape: torch.Size,
    dtype: torch.dtype = torch.float32,
    *,
    is_finite: bool = True,
) -> None:
    """Refuse a tensor of a state that cannot be what it is to be.

    Args:
        what: said of it in errors.
        value: of the state.
        shape: that it must have.
        dtype: as which it is to be kept.
        is_finite: whether all its numbers must be finite as such.

    Raises:
        ValueError: it is of another kind or shape, or holds numbers that are not finite.
    """
    if (
        value.layout is not torch.strided
        or value.is_meta
        or not (value.is_complex() if dtype.is_complex else value.is_floating_point())
    ):
        kind = "complex" if dtype.is_complex else "floating-point"
        raise _unfit(
            f"{what} must be a dense tensor of {kind} numbers, got one of {value.dtype} "
            f"and layout {value.layout} on device {value.device}"
        )
    if value.shape != shape:
        raise _unfit(f"{what} must be of shape {list(shape)}, got {list(value.shape)}")
    if is_finite and not value.to(dtype).isfinite().all():
        raise _unfit(f"{what} must hold finite numbers, got others")


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
    for rank, state in enumerate(states):
        if not isinstance(state, dict) or not {f"rank{rank}", "world_size", "steps"} <= set(state):
            raise ValueError(f"reshard_states: states[{rank}] must be that of rank {rank}")
        own_kinds = state[f"rank{rank}"]
        if not isinstance(own_kinds, dict) or not all(
            isinstance(tensors, dict)
            and all(isinstance(tensor, Tensor) for tensor in tensors.values())
            for tensors in own_kinds.values()
        ):
            raise ValueError(
                f"reshard_states: what states[{rank}] has of rank {rank} must be tensors by kind "
                "and parameter"
            )
        if own_kinds.keys() != states[0]["rank0"].keys():
            raise ValueError(
                f"reshard_states: states[{rank}] must be of the same hook as states[0], which has "
                f"{sorted(states[0]['rank0'])}, got {sorted(own_kinds)}"
            )
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


def _unfit(what: str) -> ValueError:
    return ValueError(f"load_state_dict: {what}")
