"""Additional connections between two ranks, for large messages of a step's groups."""

from __future__ import annotations

import logging
import weakref

import torch.distributed as dist

from torch_commhook import _C
from torch_commhook.collectives.exchange import FEW_RANKS
from torch_commhook.collectives.gloo_groups import group_name
from torch_commhook.step.connected_group import ConnectedGroup
from torch_commhook.step.link import MANY, Link, measure_link

#: The most that help on any link known.
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


class MoreConnections:
    """Additional connections of some groups.

    Attributes:
        count: the number of connections for large messages; None to choose the fastest.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link] = (
            weakref.WeakKeyDictionary()
        )

    def link(self, group: dist.ProcessGroup) -> Link | None:
        """The measured link of a group, or None."""
        return self._links.get(group)

    def connect(self, own: ConnectedGroup, store: dist.Store) -> None:
        """Give large messages of a group :attr:`count` connections. All of its ranks call this.

        Args:
            own: the group. Among more than 16 ranks, only a count that was given is used.
            store: a store in which nobody else uses the group's name.
        """
        group = own.group

        def use(count: int) -> None:
            own.use_rails(
                count, dist.PrefixStore(f"connections/{group_name(group)}/{count}", store)
            )

        if self.count is not None:
            use(self.count)
        elif group not in self._links and 1 < group.size() <= FEW_RANKS:
            self._links[group] = link = measure_link(group, lambda: use(MANY))
            if link.rate is not None:
                _log.info("%s: %s", group_name(group), link)
            use(link.connections)
