"""The hooks on a reducer's parameters, which tell it of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torch_commhook import _C
from torch_commhook.native.dynamo import left_to_python
from torch_commhook.reducer.parameters import ReducerParameters


class ParameterHooks:
    """A post-accumulate-grad hook on each parameter: C++ counts in eager, Python where compiled.

    Put on once and for all, since another thread's backward may be running over them.

    Args:
        listener: what C++ tells of gradients and full buckets; see ``arrivals.h``.
        parameters: the reducer's.

    Attributes:
        arrivals: counts gradients.
        called: those that compiled autograd calls.
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
        """Whether none is on a parameter any more."""
        return not self._handles

    def renew(
        self, ready_hook: Callable[[str], Callable[[Tensor], None]], buckets: list[int]
    ) -> None:
        """Let hooks know the buckets that have been formed.

        Args:
            ready_hook: gives what compiled autograd calls with a parameter of a name.
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
        """Take them off, and count no more."""
        self.arrivals.close()
        for parameter, handle in zip(self._parameters.tensors, self._handles, strict=True):
            _C.stop_counting(parameter)
            handle.remove()
        self._handles.clear()
        self.called.clear()


def _nothing(parameter: Tensor) -> None:
    pass
