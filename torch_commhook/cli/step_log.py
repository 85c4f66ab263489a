"""Writes the numbers of each step to the logs of ``--log``, in addition to ``metrics.jsonl``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch_commhook.cli.outputs import EVENTS

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
