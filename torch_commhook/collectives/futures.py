"""The futures that collectives return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torch_commhook.spans import continued

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
    """Run :func:`then` inside :func:`torch_commhook.collectives.streams.beside`.

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
