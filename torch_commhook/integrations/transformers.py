"""Hooks in the Trainer of Hugging Face transformers."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState

from torch_commhook.attachment.handle import HookHandle
from torch_commhook.attachment.sharded.fsdp import trains_shards
from torch_commhook.hooks.expressions import as_hook
from torch_commhook.integrations.attached_model import attach_wrapped, is_alone

#: The file in a checkpoint's folder.
FILE = "commhook.pt"

_HOW = "Start the script with torchrun or accelerate launch, on several ranks"


class CommHookTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Averages a Trainer's gradients through a hook, with DDP and FSDP2.

    The callback attaches the hook to the Trainer's wrapped model when training begins, and removes
    it at the end. It saves the hook's memory of all ranks beside each checkpoint, as
    ``commhook.pt``; resumed training loads it. If the hook keeps ranks apart, all ranks get the
    same parameters at the end of training.

    Args:
        hook: one of :mod:`torch_commhook.hooks`, a callable, or an expression such as
            ``"error_feedback(blockwise(bits=4))"``.
        resume_from: the checkpoint from which training is resumed, if it is not in the Trainer's
            ``output_dir``.
        begin_anew: whether the hook starts without memory in resumed training, as for a checkpoint
            without a hook, or with another one.
        log: whether to add bytes, ratio, error and times of a step to the Trainer's log history and
            to the logs of later callbacks, under ``commhook/``.
        options: options of :func:`torch_commhook.attach`. The scaler is the Trainer's.

    Attributes:
        handle: the hook's handle during and after training; None before.

    Raises:
        ValueError, TypeError: the expression describes no hook.

    Example::

        callback = CommHookTrainerCallback("error_feedback(blockwise(bits=4))")
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
    """

    def __init__(
        self,
        hook: str | Callable[..., Any],
        *,
        resume_from: str | Path | None = None,
        begin_anew: bool = False,
        log: bool = True,
        **options: Any,
    ) -> None:
        # Parsed now, so that mistakes are reported before training begins.
        self.hook = as_hook(hook, "CommHookTrainerCallback")
        self.resume_from = None if resume_from is None else Path(resume_from)
        self.begin_anew = begin_anew
        self.options = options
        self.handle: HookHandle | None = None
        self._logs = log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the hook."""
        if is_alone("CommHookTrainerCallback", args.world_size):
            return
        model: nn.Module = kwargs["model"]
        if not trains_shards(model):
            model = _wrapped_by_trainer(state) or model
        if self.handle is not None:
            self.handle.remove()
        options = {"scaler": getattr(kwargs.get("optimizer"), "scaler", None), **self.options}
        self.handle = attach_wrapped("CommHookTrainerCallback", model, self.hook, _HOW, **options)
        if state.global_step > 0 and not self.begin_anew:
            self._go_on(args, state)

    def _go_on(self, args: Any, state: Any) -> None:
        """Load the hook's memory: on all ranks, or on none if one has no file."""
        assert self.handle is not None
        try:
            folder = self.resume_from or _folder_of(args, state)
            if not (folder / FILE).exists():
                raise RuntimeError(
                    f"CommHookTrainerCallback: training is resumed at step {state.global_step}, "
                    f"but {folder} has no {FILE}; give resume_from= the folder of "
                    "the checkpoint, or begin_anew=True for a checkpoint without a hook"
                )
            read = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        except Exception:
            with suppress(Exception):  # None is refused, here and so on all ranks
                self.handle.load_state_dict(None)  # type: ignore[arg-type]
            raise
        self.handle.load_state_dict(read)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the hook's memory of all ranks."""
        if self.handle is None:
            return
        gathered = self.handle.state_dict(gather=True)
        if args.should_save:
            torch.save(gathered, _folder(args, state) / FILE)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add what the hook has sent. The last log comes before the best model is loaded."""
        if logs is not None and "train_runtime" in logs:
            self._come_together()
        if self._logs and logs is not None and self.handle is not None:
            written = dict(logs)
            self.handle.log_to(written.update)
            logs.update(written)
            if state.log_history:  # it has a copy already
                state.log_history[-1].update(written)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give all ranks the same parameters if the hook keeps them apart, and remove the hook."""
        self._come_together()
        if self.handle is not None:
            self.handle.remove()

    def _come_together(self) -> None:
        if self.handle is not None and self.handle.is_attached:
            self.handle.synchronize()


def _wrapped_by_trainer(state: Any) -> nn.Module | None:
    """The model that the Trainer of a state trains; no argument of a callback contains it."""
    for each in gc.get_objects():
        if issubclass(type(each), Trainer) and getattr(each, "state", None) is state:
            found: nn.Module = each.model_wrapped
            return found
    return None


def _folder_of(args: Any, state: Any) -> Path:
    """The folder of the checkpoint from which training is resumed; the Trainer does not report it.

    Raises:
        RuntimeError: the one in ``output_dir`` belongs to another training.
    """
    folder = _folder(args, state)
    path = folder / "trainer_state.json"
    if path.exists():
        logs = (TrainerState.load_from_json(str(path)).log_history, state.log_history)
        if len({json.dumps(each) for each in logs}) > 1:
            raise RuntimeError(
                f"CommHookTrainerCallback: training is resumed at step {state.global_step}, but "
                f"{folder} belongs to another training; give resume_from= the checkpoint's folder"
            )
    return folder


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
