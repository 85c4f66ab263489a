"""Hooks in Lightning: a callback for its Trainer, and a function for Fabric."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from torch_commhook.attachment.handle import HookHandle
from torch_commhook.codecs.base import Codec
from torch_commhook.hooks.expressions import as_hook
from torch_commhook.integrations.attached_model import attach_wrapped, is_alone

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

_HOW = (
    'Give the Trainer strategy="ddp", or ModelParallelStrategy with a configure_model() that calls '
    "fully_shard()"
)


class CommHookCallback(Callback):  # type: ignore[misc]
    """Averages a Trainer's gradients through a hook, with the strategies DDP and ModelParallel.

    The callback attaches the hook when training begins, after a checkpoint was loaded, and removes
    it at the end. Checkpoints contain the hook's memory of all ranks, and resumed training loads
    it. If the hook keeps ranks apart, all ranks get the same parameters at the end of training.

    It works with ``pytorch_lightning`` and with ``lightning``.

    Args:
        hook: one of :mod:`torch_commhook.hooks`, a callable, or an expression such as
            ``"error_feedback(blockwise(bits=4))"``.
        shard_hook, weights: for sharded models, as for :func:`torch_commhook.attach`.
        log: whether to log bytes, ratio, error and times of a step through the trainer's logger,
            every ``log_every_n_steps``, under ``commhook/``.

    Attributes:
        handle: the hook's handle during and after training; None before.

    Raises:
        ValueError, TypeError: the expression describes no hook.

    Example::

        callback = CommHookCallback("error_feedback(blockwise(bits=4))")
        trainer = Trainer(devices=2, strategy="ddp", callbacks=[callback])
        trainer.fit(module, loader)
        print(callback.handle.stats().bytes_sent)
    """

    def __init__(
        self,
        hook: str | Callable[..., Any],
        *,
        shard_hook: str | Callable[..., Any] | None = None,
        weights: Codec | None = None,
        log: bool = True,
    ) -> None:
        # Parsed now, so that mistakes are reported before training begins.
        self.hook = as_hook(hook, "CommHookCallback")
        self.shard_hook = as_hook(shard_hook, "CommHookCallback")
        self.weights = weights
        self.handle: HookHandle | None = None
        self._logs = log
        self._read: dict[str, Any] | None = None  # from a checkpoint, for the hook to attach

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget an earlier training, and a checkpoint that was loaded for another purpose."""
        if stage == "fit":
            self._take_off()
            self._read = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the hook."""
        if is_alone("CommHookCallback", trainer.world_size):
            return
        if getattr(trainer.strategy, "_ddp_comm_hook", None) is not None:
            raise ValueError(
                "CommHookCallback: the strategy has a ddp_comm_hook, which Lightning registers on "
                "GPUs and ignores on CPUs; leave it out, since this callback attaches the hook"
            )
        self.handle = attach_wrapped(
            "CommHookCallback",
            trainer.model,
            self.hook,
            _HOW,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            shard_hook=self.shard_hook,
            weights=self.weights,
        )
        if self._read:
            self.handle.load_state_dict(self._read)
        elif trainer.ckpt_path is not None and self.handle.state_dict():
            warnings.warn(
                f"CommHookCallback: {trainer.ckpt_path} was made without this callback, so the "
                "hook starts without memory",
                stacklevel=2,
            )
        self._read = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what the hook has sent."""
        # An optimizer step may take several batches, and a batch may step several optimizers.
        if (
            self._logs
            and self.handle is not None
            and trainer.loggers
            and trainer._logger_connector.should_update_logs
            and not trainer.fit_loop._should_accumulate()
        ):
            values: dict[str, float] = {}
            self.handle.log_to(values.update)
            for logger in trainer.loggers:  # at the same step as self.log()
                logger.log_metrics(values, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give all ranks the same parameters, if the hook keeps ranks apart."""
        if self.handle is not None and self.handle.is_attached:
            self.handle.synchronize()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the hook."""
        if stage == "fit":
            self._take_off()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hook if an exception ends training."""
        self._take_off()

    def _take_off(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the hook's memory of all ranks. All ranks must call this together."""
        if self.handle is None:
            return self._read or {}
        return self.handle.state_dict(gather=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, once the hook is attached."""
        if self.handle is not None and self.handle.is_attached:
            self.handle.load_state_dict(state_dict)
        else:
            self._read = state_dict


def setup(
    fabric: Any, model: nn.Module, hook: str | Callable[..., Any], **options: Any
) -> HookHandle:
    """Attach a hook to a model that ``fabric.setup()`` has returned.

    Args:
        fabric: a ``Fabric``, with the strategies DDP or ModelParallel.
        model: the result of its ``setup()``.
        hook: one of :mod:`torch_commhook.hooks`, a callable, or an expression.
        options: options of :func:`torch_commhook.attach`. The scaler is Fabric's.

    Returns:
        The handle. If the hook keeps ranks apart, call its ``synchronize()`` after training. Put
        ``handle.state_dict(gather=True)`` into checkpoints.

    Raises:
        RuntimeError: Fabric's strategy does not average gradients in a way that a hook can replace.

    Example::

        model, optimizer = fabric.setup(model, optimizer)
        handle = setup(fabric, model, "blockwise(bits=8)")
    """
    wrapped = getattr(model, "_forward_module", model)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    how = 'Give Fabric strategy="ddp", or ModelParallelStrategy; then call fabric.setup() first'
    return attach_wrapped("setup", wrapped, hook, how, **{"scaler": scaler, **options})
