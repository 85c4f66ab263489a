"""Facts on which figures depend: the machine, the software and the moment."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def environment(device: str) -> dict[str, Any]:
    """The machine, the software and the moment."""
    import torch

    gpu = None
    if device == "cuda":
        gpu = torch.cuda.get_device_name()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "processors": processors(),
        "memory_gib": round(memory("MemTotal") / 2**30, 1),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpu": gpu,
    }


def commit() -> str:
    """The checked-out commit, with ``+`` if files differ from it."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(FOLDER), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The system's name of its processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def memory(entry: str) -> int:
    """Bytes of an entry of /proc/meminfo; 0 if it does not exist."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(entry + ":"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def as_lines(found: dict[str, Any]) -> str:
    """Results as JSON with a line for each row: for each item of the values of ``found``.

    Floats have seven digits.
    """

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.7g}")
        if isinstance(value, dict):
            return {key: rounded(each) for key, each in value.items()}
        return [rounded(each) for each in value] if isinstance(value, list | tuple) else value

    def text(value: Any) -> str:
        if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
            items = (f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
            return "{\n" + ",\n".join(items) + "\n }"
        if isinstance(value, list) and value and isinstance(value[0], dict | list):
            return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
        return json.dumps(value)

    items = (f" {json.dumps(key)}: {text(value)}" for key, value in rounded(found).items())
    return "{\n" + ",\n".join(items) + "\n}\n"
