"""Checks between processes: addresses, connections, ranks, the default group's backends."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from torch_commhook.addresses import can_listen, family_of, interfaces, loopback
from torch_commhook.cli.doctor.build import HOOKS, averaged, library_error
from torch_commhook.cli.doctor.meeting import REPORT_IT, Finding, Meeting, Settings, first_line

# ---- checks of the network: the interfaces, and the address that Gloo takes ----------------------


INTERFACES = "GLOO_SOCKET_IFNAME"

_STATES = Path("/sys/class/net")


class GlooAddress(NamedTuple):
    """The IPv4 or IPv6 address at which Gloo listens, and the reason for Gloo's choice."""

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
    yield Finding("interfaces", "; ".join(texts) or "none")
    yield _taken(found, settings)
    yield _encryption()
    yield from _available()


def _described(name: str, addresses: list[str]) -> str:
    state = ""
    with suppress(OSError):
        state = (_STATES / name / "operstate").read_text().strip()
    down = " (down)" if state == "down" else ""
    return f"{name} {', '.join(addresses) or 'without an address'}{down}"


def gloo_address(found: dict[str, list[str]] | None = None) -> GlooAddress:
    """The address at which Gloo would listen.

    Gloo takes the first interface in GLOO_SOCKET_IFNAME. Without this variable, it takes the
    first address of the host's name on which it can listen, or 127.0.0.1 if there is none.

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
    resolved: list[Any] = []
    with suppress(OSError):
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    for address in (str(each[4][0]) for each in resolved):
        if can_listen(address):
            owners = [name for name, addresses in found.items() if address in addresses]
            where = f"on {owners[0]}, " if owners else ""
            return GlooAddress(address, f"{where}to which the host's name {host} resolves")
    why = f"the host's name {host} resolves to no address of this host"
    if loopback() != "127.0.0.1":
        raise NoAddressError(f"{why}, which has IPv6 alone, and {INTERFACES} is not set")
    return GlooAddress("127.0.0.1", f"since {why}")


def _taken(found: dict[str, list[str]], settings: Settings) -> Finding:
    name = "Gloo listens at"
    usable = [
        each
        for each, addresses in found.items()
        if not all(ip_address(address).is_loopback for address in addresses)
    ]
    choice = f" (this host has {', '.join(usable)})" if usable else ""
    advice = f"Set {INTERFACES} to an interface that other hosts reach{choice}"
    try:
        taken = gloo_address(found)
    except NoAddressError as error:
        unset = ", or unset it" if os.environ.get(INTERFACES) else ""
        return Finding(name, str(error), "error", f"{advice}{unset}.")
    value = f"{taken.address}, {taken.reason}"
    if not taken.is_loopback:
        return Finding(name, value)
    value += "; ranks on other hosts cannot reach it"
    place = settings.place
    if place is None or place.local_size >= place.size:
        return Finding(name, value)
    return Finding(name, value, "error", f"{advice}.")


def _encryption() -> Finding:
    """Whether the library's connections are proven and encrypted, and with what."""
    try:
        from torch_commhook import _C
        from torch_commhook.collectives import wire

        if not wire.token_key():
            return Finding("encryption", f"none, since {wire.TOKEN_FILE} is not set")
        text = f"TLS 1.3 with the token in {wire.TOKEN_FILE}, by {_C.tls_version()}"
        return Finding("encryption", text)
    except ImportError:
        return Finding("encryption", "not known, since the native libraries do not load")
    except RuntimeError as error:  # the token's, or OpenSSL's
        advice = "give the variable the name of a file with the same token on all ranks"
        return Finding("encryption", first_line(error), "error", advice)


def _available() -> Iterator[Finding]:
    try:
        import torch.distributed as dist
    except (ImportError, OSError):
        return
    if not dist.is_available():
        advice = "Install a torch that was built with torch.distributed."
        yield Finding("torch.distributed", "not in this torch", "error", advice)
        return
    if dist.is_gloo_available():
        yield Finding("Gloo", "available")
    else:
        advice = "Install a torch with Gloo: without it ranks cannot agree on a step that fails."
        yield Finding("Gloo", "not in this torch", "warning", advice)
    yield Finding("NCCL", "available" if dist.is_nccl_available() else "not in this torch")


