"""The files that a run writes: their names, and the log of steps."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# ---- names the files that a run writes, and checks before the run that it can write them ---------


METRICS = "metrics.jsonl"
#: The steps of the run of ``--compare`` without a hook.
PLAIN_METRICS = "metrics-none.jsonl"
SUMMARY = "summary.json"
PLOT = "loss.png"
#: The folder of ``--log tensorboard``.
EVENTS = "tensorboard"
PICTURE_SUFFIX = ".png"
MATPLOTLIB_IS_MISSING = "matplotlib is missing (pip install torch-commhook[train])"
_STEP = "{step}"


def metrics_name(number: int, *, is_plain: bool) -> str:
    """The name of the file for the steps of a run. Run 0 has the hook of ``--hook``."""
    if number == 0:
        return METRICS
    return PLAIN_METRICS if is_plain else f"metrics-{number + 1}.jsonl"


class OutputError(ValueError):
    """A file can't be written. The message is one sentence that names it."""


def checkpoint_path(save: Path, step: int) -> Path:
    """The path of a checkpoint: ``save`` with the step in the place of ``{step}``."""
    return Path(str(save).replace(_STEP, str(step)))


def log_name(rank: int) -> str:
    """The name of the file for a rank's stderr."""
    return f"rank{rank}.log"


def check_file(path: Path) -> None:
    """Raise OutputError unless a file can be written to ``path``. Leaves no file."""
    _check_regular(path)
    _check_folder(path.parent)


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


def check_picture(path: Path) -> None:
    """Raise OutputError unless a picture can be drawn and written to ``path``."""
    if path.suffix.lower() != PICTURE_SUFFIX:
        raise OutputError(f"{path} must end in {PICTURE_SUFFIX}: the picture is a PNG")
    check_file(path)
    if not is_installed("matplotlib"):
        raise OutputError(MATPLOTLIB_IS_MISSING)


def check_results(folder: Path, names: Sequence[str], folders: Sequence[str] = ()) -> None:
    """Raise OutputError unless the results can be written to ``folder``. Leaves no file.

    They are files of these ``names``, and new files in ``folders`` within ``folder``.
    """
    _check_folder(folder)
    for name in folders:
        _check_folder(folder / name)
    for name in names:
        path = folder / name
        _check_regular(path)
        if path.exists() and not os.access(path, os.W_OK):
            raise OutputError(f"{path} can't be written: Permission denied")


def check_apart(save: Path, last_step: int, folder: Path, names: Sequence[str], ranks: int) -> None:
    """Raise OutputError if a checkpoint has the path of another file of the run, or is its folder.

    An interrupt may save any step up to the last one. ``folder`` gets files of these ``names``, and
    may get a log of each rank.
    """
    results = {
        _real(folder / name): folder / name
        for name in (*names, *(log_name(rank) for rank in range(ranks)))
    }
    # There may be too many steps to try each one. So this finds the steps that match a result.
    pattern = re.compile(re.escape(str(_real(save))).replace(re.escape(_STEP), "([0-9]+)"))
    steps = {last_step}
    for place in {place for real in results for place in (real, *real.parents)}:
        match = pattern.fullmatch(str(place))
        if match:
            steps.update(int(digits) for digits in match.groups())
    for step in sorted(each for each in steps if 0 < each <= last_step):
        path = checkpoint_path(save, step)
        checkpoint = _real(path)
        for real, result in results.items():
            if checkpoint == real or checkpoint in real.parents or real in checkpoint.parents:
                raise OutputError(f"{path} collides with {result}, which the run itself writes")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _check_regular(path: Path) -> None:
    """Raise OutputError if ``path`` exists and is no regular file."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # _check_folder reports these
        return
    except OSError as error:
        raise OutputError(f"{path} can't be written: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise OutputError(f"{path} is a directory")
    if not stat.S_ISREG(mode):
        raise OutputError(f"{path} is not a regular file")


def _check_folder(folder: Path) -> None:
    """Raise OutputError unless new files fit into ``folder``, or its nearest existing parent."""
    present = folder
    while not os.path.lexists(present):
        present = present.parent
    if not present.is_dir():
        raise OutputError(f"{present} is not a directory")
    try:
        tempfile.TemporaryFile(dir=present).close()
    except OSError as error:
        # Linux raises ENOENT if a file system takes no files at all, such as /proc.
        why = "" if error.errno == errno.ENOENT else f": {error.strerror}"
        raise OutputError(f"{present} takes no new files{why}") from error


# ---- writes the numbers of each step to the logs of --log, in addition to metrics.jsonl ----------


#: The values of ``--log``: ``jsonl``, and packages.
LOGS = ("jsonl", "tensorboard", "wandb")
#: The project of runs on Weights & Biases.
PROJECT = "torch-commhook"
#: Takes the numbers of a step by name, and ends: writes the remaining numbers.
StepLog = tuple[Callable[[int, Mapping[str, float]], object], Callable[[], object]]


def open_logs(
    logs: Sequence[str], out: Path, run: str, hook: str, config: Mapping[str, Any], first_step: int
) -> list[StepLog]:
    """Open the logs of a run, except ``jsonl``: the run always writes ``metrics.jsonl``.

    ``out`` is the folder of the results, ``run`` a name that is different for each hook, and
    ``first_step`` the number of steps before the run.
    """
    found: list[StepLog] = []
    if "tensorboard" in logs:
        found.append(_tensorboard_log(out / EVENTS / run, hook, first_step))
    if "wandb" in logs:
        import wandb

        # The runs to compare are in one group.
        names = {"project": PROJECT, "name": hook, "group": str(out), "job_type": run}
        started = wandb.init(**names, dir=str(out), config=dict(config))
        log = (lambda step, values: started.log(dict(values), step=step), started.finish)
        found.append(log)
    return found


def _tensorboard_log(folder: Path, hook: str, first_step: int) -> StepLog:
    """Write event files to a folder for each run."""
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run continues in the folder of the earlier run, and replaces repeated steps.
    writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
    writer.add_text("hook", hook)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"train/{name}", value, step)

    return log, writer.close
