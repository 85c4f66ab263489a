"""attach() and its handle; failures of hooks under DDP."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, collectives, hooks

BUCKET_CAP_MB = 0.001


def _model(**options: object) -> DDP:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=BUCKET_CAP_MB, **options)


def _step(model: torch.nn.Module, rank: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def doubled(state: object, bucket: GradBucket) -> torch.Tensor:
    return bucket.buffer() * 2


class OwnError(Exception):
    pass


@pytest.mark.usefixtures("one_rank")
class TestHandle:
    def test_attach_remove_and_attach_again(self) -> None:
        model = _model()
        plain = _step(model)
        handle = attach(model, doubled)
        assert handle.is_attached and handle.hook is doubled
        assert repr(handle) == "HookHandle(test_attach.doubled, attached)"
        assert _equal(_step(model), [2 * gradient for gradient in plain])
        handle.remove()
        handle.remove()
        assert not handle.is_attached and "removed" in repr(handle)
        assert _equal(_step(model), plain)
        again = attach(model, doubled)
        assert _equal(_step(model), [2 * gradient for gradient in plain])
        assert again.is_attached and not handle.is_attached

    def test_replace(self) -> None:
        model = _model()
        plain = _step(model)
        handle = attach(model, doubled)
        _step(model)
        handle.replace(hooks.allreduce())
        assert repr(handle) == "HookHandle(allreduce(), attached)"
        assert handle.stats().steps == 0
        assert _equal(_step(model), plain)
        with pytest.raises(TypeError, match="got int"):
            handle.replace(3)  # type: ignore[arg-type]
        assert _equal(_step(model), plain)
        handle.remove()
        with pytest.raises(RuntimeError, match=r"allreduce\(\)' is not attached any more"):
            handle.replace(doubled)
        assert handle.stats().steps == 2  # what it did stays known

    def test_a_change_in_mid_backward_waits_for_the_next(self) -> None:
        model = _model()
        plain = _step(model)  # after which DDP forms its four buckets
        handle = attach(model, doubled)
        _step(model)

        def removes(state: object, bucket: GradBucket) -> torch.Tensor:
            handle.remove()
            return doubled(state, bucket)

        handle.replace(removes)
        assert _equal(_step(model), [2 * gradient for gradient in plain])
        assert handle.stats().steps == 1 and len(handle.stats().buckets) == 4
        assert _equal(_step(model), plain)

    def test_a_static_graph_that_is_set_after_attach(self) -> None:
        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used = torch.nn.Linear(16, 16)
                self.unused = torch.nn.Linear(16, 16)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.used(x)

        model = DDP(Net())
        attach(model, hooks.allreduce())
        model._set_static_graph()
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
            assert model.module.used.weight.grad is not None
            assert model.module.unused.weight.grad is None

    def test_twice_says_what_is_attached(self) -> None:
        model = _model()
        handle = attach(model, doubled)
        with pytest.raises(RuntimeError, match=r"'test_attach.doubled' is attached to this model"):
            attach(model, hooks.allreduce())
        assert handle.is_attached

    def test_ddps_own_registration_is_respected(self) -> None:
        model = _model()
        model.register_comm_hook(None, hooks.cast(torch.float16))
        with pytest.raises(RuntimeError, match=r"register_comm_hook: 'cast\(float16\)'"):
            attach(model, doubled)

    def test_what_cannot_take_a_hook(self) -> None:
        with pytest.raises(TypeError, match=r"DistributedDataParallel, got torch.nn.*Linear"):
            attach(torch.nn.Linear(2, 2), doubled)
        model = _model()
        with pytest.raises(TypeError, match="a hook must be callable"):
            attach(model, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="state must be None for hook 'allreduce"):
            attach(model, hooks.allreduce(), state=3)
        attach(model, hooks.allreduce())  # the refused ones left nothing behind

    def test_a_hook_of_any_kind(self) -> None:
        model = _model()
        plain = _step(model)

        class Multiplies:
            def __call__(self, state: object, grads: GradBucket) -> torch.Tensor:
                return grads.buffer() * 2

            def method(self, state: object, grads: GradBucket) -> torch.Tensor:
                return grads.buffer() * 2

        def with_factor(state: object, b: GradBucket, factor: float) -> torch.Tensor:
            return b.buffer() * factor

        def in_list(state: object, bucket: GradBucket) -> torch.futures.Future:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result([bucket.buffer() * 2])
            return future

        handle = attach(model, doubled)
        for hook in (
            Multiplies(),
            Multiplies().method,
            functools.partial(with_factor, factor=2),
            in_list,
        ):
            handle.replace(hook)
            assert _equal(_step(model), [2 * gradient for gradient in plain]), hook

    def test_state_is_passed(self) -> None:
        seen: list[object] = []

        def hook(state: list, bucket: GradBucket) -> torch.Tensor:
            state.append(bucket.index())
            return bucket.buffer()

        model = _model()
        attach(model, hook, state=seen)
        _step(model)
        _step(model)
        assert seen == [0, *range(4)]  # one bucket in the first step, then as DDP rebuilt them

    def test_the_bucket_is_ours_and_complete(self) -> None:
        model = _model()
        names: list[str] = []

        def hook(state: object, bucket: GradBucket) -> torch.Tensor:
            assert isinstance(bucket, GradBucket)
            assert sum(bucket.lengths()) == bucket.buffer().numel()
            assert bucket.process_group() is model.process_group
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                assert torch.equal(gradient, parameter.grad)
                names.extend(n for n, p in model.named_parameters() if p is parameter)
            return bucket.buffer()

        attach(model, hook)
        _step(model)
        names.clear()
        _step(model)
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())

    def test_stats_of_a_hook_with_collectives_of_its_own(self) -> None:
        def through_the_library(state: object, bucket: GradBucket) -> torch.futures.Future:
            return collectives.all_reduce(bucket.buffer())

        model = _model()
        handle = attach(model, doubled)
        _step(model)
        assert handle.stats().bytes_sent is None and handle.stats().steps == 1
        handle.replace(through_the_library)
        _step(model)
        assert handle.stats().bytes_sent == 0  # one rank sends nothing

    def test_gradients_of_none_and_of_other_strides(self) -> None:
        model = _model()
        plain = _step(model)
        attach(model, hooks.cast(torch.bfloat16))
        for parameter in model.parameters():
            parameter.grad = (
                torch.zeros(parameter.shape[::-1]).t() if parameter.dim() == 2 else None
            )
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
        model(x).square().sum().backward()
        for parameter, want in zip(model.parameters(), plain, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, want, rtol=2.0**-7, atol=1e-6)


class TwoDtypes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Parameter(torch.ones(30))
        self.wide = torch.nn.Parameter(torch.ones(30, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return (self.narrow.double() * 2 + self.wide * 5).sum()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("hook", [hooks.allreduce(), hooks.cast(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_several_dtypes(hook: hooks.Hook, static: bool) -> None:
    # In the first step of a static graph DDP calls every bucket number 0.
    net = TwoDtypes()
    model = DDP(net, static_graph=static)
    handle = attach(model, hook)
    for step in range(3):
        model.zero_grad()
        model().backward()
        assert net.narrow.grad is not None and net.wide.grad is not None
        assert (net.narrow.grad == 2).all() and (net.wide.grad == 5).all()
        assert handle.stats().steps == step + 1


class Gives(hooks.Hook):
    """A hook class whose average is `function` of the buffer."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def average(self, bucket: GradBucket) -> torch.futures.Future:
        return self.function(bucket.buffer())


