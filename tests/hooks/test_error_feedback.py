"""Error feedback whose memory decays, as momentum's does, or is in bfloat16."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mode_cases import Mode
from on_ranks import of_all_ranks, on_processes, on_ranks
from remembering_hooks import hook_of
from scaled_training import Counted, batch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torch_commhook import GradBucket, HookHandle, attach, hooks, reshard_states
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.base import decay_error, mix_seeds
from torch_commhook.collectives import compressed_all_reduce, compressed_reduce_scatter
from torch_commhook.collectives.compressed_call import segment_range
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.bucket_memory import BucketMemory
from torch_commhook.memory.states import FOLDED_INTO
from torch_commhook.testing import run_ranks, simulate

EAGER, ON_DDP = Mode("module", "eager"), Mode("ddp", "eager")
TRACED = Mode("module", "context", backend="aot_eager")
COMPILED = Mode("module", "compile", backend="aot_eager")

EXAMPLES = [example for cls in CODECS.values() for example in cls.examples()]
WITH_ERROR = [codec for codec in EXAMPLES if codec.takes_error]

BFLOAT16 = torch.bfloat16

pytestmark = pytest.mark.filterwarnings("ignore:.*take more bytes than cast")


# ---- how it is written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (hooks.error_feedback(hooks.sign(), 0.9), "error_feedback(sign(), decay=0.9)"),
        (hooks.error_feedback(hooks.sign(), decay=1), "error_feedback(sign())"),
        (hooks.momentum(hooks.sign(), 0.999), "momentum(sign(), beta=0.999)"),
        (hooks.momentum(hooks.sign(), beta=1), "momentum(sign(), beta=1)"),
        (hooks.momentum(hooks.sign(), 0.1 + 0.2), "momentum(sign(), beta=0.30000000000000004)"),
        (
            hooks.momentum(hooks.sign(), 0.5, dtype=torch.bfloat16),
            "momentum(sign(), beta=0.5, dtype=torch.bfloat16)",
        ),
        (hooks.error_feedback(hooks.sign(), dtype=torch.float32), "error_feedback(sign())"),
        (
            hooks.error_feedback(hooks.sign(), dtype=torch.bfloat16),
            "error_feedback(sign(), dtype=torch.bfloat16)",
        ),
        (
            hooks.clip(1.0, hooks.after(3, hooks.error_feedback(hooks.sign(), dtype=BFLOAT16))),
            "clip(1, after(3, error_feedback(sign(), dtype=torch.bfloat16)))",
        ),
        (
            hooks.clip(1.0, hooks.after(3, hooks.momentum(hooks.sign(), 0.5))),
            "clip(1, after(3, momentum(sign(), beta=0.5)))",
        ),
    ],
)
def test_it_prints_as_it_is_written(hook: hooks.Hook, text: str) -> None:
    assert repr(hook) == text
    for given in (text, text.replace("sign()", "sign").replace("torch.bfloat16", "bfloat16")):
        assert repr(parse_hook(given)) == text
    for made in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(made) == text
        assert (made.error_decay, made.error_dtype) == (hook.error_decay, hook.error_dtype)


HOW: dict[str, Callable[[Any], Any]] = {
    "error_feedback: decay": lambda value: hooks.error_feedback(hooks.sign(), value),
    "momentum: beta": lambda value: hooks.momentum(hooks.sign(), value),
    "compressed_all_reduce: error_decay": lambda value: compressed_all_reduce(
        torch.zeros(8), CODECS["sign"](), error_decay=value
    ),
    "compressed_reduce_scatter: error_decay": lambda value: compressed_reduce_scatter(
        torch.zeros(8), CODECS["sign"](), error_decay=value
    ),
}


@pytest.mark.parametrize("what", HOW)
def test_other_factors_are_refused(what: str) -> None:
    def on_one_rank(rank: int) -> None:
        for value, got in ((True, "bool"), (None, "NoneType"), ("0.9", "str")):
            with pytest.raises(TypeError, match=f"^{what} must be a number, got {got}$"):
                HOW[what](value)
        for number in (0, 0.0, -0.5, 1.0000001, 2, float("inf"), float("nan")):
            message = f"^{what} must be greater than 0 and at most 1, got {number}$"
            with pytest.raises(ValueError, match=message.replace("+", r"\+")):
                HOW[what](number)

    run_ranks(on_one_rank, 1)


def test_momentum_takes_what_error_feedback_takes() -> None:
    with pytest.raises(ValueError, match="hook must be one whose messages lose"):
        hooks.momentum(hooks.allreduce(), 0.9)
    with pytest.raises(ValueError, match="momentum: hook must be one that does not"):
        hooks.momentum(hooks.error_feedback(hooks.sign()), 0.9)
    with pytest.raises(TypeError, match=r"^momentum: dtype must be torch\.float32 or"):
        hooks.momentum(hooks.sign(), 0.9, dtype=torch.float16)


def test_one_memory_has_one_decay() -> None:
    plain, fading = hooks.error_feedback(hooks.sign()), hooks.momentum(hooks.sign(), 0.9)
    for hook, before in ((plain, fading), (fading, hooks.clip(1.0, plain))):
        with pytest.raises(ValueError, match="after: before's memory must decay"):
            hooks.after(3, hook, before=before)
    hooks.after(3, fading, before=hooks.error_feedback(hooks.topk(), 0.9))
    hooks.after(3, fading)


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


# ---- values --------------------------------------------------------------------------------------

NUMEL, RANKS, STEPS, DECAY = 1500, 2, 5, 0.7


def _restored(codec: Codec, p: Tensor, segments: int, rounding: Tensor) -> Tensor:
    """C(p), of values in float64."""
    message = torch.empty(codec.nbytes(len(p), segments), dtype=torch.uint8)
    codec.encode([p.float()], message, segments=segments, rounding=rounding)
    values = torch.empty(len(p))
    codec.decode(message, [values], segments=segments, rounding=rounding)
    return values.double()


def _rounding(index: int, rank: int, step: int) -> Tensor:
    return torch.tensor([mix_seeds(0, index, rank), step])


class _Reference:
    """Error feedback as it stands in books, in float64."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.errors = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(RANKS)]
        self.sum_errors = torch.zeros(NUMEL, dtype=torch.float64)

    def step(self, gradients: list[Tensor], step: int) -> Tensor:
        segments = RANKS if self.codec.exchange == "all_to_all" else 1
        mean = torch.zeros(NUMEL, dtype=torch.float64)
        for rank, gradient in enumerate(gradients):
            p = gradient.double() + self.errors[rank]
            own = 0 if self.codec.exchange == "all_reduce" else rank + 1
            sent = _restored(self.codec, p, segments, _rounding(0, own, step))
            self.errors[rank] = DECAY * (p - sent)
            mean += sent / RANKS
        if segments == 1:
            return mean
        result = torch.empty_like(mean)
        for rank in range(RANKS):
            begin, end = segment_range(self.codec, NUMEL, rank=rank, world_size=RANKS)
            p = mean[begin:end] + self.sum_errors[begin:end]
            sent = _restored(self.codec, p, 1, _rounding(0, -1 - rank, step))
            self.sum_errors[begin:end] = DECAY * (p - sent)
            result[begin:end] = sent
        return result


