"""Parameters that change while a hook is attached: an error, never gradients of one rank alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mode_cases import compiled_backward, outcome
from on_ranks import on_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, hooks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def replaced(model: Net) -> None:
    model.layers[2].weight = nn.Parameter(torch.ones(4, 4))


def all_replaced(model: Net) -> None:
    for number in (0, 2):
        for name, parameter in list(model.layers[number].named_parameters()):
            setattr(model.layers[number], name, nn.Parameter(parameter.detach().clone()))


def added(model: Net) -> None:
    model.layers.append(nn.Linear(4, 4))


def unfrozen(model: Net) -> None:
    model.layers[0].bias.requires_grad_(True)


def converted(model: Net) -> None:
    model.double()


def reshaped(model: Net) -> None:
    model.layers[2].bias.data = torch.zeros(1)


CHANGES = {
    replaced: "'{}layers.2.weight' was added to the model after the hook was attached",
    all_replaced: "'{}layers.0.weight' was added to the model after the hook was attached",
    added: "'{}layers.3.weight' was added to the model after the hook was attached",
    unfrozen: "'{}layers.0.bias' did not require grad when the hook was attached",
    converted: "'{}layers.0.weight' was torch.float32 of shape [4, 4] on cpu, and is torch.float64",
    reshaped: "'{}layers.2.bias' was torch.float32 of shape [4] on cpu, and is torch.float32 of",
}

#: Whether the model's own forward is called, and how backward runs.
RUNS = {
    "eager": (True, False),
    "past the forward": (False, False),
    "compiled backward": (True, True),
    "compiled backward past the forward": (False, True),
}


def _step(model: nn.Module, inner: Net, run: str) -> None:
    through_forward, compiled = RUNS[run]
    x = torch.ones(2, 4, dtype=inner.layers[0].weight.dtype)
    loss = (model if through_forward else inner.layers)(x).sum()
    with compiled_backward(compiled):
        loss.backward()


# Backward reaches no hook of ours where all parameters are others.
@pytest.mark.parametrize(
    ("change", "run"),
    [
        (change, run)
        for change in CHANGES
        for run in RUNS
        if change is not all_replaced or "past" not in run
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.usefixtures("one_rank")
def test_a_module(change: Callable[[Net], None], run: str) -> None:
    torch._dynamo.reset()
    model = Net()
    handle = attach(model, hooks.allreduce())
    for _ in range(2):
        _step(model, model, run)
    change(model)
    model.zero_grad()
    with pytest.raises(RuntimeError) as raised:
        _step(model, model, run)
    assert CHANGES[change].format("") in str(raised.value)
    model.zero_grad()
    if change is not reshaped:
        handle.remove()
        attach(model, hooks.allreduce())
        _step(model, model, run)
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("change", "compiled"),
    [(change, False) for change in CHANGES]
    + [(change, True) for change in CHANGES if change is not all_replaced],
)
@pytest.mark.usefixtures("one_rank")
def test_a_ddp(change: Callable[[Net], None], compiled: bool) -> None:
    torch._dynamo.reset()
    model = Net()
    ddp = DDP(model, find_unused_parameters=True)
    attach(ddp, hooks.allreduce())
    forward = torch.compile(ddp, backend="eager") if compiled else ddp
    _step(forward, model, "eager")
    change(model)
    with pytest.raises(RuntimeError) as raised:
        for _ in range(1 + compiled):
            ddp.zero_grad()
            _step(forward, model, "eager")
    assert CHANGES[change].format("module.") in str(raised.value)


@pytest.mark.usefixtures("one_rank")
def test_a_ddp_that_was_converted_and_back() -> None:
    model = Net()
    ddp = DDP(model)
    attach(ddp, hooks.allreduce())
    model.double().float()
    with pytest.raises(RuntimeError, match="DistributedDataParallel no longer averages its grad"):
        _step(ddp, model, "eager")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.usefixtures("one_rank")
def test_a_compiled_forward(compiled: bool) -> None:
    torch._dynamo.reset()
    model = Net()
    attach(model, hooks.allreduce())
    forward = torch.compile(model, backend="aot_eager")
    _step(forward, model, "compiled backward" if compiled else "eager")
    replaced(model)
    with pytest.raises(RuntimeError, match=r"'layers.2.weight' was added to the model"):
        _step(forward, model, "compiled backward" if compiled else "eager")


@pytest.mark.parametrize("in_ddp", [False, True], ids=["module", "ddp"])
@pytest.mark.usefixtures("one_rank")
def test_a_parameter_that_is_ignored_may_be_unfrozen(in_ddp: bool) -> None:
    model = Net()
    ignored = ["layers.0.bias"]
    if in_ddp:
        DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
    else:
        model._ddp_params_and_buffers_to_ignore = ignored
    wrapped = DDP(model) if in_ddp else model
    attach(wrapped, hooks.allreduce())
    unfrozen(model)
    _step(wrapped, model, "eager")
    assert model.layers[0].bias.grad is not None


@pytest.mark.usefixtures("one_rank")
def test_tensors_that_stand_in_for_parameters_for_a_while() -> None:
    model = Net()
    attach(model, hooks.allreduce())
    others = {name: torch.ones_like(p).mul(2.0) for name, p in model.named_parameters()}
    others = {name: other.requires_grad_() for name, other in others.items()}
    with torch.nn.utils.stateless._reparametrize_module(model, others):
        model(torch.ones(2, 4)).sum().backward()
    assert others["layers.0.weight"].grad is not None
    _step(model, model, "eager")


@pytest.mark.usefixtures("one_rank")
def test_what_is_no_change() -> None:
    model = Net()
    attach(model, hooks.allreduce())
    model.layers.append(nn.Dropout(0.0))
    model.layers[1] = nn.GELU()
    model.layers[2].weight.requires_grad_(False)
    model.layers.append(nn.Linear(4, 4).requires_grad_(False))
    _step(model, model, "eager")
    others = {name: torch.ones_like(p, requires_grad=True) for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, torch.ones(2, 4)).sum().backward()
    _step(model, model, "eager")


@on_processes
def test_the_other_ranks_are_told(rank: int) -> None:
    model = Net()
    attach(model, hooks.allreduce())
    _step(model, model, "eager")
    if rank == 0:
        replaced(model)
    said = outcome(lambda: _step(model, model, "eager"))
    own = "RuntimeError: torch_commhook: parameter 'layers.2.weight' was added to the model"
    peer = "PeerError: torch_commhook: this step failed on rank 0: RuntimeError"
    assert said.startswith(peer if rank else own)
