"""``commhook plan``: what hooks would cost."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from torch_commhook.cli import plan_sharded
from torch_commhook.cli.main import main
from torch_commhook.cli.plan import Measured, bucket_sizes, measure, plan
from torch_commhook.process_group.gloo_messages import Traffic
from torch_commhook.process_group.simulated.link import Issued

HOOKS = ["allreduce()", "cast()", "blockwise()", "topk(0.01)"]
PAYLOAD = 1448 / 1514


def sending(nbytes: float, compute_seconds: float = 0.0, *, overlaps: bool = True) -> Measured:
    """A hook of two ranks, each of which sends ``nbytes`` to the other in a step."""
    issued = (Issued("", Traffic("all_to_all_single", 2, 2 * nbytes, nbytes)),)
    return Measured("a", nbytes, compute_seconds, overlaps=overlaps, issued=issued)


def test_bytes() -> None:
    found = measure(HOOKS, elements=1_000_000, world_size=2)
    assert [each.hook for each in found] == HOOKS
    sent = [each.bytes_sent for each in found]
    assert sent[:2] == [4_000_000, 2_000_000]
    assert sent[2] == pytest.approx(1_016_000, rel=0.01)
    assert sent[3] == pytest.approx(80_000, rel=0.01)
    assert all(each.compute_seconds >= 0 for each in found)


@pytest.mark.parametrize(("ranks", "bytes_each"), [(7, 24 / 7), (8, 3.5), (64, 3.9375)])
def test_a_cast_sends_its_formula(ranks: int, bytes_each: float) -> None:
    (found,) = measure(["cast()"], elements=20_000, world_size=ranks)
    assert found.bytes_sent / 20_000 == pytest.approx(bytes_each, rel=2e-3)  # and padding


def test_low_rank_factors_are_those_of_matrices_as_models_have_them() -> None:
    (found,) = measure(["powersgd(rank=2)"], elements=480_000, world_size=2)
    # 48 matrices of 100 by 100, whose factors are summed over a ring
    assert found.bytes_sent == 48 * 2 * (100 + 100) * 4


def test_gathered_messages_grow_with_the_ranks() -> None:
    two, eight = (
        measure(["topk(0.01)"], elements=100_000, world_size=ranks)[0] for ranks in (2, 8)
    )
    assert eight.bytes_sent == 7 * two.bytes_sent


def test_hooks_are_planned_as_they_are_in_the_long_run() -> None:
    texts = [
        "after(1000, topk(0.01))",
        "local_sgd(8, hook=after(5, topk(0.01), before=blockwise()))",
        "clip(1.0, topk(0.01))",
        "topk(0.01)",
    ]
    *found, topk = measure(texts, elements=100_000, world_size=2)
    assert [each.bytes_sent / topk.bytes_sent for each in found] == [1.0, 1 / 8, 1.0]
    assert [each.overlaps for each in found] == [True, False, True]


def test_what_follows_the_optimizer_is_hidden_by_nothing() -> None:
    hooks = [sending(1e6 * PAYLOAD, 0.5, overlaps=overlaps) for overlaps in (True, False)]
    hidden, open_ = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[1] * 100)
    assert hidden.step_seconds == pytest.approx(3.51, rel=0.01)
    assert open_.step_seconds == pytest.approx(4.5)


def test_headers_are_on_the_wire_too() -> None:
    (cost,) = plan([sending(1_448_000)], bits_per_second=8e6)
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
    hooks = [Measured("none", 0, 0.0), sending(wire * 1e6 * PAYLOAD, hook)]
    first, cost = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[1] * buckets)
    assert first.step_seconds == pytest.approx(3.0)
    assert cost.step_seconds == pytest.approx(step)
    assert cost.ratio == pytest.approx(step / 3.0)


def test_a_small_first_bucket_is_on_its_way_early() -> None:
    hooks = [sending(8.0e6 * PAYLOAD)]
    # A tenth is computed when the first is full; all is sent after that.
    (cost,) = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[1, 9])
    assert cost.step_seconds == pytest.approx(
        1.0 + 2.0 + 0.9 * 8.0
    )  # the wire waits for the second
    (cost,) = plan(hooks, bits_per_second=8e6, compute_seconds=3.0, buckets=[2, 8])
    assert cost.step_seconds == pytest.approx(1.0 + 0.4 + 8.0)


#: Of a step of 25 buckets, the agreement included. All but the first takes half a round trip.
ROUND_TRIPS = {
    "allreduce()": {2: 1.5, 8: 2},
    "blockwise()": {2: 2, 8: 2},
    "topk(0.01)": {2: 1.5, 8: 1.5},
    "chunk_topk()": {2: 1.5, 8: 1.5},
    "powersgd(rank=2)": {2: 2, 8: 2},
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
    # After the last bucket one round trip, and half of one in which the ranks agree.
    assert cost.step_seconds == pytest.approx(3.0 + 1.5 * 0.05, rel=1e-3)
    (apart,) = plan([replace(found, overlaps=False, every=10)], compute_seconds=3.0, **far)
    assert apart.step_seconds == pytest.approx(3.0 + 1.5 * 0.05 / 10, rel=1e-3)
    assert apart.round_trips == pytest.approx(1.5 / 10)


def test_few_ranks_exchange_messages() -> None:
    """So that a step takes a round trip and a half; more ranks go around a ring."""
    few, many = (
        replace(measure(["blockwise()"], elements=20_000, world_size=ranks)[0], agreement=())
        for ranks in (16, 17)
    )
    costs = plan([few, many], bits_per_second=1e9, buckets=[1] * 10)
    assert [cost.round_trips for cost in costs] == [1.5, 1 + 16]


@pytest.mark.parametrize(("elements", "round_trips"), [(5_000, 1), (1 << 20, 1.5), (1 << 21, 6)])
def test_large_sums_take_more_round_trips(elements: int, round_trips: float) -> None:
    (found,) = measure(["allreduce()"], elements=elements, world_size=3)
    (cost,) = plan([replace(found, agreement=())], bits_per_second=1e9)
    assert cost.round_trips == round_trips


def test_many_buckets_and_ranks_are_planned_in_few_messages() -> None:
    found = replace(measure(["allreduce()"], elements=10_000, world_size=2)[0], compute_seconds=0.0)
    many = tuple(
        Issued(each.group, replace(each.traffic, ranks=1024, nbytes=4e10)) for each in found.issued
    )
    (cost,) = plan(
        [replace(found, issued=many)],
        bits_per_second=1e15,
        delay_seconds=0.01,
        buckets=[1] * 10_000,
    )
    # 10,000 all-reduces of 4 MB, 32 at a time, and the agreement of two ranks.
    assert cost.round_trips == pytest.approx(math.ceil(10_000 / 32) * 2 * 1023 + 0.5)


def test_bucket_sizes() -> None:
    of_mebibyte = 1 << 18
    assert bucket_sizes(1, [25]) == [1]
    assert bucket_sizes(25 * of_mebibyte, [25]) == [25 * of_mebibyte]
    assert bucket_sizes(25 * of_mebibyte + 1, [25]) == [25 * of_mebibyte, 1]
    found = bucket_sizes(60 * of_mebibyte, [1, 25])
    assert [size / of_mebibyte for size in found] == [1, 25, 25, 9]
    assert sum(bucket_sizes(10**12, [1e-3])) == 10**12


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model-size", "10k", "--link", "1gbit", "--hooks", *HOOKS]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0.01 M elements, 2 ranks, 1000 Mbit/s each way")
    assert [line.split()[0] for line in lines[2:]] == HOOKS
    assert "round trips" not in lines[1]
    assert main([*arguments, "--delay", "25", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["hook"] for cost in costs] == HOOKS
    assert [cost["round_trips"] for cost in costs] == [1.5, 1.5, 2, 1.5]
    assert all(cost["step_seconds"] > 0.05 * cost["round_trips"] for cost in costs)
    assert main([*arguments, "--delay", "25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1000 Mbit/s and 25 ms each way" in lines[0] and "round trips" in lines[1]
    assert main(["plan", "--parallel", "fsdp", "--delay", "1"]) == 2
    assert "--delay: is for --parallel ddp alone" in capsys.readouterr().err


# ---- models in shards ----------------------------------------------------------------------------

#: Bytes of an element's message, with a scale of 4 bytes for each block.
MESSAGE = {
    "allreduce()": 4.0,
    "cast()": 2.0,
    "blockwise()": 1 + 4 / 256,
    "blockwise(bits=4)": 0.5 + 4 / 256,
    "error_feedback(sign())": 1 / 8 + 4 / 1024,
    "after(5, fp8())": 1 + 4 / 256,
}


def layout(shards: int, replicas: int | None = None, **more: int) -> plan_sharded.Layout:
    settings = {"elements": 1 << 20, "after_forward": shards, **more}
    return plan_sharded.Layout(shards=shards, replicas=replicas, **settings)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("hook", "each"), MESSAGE.items())
def test_a_reduce_scatter_sends_one_encoding(hook: str, each: float, ranks: int) -> None:
    (found,) = plan_sharded.measure_sharded([hook], layout(ranks))
    elements = 1 << 20
    assert found.scattered_bytes == pytest.approx(each * elements * (ranks - 1) / ranks)
    assert found.forward_bytes == found.backward_bytes == 4 * elements * (ranks - 1) / ranks
    assert found.reduced_bytes == 0
    assert found.error_bytes == (4 * elements if "error_feedback" in hook else 0)
    assert found.compute_seconds >= 0


@pytest.mark.parametrize(("shards", "replicas"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize(
    ("hook", "each"),
    [
        ("allreduce()", 4.0),
        ("error_feedback(blockwise(bits=4))", 0.5 + 4 / 256),
    ],
)
def test_replicas_average_a_shard(hook: str, each: float, shards: int, replicas: int) -> None:
    (found,) = plan_sharded.measure_sharded([hook], layout(shards, replicas))
    shard = (1 << 20) / shards
    expected = 2 * each * shard * (replicas - 1) / replicas
    assert found.reduced_bytes == pytest.approx(expected, rel=1e-3)  # blocks of matrices end
    assert found.scattered_bytes == 4 * shard * (shards - 1)
    remembered = 4 * shard * (1 + 1 / replicas) if "error" in hook else 0
    assert found.error_bytes == pytest.approx(remembered, rel=1e-2)


def test_replicas_that_are_apart_send_once_in_a_round() -> None:
    inner = "error_feedback(blockwise(bits=4))"
    texts = [inner, f"local_sgd(8, hook={inner})"]
    each, apart = plan_sharded.measure_sharded(texts, layout(2, 2))
    assert apart.reduced_bytes == each.reduced_bytes / 8
    assert apart.scattered_bytes == each.scattered_bytes
    assert apart.forward_bytes == each.forward_bytes
    assert apart.error_bytes == each.error_bytes


def test_low_rank_factors_are_those_of_shards_of_matrices() -> None:
    shape = layout(2, 2, elements=480_000)
    (found,) = plan_sharded.measure_sharded(["powersgd(rank=2)"], shape)
    assert found.reduced_bytes == 48 * 2 * (50 + 100) * 4


@pytest.mark.parametrize(
    ("after_forward", "backward"),
    [(4, (1 + 4 / 256) * 3 / 4), (2, 4 * 1 / 2), (1, 0.0)],
)
def test_weights_are_compressed_among_all_shards(after_forward: int, backward: float) -> None:
    """``reshard_after_forward=2`` gathers them as they are among two ranks in the backward."""
    shape = layout(4, after_forward=after_forward)
    plain, found = plan_sharded.measure_sharded(["cast()"], shape, weights="blockwise()")
    assert (plain.hook, found.hook) == ("cast()", "cast(), weights=blockwise()")
    assert plain.forward_bytes == 4 * (1 << 20) * 3 / 4
    assert found.forward_bytes == (1 + 4 / 256) * (1 << 20) * 3 / 4
    assert found.backward_bytes == backward * (1 << 20)
    assert found.scattered_bytes == plain.scattered_bytes
    assert found.compute_seconds > plain.compute_seconds


def test_a_shard_hook_is_of_the_reduce_scatters() -> None:
    plain, found = plan_sharded.measure_sharded(
        ["cast()"], layout(2, 2), shard_hook="error_feedback(blockwise())"
    )
    assert plain.reduced_bytes == found.reduced_bytes
    assert plain.scattered_bytes == 4 * (1 << 19)
    assert found.scattered_bytes == (1 + 4 / 256) * (1 << 19)
    assert (found.error_bytes, found.shard_error_bytes) == (0, 4 * (1 << 20))


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (layout(4), 8.0 + 4.0 + 2.0),
        (layout(4, after_forward=2), 8.0 + 4.0 + 0.2),
        (layout(2, 2), 1.0 + 0.8 + 0.4 + 0.2),
    ],
)
def test_what_stays_within_takes_the_inner_link(shape: plan_sharded.Layout, seconds: float) -> None:
    """Ten times as fast. Nothing is hidden behind what is computed, for 3 seconds."""
    reduced = 0.0 if shape.replicas is None else 1e6
    sizes = [8e6, 4e6, 2e6, reduced]
    measured = plan_sharded.Measured("a", *[each * PAYLOAD for each in sizes], 0.5, 0.0, 0.0)
    (cost,) = plan_sharded.plan_sharded(
        [measured],
        layout=shape,
        bits_per_second=8e6,
        inner_bits_per_second=8e7,
        compute_seconds=3.0,
    )
    assert cost.wire_seconds == pytest.approx(seconds)
    assert cost.step_seconds == pytest.approx(seconds + 3.5)


def test_one_rank_sends_nothing() -> None:
    for shape in (layout(1), layout(1, 1)):
        (found,) = plan_sharded.measure_sharded(["cast()"], shape)
        assert found.scattered_bytes == found.forward_bytes == found.reduced_bytes == 0


@pytest.mark.parametrize("parallel", ["fsdp", "hsdp"])
def test_the_command_lists_hooks_for_shards(
    parallel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model-size", "10k", "--parallel", parallel, "--world", "4"]
    assert main([*arguments, "--json", "--reshard-after-forward", "no"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["hook"] == "allreduce()"
    assert [cost["backward_bytes"] for cost in found] == [0] * len(found)
    low_rank = [cost["hook"] for cost in found if "powersgd" in cost["hook"]]
    assert len(low_rank) == (parallel == "hsdp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-size", "many"], "must be a number such as 124M"),
        (["--link", "fast"], "must be a rate such as 200mbit"),
        (["--link", "0gbit"], "must be a rate such as 200mbit"),
        (["--world", "0"], "must be a number from 1 to 1024"),
        (["--bucket-cap-mb", "0"], "must be from 0.001 to 100000 MiB"),
        (["--compute-ms", "nan"], "must be a number of milliseconds"),
        (["--hooks", "nothing()"], "names the unknown hook 'nothing'"),
        (
            ["--model-size", "1k", "--hooks", "policy()"],
            "can't be planned: it asks for more of a model than its size",
        ),
        (["--model-size", "1k", "--hooks", "none"], "write allreduce()"),
        (["--parallel", "fsdp", "--hooks", "none"], "is plain fully_shard: write allreduce()"),
        (["--parallel", "fsdp", "--hooks", "topk(0.1)"], "error: topk(density=0.1): needs the gra"),
        (
            ["--parallel", "hsdp", "--hooks", "clip(1.0)"],
            "error: clip(1) scales all gradients of a step",
        ),
        (
            ["--parallel", "fsdp", "--weights", "topk(0.1)"],
            "weights must be a codec that sends",
        ),
        (["--weights", "fp8()"], "argument --weights: needs --parallel fsdp or hsdp, got ddp"),
        (["--parallel", "hsdp", "--world", "3"], "--shards: is half of the ranks by default"),
        (
            ["--parallel", "fsdp", "--reshard-after-forward", "1"],
            "must be yes, no or a number fr",
        ),
        (
            ["--parallel", "fsdp", "--world", "4", "--reshard-after-forward", "3"],
            "must be yes, no or a number that divides the 4 shards, got 3",
        ),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
