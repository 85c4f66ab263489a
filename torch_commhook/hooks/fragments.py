"""The fragments of a model, which :class:`local_sgd` exchanges one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The first number in a parameter's name is that of a repeated layer, as in ``layers.3.weight``.
_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)\.")


def fragments_of(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """The fragment that each parameter of a model belongs to.

    Repeated layers are dealt out in turn: fragment p has layers p, p + ``count``, p + 2 ``count``
    and so on, as in Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512). Layers of several
    lists are numbered on, list by list in the order of their names. Each module outside of layers
    goes to the fragment that has the fewest elements so far, the largest module first. With fewer
    layers than fragments, layers are dealt out as those modules are; with fewer layers and modules
    than fragments, so are single parameters. The order of ``sizes`` does not matter.

    Args:
        sizes: elements of each parameter, by its name.
        count: of fragments.

    Returns:
        Numbers from 0 to below ``count``, each at least once, by the parameters' names.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if count > len(sizes):
        raise ValueError(
            f"local_sgd: fragments must be at most {len(sizes)}, the model's parameters, got "
            f"{count}"
        )
    layers: dict[tuple[str, int], list[str]] = {}
    modules: dict[str, list[str]] = {}
    for name in sorted(sizes):
        found = _LAYER.match(name)
        if found is not None:
            layers.setdefault((found[1], int(found[2])), []).append(name)
        else:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    in_turn = [names for _, names in sorted(layers.items())]
    by_size = list(modules.values())
    if len(in_turn) < count:
        by_size, in_turn = in_turn + by_size, []
        if len(by_size) < count:
            by_size = [[name] for name in sorted(sizes)]
    fragments = [in_turn[first::count] for first in range(count)]
    elements = [sum(sizes[name] for names in each for name in names) for each in fragments]
    by_size.sort(key=lambda names: -sum(sizes[name] for name in names))
    for names in by_size:
        smallest = min(range(count), key=lambda number: (elements[number], len(fragments[number])))
        fragments[smallest].append(names)
        elements[smallest] += sum(sizes[name] for name in names)
    return {
        name: number for number, each in enumerate(fragments) for names in each for name in names
    }
