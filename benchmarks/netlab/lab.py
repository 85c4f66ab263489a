"""Hosts as network namespaces, joined by links with a limited rate.

Two hosts share one link. With more, each host has a link to a bridge in a separate namespace. Each
end of a link has a token bucket, so that each direction has the full rate, as on Ethernet. If links
have a delay or lose frames, even two hosts are on a switch, and a process forwards its frames
(``distance.py``).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .distance import Forwarder, buffer_limit, check_compiler, check_distance, raise_buffers
from .ranks import GRACE_SECONDS, run_ranks
from .signals import undisturbed
from .tools import LabError, call, check_prerequisites
from .units import format_rate, parse_rate

#: ``ip netns`` keeps the names here.
_NAMES = Path("/run/netns")
#: Each host's end of its link.
INTERFACE = "eth0"
_NEAR_INTERFACE = "eth1"
_PREFIX = "netlab"
_BRIDGE, _SWITCH = "br0", "switch"
_MOST_HOSTS = 250
_NOBODY = "02:00:00:00:00:00"  # no network card has this address: theirs are random
_PORT = 29500  # for the rendezvous: each host has its own ports
_END_SECONDS = 10.0
_UP_SECONDS = 10.0
# A kernel passes packets on in bundles of up to 64 KiB. A smaller burst would make it split them,
# and the ranks would lose the processors' time for that; network cards split them on real links.
_LEAST_BURST = 128 * 1024
_BURST_SECONDS = 0.005  # a busy kernel may be late by this; what it missed would be lost

# With more hosts, they do not ask for each other's addresses: the kernel keeps 1,024 for all
# namespaces.
_MOST_ASKING = 16

_numbers = itertools.count()


@dataclass(frozen=True)
class Link:
    """The bytes that have passed a host's link, from the counters of its interface.

    They include TCP's and IP's headers and acknowledgements. A bundle of packets counts one header,
    although the token bucket counts all: a link carries up to 7% more than the payload, of which
    the counters may see less than 1%.
    """

    sent: int
    received: int


class Lab:
    """Hosts and links, for a ``with`` block. Its end removes them and ends their processes.

    Args:
        hosts: 2 to 250.
        rate: of each link, each way: ``"200mbit"``, or bits per second.
        burst: bytes that may pass at once after a pause. By default those of five milliseconds, at
            least 128 KiB. With less, a link does not reach its rate while the ranks keep all
            processors busy.
        queue_seconds: the longest wait of a packet; after that it is dropped.
        congestion: TCP's congestion control on the hosts, such as ``"reno"``; by default the
            system's.
        delay: of each frame between two hosts, in seconds, each way: a round trip takes twice that.
            None for no delay; :meth:`set_delay` cannot change this.
        loss: share of frames between hosts to drop at random: 0.01 for 1%. Each packet is then a
            separate frame: otherwise whole bundles of up to 64 KiB would be lost.

    With a delay or a loss, TCP's buffers on the hosts may grow to four times the bytes that the
    link carries in a round trip.

    Raises:
        ValueError: a number is out of range.
        LabError: on entry, if namespaces or links cannot be made, with the reason.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | float,
        *,
        burst: int | None = None,
        queue_seconds: float = 0.05,
        congestion: str | None = None,
        delay: float | None = None,
        loss: float = 0.0,
    ) -> None:
        if not 2 <= hosts <= _MOST_HOSTS:
            raise ValueError(f"Lab: hosts must be 2 to {_MOST_HOSTS}, got {hosts}")
        if burst is not None and not 2000 <= burst < 1 << 31:
            raise ValueError(f"Lab: burst must be 2000 bytes (a packet) to 2 GiB, got {burst}")
        if not 1e-3 <= queue_seconds <= 10:
            raise ValueError(
                f"Lab: queue_seconds must be 0.001 to 10 seconds, got {queue_seconds:g}"
            )
        check_distance(delay, loss)
        self.hosts = hosts
        self.rate = parse_rate(rate)
        self.delay = delay
        self.loss = loss
        self.burst = burst
        self.queue_seconds = queue_seconds
        self.congestion = congestion
        self._forwarder: Forwarder | None = None
        self._buffer_limit = 0  # the limit on all hosts
        self._name = ""

    @property
    def _is_far(self) -> bool:
        """Whether frames are delayed or dropped."""
        return self.delay is not None or self.loss > 0

    @property
    def _has_switch(self) -> bool:
        return self.hosts > 2 or self._is_far

    # ---- making and removing ---------------------------------------------------------------------

    def __enter__(self) -> Lab:
        check_prerequisites()
        if self._is_far:
            check_compiler()
        remove_leftovers()
        self._name = f"{_owner(os.getpid())}-{next(_numbers)}"
        self._buffer_limit = 0
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts' processes, and remove the hosts and their links."""
        if self._name:
            with undisturbed():
                name, self._name = self._name, ""
                forwarder, self._forwarder = self._forwarder, None
                if forwarder is not None:
                    forwarder.close()
                _remove(f"{name}-")

    def _make(self) -> None:
        for host in range(self.hosts):
            call("ip", "netns", "add", self.namespace(host))
        if self._has_switch:
            self._make_switch(self._switch, INTERFACE, has_bridge=not self._is_far)
        else:
            first, second = self.namespace(0), self.namespace(1)
            _add_link(first, INTERFACE, second, INTERFACE)
        for host in range(self.hosts):
            name = self.namespace(host)
            call("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "-n", name, "link", "set", INTERFACE, "up")
            if self.congestion is not None:
                _set_congestion(name, self.congestion)
            if self.loss > 0:
                call("ip", "-n", name, "link", "set", INTERFACE, "gso_max_segs", "1")
        self.set_rate(self.rate)
        self._wait_until_up()
        if self._is_far:
            ports = [(_port(host), str(self._shown(host)["address"])) for host in range(self.hosts)]
            self._forwarder = Forwarder(self._switch, ports, self.delay or 0.0, self.loss)
        if self.hosts > _MOST_ASKING:
            self._tell_addresses()

    def _tell_addresses(self) -> None:
        """Tell each host the others' addresses, so that it need not ask for them."""
        cards = [str(self._shown(host)["address"]) for host in range(self.hosts)]
        entries = [
            f"neigh replace {self.address(host)} lladdr {card} dev {INTERFACE} nud permanent\n"
            for host, card in enumerate(cards)
        ]
        for host in range(self.hosts):
            others = "".join(entries[:host] + entries[host + 1 :])
            call("ip", "-n", self.namespace(host), "-batch", "-", stdin=others)

    def _make_switch(self, switch: str, device: str, *, has_bridge: bool) -> None:
        """Make a namespace with a link to each host's interface ``device``."""
        call("ip", "netns", "add", switch)
        if has_bridge:
            call("ip", "-n", switch, "link", "add", _BRIDGE, "type", "bridge")
            call("ip", "-n", switch, "link", "set", _BRIDGE, "addrgenmode", "none", "up")
        master = ["master", _BRIDGE] if has_bridge else []
        for host in range(self.hosts):
            _add_link(self.namespace(host), device, switch, _port(host))
            call("ip", "-n", switch, "link", "set", _port(host), *master, "up")

    def add_near_network(self) -> str:
        """Join all hosts by a second network, as fast as this machine; returns its interface.

        For comparisons: ranks select the interface before they make a process group over it.
        """
        switch = f"{self.namespace(0).rpartition('-')[0]}-near"
        self._make_switch(switch, _NEAR_INTERFACE, has_bridge=True)
        for host in range(self.hosts):
            name, address = self.namespace(host), f"10.78.0.{host + 1}/24"
            call("ip", "-n", name, "addr", "add", address, "dev", _NEAR_INTERFACE)
            call("ip", "-n", name, "link", "set", _NEAR_INTERFACE, "up")
        return _NEAR_INTERFACE

    def _wait_until_up(self) -> None:
        # The kernel lets packets through up to a second after both ends exist.
        deadline = time.monotonic() + _UP_SECONDS
        down = list(range(self.hosts))
        while down:
            down = [host for host in down if self._shown(host)["operstate"] != "UP"]
            if down and time.monotonic() >= deadline:
                raise LabError(f"Lab: the link of host {down[0]} does not come up")

    def _shown(self, host: int) -> dict[str, Any]:
        """The output of ``ip`` for a host's end of its link."""
        command = ["ip", "-n", self.namespace(host), "-s", "-j", "link", "show", INTERFACE]
        (shown,) = json.loads(call(*command))
        return shown

    @property
    def _switch(self) -> str:
        return f"{self._name}-{_SWITCH}"

    def namespace(self, host: int) -> str:
        """The name of a host's namespace in ``ip netns``."""
        if not self._name:
            raise LabError("Lab: has no hosts outside of its with block")
        if not 0 <= host < self.hosts:
            raise ValueError(f"Lab: host must be 0 to {self.hosts - 1}, got {host}")
        return f"{self._name}-h{host}"

    def address(self, host: int) -> str:
        """A host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    # ---- links -----------------------------------------------------------------------------------

    def set_rate(self, rate: str | float) -> None:
        """Set the rate of all links, each way."""
        bits = parse_rate(rate)
        burst = self.burst_at(bits)
        ends = [(self.namespace(host), INTERFACE) for host in range(self.hosts)]
        if self._has_switch:
            ends += [(self._switch, _port(host)) for host in range(self.hosts)]
        for namespace, device in ends:
            bucket = ["rate", f"{bits}bit", "burst", f"{burst}b"]
            bucket += ["latency", f"{round(self.queue_seconds * 1e6)}us"]
            call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
        self.rate = bits
        self._raise_buffers()

    def burst_at(self, rate: str | float) -> int:
        """The bytes that may pass at once after a pause, on links with a rate."""
        return self.burst or max(_LEAST_BURST, int(parse_rate(rate) / 8 * _BURST_SECONDS))

    def set_delay(self, seconds: float) -> None:
        """Set the delay of frames between hosts, in seconds.

        Raises:
            ValueError: a number is out of range.
            LabError: outside of the ``with`` block, or if the lab was made without a delay.
        """
        check_distance(seconds, self.loss)
        if self._forwarder is None or self.delay is None:
            raise LabError("Lab.set_delay: needs a lab that was made with a delay")
        self.delay = seconds
        self._raise_buffers()
        self._forwarder.set(seconds, self.loss)

    def _raise_buffers(self) -> None:
        """Let TCP have as much data in flight as the links hold."""
        if self._is_far:
            limit = buffer_limit(self.rate, 2 * (self.delay or 0.0) + self.queue_seconds)
            if limit <= self._buffer_limit:
                return
            for host in range(self.hosts):
                raise_buffers(self.namespace(host), limit)
            self._buffer_limit = limit

    def set_link(self, host: int, *, up: bool) -> None:
        """Cut a host off, as if someone pulled its cable at the switch, or reconnect it.

        Raises:
            ValueError: there is no such host.
            LabError: outside of the ``with`` block, or if the lab has no switch: it has two hosts.
        """
        self.namespace(host)
        self._check_switch("Lab.set_link")
        call("ip", "-n", self._switch, "link", "set", _port(host), "up" if up else "down")

    @contextmanager
    def apart(self, first: int, second: int) -> Iterator[None]:
        """Keep two hosts from reaching each other in a ``with`` block; both reach all others.

        Raises:
            ValueError: there is no such host.
            LabError: outside of the lab's ``with`` block, or if it has no switch: it has two hosts.
        """
        self._check_switch("Lab.apart")
        for host, other in ((first, second), (second, first)):
            # Sends the frames to a network card that does not exist.
            place = [self.address(other), "dev", INTERFACE]
            entry = ["lladdr", _NOBODY, "nud", "permanent"]
            call("ip", "-n", self.namespace(host), "neigh", "replace", *place, *entry)
        try:
            yield
        finally:
            for host, other in ((first, second), (second, first)):
                place = [self.address(other), "dev", INTERFACE]
                call("ip", "-n", self.namespace(host), "neigh", "del", *place)

    def _check_switch(self, what: str) -> None:
        if not self._has_switch:
            raise LabError(f"{what}: needs a lab with more than two hosts, which are on a switch")

    def link_bytes(self) -> list[Link]:
        """The bytes that have passed each host's link since it was made."""
        links = []
        for host in range(self.hosts):
            counters = self._shown(host)["stats64"]
            links.append(Link(counters["tx"]["bytes"], counters["rx"]["bytes"]))
        return links

    # ---- ranks -----------------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        timeout: float | None = None,
        grace: float = GRACE_SECONDS,
        environment: Mapping[str, str] | None = None,
        output: Callable[[int, bool, bytes], None] | None = None,
    ) -> int:
        """Run ``command`` on each host as the ranks of one world, until all have ended.

        Args:
            command: the program and its arguments. The variables RANK, WORLD_SIZE, LOCAL_RANK,
                LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME tell it its place.
            ranks_per_host: ranks on each host. The first host has the first ranks.
            timeout: seconds after which all ranks are ended.
            grace: seconds after a rank's failure until the others are ended.
            environment: the ranks' environment, besides these variables; by default this process's.
            output: called with ``(rank, whether it is stderr, line)``, from several threads. By
                default lines go to stdout and stderr, with the rank before them.

        Returns:
            0 if all ranks' exit status is 0; otherwise that of the first rank that failed, 128 + n
            if signal n has killed it; ``TIMED_OUT`` (124) after the timeout.
        """
        places = []
        for rank in range(self.hosts * ranks_per_host):
            host, local_rank = divmod(rank, ranks_per_host)
            variables = dict(os.environ if environment is None else environment)
            variables |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.hosts * ranks_per_host),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": str(_PORT),
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            places.append((self.namespace(host), variables))
        try:
            return run_ranks(command, places, timeout=timeout, grace=grace, output=output)
        finally:  # remaining processes of the ranks would disturb the next run
            with undisturbed():
                for namespace, _ in places:
                    _end_processes(namespace)
            if self._forwarder is not None:
                self._forwarder.check()

    def __repr__(self) -> str:
        distance = "" if self.delay is None else f", {self.delay * 1e3:g} ms each way"
        distance += f", {self.loss:.3g} lost" if self.loss else ""
        return f"Lab({self.hosts} hosts, {format_rate(self.rate)}{distance})"


