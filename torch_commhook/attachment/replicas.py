"""Compares what all replicas of a model must share, and names the ranks that differ.

Every ``every`` steps of the optimizer each rank adds up the bits of its parameters and sends one
number of 8 bytes to the others. The numbers travel while the next step computes. Only if they
differ do the ranks send a number for each parameter, and see which rank differs from most, and
where. The sum of a tensor's bits, as integers of 8 bytes, changes with each flipped bit.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from torch_commhook import _C, collectives
from torch_commhook.attachment.road import add_watch, first_road, remove_watch, road_in_use
from torch_commhook.collectives.agreement import gather_values, packed, unpacked
from torch_commhook.collectives.gloo_groups import group_ranks, resolve_group
from torch_commhook.elastic.joining import StateChunks
from torch_commhook.step.bucket_hooks import is_in_backward
from torch_commhook.wording import check_type, pluralize

_log = logging.getLogger(__name__)
_ACTIONS = ("raise", "warn", "repair")
_WORD = 8
_ALL_BITS = (1 << 64) - 1
#: Odd, so that the place of a tensor among the others counts.
_FACTOR = 0x9E3779B97F4A7C15


class ReplicasDifferError(RuntimeError):
    """Replicas of a model are not the same.

    Attributes:
        step: the number of the optimizer's steps after which they were compared.
        names: the parameters and buffers that differ, in the model's order.
        ranks: the ranks that differ from most others, in the default group; all ranks if no value
            is that of most.

    Example:
        >>> try:
        ...     raise ReplicasDifferError("rank 3 differs", 200, ["weight"], [3])
        ... except RuntimeError as error:
        ...     print(error, error.step, error.names, error.ranks)
        rank 3 differs 200 ['weight'] [3]
    """

    def __init__(self, text: str, step: int, names: list[str], ranks: list[int]) -> None:
        super().__init__(text)
        self.step = step
        self.names = names
        self.ranks = ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.step, self.names, self.ranks)


def watch_replicas(
    model: nn.Module,
    *,
    every: int = 100,
    on_difference: str = "raise",
    buffers: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> ReplicaWatch:
    """Compare a model's replicas after the first and then every ``every``-th step of its optimizer.

    It needs no hook, and finds all that makes replicas differ: a flipped bit in memory or on the
    wire, a DDP that was bypassed (a loss of ``model.module``), random numbers that differ, another
    rank's old checkpoint. A comparison ends in the next step of the optimizer, so that no rank
    waits for its messages. All ranks call this at the same point, and their optimizers take equally
    many steps: not inside ``join()``.

    The step of an optimizer counts if it has the model's first trained parameter. Steps inside
    ``backward()`` do not count; call :meth:`ReplicaWatch.check` yourself then.

    Args:
        model: a module, DDP, or model with ``fully_shard`` whose parameters are replicated along a
            dimension of their mesh. Only a weak reference is kept.
        every: the number of steps from one comparison to the next, at least 1.
        on_difference: what follows a difference: ``"raise"`` a :class:`ReplicasDifferError` on all
            ranks; ``"warn"`` in the log; or ``"repair"``: most ranks' parameters, buffers and
            states of the optimizers overwrite those of the other ranks, which the log names. If no
            value is that of most ranks, this raises the error.
        buffers: also compare buffers. Those of BatchNorm differ between steps, unless it is
            SyncBatchNorm.
        process_group: the ranks with replicas of parameters that are no DTensors; None for the
            default group.

    Returns:
        The watch. It continues without a reference to it, until :meth:`ReplicaWatch.remove`.

    Raises:
        TypeError, ValueError: an argument is not as above; no parameter has a replica; ``"repair"``
            for parameters that are DTensors; or the model's hook keeps ranks apart
            (``local_sgd``), or was attached with ``elastic``.

    Example:
        >>> def train(rank):
        ...     model = torch.nn.Linear(2, 2, bias=False)
        ...     torch.nn.init.constant_(model.weight, 1.0 if rank < 2 else 2.0)
        ...     watch = watch_replicas(model)
        ...     try:
        ...         watch.check()
        ...     except ReplicasDifferError as error:
        ...         return error.ranks, error.names
        ...     finally:
        ...         watch.remove()
        >>> run_ranks(train, 3)[0]
        ([2], ['weight'])
    """
    return ReplicaWatch(model, every, on_difference, buffers, process_group)


class _Compared(NamedTuple):
    """A comparison under way in one group."""

    step: int
    group: dist.ProcessGroup
    digests: dict[str, int]
    received: torch.futures.Future[Tensor]


class ReplicaWatch:
    """Compares a model's replicas, as :func:`watch_replicas` returns it.

    Attributes:
        steps: the number of the optimizer's steps since the watch began.
        checked: after how many of these steps the last comparison that has ended was; None before.

    Example:
        >>> def train(rank):
        ...     model = torch.nn.Linear(2, 2)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     attach(model, hooks.allreduce())
        ...     with watch_replicas(model, every=2) as watch:
        ...         for _ in range(5):
        ...             model(torch.ones(2)).sum().backward()
        ...             optimizer.step()
        ...     return watch.steps, watch.checked
        >>> run_ranks(train, 2)
        [(5, 4), (5, 4)]
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        on_difference: str,
        buffers: bool,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"watch_replicas: model must be a torch.nn.Module, got {_C.type_name(model)}"
            )
        check_type("watch_replicas: every", every, "an int", int)
        if every < 1:
            raise ValueError(f"watch_replicas: every must be at least 1, got {every}")
        if on_difference not in _ACTIONS:
            raise ValueError(
                f"watch_replicas: on_difference must be one of {', '.join(map(repr, _ACTIONS))}, "
                f"got {on_difference!r}"
            )
        check_type("watch_replicas: buffers", buffers, "a bool", bool)
        self._model = weakref.ref(model)
        self._every = every
        self._on_difference = on_difference
        self._buffers = buffers
        self._group = resolve_group(process_group)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._under_way: list[_Compared] = []
        self.steps = 0
        self.checked: int | None = None
        self._check_model(model)
        add_watch(self)
        weakref.finalize(model, remove_watch, self).atexit = False

    def check(self) -> None:
        """Compare the replicas now. All ranks call this at the same point, outside of a step.

        Raises:
            ReplicasDifferError: they differ, and ``on_difference`` is ``"raise"``; or no value is
                that of most ranks, and it is ``"repair"``.
            RuntimeError: a rank did not come, or has ended; or has taken another number of steps.
        """
        self._end()
        self._begin()
        self._end()

    def remove(self) -> None:
        """End the watch. A comparison under way ends first; all ranks call this at the same point.

        Raises:
            ReplicasDifferError, RuntimeError: as :meth:`check`.
        """
        remove_watch(self)
        self._end()

    def __enter__(self) -> ReplicaWatch:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        if kind is None:
            self.remove()
        else:  # the others may not come
            self._under_way.clear()
            remove_watch(self)

    # ---- steps of optimizers ---------------------------------------------------------------------

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]
    ) -> None:
        """Take no notice: only whole steps count."""

    def count_optimizer_step(self, parameters: frozenset[int]) -> None:
        """Count a step of an optimizer with these parameters, by their ids."""
        self.steps += self._counts(parameters)

    def _counts(self, parameters: frozenset[int]) -> bool:
        """Whether a step of these parameters has that of the model that counts."""
        model = self._model()
        trained = [] if model is None else [p for p in model.parameters() if p.requires_grad]
        return bool(trained) and id(trained[0]) in parameters and not is_in_backward()

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, parameters: frozenset[int]
    ) -> None:
        """End a comparison, and begin the next one where it is due."""
        model = self._model()
        if model is None or all(id(each) not in parameters for each in model.parameters()):
            return
        self._optimizers.add(optimizer)
        if self._counts(parameters):
            self._end()
            if self.steps == 1 or self.steps % self._every == 0:
                self._begin()

    # ---- a comparison ----------------------------------------------------------------------------

    def _check_model(self, model: nn.Module) -> dict[dist.ProcessGroup, list[tuple[str, Tensor]]]:
        """The tensors to compare, by the group of the ranks that have them too."""
        first = first_road(model)
        attached = None if first is None else road_in_use(first).attached
        if attached is not None and attached.keeps_ranks_apart:
            raise ValueError(
                f"watch_replicas: hook '{attached.name}' keeps the ranks' parameters apart for "
                "some steps"
            )
        if first is not None and road_in_use(first).elastic is not None:
            raise ValueError("watch_replicas: the model's hook was attached with elastic")
        named: list[tuple[str, Tensor]] = [*model.named_parameters()]
        named += model.named_buffers() if self._buffers else ()
        found: dict[dist.ProcessGroup, list[tuple[str, Tensor]]] = {}
        for name, tensor in named:
            for group in self._groups_of(tensor):
                found.setdefault(group, []).append((name, tensor))
        if not any(group.size() > 1 for group in found):
            raise ValueError(
                "watch_replicas: no parameter has a replica: there is one rank, or all parameters "
                "are sharded along each dimension of their mesh"
            )
        if self._on_difference == "repair" and any(hasattr(t, "device_mesh") for _, t in named):
            raise ValueError("watch_replicas: DTensors can't be repaired; use 'raise' or 'warn'")
        return found

    def _groups_of(self, tensor: Any) -> Iterator[dist.ProcessGroup]:
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            yield self._group
            return
        for number, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                yield mesh.get_group(number)

    def _begin(self) -> None:
        """Send this rank's number to the others."""
        model = self._model()
        if model is None:
            return
        for group, named in self._check_model(model).items():
            if group.size() == 1:
                continue
            digests = dict(
                zip((name for name, _ in named), digests_of([t for _, t in named]), strict=True)
            )
            numbers = [_signed(_total(digests.values())), self.steps]
            device = distributed_c10d._get_object_coll_device(group)
            own = torch.tensor(numbers, dtype=torch.int64, device=device)
            received = collectives.all_gather(own, group=group)
            self._under_way.append(_Compared(self.steps, group, digests, received))

    def _end(self) -> None:
        """End the comparison under way, if there is one."""
        under_way, self._under_way = self._under_way, []
        for compared in under_way:
            every = compared.received.wait().tolist()
            steps = [step for _, step in every]
            if len(set(steps)) > 1:
                raise RuntimeError(
                    "watch_replicas: the ranks must take equally many steps of the optimizer; they "
                    f"have taken {steps}"
                )
            if len({digest for digest, _ in every}) > 1:
                self._handle(compared)
        if under_way:
            self.checked = under_way[0].step

    def _handle(self, compared: _Compared) -> None:
        """Find out which ranks differ, and where; then do as ``on_difference`` says."""
        every: list[dict[str, int]] = gather_values(compared.digests, compared.group) or []
        names = [name for name in every[0] if len({each.get(name) for each in every}) > 1]
        names += sorted({name for each in every for name in each} - every[0].keys())
        ranks = group_ranks(compared.group) or list(range(len(every)))
        values = [tuple(each.get(name) for name in names) for each in every]
        common, count = Counter(values).most_common(1)[0]
        is_known = 2 * count > len(values)
        wrong = [place for place, value in enumerate(values) if not is_known or value != common]
        error = ReplicasDifferError(
            _text(compared.step, names, [ranks[place] for place in wrong], is_known=is_known),
            compared.step,
            names,
            [ranks[place] for place in wrong],
        )
        repairs = self._on_difference == "repair"
        if self._on_difference == "raise" or (repairs and not is_known):
            raise error
        for each in self._optimizers if repairs else ():
            if type(each).state_dict is not torch.optim.Optimizer.state_dict:
                raise TypeError(
                    f"watch_replicas: the state of {type(each).__name__} can't be repaired, since "
                    "each rank may have its own"
                ) from error
        _log.warning("%s", error)
        if repairs:
            self._repair(compared.group, values.index(common), wrong)

    def _repair(self, group: dist.ProcessGroup, source: int, wrong: Sequence[int]) -> None:
        """Overwrite the state of the ranks at these places of the group by that of another one."""
        model = self._model()
        assert model is not None
        rank, parameters = group.rank(), list(model.parameters())
        chunks = StateChunks(parameters, list(self._optimizers))
        for index in range(len(parameters)):  # one by one, to need little memory
            found = _broadcast(chunks.whole([index]) if rank == source else None, source, group)
            if rank in wrong:
                chunks.put(found)
        rest = (chunks.others(), dict(model.named_buffers())) if rank == source else None
        others, buffers = _broadcast(rest, source, group)
        if rank in wrong:
            chunks.put_others(others)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])


