"""attach() and its handle."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from group_doubles import completed
from mode_cases import backward_step, equal, small_model
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook import GradBucket, attach, codecs, collectives, hooks
from torch_commhook.attachment.road import compared_settings, printed_hook
from torch_commhook.testing import run_ranks


def doubled(state: object, bucket: GradBucket) -> torch.Tensor:
    return bucket.buffer() * 2


@pytest.mark.usefixtures("one_rank")
class TestHandle:
    def test_attach_remove_and_attach_again(self) -> None:
        model = small_model()
        plain = backward_step(model)
        handle = attach(model, doubled)
        assert handle.is_attached and handle.hook is doubled
        assert repr(handle) == "HookHandle(test_attach.doubled, attached)"
        assert equal(backward_step(model), [2 * gradient for gradient in plain])
        handle.remove()
        handle.remove()
        assert not handle.is_attached and "removed" in repr(handle)
        assert equal(backward_step(model), plain)
        again = attach(model, doubled)
        assert equal(backward_step(model), [2 * gradient for gradient in plain])
        assert again.is_attached and not handle.is_attached

    def test_replace(self) -> None:
        model = small_model()
        plain = backward_step(model)
        handle = attach(model, doubled)
        backward_step(model)
        handle.replace(hooks.allreduce())
        assert repr(handle) == "HookHandle(allreduce(), attached)"
        assert handle.stats().steps == 0
        assert equal(backward_step(model), plain)
        with pytest.raises(TypeError, match="got int"):
            handle.replace(3)  # type: ignore[arg-type]
        assert equal(backward_step(model), plain)
        handle.remove()
        with pytest.raises(RuntimeError, match=r"allreduce\(\)' is no longer attached"):
            handle.replace(doubled)
        assert handle.stats().steps == 2  # what it did stays known

    def test_a_change_in_mid_backward_waits_for_the_next(self) -> None:
        model = small_model()
        plain = backward_step(model)  # after which DDP forms its four buckets
        handle = attach(model, doubled)
        backward_step(model)

        def removes(state: object, bucket: GradBucket) -> torch.Tensor:
            handle.remove()
            return doubled(state, bucket)

        handle.replace(removes)
        assert equal(backward_step(model), [2 * gradient for gradient in plain])
        assert handle.stats().steps == 1 and len(handle.stats().buckets) == 4
        assert equal(backward_step(model), plain)

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
        model = small_model()
        handle = attach(model, doubled)
        with pytest.raises(RuntimeError, match=r"'test_attach.doubled' is attached to this model"):
            attach(model, hooks.allreduce())
        assert handle.is_attached

    def test_ddps_own_registration_is_respected(self) -> None:
        model = small_model()
        model.register_comm_hook(None, hooks.cast(torch.float16))
        with pytest.raises(RuntimeError, match=r"register_comm_hook: 'cast\(float16\)'"):
            attach(model, doubled)

    def test_what_cannot_take_a_hook(self) -> None:
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
            attach([], doubled)  # type: ignore[arg-type]
        model = small_model()
        with pytest.raises(TypeError, match="a hook must be callable"):
            attach(model, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="state must be None for hook 'allreduce"):
            attach(model, hooks.allreduce(), state=3)
        attach(model, hooks.allreduce())  # the refused ones left nothing behind

    def test_a_hook_of_any_kind(self) -> None:
        model = small_model()
        plain = backward_step(model)

        class Multiplies:
            def __call__(self, state: object, grads: GradBucket) -> torch.Tensor:
                return grads.buffer() * 2

            def method(self, state: object, grads: GradBucket) -> torch.Tensor:
                return grads.buffer() * 2

        def with_factor(state: object, b: GradBucket, factor: float) -> torch.Tensor:
            return b.buffer() * factor

        def in_list(state: object, bucket: GradBucket) -> torch.futures.Future:
            return completed([bucket.buffer() * 2])

        handle = attach(model, doubled)
        for hook in (
            Multiplies(),
            Multiplies().method,
            functools.partial(with_factor, factor=2),
            in_list,
        ):
            handle.replace(hook)
            assert equal(backward_step(model), [2 * gradient for gradient in plain]), hook

    def test_state_is_passed(self) -> None:
        seen: list[object] = []

        def hook(state: list, bucket: GradBucket) -> torch.Tensor:
            state.append(bucket.index())
            return bucket.buffer()

        model = small_model()
        attach(model, hook, state=seen)
        backward_step(model)
        backward_step(model)
        assert seen == [0, *range(4)]  # one bucket in the first step, then as DDP rebuilt them

    def test_the_bucket_is_ours_and_complete(self) -> None:
        model = small_model()
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
        backward_step(model)
        names.clear()
        backward_step(model)
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())

    def test_bytes_are_known_of_hooks_with_collectives(self) -> None:
        model = small_model()
        handle = attach(model, doubled)
        backward_step(model)
        assert handle.stats().bytes_sent is None and handle.stats().steps == 1
        for hook in (
            lambda _, bucket: collectives.all_reduce(bucket.buffer()),
            lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future(),
        ):
            handle.replace(hook)
            backward_step(model)
            assert handle.stats().bytes_sent == 0  # one rank sends nothing

    def test_gradients_of_none_and_of_other_strides(self) -> None:
        model = small_model()
        plain = backward_step(model)
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


class SeveralDtypes(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Parameter(torch.ones(30))
        self.wide = torch.nn.Parameter(torch.ones(30, dtype=torch.float64))
        self.complex = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self) -> torch.Tensor:
        return (self.narrow.double() * 2 + self.wide * 5).sum() + (self.complex * 2j).abs().sum()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("hook", [hooks.allreduce(), hooks.cast(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_several_dtypes(hook: hooks.Hook, static: bool) -> None:
    # In the first step of a static graph DDP calls every bucket number 0.
    net = SeveralDtypes()
    model = DDP(net, static_graph=static)
    handle = attach(model, hook)
    for step in range(3):
        model.zero_grad()
        model().backward()
        for parameter, want in ((net.narrow, 2), (net.wide, 5), (net.complex, 2)):
            assert parameter.grad is not None and (parameter.grad == want).all()
        assert handle.stats().steps == step + 1


@pytest.mark.usefixtures("one_rank")
def test_a_handle_keeps_nothing_of_a_model_that_is_gone() -> None:
    model = small_model()
    handle = attach(model, hooks.cast(torch.bfloat16))
    backward_step(model)
    parameter = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert parameter() is None
    assert not handle.is_attached and handle.stats().steps == 1


class InPlace16(hooks.Hook):
    """Gives a 16-bit result that lies in the bucket's own memory."""

    def average(self, bucket: GradBucket) -> torch.futures.Future:
        buffer = bucket.buffer()
        narrow = buffer.view(torch.bfloat16)[: buffer.numel()]
        narrow.copy_(buffer.clone())
        return completed(narrow)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return torch.bfloat16


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copy", "view"])
def test_a_result_in_the_buckets_own_memory(options: dict) -> None:
    model = small_model(**options)
    want = backward_step(model)
    attach(model, InPlace16())
    for gradient, exact in zip(backward_step(model), want, strict=True):
        assert torch.allclose(gradient, exact, rtol=2.0**-7, atol=1e-6)


