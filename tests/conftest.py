"""Fixtures for all tests."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from cases import Cases
from gil_calls import CannotCountError, build
from gpu_runs import gpu_run  # noqa: F401  (a fixture)
from graph_on_host import device_on_host  # noqa: F401  (a fixture)
from kernel_device import cuda_kernels, kernel_device  # noqa: F401  (fixtures)
from optimizer_hooks import listeners
from rank_pool import RankPool, collect_less, forget_python_reducer
from torch._dynamo.utils import counters
from torch.distributed import distributed_c10d
from torch_releases import store

import torch_commhook  # noqa: F401  (registers torch.ops.commhook)

#: Ranks that are threads of one process wait for each other on one GPU. Each stream then needs a
#: queue of its own, and a GPU has 8 by default. Read when the process first uses CUDA.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "store the counts of a run that passes, as those of the installed torch"
    parser.addoption("--store-torch", type=Path, metavar="FILE", help=text)
    text = "the commit that is tested, which is stored with them"
    parser.addoption("--commit", default="unknown", help=text)
    text = "run the cases that tests/check.py has chosen, and no others"
    parser.addoption("--chosen", type=Path, metavar="FILE", help=text)
    text = "the seed of what tests draw, the same in each run by default"
    parser.addoption("--seed", type=int, default=0, help=text)
    text = "run all cases, and store how long they take if they pass"
    parser.addoption("--store-durations", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cases(config))
    seed = config.getoption("--seed")
    if seed == 0:
        hypothesis.settings.register_profile("gate", derandomize=True, database=None)
        hypothesis.settings.load_profile("gate")
    else:
        config.option.hypothesis_seed = seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    path = config.getoption("--store-torch")
    is_worker = hasattr(config, "workerinput")  # whose counts are only some
    if path is not None and exitstatus == pytest.ExitCode.OK and not is_worker:
        code = config.getoption("--commit")
        store(path, code, {name: len(reports) for name, reports in terminalreporter.stats.items()})


def pytest_collection_finish() -> None:
    collect_less()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        reason = "needs a CUDA GPU, and none is visible"
    elif not torch.ops.commhook.has_cuda_kernels():
        reason = "needs CUDA kernels, and this build has none (COMMHOOK_CUDA=1 builds them)"
    else:
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


#: What PyTorch, Python and tqdm keep until the process ends: compiling, following shared memory,
#: and watching progress bars.
KEPT = ("compile_worker", "resource_tracker", "_read_thread", "InductorSubproc", "tqdm_monitor")


def _children() -> set[str]:
    """Processes whose parent is this one, by number and command."""
    children = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            children.add(f"{folder.name} {command}")
    return children


def _threads_of_inductor() -> set[threading.Thread]:
    """Those in which it compiles what no cache of an earlier run has."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is None or not compiler.AsyncCompile.pool.cache_info().currsize:
        return set()
    return set(compiler.AsyncCompile.pool()._threads)


def _is_of_autograd(thread: threading.Thread) -> bool:
    """Autograd has a thread for each GPU, which lives on; Python knows one that has run hooks."""
    return torch.cuda.is_available() and isinstance(thread, threading._DummyThread)


@pytest.fixture(scope="session", autouse=True)
def no_thread_or_process_left() -> Iterator[None]:
    """No test leaves a thread or a process. The first fixture, so that it ends last."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + 10
    while True:
        new = set(threading.enumerate()) - threads - _threads_of_inductor()
        left = [f"thread {each.name}" for each in new if not _is_of_autograd(each)]
        left += [f"process {each}" for each in _children() - children]
        left = [each for each in left if not any(name in each for name in KEPT)]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """What a test draws depends on the seed and the test alone."""
    random.seed(f"{request.config.getoption('--seed')} {request.node.nodeid}")
    # Without a GPU, torch.manual_seed keeps this call's stack for each kind of GPU.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(random.getrandbits(40))


@pytest.fixture(autouse=True)
def no_python_reducer_left() -> Iterator[None]:
    """A test compiles a DDP as if no other test had made one with the Python reducer."""
    yield
    forget_python_reducer()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two processes with a Gloo group: ``two_ranks.run(function, *args)``."""
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three processes with a Gloo group."""
    pool = RankPool(3)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four processes with a Gloo group."""
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture
def pools(two_ranks: RankPool, three_ranks: RankPool) -> dict[int, RankPool]:
    """The pool of so many ranks."""
    return {2: two_ranks, 3: three_ranks}


@pytest.fixture(scope="class")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Gloo group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, and counters of the compiler at zero."""
    # A graph from the cache would be that of an earlier state of the library.
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        torch._dynamo.reset()
        counters.clear()
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def gil_counter() -> None:
    """Builds what ``gil_calls.count_gil_calls`` needs, or skips the test."""
    try:
        build()
    except CannotCountError as error:
        pytest.skip(str(error))


@pytest.fixture
def run_ranks_restores() -> Iterator[None]:
    """``run_ranks`` leaves no thread, world or hook of the interpreter."""
    threads, world, hook = threading.enumerate(), distributed_c10d._world, sys.excepthook
    yield
    assert [
        t for t in threading.enumerate() if t not in threads and t.name.startswith("rank")
    ] == []
    assert distributed_c10d._world is world
    assert sys.excepthook is hook


@pytest.fixture
def no_hook_on_optimizers_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """What listens to all optimizers goes with the last hook that counts their steps."""
    pools: list[RankPool] = [
        request.getfixturevalue(name)
        for name in ("two_ranks", "three_ranks")
        if name in request.fixturenames
    ]

    def found() -> list[set[int]]:
        return [listeners(), *(each for pool in pools for each in pool.run(listeners))]

    # Something else in this process may keep a model of another test.
    before = found()
    yield
    assert [now - then for now, then in zip(found(), before, strict=True)] == [set()] * len(before)
