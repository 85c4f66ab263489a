"""What hooks remember: saved, read, and gone on from, bit for bit."""

from __future__ import annotations

import io
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from rank_pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import HookHandle, attach, hooks, reshard_states
from torch_commhook.cli.hook_expression import parse_hook

HOOKS = [
    "error_feedback(blockwise(bits=4))",
    "blockwise(rounding='stochastic', seed=5)",
    "error_feedback(blockwise(bits=4, rounding='stochastic'))",
    "error_feedback(sign())",
    "error_feedback(topk(0.05))",
    "error_feedback(chunk_topk(8, 256))",
    "after(4, error_feedback(blockwise(bits=4)))",
    "policy([('dim <= 1', allreduce()), ('0.*', error_feedback(topk(0.1)))])",
    "clip(0.5, error_feedback(fp8()))",
    # Shards of two kinds, stopped after the change, at it, and before.
    "after(3, error_feedback(blockwise(4, 8)), before=error_feedback(blockwise(8, 64)))",
    "after(5, error_feedback(sign()), before=error_feedback(blockwise(4, 8)))",
    "after(3, error_feedback(topk(0.05)), before=error_feedback(blockwise(8, 64)))",
    "error_feedback(blockwise(bits=4), dtype=torch.bfloat16)",
    "error_feedback(topk(0.05), dtype=torch.bfloat16)",
    "momentum(topk(0.05), beta=0.9)",
    "momentum(topk(0.05), beta=0.9, dtype=torch.bfloat16)",
    "error_feedback(blockwise(bits=4), decay=0.75, dtype=torch.bfloat16)",
    "error_feedback(powersgd(rank=2), decay=0.75, dtype=torch.bfloat16)",
]


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 48) for _ in range(4)]
    return nn.Sequential(
        nn.Conv2d(3, 48, 3).to(memory_format=torch.channels_last), nn.Flatten(2), Mean(), *layers
    )


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(2)


def attached(model: nn.Module, hook: str, on_ddp: bool) -> tuple[nn.Module, HookHandle]:
    if not on_ddp:
        return model, attach(model, parse_hook(hook), bucket_cap_mb=0.02)
    ddp = DDP(model, bucket_cap_mb=0.02)
    ddp(torch.zeros(1, 3, 6, 6)).sum().backward()  # which has DDP order its buckets
    ddp.zero_grad()
    return ddp, attach(ddp, parse_hook(hook))


