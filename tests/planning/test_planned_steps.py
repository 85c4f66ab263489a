"""What ``commhook plan`` says of a step over a link, and of many ranks on nodes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import nn

from torch_commhook import GradBucket, attach, codecs, hooks, run_hook
from torch_commhook.collectives import wire
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.planning import Measured, Model, measure, plan
from torch_commhook.planning.formulas import (
    Work,
    bytes_out_of_node,
    count_connections,
    count_messages,
    formula_of,
)
from torch_commhook.planning.model import random_gradients, square_shapes
from torch_commhook.planning.wire import agreement_of
from torch_commhook.process_group.operations import Traffic
from torch_commhook.process_group.simulated.link import Issued
from torch_commhook.testing import run_ranks, simulate

PAYLOAD = 1448 / 1514


def sending(seconds: float, compute_seconds: float = 0.0, **more: Any) -> Measured:
    """A hook of two ranks, whose only message takes so many seconds at 8 Mbit/s."""
    carried = 1e6 * seconds * PAYLOAD
    issued = (Issued("", Traffic("all_to_all_single", 2, 2 * carried, carried)),)
    return Measured("a", carried, compute_seconds, chains=(tuple(issued),), **more)


def test_what_follows_the_optimizer_is_hidden_by_nothing() -> None:
    hooks = [sending(1.0, 0.5, overlaps=overlaps) for overlaps in (True, False)]
    hidden, open_ = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[1] * 100)
    assert hidden.step_seconds == pytest.approx(3.51, rel=0.01)
    assert open_.step_seconds == pytest.approx(4.5)


def test_chains_also_have_their_old_names() -> None:
    chains = (Issued("all", Traffic("allreduce", 2, 8, 8.0)),), (), ()
    measured = Measured("allreduce()", 1.0, 0.0, chains=chains)
    with pytest.warns(DeprecationWarning, match=r"use chains\[0\]") as told:
        assert measured.issued == chains[0]
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"use chains\[1:\]"):
        assert measured.beside == chains[1:]


def test_headers_are_on_the_wire_too() -> None:
    hook = sending(1.514)
    assert hook.bytes_sent == pytest.approx(1_448_000)
    (cost,) = plan([hook], bits_per_second=8e6)
    assert cost.wire_seconds == pytest.approx(1.514)
    assert cost.step_seconds == pytest.approx(1.514)
    assert cost.ratio == 1.0


@pytest.mark.parametrize(
    ("wire", "hook", "buckets", "step"),
    [
        (0.0, 0.0, 4, 3.0),
        (0.0, 0.6, 4, 3.6),
        (5.0, 0.0, 1, 3.0 + 5.0),  # nothing to hide it
        (5.0, 0.0, 2, 1.0 + 1.0 + 5.0),  # what is computed of the second is hidden
        (1.0, 0.0, 2, 3.0 + 0.5),  # the first is hidden
        (8.0, 0.8, 4, 1.0 + 0.7 + 8.0),
    ],
)
def test_buckets_travel_while_others_are_computed(
    wire: float, hook: float, buckets: int, step: float
) -> None:
    """A step of 3 seconds: 1 of forward, 2 of backward."""
    hooks = [Measured("none", 0, 0.0), sending(wire, hook)]
    first, cost = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[1] * buckets)
    assert first.step_seconds == pytest.approx(3.0)
    assert cost.step_seconds == pytest.approx(step)
    assert cost.ratio == pytest.approx(step / 3.0)


def test_a_small_first_bucket_is_on_its_way_early() -> None:
    far = {"bits_per_second": 8e6, "compute_seconds": 3.0}
    # A tenth is computed when the first is full; all is sent after that.
    (cost,) = plan([sending(8.0)], **far, buckets=[1, 9])
    assert cost.step_seconds == pytest.approx(1.0 + 2.0 + 0.9 * 8.0)  # waits for the second
    (cost,) = plan([sending(8.0)], **far, buckets=[2, 8])
    assert cost.step_seconds == pytest.approx(1.0 + 0.4 + 8.0)


#: Of a step of 25 buckets, the agreement included. Each exchange takes half a round trip.
ROUND_TRIPS = {
    "none": {2: 26, 8: 182},  # as bench_round_trips measures DDP
    "allreduce()": {2: 1, 8: 1.5},
    "blockwise()": {2: 1.5, 8: 1.5},
    "topk(0.01)": {2: 1, 8: 1},
    "chunk_topk()": {2: 1, 8: 1},
    "powersgd(rank=2)": {2: 1.5, 8: 1.5},
}


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_step_takes_its_round_trips(ranks: int) -> None:
    found = measure(list(ROUND_TRIPS), elements=480_000, world_size=ranks)
    costs = plan(
        [replace(each, compute_seconds=0.0) for each in found],
        bits_per_second=1e15,
        delay_seconds=0.025,
        buckets=[1] * 25,
    )
    assert {cost.hook: cost.round_trips for cost in costs} == {
        hook: counts[ranks] for hook, counts in ROUND_TRIPS.items()
    }
    for cost in costs:
        assert cost.step_seconds == pytest.approx(cost.round_trips * 0.05, rel=1e-3)


def test_round_trips_of_one_bucket_hide_behind_the_backward_of_the_next() -> None:
    (found,) = measure(["allreduce()"], elements=10_000, world_size=2)
    found = replace(found, compute_seconds=0.0)
    far = {"bits_per_second": 1e15, "delay_seconds": 0.025, "buckets": [1, 1]}
    (cost,) = plan([found], compute_seconds=3.0, **far)
    # After the last bucket half a round trip, and another half in which the ranks agree.
    assert cost.step_seconds == pytest.approx(3.0 + 0.05, rel=1e-3)
    (apart,) = plan([replace(found, overlaps=False, every=10)], compute_seconds=3.0, **far)
    assert apart.step_seconds == pytest.approx(3.0 + 0.05 / 10, rel=1e-3)
    assert apart.round_trips == pytest.approx(1 / 10)


# Among more than 16 ranks, messages of up to 16 KiB go to the ranks at doubled distances, and
# larger ones around a ring.
@pytest.mark.parametrize(
    ("hook", "elements", "ranks", "round_trips"),
    [
        ("blockwise()", 2_000, 16, 1),
        ("blockwise()", 2_000, 17, 0.5 + 5 / 2),
        ("blockwise()", 400_000, 17, 0.5 + 16 / 2),
        ("allreduce()", 2_000, 17, 5 / 2),
        ("allreduce()", 400_000, 17, 16),
        ("allreduce()", 5_000, 3, 0.5),
        ("allreduce()", 1 << 20, 3, 1),
        ("allreduce()", 1 << 21, 3, 1),
        ("allreduce()", 1 << 20, 2, 0.5),
        ("allreduce()", (1 << 20) + 1, 2, 1),
    ],
)
def test_round_trips_of_a_collective(
    hook: str, elements: int, ranks: int, round_trips: float
) -> None:
    (found,) = measure([hook], elements=elements, world_size=ranks)
    (cost,) = plan([replace(found, agreement=())], bits_per_second=1e12)
    assert cost.round_trips == round_trips


def test_many_buckets_and_ranks_are_planned_in_few_messages() -> None:
    found = replace(measure(["allreduce()"], elements=10_000, world_size=2)[0], compute_seconds=0.0)
    many = tuple(
        Issued(each.group, replace(each.traffic, ranks=1024, nbytes=4e11))
        for each in found.chains[0]
    )
    (cost,) = plan(
        [replace(found, chains=(tuple(many),))],
        bits_per_second=1e15,
        delay_seconds=0.01,
        buckets=[1] * 10_000,
    )
    # 10,000 all-reduces of 40 MB at once, each twice around the ring, and the agreement of two.
    assert cost.round_trips == pytest.approx(2 * 1023 / 2 + 0.5)


# ---- exchanges in the background -----------------------------------------------------------------


def test_an_exchange_in_the_background_is_hidden_by_its_steps() -> None:
    def step(seconds: float, **more: Any) -> float:
        hook = sending(seconds, overlaps=False, every=10, **more)
        return plan([hook], bits_per_second=8e6, compute_seconds=1.0)[0].step_seconds

    assert step(4.0) == pytest.approx(1.4)
    assert step(4.0, delay=3) == pytest.approx(1.1)
    assert step(4.0, delay=5) == pytest.approx(1.0)
    # Two halves, of which each waits for what two steps do not hide.
    assert step(8.0, delay=2, fragments=2) == pytest.approx(1.0 + 2 * (4.0 - 2.0) / 10)


def test_local_sgd_in_the_background() -> None:
    text = "local_sgd(10, fragments=2, delay=4, mix=0.5, hook=error_feedback(blockwise(bits=4)))"
    (found,) = measure([text], elements=50_000, world_size=2)
    assert (found.every, found.fragments, found.delay, found.overlaps) == (10, 2, 4, False)
    (cost,) = plan([found], bits_per_second=1e9, delay_seconds=0.01)
    assert cost.round_trips == pytest.approx(2 * 1.5 / 10)


# ---- formulas ------------------------------------------------------------------------------------


HOOKS = [
    "allreduce()",
    "cast()",
    "blockwise()",
    "error_feedback(blockwise(bits=4))",
    "fp8()",
    "momentum(sign(), 0.9)",
    "randomk(0.1)",
    "topk(0.01)",
    "chunk_topk()",
    "powersgd(rank=2)",
    "hierarchical(blockwise(), levels=[4])",
    "error_feedback(hierarchical(sign(), levels=[2, 2]))",
    "hierarchical(topk(0.01), levels=[8])",
    "hierarchical(randomk(0.1), levels=[2])",
    "hierarchical(blockwise(), levels=[1])",
]
ELEMENTS = 5_003


def _formula(text: str, ranks: int, nodes: int = 1, elements: int = ELEMENTS) -> Work:
    found = formula_of(parse_hook(text), Model(elements), ranks, nodes)
    assert found is not None
    return found


def _with_numbered_groups(issued: Any) -> list[tuple[int, Any]]:
    numbers: dict[str, int] = {}
    return [(numbers.setdefault(one.group, len(numbers)), one.traffic) for one in issued]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        *((text, ranks) for text in HOOKS for ranks in (8, 32)),
        ("blockwise()", 128),
        ("hierarchical(blockwise(), levels=[8, 4])", 128),
    ],
)
@pytest.mark.filterwarnings("ignore:.*take more bytes than cast")
def test_formulas_are_what_simulated_ranks_do(text: str, ranks: int) -> None:
    gradients = [random_gradients(square_shapes(ELEMENTS, ELEMENTS)) for _ in range(ranks)]
    found = simulate(parse_hook(text), gradients, steps=2, timeout=600)
    formula = _formula(text, ranks)
    assert _with_numbered_groups(formula.chains[0]) == _with_numbered_groups(found.issued)
    tolerance = 0 if ranks == 128 else 1e-3  # the simulation rounds
    assert formula.bytes_sent == pytest.approx(found.wire_bytes, rel=tolerance, abs=0)


@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_formulas_of_few_elements(numel: int) -> None:
    gradients = [[torch.randn(numel)] for _ in range(8)]
    for text in ("blockwise()", "hierarchical(blockwise(), levels=[4])"):
        found = simulate(parse_hook(text), gradients)
        formula = _formula(text, 8, elements=numel)
        assert formula.bytes_sent == found.wire_bytes


def test_hooks_without_formulas() -> None:
    adaptive = hooks.adaptive(1000)
    assert formula_of(adaptive, Model(100), 32, 1) is None
    named = hooks.hierarchical(codecs.sign(), levels=["rack=1"])
    assert formula_of(named, Model(100), 32, 1) is None


# ---- between nodes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("levels", "ranks"), [([4], 8), ([2, 2], 16), ([8], 32), ([8, 4], 128)])
def test_bytes_out_of_a_node_are_those_of_the_groups_between_nodes(
    levels: list[int], ranks: int
) -> None:
    """Of two levels the second is between nodes, too."""

    def on_rank(rank: int) -> list[int]:
        hook = hooks.hierarchical(codecs.blockwise(), levels=levels)
        handle = attach(nn.Linear(64, 64, bias=False), hook)
        own = hook.own_groups()
        before = [group.bytes_sent for group in own]
        parameter = torch.zeros(64, 64, requires_grad=True)
        run_hook(hook, None, GradBucket([parameter], [torch.ones(64, 64)])).wait()
        handle.remove()
        return [group.bytes_sent - sent for group, sent in zip(own, before, strict=True)]

    per_node = levels[0]
    sent = run_ranks(on_rank, ranks, timeout=120)
    formula = _formula(
        f"hierarchical(blockwise(), levels={levels})", ranks, ranks // per_node, 4096
    )
    found = bytes_out_of_node(formula.chains[0], formula.members, [1.0])
    wanted = sum(sum(of_groups[1:]) for of_groups in sent[:per_node])
    assert found == pytest.approx(wanted, rel=2e-2)  # ranks' segments differ by a block


def test_bytes_out_of_a_node_of_hooks_among_all_ranks() -> None:
    def out(text: str, ranks: int, nodes: int, elements: int = 1 << 20) -> float:
        formula = _formula(text, ranks, nodes, elements)
        return bytes_out_of_node(formula.chains[0], formula.members, [1.0])

    # Around a ring one rank of a node sends to another node.
    assert out("allreduce()", 32, 4) == pytest.approx(2 * (4 << 20) * 31 / 32)
    # Of 7 others 4 are on the other node.
    (call, _) = _formula("blockwise()", 8, 2, 1 << 20).chains[0]
    assert out("blockwise()", 8, 2) == pytest.approx(2 * 4 * call.traffic.carried * 4 / 7, rel=1e-3)
    assert out("allreduce()", 32, 1) == out("blockwise()", 8, 1) == 0
    nodes = out("hierarchical(blockwise(), levels=[8])", 32, 4)
    assert nodes == pytest.approx(2 * (1 << 20) * 3 / 4 * 1.016, rel=0.01)


# ---- messages, round trips and connections of processes ------------------------------------------

BUCKETS, WIDTH = 5, 64


def _counted(rank: int, text: str, levels: Any) -> tuple[int, int]:
    """The messages of a step, and the connections that the hook has added."""
    wire._thread.endpoints = endpoints = wire._Endpoints()  # without others' connections
    before = _established()
    hook = parse_hook(text)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BUCKETS)]
    model = nn.Sequential(*layers)
    handle = attach(model, hook, bucket_cap_mb=WIDTH * WIDTH * 4 / (1 << 20), connections=levels)
    for _ in range(2):  # buckets are formed anew after the first
        model(torch.ones(1, WIDTH)).sum().backward()
    connections = len(_established() - before)  # earlier ones may end meanwhile
    before = _sent(endpoints)
    model(torch.ones(1, WIDTH)).sum().backward()
    count = _sent(endpoints) - before
    assert len(handle.stats().buckets) == BUCKETS
    dist.barrier()
    handle.remove()
    endpoints.close()
    del wire._thread.endpoints
    return count, connections


def _sent(endpoints: Any) -> int:
    """The messages that this process has sent over the library's transport."""
    return sum(each.counts()["sent_messages"] for each in endpoints._present.values())