def _by_call(model: DDP, hook: hooks.Hook) -> None:
    parameters = list(model.parameters())
    bucket = GradBucket(parameters, [torch.ones_like(p) for p in parameters])
    hook(None, bucket).wait()


def _by_attach(model: DDP, hook: hooks.Hook) -> None:
    attach(model, hook)
    _step(model)


def _by_register(model: DDP, hook: hooks.Hook) -> None:
    model.register_comm_hook(None, hook)
    _step(model)


each_way = pytest.mark.parametrize("way", [_by_call, _by_attach, _by_register])


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
        way(_model(), Gives(function))
    assert re.search(f"hook 'test_attach.Gives' on bucket 0 of 1: {message}", str(caught.value))


@pytest.mark.usefixtures("one_rank")
@each_way
def test_a_hook_class_that_gives_a_tensor(way: Callable) -> None:
    way(_model(), Gives(lambda buffer: buffer * 2))


@pytest.mark.usefixtures("one_rank")
@each_way
@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_a_hook_class_that_raises_is_named_in_a_note(way: Callable) -> None:
    def fails(buffer: torch.Tensor) -> None:
        raise OwnError("boo")

    with pytest.raises(OwnError) as caught:
        way(_model(), Gives(fails))
    assert caught.value.__notes__ == ["raised by hook 'test_attach.Gives' on bucket 0 of 1"]


