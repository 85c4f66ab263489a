"""Two collectives, of which the second needs the first one's result; operators for compilers.

A codec's messages are exchanged, added up, encoded again and gathered: the second collective needs
the first one's result. All ranks must issue the same collectives on one group in the same order.
But the first stages of two buckets may end in another order on each rank. So the stages have an
order:

- On the CPU both stages have places in an order, taken when the bucket is full, and start whenever
  they can. The thread that ends a first stage adds up, encodes and starts the second one. Nothing
  waits inside a callback.
- Over other groups both stages share one communicator. The second stage of a bucket waits until the
  hook has issued the first stage of the next bucket. The last bucket's second stage follows its
  first one directly. So the stages of three buckets come in the order 1 1 2 1 2 2, and the wire
  carries the next message while a rank adds up and encodes. The order depends
  only on the order of the buckets, which is the same on all ranks. It holds for the library's hooks
  in our reducer and in DDP's. If a stage fails on a rank, the stages that wait there also fail. If
  an exception leaves a backward, they fail when the next backward begins, or when the hook is
  removed.

  In other cases the call itself issues both stages: a direct call of a collective; a subclass,
  which may wait for a result in ``average()``; and a static graph of DDP, which does not number the
  buckets of the first step. A second communicator would need no order. But NCCL and PyTorch warn of
  concurrent collectives of two communicators: their kernels may wait for each other's resources for
  ever.
- ``hierarchical`` has four stages, and two more for each further level. On the CPU all have places,
  which the call takes, and the thread that ends a stage starts the next. Elsewhere the call waits
  for all stages but the last.
- CUDA tensors are encoded, sent and decoded on one of three streams of the library. So the library
  can encode a bucket while another bucket's message is on the wire and the sum of a third is
  encoded. With NCCL only such a stream waits, not the thread and not the stream of the gradients. A
  Future of Gloo's makes no stream wait; there ``Work.wait`` does.
- The parts of a bucket in ``policy`` follow each other as buckets do. A stream of PyTorch's pool
  then waits for all results and joins them (``then_all``). ``collect_all`` does not support
  devices: it would make the current stream wait in the middle of backward.
- Over NCCL on one machine, the ranks use no collective in either stage if their GPUs share memory
  (``symmetric.py``).
- While a compiler traces, first stages are issued as buckets come, then all second stages. After
  that the code waits for results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _create_work_from_future,
    _register_work,
)
from torch.distributed import distributed_c10d

from torch_commhook.collectives.futures import (
    SecondStages,
    TracedFuture,
    TracedStages,
    chained,
    current_place,
    current_second_stages,
    set_error,
    set_outcome,
    then_beside,
    traced,
)
from torch_commhook.collectives.gloo_groups import exchanges, is_alone
from torch_commhook.collectives.issuing import (
    SECOND,
    Place,
    issue_all_gather,
    issue_all_reduce,
    issue_all_to_all,
    place_in,
)
from torch_commhook.metrics import CallMeter, note_collective
from torch_commhook.spans import continued, current_spans

# ---- two collectives; the second sends data that is computed from the first one's result ---------


def second_place(group: dist.ProcessGroup, device: torch.device) -> Place | None:
    """Take the place of a second collective, before the first one is issued; None if it needs none.

    Args:
        group: the process group.
        device: the tensors' device.
    """
    if torch.compiler.is_compiling() or device.type != "cpu" or not exchanges(group):
        return None
    return place_in(group, SECOND)


def two_stages(
    first: torch.futures.Future[Tensor],
    between: Callable[[Tensor], Tensor],
    issue_second: Callable[[Tensor, Place | None], torch.futures.Future[Tensor]],
    finish: Callable[[Tensor], Tensor],
    *,
    place: Place | None,
    second_bytes: tuple[int, int],
    device: torch.device,
    group: dist.ProcessGroup,
    meter: CallMeter | None = None,
) -> torch.futures.Future[Tensor]:
    """Let another collective follow a first one, without delaying those of other buckets.

    On the CPU over Gloo the second one has a place in an order, and the thread that ended the first
    issues it. Over other groups it is issued after the next bucket's first one, if the step of a
    hook allows it (``futures.py``), or else by this call. Issuing it waits for the first; on CUDA
    a stream waits, not the thread. While a compiler traces, ``start_next`` issues the second one.

    Args:
        first: of the first collective, which has counted its own bytes.
        between: computes the second one's data from the first one's result. On any thread.
        issue_second: starts the second one, in its place if it has one; it counts and checks
            nothing, since another thread may call it.
        finish: computes the result from the second one's result. On any thread.
        place: the second one's, by :func:`second_place`.
        second_bytes: bytes that this rank sends and receives in the second one.
        device: the tensors' device.
        group: the process group.
        meter: records how long both are on the wire.

    Returns:
        A Future of the result of ``finish``.
    """
    # Read once: later stages run in other threads, which cannot tell whether a compiler traces.
    is_traced = torch.compiler.is_compiling()
    note_collective(*second_bytes)  # here, since the issuing thread may not count

    def send(received: Tensor) -> Tensor:
        with torch.no_grad():
            return between(received)

    def end(received: Tensor) -> Tensor:
        with torch.no_grad():
            return finish(received)

    if is_traced:
        return TracedStages(
            first,
            lambda received: issue_second(send(received), None).then(
                lambda done: end(done.value())
            ),
        )
    first = on_wire(first, meter, device)
    if place is None:

        def both() -> torch.futures.Future[Tensor]:
            second = on_wire(issue_second(send(first.wait()), None), meter, device)
            return then_beside(second, lambda done: end(done.value()), device)

        waiting = None if group.size() == 1 else current_second_stages()
        return both() if waiting is None else later(both, waiting, device)

    return chained(
        first,
        lambda received: on_wire(issue_second(send(received), place), meter, device),
        end,
    )


def later(
    stage: Callable[[], torch.futures.Future[Tensor]], waiting: SecondStages, device: torch.device
) -> torch.futures.Future[Tensor]:
    """Let a stage wait for the first stage of the next bucket; issues earlier waiting stages.

    Args:
        stage: issues it, and returns a Future of its result. Runs on the present current stream.
        waiting: the waiting stages; this call issues all earlier ones.
        device: the tensors' device.

    Returns:
        A Future of the result. It completes only after ``stage`` was called.
    """
    result: torch.futures.Future[Tensor]
    result = torch.futures.Future(devices=None if device.type == "cpu" else [device])
    place = current_place(device)

    def issue() -> None:
        with place():
            ended = stage()
            if ended.done():
                set_outcome(result, ended.wait)
                return
        ended.add_done_callback(lambda done: set_outcome(result, done.value, caught=BaseException))

    try:
        waiting.issue()
    except BaseException as error:
        if hasattr(error, "add_note"):  # the caller adds its own bucket's name
            error.add_note("in the second stage of the previous bucket")
        raise
    waiting.add(continued(issue), lambda error: set_error(result, error))
    return result


def on_wire(
    future: torch.futures.Future[Tensor], meter: CallMeter | None, device: torch.device
) -> torch.futures.Future[Tensor]:
    """The same future, with its duration measured."""
    if meter is None:
        return future
    begun = time.perf_counter()

    def ended(done: torch.futures.Future[Tensor]) -> Tensor:
        meter.add("wire", time.perf_counter() - begun)
        return done.value()

    return then_beside(future, ended, device)


class timed:  # noqa: N801 (a context manager)
    """Reports the time spent inside to a meter and the profiler, if there are any."""

    def __init__(self, meter: CallMeter | None, stage: str) -> None:
        self._meter = meter
        self._stage = stage

    def __enter__(self) -> None:
        spans = current_spans()
        self._span = None if spans is None else spans.begin(self._stage)
        if self._meter is not None:
            self._begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._meter is not None:
            self._meter.add(self._stage, time.perf_counter() - self._begun)
        if self._span is not None:
            self._span.end()


# ---- collectives on the CPU as operators, which compiled code calls by the name of a group -------
#
# They do the same as the collectives in eager code. So ranks with compiled code and ranks without
# can take the same step. An operator copies the data that it sends, because a compiler reuses
# memory as soon as the last operator that reads it has returned. Its result is complete after
# ``_c10d_functional.wait_tensor``, as with PyTorch's own functional collectives.


_functional = torch.ops._c10d_functional


def _group(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _group_and_place(name: str, is_second: bool) -> tuple[dist.ProcessGroup, Place | None]:
    """A group, and for a second stage the next place in their order, if any."""
    group = _group(name)
    return group, place_in(group, SECOND) if is_second and exchanges(group) else None


def _started(future: torch.futures.Future[Tensor], result: Tensor) -> Tensor:
    _register_work(result, _create_work_from_future(future))
    return result


@torch.library.custom_op("commhook::start_all_reduce", mutates_args=())
def start_all_reduce(tensor: Tensor, group_name: str, is_second: bool) -> Tensor:
    """Start the sum of a tensor over all ranks.

    Args:
        tensor: dense, of a dtype that the group's backend supports.
        group_name: the process group's name.
        is_second: whether it has a place among second stages.

    Returns:
        A tensor of the same shape and dtype, for ``wait_tensor``.
    """
    result = tensor.clone(memory_format=torch.contiguous_format)
    group, place = _group_and_place(group_name, is_second)
    return _started(issue_all_reduce(result, group, place=place), result)


@torch.library.custom_op("commhook::start_all_gather", mutates_args=())
def start_all_gather(
    tensor: Tensor, sizes: Sequence[int] | None, group_name: str, is_second: bool, form: str
) -> Tensor:
    """Start to gather the tensors of all ranks on every rank.

    Args:
        tensor: dense, with the same shape on all ranks.
        sizes: None, or the number of bytes of each rank's message, for messages of their own
            lengths; ``tensor`` is then flat bytes.
        group_name, is_second: as for :func:`start_all_reduce`.
        form: what messages of their own lengths are; see :class:`Place`.

    Returns:
        A tensor for ``wait_tensor``: of shape ``(ranks, *tensor.shape)``, or flat with
        ``sum(sizes)`` bytes.
    """
    group, place = _group_and_place(group_name, is_second)
    sent = tensor.clone(memory_format=torch.contiguous_format)
    if sizes is None:
        result = tensor.new_empty((group.size(), *tensor.shape))
        return _started(issue_all_gather(sent, result, group, place=place), result)
    result = tensor.new_empty(sum(sizes))
    place = place or place_in(group)
    place.form = form
    own = sent[: sizes[place.rank]]
    return _started(place.gather(own, result.split(list(sizes)), result), result)


@torch.library.custom_op("commhook::start_all_to_all", mutates_args=())
def start_all_to_all(
    tensor: Tensor, sends: Sequence[int], gets: Sequence[int], group_name: str, form: str
) -> Tensor:
    """Start to send a piece of a tensor to each rank, and to receive one from each.

    Args:
        tensor: split along its first dimension.
        sends: the number of rows for each rank.
        gets: the number of rows from each rank.
        group_name: the process group's name.
        form: what the messages are; see :class:`Place`. Empty: the dtype.

    Returns:
        A tensor of ``sum(gets)`` rows, for ``wait_tensor``.
    """
    group = _group(group_name)
    result = tensor.new_empty((sum(gets), *tensor.shape[1:]))
    sent = tensor.clone(memory_format=torch.contiguous_format)
    issued = issue_all_to_all(sent, list(sends), list(gets), result, group, form=form)
    return _started(issued, result)


@start_all_reduce.register_fake
def _start_all_reduce_fake(tensor: Tensor, group_name: str, is_second: bool) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@start_all_gather.register_fake
def _start_all_gather_fake(
    tensor: Tensor, sizes: Sequence[int] | None, group_name: str, is_second: bool, form: str
) -> Tensor:
    if sizes is None:
        return tensor.new_empty((_group(group_name).size(), *tensor.shape))
    return tensor.new_empty(sum(sizes))


@start_all_to_all.register_fake
def _start_all_to_all_fake(
    tensor: Tensor, sends: Sequence[int], gets: Sequence[int], group_name: str, form: str
) -> Tensor:
    return tensor.new_empty((sum(gets), *tensor.shape[1:]))


# ---- traced functions ----------------------------------------------------------------------------


def traced_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, *, is_second: bool = False
) -> TracedFuture:
    """Trace the sum of a tensor over all ranks.

    By the group's name: a compiler cannot cache a graph that contains the group itself.
    """
    if is_alone(group):
        return TracedFuture(lambda: tensor)
    if _is_dense_on_cpu(tensor):
        return traced(start_all_reduce(tensor, group.group_name, is_second))
    return traced(_functional.all_reduce(tensor, "sum", group.group_name))


def traced_all_gather(
    tensor: Tensor,
    group: dist.ProcessGroup,
    *,
    sizes: Sequence[int] | None = None,
    is_second: bool = False,
    form: str = "",
) -> TracedFuture:
    """Trace a gather of the tensors of all ranks: :func:`start_all_gather`."""
    if _is_dense_on_cpu(tensor):
        return traced(start_all_gather(tensor, sizes, group.group_name, is_second, form))
    ranks = group.size()
    shape = (ranks, *tensor.shape)
    gathered = _functional.all_gather_into_tensor(tensor.reshape(-1), ranks, group.group_name)
    return traced(gathered).then(lambda done: done.value().view(shape))


def traced_all_to_all(
    tensor: Tensor,
    sends: Sequence[int],
    gets: Sequence[int],
    group: dist.ProcessGroup,
    form: str = "",
) -> TracedFuture:
    """Trace an exchange of pieces of a tensor: :func:`start_all_to_all`."""
    if _is_dense_on_cpu(tensor):
        return traced(start_all_to_all(tensor, sends, gets, group.group_name, form))
    return traced_real(
        tensor,
        lambda real: _functional.all_to_all_single(real, gets, sends, group.group_name),
    )


def traced_real(tensor: Tensor, collective: Callable[[Tensor], Tensor]) -> TracedFuture:
    """Trace one of PyTorch's collectives that not all backends support for complex numbers."""
    if not tensor.is_complex():
        return traced(collective(tensor))
    done = traced(collective(torch.view_as_real(tensor)))
    return done.then(lambda future: torch.view_as_complex(future.value()))


def _is_dense_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided
