"""The hooks that may run around a communication hook on a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from torch_commhook.step.stages import BucketStages


class ShardedStages(BucketStages):
    """Refuses hooks that need gradients which no rank has.

    Args:
        on_shards: whether the communication hook takes part in reduce-scatters.
    """

    def __init__(self, *, on_shards: bool) -> None:
        super().__init__()
        self._on_shards = on_shards

    def register(self, stage: str, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook; as :meth:`BucketStages.register`.

        Raises:
            RuntimeError: the model does not support it.
        """
        if stage == "post_accumulate_hooks":
            raise RuntimeError(
                "HookHandle.register_post_accumulate_hook: fully_shard() writes the gradients of "
                "sharded parameters, and calls their own hooks then; use "
                "Tensor.register_post_accumulate_grad_hook"
            )
        if self._on_shards:
            name = f"register_{stage.removesuffix('s')}"
            if stage == "posthooks":
                raise RuntimeError(
                    f"HookHandle.{name}: a reduce-scatter leaves no whole gradient; use "
                    "Tensor.register_post_accumulate_grad_hook of the model's parameters, which "
                    "gets their shards with the mean gradient"
                )
            raise RuntimeError(
                f"HookHandle.{name}: in a reduce-scatter no gradient has its parameter's shape; "
                "attach a torch_commhook.hooks.Hook of your own with average_shard()"
            )
        return super().register(stage, hook)
