"""What the checks of ``doctor`` share: settings, findings, and the ranks' meeting."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from torch_commhook.addresses import with_port
from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.wording import pluralize

if TYPE_CHECKING:
    import torch.distributed as dist


# ---- the findings of doctor, and their text and JSON ---------------------------------------------


Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """A fact about this machine, found by a check of ``doctor --only``, its group.

    Attributes:
        level: only an error changes the exit code.
        advice: the solution, in one sentence; empty if the level is ``"ok"``.
        rank: the rank that found it, if it is not the rank that prints.
    """

    group: str = field(default="", kw_only=True)
    name: str
    value: str
    level: Level = "ok"
    advice: str = ""
    rank: int | None = None


def report(findings: Sequence[Finding], *, as_json: bool) -> str:
    """The findings, and the number of errors and warnings among them.

    Returns:
        Lines, one or two for each finding and one for the numbers; or a JSON object with the keys
        ``findings``, ``errors`` and ``warnings``.
    """
    levels = [finding.level for finding in findings]
    errors, warnings = levels.count("error"), levels.count("warning")
    if as_json:
        facts = [asdict(finding) for finding in findings]
        return json.dumps({"findings": facts, "errors": errors, "warnings": warnings}, indent=1)
    lines = []
    for finding in findings:
        place = "" if finding.rank is None else f"rank {finding.rank}: "
        lines.append(f"{finding.level:<9}{place}{finding.name}: {finding.value}")
        if finding.advice:
            lines.append(f"{'':<9}-> {finding.advice}")
    lines.append(f"doctor: {pluralize(errors, 'error')}, {pluralize(warnings, 'warning')}")
    return "\n".join(lines)


#: The advice on an error that no check explains.
REPORT_IT = "Report this with the whole output of doctor."


def first_line(error: BaseException) -> str:
    """The first line of an error's text: PyTorch adds a stack of C++."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---- a meeting of all ranks that a launcher has started, through a store -------------------------


#: Set by torchrun if its agent has started the store.
_AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_RETRY_SECONDS = 0.2
_POLL_SECONDS = 0.02
#: The time to wait for the other ranks' checks.
_REPORT_SECONDS = 120.0
_LEAVE_SECONDS = 5.0


class NoMeetingError(Exception):
    """This rank does not reach the store. The arguments are the reason and advice, as sentences."""


class Meeting:
    """The ranks of a launcher, and a store that only they use.

    The other ranks have ``timeout`` seconds from now to come.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self._deadline = time.monotonic() + timeout
        self.store.set(f"came/{rank}", "")

    def ranks(self) -> list[int]:
        """The ranks that have come. Waits for all of them until the timeout."""
        left = max(self._deadline - time.monotonic(), 0.0)
        return list(self.values("came", range(self.size), left))

    def values(self, key: str, ranks: Iterable[int], timeout: float) -> dict[int, str]:
        """Wait until these ranks have set ``key/rank``, for at most ``timeout`` seconds in all.

        Returns:
            The values by rank, of the ranks that have set one in time.
        """
        deadline = time.monotonic() + timeout
        return {
            rank: self.store.get(f"{key}/{rank}").decode()
            for rank in ranks
            if self._is_set(f"{key}/{rank}", deadline)
        }

    def _is_set(self, key: str, deadline: float) -> bool:
        # Store.wait() prints a warning after its timeout.
        while not self.store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def share(self, findings: Sequence[Finding]) -> list[Finding]:
        """Send this rank's findings to rank 0.

        Returns:
            On rank 0, its own findings and the warnings and errors of all other ranks. On another
            rank, its own findings, without waiting.
        """
        merged = list(findings)
        with suppress(RuntimeError):  # the store has gone
            if self.rank:
                wrong = [asdict(finding) for finding in findings if finding.level != "ok"]
                self.store.set(f"findings/{self.rank}", json.dumps(wrong))
                return merged
            others = self.ranks()[1:]
            for rank, text in self.values("findings", others, _REPORT_SECONDS).items():
                theirs = [Finding(**fields) for fields in json.loads(text)]
                merged += [replace(each, rank=rank) for each in theirs if each not in findings]
        return merged

    def leave(self) -> None:
        """Wait until rank 0 has printed: launchers end all ranks when one exits with an error."""
        with suppress(RuntimeError):  # rank 0 may have gone, and the store with it
            if self.rank:
                self._is_set("printed", time.monotonic() + _REPORT_SECONDS)
                self.store.set(f"left/{self.rank}", "")
            else:
                self.store.set("printed", "")
                self.values("left", self.ranks()[1:], _LEAVE_SECONDS)


def meet(place: LaunchEnvironment, timeout: float) -> Meeting:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; rank 0 starts it unless torchrun has.

    The connection may take ``timeout`` seconds, and so may the other ranks.

    Raises:
        NoMeetingError: the store cannot be started or reached.
    """
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = place.rank == 0 and os.environ.get(_AGENT_HAS_STORE) != "True"
    if not is_host:
        _await_port(place.rank, host, port, timeout)
    try:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore(host, port, is_master=is_host, wait_for_workers=False, timeout=limit)
    except RuntimeError as error:
        raise NoMeetingError(
            f"rank {place.rank} has no store at {with_port(host, port)}: {first_line(error)}",
            "Set MASTER_PORT to a port that is free on rank 0's host.",
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"commhook_doctor/{attempt}", store)
    return Meeting(own, place.rank, place.size, timeout)


def _await_port(rank: int, host: str, port: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            left = max(deadline - time.monotonic(), 1.0)
            with socket.create_connection((host, port), timeout=left):
                return
        except socket.gaierror as error:
            raise NoMeetingError(
                f"rank {rank} cannot resolve MASTER_ADDR={host}: {error.strerror}",
                "Set MASTER_ADDR to an address of rank 0's host.",
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise NoMeetingError(
                    f"rank {rank} cannot reach the store at {with_port(host, port)}: {error}",
                    f"Start rank 0, and let this host connect to port {port} of {host}.",
                ) from error
            time.sleep(_RETRY_SECONDS)


# ---- the settings of the checks of doctor --------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of all checks.

    Attributes:
        timeout: the seconds for ranks to come and to connect.
        place: this rank's place, or None if no launcher has started it.
        meeting: the meeting with the other ranks, or None if this process is alone.
    """

    timeout: float
    backend: str | None = None
    place: LaunchEnvironment | None = None
    meeting: Meeting | None = None
