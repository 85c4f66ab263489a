"""The futures that collectives return, and the order and streams in which they run.

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
  carries the next message while a rank adds up and encodes. The order depends only on the order of
  the buckets, which is the same on all ranks. It holds for the library's hooks in our reducer and
  in DDP's. If a stage fails on a rank, the stages that wait there also fail. If an exception leaves
  a backward, they fail when the next backward begins, or when the hook is removed.

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

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_commhook.metrics import CallMeter, ThreadValue, note_collective, setting
from torch_commhook.spans import with_spans

# ---- CUDA streams for collectives of several stages, beside the gradients' stream ----------------
#
# A stream of the library reads gradients that belong to another stream. The hook's call holds
# references to them until the step has waited for the result. Their memory is then free at once,
# and the host does the same work for one tensor as for a thousand. Two cases need more: after an
# error nobody waits, and sometimes another stream waits than that of the gradients. In both the
# call tells the allocator of the use (``Tensor.record_stream``).


#: For each device. While one bucket is encoded, another's message is on the wire, and the sum of a
#: third is encoded or decoded. With two streams, a bucket's encoding would wait for the decoding of
#: the bucket before the last, and the wire for both.
_STREAMS = 3

#: The kinds of devices with streams.
_WITH_STREAMS = frozenset({"cuda"})

#: Tensors that a call uses: single tensors, or groups of them that are handled together.
Used = Sequence[Tensor | Sequence[Tensor] | None]

_numbers = itertools.count()
_of_device: dict[tuple[int, int], torch.cuda.Stream] = {}
_used: ThreadValue[UsedTensors] = ThreadValue()


def has_streams(device: torch.device) -> bool:
    """Whether a device runs work asynchronously, on streams."""
    return device.type in _WITH_STREAMS


def is_capturing(device: torch.device) -> bool:
    """Whether work for a device is being captured into a CUDA graph instead of running."""
    return has_streams(device) and torch.cuda.is_current_stream_capturing()


class StreamNumber:
    """The number of one of a device's streams, assigned in turn on first use."""

    def __init__(self) -> None:
        self._number: int | None = None

    def get(self) -> int:
        if self._number is None:
            self._number = next(_numbers) % _STREAMS
        return self._number


def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, number
    if key not in _of_device:
        # With priority: its work is short, and links are idle until it is done.
        _of_device[key] = torch.cuda.Stream(index, priority=-1)
    return _of_device[key]


class _Use(NamedTuple):
    device: torch.device
    owner: torch.cuda.Stream  # the stream that owns the memory
    user: torch.cuda.Stream
    tensors: Used

    def record(self) -> None:
        """Tell the allocator not to reuse the memory until the stream is done with it."""
        flat: list[Tensor] = []
        for one in self.tensors:
            if one is not None:
                flat.extend([one] if isinstance(one, Tensor) else one)
        # Gradients may be views of one bucket.
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in flat}.values():
            if has_streams(tensor.device):
                tensor.record_stream(self.user)


class UsedTensors:
    """Tensors that streams of the library still use, until somebody has waited for the result."""

    __slots__ = ("_uses",)

    def __init__(self) -> None:
        self._uses: list[_Use] = []

    def add(self, use: _Use) -> None:
        """Keep tensors that a stream uses."""
        self._uses.append(use)

    def waited_for(self) -> None:
        """Release the tensors: the current stream now waits for all their uses."""
        uses, self._uses = self._uses, []
        for use in uses:
            if torch.cuda.current_stream(use.device) != use.owner:
                use.record()  # the owner does not wait

    def __len__(self) -> int:
        return len(self._uses)

    def __del__(self) -> None:
        for use in self._uses:
            use.record()


def keeping(used: UsedTensors) -> setting[UsedTensors]:
    """Let ``used`` keep the tensors of :func:`on_side_stream` on this thread inside the block."""
    return setting(_used, used)


