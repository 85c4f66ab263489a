"""Error feedback whose memory decays, and momentum, which is its other name."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import Mode
from rank_pool import RankPool
from remembering_hooks import hook_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torch_commhook import GradBucket, attach, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.codecs.error_decay import decay_error
from torch_commhook.codecs.seeds import mix_seeds
from torch_commhook.collectives import compressed_all_reduce, compressed_reduce_scatter
from torch_commhook.collectives.sum_arguments import shard_range
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.states import FOLDED_INTO
from torch_commhook.testing import run_ranks, simulate

EAGER, ON_DDP = Mode("module", "eager"), Mode("ddp", "eager")
TRACED = Mode("module", "context", backend="aot_eager")
COMPILED = Mode("module", "compile", backend="aot_eager")

EXAMPLES = [example for cls in CODECS.values() for example in cls.examples()]
WITH_ERROR = [codec for codec in EXAMPLES if codec.takes_error]

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
        (
            hooks.clip(1.0, hooks.after(3, hooks.momentum(hooks.sign(), 0.5))),
            "clip(1, after(3, momentum(sign(), beta=0.5)))",
        ),
    ],
)
def test_it_prints_as_it_is_written(hook: hooks.Hook, text: str) -> None:
    assert repr(hook) == text
    assert repr(parse_hook(text)) == text
    for made in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(made) == text
        assert made.error_decay == hook.error_decay


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


# ---- values --------------------------------------------------------------------------------------

NUMEL, RANKS, STEPS, DECAY = 1500, 2, 5, 0.7


def _restored(codec: Codec, p: Tensor, shards: int, rounding: Tensor) -> Tensor:
    """C(p), of values in float64."""
    message = torch.empty(codec.nbytes(len(p), shards), dtype=torch.uint8)
    codec.encode([p.float()], message, shards=shards, rounding=rounding)
    values = torch.empty(len(p))
    codec.decode(message, [values], shards=shards, rounding=rounding)
    return values.double()


def _rounding(index: int, rank: int, step: int) -> Tensor:
    return torch.tensor([mix_seeds(0, index, rank), step])


class _Reference:
    """Error feedback as it stands in books, in float64."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.errors = [torch.zeros(NUMEL, dtype=torch.float64) for _ in range(RANKS)]
        self.shard_errors = torch.zeros(NUMEL, dtype=torch.float64)

    def step(self, gradients: list[Tensor], step: int) -> Tensor:
        shards = RANKS if self.codec.exchange == "all_to_all" else 1
        mean = torch.zeros(NUMEL, dtype=torch.float64)
        for rank, gradient in enumerate(gradients):
            p = gradient.double() + self.errors[rank]
            own = 0 if self.codec.exchange == "all_reduce" else rank + 1
            sent = _restored(self.codec, p, shards, _rounding(0, own, step))
            self.errors[rank] = DECAY * (p - sent)
            mean += sent / RANKS
        if shards == 1:
            return mean
        result = torch.empty_like(mean)
        for rank in range(RANKS):
            begin, end = shard_range(self.codec, NUMEL, rank=rank, world_size=RANKS)
            p = mean[begin:end] + self.shard_errors[begin:end]
            sent = _restored(self.codec, p, 1, _rounding(0, -1 - rank, step))
            self.shard_errors[begin:end] = DECAY * (p - sent)
            result[begin:end] = sent
        return result


def _gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(NUMEL, generator=generator)


