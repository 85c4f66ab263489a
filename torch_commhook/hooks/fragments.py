"""The fragments of a model that :class:`local_sgd` exchanges one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: The first number in a parameter's name is its layer's, as in ``layers.3.weight``.
_LAYER = re.compile(r"((?:[^.]+\.)*?)(\d+)\.")


def fragments_of(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Assign each parameter of a model to a fragment.

    Layers go to fragments in turn: fragment p has layers p, p + ``count``, p + 2 ``count`` and so
    on, as in Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512). The layers of several
    lists are numbered consecutively, in the order of the lists' names. Each module outside layers
    goes to the fragment with the fewest elements so far, the largest module first. If there are
    fewer layers than fragments, layers are assigned like these modules. If there are fewer layers
    and modules than fragments, so are single parameters. The order of ``sizes`` does not matter.

    Args:
        sizes: the number of elements of each parameter, by name.
        count: the number of fragments.

    Returns:
        The fragment's number, 0 to ``count - 1``, by parameter name. No fragment is empty.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if count > len(sizes):
        raise ValueError(
            f"local_sgd: fragments must be at most {len(sizes)}, the number of the model's "
            f"parameters, got {count}"
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
