"""Hooks that fail under DDP: the error surfaces, names hook and bucket, and the next step works."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_doubles import completed
from mode_cases import backward_step, equal, small_model
from on_ranks import on_processes
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, collectives, hooks, run_hook


class OwnError(Exception):
    pass


# ---- hook classes, called in each way ------------------------------------------------------------


class Gives(hooks.Hook):
    """A hook class whose average is `function` of the buffer."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def average(self, bucket: GradBucket) -> torch.futures.Future:
        return self.function(bucket.buffer())


def _bucket(model: DDP) -> GradBucket:
    parameters = list(model.parameters())
    return GradBucket(parameters, [torch.ones_like(p) for p in parameters])


def _by_call(model: DDP, hook: hooks.Hook) -> None:
    hook(None, _bucket(model)).wait()


def _by_attach(model: DDP, hook: hooks.Hook) -> None:
    attach(model, hook)
    backward_step(model)


def _by_register(model: DDP, hook: hooks.Hook) -> None:
    model.register_comm_hook(None, hook)
    backward_step(model)


def _by_run_hook(model: DDP, hook: hooks.Hook) -> None:
    run_hook(hook, None, _bucket(model)).wait()


each_way = pytest.mark.parametrize("way", [_by_call, _by_attach, _by_register, _by_run_hook])


@pytest.mark.usefixtures("one_rank")
@each_way
@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda b: None, TypeError, "must return .* got None"),
        (lambda b: b[:-1], ValueError, "the result must have 1088 elements.*, got 1087"),
        (
            lambda b: b.double(),
            TypeError,
            "the result must have dtype torch.float32, got torch.float64",
        ),
    ],
    ids=["none", "length", "dtype"],
)
def test_a_hook_class_that_gives_something_else(
    way: Callable, function: Callable, error: type[Exception], message: str
) -> None:
    # PyTorch wraps what is raised in a Future's callback.
    with pytest.raises((error, RuntimeError)) as caught:
        way(small_model(), Gives(function))
    assert re.search(
        f"hook 'test_hook_failures.Gives' on bucket 0 of 1: {message}", str(caught.value)
    )


@pytest.mark.usefixtures("one_rank")
@each_way
def test_a_hook_class_that_gives_a_tensor(way: Callable) -> None:
    way(small_model(), Gives(lambda buffer: buffer * 2))


@pytest.mark.usefixtures("one_rank")
@each_way
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_a_hook_class_that_raises_is_named_in_a_note(way: Callable) -> None:
    def fails(buffer: torch.Tensor) -> None:
        raise OwnError("boo")

    with pytest.raises(OwnError) as caught:
        way(small_model(), Gives(fails))
    assert caught.value.__notes__ == ["raised by hook 'test_hook_failures.Gives' on bucket 0 of 1"]


@pytest.mark.usefixtures("one_rank")
@each_way
@pytest.mark.parametrize("dtype", [None, "float32", torch.int32])
def test_a_result_dtype_that_is_none(way: Callable, dtype: object) -> None:
    hook = Gives(lambda buffer: buffer)
    hook.result_dtype = lambda bucket: dtype  # type: ignore[assignment,return-value]
    with pytest.raises(
        TypeError, match=r"'test_hook_failures.Gives' on bucket 0 of 1: result_dtype must"
    ):
        way(small_model(), hook)


@pytest.mark.usefixtures("one_rank")
@each_way
def test_a_hook_class_without_its_base_constructor(way: Callable) -> None:
    class Forgetful(hooks.Hook):
        def __init__(self) -> None:
            self.mine = 1

        def average(self, bucket: GradBucket) -> torch.futures.Future:
            return collectives.all_reduce(bucket.buffer(), group=self.group(bucket))

    way(small_model(), copy.deepcopy(Forgetful()))


# ---- functions, attached ------------------------------------------------------------------------


def raises(state: object, bucket: GradBucket) -> torch.Tensor:
    if bucket.is_last():
        raise OwnError("boo")
    return bucket.buffer()


def raises_in_first(state: object, bucket: GradBucket) -> torch.Tensor:
    raise OwnError("boo")


def returns_none(state, bucket):  # type: ignore[no-untyped-def]
    return None


def too_long(state: object, bucket: GradBucket) -> torch.Tensor:
    return torch.zeros(bucket.buffer().numel() + 1)


def other_dtype(state: object, bucket: GradBucket) -> torch.Tensor:
    return bucket.buffer().double()


def stores_exception(state: object, bucket: GradBucket) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_exception(OwnError("boo"))
    return future


def raises_in_callback(state: object, bucket: GradBucket) -> torch.futures.Future:
    def callback(done: torch.futures.Future) -> torch.Tensor:
        raise OwnError("boo")

    return completed(bucket.buffer()).then(callback)