@pytest.mark.parametrize("codec", WITH_ERROR, ids=str)
def test_it_is_that_of_books(codec: Codec) -> None:
    """Results and memory of each step, of what this rank sends and of the sum that it encodes."""

    def train(rank: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
        model = nn.Linear(NUMEL, 1, bias=False)  # the input is the gradient
        handle = attach(model, hooks.momentum(hooks.compressed(codec), DECAY))
        found = []
        for step in range(STEPS):
            model.zero_grad()
            model(_gradient(rank, step)).backward()
            assert model.weight.grad is not None
            own = handle.state_dict()[f"rank{rank}"]
            memory = {kind: each["weight"].reshape(-1) for kind, each in own.items()}
            found.append((model.weight.grad.reshape(-1).clone(), memory))
        handle.remove()
        return found

    ranks, wanted = run_ranks(train, RANKS), _Reference(codec)
    for step in range(STEPS):
        result = wanted.step([_gradient(rank, step) for rank in range(RANKS)], step)
        shard_error = torch.zeros(NUMEL)
        for rank, steps in enumerate(ranks):
            got, memory = steps[step]
            torch.testing.assert_close(got.double(), result, rtol=1e-5, atol=1e-5)
            error = memory["error"].double()
            torch.testing.assert_close(error, wanted.errors[rank], rtol=1e-5, atol=1e-5)
            shard_error += memory.get("shard_error", 0.0)
        torch.testing.assert_close(shard_error.double(), wanted.shard_errors, rtol=1e-5, atol=1e-5)
    assert wanted.errors[0].any()


def test_momentum_is_that_of_demo() -> None:
    """m = beta m + g; C(m) is sent; m -= C(m)."""
    beta, hook = 0.9, hooks.momentum(hooks.topk(0.05), 0.9)

    def train(rank: int) -> list[Tensor]:
        weight = torch.zeros(NUMEL, requires_grad=True)
        found = []
        for step in range(STEPS):
            bucket = GradBucket([weight], [_gradient(0, step)])
            found.append(hook(None, bucket).wait().clone())
        return found

    (sent,) = run_ranks(train, 1)
    m = torch.zeros(NUMEL, dtype=torch.float64)
    for step, got in enumerate(sent):
        m = beta * m + _gradient(0, step).double()
        largest = m.abs().topk(75).indices
        q = torch.zeros_like(m).scatter_(0, largest, m[largest])
        torch.testing.assert_close(got.double(), q, rtol=1e-5, atol=1e-5)
        m -= q


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


# ---- in every mode -------------------------------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48), nn.Linear(48, 8))


def _batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 48, generator=torch.Generator().manual_seed(100 * number + rank))


def _errors(state: dict[str, Any], rank: int) -> dict[str, Tensor]:
    own = state[f"rank{rank}"]
    kinds = {"error", *FOLDED_INTO} & set(own)
    return {f"{kind} {name}": t for kind in sorted(kinds) for name, t in own[kind].items()}


def _first_step(rank: int, mode: Mode, inside: str, decay: float, dtype: str) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = mode.wrap(_net())
    if inside == "hierarchical":
        hook = hooks.error_feedback(hook_of(inside).hooks_inside()[0], decay)
    else:
        hook = parse_hook(f"error_feedback({inside}, decay={decay}, dtype={dtype})")
    handle = attach(model, hook, **mode.attach_options)
    with mode.step_function(model) as step:
        step(_batch(rank, 0))
    found = _errors(handle.state_dict(), rank)
    handle.remove()
    return found


def _is_decayed(rank: int, *how: Any) -> list[str]:
    """The memories that are not 3 / 4 of what they are without decay, after the first step."""
    mode, inside, dtype = how
    plain = _first_step(rank, mode, inside, 1.0, dtype)
    faded = _first_step(rank, mode, inside, 0.75, dtype)
    assert plain.keys() == faded.keys() and any(one.any() for one in plain.values())
    # What is rounded to 16 bits at random comes out at one of two values.
    bound = 0.0 if dtype == "float32" else 2.0**-7
    return [
        name
        for name, one in plain.items()
        if ((one.float() * 0.75 - faded[name].float()).abs() > bound * one.abs()).any()
    ]


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
def test_all_that_is_remembered_decays(
    two_ranks: RankPool, mode: Mode, inside: str, dtype: str
) -> None:
    assert two_ranks.run(_is_decayed, mode, inside, dtype, timeout=120) == [[], []]


def _sharded(rank: int, hook: str) -> bool:
    """Whether shards' memory decays, and results are those of whole gradients' first steps."""
    states = []
    for decay in (1.0, 0.75):
        model = _net()
        fully_shard(model)
        handle = attach(model, parse_hook(f"error_feedback({hook}, decay={decay})"))
        model(_batch(rank, 0)).sum().backward()
        states.append(_errors(handle.state_dict(), rank))
        handle.remove()
    plain, faded = states
    return any(one.any() for one in plain.values()) and all(
        torch.equal(one * 0.75, faded[name]) for name, one in plain.items()
    )


