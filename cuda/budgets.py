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
from dataclasses import dataclass, field, replace

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


#: For ARCHITECTURES.
Each = tuple[float, float, float]

# ---- codecs of blocks, in registers --------------------------------------------------------------


@dataclass(frozen=True)
class Codec:
    """A row of the table of codecs: the most instructions a value.

    Encoding has a number for rounding to the nearest, one with error feedback, and, where the codec
    has it, the same two for random rounding.
    """

    block: str  # a regular expression for the class
    codes: int  # loads or stores of 16 bytes that a lane's codes take for a tile; 0: one of 8
    parameters: int
    encode: tuple[Each, ...]
    decode: Each
    decode_sum: Each  # for each message
    reduce_message: Each  # for each message
    reduce: tuple[Each, ...]  # for a tile, beside its messages; as encode
    encode_warps: tuple[int, int, int] = (20, 20, 20)  # least, of the first of encode
    error_warps: tuple[int, int, int] = (16, 16, 16)  # of the second


def all_alike(*most: float) -> tuple[Each, ...]:
    """The same number for each architecture."""
    return tuple((each, each, each) for each in most)


SYMMETRIC_8 = Codec(
    "BlockwiseBlock<8, true>",
    codes=2,
    parameters=1,
    encode=all_alike(15, 22, 29, 36),
    decode=(10, 10, 10),
    decode_sum=(8, 8, 8),
    reduce_message=(9, 9, 9),
    reduce=all_alike(15, 22, 30, 37),
)
MIN_MAX_8 = Codec(
    "BlockwiseBlock<8, false>",
    codes=2,
    parameters=2,
    encode=all_alike(17, 24, 31, 38),
    decode=(11, 11, 11),
    decode_sum=(9, 9, 9),
    reduce_message=(9, 9, 9),
    reduce=all_alike(17, 24, 32, 39),
)
CODECS = (
    SYMMETRIC_8,
    MIN_MAX_8,
    replace(SYMMETRIC_8, block="BlockwiseBlock<4, true>", codes=1),
    replace(MIN_MAX_8, block="BlockwiseBlock<4, false>", codes=1),
    Codec(
        "BlockwiseBlock<2, true>",
        codes=0,
        parameters=1,
        encode=all_alike(27, 34, 29, 36),
        decode=(10, 10, 10),
        decode_sum=(8, 8, 8),
        reduce_message=(9, 9, 9),
        reduce=all_alike(27, 34, 30, 37),
        encode_warps=(16, 16, 16),
        error_warps=(16, 16, 12),
    ),
    replace(MIN_MAX_8, block="BlockwiseBlock<2, false>", codes=0),
    Codec(
        "Fp8Block<(?:true|false)>",
        codes=2,
        parameters=1,
        encode=((25, 14, 14), (36, 24, 24)),
        decode=(12, 12, 12),
        decode_sum=(9, 9, 9),
        reduce_message=(10, 10, 10),
        reduce=((26, 14, 14), (36, 24, 24)),
        encode_warps=(16, 20, 20),
    ),
)

VALUES = 32  # of a lane in a tile, in 8 loads of 16 bytes
QUADS = 8
#: Random rounding and error feedback, in the order of Codec.encode.
FLAGS = ((False, False), (False, True), (True, False), (True, True))


