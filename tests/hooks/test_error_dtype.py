"""Error feedback with a memory of bfloat16: its bytes, its states, and what it costs."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from modes import Mode
from rank_pool import RankPool
from remembering_hooks import hook_of
from torch import Tensor, nn

from torch_commhook import GradBucket, HookHandle, attach, hooks, reshard_states
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.testing import run_ranks

BFLOAT16 = ", dtype=torch.bfloat16)"

#: Inside of error_feedback(): of each kind of memory.
INSIDE = [
    "blockwise(bits=4)",
    "topk(0.1)",
    "randomk(0.1)",
    "chunk_topk(8, 64)",
    "powersgd(rank=2)",
    "policy([('0.*', allreduce()), ('2.*', topk(0.1))], sign())",
]
ROADS = [
    Mode("module", "eager"),
    Mode("ddp", "eager"),
    Mode("module", "context", backend="aot_eager"),
]


def narrow(inside: str) -> str:
    return f"error_feedback({inside}{BFLOAT16}"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48), nn.Linear(48, 8))


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * number + rank))


def memories(handle: HookHandle) -> Iterator[BucketMemory]:
    """Those of buckets, and of their parts."""
    waiting = handle._attached.memory.bucket_memories()
    while waiting:
        memory = waiting.pop()
        yield memory
        waiting.extend(memory.parts.values())


def errors(handle: HookHandle) -> dict[str, int]:
    """Bytes of what is remembered as lost, by dtype."""
    found: dict[str, int] = {}
    for memory in memories(handle):
        for name, tensor in memory.tensors.items():
            if "error" in name:
                found[str(tensor.dtype)] = found.get(str(tensor.dtype), 0) + tensor.nbytes
    return found


def train(model: nn.Module, mode: Mode, rank: int, steps: range) -> None:
    with mode.step_function(model) as step:
        for number in steps:
            model.zero_grad()
            step(batch(rank, number))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad


# ---- how it is written ---------------------------------------------------------------------------


def test_it_prints_as_it_is_written() -> None:
    hook = hooks.error_feedback(hooks.sign(), dtype=torch.bfloat16)
    assert repr(hook) == "error_feedback(sign(), dtype=torch.bfloat16)"
    for text in (repr(hook), "error_feedback(sign, dtype=bfloat16)"):
        assert repr(parse_hook(text)) == repr(hook)
    assert repr(hooks.error_feedback(hooks.sign(), dtype=torch.float32)) == "error_feedback(sign())"
    around = hooks.clip(1.0, hooks.after(3, hook))
    assert repr(parse_hook(repr(around))) == repr(around)


def test_copies_keep_it() -> None:
    hook = hooks.error_feedback(hooks.topk(), dtype=torch.bfloat16)
    for made in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(made) == repr(hook)
        assert made.error_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "got"),
    [(torch.float16, "torch.float16"), (torch.int8, "torch.int8"), ("bfloat16", "str"), (2, "int")],
)
def test_other_dtypes_are_refused(dtype: Any, got: str) -> None:
    message = f"error_feedback: dtype must be torch.float32 or torch.bfloat16, got {got}$"
    with pytest.raises(TypeError, match=message):
        hooks.error_feedback(hooks.sign(), dtype=dtype)


def test_one_memory_has_one_dtype() -> None:
    wide = hooks.error_feedback(hooks.sign())
    thin = hooks.error_feedback(hooks.topk(), dtype=torch.bfloat16)
    for hook, before in ((wide, thin), (thin, wide), (thin, hooks.clip(1.0, wide))):
        with pytest.raises(ValueError, match="after: before must remember errors in hook's dtype"):
            hooks.after(3, hook, before=before)
    hooks.after(3, thin, before=copy.deepcopy(thin))
    hooks.after(3, thin)


# ---- its bytes -----------------------------------------------------------------------------------


def _bytes(rank: int, mode: Mode, inside: str) -> list[dict[str, int]]:
    found = []
    for hook in (f"error_feedback({inside})", narrow(inside)):
        torch._dynamo.reset()
        model = mode.wrap(net())
        handle = attach(model, parse_hook(hook), **mode.attach_options)
        train(model, mode, rank, range(2))
        found.append(errors(handle))
        handle.remove()
    return found


@pytest.mark.parametrize(
    ("mode", "inside"),
    # Each compilation takes seconds.
    [*itertools.product(ROADS[:2], INSIDE), *itertools.product(ROADS[2:], INSIDE[:2])],
    ids=str,
)
def test_half_the_bytes(two_ranks: RankPool, mode: Mode, inside: str) -> None:
    for wide, thin in two_ranks.run(_bytes, mode, inside):
        assert list(wide) == ["torch.float32"]
        assert thin == {"torch.bfloat16": wide["torch.float32"] // 2}


def _between_nodes(rank: int) -> list[dict[str, int]]:
    wide, found = hook_of("hierarchical"), []
    for hook in (wide, hooks.error_feedback(wide.hooks_inside()[0], dtype=torch.bfloat16)):
        model = net()
        handle = attach(model, hook)
        train(model, ROADS[0], rank, range(2))
        found.append(errors(handle))
        assert all(memory.tensors["node_error"].any() for memory in memories(handle))
        handle.remove()
    return found


def test_half_the_bytes_between_nodes(two_ranks: RankPool) -> None:
    for wide, thin in two_ranks.run(_between_nodes):
        assert thin == {"torch.bfloat16": wide["torch.float32"] // 2}


def _other_floats(rank: int) -> list[int]:
    """What hooks keep of a float for each element beside errors, in bytes."""
    mode, found = ROADS[0], []
    for hook in (narrow("powersgd(rank=2)"), narrow("blockwise()")):
        model = net()
        handle = attach(model, parse_hook(hook), bucket_cap_mb=0.005)
        train(model, mode, rank, range(3))
        own = list(memories(handle))
        assert len(own) > 1
        assert all("work" not in memory.buffers._buffers for memory in own)
        lent = own[0].scratch._free
        assert all(memory.scratch is own[0].scratch for memory in own)
        found.append(sum(tensor.nbytes for tensor in lent))
        assert len(lent) <= len(own)
        handle.remove()
    return found


def test_powersgd_lends_its_floats(two_ranks: RankPool) -> None:
    """No bucket keeps the sum of gradient and error, which is float32, to itself."""
    for lent, nothing in two_ranks.run(_other_floats):
        # Buckets of the first step were others.
        assert 0 < lent <= 2 * sum(4 * parameter.numel() for parameter in net().parameters())
        assert nothing == 0


def _parts(rank: int) -> dict[str, int]:
    """A policy's hooks may remember in dtypes of their own."""
    hook = hooks.policy(
        [("0.*", hooks.error_feedback(hooks.topk(0.1), dtype=torch.bfloat16))],
        hooks.error_feedback(hooks.topk(0.1)),
    )
    model = net()
    handle = attach(model, hook)
    train(model, ROADS[0], rank, range(2))
    found = errors(handle)
    handle.remove()
    return found


