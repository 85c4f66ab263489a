"""The command line of ``bench``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch_commhook.cli.launch_environment import LaunchEnvironment, checks_outputs
from torch_commhook.cli.main import OneLineParser
from torch_commhook.cli.option_types import (
    OptionError,
    WorldOptions,
    add_options,
    at_most,
    given_fields,
    of_option,
    option,
    path,
    positive_float,
    positive_int,
    some_of,
    type_of,
)
from torch_commhook.cli.outputs import check_file, check_picture
from torch_commhook.cli.plan_parser import (
    Subject,
    format_count,
    model_of_factory,
    parse_count,
)
from torch_commhook.cli.train_config import DEFAULT_HOOKS, MOST_RANKS, is_no_hook
from torch_commhook.cli.train_options import available_cores, check_device, check_world_size
from torch_commhook.hooks.expressions import NO_HOOK, check_hook, is_file_reference, parse_hook
from torch_commhook.planning.model import OPTIMIZERS, Model
from torch_commhook.wording import pluralize

#: Name of each part of a run: its share of the run's time.
PARTS = {"link": 4, "collectives": 2, "codecs": 3, "hooks": 6}
#: The parts that need more than one rank.
_OF_SEVERAL = ("link", "collectives")
#: The hook that the others are compared with. It is always measured.
BASELINE = "allreduce()"
#: The peak memory of a rank for each element, as measured with the default hooks on 25 M elements.
_BYTES_PER_ELEMENT = 60


@dataclass(frozen=True, kw_only=True)
class BenchOptions(WorldOptions):
    """The options of ``bench``.

    Attributes:
        parts: the names of the parts to measure, in the order of :data:`PARTS`.
        hooks: the hooks, as ``train`` takes them; the first is :data:`BASELINE`.
        json: whether rank 0 prints JSON instead of tables.
        shapes: the shapes of the parameters, in the order of the forward.
        description: a description of the gradients.
    """

    ranks: int = option(
        at_most(MOST_RANKS, positive_int), "ranks to launch on this machine", 1, metavar="N"
    )
    parts: tuple[str, ...] = option(
        some_of(PARTS), "parts to measure", tuple(PARTS), shown=",".join(PARTS), metavar="PART,..."
    )
    seconds: float = option(at_most(86_400, positive_float), "approximate time of all parts", 60.0)
    elements: int = option(
        type_of(parse_count),
        "elements of the gradients, such as 124M",
        25_000_000,
        shown="25M",
        group="gradients",
        metavar="N",
    )
    model: str | None = option(
        str,
        "function without arguments that makes a model, or FILE.py:FACTORY; bench takes gradients "
        "of its shapes",
        group="gradients",
        metavar="MODULE:FACTORY",
    )
    #: The hooks that plan compares by default, so that it finds all of them in the file of --out.
    hooks: tuple[str, ...] = option(
        str,
        "hooks to measure, as train takes them",
        DEFAULT_HOOKS[OPTIMIZERS[0]],
        nargs="+",
        metavar="HOOK",
    )
    out: Path | None = option(path, "write a file for plan --link", metavar="FILE")
    plot: Path | None = option(path, "draw a picture (PNG)", metavar="FILE")
    json: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    description: str = ""

    def seconds_of(self, part: str) -> float:
        """The time for one of :attr:`parts`."""
        return self.seconds * PARTS[part] / sum(PARTS[name] for name in self.parts)


def build_parser() -> OneLineParser:
    """Build the parser of ``bench``."""
    parser = OneLineParser(
        prog="commhook bench",
        description=(
            "Measure the link between ranks, the backend's collectives, the codecs, and a step "
            "with each hook. Started alone, bench launches its own ranks on this machine. Under "
            "torchrun, or as one of several tasks of Slurm's srun, it joins that world. One rank "
            "has no link, and its hooks only compute."
        ),
    )
    gradients = parser.add_mutually_exclusive_group()
    add_options(parser, BenchOptions, groups={"options": parser, "gradients": gradients})
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_options(parser, WorldOptions, groups={"communication": parser})
    return parser


def parse_options(argv: Sequence[str], place: LaunchEnvironment | None = None) -> BenchOptions:
    """Read and check the options; ends the process with one line and exit code 2 on an error.

    ``place`` is this rank's place, or None if the process launches the ranks.
    """
    parser = build_parser()
    given = vars(parser.parse_args(list(argv)))
    options = BenchOptions(**given_fields(given, BenchOptions))
    try:
        if place is not None:
            check_world_size(given.get("ranks"), place)
            options = replace(options, ranks=place.size)
        local_ranks = options.ranks if place is None else place.local_size
        options = _resolve(options, local_ranks)
        if checks_outputs(place):
            _check_outputs(options)
            if "hooks" in options.parts and options.device != "cuda":
                _check_memory(options, local_ranks)
    except OptionError as error:
        parser.error(str(error))
    return options


def _resolve(options: BenchOptions, local_ranks: int) -> BenchOptions:
    check_device(options, local_ranks)
    parts = options.parts
    if options.ranks == 1 and not set(parts) - set(_OF_SEVERAL):
        raise OptionError(
            f"argument --parts: {' and '.join(parts)} need{'s' * (len(parts) == 1)} "
            "two or more ranks; give --ranks 2, or start bench by torchrun"
        )
    with of_option("--model"):
        if options.model is None:
            subject = Subject(Model(options.elements))
        else:
            subject = model_of_factory(options.model, None)
    source = "" if subject.name is None else f" of {subject.name}"
    return replace(
        options,
        shapes=tuple(each.shape for each in subject.model.listed() if each.numel),
        description=f"{format_count(subject.model.elements)} elements{source}",
        hooks=_hooks(options.hooks),
        threads=options.threads or max(1, available_cores() // local_ranks),
    )


def _hooks(texts: Sequence[str]) -> tuple[str, ...]:
    for text in texts:
        if is_no_hook(text):
            raise OptionError(
                f"argument --hooks: {NO_HOOK} names no hook; bench always measures a step without "
                "one"
            )
        with of_option("--hooks"):
            check_hook(text)
        if not is_file_reference(text) and getattr(parse_hook(text), "chooses", False):
            raise OptionError(
                f"argument --hooks: {text} chooses one of several hooks in the first steps of a "
                "training; name the hooks"
            )
    return tuple(dict.fromkeys([BASELINE, *texts]))


def _check_outputs(options: BenchOptions) -> None:
    if options.out is not None:
        with of_option("--out"):
            check_file(options.out)
    if options.plot is not None:
        with of_option("--plot"):
            check_picture(options.plot)
        if options.out == options.plot:
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
