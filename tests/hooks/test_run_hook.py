"""run_hook, parse_hook_result and check_hook."""

from __future__ import annotations

import functools
import gc
import sys
import traceback
import weakref
from typing import Any, Protocol

import pytest
import torch
from group_doubles import completed
from hook_examples import Callable, one_bucket

from torch_commhook import GradBucket, check_hook, hooks, parse_hook_result, run_hook
from torch_commhook.native.runtime import hook_name


def returns_buffer(state: object, bucket: GradBucket) -> torch.Tensor:
    return bucket.buffer()


# ---- run_hook ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hook",
    [
        returns_buffer,
        lambda state, bucket: completed(bucket.buffer()),
        functools.partial(returns_buffer),
        Callable(),
        Callable().method,
    ],
)
@pytest.mark.parametrize("theirs", [False, True])
def test_a_future_comes_back(hook: object, theirs: bool) -> None:
    bucket = one_bucket()
    future = run_hook(hook, None, bucket.to_torch() if theirs else bucket)
    assert isinstance(future, torch._C.Future)
    assert parse_hook_result(future.wait(), bucket).tolist() == [0, 1, 2, 3, 4, 5]


def test_state_and_bucket_arrive_as_they_are() -> None:
    seen = []
    state, bucket = object(), one_bucket()

    def hook(first: object, second: object) -> torch.Tensor:
        seen.append((first, second))
        return bucket.buffer()

    run_hook(hook, state, bucket)
    assert seen[0][0] is state and seen[0][1] is bucket


@pytest.mark.parametrize(
    ("value", "got"), [(None, "None"), (3, "int"), ([torch.ones(2)], "list"), (gc, "module")]
)
@pytest.mark.parametrize("theirs", [False, True])
def test_what_is_no_future_is_named(value: object, got: str, theirs: bool) -> None:
    def nonsense(state: object, bucket: object) -> object:
        return value

    bucket = one_bucket()
    with pytest.raises(TypeError) as caught:
        run_hook(nonsense, None, bucket.to_torch() if theirs else bucket)
    message = str(caught.value).splitlines()[0]
    assert "test_what_is_no_future_is_named.<locals>.nonsense' on bucket 1 of 4" in message
    assert message.endswith(
        f"must return a torch.futures.Future[torch.Tensor] or a torch.Tensor, got {got}"
    )


def test_an_exception_keeps_type_value_and_traceback() -> None:
    class OwnError(Exception):
        pass

    error = OwnError("boo", 3)

    def raises_deep_inside(state: object, bucket: object) -> None:
        raise error

    with pytest.raises(OwnError) as caught:
        run_hook(raises_deep_inside, None, one_bucket())
    assert caught.value is error and caught.value.args == ("boo", 3)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "raises_deep_inside"
    if sys.version_info >= (3, 11):
        assert "raises_deep_inside' on bucket 1 of 4" in caught.value.__notes__[0]


def test_a_hooks_own_error_about_what_is_no_bucket() -> None:
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'buffer'"):
        run_hook(returns_buffer, None, None)
    with pytest.raises(TypeError, match=r"hook '.*lambda.*' on None: must return .*, got int"):
        run_hook(lambda state, bucket: 3, None, None)


def test_names_that_cannot_be_told() -> None:
    class Endless:
        __module__ = "functools"

        @property
        def func(self) -> object:
            return Endless()

    assert hook_name(Endless()).startswith("partial of partial of ")

    class Odd:
        __module__ = "\ud800"  # which no encoding has

    assert hook_name(Odd()).endswith("Odd object")
    with pytest.raises(TypeError, match=r"got .*Odd"):
        run_hook(lambda state, bucket: Odd(), None, one_bucket())


def test_nothing_is_kept_alive() -> None:
    class State:
        pass

    class Hook:
        def __call__(self, state: object, bucket: GradBucket) -> torch.Tensor:
            return bucket.buffer()

    state, hook = State(), Hook()
    gone = [weakref.ref(state), weakref.ref(hook)]
    future = run_hook(hook, state, one_bucket())
    del state, hook
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert future.done()


# ---- parse_hook_result ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t], lambda t: (t,)])
def test_one_tensor_in_any_wrapping(wrap: object) -> None:
    tensor = torch.ones(6)
    assert parse_hook_result(wrap(tensor), one_bucket()) is tensor  # type: ignore[operator]


def test_any_shape_and_strides_of_the_right_length() -> None:
    tensor = torch.arange(6.0).reshape(3, 2).t()
    result = parse_hook_result(tensor, one_bucket())
    assert result.shape == (6,) and result.is_contiguous()
    assert result.tolist() == [0, 2, 4, 1, 3, 5]


def test_a_stored_exception_is_raised() -> None:
    error = ValueError("boo")
    with pytest.raises(ValueError, match="boo") as caught:
        parse_hook_result(error, one_bucket())
    assert caught.value is error


# ---- check_hook ----------------------------------------------------------------------------------


def annotated(bucket: str, result: str, state: str = "object") -> Any:
    """A hook with these annotations, as the compiler leaves them: as text."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    hook.__annotations__ = {"state": state, "bucket": bucket, "return": result}
    return hook


def any_names(a, b):  # type: ignore[no-untyped-def]
    raise NotImplementedError


class HasBuffer(Protocol):
    def buffer(self) -> torch.Tensor: ...


class OwnFuture(torch.futures.Future):
    pass


def with_default(state: object, bucket: GradBucket, scale: float = 1.0) -> torch.Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    "hook",
    [
        returns_buffer,
        any_names,
        annotated("torch.distributed.GradBucket", "torch.futures.Future[torch.Tensor]"),
        annotated("Any", "Any", "Any"),
        annotated("object", "object"),
        annotated("GradBucket | torch.distributed.GradBucket", "torch.Tensor | None"),
        annotated("OnlyTheCheckerKnows", "torch.Tensor"),
        annotated("HasBuffer", "OwnFuture"),
        with_default,
        lambda *args: args,
        functools.partial(with_default, scale=2.0),
        Callable(),
        Callable().method,
        hooks.allreduce(),
        hooks.cast(torch.float16),
        max,  # a builtin without a signature
    ],
)
def test_good_hooks_pass(hook: object) -> None:
    check_hook(hook)
