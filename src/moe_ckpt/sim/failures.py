"""When nodes fail: Poisson, Weibull, or a trace; and how often, from what a cluster is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moe_ckpt.sim.checks import above_zero


@dataclass(frozen=True)
class Event:
    """What happens to one node. at_secs: since the start of the job. joins: it comes back, as a spare."""

    at_secs: float
    node: int
    joins: bool = False


class Failures(Protocol):
    """Where failures come from."""

    def events(self, rng: np.random.Generator, nodes: int) -> Iterator[Event]:
        """In order of time, without end unless the source has one. nodes: those that training runs on, 0 to nodes-1."""
        ...

    @property
    def mean_secs(self) -> float | None:
        """Mean time between failures of the whole job; None where nothing fails."""
        ...


_MICRO = 1e6


@dataclass(frozen=True)
class Poisson:
    """Failures without memory, ``mtbf_secs`` apart on average, of a node drawn evenly."""

    mtbf_secs: float

    def __post_init__(self) -> None:
        above_zero("Poisson", mtbf_secs=self.mtbf_secs)

    @property
    def mean_secs(self) -> float | None:
        return self.mtbf_secs

    def events(self, rng: np.random.Generator, nodes: int) -> Iterator[Event]:
        at = 0.0
        while True:
            at += self.mtbf_secs * -math.log1p(-rng.random())
            yield Event(round(at * _MICRO) / _MICRO, int(rng.integers(nodes)))
