"""What ``plan`` says of hooks: which one it recommends, and how they do on sharded models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from torch_commhook import codecs, hooks, planning
from torch_commhook.cli.plan_parser import say_seconds
from torch_commhook.cli.report import format_bytes
from torch_commhook.cli.train_config import OF_UPDATES, check_hook_fits, check_weights
from torch_commhook.collectives.futures import await_lazy
from torch_commhook.collectives.gloo_groups import resolve_group
from torch_commhook.hooks.expressions import is_file_reference, parse_codec, parse_hook
from torch_commhook.memory.bucket_memory import BucketMemory, ShardedBucket
from torch_commhook.memory.sharded_memory import (
    ReplicaMemory,
    ShardedParameter,
    WholeGradientMemory,
)
from torch_commhook.metrics import WireMeter, counting
from torch_commhook.planning.model import (
    MOST_MEASURED,
    HookError,
    counted_elements,
    measure_pass,
    measure_seconds,
    median_seconds,
    random_gradients,
    record_traffic,
    square_shapes,
    unwrap_hook,
)
from torch_commhook.step.attached_hook import Attached
from torch_commhook.step.link import PAYLOAD
from torch_commhook.testing import run_ranks

# ---- recommends a hook: the mildest one that is clearly faster than all milder ones --------------
#
# The effect of a hook on the loss is that of its kind, as measured with the transformer of
# ``train``.


class Loss(IntEnum):
    """The effect of a hook on the loss, from none to harmful."""

    AS_PLAIN = 0  #: as with an all-reduce in float32, within the difference between seeds
    MILD = 1  #: a few percent more in the beginning
    APART = 2  #: ranks take steps apart, which changes the training
    UNKNOWN = 3  #: a user's hook
    HURTS = 4


#: A hook must be this many times as fast as the milder one chosen so far.
_LEAST_GAIN = {Loss.AS_PLAIN: 1.15, Loss.MILD: 1.3, Loss.APART: 1.5}

#: Fewer bytes are the reason for a shorter step if the link explains this share of the saved time.
_MOSTLY = 0.5


@dataclass(frozen=True)
class Verdict:
    """The known effect of a hook on the loss.

    Attributes:
        loss: the effect.
        coarse: the order among hooks with the same ``loss``; larger values are more harmful.
        warning: the reason for the harm, in sentences; None if there is none.
    """

    loss: Loss
    coarse: int = 0
    warning: str | None = None


#: A row of the table.
Row: TypeAlias = "planning.Cost | Cost"


# ---- the effect of hooks -------------------------------------------------------------------------

_EXACT, _CAST, _EIGHT_BITS, _UPDATES, _FOUR_BITS, _LOW_RANK, _FEW, _BIT = range(8)
_KINDS: dict[type, int] = {
    hooks.allreduce: _EXACT,
    hooks.cast: _CAST,
    hooks.adaptive: _FOUR_BITS,
    hooks.powersgd: _LOW_RANK,
}
_CODECS: dict[type, int] = {
    codecs.fp8: _EIGHT_BITS,
    codecs.topk: _FEW,
    codecs.chunk_topk: _FEW,
    codecs.randomk: _FEW,
    codecs.sign: _BIT,
}
_BITS = {8: _EIGHT_BITS, 4: _FOUR_BITS, 2: _BIT}

_UNDER_ADAMW = (
    "below four bits error feedback on gradients hurts under AdamW, which mistakes late errors for "
    "large gradients. train's transformer, after 61 steps: loss 3.33 with allreduce(), 4.01 "
    "with topk(0.01), 5.00 with error_feedback(topk(0.01)), 6.90 with error_feedback(sign())."
)
_UPDATES_INSTEAD = f"{OF_UPDATES.format(hook='HOOK')} compresses the updates instead: 3.35."
_COARSE = (
    "most of each gradient is lost. train's transformer under AdamW, after 61 steps: loss 3.33 "
    "with allreduce(), 4.01 with topk(0.01)."
)
_FORGETS = "most of each gradient is lost, and never sent later: use error_feedback."


def judge(text: str, optimizer: str) -> Verdict:
    """The known effect of a hook, as ``train`` takes it, on the loss under an optimizer."""
    if is_file_reference(text):  # parsing it would run the user's file again
        return Verdict(Loss.UNKNOWN)
    hook = parse_hook(text)
    return Verdict(Loss.AS_PLAIN) if hook is None else _judge(hook, optimizer)


def _judge(hook: Any, optimizer: str, *, has_feedback: bool = False) -> Verdict:
    if isinstance(hook, hooks.error_feedback):
        return _judge(hook.hook, optimizer, has_feedback=True)
    if isinstance(hook, (hooks.after, hooks.clip, hooks.momentum)):
        return _judge(hook.hook, optimizer, has_feedback=has_feedback)
    if isinstance(hook, hooks.local_sgd):
        # It averages updates of parameters, not gradients, under any optimizer.
        inside = _judge(hook.hook, "sgd")
        least, coarse = (Loss.APART, inside.coarse) if hook.H > 1 else (Loss.MILD, _UPDATES)
        return Verdict(max(inside.loss, least), coarse, inside.warning)
    if isinstance(hook, hooks.policy):
        return max(
            (_judge(each, optimizer) for each in hook.hooks_inside()),
            key=lambda each: (each.loss, each.coarse),
        )
    kind = _KINDS.get(type(hook))
    if isinstance(hook, (hooks.compressed, hooks.hierarchical)):
        codec = hook.codec
        kind = _CODECS.get(type(codec))
        if isinstance(codec, codecs.blockwise):
            kind = _BITS[codec.bits]
    return Verdict(Loss.UNKNOWN) if kind is None else _of_kind(kind, optimizer, has_feedback)


def _of_kind(kind: int, optimizer: str, has_feedback: bool) -> Verdict:
    if kind <= _EIGHT_BITS:
        return Verdict(Loss.AS_PLAIN, kind)
    if kind == _FOUR_BITS:  # 3.38 after 61 steps; 1.566 after 1,000 with feedback, 1.573 without
        return Verdict(Loss.AS_PLAIN if has_feedback else Loss.MILD, kind)
    if has_feedback:
        if optimizer == "adamw":
            return Verdict(Loss.HURTS, kind, f"{_UNDER_ADAMW} {_UPDATES_INSTEAD}")
        return Verdict(Loss.MILD, kind)
    if kind == _LOW_RANK and optimizer == "adamw":  # 3.47
        return Verdict(Loss.MILD, kind)
    warning = f"{_COARSE} {_UPDATES_INSTEAD}" if optimizer == "adamw" else _FORGETS
    return Verdict(Loss.HURTS, kind, warning)


# ---- the advice ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """The recommended hook.

    ``reason`` has the recommendation and its reason, and ``warnings`` the hooks that hurt the loss.
    """

    hook: str
    reason: str
    warnings: list[str]


def advise(rows: Sequence[Row], compute_seconds: float, optimizer: str) -> Advice:
    """Recommend one of some hooks, of which the first is the plain all-reduce.

    ``compute_seconds`` is the time of a step without communication.
    """
    verdicts = {row.hook: judge_row(row.hook, optimizer) for row in rows}
    plain = rows[0]
    by_mildness = sorted(
        rows, key=lambda row: (verdicts[row.hook].loss, verdicts[row.hook].coarse, row.step_seconds)
    )
    chosen = plain
    for row in by_mildness:
        gain = _LEAST_GAIN.get(verdicts[row.hook].loss)
        if gain is not None and row.step_seconds * gain <= chosen.step_seconds:
            chosen = row
    if chosen is plain:
        reason = _stay(plain, rows, compute_seconds)
    else:
        reason = _take(chosen, plain, compute_seconds)
    loss = verdicts[chosen.hook].loss
    if loss is Loss.APART:
        reason += " Ranks then take steps apart, which changes the training: compare the loss."
    elif loss is Loss.MILD:
        reason += " Compare the loss, which may suffer a little."
    of_warning: dict[str, list[str]] = {}  # its hooks
    for hook, verdict in verdicts.items():
        if verdict.warning is not None:
            of_warning.setdefault(verdict.warning, []).append(hook)
    warnings = [f"{'; '.join(found)}: {warning}" for warning, found in of_warning.items()]
    return Advice(chosen.hook, reason, warnings)


def judge_row(label: str, optimizer: str) -> Verdict:
    """The worse verdict of a row's hook and of the ``shard_hook`` in its label."""
    shard_hook = label.partition(", shard_hook=")[2].partition(", weights=")[0]
    texts = [own_text(label), *[shard_hook] * bool(shard_hook)]
    return max((judge(text, optimizer) for text in texts), key=lambda each: each.loss)


