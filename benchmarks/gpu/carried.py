"""Builds the libraries for another machine with a GPU, and checks there whether they fit.

    python3.12 -m benchmarks.gpu.carried

builds with this Python and its torch into ``build/carried``, for the architectures in
``TORCH_CUDA_ARCH_LIST`` (default: 9.0). Take that folder along. ``make gpu`` uses the libraries in
it if the stamp names the sources, the torch and the Python of that machine. Otherwise it builds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from .commands import ROOT, write_whole

FOLDER = ROOT / "build" / "carried"
#: The sources are copied here, so that the build in place stays.
TREE = ROOT / "build" / "carried-tree"
STAMP = "stamp.json"
ARCHITECTURES = "9.0"

_SOURCES = {
    "csrc": (".cpp", ".h", ".inl"),
    "cuda": (".cu", ".cuh", ".cpp", ".h"),
}
_BUILD_FILES = ("setup.py", "build_support.py", "pyproject.toml")


def sources_digest() -> str:
    """A digest of all files that a build reads."""
    digest = hashlib.sha256()
    paths = [
        path
        for folder, kinds in _SOURCES.items()
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in kinds
    ]
    for path in [*paths, *(ROOT / name for name in _BUILD_FILES)]:
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def torch_version() -> str:
    """The version of the installed torch, such as ``2.11.0+cu130``, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "none"
    text = Path(found.origin).with_name("version.py").read_text()
    match = re.search(r"__version__ = ['\"]([^'\"]+)", text)
    return match.group(1) if match else "unknown"


def stamp() -> dict[str, str]:
    """The properties that built libraries must share with this machine."""
    return {
        "sources": sources_digest(),
        "torch": torch_version(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "machine": platform.machine(),
    }


def obstacle(folder: Path = FOLDER) -> str | None:
    """Why the carried libraries do not fit here; None if they do."""
    try:
        carried = json.loads((folder / STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return "no libraries were carried"
    for name, wanted in stamp().items():
        if carried.get(name) != wanted:
            return f"the carried libraries are of {name} {carried.get(name)}, here it is {wanted}"
    digests = carried.get("libraries", {})
    for name, digest in digests.items():
        path = folder / name
        if not path.exists() or digest_of(path) != digest:
            return f"the carried {name} is not the one that the stamp names"
    return None if digests else "the stamp names no libraries"


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def take(folder: Path = FOLDER) -> None:
    """Copies the carried libraries to the places of a build in place."""
    package = ROOT / "torch_commhook"
    for old in (*package.glob("_C*.so"), *(package / "lib").glob("_ops*.so")):
        old.unlink()
    for library in folder.glob("*.so"):
        target = package / "lib" if library.name.startswith("_ops") else package
        shutil.copy2(library, target / library.name)


def main() -> int:
    TREE.mkdir(parents=True, exist_ok=True)
    for name in _BUILD_FILES:
        shutil.copy2(ROOT / name, TREE / name)
    for name in (*_SOURCES, "torch_commhook"):
        # Other files of ninja stay next to these, so that a second build is short.
        shutil.rmtree(TREE / name, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, TREE / name, ignore=ignored)
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    built = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        cwd=TREE,
        env={**os.environ, "COMMHOOK_CUDA": "1", "TORCH_CUDA_ARCH_LIST": architectures},
    )
    if built.returncode != 0:
        return built.returncode
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    package = TREE / "torch_commhook"
    for library in (*package.glob("_C*.so"), *(package / "lib").glob("_ops*.so")):
        shutil.copy2(library, FOLDER / library.name)
    libraries = {path.name: digest_of(path) for path in sorted(FOLDER.glob("*.so"))}
    about = {**stamp(), "architectures": architectures, "libraries": libraries}
    write_whole(FOLDER / STAMP, json.dumps(about, indent=1) + "\n")
    mebibytes = sum(path.stat().st_size for path in FOLDER.iterdir()) / 2**20
    print(f"{FOLDER.relative_to(ROOT)}: {', '.join(libraries)}, {mebibytes:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
