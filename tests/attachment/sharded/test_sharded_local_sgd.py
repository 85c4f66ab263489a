"""``local_sgd`` across replicas of sharded models: steps, traffic and fragments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_training import StreamingTurns
from rank_pool import RankPool
from sharded_bytes import recorded_groups
from sharded_local import (
    INT4,
    MEAN,
    PLACES,
    Reference,
    adamw,
    between_replicas,
    farthest,
    goes_on,
    one_step,
    sgd,
    shards_of,
    values,
    whole_values,
)
from sharded_models import (
    GLOO,
    Mesh,
    Steps,
    at_once,
    batch,
    by_layer,
    layers,
    local,
    loss_of,
    on_processes,
    on_ranks,
    run_on,
    same_bits,
    sharded,
    take_steps,
)
from sharded_models import reshard as reshard_model
from sharded_scenarios import PLACES as SCENARIO_PLACES
from sharded_scenarios import SCENARIOS
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_commhook import attach, codecs, hooks, reshard_states
from torch_commhook.hooks import local_sgd, outer_sgd

# ---- steps ---------------------------------------------------------------------------------------


def _is_diloco(
    rank: int, place: str, make_optimizer: Any, outer: outer_sgd, **settings: Any
) -> None:
    expected = Reference(place, make_optimizer, 3, outer)
    model = sharded(place)
    handle = attach(model, local_sgd(3, outer=outer), **settings)
    optimizer = make_optimizer(model.parameters())
    for number in range(8):
        one_step(model, optimizer, rank, number)
        expected.step()
        assert farthest(whole_values(model), expected.values(rank)) < 3e-5, number
        assert between_replicas(values(model), rank, place) == (number % 3 == 2), number
    handle.synchronize()
    expected.exchange()
    assert farthest(whole_values(model), expected.values(rank)) < 3e-5
    before = values(model)
    assert between_replicas(before, rank, place)
    handle.synchronize()
    assert same_bits(before, values(model))  # equal replicas stay as they are
    assert handle.stats().steps == 3
    handle.remove()


@pytest.mark.parametrize("outer", [outer_sgd(), MEAN, outer_sgd(0.5, 0.5, nesterov=False)])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@on_ranks(*PLACES)
def test_it_is_diloco_on_replicas(
    rank: int, place: str, make_optimizer: Any, outer: outer_sgd
) -> None:
    _is_diloco(rank, place, make_optimizer, outer)


@on_ranks("hsdp-4")
def test_with_a_shard_hook(rank: int, place: str) -> None:
    _is_diloco(rank, place, sgd, MEAN, shard_hook=hooks.allreduce())


def _h_is_one(rank: int, place: str, name: str) -> None:
    """A round of one step of SGD, and the mean of what comes of it: the mean of the gradients."""
    scenario = SCENARIOS[name]

    def trained(hook: Any, count: int) -> Steps:
        return take_steps(scenario, Mesh.of(place), rank, hook, count=count)

    expected, got = trained(hooks.allreduce(), 3), trained(local_sgd(1, outer=MEAN), 3)
    start = trained(hooks.allreduce(), 0).parameters
    moved = farthest(expected.parameters, start)
    assert moved > 1e-3
    # A parameter of 16 bits is rounded in each step.
    ulp = max(torch.finfo(each.dtype).eps for each in start)
    bound = 3 * scenario.rounding * moved + 4 * ulp
    assert farthest(got.parameters, expected.parameters) <= bound
    assert got.stats.steps == 3


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
        marks=[] if place.endswith("hsdp-4") and name in _OF_OTHER_FORM else pytest.mark.long,
    )
    for name, place in SCENARIO_PLACES
    if place.removeprefix(GLOO) in PLACES and SCENARIOS[name].averages
]


@pytest.mark.parametrize(("name", "place"), _NEAR)
def test_with_h_1_it_is_sgd_on_all_batches(
    request: pytest.FixtureRequest, name: str, place: str
) -> None:
    run_on(request, place, _h_is_one, name)


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
@on_ranks("hsdp-4")
def test_gradients_are_the_replicas_own(
    rank: int, place: str, policy: dict[str, Any], factor: float | None, only_sums: bool
) -> None:
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
    assert farthest(got, expected) <= bound


_COMPRESSED: dict[str, Callable[[], Any]] = {
    "blockwise": hooks.blockwise,
    "int4 with feedback": lambda: hooks.error_feedback(INT4()),
    "topk with feedback": lambda: hooks.error_feedback(hooks.topk(0.25)),
    "powersgd with feedback": lambda: hooks.error_feedback(hooks.powersgd(rank=2)),
    "sign with feedback": lambda: hooks.error_feedback(hooks.sign(32)),
}


@pytest.mark.parametrize(
    ("name", "error_reset"),
    [(name, False) for name in _COMPRESSED] + [("int4 with feedback", True)],
)
@on_ranks(*PLACES)
def test_distances_are_compressed(rank: int, place: str, name: str, error_reset: bool) -> None:
    """Near the uncompressed rounds, and the same bits in all replicas."""
    expected = Reference(place, sgd, 2, MEAN)
    model = sharded(place)
    hook = local_sgd(2, outer=MEAN, hook=_COMPRESSED[name](), error_reset=error_reset)
    handle = attach(model, hook)
    optimizer = sgd(model.parameters())
    start = whole_values(model)
    for number in range(16):
        one_step(model, optimizer, rank, number)
        expected.step()
    assert between_replicas(values(model), rank, place) != error_reset
    handle.synchronize()
    assert between_replicas(values(model), rank, place)
    got = whole_values(model)
    moved = farthest(start, expected.values(rank))
    assert farthest(got, expected.values(rank)) < 0.35 * moved
    assert not any(bool(each.isnan().any()) for each in got)
    handle.remove()


# ---- traffic -------------------------------------------------------------------------------------


@on_processes("hsdp-4", "replicate-2")
def test_replicas_do_not_wait_for_one_another(rank: int, place: str) -> None:
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
    assert between_replicas(values(model), rank, place)
    handle.remove()


_turns = 0


def _turn() -> int:
    global _turns
    _turns += 1
    return _turns


def _weights(place: str) -> dict[str, Any]:
    return {} if place.startswith("replicate") else {"weights": codecs.blockwise()}


@pytest.mark.parametrize("name", ["blockwise", "int4 with feedback"])
@on_processes(*PLACES)
def test_nothing_crosses_between_exchanges(rank: int, place: str, name: str) -> None:
    """Between replicas, as the group counts it and as the statistics say."""
    replicas = {rank, (rank + shards_of(place)) % int(place[-1])}

    def is_across(parent: dist.ProcessGroup) -> bool:
        return replicas <= set(dist.get_process_group_ranks(parent))

    with recorded_groups(is_across) as recorded:
        model = sharded(place)
        handle = attach(model, local_sgd(4, hook=_COMPRESSED[name]()))
        optimizer = sgd(model.parameters())
        sent = []
        for number in range(8):
            before = sum(group.total.bytes_sent for group in recorded.values())
            one_step(model, optimizer, rank, number)
            sent.append(sum(group.total.bytes_sent for group in recorded.values()) - before)
        stats = handle.stats()
        handle.remove()
    assert sent[:3] == sent[4:7] == [0, 0, 0]
    assert sent[3] == sent[7] > 0
    flags = 2 * torch.float32.itemsize  # whether a user has written parameters
    assert (stats.steps, stats.bytes_sent) == (2, sent[3] + sent[7] - flags)
    assert (stats.bytes_scattered > 0) == place.startswith("hsdp")


@on_ranks(*PLACES)
def test_bytes_are_those_of_the_formula(rank: int, place: str) -> None:
    """``2 (R - 1) / (R W H)`` values of each parameter's element in a step, here of even shards."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    by_layer(model, Mesh.of(place))
    handle = attach(model, local_sgd(2))
    optimizer = sgd(model.parameters())
    steps, replicas, every = 4, 2, 2
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    numel = sum(p.numel() for p in model.parameters())
    values_sent = 2 * (replicas - 1) / (replicas * shards_of(place) * every) * numel * steps
    assert handle.stats().bytes_sent == 4 * values_sent
    handle.remove()


