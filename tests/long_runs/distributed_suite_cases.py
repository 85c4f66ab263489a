"""The cases of ``torch.testing._internal.distributed.distributed_test``, run one by one.

The CPU takes the place of GPUs in the cases that were written for them.
The ranks of a case are forked off this process. Each case has a time limit, and leaves no process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import signal
import sys
import unittest
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from repository import ROOT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

CASE_SECONDS = 120
MODULE = "torch.testing._internal.distributed.distributed_test"


@dataclass(frozen=True)
class Suite:
    """Which cases are run twice, and what is changed the second time."""

    name: str  # of the change, and of its column in the table
    changed: str  # the change as the table tells it
    # makes an object whose ``install()`` makes the change in a rank, and whose ``record()`` says
    # what came of it, for the table
    change: Callable[[], Any]
    # whether a case is run, by its name and function
    is_selected: Callable[[str, Callable[..., None]], bool]
    # how many ranks there are; where a case asks for more, the next number is tried
    ranks: tuple[int, ...]
    counted: str  # the entry of what ``change`` records that says how often it was used
    known: dict[str, str]  # cases that may fail with the change, with the reason


def make_cases(suite: Suite, work: Path, ranks: int) -> type[Any]:
    """The class of torch's cases, for ranks that are forked off this process.

    Its attribute ``changing`` says whether the ranks make the suite's change. What a rank prints
    goes to ``work/rank{N}.log``, and what it records to ``work/rank{N}.json``.
    """
    os.environ.update(environment(ranks), TEMP_DIR=str(work))  # read when the module is imported
    from torch.testing._internal import common_distributed

    patch = functools.partial(mock.patch.object, common_distributed)
    with (
        patch("skip_if_no_gpu", with_gpus),
        patch("skip_if_lt_x_gpu", lambda *_, **__: with_gpus),
        patch("skip_if_small_worldsize", with_small_worlds(ranks)),
    ):
        sys.modules.pop(MODULE, None)
        distributed_test: Any = importlib.import_module(MODULE)

    common_distributed.TIMEOUT_OVERRIDE.clear()
    make_input = with_small_images(distributed_test.DDPUnevenTestInput)
    mock.patch.object(distributed_test, "DDPUnevenTestInput", make_input).start()

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        changing = False
        processes_of_last: ClassVar[list[Any]] = []

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            type(self).processes_of_last = self.processes

        @classmethod
        def end_ranks(cls) -> None:
            """End the processes of the last case, with whatever they have started."""
            for rank in cls.processes_of_last:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.join(5)
            cls.processes_of_last = []

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
            os.setpgid(0, 0)
            log = os.open(work / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            torch.set_num_threads(1)
            change = suite.change()
            if cls.changing:
                change.install()
            try:
                super()._run(rank, test_name, file_name, pipe, **kwargs)
            finally:
                (work / f"rank{rank}.json").write_text(json.dumps(change.record()))

        def _check_return_codes(self, case: Any, elapsed: float) -> None:
            super()._check_return_codes(case, elapsed)  # looks at rank 0's alone
            if case not in self.skip_return_code_checks:
                codes = [rank.exitcode for rank in self.processes]
                self.assertEqual(len(set(codes)), 1, f"exit codes of the ranks: {codes}")

    return Cases


def environment(ranks: int) -> dict[str, str]:
    """What torch's module reads."""
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "",  # ranks are forked, and a process with CUDA cannot be
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(CASE_SECONDS),
    }


def with_small_worlds(ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Takes the place of torch's decorator that skips a case on less than 8 ranks.

    These cases are about groups of a part of the ranks, 1 and 2 mostly: 4 ranks are enough.
    """
    from torch.testing._internal import common_distributed

    return (lambda case: case) if ranks >= 4 else common_distributed.skip_if_small_worldsize


def case_names(suite: Suite, cases: type[Any]) -> list[str]:
    names = unittest.TestLoader().getTestCaseNames(cases)
    return [name for name in names if suite.is_selected(name, getattr(cases, name))]


def run_case(
    suite: Suite, cases: type[Any], name: str, work: Path, *, changing: bool
) -> dict[str, Any]:
    """Run one case, and tell its result: passed, skipped or failed, with a reason.

    Returns:
        The entries ``result``, ``reason``, ``details`` (the whole error), and ``record``, of the
        first rank that has used the change.
    """
    for left in work.glob("rank*"):
        left.unlink()
    cases.changing = changing
    outcome = unittest.TestResult()
    try:
        unittest.TestSuite([cases(name)]).run(outcome)
    finally:
        cases.end_ranks()
    told: dict[str, Any] = {"result": "passed", "reason": "", "details": "", "record": {}}
    if outcome.skipped:
        told.update(result="skipped", reason=outcome.skipped[0][1])
    failures = outcome.errors + outcome.failures
    if failures:
        details = without_paths(failures[0][1], work)
        told.update(result="failed", reason=last_error(details), details=details)
    records = [json.loads(path.read_text()) for path in sorted(work.glob("rank*.json"))]
    if records:
        # The first rank may be in none of a case's groups.
        told["record"] = next((each for each in records if each[suite.counted]), records[0])
    return told


def without_paths(text: str, work: Path) -> str:
    """A text without the directories of this machine."""
    packages = str(Path(torch.__file__).parents[1])
    for path, name in ((str(work), "$WORK"), (packages + "/", ""), (f"{ROOT}/", "")):
        text = text.replace(path, name)
    return text


def last_error(traceback: str) -> str:
    """The line of a traceback that names the exception."""
    named = [
        line for line in traceback.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)
    ]
    return named[-1] if named else traceback.strip().splitlines()[-1]


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
        (torch.cuda, "device_count", lambda: int(os.environ["WORLD_SIZE"])),
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

    return run


def with_small_images(make_input: Callable[..., Any]) -> Callable[..., Any]:
    """Cut what a case feeds to a convolution to a size for the CPU: 40 x 40 for 1000 x 1000."""

    def make(**fields: Any) -> Any:
        given = fields["inp"]
        if isinstance(given, Tensor) and given.dim() == 4:
            fields["inp"] = given[..., :40, :40].contiguous()
        return make_input(**fields)

    return make
