"""Reads kernels' machine code from ``cuobjdump --dump-sass``, and measures their loops."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

WIDTH = 16  # bytes per instruction

FUNCTION = re.compile(r"\s*Function : (\S+)")
ARCH = re.compile(r"\s*code for (sm_\w+)")
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;")
TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
MEMORY = re.compile(r"\b(LDG|STG|LDS|STS|LD|ST|LDL|STL)\b(\S*)")


@dataclass
class Kernel:
    """A function's instructions by address."""

    name: str  # mangled
    arch: str
    code: dict[int, str] = field(default_factory=dict)


def kernels_in(lines: Iterable[str]) -> Iterator[Kernel]:
    """The kernels of a listing, in order."""
    arch = ""
    kernel: Kernel | None = None
    for line in lines:
        if match := ARCH.match(line):
            arch = match.group(1)
        elif match := FUNCTION.match(line):
            if kernel is not None:
                yield kernel
            kernel = Kernel(match.group(1), arch)
        elif kernel is not None and (match := INSTRUCTION.match(line)):
            kernel.code[int(match.group(1), 16)] = match.group(2)
    if kernel is not None:
        yield kernel


def operation_of(text: str) -> str:
    """``LDG.E.128`` for ``@!P0 LDG.E.128 R2, ...``."""
    return re.sub(r"^@\S+\s+", "", text).split(" ", 1)[0].rstrip(",")


def access_of(text: str) -> str | None:
    """``LDG.128`` for a load of 16 bytes, ``LDG`` for a narrower one; None for other operations."""
    match = MEMORY.match(operation_of(text))
    if match is None:
        return None
    return match.group(1) + (".128" if ".128" in match.group(2).split("desc")[0] else "")


def kind_of(text: str) -> str:
    """:func:`access_of`, or the operation's name: ``FMUL`` for ``FMUL.FTZ R2, ...``."""
    return access_of(text) or operation_of(text).partition(".")[0]


def divides_64_bits(kernel: Kernel) -> bool:
    """Whether the kernel divides integers of 64 bits: each such division begins with this
    conversion.
    """
    return any(operation_of(text).startswith("I2F.U64.RP") for text in kernel.code.values())