@contextmanager
def on_side_stream(device: torch.device, number: StreamNumber, tensors: Used) -> Iterator[None]:
    """Run the block's CUDA work on another stream, after the present work of the current one.

    Nothing waits for this work: users of its results wait for a Future that is completed inside the
    block. On other devices nothing changes.

    Args:
        tensors: tensors that the block uses and that belong to the current stream. Their memory is
            protected until then: by references if :func:`keeping` is active, or else by the
            allocator.
    """
    if not has_streams(device):
        yield
        return
    stream = _stream(device, number.get())
    current = torch.cuda.current_stream(device)
    if stream != current:
        stream.wait_stream(current)
        use = _Use(device, current, stream, tensors)
        keeper = _used.value
        if keeper is None:
            use.record()
        else:
            keeper.add(use)
    with torch.cuda.stream(stream):
        yield


# ---- the futures that collectives return ---------------------------------------------------------


T = TypeVar("T")

if TYPE_CHECKING:  # callers use one as a Future of a tensor
    _FutureOfTensor = torch.futures.Future[Tensor]
else:
    _FutureOfTensor = object


class TracedFuture(_FutureOfTensor):
    """The Future of a collective while a compiler traces, with the methods that hooks need.

    Compilers cannot trace ``torch.futures.Future``. Here everything runs on one thread: a callback
    runs when its result is needed.

    Args:
        wait: returns the result. Called once, when the result is first needed.

    Example:
        >>> future = collectives.TracedFuture(lambda: torch.ones(2))
        >>> future.then(lambda done: 2 * done.value()).wait()
        tensor([2., 2.])
    """

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait: Callable[[], Tensor] | None = wait
        self._tensor: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result, once it is complete."""
        if self._wait is not None:
            self._tensor = self._wait()
            self._wait = None
        assert self._tensor is not None
        return self._tensor

    def value(self) -> Tensor:
        """Same as :meth:`wait`."""
        return self.wait()

    def start_next(self) -> None:
        """Start the next collective, if several follow each other, as soon as possible."""

    def then(  # type: ignore[override]  # of tensors alone
        self, callback: Callable[[torch.futures.Future[Tensor]], Tensor]
    ) -> TracedFuture:
        """Return a future of ``callback(self)``."""

        def run() -> Tensor:
            self.wait()
            return callback(self)

        return TracedFuture(run)


class TracedStages(TracedFuture):
    """Consecutive collectives: each needs the result of the previous one."""

    def __init__(
        self,
        first: torch.futures.Future[Tensor],
        then: Callable[[Tensor], torch.futures.Future[Tensor]],
    ) -> None:
        super().__init__(self._run)
        self._first = first
        self._then = then
        self._second: torch.futures.Future[Tensor] | None = None

    def start_next(self) -> None:
        if self._second is None:
            self._second = self._then(self._first.wait())

    def _run(self) -> Tensor:
        self.start_next()
        assert self._second is not None
        return self._second.wait()


def traced(tensor: Tensor) -> TracedFuture:
    """The future of one of PyTorch's functional collectives."""
    return TracedFuture(lambda: torch.ops._c10d_functional.wait_tensor(tensor))


def is_driven_by_wait(future: Any) -> bool:
    """Whether a Future may complete only when it is waited for.

    torchft's do: their class has a ``wait()`` of its own, and callbacks never run.
    """
    if not isinstance(future, torch._C.Future):
        return False
    of_wait = next(cls for cls in type(future).__mro__ if "wait" in vars(cls))
    return of_wait not in (torch._C.Future, torch.futures.Future)


def await_lazy(result: Any) -> Any:
    """A hook's result; for a Future that :func:`is_driven_by_wait`, its outcome after a wait."""
    if not is_driven_by_wait(result):
        return result
    try:
        return completed(result.wait())
    except Exception as error:
        future: torch.futures.Future[Any] = torch.futures.Future()
        set_error(future, error)
        return future


def completed(value: T) -> torch.futures.Future[T]:
    """A Future that holds a tensor, or a list of them, of the current streams.

    It names the tensors' devices: streams wait only for devices that a Future knows.
    """
    tensors = value if isinstance(value, (list, tuple)) else [value]
    devices = {each.device for each in tensors if isinstance(each, Tensor)}
    # The CPU has no index, and no streams.
    future: torch.futures.Future[T] = torch.futures.Future(
        devices=[device for device in devices if device.index is not None]
    )
    future.set_result(value)
    return future


