"""PyTorch's own distributed tests, as they are and with something of this library in their place.

torch carries the cases itself (``torch.testing._internal.distributed.distributed_test``). Each runs
on two ranks over Gloo on the CPU, first as it is, then with the change of a suite:

- ``hook``: cases about DDP, with ``attach(ddp, hooks.allreduce())`` on each DDP model as soon as it
  is made;
- ``wrapper``: all cases, with each process group replaced by a ``WrapperProcessGroup`` around it.
  Cases that need more ranks have four;
- ``transport``: the same cases, with the library's own backend in place of Gloo's.

No case may pass plain and fail with the change. Many cases are written for GPUs, though few need
what only a GPU does: there the CPU stands in for every GPU, both times. What cannot work so fails
plain and tells nothing.

Run with ``make distributed-suite``, ``make wrapper-suite`` or ``make transport-suite``;
``ARGS="PART_OF_A_NAME ..."`` takes some cases. Where all run, the results go to
``distributed_suite.json``, ``distributed_suite_wrapper.json`` or
``distributed_suite_transport.json`` beside this file.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_suite_cases import MODULE, Suite, case_names, environment, make_cases, run_case
from machine import as_lines
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP

import torch_commhook
from torch_commhook import _C
from torch_commhook.attachment.handle import HookHandle
from torch_commhook.collectives import wire
from torch_commhook.process_group import WrapperProcessGroup

# ---- a hook on each model ------------------------------------------------------------------------

SELECTED = re.compile("ddp|distributeddataparallel|comm_hook|join", re.IGNORECASE)

#: Cases that may pass plain and fail with the hook, with the reason.
KNOWN_WITH_HOOK: dict[str, str] = {
    "test_ddp_profiling_torch_profiler": (
        "counts the all-reduces of a step. On Gloo there is one more with a hook attached, of one "
        "byte: the ranks agree whether the step went well"
    ),
    "test_ddp_comm_hook_logging": (
        "asks DDP's statistics whether there is no hook yet. They name ours"
    ),
    "test_ddp_grad_div_uneven_inputs": (
        "asks for gradients divided by the ranks that still have inputs. DDP leaves that to the "
        "hook, and ours divide by all ranks, as PyTorch's do"
    ),
}


def is_selected(name: str, case: Callable[..., None]) -> bool:
    """Whether a case is about DDP, hooks or join, by its name or by what it calls."""
    return bool(SELECTED.search(name)) or (
        "DistributedDataParallel" in inspect.getsource(inspect.unwrap(case))
    )


class Attacher:
    """Attaches a hook to each DDP model of this process, and counts their steps.

    Where a case registers a hook of its own, or DDP does so for it, the model gets a new reducer
    without ours: a reducer keeps its hook for life.
    """

    def __init__(self) -> None:
        self.handles: list[HookHandle] = []

    def install(self) -> None:
        """Replace the methods of DDP by ones that attach, or step aside for another hook."""
        init = DDP.__init__

        @functools.wraps(init)
        def attach_after(model: DDP, *args: Any, **options: Any) -> None:
            init(model, *args, **options)
            self._attach(model)

        replacements: dict[str, Callable[..., None]] = {"__init__": attach_after}
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            replacements[name] = self._stepping_aside(getattr(DDP, name))
        for name, replacement in replacements.items():
            setattr(DDP, name, replacement)

    def _attach(self, model: DDP) -> None:
        if not model._comm_hooks:  # DDP registers one itself, for mixed precision say
            handle = torch_commhook.attach(model, torch_commhook.hooks.allreduce())
            self.handles.append(handle)
            model.__dict__["_suite_handle"] = len(self.handles) - 1

    def _stepping_aside(self, register: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(register)
        def step_aside(model: DDP, *args: Any, **options: Any) -> None:
            number = model.__dict__.pop("_suite_handle", None)
            if number is not None:
                self.handles[number].remove()
                new_reducer(model)
            register(model, *args, **options)

        return step_aside

    def record(self) -> dict[str, Any]:
        """What happened, for the table."""
        return {"steps": sum(handle.stats().steps for handle in self.handles)}


def new_reducer(model: DDP) -> None:
    """Give a DDP model a reducer without a hook, in the way it makes one when it is unpickled."""
    model.reducer._remove_autograd_hooks()
    parameters, expect_sparse_gradient = model._build_params_for_reducer()
    model._ddp_init_helper(
        parameters,
        expect_sparse_gradient,
        model._build_debug_param_to_name_mapping(parameters),
        model.static_graph,
    )
    if model.static_graph:
        model.reducer._set_static_graph()
        assert model.logger is not None
        model.logger._set_static_graph()


# ---- a wrapper around each group -----------------------------------------------------------------

#: Cases that may pass plain and fail with wrapped groups, with the reason.
KNOWN_WRAPPED: dict[str, str] = {
    "test_ddp_logging_data_cpu": (
        "asks DDP's statistics for the name that a group's C++ gives: a wrapper's is `custom`"
    )
}


class CountingGroup(WrapperProcessGroup):
    """A wrapper that counts what passes through it."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        super().__init__(parent)
        self.calls: Counter[str] = Counter()

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls[operation] += 1
        return arguments


