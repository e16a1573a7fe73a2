"""Bars and colours: with rich where it is installed, in plain text where it is not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

from moe_ckpt.tables import rich_console


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


class Tell(Protocol):
    """Told how much is done, of how much; what: what is being done now, if that is another thing than before."""

    def __call__(self, done: float, total: float, what: str | None = None, /) -> None: ...


@contextlib.contextmanager
def progress_bar(what: str, unit: str | None = None, lines: bool = False) -> Iterator[Tell]:
    """A bar on stderr, where that is a terminal and rich is installed.

    Args:
        unit: Of both figures; None: bytes.
        lines: Elsewhere, a line for each thing that is being done; otherwise nothing.
    """
    console = rich_console(stderr=True) if sys.stderr.isatty() else None
    if console is None:
        yield _line_by_line(what) if lines else lambda done, total, what=None, /: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    counted = (
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}") if unit else DownloadColumn(binary_units=True)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), counted, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task, said = progress.add_task(what, total=None, visible=False), what

        def tell(done: float, total: float, what: str | None = None, /) -> None:
            nonlocal said
            if what is not None and what != said:
                said = what
                progress.reset(task, description=what)
            progress.update(task, completed=done, total=total, visible=True)

        yield tell


def _line_by_line(said: str) -> Tell:
    def tell(done: float, total: float, what: str | None = None, /) -> None:
        nonlocal said
        if what is not None and what != said:
            said = what
            print(what, file=sys.stderr, flush=True)

    return tell
