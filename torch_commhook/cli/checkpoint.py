"""Writes and reads checkpoints of ``train``.

A checkpoint is one file. It is written atomically, and read with ``weights_only``.
"""

from __future__ import annotations

import math
import os
import stat
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_commhook.collectives.agreement import check_saved

_FORMAT = "torch_commhook.train"
_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint can't be read or loaded. The message is one sentence."""


@dataclass(frozen=True)
class Checkpoint:
    """The state that a resumed run continues from.

    Attributes:
        model: parameter name to tensor; the tensor is whole even if the parameter is sharded.
        optimizer: the optimizer's ``state_dict()`` for whole parameters.
        rank_states: for each rank ``{"hook": the hook's state or None, "rng": uint8 tensor}``. With
            a hook that keeps ranks apart, it also has ``"optimizer"``, the state of the rank's
            optimizer, and ``model`` and ``optimizer`` are those of rank 0.
        bytes_sent: bytes that rank 0 has sent for gradients; None if the hook does not tell.
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
    """Check that a model and its AdamW, of these groups of parameters, can load ``checkpoint``.

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


def map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested dicts, lists and tuples with each tensor converted."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [map_tensors(item, convert) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def to_cpu(value: Any) -> Any:
    """Copy ``value`` with all its tensors to the CPU; dicts, lists and tuples keep their form."""
    return map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))
