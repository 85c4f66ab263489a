"""Formats counts, errors and tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def one_line(error: BaseException) -> str:
    """The type and the text of an error in one line; only the type if there is no text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def align_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, is_underlined: bool = False
) -> list[str]:
    """The lines of a table: the first column is aligned left, the others right.

    Args:
        header: the titles of the columns.
        rows: as many cells each as the header.
        is_underlined: whether a line of dashes follows the header.
    """
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if is_underlined:
        table.insert(1, ["-" * width for width in widths])
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
