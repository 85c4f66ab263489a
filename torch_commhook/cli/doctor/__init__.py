"""``doctor``: checks whether hooks can run here, and names a solution if they cannot.

It works even if torch or a native library does not load. So its modules import these only when they
need them, and the package calls :func:`end_where_nothing_loads` before it loads them itself. Bug
reports ask for its output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from torch_commhook.cli.doctor import build, network
from torch_commhook.cli.doctor.meeting import (
    REPORT_IT,
    Finding,
    NoMeetingError,
    Settings,
    first_line,
    meet,
    report,
)
from torch_commhook.cli.launch_environment import (
    LaunchError,
    read_launch_environment,
    slurm_variables,
)
from torch_commhook.cli.option_types import at_most, positive_float, some_of

#: The checks, in the order of the report.
CHECKS: dict[str, Callable[[Settings], Iterator[Finding]]] = {
    "versions": build.check_versions,
    "build": build.check_build,
    "gpus": build.check_gpus,
    "network": network.check_network,
    "ranks": network.check_ranks,
    "group": network.check_group,
    "host": build.check_host,
    "variables": build.check_variables,
    "hooks": build.check_hooks,
}


def main(argv: Sequence[str]) -> int:
    """Run ``doctor argv``; returns 0 if there is no error, and 1 otherwise."""
    from torch_commhook.cli.main import OneLineParser

    parser = OneLineParser(
        prog="commhook doctor",
        description="Check whether hooks can run here, and name a solution if they cannot. "
        "Under torchrun, all ranks try to reach each other, and rank 0 reports for all. The exit "
        "code is 0 if there is no error, and 1 otherwise.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--only",
        type=some_of(CHECKS),
        default=",".join(CHECKS),
        metavar="CHECK,...",
        help="the checks to run",
    )
    parser.add_argument(
        "--backend", help="backend to describe a group of, such as cpu:gloo,cuda:nccl"
    )
    parser.add_argument(
        "--timeout",
        type=at_most(3600, positive_float),
        default=30.0,
        metavar="SECONDS",
        help="time for ranks to come and to connect",
    )
    options = parser.parse_args(argv)
    settings, findings = _settings(options)
    for name in options.only:
        findings += _checked(name, settings)
    meeting = settings.meeting
    if meeting is not None:
        findings = meeting.share(findings)
    if meeting is None or meeting.rank == 0:
        print(report(findings, as_json=options.json), flush=True)
    if meeting is not None:
        meeting.leave()
    return int(any(finding.level == "error" for finding in findings))


def end_where_nothing_loads() -> None:
    """If this process runs ``doctor`` and the package cannot be imported, say why and end."""
    if sys.argv[1:2] == ["doctor"] and build.library_error() is not None:
        sys.exit(main(sys.argv[2:]))


def _settings(options: argparse.Namespace) -> tuple[Settings, list[Finding]]:
    """The settings of the checks, and a finding if the launcher's ranks cannot meet."""
    settings = Settings(options.timeout, options.backend)
    try:
        os.environ.update(slurm_variables(os.environ))
        place = read_launch_environment(os.environ)
        if place is None or place.launcher_pid is not None:
            return settings, []
        settings = replace(settings, place=place)
        if place.size > 1:
            # without torch, or with one that lacks torch.distributed
            with suppress(ImportError, OSError, AttributeError):
                settings = replace(settings, meeting=meet(place, options.timeout))
        return settings, []
    except LaunchError as error:
        reason = str(error)
        advice = "Start doctor by torchrun or srun, or unset RANK, WORLD_SIZE and MASTER_ADDR."
    except NoMeetingError as error:
        reason, advice = error.args
    return settings, [Finding("this rank", reason, "error", advice, group="ranks")]


def _checked(name: str, settings: Settings) -> list[Finding]:
    """The findings of a check, and an error if the check itself fails."""
    found: list[Finding] = []
    try:
        found.extend(CHECKS[name](settings))
    except Exception as error:  # the other checks go on
        text = f"{type(error).__name__}: {first_line(error)}"
        found.append(Finding(f"check of {name}", text, "error", REPORT_IT))
    return [replace(finding, group=name) for finding in found]
