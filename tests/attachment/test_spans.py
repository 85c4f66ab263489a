"""Spans of a hook in a trace of PyTorch's profiler, on each kind of model."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cpp_libraries import library
from mode_cases import BUCKET_CAP_MB, Mode, of_a_work
from on_ranks import on_processes
from sharded_models import Mesh, by_layer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, record_function

from torch_commhook import GradBucket, attach, codecs, collectives, hooks, load_cpp_hooks, spans
from torch_commhook.hooks.expressions import parse_hook
from torch_commhook.memory.bucket_memory import ShardedBucket

# ---- the profiler's trace ------------------------------------------------------------------------

_NAME = re.compile(r"commhook::(\w+) \((?:bucket (\d+), )?(.*)\)")


class Span(NamedTuple):
    """One span; times in microseconds.

    ``bucket`` is None for weights of sharded models.
    """

    stage: str
    bucket: int | None
    hook: str
    begin: float
    end: float
    thread: int


def profiled_steps(step: Callable[[], Any], count: int, **settings: Any) -> list[list[Span]]:
    """The spans of each of several steps, read from the Chrome trace of all."""
    with profile(activities=[ProfilerActivity.CPU], **settings) as profiler:
        for number in range(count):
            with record_function(f"step {number}"):
                step()
    events = complete_events(profiler)
    found = []
    for number in range(count):
        (whole,) = [event for event in events if event["name"] == f"step {number}"]
        begin, end = whole["ts"], whole["ts"] + whole["dur"]
        inside = [event for event in events if begin <= event["ts"] <= end]
        found.append(spans_in(inside))
    assert sum(map(len, found)) == len(spans_in(events)), "a span begins outside of all steps"
    return found


def complete_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """The events that the profiler writes to a Chrome trace, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])


def spans_in(events: list[dict[str, Any]]) -> list[Span]:
    found = []
    for event in events:
        if not event["name"].startswith("commhook::") or event["cat"] != "user_annotation":
            continue  # operators have names with the same beginning
        stage, bucket, hook = _NAME.fullmatch(event["name"]).groups()  # type: ignore[union-attr]
        number = None if bucket is None else int(bucket)
        begin = event["ts"]
        found.append(Span(stage, number, hook, begin, begin + event["dur"], event["tid"]))
    return found


def stages_by_bucket(spans: list[Span], hook: str) -> dict[int | None, list[str]]:
    """The stages of each bucket, in the order in which they begin.

    Each must begin after the one before has ended, and belong to the hook.
    """
    found: dict[int | None, list[Span]] = {}
    for span in spans:
        assert span.hook == hook, span
        assert span.end > span.begin, span
        of_bucket = found.setdefault(span.bucket, [])
        if of_bucket:  # times are rounded to a nanosecond
            assert span.begin >= of_bucket[-1].end - 0.01, (of_bucket[-1], span)
        of_bucket.append(span)
    return {bucket: [span.stage for span in each] for bucket, each in found.items()}


# ---- tests ---------------------------------------------------------------------------------------

STEPS = 2
ONCE = ["encode", "wire", "decode"]
#: Each rank encodes its values, and then the sum of its segment.
TWICE = ["encode", "wire", "encode", "wire", "decode"]