def _gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, generator=generator)


@pytest.mark.parametrize("codec", WITH_ERROR, ids=str)
@on_ranks(RANKS)
def test_it_is_that_of_books(rank: int, codec: Codec) -> None:
    """Results and memory of each step, of what this rank sends and of the sum that it encodes."""
    model, wanted = nn.Linear(NUMEL, 1, bias=False), _Reference(codec)  # its input is the gradient
    handle = attach(model, hooks.momentum(hooks.compressed(codec), DECAY))
    for step in range(STEPS):
        model.zero_grad()
        model(_gradient(rank, step)).backward()
        result = wanted.step([_gradient(other, step) for other in range(RANKS)], step)
        assert model.weight.grad is not None
        own = handle.state_dict()[f"rank{rank}"]
        memory = {kind: each["weight"].reshape(-1).double() for kind, each in own.items()}
        of_segments = sum(of_all_ranks(memory.get("shard_error", torch.zeros(NUMEL).double())))
        for got, want in (
            (model.weight.grad.reshape(-1).double(), result),
            (memory["error"], wanted.errors[rank]),
            (of_segments, wanted.sum_errors),
        ):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    handle.remove()
    assert wanted.errors[0].any()


def test_without_decay_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a pass over the memory."""
    gradients = [[_gradient(rank, 0)] for rank in range(2)]
    inside = [hooks.sign(), hooks.topk(0.1), hooks.powersgd()]
    wanted = [simulate(hooks.error_feedback(each), gradients, steps=3) for each in inside]

    def refuse(*arguments: object) -> None:
        raise AssertionError("called")

    for module in ("collectives.compressed_call", "hooks.powersgd"):  # a hook has a module's name
        monkeypatch.setattr(sys.modules[f"torch_commhook.{module}"], "decay_error", refuse)
    for each, want in zip(inside, wanted, strict=True):
        got = simulate(hooks.momentum(each, 1.0), gradients, steps=3)
        assert torch.equal(got.result[0], want.result[0])
    with pytest.raises(AssertionError, match="called"):
        simulate(hooks.momentum(hooks.sign(), 0.5), gradients)


# ---- the memory decays in every mode -------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48), nn.Linear(48, 8))


def _errors(state: dict[str, Any], rank: int) -> dict[str, Tensor]:
    own = state[f"rank{rank}"]
    kinds = {"error", *FOLDED_INTO} & set(own)
    return {f"{kind} {name}": t for kind in sorted(kinds) for name, t in own[kind].items()}


def feedback(inside: str, decay: float = 1.0, dtype: torch.dtype = torch.float32) -> hooks.Hook:
    hook = hook_of(inside).hooks_inside()[0] if inside == "hierarchical" else parse_hook(inside)
    return hooks.error_feedback(hook, decay, dtype=dtype)


def narrow(inside: str) -> hooks.Hook:
    return feedback(inside, dtype=BFLOAT16)


def _first_step(rank: int, mode: Mode, hook: hooks.Hook) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = mode.wrap(net())
    handle = attach(model, hook, **mode.attach_options)
    with mode.step_function(model) as step:
        step(batch(rank, 0))
    found = _errors(handle.state_dict(), rank)
    handle.remove()
    return found


INSIDE = [
    "blockwise(bits=4)",
    "sign()",
    "topk(0.1)",
    "randomk(0.1)",
    "powersgd(rank=2)",
    "policy([('0.*', allreduce()), ('2.*', topk(0.1))], sign())",
    "clip(0.1, blockwise())",
    "after(1, sign(), before=sign())",
]


@pytest.mark.parametrize(
    ("mode", "inside", "dtype"),
    [
        *itertools.product([EAGER], [*INSIDE, "hierarchical"], ["float32"]),
        *itertools.product([ON_DDP], INSIDE[:1], ["float32", "bfloat16"]),
        *itertools.product(
            [EAGER, TRACED], ["sign()", "topk(0.1)", "powersgd(rank=2)"], ["bfloat16"]
        ),
        *itertools.product([TRACED], [*INSIDE[:1], *INSIDE[4:6], "hierarchical"], ["float32"]),
        (COMPILED, "topk(0.1)", "float32"),
    ],
    ids=str,
)
@on_processes
def test_all_that_is_remembered_decays(rank: int, mode: Mode, inside: str, dtype: str) -> None:
    """After the first step, each memory is 3 / 4 of what it is without decay."""
    plain, faded = (
        _first_step(rank, mode, feedback(inside, decay, getattr(torch, dtype)))
        for decay in (1.0, 0.75)
    )
    assert plain.keys() == faded.keys() and any(one.any() for one in plain.values())
    # What is rounded to 16 bits at random comes out at one of two values.
    bound = 0.0 if dtype == "float32" else 2.0**-7
    for name, one in plain.items():
        off = (one.float() * 0.75 - faded[name].float()).abs()
        assert (off <= bound * one.abs()).all(), name


@pytest.mark.parametrize("hook", ["blockwise(bits=4)", "sign()", "randomk(0.2)"])
@on_ranks(2)
def test_that_of_segments_decays(rank: int, hook: str) -> None:
    states = []
    for decay in (1.0, 0.75):
        model = net()
        fully_shard(model)
        handle = attach(model, feedback(hook, decay))
        model(batch(rank, 0)).sum().backward()
        states.append(_errors(handle.state_dict(), rank))
        handle.remove()
    plain, faded = states
    assert any(one.any() for one in plain.values())
    assert all(torch.equal(one * 0.75, faded[name]) for name, one in plain.items())


@on_ranks(2)
def test_each_rule_of_a_policy_has_its_own(rank: int) -> None:
    texts = ["error_feedback(topk(0.1))", "momentum(topk(0.1), 0.5)"]
    found = []
    for first, second in itertools.product(texts, repeat=2):
        model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Linear(64, 8, bias=False))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        handle = attach(model, parse_hook(f"policy([('0.*', {first})], {second})"))
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step)).sum().backward()
        found.append(_errors(handle.state_dict(), rank))
        handle.remove()
    plain, last, first, both = found
    a, b = plain
    assert torch.equal(last[a], plain[a]) and torch.equal(last[b], both[b])
    assert torch.equal(first[a], both[a]) and torch.equal(first[b], plain[b])
    assert not torch.equal(plain[a], both[a]) and not torch.equal(plain[b], both[b])


@on_ranks(2)
def test_a_fragment_decays_when_it_is_exchanged(rank: int) -> None:
    model = nn.Sequential(nn.Linear(48, 48, bias=False), nn.Linear(48, 48, bias=False))
    hook = hooks.momentum(hooks.topk(0.05), 0.5)
    handle = attach(model, hooks.local_sgd(4, hook=hook, fragments=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memories = []
    for step in range(10):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()
        memories.append(_errors(handle.state_dict(), rank))
    handle.remove()
    changes = [
        [not torch.equal(now[name], before[name]) for name in sorted(now)]
        for before, now in itertools.pairwise(memories)
    ]
    assert all(sum(change) <= 1 for change in changes)
    assert all(any(change[i] for change in changes) for i in range(2))


# ---- a memory of 16 bits decays ------------------------------------------------------------------


def _rounding_of(step: int) -> Tensor:
    return torch.tensor([1 << 40 | 7, step])


def test_16_bits_decay_on_average() -> None:
    """By a factor that is nearer to 1 than two values of bfloat16 are to each other."""
    decay, start = 0.9995, 1.0
    error = torch.full((200_000,), start, dtype=torch.bfloat16)
    error[100_000:] = -start
    for step in range(20):
        decay_error(error, decay, _rounding_of(step))
    wanted = start * decay**20
    for half, sign in ((error[:100_000], 1), (error[100_000:], -1)):
        values = half.double() * sign
        assert abs(values.mean() - wanted) < 5 * values.std() / 100_000**0.5
    nearest = torch.full((4,), start, dtype=torch.bfloat16)
    decay_error(nearest, decay)
    assert (nearest == start).all()


def test_random_numbers_follow_from_seed_step_and_place() -> None:
    error = torch.randn(100_000).bfloat16()
    runs = []
    for rounding in (_rounding_of(3), _rounding_of(3), _rounding_of(4), torch.tensor([7, 3])):
        runs.append(error.clone())
        decay_error(runs[-1], 0.9, rounding)
    assert torch.equal(runs[0], runs[1])
    for a, b in itertools.combinations(runs[1:], 2):
        assert 0.2 < (a != b).double().mean() < 0.6
    exact = error.double() * 0.9
    for run in runs:
        assert ((run.double() - exact).abs() <= 2.0**-7 * exact.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_stay_finite_and_the_others_are_no_numbers(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    error = torch.tensor([most, -most, 0.0, -0.0, float("nan"), float("inf")], dtype=dtype)
    decay_error(error, 0.999999, _rounding_of(0))
    assert error[:2].isfinite().all() and (error[:2].abs() > most * 0.99).all()
    assert not error[2:4].any()
    assert error[4].isnan() and error[5].isinf()


def test_the_operator() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rounding in (None, _rounding_of(0)):
            torch.library.opcheck(decay_error, (torch.randn(50).to(dtype), 0.9, rounding))
    with pytest.raises(ValueError, match="decay_error: decay must be greater than 0"):
        decay_error(torch.zeros(3), 1.5)
    with pytest.raises(ValueError, match=r"^decay_error: rounding must be \[seed, step\]"):
        decay_error(torch.zeros(3), 0.5, torch.zeros(3, dtype=torch.int64))


# ---- a memory of bfloat16 takes half the bytes ---------------------------------------------------

#: Inside of error_feedback(): of each kind of memory.
KINDS = [
    "blockwise(bits=4)",
    "topk(0.1)",
    "randomk(0.1)",
    "chunk_topk(8, 64)",
    "powersgd(rank=2)",
    "policy([('0.*', allreduce()), ('2.*', topk(0.1))], sign())",
]


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


def train(model: nn.Module, rank: int, steps: range, mode: Mode = EAGER) -> None:
    with mode.step_function(model) as step:
        for number in steps:
            model.zero_grad()
            step(batch(rank, number))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad


def begun(rank: int, hook: str | hooks.Hook, steps: int, **options: Any) -> tuple[Any, HookHandle]:
    """A model after some steps, and its hook's handle."""
    model = net()
    handle = attach(model, hook, **options)
    train(model, rank, range(steps))
    return model, handle


