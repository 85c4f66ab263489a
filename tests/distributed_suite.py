"""PyTorch's own tests of DDP and communication hooks, without a hook of this library and with one.

torch carries the cases itself (``torch.testing._internal.distributed.distributed_test``). Each that
is about DDP runs on two ranks over Gloo on the CPU, first as it is, then with
``attach(ddp, hooks.allreduce())`` on each DDP model as soon as it is made. No case may pass plain
and fail with the hook. Most cases are written for GPUs, though few need what only a GPU does: there
the CPU stands in for every GPU, both times. What cannot work so fails plain and tells nothing.

Where a case registers a hook of its own, or DDP does so for it, the model gets a new reducer
without ours: a reducer keeps its hook for life. The table tells how often that was.

Run with ``make distributed-suite ARGS="[PART_OF_A_NAME ...]"``. Without arguments it runs all cases
and writes ``distributed_suite.json`` beside this file.
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
import time
import unittest
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

import torch_commhook
from torch_commhook.attach import HookHandle

WORLD_SIZE = 2
CASE_SECONDS = 120
TABLE = Path(__file__).with_suffix(".json")
SELECTED = re.compile("ddp|distributeddataparallel|comm_hook|join", re.IGNORECASE)

#: Cases that may pass plain and fail with the hook, with the reason.
KNOWN: dict[str, str] = {
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

ENVIRONMENT = {
    "BACKEND": "gloo",
    "WORLD_SIZE": str(WORLD_SIZE),
    "CUDA_VISIBLE_DEVICES": "",  # ranks are forked, and a process with CUDA cannot be
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(CASE_SECONDS),
}


# ---- in a rank -----------------------------------------------------------------------------------


class Attacher:
    """Attaches a hook to each DDP model of this process, and counts.

    Attributes:
        handles: of the hooks that were attached.
        without: why a model has no hook of ours (any more), for each such model.
    """

    def __init__(self) -> None:
        self.handles: list[HookHandle] = []
        self.without: list[str] = []

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
        if model._comm_hooks:  # DDP registers one itself, for mixed precision say
            self.without.append("DDP's own hook")
            return
        handle = torch_commhook.attach(model, torch_commhook.hooks.allreduce())
        self.handles.append(handle)
        model.__dict__["_suite_handle"] = len(self.handles) - 1

    def _stepping_aside(self, register: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(register)
        def step_aside(model: DDP, *args: Any, **options: Any) -> None:
            number = model.__dict__.pop("_suite_handle", None)
            if number is not None:
                self.handles[number].remove()
                self.without.append("the case's own hook")
                new_reducer(model)
            register(model, *args, **options)

        return step_aside

    def record(self) -> dict[str, Any]:
        """What happened, for the table."""
        return {
            "attached": len(self.handles),
            "without": dict(Counter(self.without)),
            "steps": sum(handle.stats().steps for handle in self.handles),
        }


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what a case would put on a GPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if function is Tensor.cuda:
            return args[0]
        if function in (Tensor.to, torch._C._nn._parse_to):  # the latter for modules
            args = tuple(map(on_cpu, args))
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        return function(*args, **options)


def on_cpu(device: Any) -> Any:
    """The CPU for a CUDA device, however that is written; anything else as it is."""
    is_cuda = (
        (isinstance(device, torch.device) and device.type == "cuda")
        or (isinstance(device, str) and device.startswith("cuda"))
        or type(device) is int
    )
    return torch.device("cpu") if is_cuda else device


def stand_in_for_gpus() -> None:
    """Let DDP and ``torch.cuda`` take the CPU for a GPU, in this process."""
    init = DDP.__init__

    @functools.wraps(init)
    def without_devices(
        model: DDP, module: Any, device_ids: Any = None, *args: Any, **options: Any
    ) -> None:
        options.pop("output_device", None)
        init(model, module, None, *args, **options)

    replacements: list[tuple[Any, str, Any]] = [
        (DDP, "__init__", without_devices),
        (torch.cuda, "device_count", lambda: WORLD_SIZE),
        (torch.cuda, "current_device", lambda: 0),
    ]
    for name in ("set_device", "synchronize", "manual_seed"):
        replacements.append((torch.cuda, name, lambda *_, **__: None))
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


def with_gpus(case: Callable[..., None]) -> Callable[..., None]:
    """Takes the place of torch's decorators that skip a case where there are no GPUs."""

    @functools.wraps(case)
    def run(*args: Any, **options: Any) -> None:
        stand_in_for_gpus()
        with OnCpu():
            case(*args, **options)

    run.for_gpus = True  # type: ignore[attr-defined]
    return run