def network(width: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def model_of(kind: str, width: int) -> tuple[Any, dict[str, Any]]:
    """A model, and what ``attach`` is to be told."""
    model = network(width)
    if kind == "ddp":
        return DDP(model, bucket_cap_mb=BUCKET_CAP_MB), {}
    if kind == "module":
        return model, {"bucket_cap_mb": BUCKET_CAP_MB}
    by_layer(model, Mesh.of(kind))
    return model, {}


def stepping(model: nn.Module, width: int = 40, value: float = 1.0) -> Callable[[], None]:
    """Takes two steps, after which DDP keeps its buckets, and returns a function for more."""

    def step() -> None:
        model(torch.full((2, width), value)).square().sum().backward()

    step()
    step()
    return step


class wide(hooks.cast):  # noqa: N801
    """Adds up in float32 among any number of ranks."""

    _wide_from = 1


def through_the_library(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return collectives.compressed_all_reduce(
        bucket.buffer(), codecs.blockwise(), scale=0.5, group=bucket.process_group()
    )


WHOLE_GRADIENTS = {
    "allreduce()": ["wire"],
    "cpp('allreduce')": ["wire"],
    "cast(bfloat16)": ["encode", "wire"],
    "error_feedback(blockwise(bits=4))": TWICE,
    "error_feedback(topk(density=0.1))": ONCE,
    "randomk(density=0.1)": ONCE,
    "error_feedback(powersgd(rank=1))": TWICE,
}
IN_SHARDS = {
    "allreduce()": ["wire"],
    "cast(bfloat16)": ONCE,
    "error_feedback(blockwise(bits=4))": ONCE,
    "randomk(density=0.1)": ONCE,
}
#: Threads of the library's own wait for messages that are so large, and run what follows.
LARGE = 600


@pytest.mark.parametrize(
    ("kind", "hook", "stages", "name", "width"),
    [
        *(("ddp", *each, None, 40) for each in WHOLE_GRADIENTS.items()),
        *(("module", *each, None, 40) for each in WHOLE_GRADIENTS.items()),
        *(("fsdp-2", *each, None, 40) for each in IN_SHARDS.items()),
        ("replicate-2", "error_feedback(topk(density=0.1))", ONCE, None, 40),
        ("module", "clip(1, cpp('allreduce'))", ["wire"], "cpp('allreduce')", 40),
        ("ddp", "blockwise()", TWICE, None, LARGE),
        ("fsdp-2", "blockwise()", ONCE, None, LARGE),
        ("module", wide(), ["encode", "wire", "encode", "wire"], "wide", 40),
        ("ddp", through_the_library, TWICE, "through_the_library", 40),
        ("module", through_the_library, TWICE, "through_the_library", 40),
    ],
)
@on_processes
def test_each_bucket_has_its_stages(
    rank: int, kind: str, hook: Any, stages: list[str], name: str | None, width: int
) -> None:
    """The spans have the hook's name, or that of the inner hook which sends."""
    check(rank, kind, hook, stages, name, width=width)


def check(
    rank: int,
    kind: str,
    hook: Any,
    stages: list[str],
    name: str | None = None,
    width: int = 40,
    **settings: Any,
) -> None:
    """Each bucket of each step must have these stages."""
    model, options = model_of(kind, width)
    handle = attach(model, parse_hook(hook) if isinstance(hook, str) else hook, **options)
    steps = profiled_steps(stepping(model, width, rank + 1.0), STEPS, **settings)
    buckets = len(handle.stats().buckets)
    handle.remove()
    assert buckets > 1
    name = hook if name is None else name if "(" in name else f"{__name__}.{name}"
    for found in steps:
        assert stages_by_bucket(found, name) == dict.fromkeys(range(buckets), stages)


@on_processes
def test_a_profiler_of_all_threads_sees_each_span_once(rank: int) -> None:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    check(rank, "module", "blockwise()", TWICE, experimental_config=config)


# ---- hooks that users write ----------------------------------------------------------------------


@on_processes
def test_a_hook_that_ddp_calls_itself_has_its_stages(rank: int) -> None:
    model = DDP(network(), bucket_cap_mb=BUCKET_CAP_MB)
    model.register_comm_hook(None, hooks.blockwise())
    for found in profiled_steps(stepping(model), STEPS):
        by_bucket = stages_by_bucket(found, "blockwise()")
        assert len(by_bucket) > 1 and all(stages == TWICE for stages in by_bucket.values())


@on_processes
def test_a_hook_that_sends_by_itself_is_on_the_wire_until_its_future_is_complete(
    rank: int,
) -> None:
    result: torch.futures.Future[Tensor] = torch.futures.Future()
    model = network()
    numel = sum(parameter.numel() for parameter in model.parameters())
    handle = attach(model, lambda state, bucket: result)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        output = model(torch.ones(2, 40)).sum()
        threading.Timer(0.2, lambda: result.set_result(torch.zeros(numel))).start()
        output.backward()
    handle.remove()
    (span,) = spans_in(complete_events(profiler))
    assert span.stage == "wire" and span.bucket == 0
    assert span.end - span.begin > 1e5


# ---- weights -------------------------------------------------------------------------------------


@on_processes
def test_weights_have_their_stages(rank: int) -> None:
    model = network()
    by_layer(model, Mesh.of("fsdp-2"))
    handle = attach(model, hooks.allreduce(), weights=codecs.fp8())
    (found,) = profiled_steps(stepping(model), 1)
    handle.remove()
    stages = [span.stage for span in found if span.hook.startswith("weights, fp8(")]
    assert sorted(set(stages)) == ["decode", "encode", "wire"]
    assert stages.count("encode") == stages.count("wire") == stages.count("decode")


# ---- what else is in the trace -------------------------------------------------------------------


@on_processes
def test_operators_of_other_threads_are_in_the_trace(rank: int) -> None:
    model, options = model_of("module", 40)
    handle = attach(model, hooks.blockwise(bits=4), **options)
    step = stepping(model)
    # Rank 1 has sent nearly all when rank 0 begins. So its backward thread is done before it can
    # decode.
    first = next(model.parameters())
    said = first.register_hook(lambda _: dist.send(torch.zeros(1), 0)) if rank == 1 else None
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        step()
    if said is not None:
        said.remove()
    handle.remove()
    events = complete_events(profiler)
    decodes = [span for span in spans_in(events) if span.stage == "decode"]
    main = threading.get_native_id()
    assert decodes
    if rank == 1:
        assert any(span.thread != main for span in decodes)
    for span in decodes:  # the operators of other threads are there, too
        assert any(
            event["cat"] == "cpu_op"
            and event["tid"] == span.thread
            and span.begin <= event["ts"] <= span.end
            for event in events
        )
    names = {event.key for event in profiler.key_averages()}
    for stage in ONCE:
        assert f"commhook::{stage} (bucket 0, blockwise(bits=4))" in names


# ---- no profiler, or none any more ---------------------------------------------------------------


def test_nothing_is_done_without_a_profiler() -> None:
    def label() -> str:
        raise AssertionError("nobody may ask for the label")

    assert spans.spans_of(label) is None
    assert spans.with_spans(label) is label


def test_a_span_may_outlive_the_profiler() -> None:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    other: torch.futures.Future[Tensor] = torch.futures.Future()
    with profile(activities=[ProfilerActivity.CPU]):
        of_bucket = spans.spans_of(lambda: "bucket 0, late")
        assert of_bucket is not None
        with spans.active(of_bucket):
            for each in (future, other):
                with spans.on_the_wire() as span:
                    assert span.until(each) is each
            callback = spans.with_spans(lambda: torch.ones(3).sum())
    thread = threading.Thread(target=lambda: future.set_result(callback()))
    thread.start()
    thread.join()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        other.set_result(callback())
        torch.ones(2)
    events = complete_events(profiler)
    assert not spans_in(events)
    assert any(event["name"] == "aten::ones" for event in events)


def test_a_span_ends_before_the_next_stage_begins() -> None:
    """Other threads see that a Future is complete before its callbacks have run."""
    sent: torch.futures.Future[Tensor] = torch.futures.Future()
    is_decoded, is_complete = threading.Event(), threading.Event()

    def earlier(future: torch.futures.Future[Tensor]) -> None:
        is_complete.set()
        assert is_decoded.wait(10)

    sent.add_done_callback(earlier)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        of_bucket = spans.spans_of(lambda: "bucket 0, late")
        with spans.active(of_bucket), spans.on_the_wire() as span:
            span.until(sent)
        thread = threading.Thread(target=lambda: sent.set_result(torch.ones(1)))
        thread.start()
        assert is_complete.wait(10)
        with spans.active(of_bucket), spans.timed(None, "decode"):
            is_decoded.set()
            thread.join()
    found = stages_by_bucket(spans_in(complete_events(profiler)), "late")
    assert found == {0: ["wire", "decode"]}


def test_a_collective_that_cannot_be_issued_ends_its_span() -> None:
    def fail() -> Any:
        raise ValueError("no")

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        of_bucket = spans.spans_of(lambda: "bucket 0, failing")
        with spans.active(of_bucket), pytest.raises(ValueError, match="no"):
            with spans.on_the_wire() as span:
                span.until(fail())
    (span,) = spans_in(complete_events(profiler))
    assert (span.stage, span.bucket, span.hook) == ("wire", 0, "failing")


@pytest.mark.parametrize("runner", ["compile", "context"])
@on_processes
def test_compiled_code_is_the_same_under_a_profiler(rank: int, runner: str) -> None:
    mode = Mode("module", runner, backend="aot_eager")
    gradients = []
    for profiles in (False, True):
        torch._dynamo.reset()
        model = network()
        handle = attach(model, hooks.error_feedback(hooks.blockwise()), **mode.attach_options)
        with mode.step_function(model) as step:
            inputs = torch.full((2, 40), rank + 1.0)
            if profiles:
                steps = profiled_steps(lambda: step(inputs), STEPS)  # noqa: B023
                buckets = len(handle.stats().buckets)
                for found in steps:
                    expected = dict.fromkeys(range(buckets), TWICE)
                    assert stages_by_bucket(found, str(handle.hook)) == expected
            else:
                for _ in range(STEPS):
                    step(inputs)
        gradients.append([parameter.grad for parameter in model.parameters()])
        handle.remove()
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def comm_hooks() -> str:
    return library("comm_hooks")


class Sharded(hooks.Hook):
    """A user's, which calls collectives of ``torch.distributed``."""

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return of_a_work(None, bucket)

    def average_shard(self, bucket: ShardedBucket) -> torch.futures.Future[Tensor]:
        buffer, group = bucket.buffer().mul_(bucket.scale), bucket.process_group()
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda _: bucket.shard.copy_(buffer.chunk(2)[group.rank()]))


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        ("ddp", "allreduce()"),
        ("ddp", "cpp('allreduce')"),
        ("ddp", "cpp('gradients')"),
        ("ddp", "cpp('torch_allreduce')"),
        ("ddp", "blockwise(bits=4)"),
        ("ddp", "of_a_work"),
        ("module", "allreduce()"),
        ("module", "cpp('allreduce')"),
        ("module", "cpp('gradients')"),
        ("module", "of_a_work"),
        ("module", "randomk(density=0.1)"),
        ("fsdp-2", "blockwise(bits=4)"),
        ("fsdp-2", "Sharded()"),
        ("hsdp-2", "of_a_work"),
        ("replicate-2", "allreduce()"),
    ],
)
@on_processes
def test_works_of_gloo_have_no_spans(rank: int, kind: str, hook: str, comm_hooks: str) -> None:
    """The Future of a Work completes before its span ends, and then the profile may be over.

    PyTorch writes the end of such a span to freed memory.
    """
    model, options = model_of(kind, 40)
    load_cpp_hooks(comm_hooks)
    own = {"of_a_work": of_a_work, "Sharded()": Sharded()}
    handle = attach(model, own.get(hook) or parse_hook(hook), **options)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(torch.full((2, 40), rank + 1.0)).square().sum().backward()
    handle.remove()
    names = {event["name"] for event in complete_events(profiler)}
    if kind != "replicate-2" and hook not in own:  # a Work may be complete at once
        assert any(name.startswith("commhook::wire") for name in names)
    assert not [name for name in names if name.startswith("gloo:")]
