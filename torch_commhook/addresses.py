"""The addresses of this host."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv6Address
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_IPV6 = Path("/proc/net/if_inet6")


def interfaces() -> dict[str, list[str]]:
    """The addresses of each network interface, IPv4 first; an empty list if unknown."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    for name, addresses in found.items():
        addresses += _ipv4(name)
    for name, address in _ipv6():
        found.setdefault(name, []).append(address)
    return found


def _ipv4(interface: str) -> list[str]:
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
    except (ImportError, OSError):  # another system; it has none
        return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6() -> Iterator[tuple[str, str]]:
    try:
        lines = _IPV6.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, _, _, _, name = line.split()
        address = IPv6Address(int(number, 16))
        if not address.is_link_local:
            yield name, str(address)


def family_of(address: str) -> socket.AddressFamily:
    """The family of an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def can_listen(address: str) -> bool:
    """Whether this process can listen at an IPv4 or IPv6 address."""
    try:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def loopback() -> str:
    """The loopback address: 127.0.0.1, or ::1 on a host with IPv6 alone."""
    only_v6 = not can_listen("127.0.0.1") and can_listen("::1")
    return "::1" if only_v6 else "127.0.0.1"


def with_port(host: str, port: object) -> str:
    """The text of a host and a port; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"


def host_and_port(store: str) -> tuple[str, int]:
    """The host and port of a store's text.

    Args:
        store: ``host:port``. An IPv6 address may be in brackets: ``[::1]:29400``.

    Raises:
        ValueError: the text is not ``host:port``.
    """
    host, _, port = store.rpartition(":")
    is_v6 = ":" in host
    if host.startswith("[") and host.endswith("]"):
        host, is_v6 = host[1:-1], True
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"Elastic: store must be 'host:port', got {store!r}")
    if is_v6:
        try:
            IPv6Address(host)
        except ValueError:
            raise ValueError(
                "Elastic: store must be 'host:port', or '[address]:port' with an IPv6 address, "
                f"got {store!r}"
            ) from None
    return host, int(port)