def budgets_of(codec: Codec) -> Iterator[Budget]:
    """The budgets of a codec's kernels, in blocks of 128 threads with 16 KiB of shared memory."""

    def loop(name: str, loads: int, stores: int, most: Each, **others: int) -> Loop:
        wide = {"LDG.128": loads, "STG.128": stores}
        # Two are moved at once, or one by one where they are not aligned: a predicate chooses.
        narrow = codec.parameters + (codec.parameters == 2)
        if codec.codes == 0:  # no accesses of 16 bytes tell some loops
            wide |= others
            narrow += 2
        wide = {kind: count for kind, count in wide.items() if count}
        return Loop(name, VALUES, wide, narrow, most)

    def budget(
        kernel: str, registers: int, warps: tuple[int, int, int], *loops: Loop, **anywhere: int
    ) -> Budget:
        wide = {f"{kind}.128": count for kind, count in anywhere.items()}
        return Budget(f"register_{kernel}>", registers, 128, 16_384, warps, loops, wide)

    codes = codec.codes
    message = loop("message", codes, 0, codec.reduce_message, FADD=2 * VALUES)
    for flags, encode, reduce in zip(FLAGS, codec.encode, codec.reduce, strict=False):
        names = f"{codec.block}, {str(flags[0]).lower()}, {str(flags[1]).lower()}"
        error = QUADS * flags[1]
        warps = {(False, False): codec.encode_warps, (False, True): codec.error_warps}.get(
            flags, (16, 16, 16)
        )
        registers = 65_536 // (32 * min(warps)) if min(warps) < 16 else 128
        tile = loop("tile", QUADS + error, codes + error, encode, FADD=VALUES, STG=1)
        yield budget(rf"encode_kernel<{names}, \d+", registers, warps, tile, LDS=QUADS)
        tile = loop("tile", codes + error, codes + error, reduce, FADD=VALUES, STG=1)
        yield budget(f"reduce_kernel<{names}", 128, (16, 16, 16), message, tile)
    decode = loop("tile", codes, QUADS, codec.decode, FADD=VALUES)
    yield budget(rf"decode_kernel<{codec.block}, false, \d+", 80, (24, 24, 24), decode, STS=QUADS)
    decode_sum = loop("message", codes, 0, codec.decode_sum, FADD=2 * VALUES)
    yield budget(
        rf"decode_kernel<{codec.block}, true, \d+",
        128,
        (16, 16, 16),
        decode_sum,
        STS=QUADS,
        STG=QUADS,
    )


# ---- flatten and unflatten -----------------------------------------------------------------------

#: Four vectors at once, and two where the source lies past an aligned address.
COPIED = {"LDG.128": 4, "STG.128": 4}
SHIFTED = {"LDG.128": 4, "STG.128": 2}
OF_2_BYTES = (
    Loop("copied", 32, COPIED, 0, (1, 1, 1)),
    Loop("scaled", 32, COPIED | {"FMUL": 32}, 0, (6, 6, 6)),
    Loop("shifted", 16, SHIFTED | {"SHF": 8}, 0, (4, 4, 4)),
    Loop("shifted and scaled", 16, SHIFTED | {"SHF": 8, "FMUL": 16}, 0, (8, 8, 8)),
)
OF_4_BYTES = (
    Loop("copied", 16, COPIED, 0, (2, 2, 2)),
    Loop("scaled", 16, COPIED | {"FMUL": 16}, 0, (3, 3, 3)),
    Loop("shifted", 8, SHIFTED | {"SEL": 4}, 0, (6, 6, 6)),
)
FROM_2_BYTES = Loop("from 2 bytes", 16, {"STG.128": 4, "LDG": 4}, 4, (4, 4, 4))
TO_2_BYTES = Loop("to 2 bytes", 16, {"LDG.128": 4, "STG": 4}, 4, (4, 4, 4))


def rows(
    kernel: str, buffer: str, registers: int, warps: tuple[int, int, int], *loops: Loop
) -> Budget:
    """Of a buffer of these dtypes, in blocks of 256 threads without shared memory."""
    return Budget(rf"{kernel}_kernel<(?:{buffer}), \d+>", registers, 256, 0, warps, loops)


# ---- sparse codecs -------------------------------------------------------------------------------

#: A tile of a lane: 4 quads of one tensor, and p. A tensor's end lies beside the shortest way.
COMPENSATED = {"LDG.128": 4, "STG.128": 4}
#: With an error of float32, which is loaded, too.
WITH_ERROR = {"LDG.128": 8, "STG.128": 4}


