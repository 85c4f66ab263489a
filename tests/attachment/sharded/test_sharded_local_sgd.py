"""``local_sgd`` across replicas of sharded models: its steps, its traffic, and its failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mode_cases import OwnError
from rank_pool import RankPool
from sharded_failures import Failing, trap_of, with_traps
from sharded_local import (
    MEAN,
    PLACES,
    Reference,
    adamw,
    farthest,
    one_step,
    same,
    sgd,
    sharded,
    shards_of,
    values,
    whole_values,
)
from sharded_models import Mesh, at_once, batch, by_layer, layers, local, loss_of, take_steps
from sharded_models import reshard as reshard_model
from sharded_scenarios import PLACES as SCENARIO_PLACES
from sharded_scenarios import SCENARIOS
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_commhook import PeerError, attach, codecs, hooks
from torch_commhook.collectives.futures import driven
from torch_commhook.hooks import local_sgd, outer_sgd
from torch_commhook.process_group.recording import RecordingProcessGroup
from torch_commhook.step.step_group import StepGroup

INT4 = partial(hooks.blockwise, bits=4, block_size=32)


def _between_replicas(mine: list[Tensor], rank: int, place: str) -> bool:
    """Whether the other replica has the same bits as this rank. All ranks must ask."""
    every: list[Any] = [None] * int(place[-1])
    dist.all_gather_object(every, mine)
    return same(mine, every[(rank + shards_of(place)) % len(every)])


# ---- steps ---------------------------------------------------------------------------------------


def _is_diloco(
    rank: int, place: str, make_optimizer: Any, outer: outer_sgd, **settings: Any
) -> list[str]:
    expected = Reference(place, make_optimizer, 3, outer)
    model = sharded(place)
    handle = attach(model, local_sgd(3, outer=outer), **settings)
    optimizer = make_optimizer(model.parameters())
    found = []
    for number in range(8):
        one_step(model, optimizer, rank, number)
        expected.step()
        got = whole_values(model)
        if not (distance := farthest(got, expected.values(rank))) < 3e-5:
            found.append(f"step {number}: {distance} from the reference")
        together = _between_replicas(values(model), rank, place)
        if together != (number % 3 == 2):
            found.append(f"step {number}: {'together' if together else 'apart'}")
    handle.synchronize()
    expected.exchange()
    if not (distance := farthest(whole_values(model), expected.values(rank))) < 3e-5:
        found.append(f"in the end: {distance} from the reference")
    if not _between_replicas(values(model), rank, place):
        found.append("in the end apart")
    before = values(model)
    handle.synchronize()
    if not same(before, values(model)):
        found.append("synchronize() moves what is together")
    if handle.stats().steps != 3:
        found.append(f"{handle.stats().steps} exchanges")
    handle.remove()
    return found


@pytest.mark.parametrize("outer", [outer_sgd(), MEAN, outer_sgd(0.5, 0.5, nesterov=False)])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("place", PLACES)
def test_it_is_diloco_on_replicas(
    ranks: RankPool, place: str, make_optimizer: Any, outer: outer_sgd
) -> None:
    assert ranks.run(_is_diloco, place, make_optimizer, outer) == [[]] * ranks.world_size


def _with_all_settings(rank: int) -> list[str]:
    return _is_diloco(rank, "hsdp-4", sgd, MEAN, shard_hook=hooks.allreduce())


@pytest.mark.parametrize("place", ["hsdp-4"])
def test_with_a_shard_hook(ranks: RankPool, place: str) -> None:
    assert ranks.run(_with_all_settings) == [[]] * 4


def _h_is_one(rank: int, name: str, place: str) -> list[str]:
    """A round of one step of SGD, and the mean of what comes of it: the mean of the gradients."""
    scenario, mesh = SCENARIOS[name], Mesh.of(place)
    expected = take_steps(scenario, mesh, rank, hooks.allreduce())
    got = take_steps(scenario, mesh, rank, local_sgd(1, outer=MEAN))
    start = take_steps(scenario, mesh, rank, hooks.allreduce(), count=0).parameters
    moved = farthest(expected.parameters, start)
    found = [] if moved > 1e-3 else ["no parameter moves"]
    # A parameter of 16 bits is rounded in each step.
    ulp = max(torch.finfo(each.dtype).eps for each in start)
    bound = 3 * scenario.rounding * moved + 4 * ulp
    if not (distance := farthest(got.parameters, expected.parameters)) <= bound:
        found.append(f"{distance} is more than {bound}")
    if got.stats.steps != 3:
        found.append(f"{got.stats.steps} exchanges in 3 steps")
    return found


#: Where gradients, steps or memory are of other forms than in most.
_OF_OTHER_FORM = (
    "layers",
    "one group",
    "f32, reduced in f16",
    "a model in bf16",
    "gradients add up",
    "gradients add up in no_sync",
    "gradients add up in shards",
    "two backwards",
    "parameters stay after backward",
    "whole after forward",
    "offloaded",
    "divided by 3",
    "sums divided by 3",
    "columns",
    "tied",
    "frozen",
    "unused by turns",
    "unused on some ranks",
    "from the meta device",
    "compiled blocks",
)

_NEAR = [
    pytest.param(
        name,
        place,
        marks=[] if place == "hsdp-4" and name in _OF_OTHER_FORM else pytest.mark.long,
    )
    for name, place in SCENARIO_PLACES
    if place in PLACES and SCENARIOS[name].averages
]


@pytest.mark.parametrize(("name", "place"), _NEAR)
def test_with_h_1_it_is_sgd_on_all_batches(ranks: RankPool, name: str, place: str) -> None:
    assert ranks.run(_h_is_one, name, place) == [[]] * ranks.world_size


def _gradients_of_a_replica(
    rank: int, place: str, policy: dict[str, Any], factor: float | None, only_sums: bool
) -> list[str]:
    """In between they are what a model of this replica's ranks alone has."""
    which = rank // shards_of(place)
    model = sharded(place, mp_policy=MixedPrecisionPolicy(**policy))
    for module in model.modules():
        if factor is not None and hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
        if only_sums and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    handle = attach(model, local_sgd(8))
    loss_of(model(batch(rank, 0))).backward()
    reshard_model(model)
    got = [p.grad.full_tensor() for p in model.parameters()]  # of this replica alone
    handle.remove()
    alone = layers().double()
    shards = shards_of(place)
    for shard in range(shards):
        loss_of(alone(batch(which * shards + shard, 0).double())).backward()
    # As many times as there are replicas: each stands for the gradient of all.
    scale = 1 / shards if factor is None else 2 / factor
    expected = [scale * p.grad for p in alone.parameters()]
    largest = max(float(each.abs().max()) for each in expected)
    bound = (0.03 if policy else 1e-5) * largest
    distance = farthest(got, expected)
    return [] if distance <= bound else [f"{distance} is more than {bound}"]


