"""Collectives in eager code: in places of an order, or one by one, unchecked and on any thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from torch_commhook import _C
from torch_commhook.collectives.futures import is_capturing, is_driven_by_wait, set_error
from torch_commhook.collectives.gloo_groups import (
    backend_of,
    exchanges,
    gathers_flat,
    group_and_inner,
    group_timeout,
    has_places,
    is_alone,
    is_gloo,
    tells_its_rank,
)
from torch_commhook.metrics import tensor_bytes
from torch_commhook.spans import on_the_wire

# ---- collectives with places in an order: any number of them at once, started in any order -------
#
# On the CPU, and for tensors on a device that pass through memory of the host, hooks' collectives
# go over the library's transport. Ranks take places in an order, and
# any number of places is under way at the same time (``csrc/runtime/wire/exchanges.h``). Nobody
# asks for a message: one that comes early is kept, up to 32 MiB from each rank. Up to 16 ranks send
# each other messages of the needed length directly. So each stage takes half a round trip, and a
# step of many buckets takes as many as one bucket. A sum is one stage if each rank gets the whole
# tensors of all ranks, or two: each rank adds up one segment, in the order of the ranks. More ranks
# pass sums and gathered messages on to a few others (``csrc/runtime/wire/patterns.h``).
#
# Traced code calls the same code through operators (``traced.py``), so that ranks in different
# modes can take the same step. First and second stages, the ends of steps and the comparisons of
# settings have orders of their own, because modes differ in when they take a place. Sums of more
# than 4 MiB are collectives of the group, unless they are second stages.
#
# - ``Place.expect`` gives memory to the messages of a place before this rank's are there, so that
#   large ones need not wait and none is copied.
# - Of a group of Gloo that a user gives, places belong to a channel of their own, over the same
#   ranks.
# - A rank removes its address in a model's group from the store when it has heard from all ranks.


#: As ``kFewRanks`` in ``csrc/runtime/wire/patterns.h``, and so are the numbers below.
FEW_RANKS = 16
#: Among few ranks: the most bytes that a rank receives at once to sum a whole tensor itself. For
#: more, each rank sums a segment and sends it to all.
_ONE_ROUND, _ONE_ROUND_OF_TWO = 64 * 1024, 4 << 20
#: Among many: the most bytes for each rank for which few rounds matter more than few bytes.
FEW_ROUNDS = 16 * 1024
#: From this number of bytes on, sums of a user's group are those of its own backend.
_MOST_SUMMED = 4 << 20
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: The orders of a group's places: of first and of second stages, of the ends of steps, and of
#: comparisons of settings. Ranks that run in different modes take the places of one after those of
#: another, or between them.
FIRST, SECOND, STEP_END, COMPARISON = range(4)


class Place:
    """A position in an order of a group's collectives: one of the constants above.

    All ranks take their places in the same order. What is in them may start in any order and on any
    thread: a place does not reference the group.

    Attributes:
        form: what its messages are, such as a codec's name. If it is another on some rank, all
            ranks get an error.
    """

    def __init__(self, group: dist.ProcessGroup, order: int = FIRST) -> None:
        self.form = ""
        self._exchanges = backend_of(group).exchanges()
        self._timeout = group_timeout(group)
        self._number = self._exchanges.reserve(order)
        #: This process's, in the group.
        self.rank: int = group.rank()

    def expect(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Give memory to each rank's message, before this rank has its own messages.

        Args:
            stage: the stage of the :meth:`exchange` that follows, unless something fails.
            outputs: the outputs of that exchange, in the same memory. Nothing else may use it until
                that exchange has ended.
        """
        self._exchanges.expect(list(outputs), self._number, stage, self._timeout, self.form)

    def exchange(
        self, stage: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Send a message to each rank, and receive one from each; returns a Future of ``result``.

        Args:
            stage: 0 or 1, each once.
            inputs, outputs: the message to each rank, and memory for that from each: flat bytes.
        """
        self._keep(inputs[self.rank], outputs)
        given = list(inputs), list(outputs), result, self._number, stage, self._timeout, self.form
        _refuse_capture("exchange", result.device)
        with on_the_wire() as span:
            return span.until(self._exchanges.start(*given))

    def expect_gather(self, outputs: Sequence[Tensor]) -> None:
        """As :meth:`expect`, for the :meth:`gather` that follows."""
        if len(outputs) <= FEW_RANKS:
            self.expect(0, outputs)

    def gather(
        self, own: Tensor, outputs: Sequence[Tensor], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Send every rank this rank's message, and receive those of all; once in a place.

        Args:
            own: flat bytes.
            outputs: memory for the message from each rank, flat bytes.
            result: the Future's value.
        """
        if len(outputs) <= FEW_RANKS:
            return self.exchange(0, [own] * len(outputs), outputs, result)
        self._keep(own, outputs)
        given = list(outputs), result, self._number, self._timeout, self.form
        _refuse_capture("gather", result.device)
        with on_the_wire() as span:
            return span.until(self._exchanges.gather(*given))

    def reduce(
        self, tensor: Tensor, *, takes_maximum: bool = False
    ) -> torch.futures.Future[Tensor]:
        """Sum a contiguous tensor of numbers over the ranks, in place; once in a place.

        With ``takes_maximum`` it takes the maximum of each element. All ranks have the same bits.
        Returns a Future of the same tensor.
        """
        given = tensor.detach().view(-1), takes_maximum, tensor, self._number, self._timeout
        _refuse_capture("sum", tensor.device)
        with on_the_wire() as span:
            return span.until(self._exchanges.reduce(*given))

    def _keep(self, own: Tensor, outputs: Sequence[Tensor]) -> None:
        """Copy this rank's own message."""
        if own.data_ptr() != outputs[self.rank].data_ptr():
            outputs[self.rank].copy_(own)


def place_in(group: dist.ProcessGroup, order: int = FIRST, form: str = "") -> Place:
    """Take the next place in an order of a group's collectives."""
    around: Any = group
    place: Place = around._commhook_place(order) if has_places(group) else Place(group, order)
    place.form = form
    return place


def second_place(group: dist.ProcessGroup, device: torch.device) -> Place | None:
    """Take a second collective's place, before the first one is issued; None if it needs none."""
    if torch.compiler.is_dynamo_compiling() or not exchanges(group, device):
        return None
    return place_in(group, SECOND)


def _refuse_capture(method: str, device: torch.device) -> None:
    if is_capturing(device):
        raise RuntimeError(
            f"{method}: a CUDA graph cannot capture collectives of Gloo or commhook, which run on "
            "the host; use a process group of NCCL"
        )


# ---- sums ----------------------------------------------------------------------------------------


def sums_in_place(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether sums of a tensor use :meth:`Place.reduce`; the same on all ranks."""
    return (
        tensor.layout == torch.strided
        and tensor.dtype in _DTYPES
        and 0 < tensor_bytes(tensor) <= _MOST_SUMMED
        and exchanges(group, tensor.device)
    )


def is_gathered(nbytes: float, ranks: int) -> bool:
    """Whether each of few ranks receives the tensors of all, of this size each, to sum them."""
    return (ranks - 1) * nbytes <= _ONE_ROUND or (ranks == 2 and nbytes <= _ONE_ROUND_OF_TWO)


def bytes_of_sum(tensor: Tensor, rank: int, ranks: int) -> int:
    """The bytes that a rank sends, and receives, for :meth:`Place.reduce`."""
    nbytes, numel = tensor_bytes(tensor), tensor.numel()
    if ranks > FEW_RANKS or is_gathered(nbytes, ranks):
        return round(sum_bytes(nbytes, ranks))
    own = ((rank + 1) * numel // ranks - rank * numel // ranks) * tensor.element_size()
    return nbytes - own + own * (ranks - 1)


def sum_bytes(nbytes: float, ranks: int) -> float:
    """The mean of :func:`bytes_of_sum` over the ranks."""
    if ranks <= FEW_RANKS and is_gathered(nbytes, ranks):
        return nbytes * (ranks - 1)
    if ranks > FEW_RANKS and nbytes <= FEW_ROUNDS * ranks:
        return nbytes * math.ceil(math.log2(ranks))
    return 2 * nbytes * (ranks - 1) / ranks


# ---- futures of the Works that process groups return ---------------------------------------------


def issued(
    issue: Callable[[], Any], group: dist.ProcessGroup, method: str, result: Tensor
) -> torch.futures.Future[Tensor]:
    """Start a collective, and return a Future of ``result``, which it writes.

    Args:
        issue: starts it, and returns the group's Work.
        method: the group's method, for errors: those of :func:`future_of_work`.
    """
    where = f"{method} through {_C.type_name(group)}"
    future = issued_on_device(issue, group, method, result)
    if result.is_complex():  # and the sent tensor is not
        return future.then(lambda done: when_good(done, result))
    # A Work's own Future holds a list.
    return _C.cast_into(future, result, result.dtype, where)


def issued_on_device(
    issue: Callable[[], Any], group: dist.ProcessGroup, method: str, result: Tensor
) -> torch.futures.Future[Any]:
    """As :func:`issued`, with the value of the Work's Future, or ``result``.

    Raises a RuntimeError if a CUDA graph captures the current stream, and the group's collectives
    run on the host.
    """
    if is_gloo(group, result.device.type):
        _refuse_capture(method, result.device)
    with on_the_wire() as span:
        work = issue_unseen(issue, result.device)
        return span.until(_completion(work, group, method, result))


def issue_unseen(issue: Callable[[], Any], device: torch.device) -> Any:
    """Start a collective whose Future is waited for, not its Work; returns the Work.

    On the CPU, PyTorch's profiler does not see it. Gloo completes a Work's Future before it ends
    the Work's span. If the profile stops in between, PyTorch writes the end of the span to freed
    memory.
    """
    return _C.unseen(issue) if device.type == "cpu" else issue()


def _completion(
    work: Any, group: dist.ProcessGroup, method: str, result: Tensor
) -> torch.futures.Future[Any]:
    """A Work's Future, with correct waits of streams.

    The Future of a group that does not know devices, such as Gloo's, completes when the host has
    done its part, perhaps before copies to the device have ended. ``Work.wait`` synchronizes these,
    but blocks the thread. The same is done for a Future that completes only when its Work is waited
    for.
    """
    try:
        future = future_of_work(work, group, method)
    except NotImplementedError:  # by a Work in Python that can only be waited for
        pass
    else:
        # PyTorch's C++ between the caller and a Work in Python hides the class of its Future.
        all_tell_their_rank = all(map(tells_its_rank, group_and_inner(group)))
        is_complete_by_itself = all_tell_their_rank and not is_driven_by_wait(future)
        if is_complete_by_itself and (result.device.type == "cpu" or _C.has_devices(future)):
            return future
    try:
        work.wait()
    except Exception as error:
        failed: torch.futures.Future[Tensor] = torch.futures.Future()
        set_error(failed, error)
        return failed
    return _C.as_future(result, method)


def future_of_work(
    work: object, group: dist.ProcessGroup, method: str = "collective"
) -> torch.futures.Future[Any]:
    """The Future of a group's result; raises a TypeError if that is no Work, or has no Future."""
    if not isinstance(work, dist.Work):
        raise TypeError(
            f"{_C.type_name(group)}.{method} must return a torch.distributed.Work, "
            f"got {_C.type_name(work)}"
        )
    future = work.get_future()
    if not isinstance(future, torch._C.Future):
        raise TypeError(
            f"{_C.type_name(work)}.get_future must return a torch.futures.Future, "
            f"got {_C.type_name(future)}"
        )
    return future


def when_good(done: torch.futures.Future[Any], result: Tensor) -> Tensor:
    """``result``, if a collective succeeded; raises its error."""
    done.value()
    return result


# ---- issues collectives in eager code: unchecked, uncounted, on any thread -----------------------
#
# Over Gloo, collectives of tensors on the CPU have places.


# Its name changes with torch; the old one warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_ALL_GATHER, _ALL_TO_ALL = (
    new if hasattr(dist.ProcessGroup, new) else old
    for new, old in (
        ("all_gather_single", "_allgather_base"),
        ("all_to_all_single", "alltoall_base"),
    )
)


def is_exchanged(tensor: Tensor, group: dist.ProcessGroup, timeout: timedelta | None) -> bool:
    """Whether collectives exchange a tensor's values; the same on all ranks."""
    # Exchanges have the group's timeout.
    return timeout is None and exchanges(group, tensor.device)


def issue_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    place: Place | None = None,
) -> torch.futures.Future[Tensor]:
    """Sum a contiguous tensor over all ranks, in place; returns a Future of it.

    Args:
        timeout: the operation's timeout; None for the group's.
        place: its place; None for the next one, if it needs one.
    """
    if is_alone(group):
        return _C.as_future(tensor, "all_reduce")
    if place is not None or (timeout is None and sums_in_place(tensor, group)):
        return (place or place_in(group)).reduce(tensor)
    # Sums by default.
    options = _with_timeout(dist.AllreduceOptions(), timeout)
    return issued(lambda: group.allreduce([tensor], options), group, "allreduce", tensor)


