"""``hooks.local_sgd`` where a rank fails, in its own step or in an exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layered_net import batch
from local_failures import Flaky, FlakyTopk, error_of_step
from local_training import MEAN, all_same, attached, parameters_of, same, train
from mode_cases import OwnError
from rank_pool import RankPool
from torch import Tensor, nn

from torch_commhook import PeerError, attach
from torch_commhook.hooks import compressed, error_feedback, local_sgd, policy

pytestmark = pytest.mark.usefixtures("no_hook_on_optimizers_left")


def _fails_on_its_own(rank: int) -> list[Tensor]:
    """A stage raises on rank 0 where no rank communicates, in a bucket that lacks gradients."""
    model, handle = attached(local_sgd(4))

    def refuse(gradients: tuple[Tensor, ...]) -> None:
        raise OwnError("boo")

    if rank == 0:
        stage = handle.register_prehook(refuse)
        with pytest.raises(OwnError):
            model.layers[0](batch(rank)).sum().backward()
        stage.remove()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 2)
    handle.synchronize()
    found = parameters_of(model)
    handle.remove()
    return found


def test_a_stage_that_fails_in_a_step_of_its_own(two_ranks: RankPool) -> None:
    """It is nothing to the other ranks, and the next exchange is as ever."""
    assert all_same(two_ranks.run(_fails_on_its_own))


def _fails(rank: int, road: str) -> Any:
    flaky = Flaky()
    model, handle = attached(local_sgd(2, hook=flaky), road)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    errors = {}
    for step in range(8):
        flaky.fails = step in (1, 2, 5) and step % 2 == rank
        if said := error_of_step(model, optimizer, rank, step):
            errors[step] = said
    found = errors, handle.stats().steps, parameters_of(model)
    handle.remove()
    return found


@pytest.mark.parametrize("road", ["module", "ddp"])
def test_a_rank_that_fails_in_the_exchange(two_ranks: RankPool, road: str) -> None:
    """All raise, nothing has changed, and the next step tries again."""
    first, second = results = two_ranks.run(_fails, road)
    # Due after steps 1, 2 and 3 (when it is done), and then after 5 and 6.
    kinds = [{step: said.partition(":")[0] for step, said in each[0].items()} for each in results]
    assert kinds[0] == {1: "PeerError", 2: "OwnError", 5: "PeerError"}
    assert kinds[1] == {1: "OwnError", 2: "PeerError", 5: "OwnError"}
    assert "on rank 1: OwnError: boo" in first[0][1]
    assert first[1] == second[1] == 2
    assert not same(first[2], second[2])  # one step after the last exchange


def _sent_again(rank: int, fails: bool, in_parts: bool) -> tuple[Tensor, Tensor, Tensor]:
    codec = FlakyTopk(0.25)
    model = nn.Linear(16, 16, bias=False)
    begin = model.weight.detach().clone()
    hook: Any = error_feedback(compressed(codec))
    if in_parts:
        hook = policy([], hook)
    handle = attach(model, local_sgd(1, outer=MEAN, hook=hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    gradient = torch.randn(16, 16, generator=generator)
    (model.weight * gradient).sum().backward()
    if fails and rank == 0:
        codec.fail_once()
    try:
        optimizer.step()
    except (OwnError, PeerError):
        assert fails
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # tries again
    left = handle.state_dict()[f"rank{rank}"]["error"]["weight"]
    handle.remove()
    return begin - model.weight.detach(), left, gradient * 0.1


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_failed_exchange_has_sent_is_not_remembered_as_lost(
    two_ranks: RankPool, fails: bool, in_parts: bool
) -> None:
    """Neither of whole buckets nor, with a policy, of parts of them."""
    (moved, *first), (_, *second) = two_ranks.run(_sent_again, fails, in_parts)
    left, wanted = ((a + b) / 2 for a, b in zip(first, second, strict=True))
    assert torch.allclose(moved + left, wanted, atol=1e-6)
