"""Checkpoints of ``train``: one file, written whole or not at all, read with weights_only."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FORMAT = "torch_commhook.train"
_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that can't be read, in one sentence that names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run goes on from.

    Attributes:
        config: the configuration as plain values.
        step: the steps done.
        model: parameter name to tensor.
        optimizer: the optimizer's ``state_dict()``.
        rank_states: for each rank ``{"hook": the hook's state or None, "rng": uint8 tensor}``.
        data_fingerprint: of the text.
        bytes_sent: what rank 0 has sent, None where the hook doesn't tell.
        seconds: spent on the steps.
    """

    config: dict[str, Any]
    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    rank_states: list[dict[str, Any]]
    data_fingerprint: str
    bytes_sent: int | None
    seconds: float

    @property
    def has_hook_state(self) -> bool:
        """Whether the hook remembers anything of its own on any rank."""
        return any(bool(state.get("hook")) for state in self.rank_states)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` so that ``path`` always holds a whole one, the old or the new.

    Raises:
        OSError: the file can't be written; what was at ``path`` is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One fixed name: what a killed run leaves behind, the next one overwrites.
    temporary = path.with_name(f".{path.name}.part")
    content = {"format": _FORMAT, "version": _VERSION, **vars(checkpoint)}
    try:
        with open(temporary, "wb") as stream:
            torch.save(content, stream)
            stream.flush()
            os.fsync(stream.fileno())  # the rename must not reach the disk before the content
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_checkpoint(path: Path, *, memory_map: bool = False) -> Checkpoint:
    """Read what :func:`write_checkpoint` wrote, on the CPU.

    Args:
        path: the file.
        memory_map: leave the tensors on disk until they are used.

    Raises:
        CheckpointError: the file is missing, damaged, or no checkpoint of ``train``.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=memory_map)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint of commhook train") from error
    if not isinstance(content, Mapping) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of commhook train")
    if content["version"] != _VERSION:
        raise CheckpointError(
            f"{path} is a checkpoint of version {content['version']}, this is for {_VERSION}"
        )
    names = Checkpoint.__dataclass_fields__
    missing = [name for name in names if name not in content]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    return Checkpoint(**{name: content[name] for name in names})


def read_header(path: Path) -> Checkpoint:
    """The checkpoint with its tensors left on disk, for a look at its configuration."""
    return read_checkpoint(path, memory_map=True)


def to_cpu(value: Any) -> Any:
    """``value`` with every tensor inside of it copied to the CPU; dicts, lists and tuples stay."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_cpu(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_cpu(item) for item in value)
    return value
