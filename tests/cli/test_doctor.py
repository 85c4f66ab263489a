"""``python -m torch_commhook doctor``: its report, and its findings on broken installations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from repository import ROOT
from torch_releases import since
from train_processes import error_of, finding, finished, report

import torch_commhook
from torch_commhook.cli.doctor import CHECKS, build, network
from torch_commhook.cli.doctor.build import architectures, serves
from torch_commhook.cli.doctor.meeting import Meeting, Settings
from torch_commhook.cli.doctor.network import by_device
from torch_commhook.cli.launch_environment import LaunchEnvironment
from torch_commhook.cli.main import main

Find = Callable[..., dict[str, Any]]


@pytest.fixture
def find(capsys: pytest.CaptureFixture[str]) -> Find:
    return lambda checks, name, *options, code=0: finding(
        report(capsys, checks, *options, code=code), name
    )


def test_all_is_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMHOOK_SHOWN", "yes")
    monkeypatch.setenv("SOME_TOKEN", "a-secret")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"ok       torch_commhook: {torch_commhook.__version__}" in lines
    assert f"ok       torch: {torch.__version__}" in lines
    assert f"ok       _C built for torch: {torch.__version__}" in lines
    assert "ok       COMMHOOK_SHOWN: yes" in lines
    assert any("1 pair of ranks connects" in line for line in lines)
    assert lines[-1].startswith("doctor: 0 errors, ")
    assert not any("a-secret" in line for line in lines)


def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "versions,build")
    assert found["errors"] == 0
    assert {each["group"] for each in found["findings"]} == {"versions", "build"}
    for each in found["findings"]:
        assert set(each) == {"group", "name", "value", "level", "advice", "rank"}
    assert finding(found, "torch")["value"] == torch.__version__


def test_a_finding_that_is_not_ok_has_one_sentence_of_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", {build.SHARED_MEMORY: _file_system(8 << 20)}.get)
    assert main(["doctor", "--only", "host"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (place,) = [i for i, line in enumerate(lines) if "shared memory" in line]
    assert lines[place].startswith("error    shared memory: 8 MiB of 8 MiB are free in /dev/shm")
    assert re.fullmatch(r" {9}-> Give /dev/shm .*--shm-size=1g.*\.", lines[place + 1])


@pytest.mark.parametrize("options", [["--only", "nothing"], ["--timeout", "0"], ["more"]])
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of("doctor", options, capsys)


def test_a_check_that_fails_leaves_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(settings: object) -> list[object]:
        raise ZeroDivisionError("by chance")

    monkeypatch.setitem(CHECKS, "gpus", fail)
    found = report(capsys, "gpus,build", code=1)
    assert finding(found, "check of gpus")["value"] == "ZeroDivisionError: by chance"
    assert finding(found, "native libraries")["level"] == "ok"


def test_wrong_gradients_are_told(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "averaged", lambda rank, hook: torch.full((2,), rank + 1.0))
    found = find("hooks", "allreduce", code=1)
    assert found["level"] == "error" and "should give 1.5" in found["value"]


# ---- the build ----------------------------------------------------------------------------------


def _copy_of_the_package(folder: Path, library: str, contents: bytes | None) -> None:
    """A package with a changed or missing library."""
    for path in (ROOT / "torch_commhook").rglob("*"):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".so" or not path.name.startswith(library):
            shutil.copyfile(path, copy)
        elif contents is not None:
            copy.write_bytes(contents)


def _doctor_of(folder: Path, *options: str) -> str:
    """What doctor prints of a broken package."""
    done = finished(
        *(sys.executable, "-m", "torch_commhook", "doctor", *options),
        folder=folder,
        code=1,
        environment={**os.environ, "PYTHONPATH": str(folder)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def _library() -> bytes:
    (library,) = (ROOT / "torch_commhook" / "lib").glob("_ops*.so")
    return library.read_bytes()


def _for_another_torch() -> bytes:
    """The library, as if it had been built for torch 9.99."""
    mark = f"commhook built for torch {torch.__version__}\0".encode()
    other = b"commhook built for torch 9.99".ljust(len(mark), b"\0")
    assert mark in _library()
    return _library().replace(mark, other)


#: Libraries, their contents, and what is said: the value as a pattern, and the advice.
BROKEN = {
    "another torch": (
        "_ops",
        _for_another_torch,
        rf"built for torch 9\.99, and torch {re.escape(torch.__version__)} is installed",
        "Build them again, or install torch 9.99: python setup.py develop",
    ),
    "no build": (
        "_",
        lambda: None,
        r"not built \(none in .*\)",
        "Change to another folder: ",  # the tests have a built one
    ),
}
for _name, _library_name in (("library", "_ops"), ("runtime", "_C")):
    BROKEN[f"a {_name} that does not load"] = (
        _library_name,
        lambda: b"nonsense",
        "do not load: NativeLibraryError: .*",
        f"Build them again for torch {torch.__version__} and this Python: python setup.py develop",
    )


@pytest.mark.parametrize("case", BROKEN)
def test_native_libraries_that_do_not_load(case: str, tmp_path: Path) -> None:
    library, contents, value, advice = BROKEN[case]
    _copy_of_the_package(tmp_path, library, contents())
    found = json.loads(_doctor_of(tmp_path, "--json", "--only", "versions,build,gpus,hooks"))
    assert found["errors"] == 1
    libraries = finding(found, "native libraries")
    assert re.fullmatch(value, libraries["value"])
    assert libraries["advice"].startswith(advice)
    assert finding(found, "torch")["value"] == torch.__version__
    assert "not tried" in finding(found, "hooks")["value"]


def test_no_other_package_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT)])
    monkeypatch.setattr(build, "library_error", lambda: ImportError("not built"))
    monkeypatch.setattr(build, "operator_library", lambda *_: None)
    (found, _) = build.check_build(Settings(1.0))
    advice = f"Build them for torch {torch.__version__}: python setup.py develop"
    assert found.advice is not None and found.advice.startswith(advice)


def test_hooks_on_two_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their connections are other than those of ranks that are threads, and have failed alone."""
    found = report(capsys, "ranks")
    name = "two processes on this host, hook allreduce over Gloo"
    assert finding(found, name)["value"] == "works"
    monkeypatch.setattr(network, "averaged", Mock(side_effect=RuntimeError("not connected\nstack")))
    alone = Meeting(dist.HashStore(), 0, 1, 10.0)
    failed = [each for each in network._all_ranks(alone, 10.0) if each.level == "error"]
    assert [each.value for each in failed] == ["RuntimeError: not connected"]
    assert not dist.is_initialized()
    for value, said in ((1.000001, None), (1.0625, "gives [1.0625], not 1.0")):  # means are rounded
        monkeypatch.setattr(network, "averaged", Mock(return_value=torch.full((4, 4), value)))
        again = Meeting(dist.HashStore(), 0, 1, 10.0)
        assert network._hook_error(again, 10.0) == said


