"""Communication hooks in C++: making one by name, and one bucket at a time."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpp_libraries import library
from torch import Tensor

from torch_commhook import (
    GradBucket,
    NativeLibraryError,
    hooks,
    include_paths,
    load_cpp_hooks,
    parse_hook_result,
    run_hook,
)

COMM_HOOKS = "comm_hooks"


@pytest.fixture(scope="module", autouse=True)
def loaded() -> list[str]:
    return load_cpp_hooks(library(COMM_HOOKS))


def bucket(**options: Any) -> GradBucket:
    torch.manual_seed(0)
    parameters = [
        torch.randn(3, 4),
        torch.randn(2, 5, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(7),
    ]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    return GradBucket(parameters, gradients, **options)


def result(hook: Any, of: GradBucket) -> Tensor:
    return parse_hook_result(run_hook(hook, None, of).wait(), of)


def ended(script: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a process that has the hooks and runs a script."""
    load = f"""
import torch, torch.distributed as dist
from torch import nn
from torch_commhook import GradBucket, attach, hooks, load_cpp_hooks, run_hook
load_cpp_hooks({library(COMM_HOOKS)!r})
"""
    return subprocess.run(
        [sys.executable, "-c", load + script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


# ---- libraries -----------------------------------------------------------------------------------


def test_loading_again_gives_the_same(loaded: list[str]) -> None:
    assert "wrong" in loaded and "torch_allreduce" in loaded
    assert load_cpp_hooks(Path(library(COMM_HOOKS))) == loaded


def test_headers() -> None:
    (folder,) = include_paths()
    assert (Path(folder) / "commhook" / "comm_hook.h").is_file()


def test_libraries_that_cannot_be_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must be encodable in UTF-8, got '.*\\udc80'"):
        load_cpp_hooks(os.fsencode(tmp_path) + b"/\x80")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_cpp_hooks(tmp_path / "none.so")
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(NativeLibraryError, match=r"does not load.*built for the torch"):
        load_cpp_hooks(text)
    cut = tmp_path / "cut.so"
    whole = Path(library(COMM_HOOKS)).read_bytes()
    for length in (0, 40, 70, 5000, len(whole) // 2):
        cut.write_bytes(whole[:length])
        with pytest.raises(NativeLibraryError, match="does not load"):
            load_cpp_hooks(cut)
    with pytest.raises(ValueError, match="registers no hooks"):
        load_cpp_hooks(library("no_hooks"))
    with pytest.raises(NativeLibraryError, match=r"built for torch 1\.0\.0"):
        load_cpp_hooks(library("old_hooks"))
    operators = Path(hooks.__file__).parent.parent / "lib"
    with pytest.raises(ValueError, match="is not a library of hooks"):
        load_cpp_hooks(next(operators.glob("_ops*.so")))


def test_a_library_that_has_been_built_anew(tmp_path: Path) -> None:
    built = tmp_path / "hooks.so"
    shutil.copy(library("autograd_hooks"), built)
    script = f"""
import os, shutil
built = {str(built)!r}
assert load_cpp_hooks(built) == load_cpp_hooks(built)
os.utime(built, (0, 0))
load_cpp_hooks(built)
print("again", flush=True)
os.remove(built)
shutil.copy({library("no_hooks")!r}, built)
load_cpp_hooks(built)
"""
    done = ended(script)
    assert done.stdout == "again\n"
    assert "has been rebuilt since this process loaded" in done.stderr
    # One that was no good stays in the process as well.
    shutil.copy(library("no_hooks"), built)
    script = f"""
import os, shutil
try:
    load_cpp_hooks({str(built)!r})
except ValueError as error:
    print(error)
os.remove({str(built)!r})
shutil.copy({library("autograd_hooks")!r}, {str(built)!r})
load_cpp_hooks({str(built)!r})
"""
    done = ended(script)
    assert "registers no hooks" in done.stdout
    assert "has been rebuilt since this process loaded" in done.stderr


def test_a_library_with_a_name_that_is_taken_is_not_taken_at_all() -> None:
    with pytest.raises(ValueError, match="'allreduce', which torch_commhook itself has registered"):
        load_cpp_hooks(library("wrong_hooks"))
    with pytest.raises(ValueError, match="there is no communication hook 'mean_of_wrong_hooks'"):
        hooks.cpp("mean_of_wrong_hooks")


# ---- names and options ---------------------------------------------------------------------------


def test_names() -> None:
    with pytest.raises(ValueError, match=r"hook 'x' in C\+\+, only 'allreduce', 'al"):
        hooks.cpp("x")
    with pytest.raises(TypeError, match="name must be a str, got int"):
        hooks.cpp(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"name must be encodable in UTF-8, got '\\udc80'"):
        hooks.cpp("\udc80")
    with pytest.raises(TypeError):
        hooks.cpp()  # type: ignore[call-arg]


def test_options_print_as_they_are_written() -> None:
    assert repr(hooks.cpp("allreduce")) == "cpp('allreduce')"
    assert repr(hooks.cpp("cast")) == "cpp('cast', dtype=torch.bfloat16)"
    printed = repr(hooks.cpp("options", level=5, factor=1, name="b", dtype=torch.float64))
    expected = "flag=False, level=5, factor=1.0, name='b', dtype=torch.float64"
    assert printed == f"cpp('options', {expected})"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"flag": 1}, TypeError, "flag must be a bool, got 1"),
        ({"level": True}, TypeError, "level must be an int, got True"),
        ({"level": 2.0}, TypeError, "level must be an int, got 2.0"),
        ({"level": torch.tensor([1, 2])}, TypeError, r"level must be an int, got tensor\(\[1, 2"),
        ({"level": 0}, ValueError, "level must be at least 1, got 0"),
        ({"level": 10}, ValueError, "level must be below 10, got 10"),
        ({"level": 1 << 70}, ValueError, "level must fit into 64 bits"),
        ({"factor": True}, TypeError, "factor must be a float, got True"),
        ({"factor": float("nan")}, ValueError, "factor must be above 0, got nan"),
        ({"factor": 1.5}, ValueError, "factor must be at most 1, got 1.5"),
        ({"factor": "1"}, TypeError, "factor must be a float, got '1'"),
        ({"factor": 10**400}, ValueError, r"cpp\('options'\): factor must fit into a float"),
        ({"name": "c"}, ValueError, "name must be one of 'a', 'b', got 'c'"),
        ({"name": None}, TypeError, "name must be a str, got None"),
        ({"name": "\udc80"}, ValueError, r"name must be encodable in UTF-8, got '\\udc80'"),
        ({"\udc80": 1}, TypeError, r"unknown option '\\udc80'"),
        ({"dtype": "float32"}, TypeError, "dtype must be a torch.dtype, got 'float32'"),
        ({"dtype": torch.cfloat}, ValueError, "dtype must be no complex dtype, got torch.c"),
        ({"levle": 3}, TypeError, "unknown option 'levle'; it takes flag \\(a bool, False by"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hooks.cpp("options", **options)


def test_an_option_without_default_must_be_given() -> None:
    with pytest.raises(
        TypeError, match=r"cpp\('wrong'\): how must be given; it takes how \(a str\)"
    ):
        hooks.cpp("wrong")
    with pytest.raises(TypeError, match=r"unknown option 'x'; it takes no options"):
        hooks.cpp("allreduce", x=1)
    with pytest.raises(ValueError, match=r"dtype must be one of torch\.bf"):
        hooks.cpp("cast", dtype=torch.float32)


def test_copies() -> None:
    hook = hooks.cpp("options", level=7)
    for other in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert repr(other) == repr(hook) and other.native is not hook.native


# ---- one bucket ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
class TestOneBucket:
    @pytest.mark.parametrize("name", ["allreduce", "gradients", "torch_allreduce", "torch_style"])
    def test_mean_over_one_rank(self, name: str) -> None:
        of = bucket(index=1, bucket_count=3)
        expected = of.buffer().clone()
        assert torch.equal(result(hooks.cpp(name), of), expected)

    def test_options_come_with_their_types(self) -> None:
        hook = hooks.cpp(
            "options", flag=True, level=np.int64(4), factor=np.float64(0.25), dtype=torch.half
        )
        with pytest.raises(RuntimeError, match=r"options: 1 4 0.25 a Half"):
            run_hook(hook, None, bucket())

    def test_cast(self) -> None:
        of = bucket()
        expected = of.buffer().to(torch.float16).float()
        hook = hooks.cpp("cast", dtype=torch.float16)
        assert hook.result_dtype(of) == torch.float16
        assert torch.equal(result(hook, of), expected)

    def test_complex_and_sparse(self) -> None:
        parameter = torch.zeros(4, dtype=torch.cfloat)
        of = GradBucket([parameter], [torch.randn(4, dtype=torch.cfloat)])
        assert torch.equal(result(hooks.cpp("allreduce"), of), of.buffer())
        sparse = torch.sparse_coo_tensor([[1]], [[2.0, 3.0]], (3, 2))
        of = GradBucket([torch.zeros(3, 2)], [sparse])
        assert result(hooks.cpp("allreduce"), of).is_sparse
        with pytest.raises(TypeError, match=r"must be dense.*\n.*raised by hook 'cpp\('cast'"):
            run_hook(hooks.cpp("cast"), None, of)

    def test_a_buffer_that_the_hook_replaces(self) -> None:
        of = bucket()
        expected = of.buffer() * 2
        assert torch.equal(result(hooks.cpp("alone"), of), expected)

    def test_a_state_and_a_parser_of_its_own(self) -> None:
        hook = hooks.cpp("counted")
        of = bucket()
        expected = of.buffer().clone()
        assert torch.equal(result(hook, copy.deepcopy(of)), expected)
        assert torch.equal(result(hook, copy.deepcopy(of)), expected * 2)
        assert torch.equal(result(copy.copy(hook), copy.deepcopy(of)), expected)

    @pytest.mark.parametrize(
        ("how", "error", "message"),
        [
            ("constructor", RuntimeError, "{where}: no such thing"),
            ("value", ValueError, "a value that does not fit.*raised by {where}"),
            ("raises", RuntimeError, "{where}: out of order"),
            ("throws an int", RuntimeError, "{where}: threw an object that is not a std"),
            ("null", TypeError, "{where}: runHook must return a Future, got a null pointer"),
            ("fails later", RuntimeError, "{where}: lost on the way"),
            ("throws an int later", RuntimeError, "{where}: threw an object that is not a std"),
            ("sets no buffer", ValueError, "setBuffer.*got an undefined tensor.*raised by {where}"),
            ("takes the buffer", RuntimeError, "the buffer was moved out of this bucket"),
            ("two", ValueError, "one tensor, got a list of 2.*raised by {where}"),
            ("number", TypeError, "one tensor, got Int.*raised by {where}"),
            ("undefined", TypeError, "an undefined tensor.*raised by {where}"),
            ("short", ValueError, "{where}: the result must have 179 elements.*got 178"),
            ("dtype", TypeError, "{where}: the result must have dtype torch.float32, got torch.f"),
            (
                "result dtype",
                TypeError,
                "{where}: resultDtype must return a dtype that can be cast",
            ),
        ],
    )
    def test_what_a_hook_can_do_wrong(self, how: str, error: type[Exception], message: str) -> None:
        where = rf"hook 'cpp\('wrong', how='{how}'\)' on bucket 0 of 1"
        with pytest.raises(error, match="(?s)" + message.format(where=where)):
            result(hooks.cpp("wrong", how=how), bucket())


def test_a_constructor_that_needs_the_gil(tmp_path: Path) -> None:
    """Two threads that need the same object must not wait for each other."""
    script = f"""
from concurrent.futures import ThreadPoolExecutor
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
hook = hooks.cpp("takes_the_gil")
def average(number):
    bucket = GradBucket([torch.zeros(2)], [torch.ones(2)])
    assert hook.result_dtype(bucket) is torch.float32
    return hook.average(bucket).wait()
with ThreadPoolExecutor(2) as threads:
    print([result.tolist() for result in threads.map(average, range(2))])
"""
    done = ended(script)
    assert (done.returncode, done.stdout) == (0, "[[1.0, 1.0], [1.0, 1.0]]\n"), done.stderr


IN_FLIGHT = """
import os, threading, time
handle.replace(hooks.cpp("late", seconds=5.0, marker={marker!r}))
loss = model(torch.ones(4)).sum()
threading.Thread(target=loss.backward, daemon=True).start()
while not os.path.exists({marker!r}):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("in_flight", ["", IN_FLIGHT], ids=["idle", "in flight"])
def test_the_process_ends_with_hooks_in_use(tmp_path: Path, in_flight: str) -> None:
    script = f"""
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model = nn.Linear(4, 4)
handle = attach(model, hooks.cpp("counted"))
model(torch.ones(4)).sum().backward()
print(handle.stats().steps, flush=True)
{in_flight.format(marker=str(tmp_path / "under way"))}
"""
    done = ended(script)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
