"""The text to train on: reads files, holds out a part, and draws each rank's batches."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launching process checks the files without torch
    from torch import Tensor

#: Directories of the standard library without text to train on: tests are long tables of data.
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
#: One chunk of this size in every _HELD_OUT_EVERY is held out for evaluation.
_CHUNK_BYTES = 16 * 1024
_HELD_OUT_EVERY = 20
_HELD_OUT_WINDOWS = 64


class DataError(ValueError):
    """The text can't be trained on. The message is one sentence."""


@dataclass(frozen=True)
class TextData:
    """Text as bytes.

    Attributes:
        train: uint8 ``[n]``.
        held_out: uint8 ``[m]``, disjoint from ``train``; empty if the text is short.
        fingerprint: 16 hexadecimal digits of a SHA-256 over all bytes.
    """

    train: Tensor
    held_out: Tensor
    fingerprint: str

    def __len__(self) -> int:
        return self.train.numel() + self.held_out.numel()


def standard_library_files() -> list[Path]:
    """The ``.py`` files of Python's standard library without its tests, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_DIRECTORIES)
        found.extend(Path(folder) / name for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def read_bytes(files: Sequence[str | Path], cap_bytes: int | None = None) -> bytes:
    """The concatenated bytes of ``files``, at most ``cap_bytes``.

    Raises:
        DataError: a file is missing, can't be read, or is no regular file. Only one rank could read
            a pipe, and only once.
    """
    parts: list[bytes] = []
    left = cap_bytes
    for file in files:
        if left is not None and left <= 0:
            break
        try:
            status = os.stat(file)  # before open(), which may wait for the writer of a pipe
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise DataError(f"{file} can't be read: it is not a regular file")
            with open(file, "rb") as stream:
                # read(n) allocates n bytes, even for a shorter file.
                capped = left is not None and left < status.st_size
                part = stream.read(left if capped else None)[:left]
        except OSError as error:
            raise DataError(f"{file} can't be read: {error.strerror or error}") from error
        parts.append(part)
        if left is not None:
            left -= len(part)
    return b"".join(parts)


def read_text(files: Sequence[str] | None, cap_bytes: int | None, seq: int) -> bytes:
    """The concatenated bytes of ``files``, or of the standard library for None.

    Args:
        files: paths.
        cap_bytes: the most bytes to return; None for all.
        seq: the length of a sequence. The text must have more bytes.

    Raises:
        DataError: there is no file, a file can't be read, or the text is too short.
    """
    chosen: Sequence[str | Path] = standard_library_files() if files is None else files
    what = "the standard library" if files is None else "the data"
    text = read_bytes(chosen, cap_bytes)
    if not text:
        hint = " (this Python has no sources: give files)" if files is None else ""
        raise DataError(f"{what} is empty{hint}")
    if len(text) <= seq:
        raise DataError(f"{what} must be longer than a sequence ({seq} bytes), got {len(text)}")
    return text


def split_text(text: bytes, seq: int) -> TextData:
    """Convert ``text`` to tensors, and hold out one chunk of 16 KiB in every 20.

    A text of fewer than 20 chunks has no held-out part, and neither has any text if a sequence of
    ``seq`` bytes does not fit into a chunk.
    """
    import torch

    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    fingerprint = hashlib.sha256(text).hexdigest()[:16]
    chunks = data.split(_CHUNK_BYTES)
    if len(chunks) < _HELD_OUT_EVERY or seq >= _CHUNK_BYTES:
        return TextData(data, data[:0], fingerprint)
    middle = _HELD_OUT_EVERY // 2
    held_out = [chunk for i, chunk in enumerate(chunks) if i % _HELD_OUT_EVERY == middle]
    train = [chunk for i, chunk in enumerate(chunks) if i % _HELD_OUT_EVERY != middle]
    return TextData(torch.cat(train), torch.cat(held_out), fingerprint)


def training_batch(
    data: TextData, *, seed: int, step: int, rank: int, batch: int, seq: int
) -> Tensor:
    """The batch of one rank at one step. It depends only on the arguments.

    Returns:
        int64 ``[batch, seq + 1]`` on the CPU: random windows of ``data.train``.
    """
    import torch

    # The hash gives neighbouring steps and ranks unrelated seeds.
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    starts = torch.randint(
        data.train.numel() - seq, (batch,), generator=generator, dtype=torch.int64, device="cpu"
    )
    return _windows(data.train, starts, seq)


def held_out_windows(data: TextData, *, rank: int, world_size: int, seq: int) -> Tensor:
    """This rank's share of the windows for evaluation, at equal distances in the held-out text.

    Returns:
        int64 ``[count, seq + 1]``. The counts of two ranks differ by one at most. They are 0 if no
        text is held out.
    """
    import torch

    last_start = data.held_out.numel() - seq - 1
    if last_start < 0:
        return torch.empty(0, seq + 1, dtype=torch.int64, device="cpu")
    starts = torch.linspace(0, last_start, _HELD_OUT_WINDOWS, dtype=torch.float64, device="cpu")
    starts = starts.long().unique()
    return _windows(data.held_out, starts[rank::world_size], seq)


def _windows(text: Tensor, starts: Tensor, seq: int) -> Tensor:
    import torch

    return text[starts[:, None] + torch.arange(seq + 1, dtype=torch.int64, device="cpu")].long()
