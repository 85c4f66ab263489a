"""Different hooks for different parameters."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.buckets.layout import BucketLayout
from torch_commhook.codecs.base import CODECS
from torch_commhook.collectives.futures import completed, then_all
from torch_commhook.hooks.base import Hook, HookTraits, result_tensor
from torch_commhook.hooks.compressed import check_inner_hook, hook_of_codec
from torch_commhook.hooks.mean import allreduce
from torch_commhook.hooks.wrappers import error_feedback
from torch_commhook.memory.bucket_memory import BucketMemory, BucketWithMemory
from torch_commhook.memory.hook_memory import HookMemory
from torch_commhook.native import bucket_ops

_COMPARISON = re.compile(r"(dim|numel)\s*(<=|>=|==|<|>)\s*(\d+)")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}

#: The number of parameter names in an error.
_SHOWN = 5


class policy(Hook):  # noqa: N801 (a hook is written as it is called)
    """Average each parameter's gradient with the hook of the first rule that matches it.

    ::

        policy([("dim <= 1", allreduce()), ("*embed*", error_feedback(topk(0.01)))],
               error_feedback(blockwise()))

    Within a bucket, hooks send in the order of the rules. Parameters of one rule that share a
    bucket are sent together.

    Args:
        rules: pairs of a condition and a hook. A condition compares a parameter's ``dim`` or
            ``numel`` with a number, or is a pattern of its name with ``*``, ``?`` and ``[...]``.
            Patterns need an attached hook. By default vectors are averaged uncompressed, and
            embeddings (``*emb*``) send the largest hundredth of their values, with error feedback.
        default: the hook of parameters that match no rule. By default int8 with error feedback.

    Raises:
        TypeError: ``rules`` are no such pairs, or a hook is none of the library.
        ValueError: a condition cannot be parsed, or a hook needs the whole model; from
            :func:`torch_commhook.attach`: a pattern matches no parameter of the model.

    Example:
        >>> rules = [("dim <= 1", hooks.allreduce())]
        >>> hook = hooks.policy(rules, hooks.error_feedback(hooks.blockwise()))
        >>> gradients = [[torch.ones(64, 64), torch.ones(64)] for _ in range(2)]
        >>> simulate(hook, gradients).wire_bytes
        4416
    """

    _lets_stages_wait = True

    def __init__(
        self,
        rules: Sequence[tuple[str, Hook]] | None = None,
        default: Hook | None = None,
    ) -> None:
        super().__init__()
        self._has_default_rules = rules is None
        self._has_default_hook = default is None
        if rules is None:
            rules = [
                ("dim <= 1", allreduce()),
                ("*emb*", error_feedback(hook_of_codec(CODECS["topk"])())),
            ]
        if default is None:
            default = error_feedback(hook_of_codec(CODECS["blockwise"])())
        if isinstance(rules, str) or not isinstance(rules, Sequence):
            raise TypeError(
                "policy: rules must be a sequence of pairs of a condition and a hook, got "
                f"{type(rules).__qualname__}"
            )
        self.rules = [_checked_rule(i, rule) for i, rule in enumerate(rules)]
        self.default = _checked_hook("default", default)
        self._hooks = [*(hook for _, hook in self.rules), self.default]
        self.traits = replace(HookTraits.of_any(self._hooks), splits_buckets=True)

    def hooks_inside(self) -> Sequence[Hook]:
        return self._hooks

    def hook_for(self, name: str | None, parameter: Tensor) -> Hook:
        """Return the hook of a parameter.

        Raises:
            RuntimeError: a rule needs the parameter's name, which is None.
        """
        return self._hooks[self._number(name, parameter)]

    def _number(self, name: str | None, parameter: Tensor) -> int:
        for number, (condition, _) in enumerate(self.rules):
            if _meets(condition, name, parameter):
                return number
        return len(self.rules)

    def check_parameters(self, named: Sequence[tuple[str, Tensor]]) -> None:
        super().check_parameters(named)
        if self._has_default_rules:
            return
        for condition, _ in self.rules:
            is_pattern = _COMPARISON.fullmatch(condition.strip()) is None
            if is_pattern and not any(_meets(condition, name, p) for name, p in named):
                names = ", ".join(repr(name) for name, _ in named[:_SHOWN])
                more = ", ..." if len(named) > _SHOWN else ""
                raise ValueError(
                    f"policy: no parameter matches {condition!r}; the model has {names}{more}"
                )

    def prepare(self, memory: BucketMemory) -> None:
        names = memory.names
        members: dict[int, list[int]] = {}
        for i, parameter in enumerate(memory.parameters):
            name = None if names is None else names[i]
            members.setdefault(self._number(name, parameter), []).append(i)
        for number, places in sorted(members.items()):
            self._hooks[number].prepare(memory.part(str(number), places))

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        memory = self.memory(bucket)
        if bucket.is_sparse():
            ((only, part),) = memory.parts.items()  # of one parameter
            return self._hooks[int(only)].average(BucketWithMemory.over(bucket, part))
        gradients = _gradients(bucket)
        group = self.group(bucket)
        futures: list[Any] = []
        for number, part_memory in memory.parts.items():
            piece = _Part(bucket, gradients, part_memory, group)
            futures.append(_as_future(self._hooks[int(number)].average(piece)))
        result = result_tensor(bucket, memory)
        pieces = _pieces(memory.layout, result)
        places_of = [part.places for part in memory.parts.values()]

        def write(values: list[Tensor]) -> Tensor:
            with torch.no_grad():
                for value, places in zip(values, places_of, strict=True):
                    _write(value.view(-1), [pieces[i] for i in places])
            return result

        return then_all(futures, write, bucket.device())

    def step_counted(self, memory: HookMemory) -> None:
        for hook in self._hooks:
            hook.step_counted(memory)

    def __repr__(self) -> str:
        rules = ", ".join(f"({condition!r}, {hook})" for condition, hook in self.rules)
        said = [] if self._has_default_rules else [f"[{rules}]"]
        if not self._has_default_hook:
            said.append(f"{'default=' if self._has_default_rules else ''}{self.default}")
        return f"policy({', '.join(said)})"


class _Part(BucketWithMemory):
    """Some of a bucket's gradients."""

    def __init__(
        self,
        whole: GradBucket,
        gradients: Sequence[Tensor],
        memory: BucketMemory,
        process_group: dist.ProcessGroup,
    ) -> None:
        parameters = whole.parameters()
        self._parameters = [parameters[i] for i in memory.places]
        self._gradients = [gradients[i] for i in memory.places]
        self._index = whole.index()
        self._bucket_count = whole.bucket_count()
        self._process_group = process_group
        self._sparse_grad_indices = None
        self._layout = memory.layout
        self.memory = memory
        self._part_dtype = whole.dtype()

    def numel(self) -> int:
        assert self._layout is not None
        return self._layout.numel

    def dtype(self) -> torch.dtype:
        return self._part_dtype

    def device(self) -> torch.device:
        return self._parameters[0].device

    def is_sparse(self) -> bool:
        return False

    def sources(self) -> Sequence[Tensor]:
        return self._gradients

    def result_buffer(self) -> Tensor | None:
        return None

    def buffer(self) -> Tensor:
        return self.scaled_buffer(1.0)

    def scaled_buffer(self, scale: float) -> Tensor:
        return self.flatten(scale=scale)

    def flatten(
        self, *, scale: float = 1.0, dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        if dtype is None and out is None:
            dtype = self._part_dtype
            assert self.memory is not None
            buffers, shape = self.memory.buffers, (self.numel(),)
            out = buffers.get("gathered", shape, dtype, self.device())
        with torch.no_grad():
            if self._part_dtype.is_complex:  # the operators do not support it
                flat = torch.cat([gradient.reshape(-1) for gradient in self._gradients], out=out)
                return flat.to(dtype or flat.dtype).mul_(scale)
            return bucket_ops.flatten(self._gradients, scale=scale, dtype=dtype, out=out)


def _write(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    if not flat.is_complex():
        bucket_ops.unflatten_into(flat, pieces)
        return
    for piece, part in zip(pieces, flat.split([p.numel() for p in pieces]), strict=True):
        piece.copy_(part)


def _gradients(bucket: GradBucket) -> Sequence[Tensor]:
    """A bucket's gradients, each in the order of the bucket's memory."""
    sources = bucket.sources()
    if len(sources) == len(bucket.parameters()):
        return sources
    return _pieces(bucket.layout(), bucket.buffer())


def _pieces(layout: BucketLayout, flat: Tensor) -> list[Tensor]:
    places = zip(layout.offsets, layout.lengths, strict=True)
    return [flat.narrow(0, offset, length) for offset, length in places]


def _as_future(value: Any) -> Any:
    return completed(value) if isinstance(value, Tensor) else value


def _meets(condition: str, name: str | None, parameter: Tensor) -> bool:
    comparison = _COMPARISON.fullmatch(condition.strip())
    if comparison is not None:
        what, sign, number = comparison.groups()
        value = parameter.dim() if what == "dim" else parameter.numel()
        return _COMPARE[sign](value, int(number))
    if name is None:
        raise RuntimeError(
            f"policy: the rule {condition!r} needs names of parameters, which only an attached "
            "hook knows; use torch_commhook.attach(model, hook)"
        )
    return fnmatch.fnmatchcase(name, condition)


def _checked_rule(number: int, rule: Any) -> tuple[str, Hook]:
    if not isinstance(rule, (tuple, list)) or len(rule) != 2 or not isinstance(rule[0], str):
        raise TypeError(
            f"policy: rules[{number}] must be a pair of a condition and a hook, got {rule!r}"
        )
    condition, hook = rule
    if any(sign in condition for sign in "<>=") and not _COMPARISON.fullmatch(condition.strip()):
        raise ValueError(
            f"policy: rules[{number}] must have a condition such as 'dim <= 1', 'numel < 1000' or "
            f"'*.bias', got {condition!r}"
        )
    comparison = _COMPARISON.fullmatch(condition.strip())
    if comparison is not None and comparison.group(2) == "<" and int(comparison.group(3)) == 0:
        raise ValueError(
            f"policy: rules[{number}] must have a condition that a parameter can meet, got "
            f"{condition!r}"
        )
    return condition, _checked_hook(f"rules[{number}]", hook)


def _checked_hook(where: str, hook: Hook) -> Hook:
    check_inner_hook(f"policy: {where}", hook, must="must have")
    if hook.scales_steps or hook.keeps_ranks_apart or hook.settles_buckets:
        raise ValueError(f"policy: {where} must not need all gradients together, got {hook}")
    return hook
