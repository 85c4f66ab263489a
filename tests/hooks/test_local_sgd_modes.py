"""``hooks.local_sgd`` with error reset, and under compilers of the model and of the optimizer."""

from __future__ import annotations

import re
import unittest.mock
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layered_net import batch
from local_training import (
    MEAN,
    ROADS,
    Training,
    all_same,
    farthest,
    net,
    parameters_of,
    same,
)
from mode_cases import Mode
from on_ranks import of_all_ranks, on_processes, on_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters

from torch_commhook import GradBucket, PeerError, attach, collectives
from torch_commhook.hooks import Hook, local_sgd
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")

TOPK = "error_feedback(topk(0.05))"


def resets(hook: str = TOPK, H: int = 1) -> local_sgd:  # noqa: N803
    return local_sgd(H, outer=MEAN, hook=parse_hook(hook), error_reset=True)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    "hook",
    [
        TOPK,
        "error_feedback(powersgd(rank=1))",
        "error_feedback(sign())",
        f"after(2, {TOPK}, before=error_feedback(blockwise(bits=4)))",
    ],
)
@on_ranks(2)
def test_error_reset_keeps_the_mean(rank: int, road: str, hook: str) -> None:
    """Ranks go on from the anchor less what they have not sent; an exchange loses nothing."""

    def mean(tensors: list[Tensor]) -> list[Tensor]:
        return [
            sum(each) / 2 for each in zip(*of_all_ranks([t.double() for t in tensors]), strict=True)
        ]

    run = Training(rank, resets(hook), road)
    names = [name for name, _ in net().named_parameters()]
    for _ in range(5):
        before: list[Tensor] = []
        taken = run.optimizer.register_step_post_hook(
            lambda *_, kept=before: kept.extend(run.parameters)
        )
        # Called before ours, which is for all optimizers.
        run.train()
        taken.remove()
        after, anchors = run.parameters, run.anchors
        assert farthest(mean(before), mean(after)) < 1e-6
        errors = run.handle.state_dict()[f"rank{rank}"]["error"]
        for parameter, name in zip(after, names, strict=True):
            place = anchors[name] - errors[name].view_as(anchors[name])
            torch.testing.assert_close(parameter, place, rtol=0, atol=1e-7)
        assert farthest(*of_all_ranks(after)) > 1e-4
    run.handle.synchronize()
    together, steps = run.parameters, run.exchanges
    assert farthest(mean(after), mean(together)) < 1e-6
    assert all_same(of_all_ranks(together))
    run.handle.synchronize()
    assert run.exchanges == steps and same(together, run.parameters)
    run.train()  # goes on from there
    run.handle.remove()


