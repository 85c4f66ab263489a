"""Settings of a training that continues when ranks are lost."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torch_commhook import _C


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Settings for :func:`attach`: training continues when ranks are lost, and admits new ranks.

    See ``docs/elastic.md``.

    Attributes:
        min_ranks: the smallest number of ranks that trains. Fewer ranks wait for ``grace``, and
            then raise :class:`TooFewRanksError`.
        name: the training's name in the store, such as ``"first-run"``. All processes that give one
            name and one store train together, so each training needs its own.
        grace: seconds within which the ranks agree on who is left. A rank is lost when its process
            ends, or when it shows no sign of life for half of this time.
        state: objects that a new rank receives beside the model's parameters and buffers and the
            hook's shared memory: optimizers, schedulers, any objects with ``state_dict()`` and
            ``load_state_dict()``. The same on all ranks, in the same order.
        store: where the ranks meet: ``"host:port"`` or, with an IPv6 address, ``"[::1]:29400"``, as
            of ``python -m torch_commhook store``; or a store of ``torch.distributed``. It must live
            as long as the training. None means ``MASTER_ADDR`` and ``MASTER_PORT``, where
            ``torchrun`` runs one.
        ranks: the number of ranks that begins; None for those that arrive within ``grace`` of one
            another.
        timeout: seconds that a new rank waits for admission, and that a collective may take.
        straggler: a rank is slow in a step if its computing time exceeds this many times the median
            of all ranks; above 1. The log and :meth:`HookHandle.stats` name a rank that stays slow.
            None compares nothing.
        straggler_steps: a rank is named after this many consecutive slow steps; with ``local_sgd``,
            rounds.
        leave_out_stragglers: whether the others continue without such a rank, if ``min_ranks`` are
            left. It raises :class:`LeftOutError`.

    Raises:
        TypeError, ValueError: an attribute has a wrong type or value.

    Example:
        >>> settings = Elastic(min_ranks=6, name="first-run", grace=5.0, straggler=2.0)
        >>> settings.min_ranks, settings.timeout
        (6, 1800.0)
    """

    min_ranks: int
    name: str
    grace: float = 10.0
    state: Sequence[Any] = ()
    store: str | dist.Store | None = None
    ranks: int | None = None
    timeout: float = 1800.0
    straggler: float | None = None
    straggler_steps: int = 10
    leave_out_stragglers: bool = False

    def __post_init__(self) -> None:
        for name in ("min_ranks", "ranks", "straggler_steps"):
            value = getattr(self, name)
            if name == "ranks" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Elastic: {name} must be an int, got {_C.type_name(value)}")
            if value < 1:
                raise ValueError(f"Elastic: {name} must be at least 1, got {value}")
        if self.ranks is not None and self.ranks < self.min_ranks:
            raise ValueError(
                f"Elastic: ranks must be at least min_ranks, {self.min_ranks}, got {self.ranks}"
            )
        for name in ("grace", "timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Elastic: {name} must be a number of s, got {_C.type_name(value)}")
            if not 0 < value <= 1e6:
                raise ValueError(f"Elastic: {name} must be a positive number of s, got {value}")
        self._check_straggler()
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"Elastic: name must be a text that only this training has, got {self.name!r}"
            )
        if self.store is not None and not isinstance(self.store, (str, dist.Store)):
            raise TypeError(
                "Elastic: store must be 'host:port', a store of torch.distributed or None, got "
                f"{_C.type_name(self.store)}"
            )
        if isinstance(self.store, str):
            host_and_port(self.store)
        if isinstance(self.state, (str, bytes)) or not isinstance(self.state, Sequence):
            raise TypeError(f"Elastic: state must be a list, got {_C.type_name(self.state)}")
        for number, each in enumerate(self.state):
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(each, method, None)):
                    raise TypeError(
                        f"Elastic: state[{number}] must have {method}(), got {_C.type_name(each)}"
                    )

    def _check_straggler(self) -> None:
        factor = self.straggler
        if isinstance(factor, bool) or not isinstance(factor, (int, float, type(None))):
            raise TypeError(
                f"Elastic: straggler must be a number or None, got {_C.type_name(factor)}"
            )
        if factor is not None and not 1 < factor <= 1e6:
            raise ValueError(f"Elastic: straggler must be a number above 1, got {factor}")
        if not isinstance(self.leave_out_stragglers, bool):
            raise TypeError(
                "Elastic: leave_out_stragglers must be a bool, got "
                f"{_C.type_name(self.leave_out_stragglers)}"
            )
        if self.leave_out_stragglers and factor is None:
            raise ValueError("Elastic: leave_out_stragglers needs straggler, got None")


def host_and_port(store: str) -> tuple[str, int]:
    """The host and port of a store's text.

    Args:
        store: ``host:port``. An IPv6 address may be in brackets: ``[::1]:29400``.

    Raises:
        ValueError: the text is not ``host:port``.
    """
    host, _, port = store.rpartition(":")
    is_v6 = ":" in host
    if host.startswith("[") and host.endswith("]"):
        host, is_v6 = host[1:-1], True
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"Elastic: store must be 'host:port', got {store!r}")
    if is_v6:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(
                "Elastic: store must be 'host:port', or '[address]:port' with an IPv6 address, "
                f"got {store!r}"
            ) from None
    return host, int(port)
