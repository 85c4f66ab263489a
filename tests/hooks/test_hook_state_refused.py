"""States that do not fit, and ranks that disagree about a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankPool
from state_training import attached, net, train

from torch_commhook.hooks.expressions import parse_hook


def _wrong(rank: int) -> None:
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(1))
    state = handle.state_dict()
    before = state[f"rank{rank}"]["error"]["0.weight"].clone()
    name = "0.weight"

    def own(kind: str, value: torch.Tensor) -> dict[str, Any]:
        return {f"rank{rank}": {**state[f"rank{rank}"], kind: {name: value}}}

    for change, message in [
        ({"version": 7}, "version 7"),
        ({"world_size": 3}, "must be of 2 ranks, got one of 3"),
        ({f"rank{rank}": None}, f"must be that of rank {rank}"),
        ({f"rank{rank}": {"error": {"gone": torch.zeros(1)}}}, "parameter 'gone'"),
        ({f"rank{rank}": {"error": {name: torch.zeros(1)}}}, r"must be of shape .*, got \[1\]"),
        (
            {f"rank{rank}": {"error": {name: torch.zeros(3, 3, 3, 48)}}},
            r"must be of shape \[48, 3, 3, 3\], got \[3, 3, 3, 48\]",
        ),
        ({"steps": -1}, "its steps must be a number of steps, got -1"),
        ({"steps": True}, "its steps must be a number of steps, got True"),
        ({f"rank{rank}": {"error": {name: 3}}}, "must be a tensor"),
        ({f"rank{rank}": {"error": 3}}, "'error' must be a dict by parameter, got int"),
        ({f"rank{rank}": None, 7: None}, f"must be that of rank {rank}"),
        ({"buckets": None}, "buckets must be of type list"),
        ({"buckets": [[]]}, "buckets must be lists of the model's parameters"),
        ({"version": torch.ones(2)}, "must come from HookHandle.state_dict"),
        ({"world_size": torch.ones(2)}, "must be of 2 ranks"),
        ({"buckets": [["gone"]]}, "buckets must be lists of the model's parameters"),
        ({"buckets": [[[]]]}, "buckets must be lists of the model's parameters"),
        ({"steps": 1 << 70}, "its steps must be a number of steps"),
        (own("error", torch.full((48, 3, 3, 3), torch.nan)), "must hold finite numbers"),
        (
            own("error", torch.full((48, 3, 3, 3), 1e300, dtype=torch.float64)),
            "must hold finite numbers",
        ),
        (own("error", torch.zeros(48, 3, 3, 3, device="meta")), "must be a dense tensor"),
        (own("error", torch.zeros(48, 3, 3, 3, dtype=torch.int64)), "must be a dense tensor"),
        (own("error", torch.zeros(48 * 27)), r"must be of shape \[48, 3, 3, 3\]"),
        (own("shard_error", torch.zeros(48, 3, 3, 3)), r"must be of shape \[1296\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            handle.load_state_dict({**state, **change})
    with pytest.raises(ValueError, match=r"must come from HookHandle\.state_dict"):
        handle.load_state_dict([])  # type: ignore[arg-type]
    assert torch.equal(handle.state_dict()[f"rank{rank}"]["error"]["0.weight"], before)
    handle.remove()
    with pytest.raises(RuntimeError, match="no longer attached"):
        handle.load_state_dict(state)
    plain, handle = attached(net(), "allreduce()", False)
    train(plain, rank, range(1))
    assert handle.state_dict() == {}
    handle.load_state_dict({})
    for nothing in (None, [], 0):
        with pytest.raises(ValueError, match=r"must come from HookHandle\.state_dict"):
            handle.load_state_dict(nothing)  # type: ignore[arg-type]
    handle.remove()


def test_states_that_do_not_fit(two_ranks: RankPool) -> None:
    two_ranks.run(_wrong)


def _ranks_disagree(rank: int) -> list[str]:
    errors = []
    model, handle = attached(net(), "error_feedback(blockwise())", False)
    train(model, rank, range(1))
    state = handle.state_dict()
    for attempt in (
        lambda: handle.load_state_dict({**state, "steps": 1 + rank}),
        lambda: handle.load_state_dict({**state, "version": 1 + rank}),
        lambda: handle.replace(parse_hook(f"blockwise(bits={4 + 4 * rank})")),
        lambda: handle.replace(parse_hook("blockwise()") if rank else 3),
    ):
        try:
            attempt()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    same_hook = repr(handle.hook) == "error_feedback(blockwise())"
    train(model, rank, range(1, 2))
    handle.remove()
    return [*errors, str(same_hook)]


def test_ranks_that_disagree_change_nothing(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_ranks_disagree)
    assert first[-1] == second[-1] == "True"
    assert first[0].startswith(
        "RuntimeError: HookHandle.load_state_dict: the state's steps must be the same on all "
        "ranks: this one has 1, rank 1 has 2"
    )
    assert first[1].startswith("RuntimeError: HookHandle.load_state_dict: it failed on rank 1: ")
    assert second[1].startswith("ValueError: load_state_dict: the state must come from")
    assert first[2].startswith("RuntimeError: HookHandle.replace: the hook must be the same")
    assert first[3].startswith("TypeError")
    assert second[3].startswith("RuntimeError: HookHandle.replace: it failed on rank 0: TypeError")


def _anothers_state(rank: int) -> None:
    _, first = attached(net(), "error_feedback(topk(0.1))", False)
    train(first._road.model(), rank, range(2))
    states = {"error": first.state_dict()}
    first.remove()
    _, first = attached(net(), "local_sgd(2)", False)
    states["apart"] = first.state_dict()
    first.remove()
    _, handle = attached(net(), "error_feedback(sign())", False)
    with pytest.raises(ValueError, match="'local_sgd_parameter', which the attached hook"):
        handle.load_state_dict(states["apart"])
    handle.load_state_dict(states["error"])  # of a hook that remembers as much
    handle.remove()
    _, handle = attached(net(), "allreduce()", False)
    with pytest.raises(ValueError, match="'error', which the attached hook"):
        handle.load_state_dict(states["error"])
    handle.remove()


def test_the_state_of_another_hook(two_ranks: RankPool) -> None:
    two_ranks.run(_anothers_state)
