"""Runs one rank of ``bench``: joins the others, and measures one part after another."""

from __future__ import annotations

import math
import os
import platform
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torch_commhook.cli.bench import tables
from torch_commhook.cli.bench.codecs import measure_codecs
from torch_commhook.cli.bench.collectives import measure_collectives
from torch_commhook.cli.bench.hooks import measure_hooks
from torch_commhook.cli.bench.link import measure_link_part
from torch_commhook.cli.bench.options import BenchOptions
from torch_commhook.cli.place import Place
from torch_commhook.cli.world import World, join_world
from torch_commhook.planning.link_file import LinkFile
from torch_commhook.planning.wire import Wire


def run_rank(options: BenchOptions, place: Place) -> None:
    """Measure all parts. Rank 0 prints, draws and writes the measurements."""
    world = join_world(options, place)
    found = LinkFile(
        ranks=world.size,
        backend=world.backend,
        device=world.device.type,
        machine=_machine(options),
    )
    say = _Printer(world, options)
    say(tables.heading(found, options.threads, torch.__version__))
    for part in options.parts:
        found = _with_part(part, found, world, options, say)
    if world.rank == 0:
        _write(found, options)
    dist.barrier()
    dist.destroy_process_group()


class _Printer:
    """Prints texts on rank 0, unless it will print JSON."""

    def __init__(self, world: World, options: BenchOptions) -> None:
        self._prints = world.rank == 0 and not options.json

    def __call__(self, text: str) -> None:
        if self._prints:
            print(f"{text}\n", flush=True)


def _with_part(
    part: str, found: LinkFile, world: World, options: BenchOptions, say: _Printer
) -> LinkFile:
    """Measure a part; returns ``found`` with its measurements."""
    device, seconds = world.device, options.seconds_of(part)
    if part == "link":
        if world.size == 1:
            say(tables.NO_LINK)
            return found
        measured = measure_link_part(Wire(), seconds)
        say(tables.link_text(measured, world.size))
        return replace(found, link=measured.figures.link, messages=measured.messages)
    if part == "collectives":
        if world.size == 1:
            return found
        collectives = measure_collectives(device, seconds)
        say(tables.collectives_text(collectives))
        return replace(found, collectives=collectives)
    if part == "codecs":
        elements = sum(map(math.prod, options.shapes))
        codecs = measure_codecs(device, elements, seconds)
        say(tables.codecs_text(codecs))
        return replace(found, codecs=codecs)
    hooks = measure_hooks(options.hooks, options.shapes, device, seconds)
    say(tables.hooks_text(hooks, options.description))
    return replace(found, hooks=hooks)


def _machine(options: BenchOptions) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": options.threads,
        "gradients": options.description,
        "elements": sum(map(math.prod, options.shapes)),
    }


def _write(found: LinkFile, options: BenchOptions) -> None:
    for path in (options.out, options.plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if options.out is not None:
        found.write(options.out)
    if options.plot is not None:
        from torch_commhook.cli.bench.plot import draw

        draw(options.plot, found)
    if options.json:
        print(found.text(), end="", flush=True)