FAILURES = [
    (raises, OwnError, "boo"),
    (raises_in_first, OwnError, "boo"),
    (returns_none, TypeError, r"hook '.*returns_none' on bucket 0 of 4: must return .* got None"),
    (too_long, ValueError, r"'test_hook_failures.too_long' on bucket 0 of 4: the result must have"),
    (other_dtype, TypeError, r"on bucket 0 of 4: .*torch.float32, got torch.float64"),
    (stores_exception, OwnError, "boo"),
    (
        raises_in_callback,
        RuntimeError,
        r"raises_in_callback' on bucket 0 of 4: (.|\n)*OwnError: boo",
    ),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
@pytest.mark.parametrize(
    ("hook", "error", "message"), FAILURES, ids=lambda f: getattr(f, "__name__", "")
)
def test_a_failure_surfaces_and_the_next_backward_works(
    hook: object, error: type[Exception], message: str, options: dict
) -> None:
    model = small_model(**options)
    handle = attach(model, hooks.allreduce())
    backward_step(model)
    want = backward_step(model)
    handle.replace(hook)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(error, match=message):
            backward_step(model)
    handle.replace(hooks.allreduce())
    for _ in range(2):
        assert equal(backward_step(model), want)


@pytest.mark.usefixtures("one_rank")
def test_the_traceback_leads_into_the_hook() -> None:
    model = small_model()
    attach(model, raises_in_first)
    with pytest.raises(OwnError) as caught:
        backward_step(model)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "raises_in_first" and "backward" in frames


class Futures:
    """Completes all buckets' Futures at the last one, if it comes to that."""

    def __init__(self) -> None:
        self.open: list[tuple[torch.futures.Future, torch.Tensor]] = []

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future:
        if bucket.index() == 0:
            self.open.clear()
        if bucket.is_last() and bucket.bucket_count() > 1:
            raise OwnError("boo")
        self.open.append((torch.futures.Future(), bucket.buffer()))
        if bucket.is_last():
            for future, buffer in self.open:
                future.set_result(buffer)
        return self.open[-1][0]


@pytest.mark.usefixtures("one_rank")
def test_a_future_that_a_failure_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_commhook.attachment.ddp_road.DRAIN_SECONDS", 0.2)
    model = small_model()
    plain = backward_step(model)
    handle = attach(model, Futures())
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="on bucket 0 of 4: its Future had not completed 0.2 sec"
        ):
            with pytest.raises(OwnError):
                backward_step(model)
    handle.remove()
    assert equal(backward_step(model), plain)


@pytest.mark.parametrize("where", ["wait", "hook"])
def test_ctrl_c_ends_the_wait_for_a_future(where: str) -> None:
    script = f"""
import _thread, signal, threading, torch.distributed as dist
from mode_cases import small_model, backward_step
from test_hook_failures import Futures, OwnError
from torch_commhook import attach

# What a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

def hook(state, bucket):
    try:
        return futures(state, bucket)
    except OwnError:  # the wait begins when this has failed
        if {where!r} == "hook":
            raise KeyboardInterrupt
        threading.Timer(0.3, _thread.interrupt_main).start()
        raise

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
futures = Futures()
model = small_model()
backward_step(model)
attach(model, hook)
try:
    backward_step(model)
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=50,  # less than the wait
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.stdout == "interrupted\n", ended.stderr


@pytest.mark.usefixtures("one_rank")
def test_an_error_that_was_caught_keeps_nothing_alive() -> None:
    class Large:
        pass

    seen: list[weakref.ref] = []

    def hook(state: object, bucket: GradBucket) -> torch.Tensor:
        large = Large()
        seen.append(weakref.ref(large))
        raise OwnError("boo")

    model = small_model()
    attach(model, hook)
    with contextlib.suppress(OwnError):
        backward_step(model)
    gc.collect()
    assert seen[0]() is None


@pytest.mark.usefixtures("one_rank")
def test_later_buckets_issue_no_collectives_after_a_failure() -> None:
    model = small_model()
    called: list[int] = []

    def hook(state: object, bucket: GradBucket) -> torch.Tensor:
        called.append(bucket.index())
        if bucket.index() == 1:
            raise OwnError
        return bucket.buffer()

    attach(model, hook)
    _step_of_one_bucket = called.copy()
    backward_step(model)
    with pytest.raises(OwnError):
        backward_step(model)
    assert called == [*_step_of_one_bucket, 0, 0, 1]


EXIT_SCRIPT = """
import sys, threading, torch, torch.distributed as dist
import torch_commhook as tc
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
class Hook:
    def __call__(self, state, bucket):
        return bucket.buffer()
    def __del__(self):
        print("dropped")
handle = tc.attach(model, Hook(), state=[model])
model(torch.ones(2, 4)).sum().backward()
if sys.argv[1] == "destroyed":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("group", ["destroyed", "alive"])
def test_the_interpreter_ends_with_a_hook_attached(group: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXIT_SCRIPT, group], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "Fatal" not in ended.stderr and "rror" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
@on_processes
def test_an_error_leaves_nothing_in_flight(rank: int, options: dict) -> None:
    model = small_model(**options)
    want = backward_step(model, rank)

    def bad_first(state: object, bucket: GradBucket) -> torch.futures.Future | torch.Tensor:
        future = collectives.all_reduce(bucket.buffer().div_(2))
        return torch.zeros(1) if bucket.index() == 0 else future

    handle = attach(model, hooks.allreduce())
    backward_step(model, rank)
    for _ in range(10):
        handle.replace(bad_first)
        with pytest.raises(ValueError, match="on bucket 0 of 4"):
            backward_step(model, rank)
        handle.replace(hooks.allreduce())
        assert equal(backward_step(model, rank), want)
