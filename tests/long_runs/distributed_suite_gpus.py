"""The CPU in place of GPUs, for cases of PyTorch's that were written for GPUs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode


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
