"""Errors of ``train`` for wrong arguments."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torch_commhook.cli.main import main


def train_error(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``train`` prints for these arguments; it must exit with code 2."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("commhook train: error: ")
    assert error.count("\n") == 1
    return error