def with_small_images(make_input: Callable[..., Any]) -> Callable[..., Any]:
    """Cut what a case feeds to a convolution to a size for the CPU: 40 x 40 for 1000 x 1000."""

    def make(**fields: Any) -> Any:
        given = fields["inp"]
        if isinstance(given, Tensor) and given.dim() == 4:
            fields["inp"] = given[..., :40, :40].contiguous()
        return make_input(**fields)

    return make


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


# ---- the cases -----------------------------------------------------------------------------------


def make_cases(work: Path) -> type[Any]:
    """The class of torch's cases, for ranks that are forked off this process.

    Its attribute ``attaching`` says whether the ranks attach a hook. What a rank prints goes to
    ``work/rank{N}.log``, and what it attached to ``work/rank{N}.json``.
    """
    os.environ.update(ENVIRONMENT, TEMP_DIR=str(work))  # read when the module is imported
    from torch.testing._internal import common_distributed

    patch = functools.partial(mock.patch.object, common_distributed)
    with (
        patch("skip_if_no_gpu", with_gpus),
        patch("skip_if_lt_x_gpu", lambda *_, **__: with_gpus),
    ):
        from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_OVERRIDE.clear()
    make_input = with_small_images(distributed_test.DDPUnevenTestInput)
    mock.patch.object(distributed_test, "DDPUnevenTestInput", make_input).start()

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        attaching = False
        ranks: ClassVar[list[Any]] = []

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            type(self).ranks = self.processes

        @classmethod
        def end_ranks(cls) -> None:
            """End the processes of the last case, with whatever they have started."""
            for rank in cls.ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.join(5)
            cls.ranks = []

        @classmethod
        def _run(  # type: ignore[override]
            cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any
        ) -> None:
            os.setpgid(0, 0)
            log = os.open(work / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            torch.set_num_threads(1)
            attacher = Attacher()
            if cls.attaching:
                attacher.install()
            try:
                super()._run(rank, test_name, file_name, pipe, **kwargs)
            finally:
                (work / f"rank{rank}.json").write_text(json.dumps(attacher.record()))

        def _check_return_codes(self, case: Any, elapsed: float) -> None:
            super()._check_return_codes(case, elapsed)  # looks at rank 0's alone
            if case not in self.skip_return_code_checks:
                codes = [rank.exitcode for rank in self.processes]
                self.assertEqual(len(set(codes)), 1, f"exit codes of the ranks: {codes}")

    return Cases


def selected(cases: type[Any]) -> list[str]:
    """The names of the cases about DDP, hooks and join, by their names or by what they call."""
    names = unittest.TestLoader().getTestCaseNames(cases)
    return [
        name
        for name in names
        if SELECTED.search(name)
        or "DistributedDataParallel" in inspect.getsource(inspect.unwrap(getattr(cases, name)))
    ]


def run_case(cases: type[Any], name: str, work: Path, *, attaching: bool) -> dict[str, Any]:
    """Run one case, and tell its result: passed, skipped or failed, with a reason.

    Returns:
        The entries ``result``, ``reason``, ``details`` (the whole error), ``seconds``, and those of
        :meth:`Attacher.record` for the first rank.
    """
    for left in work.glob("rank*"):
        left.unlink()
    cases.attaching = attaching
    outcome = unittest.TestResult()
    begin = time.monotonic()
    try:
        unittest.TestSuite([cases(name)]).run(outcome)
    finally:
        cases.end_ranks()
    told: dict[str, Any] = {"result": "passed", "reason": "", "details": ""}
    if outcome.skipped:
        told.update(result="skipped", reason=outcome.skipped[0][1])
    failures = outcome.errors + outcome.failures
    if failures:
        details = without_paths(failures[0][1], work)
        told.update(result="failed", reason=last_error(details), details=details)
    told["seconds"] = round(time.monotonic() - begin, 1)
    record = work / "rank0.json"
    if record.exists():
        told.update(json.loads(record.read_text()))
    return told


def without_paths(text: str, work: Path) -> str:
    """A text without the directories of this machine."""
    packages = str(Path(torch.__file__).parents[1])
    here = str(Path(__file__).parents[1])
    for path, name in ((str(work), "$WORK"), (packages + "/", ""), (here + "/", "")):
        text = text.replace(path, name)
    return text


def last_error(traceback: str) -> str:
    """The line of a traceback that names the exception."""
    named = [
        line for line in traceback.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)
    ]
    return named[-1] if named else traceback.strip().splitlines()[-1]


