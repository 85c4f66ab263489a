"""Checks a build with CUDA kernels on a machine without a GPU.

    python cuda/check_build.py [LIBRARY] [--arch-list LIST] [--reference-only OPERATOR ...]
    python cuda/check_build.py --objects OBJECT ...

Prints a line for each check and exits with 1 if one fails:

* every operator that takes tensors has its own kernel for CUDA (not only the reference kernel,
  which serves all devices);
* the library holds machine code and PTX for the requested architectures;
* no kernel keeps registers on the stack or spills them;
* in the disassembly, every kernel that loops over values loads 16 bytes with one instruction, and
  every kernel that writes values stores 16 bytes with one;
* the kernels in ``budgets.py`` stay within their budgets, and none of them divides integers of 64
  bits.

With --objects, it checks the machine code of single files that nvcc has compiled.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import budgets
import machine_code
import torch

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "commhook"

#: Kernels without a loop over values, and the reason that they need no vectors.
WITHOUT_VECTORS = {
    "flatten_stats_sum_kernel": "adds up one number for each block of threads",
    "add_entries_kernel": "writes where a message's indices say",
    "take_entries_kernel": "reads at random places",
    "put_entries_kernel": "writes at random places",
    "barrier_kernel": "moves a number for each rank",
}
#: Kernels that write values or errors. These must also store 16 bytes at once.
WRITING = (
    "flatten_kernel",
    "flatten_stats_kernel",
    "unflatten_into_kernel",
    "decode_kernel",
    "decode_chunks_kernel",
    "compensate_count_kernel",
    "compensate_finite_kernel",
    "encode_kernel",
    "reduce_kernel",
    "register_encode_kernel",
    "register_decode_kernel",
    "register_reduce_kernel",
    "reduce_shards_kernel",
    "gather_kernel",
)
#: Of these, kernels that read too little to need vectors.
READING_LITTLE = {
    "decode_kernel<SignBlock>": "reads a bit for each value",
    "reduce_kernel<SignBlock>": "reads a bit for each value",
    "reduce_shards_kernel<SignBlock>": "reads a bit for each value",
    "decode_chunks_kernel": "reads a few entries for each chunk",
    **{
        f"{kernel}_kernel<BlockwiseBlock of 2 bits>": "reads two bits for each value"
        for kernel in ("decode", "reduce", "reduce_shards", "register_decode", "register_reduce")
    },
}
#: Of these, kernels that also write too little.
WRITING_LITTLE = {
    f"register_{kernel}_kernel<BlockwiseBlock of 2 bits>": "writes two bits for each value"
    for kernel in ("encode", "reduce")
}


class Report:
    """Prints the outcome of each check, and records whether one failed."""

    def __init__(self) -> None:
        self.failures = 0

    def check(self, passed: bool, line: str) -> None:
        self.failures += not passed
        print(f"{'ok  ' if passed else 'FAIL'}  {line}")

    def end(self) -> int:
        """Prints a summary, and returns the program's exit status."""
        print(f"check_build: {self.failures} failures" if self.failures else "check_build: passed")
        return 1 if self.failures else 0


def library_at(path: Path) -> Path:
    """The library itself, or the library in a folder."""
    if path.is_dir():
        path = next(iter(sorted(path.glob("_ops*.so"))), path / "_ops*.so")
    if not path.exists():
        raise SystemExit(f"check_build: LIBRARY must be a built library or its folder, got {path}")
    return path


# ---- operators -----------------------------------------------------------------------------------


def takes_tensors(name: str) -> bool:
    operator, _, overload = name.partition(".")
    schemas = torch._C._jit_get_schemas_for_operator(operator)
    return any(
        "Tensor" in str(argument.type)
        for schema in schemas
        if schema.overload_name == overload
        for argument in schema.arguments
    )


def check_operators(report: Report, reference_only: list[str]) -> None:
    has_kernels = torch.ops.commhook.has_cuda_kernels()
    report.check(has_kernels, f"{NAMESPACE}::has_cuda_kernels() is {has_kernels}")
    names = sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{NAMESPACE}::") and takes_tensors(name)
    )
    report.check(bool(names), f"{len(names)} operators take tensors")
    for name in names:
        # Checks only the CUDA key: a kernel for an alias key, such as the reference kernels', does
        # not count.
        registered = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
        if name.split("::")[1] in reference_only:
            report.check(not registered, f"{name}: served on CUDA by the reference kernel")
        else:
            what = "a CUDA kernel" if registered else "no CUDA kernel, only the reference kernel"
            report.check(registered, f"{name}: {what}")