def _established() -> set[str]:
    """The inodes of this process's TCP connections."""
    sockets = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{name}") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == "01"}
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found & sockets


@pytest.mark.parametrize(
    ("pool", "text", "connections"),
    [
        ("four_ranks", "allreduce()", 1),
        ("four_ranks", "blockwise()", 1),
        ("four_ranks", "blockwise()", 3),
        ("four_ranks", "topk(0.01)", 1),
        ("four_ranks", "hierarchical(blockwise(), levels=[2])", 1),
        ("two_ranks", "blockwise()", 1),
        ("two_ranks", "allreduce()", 2),
    ],
)
def test_messages_and_connections_of_processes(
    request: pytest.FixtureRequest, pool: str, text: str, connections: int
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    size = ranks.world_size
    formula = _formula(text, size, 1, BUCKETS * WIDTH * WIDTH)
    messages = count_messages(formula.chains[0], agreement_of(size), [1 / BUCKETS] * BUCKETS)
    added = count_connections(formula.hook, formula.chains[0], size, connections)
    assert ranks.run(_counted, text, connections) == [(messages, added)] * size


def test_round_trips_of_nodes() -> None:
    """As in test_round_trips.py, where processes take so many."""
    found = measure(["hierarchical(blockwise())"], elements=25 << 14, world_size=4, nodes=2)
    (cost,) = plan(found, bits_per_second=1e12, buckets=[1] * 25)
    assert cost.round_trips == 2.5


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # Those at powers of 2 on both sides.
        ("allreduce()", 20),
        ("blockwise()", 999),
        ("topk(0.01)", 20),
        # Those of a node are among the 124 between nodes and the 20 of all.
        ("hierarchical(blockwise(), levels=[8])", 124),
    ],
)
@pytest.mark.filterwarnings("ignore:.*take more bytes than cast")
def test_connections_of_a_thousand_ranks(text: str, wanted: int) -> None:
    formula = _formula(text, 1000, 125)
    assert count_connections(formula.hook, formula.chains[0], 1000) == wanted


@pytest.mark.parametrize(("size", "messages"), [(2, 1), (16, 15), (17, 5), (100, 7), (1000, 10)])
def test_messages_of_an_agreement(size: int, messages: int) -> None:
    assert count_messages((), agreement_of(size), []) == messages
