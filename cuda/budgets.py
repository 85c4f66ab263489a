"""What kernels may cost, for ``cuda/check_build.py``: a table of budgets.

A loop is found by its accesses to memory: of all ways once around a loop of the kernel, the check
takes the shortest that has at least the row's loads and stores of 16 bytes. Tiles that are not
aligned, the last values of a launch, and a division's rare cases lie beside that way. On it, a lane
handles ``values`` values.

The most instructions a value stand for each architecture, so that a compiler's next version may
differ by a little. sm_80 has no conversion to 8-bit floats; integer arithmetic takes its place.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import machine_code

#: Architectures of the columns.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
#: A multiprocessor's registers, bytes of shared memory, and warps.
REGISTERS = 65_536
SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024}
WARPS = 64
#: The runtime's own in each block of threads.
RESERVED = 1024


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel: its values a lane, its accesses of 16 bytes, and its budget."""

    name: str
    values: int
    wide: dict[str, int]  # least accesses of 16 bytes, and other operations that tell the loop
    narrow: int  # most accesses of fewer bytes: the parameters of a block
    instructions: tuple[float, float, float]  # most a value, for ARCHITECTURES


@dataclass(frozen=True)
class Budget:
    """What all variants of a kernel that match a pattern may take."""

    kernel: str  # a regular expression for its name, without namespaces
    registers: int  # most of a thread
    threads: int  # of a block, as it is launched
    shared: int  # bytes of a block, as it is launched
    warps: tuple[int, int, int]  # least of a multiprocessor, for ARCHITECTURES
    loops: tuple[Loop, ...]
    anywhere: dict[str, int] = field(default_factory=dict)  # least accesses of 16 bytes
    divides: bool = False  # whether it may divide integers of 64 bits


SYMMETRIC_8 = "BlockwiseBlock<8, true>"
SYMMETRIC_4 = "BlockwiseBlock<4, true>"
MIN_MAX_8 = "BlockwiseBlock<8, false>"
MIN_MAX_4 = "BlockwiseBlock<4, false>"
FP8 = "Fp8Block<(?:true|false)>"

#: For ARCHITECTURES.
Each = tuple[float, float, float]

VALUES = 32  # of a lane in a tile, in 8 loads of 16 bytes
QUADS = 8


def quads_of(codec: str) -> int:
    """How many times a lane loads or stores 16 bytes of codes for a tile."""
    return 1 if "<4" in codec else 2


def parameters_of(codec: str) -> int:
    return 2 if codec in (MIN_MAX_8, MIN_MAX_4) else 1


def register_kernel(
    kernel: str, registers: int, warps: tuple[int, int, int], *loops: Loop, **anywhere: int
) -> Budget:
    wide = {f"{kind}.128": count for kind, count in anywhere.items()}
    return Budget(rf"register_{kernel}>", registers, 128, 16_384, warps, loops, wide)


def encode(
    codec: str, random: bool, error: bool, warps: tuple[int, int, int], most: Each
) -> Budget:
    quads = QUADS * error  # of the error
    wide = {"LDG.128": QUADS + quads, "STG.128": quads_of(codec) + quads}
    tile = Loop("tile", VALUES, wide, parameters_of(codec), most)
    flags = f"{random}, {error}".lower()
    return register_kernel(rf"encode_kernel<{codec}, {flags}, \d+", 128, warps, tile, LDS=QUADS)


def decode(codec: str, most: Each) -> Budget:
    wide = {"LDG.128": quads_of(codec), "STG.128": QUADS}
    tile = Loop("tile", VALUES, wide, parameters_of(codec), most)
    kernel = rf"decode_kernel<{codec}, false, \d+"
    return register_kernel(kernel, 80, (24, 24, 24), tile, STS=QUADS)


def decode_sum(codec: str, most: Each) -> Budget:
    """Of several messages; the instructions are those for each."""
    wide = {"LDG.128": quads_of(codec)}
    message = Loop("message", VALUES, wide, parameters_of(codec), most)
    kernel = rf"decode_kernel<{codec}, true, \d+"
    return register_kernel(kernel, 128, (16, 16, 16), message, STS=QUADS, STG=QUADS)


def reduce(codec: str, random: bool, error: bool, message: Each, most: Each) -> Budget:
    """The instructions are those for each message, and those for a tile beside its messages."""
    quads = QUADS * error
    codes = quads_of(codec)
    loops = (
        Loop("message", VALUES, {"LDG.128": codes}, parameters_of(codec), message),
        Loop(
            "tile",
            VALUES,
            {"LDG.128": codes + quads, "STG.128": codes + quads},
            parameters_of(codec),
            most,
        ),
    )
    flags = f"{random}, {error}".lower()
    return register_kernel(rf"reduce_kernel<{codec}, {flags}", 128, (16, 16, 16), *loops)


