"""Sources of failures: memoryless, Weibull, by the cluster's components, or none; traces are in ``failures.traces``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import above_zero, at_least, portion, whole
from moe_ckpt_sim.failures.formulas import Component, system_mtbf_hours


@dataclass(frozen=True)
class FailureEvent:
    """An event of one node, which fails or comes back.

    Attributes:
        at_secs: Seconds since the start of the job.
        joins: The node comes back, as a spare.
        process: Only a process on the node dies, and its launcher restarts the others there; the node and its memory
            stay.
    """

    at_secs: float
    node: int
    joins: bool = False
    process: bool = False


class Failures(Protocol):
    """A source of failures."""

    def events(self, rng: np.random.Generator, nodes: int) -> Iterator[FailureEvent]:
        """The events in order of time, without end unless the source ends.

        Several events at one time are one failure that takes several nodes.

        Args:
            nodes: The number of nodes that training runs on; they are 0 to nodes-1.
        """
        ...

    @property
    def mean_secs(self) -> float | None:
        """Mean time between failures of the whole job; None without failures and for a trace."""
        ...

    @property
    def tells_joins(self) -> bool:
        """True if ``events`` says when nodes come back; otherwise each is repaired (``Cluster.repair_secs``)."""
        ...


@dataclass(frozen=True)
class NoFailures:
    """Nothing ever fails."""

    @property
    def tells_joins(self) -> bool:
        return False

    @property
    def mean_secs(self) -> float | None:
        return None

    def events(self, rng: np.random.Generator, nodes: int) -> Iterator[FailureEvent]:
        return iter(())


@dataclass(frozen=True)
class Poisson:
    """Memoryless failures, ``mtbf_secs`` apart on average, of a node drawn evenly.

    The same seed gives the same failures on another scale of time: with half the MTBF each comes at half its time, on
    the same node.

    Attributes:
        process_share: Portion of failures that end processes only (``FailureEvent.process``).
        domain_share: Portion of failures that take all ``domain_nodes`` neighbours that share a rack or a switch with
            the node. The others take the node alone.
    """

    mtbf_secs: float
    process_share: float = field(default=0.0, kw_only=True)
    domain_share: float = field(default=0.0, kw_only=True)
    domain_nodes: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        above_zero(owner, mtbf_secs=self.mtbf_secs)
        portion(owner, process_share=self.process_share, domain_share=self.domain_share)
        whole(owner, domain_nodes=self.domain_nodes)
        if self.process_share + self.domain_share > 1:
            raise ConfigError(
                f"{owner}(process_share={self.process_share!r}, domain_share={self.domain_share!r}): together they are "
                "more than all failures"
            )

    @property
    def tells_joins(self) -> bool:
        return False

    @property
    def mean_secs(self) -> float | None:
        return self.mtbf_secs

    def events(self, rng: np.random.Generator, nodes: int) -> Iterator[FailureEvent]:
        whole(f"{type(self).__name__}.events", nodes=nodes)
        return self._drawn(rng, nodes)

    def _drawn(self, rng: np.random.Generator, nodes: int) -> Iterator[FailureEvent]:
        at = 0.0
        while True:
            at += self._between(_waiting(rng))
            node, remainder = divmod(rng.random() * nodes, 1.0)  # one draw: the remainder says what dies
            yield from self._at(_whole_micros(at), int(node), remainder, nodes)

    def _at(self, secs: float, node: int, remainder: float, nodes: int) -> Iterator[FailureEvent]:
        if remainder < self.process_share:
            yield FailureEvent(secs, node, process=True)
        elif remainder >= 1 - self.domain_share:
            first = node - node % self.domain_nodes
            yield from (FailureEvent(secs, one) for one in range(first, min(first + self.domain_nodes, nodes)))
        else:
            yield FailureEvent(secs, node)

    def _between(self, waiting: float) -> float:
        """Seconds between two failures, from an exponential draw of mean 1."""
        return self.mtbf_secs * waiting


@dataclass(frozen=True)
class Weibull(Poisson):
    """Failures of the whole job, ``mtbf_secs`` apart on average, with Weibull-distributed times between them.

    Attributes:
        shape: Below 1 failures come in bursts, with long quiet times (0.7 to 0.8 in high-performance computing:
            Schroeder and Gibson, DSN 2006); 1 is Poisson, to the same draws; above 1 they come more evenly.

    The process starts again at each failure (a renewal process). The same seed scales with the MTBF as for ``Poisson``.
    """

    shape: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        # Below that nearly all failures come at once, and rare waits of a billion times the mean make up the mean.
        at_least("Weibull", 0.1, shape=self.shape)

    def _between(self, waiting: float) -> float:
        scale = self.mtbf_secs / math.gamma(1 + 1 / self.shape)
        return scale * float(waiting ** (1 / self.shape))


@dataclass(frozen=True)
class Components:
    """Memoryless failures of a cluster's components; their rates add.

    Attributes:
        table: Name -> {count, mtbf_hours, blast_nodes}, or ``Component``s, with the count of all that can stop the
            job. The order does not matter.

    The component that fails is drawn by the rates, then evenly its node or, with ``blast_nodes``, one of the groups of
    so many neighbours, all of which fail at that time.
    """

    table: Mapping[str, Mapping[str, Any]] | Sequence[Component]

    def __post_init__(self) -> None:
        _ = self.parts

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        """The components of the table, sorted by name."""
        return _components(self.table)

    @property
    def tells_joins(self) -> bool:
        return False

    @property
    def mean_secs(self) -> float | None:
        return system_mtbf_hours(self.parts) * 3600

    def events(self, rng: np.random.Generator, nodes: int) -> Iterator[FailureEvent]:
        whole("Components.events", nodes=nodes)
        return self._drawn(rng, nodes)

    def _drawn(self, rng: np.random.Generator, nodes: int) -> Iterator[FailureEvent]:
        mean = system_mtbf_hours(self.parts) * 3600
        reach = list(accumulate(one.failures_per_hour for one in self.parts))
        at = 0.0
        while True:
            at += mean * _waiting(rng)
            point = rng.random() * reach[-1]
            failed = next((one for one, end in zip(self.parts, reach, strict=True) if point < end), self.parts[-1])
            group = failed.blast_nodes * _below(rng, -(-nodes // failed.blast_nodes))
            for node in range(group, min(group + failed.blast_nodes, nodes)):
                yield FailureEvent(_whole_micros(at), node)


def _components(table: Mapping[str, Mapping[str, Any]] | Sequence[Component]) -> tuple[Component, ...]:
    """The components of ``table``, checked and sorted by name."""
    if not isinstance(table, (Mapping, Sequence)) or isinstance(table, str):
        raise ConfigError(f"Components(table={table!r}): give a count and mtbf_hours for the name of each component")
    components = tuple(_named(name, row) for name, row in table.items()) if isinstance(table, Mapping) else tuple(table)
    if not components:
        raise ConfigError("Components(table={}): name at least one component, or use failures: none")
    names = [one.name for one in components]
    if len(set(names)) < len(names):
        raise ConfigError(f"Components: {max(names, key=names.count)!r} is in the table twice")
    return tuple(sorted(components, key=lambda one: one.name))


_FIELDS = ("count", "mtbf_hours", "blast_nodes")


def _named(name: str, row: Mapping[str, Any]) -> Component:
    names = set(row) if isinstance(row, Mapping) else set()
    if not {"count", "mtbf_hours"} <= names <= set(_FIELDS):
        raise ConfigError(
            f"Components(table[{name!r}]={row!r}): give count and mtbf_hours, and blast_nodes where one "
            "takes down several nodes"
        )
    return Component(name, **row)


def _waiting(rng: np.random.Generator) -> float:
    """Draw from the exponential distribution of mean 1 by one inversion, so that no rate changes other draws."""
    return -math.log1p(-rng.random())


def _below(rng: np.random.Generator, count: int) -> int:
    """Draw from 0 to ``count - 1``, by exactly one draw: failure times do not depend on the number of nodes."""
    return int(rng.random() * count)


def _whole_micros(secs: float) -> float:
    """Round to microseconds, since two machines' logarithms may differ in the last bit."""
    return round(secs * 1e6) / 1e6
