"""A hook on a plain module, on one rank: what it takes, and what it leaves as it was."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layered_net import BUCKET_CAP_MB, Net, batch, differing, gradients_of
from mode_cases import BreaksTheGraph, compiled_backward
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.attachment.training_state import BeforeForward, register_first

pytestmark = pytest.mark.usefixtures("one_rank")


def _alone(model: nn.Module) -> nn.Module:
    """A copy with the gradients of ``batch(0)`` and no hook."""
    other = Net()
    other.load_state_dict(model.state_dict())
    other(batch(0)).sum().backward()
    return other


def test_errors_of_attach() -> None:
    for module, options, message in (
        (nn.Linear(2, 2, device="meta"), {}, "'weight' is on the meta device; materialise"),
        (nn.ReLU(), {}, "has no parameter that requires grad"),
        (nn.LazyLinear(2), {}, "'weight' is not initialised; run the model once"),
        (DDP(nn.Linear(2, 2)), {"bucket_cap_mb": 3}, "bucket_cap_mb must be given to Distributed"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(module, hooks.allreduce(), **options)
    for number in (0, True, float("nan"), 1e300, "x"):
        with pytest.raises(
            ValueError, match="bucket_cap_mb must be a positive number of MiB, got"
        ) as raised:
            attach(nn.Linear(2, 2), hooks.allreduce(), bucket_cap_mb=number)  # type: ignore[arg-type]
        assert str(raised.value).endswith(repr(number))
    with pytest.raises(TypeError, match="must not be a ScriptModule"):
        attach(torch.jit.script(nn.Linear(2, 2)), hooks.allreduce())
    model = nn.Linear(2, 2)
    attach(model, hooks.allreduce())
    with pytest.raises(RuntimeError, match=r"'allreduce\(\)' is attached to this model"):
        attach(model, hooks.cast())
    model = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'weight' has an optimizer in backward, which would"):
        attach(model, hooks.allreduce())


def test_a_parameter_has_one_hook() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    for first, second, name in ((inner, outer, "0.weight"), (outer, inner, "weight")):
        handle = attach(first, hooks.allreduce())
        with pytest.raises(RuntimeError, match=rf"'{name}' also belongs to another module"):
            attach(second, hooks.cast())
        handle.remove()
        del handle  # which has what the hook remembers
    gc.collect()
    assert weakref.getweakrefcount(inner.weight) == 0


@pytest.mark.parametrize("mode", ["ddp_optimizer", "python_reducer"])
def test_a_parameter_in_ddp(mode: str) -> None:
    inner = nn.Linear(2, 2)
    with torch._dynamo.config.patch(optimize_ddp=mode):
        ddp = DDP(inner)
    for hooked in (True, False):  # DDP averages with and without a hook
        handle = attach(ddp, hooks.allreduce()) if hooked else None
        message = "averages the gradient of parameter 'weight'|'weight' also belongs to another"
        with pytest.raises(RuntimeError, match=message):
            attach(inner, hooks.cast())
        if handle is not None:
            handle.remove()
    del handle, ddp
    gc.collect()
    if mode == "python_reducer":
        return  # its hooks stay on the parameters, and go on averaging
    attach(inner, hooks.allreduce())
    ddp = DDP(inner)
    with pytest.raises(RuntimeError, match="averages the gradient of parameter 'weight'"):
        ddp(torch.ones(1, 2)).sum().backward()


def test_two_ddps_may_share_a_module() -> None:
    inner = nn.Linear(2, 2)
    attach(DDP(inner), hooks.allreduce())
    attach(DDP(inner), hooks.allreduce())


def test_removed_and_attached_again() -> None:
    model = nn.Linear(2, 2)
    for _ in range(2):
        handle = attach(model, lambda state, bucket: bucket.buffer() * 3)
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[3, 3], [3, 3]]
        handle.remove()
        assert not handle.is_attached
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[1, 1], [1, 1]]
    assert not model._forward_pre_hooks


def test_a_compiled_model_is_its_module() -> None:
    model = nn.Linear(2, 2)
    handle = attach(torch.compile(model, backend="eager"), hooks.allreduce())
    model(torch.ones(1, 2)).sum().backward()
    assert handle.stats().steps == 1


def test_views_share_the_buckets_memory() -> None:
    model = Net()
    buffers: list[Tensor] = []

    def keep(state: object, bucket: Any) -> Tensor:
        buffers.append(bucket.buffer())
        return bucket.buffer()

    attach(model, keep, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=True)
    for number in range(3):
        model.zero_grad(set_to_none=False)
        buffers.clear()
        model(batch(0, number)).sum().backward()
    memory = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    assert all(p.grad.untyped_storage().data_ptr() in memory for p in model.parameters())


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda bucket: pickle.loads(pickle.dumps(bucket))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_bucket(copied: Callable[[GradBucket], GradBucket]) -> None:
    buffers: list[tuple[Tensor, Tensor]] = []

    def keep(state: object, bucket: GradBucket) -> Tensor:
        other = copied(bucket)
        assert type(other) is GradBucket
        buffers.append((other.buffer(), bucket.buffer()))
        return bucket.buffer()

    model = nn.Linear(2, 2)
    attach(model, keep)
    model(torch.ones(1, 2)).sum().backward()
    ((own, original),) = buffers
    assert torch.equal(own, original)


def test_a_hook_with_a_group_on_a_bucket() -> None:
    hook = hooks.allreduce()
    model = nn.Linear(2, 2)
    attach(model, lambda state, bucket: hook(bucket.process_group(), bucket))
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[1, 1], [1, 1]]


def test_hooks_start_before_backward_ends() -> None:
    model = Net()
    events: list[str] = []

    def hook(state: object, bucket: Any) -> Tensor:
        events.append("hook")
        return bucket.buffer()

    attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    for _ in range(2):
        events.clear()
        x = batch(0).requires_grad_()
        x.register_hook(lambda gradient: events.append("end"))
        model(x).sum().backward()
    assert events.index("end") > 1


def test_a_layer_in_two_reentrant_checkpoints() -> None:
    shared, first = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.ones(2, 4)

    def twice(inputs: Tensor) -> Tensor:
        inputs = checkpoint(shared, inputs, use_reentrant=True)
        return checkpoint(shared, inputs, use_reentrant=True)

    handle = attach(shared, lambda state, bucket: bucket.buffer())
    twice(x.clone().requires_grad_()).sum().backward()
    got = gradients_of(shared)
    handle.remove()
    shared.zero_grad()
    shared(shared(x)).sum().backward()
    assert differing(got, gradients_of(shared)) == []

    # Its bucket has been sent when the second gradient comes.
    model = nn.ModuleList([first, shared])
    attach(model, hooks.allreduce(), bucket_cap_mb=1e-6)
    with pytest.raises(RuntimeError, match=r"'1.(weight|bias)' got a gradient after its buck"):
        twice(first(x)).sum().backward()
    model.zero_grad()
    shared(first(x)).sum().backward()  # the next step works
    assert shared.bias.grad.tolist() == [2, 2, 2, 2]


def test_an_exception_between_reentrant_segments() -> None:
    """Where all gradients so far came from backward passes inside the one that was left."""
    first, second, third = (nn.Linear(4, 4) for _ in range(3))

    def loss(fails: bool = False, deep: bool = True) -> Tensor:
        x = checkpoint(second, first(torch.ones(2, 4)), use_reentrant=True)
        if fails:
            x.register_hook(lambda gradient: 1 / 0)
        return (checkpoint(third, x, use_reentrant=True) if deep else x).square().sum()

    model = nn.ModuleList([first, second, third])
    for capacity in (25, 1e-5):
        handle = attach(model, hooks.allreduce(), bucket_cap_mb=capacity)
        for deep in (True, False):
            model.zero_grad()
            loss(deep=deep).backward()
            want = gradients_of(model)
            with pytest.raises(ZeroDivisionError):
                loss(fails=True).backward()
            model.zero_grad()
            loss(deep=deep).backward()
            assert differing(gradients_of(model), want) == []
        handle.remove()


@pytest.mark.parametrize("then", ["eager", "compiled"])
def test_an_exception_elsewhere_in_backward(then: str) -> None:
    model = Net()
    attach(model, lambda state, bucket: bucket.buffer() * 2, bucket_cap_mb=BUCKET_CAP_MB)
    handle = model.layers[2].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(0)).sum().backward()
    handle.remove()
    model.zero_grad()
    with compiled_backward(then == "compiled", "eager"):
        model(batch(0)).sum().backward()
    assert differing(gradients_of(model), [2 * g for g in gradients_of(_alone(model))]) == []


def test_a_backward_inside_a_function() -> None:
    """Unlike that of a reentrant checkpoint, it is not nested in another one."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                model(batch(0), skip=(3,)).sum().backward()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    model = Net()
    handle = attach(model, lambda state, bucket: bucket.buffer() * 2)
    Inner.apply(torch.ones(1, requires_grad=True))
    assert handle.stats().steps == 1