@pytest.mark.usefixtures("one_rank")
@each_way
@pytest.mark.parametrize("dtype", [None, "float32", torch.int32])
def test_a_result_dtype_that_is_none(way: Callable, dtype: object) -> None:
    hook = Gives(lambda buffer: buffer)
    hook.result_dtype = lambda bucket: dtype  # type: ignore[assignment,return-value]
    with pytest.raises(TypeError, match=r"'test_attach.Gives' on bucket 0 of 1: result_dtype must"):
        way(_model(), hook)


@pytest.mark.usefixtures("one_rank")
@each_way
def test_a_hook_class_without_its_base_constructor(way: Callable) -> None:
    class Forgetful(hooks.Hook):
        def __init__(self) -> None:
            self.mine = 1

        def average(self, bucket: GradBucket) -> torch.futures.Future:
            return collectives.all_reduce(bucket.buffer(), group=self.group(bucket))

    way(_model(), copy.deepcopy(Forgetful()))


@pytest.mark.usefixtures("one_rank")
def test_bytes_that_go_past_the_library_are_not_known() -> None:
    def past(buffer: torch.Tensor) -> torch.futures.Future:
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future()

    model = _model()
    handle = attach(model, Gives(past))
    _step(model)
    assert handle.stats().bytes_sent is None


@pytest.mark.usefixtures("one_rank")
def test_a_handle_keeps_nothing_of_a_model_that_is_gone() -> None:
    model = _model()
    handle = attach(model, hooks.cast(torch.bfloat16))
    _step(model)
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert parameter() is None
    assert not handle.is_attached and handle.stats().steps == 1
    assert len(handle.hook._workspaces) == 0  # type: ignore[attr-defined]


# ---- failures ------------------------------------------------------------------------------------


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

    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future.then(callback)


