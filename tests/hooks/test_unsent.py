"""What is remembered as lost stays so, whoever does not use a parameter, or takes over.

Messages hold errors of earlier steps: of parameters too that no rank uses in a step, and whose
gradients are left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import Mode
from on_ranks import on_processes, on_ranks
from torch import Tensor, nn

from torch_commhook import attach
from torch_commhook.hooks.expressions import parse_hook


class TwoWeights(nn.Module):
    """Of which the second is used in some steps only."""

    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(16, 24, False)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = layer(), layer()

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if both else y


EAGER, TRACED = Mode("module", "eager"), Mode("module", "context", backend="aot_eager")
ON_DDP = Mode("ddp", "eager")
MODES = pytest.mark.parametrize("mode", [EAGER, ON_DDP, TRACED], ids=str)


def _batch(rank: int, number: int, width: int = 16) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * number + rank))


class Run:
    """A model with a hook, in a mode."""

    def __init__(self, rank: int, mode: Mode, hook: str, model: nn.Module | None = None) -> None:
        torch._dynamo.reset()
        self.rank, self.mode = rank, mode
        self.model = TwoWeights() if model is None else model
        self.made = mode.wrap(self.model, find_unused_parameters=isinstance(self.model, TwoWeights))
        self.handle = attach(self.made, parse_hook(hook), **mode.attach_options)
        self.forward: Any = self.made
        if mode.runner != "eager":
            self.forward = torch.compile(self.made, backend=mode.backend)

    def step(self, *args: Any) -> None:
        loss = self.forward(*args).sum()
        with self.mode._backward():
            loss.backward()

    def left(self, name: str = "sometimes.weight") -> Tensor:
        """The mean over the ranks of what they have to send."""
        own = self.handle.state_dict()[f"rank{self.rank}"]
        left = own["error"][name].reshape(-1) / dist.get_world_size()
        if "shard_error" in own:
            left = left + own["shard_error"][name]
        dist.all_reduce(left)
        return left

    def left_after_steps(self, count: int = 3) -> list[Tensor]:
        """What is left of the second weight, which the first step alone uses, after each step."""
        found = []
        for number in range(count):
            self.made.zero_grad()
            self.step(_batch(self.rank, number), number == 0)
            found.append(self.left())
        return found

    def lost(self, name: str, uses: list[tuple[bool, ...]]) -> float:
        """The part of a weight's gradients that is neither applied nor left, by its norm.

        Args:
            name: of the weight.
            uses: for each step the arguments that follow the input; all true where it is used.
        """
        weight = self.model.get_parameter(name)
        wanted, applied = torch.zeros_like(weight), torch.zeros_like(weight)
        for number, args in enumerate(uses):
            x = _batch(self.rank, number, weight.shape[1])
            self.made.zero_grad()
            self.step(x, *args)
            if all(args):
                mean = x.sum(0).expand_as(weight).clone()
                dist.all_reduce(mean)
                wanted += mean / dist.get_world_size()
            if weight.grad is not None:
                applied += weight.grad
        left = self.left(name).view_as(weight)
        return float((wanted - applied - left).norm() / wanted.norm())


HOOKS = [
    "error_feedback(topk(0.05))",
    "error_feedback(chunk_topk(8, 256))",
    "error_feedback(blockwise(bits=4))",
    "error_feedback(powersgd(rank=1))",
    "policy([('always*', allreduce())], error_feedback(sign()))",
]


#: Of nine steps, the arguments that follow the input.
ONE_IN_THREE = [(number % 3 == 0,) for number in range(9)]


@pytest.mark.parametrize(
    ("mode", "hook"),
    [*itertools.product([EAGER, ON_DDP], HOOKS), (TRACED, HOOKS[0]), (TRACED, HOOKS[-1])],
    ids=str,
)
@on_processes
def test_nothing_is_lost_of_parameters_that_no_rank_used(rank: int, mode: Mode, hook: str) -> None:
    run = Run(rank, mode, hook)
    assert run.lost("sometimes.weight", ONE_IN_THREE) < 1e-5
    run.handle.remove()


@MODES
@on_processes
def test_little_is_lost_where_16_bits_remember_it(rank: int, mode: Mode) -> None:
    """Of nine steps, each of which rounds what is remembered."""
    run = Run(rank, mode, "error_feedback(topk(0.05), dtype=torch.bfloat16)")
    assert 1e-5 < run.lost("sometimes.weight", ONE_IN_THREE) < 9 * 2.0**-8
    run.handle.remove()


AFTER = {
    "error_feedback(topk(0.05))": "error_feedback(blockwise(bits=4))",
    "error_feedback(powersgd(rank=1))": "error_feedback(sign())",
    # Blocks of other sizes, and so other segments.
    "error_feedback(blockwise(4, 8))": "error_feedback(blockwise(8, 4096))",
    "error_feedback(sign(4096))": "error_feedback(fp8())",
}


@pytest.mark.parametrize(
    ("mode", "hook"),
    [
        *itertools.product([ON_DDP], AFTER),
        (TRACED, HOOKS[0]),
        (TRACED, "error_feedback(sign(4096))"),
    ],
    ids=str,
)
@on_processes
def test_a_hook_takes_over_what_the_one_before_has_lost(rank: int, mode: Mode, hook: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 40, bias=False)
    run = Run(rank, mode, f"after(3, {hook}, before={AFTER[hook]})", model)
    assert run.lost("weight", [()] * 6) < 1e-5
    if "blockwise" not in hook and "sign" not in hook:
        own = run.handle.state_dict()[f"rank{rank}"]
        assert not own["shard_error"]["weight"].any()
    run.handle.remove()


@on_processes
def test_traffic_of_compiled_steps_that_differ(rank: int) -> None:
    """Whenever it is asked for."""
    found = []
    for read_often in (True, False):
        torch.manual_seed(0)
        run = Run(rank, TRACED, "after(2, topk(0.1))", nn.Linear(30, 40))
        for _ in range(6):
            run.step(torch.ones(4, 30))
            if read_often:
                run.handle.stats()
        stats = run.handle.stats()
        found.append((stats.steps, stats.bytes_sent))
        run.handle.remove()
    assert found[0] == found[1]
    assert found[0][0] == 6


@MODES
@pytest.mark.parametrize(
    "hook",
    [
        "error_feedback(blockwise(bits=4))",
        "error_feedback(topk(0.1))",
        "after(9, error_feedback(topk(0.1)))",
    ],
)
@on_processes
def test_a_gradient_that_is_not_zeroed_is_not_remembered(rank: int, hook: str, mode: Mode) -> None:
    model = TwoWeights()
    weight = model.sometimes.weight
    if "topk" in hook:  # whose memory has the parameters' strides alone
        weight = model.sometimes.weight = nn.Parameter(weight.detach().t().clone().t())
    run = Run(rank, mode, hook, model)
    (left,) = run.left_after_steps(1)
    assert weight.grad is not None
    gradient = weight.grad.clone()
    for number in (1, 2):
        run.step(_batch(rank, number), False)
        assert torch.allclose(run.left(), left, atol=1e-5)
    run.handle.remove()
    assert torch.equal(weight.grad, gradient)


@MODES
@on_processes
def test_what_posthooks_do_is_not_remembered(rank: int, mode: Mode) -> None:
    run = Run(rank, mode, "error_feedback(topk(0.1))")
    run.handle.register_posthook(lambda reduced, local: tuple(r.mul_(3) for r in reduced))
    first, *later = run.left_after_steps()
    run.handle.remove()
    for left in later:
        assert torch.allclose(left, first, atol=1e-5)


@MODES
@pytest.mark.parametrize("hook", ["topk(0.9)", "sign()"])
@on_processes
def test_that_of_a_parameter_that_no_rank_uses_decays(rank: int, hook: str, mode: Mode) -> None:
    run = Run(rank, mode, f"momentum({hook}, 0.5)")
    found = run.left_after_steps(4)
    run.handle.remove()
    assert found[0].any()
    for step, left in enumerate(found):
        torch.testing.assert_close(left, found[0] * 0.5**step, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_rank_in_join_remembers_what_went_nowhere(rank: int) -> None:
    run = Run(rank, EAGER, "error_feedback(topk(0.5))")
    x = _batch(rank, 0)
    run.step(x, True)
    before = run.left()
    run.model.zero_grad()
    with run.handle.join():
        if rank == 0:
            run.step(x, False)
    assert before.any()
    assert torch.allclose(before, run.left(), atol=1e-7)
    run.handle.remove()


@pytest.mark.parametrize("hook", ["clip(1.0)", "error_feedback(blockwise(bits=4))"])
@on_ranks(2)
def test_joining_on_ddp(rank: int, hook: str) -> None:
    made = nn.parallel.DistributedDataParallel(nn.Linear(8, 8), find_unused_parameters=True)
    handle = attach(made, parse_hook(hook))
    written = []
    handle.register_post_accumulate_hook(lambda bucket: written.append(bucket.index()))
    with handle.join():
        for _ in range(2 - rank):
            made.zero_grad()
            made(torch.ones(4, 8)).sum().backward()
    handle.remove()
    assert len(written) == 2 - rank  # where there are gradients


@MODES
@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize(
    "hook", ["clip(1.0)", "clip(1.0, policy([('always*', allreduce())], error_feedback(sign())))"]
)
@on_processes
def test_clip_takes_the_norm_of_gradients_that_are_written(
    rank: int, hook: str, zeroed: bool, mode: Mode
) -> None:
    """Not of what was left of earlier steps, for a parameter that no rank has used."""
    run = Run(rank, mode, hook)
    always, sometimes = run.model.always.weight, run.model.sometimes.weight
    for number in range(2):
        if zeroed:
            run.made.zero_grad()
        stale = None if sometimes.grad is None else sometimes.grad.clone()
        run.step(_batch(rank, number), number == 0)
    run.handle.remove()
    assert float(always.grad.norm()) == pytest.approx(1.0, rel=1e-5)
    assert sometimes.grad is None if stale is None else torch.equal(sometimes.grad, stale)


@on_ranks(2)
def test_clip_leaves_out_sparse_gradients_of_earlier_steps(rank: int) -> None:
    model = TwoWeights(lambda: nn.Embedding(10, 4, sparse=True))
    handle = attach(model, parse_hook("clip(1.0)"))
    rows = torch.tensor([1, 1, 3 + rank])
    model(rows, True).sum().backward()
    before = model.sometimes.weight.grad.to_dense()  # type: ignore[union-attr]
    model.always.weight.grad = None
    model(rows, False).sum().backward()
    handle.remove()
    assert model.always.weight.grad.is_sparse  # type: ignore[union-attr]
    gradients = [table.weight.grad.to_dense() for table in (model.always, model.sometimes)]  # type: ignore[union-attr]
    assert float(gradients[0].norm()) == pytest.approx(1.0, rel=1e-5)
    assert torch.equal(gradients[1], before)