# ---- connects each rank to each other rank, at the addresses that Gloo uses ----------------------


_TOKEN_BYTES = 16
_AT_ONCE = 16
#: A rank in the same network answers at once.
_MOST_SECONDS = 5.0


class Listener(socketserver.TCPServer):
    """Listens at an address of this host, and tells its token to each process that connects.

    Raises:
        OSError: this process cannot listen at the address.
    """

    request_queue_size = 512

    def __init__(self, address: str) -> None:
        self.address_family = family_of(address)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        super().__init__((address, 0), socketserver.BaseRequestHandler)
        port = self.server_address[1]
        self.place = {"address": address, "port": port, "token": self._token.hex()}
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def finish_request(self, request: Any, client_address: object) -> None:
        """Tell the token; the server then closes the connection."""
        with suppress(OSError):
            request.sendall(self._token)


def failed_connections(meeting: Meeting, timeout: float) -> dict[int, str]:
    """Connect to all other ranks. All ranks must call this function.

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
            listener.shutdown()
            listener.server_close()


def _connect_to_all(meeting: Meeting, timeout: float) -> dict[int, str]:
    others = [rank for rank in meeting.ranks() if rank != meeting.rank]
    places = meeting.values("listens", others, timeout)
    limit = min(timeout, _MOST_SECONDS)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        errors = pool.map(lambda text: _connect(json.loads(text), limit), places.values())
        reasons = dict(zip(places, errors, strict=True))
    absent = f"it does not listen within {timeout:g} s"
    found = {rank: reasons.get(rank, absent) for rank in others}
    return {rank: reason for rank, reason in found.items() if reason is not None}


def _connect(place: Mapping[str, str], timeout: float) -> str | None:
    """Connect to a rank that listens at ``place``; returns the reason if that fails."""
    if "error" in place:
        return f"it listens nowhere: {place['error']}"
    address, port = place["address"], int(place["port"])
    where = f"at {address} port {port}"
    note = ", which is loopback of its own host" if ip_address(address).is_loopback else ""
    try:
        with (
            socket.create_connection((address, port), timeout=timeout) as connection,
            connection.makefile("rb") as stream,
        ):
            token = stream.read(_TOKEN_BYTES)
    except OSError as error:
        return f"{where}{note}: {error.strerror or error}"
    if token.hex() != place["token"]:
        return f"{where}{note}: another program answers"
    return None


# ---- checks that ranks reach each other ----------------------------------------------------------


#: To import torch in three processes on a slow disk.
_START_SECONDS = 120.0
_MOST_PAIRS = 10
_ONE_HOST = "two processes on this host"
_ADVICE = (
    "Let these hosts connect to all TCP ports of each other, or set "
    f"{INTERFACES} on each to an interface in a network that they share."
)
_ADVICE_ON_ONE_HOST = (
    f"Set {INTERFACES} to an interface of this host or unset it, and let this host connect to "
    "all of its own TCP ports."
)


def check_ranks(settings: Settings) -> Iterator[Finding]:
    """Whether the launcher's ranks connect; without a launcher, two processes on this host."""
    try:
        import torch.distributed as dist
    except (ImportError, OSError):
        yield Finding(_ONE_HOST, "not tried, since torch does not load")
        return
    if not (dist.is_available() and dist.is_gloo_available()):
        yield Finding(_ONE_HOST, "not tried, since torch has no Gloo")
    elif settings.meeting is not None:
        yield from _all_ranks(settings.meeting, settings.timeout)
    elif settings.place is None or settings.place.size == 1:
        yield from _two_processes(settings.timeout)


