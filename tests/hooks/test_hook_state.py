"""A hook's state: training goes on from it, or it is refused; states of all ranks; checkpoints."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import remembering_hooks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from mode_cases import compiled_backward
from nested_values import different_paths
from on_ranks import of_all_ranks, on_processes, on_ranks
from remembering_hooks import check_same, hook_of, model_of
from state_training import Run, attached, in_rows, mean_error, net, train
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import GradBucket, HookHandle, attach, hooks, reshard_states
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.process_group import RecordingProcessGroup
from torch_commhook.testing import run_ranks

INT4 = "error_feedback(blockwise(bits=4))"
HOOKS = [
    INT4,
    "blockwise(rounding='stochastic', seed=5)",
    "error_feedback(blockwise(bits=4, rounding='stochastic'))",
    "error_feedback(sign())",
    "error_feedback(topk(0.05))",
    "error_feedback(chunk_topk(8, 256))",
    "after(4, error_feedback(blockwise(bits=4)))",
    "policy([('dim <= 1', allreduce()), ('0.*', error_feedback(topk(0.1)))])",
    "clip(0.5, error_feedback(fp8()))",
    # Segments of two kinds, stopped after the change, at it, and before.
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


# ---- going on ------------------------------------------------------------------------------------


@on_processes
def test_a_state_that_is_loaded_inside_a_step_counts_from_the_next_bucket(rank: int) -> None:
    assert all(map(torch.equal, *(_loaded_inside(rank, compiled) for compiled in (False, True))))


def _loaded_inside(rank: int, compiled: bool) -> list[nn.Parameter]:
    torch._dynamo.reset()
    model, handle = attached(net(), INT4, False)
    states: list[dict[str, Any]] = []

    def load(bucket: GradBucket) -> None:
        if bucket.index() == 0 and states:
            handle.load_state_dict(states.pop())

    handle.register_buffer_prehook(load)
    with compiled_backward(compiled):
        train(model, rank, range(1))
        early = handle.state_dict()
        train(model, rank, range(1, 3))
        states.append(early)
        train(model, rank, range(3, 5))
    assert len(handle.stats().buckets) > 1 and not states
    handle.remove()
    return list(model.parameters())


def _trained(
    rank: int, hook: str, steps: int, on_ddp: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """A model after some steps, and the state of its hook."""
    model, handle = attached(net(), hook, on_ddp)
    train(model, rank, range(steps))
    state = handle.state_dict()
    handle.remove()
    return model, state


def _is_same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("on_ddp", [False, True], ids=["module", "ddp"])
@on_processes
def test_training_goes_on_as_if_nothing_had_happened(rank: int, hook: str, on_ddp: bool) -> None:
    stop = 1 + HOOKS.index(hook) % 5
    straight, _ = _trained(rank, hook, 6, on_ddp)
    first, state = _trained(rank, hook, stop, on_ddp)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "hook": state}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, handle = attached(net(), hook, on_ddp)
    second.load_state_dict(saved["model"])
    handle.load_state_dict(saved["hook"])
    train(second, rank, range(stop, 6))
    assert handle.state_dict()["steps"] == 6
    handle.remove()
    assert _is_same(straight, second)


@on_ranks(2)
def test_without_its_state_it_would_show(rank: int) -> None:
    straight, _ = _trained(rank, INT4, 4)
    first, _ = _trained(rank, INT4, 2)
    handle = attach(first, parse_hook(INT4), bucket_cap_mb=0.02)
    train(first, rank, range(2, 4))
    handle.remove()
    assert not _is_same(straight, first)


@on_ranks(2)
def test_a_hook_in_anothers_place_remembers_nothing(rank: int) -> None:
    model, handle = attached(net(), INT4, False)
    train(model, rank, range(2))
    handle.replace(hooks.error_feedback(hooks.sign()))
    assert handle.state_dict()["steps"] == 0
    train(model, rank, range(2, 3))
    assert handle.state_dict()["steps"] == 1
    handle.remove()


# ---- in other buckets ----------------------------------------------------------------------------


@on_ranks(2)
def test_other_buckets_take_over_what_is_remembered(rank: int) -> None:
    """Nothing of it is lost."""
    model, state = _trained(rank, INT4, 3)
    other = attach(model, parse_hook(INT4), bucket_cap_mb=1)
    names = [name for bucket in state["buckets"] for name in bucket]
    other.load_state_dict({**state, "buckets": [names]})  # one bucket, with other segments
    moved = other.state_dict()
    other.remove()
    torch.testing.assert_close(mean_error(moved, rank), mean_error(state, rank))
    assert moved["buckets"] == [names]


@on_ranks(2)
def test_buckets_of_another_form(rank: int) -> None:
    first, state = _trained(rank, INT4, 3)
    second = net()
    second.load_state_dict(first.state_dict())
    other = DDP(second)
    handle = attach(other, parse_hook(INT4))
    handle.load_state_dict(state)
    train(other, rank, range(3, 4))
    before, after = mean_error(state, rank), mean_error(handle.state_dict(), rank)
    handle.remove()
    # A step has changed it, but not by more than that step's own gradients.
    assert 0 < float((before - after).norm() / after.norm()) < 2


@on_ranks(2)
def test_a_state_of_other_dtypes(rank: int) -> None:
    """Its buckets held what may not share one here, and would have been rounded to bfloat16."""
    hook = "after(3, error_feedback(blockwise(bits=4)))"
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
    for parameter, mean in zip(other.parameters(), wanted, strict=True):
        if parameter.dtype == torch.float32:
            assert (parameter.grad - mean).abs().max() < 1e-6  # type: ignore[operator]


# ---- of another number of ranks ------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_another_number_of_ranks(world_size: int) -> None:
    states = [state for _, state in run_ranks(_trained, 2, INT4, 3)]
    others = reshard_states(states, world_size)
    assert len(others) == world_size

    def left(of: list[dict[str, Any]]) -> dict[str, Tensor]:
        """What they have yet to send, as the mean over the ranks."""
        total: dict[str, Tensor] = {}
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
        ([{}], 2**70, ValueError, "world_size must be from 1 to"),
        ([{}], 2.0, TypeError, "world_size must be an int, got float"),
        ([{}], True, TypeError, "world_size must be an int, got bool"),
        (
            [{"rank0": 3, "world_size": 1, "steps": 1}],
            2,
            ValueError,
            "must be tensors by kind and parameter",
        ),
        ([{"rank0": {"error": 3}, "world_size": 1, "steps": 1}], 2, ValueError, "by kind"),
    ],
)
def test_states_that_cannot_be_of_other_ranks(
    states: Any, world_size: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"reshard_states: .*{message}"):
        reshard_states(states, world_size)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_a_state_with_an_unknown_key_is_refused() -> None:
    model, handle = attached(net(), INT4, False)
    train(model, 0, range(1))
    state = handle.state_dict()
    for key in ("errors", 3, "rank1", "local_steps"):
        with pytest.raises(ValueError, match=r"load_state_dict: it has .*, which no state of the"):
            handle.load_state_dict({**state, key: {}})
    handle.load_state_dict(state)
    handle.remove()


@on_ranks(2)
def test_states_that_do_not_fit(rank: int) -> None:
    model, handle = attached(net(), INT4, False)
    train(model, rank, range(1))
    state = handle.state_dict()
    before = state[f"rank{rank}"]["error"]["0.weight"].clone()
    name = "0.weight"

    def own(kind: str, value: Tensor) -> dict[str, Any]:
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
        ({"world_size": torch.ones(2)}, "must be of 2 ranks"),
        ({"buckets": [["gone"]]}, "buckets must be lists of the model's parameters"),
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


@on_ranks(2)
def test_ranks_that_disagree_change_nothing(rank: int) -> None:
    model, handle = attached(net(), "error_feedback(blockwise())", False)
    train(model, rank, range(1))
    state = handle.state_dict()
    other = parse_hook("blockwise()") if rank else 3
    for attempt, of_first, of_second in (
        (
            lambda: handle.load_state_dict({**state, "steps": 1 + rank}),
            "RuntimeError: HookHandle.load_state_dict: the state's steps must be the same on all "
            "ranks: rank 0 has 1, rank 1 has 2",
            "RuntimeError: HookHandle.load_state_dict: the state's steps must be the same",
        ),
        (
            lambda: handle.load_state_dict({**state, "version": 1 + rank}),
            "RuntimeError: HookHandle.load_state_dict: it failed on rank 1: ",
            "ValueError: load_state_dict: the state must come from",
        ),
        (
            lambda: handle.replace(parse_hook(f"blockwise(bits={4 + 4 * rank})")),
            "RuntimeError: HookHandle.replace: the hook must be the same",
            "RuntimeError: HookHandle.replace: the hook must be the same",
        ),
        (
            lambda: handle.replace(other),
            "TypeError",
            "RuntimeError: HookHandle.replace: it failed on rank 0: TypeError",
        ),
    ):
        with pytest.raises(Exception) as raised:
            attempt()
        said = f"{type(raised.value).__name__}: {raised.value}"
        assert said.startswith(of_second if rank else of_first)
    assert repr(handle.hook) == "error_feedback(blockwise())"
    train(model, rank, range(1, 2))
    handle.remove()


@on_ranks(2)
def test_the_state_of_another_hook(rank: int) -> None:
    _, error = _trained(rank, "error_feedback(topk(0.1))", 2)
    _, first = attached(net(), "local_sgd(2)", False)
    apart = first.state_dict()
    first.remove()
    _, handle = attached(net(), "error_feedback(sign())", False)
    with pytest.raises(ValueError, match="'local_steps', which no state of the attached hook"):
        handle.load_state_dict(apart)
    handle.load_state_dict(error)  # of a hook that remembers as much
    handle.remove()
    assert _trained(rank, "allreduce()", 1)[1] == {}
    _, handle = attached(net(), "allreduce()", False)
    handle.load_state_dict({})
    for nothing in (None, [], 0):
        with pytest.raises(ValueError, match=r"must come from HookHandle\.state_dict"):
            handle.load_state_dict(nothing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'error', which the attached hook"):
        handle.load_state_dict(error)
    handle.remove()


# ---- one state of all ranks ----------------------------------------------------------------------

FEEDBACK = "error_feedback(blockwise(bits=4))"


def begun(
    rank: int, hook: str = FEEDBACK, steps: int = 0, road: str = "module"
) -> tuple[Run, HookHandle]:
    """A model after some steps, and its hook's handle."""
    run = Run(rank, hook, road)
    handle = run.attach()
    run.train(steps)
    return run, handle