def test_parts_have_dtypes_of_their_own(two_ranks: RankPool) -> None:
    first = sum(parameter.numel() for parameter in net()[0].parameters())
    rest = sum(parameter.numel() for parameter in net().parameters()) - first
    want = {"torch.bfloat16": 2 * first, "torch.float32": 4 * rest}
    assert two_ranks.run(_parts) == [want, want]


# ---- its rounding --------------------------------------------------------------------------------


def _grows(rank: int, hook: hooks.Hook) -> float:
    """By how much an error of 1 grows on average, of gradients less than its last bit."""
    numel, steps = 400, 256
    gradient = torch.full((numel,), 1 / 1024)
    gradient[:4] = 100.0  # in each message
    parameter = torch.zeros(numel, requires_grad=True)
    for step in range(steps):
        bucket = GradBucket([parameter], [gradient])
        hook(None, bucket).wait()
        error = hook.memory(bucket).tensors["error"]
        if step == 0:
            error[4:] = 1.0
    return (error[4:].float().mean() - 1.0).item()


def test_small_gradients_add_up_in_topk() -> None:
    hook = hooks.error_feedback(hooks.topk(0.01), dtype=torch.bfloat16)
    (grown,) = run_ranks(_grows, 1, hook)
    assert grown == pytest.approx(255 / 1024, rel=0.1)


# ---- its states ----------------------------------------------------------------------------------


def _own(state: dict[str, Any], rank: int) -> list[Tensor]:
    own = state[f"rank{rank}"]
    return [own[kind][name] for kind in sorted(own) for name in sorted(own[kind])]


