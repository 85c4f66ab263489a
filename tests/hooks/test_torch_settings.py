"""Hooks do not depend on the default dtype and device, or on ``torch.inference_mode()``."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_processes, on_ranks
from ops_reference import default_dtype
from remembering_hooks import HOOKS, batch, check_same, hook_of, model_of
from state_training import Context, Run
from torch import Tensor, nn

import torch_commhook
from torch_commhook import GradBucket, HookHandle, attach, codecs, hooks, metrics, reshard_states
from torch_commhook.collectives.compressed import compressed_all_reduce
from torch_commhook.collectives.compressed_call import MessageBuffers, MessageError
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
    measured = MessageError([values], error)
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


# ---- inference mode ------------------------------------------------------------------------------

EAGER = ["module", "views", "ddp", "ddp-views"]


def attached(run: Run, context: Context) -> HookHandle:
    with context():
        handle = run.attach()
    run.train(2)
    return handle


def replaced(run: Run, context: Context) -> HookHandle:
    handle = run.attach("allreduce()")
    run.train(1)
    hook = hook_of(run.hook)
    with context():
        handle.replace(hook)
    run.train(2)
    return handle


def loaded(run: Run, context: Context) -> HookHandle:
    handle = run.attach()
    run.train(1)
    with context():
        state = handle.state_dict()
        assert handle.stats() is not None
    run.train(1)
    with context():
        handle.load_state_dict(state)
    run.train(2)
    return handle


def loaded_from_states_made_there(run: Run, context: Context) -> HookHandle:
    """Of which a user has made copies, and which were written to outside."""
    handle = run.attach()
    run.train(1)
    with context():
        state = handle.state_dict()
        copies = {
            key: {kind: {n: t.clone() for n, t in each.items()} for kind, each in value.items()}
            for key, value in state.items()
            if key == f"rank{run.rank}"
        }
    for each in state.get(f"rank{run.rank}", {}).values():
        for tensor in each.values():
            tensor.mul_(0.5)
    handle.load_state_dict({**state, **copies})
    run.train(2)
    return handle


def synchronized(run: Run, context: Context) -> HookHandle:
    handle = run.attach()
    run.train(1)
    with context():
        handle.synchronize()
    run.train(2)
    return handle


def stepped(run: Run, context: Context) -> HookHandle:
    """The optimizer's steps, after which ranks that are apart come together."""
    handle = run.attach()
    run.train(3, context)
    run.train(3)
    return handle


ENTRIES = [attached, replaced, loaded, loaded_from_states_made_there]
#: For hooks that keep ranks apart.
EXCHANGES = [synchronized, stepped]


def trained_in_inference(
    rank: int, hook: str, road: str, entry: Callable[[Run, Context], HookHandle], context: Context
) -> list[Tensor]:
    run = Run(rank, hook, road)
    handle = entry(run, context)
    handle.synchronize()
    handle.remove()
    return run.found + run.parameters


@pytest.mark.parametrize(
    ("entry", "hook"),
    [
        pytest.param(entry, hook, id=f"{entry.__name__}-{hook}")
        for entry in ENTRIES + EXCHANGES
        for hook in (HOOKS if entry in ENTRIES else HOOKS[-2:])
    ],
)
def test_what_is_made_in_inference_mode(
    hook: str, entry: Callable[[Run, Context], HookHandle]
) -> None:
    for road in EAGER:
        want = run_ranks(trained_in_inference, 2, hook, road, entry, nullcontext)
        got = run_ranks(trained_in_inference, 2, hook, road, entry, torch.inference_mode)
        check_same(got, want)


@pytest.mark.parametrize("entry", ENTRIES + EXCHANGES, ids=lambda entry: entry.__name__)
@pytest.mark.parametrize("hook", ["error_feedback(powersgd(rank=2))", HOOKS[-1]])
def test_what_is_made_without_gradients(
    hook: str, entry: Callable[[Run, Context], HookHandle]
) -> None:
    for road in EAGER:
        want = run_ranks(trained_in_inference, 2, hook, road, entry, nullcontext)
        got = run_ranks(trained_in_inference, 2, hook, road, entry, torch.no_grad)
        check_same(got, want)


@pytest.mark.parametrize("entry", [attached, loaded], ids=lambda entry: entry.__name__)
@on_processes
def test_under_compiled_autograd(rank: int, entry: Callable[[Run, Context], HookHandle]) -> None:
    want, got = (
        trained_in_inference(rank, "error_feedback(blockwise(bits=4))", "compiled", entry, context)
        for context in (nullcontext, torch.inference_mode)
    )
    check_same([got], [want])


def _backward(rank: int, context: Context, hook: str, views: bool) -> list[Tensor]:
    """The first backward inside, which PyTorch allows where the forward was outside."""
    model = model_of()
    handle = attach(model, hook_of(hook), gradient_as_bucket_view=views)
    loss = model(batch(rank, 0)).square().sum()
    with context():
        loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    for number in range(1, 3):
        model.zero_grad(set_to_none=True)
        model(batch(rank, number)).square().sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    handle.remove()
    return found


@pytest.mark.parametrize("hook", [*HOOKS[:-2], "cpp('cast')"])
def test_a_backward_in_inference_mode(hook: str) -> None:
    for views in (False, True):
        want = run_ranks(_backward, 2, nullcontext, hook, views)
        check_same(run_ranks(_backward, 2, torch.inference_mode, hook, views), want)


@on_ranks(2)
def test_buffers_for_messages_made_in_inference_mode(rank: int) -> None:
    """Buffers for messages are for all calls."""
    buffers, error = MessageBuffers(), torch.zeros(100)
    with torch.inference_mode():
        compressed_all_reduce(torch.ones(100), codecs.sign(), buffers=buffers).wait()
    got = compressed_all_reduce(torch.ones(100), codecs.sign(), error=error, buffers=buffers)
    assert torch.equal(got.wait(), torch.full((100,), 2.0))


def test_a_bucket_made_in_inference_mode() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.float32))]
    with torch.inference_mode():
        bucket = GradBucket(parameters, [torch.ones(3), None])
        into = GradBucket(parameters, [torch.ones(3), None], torch.empty(5))
    bucket.buffer().mul_(2)
    assert bucket.buffer().tolist() == [2, 2, 2, 0, 0]
    assert into.buffer().tolist() == [1, 1, 1, 0, 0] and into.buffer().is_inference()


def test_states_made_for_other_ranks_in_inference_mode() -> None:
    def states(rank: int) -> dict[str, Any]:
        run = Run(rank, "error_feedback(sign())", "module")
        handle = run.attach()
        run.train(1)
        state = handle.state_dict()
        handle.remove()
        return state

    given = run_ranks(states, 2)
    with torch.inference_mode():
        [made] = reshard_states(given, 1)
    for kinds in (made["rank0"], made["shared"]):
        for tensors in kinds.values():
            for tensor in tensors.values():
                assert not tensor.is_inference()


@on_ranks(1)
def test_hooks_are_no_part_of_inference_mode(rank: int) -> None:
    """The mode is as it was when a call is over, and what was made is of no use to autograd."""
    model = nn.Linear(3, 2)
    with torch.inference_mode():
        handle = attach(model, hooks.error_feedback(hooks.sign()))
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        state = handle.state_dict()
    assert not any(t.requires_grad for t in state["rank0"]["error"].values())
    handle.remove()