class Wrapping:
    """Wraps each process group of this process, the default one too, and counts its collectives.

    ``torch.distributed`` knows the wrapper by the name, backend and ranks of the group in it.
    """

    def __init__(self) -> None:
        self.calls: list[Counter[str]] = []

    def install(self) -> None:
        """Replace the function that makes groups by one that wraps what it has made."""
        make = distributed_c10d._new_process_group_helper

        @functools.wraps(make)
        def make_and_wrap(*args: Any, **options: Any) -> Any:
            group, store = make(*args, **options)
            if isinstance(group, dist.ProcessGroup) and not isinstance(group, CountingGroup):
                group = self._wrap(group)
            return group, store

        distributed_c10d._new_process_group_helper = make_and_wrap

    def _wrap(self, group: dist.ProcessGroup) -> CountingGroup:
        wrapper = CountingGroup(group)
        self.calls.append(wrapper.calls)
        name = group.group_name
        wrapper._set_group_name(name)
        wrapper._set_group_desc(group.group_desc)
        distributed_c10d._unregister_process_group(name)
        distributed_c10d._register_process_group(name, wrapper)
        world: Any = distributed_c10d._world
        for known in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
        ):
            if group in known:
                known[wrapper] = known.pop(group)
        for groups in world.tags_to_pg.values():
            groups[:] = [wrapper if each is group else each for each in groups]
        return wrapper

    def record(self) -> dict[str, Any]:
        """What happened, for the table."""
        return {
            "groups": len(self.calls),
            "calls": dict(sorted(sum(self.calls, Counter()).items())),
        }


# ---- another backend -----------------------------------------------------------------------------

#: Cases that may pass plain and fail with the library's backend, with the reason.
KNOWN_TRANSPORT: dict[str, str] = {
    name: reason
    for reason, names in {
        "looks for Gloo's name": (
            "test_ddp_logging_data_cpu",
            "test_ddp_profiling_torch_profiler",
        ),
        "receives from any rank": (
            "test_send_recv_any_source",
            "test_send_recv_any_source_autograd_profiler",
            "test_send_recv_any_source_torch_profiler",
        ),
        "sums sparse tensors": ("test_sparse_all_reduce_sum", "test_sparse_all_reduce_sum_cuda"),
        "asks for the words of Gloo's errors": (
            "test_monitored_barrier_failure_order",
            "test_monitored_barrier_gloo_rank_0_timeout",
        ),
    }.items()
    for name in names
}


class Transport:
    """Makes groups with the library's own backend where PyTorch would make Gloo's."""

    def __init__(self) -> None:
        self.groups = 0

    def install(self) -> None:
        """Replace the class of Gloo's backend."""
        counted = self

        class Type(type):
            def __call__(cls, store: Any, rank: int, size: int, timeout: Any) -> Any:
                counted.groups += 1
                return _C.WireBackend(wire.endpoint(), store, "suite", rank, size, timeout)

            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, _C.WireBackend)

        distributed_c10d.ProcessGroupGloo = Type("ProcessGroupGloo", (), {})
        # The backend has no events of its own in profiles.
        cases: Any = sys.modules[MODULE]
        cases.PROFILING_SUPPORTED_BACKENDS = cases.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []

    def record(self) -> dict[str, Any]:
        """What happened, for the table."""
        return {"groups": self.groups}


# ---- the runs ------------------------------------------------------------------------------------

SUITES = {
    "hook": Suite(
        name="hook",
        changed=repr(torch_commhook.hooks.allreduce()),
        change=Attacher,
        is_selected=is_selected,
        ranks=(2,),
        counted="steps",
        known=KNOWN_WITH_HOOK,
    ),
    "wrapper": Suite(
        name="wrapper",
        changed="WrapperProcessGroup",
        change=Wrapping,
        is_selected=lambda name, case: True,
        ranks=(2, 4),
        counted="calls",
        known=KNOWN_WRAPPED,
    ),
    "transport": Suite(
        name="transport",
        changed="commhook",
        change=Transport,
        is_selected=lambda name, case: True,
        ranks=(2, 4),
        counted="groups",
        known=KNOWN_TRANSPORT,
    ),
}
TABLES = {
    "hook": Path(__file__).with_name("distributed_suite.json"),
    "wrapper": Path(__file__).with_name("distributed_suite_wrapper.json"),
    "transport": Path(__file__).with_name("distributed_suite_transport.json"),
}
TOO_FEW_RANKS = re.compile("world size", re.IGNORECASE)


