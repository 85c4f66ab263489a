"""States of hooks and parameters: the values, how they are saved, and by which parameter."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_commhook import _C
from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.codecs.base import write_saturated
from torch_commhook.native.bucket_ops import span_of

# ---- checks of untrusted values in a state. They raise only their own errors ---------------------


#: Makes an error from a text.
Refuse = Callable[[str], ValueError]

_MOST_CHARACTERS_SHOWN = 80
_MOST_BITS_SHOWN = 128


def is_number(value: object, number: int) -> bool:
    """Whether a value is an int and equals a number; tensors and bools are not ints."""
    return type(value) is int and value == number


def shown(value: object) -> str:
    """A value's text in an error: plain values themselves, others by class. Never long."""
    if type(value) is int and value.bit_length() > _MOST_BITS_SHOWN:
        return f"an int of {value.bit_length()} bits"  # Python refuses to write the longest
    if value is None or type(value) in (bool, int, float, complex):
        return repr(value)
    if type(value) is str:
        if len(value) > _MOST_CHARACTERS_SHOWN:
            value = f"{value[:_MOST_CHARACTERS_SHOWN]}..."
        return repr(value)
    return _C.type_name(value)


def check_tensor(
    what: str,
    value: object,
    shape: torch.Size | None,
    dtype: torch.dtype | None,
    refuse: Refuse,
    *,
    is_finite: bool = True,
) -> Tensor:
    """Check a tensor of a state, and convert it.

    Args:
        what: its name in errors.
        value: the state's value.
        shape: the required shape; None for any.
        dtype: the dtype to convert to; None for its own.
        refuse: makes the error.
        is_finite: whether all its numbers must be finite.

    Returns:
        Its numbers in ``dtype``, without a copy if they have it already. With None, numbers of 8
        bits or less become float32.

    Raises:
        ValueError: it is of another kind or shape, or holds numbers that are not finite.
    """
    if not isinstance(value, Tensor):
        raise refuse(f"{what} must be a tensor, got {shown(value)}")
    is_complex = value.is_complex() if dtype is None else dtype.is_complex
    has_numbers = value.is_complex() if is_complex else value.is_floating_point()
    if value.layout is not torch.strided or value.is_meta or not has_numbers:
        kind = "complex" if is_complex else "floating-point"
        raise refuse(
            f"{what} must be a dense tensor of {kind} numbers, got one of {value.dtype} "
            f"and layout {value.layout} on device {value.device}"
        )
    if shape is not None and value.shape != shape:
        raise refuse(f"{what} must be of shape {list(shape)}, got {list(value.shape)}")
    dtype = dtype or (torch.float32 if value.dtype.itemsize == 1 else value.dtype)
    try:
        last = value.storage_offset() + span_of(value) if value.numel() else 0
        has_memory = last * value.element_size() <= value.untyped_storage().nbytes()
        numbers = value.detach().to(dtype).resolve_conj().resolve_neg() if has_memory else value
        fits = not has_memory or not is_finite or bool(numbers.isfinite().all())
    except Exception as error:  # tensors of odd dtypes and classes may raise anything
        got = f"{_C.type_name(value)} of {value.dtype}"
        raise refuse(f"{what} must be a tensor that can be read as {dtype}, got {got}") from error
    if not has_memory:
        raise refuse(f"{what} must have its numbers in memory, got a tensor without")
    if not fits:
        raise refuse(f"{what} must hold finite numbers only")
    return numbers


# ---- the form of HookHandle.state_dict(), and the checks of a state before it is loaded ----------
#
# A state has tensors by kind and parameter name: each rank's own under ``"rank0"``, ``"rank1"`` and
# so on, and tensors that are equal on all ranks under ``"shared"``; also plain values.


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
#: that part. States name the error of a segment's sum by the older word "shard".
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
        segments: kinds of tensors for a part of the elements.
        shared: tensors that are equal on all ranks, by kind and parameter name.
        choices: by kind, the numbers that may have been chosen.
    """

    own: Set[str]
    segments: Set[str]
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
    check_common(state, "its ", load_error, by_name)
    folded = {kind for kind, into in FOLDED_INTO.items() if into in remembered.own}
    for kind in own:
        if kind not in remembered.own | remembered.segments | folded:
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
    """The entries of an unchecked part of a state: kind, name, value, and the parameter.

    Other kinds than ``wanted`` are left out.
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