@pytest.mark.parametrize("hook", remembering_hooks.HOOKS)
@pytest.mark.parametrize("use_ddp", [False, True])
@on_processes
def test_each_rank_goes_on_from_one_file(
    rank: int, tmp_path: Path, hook: str, use_ddp: bool
) -> None:
    road = "ddp-unused" if use_ddp else "module"  # such a DDP keeps its first buckets
    path = tmp_path / "state.pt"
    first, handle = begun(rank, hook, 3, road)
    state = {"model": first.model.state_dict(), "hook": handle.state_dict(gather=True)}
    if rank == 0:
        torch.save(state, path)
    first.train(3)
    handle.remove()
    dist.barrier()
    read = torch.load(path, weights_only=True)
    second, handle = begun(rank, hook, 0, road)
    second.model.load_state_dict(read["model"])
    handle.load_state_dict(read["hook"])
    second.number = 3
    second.train(3)
    handle.remove()
    check_same([second.parameters], [first.parameters])
    remembers = any(key.startswith("rank") for key in state["hook"])
    assert remembers == (hook not in ("allreduce()", "cast()"))


@on_ranks(2)
def test_what_one_state_has(rank: int) -> None:
    run, handle = begun(rank, steps=2)
    own, gathered = handle.state_dict(), handle.state_dict(gather=True)
    before = copy.deepcopy(gathered)
    run.train(1)
    assert different_paths(gathered, before) == []  # in memory of its own
    handle.remove()
    every = of_all_ranks(gathered)
    for others in every:
        assert different_paths(gathered, others) == []
        assert list(gathered) == list(others)
    states = of_all_ranks(own)
    for number, state in enumerate(states):
        assert different_paths(gathered[f"rank{number}"], state[f"rank{number}"]) == []
    rest, own_rest = (
        {key: value for key, value in state.items() if not key.startswith("rank")}
        for state in (gathered, own)
    )
    assert different_paths(rest, own_rest) == []
    expected = reshard_states(states, 3)
    for given in (gathered, every):
        assert different_paths(reshard_states(given, 3), expected) == []