@pytest.mark.parametrize(
    ("policy", "factor", "only_sums"),
    [
        ({}, None, False),
        ({}, None, True),
        ({}, 3.0, False),
        ({"reduce_dtype": torch.bfloat16}, None, False),
        ({"reduce_dtype": torch.float16}, None, False),
        ({"reduce_dtype": torch.float16}, 8.0, False),
    ],
)
@pytest.mark.parametrize("place", ["hsdp-4"])
def test_gradients_are_the_replicas_own(
    ranks: RankPool, place: str, policy: Any, factor: float | None, only_sums: bool
) -> None:
    assert ranks.run(_gradients_of_a_replica, place, policy, factor, only_sums) == [[]] * 4


_COMPRESSED: dict[str, Callable[[], Any]] = {
    "blockwise": hooks.blockwise,
    "int4 with feedback": lambda: hooks.error_feedback(INT4()),
    "topk with feedback": lambda: hooks.error_feedback(hooks.topk(0.25)),
    "powersgd with feedback": lambda: hooks.error_feedback(hooks.powersgd(rank=2)),
    "sign with feedback": lambda: hooks.error_feedback(hooks.sign(32)),
}


def _compressed(rank: int, place: str, name: str, error_reset: bool) -> list[str]:
    """Near the uncompressed rounds, and the same bits in all replicas."""
    expected = Reference(place, sgd, 2, MEAN)
    model = sharded(place)
    hook = local_sgd(2, outer=MEAN, hook=_COMPRESSED[name](), error_reset=error_reset)
    handle = attach(model, hook)
    optimizer = sgd(model.parameters())
    found = []
    start = whole_values(model)
    for number in range(16):
        one_step(model, optimizer, rank, number)
        expected.step()
    if error_reset == _between_replicas(values(model), rank, place):
        found.append("apart" if not error_reset else "together")
    handle.synchronize()
    if not _between_replicas(values(model), rank, place):
        found.append("apart in the end")
    got = whole_values(model)
    moved = farthest(start, expected.values(rank))
    if not (distance := farthest(got, expected.values(rank))) < 0.35 * moved:
        found.append(f"{distance} from the reference, which has moved by {moved}")
    if any(bool(each.isnan().any()) for each in got):
        found.append("NaN")
    handle.remove()
    return found