@pytest.mark.parametrize("kind", ["views", "complex"])
def test_compiled_with(kind: str) -> None:
    model: nn.Module = Net()
    if kind == "complex":
        model = nn.ParameterDict({"z": torch.randn(24, dtype=torch.complex64)})

    def loss() -> Tensor:
        if kind == "complex":
            return (model["z"] * batch(0)).abs().sum()
        return model(batch(0)).sum()

    loss().backward()
    want = gradients_of(model)
    attach(model, hooks.allreduce(), gradient_as_bucket_view=kind == "views")
    for way in ("eager", "compiled", "eager", "compiled"):
        model.zero_grad(set_to_none=way == "eager")
        with compiled_backward(way == "compiled", fullgraph=True):
            loss().backward()
        assert differing(gradients_of(model), want) == []


def test_several_models_are_compiled_as_one_graph_each() -> None:
    torch._dynamo.reset()
    for _ in range(3):
        model = nn.Linear(24, 24)
        model(batch(0)).sum().backward()
        want = gradients_of(model)
        model.zero_grad()
        attach(model, hooks.error_feedback(hooks.topk(1.0)))
        with compiled_backward(fullgraph=True):
            model(batch(0)).sum().backward()
        assert differing(gradients_of(model), want) == []


def test_a_gradient_of_another_layout() -> None:
    model = nn.ParameterDict({"table": torch.randn(10, 4)})
    attach(model, hooks.allreduce())
    words = torch.tensor([1, 2])
    with pytest.raises(TypeError, match=r"'table' must have layout torch.strided, got torch.sp"):
        nn.functional.embedding(words, model["table"], sparse=True).sum().backward()
    model.zero_grad()
    tied = nn.Embedding(10, 4, sparse=True)
    attach(tied, hooks.allreduce())
    with pytest.raises(TypeError, match=r"'weight' must have layout torch.sparse_coo, got torc"):
        (tied(words) @ tied.weight.T).sum().backward()


