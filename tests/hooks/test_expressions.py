"""The hook of ``--hook``: what is understood, and what is said about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hook_examples import HOOKS

from torch_commhook.hooks.expressions import (
    HookExpressionError,
    check_hook,
    parse_hook,
    public_names,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", None),
        (" None ", None),
        ("allreduce()", ("allreduce",)),
        ("allreduce", ("allreduce",)),
        ("cast(bfloat16)", ("cast", torch.bfloat16)),
        ("cast(torch.float16)", ("cast", torch.float16)),
        ("cast(dtype=float8_e4m3fn)", ("cast", torch.float8_e4m3fn)),
        ("blockwise(bits=4, sizes=[1, (2, -3)])", ("blockwise", 4, [1, (2, -3)])),
        (
            "error_feedback(blockwise(4), decay=0.5)",
            ("error_feedback", ("blockwise", 4, None), 0.5),
        ),
        ("error_feedback(allreduce)", ("error_feedback", ("allreduce",), 1.0)),
        ("blockwise(process_group=None)", ("blockwise", 8, None)),
    ],
)
def test_an_expression_builds_the_hook(text: str, expected: object) -> None:
    assert parse_hook(text, HOOKS) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(" * 500, "is not a hook expression"),
        (f"blockwise({'-' * 1500}1)", "must have at most 50 levels"),
        (f"blockwise({'-' * 9000}1)", ""),
        (f"blockwise(sizes={'[' * 90}1{']' * 90})", "must have at most 50 levels"),
        (f"blockwise(a{'.a' * 60})", "must have at most 50 levels"),
        (f"blockwise(a{'.a' * 4000})", ""),
        (f"blockwise{'()' * 60}", "must have at most 50 levels"),
        (f"{'error_feedback(' * 60}allreduce(){')' * 60}", "must have at most 50 levels"),
        (f"cast('{'x' * 9000}')", "is refused by cast: TypeError: cast: dtype must be"),
        (f"blockwise({'x' * 9000})", "is neither a dtype nor a hook"),
        (f"{'x' * 9000}()", "names the unknown hook 'xxx"),
        (f"blockwise({'1 + ' * 40}1)", "must not contain '1 + 1"),
        (f"cast('{'x' * 100_000}')", "must have at most 10000 characters"),
        (f"blockwise({'9' * 1_000_000})", "must have at most 10000 characters"),
        (f"blockwise({'9' * 9000})", "is not a hook expression"),
        (f"cast(0x{'f' * 9000})", "is refused by cast: TypeError: cast: dtype must be"),
    ],
)
def test_a_wrong_expression_is_named_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(HookExpressionError) as caught:
        parse_hook(text, HOOKS)
    assert message in str(caught.value)
    is_argument = "is refused by" in message
    assert ("allreduce, blockwise, cast, error_feedback" in str(caught.value)) != is_argument
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("error_feedback()", "missing a required argument: 'hook'; it is error_feedback(hook, "),
        ("blockwise(block=0)", "unexpected keyword argument 'block'; it is blockwise(bits=8, "),
        ("topk(nan)", "has the argument 'nan', which is not a finite number"),
        ("clip(inf, cast())", "has the argument 'inf', which is not a finite number"),
    ],
)
def test_a_wrong_argument_is_named_with_the_settings(text: str, message: str) -> None:
    with pytest.raises(HookExpressionError) as caught:
        parse_hook(text)
    assert message in str(caught.value)


def test_the_library_offers_its_hooks() -> None:
    from torch_commhook import hooks

    assert {"allreduce", "cast"} <= set(public_names(hooks))
    assert callable(parse_hook("cast(bfloat16)"))
    assert callable(parse_hook("allreduce"))
    text = "local_sgd(8, outer=outer_sgd(0.7, 0.9), hook=error_feedback(blockwise(bits=4)))"
    assert str(parse_hook(text)) == "local_sgd(8, hook=error_feedback(blockwise(bits=4)))"


def test_a_codec_that_was_registered_since(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_commhook import hooks
    from torch_commhook.codecs import CODECS

    monkeypatch.setitem(CODECS, "signs_of_mine", CODECS["sign"])
    assert "signs_of_mine" in public_names(hooks)
    hook = parse_hook("error_feedback(signs_of_mine(32))")
    assert str(hook) == "error_feedback(sign(block_size=32))"


def test_a_file_gives_its_object(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def my_hook(state, bucket):\n    return bucket.buffer()\nsize = 3\n")
    check_hook(f"{file}:my_hook")
    assert parse_hook(f"{file}:my_hook").__name__ == "my_hook"
    with pytest.raises(HookExpressionError, match="size must be callable, got int"):
        parse_hook(f"{file}:size")
    for text, message in [
        (f"{file}:other", "defines no other"),
        (f"{file}", "must be FILE.py:NAME"),
        (f"{file}:not a name", "must be FILE.py:NAME"),
        (f"{tmp_path}/missing.py:my_hook", "there is no file"),
    ]:
        for function in (check_hook, parse_hook):
            with pytest.raises(HookExpressionError, match=message):
                function(text)


def test_a_coroutine_function_of_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    definition = "async def co(state, bucket): ...\n"
    file.write_text(definition)
    with pytest.raises(HookExpressionError, match=r"mine.py:co' .* got a coroutine function \(asy"):
        check_hook(f"{file}:co")
    for text in (
        f"{definition}co = run(co)\n",
        f"@run\n{definition}",
        f"try:\n  from a import co\nexcept ImportError:\n  {definition}",
    ):
        file.write_text(text)
        check_hook(f"{file}:co")


def test_checking_a_file_does_not_run_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise RuntimeError('it runs')\ndef my_hook(state, bucket): ...\n")
    check_hook(f"{file}:my_hook")
    with pytest.raises(HookExpressionError, match="raised RuntimeError: it runs"):
        parse_hook(f"{file}:my_hook")
    file.write_text("def my_hook(:\n")
    with pytest.raises(HookExpressionError, match="can't be read as Python: SyntaxError"):
        check_hook(f"{file}:my_hook")


def test_a_file_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    with pytest.raises(HookExpressionError, match=r"the file can't be read: File name too long"):
        check_hook(f"{'x' * 5000}.py:hook")
    deep = tmp_path / "deep.py"
    deep.write_text(f"x = {'-' * 100_000}1")
    with pytest.raises(HookExpressionError, match=r"deep\.py can't be read as Python: "):
        check_hook(f"{deep}:x")