def _broadcast(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """A plain value of one rank, on all."""
    device = distributed_c10d._get_object_coll_device(group)
    sent = packed(value).to(device) if group.rank() == source else None
    numel = 0 if sent is None else sent.numel()
    length = torch.tensor([numel], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=source)
    if sent is None:
        sent = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(sent, group=group, group_src=source)
    return unpacked(sent.cpu())


def _text(step: int, names: list[str], ranks: list[int], *, is_known: bool) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    where = f"after {pluralize(step, 'step')} of the optimizer"
    if not is_known:
        return (
            f"torch_commhook: {where} the ranks {', '.join(map(str, ranks))} have different values "
            f"of '{names[0]}'{more}, and none is that of most ranks"
        )
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
    return f"torch_commhook: {where} {who} other values of '{names[0]}'{more} than most ranks"


# ---- the sum of bits -----------------------------------------------------------------------------


@torch.no_grad()
def digests_of(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of each tensor's bits, as integers of 8 bytes, modulo 2 ** 64.

    Of a DTensor or another subclass it counts the tensors inside, of this rank.
    """
    parts: list[list[Tensor]] = [list(_plain(tensor)) for tensor in tensors]
    sums = {id(each): _sum_of_bits(each) for part in parts for each in part}
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in sums.values():
        by_device.setdefault(each.device, []).append(each)
    numbers: dict[int, int] = {}
    for found in by_device.values():  # one copy from each device
        numbers |= zip(map(id, found), torch.stack(found).tolist(), strict=True)
    return [_total(numbers[id(sums[id(each)])] for each in part) for part in parts]


def _plain(tensor: Any) -> Iterator[Tensor]:
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is None:
        yield tensor.detach()
        return
    for name in inner()[0]:
        value = getattr(tensor, name)
        if isinstance(value, Tensor):  # newer DTensors also list their mesh
            yield from _plain(value)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum as one int64 on the tensor's device."""
    data = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = data.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    length = flat.numel() // _WORD * _WORD
    total = flat[:length].view(torch.int64).sum()
    for place, byte in enumerate(flat[length:]):
        total += byte.to(torch.int64) << 8 * place
    return total


def _total(numbers: Any) -> int:
    total = 0
    for number in numbers:
        total = (total * _FACTOR + number) & _ALL_BITS
    return total


def _signed(number: int) -> int:
    """A number of 64 bits as int64 has it."""
    return number - (1 << 64) if number >> 63 else number
