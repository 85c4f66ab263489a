"""The parts of random models: layers of many kinds, each used by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 4


class _Rows(nn.Embedding):
    """An embedding whose rows depend on the inputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward((inputs[:, 0] * 100).long() % self.num_embeddings)


class _Linear(nn.Linear):
    """A linear layer of any dtype; of the gradients too."""

    def __init__(self, dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__(WIDTH, 3, dtype=dtype)
        for parameter in self.parameters() if grad_dtype else ():
            parameter.grad_dtype = grad_dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.to(self.weight.dtype))


class _Tied(nn.Module):
    """One weight under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(self.second(self.first(inputs).tanh()).tanh())


class _Bare(nn.Module):
    """Parameters without elements, without dimensions, and with strides of another order."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, WIDTH).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.transposed * self.scalar + self.empty.sum()


class _Conjugates(nn.Module):
    """PyTorch leaves the gradients of ``weight`` and ``imaginary`` lazy."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(1))
        self.imaginary = nn.Parameter(torch.randn(1))
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.cfloat))
        self.wide = nn.Parameter(torch.randn(WIDTH, dtype=torch.cdouble))

    def forward(self, inputs: Tensor) -> Tensor:
        number = torch.complex(self.real, self.imaginary).conj()
        rows = inputs.to(torch.cfloat).mean(0) + 1j
        return (number * rows * self.weight.conj() * (1 + 2j) + self.wide.conj() * rows).sum()


class _Buffers(nn.Module):
    """Buffers of many dtypes. Autograd saves one; the forward changes others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.complex64):
            self.register_buffer(f"{dtype}".replace(".", "_"), torch.ones(3).to(dtype))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(inputs.detach().double().mean(), 0.5)
        return self.linear(inputs) * self.scale


class _Own(nn.Module):
    """What data parallelism is told to ignore: each rank has its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) + self.shift


#: The parts by name. Those in ``PLAIN`` suit every model and hook.
PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 3),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "buffered": _Buffers,
    "frozen": lambda: nn.Linear(WIDTH, 3).requires_grad_(False),
    "tied": _Tied,
    "rows": lambda: _Rows(6, 3),
    "bare": _Bare,
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, 3)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, 3)),
    "short_rows": lambda: _Rows(6, 3, max_norm=0.5),
    "sparse_rows": lambda: _Rows(6, 3, sparse=True),
    "bf16": lambda: _Linear(torch.bfloat16),
    "fp16": lambda: _Linear(torch.float16),
    "fp64": lambda: _Linear(torch.float64),
    "grad_dtype": lambda: _Linear(torch.bfloat16, torch.float32),
    "conjugates": _Conjugates,
    "own": _Own,
}
PLAIN = ("linear", "norm", "buffered", "frozen", "tied", "rows")


class Net(nn.Module):
    """A layer, and parts that each add to the loss."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({name: PARTS[name]() for name in parts})

    def forward(self, inputs: Tensor, used: Sequence[str]) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        loss = hidden.square().mean()
        for name in used:
            part = self.parts[name]
            result = part(inputs if isinstance(part, nn.Embedding) else hidden)
            loss = loss + result.abs().float().square().mean().log1p()
        return loss
