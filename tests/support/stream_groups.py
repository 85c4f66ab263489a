"""Process groups that run collectives on a stream, like NCCL, and training with hooks on them.

Works and Futures are complete at once. Their values come ``DELAY_SECONDS`` later or more, when the
stream has run the collective: for callers of ``wait()``. The tensors are on the CPU, or on a device
with streams, which has the host's memory (``stream_device/``). Its operators return at once; values
are NaN until they come.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from mode_cases import Mode, batch, with_futures
from torch import Tensor, nn

from torch_commhook import attach, hooks
from torch_commhook.codecs import CODECS
from torch_commhook.process_group import ProcessGroup

DELAY_SECONDS = 0.005
BACKEND = "streams"


@cache
def load_library(name: str, path: str) -> Any:
    """Loads a module that ``cpp_libraries`` has built."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream_backend(path: str, gloo: dist.ProcessGroupGloo, name: str = BACKEND) -> Any:
    """Makes a backend that runs Gloo's collectives on a stream; the path is ``stream_group``'s."""
    return load_library("stream_group", path).around(gloo, DELAY_SECONDS, name)


@cache
def _register(path: str) -> None:
    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return stream_backend(path, dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(BACKEND, make, devices=["cpu"])


def stream_group(path: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Makes a new group of some ranks, or of all; all ranks must call it, as with ``new_group``."""
    _register(path)
    return dist.new_group(ranks, backend=BACKEND)


NAME = "streams"
DEVICE = f"{NAME}:0"
#: A group without streams, such as Gloo for tensors on CUDA.
STAGED = f"cpu:gloo,{NAME}:staged"
#: A group that sends tensors on the CPU over Gloo, as ``init_process_group()`` makes it.
MIXED = f"cpu:gloo,{NAME}:{NAME}"


def _device_module() -> types.ModuleType:
    """The parts of ``torch.<name>`` that PyTorch needs of a device."""
    module = types.ModuleType(NAME)
    values: dict[str, Any] = {
        "Stream": lambda *_, **__: torch.Stream(DEVICE),
        "Event": lambda *_, **__: torch.Event(DEVICE),
        "current_stream": lambda *_: torch.accelerator.current_stream(DEVICE),
        "stream": lambda stream: stream,
        "synchronize": lambda *_: torch.accelerator.synchronize(DEVICE),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "manual_seed_all": lambda _: None,
        "_is_in_bad_fork": lambda: False,
    }
    vars(module).update(values)
    return module


def _with_kernels() -> list[str]:
    """The library's operators that have kernels for devices, as for CUDA."""
    names = ["flatten", "flatten.out", "flatten_stats", "unflatten", "unflatten_into"]
    names += ["check_finite", "sum_rows"]
    for codec in sorted(CODECS):
        operators = ("encode", "decode", "decode_sum", "reduce")
        names += [f"{codec}_{each}" for each in operators]
    return [each for each in names if hasattr(torch.ops.commhook, each.partition(".")[0])]


def issued() -> int:
    """The number of collectives that this process has put on a stream; 0 without the device."""
    return sum(library.issued() for library in _loaded)


_loaded: list[Any] = []


@cache
def load(path: str) -> Any:
    """Loads the library ``stream_device`` from its path, and registers its name with PyTorch."""
    library = load_library("stream_device", path)
    library.use_cpu_kernels(_with_kernels())
    _loaded.append(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return library.around(dist.ProcessGroupGloo(store, rank, size, timeout), DELAY_SECONDS)

    def make_staged(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return library.staged(dist.ProcessGroupGloo(store, rank, size, timeout), DELAY_SECONDS)

    dist.Backend.register_backend(NAME, make, devices=[NAME])
    dist.Backend.register_backend("staged", make_staged, devices=[NAME])
    return library


# ---- training ------------------------------------------------------------------------------------


#: Each makes a hook for the ranks and for a group of this rank alone.
_HOOKS: dict[str, Callable[[dist.ProcessGroup, dist.ProcessGroup], Any]] = {
    **{
        f"cpp {name}": lambda *_, name=name: hooks.cpp(name)
        for name in ("allreduce", "cast", "gradients", "torch_allreduce", "torch_style")
    },
    "with_futures": lambda *_: with_futures,
    **{
        name: lambda *_, name=name: getattr(hooks, name)()
        for name in ("allreduce", "cast", "blockwise", "fp8", "topk", "randomk")
    },
    "adaptive": lambda *_: hooks.adaptive(20_000, every=1, block_size=64),
    "sign": lambda *_: hooks.sign(block_size=256),
    "error_feedback": lambda *_: hooks.error_feedback(hooks.topk(0.1)),
    "powersgd": lambda *_: hooks.error_feedback(hooks.powersgd(2)),
    "policy": lambda *_: hooks.policy(
        [("numel > 2500", hooks.allreduce()), ("numel < 1000", hooks.cast())],
        hooks.error_feedback(hooks.blockwise(8)),
    ),
    # It compresses between the ranks, and not within this one.
    "hierarchical": lambda group, alone: hooks.hierarchical(
        CODECS["blockwise"](8), intra_group=alone, inter_group=group
    ),
    "clip": lambda *_: hooks.clip(0.1, hooks.blockwise(8)),
    "local_sgd": lambda *_: hooks.local_sgd(2),
    "streaming": lambda *_: hooks.local_sgd(2, hook=hooks.blockwise(8), delay=1, mix=0.5),
}
#: The names of hooks that ``hook_of`` makes.
NAMES = list(_HOOKS)


def hook_of(name: str, group: dist.ProcessGroup, alone: dist.ProcessGroup) -> Any:
    """Makes a hook for the ranks of a group, and for this rank alone."""
    return _HOOKS[name](group, alone)


def assert_same(want: list[list[Tensor]], got: list[list[Tensor]], same_bits: bool = True) -> None:
    """Compares the tensors of each rank."""
    for expected, found in zip(want, got, strict=True):
        for a, b in zip(expected, found, strict=True):
            if same_bits:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def attached(
    mode: Mode, net: nn.Module, hook: Any, group: dist.ProcessGroup, **options: Any
) -> tuple[nn.Module, Any]:
    """The model in a mode, and the hook's handle; both use the group, ``attach`` the options."""
    own = {"process_group": group}
    model = mode.wrap(net, **(own if mode.model == "ddp" else {}))
    options |= {**mode.attach_options, **(own if mode.model == "module" else {})}
    return model, attach(model, hook, **options)


def parameters_of_steps(rank: int, mode: Mode, model: nn.Module) -> list[Tensor]:
    """The parameters after each of three steps, on the CPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = next(model.parameters()).device
    found = []
    with mode.step_function(model) as step:
        for number in range(3):
            optimizer.zero_grad(set_to_none=False)
            step(batch(rank, number).to(device))
            optimizer.step()
            found += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    return found


class EchoGroup(ProcessGroup):
    """A group of two ranks on any device; the second sends the same as the first.

    It needs one process. Like NCCL, it runs its collectives on a separate stream, after a pause.
    Futures are complete at once and name the device. Memory holds NaN until the stream writes it.
    """

    def __init__(self, device: str, pause: Callable[[], None], *, is_late: bool = True) -> None:
        super().__init__(0, 2)
        self._device = torch.device(device)  # the tensors', with its index
        self._stream = torch.Stream(self._device)
        self._pause = pause  # makes the current stream wait for a while
        # Only a wait for the Future gives its values; otherwise the host waits in each collective.
        self._is_late = is_late

    def getBackendName(self) -> str:  # noqa: N802
        return "echo"

    def _run(self, outputs: Any, written: Sequence[Tensor], write: Callable[[], object]) -> Any:
        current = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._stream:
            for tensor in written:
                tensor.view(torch.uint8).fill_(0xFF)
            self._pause()
            write()
            future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
            future.set_result(outputs)
        for tensor in written:
            tensor.record_stream(self._stream)
        if not self._is_late:
            torch.accelerator.synchronize(self._device)
        return future

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run(tensors, [], lambda: None)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        def write() -> None:
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value).mul_(2)

        own = [tensor.clone() for tensor in tensors]
        return self._run(tensors, tensors, write)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        def write() -> None:
            for each in outputs[0]:
                each.copy_(inputs[0])

        return self._run(outputs, outputs[0], write)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        own = input.clone()  # the input may be a part of the output
        return self._run(output, [output], lambda: output.view(2, -1).copy_(own.view(-1)))

    def alltoall_base(
        self, output: Tensor, input: Tensor, gets: list[int], sends: list[int], opts: Any = None
    ) -> Any:
        own = input[: sends[0] if sends else len(input) // 2]
        return self._run(output, [output], lambda: output.copy_(torch.cat([own, own])))