def own_text(label: str) -> str:
    """The hook of a row, without its ``shard_hook`` and ``weights``."""
    return label.partition(", shard_hook=")[0].partition(", weights=")[0]


def _stay(plain: Row, rows: Sequence[Row], compute: float) -> str:
    fastest = min(rows, key=lambda row: row.step_seconds)
    text = (
        f"Take {plain.hook}, the plain all-reduce: a step takes {say_seconds(plain.step_seconds)}"
    )
    if len(rows) == 1:
        return f"{text}, {say_seconds(compute)} of it computing. No other hook was compared."
    if fastest.step_seconds * _LEAST_GAIN[Loss.MILD] > plain.step_seconds:
        return f"{text}, {say_seconds(compute)} of it computing, and no hook makes it much shorter."
    return (
        f"{text}. Only hooks that hurt the loss, or have an unknown effect on it, are faster: "
        f"{fastest.hook} takes {say_seconds(fastest.step_seconds)}."
    )


def _take(chosen: Row, plain: Row, compute: float) -> str:
    saved = plain.step_seconds - chosen.step_seconds
    is_wire = plain.wire_seconds - chosen.wire_seconds >= _MOSTLY * saved
    why = ", since a rank" if is_wire else ". Most of the difference is delays or computing; a rank"
    return (
        f"Take {chosen.hook}: a step of {say_seconds(chosen.step_seconds)} instead of "
        f"{say_seconds(plain.step_seconds)} with a plain all-reduce{why} sends "
        f"{format_bytes(chosen.bytes_sent)} in a step instead of {format_bytes(plain.bytes_sent)}: "
        f"{say_seconds(chosen.wire_seconds)} on the link instead of "
        f"{say_seconds(plain.wire_seconds)}. Without communication a step takes "
        f"{say_seconds(compute)}."
    )


