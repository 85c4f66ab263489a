"""Codecs of a user's own: by operators in a library, in Python alone, and codecs that raise.

The example of a codec in Python passes what every codec is tried in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_processes
from ops_reference import LEVELS
from rank_pool import RankPool
from repository import ROOT, TESTS
from staged_steps import (
    BLOCKWISE,
    Around,
    Failure,
    OwnError,
    X,
    backward,
    gradients_of,
    known_groups,
    model,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_commhook import attach, codecs, hooks
from torch_commhook.codecs import CODECS, Codec
from torch_commhook.collectives import (
    compressed_all_gather,
    compressed_all_reduce,
    compressed_reduce_scatter,
)
from torch_commhook.native import bucket_ops as ops
from torch_commhook.testing import run_ranks, simulate

_METHODS = ("encode", "decode", "decode_sum", "reduce", "reduce_shards")
_SETTINGS = {"format": "e5m2", "block_size": 64}


class own(codecs.BlockCodec):  # noqa: N801
    """Does what ``fp8("e5m2", 64)`` does."""

    def __init__(self) -> None:
        form = codecs.BlockForm(block_size=64, bits=8, parameters=1)
        super().__init__("own", form, _SETTINGS, library="commhook_test_codecs")

    def __repr__(self) -> str:
        return "own()"


@pytest.fixture(scope="module")
def calls() -> Iterator[list[str]]:
    """The operators, which note that they were called."""
    library = torch.library.Library("commhook_test_codecs", "DEF")
    called: list[str] = []

    def define(method: str) -> None:
        theirs = getattr(torch.ops.commhook, f"fp8_{method}").default

        def operator(*arguments: Any, **more: Any) -> Any:
            called.append(method)
            return theirs(*arguments, **more)

        _, _, rest = str(theirs._schema).partition("(")
        library.define(f"own_{method}({rest}")
        library.impl(f"own_{method}", operator, "CompositeExplicitAutograd")

    for method in _METHODS:
        define(method)
    yield called
    library._destroy()


def test_its_hook_gives_the_bits_of_the_same_codec(calls: list[str]) -> None:
    torch.manual_seed(0)
    gradients = [[torch.randn(1000), torch.randn(30, 7)] for _ in range(3)]
    want = simulate(hooks.fp8("e5m2", 64), gradients, steps=2)
    calls.clear()
    got = simulate(hooks.compressed(own()), gradients, steps=2)
    assert {"encode", "decode", "reduce"} <= {*calls}
    assert got.wire_bytes == want.wire_bytes
    for one, other in zip(got.result, want.result, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("calls")
def test_it_trains_with_error_feedback() -> None:
    def train(rank: int, hook: hooks.Hook) -> tuple[torch.Tensor, int | None]:
        torch.manual_seed(0)
        model = nn.Linear(40, 8)
        handle = attach(model, hook)
        for step in range(3):
            model.zero_grad()
            model(torch.full((2, 40), rank + 0.3 * step)).square().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad, handle.stats().bytes_sent

    (got, sent), _ = run_ranks(train, 2, hooks.error_feedback(hooks.compressed(own())))
    same = hooks.error_feedback(hooks.fp8("e5m2", 64))
    (want, wanted_bytes), _ = run_ranks(train, 2, same)
    assert torch.equal(got, want) and sent == wanted_bytes


class OneSegment(codecs.Codec):
    """Has one segment, however many ranks there are."""

    def segments(self, numel: int, segments: int = 1) -> list[codecs.Segment]:
        return [codecs.Segment(numel, 4 * numel)]

    def encode(self, *arguments: Any, **settings: Any) -> None:
        raise AssertionError("never called")

    decode = encode


def test_a_codec_without_a_segment_for_each_rank() -> None:
    gradients = [[torch.ones(8)] for _ in range(2)]
    with pytest.raises(
        ValueError, match=r"segments\(8, 2\) of OneSegment\(\) must return a list with"
    ):
        simulate(hooks.compressed(OneSegment()), gradients)


def test_segments_have_their_old_name_too() -> None:
    with pytest.warns(DeprecationWarning, match=r"use codecs\.Segment") as told:
        shard = codecs.Shard
    assert shard is codecs.Segment and told[0].filename == __file__
    int8, x, y = codecs.blockwise(), torch.arange(512.0), torch.empty(512)
    with pytest.warns(DeprecationWarning, match="use segments") as told:
        assert int8.shards(512, shards=2) == int8.segments(512, 2)
    assert {each.filename for each in told} == {__file__}
    message = torch.empty(int8.nbytes(512, 2), dtype=torch.uint8)
    with pytest.warns(DeprecationWarning, match="encode: shards is deprecated: use segments"):
        int8.encode([x], message, shards=2)
    int8.decode(message, [y], segments=2)
    assert torch.allclose(x, y, atol=3.0)


def test_a_codec_that_defines_segments_by_their_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="old: .* use segments") as told:

        class old(Codec):  # noqa: N801
            def shards(self, numel: int, shards: int = 1) -> list[codecs.Segment]:
                return [codecs.Segment(numel // shards, 4 * numel // shards)] * shards

            def encode(self, tensors: Any, message: Any, *, shards: int = 1, **more: Any) -> None:
                assert "segments" not in more
                message.view(torch.float32).copy_(tensors[0]).mul_(more.get("scale", 1.0))

            def decode(self, message: Any, tensors: Any, *, shards: int = 1, **more: Any) -> None:
                assert "segments" not in more
                tensors[0].copy_(message.view(torch.float32))

    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*use segments")
        found = simulate(hooks.compressed(old()), [[torch.full((8,), i)] for i in (1.0, 3.0)])
    assert torch.equal(found.result[0], torch.full((8,), 2.0))
    with pytest.warns(DeprecationWarning, match="use segments"):  # by way of the base class

        class older(codecs.blockwise):  # noqa: N801
            def shards(self, numel: int, shards: int = 1) -> list[codecs.Segment]:
                return super().shards(numel, shards)

        assert older().segments(512, 2) == codecs.blockwise().segments(512, 2)


def test_a_codec_that_reduces_segments_by_the_old_name() -> None:
    called: list[int] = []
    with pytest.warns(DeprecationWarning, match="old: .* use reduce_segments"):

        class old(codecs.blockwise):  # noqa: N801
            def reduce_shards(self, messages: Any, message: Any, numel: int, **more: Any) -> None:
                called.append(numel)
                super().reduce_shards(messages, message, numel, **more)

    codec = old()
    message, own = (torch.empty(codec.nbytes(512), dtype=torch.uint8) for _ in range(2))
    codec.encode([torch.arange(512.0)], message)
    with pytest.warns(DeprecationWarning, match="reduce_shards is deprecated"):
        codec.reduce_segments([message], own, 512)
    assert called == [512] and torch.equal(message, own)


# ---- a codec in Python alone ---------------------------------------------------------------------

EXAMPLES = ROOT / "examples"

#: The levels of CPU kernels that this processor has. Two cases try each.
LEVELS_HERE = 1 + LEVELS.index(ops.cpu_capability())
#: Files that try each codec of the table, what of them to choose, without what needs processes, and
#: how many there are. Tests by properties draw from the table: no codec is in their names.
TRIED = {
    "codecs/test_codecs.py": ("truncated and not inductor", 24 + 2 * LEVELS_HERE),
    "codecs/test_codec_operators.py": ("truncated", 8),
    "collectives/test_compressed_chunks.py": ("truncated and not gloo", 14),
    "collectives/test_compressed_all_reduce.py": ("truncated and not gloo", 9),
    "hooks/test_hooks_properties.py": ("", 8),
    "codecs/test_formulas.py": ("truncated", 2),
}


def run(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    # Not one of the processes of a run with pytest-xdist.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**own, "PYTHONPATH": str(EXAMPLES)},
    )


def passed(files: Iterable[str], chosen: str) -> Counter[str]:
    """How many tests pass in each file, with the codec in the table; none may fail."""
    options = ["-p", "python_codec", "-p", "no:cacheprovider", "-v", "-p", "no:xdist"]
    ran = run(
        "-m", "pytest", *options, *(str(TESTS / name) for name in files), "-k", chosen, "-m", ""
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    return Counter(re.findall(r"^tests/(\S+?)::.* PASSED", ran.stdout, re.MULTILINE))


@pytest.fixture(scope="module")
def found() -> Counter[str]:
    parts = [
        f"({Path(name).stem}{chosen and f' and {chosen}'})" for name, (chosen, _) in TRIED.items()
    ]
    return passed(TRIED, " or ".join(parts))


@pytest.mark.long
@pytest.mark.parametrize("name", TRIED)
def test_it_is_tried_as_all_codecs_are(found: Counter[str], name: str) -> None:
    assert found[name] >= TRIED[name][1]


@pytest.mark.long
def test_it_is_compiled_by_inductor() -> None:
    assert passed(["codecs/test_codecs.py"], "truncated and inductor").total() >= 1


def test_it_trains(tmp_path: Path) -> None:
    options = ["--layers", "1", "--dim", "32", "--heads", "2", "--seq", "16", "--steps", "4"]
    hook = str(EXAMPLES / "python_codec.py:hook")
    ran = run("-m", "torch_commhook", "train", "--hook", hook, *options, "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert "2.00x" in ran.stdout  # of what float32 would have been


# ---- codecs that raise ---------------------------------------------------------------------------

TOPK_OF_ALL = CODECS["topk"](1.0)
#: Codecs, and what of them runs once messages have come.
AFTER_ENCODING = [(BLOCKWISE, "reduce"), (BLOCKWISE, "decode"), (TOPK_OF_ALL, "decode_sum")]


def _failing_steps(rank: int, kind: str, wrapped: str) -> list[tuple[Any, ...]]:
    """Every stage fails, on each rank, in the first and in another bucket."""
    world_size = dist.get_world_size()
    net: nn.Module = model()
    options: dict[str, Any] = {"bucket_cap_mb": 0.005}
    if kind == "ddp":
        net, options = DDP(net, bucket_cap_mb=0.005), {}
    failure = Failure()
    hook: Any = hooks.compressed(Around(BLOCKWISE, failure))
    if wrapped == "policy":
        hook = hooks.policy([("dim <= 1", hooks.allreduce())], hook)
    handle = attach(net, hook, **options)
    for _ in range(2):
        backward(net, rank)
    want, groups = gradients_of(net), known_groups()
    happened = []
    for method in ("encode", "reduce", "decode"):
        for fails in range(world_size):
            for bucket in (0, 2):
                if rank == fails:
                    failure.arm(method, bucket)
                try:
                    backward(net, rank)
                    raised = "nothing"
                except Exception as error:
                    raised = f"{type(error).__name__}: {error}"
                armed = failure.method
                backward(net, rank)
                right = all(map(torch.equal, gradients_of(net), want))
                happened.append((method, fails, bucket, raised, armed, right))
    assert known_groups() == groups
    buckets = len(handle.stats().buckets)
    handle.remove()
    assert buckets > 2
    return happened


@pytest.mark.parametrize(
    ("world_size", "kind", "wrapped"),
    [(2, "ddp", ""), (2, "module", "policy"), (3, "module", "")],
)
def test_a_codec_that_raises(
    pools: dict[int, RankPool], world_size: int, kind: str, wrapped: str
) -> None:
    ranks = pools[world_size].run(_failing_steps, kind, wrapped)
    for rank, happened in enumerate(ranks):
        assert len(happened) == 6 * world_size
        for method, fails, bucket, raised, armed, right in happened:
            where = f"{method} of bucket {bucket} on rank {fails}, seen by {rank}: {raised}"
            if rank == fails:
                assert raised == "OwnError: boo", where
            else:
                assert raised.startswith("PeerError: "), where
                assert re.search(rf"on rank {fails}: .*OwnError: boo", raised, re.S), where
            assert (armed, right) == ("", True), where


def _outcome(future: Any) -> str:
    try:
        return str(future.wait().sum().item())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _fails_alone(rank: int, call: Callable[..., Any], codec: Codec, method: str) -> list[str]:
    """Called directly, where nobody tells the others."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    failure = Failure()
    around = Around(codec, failure)
    happened = []
    for number in range(4):
        if rank == number == 1:
            failure.arm(method)
        happened.append(_outcome(call(X, around, group=group)))
    dist.destroy_process_group(group)
    return happened


