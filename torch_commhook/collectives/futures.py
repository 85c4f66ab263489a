"""The futures that collectives return, and the order and streams in which they run."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_commhook.metrics import ThreadValue, setting
from torch_commhook.spans import continued

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
    """Tensors that streams of the library still use, until somebody has waited for the result.

    A reference protects a tensor's memory. It costs nothing per tensor, and the memory is free as
    soon as somebody has waited for the result. If nobody waits, as after an error, or another
    stream does, the allocator is told instead.
    """

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
    """Let ``used`` keep the tensors of :func:`beside` on this thread inside the block."""
    return setting(_used, used)


@contextmanager
def beside(device: torch.device, number: StreamNumber, tensors: Used) -> Iterator[None]:
    """Run the block's CUDA work on another stream, after the present work of the current one.

    Nothing waits for this work: users of its results wait for a Future that is completed inside the
    block. On other devices nothing changes.

    Args:
        device: the tensors' device.
        number: the stream.
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


def current_place(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function whose contexts restore the present current stream, on any thread."""
    if not has_streams(device):
        return nullcontext
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)


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


def driven(result: Any) -> Any:
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
    callback = continued(callback)
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
) -> torch.futures.Future[Tensor]:
    """Run an asynchronous continuation of a CPU Future, on the thread that completes it.

    Args:
        first: a Future.
        start: starts the continuation, from the value of ``first``. It must not wait.
        end: makes the result from the continuation's value.

    Returns:
        A Future of the result of ``end``, or of an earlier error.
    """
    result: torch.futures.Future[Tensor] = torch.futures.Future()

    def over(done: torch.futures.Future[Tensor]) -> None:
        set_outcome(result, lambda: end(done.value()), caught=BaseException)

    over = continued(over)

    def is_there(done: torch.futures.Future[Tensor]) -> None:
        try:
            following = start(done.value())
        except BaseException as error:
            set_error(result, error)
            return
        following.add_done_callback(over)

    first.add_done_callback(continued(is_there))
    return result


def then_beside(
    future: torch.futures.Future[T],
    callback: Callable[[torch.futures.Future[T]], Tensor],
    device: torch.device,
) -> torch.futures.Future[Tensor]:
    """Run :func:`then` inside :func:`torch_commhook.collectives.futures.beside`.

    A device Future that is complete at once, such as NCCL's, leaves the wait to the stream. Here a
    stream without other work waits, and runs the callback's work too.
    """
    if isinstance(future, TracedFuture) or device.type == "cpu" or not future.done():
        return then(future, callback, device)
    result: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])

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
    results. Here a stream of PyTorch's pool waits, and runs ``combine`` too.

    Args:
        futures: at least one; of tensors on one device.
        combine: gets the results in order. May run on any thread.
        device: the tensors' device.
    """
    together = torch.futures.collect_all(list(futures))
    if device.index is None:  # such as the CPU
        return then(together, lambda _: combine([each.wait() for each in futures]), device)
    result: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
    combine = continued(combine)

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
        future: an incomplete Future.
        compute: returns the value.
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
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        stand_in.__cause__ = error
        error = stand_in
    future.set_exception(error)


# ---- second stages of a step's collectives on the process group of the first stages --------------
#
# All backends over NCCL run the collectives of a group on one communicator, in order (``nccl-lazy``
# has others for point-to-point messages). So a bucket's second stage must not be issued right
# behind the first: the wire would be idle while a rank sums and encodes. It waits until the next
# bucket's first stage has been issued, or until the last bucket has come. So the order depends on
# the order of the buckets only, which is the same on all ranks.
#
# A separate communicator for second stages would not need this order. But collectives of two NCCL
# communicators that run at once may deadlock, waiting for each other's resources on different
# devices; NCCL and PyTorch warn about this. Each communicator also takes device memory.


_stages: ThreadValue[SecondStages] = ThreadValue()


class _Waiting(NamedTuple):
    issue: Callable[[], None]
    failed: Callable[[BaseException], None]


class SecondStages:
    """The second stages that wait in a step of one attached hook, in the order of its buckets."""

    def __init__(self) -> None:
        self._waiting: deque[_Waiting] = deque()

    def add(self, issue: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """Let the next call of :meth:`issue` issue a stage.

        Args:
            issue: issues it. May raise.
            failed: called with an error if it is not issued.
        """
        self._waiting.append(_Waiting(issue, failed))

    def issue(self) -> None:
        """Issue the waiting stages, in order.

        Raises:
            Exception: a stage raised it. The stages behind it fail too: other ranks would pair them
                with the missing one.
        """
        while self._waiting:
            waiting = self._waiting.popleft()
            try:
                waiting.issue()
            except BaseException as error:
                waiting.failed(error)
                self.give_up(error)
                raise

    def give_up(self, error: BaseException) -> None:
        """Fail the waiting stages: the step has failed on this rank, or was abandoned."""
        while self._waiting:
            self._waiting.popleft().failed(error)

    def __len__(self) -> int:
        return len(self._waiting)


def issuing_later(stages: SecondStages) -> setting[SecondStages]:
    """Let second stages of collectives that this thread begins inside the block wait in ``stages``.

    The caller must not wait for a result inside the block, and must call
    :meth:`SecondStages.issue` after the last bucket of a step.
    """
    return setting(_stages, stages)


def current_second_stages() -> SecondStages | None:
    """The waiting stages of the hook that this thread runs; None if no stage is to wait."""
    return _stages.value