def _loaded(rank: int, inside: str) -> None:
    """Into the other dtype and back, by ``replace`` and a state."""
    model, mode = net(), ROADS[0]
    wide, thin = f"error_feedback({inside})", narrow(inside)
    handle = attach(model, parse_hook(wide))
    train(model, mode, rank, range(2))
    state = handle.state_dict()
    handle.replace(parse_hook(thin))
    handle.load_state_dict(state)
    narrowed = handle.state_dict()
    assert handle.state_dict()["steps"] == 2
    assert list(errors(handle)) == ["torch.bfloat16"]
    for before, after in zip(_own(state, rank), _own(narrowed, rank), strict=True):
        assert (before.dtype, after.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(after, before.bfloat16())
    train(model, mode, rank, range(2, 3))
    narrowed = handle.state_dict()
    handle.replace(parse_hook(wide))
    handle.load_state_dict(narrowed)
    assert list(errors(handle)) == ["torch.float32"]
    for before, after in zip(_own(narrowed, rank), _own(handle.state_dict(), rank), strict=True):
        assert (before.dtype, after.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(after, before.float())
    train(model, mode, rank, range(3, 4))
    handle.remove()


@pytest.mark.parametrize("inside", ["blockwise(bits=4)", "topk(0.1)"])
def test_a_state_of_one_dtype_loads_into_the_other(two_ranks: RankPool, inside: str) -> None:
    two_ranks.run(_loaded, inside)


def _saturated(rank: int, inside: str) -> None:
    model = net()
    handle = attach(model, parse_hook(narrow(inside)))
    train(model, ROADS[0], rank, range(1))
    state = handle.state_dict()
    own = state[f"rank{rank}"]
    largest = torch.finfo(torch.float32).max
    for kind in own:
        own[kind] = {name: torch.full(t.shape, largest) for name, t in own[kind].items()}
    handle.load_state_dict(state)
    found = [tensor for memory in memories(handle) for tensor in memory.tensors.values()]
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    assert all(tensor.eq(torch.finfo(torch.bfloat16).max).all() for tensor in found)
    handle.remove()


@pytest.mark.parametrize("inside", ["sign()", "topk(0.1)"])
def test_the_largest_numbers_of_a_state_stay_finite(two_ranks: RankPool, inside: str) -> None:
    two_ranks.run(_saturated, inside)


def _state(rank: int) -> dict[str, Any]:
    model = net()
    handle = attach(model, parse_hook(narrow("blockwise(bits=4)")))
    train(model, ROADS[0], rank, range(3))
    state = handle.state_dict()
    handle.remove()
    return state


def _goes_on(rank: int, states: bytes) -> list[str]:
    model = net()
    handle = attach(model, parse_hook(narrow("blockwise(bits=4)")))
    handle.load_state_dict(torch.load(io.BytesIO(states), weights_only=True)[rank])
    train(model, ROADS[0], rank, range(1))
    found = list(errors(handle))
    handle.remove()
    return found


def test_states_of_another_number_of_ranks(two_ranks: RankPool) -> None:
    states = two_ranks.run(_state)
    alone = reshard_states(states, 1)
    own = alone[0]["rank0"]["error"]
    for name, error in own.items():
        mean = sum(
            state[f"rank{rank}"]["error"][name].float().view(-1) / 2
            + state[f"rank{rank}"]["shard_error"][name].float()
            for rank, state in enumerate(states)
        )
        torch.testing.assert_close(error.view(-1).float(), mean, rtol=1e-5, atol=1e-6)
    file = io.BytesIO()
    torch.save(reshard_states(alone, 2), file)
    assert two_ranks.run(_goes_on, file.getvalue()) == [["torch.bfloat16"]] * 2


# ---- a GradScaler --------------------------------------------------------------------------------


class _Scaler:
    def __init__(self) -> None:
        self.scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


def _rescaled(rank: int) -> None:
    model, scaler = net(), _Scaler()
    handle = attach(model, parse_hook(narrow("sign()")), scaler=scaler)
    train(model, ROADS[0], rank, range(2))
    before = [memory.tensors["error"].clone() for memory in memories(handle)]
    scaler.scale = 256.0
    handle._attached.memory.change_scale(256.0)
    for memory, error in zip(memories(handle), before, strict=True):
        assert error.any()
        assert torch.equal(memory.tensors["error"], error / 4)
    state = handle.state_dict()
    for memory in memories(handle):
        for name, parameter in zip(memory.names or [], memory.parameters, strict=True):
            piece = memory.layout.views(memory.tensors["error"])[memory.names.index(name)]
            assert torch.equal(state[f"rank{rank}"]["error"][name], piece / 256)
            assert piece.shape == parameter.shape
    handle.remove()


def test_it_follows_the_scale(two_ranks: RankPool) -> None:
    two_ranks.run(_rescaled)


# ---- powersgd ------------------------------------------------------------------------------------


def _matrices(rank: int, hook: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.Linear(64, 48, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    handle = attach(model, parse_hook(hook))
    total = torch.zeros(48, 64, dtype=torch.float64)
    sent = torch.zeros_like(total)
    for _ in range(6):
        model.zero_grad()
        x, slopes = torch.randn(4, 64, dtype=dtype), torch.randn(4, 48, dtype=dtype)
        (model(x) * slopes).sum().backward()
        total += slopes.double().T @ x.double()
        sent += model.weight.grad.double()
    error = handle.state_dict()[f"rank{rank}"]["error"]["weight"].double()
    handle.remove()
    return [total, sent, error]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_low_rank_loses_what_it_rounds(two_ranks: RankPool, dtype: torch.dtype) -> None:
    found = two_ranks.run(_matrices, narrow("powersgd(rank=1)"), dtype)
    total = sum(each[0] for each in found) / 2
    error = sum(each[2] for each in found) / 2
    assert torch.equal(found[0][1], found[1][1])
    off = (found[0][1] + error - total).abs().max()
    # Of six steps, each rounded once; and gradients and results of 16 bits are rounded themselves.
    rounded = 6 * 2.0**-8 * max(total.abs().max(), error.abs().max())
    assert off < (3 if dtype == torch.bfloat16 else 1) * rounded
    assert error.abs().max() > 10 * rounded, "nothing was lost, so that this test shows nothing"
