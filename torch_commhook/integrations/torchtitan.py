"""Hooks in the Trainer of torchtitan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_commhook.attachment.handle import HookHandle
from torch_commhook.integrations.attached_model import attach_wrapped

#: The key of the hook's memory in torchtitan's checkpoints.
STATE = "commhook"

_HOW = "Call it after the Trainer is built, which applies fully_shard()"


def attach_to(trainer: Any, hook: str | Callable[..., Any], **options: Any) -> HookHandle:
    """Attach a hook to the model of a torchtitan ``Trainer``, before ``trainer.train()``.

    With a replicate degree above 1 the hook averages across replicas; otherwise it takes part in
    the reduce-scatters. torchtitan divides the loss by the tokens of all ranks and sums gradients,
    so they are the hook's mean times the number of ranks.

    Checkpoints contain the hook's memory of all ranks under ``commhook``, and resumed training
    loads it. To resume from a checkpoint without a hook, add ``commhook`` to
    ``checkpoint.exclude_from_loading``. If the hook keeps ranks apart, all ranks get the same
    parameters at the last step, before the model is saved.

    Args:
        trainer: a ``Trainer`` that is built, and has not trained yet.
        hook: one of :mod:`torch_commhook.hooks`, a callable, or an expression such as
            ``"error_feedback(blockwise(bits=4))"``.
        options: options of :func:`torch_commhook.attach`: ``shard_hook`` and ``weights``.

    Returns:
        The handle.

    Raises:
        ValueError: torchtitan captures steps in CUDA graphs, which would run the hook only once.
        RuntimeError: the model has pipeline stages, or is not sharded.
        TypeError, ValueError, RuntimeError: as :func:`torch_commhook.attach`.

    Example::

        trainer = config.build()
        handle = attach_to(trainer, "error_feedback(blockwise(bits=4))")
        trainer.train()
    """
    training = trainer.config.training
    if not getattr(training, "disable_cuda_graphs", True):
        raise ValueError(
            "attach_to: a CUDA graph would replay the hook's work of the captured step; "
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