def sparse(
    kernel: str, registers: int, warps: tuple[int, int, int], loop: Loop, shared: int = 0
) -> Budget:
    """In blocks of 256 threads, with static shared memory alone."""
    return Budget(kernel, registers, 256, shared, warps, (loop,), {"LDG.128": 4})


def counting(error: int, wide: dict[str, int], narrow: int, most: Each) -> Budget:
    """topk's first pass, which counts each value. error: a number of ErrorKind."""
    loop = Loop("tile", 16, wide | {"ATOMS": 16}, narrow, most)
    kernel = rf"compensate_count_kernel<\d+, {error}>"
    return sparse(kernel, 64, (32, 40, 40), loop, shared=32_816)


def checking(error: int, wide: dict[str, int], narrow: int, most: Each) -> Budget:
    """The first pass of randomk."""
    loop = Loop("tile", 16, wide, narrow, most)
    kernel = rf"compensate_finite_kernel<\d+, {error}>"
    return sparse(kernel, 64, (32, 40, 40), loop, shared=16_384)


SPARSE = (
    counting(0, COMPENSATED, 2, (25, 31, 30)),
    counting(1, WITH_ERROR, 2, (26, 31, 31)),
    counting(2, COMPENSATED, 10, (42, 46, 43)),  # 8 bytes of the error at once
    checking(0, COMPENSATED, 1, (15, 15, 15)),
    checking(1, WITH_ERROR, 1, (20, 20, 18)),
    checking(2, COMPENSATED, 9, (32, 32, 28)),
    sparse(
        "count_low_kernel",
        32,
        (64, 64, 64),
        Loop("group", 16, {"LDG.128": 4}, 1, (12, 12, 12)),
    ),
    sparse(
        "write_entries_kernel",
        32,
        (64, 64, 64),
        Loop("entry", 1, {"LDG": 1, "STG": 2}, 4, (38, 40, 50)),
    ),
)


def of_chunks(kernel: str, registers: int, shared: int, warps: Each, wide: str) -> Budget:
    """A kernel of chunk_topk: a block of threads has one piece of 4,096 values, and no loop."""
    anywhere = {wide: 4}
    return Budget(rf"{kernel}_chunks_kernel<.*>", registers, 256, shared, warps, (), anywhere)


CHUNKS = (
    of_chunks("encode", 64, 36_368, (32, 32, 32), "LDG.128"),
    of_chunks("decode", 48, 16_384, (40, 40, 40), "STG.128"),
)


BUDGETS = (
    rows("flatten", "Half|BFloat16", 48, (40, 40, 40), *OF_2_BYTES),
    rows("flatten", "float", 64, (32, 40, 40), *OF_4_BYTES, FROM_2_BYTES),
    rows("unflatten_into", "Half|BFloat16", 64, (32, 32, 40), *OF_2_BYTES),
    rows("unflatten_into", "float", 64, (32, 32, 40), *OF_4_BYTES, TO_2_BYTES),
    *(budget for codec in CODECS for budget in budgets_of(codec)),
    *SPARSE,
    *CHUNKS,
)
#: Kernels that must have a row: a regular expression.
HELD = (
    r"register_.*|(?:flatten|unflatten_into)_kernel<(?:float|Half|BFloat16)\b.*"
    r"|compensate_(?:count|finite)_kernel.*|count_low_kernel|write_entries_kernel"
    r"|(?:encode|decode)_chunks_kernel.*"
)


# ---- checks --------------------------------------------------------------------------------------


def plain_name(kernel: machine_code.Kernel) -> str:
    """A kernel's name with the arguments of its template, without namespaces."""
    name = machine_code.demangled(kernel.name).replace("(anonymous namespace)::", "")
    name = re.sub(r"\([\w:]+\)(?=\d)", "", name)  # of an enumeration: "(cuda::ErrorKind)1" is "1"
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
        if not rows and re.fullmatch(HELD, name):
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
