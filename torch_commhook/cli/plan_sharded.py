"""Measures hooks on a sharded model, and predicts the time of a step with each.

Formulas give the bytes. A reduce-scatter or an all-gather sends ``(W - 1) / W`` of one encoding.
Across replicas, the hook's all-reduce sends a shard. ``fully_shard`` on the CPU does not overlap
communication with computation. So a step takes the sum of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch_commhook import hooks
from torch_commhook.cli.formatting import one_line
from torch_commhook.cli.sharded_options import check_hook_fits, check_weights
from torch_commhook.hooks.expressions import parse_codec, parse_hook
from torch_commhook.planning.hook_work import (
    MOST_MEASURED,
    HookError,
    count_bytes,
    counted_elements,
    gradients_of,
    measure_pass,
    measure_seconds,
    median_seconds,
    unwrap_hook,
)
from torch_commhook.planning.model import square_shapes
from torch_commhook.planning.schedule import PAYLOAD

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
class Measured:
    """The work of a hook in one step, over any link.

    Attributes:
        hook: the hook as text, with its ``shard_hook`` and ``weights``.
        scattered_bytes: bytes that each rank sends in reduce-scatters.
        forward_bytes: bytes that it sends in the all-gathers of the forward.
        backward_bytes: bytes that it sends in the all-gathers of the backward.
        reduced_bytes: bytes that it sends across replicas.
        compute_seconds: the time to encode, add up and decode.
        error_bytes: bytes of the hook's error memory on each rank.
        shard_error_bytes: bytes of the shard hook's error memory on each rank.
    """

    hook: str
    scattered_bytes: float
    forward_bytes: float
    backward_bytes: float
    reduced_bytes: float
    compute_seconds: float
    error_bytes: float
    shard_error_bytes: float


@dataclass(frozen=True, kw_only=True)
class Cost(Measured):
    """The predicted cost of a hook in one step.

    Attributes:
        wire_seconds: the time of the bytes on the links, with the headers of their packets.
        step_seconds: the time of the step.
        ratio: ``step_seconds`` over that of the first row.
    """

    wire_seconds: float
    step_seconds: float
    ratio: float


@dataclass(frozen=True)
class _Part:
    """A part of a step's communication.

    Attributes:
        sent: bytes that a rank sends.
        seconds: the time to encode, add up and decode.
        error: bytes of error memory.
    """

    sent: float
    seconds: float = 0.0
    error: float = 0.0


def measure_sharded(
    texts: Sequence[str],
    layout: Layout,
    *,
    shard_hook: str | None = None,
    weights: str | None = None,
) -> list[Measured]:
    """Measure the time and the bytes of each hook.

    Args:
        texts: the hooks, as ``train`` takes them; ``none`` stands for ``allreduce()``.
        layout: the distribution of the model.
        shard_hook: the hook of the reduce-scatters, if the hooks average across replicas.
        weights: the codec of the all-gathers.

    Returns:
        The measurements of each hook. If ``shard_hook`` or ``weights`` is given, the first hook
        without them comes before.

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
    found: list[Measured] = []
    for text, part in zip(texts, parts, strict=True):
        if compressed and not found:
            found.append(_measured(text, part, plain, _gathers(None, layout), layout))
        label = ", ".join([text, *compressed])
        found.append(_measured(label, part, scatters, gathers, layout))
    return found


def _measured(
    label: str, part: _Part, scatters: _Part, gathers: tuple[_Part, _Part], layout: Layout
) -> Measured:
    on_shards = layout.replicas is None
    others = gathers if on_shards else (*gathers, scatters)
    return Measured(
        hook=label,
        scattered_bytes=part.sent if on_shards else scatters.sent,
        forward_bytes=gathers[0].sent,
        backward_bytes=gathers[1].sent,
        reduced_bytes=0.0 if on_shards else part.sent,
        compute_seconds=part.seconds + sum(each.seconds for each in others),
        error_bytes=part.error,
        shard_error_bytes=0.0 if on_shards else scatters.error,
    )