def test_no_rank_tries_a_hook_if_one_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([None, ImportError("not built")])
    monkeypatch.setattr(network, "library_error", lambda: next(errors))
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        meetings = pool.map(lambda rank: Meeting(store, rank, 2, 10.0), range(2))
        found = pool.map(lambda meeting: list(network._all_ranks(meeting, 10.0)), meetings)
        names = [[each.name for each in of_rank] for of_rank in found]
    assert names == [["connections", "all-reduce over Gloo"], []]


def test_a_whole_report_where_nothing_is_built(tmp_path: Path) -> None:
    _copy_of_the_package(tmp_path, "_", None)
    output = _doctor_of(tmp_path)
    assert "ok       two processes on this host, all-reduce over Gloo: works" in output
    assert "hook allreduce" not in output  # it has no library
    assert output.splitlines()[-1].startswith("doctor: 1 error, ")


@pytest.mark.parametrize(
    ("version", "value", "level"),
    [
        (
            "2.13.0+cu130",
            "12 passed at commit 1a2b on torch 2.13.0, its build cpu, with Python 3.11.7",
            "ok",
        ),
        ("2.13.1", "never run on 2.13.1; passed on torch 2.13.0", "ok"),
        ("2.16.0+cu140", "never run on 2.16.0; passed on torch 2.11.0, 2.13.0", "warning"),
    ],
)
def test_the_torch_that_the_tests_ran_on(
    version: str,
    value: str,
    level: str,
    find: Find,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = {"passed": 12, "python": "3.11.7", "build": "cpu", "code": "1a2b"}
    (tmp_path / "tested.json").write_text(json.dumps({"2.11.0": run, "2.13.0": run}))
    monkeypatch.setattr(build, "TESTED", tmp_path / "tested.json")
    monkeypatch.setattr(torch, "__version__", version)
    found = find("versions", "tests on this torch")
    assert (found["value"], found["level"]) == (value, level)
    assert ("make test-torch TORCH=2.16.0" in found["advice"]) == (level == "warning")


def test_torch_that_does_not_load(tmp_path: Path) -> None:
    _copy_of_the_package(tmp_path, "_ops", _library())
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')")
    found = json.loads(_doctor_of(tmp_path, "--json"))
    torch_found = finding(found, "torch")
    assert torch_found["value"] == "does not load: libcudart.so.13: no such file"
    assert torch_found["advice"].startswith("Install torch")
    assert finding(found, "native libraries")["advice"] == "Install torch first."
    assert finding(found, "shared memory")


@pytest.mark.parametrize(
    ("compiler", "is_built", "value", "level", "advice"),
    [
        (None, True, "none on the PATH", "warning", "torch.compile"),
        (None, False, "none on the PATH", "error", "the build needs it"),
        (
            "no-such-compiler",
            True,
            "CXX names no-such-compiler, which is missing",
            "warning",
            "Set CXX to an installed compiler, or unset it: ",
        ),
        (f"{sys.executable} -O2", True, sys.executable, "ok", ""),
    ],
)
def test_the_compiler(
    compiler: str | None,
    is_built: bool,
    value: str,
    level: str,
    advice: str,
    find: Find,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compiler is None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", compiler)
    if not is_built:
        monkeypatch.setattr(build, "library_error", lambda: ImportError("not built"))
    found = find("build", "C++ compiler", code=0 if is_built else 1)
    assert (found["value"], found["level"]) == (value, level)
    assert advice in found["advice"] and bool(advice) == bool(found["advice"])


# ---- CUDA ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.ops.commhook.has_cuda_kernels(), reason="this build has CUDA kernels")
def test_a_cuda_build_without_kernels(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = find("gpus", "CUDA kernels")
    assert found["level"] == "warning"
    assert "none in the build, though torch is a build for CUDA 13.0" in found["value"]
    advice = "Install nvcc of CUDA 13.0, then run: COMMHOOK_CUDA=1 python setup.py develop"
    assert found["advice"] == advice


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_a_build_for_the_cpu(find: Find) -> None:
    found = find("gpus", "CUDA kernels")
    assert found["level"] == "ok"
    assert found["value"] == f"none, since torch {torch.__version__} is not a CUDA build"


def _entry(kind: int, number: int, payload: bytes) -> bytes:
    header = kind.to_bytes(2, "little") + bytes(2) + (64).to_bytes(4, "little")
    header += len(payload).to_bytes(8, "little") + bytes(12) + number.to_bytes(4, "little")
    return header.ljust(64, b"\0") + payload


def _fat_binary(*entries: bytes) -> bytes:
    size = sum(map(len, entries))
    header = b"\x50\xed\x55\xba\x01\x00\x10\x00" + size.to_bytes(8, "little")
    return header + b"".join(entries)


def test_architectures_of_the_kernels() -> None:
    first = _fat_binary(_entry(2, 80, b"code" * 3), _entry(2, 90, b"more"), _entry(1, 90, b"ptx"))
    library = b"\x7fELF" + first + bytes(7) + _fat_binary(_entry(2, 100, b"")) + b"end"
    assert architectures(library) == {"sm_80", "sm_90", "compute_90", "sm_100"}
    assert architectures(library[: 4 + 16 + 20]) == set()
    assert architectures(b"\x50\xed\x55\xba\x01\x00" + bytes(range(200))) == set()


@pytest.mark.parametrize(
    ("found", "capability", "is_served"),
    [
        ({"sm_80"}, (8, 0), True),
        ({"sm_80"}, (8, 6), True),
        ({"sm_86"}, (8, 0), False),
        ({"sm_80"}, (9, 0), False),
        ({"compute_80"}, (9, 0), True),
        ({"compute_90"}, (8, 0), False),
        ({"sm_90", "sm_100"}, (10, 0), True),
    ],
)
def test_gpus_that_kernels_serve(
    found: set[str], capability: tuple[int, int], is_served: bool
) -> None:
    assert serves(found, *capability) is is_served


def test_kernels_for_other_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "_ops.so"
    library.write_bytes(_fat_binary(_entry(2, 90, b"code")))
    gpu = SimpleNamespace(name="A GPU", major=8, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr("torch_commhook.cli.doctor.build.operator_library", lambda: library)
    monkeypatch.setattr(torch.ops.commhook, "has_cuda_kernels", lambda: True)
    found = report(capsys, "gpus", code=1)
    assert finding(found, "GPUs")["value"] == "A GPU (8.0, 80 GiB)"
    kernels = finding(found, "CUDA kernels")
    assert kernels["level"] == "error"
    assert kernels["value"] == "sm_90: none for compute capability 8.0"
    assert "TORCH_CUDA_ARCH_LIST='8.0'" in kernels["advice"]


# ---- the host -----------------------------------------------------------------------------------


def _file_system(free: int) -> SimpleNamespace:
    return SimpleNamespace(f_frsize=4096, f_blocks=free // 4096, f_bavail=free // 4096)


@pytest.mark.parametrize(
    ("free", "level"), [(8 << 20, "error"), (64 << 20, "warning"), (2 << 30, "ok")]
)
def test_shared_memory(free: int, level: str, find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: _file_system(free))
    found = find("host", "shared memory", code=int(level == "error"))
    assert found["level"] == level
    assert (level == "ok") == (not found["advice"])


def test_no_huge_pages(find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(build, "_HUGE_PAGES", setting)
    found = find("host", "huge pages")
    assert (found["value"], found["level"]) == ("never", "warning")
    setting.write_text("always [madvise] never\n")
    assert find("host", "huge pages")["level"] == "ok"


@pytest.mark.parametrize(
    ("cores", "threads", "ranks", "advice"),
    [
        (8, 8, 1, ""),
        (8, 4, 2, ""),
        (8, 8, 2, "Set OMP_NUM_THREADS=4: all ranks together have more"),
        (8, 1, 2, "Set OMP_NUM_THREADS=4: each rank uses one processor of 4"),
        (2, 1, 2, ""),
        (2, 1, 4, ""),
    ],
)
def test_threads_and_processors(
    cores: int, threads: int, ranks: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    settings = Settings(1.0, place=LaunchEnvironment(0, ranks, 0, ranks))
    found = build._processors(settings)
    assert found.advice.startswith(advice) and bool(found.advice) == bool(advice)


def test_the_quota_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(build, "_CPU_QUOTA", quota)
    cores = build.usable_cores()
    quota.write_text("max 100000\n")
    assert build.usable_cores() == cores
    quota.write_text("50000 100000\n")
    assert build.usable_cores() == 0.5


def test_few_open_files(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (128, 4096))
    found = find("host", "open files")
    assert (found["value"], found["level"]) == ("128 (at most 4096)", "warning")
    assert found["advice"].startswith("Run ulimit -n 1024 before training")


# ---- the default group --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "devices", "said"),
    [
        ("gloo", "cpu cuda", ["gloo"]),
        (
            "cpu:gloo,cuda:nccl",
            "",
            [
                "cpu tensors travel over gloo, cuda tensors travel over nccl",
                "nccl cannot take back a collective",
                "call abort() on all ranks, make a new group and attach again",
            ],
        ),
        (
            "cpu:mpi,cuda:nccl",
            "",
            ["ranks cannot agree over mpi", "init_process_group('cpu:gloo,cuda:nccl')"],
        ),
        ("cpu:fake,xpu:xccl", "", ["ranks cannot agree over fake", "('cpu:gloo,xpu:xccl')"]),
        # torch says for which devices a backend is; older releases do not know some of these.
        *(
            (n, "cuda", [f"{n}: cuda tensors travel over {n}; ranks agree", f"{n} cannot take"])
            for n in ("nccl", "nccl2", "nccl-legacy", "nccl-lazy")
        ),
        ("xccl", "xpu", ["xccl cannot take back a collective"]),
    ],
)
def test_a_group_of_a_backend(
    backend: str,
    devices: str,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend != "gloo":
        monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    if devices:
        monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, backend])
        monkeypatch.setitem(dist.Backend.backend_capability, backend, devices.split())
    (group,) = report(capsys, "group", "--backend", backend)["findings"]
    assert group["level"] == ("ok" if backend == "gloo" else "warning")
    assert [each for each in said if each not in f"{group['value']} {group['advice']}"] == []


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("", "'': the configuration names no backend"),
        ("cpu:a:b:c", "'cpu:a:b:c': Invalid device:backend pairing: cpu:a:b:c."),
        ("cpu:gloo,cuda", "Invalid device:backend pairing: cuda."),
        ("cpu:gloo,cpu:nccl", "Duplicate device type cpu in backend string"),
        ("foo:gloo", "device type at start of device string: foo"),
    ],
)
def test_a_group_that_torch_refuses(
    backend: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (group,) = report(capsys, "group", "--backend", backend, code=1)["findings"]
    assert said in group["value"]
    assert group["advice"].startswith("Name a backend, or one for each kind of device")


def test_the_default_group_has_the_accelerators_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.device("cuda")
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: found)
    # Newer torch asks whether it is there.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: found)
    assert by_device("undefined") == {"cuda": "nccl"}


@since("2.14")
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_backends_that_torch_registers_when_asked() -> None:
    names = ["nccl", "nccl2", "nccl-legacy", "nccl-lazy"]  # only of which it already knows one
    program = (
        "import sys; from torch_commhook.cli.doctor.network import by_device\n"
        "for name in sys.argv[1:]: print(by_device(name))"
    )
    printed = subprocess.check_output([sys.executable, "-c", program, *names], text=True)
    assert printed.splitlines() == [str({"cuda": name}) for name in names]


def test_a_default_group_of_two_backends(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is real; its backend for CUDA is PyTorch's fake one."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers it)

    dist.init_process_group(
        "cpu:gloo,cuda:fake", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        (group,) = report(capsys, "group")["findings"]
    finally:
        dist.destroy_process_group()
    assert group["name"] == "the default group" and group["level"] == "warning"
    assert "cuda tensors travel over fake" in group["value"]
    assert "fake cannot take back a collective" in group["value"]
    assert report(capsys, "group")["findings"] == []  # there is none any more


def test_a_backend_that_torch_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = report(capsys, "group", "--backend", "cpu:gloo,cuda:none_such", code=1)["findings"]
    assert "this torch has no none_such" in group["value"]
