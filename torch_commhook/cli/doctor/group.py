"""Checks of the default process group's backends."""

from __future__ import annotations

from collections.abc import Iterator

from torch_commhook.cli.doctor.findings import Finding
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
        source, config = "init_process_group()", _default_config()
    else:
        return
    yield from backends(source, config)


def _default_config() -> str:
    """The configuration that ``init_process_group()`` takes by default."""
    import torch
    import torch.distributed as dist

    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"


def by_device(config: str) -> dict[str, str]:
    """The backend for each kind of device that a configuration names.

    Args:
        config: such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    text = config.lower().strip()
    if ":" in text:
        pairs = (part.partition(":") for part in text.split(","))
        return {device.strip(): backend.strip() for device, _, backend in pairs}
    import torch.distributed as dist

    dist.is_backend_available(text)  # torch 2.14 registers some backends only when asked
    return dict.fromkeys(dist.Backend.backend_capability.get(text, ("cpu", "cuda")), text)


def backends(source: str, config: str) -> Iterator[Finding]:
    """Describe a configuration of backends.

    Args:
        source: the source of the configuration, which names the finding.
        config: such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    import torch.distributed as dist

    found = by_device(config)
    cpu, cuda = found.get("cpu"), found.get("cuda")
    parts = [f"{device} tensors travel over {name}" for device, name in found.items()]
    value = f"{config}: {', '.join(parts)}"
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
    if cpu not in (None, "gloo"):
        yield Finding(
            "group",
            source,
            f"{value}; ranks cannot agree over {cpu} on a step that fails",
            "warning",
            f"Take gloo for the CPU: init_process_group('cpu:gloo,cuda:{cuda or 'nccl'}').",
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
