"""The tables of ``memory_tiers.py`` as the documentation has them: all rows, those too that speak against us."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_IDLE, _PRIVATE, _STORAGE = "no checkpoint", "private memory, storage", "storage in the page cache"
_SPANS = ("imports", "open", "resume", "first step", "total")
_HEADS = {"open": "`open`"}
_FROM_OPEN = ("open", "resume", "first step")
_LOST = {"a peer's memory": "a peer's memory, one node lost", _STORAGE: f"{_STORAGE}, both lost"}

Samples = Sequence[Mapping[str, float]]


def tables(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields each table in Markdown.

    Args:
        facts: As ``memory_tiers.py --write`` keeps them.
    """
    for nodes, key in ((2, "stalls"), (3, "three_nodes")):
        yield _stalls(f"{nodes} nodes", facts[key])
    for mib, of_sources in facts["recoveries"].items():
        yield _recoveries(f"{mib} MiB, restored from", of_sources)


def put(facts: Mapping[str, Any], page: Path = PAGE) -> None:
    """Each table takes the place of the one on the page whose first head is the same.

    Raises:
        ValueError: There is none, or more than one.
    """
    text = page.read_text()
    for table in tables(facts):
        head = table[: table.index("|", 2) + 1]
        result = re.findall(rf"^{re.escape(head)}.*\n(?:\|.*\n)*", text, flags=re.M)
        if len(result) != 1:
            raise ValueError(f"{page} has {len(result)} tables that begin with {head!r}, and is to have one")
        text = text.replace(result[0], table)
    page.write_text(text)


def _stalls(title: str, results: Mapping[str, Samples]) -> str:
    """Of each way but none: stall, CPU time beyond that of no checkpoint, and that as a part of private memory's."""
    idle = _median(results[_IDLE], "cpu_secs")
    private = _median(results[_PRIVATE], "cpu_secs") - idle
    rows = []
    for name, samples in results.items():
        beyond = _median(samples, "cpu_secs") - idle
        cells = f"{_median(samples, 'stall_secs') * 1e3:.1f}", f"{beyond * 1e3:.0f}", _ratio(beyond, private)
        if name != _IDLE:
            rows.append([_said(name), *cells])
    return _table([title, "stall ms", "CPU ms beyond no checkpoint", "of private memory's CPU"], rows)


def _said(way: str) -> str:
    """A way of saving, with code marked as such."""
    result = re.sub(r"Memory\([^)]*\)", lambda match: f"`{match[0]}`", way)
    return result.replace("DCP _ReplicationStager", "DCP's `_ReplicationStager`")


def _recoveries(title: str, results: Mapping[str, Samples]) -> str:
    """Of each source: milliseconds of each span, and what those from ``open`` on are of storage's."""
    rows = []
    for name, samples in results.items():
        spans = (f"{_median(samples, key) * 1e3:.0f}" for key in _SPANS)
        ratio = _ratio(_median(samples, *_FROM_OPEN), _median(results[_STORAGE], *_FROM_OPEN))
        rows.append([_LOST.get(name, name), *spans, ratio])
    heads = (_HEADS.get(key, key) for key in _SPANS)
    return _table([title, *heads, f"{' + '.join(_FROM_OPEN)}, of storage's"], rows)


def _median(samples: Samples, *keys: str) -> float:
    return median(sum(sample[key] for key in keys) for sample in samples)


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.2f}" if reference > 0 else "-"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    text[1] = text[1].replace(" ", "")
    return "\n".join(text) + "\n"