def flatten(types: str, registers: int, warps: tuple[int, int, int], *loops: Loop) -> Budget:
    """Of a buffer of these dtypes, in blocks of 256 threads without shared memory."""
    return Budget(rf"flatten_kernel<(?:{types}), \d+>", registers, 256, 0, warps, loops)


#: Four vectors at once, and two where the source lies past an aligned address.
COPIED = {"LDG.128": 4, "STG.128": 4}
SHIFTED = {"LDG.128": 4, "STG.128": 2}
FLATTEN = (
    flatten(
        "Half|BFloat16",
        48,
        (40, 40, 40),
        Loop("copied", 32, COPIED, 0, (1, 1, 1)),
        Loop("scaled", 32, COPIED | {"FMUL": 32}, 0, (6, 6, 6)),
        Loop("shifted", 16, SHIFTED | {"SHF": 8}, 0, (4, 4, 4)),
        Loop("shifted and scaled", 16, SHIFTED | {"SHF": 8, "FMUL": 16}, 0, (8, 8, 8)),
    ),
    flatten(
        "float",
        64,
        (32, 40, 40),
        Loop("copied", 16, COPIED, 0, (2, 2, 2)),
        Loop("scaled", 16, COPIED | {"FMUL": 16}, 0, (3, 3, 3)),
        Loop("shifted", 8, SHIFTED | {"SEL": 4}, 0, (6, 6, 6)),
        Loop("from 2 bytes", 16, {"STG.128": 4, "LDG": 4}, 4, (4, 4, 4)),
    ),
)

#: The budgets of codecs: nearest rounding, with error feedback, with random rounding, with both.
#: All are for sm_80, sm_90 and sm_100.
BUDGETS = (
    *FLATTEN,
    encode(SYMMETRIC_8, False, False, (20, 20, 20), (15, 15, 15)),
    encode(SYMMETRIC_8, False, True, (16, 16, 16), (22, 22, 22)),
    encode(SYMMETRIC_8, True, False, (16, 16, 16), (29, 29, 29)),
    encode(SYMMETRIC_8, True, True, (16, 16, 16), (36, 36, 36)),
    encode(MIN_MAX_8, False, False, (20, 20, 20), (17, 17, 17)),
    encode(MIN_MAX_8, False, True, (16, 16, 16), (24, 24, 24)),
    encode(MIN_MAX_8, True, False, (16, 16, 16), (31, 31, 31)),
    encode(MIN_MAX_8, True, True, (16, 16, 16), (38, 38, 38)),
    encode(SYMMETRIC_4, False, False, (20, 20, 20), (15, 15, 15)),
    encode(SYMMETRIC_4, False, True, (16, 16, 16), (22, 22, 22)),
    encode(SYMMETRIC_4, True, False, (16, 16, 16), (29, 29, 29)),
    encode(SYMMETRIC_4, True, True, (16, 16, 16), (36, 36, 36)),
    encode(MIN_MAX_4, False, False, (20, 20, 20), (17, 17, 17)),
    encode(MIN_MAX_4, False, True, (16, 16, 16), (24, 24, 24)),
    encode(MIN_MAX_4, True, False, (16, 16, 16), (31, 31, 31)),
    encode(MIN_MAX_4, True, True, (16, 16, 16), (38, 38, 38)),
    encode(FP8, False, False, (16, 20, 20), (25, 14, 14)),
    encode(FP8, False, True, (16, 16, 16), (36, 24, 24)),
    decode(SYMMETRIC_8, (10, 10, 10)),
    decode(MIN_MAX_8, (11, 11, 11)),
    decode(SYMMETRIC_4, (10, 10, 10)),
    decode(MIN_MAX_4, (11, 11, 11)),
    decode(FP8, (12, 12, 12)),
    decode_sum(SYMMETRIC_8, (8, 8, 8)),
    decode_sum(MIN_MAX_8, (9, 9, 9)),
    decode_sum(SYMMETRIC_4, (8, 8, 8)),
    decode_sum(MIN_MAX_4, (9, 9, 9)),
    decode_sum(FP8, (9, 9, 9)),
    reduce(SYMMETRIC_8, False, False, (9, 9, 9), (15, 15, 15)),
    reduce(SYMMETRIC_8, False, True, (9, 9, 9), (22, 22, 22)),
    reduce(SYMMETRIC_8, True, False, (9, 9, 9), (30, 30, 30)),
    reduce(SYMMETRIC_8, True, True, (9, 9, 9), (37, 37, 37)),
    reduce(MIN_MAX_8, False, False, (9, 9, 9), (17, 17, 17)),
    reduce(MIN_MAX_8, False, True, (9, 9, 9), (24, 24, 24)),
    reduce(MIN_MAX_8, True, False, (9, 9, 9), (32, 32, 32)),
    reduce(MIN_MAX_8, True, True, (9, 9, 9), (39, 39, 39)),
    reduce(SYMMETRIC_4, False, False, (9, 9, 9), (15, 15, 15)),
    reduce(SYMMETRIC_4, False, True, (9, 9, 9), (22, 22, 22)),
    reduce(SYMMETRIC_4, True, False, (9, 9, 9), (30, 30, 30)),
    reduce(SYMMETRIC_4, True, True, (9, 9, 9), (37, 37, 37)),
    reduce(MIN_MAX_4, False, False, (9, 9, 9), (17, 17, 17)),
    reduce(MIN_MAX_4, False, True, (9, 9, 9), (24, 24, 24)),
    reduce(MIN_MAX_4, True, False, (9, 9, 9), (32, 32, 32)),
    reduce(MIN_MAX_4, True, True, (9, 9, 9), (39, 39, 39)),
    reduce(FP8, False, False, (10, 10, 10), (26, 14, 14)),
    reduce(FP8, False, True, (10, 10, 10), (36, 24, 24)),
)


