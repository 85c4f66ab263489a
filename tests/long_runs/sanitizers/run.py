"""Tests of hooks and operators on libraries that were built with a sanitizer; any report fails.

``make test-asan`` and ``make test-tsan`` build a copy of the tree and call this in it:
``run.py address|thread [arguments of pytest]``. Files among the arguments take the place of those
that are named here.

Python and PyTorch are not instrumented. The sanitizer's library must be loaded before all others,
and what it takes for a mistake of theirs is left out: the files ``*.supp`` say what, and why.
Reports go to files: pytest holds back what a process writes before it dies, and nobody reads what
child processes write.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
REPORTS = ROOT / "build" / "reports"

#: What runs a second time to look for leaks. That takes the whole stack of each allocation, and
#: with it several times as long.
LEAK_TESTS = [
    "tests/autograd/test_autograd_hooks.py",
    "tests/autograd/test_autograd_hook_threads.py",
]

TESTS = [
    *LEAK_TESTS,
    "tests/autograd/test_post_accumulate_hooks.py",
    "tests/hooks/test_run_hook.py",
    "tests/attachment/test_reducer_one_rank.py",
    "tests/attachment/test_hook_failures.py",
    "tests/attachment/test_reducer.py",
    "tests/hooks/test_cpp_hooks.py",
    "tests/autograd/test_cpp_autograd_hooks.py",
    "tests/collectives/test_wire_backend.py",
    "tests/collectives/test_exchange.py",
]

#: With AddressSanitizer too. These have no threads but OpenMP's.
OPERATOR_TESTS = [
    "tests/hooks/test_bucket.py",
    "tests/ops/test_ops_errors.py",
    "tests/ops/test_ops_values.py",
    "tests/ops/test_ops_contract.py::test_plain_calls_go_past_torch_ops",
    "tests/ops/test_ops_contract.py::test_other_numbers_go_through_torch_ops",
    "tests/ops/test_ops_contract.py::test_what_is_no_list_of_tensors",
    "tests/ops/test_ops_contract.py::test_refusals_are_the_same",
]

#: CUDA kernels on the host: what they read or write past a tensor.
KERNEL_TESTS = [
    "tests/cuda/test_cuda_bucket.py::test_mixed_dtypes",
    "tests/cuda/test_cuda_bucket.py::test_random_tensors",
    "tests/cuda/test_cuda_bucket.py::test_rows_that_end_with_their_memory",
    "tests/cuda/test_cuda_check.py::test_every_alignment",
    "tests/cuda/test_cuda_topk.py",
    "tests/cuda/test_cuda_codecs.py::test_blocks_of_any_size",
    "tests/cuda/test_cuda_codecs.py::test_the_largest_numbers",
    "tests/cuda/test_cuda_codecs.py::test_the_bits_of_the_cpu",
    "tests/cuda/test_cuda_codecs.py::test_many_tensors",
    "tests/cuda/test_cuda_codecs.py::test_a_block_of_more_tensors_than_a_table",
]

#: Threads that write the same gradients at the same time are what this test is about.
RACES = ["tests/autograd/test_post_accumulate_hooks.py::test_one_model_in_several_threads"]


def preloaded(name: str) -> str:
    """The sanitizer's library, and that of C++, whose ``__cxa_throw`` it looks for at once."""
    paths = []
    for library in (name, "libstdc++.so"):
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={library}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            raise SystemExit(f"run.py: {command[0]} must have {library}, got none")
        paths.append(path)
    return ":".join(paths)


def options(**values: object) -> str:
    return ":".join(f"{name}={value}" for name, value in values.items())


def run_tests(arguments: list[str], **environment: str) -> bool:
    """Run pytest, and say whether all is well."""
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    # pytest's handler of faults would take the place of the sanitizer's. Long tests run, too.
    pytest = [sys.executable, "-m", "pytest", "-p", "no:faulthandler", "-m", "", *arguments]
    # Tests that start Python elsewhere must find this tree, and not the one that is installed.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    status = subprocess.run(pytest, cwd=ROOT, env=environment).returncode
    reports = sorted(REPORTS.iterdir())
    for report in reports:
        print(report.read_text(errors="replace"))
    print(f"run.py: pytest ended with {status}; {len(reports)} processes made reports")
    return status == 0 and not reports


def selected(tests: list[str], arguments: list[str]) -> list[str]:
    """Arguments of pytest, with the tests that are run where they name none."""
    named = any((ROOT / argument.split("::")[0]).exists() for argument in arguments)
    return arguments if named else [*tests, *arguments]


def address(arguments: list[str]) -> bool:
    environment = {
        "LD_PRELOAD": preloaded("libasan.so"),
        "PYTHONMALLOC": "malloc",  # a block of the heap for each Python object
    }
    log = REPORTS / "report"
    errors = options(
        log_path=log,
        detect_leaks=0,
        detect_stack_use_after_return=1,
        max_free_fill_size=4096,  # code that is not instrumented finds no valid pointer there
    )
    leaks = options(log_path=log, fast_unwind_on_malloc=0, malloc_context_size=40)
    suppressions = options(suppressions=HERE / "leak.supp", print_suppressions=0)
    tests = selected([*TESTS, *OPERATOR_TESTS, *KERNEL_TESTS], arguments)
    if not run_tests(tests, ASAN_OPTIONS=errors, **environment):
        return False
    tests = selected([*LEAK_TESTS, "-k", "not compiled"], arguments)
    return run_tests(tests, ASAN_OPTIONS=leaks, LSAN_OPTIONS=suppressions, **environment)


def thread(arguments: list[str]) -> bool:
    deselected = [f"--deselect={test}" for test in RACES]
    return run_tests(
        [*selected(TESTS, arguments), *deselected],
        LD_PRELOAD=preloaded("libtsan.so"),
        OMP_NUM_THREADS="1",  # the sanitizer does not see how OpenMP's threads wait for each other
        TSAN_OPTIONS=options(
            log_path=REPORTS / "report",
            # Not what Python and PyTorch do to memory; their locks, the GIL among them, count.
            ignore_noninstrumented_modules=1,
            history_size=4,
        ),
    )


def main() -> int:
    sanitizers = {"address": address, "thread": thread}
    name, *arguments = sys.argv[1:] or [""]
    if name not in sanitizers:
        raise SystemExit(f"run.py: the first argument must be address or thread, got {name!r}")
    return 0 if sanitizers[name](arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
