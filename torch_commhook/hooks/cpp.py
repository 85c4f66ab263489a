"""Communication hooks in C++."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook import _C
from torch_commhook.buckets.grad_bucket import GradBucket
from torch_commhook.collectives.gloo_groups import is_seen_by_cpp
from torch_commhook.hooks.base import Hook
from torch_commhook.metrics import note_collective
from torch_commhook.spans import current_spans
from torch_commhook.wording import check_type


class cpp(Hook):  # noqa: N801 (a hook is written as it is called)
    """A hook that is written in C++ and registered by name.

    In eager code ``attach`` runs it without Python for each bucket, on DDP's C++ reducer and on a
    plain module, unless other hooks are registered around it. Under compiled autograd it interrupts
    the compiled graph once, at the end of backward. The library has two:

    ``cpp("allreduce")``
        as :class:`allreduce`.
    ``cpp("cast", dtype=torch.bfloat16)``
        as :class:`cast` among fewer than 8 ranks. It sums in ``dtype`` at any number of ranks, so
        its error grows with them.

    :func:`torch_commhook.load_cpp_hooks` loads others.

    Args:
        name: the hook's name.
        process_group: the ranks to average over; see :class:`Hook`.
        options: the hook's options, checked against its registration.

    Raises:
        ValueError: there is no such hook, or an option breaks the hook's own rule.
        TypeError: an option is unknown, missing, or of another type.
        RuntimeError: the hook's constructor threw it, when the hook first ran.

    Example:
        >>> gradients = [[torch.tensor([1.0, 2.0, 3.0])], [torch.tensor([3.0, 2.0, 1.0])]]
        >>> found = simulate(hooks.cpp("cast", dtype=torch.float16), gradients)
        >>> found.result, found.wire_bytes
        ([tensor([2., 2., 2.])], 6)
    """

    def __init__(
        self, name: str, /, *, process_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(process_group)
        check_type("cpp: name", name, "a str", str)
        self.native = _C.CppHook(name, options)

    def check_ranks(self, group: dist.ProcessGroup) -> None:
        for own in self.own_groups() or [group]:  # a step reports a group without this rank
            self._check_is_seen(own)

    def _check_is_seen(self, group: dist.ProcessGroup) -> None:
        if not is_seen_by_cpp(group):
            raise ValueError(
                f"cpp: hook '{self}' would not average over {_C.type_name(group)}, because Python "
                "overrides size() and C++ does not see it; use a hook in Python, such as "
                "allreduce()"
            )

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        group = self.group(bucket)
        self._check_is_seen(group)
        future, bytes_sent = self.native.start(bucket, group)
        if bytes_sent is not None:
            note_collective(bytes_sent)
        spans = current_spans()
        if spans is not None:
            spans.has_wire = True  # recorded in C++
        return future

    def result_dtype(self, bucket: GradBucket) -> torch.dtype:
        return self.native.result_dtype(bucket, self.group(bucket))

    def __repr__(self) -> str:
        return self.native.name
