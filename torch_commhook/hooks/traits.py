"""What hooks tell of themselves, by which those around them and what runs them go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class HookTraits:
    """What is so of a hook.

    Attributes:
        is_lossy: whether what travels is less than what there is, so that results depend on what
            shares a bucket.
        takes_error: whether what is lost can be sent with the next message.
        keeps_error: whether what is lost is remembered, and sent with the next message.
        splits_buckets: whether parts of a bucket are averaged each by itself.
        settles_buckets: whether something is settled for all buckets of a step together.
        has_stages: whether collectives follow one another, for which some process groups need a
            second one; where that depends on the number of ranks, ``Hook.has_stages_among`` tells.
        keeps_ranks_apart: whether each rank steps on gradients of its own for a while, so that
            parameters differ between ranks, and so does what an optimizer remembers of them.
        scales_steps: whether ``Hook.step_scale`` is to be asked, which has all results wait for the
            last.
    """

    is_lossy: bool = False
    takes_error: bool = False
    keeps_error: bool = False
    splits_buckets: bool = False
    settles_buckets: bool = False
    has_stages: bool = False
    keeps_ranks_apart: bool = False
    scales_steps: bool = False

    @classmethod
    def of_any(cls, hooks: Iterable[Any]) -> HookTraits:
        """What is so of at least one of these hooks."""
        hooks = list(hooks)
        # By the hooks' attributes: a class of one's own may say so there.
        return cls(
            **{one.name: any(getattr(hook, one.name) for hook in hooks) for one in fields(cls)}
        )


class Trait:
    """The attribute of a hook that reads one of its traits, by the attribute's name.

    A class or an object may have a bool or a property of that name in its place.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, hook: Any, owner: Any = None) -> bool:
        value: bool = getattr((owner if hook is None else hook).traits, self._name)
        return value
