"""Stores a hook's memory of each parameter, independent of the parameter's bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.codecs.base import write_saturated
from torch_commhook.memory.states import ERROR, FOLDED_INTO

#: The attributes that are tables by parameter.
_TABLES = ("_names", "_pieces", "_shared", "_loaded_shards", "_choices")


class ParameterStore:
    """A hook's memory of a model's parameters, by parameter and kind.

    It keeps no parameter alive.

    Attributes:
        allowed_choices: by kind, the numbers that may be chosen for a bucket.
        deciding_choices: the kinds whose number decides on the hook's memory.
    """

    def __init__(self) -> None:
        self._names: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        # By parameter, then by kind; a piece belongs to a bucket's tensor.
        self._pieces: MutableMapping[Tensor, dict[str, Tensor]] = WeakIdKeyDictionary()
        self._shared: MutableMapping[Tensor, dict[str, Tensor | None]] = WeakIdKeyDictionary()
        self._loaded_shards: MutableMapping[Tensor, dict[str, Tensor]] = WeakIdKeyDictionary()
        self._choices: MutableMapping[Tensor, dict[str, int]] = WeakIdKeyDictionary()
        self.allowed_choices: dict[str, tuple[int, ...]] = {}
        self.deciding_choices: set[str] = set()
        self._placeholders: list[Tensor] = []  # for released parameters

    # ---- parameters and their names --------------------------------------------------------------

    def add_names(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Name the model's parameters."""
        for name, parameter in named:
            self._names[parameter] = name

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters that have names, while they exist."""
        return [(name, parameter) for parameter, name in self._names.items()]

    def names_of(self, parameters: Sequence[Tensor]) -> list[str] | None:
        """The parameters' names, if all are known."""
        names = [self._names.get(parameter) for parameter in parameters]
        known = [name for name in names if name is not None]
        return known if len(known) == len(names) else None

    def has_any_of(self, parameters: Sequence[Tensor]) -> bool:
        """Whether some of the parameters are the model's."""
        return any(parameter in self._names for parameter in parameters)

    def release_parameters(self) -> dict[int, Tensor]:
        """Keep the memory, and release all parameters: a weak reference prevents swap_tensors.

        Returns:
            The placeholder of each parameter, by its id: a tensor of one element, expanded.
        """
        placeholders = {
            id(p): torch.empty((), dtype=p.dtype, device=p.device).expand(p.shape)
            for p in self._names
        }
        for table in _TABLES:
            kept = WeakIdKeyDictionary()
            for parameter, value in getattr(self, table).items():
                kept[placeholders[id(parameter)]] = value
            setattr(self, table, kept)
        self._placeholders = list(placeholders.values())
        return placeholders

    def replace_parameter(self, before: Tensor, now: Tensor) -> None:
        """Let another tensor have a parameter's memory from now on."""
        for table in _TABLES:
            values = getattr(self, table)
            if before in values:
                values[now] = values.pop(before)

    # ---- pieces of buckets' tensors, this rank's own ---------------------------------------------

    def piece(self, parameter: Tensor, kind: str) -> Tensor | None:
        """A parameter's piece of its bucket's tensor of a kind."""
        return self._pieces.get(parameter, {}).get(kind)

    def move_piece(self, parameter: Tensor, kind: str, piece: Tensor) -> None:
        """Let ``piece`` be the parameter's piece from now on, with the earlier contents."""
        pieces = self._pieces.setdefault(parameter, {})
        before = pieces.get(kind)
        if before is not None:
            write_saturated(piece, before)
        pieces[kind] = piece

    def add_lost(
        self, parameter: Tensor, kind: str, lost: Tensor, factor: int, *, begin: int = 0
    ) -> None:
        """Add a shard's errors of a parameter to the parameter's error memory, if there is one.

        Args:
            parameter: the parameter.
            kind: the shard's kind.
            lost: the errors, flat, in a bucket's order.
            factor: the factor of ``lost``.
            begin: the parameter's element at which ``lost`` begins.
        """
        piece = self.piece(parameter, FOLDED_INTO[kind])
        if piece is not None:
            flat = BucketLayout([parameter])._permute([piece])[0].view(-1)
            add_to_error(flat[begin : begin + len(lost)], lost, factor)

    def rescale_errors(self, factor: float) -> None:
        """Multiply all errors, except those in shards."""
        for pieces in self._pieces.values():
            if ERROR in pieces:
                multiply_error(pieces[ERROR], factor)
        for loaded in self._loaded_shards.values():
            for shard in loaded.values():
                multiply_error(shard, factor)

    # ---- tensors that are equal on all ranks -----------------------------------------------------

    def shared(self, parameter: Tensor, kind: str) -> Tensor | None:
        """The parameter's own tensor of a kind, or None."""
        return self._shared.get(parameter, {}).get(kind)

    def shared_or_made(
        self, parameter: Tensor, kind: str, make: Callable[[], Tensor | None]
    ) -> Tensor | None:
        """The parameter's own tensor of a kind; created if there is none."""
        tensors = self._shared.setdefault(parameter, {})
        if kind not in tensors:
            tensors[kind] = make()
        return tensors[kind]

    def set_shared(self, parameter: Tensor, kind: str, tensor: Tensor) -> None:
        """Let ``tensor`` be the parameter's own of a kind from now on."""
        self._shared.setdefault(parameter, {})[kind] = tensor

    # ---- numbers that were chosen for buckets ----------------------------------------------------

    def set_choice(self, parameter: Tensor, kind: str, value: int) -> None:
        """Store a number that was chosen for a parameter's bucket."""
        self._choices.setdefault(parameter, {})[kind] = value

    def choice(self, parameter: Tensor, kind: str, default: int) -> int:
        """A number that was chosen for a parameter's bucket."""
        return self._choices.get(parameter, {}).get(kind, default)

    # ---- shards of a state, before there are buckets ---------------------------------------------

    def loaded_shard(self, parameter: Tensor, kind: str) -> Tensor | None:
        """The loaded shards of a kind: flat, one element for each of the parameter's."""
        return self._loaded_shards.get(parameter, {}).get(kind)

    def pop_loaded_shard(self, parameter: Tensor, kind: str) -> Tensor | None:
        """Return and remove :meth:`loaded_shard`."""
        return self._loaded_shards.get(parameter, {}).pop(kind, None)

    def add_loaded_shards_to_errors(self, parameters: Sequence[Tensor], world_size: int) -> None:
        """Add loaded shards to the parameters' errors, if the hook has no such shards."""
        for parameter in parameters:
            for kind, loaded in self._loaded_shards.pop(parameter, {}).items():
                factor = 1 if kind == "node_error" else world_size
                self.add_lost(parameter, kind, loaded, factor)

    # ---- state -----------------------------------------------------------------------------------

    def kinds_of_pieces(self) -> set[str]:
        """The kinds of pieces that parameters have."""
        return {kind for pieces in self._pieces.values() for kind in pieces}

    def named_pieces(self) -> Iterator[tuple[str, str, Tensor]]:
        """Kind, parameter name, and piece."""
        return self._named(self._pieces)

    def named_shared(self) -> dict[str, dict[str, Tensor]]:
        """The tensors that are equal on all ranks, by kind and parameter name."""
        found: dict[str, dict[str, Tensor]] = {}
        for kind, name, tensor in self._named(self._shared):
            if tensor is not None:
                found.setdefault(kind, {})[name] = tensor
        return found

    def named_choices(self) -> dict[str, dict[str, int]]:
        """The chosen numbers, by kind and parameter name."""
        found: dict[str, dict[str, int]] = {}
        for kind, name, number in self._named(self._choices):
            found.setdefault(kind, {})[name] = number
        return found

    def _named(self, table: Mapping[Tensor, dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
        for parameter, values in table.items():
            for kind, value in values.items():
                yield kind, self._names[parameter], value

    def load_state(
        self,
        own: Mapping[str, Mapping[str, Tensor]],
        shared: Mapping[str, Mapping[str, Tensor]],
        choices: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Replace the memory by copies of a state's tensors.

        Args:
            own: this rank's pieces and shards, by kind and parameter name.
            shared: tensors that are equal on all ranks, likewise.
            choices: chosen numbers, likewise.
        """
        by_name = dict(self.named_parameters())
        self._pieces = WeakIdKeyDictionary()
        self._shared = WeakIdKeyDictionary()
        self._loaded_shards = WeakIdKeyDictionary()
        self._choices = WeakIdKeyDictionary()
        for kind, numbers in choices.items():
            for name, number in numbers.items():
                self.set_choice(by_name[name], kind, number)
        for kind, tensors in own.items():
            table = self._loaded_shards if kind in FOLDED_INTO else self._pieces
            for name, tensor in tensors.items():
                parameter = by_name[name]
                copied = tensor.detach().to(parameter.device, torch.float32, copy=True)
                table.setdefault(parameter, {})[kind] = copied
        for kind, tensors in shared.items():
            for name, tensor in tensors.items():
                parameter = by_name[name]
                copied = tensor.detach().to(parameter.device, copy=True)
                self.set_shared(parameter, kind, copied)


def multiply_error(error: Tensor, factor: float) -> None:
    """Multiply errors in place; they stay finite."""
    if factor != 1.0:
        most = torch.finfo(error.dtype).max
        error.mul_(min(factor, most)).clamp_(-most, most)


def add_to_error(error: Tensor, lost: Tensor, factor: int) -> None:
    """Add ``factor * lost`` to an error in place; an overflow becomes the largest number."""
    limits = torch.finfo(error.dtype)
    error.add_(lost, alpha=factor).clamp_(limits.min, limits.max)