def _two_processes(timeout: float) -> Iterator[Finding]:
    """Start this check by torchrun as two ranks on this host."""
    torchrun = ["torch.distributed.run", "--standalone", "--nnodes", "1", "--nproc-per-node", "2"]
    check = ["torch_commhook", "doctor", "--only", "ranks", "--json", "--timeout", f"{timeout:g}"]
    try:
        with subprocess.Popen(
            [sys.executable, "-m", *torchrun, "--local-addr", loopback(), "-m", *check],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=_START_SECONDS + timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks, too
                raise
        found = [Finding(**fields) for fields in json.loads(out)["findings"]]
    except subprocess.TimeoutExpired as error:
        yield Finding(_ONE_HOST, f"no answer within {error.timeout:g} s", "error", _ADVICE)
        return
    except (ValueError, KeyError):
        # The ranks' own last words come before torchrun's report.
        words = err.partition("torch.distributed.elastic")[0].strip().splitlines()
        last = words[-1].strip() if words else "no output"
        value = f"torchrun ended with {process.returncode}: {last}"
        yield Finding(_ONE_HOST, value, "error", _ADVICE)
        return
    for finding in found:
        advice = "" if finding.level == "ok" else _ADVICE_ON_ONE_HOST
        yield Finding(f"{_ONE_HOST}, {finding.name}", finding.value, finding.level, advice)


def _all_ranks(meeting: Meeting, timeout: float) -> Iterator[Finding]:
    import torch.distributed as dist

    mine = failed_connections(meeting, timeout)
    meeting.store.set(f"failed/{meeting.rank}", json.dumps(mine))
    reports = meeting.values("failed", meeting.ranks(), 2 * timeout)
    failed = {
        (rank, int(peer)): reason
        for rank, text in reports.items()
        for peer, reason in json.loads(text).items()
    }
    absent = sorted(set(range(meeting.size)) - set(reports))
    if not failed and not absent:
        sums = _sum_error(meeting, timeout)
        if meeting.rank == 0:
            pairs = meeting.size * (meeting.size - 1) // 2
            many = "pair of ranks connects" if pairs == 1 else "pairs of ranks connect"
            yield Finding("connections", f"{'' if pairs == 1 else 'all '}{pairs} {many}")
        yield from _tried(meeting, "all-reduce over Gloo", sums, _ADVICE)
        can_try = sums is None and library_error() is None and not dist.is_initialized()
        meeting.store.set(f"can_try/{meeting.rank}", str(can_try))
        answers = meeting.values("can_try", range(meeting.size), timeout).values()
        if list(answers) == ["True"] * meeting.size:
            error = _hook_error(meeting, timeout)
            yield from _tried(meeting, f"hook {HOOKS[0]} over Gloo", error, REPORT_IT)
    elif meeting.rank == 0:
        yield from _of_failed(failed, absent, timeout)


def _tried(meeting: Meeting, name: str, error: str | None, advice: str) -> Iterator[Finding]:
    if error is not None:
        yield Finding(name, error, "error", advice)
    elif meeting.rank == 0:
        yield Finding(name, "works")


def _of_failed(
    failed: Mapping[tuple[int, int], str], absent: list[int], timeout: float
) -> Iterator[Finding]:
    for rank in absent:
        advice = "Read the output of this rank, and look whether its host reaches MASTER_ADDR."
        yield Finding(f"rank {rank}", f"it has not come within {timeout:g} s", "error", advice)
    for (rank, peer), reason in list(failed.items())[:_MOST_PAIRS]:
        advice = _ADVICE
        if "loopback" in reason:
            advice = f"Set {INTERFACES} on rank {peer}'s host to an interface that others reach."
        elif "listens nowhere" in reason:
            advice = f"Set {INTERFACES} on rank {peer}'s host to an interface that it has."
        yield Finding(f"rank {rank} cannot connect to rank {peer}", reason, "error", advice)
    if len(failed) > _MOST_PAIRS:
        more = len(failed) - _MOST_PAIRS
        yield Finding("connections", f"{more} more of {len(failed)} fail", "error", _ADVICE)


def _sum_error(meeting: Meeting, timeout: float) -> str | None:
    """Add up numbers of all ranks over Gloo; the error, or None."""
    import torch
    import torch.distributed as dist

    size = meeting.size
    try:
        store = dist.PrefixStore("gloo", meeting.store)
        # PyTorch's annotations lack the class's collectives.
        make: Any = dist.ProcessGroupGloo
        group = make(store, meeting.rank, size, timedelta(seconds=timeout))
        number = torch.full((1,), meeting.rank + 1.0, dtype=torch.float64, device="cpu")
        group.allreduce([number]).wait()
    except RuntimeError as error:
        return first_line(error)
    expected = size * (size + 1) / 2
    return None if number.item() == expected else f"gives {number.item()}, not {expected}"


def _hook_error(meeting: Meeting, timeout: float) -> str | None:
    """Average gradients of all ranks in a default group over Gloo; the error, or None."""
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("hook", meeting.store),
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=timedelta(seconds=timeout),
        )
        gradient = averaged(meeting.rank, HOOKS[0])
    except Exception as error:  # doctor reports any error
        return f"{type(error).__name__}: {first_line(error)}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    expected = (meeting.size + 1) / 2
    is_near = bool((gradient - expected).abs().max() < 1e-5 * expected)
    return None if is_near else f"gives {gradient.unique().tolist()}, not {expected}"


