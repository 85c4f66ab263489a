"""Checks of the default process group's backends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch_commhook.cli.doctor.findings import Finding, first_line
from torch_commhook.cli.doctor.settings import Settings


def check_group(settings: Settings) -> Iterator[Finding]:
    """The default group's backends, or those that ``init_process_group`` would take."""
    try:
        import torch.distributed as dist
    except (ImportError, OSError):
        return
    if not dist.is_available():
        return
    if dist.is_initialized():
        source, config = "the default group", dist.get_backend_config()
    elif settings.backend is not None:
        source, config = f"init_process_group({settings.backend!r})", settings.backend
    elif settings.place is not None:
        source, config = "init_process_group()", "undefined"
    else:
        return
    yield from backends(source, config)


def by_device(config: str) -> dict[str, str]:
    """The backend for each kind of device that a configuration names.

    Args:
        config: such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``; ``"undefined"`` is that of
            ``init_process_group()``, with the accelerator's backend.

    Raises:
        ValueError, RuntimeError: ``init_process_group`` would refuse it.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import BackendConfig

    text = config.lower().strip()
    if not text:
        raise ValueError("the configuration names no backend")
    if ":" not in text:
        dist.is_backend_available(text)  # torch 2.14 registers some backends only when asked
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backends of unknown devices
        found = BackendConfig(dist.Backend(text)).get_device_backend_map()
    for device in found:
        torch.device(device)  # refuses an unknown one
    return {str(device): str(backend) for device, backend in found.items()}


def backends(source: str, config: str) -> Iterator[Finding]:
    """Describe a configuration of backends.

    Args:
        source: the source of the configuration, which names the finding.
        config: such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    import torch.distributed as dist

    try:
        found = by_device(config)
    except (ValueError, RuntimeError) as error:
        advice = "Name a backend, or one for each kind of device: cpu:gloo,cuda:nccl."
        text = " ".join(first_line(error).split())
        yield Finding("group", source, f"{config!r}: {text}", "error", advice)
        return
    value = ", ".join(f"{device} tensors travel over {name}" for device, name in found.items())
    if config != "undefined":
        value = f"{config}: {value}"
    missing = [
        backend
        for backend in dict.fromkeys(found.values())
        if not dist.is_backend_available(backend)
    ]
    if missing:
        yield Finding(
            "group",
            source,
            f"{value}; this torch has no {' and no '.join(missing)}",
            "error",
            "Choose backends that this torch has, or install a build of torch with them.",
        )
        return
    cpu = found.get("cpu", "gloo")
    if cpu != "gloo":
        right = {**found, "cpu": "gloo"}
        advised = ",".join(f"{device}:{name}" for device, name in right.items())
        yield Finding(
            "group",
            source,
            f"{value}; ranks cannot agree over {cpu} on a step that fails",
            "warning",
            f"Take gloo for the CPU: init_process_group('{advised}').",
        )
        return
    others = dict.fromkeys(name for name in found.values() if name != "gloo")
    if not others:
        yield Finding("group", source, f"{value}; ranks agree on each step over gloo")
        return
    yield Finding(
        "group",
        source,
        f"{value}; ranks agree on each step over gloo, and {' and '.join(others)} cannot take back "
        "a collective of a step that fails",
        "warning",
        "After an error in backward(), call abort() on all ranks, make a new group and attach "
        "again.",
    )
