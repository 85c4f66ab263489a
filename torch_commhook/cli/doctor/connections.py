"""Connects each rank to each other rank, at the addresses that Gloo uses."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address

from torch_commhook.addresses import family_of
from torch_commhook.cli.doctor.meeting import Meeting
from torch_commhook.cli.doctor.network import NoAddressError, gloo_address

_TOKEN_BYTES = 16
_AT_ONCE = 16
#: A rank in the same network answers at once.
_MOST_SECONDS = 5.0


class Listener:
    """Listens at an address, and tells its token to each process that connects.

    Args:
        address: an IPv4 or IPv6 address of this host; the system chooses a free port.

    Raises:
        OSError: this process cannot listen at the address.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), family=family_of(address), backlog=512)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._thread = threading.Thread(target=self._accept, name="doctor", daemon=True)
        self._thread.start()
        self.place = {
            "address": address,
            "port": self._socket.getsockname()[1],
            "token": self._token.hex(),
        }

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError):
                connection.sendall(self._token)

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # accept() would go on after close()
        self._socket.close()
        self._thread.join()


def failed_connections(meeting: Meeting, timeout: float) -> dict[int, str]:
    """Connect to all other ranks. All ranks must call this function.

    Args:
        meeting: the meeting of all ranks.
        timeout: the seconds for each single wait.

    Returns:
        The reason for each rank that has come, but that this rank cannot connect to.
    """
    listener = None
    try:
        listener = Listener(gloo_address().address)
        mine: Mapping[str, object] = listener.place
    except (NoAddressError, OSError) as error:
        mine = {"error": str(error)}
    meeting.store.set(f"listens/{meeting.rank}", json.dumps(mine))
    try:
        return _connect_to_all(meeting, timeout)
    finally:
        meeting.store.set(f"connected/{meeting.rank}", "")
        if listener is not None:
            meeting.values("connected", meeting.ranks(), timeout)
            listener.close()


def _connect_to_all(meeting: Meeting, timeout: float) -> dict[int, str]:
    others = [rank for rank in meeting.ranks() if rank != meeting.rank]
    places = meeting.values("listens", others, timeout)
    failed = {rank: f"it does not listen within {timeout:g} s" for rank in others}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        limit = min(timeout, _MOST_SECONDS)
        errors = pool.map(lambda text: _connect(json.loads(text), limit), places.values())
        for rank, error in zip(places, errors, strict=True):
            if error is None:
                del failed[rank]
            else:
                failed[rank] = error
    return failed


def _connect(place: Mapping[str, str], timeout: float) -> str | None:
    """Connect to a rank that listens at ``place``; returns the reason if that fails."""
    if "error" in place:
        return f"it listens nowhere: {place['error']}"
    address, port = place["address"], int(place["port"])
    where = f"at {address} port {port}"
    note = ", which is loopback of its own host" if ip_address(address).is_loopback else ""
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            connection.settimeout(timeout)
            token = b""
            while len(token) < _TOKEN_BYTES:
                part = connection.recv(_TOKEN_BYTES - len(token))
                if not part:
                    break
                token += part
    except OSError as error:
        return f"{where}{note}: {error.strerror or error}"
    if token.hex() != place["token"]:
        return f"{where}{note}: another program answers"
    return None
