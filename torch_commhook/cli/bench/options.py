"""The command line of ``bench``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_commhook.cli.default_hooks import DEFAULT_HOOKS
from torch_commhook.cli.formatting import pluralize
from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import at_most, positive_float, positive_int
from torch_commhook.cli.outputs import OutputError, check_checkpoint, check_picture
from torch_commhook.cli.place import Place
from torch_commhook.cli.plan_numbers import format_count, parse_count
from torch_commhook.cli.train_config import MOST, MOST_RANKS
from torch_commhook.cli.train_options import OptionError, available_cores, check_device
from torch_commhook.hooks.expressions import (
    NO_HOOK,
    HookExpressionError,
    check_hook,
    is_file_reference,
    parse_hook,
)
from torch_commhook.planning.computing import OPTIMIZERS

#: The parts of a run, and their shares of its time.
PARTS = {"link": 4, "collectives": 2, "codecs": 3, "hooks": 6}
_OF_SEVERAL = ("link", "collectives")
#: The hooks that plan compares by default, so that it finds all of them in the file of --out.
_DEFAULT_HOOKS = DEFAULT_HOOKS[OPTIMIZERS[0]]
#: The hook that the others are compared with. It is always measured.
BASELINE = "allreduce()"
_DEFAULT_ELEMENTS = 25_000_000
_DEFAULT_SECONDS = 60.0
_MOST_SECONDS = 86_400
#: Of an element: parameter, gradient, bucket, error memory, and copies on the way.
_BYTES_PER_ELEMENT = 24


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how.

    Attributes:
        ranks: to launch, or those of the world that is there.
        parts: names of :data:`PARTS`, in order.
        seconds: about how long it may take.
        shapes: of the parameters, in the order of the forward.
        what: the model, in words.
        hooks: as ``train`` takes them; the first is :data:`BASELINE`.
        out: where the file of ``plan --link`` goes; None for nowhere.
        plot: where the picture goes; None for nowhere.
        json: whether rank 0 prints JSON instead of tables.
        timeout, device, backend, threads: as of ``train``.
    """

    ranks: int
    parts: tuple[str, ...]
    seconds: float
    shapes: tuple[tuple[int, ...], ...]
    what: str
    hooks: tuple[str, ...]
    out: Path | None
    plot: Path | None
    json: bool
    timeout: float
    device: str
    backend: str
    threads: int

    def seconds_of(self, part: str) -> float:
        """The share of a part that is measured."""
        return self.seconds * PARTS[part] / sum(PARTS[name] for name in self.parts)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``bench``. ``--threads`` and ``--ranks`` that are not given are None."""
    parser = OneLineParser(
        prog="commhook bench",
        description=(
            "Measure the link between ranks, the backend's collectives, the codecs, and a step "
            "with each hook. Started alone it launches its own ranks on this machine; under "
            "torchrun, or as one of several tasks of Slurm's srun, it joins the world that is "
            "there. One rank has no link, and its hooks only compute."
        ),
    )
    add = parser.add_argument
    add(
        "--ranks",
        type=at_most(MOST_RANKS, positive_int),
        metavar="N",
        help="ranks to launch on this machine (1)",
    )
    add(
        "--parts",
        type=_parts,
        default=tuple(PARTS),
        metavar="PART,...",
        help=f"what to measure ({','.join(PARTS)})",
    )
    add(
        "--seconds",
        type=at_most(_MOST_SECONDS, positive_float),
        default=_DEFAULT_SECONDS,
        help=f"about how long it may take ({_DEFAULT_SECONDS:g})",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--elements",
        type=_elements,
        default=_DEFAULT_ELEMENTS,
        metavar="N",
        help=f"of the gradients, such as 124M ({_DEFAULT_ELEMENTS // 10**6}M)",
    )
    size.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help=(
            "gradients as those of the model that a function makes, on the meta device, where it "
            "takes no memory; or FILE.py:FACTORY"
        ),
    )
    add(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        default=list(_DEFAULT_HOOKS),
        help=f"as train takes them ({' '.join(_DEFAULT_HOOKS)})",
    )
    add("--out", type=Path, metavar="FILE", help="write the file that plan --link takes")
    add("--plot", type=Path, metavar="FILE", help="draw a picture (PNG)")
    add("--json", action="store_true", help="print JSON")
    add(
        "--timeout",
        type=at_most(MOST["timeout"], positive_float),
        default=300.0,
        help="of a collective, seconds (300)",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA where every rank of this machine gets a GPU of its own, else the CPU",
    )
    add(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="auto: NCCL on CUDA, Gloo on the CPU",
    )
    add(
        "--threads",
        type=at_most(MOST["threads"], positive_int),
        help="of a rank on the CPU (cores // ranks)",
    )
    return parser


def parse_options(argv: Sequence[str], place: Place | None = None) -> BenchOptions:
    """Read and check the options; ends the process with one line and exit code 2 on an error.

    Args:
        argv: the arguments after ``bench``.
        place: of this process in the world that is there, None where it is to launch one.
    """
    parser = build_parser()
    given = parser.parse_args(list(argv))
    try:
        options = _resolve(given, place)
        if place is None or (place.rank == 0 and place.launcher_pid is None):
            _check_outputs(options)  # once, where it will be written
            if "hooks" in options.parts and options.device != "cuda":
                _check_memory(options, options.ranks if place is None else place.local_size)
        return options
    except OptionError as error:
        parser.error(str(error))


def _resolve(given: argparse.Namespace, place: Place | None) -> BenchOptions:
    ranks = given.ranks or 1
    if place is not None:
        ranks = place.size
        if given.ranks not in (None, ranks):
            raise OptionError(
                f"argument --ranks: must be the {ranks} of the world that is there, "
                f"got {given.ranks}"
            )
    local_ranks = ranks if place is None else place.local_size
    check_device(given, local_ranks)
    if ranks == 1 and not set(given.parts) - set(_OF_SEVERAL):
        raise OptionError(
            f"argument --parts: {' and '.join(given.parts)} need{'s' * (len(given.parts) == 1)} "
            "two or more ranks; give "
            "--ranks 2, or start bench by torchrun"
        )
    shapes, what = _shapes(given)
    return BenchOptions(
        ranks=ranks,
        parts=given.parts,
        seconds=given.seconds,
        shapes=shapes,
        what=what,
        hooks=_hooks(given.hooks),
        out=given.out,
        plot=given.plot,
        json=given.json,
        timeout=given.timeout,
        device=given.device,
        backend=given.backend,
        threads=given.threads or max(1, available_cores() // local_ranks),
    )


def _hooks(texts: Sequence[str]) -> tuple[str, ...]:
    for text in texts:
        if text.strip().lower() == NO_HOOK:
            raise OptionError(
                f"argument --hooks: {NO_HOOK} names no hook; a step without one is measured anyway"
            )
        try:
            check_hook(text)
        except HookExpressionError as error:
            raise OptionError(f"argument --hooks: {error}") from error
        if not is_file_reference(text) and getattr(parse_hook(text), "chooses", False):
            raise OptionError(
                f"argument --hooks: {text} chooses one of several hooks in the first steps of a "
                "training; name these"
            )
    return tuple(dict.fromkeys([BASELINE, *texts]))


def _check_outputs(options: BenchOptions) -> None:
    checks = {"out": check_checkpoint, "plot": check_picture}
    for name, check in checks.items():
        path = getattr(options, name)
        if path is None:
            continue
        try:
            check(path)
        except OutputError as error:
            raise OptionError(f"argument --{name}: {error}") from error
    if options.out is not None and options.out == options.plot:
        raise OptionError(
            f"argument --plot: must be another file than that of --out, {options.out}"
        )


def _check_memory(options: BenchOptions, local_ranks: int) -> None:
    """Raise OptionError where this machine has no room for the gradients of all of its ranks."""
    needed = sum(map(math.prod, options.shapes)) * _BYTES_PER_ELEMENT * local_ranks
    there = _available_memory()
    if there is not None and needed > there:
        raise OptionError(
            f"argument --parts: hooks need about {needed / 1e9:.1f} GB for {options.what} on "
            f"{pluralize(local_ranks, 'rank')} of this machine, and {there / 1e9:.1f} GB are free; "
            "give fewer --elements, or leave hooks out"
        )


def _available_memory() -> int | None:
    """In bytes; None where the system does not tell."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) << 10


# ---- what is measured ----------------------------------------------------------------------------


def _parts(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(PARTS)}, got {unknown[0]!r}")
    return tuple(name for name in PARTS if name in names)


def _elements(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _shapes(given: argparse.Namespace) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The shapes of all parameters, and what they are, in words."""
    from torch_commhook.cli.plan_model import ModelError, model_of_factory, model_of_size

    try:
        if given.model is None:
            subject = model_of_size(given.elements)
        else:
            subject = model_of_factory(given.model, None)
    except ModelError as error:
        raise OptionError(f"argument --model: {error}") from error
    shapes = tuple(each.shape for each in subject.model.listed() if each.numel)
    whose = "" if subject.name is None else f" of {subject.name}"
    return shapes, f"{format_count(subject.model.elements)} elements{whose}"
