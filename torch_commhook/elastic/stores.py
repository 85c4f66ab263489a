"""The stores through which the ranks of a training meet.

With a token (``COMMHOOK_TOKEN_FILE``) a store listens at a port of its own host alone. Before it,
at the address that others reach, is one end of a tunnel, which continues only connections whose
other side has the token. The other end is in each client's process: the client connects to a port
of its own host.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.addresses import family_of, host_and_port, interfaces, loopback, with_port
from torch_commhook.collectives.wire import TOKEN_FILE, token_key
from torch_commhook.step.connected_group import innermost

_log = logging.getLogger("torch_commhook.elastic")
_lock = threading.Lock()
#: The ports of the tunnels of this process, by the process, what they lead to and their key.
_tunnels: dict[tuple[int, str, int, bytes], int] = {}


def store_of(store: str | dist.Store | None, timeout: float) -> tuple[dist.Store, str | None]:
    """The store where ranks meet, and its host if that is known.

    Args:
        store: ``"host:port"``, a store, or None for ``MASTER_ADDR`` and ``MASTER_PORT``.
        timeout: how long its clients wait, in seconds.

    Raises:
        ValueError: there is no address.
        RuntimeError: as :func:`token_key`.
        torch.distributed.DistNetworkError: there is a token, and what listens there has not shown
            within ``timeout`` that it has the same one.
    """
    key = token_key()
    if key and not isinstance(store, str):
        _log.warning(
            "the token in %s does not protect this training's store: whoever reaches it can "
            "change it. Give Elastic(store='host:port') the address of a store that "
            "python -m torch_commhook store runs with the same token",
            TOKEN_FILE,
        )
    if isinstance(store, dist.Store):
        return store, getattr(innermost(store), "host", None)
    if store is None:
        found = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not all(found):
            raise ValueError(
                "Elastic: store must be given, 'host:port', because MASTER_ADDR and MASTER_PORT "
                "are not set; python -m torch_commhook store runs one"
            )
        store, key = with_port(*map(str, found)), b""
    host, port = host_and_port(store)
    near, near_port = (loopback(), _tunnel_to(host, port, key, timeout)) if key else (host, port)
    client = dist.TCPStore(
        near,
        near_port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return client, host


def _tunnel_to(host: str, port: int, key: bytes, timeout: float) -> int:
    """The port of this process's end of a tunnel."""
    place = os.getpid(), host, port, key
    with _lock:
        if place not in _tunnels:
            listener = socket.create_server((loopback(), 0), family=family_of(loopback()))
            own = listener.getsockname()[1]
            tunnel = _tunnel(listener, host, port, key, is_client=True)
            try:
                tunnel.prove(timeout)
            except BaseException:  # also Ctrl-C
                tunnel.close()
                raise
            _tunnels[place] = own
        return _tunnels[place]


def _tunnel(
    listener: socket.socket, host: str, port: int, key: bytes, *, is_client: bool
) -> _C.WireTunnel:
    """A tunnel that ends with this process."""
    listener.setblocking(False)
    tunnel = _C.WireTunnel(listener.fileno(), host, port, key, is_client)
    listener.detach()
    own = os.getpid()
    atexit.register(lambda: tunnel.close() if os.getpid() == own else None)
    return tunnel


def serve(host: str, port: int) -> tuple[dist.Store, int]:
    """A store that listens on one address only, and its port.

    Raises:
        OSError: the host is unknown, or the address is taken or not of this machine.
        RuntimeError: as :func:`token_key`; or there is a token, and no OpenSSL 3.
    """
    key = token_key()
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if host == "*" or (re.match(r"(?i)fe[89ab].:", bare) and "%" not in bare):
            raise UnicodeError
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise OSError(
            "the host must be a name or an address of this machine, without a port, such as "
            "127.0.0.1, ::1 or fe80::1%eth0; 0.0.0.0 or :: means all networks"
            + (f" ({error.strerror})" if isinstance(error, OSError) else "")
        ) from None
    family, _, _, _, address = found[0]
    every = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=every)
    own = listener.getsockname()[1]
    if not key:
        return _store_at(listener), own
    near = socket.create_server((loopback(), 0), family=family_of(loopback()), backlog=1024)
    store = _store_at(near)
    _tunnel(listener, loopback(), store.port, key, is_client=False)
    return store, own


def _store_at(listener: socket.socket) -> dist.TCPStore:
    # With the scope of a link-local address, such as fe80::1%eth0.
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    bound, port = socket.getnameinfo(listener.getsockname(), numeric)
    # TCPStore would try for minutes to connect to an address of many hosts, such as 224.0.0.1.
    socket.create_connection((bound, int(port)), timeout=10).close()
    # The store now owns the descriptor.
    return dist.TCPStore(
        bound,
        int(port),
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def own_address(host: str | None) -> str:
    """The address of this process's host, as others see it, by that of a store."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        found = interfaces().get(interface)
        if found:
            return found[0]
    for family in (socket.AF_INET, socket.AF_INET6) if host else ():
        with suppress(OSError):
            ((*_, towards), *_) = socket.getaddrinfo(host, 1, family, socket.SOCK_DGRAM)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(towards)  # sends nothing
                address: str = probe.getsockname()[0]
                return address
    return loopback()
