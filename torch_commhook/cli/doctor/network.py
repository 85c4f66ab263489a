"""Checks of the network: the interfaces, and the address that Gloo takes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from torch_commhook.addresses import can_listen, interfaces, loopback
from torch_commhook.cli.doctor.findings import Finding, first_line
from torch_commhook.cli.doctor.settings import Settings

INTERFACES = "GLOO_SOCKET_IFNAME"

_STATES = Path("/sys/class/net")


@dataclass(frozen=True)
class GlooAddress:
    """The address at which Gloo listens.

    Attributes:
        address: an IPv4 or IPv6 address.
        reason: the reason for Gloo's choice.
    """

    address: str
    reason: str

    @property
    def is_loopback(self) -> bool:
        return ip_address(self.address).is_loopback


class NoAddressError(Exception):
    """Gloo finds no address; the text says why."""


def check_network(settings: Settings) -> Iterator[Finding]:
    """The interfaces with their addresses, Gloo's address, encryption, and torch's backends."""
    found = interfaces()
    texts = [_described(name, addresses) for name, addresses in found.items()]
    yield Finding("network", "interfaces", "; ".join(texts) or "none")
    yield _taken(found, settings)
    yield _encryption()
    yield from _available()


def _described(name: str, addresses: list[str]) -> str:
    is_down = _state(name) == "down"
    return f"{name} {', '.join(addresses) or 'without an address'}{' (down)' if is_down else ''}"


def _state(name: str) -> str:
    try:
        return (_STATES / name / "operstate").read_text().strip()
    except OSError:
        return "unknown"


def gloo_address(found: dict[str, list[str]] | None = None) -> GlooAddress:
    """The address at which Gloo would listen.

    Gloo takes the first interface in GLOO_SOCKET_IFNAME. Without this variable, it takes the
    first address of the host's name on which it can listen, or 127.0.0.1 if there is none.

    Args:
        found: the result of :func:`interfaces`; None calls it.

    Raises:
        NoAddressError: an interface in GLOO_SOCKET_IFNAME is missing or has no address; or the
            host's name has none either, and the host has no IPv4.
    """
    found = interfaces() if found is None else found
    names = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
    for name in names:
        if name not in found:
            raise NoAddressError(f"{INTERFACES} names {name}, and this host has no such interface")
        if not found[name]:
            raise NoAddressError(f"{INTERFACES} names {name}, which has no address")
    if names:
        return GlooAddress(found[names[0]][0], f"on {names[0]}, by {INTERFACES}")
    host = socket.gethostname()
    for address in _addresses_of(host):
        if can_listen(address):
            owners = [name for name, addresses in found.items() if address in addresses]
            where = f"on {owners[0]}, " if owners else ""
            return GlooAddress(address, f"{where}to which the host's name {host} resolves")
    why = f"the host's name {host} resolves to no address of this host"
    if loopback() != "127.0.0.1":
        raise NoAddressError(f"{why}, which has IPv6 alone, and {INTERFACES} is not set")
    return GlooAddress("127.0.0.1", f"since {why}")


def _addresses_of(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(each[4][0]) for each in found]


def _taken(found: dict[str, list[str]], settings: Settings) -> Finding:
    name = "Gloo listens at"
    usable = [each for each, addresses in found.items() if _reaches_others(addresses)]
    choice = f" (this host has {', '.join(usable)})" if usable else ""
    try:
        taken = gloo_address(found)
    except NoAddressError as error:
        unset = ", or unset it" if os.environ.get(INTERFACES) else ""
        return Finding(
            "network",
            name,
            str(error),
            "error",
            f"Set {INTERFACES} to an interface that other hosts reach{choice}{unset}.",
        )
    value = f"{taken.address}, {taken.reason}"
    if not taken.is_loopback:
        return Finding("network", name, value)
    value += "; ranks on other hosts cannot reach it"
    place = settings.place
    if place is None or place.local_size >= place.size:
        return Finding("network", name, value)
    return Finding(
        "network",
        name,
        value,
        "error",
        f"Set {INTERFACES} to an interface that other hosts reach{choice}.",
    )


def _encryption() -> Finding:
    """Whether the library's connections are proven and encrypted, and with what."""
    try:
        from torch_commhook import _C
        from torch_commhook.collectives import wire

        if not wire.token_key():
            return Finding("network", "encryption", f"none, since {wire.TOKEN_FILE} is not set")
        text = f"TLS 1.3 with the token in {wire.TOKEN_FILE}, by {_C.tls_version()}"
        return Finding("network", "encryption", text)
    except ImportError:
        return Finding("network", "encryption", "not known, since the native libraries do not load")
    except RuntimeError as error:  # the token's, or OpenSSL's
        advice = "give the variable the name of a file with the same token on all ranks"
        return Finding("network", "encryption", first_line(error), "error", advice)


def _reaches_others(addresses: list[str]) -> bool:
    return any(not ip_address(address).is_loopback for address in addresses)


def _available() -> Iterator[Finding]:
    try:
        import torch.distributed as dist
    except (ImportError, OSError):
        return
    if not dist.is_available():
        yield Finding(
            "network",
            "torch.distributed",
            "not in this torch",
            "error",
            "Install a torch that was built with torch.distributed.",
        )
        return
    if dist.is_gloo_available():
        yield Finding("network", "Gloo", "available")
    else:
        yield Finding(
            "network",
            "Gloo",
            "not in this torch",
            "warning",
            "Install a torch with Gloo: without it ranks cannot agree on a step that fails.",
        )
    yield Finding(
        "network", "NCCL", "available" if dist.is_nccl_available() else "not in this torch"
    )