# ---- binary --------------------------------------------------------------------------------------


def candidates(tool: str) -> Iterator[Path]:
    """Possible places of a tool of the CUDA toolkit: not every toolkit includes it."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable], "bin", tool)
    for name in (tool, "nvcc"):
        found = shutil.which(name)
        if found is not None:
            yield Path(found).with_name(tool)
            yield Path(found).resolve().with_name(tool)
    for folder in sys.path:
        yield from sorted(Path(folder).glob(f"nvidia/*/bin/{tool}"))
        yield Path(folder, "triton", "backends", "nvidia", "bin", tool)


def find_tool(tool: str) -> Path | None:
    return next((path for path in candidates(tool) if os.access(path, os.X_OK)), None)


def output_of(*command: str | Path) -> str:
    # cuobjdump fails if it has nothing to list.
    return subprocess.run(command, capture_output=True, text=True).stdout


def demangled(text: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None:
        return text
    return subprocess.run([tool], input=text, capture_output=True, text=True, check=True).stdout


def asked_for(arch_list: str) -> tuple[set[str], set[str]]:
    """``8.0;9.0+PTX`` means machine code for ``80`` and ``90``, and PTX for ``90``."""
    machine, ptx = set(), set()
    for entry in re.split(r"[;\s]+", arch_list.strip()):
        digits = entry.removesuffix("+PTX").replace(".", "")
        machine.add(digits)
        if entry.endswith("+PTX"):
            ptx.add(digits)
    return machine, ptx


def count_by_arch(listing: str, ending: str) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for arch in re.findall(rf"\.sm_(\w+)\.{ending}\b", listing):
        counts[arch] += 1
    return counts


def check_architectures(report: Report, cuobjdump: Path, library: Path, arch_list: str) -> None:
    machine, ptx = asked_for(arch_list)
    files = len(list((ROOT / "cuda").glob("*.cu")))
    for option, ending, wanted, what in (
        ("--list-elf", "cubin", machine, "machine code"),
        ("--list-ptx", "ptx", ptx, "PTX"),
    ):
        counts = count_by_arch(output_of(cuobjdump, option, library), ending)
        for arch in sorted(wanted):
            found = counts.get(arch, 0)
            report.check(found == files, f"sm_{arch}: {what} of {found} of {files} files")


def kernel_of(function: str) -> str:
    """The function's name, with the codec if that is a template argument."""
    kernel = re.search(r"(\w+_kernel)\b", function)
    if kernel is None:
        return function
    codec = re.search(
        r"_kernel<[\w:]*?(\w+Block)\b", function.replace("(anonymous namespace)::", "")
    )
    if codec is None:
        return kernel.group(1)
    # These have loads and stores of other widths.
    few = " of 2 bits" if re.search(r"BlockwiseBlock<(?:\(int\))?2,", function) else ""
    return f"{kernel.group(1)}<{codec.group(1)}{few}>"


def check_resources(report: Report, cuobjdump: Path, library: Path) -> None:
    """Checks that no kernel uses the stack, and prints the registers and shared memory of each."""
    listing = demangled(output_of(cuobjdump, "--dump-resource-usage", library))
    usage: dict[tuple[str, str], list[tuple[int, int, int]]] = defaultdict(list)
    arch, function = "", ""
    for line in listing.splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            arch = match.group(1)
        elif match := re.match(r"\s*Function (.+):\s*$", line):
            function = match.group(1)
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, match.groups())
            usage[kernel_of(function), arch].append((registers, stack + local, shared))
    report.check(bool(usage), f"{sum(map(len, usage.values()))} kernels say what they use")
    for (name, arch), variants in sorted(usage.items()):
        registers = [variant[0] for variant in variants]
        stack = max(variant[1] for variant in variants)
        shared = max(variant[2] for variant in variants)
        report.check(
            stack == 0,
            f"{name} ({arch}): {len(variants)} variants, {min(registers)} to {max(registers)} "
            f"registers, {shared} bytes of shared memory, "
            f"{'nothing' if stack == 0 else f'up to {stack} bytes'} on the stack",
        )


def check_machine_code(
    report: Report, cuobjdump: Path, library: Path, is_whole: bool = True
) -> None:
    """Checks accesses, spills and budgets in the disassembly, which is read once."""
    checks = budgets.Checks()
    counts: dict[tuple[str, str], Counter[str | None]] = {}
    registers = registers_of(cuobjdump, library)
    for kernel in disassembled(cuobjdump, library):
        accesses = Counter(map(machine_code.access_of, kernel.code.values()))
        counts[kernel.name, kernel.arch] = accesses
        # A cubin's listing does not name its architecture.
        own = registers.get((kernel.name, kernel.arch)) or registers[kernel.name, ""]
        checks.add(kernel, own, accesses)
    check_vectors(report, counts)
    for passed, line in checks.outcomes():
        report.check(passed, line)
    if is_whole:
        for line in checks.unmatched(arch for _, arch in counts):
            report.check(False, line)