@pytest.mark.parametrize(
    ("name", "error_reset"),
    [(name, False) for name in _COMPRESSED] + [("int4 with feedback", True)],
)
@pytest.mark.parametrize("place", PLACES)
def test_distances_are_compressed(
    ranks: RankPool, place: str, name: str, error_reset: bool
) -> None:
    assert ranks.run(_compressed, place, name, error_reset) == [[]] * ranks.world_size


# ---- traffic -------------------------------------------------------------------------------------


def _replicas_go_alone(rank: int, place: str) -> list[str]:
    """A replica takes its steps while the other one does nothing at all."""
    world = dist.group.WORLD
    assert world is not None
    store, key = dist.distributed_c10d._get_default_store(), f"replica 0 is done {_turn()}"
    model = sharded(place)
    handle = attach(model, local_sgd(4), **_weights(place))
    optimizer = sgd(model.parameters())
    is_first = rank < shards_of(place)
    if not is_first:
        store.wait([f"{key}, {other}" for other in range(shards_of(place))])
    for number in range(3):
        one_step(model, optimizer, rank, number)
    if is_first:
        store.set(f"{key}, {rank}", "yes")
    one_step(model, optimizer, rank, 3)
    found = [] if _between_replicas(values(model), rank, place) else ["apart"]
    handle.remove()
    return found


_turns = 0


def _turn() -> int:
    global _turns
    _turns += 1
    return _turns


def _weights(place: str) -> dict[str, Any]:
    return {} if place.startswith("replicate") else {"weights": codecs.blockwise()}


@pytest.mark.parametrize("place", PLACES)
def test_replicas_do_not_wait_for_one_another(ranks: RankPool, place: str) -> None:
    assert ranks.run(_replicas_go_alone, place) == [[]] * ranks.world_size


def _sent(rank: int, place: str, name: str) -> list[Any]:
    """What is sent across replicas in each step, as the group counts it, and the statistics."""
    recorded: dict[Any, RecordingProcessGroup] = {}
    inner = StepGroup.group_for

    def group_for(step_group: StepGroup, device: torch.device) -> dist.ProcessGroup:
        group = inner(step_group, device)
        ranks_of = set(dist.get_process_group_ranks(step_group.parent))
        if not {rank, (rank + shards_of(place)) % int(place[-1])} <= ranks_of:
            return group
        if group not in recorded:
            recorded[group] = RecordingProcessGroup(group)
        return recorded[group]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(StepGroup, "group_for", group_for)
        model = sharded(place)
        handle = attach(model, local_sgd(4, hook=_COMPRESSED[name]()))
        optimizer = sgd(model.parameters())
        found: list[Any] = []
        for number in range(8):
            before = sum(group.total.bytes_sent for group in recorded.values())
            one_step(model, optimizer, rank, number)
            after = sum(group.total.bytes_sent for group in recorded.values())
            found.append(after - before)
        stats = handle.stats()
        handle.remove()
    return [found, stats.steps, stats.bytes_sent, stats.bytes_scattered > 0]


@pytest.mark.parametrize("name", ["blockwise", "int4 with feedback"])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_crosses_between_exchanges(ranks: RankPool, place: str, name: str) -> None:
    for sent, steps, counted, scattered in ranks.run(_sent, place, name):
        assert sent[:3] == sent[4:7] == [0, 0, 0]
        assert sent[3] == sent[7] > 0
        assert (steps, counted) == (2, sent[3] + sent[7])
        assert scattered == place.startswith("hsdp")


