"""Futures of the Works that process groups return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.collectives.futures import is_driven_by_wait, set_error
from torch_commhook.collectives.gloo_groups import is_gloo
from torch_commhook.collectives.group_place import all_tell_their_rank
from torch_commhook.collectives.streams import is_capturing
from torch_commhook.spans import sent


def issued(
    issue: Callable[[], Any], group: dist.ProcessGroup, method: str, result: Tensor
) -> torch.futures.Future[Tensor]:
    """Start a collective, and return a Future of its result.

    Args:
        issue: starts it, and returns the group's Work.
        group: the process group.
        method: the group's method, for errors.
        result: the tensor that the collective writes.

    Raises:
        TypeError: as :func:`future_of_work`.
    """
    where = f"{method} through {_C.type_name(group)}"
    future = issued_on_device(issue, group, method, result)
    if result.is_complex():  # and the sent tensor is not
        return future.then(lambda done: when_good(done, result))
    # A Work's own Future holds a list.
    return _C.cast_into(future, result, result.dtype, where)


def issued_on_device(
    issue: Callable[[], Any], group: dist.ProcessGroup, method: str, result: Tensor
) -> torch.futures.Future[Any]:
    """As :func:`issued`, with the value of the Work's Future, or ``result``.

    Raises:
        TypeError: as :func:`future_of_work`.
        RuntimeError: a CUDA graph captures the current stream, and the group is Gloo's.
    """
    if is_capturing(result.device) and is_gloo(group, result.device.type):
        raise RuntimeError(
            f"{method}: a CUDA graph cannot capture collectives of Gloo, which run on the host; "
            "use a process group of NCCL"
        )
    return sent(lambda: _completion(issue_unseen(issue, result.device), group, method, result))


def issue_unseen(issue: Callable[[], Any], device: torch.device) -> Any:
    """Start a collective whose Future is waited for, not its Work.

    On the CPU, PyTorch's profiler does not see it. Gloo completes a Work's Future before it ends
    the Work's span. If the profile stops in between, PyTorch writes the end of the span to freed
    memory.

    Args:
        issue: starts the collective, and returns the group's Work.
        device: the device of the collective's tensors.

    Returns:
        The Work.
    """
    return _C.unseen(issue) if device.type == "cpu" else issue()


def _completion(
    work: Any, group: dist.ProcessGroup, method: str, result: Tensor
) -> torch.futures.Future[Any]:
    """A Work's Future, with correct waits of streams.

    The Future of a group that does not know devices, such as Gloo's, completes when the host has
    done its part, perhaps before copies to the device have ended. ``Work.wait`` synchronizes these,
    but blocks the thread. The same is done for a Future that completes only when its Work is waited
    for.
    """
    try:
        future = future_of_work(work, group, method)
    except NotImplementedError:  # by a Work in Python that can only be waited for
        pass
    else:
        # PyTorch's C++ between the caller and a Work in Python hides the class of its Future.
        is_complete_by_itself = all_tell_their_rank(group) and not is_driven_by_wait(future)
        if is_complete_by_itself and (result.device.type == "cpu" or _C.has_devices(future)):
            return future
    try:
        work.wait()
    except Exception as error:
        failed: torch.futures.Future[Tensor] = torch.futures.Future()
        set_error(failed, error)
        return failed
    return _C.as_future(result, method)


def future_of_work(
    work: object, group: dist.ProcessGroup, method: str = "collective"
) -> torch.futures.Future[Any]:
    """The Future of a group's result, checked.

    Raises:
        TypeError: the result is not a Work, or has no Future.
    """
    if not isinstance(work, dist.Work):
        raise TypeError(
            f"{_C.type_name(group)}.{method} must return a torch.distributed.Work, "
            f"got {_C.type_name(work)}"
        )
    future = work.get_future()
    if not isinstance(future, torch._C.Future):
        raise TypeError(
            f"{_C.type_name(work)}.get_future must return a torch.futures.Future, "
            f"got {_C.type_name(future)}"
        )
    return future


def when_good(done: torch.futures.Future[Any], result: Tensor) -> Tensor:
    """``result``, if a collective succeeded.

    Raises:
        Exception: the collective's error.
    """
    done.value()
    return result
