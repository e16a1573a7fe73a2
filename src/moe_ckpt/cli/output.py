"""Tables, bars and colours: with rich where it is installed, in plain text where it is not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def rich_console(stderr: bool = False) -> Any | None:
    """A rich console, or None when rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=stderr, highlight=False, soft_wrap=True)


def human_bytes(nbytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """All columns but the first flush right."""
    console = rich_console()
    if console is None:
        print(plain_table(columns, rows))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    # rich would swallow whole columns on a narrow terminal; lines that wrap there can still be read.
    needed = max(map(len, plain_table(columns, rows).split("\n"))) + 2 * len(columns)
    console.width = max(console.width, needed)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as text."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def print_cells(label: str, cells: Sequence[tuple[str, float]]) -> None:
    """One line of a heat table. Each cell has a heat from 0 (fresh, green) to 1 (stale, red)."""
    console = rich_console()
    if console is None:
        print(label + "".join(text for text, _ in cells))
        return
    from rich.text import Text

    line = Text(label)
    for text, heat in cells:
        red, green = int(40 + 170 * heat), int(150 - 110 * heat)
        line.append(text, style=f"white on rgb({red},{green},50)")
    console.print(line)


@contextlib.contextmanager
def progress_bar(what: str, unit: str | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, fed with (done, in all); silent when stderr is no terminal. unit: of both; None: bytes."""
    console = rich_console(stderr=True) if sys.stderr.isatty() else None
    if console is None:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counted = (MofNCompleteColumn(), TextColumn(unit)) if unit else (DownloadColumn(binary_units=True),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
