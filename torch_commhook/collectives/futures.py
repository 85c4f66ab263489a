"""What collectives return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torch_commhook.spans import continued

T = TypeVar("T")

if TYPE_CHECKING:  # whoever gets one uses it as a Future of a tensor
    _FutureOfTensor = torch.futures.Future[Tensor]
else:
    _FutureOfTensor = object


class TracedFuture(_FutureOfTensor):
    """What a collective returns while a compiler traces: a Future as far as hooks need one.

    Compilers cannot trace ``torch.futures.Future``. Here everything happens on one thread: a
    callback runs when its result is asked for.

    Args:
        wait: returns the result. Called once, when the result is first asked for.

    Example:
        >>> future = collectives.TracedFuture(lambda: torch.ones(2))
        >>> future.then(lambda done: 2 * done.value()).wait()
        tensor([2., 2.])
    """

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait: Callable[[], Tensor] | None = wait
        self._tensor: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, once it is there."""
        if self._wait is not None:
            self._tensor = self._wait()
            self._wait = None
        assert self._tensor is not None
        return self._tensor

    def value(self) -> Tensor:
        """Same as :meth:`wait`."""
        return self.wait()

    def start_next(self) -> None:
        """Start the next collective, where several follow each other, as soon as it can."""

    def then(  # type: ignore[override]  # of tensors alone
        self, callback: Callable[[torch.futures.Future[Tensor]], Tensor]
    ) -> TracedFuture:
        """A future of ``callback(self)``."""

        def run() -> Tensor:
            self.wait()
            return callback(self)

        return TracedFuture(run)


class TracedStages(TracedFuture):
    """Collectives of which one needs the result of the one before."""

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
    """The result of one of PyTorch's functional collectives."""
    return TracedFuture(lambda: torch.ops._c10d_functional.wait_tensor(tensor))


def is_driven_by_wait(future: Any) -> bool:
    """Whether a Future may complete only when it is waited for.

    Such as torchft's, which is of a class with a ``wait()`` of its own; callbacks never run.
    """
    if not isinstance(future, torch._C.Future):
        return False
    of_wait = next(cls for cls in type(future).__mro__ if "wait" in vars(cls))
    return of_wait not in (torch._C.Future, torch.futures.Future)


def driven(result: Any) -> Any:
    """What a hook gave; of a Future that :func:`is_driven_by_wait`, the outcome, waited for."""
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

    It names the tensors' devices: streams wait only for those that a Future knows.
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
    """``future.then(callback)``, of tensors on a device.

    On the CPU what the callback raises keeps its type: PyTorch makes a RuntimeError of it that has
    its text. On other devices that stays so, since ``then`` is what takes care of streams.
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
    """What follows a Future on the CPU, started by the thread that completes it.

    Args:
        first: a Future.
        start: starts the next, with the value of ``first``. It must not wait.
        end: makes the result of the value of the next.

    Returns:
        A Future of what ``end`` gives, or of what has failed before.
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
    """:func:`then`, inside :func:`torch_commhook.collectives.streams.beside`.

    A future on a device that is complete at once, such as NCCL's, leaves waiting to the stream:
    here to one that has nothing else to do, and runs the callback's work, too.
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
    """A Future of what ``combine`` makes of the results of several, once all are there.

    ``collect_all`` knows no devices: who waits for its Future has the current stream wait for all
    results. Here a stream of PyTorch's pool does, which runs ``combine``, too.

    Args:
        futures: at least one; of tensors on one device.
        combine: is given the results, in order. On any thread.
        device: of the tensors.
    """
    together = torch.futures.collect_all(list(futures))
    if device.index is None:  # as the CPU
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
    """Complete a Future with what ``compute()`` returns or raises.

    Args:
        future: is not complete yet.
        compute: gives its value.
        caught: BaseException where nobody would get what is raised, as in a callback.
    """
    try:
        value = compute()
    except caught as error:
        set_error(future, error)
    else:
        future.set_result(value)


def set_error(future: torch.futures.Future[Any], error: BaseException) -> None:
    """``future.set_exception(error)``, which refuses those that are to end the program.

    Nobody would get these from a callback, and whoever waits for the future would wait for ever.
    """
    if not isinstance(error, Exception):
        stand_in = RuntimeError(f"{type(error).__name__}: {error}")
        stand_in.__cause__ = error
        error = stand_in
    future.set_exception(error)
