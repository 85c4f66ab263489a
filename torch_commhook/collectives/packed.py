"""Plain values as bytes, and their exchange among ranks. Reading them runs no code of a peer."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

#: Another rank's value may be this many times as long as this rank's, and this many bytes longer.
_TIMES, _MORE = 64, 1 << 30
# Globals that weights_only allows: they allocate as much as their arguments say, or copy them.
_ALLOCATES = re.compile(r"torch\..*(Tensor|Storage)|torch\._utils\._rebuild_(device|nested|q).*")
_COPIES = re.compile(
    r"builtins\.(bytearray|set)|collections\.(Counter|OrderedDict)|torch\.Size|_codecs\.encode"
)


def packed(value: Any) -> Tensor:
    """A value as flat bytes, on the CPU.

    Args:
        value: tensors and plain values, as ``state_dict()`` returns them. :func:`unpacked` returns
            tensors on the CPU, and NumPy scalars of dicts, lists and tuples as Python numbers.
    """
    file = io.BytesIO()
    torch.save(_plain(value, {}), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _plain(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, np.generic):
        return value.item()
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

    Args:
        length: the length, in bytes.
        own: the length of a message or of parameters that this rank knows, in bytes.

    Raises:
        ValueError: the length is negative, or far above ``own``.
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
        only_first: whether only the first rank gets the values.

    Returns:
        The values in rank order; None on the other ranks with ``only_first``.

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