def _bytes_of_float32(rank: int, place: str) -> tuple[int, int]:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    by_layer(model, Mesh.of(place))
    handle = attach(model, local_sgd(2))
    optimizer = sgd(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    stats = handle.stats()
    handle.remove()
    return stats.bytes_sent, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("place", PLACES)
def test_bytes_are_those_of_the_formula(ranks: RankPool, place: str) -> None:
    """``2 (R - 1) / (R W H)`` values of each parameter's element in a step, here of even shards."""
    for sent, numel in ranks.run(_bytes_of_float32, place):
        steps, replicas, every = 4, 2, 2
        values_sent = 2 * (replicas - 1) / (replicas * shards_of(place) * every) * numel * steps
        assert sent == 4 * values_sent


# ---- what a step is ------------------------------------------------------------------------------


class _One(nn.Module):
    """Its parameters have one row: of two shards one has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def _empty_shards(rank: int, place: str) -> list[str]:
    torch.manual_seed(0)
    model = _One()
    by_layer(model, Mesh.of(place))
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    exchanges = []
    for number in range(4):
        optimizer.zero_grad(set_to_none=False)
        for part in range(3):  # gradients that add up are no steps
            loss_of(model(batch(rank, 3 * number + part))).backward()
        optimizer.step()
        exchanges.append(handle.stats().steps)
    found = [] if exchanges == [0, 1, 1, 2] else [f"exchanges after {exchanges}"]
    if not _between_replicas(values(model), rank, place):
        found.append("apart")
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_shards_that_are_empty(ranks: RankPool, place: str) -> None:
    assert ranks.run(_empty_shards, place) == [[]] * ranks.world_size


def _skipped(rank: int, place: str) -> list[int]:
    """Steps that no optimizer takes, as where ``GradScaler`` skips them."""
    model = sharded(place)
    handle = attach(model, local_sgd(2))
    optimizer = sgd(model.parameters())
    exchanges = []
    for number in range(5):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss_of(model(batch(rank, number))).backward()
        if number % 2:
            optimizer.step()
        exchanges.append(handle.stats().steps)
    handle.remove()
    return exchanges


@pytest.mark.parametrize("place", PLACES)
def test_steps_that_are_skipped(ranks: RankPool, place: str) -> None:
    # The first is noticed when the second one's forward begins, which its own step makes a round.
    assert ranks.run(_skipped, place) == [[0, 1, 1, 2, 2]] * ranks.world_size


def _by_hand(rank: int, place: str) -> list[str]:
    model, other = sharded(place), sharded(place)
    handles = [attach(each, local_sgd(2, outer=MEAN)) for each in (model, other)]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.02)
    for number in range(3):
        loss_of(model(batch(rank, number))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.02 * parameter.grad)
                parameter.grad = None
        one_step(other, optimizer, rank, number)
    for handle in handles:
        handle.synchronize()
    found = [] if farthest(values(model), values(other)) < 1e-6 else ["other parameters"]
    if not _between_replicas(values(model), rank, place):
        found.append("apart")
    found += [f"{h.stats().steps} exchanges" for h in handles if h.stats().steps != 2]
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_updates_by_hand(ranks: RankPool, place: str) -> None:
    assert ranks.run(_by_hand, place) == [[]] * ranks.world_size


def _evaluated(rank: int, place: str) -> list[str]:
    """What an evaluation has gathered is not what the next forward computes with."""
    model = layers()
    at_once(model, Mesh.of(place))
    handle = attach(model, local_sgd(8, outer=MEAN))
    optimizer = sgd(model.parameters())
    for number in range(2):
        one_step(model, optimizer, rank, number)
    inputs = batch(9, 9)
    with torch.no_grad():
        before = model(inputs).clone()  # leaves the root's parameters gathered
        handle.synchronize()
        after = model(inputs).clone()
    plain = layers()
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), whole_values(model), strict=True):
            parameter.copy_(value)
        expected = plain(inputs)
    handle.remove()
    found = [] if torch.allclose(after, expected, atol=1e-6) else ["computed with what was"]
    return found if not torch.allclose(before, after, atol=1e-6) else [*found, "nothing has moved"]


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_after_an_exchange(ranks: RankPool, place: str) -> None:
    assert ranks.run(_evaluated, place) == [[]] * ranks.world_size


def _stages(rank: int, place: str) -> list[str]:
    """Hooks around the hook see the gradients of each backward."""
    model, plain = sharded(place), sharded(place)
    handles = [attach(each, local_sgd(8)) for each in (model, plain)]
    handles[0].register_prehook(lambda gradients: tuple(2 * each for each in gradients))
    found = []
    for number in range(2):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each(batch(rank, number))).backward()
            reshard_model(each)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        if not all(torch.equal(local(a.grad), 2 * local(b.grad)) for a, b in pairs):
            found.append(f"step {number}")
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_hooks_around_the_hook(ranks: RankPool, place: str) -> None:
    assert ranks.run(_stages, place) == [[]] * ranks.world_size


# ---- failures ------------------------------------------------------------------------------------


class _FailsAfter(hooks.error_feedback):
    """Has sent, and remembers what that has lost, when it fails."""

    def __init__(self) -> None:
        super().__init__(INT4())
        self.is_failing = False

    def average(self, bucket: Any) -> Any:
        result = super().average(bucket)
        if self.is_failing and bucket.index() == bucket.bucket_count() - 1:
            driven(result).wait()  # nothing goes on that writes to what it remembers
            raise OwnError("boo")
        return result


class _FailsBefore(Failing):
    """Fails before anything is sent."""

    @property
    def is_failing(self) -> bool:
        return self.fails_in is not None

    @is_failing.setter
    def is_failing(self, value: bool) -> None:
        self.fails_in = 0 if value else None


def _tensors(state: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(state, Tensor):
        return {path: state}
    items = state.items() if isinstance(state, dict) else ()
    return {k: v for key, value in items for k, v in _tensors(value, f"{path}/{key}").items()}


def _raised(action: Callable[[], Any]) -> str:
    try:
        action()
    except (OwnError, PeerError) as error:
        return type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _fail_at_an_exchange(rank: int, place: str, make_hook: Any, at_the_end: bool) -> list[str]:
    """Each rank in turn; beside it a training in which nothing fails."""
    failing, working = make_hook(), make_hook()
    models = [sharded(place), sharded(place)]
    handles = [
        attach(model, local_sgd(2, hook=hook))
        for model, hook in zip(models, (failing, working), strict=True)
    ]
    optimizers = [sgd(model.parameters()) for model in models]
    found = []
    for fails in range(int(place[-1])):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_step(model, optimizer, rank, 2 * fails)
        failing.is_failing = rank == fails
        if not at_the_end:
            said = _raised(partial(one_step, models[0], optimizers[0], rank, 2 * fails + 1))
        else:
            before, state = values(models[0]), _tensors(handles[0].state_dict())
            said = _raised(handles[0].synchronize)
            if not same(values(models[0]), before):
                found.append(f"rank {fails} has failed: parameters have moved")
            now = _tensors(handles[0].state_dict())
            found += [
                f"rank {fails} has failed: {name} has changed"
                for name, tensor in state.items()
                if not torch.equal(tensor, now[name])
            ]
        if said != ("OwnError" if rank == fails else "PeerError"):
            found.append(f"rank {fails} has failed: {said}")
        failing.is_failing = False
        if not at_the_end:
            one_step(models[1], optimizers[1], rank, 2 * fails + 1)
        for handle in handles:
            handle.synchronize()
        if not same(values(models[0]), values(models[1])):
            found.append(f"rank {fails} has failed: other parameters then")
        if not _between_replicas(values(models[0]), rank, place):
            found.append(f"rank {fails} has failed: apart")
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("make_hook", [_FailsBefore, _FailsAfter])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_at_an_exchange(
    ranks: RankPool, place: str, make_hook: Any, at_the_end: bool
) -> None:
    found = ranks.run(_fail_at_an_exchange, place, make_hook, at_the_end)
    assert found == [[]] * ranks.world_size


def _fail_in_a_backward(rank: int, place: str) -> list[str]:
    """It is a replica's own: the other replica goes on, and the next exchange works."""
    model = with_traps()
    by_layer(model, Mesh.of(place))
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = sgd(model.parameters())
    found = []
    for fails in range(int(place[-1])):
        trap_of(model, "middle").raises_in = "backward" if rank == fails else ""
        said = _raised(lambda: one_step(model, optimizer, rank, 0))
        in_replica = rank // shards_of(place) == fails // shards_of(place)
        expected = "OwnError" if rank == fails else "PeerError" if in_replica else "nothing"
        if said != expected:
            found.append(f"rank {fails} has failed: {said}, not {expected}")
        trap_of(model, "middle").raises_in = ""
        for number in range(2 if in_replica else 1):  # as many steps as the others
            one_step(model, optimizer, rank, number)
        if not _between_replicas(values(model), rank, place):
            found.append(f"rank {fails} has failed: apart")
    if handle.stats().steps != int(place[-1]):
        found.append(f"{handle.stats().steps} exchanges")
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_failure_in_a_backward_is_a_replicas_own(ranks: RankPool, place: str) -> None:
    assert ranks.run(_fail_in_a_backward, place) == [[]] * ranks.world_size


# ---- other hooks in its place --------------------------------------------------------------------


def _replaced(rank: int, place: str) -> list[str]:
    """By a hook that averages gradients, and back."""
    model, plain = sharded(place), sharded(place)
    handle = attach(model, local_sgd(2, outer=MEAN))
    optimizer = sgd(model.parameters())
    found = []
    for number in range(2):
        one_step(model, optimizer, rank, number)
    handle.replace(hooks.allreduce())
    with torch.no_grad():
        for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.copy_(other)
    other = sgd(plain.parameters())
    for number in range(2, 4):
        one_step(model, optimizer, rank, number)
        one_step(plain, other, rank, number)
        if not same(values(model), values(plain)):
            found.append(f"step {number}: other bits than fully_shard")
    handle.replace(local_sgd(2, outer=MEAN))
    for number in range(2):
        one_step(model, optimizer, rank, number)
        if _between_replicas(values(model), rank, place) != (number == 1):
            found.append(f"again, step {number}")
    if handle.stats().steps != 1:
        found.append(f"{handle.stats().steps} exchanges")
    handle.remove()
    return found


@pytest.mark.parametrize("place", PLACES)
def test_replaced_and_back(ranks: RankPool, place: str) -> None:
    assert ranks.run(_replaced, place) == [[]] * ranks.world_size


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _removed(rank: int, place: str, steps: int) -> list[str]:
    """It leaves ``fully_shard`` as it was, and says where replicas are apart."""
    model, plain = sharded(place), sharded(place)
    said = _Said()
    log = logging.getLogger("torch_commhook.attachment.local_steps")
    log.addHandler(said)
    try:
        handle = attach(model, local_sgd(2, outer=MEAN))
        optimizer = sgd(model.parameters())
        for number in range(steps):
            one_step(model, optimizer, rank, number)
        handle.remove()
    finally:
        log.removeHandler(said)
    found = [] if len(said.lines) == steps % 2 else [f"said {said.lines}"]
    with torch.no_grad():
        for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.copy_(other)
    other = sgd(plain.parameters())
    one_step(model, optimizer, rank, 5)
    one_step(plain, other, rank, 5)
    return found if same(values(model), values(plain)) else [*found, "other bits"]


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_removed(ranks: RankPool, place: str, steps: int) -> None:
    assert ranks.run(_removed, place, steps) == [[]] * ranks.world_size


def _refused(rank: int, place: str, name: str) -> str:
    hook = {
        "one dimension": lambda: local_sgd(4),
        "clip": lambda: local_sgd(4, hook=hooks.clip(1.0)),
        "clip inside": lambda: local_sgd(4, hook=hooks.after(3, hooks.clip(1.0))),
    }[name]()
    try:
        attach(sharded(place), hook)
    except TypeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        ("fsdp-2", "one dimension", "shard over a mesh of two dimensions"),
        ("hsdp-4", "clip", "clip_grad_norm_"),
        ("hsdp-4", "clip inside", "clip_grad_norm_"),
    ],
)
def test_refused(ranks: RankPool, place: str, name: str, message: str) -> None:
    for said in ranks.run(_refused, place, name):
        assert message in said
