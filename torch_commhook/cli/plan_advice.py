"""Recommends a hook: the mildest one that is clearly faster than all milder ones.

The effect of a hook on the loss is that of its kind, as measured with the transformer of ``train``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from torch_commhook import codecs, hooks
from torch_commhook.cli.default_hooks import OF_UPDATES
from torch_commhook.cli.plan_numbers import say_seconds
from torch_commhook.cli.report import format_bytes
from torch_commhook.hooks.expressions import is_file_reference, parse_hook


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


class Row(Protocol):
    """A row of the table."""

    @property
    def hook(self) -> str:
        """The hook as text."""

    @property
    def step_seconds(self) -> float:
        """The time of a step."""

    @property
    def wire_seconds(self) -> float:
        """The time of the bytes on the link."""


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
    """The known effect of a hook on the loss.

    Args:
        text: the hook, as ``train`` takes it.
        optimizer: ``adamw`` or ``sgd``.
    """
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
    kind = _kind_of(hook)
    if kind is None:
        return Verdict(Loss.UNKNOWN)
    return _of_kind(kind, optimizer, has_feedback)


def _kind_of(hook: Any) -> int | None:
    if isinstance(hook, (hooks.compressed, hooks.hierarchical)):
        if isinstance(hook.codec, codecs.blockwise):
            return _BITS[hook.codec.bits]
        return _CODECS.get(type(hook.codec))
    return _KINDS.get(type(hook))


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

    Attributes:
        hook: the hook as text.
        reason: the recommendation and its reason, in sentences.
        warnings: sentences about the hooks that hurt the loss.
    """

    hook: str
    reason: str
    warnings: list[str]


def advise(
    rows: Sequence[Row], sent: Sequence[float], compute_seconds: float, optimizer: str
) -> Advice:
    """Recommend one of some hooks.

    Args:
        rows: the hooks, the plain all-reduce first.
        sent: the bytes that a rank sends in a step, with each hook.
        compute_seconds: the time of a step without communication.
        optimizer: ``adamw`` or ``sgd``.
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
    bytes_of = {row.hook: count for row, count in zip(rows, sent, strict=True)}
    if chosen is plain:
        reason = _stay(plain, rows, compute_seconds)
    else:
        reason = _take(chosen, plain, bytes_of, compute_seconds)
    loss = verdicts[chosen.hook].loss
    if loss is Loss.APART:
        reason += " Ranks then take steps apart, which changes the training: compare the loss."
    elif loss is Loss.MILD:
        reason += " Compare the loss, which may suffer a little."
    return Advice(chosen.hook, reason, _warnings(verdicts))


def judge_row(label: str, optimizer: str) -> Verdict:
    """The worse verdict of a row's hook and of its ``shard_hook``.

    Args:
        label: the text of the row: a hook, and possibly a ``shard_hook`` and ``weights``.
        optimizer: ``adamw`` or ``sgd``.
    """
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


def _take(chosen: Row, plain: Row, sent: dict[str, float], compute: float) -> str:
    saved = plain.step_seconds - chosen.step_seconds
    is_wire = plain.wire_seconds - chosen.wire_seconds >= _MOSTLY * saved
    why = ", since a rank" if is_wire else ". Most of the difference is delays or computing; a rank"
    return (
        f"Take {chosen.hook}: a step of {say_seconds(chosen.step_seconds)} instead of "
        f"{say_seconds(plain.step_seconds)} with a plain all-reduce{why} sends "
        f"{format_bytes(sent[chosen.hook])} in a step instead of {format_bytes(sent[plain.hook])}: "
        f"{say_seconds(chosen.wire_seconds)} on the link instead of "
        f"{say_seconds(plain.wire_seconds)}. Without communication a step takes "
        f"{say_seconds(compute)}."
    )


def _warnings(verdicts: dict[str, Verdict]) -> list[str]:
    """Each warning once, after its hooks."""
    of_reason: dict[str, list[str]] = {}
    for hook, verdict in verdicts.items():
        if verdict.warning is not None:
            of_reason.setdefault(verdict.warning, []).append(hook)
    return [f"{'; '.join(found)}: {reason}" for reason, found in of_reason.items()]
