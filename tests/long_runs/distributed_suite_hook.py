"""What ``distributed_suite.py`` changes for its suite "hook": a hook is attached to each DDP model.

Where a case registers a hook of its own, or DDP does so for it, the model gets a new reducer
without ours: a reducer keeps its hook for life.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook.attachment.handle import HookHandle

SELECTED = re.compile("ddp|distributeddataparallel|comm_hook|join", re.IGNORECASE)

#: Cases that may pass plain and fail with the hook, with the reason.
KNOWN: dict[str, str] = {
    "test_ddp_profiling_torch_profiler": (
        "counts the all-reduces of a step. On Gloo there is one more with a hook attached, of one "
        "byte: the ranks agree whether the step went well"
    ),
    "test_ddp_comm_hook_logging": (
        "asks DDP's statistics whether there is no hook yet. They name ours"
    ),
    "test_ddp_grad_div_uneven_inputs": (
        "asks for gradients divided by the ranks that still have inputs. DDP leaves that to the "
        "hook, and ours divide by all ranks, as PyTorch's do"
    ),
}


def is_selected(name: str, case: Callable[..., None]) -> bool:
    """Whether a case is about DDP, hooks or join, by its name or by what it calls."""
    return bool(SELECTED.search(name)) or (
        "DistributedDataParallel" in inspect.getsource(inspect.unwrap(case))
    )


class Attacher:
    """Attaches a hook to each DDP model of this process, and counts their steps."""

    def __init__(self) -> None:
        self.handles: list[HookHandle] = []

    def install(self) -> None:
        """Replace the methods of DDP by ones that attach, or step aside for another hook."""
        init = DDP.__init__

        @functools.wraps(init)
        def attach_after(model: DDP, *args: Any, **options: Any) -> None:
            init(model, *args, **options)
            self._attach(model)

        replacements: dict[str, Callable[..., None]] = {"__init__": attach_after}
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            replacements[name] = self._stepping_aside(getattr(DDP, name))
        for name, replacement in replacements.items():
            setattr(DDP, name, replacement)

    def _attach(self, model: DDP) -> None:
        if not model._comm_hooks:  # DDP registers one itself, for mixed precision say
            handle = torch_commhook.attach(model, torch_commhook.hooks.allreduce())
            self.handles.append(handle)
            model.__dict__["_suite_handle"] = len(self.handles) - 1

    def _stepping_aside(self, register: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(register)
        def step_aside(model: DDP, *args: Any, **options: Any) -> None:
            number = model.__dict__.pop("_suite_handle", None)
            if number is not None:
                self.handles[number].remove()
                new_reducer(model)
            register(model, *args, **options)

        return step_aside

    def record(self) -> dict[str, Any]:
        """What happened, for the table."""
        return {"steps": sum(handle.stats().steps for handle in self.handles)}


def new_reducer(model: DDP) -> None:
    """Give a DDP model a reducer without a hook, in the way it makes one when it is unpickled."""
    model.reducer._remove_autograd_hooks()
    parameters, expect_sparse_gradient = model._build_params_for_reducer()
    model._ddp_init_helper(
        parameters,
        expect_sparse_gradient,
        model._build_debug_param_to_name_mapping(parameters),
        model.static_graph,
    )
    if model.static_graph:
        model.reducer._set_static_graph()
        assert model.logger is not None
        model.logger._set_static_graph()
