"""Properties of a hook that its wrappers and the reducers depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class HookTraits:
    """The traits of a hook.

    Attributes:
        is_lossy: whether a message holds less than the gradients, so that results depend on the
            parameters that share a bucket.
        takes_error: whether the next message can carry what earlier ones have lost.
        keeps_error: whether the hook remembers what a message loses, and sends it with the next.
        splits_buckets: whether the hook averages parts of a bucket one by one.
        settles_buckets: whether the hook decides something for all buckets of a step together.
        has_stages: whether collectives follow one another, for which some process groups need a
            second group. If that depends on the number of ranks, ask ``Hook.has_stages_among``.
        keeps_ranks_apart: whether each rank steps on gradients of its own for a while, so that
            parameters differ between ranks, and so does what an optimizer remembers of them.
        scales_steps: whether ``Hook.step_scale`` is to be asked, which has all results wait for the
            last.
        chooses: whether the hook finds out in the first steps which of several hooks it is to be.
    """

    is_lossy: bool = False
    takes_error: bool = False
    keeps_error: bool = False
    splits_buckets: bool = False
    settles_buckets: bool = False
    has_stages: bool = False
    keeps_ranks_apart: bool = False
    scales_steps: bool = False
    chooses: bool = False

    @classmethod
    def of_any(cls, hooks: Iterable[Any]) -> HookTraits:
        """The traits that at least one of these hooks has."""
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
