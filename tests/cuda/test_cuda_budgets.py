"""The check of the CUDA kernels' budgets, on machine code that is written here."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
from repository import ROOT

sys.path.insert(0, str(ROOT / "cuda"))
import budgets
import machine_code

sys.path.remove(str(ROOT / "cuda"))

KERNEL = "_ZN8commhook4cuda15register_kernelILi8EEEvPf"
#: A loop with two ways that load 16 bytes: the longer one by four loads of a word.
LOOP = """
        MOV R1, c[0x0][0x28] ;
head:   ISETP.NE.AND P0, PT, R0, RZ, PT ;
        BSSY B0, join ;
        @P0 BRA slow ;
        LDG.E.128 R4, desc[UR4][R2.64] ;
        BSYNC B0 ;
slow:   LDG.E R4, desc[UR4][R2.64] ;
        LDG.E R5, desc[UR4][R2.64+0x4] ;
        LDG.E R6, desc[UR4][R2.64+0x8] ;
        LDG.E.128 R8, desc[UR4][R2.64] ;
        BSYNC B0 ;
join:   FADD R4, R4, R5 ;
        @!P1 STG.E.128 desc[UR4][R2.64], R4 ;
        STG.E desc[UR4][R6.64], R4 ;
        @P2 BRA head ;
        EXIT ;
"""


BUDGET = budgets.Budget("register_kernel<8>", 64, 128, 16_384, (0, 32, 0), ())


def listing(source: str) -> list[str]:
    """As cuobjdump prints it, with addresses in the place of labels."""
    lines = [line.rpartition(":   ") for line in source.strip().splitlines()]
    labels = {label.strip(): 16 * i for i, (label, _, _) in enumerate(lines) if label.strip()}
    printed = ["\t\tcode for sm_90", f"\t\tFunction : {KERNEL}"]
    for i, (_, _, text) in enumerate(lines):
        for label, address in labels.items():
            text = text.replace(f" {label} ;", f" 0x{address:x} ;")
        printed.append(f"        /*{16 * i:04x}*/  {text.strip()}   /* 0x0000000a10107980 */")
        printed.append("                                            /* 0x000fe200000e0000 */")
    return printed


def test_a_kernel_of_a_listing() -> None:
    (kernel,) = machine_code.kernels_in(listing(LOOP))
    assert (kernel.name, kernel.arch, len(kernel.code)) == (KERNEL, "sm_90", 16)
    assert not machine_code.divides_64_bits(kernel)
    assert machine_code.shortest_loop(kernel, {"FADD": 1}) is not None


NINE, TWELVE = (machine_code.Path(*each) for each in ((9, 1), (12, 4)))
OF_SLOW = {"LDG": 3, "LDG.128": 1}


@pytest.mark.parametrize(
    ("wanted", "code", "path"),
    [
        ({"LDG.128": 1, "STG.128": 1}, LOOP, NINE),
        ({"LDG.128": 2}, LOOP, None),
        ({"LDG.128": 1}, LOOP.replace("@P2 BRA head", "NOP"), None),  # outside of a loop
        ({"FMUL": 1}, LOOP, None),  # other operations tell loops apart
        # A call with a condition goes on at its target.
        (OF_SLOW, LOOP, TWELVE),
        (OF_SLOW, LOOP.replace("@P0 BRA slow", "@P0 CALL.REL.NOINC slow"), TWELVE),
        (OF_SLOW, LOOP.replace("@P0 BRA slow", "CALL.REL.NOINC slow"), None),
    ],
)
def test_the_shortest_way(
    wanted: dict[str, int], code: str, path: machine_code.Path | None
) -> None:
    (kernel,) = machine_code.kernels_in(listing(code))
    assert machine_code.shortest_loop(kernel, wanted) == path


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"instructions": (0, 8.9, 0)}, "9.0 instructions a value of at most 8.9"),
        ({"narrow": 0}, "1 narrow accesses of at most 0"),
        ({"wide": {"LDG.128": 2}}, "no loop has 2 LDG.128"),
        ({"registers": 63}, "64 registers of at most 63"),
        ({"warps": (0, 33, 0)}, "32 warps of at least 33"),
        ({"anywhere": {"STS.128": 1}}, "0 STS.128, at least 1 asked"),
        ({"kernel": "another"}, "budgets.py has no row for it"),
    ],
    ids=str,
)
def test_what_fails(change: dict[str, object], fault: str | None) -> None:
    loop = budgets.Loop("tile", 1, {"LDG.128": 1, "STG.128": 1}, 1, (0, 9, 0))
    of_loop = {key: value for key, value in change.items() if hasattr(loop, key)}
    budget = replace(BUDGET, loops=(replace(loop, **of_loop),))
    budget = replace(budget, **{key: change[key] for key in change.keys() - of_loop.keys()})
    checks = budgets.Checks((budget,))
    (kernel,) = machine_code.kernels_in(listing(LOOP))
    checks.add(kernel, 64, Counter(map(machine_code.access_of, kernel.code.values())))
    faults = [line for passed, line in checks.outcomes() if not passed]
    assert len(faults) == (fault is not None), faults
    assert fault is None or fault in faults[0]


def test_a_division_of_64_bits_fails() -> None:
    checks = budgets.Checks((BUDGET,))
    code = LOOP.replace("FADD R4, R4, R5", "I2F.U64.RP R4, R6")
    (kernel,) = machine_code.kernels_in(listing(code))
    checks.add(kernel, 64, Counter())
    assert [line for passed, line in checks.outcomes() if not passed] == [
        "register_kernel<8> (sm_90): divides integers of 64 bits"
    ]


def test_a_row_that_no_kernel_matches_fails() -> None:
    checks = budgets.Checks((BUDGET, replace(BUDGET, kernel="another")))
    (kernel,) = machine_code.kernels_in(listing(LOOP))
    checks.add(kernel, 64, Counter())
    assert list(checks.unmatched(["sm_90", "sm_70"])) == [
        "another (sm_90): budgets.py has a row that no kernel matches"
    ]


def test_names_without_namespaces() -> None:
    name = "_ZN8commhook4cuda12_GLOBAL__N_112count_kernelILi216ELNS0_9ErrorKindE1EEEvi"
    if machine_code.demangled(name) == name:
        pytest.skip("there is no c++filt")
    assert budgets.plain_name(machine_code.Kernel(name, "sm_90")) == "count_kernel<216, 1>"
