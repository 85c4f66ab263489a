"""Loading the native libraries, and what is said where that fails."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook import NativeLibraryError, attach, hooks
from torch_commhook.native import libraries, stamp


def test_both_libraries_were_built_for_this_torch() -> None:
    assert torch.ops.commhook.built_for_torch() == torch.__version__
    assert torch_commhook._C.built_for_torch() == torch.__version__  # type: ignore[attr-defined]
    (library,) = libraries._LIBRARY_FOLDER.glob("_ops*.so")
    assert stamp.read_built_for(library) == torch.__version__


def test_another_torch_is_named() -> None:
    with pytest.raises(NativeLibraryError) as caught:
        libraries.check_built_for("1.2.3+cpu")
    message = str(caught.value)
    assert "built for torch 1.2.3+cpu" in message and f"torch {torch.__version__} is" in message
    assert "python setup.py develop" in message
    libraries.check_built_for(torch.__version__.split("+")[0] + "+other")  # the same release


def test_a_missing_library_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_LIBRARY_FOLDER", tmp_path)
    with pytest.raises(NativeLibraryError, match=r"is not in .*python setup.py develop"):
        libraries.load_ops()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"nonsense", r"does not load: .* built for torch unknown.*python setup.py develop"),
        (b"..commhook built for torch 1.0.0\0..", r"built for torch 1.0.0, but torch .* installed"),
    ],
)
def test_a_library_that_does_not_fit(
    contents: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_ops.so").write_bytes(contents)
    monkeypatch.setattr(libraries, "_LIBRARY_FOLDER", tmp_path)
    with pytest.raises(NativeLibraryError, match=re.compile(message, re.DOTALL)):
        libraries.load_ops()


@pytest.mark.usefixtures("one_rank")
def test_a_model_with_a_hook_is_collected() -> None:
    model = DDP(torch.nn.Linear(3, 3))
    handle = attach(model, hooks.cast(torch.bfloat16))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