@pytest.mark.parametrize(
    ("mode", "inside"),
    # Each compilation takes seconds.
    [
        *itertools.product([EAGER, ON_DDP], KINDS),
        *itertools.product([TRACED], KINDS[:2]),
        (EAGER, "hierarchical"),
    ],
    ids=str,
)
@on_processes
def test_half_the_bytes(rank: int, mode: Mode, inside: str) -> None:
    found = []
    for hook in (feedback(inside), narrow(inside)):
        torch._dynamo.reset()
        model = mode.wrap(net())
        handle = attach(model, hook, **mode.attach_options)
        train(model, rank, range(2), mode)
        found.append(errors(handle))
        if inside == "hierarchical":
            assert all(memory.tensors["node_error"].any() for memory in memories(handle))
        handle.remove()
    wide, thin = found
    assert list(wide) == ["torch.float32"]
    assert thin == {"torch.bfloat16": wide["torch.float32"] // 2}


@on_ranks(2)
def test_powersgd_lends_its_floats(rank: int) -> None:
    """No bucket keeps the sum of gradient and error, which is float32, to itself."""
    found = []
    for hook in (narrow("powersgd(rank=2)"), narrow("blockwise()")):
        _, handle = begun(rank, hook, 3, bucket_cap_mb=0.005)
        own = list(memories(handle))
        assert len(own) > 1
        assert all("work" not in memory.buffers._buffers for memory in own)
        lent = own[0].scratch._free
        assert all(memory.scratch is own[0].scratch for memory in own)
        found.append(sum(tensor.nbytes for tensor in lent))
        assert len(lent) <= len(own)
        handle.remove()
    lent_bytes, nothing = found
    # Buckets of the first step were others.
    assert 0 < lent_bytes <= 2 * sum(4 * parameter.numel() for parameter in net().parameters())
    assert nothing == 0


@on_ranks(2)
def test_parts_have_dtypes_of_their_own(rank: int) -> None:
    """A policy's hooks may remember in dtypes of their own."""
    hook = hooks.policy(
        [("0.*", hooks.error_feedback(hooks.topk(0.1), dtype=torch.bfloat16))],
        hooks.error_feedback(hooks.topk(0.1)),
    )
    model, handle = begun(rank, hook, 2)
    first = sum(parameter.numel() for parameter in model[0].parameters())
    rest = sum(parameter.numel() for parameter in model.parameters()) - first
    assert errors(handle) == {"torch.bfloat16": 2 * first, "torch.float32": 4 * rest}
    handle.remove()


@on_ranks(1)
def test_small_gradients_add_up_in_topk(rank: int) -> None:
    """Gradients smaller than the last bit of an error of 1 increase it on average."""
    hook = hooks.error_feedback(hooks.topk(0.01), dtype=torch.bfloat16)
    gradient = torch.full((400,), 1 / 1024)
    gradient[:4] = 100.0  # in each message
    parameter = torch.zeros(400, requires_grad=True)
    for step in range(256):
        bucket = GradBucket([parameter], [gradient])
        hook(None, bucket).wait()
        error = hook.memory(bucket).tensors["error"]
        if step == 0:
            error[4:] = 1.0
    assert error[4:].float().mean().item() - 1.0 == pytest.approx(255 / 1024, rel=0.1)


# ---- its states ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["blockwise(bits=4)", "topk(0.1)"])
@on_ranks(2)
def test_a_state_of_one_dtype_loads_into_the_other(rank: int, inside: str) -> None:
    """And back, by ``replace`` and a state."""
    wide, thin = feedback(inside), narrow(inside)
    model, handle = begun(rank, wide, 2)
    for step, hook, dtype, before_dtype in (
        (2, thin, torch.bfloat16, torch.float32),
        (3, wide, torch.float32, torch.bfloat16),
    ):
        state = handle.state_dict()
        handle.replace(hook)
        handle.load_state_dict(state)
        loaded = handle.state_dict()
        assert loaded["steps"] == step
        assert list(errors(handle)) == [str(dtype)]
        saved, now = _errors(state, rank), _errors(loaded, rank)
        assert saved.keys() == now.keys()
        for name, before in saved.items():
            assert (before.dtype, now[name].dtype) == (before_dtype, dtype)
            assert torch.equal(now[name], before.to(dtype))
        train(model, rank, range(step, step + 1))
    handle.remove()


@pytest.mark.parametrize("inside", ["sign()", "topk(0.1)"])
@on_ranks(2)
def test_the_largest_numbers_of_a_state_stay_finite(rank: int, inside: str) -> None:
    _, handle = begun(rank, narrow(inside), 1)
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


def _state(rank: int) -> dict[str, Any]:
    _, handle = begun(rank, narrow("blockwise(bits=4)"), 3)
    state = handle.state_dict()
    handle.remove()
    return state


def test_states_of_another_number_of_ranks() -> None:
    states = run_ranks(_state, 2)
    alone = reshard_states(states, 1)
    for name, error in alone[0]["rank0"]["error"].items():
        mean = sum(
            state[f"rank{rank}"]["error"][name].float().view(-1) / 2
            + state[f"rank{rank}"]["shard_error"][name].float()
            for rank, state in enumerate(states)
        )
        torch.testing.assert_close(error.view(-1).float(), mean, rtol=1e-5, atol=1e-6)
    again = reshard_states(alone, 2)

    def goes_on(rank: int) -> list[str]:
        model, handle = begun(rank, narrow("blockwise(bits=4)"), 0)
        handle.load_state_dict(again[rank])
        train(model, rank, range(1))
        return list(errors(handle))

    assert run_ranks(goes_on, 2) == [["torch.bfloat16"]] * 2


@on_ranks(2)
def test_it_follows_the_scale(rank: int) -> None:
    scaler = Counted(1024.0)
    _, handle = begun(rank, narrow("sign()"), 2, scaler=scaler)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(2)
def test_low_rank_loses_what_it_rounds(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rank)
    model = nn.Linear(64, 48, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    handle = attach(model, narrow("powersgd(rank=1)"))
    own = torch.zeros(48, 64, dtype=torch.float64)
    sent = torch.zeros_like(own)
    for _ in range(6):
        model.zero_grad()
        x, slopes = torch.randn(4, 64, dtype=dtype), torch.randn(4, 48, dtype=dtype)
        (model(x) * slopes).sum().backward()
        own += slopes.double().T @ x.double()
        sent += model.weight.grad.double()
    lost = handle.state_dict()[f"rank{rank}"]["error"]["weight"].double()
    handle.remove()
    total, error = (sum(of_all_ranks(each)) / 2 for each in (own, lost))
    assert torch.equal(*of_all_ranks(sent))
    off = (sent + error - total).abs().max()
    # Of six steps, each rounded once; and gradients and results of 16 bits are rounded themselves.
    rounded = 6 * 2.0**-8 * max(total.abs().max(), error.abs().max())
    assert off < (3 if dtype == torch.bfloat16 else 1) * rounded
    assert error.abs().max() > 10 * rounded, "nothing was lost, so that this test shows nothing"
