"""Checks that ranks reach each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch_commhook.addresses import loopback
from torch_commhook.cli.doctor.build import HOOKS, averaged, library_error
from torch_commhook.cli.doctor.meeting import Finding, Meeting, Settings, first_line
from torch_commhook.cli.doctor.network import INTERFACES, failed_connections

#: To import torch, twice at once on a slow disk.
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
    """Start this check as two ranks, which meet in a store of this process."""
    import torch.distributed as dist

    host = loopback()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "torch_commhook", "doctor", "--only", "ranks", "--json"]
    processes = [
        subprocess.Popen(
            [*command, "--timeout", f"{timeout:g}"],
            env={**os.environ, **_variables(rank, host, store.port)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=_START_SECONDS + timeout) for each in processes]
    except subprocess.TimeoutExpired as error:
        yield _failed(_ONE_HOST, f"no answer within {error.timeout:g} s")
        return
    finally:
        for each in processes:
            each.kill()
            each.wait()
    try:
        found = [Finding(**fields) for fields in json.loads(outputs[0][0])["findings"]]
    except (ValueError, KeyError):
        lines = (outputs[0][1] or outputs[1][1]).strip().splitlines() or ["no output"]
        yield _failed(_ONE_HOST, f"rank 0 ended with {processes[0].returncode}: {lines[-1]}")
        return
    for finding in found:
        is_well = finding.level == "ok"
        yield Finding(
            f"{_ONE_HOST}, {finding.name}",
            finding.value,
            finding.level,
            "" if is_well else _ADVICE_ON_ONE_HOST,
        )


def _variables(rank: int, host: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _failed(name: str, value: str, advice: str = _ADVICE) -> Finding:
    return Finding.error(name, value, advice)


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
            yield _connected(meeting.size)
        yield from _tried(meeting, "all-reduce over Gloo", sums, _ADVICE)
        can_try = sums is None and library_error() is None and not dist.is_initialized()
        meeting.store.set(f"can_try/{meeting.rank}", str(can_try))
        answers = meeting.values("can_try", range(meeting.size), timeout).values()
        if list(answers) == ["True"] * meeting.size:
            error = _hook_error(meeting, timeout)
            yield from _tried(
                meeting,
                f"hook {HOOKS[0]} over Gloo",
                error,
                "Report this with the whole output of doctor.",
            )
    elif meeting.rank == 0:
        yield from _of_failed(failed, absent, timeout)


def _connected(size: int) -> Finding:
    pairs = size * (size - 1) // 2
    noun = "pair of ranks connects" if pairs == 1 else "pairs of ranks connect"
    return Finding("connections", f"{'' if pairs == 1 else 'all '}{pairs} {noun}")


def _tried(meeting: Meeting, name: str, error: str | None, advice: str) -> Iterator[Finding]:
    if error is not None:
        yield _failed(name, error, advice)
    elif meeting.rank == 0:
        yield Finding(name, "works")


def _of_failed(
    failed: Mapping[tuple[int, int], str], absent: list[int], timeout: float
) -> Iterator[Finding]:
    for rank in absent:
        yield _failed(
            f"rank {rank}",
            f"it has not come within {timeout:g} s",
            "Read the output of this rank, and look whether its host reaches MASTER_ADDR.",
        )
    for (rank, peer), reason in list(failed.items())[:_MOST_PAIRS]:
        advice = _ADVICE
        if "loopback" in reason:
            advice = f"Set {INTERFACES} on rank {peer}'s host to an interface that others reach."
        elif "listens nowhere" in reason:
            advice = f"Set {INTERFACES} on rank {peer}'s host to an interface that it has."
        yield _failed(f"rank {rank} cannot connect to rank {peer}", reason, advice)
    if len(failed) > _MOST_PAIRS:
        more = len(failed) - _MOST_PAIRS
        yield _failed("connections", f"{more} more of {len(failed)} fail")


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
