"""Where a run stands: what a training loop is told when it begins, and tells as it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """Where training goes on.

    Attributes:
        iteration: Iterations that are done; the next one to compute is ``iteration + 1``, counted from 1.
        consumed_samples: Samples of the training data that were consumed by then, as ``after_step`` was told.
        restored: False for a run that begins from nothing.
        counters: Whatever else the loop counts, as ``after_step`` or ``skip`` was told last; empty for a run that
            begins from nothing, and for a checkpoint from before there were counters.
    """

    iteration: int = 0
    consumed_samples: int = 0
    restored: bool = False
    counters: Mapping[str, Any] = field(default_factory=dict)
