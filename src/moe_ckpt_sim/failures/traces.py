"""Failures that were recorded, as CSV.

::

    # comments begin so
    time,event,node
    412.5,remove,7
    1030,add,7

time: seconds since the start, never falling. event: ``remove`` when a node fails, ``add`` when it is back, ``kill``
when only a process on it dies. node: from 0 up to one less than training runs on; all are there at the start.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import IO

import numpy as np

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import above_zero, at_least, flag, not_none, whole
from moe_ckpt_sim.failures.failures import FailureEvent

HEADER = ["time", "event", "node"]
SHIPPED = "package:"
"""Prefix for the name of a trace of this package, in ``moe_ckpt_sim/conf/simulate/failures``."""

_TIME = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_NODE = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class Trace:
    """Failures as they were recorded.

    The trace is read row by row: once when the object is made, so that errors precede the simulation, and once per
    simulation.

    Attributes:
        path: A CSV file, or ``package:NAME`` for one of this package.
        recorded: The events themselves, instead of a file.
        repeat: Begin again every ``period_secs``; nodes that are away then come back.
        period_secs: None for the time of the last event.

    Raises:
        ConfigError: naming file, line and field: a time below 0 or before the row above, an unknown event, a node that
            is no number, that is removed while away or added while there; no row at all; from ``events``: a node that
            training does not have.
    """

    path: str | None = None
    recorded: tuple[FailureEvent, ...] = ()
    repeat: bool = False
    period_secs: float | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.recorded):
            raise ConfigError(
                f"Trace(path={self.path!r}, recorded={len(self.recorded)} events): give one of both, and at least one "
                "event"
            )
        if self.path is not None and not isinstance(self.path, str):
            raise ConfigError(f"Trace(path={self.path!r}): path must be the name of a CSV file")
        above_zero("Trace", **not_none(period_secs=self.period_secs))
        flag("Trace", repeat=self.repeat)
        last = self._extent.last_secs
        if self.period_secs is not None and self.period_secs < last:
            raise ConfigError(
                f"Trace(period_secs={self.period_secs!r}): {self._name} goes on until {last!r} s; period_secs must "
                "not be below that"
            )
        if self.repeat and not self._period:
            raise ConfigError(
                f"Trace(repeat=True): all events of {self._name} are at 0 s, so it would repeat at once, "
                "without end; give period_secs"
            )

    @property
    def tells_joins(self) -> bool:
        """Always true: ``add`` events do."""
        return True

    @property
    def mean_secs(self) -> float | None:
        """Always None: some failures of a trace may be close together, so its mean need not exceed restarts."""
        return None

    def events(self, rng: np.random.Generator, nodes: int) -> Iterator[FailureEvent]:
        """The events of the trace, the same whatever ``rng``."""
        whole("Trace.events", nodes=nodes)
        if self._extent.node >= nodes:
            raise ConfigError(
                f"{self._extent.where}: node {self._extent.node}, but training runs on {nodes} nodes (0 to {nodes - 1})"
            )
        return self._rounds()

    def _rounds(self) -> Iterator[FailureEvent]:
        start = 0.0
        while True:
            away: set[int] = set()
            for _, event in self._rows():
                if not event.process:
                    (away.discard if event.joins else away.add)(event.node)
                yield replace(event, at_secs=_micros(start + event.at_secs))
            if not self.repeat:
                return
            start += self._period
            for node in sorted(away):
                yield FailureEvent(_micros(start), node, joins=True)

    @property
    def _period(self) -> float:
        return self._extent.last_secs if self.period_secs is None else self.period_secs

    @property
    def _name(self) -> str:
        return "the trace given" if self.path is None else f"{self.path}"

    @cached_property
    def _extent(self) -> _Extent:
        """The last time and highest node, from a pass over all rows."""
        last_secs, node, where = 0.0, -1, ""
        for at, event in self._rows():
            last_secs = event.at_secs
            if event.node > node:
                node, where = event.node, at
        if not where:
            raise ConfigError(f"{self._name}: no event in it; for a run without failures use failures: none")
        return _Extent(last_secs, node, where)

    def _rows(self) -> Iterator[tuple[str, FailureEvent]]:
        """The checked rows: (position for messages, event)."""
        if self.path is None:
            yield from _in_order((f"event {number} of the trace given", e) for number, e in enumerate(self.recorded, 1))
            return
        with _opened(self.path) as handle:
            yield from _in_order(_parsed(self.path, handle))


@dataclass(frozen=True)
class _Extent:
    """The extent of a trace. last_secs: time of its last event. node: the highest, which ``where`` names first."""

    last_secs: float
    node: int
    where: str


@contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    """Open the trace as text.

    Raises:
        ConfigError: it cannot be opened, or is no text.
    """
    try:
        if path.startswith(SHIPPED):
            with _shipped(path.removeprefix(SHIPPED)) as handle:
                yield handle
        else:
            # Spreadsheets write a byte order mark before the first field, which utf-8-sig skips.
            with Path(path).open(encoding="utf-8-sig", newline="") as handle:
                yield handle
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"Trace(path={path!r}): cannot be read as CSV: {error}") from error


def _shipped(name: str) -> IO[str]:
    folder = resources.files("moe_ckpt_sim").joinpath("conf", "simulate", "failures")
    names = sorted(one.name for one in folder.iterdir() if one.name.endswith(".csv"))
    if name not in names:
        raise ConfigError(f"Trace(path={SHIPPED + name!r}): this package has {', '.join(names)}")
    return folder.joinpath(name).open("r", encoding="utf-8")


def _parsed(path: str, handle: IO[str]) -> Iterator[tuple[str, FailureEvent]]:
    reader = csv.reader(handle)
    headed = False
    for row in reader:
        if not row or row[0].lstrip().startswith("#"):
            continue
        fields = [field.strip() for field in row]
        where = f"{path}, line {reader.line_num}"
        if not headed:
            if fields != HEADER:
                raise ConfigError(f"{where}: the first row must be {','.join(HEADER)}, not {','.join(row)!r}")
            headed = True
            continue
        yield where, _event(where, fields)
    if not headed:
        raise ConfigError(f"{path}: empty; the first row must be {','.join(HEADER)}")


def _event(where: str, fields: list[str]) -> FailureEvent:
    if len(fields) != len(HEADER):
        raise ConfigError(f"{where}: {len(fields)} fields; there must be {len(HEADER)}: {','.join(HEADER)}")
    time, event, node = fields
    if not _TIME.fullmatch(time):
        raise ConfigError(f"{where}: time {time!r} is not a number of seconds")
    if event not in ("remove", "add", "kill"):
        raise ConfigError(f"{where}: event {event!r} must be 'remove', 'add' or 'kill'")
    if not _NODE.fullmatch(node):
        raise ConfigError(f"{where}: node {node!r} is not a whole number from 0 on")
    return FailureEvent(float(time), int(node), joins=event == "add", process=event == "kill")


def _in_order(rows: Iterable[tuple[str, FailureEvent]]) -> Iterator[tuple[str, FailureEvent]]:
    """Yield the rows, each checked against the rows before. Only the nodes that are away are remembered."""
    latest, away = 0.0, set[int]()
    for where, event in rows:
        at_least(where, 0, time=event.at_secs)
        whole(where, 0, node=event.node)
        if event.at_secs < latest:
            raise ConfigError(f"{where}: time {event.at_secs!r} is before {latest!r} of an earlier row; sort by time")
        if event.joins != (event.node in away):
            problem = "is added, but is there" if event.joins else "is removed, but is away already"
            problem = "has a process killed, but is away" if event.process else problem
            raise ConfigError(f"{where}: node {event.node} {problem}")
        if not event.process:
            (away.discard if event.joins else away.add)(event.node)
        latest = event.at_secs
        yield where, event


def _micros(secs: float) -> float:
    return round(secs * 1e6) / 1e6