def compare(suite: Suite, cases: type[Any], name: str, work: Path) -> dict[str, Any]:
    """Run a case plain and with the change; one row of the table."""
    plain = run_case(suite, cases, name, work, changing=False)
    row = {"case": name, "plain": plain["result"]}
    if plain["result"] == "skipped":
        return row | {suite.name: "skipped", "reason": plain["reason"]}
    changed = run_case(suite, cases, name, work, changing=True)
    for told in (plain, changed):
        if told["details"]:
            print(told["details"], file=sys.stderr)
    return row | changed["record"] | {suite.name: changed["result"], "reason": plain["reason"]}


def is_regression(suite: Suite, row: dict[str, Any]) -> bool:
    """Whether a case passes plain and not with the change, for no known reason."""
    passed = (row["plain"] == "passed", row[suite.name] == "passed")
    return passed == (True, False) and row["case"] not in suite.known


def problems(suite: Suite, rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with a whole table."""
    found = [f"{row['case']} passes plain" for row in rows if is_regression(suite, row)]
    differing = {row["case"] for row in rows if row["plain"] != row[suite.name]}
    found += [f"{name} no longer differs" for name in sorted(suite.known.keys() - differing)]
    if suite.counted == "calls":
        passed = (row for row in rows if row[suite.name] == "passed")
        found += [f"{row['case']} wraps no group" for row in passed if not row["groups"]]
    return found


def summarize(suite: Suite, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table: how many cases pass both times, and the others by the reason."""
    both = [row for row in rows if (row["plain"], row[suite.name]) == ("passed", "passed")]
    others: dict[str, dict[str, list[str]]] = {"failed": {}, "skipped": {}}
    for row in rows:
        if row["plain"] in others:
            others[row["plain"]].setdefault(row["reason"], []).append(row["case"])
    differing = [row["case"] for row in rows if row["plain"] != row[suite.name]]
    return {
        "torch": torch.__version__,
        "backend": environment(suite.ranks[0])["BACKEND"],
        "ranks": suite.ranks[0],
        suite.name: suite.changed,
        "cases": len(rows),
        "passed_both": len(both),
        f"passed_both_with_{suite.counted}": sum(bool(row.get(suite.counted)) for row in both),
        "differing": {name: suite.known.get(name, "unknown") for name in differing},
        "failed_plain": others["failed"],
        "skipped": others["skipped"],
    }


def run(suite: Suite, parts: list[str], table: Path | None) -> list[dict[str, Any]]:
    """Run the cases whose names hold one of the parts, all where there is none; the table's rows.

    A case that is skipped because there are too few ranks is run again with more, where the suite
    has more.
    """
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory  # for all that the cases leave
        for ranks in suite.ranks:
            cases = make_cases(suite, Path(directory), ranks)
            for name in case_names(suite, cases):
                if parts and not any(part in name for part in parts):
                    continue
                if name in rows and not TOO_FEW_RANKS.search(rows[name].get("reason", "")):
                    continue
                row = rows[name] = compare(suite, cases, name, Path(directory))
                print(f"{row['plain']:8} {row[suite.name]:8} {name}", flush=True)
                if table:
                    told = summarize(suite, [rows[name] for name in sorted(rows)])
                    table.write_text(as_lines(told))
        tempfile.tempdir = None
    return [rows[name] for name in sorted(rows)]


def main() -> int:
    """Run the cases; 1 where one passes plain and fails with the change."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help="parts of names; all cases where none is given")
    parser.add_argument("--suite", choices=SUITES, default="hook", help="default: %(default)s")
    parser.add_argument("--table", type=Path, help="where the table goes")
    arguments = parser.parse_args()
    # So that ranks and files go when this process is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    suite = SUITES[arguments.suite]
    table = arguments.table or (None if arguments.parts else TABLES[suite.name])
    rows = run(suite, arguments.parts, table)
    print(json.dumps(summarize(suite, rows), indent=1))
    wrong = [row["case"] for row in rows if is_regression(suite, row)]
    if not arguments.parts:
        wrong = problems(suite, rows)
    if wrong:
        print(f"with the {suite.name} these are wrong:", *wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