def check_common(
    state: dict[Any, Any], which: str, refuse: Refuse, known: Collection[str] | None = None
) -> None:
    """Refuse a common part of another form.

    Args:
        state: a rank's state.
        which: prefix of the names of its entries in errors.
        refuse: makes an error from a text.
        known: the names of the model's parameters, if it is known.
    """
    for key, kind in (("buckets", list), ("shared", dict), ("choices", dict), ("steps", int)):
        if not isinstance(state.get(key), kind):
            got = shown(state.get(key))
            raise refuse(f"{which}{key} must be of type {kind.__name__}, got {got}")
    if type(state["steps"]) is not int or not 0 <= state["steps"] <= _MOST_STEPS:
        raise refuse(f"{which}steps must be a number of steps, got {shown(state['steps'])}")
    for names in state["buckets"]:
        got = "an empty list" if isinstance(names, list) else shown(names)
        for name in names if isinstance(names, list) else ():
            is_known = type(name) is str and (known is None or name in known)
            got = "" if is_known else f"{shown(name)} in one"
            if got:
                break
        if got:
            raise refuse(f"{which}buckets must be lists of the model's parameters, got {got}")


def check_by_kind(kinds: Any, what: str, wanted: type, refuse: Refuse) -> None:
    """Refuse a part of a state that is not values of one type, by kind and parameter name."""

    def check(is_right: bool, value: object, where: str) -> None:
        if not is_right:
            plural = {Tensor: "tensors", int: "numbers"}[wanted]
            raise refuse(
                f"{what} must be {plural} by kind and parameter, got {shown(value)}{where}"
            )

    check(isinstance(kinds, dict), kinds, "")
    for kind, values in kinds.items():
        check(type(kind) is str and isinstance(values, dict), values, f" for {shown(kind)}")
        for name, value in values.items():
            is_right = type(name) is str and isinstance(value, wanted)
            check(is_right, value, f" for {entry_name(kind, name)}")


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
    found = position if isinstance(position, dict) else {}
    done, is_open = found.get("done"), found.get("is_open")
    if not _is_count(done) or type(is_open) is not bool:
        got = f"done {shown(done)} and is_open {shown(is_open)}"
        if found is not position:
            got = shown(position)
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


# ---- stores a hook's memory of each parameter, independent of the parameter's bucket -------------


_T = TypeVar("_T")

#: The attributes that are tables by parameter and kind.
_TABLES = ("pieces", "shared", "loaded_segments", "choices")


