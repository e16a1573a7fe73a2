"""Options and progress that several commands share: ``--directory``, a line on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from moe_ckpt.core.user_text import human_bytes

DEFAULT_MEMORY = "/dev/shm"
_SHOW_EVERY_SECS = 0.1


def memory_directory(path: str) -> str:
    """Returns ``path`` if it may be a memory directory of a run on this node. The type of ``--directory``."""
    if not os.path.isdir(path):
        what = "is a file, not a directory" if os.path.exists(path) else "there is no such directory"
        raise argparse.ArgumentTypeError(f"{path}: {what}; give the one that the run had as Memory(directory=...)")
    return path


def add_memory(parser: argparse.ArgumentParser, when: str = "read what an ended run left in memory: ") -> None:
    """Adds ``--directory`` to a command that reads what a run left in memory, or that also does so."""
    parser.add_argument(
        "--directory",
        action="append",
        default=[],
        type=memory_directory,
        metavar="DIR",
        help=f"{when}as in Memory(directory=...), once for each node",
    )


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
