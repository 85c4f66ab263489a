"""The modes of a model with a hook: the kind of model, and the runner of its backward."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BUCKET_CAP_MB = 0.01
# torch.compile refuses DDP models with buckets that are smaller than the first one, of 1 MiB.
FIRST_BUCKET_BYTES = 1024


@dataclass(frozen=True)
class Mode:
    """A kind of model, and its runner.

    Attributes:
        model: ``module``, ``ddp`` (C++ reducer) or ``python_reducer`` (DDP with its Python
            reducer).
        runner: ``eager``; ``compile``: a compiled forward; ``context``: also a compiled backward,
            by compiled autograd's context manager; ``config``: a compiled function calls backward,
            with ``torch._dynamo.config.compiled_autograd``.
        fullgraph: whether a graph break in the backward is an error.
        backend: for ``torch.compile``. ``aot_eager`` traces everything, but does not compile
            kernels.
        dynamic: whether the backward is compiled for all shapes; None lets the compiler decide.
    """

    model: str
    runner: str
    fullgraph: bool = False
    backend: str = "inductor"
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
    Mode("ddp", "eager"),
    Mode("ddp", "compile"),
    Mode("ddp", "context"),
    Mode("ddp", "config"),
    Mode("python_reducer", "eager"),
    Mode("python_reducer", "compile"),
    Mode("python_reducer", "context"),
    Mode("python_reducer", "config"),
    Mode("module", "eager"),
    Mode("module", "compile"),
    Mode("module", "context"),
    Mode("module", "context", fullgraph=True),
    Mode("module", "config"),
]

#: The same modes without Inductor's kernels, for tests that do not depend on these.
TRACED_MODES = [replace(mode, backend="aot_eager") for mode in MODES]
