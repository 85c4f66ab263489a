"""The hooks on a reducer's parameters, which notify it of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.native.dynamo import left_to_python
from torch_commhook.reducer.parameters import ReducerParameters


class ParameterHooks:
    """A post-accumulate-grad hook on each parameter: C++ counts in eager code, Python if compiled.

    The hooks are registered once, since another thread's backward may be running over them.

    Args:
        listener: the object that C++ notifies of gradients and full buckets; see ``arrivals.h``.
        parameters: the reducer's parameters.

    Attributes:
        arrivals: counts gradients.
        called: the hooks that compiled autograd calls.
    """

    def __init__(self, listener: _C.ArrivalsListener, parameters: ReducerParameters) -> None:
        self.arrivals = _C.Arrivals(listener, len(parameters))
        self.called: set[Callable[..., None]] = set()
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        for number, parameter in enumerate(parameters.tensors):
            handle: Any = parameter.register_post_accumulate_grad_hook(_nothing)
            self._handles.append(handle)
            _C.count_arrivals(parameter, handle.id, self.arrivals, number)

    @property
    def are_removed(self) -> bool:
        """Whether no parameter has such a hook any more."""
        return not self._handles

    def renew(
        self, ready_hook: Callable[[str], Callable[[Tensor], None]], buckets: list[int]
    ) -> None:
        """Update the hooks for rebuilt buckets.

        Args:
            ready_hook: returns the function that compiled autograd calls with the named parameter.
            buckets: the bucket of each parameter.
        """
        self.called.clear()
        for name, handle in zip(self._parameters.names, self._handles, strict=True):
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                hook = hooks[handle.id] = left_to_python(ready_hook(name))
                self.called.add(hook)
        self.arrivals.assign(buckets)

    def remove(self) -> None:
        """Remove the hooks, and stop counting."""
        self.arrivals.close()
        for parameter, handle in zip(self._parameters.tensors, self._handles, strict=True):
            _C.stop_counting(parameter)
            handle.remove()
        self._handles.clear()
        self.called.clear()


def _nothing(parameter: Tensor) -> None:
    pass