def issue_all_gather(
    tensor: Tensor,
    out: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    place: Place | None = None,
) -> torch.futures.Future[Tensor]:
    """Gather the tensors of all ranks on every rank; returns a Future of ``out``.

    Args:
        tensor: contiguous, with the same shape on all ranks.
        out: contiguous, of shape ``(ranks, *tensor.shape)``. Written.
        timeout, place: as for :func:`issue_all_reduce`.
    """
    ranks = group.size()
    if ranks == 1:
        return _C.as_future(out.copy_(tensor.unsqueeze(0)), "all_gather")
    if is_exchanged(tensor, group, timeout):
        outputs = [as_bytes(each) for each in out.unbind()]
        place = place or place_in(group)
        place.form = str(tensor.dtype)
        return place.gather(as_bytes(tensor), outputs, out)
    flat = tensor.reshape(-1)
    options = _with_timeout(AllgatherOptions(), timeout)

    def issue() -> Any:
        if not gathers_flat(group, (_ALL_GATHER, "_allgather_base")):
            return group.allgather([list(out.flatten(1).unbind())], [flat], options)
        if timeout is None:
            return _all_gather(out.view(-1), flat, group=group, async_op=True)
        return getattr(group, _ALL_GATHER)(out.view(-1), flat, options)

    # The value of its Future differs between backends: one tensor, or one for each rank.
    done = issued_on_device(issue, group, "all_gather", out)
    return done.then(lambda done: when_good(done, out))