class ParameterStore:
    """A hook's memory of a model's parameters, by parameter and kind.

    It keeps no parameter alive. Its tables are by parameter, then by kind.

    Attributes:
        pieces: a parameter's piece of its bucket's tensor; this rank's own.
        shared: a parameter's own tensor, equal on all ranks, or None.
        loaded_segments: loaded segments, before there are buckets: flat, one element for each of
            the parameter's.
        choices: the number that was chosen for the parameter's bucket.
        allowed_choices: by kind, the numbers that may be chosen for a bucket.
        deciding_choices: the kinds whose number decides on the hook's memory.
    """

    def __init__(self) -> None:
        self._names: MutableMapping[Tensor, str] = WeakIdKeyDictionary()
        self.pieces: MutableMapping[Tensor, dict[str, Tensor]] = WeakIdKeyDictionary()
        self.shared: MutableMapping[Tensor, dict[str, Tensor | None]] = WeakIdKeyDictionary()
        self.loaded_segments: MutableMapping[Tensor, dict[str, Tensor]] = WeakIdKeyDictionary()
        self.choices: MutableMapping[Tensor, dict[str, int]] = WeakIdKeyDictionary()
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
        for table in ("_names", *_TABLES):
            kept = WeakIdKeyDictionary()
            for parameter, value in getattr(self, table).items():
                kept[placeholders[id(parameter)]] = value
            setattr(self, table, kept)
        self._placeholders = list(placeholders.values())
        return placeholders

    def replace_parameter(self, before: Tensor, now: Tensor) -> None:
        """Let another tensor have a parameter's memory from now on."""
        for table in ("_names", *_TABLES):
            values = getattr(self, table)
            if before in values:
                values[now] = values.pop(before)

    # ---- pieces of buckets' tensors, this rank's own ---------------------------------------------

    def move_piece(self, parameter: Tensor, kind: str, piece: Tensor) -> None:
        """Let ``piece`` be the parameter's piece from now on, with the earlier contents."""
        pieces = self.pieces.setdefault(parameter, {})
        before = pieces.get(kind)
        if before is not None:
            write_saturated(piece, before)
        pieces[kind] = piece

    def add_lost(
        self, parameter: Tensor, kind: str, lost: Tensor, factor: int, *, begin: int = 0
    ) -> None:
        """Add a segment's errors of a parameter to the parameter's error memory, if there is one.

        Args:
            lost: the errors, flat, in a bucket's order.
            factor: the factor of ``lost``.
            begin: the parameter's element at which ``lost`` begins.
        """
        piece = self.pieces.get(parameter, {}).get(FOLDED_INTO[kind])
        if piece is not None:
            flat = BucketLayout([parameter])._permute([piece])[0].view(-1)
            add_to_error(flat[begin : begin + len(lost)], lost, factor)

    def rescale_errors(self, factor: float) -> None:
        """Multiply all errors, except those in segments."""
        for pieces in self.pieces.values():
            if ERROR in pieces:
                multiply_error(pieces[ERROR], factor)
        for loaded in self.loaded_segments.values():
            for segment in loaded.values():
                multiply_error(segment, factor)

    def add_loaded_segments_to_errors(self, parameters: Sequence[Tensor], world_size: int) -> None:
        """Add loaded segments to the parameters' errors, if the hook has no such segments."""
        for parameter in parameters:
            for kind, loaded in self.loaded_segments.pop(parameter, {}).items():
                factor = 1 if kind == "node_error" else world_size
                self.add_lost(parameter, kind, loaded, factor)

    # ---- state -----------------------------------------------------------------------------------

    def kinds_of_pieces(self) -> set[str]:
        """The kinds of pieces that parameters have."""
        return {kind for pieces in self.pieces.values() for kind in pieces}

    def by_name(self, table: Mapping[Tensor, Mapping[str, _T | None]]) -> dict[str, dict[str, _T]]:
        """A table's values without None, by kind and parameter name."""
        found: dict[str, dict[str, _T]] = {}
        for parameter, values in table.items():
            for kind, value in values.items():
                if value is not None:
                    found.setdefault(kind, {})[self._names[parameter]] = value
        return found

    def load_state(
        self,
        own: Mapping[str, Mapping[str, Tensor]],
        shared: Mapping[str, Mapping[str, Tensor]],
        choices: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Replace the memory by copies of a state's values, by kind and parameter name.

        Args:
            own: this rank's pieces and segments.
            shared: tensors that are equal on all ranks.
            choices: chosen numbers.
        """
        by_name = dict(self.named_parameters())
        for table in _TABLES:
            setattr(self, table, WeakIdKeyDictionary())
        for kind, numbers in choices.items():
            for name, number in numbers.items():
                self.choices.setdefault(by_name[name], {})[kind] = number
        for is_own, kinds in ((True, own), (False, shared)):
            for kind, tensors in kinds.items():
                own_table = self.loaded_segments if kind in FOLDED_INTO else self.pieces
                values: MutableMapping[Tensor, Any] = own_table if is_own else self.shared
                for name, tensor in tensors.items():
                    parameter, dtype = by_name[name], torch.float32 if is_own else tensor.dtype
                    copied = tensor.detach().to(parameter.device, dtype, copy=True)
                    values.setdefault(parameter, {})[kind] = copied


def multiply_error(error: Tensor, factor: float) -> None:
    """Multiply errors in place; they stay finite."""
    if factor != 1.0:
        most = torch.finfo(error.dtype).max
        error.mul_(min(factor, most)).clamp_(-most, most)


def add_to_error(error: Tensor, lost: Tensor, factor: int) -> None:
    """Add ``factor * lost`` to an error in place; an overflow becomes the largest number."""
    limits = torch.finfo(error.dtype)
    error.add_(lost, alpha=factor).clamp_(limits.min, limits.max)
