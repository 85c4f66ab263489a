"""Functions that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def in_threads(targets: Sequence[Callable[[], None]], seconds: float = 60) -> list[BaseException]:
    """The results of functions that run at the same time.

    Raises:
        AssertionError: a function has not returned after ``seconds``.
    """
    raised: list[BaseException] = []
    start = threading.Barrier(len(targets))

    def run(target: Callable[[], None]) -> None:
        try:
            start.wait(seconds)
            target()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads)
    return raised
