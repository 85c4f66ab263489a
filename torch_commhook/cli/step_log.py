"""Where ``--log`` sends the numbers of each step, beside ``metrics.jsonl``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch_commhook.cli.outputs import EVENTS

#: The values of ``--log``, and the package that each needs.
LOGS: Mapping[str, str | None] = {"jsonl": None, "tensorboard": "tensorboard", "wandb": "wandb"}
#: Of runs on Weights & Biases.
PROJECT = "torch-commhook"


class LogError(ValueError):
    """A log that can't be written, in one sentence."""


class StepLog(Protocol):
    """Takes the numbers of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take those of a step."""

    def close(self) -> None:
        """Write what is left."""


def check_logs(logs: Sequence[str]) -> None:
    """Raise LogError where the package that a log needs is not installed."""
    for name in logs:
        package = LOGS[name]
        if package is not None and not _is_installed(package):
            raise LogError(f"{name} needs the package {package}: pip install {package}")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def open_logs(
    logs: Sequence[str], out: Path, run: str, hook: str, config: Mapping[str, Any], first_step: int
) -> list[StepLog]:
    """The logs of a run; ``jsonl`` is none of these, since ``metrics.jsonl`` is always written.

    Args:
        logs: as ``--log`` names them.
        out: the folder of the results.
        run: the name of the run, another one for each hook.
        hook: the hook as text.
        config: the settings of the run.
        first_step: the steps done before it.
    """
    open_log: dict[str, Callable[[], StepLog]] = {
        "tensorboard": lambda: _TensorBoardLog(out / EVENTS / run, hook, first_step),
        "wandb": lambda: _WandbLog(out, run, hook, config),
    }
    return [open_log[name]() for name in logs if name in open_log]


class _TensorBoardLog:
    """Event files: a folder for each run."""

    def __init__(self, folder: Path, hook: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run goes on in the folder of the run before; the steps that it repeats go.
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        self._writer.add_text("hook", hook)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _WandbLog:
    """A run on Weights & Biases, in a group with those that it is compared with."""

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