def issue_all_to_all(
    tensor: Tensor,
    sends: Sequence[int],
    gets: Sequence[int],
    out: Tensor,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    place: Place | None = None,
    form: str = "",
) -> torch.futures.Future[Tensor]:
    """Send a piece of a tensor to each rank, and receive one from each; a Future of ``out``.

    Args:
        tensor: contiguous; split along its first dimension.
        sends, gets: the number of rows for each rank, and from each rank.
        out: contiguous, ``sum(gets)`` rows. Written.
        timeout, place: as for :func:`issue_all_reduce`.
        form: what the messages are, if they have a place; by default of the tensor's dtype.
    """
    if group.size() == 1:
        return _C.as_future(out.copy_(tensor), "all_to_all")
    if is_exchanged(tensor, group, timeout):
        inputs = [as_bytes(piece) for piece in tensor.split(list(sends))]
        outputs = [as_bytes(piece) for piece in out.split(list(gets))]
        place = place or place_in(group)
        place.form = form or str(tensor.dtype)
        return place.exchange(0, inputs, outputs, out)

    def issue() -> Any:
        tensors = as_real(out), as_real(tensor)
        if timeout is None:
            return dist.all_to_all_single(
                *tensors, list(gets), list(sends), group=group, async_op=True
            )
        options = _with_timeout(AllToAllOptions(), timeout)
        return getattr(group, _ALL_TO_ALL)(*tensors, list(gets), list(sends), options)

    return issued(issue, group, "all_to_all_single", out)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat bytes."""
    return as_real(tensor.detach()).reshape(-1).view(torch.uint8)


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs: not all backends support them."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _with_timeout(options: Any, timeout: timedelta | None) -> Any:
    if timeout is not None:
        options.timeout = timeout
    return options


# ---- the agreement of a group's ranks at the end of a step ---------------------------------------
#
# Each rank tells all others that its part succeeded, which takes half a round trip. A failed rank
# leaves the group, which ends the others' wait. The maps of used parameters follow only if each
# rank left some unused.


class StepEnd:
    """The end of one step, at which each rank sends a flag to all others.

    All ranks make theirs at the same point, after the end of the previous step.

    Args:
        group: one of the library's own groups, or one around it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._place = place_in(group, STEP_END) if exchanges(group) else None

    def any_rank(self, flag: bool = True) -> bool:
        """Wait until all ranks call this. Returns whether the flag is set on any of them.

        Raises:
            RuntimeError: a rank has left, or the group's timeout is over.
        """
        own = torch.tensor([flag], dtype=torch.uint8, device="cpu")
        return bool(begin_maximum(self.group, own, self._place)().any())


