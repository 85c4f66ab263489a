"""Builds torch_commhook: the Python package and two native libraries.

``torch_commhook/lib/_ops``: operators and kernels, libtorch only (``csrc/ops``, ``cuda``).
``torch_commhook/_C``: the runtime; pybind, bound to one Python (``csrc/runtime``).

Settings, all optional:

``COMMHOOK_CUDA``
    ``auto`` (default): compile CUDA kernels if the installed torch is a CUDA build and an nvcc of
    the same major version is present, with or without a visible GPU. ``0``: never. ``1``: always,
    with an error if something is missing.
``TORCH_CUDA_ARCH_LIST``
    Architectures, as for every torch extension. By default the visible GPU's, or ``8.0;9.0+PTX`` if
    no GPU is visible.
``CUDA_HOME``
    The CUDA toolkit. By default that of the ``nvcc`` on the PATH.
``COMMHOOK_DEBUG=1``
    No optimisation, debug symbols.
``COMMHOOK_SANITIZE``
    ``address`` or ``thread``: build both libraries with AddressSanitizer or ThreadSanitizer,
    ``-O1`` and debug symbols. Only a Python started by ``tests/long_runs/sanitizers/run.py`` can
    load them.
"""

import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Command, Extension, setup
from setuptools.command.build_py import build_py as setuptools_build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # for build_support, if pip runs this file
HOW_TO_BUILD = (
    "torch_commhook is built against the torch that is installed: install torch first, then run\n"
    "    python setup.py develop\n"
    "or  pip install --no-build-isolation ."
)


def toolkit_of_nvcc() -> str | None:
    """The toolkit's folder. Asks nvcc itself, since the one on the PATH may be a wrapper script."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True
    )
    here = re.search(r"^#\$ _HERE_=(.+)$", dry_run.stderr, re.MULTILINE)
    return str(Path(here.group(1).strip()).parent) if here else None


# torch searches the PATH for ninja. pip installs it next to this Python, perhaps outside the PATH.
os.environ["PATH"] = os.pathsep.join(
    [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
)

# torch.utils.cpp_extension reads CUDA_HOME when it is imported.
if "CUDA_HOME" not in os.environ and "CUDA_PATH" not in os.environ:
    toolkit = toolkit_of_nvcc()
    if toolkit is not None:
        os.environ["CUDA_HOME"] = toolkit

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(f"setup.py: cannot import torch ({error}).\n{HOW_TO_BUILD}") from error

from build_support import NinjaBuildExtension  # noqa: E402 (it imports torch)


def cuda_obstacle() -> str | None:
    """Why the CUDA kernels cannot be compiled here; None if they can."""
    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is not a CUDA build"
    home = cpp_extension.CUDA_HOME
    nvcc = Path(home, "bin", "nvcc") if home else None
    if nvcc is None or not nvcc.exists():
        return "no nvcc was found (put it on the PATH or set CUDA_HOME)"
    version = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None:
        return f"{nvcc} --version names no release"
    major, minor = torch.version.cuda.split(".")[:2]
    # The headers of nvidia's packages fit torch's release; nvcc must fit them too.
    packaged = bool(nvidia_package_folders("include"))
    if release.group(1) != major or (packaged and release.group(2) != minor):
        return (
            f"nvcc is of CUDA {release.group(1)}.{release.group(2)}, "
            f"torch {torch.__version__} of CUDA {torch.version.cuda}"
        )
    return None


def want_cuda() -> bool:
    setting = os.environ.get("COMMHOOK_CUDA", "auto").lower()
    if setting not in ("auto", "0", "1"):
        raise SystemExit(f"setup.py: COMMHOOK_CUDA must be auto, 0 or 1, got {setting!r}")
    if setting == "0":
        return False
    obstacle = cuda_obstacle()
    if obstacle is None:
        return True
    if setting == "1":
        raise SystemExit(f"setup.py: COMMHOOK_CUDA=1, but {obstacle}")
    if torch.version.cuda is not None:
        print(
            f"setup.py: CUDA kernels are left out, since {obstacle}; "
            "CUDA tensors will be served by the slower reference kernels",
            file=sys.stderr,
        )
    return False


def nvidia_package_folders(name: str) -> list[str]:
    """``include`` or ``lib`` folders of the nvidia packages that a torch wheel depends on."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    return sorted(folder for root in roots for folder in glob.glob(os.path.join(root, "*", name)))


