"""What a user has set for new tensors, their dtype and device, is nothing to hooks."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_processes
from ops_reference import default_dtype
from remembering_hooks import HOOKS, check_same
from state_training import Run
from torch import Tensor

import torch_commhook
from torch_commhook import codecs, metrics
from torch_commhook.collectives.message_error import begin_measuring
from torch_commhook.native import bucket_ops
from torch_commhook.testing import run_ranks


def trained(rank: int, hook: str, device: str | None, road: str = "module") -> list[Tensor]:
    """All gradients of three steps, the parameters, and what the hook remembers."""
    run = Run(rank, hook, road)
    with nullcontext() if device is None else torch.device(device):
        handle = run.attach()
        run.train(3)
        handle.stats()
        state = handle.state_dict()
        handle.load_state_dict(state)
        handle.synchronize()
    handle.remove()
    return run.found + run.parameters + _tensors(state) + _tensors(handle.state_dict())


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for key in sorted(state) for tensor in _tensors(state[key])]
    return []


@pytest.fixture(scope="module")
def plain() -> Any:
    kept: dict[str, list[list[Tensor]]] = {}

    def results(hook: str) -> list[list[Tensor]]:
        if hook not in kept:
            kept[hook] = run_ranks(trained, 2, hook, None)
        return kept[hook]

    return results


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=lambda dtype: str(dtype)[6:]
)


@pytest.mark.parametrize("hook", HOOKS)
@DTYPES
def test_a_default_dtype(plain: Any, hook: str, dtype: torch.dtype) -> None:
    with default_dtype(dtype):
        got = run_ranks(trained, 2, hook, None)
    check_same(got, plain(hook))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_default_device(plain: Any, hook: str) -> None:
    check_same(run_ranks(trained, 2, hook, "meta"), plain(hook))


def _both(rank: int, hook: str, road: str) -> None:
    want = trained(rank, hook, None, road)
    with default_dtype(torch.bfloat16):
        got = trained(rank, hook, None if road == "ddp" else "meta", road)
    check_same([got], [want])


@pytest.mark.parametrize("hook", ["error_feedback(powersgd(rank=2))", "adaptive(20000)"])
@pytest.mark.parametrize("road", ["module", "ddp"])
@on_processes
def test_defaults_over_gloo(rank: int, hook: str, road: str) -> None:
    """Where ranks have groups and threads of the library's own."""
    _both(rank, hook, road)


@pytest.mark.parametrize("hook", ["error_feedback(powersgd(rank=2))", "clip(0.1, cast())"])
@on_processes
def test_defaults_under_compiled_autograd(rank: int, hook: str) -> None:
    _both(rank, hook, "compiled")


@DTYPES
@pytest.mark.parametrize("capability", ["reference", None])
def test_codecs_by_themselves(dtype: torch.dtype, capability: str | None) -> None:
    """Every codec with blocks of tiny numbers, which are lifted; and what measures its loss."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e-36
    before = bucket_ops.cpu_capability()
    try:
        if capability is not None:
            bucket_ops.cpu_capability(capability)
        for codec in (one for cls in codecs.CODECS.values() for one in cls.examples()):
            found = []
            for default in (torch.float32, dtype):
                with default_dtype(default):
                    found.append(_through(codec, values))
            for a, b in zip(*found, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), codec
    finally:
        bucket_ops.cpu_capability(before)


def _through(codec: Any, values: Tensor) -> list[Tensor]:
    rounding = torch.tensor([3, 1], dtype=torch.int64) if codec.is_random else None
    message = torch.empty(codec.nbytes(1000), dtype=torch.uint8)
    error = torch.zeros(1000, dtype=torch.float32) if codec.takes_error else None
    meter = metrics.CallMeter()
    measured = begin_measuring(meter, [values], error)
    assert measured is not None
    codec.encode([values], message, error=error, rounding=rounding)
    measured.note(meter, codec, error, rounding)
    total = torch.empty(1000, dtype=torch.float32)
    codec.decode_sum(torch.stack([message, message]), [total], rounding=rounding)
    squares = torch.tensor(meter.squares, dtype=torch.float64)
    return [message, total, squares, *([] if error is None else [error])]


# ---- the sources ---------------------------------------------------------------------------------

#: Functions of torch that make a tensor of the default dtype, on the default device.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor"),
    *("sparse_coo_tensor", "tensor", "zeros"),
}


def _calls_without(tree: ast.AST) -> list[str]:
    """The calls of factories that leave the dtype or the device to the defaults."""
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
            and not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
        ):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_every_new_tensor_has_dtype_and_device() -> None:
    folder = Path(torch_commhook.__file__).parent
    found = {
        str(path.relative_to(folder)): calls
        for path in sorted(folder.rglob("*.py"))
        if (calls := _calls_without(ast.parse(path.read_text())))
    }
    assert found == {}


def test_a_call_without_them_is_found() -> None:
    tree = ast.parse("a = torch.zeros(3, dtype=d)\nb = torch.empty(2, dtype=d, device=e)")
    assert _calls_without(tree) == ["line 1: torch.zeros(3, dtype=d)"]