# ---- checks --------------------------------------------------------------------------------------


def plain_name(kernel: machine_code.Kernel) -> str:
    """A kernel's name with the arguments of its template, without namespaces."""
    name = machine_code.demangled(kernel.name).replace("(anonymous namespace)::", "")
    name = re.sub(r"\b\w+::", "", name.partition("(")[0])
    return name.removeprefix("void ")


def warps_of(budget: Budget, registers: int, arch: str) -> int:
    """How many warps of a kernel a multiprocessor has room for."""
    warps = budget.threads // 32
    by_registers = REGISTERS // ((registers + 7) // 8 * 8 * 32) // 4 * 4 // warps
    by_shared = SHARED[arch] // (budget.shared + RESERVED)
    return min(by_registers, by_shared, WARPS // warps) * warps


class Checks:
    """Compares kernels with the table; the worst of all variants counts."""

    def __init__(self, table: tuple[Budget, ...] = BUDGETS) -> None:
        self.table = table
        self.registers: dict[tuple[int, str], int] = defaultdict(int)
        self.loops: dict[tuple[int, str, str], list[machine_code.Path | None]] = defaultdict(list)
        self.faults: list[str] = []

    def add(
        self, kernel: machine_code.Kernel, registers: int, accesses: Counter[str | None]
    ) -> None:
        name = plain_name(kernel)
        rows = [row for row, each in enumerate(self.table) if re.fullmatch(each.kernel, name)]
        if not rows and name.startswith(
            ("register_", "flatten_kernel<float", "flatten_kernel<Half")
        ):
            self.faults.append(f"{name}: budgets.py has no row for it")
        for row in rows:
            budget = self.table[row]
            where = f"{name} ({kernel.arch})"
            self.registers[row, kernel.arch] = max(self.registers[row, kernel.arch], registers)
            for loop in budget.loops:
                path = machine_code.shortest_loop(kernel, loop.wide)
                self.loops[row, kernel.arch, loop.name].append(path)
            for kind, least in budget.anywhere.items():
                if accesses[kind] < least:
                    self.faults.append(f"{where}: {accesses[kind]} {kind}, at least {least} asked")
            if not budget.divides and machine_code.divides_64_bits(kernel):
                self.faults.append(f"{where}: divides integers of 64 bits")

    def unmatched(self, archs: Iterable[str]) -> Iterator[str]:
        """A line for each row that no kernel of one of a whole library's architectures matches."""
        for row, budget in enumerate(self.table):
            for arch in sorted(set(archs) & set(ARCHITECTURES)):
                if (row, arch) not in self.registers:
                    yield f"{budget.kernel} ({arch}): budgets.py has a row that no kernel matches"

    def outcomes(self) -> Iterator[tuple[bool, str]]:
        """Whether each check has passed, and a line for it."""
        for fault in self.faults:
            yield False, fault
        for (row, arch), registers in sorted(self.registers.items()):
            if arch not in ARCHITECTURES:
                continue
            budget = self.table[row]
            warps = warps_of(budget, registers, arch)
            least = budget.warps[ARCHITECTURES.index(arch)]
            yield (
                registers <= budget.registers and warps >= least,
                f"{budget.kernel} ({arch}): {registers} registers of at most {budget.registers}, "
                f"{warps} warps of at least {least}",
            )
            for loop in budget.loops:
                yield self.outcome(budget, loop, arch, self.loops[row, arch, loop.name])

    def outcome(
        self, budget: Budget, loop: Loop, arch: str, paths: list[machine_code.Path | None]
    ) -> tuple[bool, str]:
        where = f"{budget.kernel} ({arch}), {loop.name}"
        found = [path for path in paths if path is not None]
        if len(found) < len(paths):
            asked = ", ".join(f"{count} {kind}" for kind, count in loop.wide.items())
            return False, f"{where}: no loop has {asked}"
        most = loop.instructions[ARCHITECTURES.index(arch)]
        value = max(path.instructions for path in found) / loop.values
        narrow = max(path.narrow for path in found)
        return (
            value <= most and narrow <= loop.narrow,
            f"{where}: {value:.1f} instructions a value of at most {most}, "
            f"{narrow} narrow accesses of at most {loop.narrow}",
        )