def sources(*patterns: str) -> list[str]:
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def sanitizer() -> str | None:
    setting = os.environ.get("COMMHOOK_SANITIZE", "")
    if setting not in ("", "address", "thread"):
        raise SystemExit(f"setup.py: COMMHOOK_SANITIZE must be address or thread, got {setting!r}")
    return setting or None


def sanitizer_flags() -> list[str]:
    return [f"-fsanitize={sanitizer()}", "-D_GLIBCXX_ASSERTIONS"] if sanitizer() else []


def compile_flags(level: str) -> list[str]:
    flags = [level, "-g0"]
    if os.environ.get("COMMHOOK_DEBUG") == "1":
        flags = ["-O0", "-g"]
    elif sanitizer():
        flags = ["-O1", "-g", "-fno-omit-frame-pointer"]
        flags += ["-Wno-tsan"]  # warns of a fence in PyTorch's headers
    return [
        *flags,
        *sanitizer_flags(),
        "-fvisibility=hidden",
        "-fopenmp",  # without it, the inline at::parallel_for is serial
        "-ffp-contract=off",  # the same bits on all processors
        # As system headers, PyTorch's cause no warnings.
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        "-Wall",
        "-Wno-unknown-pragmas",
        # False alarms of GCC in its own intrinsics headers and in c10::SmallVector.
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
        f'-DCOMMHOOK_TORCH_VERSION="{torch.__version__}"',
    ]


def extensions() -> list[Extension]:
    include_dirs = [str(ROOT / "csrc"), str(ROOT / "csrc" / "include")]
    kernels = compile_flags("-O3")
    link_flags = ["-fopenmp", *sanitizer_flags()]
    headers = sources("csrc/**/*.h", "csrc/**/*.inl", "cuda/*.cuh", "cuda/*.h")
    ops: dict[str, Any] = {
        "name": "torch_commhook.lib._ops",
        "sources": sources("csrc/ops/**/*.cpp"),
        "depends": headers,
        "include_dirs": list(include_dirs),
        "extra_link_args": link_flags,
        "py_limited_api": True,  # no libtorch_python; a file name without a Python version
    }
    if want_cuda():
        if "TORCH_CUDA_ARCH_LIST" not in os.environ and not torch.cuda.is_available():
            os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0;9.0+PTX"
        ops["sources"] += sources("cuda/*.cu", "cuda/*.cpp")
        ops["include_dirs"] += [str(ROOT / "cuda"), *nvidia_package_folders("include")]
        ops["library_dirs"] = nvidia_package_folders("lib")
        ops["extra_compile_args"] = {
            "cxx": [*kernels, "-DCOMMHOOK_WITH_CUDA"],
            "nvcc": [
                "-O3",
                "-fmad=false",  # the same bits as on the CPU
                "--expt-relaxed-constexpr",
                "-Xcompiler",
                "-fvisibility=hidden",
            ],
        }
        ops_extension = cpp_extension.CUDAExtension(**ops)
    else:
        ops["extra_compile_args"] = {"cxx": kernels}
        ops_extension = cpp_extension.CppExtension(**ops)
    runtime_extension = cpp_extension.CppExtension(
        name="torch_commhook._C",
        sources=sources("csrc/runtime/**/*.cpp"),
        depends=headers,
        include_dirs=include_dirs,
        # The CPU wheels include c10d with Gloo; declarations in headers depend on these macros.
        define_macros=[("USE_C10D", None), ("USE_DISTRIBUTED", None), ("USE_C10D_GLOO", None)],
        extra_compile_args={"cxx": compile_flags("-O2")},
        extra_link_args=link_flags,
    )
    return [ops_extension, runtime_extension]


