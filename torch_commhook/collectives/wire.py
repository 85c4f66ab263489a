"""The library's own transport: the process's endpoints, and a backend of ``torch.distributed``.

All groups of a process use the same endpoint: one port, one thread, and a connection to each
process that it exchanges messages with.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

import torch_commhook
from torch_commhook import _C

# ---- the library's own transport -----------------------------------------------------------------


#: A host that has not answered for this time is lost, in seconds.
LOST_AFTER = 15.0
_NAME = "commhook"
_INTERFACES = "GLOO_SOCKET_IFNAME"
#: The variable with the name of a file: all connections then prove that both sides know its text.
TOKEN_FILE = "COMMHOOK_TOKEN_FILE"
_LEAST_TOKEN_BYTES = 16


class _Endpoints:
    """Endpoints by their options."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: dict[tuple[float, int, bytes], _C.WireEndpoint] = {}
        self._replaced: list[_C.WireEndpoint] = []

    def get(self, lost_after: float, rails: int) -> _C.WireEndpoint:
        key = token_key()
        with self._lock:
            found = self._present.get((lost_after, rails, key))
            if found is not None and found.has_lost():  # the hosts may have come back
                self._replaced.append(found)
                found = None
            for each in [each for each in self._replaced if not each.has_groups()]:
                self._replaced.remove(each)
                each.close()
            if found is None:
                host = os.environ.get(_INTERFACES, "").split(",")[0]
                found = _C.WireEndpoint(host, torch_commhook.__version__, lost_after, rails, key)
                self._present[lost_after, rails, key] = found
            return found

    def close(self) -> None:
        every = [*self._replaced, *self._present.values()]
        for each in every:  # at the same time
            each.stop()
        for each in every:
            each.close()


_process = _Endpoints()
#: Those of threads that are ranks themselves.
_thread = threading.local()


def register_backend() -> None:
    """Make ``"commhook"`` a backend that groups can be made with. More calls do nothing.

    ``import torch_commhook`` does not call this: once any backend is registered, PyTorch gives
    groups for named devices, such as ``"cpu:gloo"``, no default backend.

    Example:
        >>> process_group.register_backend()  # doctest: +SKIP
        >>> dist.init_process_group("cpu:commhook,cuda:nccl")  # doctest: +SKIP
    """
    if _NAME not in dist.Backend.backend_list:
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(_NAME, _make_backend, extended_api=True, devices=devices)


def endpoint(lost_after: float = LOST_AFTER, rails: int = 1) -> _C.WireEndpoint:
    """The process's endpoint. It listens from the first call on, until Python ends.

    A child of ``os.fork()`` has its own one, and cannot use its parent's groups.

    Args:
        lost_after: a host that has not answered for this time is lost, in seconds.
        rails: the number of connections to each other process.

    Raises:
        RuntimeError: as :func:`token_key`.
        torch.distributed.DistNetworkError: the process cannot listen at the first interface of
            ``GLOO_SOCKET_IFNAME``, or without one at the host's own address; or there is a token,
            and no OpenSSL 3.
    """
    found: _Endpoints = getattr(_thread, "endpoints", _process)
    return found.get(lost_after, rails)


def token_key() -> bytes:
    """The key of the token that ``COMMHOOK_TOKEN_FILE`` names, 32 bytes; empty without one.

    Raises:
        RuntimeError: the file cannot be read, or has fewer than 16 bytes beside spaces.
    """
    path = os.environ.get(TOKEN_FILE)
    if not path:
        return b""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise RuntimeError(f"torch_commhook: {TOKEN_FILE}: {error}") from error
    if len(token) < _LEAST_TOKEN_BYTES:
        raise RuntimeError(
            f"torch_commhook: the token in {TOKEN_FILE} must have {_LEAST_TOKEN_BYTES} or more "
            f"bytes, got {len(token)}: make one with `openssl rand -hex 32`"
        )
    return hashlib.sha256(b"torch_commhook transport 1\0" + token).digest()


def _make_backend(options: Any, _: object) -> _C.WireBackend:
    return _C.WireBackend(
        endpoint(),
        options.store,
        options.group_id,
        options.group_rank,
        options.group_size,
        options.timeout,
    )


def keep_for_good(found: object) -> None:
    """Never destroy an object."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def _forget() -> None:
    global _process
    keep_for_good(_process)  # its endpoints have threads that are not here
    _process = _Endpoints()


atexit.register(lambda: _process.close())  # those that are present then
os.register_at_fork(after_in_child=_forget)
