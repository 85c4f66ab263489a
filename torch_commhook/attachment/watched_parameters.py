"""Checks that a model still has the parameters that its hook was attached to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_commhook import _C
from torch_commhook.attachment.parameters import ignored_names, is_whole, why_replaced
from torch_commhook.autograd.running_backward import is_inside

_FUNCTIONAL_FILE = torch.nn.utils.stateless.__file__


class WatchedParameters:
    """The parameters that a model had when a hook was attached.

    The gradient of a parameter that is added later would silently stay each rank's own. A converted
    parameter no longer fits its bucket.

    Args:
        model: the model.
        parameters: the names and parameters whose gradients the hook averages.
        in_ddp: whether DDP's own reducer calls the hook.

    Attributes:
        parameters: as given; empty after :meth:`clear`.
        is_sure: whether the last call of :meth:`change` saw the model's own parameters.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[tuple[str, Tensor]], *, in_ddp: bool
    ) -> None:
        self._model = weakref.ref(model)
        self.parameters = list(parameters)
        self._averaged = {id(parameter) for _, parameter in parameters}
        self._forms = _C.ParameterForms([parameter for _, parameter in parameters], in_ddp)
        ignored = ignored_names(model)
        self._frozen = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if id(parameter) not in self._averaged
            and not parameter.requires_grad
            and name not in ignored
        ]
        self._members = _C.module_members(model)
        self.is_sure = False
        self._way_out = (
            "wrap the module in a new DistributedDataParallel"
            if in_ddp
            else "remove() the hook and attach it again"
        )

    def clear(self) -> None:
        """Stop watching, and release the parameters."""
        self.parameters.clear()
        self._averaged.clear()
        self._forms.clear()
        self._frozen.clear()
        self._members = 0

    def change(self) -> str | None:
        """How the parameters have changed, as the text of an error, or None."""
        model = self._model()
        self.is_sure = True
        if model is None or not self.parameters:
            return None
        changed = self._forms.change()
        if changed is not None:
            number, what = changed
            name, _ = self.parameters[number]
            return self._sharded(model) or (
                f"torch_commhook: parameter '{name}' {what}; convert, move or change a model "
                "before it is wrapped and before a hook is attached"
            )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                return (
                    f"torch_commhook: parameter '{name}' did not require grad when the hook was "
                    f"attached, and does now; {self._way_out}"
                )
        members = _C.module_members(model)
        if members == self._members:
            return None
        # torch.func.functional_call has put other tensors in the parameters' place.
        self.is_sure = not is_inside(_FUNCTIONAL_FILE)
        if not self.is_sure:
            return None
        sharded = self._sharded(model)
        if sharded is not None:
            return sharded
        ignored = ignored_names(model)
        for name, parameter in model.named_parameters():
            if (
                parameter.requires_grad
                and id(parameter) not in self._averaged
                and name not in ignored
                # A function that computes gradients may have put other tensors there for a while.
                and isinstance(parameter, nn.Parameter)
            ):
                return (
                    f"torch_commhook: parameter '{name}' was added to the model after the hook was "
                    f"attached, and its gradient is not averaged; {self._way_out}"
                )
        self._members = members
        return None

    def _sharded(self, model: nn.Module) -> str | None:
        for name, parameter in self.parameters:
            if is_whole(model, name, parameter):
                continue
            why = why_replaced(model, name, parameter)
            if why is not None:
                return f"torch_commhook: parameter '{name}' was replaced: {why}"
        return None
