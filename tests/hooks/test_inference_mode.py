"""Hooks that are attached, replaced, loaded or asked inside of ``torch.inference_mode()``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from on_ranks import on_processes, on_ranks
from remembering_hooks import HOOKS, batch, check_same, hook_of, model_of
from state_training import Context, Run
from torch import Tensor, nn

from torch_commhook import GradBucket, HookHandle, attach, codecs, hooks, reshard_states
from torch_commhook.collectives.compressed import compressed_all_reduce
from torch_commhook.collectives.message_buffers import MessageBuffers
from torch_commhook.testing import run_ranks

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


def trained(
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
        want = run_ranks(trained, 2, hook, road, entry, nullcontext)
        got = run_ranks(trained, 2, hook, road, entry, torch.inference_mode)
        check_same(got, want)


@pytest.mark.parametrize("entry", ENTRIES + EXCHANGES, ids=lambda entry: entry.__name__)
@pytest.mark.parametrize("hook", ["error_feedback(powersgd(rank=2))", HOOKS[-1]])
def test_what_is_made_without_gradients(
    hook: str, entry: Callable[[Run, Context], HookHandle]
) -> None:
    for road in EAGER:
        want = run_ranks(trained, 2, hook, road, entry, nullcontext)
        got = run_ranks(trained, 2, hook, road, entry, torch.no_grad)
        check_same(got, want)


@pytest.mark.parametrize("entry", [attached, loaded], ids=lambda entry: entry.__name__)
@on_processes
def test_under_compiled_autograd(rank: int, entry: Callable[[Run, Context], HookHandle]) -> None:
    want, got = (
        trained(rank, "error_feedback(blockwise(bits=4))", "compiled", entry, context)
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
