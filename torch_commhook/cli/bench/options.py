"""The command line of ``bench``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import at_most, path, positive_float, positive_int, type_of
from torch_commhook.cli.outputs import OutputError, check_file, check_picture
from torch_commhook.cli.place import Place, checks_outputs
from torch_commhook.cli.plan_parser import format_count, parse_count
from torch_commhook.cli.train_config import DEFAULT_HOOKS, MOST_RANKS, is_no_hook
from torch_commhook.cli.train_options import (
    OptionError,
    available_cores,
    check_device,
    check_world_size,
    world_options,
)
from torch_commhook.hooks.expressions import (
    NO_HOOK,
    HookExpressionError,
    check_hook,
    is_file_reference,
    parse_hook,
)
from torch_commhook.planning.model import OPTIMIZERS
from torch_commhook.wording import pluralize

#: Name of each part of a run: its share of the run's time.
PARTS = {"link": 4, "collectives": 2, "codecs": 3, "hooks": 6}
#: The parts that need more than one rank.
_OF_SEVERAL = ("link", "collectives")
#: The hooks that plan compares by default, so that it finds all of them in the file of --out.
_DEFAULT_HOOKS = DEFAULT_HOOKS[OPTIMIZERS[0]]
#: The hook that the others are compared with. It is always measured.
BASELINE = "allreduce()"
_DEFAULT_ELEMENTS = 25_000_000
_DEFAULT_SECONDS = 60.0
_MOST_SECONDS = 86_400
#: The peak memory of a rank for each element, as measured with the default hooks on 25 M elements.
_BYTES_PER_ELEMENT = 60


@dataclass(frozen=True)
class BenchOptions:
    """The options of ``bench``.

    Attributes:
        ranks: the number of ranks.
        parts: the names of the parts to measure, in the order of :data:`PARTS`.
        seconds: the approximate time of all parts.
        shapes: the shapes of the parameters, in the order of the forward.
        description: a description of the gradients.
        hooks: the hooks, as ``train`` takes them; the first is :data:`BASELINE`.
        out: the file for ``plan --link``; None for none.
        plot: the picture; None for none.
        json: whether rank 0 prints JSON instead of tables.
        timeout, device, backend, threads: as in :class:`torch_commhook.cli.world.WorldOptions`.
    """

    ranks: int
    parts: tuple[str, ...]
    seconds: float
    shapes: tuple[tuple[int, ...], ...]
    description: str
    hooks: tuple[str, ...]
    out: Path | None
    plot: Path | None
    json: bool
    timeout: float
    device: str
    backend: str
    threads: int

    def seconds_of(self, part: str) -> float:
        """The time for one of :attr:`parts`."""
        return self.seconds * PARTS[part] / sum(PARTS[name] for name in self.parts)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of ``bench``. ``--threads`` and ``--ranks`` are None by default."""
    parser = OneLineParser(
        prog="commhook bench",
        description=(
            "Measure the link between ranks, the backend's collectives, the codecs, and a step "
            "with each hook. Started alone, bench launches its own ranks on this machine. Under "
            "torchrun, or as one of several tasks of Slurm's srun, it joins that world. One rank "
            "has no link, and its hooks only compute."
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
        help=f"parts to measure ({','.join(PARTS)})",
    )
    add(
        "--seconds",
        type=at_most(_MOST_SECONDS, positive_float),
        default=_DEFAULT_SECONDS,
        help=f"approximate time of all parts ({_DEFAULT_SECONDS:g})",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--elements",
        type=type_of(parse_count),
        default=_DEFAULT_ELEMENTS,
        metavar="N",
        help=f"elements of the gradients, such as 124M ({_DEFAULT_ELEMENTS // 10**6}M)",
    )
    size.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help=(
            "function without arguments that makes a model, or FILE.py:FACTORY; bench takes "
            "gradients of its shapes"
        ),
    )
    add(
        "--hooks",
        nargs="+",
        metavar="HOOK",
        default=list(_DEFAULT_HOOKS),
        help=f"hooks to measure, as train takes them ({' '.join(_DEFAULT_HOOKS)})",
    )
    add("--out", type=path, metavar="FILE", help="write a file for plan --link")
    add("--plot", type=path, metavar="FILE", help="draw a picture (PNG)")
    add("--json", action="store_true", help="print JSON instead of tables")
    for name, settings in world_options().items():
        add(name, **settings)
    return parser


