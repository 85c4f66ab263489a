"""Compares plain values of the ranks, which travel as bytes that run no code."""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_commhook.buckets.layout import gradient_dtype
from torch_commhook.collectives.gloo_groups import group_ranks, is_known
from torch_commhook.metrics import ThreadValue, setting

# ---- plain values as bytes -----------------------------------------------------------------------


#: Another rank's value may be this many times as long as this rank's, and this many bytes longer.
_TIMES, _MORE = 64, 1 << 30
# Globals that weights_only allows: they allocate as much as their arguments say, or copy them.
_ALLOCATES = re.compile(r"torch\..*(Tensor|Storage)|torch\._utils\._rebuild_(device|nested|q).*")
_COPIES = re.compile(
    r"builtins\.(bytearray|set)|collections\.(Counter|OrderedDict)|torch\.Size|_codecs\.encode"
)


def packed(value: Any) -> Tensor:
    """A value as flat bytes on the CPU: tensors and plain values, as ``state_dict()`` returns them.

    :func:`unpacked` returns tensors on the CPU, and NumPy scalars of dicts, lists and tuples as
    Python numbers.
    """
    file = io.BytesIO()
    torch.save(_plain(value, {}), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _plain(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return value.detach().cpu()
    if type(value) not in (dict, list, tuple):
        return value
    if id(value) not in made:
        made[id(value)] = value  # within itself it stays as it is
        if isinstance(value, dict):
            found: Any = {_plain(name, made): _plain(each, made) for name, each in value.items()}
        else:
            found = type(value)(_plain(each, made) for each in value)
        made[id(value)] = found
    return made[id(value)]


def unpacked(data: Tensor) -> Any:
    """The argument of :func:`packed`, from the bytes of any sender.

    Raises:
        ValueError: the bytes are damaged, or contain an object that is no tensor or plain value,
            and that ``torch.serialization.add_safe_globals`` has not allowed.
    """
    file = io.BytesIO(data.numpy().tobytes())
    try:
        check_saved(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the type depends on the place of the damage
        names = _refused_names(file) if isinstance(error, pickle.UnpicklingError) else ""
        if not names:
            reason = f": {error}" if isinstance(error, ValueError) else ""
            raise ValueError(
                f"torch_commhook: another rank has sent damaged bytes{reason}"
            ) from error
        raise ValueError(
            f"torch_commhook: a rank sends objects of {names}; ranks read only tensors and plain "
            "values from each other. Make them plain values, or allow them on all ranks: "
            "torch.serialization.add_safe_globals([...])"
        ) from None


def _refused_names(file: io.BytesIO) -> str:
    """The classes and functions that a file names and a rank does not load; "" if it is damaged."""
    file.seek(0)
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:  # as above
        return ""


def check_saved(file: IO[bytes]) -> None:
    """Refuse a file of ``torch.save`` that takes far more memory than its length.

    ``torch.load`` inflates compressed members, and lets a pickle call ``bytearray(n)``. This
    function reads only the pickle, not the tensors, and calls nothing that the pickle names.

    Raises:
        ValueError: the file takes far more memory.
        Exception: the file is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        sizes = {each.filename: each.file_size for each in members}
        is_compressed = any(each.compress_type != zipfile.ZIP_STORED for each in members)
        is_shared = len({name.lower() for name in sizes}) < len(members)  # torch.load ignores case
        if is_compressed or is_shared or sum(sizes.values()) > file.seek(0, io.SEEK_END):
            raise ValueError("its members are compressed, or longer than the file")
        folder = members[0].filename.partition("/")[0]
        content = archive.read(f"{folder}/data.pkl")
    left = 2 * len(content)  # a bytearray is copied twice

    def check(is_right: bool, *copied: Any) -> None:
        nonlocal left
        is_sized = all(type(each) in (str, bytes, list, tuple, dict) for each in copied)
        left -= sum(map(len, copied)) if is_sized else 0
        if not (is_right and is_sized and left >= 0):
            raise _RefusedPickleError(
                "its pickle asks for quantized or nested tensors, or for more memory than the file "
                "has"
            )

    def storage(saved: Any) -> None:
        check(type(saved[2]) is str and f"{folder}/data/{saved[2]}" in sizes)

    def call(unpickler: Any) -> None:
        arguments, name = unpickler.stack.pop(), unpickler.stack.pop()
        if name == "torch._tensor._rebuild_from_type_v2":  # it calls its first argument
            name, _, arguments, _ = arguments
        copied = arguments if _COPIES.fullmatch(name) else ()
        is_plain = name != "_codecs.encode" or arguments[1] == "latin1"
        check(is_plain and not _ALLOCATES.fullmatch(name), *copied)
        unpickler.stack.append(copied[0] if copied else _Made(name))

    def build(unpickler: Any) -> None:
        state, built = unpickler.stack.pop(), unpickler.stack[-1]
        name = built.name if isinstance(built, _Made) else "torch._"
        is_copied = name.startswith("collections.")
        check(not name.startswith(("torch._", "torch.nn.parameter.")), *[state][:is_copied])

    unpickler: Any = pickle._Unpickler(io.BytesIO(content), encoding="utf-8")
    calls = {pickle.REDUCE[0]: call, pickle.NEWOBJ[0]: call, pickle.BUILD[0]: build}
    unpickler.dispatch = {**unpickler.dispatch, **calls}
    del unpickler.dispatch[pickle.BYTEARRAY8[0]]  # it allocates before it reads
    unpickler.find_class = lambda module, name: f"{IMPORT_MAPPING.get(module, module)}.{name}"
    unpickler.persistent_load = storage
    try:
        unpickler.load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # the type depends on the place of the damage
        raise pickle.UnpicklingError("the pickle is damaged") from error


class _RefusedPickleError(pickle.UnpicklingError, ValueError):
    """A pickle that takes far more memory than its length."""


class _Made(list[Any]):
    """An object that a pickle makes by a call.

    Args:
        name: the name of its class or function.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""


def check_length(length: int, own: int) -> None:
    """Refuse an impossible length of another rank's message, before memory is allocated for it.

    Raises a ValueError if the length is negative, or far above ``own``: the length of a message or
    of parameters that this rank knows. Both are in bytes.
    """
    most = _TIMES * own + _MORE
    if not 0 <= length <= most:
        raise ValueError(
            f"torch_commhook: another rank announces a message of {length} bytes; it must have "
            f"from 0 to {most}"
        )


def gather_values(
    value: Any, group: dist.ProcessGroup | None = None, *, only_first: bool = False
) -> list[Any] | None:
    """Gather a plain value of each rank. All ranks of the group must call this.

    Args:
        value: tensors and plain values. Tensors arrive on the CPU.
        group: the group of the ranks; None means the default group.

    Returns:
        The values in rank order; with ``only_first``, None on all ranks but the first.

    Raises:
        ValueError: as :func:`unpacked` and :func:`check_length`.
    """
    group = distributed_c10d._group_or_default_group(group)
    device, size = distributed_c10d._get_object_coll_device(group), group.size()
    data = packed(value)
    own = data.numel()
    lengths = list(torch.zeros(size, dtype=torch.int64, device=device).split(1))
    dist.all_gather(lengths, torch.tensor([own], dtype=torch.int64, device=device), group=group)
    every = [int(length) for length in lengths]
    for length in every:
        check_length(length, max(0, min(every)))  # all ranks refuse alike
    most = max(every)
    sent = torch.zeros(most, dtype=torch.uint8, device=device)
    sent[:own] = data
    received = None
    if not only_first or group.rank() == 0:
        received = list(torch.empty(size * most, dtype=torch.uint8, device=device).split(most))
    if not only_first:
        dist.all_gather(received, sent, group=group)
    else:
        dist.gather(sent, received, group=group, group_dst=0)
    if received is None:
        return None
    return [unpacked(got[:length].cpu()) for got, length in zip(received, every, strict=True)]


# ---- compares what ranks attach ------------------------------------------------------------------


_of_step: ThreadValue[dist.ProcessGroup] = ThreadValue()

#: Whether all ranks have the same bytes. All of them call it at the same point.
AllAlike = Callable[[bytes], bool]


def agree(
    group: dist.ProcessGroup,
    what: str,
    error: Exception | None,
    settings: dict[str, object],
    all_alike: AllAlike | None = None,
) -> None:
    """Raise on all ranks if one fails or settings differ. All ranks of the group must call this.

    Args:
        group: the group of the ranks. Does nothing for one that ``torch.distributed`` does not
            know: it may support little.
        what: the subject of errors.
        error: this rank's error, or None.
        settings: names and values that must be the same. Any if this rank has an error.
        all_alike: called first, with :func:`digest_of` both. None to send everything at once.

    Raises:
        Exception: ``error``.
        RuntimeError: another rank failed, or settings differ. The message names ranks and values.
    """
    if can_agree(group):
        if all_alike is None or not all_alike(digest_of(error, settings)):
            every: list[Any] = gather_values((_text(error), settings), group) or []
            if error is None:
                _check_same(what, dist.get_process_group_ranks(group), every)
    if error is not None:
        raise error


def can_agree(group: dist.ProcessGroup) -> bool:
    """Whether :func:`agree` asks other ranks."""
    return group.size() > 1 and is_known(group)


def _check_same(
    what: str, ranks: Sequence[int], every: Sequence[tuple[str | None, dict[str, object]]]
) -> None:
    """Refuse errors of other ranks, and settings that differ."""
    for rank, (failed, _) in zip(ranks, every, strict=True):
        if failed is not None:
            raise RuntimeError(f"{what}: it failed on rank {rank}: {failed}")
    first = every[0][1]
    for rank, (_, others) in zip(ranks, every, strict=True):
        for name, value in first.items():
            if others.get(name) != value:
                own, other = _first_difference(value, others.get(name))
                raise RuntimeError(
                    f"{what}: {name} must be the same on all ranks: rank {ranks[0]} has {own}, "
                    f"rank {rank} has {other}"
                )


def agree_across(
    groups: Sequence[dist.ProcessGroup],
    what: str,
    error: Exception | None,
    settings: dict[str, object],
    some: dict[str, object] | None = None,
) -> None:
    """Raise on all ranks of a mesh if one fails or settings differ; as :func:`agree`.

    Args:
        groups: this rank's groups along the mesh's dimensions.
        what, error, settings: as for :func:`agree`.
        some: names and values that must be the same on the ranks that have these names.

    Raises:
        Exception: ``error``.
        RuntimeError: another rank failed, or settings differ. The message says which.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = gather_along(groups, (rank, _text(error), settings, some or {}))
    if error is not None:
        raise error
    first: dict[str, tuple[int, object]] = {}  # values that only some ranks have
    for rank, other, other_settings, others_own in found:
        if other is not None:
            raise RuntimeError(f"{what}: it failed on rank {rank}: {other}")
        for name, value in settings.items():
            if other_settings.get(name) != value:
                own, others = _first_difference(value, other_settings.get(name))
                raise RuntimeError(
                    f"{what}: {name} must be the same on all ranks: this one has {own}, "
                    f"rank {rank} has {others}"
                )
        for name, value in others_own.items():
            before, known = first.setdefault(name, (rank, value))
            if known != value:
                raise RuntimeError(
                    f"{what}: {name} must be the same on all of its ranks: rank {before} has "
                    f"{known}, rank {rank} has {value}"
                )


def gather(group: dist.ProcessGroup, value: object) -> list[Any] | None:
    """Gather a plain value of each rank of a group, as :func:`gather_values`, in rank order.

    Returns None for a group that ``torch.distributed`` does not know.
    """
    if not is_known(group):
        return None
    return gather_values(value, group)


def gather_in_step(group: dist.ProcessGroup, value: object) -> list[Any] | None:
    """Gather as :func:`gather`, but fail at once if the step of an attached hook fails.

    A failed rank closes the step's own group. Over ``group`` the others would wait until its
    timeout. So the step's group is used if it has the same ranks.
    """
    of_step = _of_step.value
    if of_step is not None and group_ranks(of_step) == group_ranks(group) is not None:
        group = of_step
    return gather(group, value)


def gathering_through(group: dist.ProcessGroup) -> setting[dist.ProcessGroup]:
    """Let :func:`gather_in_step` use a step's own group, on this thread inside the block."""
    return setting(_of_step, group)


def gather_along(groups: Sequence[dist.ProcessGroup], value: object) -> list[Any]:
    """Gather a value of each rank of a mesh. All of them must call this.

    Args:
        groups: this rank's groups along the mesh's dimensions.

    Returns:
        The values in the same order on all ranks; only this rank's if ``torch.distributed`` knows
        none of the groups.
    """
    found: list[Any] = [value]
    for group in groups:
        every = gather(group, found)
        if every is not None:
            found = [each for values in every for each in values]
    return found


def _first_difference(own: object, other: object) -> tuple[object, object]:
    """Two different values; for lists, the first entries that differ."""
    if not (isinstance(own, list) and isinstance(other, list)):
        return own, other
    for number, (mine, theirs) in enumerate(zip(own, other, strict=False)):
        if mine != theirs:
            return f"{mine} in place {number}", theirs
    return f"{len(own)} of them", len(other)


def _text(error: Exception | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def digest_of(error: Exception | None, settings: dict[str, object]) -> bytes:
    """The digest that :func:`agree` compares first: 32 bytes.

    Settings have the same order on all ranks.
    """
    return hashlib.sha256(repr((_text(error), settings)).encode()).digest()


def described(parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Each parameter's name, shape and dtype, and its gradient's dtype if that is another one."""
    found = []
    for name, parameter in parameters:
        text = f"'{name}' of shape {tuple(parameter.shape)} and {parameter.dtype}"
        dtype = gradient_dtype(parameter)
        found.append(text if dtype == parameter.dtype else f"{text} with gradients of {dtype}")
    return found
