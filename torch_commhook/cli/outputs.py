"""What a run writes and where, and whether that will work, which is asked before it starts."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

METRICS = "metrics.jsonl"
#: Of the second run of ``--compare``.
PLAIN_METRICS = "metrics-none.jsonl"
SUMMARY = "summary.json"
PLOT = "loss.png"


class OutputError(ValueError):
    """A place that can't be written, in one sentence."""


def checkpoint_path(save: Path, step: int) -> Path:
    """The file of ``--save``, where ``{step}`` stands for the step."""
    return Path(str(save).replace("{step}", str(step)))


def check_checkpoint(path: Path) -> None:
    """Raise OutputError unless a file can be put at ``path``. Leaves nothing behind."""
    _check_regular(path)
    _check_folder(path.parent)


def check_results(folder: Path) -> None:
    """Raise OutputError unless the results can be written in ``folder``. Leaves nothing behind."""
    _check_folder(folder)
    for name in (METRICS, PLAIN_METRICS, SUMMARY, PLOT):
        path = folder / name
        _check_regular(path)
        if path.exists() and not os.access(path, os.W_OK):
            raise OutputError(f"{path} can't be written: Permission denied")


def _check_regular(path: Path) -> None:
    """Raise OutputError where something is at ``path`` that is no regular file."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # the check of the folder tells about those
        return
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise OutputError(f"{path} is a directory")
    if not stat.S_ISREG(mode):
        raise OutputError(f"{path} is not a regular file")


def _check_folder(folder: Path) -> None:
    """Raise OutputError unless ``folder``, or what of its path is there, takes new files."""
    present = folder
    while not os.path.lexists(present):
        present = present.parent
    if not present.is_dir():
        raise OutputError(f"{present} is not a directory")
    try:
        tempfile.TemporaryFile(dir=present).close()
    except OSError as error:
        raise OutputError(f"{present} takes no new files: {error.strerror}") from error