# ---- what a step is ------------------------------------------------------------------------------


class _One(nn.Module):
    """Its parameters have one row: of two shards one has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


@on_ranks(*PLACES)
def test_shards_that_are_empty(rank: int, place: str) -> None:
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
    assert exchanges == [0, 1, 1, 2]
    assert between_replicas(values(model), rank, place)
    handle.remove()


@on_ranks(*PLACES)
def test_steps_that_are_skipped(rank: int, place: str) -> None:
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
    # The first is noticed when the second one's forward begins, which its own step makes a round.
    assert exchanges == [0, 1, 1, 2, 2]


@on_ranks(*PLACES)
def test_updates_by_hand(rank: int, place: str) -> None:
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
    assert farthest(values(model), values(other)) < 1e-6
    assert between_replicas(values(model), rank, place)
    assert [handle.stats().steps for handle in handles] == [2, 2]
    for handle in handles:
        handle.remove()


@on_ranks(*PLACES)
def test_a_forward_after_an_exchange(rank: int, place: str) -> None:
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
    assert torch.allclose(after, expected, atol=1e-6)
    assert not torch.allclose(before, after, atol=1e-6)


@on_ranks(*PLACES)
def test_hooks_around_the_hook(rank: int, place: str) -> None:
    """Hooks around the hook see the gradients of each backward."""
    model, plain = sharded(place), sharded(place)
    handles = [attach(each, local_sgd(8)) for each in (model, plain)]
    handles[0].register_prehook(lambda gradients: tuple(2 * each for each in gradients))
    for number in range(2):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each(batch(rank, number))).backward()
            reshard_model(each)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(local(a.grad), 2 * local(b.grad)) for a, b in pairs)
    for handle in handles:
        handle.remove()


# ---- fragments in the background -----------------------------------------------------------------

_OUTER = outer_sgd(0.7, 0.5)


class _Streaming(StreamingTurns, Reference):
    """Fragments of layers in turn, of the usual model's three."""

    def __init__(self, place: str, H: int, fragments: int, delay: int, mix: float) -> None:  # noqa: N803
        Reference.__init__(self, place, sgd, 1 << 30, _OUTER)
        self.settings = H, fragments, delay, mix
        layers = [number // 2 for number in range(len(self.anchor))]  # of weight and bias each
        self.fragment_of = [layer % fragments for layer in layers]
        self.outers = [
            torch.optim.SGD(
                [a for a, of in zip(self.anchor, self.fragment_of, strict=True) if of == number],
                lr=_OUTER.lr,
                momentum=_OUTER.momentum,
                nesterov=_OUTER.nesterov,
            )
            for number in range(fragments)
        ]

    def train(self) -> None:
        Reference.step(self)

    def take_means(self, fragment: int) -> None:
        own = [list(model.parameters()) for model in self.replicas]
        for number, anchor in enumerate(self.anchor):
            if self.fragment_of[number] == fragment:
                anchor.grad = torch.stack([anchor - each[number] for each in own]).mean(0)

    def move(self, fragment: int) -> None:
        mix = self.settings[3]
        self.outers[fragment].step()
        for model in self.replicas:
            for number, parameter in enumerate(model.parameters()):
                if self.fragment_of[number] == fragment:
                    parameter.copy_(mix * parameter + (1 - mix) * self.anchor[number])


@pytest.mark.parametrize(
    ("fragments", "delay", "mix"), [(2, 0, 0.0), (2, 2, 0.5), (3, 1, 0.5), (1, 3, 0.0)]
)
@on_processes(*PLACES)
def test_it_moves_as_plain_pytorch_does(
    rank: int, place: str, fragments: int, delay: int, mix: float
) -> None:
    expected = _Streaming(place, 6, fragments, delay, mix)
    model = sharded(place)
    start = whole_values(model)
    handle = attach(model, local_sgd(6, outer=_OUTER, fragments=fragments, delay=delay, mix=mix))
    optimizer = sgd(model.parameters())
    for number in range(15):
        one_step(model, optimizer, rank, number)
        expected.step()
    wanted = expected.values(rank)
    assert farthest(whole_values(model), wanted) <= 1e-4 * farthest(start, wanted)
    handle.synchronize()
    assert between_replicas(values(model), rank, place)
    handle.remove()


# ---- states --------------------------------------------------------------------------------------


def _hook() -> Any:
    return local_sgd(6, hook=hooks.error_feedback(INT4()), fragments=2, delay=2, mix=0.5)


@pytest.mark.parametrize("steps", [4, 5, 6])
@on_ranks(*PLACES)
def test_training_goes_on(rank: int, place: str, steps: int) -> None:
    goes_on(rank, place, _hook, steps, 5)


@on_processes(*PLACES)
def test_a_distributed_checkpoint(rank: int, place: str, tmp_path: Path) -> None:
    goes_on(rank, place, _hook, 4, 5, tmp_path)


def _under_way(rank: int, place: str, folder: str, goes_on: bool) -> list[Tensor]:
    model = sharded(place)
    handle = attach(model, local_sgd(4, outer=_OUTER, fragments=2, delay=1, mix=0.5))
    if goes_on:
        handle.load_state_dict(torch.load(f"{folder}/then{rank}", weights_only=True))
        assert handle.state_dict()["local_steps"]["steps_in_flight"] == 0
    else:
        optimizer = sgd(model.parameters())
        for number in range(6):
            one_step(model, optimizer, rank, number)
        torch.save(handle.state_dict(), f"{folder}/{rank}")
    handle.synchronize()
    handle.remove()
    return whole_values(model)


def test_other_shards_come_to_the_same(
    four_ranks: RankPool, two_ranks: RankPool, tmp_path: Path
) -> None:
    """What has come of an exchange is cut as the parameters are."""
    before = four_ranks.run(_under_way, "hsdp-4", str(tmp_path), False)
    states = [torch.load(tmp_path / str(rank), weights_only=True) for rank in range(4)]
    for rank, state in enumerate(reshard_states(states, 2, shards=1)):
        torch.save(state, tmp_path / f"then{rank}")
    after = two_ranks.run(_under_way, "replicate-2", str(tmp_path), True)
    assert farthest(before[0], after[0]) < 1e-6
