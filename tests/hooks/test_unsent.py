"""What is remembered as lost stays so, whoever does not use a parameter, or takes over.

Messages hold errors of earlier steps: of parameters too that no rank uses in a step, and whose
gradients are left alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from modes import Mode
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import attach
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.metrics import BucketTraffic, as_text, from_text


class TwoWeights(nn.Module):
    """Of which the second is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(16, 24, bias=False)
        self.sometimes = nn.Linear(16, 24, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if both else y


EAGER, TRACED = Mode("module", "eager"), Mode("module", "context", backend="aot_eager")
ON_DDP = Mode("ddp", "eager")


def _forward(made: nn.Module, mode: Mode) -> Any:
    return made if mode.runner == "eager" else torch.compile(made, backend=mode.backend)


def _step(forward: Any, mode: Mode, *args: Any) -> None:
    loss = forward(*args).sum()
    with mode._backward():
        loss.backward()


def _left(state: dict[str, Any], rank: int, name: str) -> Tensor:
    """The mean over the ranks of what they have to send."""
    own = state[f"rank{rank}"]
    left = own["error"][name].reshape(-1) / dist.get_world_size()
    if "shard_error" in own:
        left = left + own["shard_error"][name]
    dist.all_reduce(left)
    return left


def _sometimes_unused(rank: int, hook: str, mode: Mode) -> float:
    torch._dynamo.reset()
    model = TwoWeights()
    made = mode.wrap(model, find_unused_parameters=True)
    handle = attach(made, parse_hook(hook), **mode.attach_options)
    weight = model.sometimes.weight
    wanted, applied = torch.zeros_like(weight), torch.zeros_like(weight)
    forward = _forward(made, mode)
    for number in range(9):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(4, 16, generator=generator)
        made.zero_grad()
        both = number % 3 == 0
        _step(forward, mode, x, both)
        if both:
            mean = x.sum(0).expand_as(weight).clone()
            dist.all_reduce(mean)
            wanted += mean / dist.get_world_size()
        if weight.grad is not None:
            applied += weight.grad
    left = _left(handle.state_dict(), rank, "sometimes.weight").view_as(weight)
    handle.remove()
    return float((wanted - applied - left).norm() / wanted.norm())


HOOKS = [
    "error_feedback(topk(0.05))",
    "error_feedback(chunk_topk(8, 256))",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(powersgd(rank=1))",
    "policy([('always*', allreduce())], error_feedback(sign()))",
]


@pytest.mark.parametrize(
    ("mode", "hook"),
    [
        *itertools.product([EAGER, ON_DDP], HOOKS),
        (TRACED, HOOKS[0]),
        (TRACED, HOOKS[-1]),
    ],
    ids=str,
)
def test_nothing_is_lost_of_parameters_that_no_rank_used(
    two_ranks: RankPool, mode: Mode, hook: str
) -> None:
    for lost in two_ranks.run(_sometimes_unused, hook, mode, timeout=120):
        assert lost < 1e-5


@pytest.mark.parametrize("mode", [EAGER, ON_DDP, TRACED], ids=str)
def test_little_is_lost_where_16_bits_remember_it(two_ranks: RankPool, mode: Mode) -> None:
    """Of nine steps, each of which rounds what is remembered."""
    hook = "error_feedback(topk(0.05), dtype=torch.bfloat16)"
    for lost in two_ranks.run(_sometimes_unused, hook, mode, timeout=120):
        assert 1e-5 < lost < 9 * 2.0**-8


AFTER = {
    "error_feedback(topk(0.05))": "error_feedback(blockwise(bits=4))",
    "error_feedback(powersgd(rank=1))": "error_feedback(sign())",
    # Blocks of other sizes, and so other shards.
    "error_feedback(blockwise(4, 8))": "error_feedback(blockwise(8, 4096))",
    "error_feedback(sign(4096))": "error_feedback(fp8())",
}


def _after(rank: int, hook: str, before: str, mode: Mode) -> tuple[float, float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(30, 40, bias=False)
    made = mode.wrap(model)
    handle = attach(made, parse_hook(f"after(3, {hook}, before={before})"), **mode.attach_options)
    weight = model.weight
    wanted, applied = torch.zeros_like(weight), torch.zeros_like(weight)
    shards = 0.0
    forward = _forward(made, mode)
    for number in range(6):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(4, 30, generator=generator)
        made.zero_grad()
        _step(forward, mode, x)
        mean = x.sum(0).expand_as(weight).clone()
        dist.all_reduce(mean)
        wanted += mean / dist.get_world_size()
        assert weight.grad is not None
        applied += weight.grad
    state = handle.state_dict()
    left = _left(state, rank, "weight").view_as(weight)
    if "blockwise" not in hook and "sign" not in hook:
        shards = float(state[f"rank{rank}"]["shard_error"]["weight"].norm())
    handle.remove()
    return float((wanted - applied - left).norm() / wanted.norm()), shards


@pytest.mark.parametrize(
    ("mode", "hook"),
    [
        *itertools.product([ON_DDP], AFTER),
        (TRACED, HOOKS[0]),
        (TRACED, "error_feedback(sign(4096))"),
    ],
    ids=str,
)
def test_a_hook_takes_over_what_the_one_before_has_lost(
    two_ranks: RankPool, mode: Mode, hook: str
) -> None:
    for lost, left_behind in two_ranks.run(_after, hook, AFTER[hook], mode, timeout=120):
        assert lost < 1e-5
        assert left_behind == 0.0


def _traffic(rank: int, hook: str, read_often: bool) -> tuple[int, int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(30, 40)
    handle = attach(model, parse_hook(hook))
    forward = _forward(model, TRACED)
    for _ in range(6):
        _step(forward, TRACED, torch.ones(4, 30))
        if read_often:
            handle.stats()
    stats = handle.stats()
    handle.remove()
    return stats.steps, stats.bytes_sent


def test_traffic_of_compiled_steps_that_differ(two_ranks: RankPool) -> None:
    """Whenever it is asked for."""
    hook = "after(2, topk(0.1))"
    often = two_ranks.run(_traffic, hook, True, timeout=120)
    assert two_ranks.run(_traffic, hook, False, timeout=120) == often
    assert often[0][0] == 6


def test_traffic_as_text() -> None:
    buckets = (
        BucketTraffic(3, torch.bfloat16, 6, None),
        BucketTraffic(1 << 40, torch.float32, None, 0),
    )
    assert from_text(as_text(buckets)) == buckets


def _not_zeroed(rank: int, hook: str, mode: Mode) -> tuple[Tensor, bool]:
    torch._dynamo.reset()
    model = TwoWeights()
    if "topk" in hook:  # whose memory has the parameters' strides alone
        model.sometimes.weight = nn.Parameter(model.sometimes.weight.detach().t().clone().t())
    made = mode.wrap(model, find_unused_parameters=True)
    handle = attach(made, parse_hook(hook), **mode.attach_options)
    forward = _forward(made, mode)
    left = []
    for number in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + rank))
        _step(forward, mode, x, number == 0)
        left.append(_left(handle.state_dict(), rank, "sometimes.weight"))
        if number == 0:
            assert model.sometimes.weight.grad is not None
            gradient = model.sometimes.weight.grad.clone()
    stays = torch.equal(model.sometimes.weight.grad, gradient)
    handle.remove()
    return torch.stack(left), stays


@pytest.mark.parametrize("mode", [EAGER, ON_DDP, TRACED], ids=str)
@pytest.mark.parametrize(
    "hook",
    [
        "error_feedback(blockwise(bits=4))",
        "error_feedback(topk(0.1))",
        "after(9, error_feedback(topk(0.1)))",
    ],
)
def test_a_gradient_that_is_not_zeroed_is_not_remembered(
    two_ranks: RankPool, hook: str, mode: Mode
) -> None:
    left, stays = two_ranks.run(_not_zeroed, hook, mode)[0]
    assert stays
    for later in left[1:]:
        assert torch.allclose(later, left[0], atol=1e-5)


def _tripled(rank: int, mode: Mode) -> Tensor:
    torch._dynamo.reset()
    model = TwoWeights()
    made = mode.wrap(model, find_unused_parameters=True)
    handle = attach(made, parse_hook("error_feedback(topk(0.1))"), **mode.attach_options)
    handle.register_posthook(lambda reduced, local: tuple(r.mul_(3) for r in reduced))
    forward = _forward(made, mode)
    left = []
    for number in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + rank))
        made.zero_grad()
        _step(forward, mode, x, number == 0)
        left.append(_left(handle.state_dict(), rank, "sometimes.weight"))
    handle.remove()
    return torch.stack(left)


