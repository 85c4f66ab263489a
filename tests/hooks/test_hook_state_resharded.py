"""``reshard_states``: states for another number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankPool
from state_training import attached, in_rows, net, train

from torch_commhook import reshard_states


def _states(rank: int) -> dict[str, Any]:
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(3))
    state = handle.state_dict()
    handle.remove()
    return state


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_another_number_of_ranks(two_ranks: RankPool, world_size: int) -> None:
    states = two_ranks.run(_states)
    others = reshard_states(states, world_size)
    assert len(others) == world_size

    def left(of: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """What they have yet to send, as the mean over the ranks."""
        total: dict[str, torch.Tensor] = {}
        for rank, state in enumerate(of):
            own = state[f"rank{rank}"]
            for name, error in own.get("error", {}).items():
                second = in_rows(own.get("shard_error", {}).get(name), error)
                total[name] = total.get(name, 0) + error.reshape(-1) / len(of) + second
        return total

    before, after = left(states), left(others)
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name])
    for rank, state in enumerate(others):
        assert state["world_size"] == world_size
        assert [key for key in state if key.startswith("rank")] == [f"rank{rank}"]


@pytest.mark.parametrize(
    ("states", "world_size", "error", "message"),
    [
        ([], 1, ValueError, "must hold at least one"),
        ([{}], 1, ValueError, r"states\[0\] must be that of rank 0"),
        ([{"rank0": {}}], 1, ValueError, r"states\[0\] must be that of rank 0"),
        ([{"rank0": {}, "world_size": 2, "steps": 1}], 1, ValueError, "must be of 1 ranks"),
        ({"rank0": {}}, 1, TypeError, "states must be a list of states, got dict"),
        ([{}], 0, ValueError, "world_size must be from 1 to 1048576, got 0"),
        ([{}], 2.0, TypeError, "world_size must be an int, got float"),
        ([{}], True, TypeError, "world_size must be an int, got bool"),
    ],
)
def test_states_that_cannot_be_of_other_ranks(
    states: Any, world_size: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"reshard_states: .*{message}"):
        reshard_states(states, world_size)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([{"rank0": 3, "world_size": 1, "steps": 1}], "must be tensors by kind and parameter"),
        ([{"rank0": {"error": 3}, "world_size": 1, "steps": 1}], "must be tensors by kind"),
    ],
)
def test_damaged_states_are_not_resharded(states: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reshard_states(states, 2)
    with pytest.raises(ValueError, match="world_size must be from 1 to"):
        reshard_states(states, 2**70)
