"""A hook's memory for a model with sharded parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.memory.sharded_states import (
    SHARD_HOOK,
    SHARDS,
    ShardedParameter,
    choices_key,
    number_of_shards,
    of_part,
    shards_entry,
    shared_key,
    without_part,
)
from torch_commhook.memory.states import (
    ERROR,
    FOLDED_INTO,
    Remembered,
    add_to_error,
    checked_state,
    load_error,
)


class WholeGradientMemory(HookMemory):
    """Memory of whole gradients, when each rank gets its shard of their sum.

    A bucket's elements are ordered by rank: a parameter's gradient has one piece per shard. A state
    has whole parameters, as without shards.

    Attributes:
        replica: the number of this rank's replica, and the number of replicas.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replica = 0, 1
        self._parameters: dict[str, ShardedParameter] = {}
        self._shards: dict[str, list[Tensor]] = {}
        self._padding: weakref.WeakKeyDictionary[BucketMemory, list[tuple[int, int]]] = (
            weakref.WeakKeyDictionary()
        )

    def set_sharded(self, parameters: Sequence[ShardedParameter], *, rank: int) -> None:
        """Set the model's parameters, sharded over equally many ranks, and this rank of these."""
        self._parameters = {each.name: each for each in parameters}
        self._shards = {each.name: each.placeholders() for each in parameters}
        named = [
            (_piece_name(name, number), placeholder)
            for name, placeholders in self._shards.items()
            for number, placeholder in enumerate(placeholders)
        ]
        self.set_parameters(named, rank=rank, world_size=parameters[0].shards)

    def new_for_same_model(self) -> HookMemory:
        other = WholeGradientMemory()
        other.set_sharded(list(self._parameters.values()), rank=self.rank)
        other.replica, other.part = self.replica, self.part
        other.scaler = self.scaler
        return other

    @property
    def state_rank(self) -> tuple[int, int]:
        replica, replicas = self.replica
        return replica * self.world_size + self.rank, replicas * self.world_size

    def shards_of(self, names: Sequence[str]) -> list[Tensor]:
        """Placeholders of parameters' shards in a bucket: by rank, then by parameter."""
        found = [self._shards[name] for name in names]
        return [each[rank] for rank in range(self.world_size) for each in found]

    def _new_bucket_memory(self, parameters: Sequence[Tensor], index: int) -> BucketMemory:
        return BucketMemory(self, parameters, index, is_sharded=True)

    def clear_padding(self, memory: BucketMemory) -> None:
        """Set errors of padding to zero; they belong to no gradient."""
        error = memory.tensors.get(ERROR)
        if error is None:
            return
        places = self._padding.get(memory)
        if places is None:
            places = self._padding[memory] = self._places_of_padding(memory)
        for begin, end in places:
            error[begin:end].zero_()

    def _places_of_padding(self, memory: BucketMemory) -> list[tuple[int, int]]:
        place_of = {
            id(placeholder): (self._parameters[name], number)
            for name, placeholders in self._shards.items()
            for number, placeholder in enumerate(placeholders)
        }
        places = []
        offsets, lengths = memory.layout.offsets, memory.layout.lengths
        for placeholder, offset, length in zip(memory.parameters, offsets, lengths, strict=True):
            parameter, number = place_of[id(placeholder)]
            if parameter.dim == 0:  # others divide evenly
                rows = parameter.shard_shape[0]
                begin = length // max(rows, 1) * parameter.rows_of(number)
                if begin < length:
                    places.append((offset + begin, offset + length))
        return places

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state[SHARDS] = shards_entry(list(self._parameters.values()), 1)
        key = self.rank_key
        own = state[key]
        state[key] = {kind: self._whole(pieces) for kind, pieces in own.items()}
        # Each parameter has a piece for each rank.
        state["buckets"] = [
            [_whole_name(name) for name in names[: len(names) // self.world_size]]
            for names in state["buckets"]
        ]
        state["choices"] = {
            kind: {_whole_name(name): number for name, number in numbers.items()}
            for kind, numbers in state["choices"].items()
        }
        return of_part(state, self.part)

    def _whole(self, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._parameters.items():
            names = [_piece_name(name, number) for number in range(self.world_size)]
            if names[0] in pieces:
                found[name] = parameter.whole([pieces[each] for each in names])
        return found

    def check_state(self, state: Any) -> dict[str, Any]:
        remembered = Remembered(
            own=self.store.kinds_of_pieces(),
            segments=set(),
            shared={},
            choices=self.store.allowed_choices,
        )
        by_name = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            for name, parameter in self._parameters.items()
        }
        state = without_part(state, self.part, load_error)
        _check_shards(state, 1)
        rank, ranks = self.state_rank
        return checked_state(state, by_name, remembered, rank=rank, world_size=ranks)

    def load_state(self, state: dict[str, Any]) -> None:
        key = self.rank_key
        own = {kind: dict(tensors) for kind, tensors in state[key].items()}
        # A rank's errors of sums that it encoded when parameters were not sharded.
        for kind in [kind for kind in own if kind in FOLDED_INTO]:
            for name, lost in own.pop(kind).items():
                shape = self._parameters[name].shape
                whole = own.setdefault(FOLDED_INTO[kind], {}).get(name)
                if whole is None:
                    whole = torch.zeros(shape, dtype=lost.dtype, device=lost.device)
                else:
                    whole = whole.clone()
                add_to_error(whole, lost.view(shape), self.world_size)
                own[FOLDED_INTO[kind]][name] = whole
        pieces = {
            kind: {
                _piece_name(name, number): piece
                for name, tensor in tensors.items()
                for number, piece in enumerate(self._parameters[name].pieces(tensor))
            }
            for kind, tensors in own.items()
        }
        choices = {
            kind: {
                _piece_name(name, number): value
                for name, value in numbers.items()
                for number in range(self.world_size)
            }
            for kind, numbers in state["choices"].items()
        }
        super().load_state({**state, key: pieces, "choices": choices})


class ReplicaMemory(HookMemory):
    """Memory of shards' gradients, which are averaged across replicas.

    Ranks with other shards have other memory: each state belongs to one rank of all.

    Attributes:
        shard: the number of this rank's shard, and the number of shards.
        parameters: the model's parameters.
        of_shard_hook: the memory of the hook in the reduce-scatters, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shard = 0, 1
        self.parameters: list[ShardedParameter] = []
        self.of_shard_hook: HookMemory | None = None

    @property
    def _beside(self) -> HookMemory | None:
        """The memory of the hook in the reduce-scatters, if that hook remembers something."""
        beside = self.of_shard_hook
        return None if beside is None or beside.is_empty else beside

    @property
    def remembers_nothing(self) -> bool:
        return self.is_empty and self._beside is None

    @property
    def state_rank(self) -> tuple[int, int]:
        shard, shards = self.shard
        return self.rank * shards + shard, self.world_size * shards

    def new_for_same_model(self) -> HookMemory:
        other = super().new_for_same_model()
        assert isinstance(other, ReplicaMemory)
        other.shard, other.parameters = self.shard, self.parameters
        other.of_shard_hook = self.of_shard_hook
        return other

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), SHARDS: shards_entry(self.parameters, self.shard[1])}
        if self.shard[1] > 1:  # the replicas of one shard share entries that other shards lack
            state[shared_key(self.shard[0])] = state["shared"]
            state[choices_key(self.shard[0])] = state["choices"]
            state["shared"], state["choices"] = {}, {}
        if self._beside is not None:
            state[SHARD_HOOK] = self._beside.state_dict()
        return of_part(state, self.part)

    def check_state(self, state: Any) -> dict[str, Any]:
        state = without_part(state, self.part, load_error)
        _check_shards(state, self.shard[1])
        if isinstance(state, dict) and self.shard[1] > 1:
            shard = self.shard[0]
            choices = state.get(choices_key(shard), state.get("choices"))
            state = {**state, "shared": state.get(shared_key(shard)), "choices": choices}
        checked = super().check_state(state)
        beside = self._beside
        if (SHARD_HOOK in state) != (beside is not None):
            has = "one" if beside is None else "none"
            raise load_error(
                f"the state must have the memory of a shard_hook if there is one, got {has}"
            )
        if beside is not None:
            checked[SHARD_HOOK] = beside.check_state(state[SHARD_HOOK])
        return checked

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        if self._beside is not None:
            self._beside.load_state(state[SHARD_HOOK])


def _check_shards(state: Any, wanted: int) -> None:
    if not isinstance(state, dict):
        return  # other checks refuse it
    shards = number_of_shards(state, "its ", load_error)
    if shards != wanted:
        raise load_error(
            f"the state must be of parameters in {wanted} shards, got one of {shards}; make one "
            f"with torch_commhook.reshard_states, and give that shards={wanted}"
        )


def _piece_name(name: str, number: int) -> str:
    return f"{name} {number}"


def _whole_name(name: str) -> str:
    return name.rpartition(" ")[0]