def train(model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 3, 6, 6, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad


def saved_and_read(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _resume(rank: int, hook: str, on_ddp: bool, stop: int) -> bool:
    straight, handle = attached(net(), hook, on_ddp)
    train(straight, rank, range(6))
    handle.remove()
    first, handle = attached(net(), hook, on_ddp)
    train(first, rank, range(stop))
    saved = saved_and_read({"model": first.state_dict(), "hook": handle.state_dict()})
    handle.remove()
    second, handle = attached(net(), hook, on_ddp)
    second.load_state_dict(saved["model"])
    handle.load_state_dict(saved["hook"])
    train(second, rank, range(stop, 6))
    assert handle.state_dict()["steps"] == 6
    handle.remove()
    pairs = zip(straight.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
def test_training_goes_on_as_if_nothing_had_happened(
    two_ranks: RankPool, hook: str, on_ddp: bool
) -> None:
    stop = 1 + HOOKS.index(hook) % 5
    assert two_ranks.run(_resume, hook, on_ddp, stop) == [True, True]


def _forgotten(rank: int) -> bool:
    """The same without the hook's state, which must show."""
    hook = "error_feedback(blockwise(bits=4))"
    straight, handle = attached(net(), hook, False)
    train(straight, rank, range(4))
    handle.remove()
    first, handle = attached(net(), hook, False)
    train(first, rank, range(2))
    handle.remove()
    handle = attach(first, hooks.error_feedback(hooks.blockwise(bits=4)), bucket_cap_mb=0.02)
    train(first, rank, range(2, 4))
    handle.remove()
    pairs = zip(straight.parameters(), first.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_without_its_state_it_would_show(two_ranks: RankPool) -> None:
    assert two_ranks.run(_forgotten) == [False, False]


def _other_buckets(rank: int, ddp_first: bool) -> float:
    """What is remembered, as the mean over the ranks, in buckets of another form."""
    first, handle = attached(net(), "error_feedback(blockwise(bits=4))", ddp_first)
    train(first, rank, range(3))
    state = handle.state_dict()
    handle.remove()
    second = net()
    second.load_state_dict(first.module.state_dict() if ddp_first else first.state_dict())
    other = DDP(second)
    other_handle = attach(other, hooks.error_feedback(hooks.blockwise(bits=4)))
    other_handle.load_state_dict(state)
    train(other, rank, range(3, 4))
    before, after = mean_error(state, rank), mean_error(other_handle.state_dict(), rank)
    other_handle.remove()
    # A step has changed it, but not by more than that step's own gradients.
    return float((before - after).norm() / after.norm())


def mean_error(state: dict[str, Any], rank: int) -> torch.Tensor:
    """What all ranks together have yet to send, per parameter and element."""
    own = state[f"rank{rank}"]
    names = sorted(own["error"])
    total = torch.cat(
        [
            own["error"][name].permute(*range(own["error"][name].dim())).reshape(-1) / 2
            + in_rows(own["shard_error"].get(name), own["error"][name])
            for name in names
        ]
    )
    dist.all_reduce(total)
    return total


def in_rows(flat: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if flat is None:
        return torch.zeros(like.numel())
    as_it_lies = torch.empty_like(like)
    order = sorted(range(like.dim()), key=lambda d: like.stride(d), reverse=True)
    as_it_lies.permute(order).view(-1).copy_(flat)
    return as_it_lies.reshape(-1)


def _fold(rank: int) -> bool:
    """Nothing of it is lost when other buckets take it over."""
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(3))
    state = handle.state_dict()
    handle.remove()
    other = attach(model, hooks.error_feedback(hooks.blockwise(bits=4)), bucket_cap_mb=1)
    split = dict(state)
    names = [name for bucket in state["buckets"] for name in bucket]
    split["buckets"] = [names]  # one bucket, with other shards
    other.load_state_dict(split)
    moved = other.state_dict()
    other.remove()
    torch.testing.assert_close(mean_error(moved, rank), mean_error(state, rank))
    return moved["buckets"] == split["buckets"]


def test_other_buckets_take_over_what_is_remembered(two_ranks: RankPool) -> None:
    assert two_ranks.run(_fold) == [True, True]


def test_buckets_of_another_form(two_ranks: RankPool) -> None:
    for change in two_ranks.run(_other_buckets, False):
        assert 0 < change < 2


def _checkpoint(rank: int, folder: str) -> bool:
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(2))
    state = handle.state_dict()
    checkpoint.save({"hook": state}, checkpoint_id=folder)
    train(model, rank, range(2, 3))
    read = {"hook": handle.state_dict()}
    checkpoint.load(read, checkpoint_id=folder)
    handle.load_state_dict(read["hook"])
    again = handle.state_dict()
    handle.remove()
    own, own_again = state[f"rank{rank}"], again[f"rank{rank}"]
    assert again["steps"] == 2
    return all(
        torch.equal(own[kind][name], own_again[kind][name]) for kind in own for name in own[kind]
    )


def test_distributed_checkpoints(two_ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert two_ranks.run(_checkpoint, folder) == [True, True]


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
        ({"version": torch.ones(2)}, "must be what HookHandle.state_dict"),
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
    with pytest.raises(ValueError, match=r"must be what HookHandle\.state_dict"):
        handle.load_state_dict([])  # type: ignore[arg-type]
    assert torch.equal(handle.state_dict()[f"rank{rank}"]["error"]["0.weight"], before)
    handle.remove()
    with pytest.raises(RuntimeError, match="not attached any more"):
        handle.load_state_dict(state)
    plain, handle = attached(net(), "allreduce()", False)
    train(plain, rank, range(1))
    assert handle.state_dict() == {}
    handle.load_state_dict({})
    for nothing in (None, [], 0):
        with pytest.raises(ValueError, match=r"must be what HookHandle\.state_dict"):
            handle.load_state_dict(nothing)  # type: ignore[arg-type]
    handle.remove()


def test_states_that_do_not_fit(two_ranks: RankPool) -> None:
    two_ranks.run(_wrong)


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


def _replaced(rank: int) -> bool:
    """Another hook in its place begins with nothing."""
    model, handle = attached(net(), "error_feedback(blockwise(bits=4))", False)
    train(model, rank, range(2))
    handle.replace(hooks.error_feedback(hooks.sign()))
    assert handle.state_dict()["steps"] == 0
    train(model, rank, range(2, 3))
    assert handle.state_dict()["steps"] == 1
    handle.remove()
    return True


def test_a_hook_in_anothers_place_remembers_nothing(two_ranks: RankPool) -> None:
    assert two_ranks.run(_replaced) == [True, True]


KINDS = [
    "error_feedback(blockwise(bits=4))",
    "error_feedback(topk(0.1))",
    "powersgd(rank=2)",
    "policy([('dim <= 1', allreduce())], error_feedback(sign()))",
    "adaptive(20000, every=2)",
    "after(2, error_feedback(topk(0.1)), before=error_feedback(blockwise()))",
    "local_sgd(3)",
    "local_sgd(2, hook=error_feedback(blockwise()), error_reset=True)",
    "local_sgd(2, hook=error_feedback(blockwise()), delay=1)",
]


def _keys(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a state has, whatever its values."""
    return {
        kind: {name: tensor.shape for name, tensor in tensors.items()}
        for kind, tensors in {**state[f"rank{rank}"], **state["shared"]}.items()
    }


def _at_any_time(rank: int, hook: str, on_ddp: bool) -> list[bool]:
    model, handle = attached(net(), hook, on_ddp)
    found = [_keys(handle.state_dict(), rank)]
    for step in range(3):
        train(model, rank, range(step, step + 1))
        found.append(_keys(handle.state_dict(), rank))
    # A state that was loaded is there at once.
    state = handle.state_dict()
    other_model, other = attached(net(), hook, on_ddp)
    other.load_state_dict(state)
    again = other.state_dict()
    found.append(_keys(again, rank))
    kept = all(
        torch.equal(again[f"rank{rank}"][kind][name], tensor)
        for kind, tensors in state[f"rank{rank}"].items()
        for name, tensor in tensors.items()
    )
    for one in (handle, other):
        one.synchronize()
        one.remove()
    del other_model
    return [kept, *(one == found[0] for one in found)]


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", KINDS)
def test_a_state_always_has_the_same(two_ranks: RankPool, hook: str, on_ddp: bool) -> None:
    """Before the first step, and whatever the buckets: ``torch.distributed.checkpoint`` asks."""
    for found in two_ranks.run(_at_any_time, hook, on_ddp):
        assert all(found), found


def _from_a_fresh_template(rank: int, hook: str, on_ddp: bool, folder: str) -> bool:
    model, handle = attached(net(), hook, on_ddp)
    train(model, rank, range(4))
    state = handle.state_dict()
    checkpoint.save({"hook": state}, checkpoint_id=folder)
    dist.barrier()
    _, other = attached(net(), hook, on_ddp)
    template = {"hook": other.state_dict()}
    checkpoint.load(template, checkpoint_id=folder)
    other.load_state_dict(template["hook"])
    again = other.state_dict()
    for one in (handle, other):
        one.synchronize()
        one.remove()
    return all(
        torch.equal(again[of][kind][name], tensor)
        for of in ("shared", f"rank{rank}")
        for kind, tensors in state[of].items()
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", [KINDS[0], "local_sgd(3)", KINDS[-1]])
def test_a_checkpoint_into_a_fresh_template(two_ranks: RankPool, hook: str, on_ddp: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert two_ranks.run(_from_a_fresh_template, hook, on_ddp, folder) == [True, True]


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
    assert second[1].startswith("ValueError: load_state_dict: the state must be what")
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
    with pytest.raises(ValueError, match="'local_sgd_parameter', which the hook"):
        handle.load_state_dict(states["apart"])
    handle.load_state_dict(states["error"])  # of a hook that remembers as much
    handle.remove()
    _, handle = attached(net(), "allreduce()", False)
    with pytest.raises(ValueError, match="'error', which the hook"):
        handle.load_state_dict(states["error"])
    handle.remove()


def test_the_state_of_another_hook(two_ranks: RankPool) -> None:
    two_ranks.run(_anothers_state)


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


def _of_other_dtypes(rank: int, hook: str) -> float:
    first = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    handle = attach(first, parse_hook(hook))
    first(torch.ones(2, 64)).sum().backward()
    state = handle.state_dict()
    handle.remove()
    other = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).to(torch.bfloat16))
    handle = attach(other, parse_hook(hook))
    handle.load_state_dict(state)
    generator = torch.Generator().manual_seed(rank)
    wanted, losses = [], []
    for parameter in other.parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        losses.append((parameter * gradient).sum().float())
        wanted.append(gradient / 2)
        dist.all_reduce(wanted[-1])
    sum(losses).backward()  # type: ignore[union-attr]
    handle.remove()
    return max(
        float((parameter.grad - mean).abs().max())  # type: ignore[operator]
        for parameter, mean in zip(other.parameters(), wanted, strict=True)
        if parameter.dtype == torch.float32
    )


def test_a_state_of_other_dtypes(two_ranks: RankPool) -> None:
    """Its buckets held what may not share one here, and would have been rounded to bfloat16."""
    hook = "after(3, error_feedback(blockwise(bits=4)))"
    for error in two_ranks.run(_of_other_dtypes, hook):
        assert error < 1e-6