def then(
    future: torch.futures.Future[T],
    callback: Callable[[torch.futures.Future[T]], Tensor],
    device: torch.device,
) -> torch.futures.Future[Tensor]:
    """Run ``future.then(callback)`` for tensors on a device.

    On the CPU an exception of the callback keeps its type; PyTorch would replace it by a
    RuntimeError with its text. On other devices PyTorch's behaviour stays, since ``then``
    synchronizes streams.
    """
    callback = with_spans(callback)
    if isinstance(future, TracedFuture) or device.type != "cpu":
        return future.then(callback)
    result: torch.futures.Future[Tensor] = torch.futures.Future()

    future.add_done_callback(
        lambda each: set_outcome(result, lambda: callback(each), caught=BaseException)
    )
    return result


def chained(
    first: torch.futures.Future[Tensor],
    start: Callable[[Tensor], torch.futures.Future[Tensor]],
    end: Callable[[Tensor], Tensor],
    device: torch.device,
) -> torch.futures.Future[Tensor]:
    """Run an asynchronous continuation of a Future, on the thread that completes it.

    Args:
        start: starts the continuation, from the value of ``first``. It must not wait.
        end: makes the result from the continuation's value.

    Returns:
        A Future of the result of ``end``, on the device, or of an earlier error.
    """
    result = _future_on(device)

    def over(done: torch.futures.Future[Tensor]) -> None:
        set_outcome(result, lambda: end(done.value()), caught=BaseException)

    over = with_spans(over)

    def is_there(done: torch.futures.Future[Tensor]) -> None:
        try:
            following = start(done.value())
        except BaseException as error:
            set_error(result, error)
            return
        following.add_done_callback(over)

    first.add_done_callback(with_spans(is_there))
    return result


def _future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def then_on_side_stream(
    future: torch.futures.Future[T],
    callback: Callable[[torch.futures.Future[T]], Tensor],
    device: torch.device,
) -> torch.futures.Future[Tensor]:
    """Run :func:`then` inside :func:`torch_commhook.collectives.futures.on_side_stream`.

    A device Future that is complete at once, such as NCCL's, leaves the wait to the stream. Here a
    stream without other work waits, and runs the callback's work too.
    """
    if isinstance(future, TracedFuture) or device.type == "cpu" or not future.done():
        return then(future, callback, device)
    result = _future_on(device)

    def waited_for() -> Tensor:
        future.wait()
        return callback(future)

    set_outcome(result, waited_for)
    return result


def then_all(
    futures: Sequence[torch.futures.Future[Tensor]],
    combine: Callable[[list[Tensor]], Tensor],
    device: torch.device,
) -> torch.futures.Future[Tensor]:
    """Return a Future of ``combine`` of the results of several futures, once all are complete.

    With ``collect_all``, which knows no devices, a waiting caller's stream would wait for all
    results. Here a stream of PyTorch's pool waits, and runs ``combine`` too. The futures are of
    tensors on one device; there is at least one.
    """
    together = torch.futures.collect_all(list(futures))
    if device.index is None:  # such as the CPU
        return then(together, lambda _: combine([each.wait() for each in futures]), device)
    result: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
    combine = with_spans(combine)

    def all_complete(_: Any) -> None:
        # Called at once, on a stream that waits for the last of them.
        futures[-1].add_done_callback(on_stream)

    def on_stream(_: Any) -> None:
        set_outcome(
            result, lambda: combine([each.wait() for each in futures]), caught=BaseException
        )

    together.add_done_callback(all_complete)
    return result


def set_outcome(
    future: torch.futures.Future[T],
    compute: Callable[[], T],
    *,
    caught: type[BaseException] = Exception,
) -> None:
    """Complete a Future with the result or the exception of ``compute()``.

    Args:
        caught: the exceptions to set; BaseException if nobody else would see them, as in a
            callback.
    """
    try:
        value = compute()
    except caught as error:
        set_error(future, error)
    else:
        future.set_result(value)


def set_error(future: torch.futures.Future[Any], error: BaseException) -> None:
    """Run ``future.set_exception(error)``, which refuses exceptions that end the program.

    In a callback nobody would see those, and waits for the future would never end.
    """
    if not isinstance(error, Exception):
        told = RuntimeError(f"{type(error).__name__}: {error}")
        told.__cause__ = error
        error = told
    future.set_exception(error)


# ---- second stages of a step's collectives on the process group of the first stages --------------
#
# All backends over NCCL run the collectives of a group on one communicator, in order (``nccl-lazy``
# has others for point-to-point messages). The head of this file has the stages' order. Another
# communicator would also take device memory.


