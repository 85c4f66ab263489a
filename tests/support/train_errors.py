"""Errors of ``train`` for wrong arguments."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torch_commhook.cli import launcher, rank_process
from torch_commhook.cli.main import main


def forbid_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a command starts ranks or this process becomes one; no launcher is there."""

    def launch(*arguments: object) -> int:
        raise AssertionError("a wrong command line must not start ranks")

    monkeypatch.setattr(launcher, "launch", launch)
    for name in ("tie_to_launcher", "end_on_signals"):
        monkeypatch.setattr(rank_process, name, launch)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "COMMHOOK_LAUNCHER_PID"):
        monkeypatch.delenv(name, raising=False)


def train_error(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``train`` prints for these arguments; it must exit with code 2."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("commhook train: error: ")
    assert error.count("\n") == 1
    return error
