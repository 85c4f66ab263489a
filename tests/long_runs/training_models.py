"""Random models: layers of many kinds, of which each forward uses some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

_WIDTH = 4
_LOW = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.complex64)
_COMPLEX = (torch.cfloat, torch.cdouble)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_DTYPES["grad_dtype"] = torch.bfloat16  # its gradients are float32


class _Buffered(nn.Linear):
    """Buffers of many dtypes. Autograd saves one; the forward changes others."""

    def __init__(self) -> None:
        super().__init__(_WIDTH, _WIDTH)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        for dtype in _LOW:
            self.register_buffer(f"{dtype}".replace(".", "_"), torch.zeros(3).to(dtype))
        self.register_buffer("scale", torch.full((_WIDTH,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(inputs.detach().double().mean(), 0.5)
        return super().forward(inputs) * self.scale


class _Own(nn.Module):
    """Parameters, and a function of the inputs and of these."""

    def __init__(self, run: Callable[..., Tensor], *values: Tensor) -> None:
        super().__init__()
        self.run, self.values = run, nn.ParameterList(values)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(inputs, *self.values)


def _conjugates(inputs: Tensor, a: Tensor, b: Tensor, weight: Tensor, wide: Tensor) -> Tensor:
    number = torch.complex(a, b).conj() * weight.conj() * (1 + 2j)
    return ((number + wide.conj()) * (inputs.mean(0) + 1j)).sum()


def _tied() -> nn.Module:
    """One weight under three names."""
    first, other = nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH)
    other.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), first, nn.Tanh(), other)


_linear = partial(nn.Linear, _WIDTH, 3)
_rows = partial(nn.Embedding, 6, 3)
#: The parts by name. Those in ``PLAIN`` suit every model and hook.
PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "norm": partial(nn.BatchNorm1d, _WIDTH),
    "buffered": _Buffered,
    "frozen": lambda: _linear().requires_grad_(False),
    "tied": _tied,
    "rows": _rows,
    # Parameters with strides of another order, without dimensions, and without elements.
    "bare": lambda: _Own(
        lambda inputs, matrix, scalar, empty: inputs @ matrix * scalar + empty.sum(),
        *(torch.randn(5, _WIDTH).t(), torch.randn(()), torch.zeros(0, 3)),
    ),
    "orthogonal": lambda: parametrizations.orthogonal(_linear()),
    "weight_norm": lambda: parametrizations.weight_norm(_linear()),
    "spectral_norm": lambda: parametrizations.spectral_norm(_linear()),
    "short_rows": partial(_rows, max_norm=0.5),
    "sparse_rows": partial(_rows, sparse=True),
    **{name: partial(_linear, dtype=dtype) for name, dtype in _DTYPES.items()},
    # PyTorch leaves the gradients of the second and third lazy.
    "conjugates": lambda: _Own(
        _conjugates, *torch.randn(2, 1), *(torch.randn(_WIDTH, dtype=each) for each in _COMPLEX)
    ),
    # Data parallelism is told to ignore it: each rank has its own values.
    "own": lambda: nn.Sequential(_linear(), nn.BatchNorm1d(3)),
}
PLAIN = {"linear", "norm", "buffered", "frozen", "tied", "rows"}


class Net(nn.Module):
    """A layer, and parts that each add to the loss."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.trunk = nn.Linear(_WIDTH, _WIDTH)
        self.parts = nn.ModuleDict({name: PARTS[name]() for name in parts})
        for parameter in self.parts["grad_dtype"].parameters() if "grad_dtype" in parts else ():
            parameter.grad_dtype = torch.float32

    def forward(self, seed: int, used: Sequence[str]) -> Tensor:
        """The loss of the inputs of a seed; with the names of the parts that are used."""
        inputs = torch.randn(3, _WIDTH, generator=torch.Generator().manual_seed(seed))
        hidden = self.trunk(inputs).tanh()
        loss: Tensor = hidden.square().mean()
        for name in used:
            own = hidden.to(_DTYPES.get(name, torch.float32))
            rows = (inputs[:, 0] * 100).long() % 6
            result = self.parts[name](rows if name.endswith("rows") else own)
            loss = loss + result.abs().float().square().mean().log1p()
        return loss