_stages: ThreadValue[SecondStages] = ThreadValue()


class SecondStages:
    """The second stages that wait in a step of one attached hook, in the order of its buckets."""

    def __init__(self) -> None:
        #: What issues a stage, and what is called with an error if it is not issued.
        self._waiting: deque[tuple[Callable[[], None], Callable[[BaseException], None]]] = deque()

    def add(self, issue: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Let the next call of :meth:`issue` issue a stage: ``issue`` may raise."""
        self._waiting.append((issue, failed))

    def issue(self) -> None:
        """Issue the waiting stages, in order.

        If one raises, those behind it fail too: other ranks would pair them with the missing one.
        """
        while self._waiting:
            issue, failed = self._waiting.popleft()
            try:
                issue()
            except BaseException as error:
                failed(error)
                self.give_up(error)
                raise

    def give_up(self, error: BaseException) -> None:
        """Fail the waiting stages: the step has failed on this rank, or was abandoned."""
        while self._waiting:
            _, failed = self._waiting.popleft()
            failed(error)

    def __len__(self) -> int:
        return len(self._waiting)


def issuing_later(stages: SecondStages) -> setting[SecondStages]:
    """Let second stages of collectives that this thread begins inside the block wait in ``stages``.

    The caller must not wait for a result inside the block, and must call
    :meth:`SecondStages.issue` after the last bucket of a step.
    """
    return setting(_stages, stages)


# ---- two collectives; the second sends data that is computed from the first one's result ---------


def two_stages(
    first: torch.futures.Future[Tensor],
    between: Callable[[Tensor], Tensor],
    issue_second: Callable[[Tensor], torch.futures.Future[Tensor]],
    finish: Callable[[Tensor], Tensor],
    *,
    has_place: bool,
    second_bytes: tuple[int, int],
    device: torch.device,
    group: dist.ProcessGroup,
    meter: CallMeter | None = None,
) -> torch.futures.Future[Tensor]:
    """Let another collective follow a first one, without delaying those of other buckets.

    If the second one has a place in an order, the thread that ended the first issues it. Otherwise
    it is issued after the next bucket's first one, if the step of a hook allows it
    (:class:`SecondStages`), or else by this call. Issuing it waits for the first; on CUDA a stream
    waits, not the thread. While a compiler traces, ``start_next`` issues the second one.

    Args:
        first: of the first collective, which has counted its own bytes.
        between: computes the second one's data from the first one's result. On any thread.
        issue_second: starts the second one; it counts and checks nothing, since another thread may
            call it.
        finish: computes the result from the second one's result. On any thread.
        has_place: whether the second one has a place in an order (``issuing.second_place``).
        second_bytes: bytes that this rank sends and receives in the second one.
        meter: records how long both are on the wire.
    """
    # Read once: later stages run in other threads, which cannot tell whether a compiler traces.
    is_traced = torch.compiler.is_dynamo_compiling()
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
            lambda received: issue_second(send(received)).then(lambda done: end(done.value())),
        )
    first = on_wire(first, meter, device)
    if not has_place:

        def both() -> torch.futures.Future[Tensor]:
            second = on_wire(issue_second(send(first.wait())), meter, device)
            return then_on_side_stream(second, lambda done: end(done.value()), device)

        waiting = None if group.size() == 1 else _stages.value
        return both() if waiting is None else later(both, waiting, device)

    return chained(
        first,
        lambda received: on_wire(issue_second(send(received)), meter, device),
        end,
        device,
    )


def later(
    stage: Callable[[], torch.futures.Future[Tensor]], waiting: SecondStages, device: torch.device
) -> torch.futures.Future[Tensor]:
    """Let a stage wait for the first stage of the next bucket; issues all earlier waiting stages.

    Args:
        stage: issues it, and returns a Future of its result. Runs on the present current stream.

    Returns:
        A Future of the result. It completes only after ``stage`` was called.
    """
    result = _future_on(device)
    stream = torch.cuda.current_stream(device) if has_streams(device) else None

    def issue() -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
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
    waiting.add(with_spans(issue), lambda error: set_error(result, error))
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

    return then_on_side_stream(future, ended, device)