@pytest.mark.parametrize(
    "hook", [TOPK, "error_feedback(blockwise(bits=4))", "error_feedback(sign())"]
)
@on_processes
def test_a_failed_exchange_keeps_the_mean(rank: int, hook: str) -> None:
    model = nn.Linear(40, 40, bias=False)
    handle = attach(model, resets(hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradient = torch.randn(40, 40, generator=torch.Generator().manual_seed(rank))
    wanted = model.weight.detach() - gradient
    (model.weight * gradient).sum().backward()
    inside = handle._attached.hook.hook
    average = inside.average

    def fails(bucket: GradBucket) -> Any:
        average(bucket).wait()  # all is sent
        raise ArithmeticError("boo")

    with pytest.raises((ArithmeticError, PeerError)):
        with unittest.mock.patch.object(inside, "average", fails) if rank == 0 else nullcontext():
            optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # tries again
    handle.remove()
    found, mean = (sum(of_all_ranks(each)) / 2 for each in (model.weight.detach(), wanted))
    assert torch.allclose(found, mean, atol=1e-5)


@on_ranks(2)
def test_what_is_loaded_has_nothing_unsent(rank: int) -> None:
    run = Training(rank, resets())
    run.train(3)
    loaded = {name: torch.full_like(p, 0.5) for name, p in run.model.state_dict().items()}
    run.model.load_state_dict(loaded)
    run.handle.synchronize()  # nothing is apart
    assert all((p == 0.5).all() for p in run.parameters)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.0)
    run.train(2)
    run.end()
    assert all((p == 0.5).all() for p in run.parameters)


def _least_squares(rank: int, hook: local_sgd, steps: int) -> float:
    """How far the ranks' mean is from the solution of what all ranks have."""
    generator = torch.Generator().manual_seed(rank)
    rows, target = torch.randn(64, 40, generator=generator), torch.randn(64, generator=generator)
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    handle = attach(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(rows).squeeze(1) - target).square().mean().backward()
        optimizer.step()
    handle.synchronize()
    handle.remove()
    gathered = collectives.all_gather(torch.cat([rows, target[:, None]], 1)).wait()
    table = gathered.flatten(0, 1)
    solution = torch.linalg.lstsq(table[:, :40], table[:, 40:]).solution.squeeze(1)
    return float((model.weight.detach()[0] - solution).norm() / solution.norm())


def test_error_reset_is_nearer_than_feedback_alone() -> None:
    """With few of the values sent in each step."""
    late = run_ranks(_least_squares, 2, local_sgd(1, outer=MEAN, hook=parse_hook(TOPK)), 60)
    reset = run_ranks(_least_squares, 2, resets(), 60)
    assert reset == pytest.approx([reset[0]] * 2, rel=1e-5)
    assert reset[0] < 0.7 * late[0]


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="error_reset must be a bool, got int"):
        local_sgd(1, error_reset=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got allreduce\(\); use error_feedback"):
        local_sgd(1, error_reset=True)
    for hook in ("error_feedback(sign(), decay=0.9)", "momentum(sign(), beta=0.9)"):
        with pytest.raises(ValueError, match=f"must not decay.*got {re.escape(hook)}"):
            resets(hook)
    with pytest.raises(ValueError, match="must remember its errors of each bucket"):
        resets("policy()")


@on_ranks(2)
def test_all_ranks_move_their_anchors_where_one_finds_its_own_parameters(rank: int) -> None:
    run = Training(rank, resets())
    run.train(3)
    with torch.no_grad():
        for parameter in run.model.parameters():
            loaded = parameter.clone()
            dist.broadcast(loaded, 0)
            parameter.copy_(loaded)
    run.train(3)
    run.handle.synchronize()
    assert all_same(of_all_ranks([*run.parameters, *run.anchors.values()]))
    run.handle.remove()


# ---- under compilers -----------------------------------------------------------------------------

EAGER = Mode("module", "eager")
PLAIN, STREAMING = local_sgd(2), local_sgd(4, fragments=2, delay=1, mix=0.5)


def _small_net() -> nn.Module:
    """No biases: their gradients are sums that Inductor adds up in another order than eager."""
    torch.manual_seed(0)
    layers = nn.Linear(24, 150, bias=False), nn.ReLU(), nn.Linear(150, 8, bias=False)
    return nn.Sequential(*layers)


def _in_mode(
    rank: int, mode: Mode, hook: Hook = PLAIN, update: str = "optimizer"
) -> dict[str, Any]:
    """Trains with an optimizer, one whose step is compiled, or updates by hand."""
    torch._dynamo.reset()
    counters.clear()
    model = mode.wrap(_small_net())
    handle = attach(model, hook, **mode.attach_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def by_hand() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    take_step = by_hand if update == "by hand" else optimizer.step
    if update == "compiled":
        take_step = torch.compile(take_step)
    captures = []
    with mode.step_function(model) as step:
        for number in range(5):
            optimizer.zero_grad()
            step(batch(rank, number))
            take_step()
            captures.append(counters["stats"]["unique_graphs"])
    handle.synchronize()
    found = {
        "parameters": parameters_of(model),
        "captures": captures,
        "breaks": sum(counters["graph_break"].values()),
        "steps": handle.stats().steps,
        "bytes": handle.stats().bytes_sent,
    }
    handle.remove()
    return found


COMPILED = [
    Mode("ddp", "context", backend="aot_eager"),
    Mode("python_reducer", "context", backend="aot_eager"),
    Mode("module", "compile", backend="aot_eager"),
    Mode("module", "context", fullgraph=True),
]


@pytest.mark.parametrize(
    ("mode", "hook"),
    [(mode, PLAIN) for mode in COMPILED] + [(COMPILED[n], STREAMING) for n in (0, 2)],
    ids=str,
)
@on_processes
def test_compiled_as_in_eager(rank: int, mode: Mode, hook: Hook) -> None:
    wanted = _in_mode(rank, Mode(mode.model, "eager"), hook)
    found = _in_mode(rank, mode, hook)
    assert found["steps"] == wanted["steps"] == 3
    assert found["bytes"] == wanted["bytes"]
    assert same(found["parameters"], wanted["parameters"])
    compiled_once = 1 if mode.model == "ddp" else 0
    assert found["captures"][compiled_once] == found["captures"][-1], "compiled again"
    if mode.model != "ddp":  # whose forward has some of PyTorch's own
        assert found["breaks"] == 0


@on_processes
def test_updates_by_hand_are_noticed_under_compilers(rank: int) -> None:
    wanted = _in_mode(rank, EAGER, update="by hand")
    found = _in_mode(rank, Mode("module", "context", backend="aot_eager"), update="by hand")
    assert found["steps"] == wanted["steps"] == 3
    assert same(found["parameters"], wanted["parameters"])


@on_processes
def test_an_optimizer_that_is_compiled(rank: int) -> None:
    wanted, found = _in_mode(rank, EAGER), _in_mode(rank, EAGER, update="compiled")
    assert found["steps"] == wanted["steps"] == 3
    assert farthest(found["parameters"], wanted["parameters"]) < 1e-4
