"""The counter of GIL acquisitions, in one process."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import gil_calls
import pytest
import torch
from cpp_compiler import cpp_compiler
from gil_calls import CannotCountError, count_gil_calls
from repository import SUPPORT

pytestmark = pytest.mark.usefixtures("gil_counter")


@pytest.fixture(scope="module")
def leave_and_return() -> Callable[[int], None]:
    """Gives the GIL away and takes it again, as often as asked."""
    getpid = ctypes.CDLL(None).getpid

    def call(times: int) -> None:
        for _ in range(times):
            getpid()

    return call


class TestCounter:
    def test_a_known_number(self, leave_and_return: Callable[[int], None]) -> None:
        with count_gil_calls() as calls:
            leave_and_return(100)
        assert calls.acquired == 100
        assert calls.by_function == {"PyEval_RestoreThread": 100}
        ((library, number),) = calls.by_library.items()
        assert "_ctypes" in library and number == 100
        assert calls.by_thread == {threading.get_native_id(): 100}
        assert calls.already_held == 0

    def test_nothing_to_count(self) -> None:
        with count_gil_calls() as calls:
            sum(range(1000))
        assert calls.acquired == 0 and calls.calls == {}

    def test_a_call_that_keeps_the_gil(self) -> None:
        getpid = ctypes.PyDLL(None).getpid
        with count_gil_calls() as calls:
            getpid()
        assert calls.acquired == 0

    @pytest.mark.parametrize("held", [False, True])
    def test_a_callback_with_and_without_the_gil(self, held: bool) -> None:
        called = 0

        def compare(a: int, b: int) -> int:
            nonlocal called
            called += 1
            return 0

        pointer = ctypes.c_void_p
        callback = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(compare)
        sort = (ctypes.PyDLL if held else ctypes.CDLL)(None).qsort
        numbers = (ctypes.c_int * 8)()
        with count_gil_calls() as calls:
            sort(numbers, ctypes.c_size_t(8), ctypes.c_size_t(4), callback)
        assert called > 0
        if held:
            assert (calls.acquired, calls.already_held) == (0, called)
        else:
            assert calls.by_function == {"PyGILState_Ensure": called, "PyEval_RestoreThread": 1}
            assert calls.already_held == 0

    def test_again_and_nested(self, leave_and_return: Callable[[int], None]) -> None:
        with count_gil_calls() as outer:
            leave_and_return(1)
            with count_gil_calls() as inner:
                leave_and_return(10)
            leave_and_return(100)
        leave_and_return(1000)
        with count_gil_calls() as again:
            leave_and_return(3)
        assert (outer.acquired, inner.acquired, again.acquired) == (111, 10, 3)

    def test_also_after_an_error(self) -> None:
        with pytest.raises(KeyError), count_gil_calls() as calls:
            raise KeyError
        assert gil_calls.installed() == 0
        with pytest.raises(RuntimeError, match="must have ended"):
            _ = calls.acquired

    def test_not_to_be_read_too_early(self) -> None:
        with count_gil_calls() as calls, pytest.raises(RuntimeError, match="must have ended"):
            _ = calls.by_function

    def test_threads(self, leave_and_return: Callable[[int], None]) -> None:
        numbers = {}
        start = threading.Barrier(4)

        def work(times: int) -> None:
            numbers[threading.get_native_id()] = times
            start.wait(30)
            leave_and_return(times)
            start.wait(30)  # the system must not give one thread's number to the next

        threads = [threading.Thread(target=work, args=(100 * i,)) for i in (1, 2, 3, 4)]
        with count_gil_calls() as calls:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert calls.by_thread == numbers
        assert calls.acquired == 1000

    def test_autograd_is_seen(self) -> None:
        parameter = torch.ones(3, requires_grad=True)
        loss = parameter.exp().sum()
        with count_gil_calls() as calls:
            loss.backward()
        assert calls.by_library["lib/libtorch_python.so"] >= 1

    def test_a_library_that_is_loaded_meanwhile(self, tmp_path: Path) -> None:
        another = shutil.copy(gil_calls.build(), tmp_path / "another.so")
        with pytest.raises(RuntimeError, match="1 libraries were loaded while counting"):
            with count_gil_calls():
                ctypes.CDLL(another)
        assert gil_calls.installed() == 0
        with count_gil_calls() as calls:
            ctypes.CDLL(another)
        assert calls.calls is not None

    def test_without_torch(self) -> None:
        program = (
            "import ctypes\nfrom gil_calls import count_gil_calls\n"
            "getpid = ctypes.CDLL(None).getpid\n"
            "with count_gil_calls() as calls:\n    getpid()\nprint(calls.acquired)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=SUPPORT, capture_output=True, text=True, timeout=60
        )
        assert (done.stdout, done.stderr) == ("1\n", "")


TAKES = """
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
int (*volatile pointer)() = PyGILState_Ensure;
void call(int times) {
  for (int i = 0; i < times; ++i) PyGILState_Release(PyGILState_Ensure());
}
void call_by_pointer(int times) {
  for (int i = 0; i < times; ++i) PyGILState_Release(pointer());
}
}
"""


class TestWaysToLink:
    """However a library was linked, its calls are counted and it is left as it was."""

    @pytest.mark.parametrize("function", ["call", "call_by_pointer"])
    @pytest.mark.parametrize(
        "options",
        [["-Wl,-z,lazy"], ["-Wl,-z,now,-z,relro"], ["-fno-plt", "-Wl,-z,relro"]],
        ids=["lazy", "now", "no-plt"],
    )
    def test_counted_and_put_back(self, tmp_path: Path, options: list[str], function: str) -> None:
        library = tmp_path / "takes.so"
        command = [*cpp_compiler(), "-x", "c++", "-", "-shared", "-fPIC", *options]
        command += ["-o", str(library)]
        subprocess.run(command, input=TAKES, text=True, timeout=300, check=True)

        def protections() -> list[str]:
            lines = Path("/proc/self/maps").read_text().splitlines()
            return [" ".join(line.split()[:2]) for line in lines if line.endswith(str(library))]

        takes = ctypes.CDLL(str(library))
        call = getattr(takes, function)
        before = protections()
        assert len(before) > 2
        assert gil_calls.installed() == 0
        with count_gil_calls() as calls, count_gil_calls():
            assert gil_calls.installed() > 0
            call(10)
            assert protections() == before
        assert gil_calls.installed() == 0
        assert protections() == before
        call(10)
        assert calls.by_function == {"PyGILState_Ensure": 10, "PyEval_RestoreThread": 1}
        assert calls.by_library[f"{tmp_path.name}/takes.so"] == 10


class TestBuild:
    @pytest.fixture(autouse=True)
    def nothing_built(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cpp_compiler.BUILD", tmp_path)

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(CannotCountError, match=re.escape("no C++ compiler was found")):
            gil_calls.build()

    def test_another_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(CannotCountError, match=r"must be Linux .*, got darwin"):
            gil_calls.build()

    def test_a_compiler_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(RuntimeError, match=r"false .* failed"):
            gil_calls.build()
        assert not list(tmp_path.iterdir())
