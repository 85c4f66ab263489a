"""What clips a step: the factor is applied in float32, and rounded once, whoever runs backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_on_host import DeviceOnHost
from mode_cases import Mode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.hooks.wrappers import _total_norm

pytestmark = pytest.mark.usefixtures("one_rank")

MAX_NORM = 0.37


class answering(hooks.Hook):  # noqa: N801 (a hook is written as it is called)
    """Gives results of a dtype that a cast into the gradients would round."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def average(self, bucket: GradBucket) -> Any:
        return bucket.flatten(scale=1.01, dtype=self.dtype)

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return self.dtype


class Linear(nn.Module):
    """The gradients are what the model is given; of one parameter there may be none."""

    def __init__(self, dtype: torch.dtype, *, some_unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(100, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(7, 33, dtype=dtype))
        self.third = nn.Parameter(torch.zeros(50, dtype=dtype)) if some_unused else None

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.first * a).sum() + (self.second * b).sum()


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (100,), (7, 33)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)  # type: ignore[return-value]


def wanted(gradients: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """By the rule, from results of a dtype."""
    is_double = dtype == torch.float64
    wide = torch.float64 if is_double or gradients[0].dtype == torch.float64 else torch.float32
    results = [(gradient.to(wide) * 1.01).to(dtype) for gradient in gradients]
    norm = torch.cat([result.double().view(-1) for result in results]).norm()
    scale = (MAX_NORM / (norm + 1e-6)).to(torch.float64 if is_double else torch.float32)
    assert scale < 0.1
    return [
        (result.to(wide) * scale.to(wide)).to(gradient.dtype)
        for result, gradient in zip(results, gradients, strict=True)
    ]


ROADS = {
    "module": (Mode("module", "eager"), {}),
    "views": (Mode("module", "eager"), {"gradient_as_bucket_view": True}),
    "compiled": (Mode("module", "context", fullgraph=True, backend="aot_eager"), {}),
    "inductor": (Mode("module", "context", fullgraph=True), {}),
    "unused": (Mode("module", "eager"), {}),
    "unused-compiled": (Mode("module", "context", backend="aot_eager"), {}),
    "ddp": (Mode("ddp", "eager"), {}),
    "ddp-views": (Mode("ddp", "eager"), {"gradient_as_bucket_view": True}),
    "ddp-unused": (Mode("ddp", "eager"), {"find_unused_parameters": True}),
}

#: Of the parameters, and of the results. All ways to run are tried with the first four.
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(
    ("road", "dtypes"),
    [
        pytest.param(road, dtypes, id=f"{road}-{str(dtypes[0])[6:]}-{str(dtypes[1])[6:]}")
        for road, (mode, _) in ROADS.items()
        for dtypes in (DTYPES if mode.runner == "eager" else DTYPES[:4])
        if road != "inductor" or dtypes == DTYPES[0]
    ],
)
def test_a_factor_is_rounded_once(road: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    mode, options = ROADS[road]
    own, of_results = dtypes
    torch._dynamo.reset()
    model = Linear(own, some_unused="unused" in road)
    on_ddp = mode.model == "ddp"
    wrapped = DDP(model, **options) if on_ddp else model
    handle = attach(
        wrapped, hooks.clip(MAX_NORM, answering(of_results)), **({} if on_ddp else options)
    )
    gradients = given(own)
    forward = wrapped if mode.runner == "eager" else torch.compile(wrapped, backend=mode.backend)
    for _ in range(2):  # DDP forms its buckets anew after the first
        model.zero_grad()
        loss = forward(*gradients)
        with mode._backward():
            loss.backward()
        got = model.first.grad, model.second.grad
        assert model.third is None or model.third.grad is None
        for one, want in zip(got, wanted(gradients, of_results), strict=True):
            assert one is not None and one.dtype == own
            if of_results == torch.float64:  # as is the norm, which depends on the buckets
                torch.testing.assert_close(
                    one, want, rtol=1e-7 if own != of_results else 1e-14, atol=0
                )
            else:
                assert torch.equal(one, want)
    handle.remove()


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("road", ["module", "views", "unused"])
def test_a_factor_that_stays_on_its_device(
    device_on_host: DeviceOnHost, road: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """It has the same bits: a multiplication of its own rounds no more than the write does."""
    test_a_factor_is_rounded_once(road, dtypes)


@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
def test_the_factor_of_a_sparse_gradient(on_ddp: bool) -> None:
    model = nn.Embedding(10, 30, sparse=True, dtype=torch.bfloat16)
    wrapped = DDP(model) if on_ddp else model
    handle = attach(wrapped, hooks.clip(MAX_NORM))
    rows = torch.tensor([1, 4, 7])
    weights = torch.randn(3, 30, dtype=torch.bfloat16)
    (wrapped(rows) * weights).sum().backward()
    got = model.weight.grad
    model.weight.grad = None
    handle.remove()
    (wrapped(rows) * weights).sum().backward()
    plain = model.weight.grad
    assert got is not None and got.dtype == torch.bfloat16 and plain is not None
    plain = plain.coalesce()
    scale = (MAX_NORM / (plain.values().double().norm() + 1e-6)).float()
    assert torch.equal(got.to_dense(), (plain.to_dense().float() * scale).bfloat16())


def test_the_factor_of_an_exchange_of_local_sgd() -> None:
    model = Linear(torch.float32)
    outer = hooks.outer_sgd(1.0, 0.0)
    inside = hooks.clip(MAX_NORM, answering(torch.bfloat16))
    handle = attach(model, hooks.local_sgd(1, outer=outer, hook=inside))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradients = given(torch.float32)
    model(*gradients).backward()
    optimizer.step()
    for parameter, want in zip(
        (model.first, model.second), wanted(gradients, torch.bfloat16), strict=True
    ):
        assert torch.equal(parameter, -want)
    handle.remove()


@pytest.mark.parametrize("road", ["module", "ddp"])
def test_a_norm_that_float16_cannot_hold(road: str) -> None:
    """What is clipped to a length that fits need not fit before."""

    class Large(answering):
        def average(self, bucket: GradBucket) -> Any:
            return torch.full((bucket.numel(),), 1e5)

    model = Linear(torch.float16)
    wrapped = DDP(model) if road == "ddp" else model
    handle = attach(wrapped, hooks.clip(1.0, Large(torch.float32)))
    wrapped(*given(torch.float16)).backward()
    handle.remove()
    assert model.first.grad is not None
    assert model.first.grad.norm() == pytest.approx((100 / 331) ** 0.5, rel=1e-2)


def test_the_norm() -> None:
    """Many small results lie in one batch, and long ones in several."""
    results = [torch.randn(300_000), *(torch.randn(10).bfloat16() for _ in range(50))]
    results += [torch.randn(4, 5, dtype=torch.float64), torch.randn(7, dtype=torch.complex64)]
    squares = [result.abs().double().square().sum() for result in results]
    torch.testing.assert_close(_total_norm(results), torch.stack(squares).sum().sqrt())