FAILURES = [
    (raises, OwnError, "boo"),
    (raises_in_first, OwnError, "boo"),
    (returns_none, TypeError, r"hook '.*returns_none' on bucket 0 of 4: must return .* got None"),
    (too_long, ValueError, r"'test_attach.too_long' on bucket 0 of 4: the result must have"),
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
class TestFailure:
    def test_it_surfaces_and_the_next_backward_works(
        self, hook: object, error: type[Exception], message: str, options: dict
    ) -> None:
        model = _model(**options)
        handle = attach(model, hooks.allreduce())
        _step(model)
        want = _step(model)
        handle.replace(hook)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(error, match=message):
                _step(model)
        handle.replace(hooks.allreduce())
        for _ in range(2):
            assert _equal(_step(model), want)


@pytest.mark.usefixtures("one_rank")
def test_the_traceback_leads_into_the_hook() -> None:
    model = _model()
    attach(model, raises_in_first)
    with pytest.raises(OwnError) as caught:
        _step(model)
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
    monkeypatch.setattr(sys.modules["torch_commhook.attach"], "_DRAIN_SECONDS", 0.2)
    model = _model()
    plain = _step(model)
    handle = attach(model, Futures())
    for _ in range(2):
        with pytest.warns(
            UserWarning, match="on bucket 0 of 4: its Future is not complete 0.2 sec"
        ):
            with pytest.raises(OwnError):
                _step(model)
    handle.remove()
    assert _equal(_step(model), plain)


def test_ctrl_c_ends_the_wait_for_a_future() -> None:
    script = """
import _thread, threading, torch, torch.distributed as dist
from test_attach import Futures, _model, _step
from torch_commhook import attach
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = _model()
_step(model)
attach(model, Futures())
threading.Timer(1, _thread.interrupt_main).start()
try:
    _step(model)
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=50,  # less than the wait
        cwd=Path(__file__).parent,
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

    model = _model()
    attach(model, hook)
    with contextlib.suppress(OwnError):
        _step(model)
    gc.collect()
    assert seen[0]() is None


@pytest.mark.usefixtures("one_rank")
def test_later_buckets_issue_no_collectives_after_a_failure() -> None:
    model = _model()
    called: list[int] = []

    def hook(state: object, bucket: GradBucket) -> torch.Tensor:
        called.append(bucket.index())
        if bucket.index() == 1:
            raise OwnError
        return bucket.buffer()

    attach(model, hook)
    _step_of_one_bucket = called.copy()
    _step(model)
    with pytest.raises(OwnError):
        _step(model)
    assert called == [*_step_of_one_bucket, 0, 0, 1]


def _fail_everywhere_then_train(rank: int) -> None:
    model = _model()
    want = _step(model, rank)
    handle = attach(model, hooks.allreduce())
    for step in range(6):
        handle.replace(raises if step % 2 else hooks.allreduce())
        if step % 2:
            with pytest.raises(OwnError, match="boo"):
                _step(model, rank)
        else:
            assert _equal(_step(model, rank), want)
    dist.barrier()


def test_all_ranks_fail_and_go_on(two_ranks: RankPool) -> None:
    two_ranks.run(_fail_everywhere_then_train)


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


def _error_with_others_in_flight(rank: int, options: dict) -> int:
    model = _model(**options)
    want = _step(model, rank)
    wrong = 0

    def bad_first(state: object, bucket: GradBucket) -> torch.futures.Future | torch.Tensor:
        future = collectives.all_reduce(bucket.buffer().div_(2))
        return torch.zeros(1) if bucket.index() == 0 else future

    handle = attach(model, hooks.allreduce())
    _step(model, rank)
    for _ in range(10):
        handle.replace(bad_first)
        with pytest.raises(ValueError, match="on bucket 0 of 4"):
            _step(model, rank)
        handle.replace(hooks.allreduce())
        wrong += not _equal(_step(model, rank), want)
    return wrong


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
def test_an_error_leaves_nothing_in_flight(two_ranks: RankPool, options: dict) -> None:
    assert two_ranks.run(_error_with_others_in_flight, options) == [0, 0]


class InPlace16(hooks.Hook):
    """Gives a 16-bit result that lies in the bucket's own memory."""

    def average(self, bucket: GradBucket) -> torch.futures.Future:
        buffer = bucket.buffer()
        narrow = buffer.view(torch.bfloat16)[: buffer.numel()]
        narrow.copy_(buffer.clone())
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(narrow)
        return future

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return torch.bfloat16


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
def test_a_result_in_the_buckets_own_memory(options: dict) -> None:
    model = _model(**options)
    want = _step(model)
    attach(model, InPlace16())
    for gradient, exact in zip(_step(model), want, strict=True):
        assert torch.allclose(gradient, exact, rtol=2.0**-7, atol=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_complex_gradients() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    module = torch.nn.Module()
    module.weight = parameter
    module.forward = lambda: (parameter * 2j).abs().sum()  # type: ignore[method-assign]
    model = DDP(module)
    model().backward()
    want = parameter.grad
    attach(model, hooks.allreduce())
    parameter.grad = None
    model().backward()
    assert torch.equal(parameter.grad, want)