def disassembled(cuobjdump: Path, library: Path) -> Iterator[machine_code.Kernel]:
    command = [str(cuobjdump), "--dump-sass", str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from machine_code.kernels_in(process.stdout)


def registers_of(cuobjdump: Path, library: Path) -> dict[tuple[str, str], int]:
    found = {}
    arch, function = "", ""
    for line in output_of(cuobjdump, "--dump-resource-usage", library).splitlines():
        if match := re.match(r"\s*arch = (\w+)", line):
            arch = match.group(1)
        elif match := re.match(r"\s*Function (\S+):\s*$", line):
            function = match.group(1)
        elif match := re.search(r"REG:(\d+) ", line):
            found[function, arch] = int(match.group(1))
    return found


def check_vectors(report: Report, found: dict[tuple[str, str], Counter[str | None]]) -> None:
    """Checks the numbers of global loads and stores of 16 bytes, and of spills."""
    functions = list(found)
    names = demangled("\n".join(function for function, _ in functions)).splitlines()
    variants: dict[tuple[str, str], list[Counter[str | None]]] = defaultdict(list)
    for (function, arch), name in zip(functions, names, strict=True):
        variants[kernel_of(name), arch].append(found[function, arch])
    report.check(bool(variants), f"{len(functions)} kernels were disassembled")
    for (name, arch), all_counts in sorted(variants.items()):
        spills = max(counts["LDL"] + counts["STL"] for counts in all_counts)
        report.check(spills == 0, f"{name} ({arch}): {spills or 'no'} instructions that spill")
        reason = WITHOUT_VECTORS.get(name) or WITHOUT_VECTORS.get(name.partition("<")[0])
        if reason is not None:
            print(f"ok    {name} ({arch}): no vectors asked for, since it {reason}")
            continue
        kinds = {"LDG.128": "loads"}
        if name.partition("<")[0] in WRITING:
            kinds["STG.128"] = "stores"
        if name in READING_LITTLE:
            print(f"ok    {name} ({arch}): no loads asked for, since it {READING_LITTLE[name]}")
            del kinds["LDG.128"]
        if name in WRITING_LITTLE:
            print(f"ok    {name} ({arch}): no stores asked for, since it {WRITING_LITTLE[name]}")
            del kinds["STG.128"]
        for kind, what in kinds.items():
            least = min(counts[kind] for counts in all_counts)
            report.check(least > 0, f"{name} ({arch}): at least {least} {what} of 16 bytes in each")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "library",
        nargs="?",
        type=Path,
        default=ROOT / "torch_commhook" / "lib",
        help="_ops*.so, or its folder (default: the one built in place)",
    )
    parser.add_argument(
        "--arch-list",
        default=os.environ.get("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX;10.0"),
        help="as in TORCH_CUDA_ARCH_LIST (default: that variable, or %(default)s)",
    )
    parser.add_argument(
        "--reference-only",
        nargs="*",
        default=[],
        metavar="OPERATOR",
        help="operators that are meant to have no CUDA kernel, without the namespace",
    )
    parser.add_argument(
        "--objects",
        nargs="+",
        type=Path,
        default=[],
        metavar="OBJECT",
        help="look at the machine code of these files, and at nothing else",
    )
    arguments = parser.parse_args()
    report = Report()
    if arguments.objects:
        cuobjdump = find_tool("cuobjdump")
        if cuobjdump is None:
            raise SystemExit("check_build: cuobjdump is in the CUDA toolkit, or beside triton")
        for path in arguments.objects:
            check_resources(report, cuobjdump, path)
            check_machine_code(report, cuobjdump, path, is_whole=False)
        return report.end()
    library = library_at(arguments.library)
    torch.ops.load_library(library)

    print(
        f"      {library.name}: {library.stat().st_size / 2**20:.1f} MiB, torch {torch.__version__}"
    )
    check_operators(report, arguments.reference_only)
    cuobjdump = find_tool("cuobjdump")
    report.check(cuobjdump is not None, "cuobjdump: in the CUDA toolkit, or beside triton")
    if cuobjdump is not None:
        check_architectures(report, cuobjdump, library, arguments.arch_list)
        check_resources(report, cuobjdump, library)
        check_machine_code(report, cuobjdump, library)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