@pytest.mark.parametrize(
    ("call", "codec", "method"),
    [
        *((compressed_all_reduce, *each) for each in AFTER_ENCODING),
        (compressed_reduce_scatter, TOPK_OF_ALL, "decode_sum"),
        (compressed_all_gather, TOPK_OF_ALL, "decode"),
    ],
)
def test_a_codec_that_raises_outside_of_a_model(
    two_ranks: RankPool, call: Callable[..., Any], codec: Codec, method: str
) -> None:
    """Its error keeps its type, also on a thread of the backend."""
    first, second = two_ranks.run(_fails_alone, call, codec, method)
    right = "600.0" if call is compressed_reduce_scatter else "1200.0"
    if method == "reduce":  # what the other rank waits for never comes: it leaves
        assert first[0] == second[0] == "1200.0"
        assert second[1] == "OwnError: boo"
        late = [*first[1:], *second[2:]]
        assert all(re.match("DistBackendError: ", each) for each in late), late
    else:  # what others need of this rank, it has sent
        assert first == [right] * 4
        assert second == [right, "OwnError: boo", right, right]


@pytest.mark.parametrize("method", ["encode", "reduce", "decode"])
def test_a_codec_that_raises_on_simulated_ranks(method: str) -> None:
    def run(rank: int) -> None:
        failure = Failure()
        if rank == 1:
            failure.arm(method)
        compressed_all_reduce(X, Around(BLOCKWISE, failure)).wait()

    with pytest.raises(OwnError, match="boo"):
        run_ranks(run, 3)


@on_processes
@pytest.mark.parametrize(("codec", "method"), AFTER_ENCODING, ids=repr)
def test_an_interrupt_in_a_callback(rank: int, codec: Codec, method: str) -> None:
    """Reaches the future, or it would never be complete."""
    group = dist.new_group([0, 1])
    failure = Failure()
    failure.arm(method, error=KeyboardInterrupt)
    happened = _outcome(compressed_all_reduce(X, Around(codec, failure), group=group))
    dist.destroy_process_group(group)
    assert happened == "RuntimeError: KeyboardInterrupt: boo"
