"""Words for the counts that the library prints, and warnings with the user's line."""

from __future__ import annotations

import os
import sys
import warnings


def pluralize(number: int, noun: str) -> str:
    """``number`` with ``noun``, which gets an ``s`` unless the number is 1: ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the location of the innermost frame outside the package.

    Python 3.12 has ``skip_file_prefixes`` for this.

    Args:
        message: the text.
        category: the warning's class.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_inside(file: str) -> bool:
    import torch.utils._contextlib as decorators  # who asks for words may do without torch

    # As a decorator, torch.inference_mode() has a frame between the user's and the function's.
    return file.startswith(_PACKAGE) or file == decorators.__file__