def all_alike(group: dist.ProcessGroup, own: bytes, place: Place | None = None) -> bool:
    """Whether all ranks have the same bytes, equally many. All call this at the same point.

    ``place`` and errors are those of :func:`begin_maximum`, for a group of any backend.
    """
    device = "cpu" if exchanges(group) else distributed_c10d._get_object_coll_device(group)
    digest = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    both = torch.cat([digest, 255 - digest])  # the maximum of the second half is the minimum
    return torch.equal(begin_maximum(group, both, place)(), both)


def agree_on_used(step_end: StepEnd, used: Tensor) -> None:
    """Wait until all ranks call this, and combine the parameters that they have used.

    Args:
        used: uint8, flat, with the same shape on all ranks: not 0 for each parameter that this rank
            has used. Becomes the maximum over the ranks.

    Raises:
        RuntimeError: a rank has left, or the group's timeout is over.
    """
    group = step_end.group
    if step_end.any_rank(bool(used.all())):
        used.fill_(1)
    else:
        used.copy_(begin_maximum(group, used)())


def begin_maximum(
    group: dist.ProcessGroup, own: Tensor, place: Place | None = None
) -> Callable[[], Tensor]:
    """Start to take the maximum over the ranks, element by element.

    All ranks call this at the same point of a step.

    Args:
        own: this rank's numbers: uint8, flat, with the same size on all ranks; on the CPU if
            :func:`exchanges` holds for the group.
        place: its place, if one was taken.

    Returns:
        A function that waits for the maximum and returns it. It raises a RuntimeError if a rank has
        left, or the group's timeout is over.
    """
    if exchanges(group):
        return (place or place_in(group)).reduce(own.clone(), takes_maximum=True).wait
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    maximum = own.clone()
    work = group.allreduce([maximum], options)

    def wait() -> Tensor:
        work.wait()
        return maximum

    return wait