def test_copies_have_no_hook() -> None:
    model = Net()
    attach(model, lambda state, bucket: bucket.buffer() * 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(batch(0)).sum().backward()
        own = gradients_of(other)
        model.zero_grad()
        model(batch(0)).sum().backward()
        assert differing(gradients_of(model), [2 * g for g in own]) == []
        attach(other, hooks.allreduce()).remove()  # it has none


def test_forward_hooks_have_one_order() -> None:
    """Dynamo of torch 2.11 takes that of the underlying dict."""
    module = nn.Linear(2, 2)
    called: list[str] = []

    class Named(BeforeForward):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, module: nn.Module, args: Any) -> None:
            called.append(self.name)

    module.register_forward_pre_hook(Named("second"))
    module.register_forward_pre_hook(Named("third"))
    handle = register_first(module, Named("first"))
    present = module._forward_pre_hooks
    assert list(dict.keys(present)) == list(present)
    module(torch.zeros(1, 2))
    handle.remove()
    module(torch.zeros(1, 2))
    assert called == ["first", "second", "third", "second", "third"]


def _graphs_of_a_broken_backward(hook: hooks.Hook) -> int:
    torch._dynamo.reset()
    counters.clear()
    model = Net()
    attach(model, hook, bucket_cap_mb=BUCKET_CAP_MB)
    with compiled_backward(backend="eager"):
        for step in range(2):
            x = batch(0, step)
            for layer in model.layers[:-1]:
                x = layer(x)
            model.layers[-1](BreaksTheGraph.apply(x)).sum().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "hook", [hooks.error_feedback(hooks.sign()), hooks.powersgd(2)], ids=["sign", "powersgd"]
)
def test_what_is_started_before_a_graph_break_costs_no_graph(hook: hooks.Hook) -> None:
    """Nothing of it is left at the end, which the graph after the break would have to make."""
    assert _graphs_of_a_broken_backward(hook) == _graphs_of_a_broken_backward(hooks.allreduce())


def test_the_model_is_not_kept_alive() -> None:
    model = Net()
    handle = attach(model, hooks.allreduce())
    model(batch(0)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not handle.is_attached
