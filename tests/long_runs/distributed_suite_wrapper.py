"""What ``distributed_suite.py`` changes for its suite "wrapper": every group is a wrapped one.

Each group that ``torch.distributed`` makes, the default one too, is replaced by a
``WrapperProcessGroup`` around it, before anybody else sees it. ``torch.distributed`` knows it by
the name, backend and ranks of the group in it.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_commhook.process_group import WrapperProcessGroup

#: Cases that may pass plain and fail with wrapped groups, with the reason.
KNOWN: dict[str, str] = {
    "test_ddp_logging_data_cpu": (
        "asks DDP's statistics for the name that a group's C++ gives: a wrapper's is `custom`"
    ),
}


class CountingGroup(WrapperProcessGroup):
    """A wrapper that counts what passes through it."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        super().__init__(parent)
        self.calls: Counter[str] = Counter()

    def change_arguments(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls[operation] += 1
        return arguments


class Wrapping:
    """Wraps each process group of this process, and counts.

    Attributes:
        calls: of collectives, for each group that was wrapped.
    """

    def __init__(self) -> None:
        self.calls: list[Counter[str]] = []

    def install(self) -> None:
        """Replace the function that makes groups by one that wraps what it has made."""
        make = distributed_c10d._new_process_group_helper

        @functools.wraps(make)
        def make_and_wrap(*args: Any, **options: Any) -> Any:
            group, store = make(*args, **options)
            if isinstance(group, dist.ProcessGroup) and not isinstance(group, CountingGroup):
                group = self._wrap(group)
            return group, store

        distributed_c10d._new_process_group_helper = make_and_wrap

    def _wrap(self, group: dist.ProcessGroup) -> CountingGroup:
        wrapper = CountingGroup(group)
        self.calls.append(wrapper.calls)
        name = group.group_name
        wrapper._set_group_name(name)
        wrapper._set_group_desc(group.group_desc)
        distributed_c10d._unregister_process_group(name)
        distributed_c10d._register_process_group(name, wrapper)
        world: Any = distributed_c10d._world
        for known in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
        ):
            if group in known:
                known[wrapper] = known.pop(group)
        for groups in world.tags_to_pg.values():
            groups[:] = [wrapper if each is group else each for each in groups]
        return wrapper

    def record(self) -> dict[str, Any]:
        """What happened, for the table."""
        return {
            "groups": len(self.calls),
            "calls": dict(sorted(sum(self.calls, Counter()).items())),
        }
