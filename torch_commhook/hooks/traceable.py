"""The mark of hooks that compilers can trace."""

from __future__ import annotations

from typing import Any


def traceable(hook: Any) -> Any:
    """Mark a hook as traceable by compilers. A decorator for functions, classes and objects.

    Under compiled autograd such a hook becomes part of the compiled backward. Its collectives must
    be those of :mod:`torch_commhook.collectives` or ``torch.distributed._functional_collectives``.
    Other hooks interrupt the compiled graph once, at the end of backward, and run outside it.

    Args:
        hook: a function, a class or an object.

    Returns:
        The hook itself.

    Example:
        >>> @traceable
        ... def mean(state, bucket):
        ...     group = bucket.process_group()
        ...     buffer = bucket.scaled_buffer(1 / collectives.resolve_group(group).size())
        ...     return collectives.all_reduce(buffer, group=group)
        >>> simulate(mean, [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])]]).result
        [tensor([2., 3.])]
    """
    hook._commhook_traceable = True
    return hook


def is_traceable(hook: object) -> bool:
    """Whether :func:`traceable` has marked a hook."""
    return getattr(hook, "_commhook_traceable", False) is True
