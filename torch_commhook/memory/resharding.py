"""States of hooks for another number of ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from torch_commhook.memory.sharded_states import (
    PARTS,
    SHARD_HOOK,
    choices_key,
    cut_states,
    is_cut,
    number_of_shards,
    shared_key,
    whole_states,
)
from torch_commhook.memory.states import (
    FOLDED_INTO,
    LOCAL_STEPS,
    MEANS,
    PARAMETERS,
    VERSION,
    check_by_kind,
    check_common,
    check_tensor,
    checked_position,
    entry_name,
    is_number,
    shown,
)
from torch_commhook.wording import check_type

# ---- merges the states of all ranks' hooks into one ----------------------------------------------


def merged_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge states into one that each rank can load.

    Args:
        states: the states of all ranks. Plain values under the same name must be equal. Of tensors
            the first is taken: they are equal on all ranks.

    Raises:
        RuntimeError: plain values differ.
    """
    merged: dict[str, Any] = {}
    for state in states:
        _add(merged, state, "")
    return merged


def _add(merged: dict[str, Any], state: dict[str, Any], where: str) -> None:
    for key, value in state.items():
        path = f"{where}{key}"
        if isinstance(value, dict):
            _add(merged.setdefault(key, {}), value, f"{path}.")
        elif isinstance(merged.setdefault(key, value), Tensor):
            continue
        elif merged[key] != value:
            raise RuntimeError(
                f"HookHandle.state_dict: the ranks' '{path}' must be the same for one state of "
                f"all ranks, got {shown(merged[key])} and {shown(value)}; save each rank's state "
                "instead"
            )


def on_the_host(value: Any) -> Any:
    """Copy a state, with its tensors in host memory."""
    if isinstance(value, dict):
        return {key: on_the_host(each) for key, each in value.items()}
    return value.cpu().clone() if isinstance(value, Tensor) else value


# ---- converts states of a hook's memory to another number of ranks -------------------------------


_MOST_RANKS = 1 << 20

#: Kinds of tensors of which each new rank gets the mean.
_OF_RANKS_APART = (PARAMETERS, MEANS)