@cache
def demangled(name: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None:
        return name
    return subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip()


# ---- the flow of control -------------------------------------------------------------------------


def target_of(text: str) -> int | None:
    match = TARGET.search(text)
    return int(match.group(1), 16) if match else None


def may_fall_through(text: str) -> bool:
    operation = operation_of(text)
    if text.startswith("@"):
        return True
    if operation.startswith(("EXIT", "RET", "BSYNC")):
        return False
    if operation.startswith("BRA"):
        # A condition may also precede the target: BRA.U !UP0, 0x100.
        return "DIV" in operation or "CONV" in operation or "," in text
    return True


def flow_of(code: dict[int, str]) -> dict[int, set[int]]:
    """The instructions that may follow each one."""
    flow: dict[int, set[int]] = {}
    for address, text in code.items():
        following = set()
        if may_fall_through(text) and address + WIDTH in code:
            following.add(address + WIDTH)
        # A call with a condition is an exit of a loop: sm_80 uses it in place of a branch.
        if operation_of(text).startswith("BRA") or re.match(r"@\S+\s+CALL\b", text):
            target = target_of(text)
            if target in code:
                following.add(target)
        flow[address] = following
    add_convergence(code, flow)
    return flow


def add_convergence(code: dict[int, str], flow: dict[int, set[int]]) -> None:
    """Adds where a BSYNC continues: at the address in the BSSY that names the same barrier."""
    barriers = {
        address: re.findall(r"\bB\d+\b", text)
        for address, text in code.items()
        if operation_of(text).startswith(("BSSY", "BSYNC"))
    }
    known: dict[int, dict[str, set[int]]] = {address: {} for address in code}
    work = list(code)
    while work:
        address = work.pop()
        text = code[address]
        after = {name: set(targets) for name, targets in known[address].items()}
        names = barriers.get(address)
        if names:
            if operation_of(text).startswith("BSSY"):
                target = target_of(text)
                after[names[0]] = {target} if target in code else set()
            else:
                flow[address] |= after.get(names[0], set())
        for following in flow[address]:
            changed = False
            for name, targets in after.items():
                there = known[following].setdefault(name, set())
                if not targets <= there:
                    there |= targets
                    changed = True
            if changed:
                work.append(following)


def back_edges(flow: dict[int, set[int]], first: int) -> set[tuple[int, int]]:
    """Edges to an instruction that is on the path from the first one."""
    found = set()
    on_way = {first}
    seen = {first}
    stack = [(first, iter(sorted(flow[first])))]
    while stack:
        address, following = stack[-1]
        for other in following:
            if other in on_way:
                found.add((address, other))
            elif other not in seen:
                seen.add(other)
                on_way.add(other)
                stack.append((other, iter(sorted(flow[other]))))
                break
        else:
            on_way.discard(address)
            stack.pop()
    return found


# ---- paths ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """The shortest path once around a loop with the wanted accesses of 16 bytes."""

    instructions: int
    narrow: int  # accesses of global and shared memory with fewer bytes


def in_order(flow: dict[int, set[int]], without: set[tuple[int, int]], first: int) -> list[int]:
    """The instructions, each before those that follow it."""
    order: list[int] = []
    seen = {first}
    stack = [(first, iter(flow[first]))]
    while stack:
        address, following = stack[-1]
        for other in following:
            if (address, other) not in without and other not in seen:
                seen.add(other)
                stack.append((other, iter(flow[other])))
                break
        else:
            order.append(address)
            stack.pop()
    return order[::-1]


def body_of(
    flow: dict[int, set[int]], without: set[tuple[int, int]], head: int, ends: set[int]
) -> set[int]:
    """The instructions on paths from a loop's head to its ends."""
    before = defaultdict(set)
    for address, following in flow.items():
        for other in following:
            if (address, other) not in without and other != head:
                before[other].add(address)
    body = set(ends)
    stack = list(ends)
    while stack:
        new = before[stack.pop()] - body
        body |= new
        stack.extend(new)
    return body


def shortest_loop(kernel: Kernel, wanted: dict[str, int]) -> Path | None:
    """The shortest path around any of a kernel's loops with at least the accesses in ``wanted``.

    A loop inside the loop counts once. Called functions do not count.

    Args:
        wanted: numbers of accesses, such as ``{"LDG.128": 8}``, or of other operations, such as
            ``{"FMUL": 4}``.
    """
    flow = flow_of(kernel.code)
    edges = back_edges(flow, min(kernel.code))
    kinds = sorted(wanted)
    best: Path | None = None
    for head in sorted({head for _, head in edges}):
        ends = {address for address, other in edges if other == head}
        body = body_of(flow, edges, head, ends)
        within = Counter(kind_of(kernel.code[address]) for address in body)
        if any(within[kind] < least for kind, least in wanted.items()):
            continue
        # From the loop's head: the lengths of the paths, by their accesses.
        ways: dict[int, dict[tuple[int, ...], tuple[int, int]]] = defaultdict(dict)
        ways[head][tuple(0 for _ in kinds)] = (0, 0)
        for address in in_order(flow, edges, head):
            found = kind_of(kernel.code[address])
            is_narrow = found in ("LDG", "STG", "LDS", "STS", "LD", "ST")
            for counts, (length, narrow) in list(ways[address].items()):
                now = tuple(
                    min(wanted[kind], count + (kind == found))
                    for kind, count in zip(kinds, counts, strict=True)
                )
                way = (length + 1, narrow + is_narrow)
                if address in ends and all(
                    count == wanted[kind] for kind, count in zip(kinds, now, strict=True)
                ):
                    if best is None or way < (best.instructions, best.narrow):
                        best = Path(*way)
                for other in flow[address]:
                    if other in body and (address, other) not in edges:
                        ways[other][now] = min(ways[other].get(now, way), way)
            del ways[address]
    return best
