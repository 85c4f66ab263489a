"""PyTorch's tests of DDP on a process group in Python that has one rank, on ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_doubles import COUNTED, RESULTS, TORCH, LonelyGroup
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from torch_commhook.process_group import register

by_result = pytest.mark.parametrize("result", RESULTS)
as_view = pytest.mark.parametrize("gradient_as_bucket_view", [False, True])


def compare(
    make: Callable[[], nn.Module],
    result: str = "our Work",
    *,
    steps: int = 2,
    call: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x),
    **options: Any,
) -> LonelyGroup:
    """Train a model alone and with DDP on a lonely group: the gradients are equal."""
    torch.manual_seed(0)
    model = make()
    group = LonelyGroup(result)
    ddp = DDP(copy.deepcopy(model), process_group=group, **options)
    for _ in range(steps):
        x = torch.randn(8, 20)
        for each in (model, ddp):
            each.zero_grad()
            call(each, x).square().sum().backward()
        for expected, got in zip(model.parameters(), ddp.parameters(), strict=True):
            assert (expected.grad is None) == (got.grad is None)
            if expected.grad is not None:
                assert torch.equal(got.grad, expected.grad)
                assert expected.grad.any()
            with torch.no_grad():
                for parameter in (expected, got):
                    parameter -= 0 if parameter.grad is None else 0.01 * parameter.grad
    return group


@by_result
@as_view
def test_two_steps(result: str, gradient_as_bucket_view: bool) -> None:
    group = compare(
        lambda: nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 4), nn.Softmax(1)),
        result,
        bucket_cap_mb=0.001,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )
    assert (group.waits > 0) == (group.futures > 0) == (result in COUNTED)


def test_without_init_sync_nothing_is_asked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    synced, not_synced = LonelyGroup("our Work"), LonelyGroup("our Work")
    DDP(model, process_group=synced)
    DDP(model, process_group=not_synced, init_sync=False)
    assert synced.waits > 0
    assert (not_synced.waits, not_synced.futures) == (0, 0)


# ---- checkpointing -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two linear layers, of which some are run in checkpoints.

    Args:
        layers: the numbers of the layers that are run, after the first one.
        reentrant: the kind of checkpoint.
        shared: whether both layers have one weight.
        alternating: whether a call runs only one layer, each in its turn.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        *,
        reentrant: bool,
        shared: bool = False,
        alternating: bool = False,
    ) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))
        if shared:
            self.all[0].weight = self.all[1].weight
        self.layers, self.reentrant, self.alternating = layers, reentrant, alternating
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.alternating:
            self.calls += 1
            layers: tuple[int, ...] = (self.calls % 2,)
        else:
            x, layers = self.all[0](x), self.layers
        for layer in layers:
            x = checkpoint(self.all[layer], x, use_reentrant=self.reentrant)
        return x


reentrant = pytest.mark.parametrize("reentrant", [False, True])
TWICE = r"Expected to mark a variable ready only once\."


@reentrant
@as_view
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
@pytest.mark.parametrize("layers", [(1,), (1, 1)], ids=["once", "twice"])
def test_a_checkpoint(
    reentrant: bool,
    gradient_as_bucket_view: bool,
    static_graph: bool,
    find_unused_parameters: bool,
    layers: tuple[int, ...],
) -> None:
    is_refused = reentrant and not static_graph and (find_unused_parameters or len(layers) > 1)
    with pytest.raises(RuntimeError, match=TWICE) if is_refused else nullcontext():
        compare(
            lambda: Checkpointed(layers, reentrant=reentrant),
            steps=5,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )


@as_view
@pytest.mark.parametrize("shared", [False, True])
def test_another_layer_in_each_step(gradient_as_bucket_view: bool, shared: bool) -> None:
    compare(
        lambda: Checkpointed((), reentrant=False, shared=shared, alternating=True),
        steps=5,
        find_unused_parameters=True,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )


def _shared_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    model[0].weight = model[1].weight
    return model


@reentrant
@as_view
@pytest.mark.parametrize("static_graph", [False, True])
def test_a_shared_weight_in_a_checkpoint_around_the_model(
    reentrant: bool, gradient_as_bucket_view: bool, static_graph: bool
) -> None:
    def call(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    compare(
        _shared_layers,
        steps=5,
        call=call,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
    )


@as_view
def test_a_shared_weight_checkpointed_twice(gradient_as_bucket_view: bool) -> None:
    compare(
        lambda: Checkpointed((1, 1), reentrant=True, shared=True),
        steps=5,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=True,
    )


# ---- buffers and outputs -------------------------------------------------------------------------


@pytest.mark.skipif(
    TORCH < (2, 13), reason="this torch's DDP broadcasts into buffers that a backward needs"
)
def test_buffers_are_broadcast_between_two_forwards() -> None:
    group = LonelyGroup("our Work")
    model = DDP(nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10)), process_group=group)
    waits = group.waits
    x = torch.randn(4, 10)
    (model(x).square().mean() + model(x).square().mean()).backward()
    assert group.waits > waits
    assert all(parameter.grad is not None for parameter in model.parameters())


@dataclass
class Outputs:
    """What a model gives: a tensor that may be missing, and others by name."""

    first: Tensor | None
    others: dict[str, Tensor]


class WithOutputs(nn.Module):
    def __init__(self, *, skip_first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 10), nn.Linear(20, 10)
        self.skip_first = skip_first

    def forward(self, x: Tensor) -> Outputs:
        first = None if self.skip_first else self.first(x).relu()
        return Outputs(first, {"a": self.second(x), "b": self.second(x).relu()})


@pytest.mark.parametrize("skip_first", [False, True])
def test_outputs_in_a_dataclass(skip_first: bool) -> None:
    def call(model: Any, x: Tensor) -> Tensor:
        outputs = model(x)
        total = outputs.others["a"] + outputs.others["b"]
        return total if skip_first else total + outputs.first

    compare(lambda: WithOutputs(skip_first=skip_first), call=call, find_unused_parameters=True)


# ---- compilers -----------------------------------------------------------------------------------


def test_a_compiled_model(one_rank: None, fresh_compiler: None) -> None:
    group = LonelyGroup("Future")
    register(group, "compiled")
    group._set_group_desc("compiled")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    ddp = torch.compile(DDP(copy.deepcopy(model), process_group=group), backend="eager")
    for _ in range(3):
        x = torch.randn(2, 4)
        for each in (model, ddp):
            each.zero_grad()
            each(x).sum().backward()
        for expected, got in zip(model.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(got.grad, expected.grad)
    dist.destroy_process_group(group)