@on_ranks(2)
def test_a_state_that_cannot_be_gathered(rank: int) -> None:
    _run, handle = begun(rank, steps=1)
    memory = handle._attached.memory
    state_dict = memory.state_dict
    if rank == 1:
        memory.state_dict = lambda: 1 / 0
    message = "HookHandle.state_dict: it failed on rank 1: ZeroDivisionError: division by zero"
    error, message = (ZeroDivisionError, "division by zero") if rank else (RuntimeError, message)
    with pytest.raises(error, match=f"^{message}$") as raised:
        handle.state_dict(gather=True)
    assert raised.type is error
    memory.state_dict = state_dict
    memory._seen_steps += rank
    message = "the ranks' 'steps' must be the same for one state of all ranks, got 1 and"
    with pytest.raises(Exception, match=message):
        handle.state_dict(gather=True)
    handle.remove()


@on_ranks(2)
def test_a_group_that_nobody_knows(rank: int) -> None:
    group = RecordingProcessGroup(dist.group.WORLD)  # which is not registered
    handle = attach(model_of(), hook_of(FEEDBACK), process_group=group)
    with pytest.raises(RuntimeError, match=r"needs a process group that torch\.distributed knows"):
        handle.state_dict(gather=True)
    handle.remove()


@on_processes
def test_a_handle_in_a_distributed_checkpoint(rank: int, tmp_path: Path) -> None:
    _run, handle = begun(rank, steps=2)
    assert isinstance(handle, Stateful)
    before = copy.deepcopy(handle.state_dict())
    checkpoint.save({"hook": handle}, checkpoint_id=tmp_path)
    handle.remove()
    _other, loaded = begun(rank)
    checkpoint.load({"hook": loaded}, checkpoint_id=tmp_path)
    assert different_paths(loaded.state_dict(), before) == []
    loaded.remove()
    assert before["steps"] == 2


