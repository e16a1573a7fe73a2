"""Tables of text, in bold and in colours where a terminal shows them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

PIPED_WIDTH = 100
"""Of tables that go to no terminal, whatever the terminal that they come from, unless ``COLUMNS`` is set."""
GAP = "  "
BOLD, BOLD_RED = "1", "1;31"
_BREAKS = re.compile(r"(?<=[ ./])")


def styled(text: str, style: str, stream: TextIO) -> str:
    """Returns ``text`` in a style of ANSI where ``stream`` is a terminal that shows it, and the user wants that."""
    shows = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
    return f"\x1b[{style}m{text}\x1b[0m" if shows else text


def width() -> int:
    """Columns to fit into: ``COLUMNS`` if it is set, or those of the terminal; ``PIPED_WIDTH`` where there is none."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if re.fullmatch(r"[1-9]\d{0,4}", asked, re.ASCII) else PIPED_WIDTH


def drawn(line: str, plain: str) -> str:
    """``line``, a character of a rule or a bar, or ``plain`` where standard output cannot show it."""
    try:
        line.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return plain
    return line


def wrapped(text: str) -> str:
    """A paragraph no wider than there is room, its further lines set in. Names and paths stay whole."""
    return textwrap.fill(text, width(), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """All columns but the first flush right. What is too wide goes on below, with the first column again."""
    for number, (head, rule, *lines) in enumerate(folded(columns, rows, width())):
        if number:
            print()
        print("\n".join([*(styled(line, BOLD, sys.stdout) for line in head), rule, *lines]))


Block = list[Any]


def folded(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[Block]:
    """Blocks of lines no wider than ``room``, if no two columns are: a list of lines of the head, a rule, rows.

    Heads are broken at spaces, and after a dot or a slash, where that makes their column narrower.
    """
    heads = [_broken(head, max((len(row[at]) for row in rows), default=0)) for at, head in enumerate(columns)]
    widths = [max(map(len, (*head, *(row[at] for row in rows)))) for at, head in enumerate(heads)]
    groups: list[list[int]] = [[]]
    for at in range(1, len(columns)):
        taken = widths[0] + sum(len(GAP) + widths[other] for other in groups[-1])
        if groups[-1] and taken + len(GAP) + widths[at] > room:
            groups.append([])
        groups[-1].append(at)
    return [_block(heads, rows, widths, (0, *group)) for group in groups]


def _block(
    heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], widths: Sequence[int], shown: Sequence[int]
) -> Block:
    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, shown, strict=True)
        flush = [cell.rjust(widths[at]) for cell, at in others]
        return GAP.join([first[0].ljust(widths[first[1]]), *flush]).rstrip()

    height = max(len(heads[at]) for at in shown)
    head = [line([("", *[""] * height, *heads[at])[len(heads[at]) + 1 + row] for at in shown]) for row in range(height)]
    total = sum(widths[at] for at in shown) + len(GAP) * (len(shown) - 1)
    return [head, drawn("─", "-") * total, *(line([row[at] for at in shown]) for row in rows)]


def _broken(head: str, least: int) -> list[str]:
    """The lines of a head over a column that is ``least`` wide anyway."""
    words = [word for word in _BREAKS.split(head) if word]
    least = max([least, *map(len, words)])
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1] + word) > least:
            lines.append("")
        lines[-1] += word
    return [one.strip() for one in lines]