@torch.inference_mode(False)  # states made in inference mode could not be used outside it
# Over 80 lines: the docstring describes each argument and error.
def reshard_states(
    states: Sequence[dict[str, Any]] | dict[str, Any],
    world_size: int,
    *,
    shards: int | None = None,
) -> list[dict[str, Any]]:
    """Convert the states of all ranks to another number of ranks.

    No unsent error is lost: the mean of the ranks' error memories stays the same. With fewer ranks,
    the memories of rank r, r + W, r + 2 W, and so on are added. With more ranks, additional ones
    begin with empty memory. Each memory is scaled by new ranks / old ranks, since the mean is then
    over other ranks. Errors of sums that ranks encode are added to these memories. Ranks that are
    apart (:class:`torch_commhook.hooks.local_sgd`) continue from the mean of their parameters; they
    apply the arrived means of a running exchange when it is due.

    On sharded models, a hook in the reduce-scatters remembers whole gradients, and the same holds.
    A hook across replicas remembers its shard: the ranks of a replica together have whole memories,
    to which all this applies, and which are divided again. So are the anchor, its momentum and the
    parameters of ranks that are apart. Factors of matrices restart on other shards.

    Args:
        states: the states from ``HookHandle.state_dict()`` of each rank, in rank order; or from
            ``state_dict(gather=True)``. On a mesh of replicas and shards the states of a replica
            are consecutive.
        world_size: the new number of ranks.
        shards: the number of shards of the new memory, for a hook across replicas: the ranks of a
            replica. 1 for all other models. None keeps the number.

    Returns:
        The state of each new rank.

    Raises:
        TypeError: ``states`` is not a list of states, or a number is not an int.
        ValueError: the states are not those of all ranks of one training; ``world_size`` is out of
            range; or the states are of a hierarchical hook, whose memory belongs to nodes.

    Example:
        >>> def train(rank):
        ...     model = nn.Linear(64, 1, bias=False)
        ...     handle = attach(model, hooks.error_feedback(hooks.sign()))
        ...     model(torch.full((1, 64), 1.0 + rank)).sum().backward()
        ...     return handle.state_dict()
        >>> states = run_ranks(train, 2)
        >>> [key for state in reshard_states(states, 3) for key in state if key.startswith("rank")]
        ['rank0', 'rank1', 'rank2']
    """
    check_type("reshard_states: world_size", world_size, "an int", int)
    if not 1 <= world_size <= _MOST_RANKS:
        raise _error(f"world_size must be from 1 to {_MOST_RANKS}, got {world_size}")
    if isinstance(states, dict) and is_number(
        states.get("world_size"), len(_keys_of_ranks(states))
    ):
        states = [states] * len(_keys_of_ranks(states))
    if not isinstance(states, (list, tuple)):
        got = type(states).__qualname__
        raise TypeError(f"reshard_states: states must be a list of states, got {got}")
    if not states:
        raise _error("states must hold at least one, got none")
    check_type("reshard_states: shards", shards, "an int or None", int, NoneType)
    if shards is not None and not 1 <= shards <= world_size:
        raise _error(f"shards must be from 1 to {world_size}, the ranks, got {shards}")
    if isinstance(states[0], dict) and PARTS in states[0]:
        raise _error(
            "states of models with tensor parallelism fit only the number of ranks "
            "that has saved them"
        )
    if isinstance(states[0], dict) and SHARD_HOOK in states[0]:
        for rank, state in enumerate(states):
            if not isinstance(state, dict) or SHARD_HOOK not in state:
                raise _error(f"states[{rank}] must have {SHARD_HOOK!r}, as states[0] has")
        beside = [state[SHARD_HOOK] for state in states]
        rest = [{k: v for k, v in state.items() if k != SHARD_HOOK} for state in states]
        both = zip(
            reshard_states(rest, world_size, shards=shards),
            reshard_states(beside, world_size, shards=1),
            strict=True,
        )
        return [{**state, SHARD_HOOK: of_shard_hook} for state, of_shard_hook in both]
    if is_cut(states[0]) or (shards or 1) > 1:
        return _reshard_shards(states, world_size, shards)
    own: list[dict[str, dict[str, Tensor]]] = []
    for rank, state in enumerate(states):
        own.append(_own_tensors(state, rank))
        if own[rank].keys() != own[0].keys():
            raise _error(
                f"states[{rank}] must be of the same hook as states[0], which has "
                f"{sorted(own[0])}, got {sorted(own[rank])}"
            )
        if not is_number(state["world_size"], len(states)) or not is_number(
            state["steps"], states[0]["steps"]
        ):
            raise _error(
                f"states[{rank}] must be of {len(states)} ranks after "
                f"{shown(states[0]['steps'])} steps, got one of {shown(state['world_size'])} "
                f"ranks after {shown(state['steps'])}"
            )
        _check_alike(state, states[0], rank)
        _check_shapes(own, rank)
    if world_size != len(states):
        own = _add_up_for_ranks(own, world_size)
    of_ranks = _keys_of_ranks(states[0])
    common = {key: value for key, value in states[0].items() if key not in of_ranks}
    return [
        {**common, "world_size": world_size, f"rank{rank}": own[rank]} for rank in range(world_size)
    ]


def _keys_of_ranks(state: dict[str, Any]) -> set[str]:
    return {key for key in state if type(key) is str and re.fullmatch(r"rank\d+", key)}


