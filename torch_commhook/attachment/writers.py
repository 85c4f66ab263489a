"""Writes numbers to a user's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def write(writer: Any, values: Mapping[str, float], step: int | None) -> None:
    """Write numbers to a log.

    Args:
        writer: TensorBoard's ``SummaryWriter``, with ``add_scalar(name, value, step)``; a logger of
            Lightning or MLflow, with ``log_metrics(values, step)``; a run of Weights & Biases, a
            tracker of Accelerate, or any object with ``log(values)``; or a function of the values.
        values: the numbers by name.
        step: the number of the step; None if the writer counts steps itself.

    Raises:
        TypeError: the writer is none of these.
    """
    if callable(getattr(writer, "add_scalar", None)):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        return
    metrics: Callable[..., Any] | None = getattr(writer, "log_metrics", None)
    log = getattr(writer, "log", None)
    if callable(metrics):
        metrics(dict(values), step=step)
    elif callable(log):
        log(dict(values)) if step is None else log(dict(values), step=step)
    elif callable(writer):
        writer(dict(values))
    else:
        raise TypeError(
            "HookHandle.log_to: the writer must have add_scalar(), log_metrics() or log(), or be a "
            f"function of a dict, got {type(writer).__qualname__}"
        )