@pytest.mark.parametrize("mode", [EAGER, ON_DDP, TRACED], ids=str)
def test_what_posthooks_do_is_not_remembered(two_ranks: RankPool, mode: Mode) -> None:
    left = two_ranks.run(_tripled, mode)[0]
    for later in left[1:]:
        assert torch.allclose(later, left[0], atol=1e-5)


def _joined(rank: int) -> Tensor:
    model = TwoWeights()
    handle = attach(model, parse_hook("error_feedback(topk(0.5))"))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    model(x, True).sum().backward()
    before = _left(handle.state_dict(), rank, "sometimes.weight")
    model.zero_grad()
    with handle.join():
        if rank == 0:
            model(x, False).sum().backward()
    after = _left(handle.state_dict(), rank, "sometimes.weight")
    handle.remove()
    return torch.stack([before, after])


def test_a_rank_in_join_remembers_what_went_nowhere(two_ranks: RankPool) -> None:
    before, after = two_ranks.run(_joined)[0]
    assert before.any()
    assert torch.allclose(before, after, atol=1e-7)


def _joined_ddp(rank: int, hook: str) -> bool:
    made = nn.parallel.DistributedDataParallel(nn.Linear(8, 8), find_unused_parameters=True)
    handle = attach(made, parse_hook(hook))
    written = []
    handle.register_post_accumulate_hook(lambda bucket: written.append(bucket.index()))
    with handle.join():
        for _ in range(2 - rank):
            made.zero_grad()
            made(torch.ones(4, 8)).sum().backward()
    handle.remove()
    return len(written) == 2 - rank  # where there are gradients


