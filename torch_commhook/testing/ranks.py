"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_commhook._C import type_name
from torch_commhook.process_group.simulated.link import Links
from torch_commhook.testing.scheduler import RunEndedError, Scheduler, current_rank
from torch_commhook.testing.store import SimulatedStore
from torch_commhook.testing.worlds import world_of, worlds_of_ranks

Result = TypeVar("Result")

_one_run = threading.Lock()


def run_ranks(
    fn: Callable[..., Result],
    world_size: int,
    *args: Any,
    seed: int = 0,
    timeout: float = 60.0,
) -> list[Result]:
    """Call ``fn(rank, *args)`` on each of ``world_size`` ranks, which are threads of this process.

    Inside, ``torch.distributed`` is initialized. The default group is a
    :class:`torch_commhook.process_group.SimulatedProcessGroup`. ``new_group``, device meshes,
    functional collectives, DDP, ``fully_shard``, DTensor and :func:`torch_commhook.attach` work as
    in processes. Other threads see the process's own ``torch.distributed``.

    One rank runs at a time, until it issues a collective or waits for other ranks; then ``seed``
    decides which rank runs next. The same seed gives the same order of events.

    Ranks share the state of the process: ``torch.manual_seed``, the compiler's caches, environment
    variables. Objects in ``fn``'s closure are the same for all ranks.

    Args:
        fn: called with the rank and ``args``.
        world_size: the number of ranks.
        args: further arguments of ``fn``.
        seed: the seed of the order in which ranks run.
        timeout: the number of seconds that a rank may run without reaching a collective.

    Returns:
        Each rank's result, in rank order.

    Raises:
        DeadlockError: no rank can continue. The message says what each rank waits for.
        MismatchedCollectiveError: two ranks' n-th collectives on a group differ. The message
            describes both.
        TimeoutError: a rank has not reached a collective in time. A thread that cannot be ended
            keeps running.
        BaseException: the first rank that failed raised it; a note names the rank (Python 3.11
            and newer). The other ranks are ended.
        RuntimeError: another ``run_ranks`` is running.
        TypeError, ValueError: an argument is none of the above.

    Example:
        >>> def total(rank):
        ...     x = torch.tensor([float(rank)])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks(total, 8)
        [28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0, 28.0]
    """
    _check_arguments(fn, world_size, seed, timeout)
    return run_with_links(lambda rank, _: fn(rank, *args), world_size, seed, timeout)[0]


def run_with_links(
    fn: Callable[[int, Links], Result], world_size: int, seed: int, timeout: float = 60.0
) -> tuple[list[Result], Links]:
    """Run a function that also gets all groups of the run, as :func:`run_ranks`; returns these."""
    if current_rank() is not None:
        raise RuntimeError("run_ranks: a rank must not call run_ranks, which is running already")
    if not _one_run.acquire(blocking=False):
        raise RuntimeError("run_ranks: another thread is running run_ranks; wait until it ends")
    try:
        return _run(fn, world_size, seed, timeout)
    finally:
        _one_run.release()


def _run(
    fn: Callable[[int, Links], Result], world_size: int, seed: int, timeout: float
) -> tuple[list[Result], Links]:
    scheduler = Scheduler(world_size, seed, timeout)
    links = Links(scheduler)
    store = SimulatedStore(scheduler)

    def run_rank(rank: int) -> Result:
        # Backward of CUDA tensors stays on the rank's own thread, too.
        with (
            torch.autograd.set_multithreading_enabled(False),
            world_of(links, store, rank, world_size),
        ):
            return fn(rank, links)

    with worlds_of_ranks(scheduler.threads):
        scheduler.run(run_rank)
    _raise_failure(scheduler)
    return [rank.result for rank in scheduler.ranks], links


def _raise_failure(scheduler: Scheduler) -> None:
    failure, errors = scheduler.failure, [rank.error for rank in scheduler.ranks]
    if failure is None:
        return
    # Tracebacks refer to models, and hooks in C++ to the scheduler. No collector sees that cycle.
    scheduler.failure = type(failure)(*failure.args)
    for rank in scheduler.ranks:
        rank.error = None
    for rank, error in zip(scheduler.ranks, errors, strict=True):
        if error is None or isinstance(error, RunEndedError):
            continue
        if isinstance(failure, RunEndedError):
            if rank is scheduler.first_to_fail:
                if hasattr(error, "add_note"):
                    error.add_note(f"raised by rank {rank.number} of {len(scheduler.ranks)}")
                raise error
        elif type(error) is type(failure) and error.args == failure.args:
            raise error  # with the traceback of the rank
    raise failure


def _check_arguments(fn: object, world_size: object, seed: object, timeout: object) -> None:
    if not callable(fn):
        raise TypeError(f"run_ranks: fn must be callable, got {type_name(fn)}")
    for name, value in (("world_size", world_size), ("seed", seed)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"run_ranks: {name} must be an int, got {type_name(value)}")
    if world_size < 1:  # type: ignore[operator]
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}")
    check_timeout("run_ranks", timeout)


def check_timeout(function: str, timeout: object) -> None:
    """Check that a timeout is a positive number of seconds."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not timeout > 0:  # type: ignore[operator]
        raise ValueError(f"{function}: timeout must be a positive number of s, got {timeout!r}")
