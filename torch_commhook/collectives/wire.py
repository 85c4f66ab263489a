"""The library's own backend of ``torch.distributed`` for tensors on the CPU: ``"commhook"``.

A process has one endpoint, which all of its groups use: one port, one thread, and a connection to
each process that it exchanges messages with.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import torch.distributed as dist

import torch_commhook
from torch_commhook import _C
from torch_commhook.collectives.forks import keep_for_good

_NAME = "commhook"
_INTERFACES = "GLOO_SOCKET_IFNAME"

_lock = threading.Lock()
_endpoint: _C.WireEndpoint | None = None


def register_backend() -> None:
    """Make ``"commhook"`` a backend that groups can be made with. More calls do nothing.

    ``import torch_commhook`` does not call this: once any backend is registered, PyTorch gives
    groups for named devices, such as ``"cpu:gloo"``, no default backend.

    Example:
        >>> process_group.register_backend()  # doctest: +SKIP
        >>> dist.init_process_group("cpu:commhook,cuda:nccl")  # doctest: +SKIP
    """
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _make_backend, extended_api=True, devices=["cpu"])


def endpoint() -> _C.WireEndpoint:
    """The process's endpoint. It listens from the first call on, until Python ends.

    A child of ``os.fork()`` has its own one, and cannot use its parent's groups.

    Raises:
        torch.distributed.DistNetworkError: the process cannot listen at the first interface of
            ``GLOO_SOCKET_IFNAME``, or without one at the host's own address.
    """
    global _endpoint
    with _lock:
        if _endpoint is None:
            host = os.environ.get(_INTERFACES, "").split(",")[0]
            _endpoint = _C.WireEndpoint(host, torch_commhook.__version__)
            atexit.register(_close, _endpoint)
        return _endpoint


def _make_backend(options: Any, _: object) -> _C.WireBackend:
    return _C.WireBackend(
        endpoint(),
        options.store,
        options.group_id,
        options.group_rank,
        options.group_size,
        options.timeout,
    )


def _close(found: _C.WireEndpoint) -> None:
    if found is _endpoint:  # not a parent's
        found.close()


def _forget() -> None:
    global _endpoint, _lock
    _lock = threading.Lock()
    if _endpoint is not None:
        keep_for_good(_endpoint)  # it has threads that are not here
        _endpoint = None


os.register_at_fork(after_in_child=_forget)