@pytest.mark.parametrize("hook", ["clip(1.0)", "error_feedback(blockwise(bits=4))"])
def test_joining_on_ddp(two_ranks: RankPool, hook: str) -> None:
    assert two_ranks.run(_joined_ddp, hook) == [True, True]


def _clipped(rank: int, hook: str, zeroed: bool, mode: Mode) -> tuple[float, bool]:
    torch._dynamo.reset()
    model = TwoWeights()
    made = mode.wrap(model, find_unused_parameters=True)
    handle = attach(made, parse_hook(hook), **mode.attach_options)
    forward = _forward(made, mode)
    weight = model.sometimes.weight
    for number in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + rank))
        if zeroed:
            made.zero_grad()
        stale = None if weight.grad is None else weight.grad.clone()
        _step(forward, mode, x, number == 0)
    handle.remove()
    assert model.always.weight.grad is not None
    stays = weight.grad is None if stale is None else torch.equal(weight.grad, stale)
    return float(model.always.weight.grad.norm()), stays


@pytest.mark.parametrize("mode", [EAGER, ON_DDP, TRACED], ids=str)
@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize(
    "hook", ["clip(1.0)", "clip(1.0, policy([('always*', allreduce())], error_feedback(sign())))"]
)
def test_clip_takes_the_norm_of_gradients_that_are_written(
    two_ranks: RankPool, hook: str, zeroed: bool, mode: Mode
) -> None:
    """Not of what was left of earlier steps, for a parameter that no rank has used."""
    for norm, stays in two_ranks.run(_clipped, hook, zeroed, mode):
        assert norm == pytest.approx(1.0, rel=1e-5)
        assert stays


class TwoTables(nn.Module):
    """With sparse gradients, of which the second is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Embedding(10, 4, sparse=True)
        self.sometimes = nn.Embedding(10, 4, sparse=True)

    def forward(self, rows: Tensor, both: bool) -> Tensor:
        y = self.always(rows)
        return y + self.sometimes(rows) if both else y


def _clipped_rows(rank: int) -> tuple[float, bool]:
    model = TwoTables()
    handle = attach(model, parse_hook("clip(1.0)"))
    rows = torch.tensor([1, 2, 3 + rank])
    model(rows, True).sum().backward()
    before = model.sometimes.weight.grad.to_dense()  # type: ignore[union-attr]
    model.always.weight.grad = None
    model(rows, False).sum().backward()
    handle.remove()
    gradients = [table.weight.grad.to_dense() for table in (model.always, model.sometimes)]  # type: ignore[union-attr]
    return float(gradients[0].norm()), torch.equal(gradients[1], before)


def test_clip_leaves_out_sparse_gradients_of_earlier_steps(two_ranks: RankPool) -> None:
    for norm, stays in two_ranks.run(_clipped_rows):
        assert norm == pytest.approx(1.0, rel=1e-5)
        assert stays
