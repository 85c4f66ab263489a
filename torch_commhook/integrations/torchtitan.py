"""Hooks in the Trainer of torchtitan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_commhook.attachment.handle import HookHandle
from torch_commhook.integrations.attached_model import attach_wrapped

#: The name of what the hook remembers, in torchtitan's checkpoints.
STATE = "commhook"

_HOW = "Call it after the Trainer is built, which applies fully_shard()"


def attach_to(trainer: Any, hook: str | Callable[..., Any], **options: Any) -> HookHandle:
    """Attach a hook to the model of a torchtitan ``Trainer``, before ``trainer.train()``.

    With a replicate degree above 1 the hook averages across replicas, else it takes part in the
    reduce-scatters. torchtitan divides the loss by the tokens of all ranks, and has gradients
    summed: they are the hook's mean times the ranks.

    Checkpoints hold what the hook remembers on all ranks, as ``commhook``, and training that is
    resumed goes on from it. To resume from a checkpoint that was made without a hook, name
    ``commhook`` in ``checkpoint.exclude_from_loading``. A hook that keeps ranks apart brings them
    together at the last step, before the model is saved.

    Args:
        trainer: a ``Trainer`` that is built, and has not trained yet.
        hook: one of :mod:`torch_commhook.hooks`, a callable, or an expression such as
            ``"error_feedback(blockwise(bits=4))"``.
        options: of :func:`torch_commhook.attach`: ``shard_hook`` and ``weights``.

    Returns:
        The handle.

    Raises:
        ValueError: torchtitan records steps as CUDA graphs, in which a hook would run once only.
        RuntimeError: the model is in pipeline stages, or not sharded.
        TypeError, ValueError, RuntimeError: as :func:`torch_commhook.attach`.

    Example::

        trainer = config.build()
        handle = attach_to(trainer, "error_feedback(blockwise(bits=4))")
        trainer.train()
    """
    training = trainer.config.training
    if not getattr(training, "disable_cuda_graphs", True):
        raise ValueError(
            "attach_to: a CUDA graph would replay what the hook did in the step that it records; "
            "set training.disable_cuda_graphs"
        )
    if trainer.parallel_dims.pp_enabled:
        raise RuntimeError(
            "attach_to: hooks do not work with pipeline parallelism; "
            "set parallelism.pipeline_parallel_degree to 1"
        )
    (model,) = trainer.model_parts
    handle = attach_wrapped("attach_to", model, hook, _HOW, **options)
    checkpointer = trainer.checkpointer
    if checkpointer.enable:
        checkpointer.states[STATE] = handle
    save = checkpointer.save

    def save_together(curr_step: int, last_step: bool = False) -> bool:
        if last_step and handle.is_attached:
            handle.synchronize()
        saved: bool = save(curr_step, last_step)
        return saved

    checkpointer.save = save_together
    return handle