# ---- in torch.distributed.checkpoint -------------------------------------------------------------

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


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", KINDS)
@on_ranks(2)
def test_a_state_always_has_the_same(rank: int, hook: str, on_ddp: bool) -> None:
    """Before the first step, and whatever the buckets: ``torch.distributed.checkpoint`` asks."""
    model, handle = attached(net(), hook, on_ddp)
    before = _keys(handle.state_dict(), rank)
    for step in range(3):
        train(model, rank, range(step, step + 1))
        assert _keys(handle.state_dict(), rank) == before
    # A state that was loaded is there at once.
    state = handle.state_dict()
    other_model, other = attached(net(), hook, on_ddp)
    other.load_state_dict(state)
    again = other.state_dict()
    assert _keys(again, rank) == before
    assert different_paths(again[f"rank{rank}"], state[f"rank{rank}"]) == []
    for one in (handle, other):
        one.synchronize()
        one.remove()
    del other_model


@pytest.mark.parametrize("on_ddp", [False, True])
@pytest.mark.parametrize("hook", [KINDS[0], "local_sgd(3)", KINDS[-1]])
@on_processes
def test_a_checkpoint_into_a_fresh_template(
    rank: int, tmp_path: Path, hook: str, on_ddp: bool
) -> None:
    model, handle = attached(net(), hook, on_ddp)
    train(model, rank, range(4))
    state = handle.state_dict()
    checkpoint.save({"hook": state}, checkpoint_id=tmp_path)
    dist.barrier()
    _, other = attached(net(), hook, on_ddp)
    template = {"hook": other.state_dict()}
    checkpoint.load(template, checkpoint_id=tmp_path)
    other.load_state_dict(template["hook"])
    again = other.state_dict()
    for one in (handle, other):
        one.synchronize()
        one.remove()
    for key in ("steps", "shared", f"rank{rank}"):
        assert different_paths(again[key], state[key]) == []