# ---- the table -----------------------------------------------------------------------------------


def compare(cases: type[Any], name: str, work: Path) -> dict[str, Any]:
    """Run a case plain and with the hook; one row of the table."""
    plain = run_case(cases, name, work, attaching=False)
    for_gpus = hasattr(getattr(cases, name), "for_gpus")
    row = {"case": name, "for_gpus": for_gpus, "plain": plain["result"]}
    if plain["result"] == "skipped":
        return row | {"hook": "skipped", "reason": plain["reason"]}
    hook = run_case(cases, name, work, attaching=True)
    for told in (plain, hook):
        if told["details"]:
            print(told["details"], file=sys.stderr)
    row |= {"hook": hook["result"]}
    row |= {entry: hook[entry] for entry in ("attached", "without", "steps") if entry in hook}
    reasons = {"plain": plain["reason"], "hook": hook["reason"]}
    if any(reasons.values()):
        row["reasons"] = {kind: reason for kind, reason in reasons.items() if reason}
    if name in KNOWN:
        row["known"] = KNOWN[name]
    return row


def is_regression(row: dict[str, Any]) -> bool:
    """Whether a case passes plain and not with the hook, for no known reason."""
    return row["plain"] == "passed" and row["hook"] != "passed" and row["case"] not in KNOWN


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a table."""
    results = Counter((row["plain"], row["hook"]) for row in rows)
    return {
        "cases": len(rows),
        "passed_both": results["passed", "passed"],
        "passed_both_with_steps": sum(
            (row["plain"], row["hook"]) == ("passed", "passed") and row.get("steps", 0) > 0
            for row in rows
        ),
        "failed_plain": dict(
            Counter(row["reasons"]["plain"] for row in rows if row["plain"] == "failed")
        ),
        "differing": {
            row["case"]: row.get("known", "unknown") for row in rows if row["plain"] != row["hook"]
        },
        "skipped": dict(Counter(row["reason"] for row in rows if row["plain"] == "skipped")),
    }


def main() -> int:
    """Run the cases; 1 where one passes plain and fails with the hook."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help="parts of names; all cases where none is given")
    parser.add_argument("--table", type=Path, help="where the table goes")
    arguments = parser.parse_args()
    # So that ranks and files go when this process is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    table = arguments.table or (None if arguments.parts else TABLE)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TMPDIR"] = tempfile.tempdir = directory  # for all that the cases leave
        cases = make_cases(Path(directory))
        names = selected(cases)
        if arguments.parts:
            names = [name for name in names if any(part in name for part in arguments.parts)]
        for name in names:
            row = compare(cases, name, Path(directory))
            rows.append(row)
            print(f"{row['plain']:8} {row['hook']:8} {row['case']}", flush=True)
            if table:
                contents = {
                    "torch": torch.__version__,
                    "backend": ENVIRONMENT["BACKEND"],
                    "ranks": WORLD_SIZE,
                    "hook": repr(torch_commhook.hooks.allreduce()),
                    "summary": summarize(rows),
                    "cases": rows,
                }
                table.write_text(json.dumps(contents, indent=1) + "\n")
        tempfile.tempdir = None
    print(json.dumps(summarize(rows), indent=1))
    regressions = [row["case"] for row in rows if is_regression(row)]
    if regressions:
        print("pass plain, and fail with the hook:", *regressions, sep="\n  ", file=sys.stderr)
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main())
