"""Cells of a heat table, and progress on a terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from moe_ckpt.core.quantities import human_bytes
from moe_ckpt.tables import styled

_HEAT = (28, 64, 100, 136, 130, 124)
"""From green to red, of the 256 colours of terminals."""
_SHOW_EVERY_SECS = 0.1


def print_cells(label: str, cells: Sequence[tuple[str, float]]) -> None:
    """Prints one line of a heat table. Each cell has a heat from 0 (fresh, green) to 1 (stale, red)."""
    colours = (f"97;48;5;{_HEAT[round(heat * (len(_HEAT) - 1))]}" for _, heat in cells)
    print(label + "".join(styled(text, colour, sys.stdout) for (text, _), colour in zip(cells, colours, strict=True)))


class Tell(Protocol):
    """Told how much is done, of how much; what: what is being done now, if that is another thing than before."""

    def __call__(self, done: float, total: float, what: str | None = None, /) -> None: ...


@contextlib.contextmanager
def progress_bar(what: str, unit: str | None = None, *, lines: bool = False, silent: bool = False) -> Iterator[Tell]:
    """Shows on stderr, where that is a terminal, how much is done, in a line that goes away at the end.

    Args:
        unit: Of both figures; None: bytes.
        lines: Elsewhere, a line for each thing that is being done; otherwise nothing.
        silent: Show nothing anywhere.
    """
    current, terminal, shown_at = what, sys.stderr.isatty() and not silent, 0.0

    def tell(done: float, total: float, what: str | None = None, /) -> None:
        nonlocal current, shown_at
        if what is not None and what != current:
            current = what
            if lines and not terminal and not silent:
                print(what, file=sys.stderr, flush=True)
        if not terminal or time.monotonic() < shown_at + _SHOW_EVERY_SECS:
            return
        shown_at = time.monotonic()
        figures = (
            f"{done:.3g} of {total:.3g} {unit}" if unit else f"{human_bytes(int(done))} of {human_bytes(int(total))}"
        )
        line = f"{figures} ({done / (total or 1):.0%}) {current}"[: shutil.get_terminal_size().columns - 1]
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if shown_at:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
