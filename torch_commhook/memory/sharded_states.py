"""States of hooks on sharded models, by parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_commhook.memory.states import (
    ANCHOR,
    FOLDED_INTO,
    LOCAL_STEPS,
    MOMENTUM,
    Refuse,
    check_by_kind,
    entry_name,
    is_number,
    shown,
)

# ---- a parameter that is divided into shards -----------------------------------------------------


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which each rank has a shard.

    Attributes:
        name: its name in the model.
        shape: the shape of the whole parameter.
        dim: the dimension along which it is divided.
        shards: the number of shards.
        dtype: its gradient's dtype.
        device: its gradient's device.
    """

    name: str
    shape: torch.Size
    dim: int
    shards: int
    dtype: torch.dtype
    device: torch.device

    @property
    def shard_shape(self) -> torch.Size:
        """The shape of each shard, with its padding."""
        shape = list(self.shape)
        shape[self.dim] = -(-shape[self.dim] // self.shards)
        return torch.Size(shape)

    def rows_of(self, rank: int) -> int:
        """The number of a shard's rows that belong to the parameter: the rest is padding."""
        rows = self.shard_shape[self.dim]
        return max(min(self.shape[self.dim] - rank * rows, rows), 0)

    def placeholders(self) -> list[Tensor]:
        """For each rank a placeholder with its shard's form, which takes no memory."""
        one = torch.empty((), dtype=self.dtype, device=self.device)
        return [one.expand(self.shard_shape) for _ in range(self.shards)]

    def whole(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor of its shards' tensors."""
        return torch.cat(list(pieces), dim=self.dim).narrow(self.dim, 0, self.shape[self.dim])

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """The inverse of :meth:`whole`, with zeros in the padding."""
        rows = self.shard_shape[self.dim]
        missing = rows * self.shards - self.shape[self.dim]
        shape = list(self.shape)
        shape[self.dim] = missing
        padded = torch.cat([whole, whole.new_zeros(shape)], dim=self.dim)
        return [piece.contiguous() for piece in padded.split(rows, dim=self.dim)]


# ---- converts states of hooks on sharded models to whole parameters, and back to shards ----------


#: The key of the number of shards of a state's parameters, and of their dimensions.
SHARDS = "shards"
#: The key of the number of parts into which tensor parallelism divides the model.
PARTS = "parts"
_OF_ALL_PARTS = {"version", "steps", "world_size", "buckets", LOCAL_STEPS}

#: The key of the state of the hook in the reduce-scatters, beside one across replicas.
SHARD_HOOK = "shard_hook"

_MOST_DIMENSIONS = 64
_OF_A_PART = re.compile(r"part\d+_")


def shards_entry(parameters: Sequence[ShardedParameter], number: int) -> dict[str, Any]:
    """A state's entry under :data:`SHARDS`, for tensors in a number of shards."""
    forms = {each.name: [each.dim, *each.shape] for each in parameters}
    return {"number": number, "forms": forms}


def number_of_shards(state: Mapping[str, Any], which: str, refuse: Refuse) -> int:
    """The number of shards of a state's tensors; 1 if they are whole.

    Raises:
        ValueError: the state has no such number.
    """
    entry = state.get(SHARDS, {"number": 1})
    number = entry.get("number") if isinstance(entry, dict) else None
    if type(number) is not int or number < 1:
        raise refuse(f"{which}{SHARDS} must have a number of shards, got {shown(entry)}")
    return number


def _forms(state: Mapping[str, Any], which: str, refuse: Refuse) -> dict[str, list[int]]:
    """Each parameter's dimension of division, and its shape."""
    entry = state.get(SHARDS, {})
    forms = entry.get("forms", {}) if isinstance(entry, dict) else None
    if not isinstance(forms, dict):
        raise refuse(f"{which}{SHARDS} must have the parameters' forms, got {shown(entry)}")
    for name, form in forms.items():
        if (
            type(name) is not str
            or not isinstance(form, list)
            or not 2 <= len(form) <= _MOST_DIMENSIONS
            or any(type(size) is not int or size < 0 for size in form)
            or form[0] >= len(form) - 1
        ):
            raise refuse(
                f"{which}{SHARDS}: the form of parameter {shown(name)} must be a dimension and a "
                f"shape, got {shown(form)}"
            )
    return forms


def _parameter(
    name: str, forms: Mapping[str, list[int]], shards: int, refuse: Refuse
) -> ShardedParameter:
    if name not in forms:
        raise refuse(f"the form of parameter {shown(name)} must be in the state, got none")
    dim, *shape = forms[name]
    device = torch.device("cpu")
    return ShardedParameter(name, torch.Size(shape), dim, shards, torch.float32, device)


def choices_key(shard: int) -> str:
    """The key of a shard's choices in a state; its replicas share them."""
    return f"choices{shard}"


def part_key(key: str, part: tuple[int, int]) -> str:
    """An entry's key in a state of a part, which is its number and the number of parts."""
    number, parts = part
    return key if parts == 1 or key in _OF_ALL_PARTS else f"part{number}_{key}"


def of_part(state: dict[str, Any], part: tuple[int, int]) -> dict[str, Any]:
    """Rename a state's entries, so that other parts use other names; see :func:`part_key`."""
    if part[1] == 1:
        return state
    return {PARTS: part[1], **{part_key(key, part): value for key, value in state.items()}}


def without_part(state: Any, part: tuple[int, int], refuse: Refuse) -> Any:
    """Undo :func:`of_part`.

    Raises:
        ValueError: the state belongs to another part.
    """
    if not isinstance(state, dict):
        return state  # other checks refuse it
    number, parts = part
    if not is_number(state.get(PARTS, 1), parts):
        raise refuse(
            f"the state must be of {parts} parts of tensor parallelism, got one of "
            f"{shown(state.get(PARTS, 1))}"
        )
    if parts == 1:
        return state
    for key in state:
        if key != PARTS and key not in _OF_ALL_PARTS and not _OF_A_PART.match(str(key)):
            raise refuse(f"it has {shown(key)}, which no state of a part of a model has")
    own = f"part{number}_"
    if not any(isinstance(key, str) and key.startswith(own) for key in state):
        raise refuse(f"the state must contain part {number}, got one without it")
    return {
        key.removeprefix(own): value
        for key, value in state.items()
        if key in _OF_ALL_PARTS or (isinstance(key, str) and key.startswith(own))
    }


def shared_key(shard: int) -> str:
    """The key of the entries that the replicas of a shard share."""
    return f"shared{shard}"


def whole_states(states: Sequence[dict[str, Any]], refuse: Refuse) -> list[dict[str, Any]]:
    """Convert states of shards to states of whole parameters, one for each replica.

    Args:
        states: the states of all ranks, in rank order: those of a replica are consecutive.
        refuse: makes an error from a text.

    Raises:
        ValueError: they do not fit together.
    """
    shards = number_of_shards(states[0], "states[0]: its ", refuse)
    forms = _forms(states[0], "states[0]: its ", refuse)
    for rank, state in enumerate(states):
        if number_of_shards(state, f"states[{rank}]: its ", refuse) != shards:
            raise refuse(f"states[{rank}] must be of {shards} shards, as states[0]")
    if len(states) % shards:
        raise refuse(f"states must be of all {shards} shards of each replica, got {len(states)}")
    if shards == 1:
        return [{key: state[key] for key in state if key != SHARDS} for state in states]
    found = []
    for first in range(0, len(states), shards):
        own = [states[first + shard][f"rank{first + shard}"] for shard in range(shards)]
        replica = first // shards
        state = {
            key: value
            for key, value in states[first].items()
            if key != SHARDS and not key.startswith(("rank", "shared", "choices"))
        }
        state["choices"] = states[first].get(choices_key(0), states[first].get("choices"))
        state["world_size"] = len(states) // shards
        alike = [
            _of_parameters(states[first + shard].get(shared_key(shard), {}), refuse)
            for shard in range(shards)
        ]
        state["shared"] = _joined_tensors(alike, forms, refuse)
        state[f"rank{replica}"] = _joined_tensors(own, forms, refuse)
        found.append(state)
    return found


def _of_parameters(alike: Any, refuse: Refuse) -> dict[str, dict[str, Tensor]]:
    """The common entries of ranks that have a number for each of a parameter's elements.

    Others, such as factors of matrices, belong to one shard or a whole parameter, and restart.
    """
    if isinstance(alike, dict):
        alike = {kind: alike[kind] for kind in (ANCHOR, MOMENTUM) if kind in alike}
    check_by_kind(alike, "the common part of a shard's replicas", Tensor, refuse)
    found: dict[str, dict[str, Tensor]] = alike
    return found


def _joined_tensors(
    own: Sequence[Any], forms: Mapping[str, list[int]], refuse: Refuse
) -> dict[str, dict[str, Tensor]]:
    def join(kind: str, name: str, _: Tensor) -> Tensor:
        pieces = [each.get(kind, {}).get(name) for each in own]
        if not all(isinstance(piece, Tensor) for piece in pieces):
            raise refuse(f"{entry_name(kind, name)} must be there for all shards")
        parameter = _parameter(name, forms, len(pieces), refuse)
        shape = parameter.shard_shape
        for piece in pieces:
            if piece.numel() != math.prod(shape):
                raise refuse(
                    f"a shard of {shown(kind)} must be of shape {list(shape)}, got "
                    f"{list(piece.shape)}"
                )
        whole = parameter.whole([piece.reshape(shape) for piece in pieces])
        return whole.reshape(-1) if kind in FOLDED_INTO else whole

    return _map_tensors(own[0], join)


def cut_states(
    states: Sequence[dict[str, Any]],
    shards: int,
    forms_of: Mapping[str, Any],
    refuse: Refuse,
) -> list[dict[str, Any]]:
    """Convert states of whole parameters to states for each rank of replicas with shards.

    Args:
        states: states of whole parameters, one for each replica, in order.
        shards: the number of ranks of each replica.
        forms_of: a state with the parameters' dimensions of division; without these, the first
            dimension is used.
        refuse: makes an error from a text.
    """
    forms = dict(_forms(forms_of, "states[0]: its ", refuse))
    if shards == 1:
        return [dict(state) for state in states]
    found = []
    for replica, state in enumerate(states):
        own = state[f"rank{replica}"]
        for kind, tensors in own.items():
            for name, tensor in tensors.items():
                if kind not in FOLDED_INTO:
                    forms.setdefault(name, [0, *tensor.shape])
        common = {key: value for key, value in state.items() if key != f"rank{replica}"}
        alike = _of_parameters(state["shared"], refuse)
        for shard in range(shards):
            rank = replica * shards + shard

            def piece(kind: str, name: str, tensor: Tensor, shard: int = shard) -> Tensor:
                parameter = _parameter(name, forms, shards, refuse)
                count = math.prod(parameter.shape)
                if tensor.numel() != count:
                    what = entry_name(kind, name)
                    raise refuse(f"{what} must have {count} elements, got {tensor.numel()}")
                one = parameter.pieces(tensor.reshape(parameter.shape))[shard]
                return one.reshape(-1) if kind in FOLDED_INTO else one

            found.append(
                {
                    **common,
                    "world_size": len(states) * shards,
                    SHARDS: {"number": shards, "forms": dict(forms)},
                    "shared": {},
                    "choices": {},
                    choices_key(shard): state["choices"],
                    shared_key(shard): _map_tensors(alike, piece),
                    f"rank{rank}": _map_tensors(own, piece),
                }
            )
    return found


def _map_tensors(
    own: Mapping[str, Mapping[str, Tensor]], function: Callable[[str, str, Tensor], Tensor]
) -> dict[str, dict[str, Tensor]]:
    return {
        kind: {name: function(kind, name, tensor) for name, tensor in tensors.items()}
        for kind, tensors in own.items()
    }


def is_cut(state: object) -> bool:
    """Whether a state's tensors are shards."""
    if not isinstance(state, dict) or SHARDS not in state:
        return False
    entry = state[SHARDS]
    return not (isinstance(entry, dict) and is_number(entry.get("number"), 1))