def why_impossible() -> str | None:
    """Why hosts cannot be made here, found by making two; None if they can."""
    try:
        with Lab(hosts=2, rate="1gbit"):
            return None
    except LabError as error:
        return str(error)


def _port(host: int) -> str:
    """The switch's end of a host's link."""
    return f"port{host}"


def _add_link(first: str, first_device: str, second: str, second_device: str) -> None:
    # Both ends are made in their namespaces, so that names of several labs do not collide.
    ends = [first_device, "netns", first, "type", "veth"]
    peer = ["peer", "name", second_device, "netns", second]
    call("ip", "link", "add", *ends, *peer)
    for namespace, device in ((first, first_device), (second, second_device)):
        # Without IPv6 addresses the counters count only the ranks' bytes.
        call("ip", "-n", namespace, "link", "set", device, "addrgenmode", "none")


def _set_congestion(namespace: str, name: str) -> None:
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    try:
        call("ip", "netns", "exec", namespace, "tee", setting, stdin=name)
    except LabError as error:
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
        raise LabError(
            f"Lab: congestion must be one of {', '.join(allowed)} on this system, got {name}"
        ) from error


# ---- leftovers of earlier runs -------------------------------------------------------------------


def _owner(pid: int) -> str:
    """A name for a process, unique while the system runs."""
    space = os.stat("/proc/self/ns/pid").st_ino  # process ids are unique only within a container
    return f"{_PREFIX}-{space}-{pid}-{_started(pid)}"