def _reshard_shards(
    states: Sequence[dict[str, Any]], world_size: int, shards: int | None
) -> list[dict[str, Any]]:
    """Convert states of sharded parameters, or to sharded parameters; as :func:`reshard_states`."""
    for rank, state in enumerate(states):
        _own_tensors(state, rank)
        _check_alike(state, states[0], rank)
    before = number_of_shards(states[0], "states[0]: its ", _error)
    shards = before if shards is None else shards
    if world_size % shards:
        raise _error(f"world_size must be a multiple of {shards} shards, got {world_size}")
    whole = reshard_states(whole_states(states, _error), world_size // shards)
    made = cut_states(whole, shards, states[0], _error)
    if shards == before:  # tensors that the replicas of a shard share, such as factors, stay
        for rank, state in enumerate(made):
            key = shared_key(rank % shards)
            state[key] = states[rank % shards].get(key, {})
            key = choices_key(rank % shards)
            state[key] = states[rank % shards].get(key, state[key])
    return made


def _error(what: str) -> ValueError:
    return ValueError(f"reshard_states: {what}")


def _own_tensors(state: Any, rank: int) -> dict[str, dict[str, Tensor]]:
    """The tensors of a state that are the rank's own, by kind and name."""
    which = f"states[{rank}]"
    own_key = f"rank{rank}"
    if not isinstance(state, dict) or not {own_key, "world_size", "steps"} <= state.keys():
        raise _error(f"{which} must be that of rank {rank}")
    kinds = state[own_key]
    check_by_kind(kinds, f"what {which} has of rank {rank}", Tensor, _error)
    return {
        kind: {
            name: check_tensor(
                f"{which}: {entry_name(kind, name)}",
                tensor,
                None,
                None if kind in _OF_RANKS_APART else torch.float32,
                _error,
                is_finite=kind not in _OF_RANKS_APART,
            )
            for name, tensor in tensors.items()
        }
        for kind, tensors in kinds.items()
    }


def _check_alike(state: dict[str, Any], first: dict[str, Any], rank: int) -> None:
    """Refuse a common part that has another form, or another round, than the first rank's."""
    which = f"states[{rank}]: its "
    if not is_number(state.get("version"), VERSION):
        raise _error(f"{which}version must be {VERSION}, got {shown(state.get('version'))}")
    check_common(state, which, _error)
    for key, wanted in (("shared", Tensor), ("choices", int)):
        check_by_kind(state[key], f"{which}{key}", wanted, _error)
    if (LOCAL_STEPS in state) != (LOCAL_STEPS in first):
        raise _error(f"states[{rank}] must have {LOCAL_STEPS} where states[0] has, got another")
    if LOCAL_STEPS in state:
        position = checked_position(state, which, _error)
        wanted_position = checked_position(first, "states[0]: its ", _error)
        if position != wanted_position:
            raise _error(f"{which}{LOCAL_STEPS} must be {wanted_position}, got {position}")


def _check_shapes(own: Sequence[dict[str, dict[str, Tensor]]], rank: int) -> None:
    """Refuse tensors of a rank that do not fit the first rank's, or their sums."""
    for kind, tensors in own[rank].items():
        firsts = own[0][kind]
        if kind in _OF_RANKS_APART and tensors.keys() != firsts.keys():
            odd = sorted(tensors.keys() ^ firsts.keys())
            raise _error(f"'{kind}' must be of the same parameters on all ranks, got {odd} on one")
        for name, tensor in tensors.items():
            what = f"states[{rank}]: {entry_name(kind, name)}"
            shape = firsts[name].shape if name in firsts else tensor.shape
            into = FOLDED_INTO.get(kind)
            if into is not None:
                target = own[rank].get(into, {}).get(name)
                if target is None:
                    raise _error(f"{what} must have {entry_name(into, name)} beside it, got none")
                shape = torch.Size([target.numel()])
            if tensor.shape != shape:
                raise _error(f"{what} must be of shape {list(shape)}, got {list(tensor.shape)}")


def _add_up_for_ranks(own: Sequence[dict[str, dict[str, Tensor]]], world_size: int) -> list[Any]:
    kinds_of_all = [FOLDED_INTO.get(kind, kind) for kind in own[0]]
    found: list[dict[str, dict[str, Tensor]]] = [
        {kind: {} for kind in kinds_of_all} for _ in range(world_size)
    ]
    for rank, kinds in enumerate(own):
        for kind, tensors in kinds.items():
            if kind.startswith("node_"):
                raise ValueError(
                    "reshard_states: hierarchical hooks' memory belongs to nodes, which "
                    "another number of ranks does not have"
                )
            if kind in _OF_RANKS_APART:
                for each in found:
                    _add_mean(each.setdefault(kind, {}), tensors, own[0][kind], len(own))
                continue
            into = FOLDED_INTO.get(kind)
            # A sum's own error counts as often as there are ranks.
            factor = world_size if into else world_size / len(own)
            target = found[rank % world_size].setdefault(into or kind, {})
            for name, tensor in tensors.items():
                piece = target.get(name)
                if piece is None:
                    like = own[rank][into][name] if into else tensor
                    piece = target[name] = torch.zeros_like(like)
                if piece.shape != tensor.shape:  # flat, in the order of the piece's memory
                    piece = piece.as_strided((piece.numel(),), (1,), piece.storage_offset())
                piece += factor * tensor
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