# ---- measures hooks on a sharded model, and predicts the time of a step with each ----------------
#
# Formulas give the bytes. A reduce-scatter or an all-gather sends ``(W - 1) / W`` of one encoding.
# Across replicas, the hook's all-reduce sends a shard. ``fully_shard`` on the CPU does not overlap
# communication with computation. So a step takes the sum of both.


#: The bytes of a parameter or a gradient, in float32.
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class Layout:
    """The distribution of a sharded model over the ranks.

    Attributes:
        elements: the number of the model's parameters.
        shards: the number of ranks that the parameters are sharded over.
        replicas: the number of replicas that the hook averages across; None if the hook takes part
            in reduce-scatters.
        after_forward: the number of ranks that parameters are sharded over between forward and
            backward: ``shards`` if the forward frees them, 1 if it keeps them.
    """

    elements: int
    shards: int
    replicas: int | None
    after_forward: int

    @property
    def shard_elements(self) -> int:
        """The number of elements of a rank's shard."""
        return -(-self.elements // self.shards)


@dataclass(frozen=True)
class Cost:
    """The work of a hook in one step over any link, and its predicted cost over one.

    Attributes:
        hook: the hook as text, with its ``shard_hook`` and ``weights``.
        scattered_bytes: bytes that each rank sends in reduce-scatters.
        forward_bytes: bytes that it sends in the all-gathers of the forward.
        backward_bytes: bytes that it sends in the all-gathers of the backward.
        reduced_bytes: bytes that it sends across replicas.
        compute_seconds: the time to encode, add up and decode.
        error_bytes: bytes of the hook's error memory on each rank.
        shard_error_bytes: bytes of the shard hook's error memory on each rank.
        wire_seconds: the time of the bytes on the links, with the headers of their packets.
        step_seconds: the time of the step.
        ratio: ``step_seconds`` over that of the first row.
    """

    hook: str
    scattered_bytes: float
    forward_bytes: float
    backward_bytes: float
    reduced_bytes: float
    compute_seconds: float
    error_bytes: float
    shard_error_bytes: float
    wire_seconds: float = 0.0
    step_seconds: float = 0.0
    ratio: float = 1.0

    @property
    def bytes_sent(self) -> float:
        """The bytes that each rank sends in all."""
        return self.scattered_bytes + self.forward_bytes + self.backward_bytes + self.reduced_bytes


@dataclass(frozen=True)
class _Part:
    """A part of a step's communication: bytes sent, seconds of computing, bytes of error memory."""

    sent: float
    seconds: float = 0.0
    error: float = 0.0


def measure_sharded(
    texts: Sequence[str],
    layout: Layout,
    *,
    shard_hook: str | None = None,
    weights: str | None = None,
) -> list[Cost]:
    """Measure the time and the bytes of each hook, as ``train`` takes them.

    ``shard_hook`` is the hook of the reduce-scatters if the hooks average across replicas, and
    ``weights`` the codec of the all-gathers. With one of these, the first hook without them comes
    before the others.

    Raises:
        HookExpressionError: a text names no hook or codec.
        ShardedOptionError: a hook or codec does not fit the model.
        HookError: a hook fails when it runs.
    """
    on_shards = layout.replicas is None
    for text in texts:
        check_hook_fits(text, on_shards=on_shards)
    if shard_hook is not None:
        check_hook_fits(shard_hook, on_shards=True)
    if weights is not None:
        check_weights(weights)
    plain = _Part(_NUMBER_BYTES * layout.shard_elements * (layout.shards - 1))
    scatters = plain if shard_hook is None else _tried(_scatter, shard_hook, layout)
    parts = [_tried(_scatter if on_shards else _reduce, text, layout) for text in texts]
    given = {"shard_hook": shard_hook, "weights": weights}
    compressed = [f"{name}={value}" for name, value in given.items() if value is not None]
    gathers = _gathers(weights, layout)
    found: list[Cost] = []
    for text, part in zip(texts, parts, strict=True):
        if compressed and not found:
            found.append(_measured(text, part, plain, _gathers(None, layout), layout))
        label = ", ".join([text, *compressed])
        found.append(_measured(label, part, scatters, gathers, layout))
    return found


def _measured(
    label: str, part: _Part, scatters: _Part, gathers: tuple[_Part, _Part], layout: Layout
) -> Cost:
    """The figures of a hook, from those of the parts of a step; ``part`` is the hook's own."""
    scatters, reduced = (part, _Part(0.0)) if layout.replicas is None else (scatters, part)
    return Cost(
        hook=label,
        scattered_bytes=scatters.sent,
        forward_bytes=gathers[0].sent,
        backward_bytes=gathers[1].sent,
        reduced_bytes=reduced.sent,
        compute_seconds=sum(each.seconds for each in (scatters, reduced, *gathers)),
        error_bytes=part.error,
        shard_error_bytes=0.0 if part is scatters else scatters.error,
    )


def plan_sharded(
    measured: Sequence[Cost],
    *,
    layout: Layout,
    bits_per_second: float,
    inner_bits_per_second: float,
    compute_seconds: float = 0.0,
) -> list[Cost]:
    """Predict the cost of each hook. Ratios compare with the first one.

    Each rank's link has ``bits_per_second`` each way, with replicas between these. The inner rate
    is that within a replica, and among the ranks of ``after_forward`` if they are fewer than the
    shards.
    """
    costs: list[Cost] = []
    for each in measured:
        inner, outer = 0.0, each.reduced_bytes
        if layout.replicas is not None:
            inner += each.scattered_bytes + each.forward_bytes + each.backward_bytes
        else:
            outer += each.scattered_bytes + each.forward_bytes
            if layout.after_forward == layout.shards:
                outer += each.backward_bytes
            else:
                inner += each.backward_bytes
        wire = (outer / bits_per_second + inner / inner_bits_per_second) * 8 / PAYLOAD
        step = compute_seconds + each.compute_seconds + wire
        first = costs[0].step_seconds if costs else step
        ratio = step / first if first else 1.0
        costs.append(replace(each, wire_seconds=wire, step_seconds=step, ratio=ratio))
    return costs


# ---- the parts of a step -------------------------------------------------------------------------


def _tried(part: Callable[[Any, Layout], _Part], text: str, layout: Layout) -> _Part:
    """Measure a part with a hook, as the mean over many steps."""
    try:
        parsed = parse_hook(text)
        # Without a hook, fully_shard averages as allreduce() does.
        hook = unwrap_hook(hooks.allreduce() if parsed is None else parsed)
        found = part(hook.hook, layout)
        elements = layout.shard_elements
        passes = sum(measure_pass(each, elements, elements) for each in hook.around)
        return _Part(found.sent / hook.every, (found.seconds + passes) / hook.every, found.error)
    except Exception as error:  # a user's hook may raise anything
        unknown = "it needs more of the model than its size"
        raise HookError.of(text, error, unknown) from error


def _gathers(weights: str | None, layout: Layout) -> tuple[_Part, _Part]:
    """The all-gathers of the forward, and those of the backward."""
    codec = None if weights is None else parse_codec(weights)
    ranks, elements = layout.shards, layout.shard_elements
    full = _Part(_NUMBER_BYTES * elements * (ranks - 1))
    if codec is not None:
        full = _Part(codec.nbytes(elements) * (ranks - 1), _codec_seconds(codec, layout))
    if layout.after_forward == ranks:
        return full, full
    # Only gathers among all shards use the codec; fewer ranks gather uncompressed parameters.
    few = layout.after_forward
    return full, _Part(_NUMBER_BYTES * -(-layout.elements // few) * (few - 1))


def _codec_seconds(codec: Any, layout: Layout) -> float:
    """The seconds to encode a shard and to decode all shards."""
    own = max(1, min(layout.elements, MOST_MEASURED) // layout.shards)
    counts = [own] * layout.shards
    shard = torch.randn(own, dtype=torch.float32, device="cpu")
    message = torch.empty(codec.nbytes(own), dtype=torch.uint8, device="cpu")
    whole = torch.empty(own * layout.shards, dtype=torch.float32, device="cpu")

    codec.encode_chunks([shard], message, [own])
    messages = message.repeat(layout.shards)

    def gather() -> None:
        codec.encode_chunks([shard], message, [own])
        codec.decode_chunks(messages, [whole], counts)

    return median_seconds(gather) * layout.elements / whole.numel()


def _scatter(hook: Any, layout: Layout) -> _Part:
    """Measure the reduce-scatters with a hook."""
    ranks = layout.shards
    if ranks == 1:  # fully_shard then calls no reduce-scatter
        return _Part(0.0)
    counted = -(-counted_elements(layout.elements, ranks) // ranks)
    measured = min(layout.elements, MOST_MEASURED)

    def count(rank: int) -> tuple[float, float]:
        average, memory = _scattering(hook, counted, ranks, rank)
        meter = WireMeter()
        with counting(meter):
            average()
        return meter.bytes_sent, _error_bytes(memory)

    def measure(rank: int) -> float:
        return median_seconds(_scattering(hook, measured, 1, rank)[0])

    sent, error = run_ranks(count, ranks, timeout=600)[0]
    seconds = run_ranks(measure, 1, timeout=600)[0] * layout.elements / measured
    share = layout.elements / (counted * ranks)
    return _Part(sent * share, seconds, error * share)


def _scattering(
    hook: Any, elements: int, ranks: int, rank: int
) -> tuple[Callable[[], None], BucketMemory | None]:
    """A rank's reduce-scatter of the gradient of one parameter, as a function for each step.

    A rank's shard has ``elements`` elements. The second value is the hook's memory.
    """
    size, cpu = torch.Size([elements * ranks]), torch.device("cpu")
    form = ShardedParameter("p", size, 0, ranks, torch.float32, cpu)
    memories = WholeGradientMemory()
    memories.set_sharded([form], rank=rank)
    attached = Attached.checked(copy.deepcopy(hook), None, memories)
    placeholders = memories.shards_of(["p"])
    memory = attached.memory_of(placeholders, 0)
    gradients = torch.randn(size, dtype=torch.float32, device=cpu)
    shard = torch.empty(elements, dtype=torch.float32, device=cpu)

    def average() -> None:
        bucket = ShardedBucket(
            placeholders,
            memory=memory,
            shard=shard,
            scale=1.0 / ranks,
            op=dist.ReduceOp.AVG,
            buffer=gradients,
            process_group=resolve_group(),
        )
        await_lazy(attached.hook.average_shard(bucket)).wait()

    return average, memory


def _reduce(hook: Any, layout: Layout) -> _Part:
    """Measure the average of a shard across replicas with a hook."""
    assert layout.replicas is not None
    elements = layout.shard_elements
    if layout.replicas == 1:
        return _Part(0.0)
    sent, _ = record_traffic(hook, elements, layout.replicas, layout.shards)
    measured = min(elements, MOST_MEASURED)
    shapes = square_shapes(measured, elements * layout.shards, layout.shards)
    seconds = measure_seconds(hook, elements, shapes)
    counted = counted_elements(elements, layout.replicas)
    shards = random_gradients(square_shapes(counted, layout.elements, layout.shards))
    memories = ReplicaMemory()
    named = [(f"p{number}", shard) for number, shard in enumerate(shards)]
    memories.set_parameters(named, rank=0, world_size=layout.replicas)
    attached = Attached.checked(copy.deepcopy(hook), None, memories)
    error = _error_bytes(attached.memory_of(shards, 0)) * elements / counted
    return _Part(sent, seconds, error)


def _error_bytes(memory: BucketMemory | None) -> float:
    """The bytes of error memory in a bucket's memory."""
    if memory is None:
        return 0.0
    own = sum(tensor.nbytes for name, tensor in memory.tensors.items() if "error" in name)
    return float(own) + sum(map(_error_bytes, memory.parts.values()))