@pytest.mark.parametrize("hook", ["blockwise(bits=4)", "sign()", "randomk(0.2)"])
def test_that_of_shards_decays(two_ranks: RankPool, hook: str) -> None:
    assert two_ranks.run(_sharded, hook) == [True, True]


def _rules(rank: int) -> list[bool]:
    """Whether each rule's memory has a decay of its own."""
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
            model(_batch(rank, step)).sum().backward()
        found.append(_errors(handle.state_dict(), rank))
        handle.remove()
    plain, last, first, both = found
    a, b = plain
    return [
        torch.equal(last[a], plain[a]) and torch.equal(last[b], both[b]),
        torch.equal(first[a], both[a]) and torch.equal(first[b], plain[b]),
        not torch.equal(plain[a], both[a]) and not torch.equal(plain[b], both[b]),
    ]


def test_each_rule_of_a_policy_has_its_own(two_ranks: RankPool) -> None:
    assert two_ranks.run(_rules) == [[True] * 3] * 2


def _fragments(rank: int) -> list[list[bool]]:
    """After each step, whether the memory of each fragment is another one than before."""
    model = nn.Sequential(nn.Linear(48, 48, bias=False), nn.Linear(48, 48, bias=False))
    hook = hooks.momentum(hooks.topk(0.05), 0.5)
    handle = attach(model, hooks.local_sgd(4, hook=hook, fragments=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before: dict[str, Tensor] | None = None
    changes = []
    for step in range(10):
        optimizer.zero_grad()
        model(_batch(rank, step)).sum().backward()
        optimizer.step()
        now = _errors(handle.state_dict(), rank)
        if before is not None:
            changes.append([not torch.equal(now[name], before[name]) for name in sorted(now)])
        before = now
    handle.remove()
    return changes


def test_a_fragment_decays_when_it_is_exchanged(two_ranks: RankPool) -> None:
    for changes in two_ranks.run(_fragments):
        assert all(sum(change) <= 1 for change in changes)
        assert all(any(change[i] for change in changes) for i in range(2))


class _TwoWeights(nn.Module):
    """Of which the second is used in the first step alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(16, 24, bias=False)
        self.once = nn.Linear(16, 24, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.always(x)
        return y + self.once(x) if both else y


def _unused(rank: int, hook: str, mode: Mode) -> list[Tensor]:
    """The mean of what the ranks remember of a parameter, after each step."""
    torch._dynamo.reset()
    made = mode.wrap(_TwoWeights(), find_unused_parameters=True)
    handle = attach(made, parse_hook(hook), **mode.attach_options)
    forward = made if mode.runner == "eager" else torch.compile(made, backend=mode.backend)
    found = []
    for step in range(4):
        made.zero_grad()
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = forward(x, step == 0).sum()
        with mode._backward():
            loss.backward()
        own = handle.state_dict()[f"rank{rank}"]
        left = own["error"]["once.weight"].reshape(-1) / dist.get_world_size()
        if "shard_error" in own:
            left = left + own["shard_error"]["once.weight"]
        dist.all_reduce(left)
        found.append(left)
    handle.remove()
    return found


@pytest.mark.parametrize("mode", [EAGER, ON_DDP, TRACED], ids=str)
@pytest.mark.parametrize("hook", ["topk(0.9)", "sign()"])
def test_that_of_a_parameter_that_no_rank_uses_decays(
    two_ranks: RankPool, hook: str, mode: Mode
) -> None:
    for found in two_ranks.run(_unused, f"momentum({hook}, 0.5)", mode, timeout=120):
        assert found[0].any()
        for step, left in enumerate(found):
            torch.testing.assert_close(left, found[0] * 0.5**step, rtol=1e-4, atol=1e-5)


# ---- in 16 bits ----------------------------------------------------------------------------------


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
