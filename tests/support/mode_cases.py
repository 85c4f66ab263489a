"""The modes of a model with a hook, and models, batches and hooks for them."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, hooks


def module() -> nn.Module:
    """Has no biases: Inductor adds their gradients' sums in another order than eager mode."""
    torch.manual_seed(0)
    sizes = [(48, 48), (48, 64), (64, 48)]
    return nn.Sequential(
        *(layer for size in sizes for layer in (nn.Linear(*size, bias=False), nn.ReLU())),
        nn.Linear(48, 4, bias=False),
    )


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 48, generator=torch.Generator().manual_seed(10 * step + rank))


def with_futures(state: object, bucket: GradBucket) -> torch.futures.Future:
    buffer = bucket.buffer().div_(2)
    work = dist.all_reduce(buffer, group=bucket.process_group(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def of_a_work(state: object, bucket: GradBucket) -> torch.futures.Future:
    """Returns a Work's own Future, of a list."""
    buffer = bucket.buffer().div_(bucket.process_group().size())
    return dist.all_reduce(buffer, group=bucket.process_group(), async_op=True).get_future()


class CastInTwoStages(hooks.cast):
    """Does the same as :class:`hooks.cast` with many ranks."""

    _wide_from = 2


class OwnError(Exception):
    pass


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def outcome(step: Callable[[], object]) -> str:
    """``done``, or the type and the message of what a step raises."""
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


BUCKET_CAP_MB = 0.01
# torch.compile refuses DDP models with buckets that are smaller than the first one, of 1 MiB.
FIRST_BUCKET_BYTES = 1024


@dataclass(frozen=True)
class Mode:
    """A kind of model, and its runner."""

    # ``module``, ``ddp`` (C++ reducer) or ``python_reducer`` (DDP with its Python reducer)
    model: str
    # ``eager``; ``compile``: a compiled forward; ``context``: also a compiled backward, by compiled
    # autograd's context manager; ``config``: a compiled function calls backward, with
    # ``torch._dynamo.config.compiled_autograd``
    runner: str
    fullgraph: bool = False  # whether a graph break in the backward is an error
    # for ``torch.compile``. ``aot_eager`` traces everything, but does not compile kernels
    backend: str = "inductor"
    # whether the backward is compiled for all shapes; None lets the compiler decide
    dynamic: bool | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.runner}{'-fullgraph' if self.fullgraph else ''}"

    @property
    def compiles_backward(self) -> bool:
        return self.runner in ("context", "config")

    @property
    def attach_options(self) -> dict[str, Any]:
        """Options for ``attach``: :meth:`wrap` has configured DDP's buckets."""
        return {"bucket_cap_mb": BUCKET_CAP_MB} if self.model == "module" else {}

    def wrap(self, module: nn.Module, **options: object) -> nn.Module:
        """The model that gets the hook."""
        if self.model == "module":
            return module
        reducer = "python_reducer" if self.model == "python_reducer" else "ddp_optimizer"
        with torch._dynamo.config.patch(optimize_ddp=reducer):
            return DDP(module, bucket_cap_mb=BUCKET_CAP_MB, **options)

    @contextlib.contextmanager
    def step_function(self, model: nn.Module) -> Iterator[Callable[[torch.Tensor], None]]:
        """A function that runs forward, a loss, and backward."""
        reducer = "python_reducer" if self.model == "python_reducer" else "ddp_optimizer"
        with (
            torch._dynamo.config.patch(
                optimize_ddp=reducer, compiled_autograd=self.runner == "config"
            ),
            unittest.mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", FIRST_BUCKET_BYTES),
        ):
            forward = model
            if self.runner != "eager":
                forward = torch.compile(model, backend=self.backend)

            def step(x: torch.Tensor) -> None:
                loss = forward(x).square().sum()
                with self._backward():
                    loss.backward()

            def compiled_step(x: torch.Tensor) -> None:
                model(x).square().sum().backward()

            if self.runner == "config":
                yield torch.compile(compiled_step, backend=self.backend)
            else:
                yield step

    def _backward(self) -> contextlib.AbstractContextManager[object]:
        return compiled_backward(
            self.runner == "context", self.backend, fullgraph=self.fullgraph, dynamic=self.dynamic
        )


def compiled_backward(
    is_compiled: bool = True, backend: Any = "aot_eager", **options: Any
) -> contextlib.AbstractContextManager[object]:
    """Compiles backward passes inside, or leaves them as they are."""
    if not is_compiled:
        return contextlib.nullcontext()
    compiler = torch.compile(backend=backend, **options)
    return torch._dynamo.compiled_autograd._enable(compiler)


MODES = [
    *(
        Mode(model, runner)
        for model in ("ddp", "python_reducer", "module")
        for runner in ("eager", "compile", "context", "config")
    ),
    Mode("module", "context", fullgraph=True),
]

#: The same modes without Inductor's kernels, for tests that do not depend on these.
TRACED_MODES = [replace(mode, backend="aot_eager") for mode in MODES]


def small_model(**options: object) -> DDP:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    return DDP(torch.nn.Sequential(*layers), bucket_cap_mb=0.001, **options)


def backward_step(model: torch.nn.Module, rank: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class BreaksTheGraph(torch.autograd.Function):
    """Its backward is traced up to here, and goes on in another graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        torch._dynamo.graph_break()
        return gradient