class build_ext(NinjaBuildExtension):  # noqa: N801 (setuptools names commands so)
    """Keeps the build folder, so that ninja can build incrementally."""

    def finalize_options(self) -> None:
        super().finalize_options()
        tag = f"torch-{torch.__version__}-cp{sys.version_info.major}{sys.version_info.minor}"
        if sanitizer():
            tag += f"-{sanitizer()}"
        self.build_temp = str(ROOT / "build" / tag)
        # setuptools compares only times: without ninja, a library for another torch would stay.
        self.force = True


class build_py(setuptools_build_py):  # noqa: N801
    """Copies the headers for C++ hooks into the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # they stay in csrc otherwise
            self.copy_tree(
                str(ROOT / "csrc" / "include"), str(Path(self.build_lib, "torch_commhook/include"))
            )


class develop(Command):  # noqa: N801
    """``python setup.py develop``: an editable install that sees the installed torch.

    setuptools 80 and newer turn this command into an isolated ``pip install -e``. Its environment
    has no torch.
    """

    description = "install in place, against the torch that is installed"
    user_options = [("extras=", None, "optional dependencies too, such as test or train")]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.extras: str | None = None

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        # Builds first, since pip would hide the progress and the warnings.
        self.reinitialize_command("build_ext", inplace=True)
        self.run_command("build_ext")
        quiet = [] if self.distribution.verbose else ["--quiet"]
        pip = [sys.executable, "-m", "pip", *quiet, "--disable-pip-version-check", "install"]
        project = f"{ROOT}[{self.extras}]" if self.extras else str(ROOT)
        built = subprocess.run([*pip, "--no-build-isolation", "--editable", project])
        if built.returncode != 0:
            raise SystemExit(built.returncode)  # pip has printed the error


def local_version() -> str:
    """For example ``torch2.13cpu`` or ``torch2.14cu130``: the torch that the libraries fit."""
    release, _, build = str(torch.__version__).partition("+")
    if not build:
        build = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    major, minor = release.split(".")[:2]
    return f"torch{major}.{minor}{re.sub('[^a-z0-9]', '', build.lower())}"


class wheel(Command):  # noqa: N801
    """``python setup.py wheel``: a wheel for the installed torch, and for no other one."""

    description = "build a wheel for the torch that is installed"
    user_options = [("dist-dir=", "d", "the folder for the wheel (dist by default)")]  # noqa: RUF012

    def initialize_options(self) -> None:
        self.dist_dir: str | None = None

    def finalize_options(self) -> None:
        self.dist_dir = self.dist_dir or str(ROOT / "dist")

    def run(self) -> None:
        distribution: Any = self.distribution
        distribution.metadata.version += f"+{local_version()}"
        release = ".".join(str(torch.__version__).split(".")[:2])
        requirements = [
            f"torch=={release}.*" if re.match(r"torch\b", requirement) else requirement
            for requirement in distribution.install_requires
        ]
        # The setuptools release decides which of these it reads.
        distribution.install_requires = requirements
        distribution.metadata.install_requires = requirements
        # A separate folder: a build leaves modules there that the package no longer has.
        folder = ROOT / "build" / "wheel"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.reinitialize_command("build", build_base=str(folder))
        self.reinitialize_command("egg_info", egg_base=str(folder))
        self.reinitialize_command("bdist_wheel", dist_dir=self.dist_dir)
        self.run_command("bdist_wheel")


if __name__ == "__main__":
    setup(
        license="BSD-3-Clause",
        ext_modules=extensions(),
        cmdclass={"build_ext": build_ext, "build_py": build_py, "develop": develop, "wheel": wheel},
    )