# ---- checks of the default process group's backends ----------------------------------------------


def check_group(settings: Settings) -> Iterator[Finding]:
    """The default group's backends, or those that ``init_process_group`` would take."""
    try:
        import torch.distributed as dist
    except (ImportError, OSError):
        return
    if not dist.is_available():
        return
    if dist.is_initialized():
        source, config = "the default group", dist.get_backend_config()
    elif settings.backend is not None:
        source, config = f"init_process_group({settings.backend!r})", settings.backend
    elif settings.place is not None:
        source, config = "init_process_group()", "undefined"
    else:
        return
    yield backends(source, config)


def by_device(config: str) -> dict[str, str]:
    """The backend for each kind of device in a configuration such as ``"cpu:gloo,cuda:nccl"``.

    ``"undefined"`` is that of ``init_process_group()``, with the accelerator's backend.

    Raises:
        ValueError, RuntimeError: ``init_process_group`` would refuse it.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import BackendConfig

    text = config.lower().strip()
    if not text:
        raise ValueError("the configuration names no backend")
    if ":" not in text:
        dist.is_backend_available(text)  # torch 2.14 registers some backends only when asked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backends of unknown devices
        found = BackendConfig(dist.Backend(text)).get_device_backend_map()
    for device in found:
        torch.device(device)  # refuses an unknown one
    return {str(device): str(backend) for device, backend in found.items()}


def backends(source: str, config: str) -> Finding:
    """Describe a configuration of backends; its source names the finding."""
    import torch.distributed as dist

    try:
        found = by_device(config)
    except (ValueError, RuntimeError) as error:
        advice = "Name a backend, or one for each kind of device: cpu:gloo,cuda:nccl."
        text = " ".join(first_line(error).split())
        return Finding(source, f"{config!r}: {text}", "error", advice)
    value = ", ".join(f"{device} tensors travel over {name}" for device, name in found.items())
    if config != "undefined":
        value = f"{config}: {value}"
    missing = [
        name for name in dict.fromkeys(found.values()) if not dist.is_backend_available(name)
    ]
    if missing:
        value = f"{value}; this torch has no {' and no '.join(missing)}"
        advice = "Choose backends that this torch has, or install a build of torch with them."
        return Finding(source, value, "error", advice)
    cpu = found.get("cpu", "gloo")
    if cpu != "gloo":
        right = ",".join(f"{device}:{name}" for device, name in {**found, "cpu": "gloo"}.items())
        value = f"{value}; ranks cannot agree over {cpu} on a step that fails"
        advice = f"Take gloo for the CPU: init_process_group('{right}')."
        return Finding(source, value, "warning", advice)
    value = f"{value}; ranks agree on each step over gloo"
    others = dict.fromkeys(name for name in found.values() if name != "gloo")
    if not others:
        return Finding(source, value)
    value += f", and {' and '.join(others)} cannot take back a collective of a step that fails"
    advice = "After an error in backward(), call abort() on all ranks, make a new group and "
    return Finding(source, value, "warning", f"{advice}attach again.")