def plan_sharded(
    measured: Sequence[Measured],
    *,
    layout: Layout,
    bits_per_second: float,
    inner_bits_per_second: float,
    compute_seconds: float = 0.0,
) -> list[Cost]:
    """Predict the cost of each hook. Ratios compare with the first one.

    Args:
        measured: the result of :func:`measure_sharded`.
        layout: the distribution of the model.
        bits_per_second: the rate of each rank's link, each way; with replicas, between replicas.
        inner_bits_per_second: the rate within a replica, and among the ranks of ``after_forward``
            if these are fewer than the shards.
        compute_seconds: the time of a step without communication.
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
        costs.append(Cost(**asdict(each), wire_seconds=wire, step_seconds=step, ratio=ratio))
    return costs


# ---- the parts of a step -------------------------------------------------------------------------


def _tried(part: Callable[[Any, Layout], _Part], text: str, layout: Layout) -> _Part:
    """Measure a part with a hook, as the mean over many steps."""
    try:
        hook = unwrap_hook(_parsed(text))
        found = part(hook.hook, layout)
        elements = layout.shard_elements
        passes = sum(measure_pass(each, elements, elements) for each in hook.around)
        return _Part(found.sent / hook.every, (found.seconds + passes) / hook.every, found.error)
    except Exception as error:  # a user's hook may raise anything
        reason = one_line(error)
        if "attach(model, hook)" in reason:
            reason = "it needs more of the model than its size"
        raise HookError(f"the hook {text!r} can't be planned: {reason}") from error


def _parsed(text: str) -> Any:
    """Parse a hook; ``none`` gives ``allreduce()``: plain ``fully_shard`` averages alike."""
    hook = parse_hook(text)
    return hooks.allreduce() if hook is None else hook


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
    import torch

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
    from torch_commhook.testing import run_ranks

    ranks = layout.shards
    counted = -(-counted_elements(layout.elements, ranks) // ranks)
    share = layout.elements / (counted * ranks)
    measured = min(layout.elements, MOST_MEASURED)

    def count(rank: int) -> tuple[float, float]:
        return _Scatter(hook, [counted] * ranks, rank).sent()

    def measure(rank: int) -> float:
        return median_seconds(_Scatter(hook, [measured], rank).average)

    if ranks == 1:  # fully_shard then calls no reduce-scatter
        return _Part(0.0)
    sent, error = run_ranks(count, ranks, timeout=600)[0]
    seconds = run_ranks(measure, 1, timeout=600)[0] * layout.elements / measured
    return _Part(sent * share, seconds, error * share)


class _Scatter:
    """One rank's reduce-scatter of the gradient of one parameter.

    Args:
        hook: the hook that averages the gradient.
        counts: the number of elements of each rank's chunk, the same for all ranks.
        rank: the rank in the default process group.
    """

    def __init__(self, hook: Any, counts: list[int], rank: int) -> None:
        import torch

        from torch_commhook.memory.sharded_memory import ShardedParameter, UnshardedMemory
        from torch_commhook.step.attached_hook import Attached

        ranks, numel = len(counts), sum(counts)
        cpu = torch.device("cpu")
        form = ShardedParameter("p", torch.Size([numel]), 0, ranks, torch.float32, cpu)
        memory = UnshardedMemory()
        memory.set_sharded([form], rank=rank)
        attached = Attached.checked(copy.deepcopy(hook), None, memory)
        self._hook = attached.hook
        self._ranks = ranks
        self._stand_ins = memory.shards_of(["p"])
        self._memory = attached.memory_of(self._stand_ins, 0)
        self._gradients = torch.randn(numel, dtype=torch.float32, device=cpu)
        self._shard = torch.empty(counts[rank], dtype=torch.float32, device=cpu)

    def average(self) -> None:
        """Do one step."""
        import torch.distributed as dist

        from torch_commhook.collectives import resolve_group
        from torch_commhook.collectives.futures import driven
        from torch_commhook.memory.sharded_bucket import ShardedBucket

        bucket = ShardedBucket(
            self._stand_ins,
            memory=self._memory,
            shard=self._shard,
            scale=1.0 / self._ranks,
            op=dist.ReduceOp.AVG,
            buffer=self._gradients,
            process_group=resolve_group(),
        )
        driven(self._hook.average_shard(bucket)).wait()  # type: ignore[attr-defined]

    def sent(self) -> tuple[float, float]:
        """The bytes that a step sends, and the bytes of the error memory."""
        from torch_commhook.metrics import WireMeter, counting

        meter = WireMeter()
        with counting(meter):
            self.average()
        return meter.bytes_sent, _error_bytes(self._memory)


def _reduce(hook: Any, layout: Layout) -> _Part:
    """Measure the average of a shard across replicas with a hook."""
    assert layout.replicas is not None
    elements = layout.shard_elements
    if layout.replicas == 1:
        return _Part(0.0)
    sent = count_bytes(hook, elements, layout.replicas, layout.shards)
    measured = min(elements, MOST_MEASURED)
    shapes = square_shapes(measured, elements * layout.shards, layout.shards)
    seconds = measure_seconds(hook, elements, shapes)
    return _Part(sent, seconds, _replica_error_bytes(hook, layout))


def _replica_error_bytes(hook: Any, layout: Layout) -> float:
    from torch_commhook.memory.sharded_memory import ReplicaMemory
    from torch_commhook.step.attached_hook import Attached

    assert layout.replicas is not None
    elements = layout.shard_elements
    counted = counted_elements(elements, layout.replicas)
    shards = gradients_of(counted, layout.elements, layout.shards)
    memory = ReplicaMemory()
    named = [(f"p{number}", shard) for number, shard in enumerate(shards)]
    memory.set_parameters(named, rank=0, world_size=layout.replicas)
    attached = Attached.checked(copy.deepcopy(hook), None, memory)
    return _error_bytes(attached.memory_of(shards, 0)) * elements / counted


def _error_bytes(memory: Any) -> float:
    """The bytes of error memory in a bucket's memory."""
    if memory is None:
        return 0.0
    own = sum(tensor.nbytes for name, tensor in memory.tensors.items() if "error" in name)
    return float(own) + sum(map(_error_bytes, memory.parts.values()))