_GLOBAL = hooks.blockwise(bits=4)


class _Callable:
    def __init__(self, bits: int) -> None:
        self.inner = [hooks.error_feedback(hooks.blockwise(bits))]

    def __call__(self, state: object, bucket: GradBucket) -> Any:
        return self.inner[0](state, bucket)


def _own_hook(kind: str, bits: int) -> Any:
    """A hook of a user, with a setting in one of the usual places."""
    inner = hooks.blockwise(bits)
    if kind == "closure":
        return lambda state, bucket: inner(state, bucket)
    if kind == "default":
        return lambda state, bucket, inner=inner: inner(state, bucket)
    if kind == "partial":
        return functools.partial(doubled, inner=inner)
    if kind == "codec":
        codec = codecs.blockwise(bits)
        return lambda state, bucket: codec
    if kind == "method":
        return _Callable(bits).__call__
    assert kind == "attribute"
    return _Callable(bits)


@pytest.mark.parametrize("kind", ["closure", "default", "partial", "codec", "method", "attribute"])
def test_settings_in_hooks_of_users_must_be_the_same(kind: str) -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(RuntimeError) as raised:
            attach(torch.nn.Linear(4, 4), _own_hook(kind, 4 if rank == 0 else 2))
        return str(raised.value)

    for text in run_ranks(on_rank, 2):
        assert "the hook must be the same on all ranks: rank 0 has another with " in text
        assert "blockwise(bits=4)" in text and "blockwise(bits=2)" in text


def test_globals_and_expressions_in_hooks_of_users() -> None:
    class Own(hooks.Hook):
        def __repr__(self) -> str:
            return "own(bits=3)"

        def average(self, bucket: GradBucket) -> torch.Tensor:
            return bucket.buffer()

    assert printed_hook(lambda state, bucket: _GLOBAL) == "another with blockwise(bits=4)"
    assert printed_hook(Own()) == "own(bits=3)"
    assert printed_hook(doubled) == "another"


def test_no_addresses_or_data_in_hooks_of_users_are_compared() -> None:
    @dataclass(repr=True)
    class Scaled(hooks.Hook):
        scale: Callable[[torch.Tensor], torch.Tensor]

        def average(self, bucket: GradBucket) -> torch.Tensor:
            return self.scale(bucket.buffer())

    text = printed_hook(Scaled(lambda grad: grad * 2))
    assert "Scaled(scale=<function" in text and "0x" not in text
    many = [hooks.allreduce()] * 101
    keeps = functools.partial(doubled, many, {4: hooks.cast()}, torch.nn.Linear(4, 4))
    assert printed_hook(keeps) == "another"


def test_versions_and_lengths_of_messages_are_compared() -> None:
    found = compared_settings(hooks.error_feedback(hooks.blockwise(bits=4)))
    assert found["the version of torch_commhook"] == torch_commhook.__version__
    (form,) = cast(list[str], found["the form of messages"])
    nbytes = codecs.blockwise(bits=4).nbytes(1000)
    assert form.startswith("blockwise(bits=4): 1 values in ")
    assert form.endswith(f"1000 values in {nbytes} bytes")
