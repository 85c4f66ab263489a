"""Additional connections between two ranks, for large messages of a step's groups."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.exchange import exchanges, has_few_ranks
from torch_commhook.collectives.gloo_groups import group_name, use_more_connections
from torch_commhook.step.link import MANY, Link, measure_link

#: Each consists of two Gloo groups, with their threads and files.
MOST = 16

_log = logging.getLogger(__name__)


def check_connections(count: object) -> None:
    """Check a number of connections.

    Args:
        count: the user's argument; None is valid.

    Raises:
        TypeError, ValueError: it is not an int, or not in [1, :data:`MOST`].
    """
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"attach: connections must be an int or None, got {_C.type_name(count)}")
    if not 1 <= count <= MOST:
        raise ValueError(f"attach: connections must be 1 to {MOST}, got {count}")


@dataclass
class _OfGroup:
    """The connections of one group.

    Attributes:
        pairs: groups for messages to higher ranks and to lower ranks, beside the group itself.
        made: the number ever made: a store keeps the addresses of those that are gone.
        link: the measured link, or None.
    """

    pairs: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = field(default_factory=list)
    made: int = 0
    link: Link | None = None


class MoreConnections:
    """Additional connections of some groups.

    Attributes:
        count: the number of connections for large messages; None to choose the fastest.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _OfGroup] = (
            weakref.WeakKeyDictionary()
        )

    def link(self, group: dist.ProcessGroup) -> Link | None:
        """The measured link of a group, or None."""
        found = self._of_groups.get(group)
        return None if found is None else found.link

    def connect(
        self,
        group: dist.ProcessGroup,
        make: Callable[[str], dist.ProcessGroup],
        drop: Callable[[Collection[dist.ProcessGroup]], object],
    ) -> None:
        """Give large messages of a group :attr:`count` connections. All of its ranks call this.

        Args:
            group: a Gloo group. Does nothing for a group whose ranks exchange no messages.
            make: makes a group over the same ranks, from a suffix for this group's name.
            drop: destroys groups that ``make`` has made.
        """
        if not exchanges(group):
            return
        found = self._of_groups.setdefault(group, _OfGroup())
        if self.count is not None:
            _take(group, found, self.count, make)
        elif found.link is None:
            found.link = link = measure_link(group, lambda: _take(group, found, MANY, make))
            if link.rate is not None:
                _log.info("%s: %s", group_name(group), link)
            _take(group, found, link.connections, make)
            unused = found.pairs[link.connections - 1 :]
            if unused:
                del found.pairs[link.connections - 1 :]
                group.barrier().wait()  # ranks that still watch the old ones would count them lost
                drop([each for pair in unused for each in pair])


def _take(
    group: dist.ProcessGroup,
    found: _OfGroup,
    count: int,
    make: Callable[[str], dist.ProcessGroup],
) -> None:
    while len(found.pairs) < count - 1:
        found.made += 1
        ups = make(f"up{found.made + 1}")
        downs = make(f"down{found.made + 1}") if has_few_ranks(group) else ups
        found.pairs.append((ups, downs))
    use_more_connections(group, found.pairs[: count - 1])
