"""What a run writes and where, and whether that will work, which is asked before it starts."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

METRICS = "metrics.jsonl"
#: Of the run of ``--compare`` without a hook.
PLAIN_METRICS = "metrics-none.jsonl"
SUMMARY = "summary.json"
PLOT = "loss.png"
#: The folder of ``--log tensorboard``.
EVENTS = "tensorboard"
MATPLOTLIB_IS_MISSING = "matplotlib is missing (pip install torch-commhook[train])"
_STEP = "{step}"


def metrics_name(number: int, *, is_plain: bool) -> str:
    """The file of a run's steps.

    Args:
        number: of the run, from 0; 0 is that of ``--hook``.
        is_plain: whether it has no hook.
    """
    if number == 0:
        return METRICS
    return PLAIN_METRICS if is_plain else f"metrics-{number + 1}.jsonl"


class OutputError(ValueError):
    """A place that can't be written, in one sentence."""


def checkpoint_path(save: Path, step: int) -> Path:
    """The file of ``--save``, where ``{step}`` stands for the step."""
    return Path(str(save).replace(_STEP, str(step)))


def log_name(rank: int) -> str:
    """The file of what a rank wrote to stderr."""
    return f"rank{rank}.log"


def check_checkpoint(path: Path) -> None:
    """Raise OutputError unless a file can be put at ``path``. Leaves nothing behind."""
    _check_regular(path)
    _check_folder(path.parent)


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_picture(path: Path) -> None:
    """Raise OutputError unless a picture can be drawn and put at ``path``."""
    if not has_matplotlib():
        raise OutputError(MATPLOTLIB_IS_MISSING)
    check_checkpoint(path)


def check_results(folder: Path, names: Sequence[str], folders: Sequence[str] = ()) -> None:
    """Raise OutputError unless the results can be written. Leaves nothing behind.

    Args:
        folder: of the results.
        names: of files in it.
        folders: in it that take files.
    """
    _check_folder(folder)
    for name in folders:
        _check_folder(folder / name)
    for name in names:
        path = folder / name
        _check_regular(path)
        if path.exists() and not os.access(path, os.W_OK):
            raise OutputError(f"{path} can't be written: Permission denied")


def check_apart(
    save: Path,
    last_step: int,
    saves_at: Callable[[int], bool],
    folder: Path,
    names: Sequence[str],
    ranks: int,
) -> None:
    """Raise OutputError where a checkpoint would be in the place of what the run writes itself.

    Args:
        save: the path of ``--save``.
        last_step: of the run, which is saved.
        saves_at: whether a step is saved.
        folder: of the results.
        names: of these.
        ranks: the run's, each of which may leave a log in ``folder``.
    """
    results = {
        _real(folder / name): folder / name
        for name in (*names, *(log_name(rank) for rank in range(ranks)))
    }
    # The steps may be too many to try each: only those that fit the names of the results.
    pattern = re.compile(re.escape(str(_real(save))).replace(re.escape(_STEP), "([0-9]+)"))
    steps = {last_step}
    for place in {place for real in results for place in (real, *real.parents)}:
        match = pattern.fullmatch(str(place))
        if match:
            steps.update(int(digits) for digits in match.groups())
    for step in sorted(step for step in steps if saves_at(step)):
        path = checkpoint_path(save, step)
        checkpoint = _real(path)
        for real, result in results.items():
            if checkpoint == real or checkpoint in real.parents or real in checkpoint.parents:
                raise OutputError(f"{path} collides with {result}, which the run itself writes")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


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
