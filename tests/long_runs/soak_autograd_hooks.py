"""Memory over a million cycles of registering, calling and removing an autograd hook.

For each kind of hook, in Python and as an operator; and PyTorch's own registration beside it. A
cycle makes a new hook, registers it, runs backward and removes it. After a warm-up nothing may
grow: neither the process (RSS), nor what the C allocator has given out, nor the blocks that Python
has, nor the objects that its garbage collector knows.

Run with ``make soak ARGS="[--cycles N] [PART_OF_A_NAME ...]"``. Exits with 1 where memory has grown
with one of our hooks. Without arguments it writes ``soak_autograd_hooks.json`` beside this file.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from autograd_apis import Ours, PyTorchs, leaf
from long_run_results import store

TABLE = Path(__file__).with_suffix(".json")
CYCLES = 1_000_000
WARM_UP = 20_000
SAMPLES = 10

#: How much each may grow after the warm-up, whatever the cycles: far less than a byte for each of a
#: million. RSS moves by pages that the allocator takes and gives back.
BOUNDS = {"rss_bytes": 4 << 20, "heap_bytes": 64 << 10, "python_blocks": 2000, "gc_objects": 100}

#: Of each kind: what makes a hook in Python, the operator, and where in the graph it goes.
KINDS: dict[str, tuple[Callable[[], Callable[..., Any]], Any, Callable[[Any, Any], Any]]] = {
    "hook": (lambda: lambda grad: grad * 2, torch.ops.aten.neg.default, lambda x, y: y),
    "prehook": (
        lambda: lambda grads: (grads[0] * 2,),
        torch.ops.aten._foreach_neg.default,
        lambda x, y: y.grad_fn,
    ),
    "posthook": (
        lambda: lambda inputs, outputs: (outputs[0] * 2,),
        torch.ops.aten._foreach_add.List,
        lambda x, y: y.grad_fn,
    ),
    "post_accumulate": (
        lambda: lambda parameter: None,
        torch.ops.aten._assert_tensor_metadata.default,
        lambda x, y: x,
    ),
}


class Mallinfo2(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def heap_bytes() -> int | None:
    """What the C allocator has given out and not got back; None where glibc does not tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure() -> dict[str, int | None]:
    gc.collect()
    return {
        "rss_bytes": rss_bytes(),
        "heap_bytes": heap_bytes(),
        "python_blocks": sys.getallocatedblocks(),
        "gc_objects": len(gc.get_objects()),
    }


def soak(api: Any, kind: str, hook: str, cycles: int) -> dict[str, Any]:
    """One row of the table."""
    make, operator, place = KINDS[kind]
    register = getattr(api, kind)
    x = leaf()
    y = x.neg()
    on, loss = place(x, y), y.sum()

    def run(count: int) -> None:
        for _ in range(count):
            handle = register(on, make() if hook == "python" else operator)
            x.grad = None
            loss.backward(retain_graph=True)
            handle.remove()

    run(WARM_UP)
    measure()  # takes memory for itself the first time
    samples = [{"cycles": 0} | measure()]
    begin = time.monotonic()
    for number in range(SAMPLES):
        run((number + 1) * cycles // SAMPLES - number * cycles // SAMPLES)
        samples.append({"cycles": (number + 1) * cycles // SAMPLES} | measure())
    first, last = samples[0], samples[-1]
    growth = {name: last[name] - first[name] for name in BOUNDS if first[name] is not None}
    return {
        "kind": kind,
        "hook": hook,
        "registration": api.name,
        "seconds": round(time.monotonic() - begin, 1),
        "growth": growth,
        "flat": all(growth[name] <= BOUNDS[name] for name in growth),
        "samples": samples,
    }


def main() -> int:
    """Run the cycles; 1 where memory grows with one of our hooks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help="parts of names; all rows where none is given")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="of each row (%(default)s)")
    arguments = parser.parse_args()
    if arguments.cycles < SAMPLES:
        parser.error(f"--cycles must be at least {SAMPLES}, got {arguments.cycles}")
    torch.set_num_threads(1)
    rows, begun = [], time.monotonic()
    for kind in KINDS:
        for hook, api in [("python", Ours), ("operator", Ours), ("python", PyTorchs)]:
            name = f"{kind}, {hook}, {api.name}"
            if arguments.parts and not any(part in name for part in arguments.parts):
                continue
            row = soak(api, kind, hook, arguments.cycles)
            rows.append(row)
            growth = ", ".join(f"{what} {by:+}" for what, by in row["growth"].items())
            print(f"{'flat ' if row['flat'] else 'GROWS'} {name}: {growth}", flush=True)
    if not arguments.parts and arguments.cycles == CYCLES:
        store(TABLE, begun, cycles=CYCLES, warm_up=WARM_UP, bounds=BOUNDS, rows=rows)
    grows = [row for row in rows if not row["flat"] and row["registration"] == Ours.name]
    return 1 if grows else 0


if __name__ == "__main__":
    sys.exit(main())