def parse_options(argv: Sequence[str], place: Place | None = None) -> BenchOptions:
    """Read and check the options; ends the process with one line and exit code 2 on an error.

    Args:
        argv: the arguments after ``bench``.
        place: this rank's place; None if the process launches the ranks.
    """
    parser = build_parser()
    given = parser.parse_args(list(argv))
    try:
        options = _resolve(given, place)
        if checks_outputs(place):
            _check_outputs(options)
            if "hooks" in options.parts and options.device != "cuda":
                _check_memory(options, options.ranks if place is None else place.local_size)
        return options
    except OptionError as error:
        parser.error(str(error))


def _resolve(given: argparse.Namespace, place: Place | None) -> BenchOptions:
    ranks = given.ranks or 1
    if place is not None:
        check_world_size(given.ranks, place)
        ranks = place.size
    local_ranks = ranks if place is None else place.local_size
    check_device(given, local_ranks)
    if ranks == 1 and not set(given.parts) - set(_OF_SEVERAL):
        raise OptionError(
            f"argument --parts: {' and '.join(given.parts)} need{'s' * (len(given.parts) == 1)} "
            "two or more ranks; give --ranks 2, or start bench by torchrun"
        )
    shapes, description = _shapes(given)
    return BenchOptions(
        ranks=ranks,
        parts=given.parts,
        seconds=given.seconds,
        shapes=shapes,
        description=description,
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
        if is_no_hook(text):
            raise OptionError(
                f"argument --hooks: {NO_HOOK} names no hook; bench always measures a step without "
                "one"
            )
        try:
            check_hook(text)
        except HookExpressionError as error:
            raise OptionError(f"argument --hooks: {error}") from error
        if not is_file_reference(text) and getattr(parse_hook(text), "chooses", False):
            raise OptionError(
                f"argument --hooks: {text} chooses one of several hooks in the first steps of a "
                "training; name the hooks"
            )
    return tuple(dict.fromkeys([BASELINE, *texts]))


def _check_outputs(options: BenchOptions) -> None:
    checks = {"out": check_file, "plot": check_picture}
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
    """Raise OptionError if this machine has too little memory for the hooks of its ranks."""
    needed = sum(map(math.prod, options.shapes)) * _BYTES_PER_ELEMENT * local_ranks
    there = _available_memory()
    if there is not None and needed > there:
        raise OptionError(
            f"argument --parts: hooks need about {needed / 1e9:.1f} GB for {options.description} "
            f"on {pluralize(local_ranks, 'rank')} of this machine, and {there / 1e9:.1f} GB are "
            "free; give fewer --elements, or leave hooks out"
        )


def _available_memory() -> int | None:
    """The available memory in bytes; None if the system does not tell."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) << 10


# ---- parts and shapes ----------------------------------------------------------------------------


def _parts(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(PARTS)}, got {unknown[0]!r}")
    return tuple(name for name in PARTS if name in names)


def _shapes(given: argparse.Namespace) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The shapes of all parameters, and a description of them."""
    from torch_commhook.cli.plan_parser import ModelError, model_of_factory, model_of_size

    try:
        if given.model is None:
            subject = model_of_size(given.elements)
        else:
            subject = model_of_factory(given.model, None)
    except ModelError as error:
        raise OptionError(f"argument --model: {error}") from error
    shapes = tuple(each.shape for each in subject.model.listed() if each.numel)
    source = "" if subject.name is None else f" of {subject.name}"
    return shapes, f"{format_count(subject.model.elements)} elements{source}"