def _started(pid: int) -> int | None:
    """The start of a process, in ticks since the system's start; None if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def remove_leftovers() -> list[str]:
    """Remove the hosts of killed processes, and end their processes; returns their names."""
    own_space = os.stat("/proc/self/ns/pid").st_ino
    left = []
    for name in _namespaces(_PREFIX):
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-(\d+)-(\d+)-\d+-\w+", name)
        if match is None or int(match[1]) != own_space:
            continue
        if _started(int(match[2])) != int(match[3]):
            left.append(name)
    with undisturbed():
        for name in left:
            _remove(name)
    return left


def _namespaces(prefix: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(_NAMES) if name.startswith(prefix))
    except FileNotFoundError:  # no namespace was made since the system started
        return []


def _remove(prefix: str) -> None:
    """Remove all namespaces with names that begin so, and end the processes in them."""
    for name in _namespaces(prefix):
        _end_processes(name)
        with suppress(LabError):  # another lab has removed the same leftover
            call("ip", "netns", "del", name)
    remaining = _namespaces(prefix)
    if remaining:
        raise LabError(f"netlab: can't remove {', '.join(remaining)}; try ip netns del")


def _end_processes(namespace: str) -> None:
    """Kill the processes in a namespace, until there are none."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        try:
            pids = [int(pid) for pid in call("ip", "netns", "pids", namespace).split()]
        except LabError:  # the namespace does not exist
            return
        if not pids:
            return
        for pid in pids:
            if pid == os.getpid():  # this process may have entered a host itself
                return
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
