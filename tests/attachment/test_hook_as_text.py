"""Hooks that are given as text, and handles in a ``with`` statement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_commhook
from torch_commhook import HookExpressionError, attach, hooks

pytestmark = pytest.mark.usefixtures("one_rank")
TEXT = "error_feedback(blockwise(bits=4))"


def test_a_hook_as_text() -> None:
    made = str(hooks.error_feedback(hooks.blockwise(bits=4)))
    assert str(torch_commhook.parse_hook(TEXT)) == made
    assert torch_commhook.parse_hook("none") is None
    model = nn.Linear(4, 4)
    with attach(model, TEXT) as handle:
        assert str(handle.hook) == made
        handle.replace("cast(bfloat16)")
        assert str(handle.hook) == str(hooks.cast(torch.bfloat16))
        with pytest.raises(HookExpressionError, match="blokwise"):
            handle.replace("blokwise")
        assert str(handle.hook) == str(hooks.cast(torch.bfloat16)) and handle.is_attached


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blokwise", "unknown hook 'blokwise' (did you mean 'blockwise'?)"),
        ("cast(bf16)", "neither a dtype nor a hook (did you mean 'bfloat16'?)"),
        ("none", "attach: 'none' is not a hook; hooks.allreduce() is the plain mean"),
        ("adaptive(1e6)", "adaptive: budget must be an int"),
        ("blockwise(bits=4, bits=8)", "gives 'bits' twice"),
    ],
)
def test_a_text_that_is_no_hook(text: str, message: str) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(HookExpressionError) as raised:
        attach(model, text)
    assert message in str(raised.value)
    attach(model, "allreduce").remove()


def test_the_end_of_a_with_statement_removes_the_hook() -> None:
    model = nn.Linear(4, 4)
    with attach(model, hooks.allreduce()) as handle:
        model(torch.ones(2, 4)).sum().backward()
        assert handle.is_attached
    assert not handle.is_attached and handle.stats().steps == 1
    with pytest.raises(ZeroDivisionError), attach(model, "allreduce") as handle:
        raise ZeroDivisionError
    assert not handle.is_attached
    with attach(model, "allreduce") as handle:
        handle.remove()


@pytest.mark.parametrize("given", [None, 3, b"allreduce"])
def test_what_is_no_text(given: object) -> None:
    with pytest.raises(TypeError, match="parse_hook: expression must be a text, got"):
        torch_commhook.parse_hook(given)  # type: ignore[arg-type]
