"""The files that a run writes: their names, the log of steps, and checkpoints."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import re
import stat
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_commhook.collectives.agreement import check_saved

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
    """The name of the file for the steps of a run.

    Args:
        number: the number of the run. Run 0 has the hook of ``--hook``.
        is_plain: whether the run has no hook.
    """
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


def has_matplotlib() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_picture(path: Path) -> None:
    """Raise OutputError unless a picture can be drawn and written to ``path``."""
    if path.suffix.lower() != PICTURE_SUFFIX:
        raise OutputError(f"{path} must end in {PICTURE_SUFFIX}: the picture is a PNG")
    check_file(path)
    if not has_matplotlib():
        raise OutputError(MATPLOTLIB_IS_MISSING)


def check_results(folder: Path, names: Sequence[str], folders: Sequence[str] = ()) -> None:
    """Raise OutputError unless the results can be written. Leaves no file.

    Args:
        folder: the folder of the results.
        names: the files in this folder.
        folders: folders in this folder that take new files.
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
    """Raise OutputError if a checkpoint has the path of another file of the run, or is its folder.

    Args:
        save: the path of ``--save``.
        last_step: the last step of the run, which is saved.
        saves_at: whether a step is saved.
        folder: the folder of the results.
        names: the files of the results.
        ranks: the number of ranks. Each of them may write a log to ``folder``.
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
    for step in sorted(step for step in steps if saves_at(step)):
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


#: Value of ``--log``: the package that it needs, or None.
LOGS: Mapping[str, str | None] = {"jsonl": None, "tensorboard": "tensorboard", "wandb": "wandb"}
#: The project of runs on Weights & Biases.
PROJECT = "torch-commhook"


class LogError(ValueError):
    """A log can't be written. The message is one sentence."""


class StepLog(Protocol):
    """Takes the numbers of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step, by name."""

    def close(self) -> None:
        """Write the remaining numbers."""


def check_logs(logs: Sequence[str]) -> None:
    """Raise LogError if a log needs a package that is not installed."""
    for name in logs:
        package = LOGS[name]
        if package is not None and not _is_installed(package):
            raise LogError(f"{name} needs the package {package}: pip install {package}")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def open_logs(
    logs: Sequence[str], out: Path, run: str, hook: str, config: Mapping[str, Any], first_step: int
) -> list[StepLog]:
    """Open the logs of a run, except ``jsonl``: the run always writes ``metrics.jsonl``.

    Args:
        logs: names of logs, as for ``--log``.
        out: the folder of the results.
        run: the name of the run, different for each hook.
        hook: the hook as text.
        config: the settings of the run.
        first_step: the number of steps before the run.
    """
    open_log: dict[str, Callable[[], StepLog]] = {
        "tensorboard": lambda: _TensorBoardLog(out / EVENTS / run, hook, first_step),
        "wandb": lambda: _WandbLog(out, run, hook, config),
    }
    return [open_log[name]() for name in logs if name in open_log]


