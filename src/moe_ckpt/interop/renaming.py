"""The same tensors under names that begin differently: ``net.model.embed`` and ``model.embed``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection


def aligned(sources: Collection[str], here: Collection[str]) -> dict[str, str]:
    """Returns name here -> name there, for all that agree once a beginning is taken off each side.

    Of the beginnings that most names of a side share (``""`` among them) those are taken with which most names agree,
    and of these the shortest.
    """
    best: tuple[int, int, dict[str, str]] = (0, 0, {})
    for stripped in beginnings(sources):
        rest = {name[len(stripped) :]: name for name in sources if name.startswith(stripped)}
        for prefix in beginnings(here):
            pairs = {
                name: rest[name[len(prefix) :]]
                for name in here
                if name.startswith(prefix) and name[len(prefix) :] in rest
            }
            best = max(best, (len(pairs), -len(stripped) - len(prefix), pairs), key=lambda candidate: candidate[:2])
    return best[2]


def beginnings(names: Collection[str]) -> list[str]:
    """Returns ``""`` and every dotted beginning that more than half of ``names`` share, shortest first."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")[:-1]
        counts.update(".".join(parts[: depth + 1]) + "." for depth in range(len(parts)))
    return ["", *sorted((start for start, count in counts.items() if 2 * count > len(names)), key=len)]
