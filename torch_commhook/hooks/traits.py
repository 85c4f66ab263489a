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
        takes_error: whether the next message can carry the errors of earlier ones.
        keeps_error: whether the hook remembers a message's error, and sends it with the next.
        splits_buckets: whether the hook averages parts of a bucket one by one.
        settles_buckets: whether the hook decides about all buckets of a step together.
        has_stages: whether a collective follows another one, at any number of ranks.
        keeps_ranks_apart: whether each rank takes several steps on its own gradients, so that
            parameters and optimizer state differ among ranks.
        scales_steps: whether ``Hook.step_scale`` is called; all results then wait for the last.
        chooses: whether the hook measures in the first steps which of several hooks to use.
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
        # By the hooks' attributes: a user's class may define them directly.
        return cls(
            **{one.name: any(getattr(hook, one.name) for hook in hooks) for one in fields(cls)}
        )


class Trait:
    """An attribute of a hook that reads the trait of the same name.

    A class or an object may replace it by a bool or a property.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, hook: Any, owner: Any = None) -> bool:
        value: bool = getattr((owner if hook is None else hook).traits, self._name)
        return value