class _TensorBoardLog:
    """Writes event files to a folder for each run."""

    def __init__(self, folder: Path, hook: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run continues in the folder of the earlier run, and replaces repeated steps.
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        self._writer.add_text("hook", hook)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _WandbLog:
    """Writes a run to Weights & Biases, in one group with the runs to compare it with."""

    def __init__(self, out: Path, run: str, hook: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=PROJECT,
            dir=str(out),
            name=hook,
            group=str(out),
            job_type=run,
            config=dict(config),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# ---- writes and reads checkpoints of train -------------------------------------------------------
#
# A checkpoint is one file. It is written atomically, and read with ``weights_only``.


_FORMAT = "torch_commhook.train"
_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint can't be read or loaded. The message is one sentence."""


@dataclass(frozen=True)
class Checkpoint:
    """The state that a resumed run continues from.

    Attributes:
        config: the configuration as plain values.
        step: the number of steps done.
        model: parameter name to tensor; the tensor is whole even if the parameter is sharded.
        optimizer: the optimizer's ``state_dict()`` for whole parameters.
        rank_states: for each rank ``{"hook": the hook's state or None, "rng": uint8 tensor}``. With
            a hook that keeps ranks apart, it also has ``"optimizer"``, the state of the rank's
            optimizer, and ``model`` and ``optimizer`` are those of rank 0.
        data_fingerprint: the fingerprint of the text.
        bytes_sent: bytes that rank 0 has sent for gradients; None if the hook does not tell.
        seconds: the time of the steps.
        bytes_scattered: bytes that rank 0 has sent in reduce-scatters within its replica.
        bytes_gathered: bytes that rank 0 has sent to gather parameters.
    """

    config: dict[str, Any]
    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    rank_states: list[dict[str, Any]]
    data_fingerprint: str
    bytes_sent: int | None
    seconds: float
    bytes_scattered: int = 0
    bytes_gathered: int = 0

    @property
    def has_hook_state(self) -> bool:
        """Whether the hook has a state on any rank."""
        return any(bool(state.get("hook")) for state in self.rank_states)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` atomically: ``path`` has the old file or the whole new one.

    Raises:
        OSError: the file can't be written; ``path`` still has the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is fixed, so that the next run overwrites the remains of a killed one.
    temporary = path.with_name(f".{path.name}.part")
    content = {"format": _FORMAT, "version": _VERSION, **vars(checkpoint)}
    try:
        with open(temporary, "wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())  # the rename must not reach the disk before the content
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch.save's own error only hides it
        raise


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a file of :func:`write_checkpoint`, with all tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or no checkpoint of ``train``.
    """
    content = _load(path)
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of commhook train")
    version = content.get("version")
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {version}, this is for {_VERSION}"
        )
    known = fields(Checkpoint)
    missing = [each.name for each in known if each.name not in content and each.default is MISSING]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    checkpoint = Checkpoint(**{e.name: content[e.name] for e in known if e.name in content})
    wrong = [name for name, is_right in _right_fields(checkpoint).items() if not is_right]
    if wrong:
        raise CheckpointError(f"{path} is damaged: its {', '.join(wrong)} can't be read")
    return checkpoint


def _load(path: Path) -> Any:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe may wait for ever
            raise CheckpointError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            check_saved(file)
        with zipfile.ZipFile(path) as archive:  # torch.load doesn't compare the checksums
            if archive.testzip() is not None:
                raise zipfile.BadZipFile
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damage raises an error of one line
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except PermissionError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except Exception as error:  # the type depends on the place of the damage
        reason = f": {error}" if isinstance(error, ValueError) else ""
        raise CheckpointError(
            f"{path} is not a whole checkpoint of commhook train{reason}"
        ) from error


def _right_fields(checkpoint: Checkpoint) -> dict[str, bool]:
    """Whether each field has the form that :class:`Checkpoint` describes."""
    model, optimizer, ranks = checkpoint.model, checkpoint.optimizer, checkpoint.rank_states
    return {
        "config": isinstance(checkpoint.config, Mapping),
        "step": _is_count(checkpoint.step),
        "model": isinstance(model, Mapping)
        and all(isinstance(name, str) and isinstance(model[name], Tensor) for name in model),
        "optimizer": isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping),
        "rank_states": isinstance(ranks, list) and all(_is_rank_state(state) for state in ranks),
        "data_fingerprint": isinstance(checkpoint.data_fingerprint, str),
        "bytes_sent": checkpoint.bytes_sent is None or _is_count(checkpoint.bytes_sent),
        "bytes_scattered": _is_count(checkpoint.bytes_scattered),
        "bytes_gathered": _is_count(checkpoint.bytes_gathered),
        "seconds": isinstance(checkpoint.seconds, float) and 0 <= checkpoint.seconds < math.inf,
    }


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_rank_state(state: object) -> bool:
    if not isinstance(state, Mapping) or not {"hook", "rng"} <= set(state):
        return False
    if state["hook"] is not None and not isinstance(state["hook"], Mapping):
        return False
    if not isinstance(state.get("optimizer", {}), Mapping):
        return False
    try:
        torch.Generator("cpu").set_state(state["rng"])
    except (RuntimeError, TypeError):
        return False
    return True


def check_fits(
    checkpoint: Checkpoint, model: nn.Module, groups: Sequence[Sequence[Tensor]]
) -> None:
    """Check that a model and its AdamW can load the tensors of ``checkpoint``.

    Args:
        checkpoint: the checkpoint.
        model: the model.
        groups: the optimizer's groups of parameters of ``model``.

    Raises:
        CheckpointError: a tensor is missing, superfluous, or of another shape or dtype.
    """
    _check_tensors("model", model.state_dict(), checkpoint.model)
    parameters = [parameter for group in groups for parameter in group]
    own = [state["optimizer"] for state in checkpoint.rank_states if "optimizer" in state]
    for states in (checkpoint.optimizer["state"], *own):
        _check_optimizer(states, parameters)


def _check_optimizer(states: Mapping[int, Any], parameters: Sequence[Tensor]) -> None:
    if set(states) != set(range(len(parameters))):
        raise CheckpointError(
            f"its optimizer must have the state of {len(parameters)} parameters, got {len(states)}"
        )
    step = torch.zeros((), dtype=torch.float32, device="cpu")
    for index, parameter in enumerate(parameters):
        expected = {"step": step, "exp_avg": parameter, "exp_avg_sq": parameter}
        if not isinstance(states[index], Mapping):
            raise CheckpointError(f"its optimizer has no state of parameter {index}")
        _check_tensors(f"optimizer, parameter {index}", expected, states[index])


def _check_tensors(what: str, expected: Mapping[str, Tensor], got: Mapping[str, Any]) -> None:
    for name in [*expected, *(name for name in got if name not in expected)]:
        must, has = _describe(expected.get(name)), _describe(got.get(name))
        if must != has:
            raise CheckpointError(f"its {what}: {name} must be {must}, got {has}")


def _describe(value: object) -> str:
    if value is None:
        return "missing"
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def to_cpu(value: Any) -> Any:
    """Copy ``value`` with all its tensors to the CPU; dicts, lists and tuples keep their form."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_cpu(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_cpu(item) for item in value)
    return value
