"""What a log of gradients costs, in numbers: explains a choice, decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from moe_ckpt.policies.schedules.rolling import held_bytes_per_parameter, most_held_bytes_per_parameter


@dataclass(frozen=True)
class LogReport:
    """A round of one model, with what was known when it was made. ``GradientLog.explain`` makes it.

    Bytes are those of the rank that has most; ``str(report)`` is for people, ``to_dict()`` for programs.

    Attributes:
        window: W, steps of a round.
        dense_bytes: Of everything in full.
        gradient_bytes: Of all gradients: what no round saves less than at each step.
        heaviest_bytes: Of the round's heaviest step.
        mean_bytes: Of its steps.
        limit_bytes: Most that a step may save; None while not known.
        most_window: The longest round that was allowed.
        iteration_secs: None while not known.
        unlimited: W, if host memory had more room; 0 while not known.
    """

    window: int
    dense_bytes: int
    gradient_bytes: int
    heaviest_bytes: int
    mean_bytes: float
    limit_bytes: int | None = None
    most_window: int = 0
    iteration_secs: float | None = None
    unlimited: int = 0

    @property
    def fits(self) -> bool | None:
        """True if each step keeps within the limit; None where that is not known."""
        return None if self.limit_bytes is None else self.heaviest_bytes <= self.limit_bytes

    @property
    def gradients_fit(self) -> bool | None:
        """True if gradients alone keep within the limit, so that some round would fit if it were long enough."""
        return None if self.limit_bytes is None else self.gradient_bytes < self.limit_bytes

    @property
    def stall_secs(self) -> float | None:
        """Seconds that the heaviest step takes longer than there is time for; None where that is not known."""
        if not self.limit_bytes or not self.iteration_secs:
            return None
        return max(0.0, self.heaviest_bytes / self.limit_bytes - 1) * self.iteration_secs

    @property
    def held_bytes(self) -> float:
        """Bytes of the log that memory holds: anchors, the gradients since, and the step that comes in."""
        return held_bytes_per_parameter(self.window, self.gradient_bytes, self.dense_bytes) + self.mean_bytes

    @property
    def most_held_bytes(self) -> float:
        """The most, when the first round after a dense step ends."""
        return most_held_bytes_per_parameter(self.window, self.gradient_bytes, self.dense_bytes) + self.mean_bytes

    @property
    def warning(self) -> str | None:
        """One sentence if steps weigh more than there is time for, with the reason, or if host memory has no room for
        the round that was wanted; None if neither is so, or if unknown."""
        warnings = [warning for warning in (self._memory_warning, self._time_warning) if warning is not None]
        return "; ".join(warnings) if warnings else None

    @property
    def _memory_warning(self) -> str | None:
        if self.unlimited <= self.window:
            return None
        return (
            f"host memory has no room for rounds of W = {self.unlimited}, so W = {self.window}; host_memory_bytes sets "
            "how much it has"
        )

    @property
    def _time_warning(self) -> str | None:
        if self.fits is not False:
            return None
        stall = "" if self.stall_secs is None else f"; training stalls by up to {self.stall_secs:.3g} s per step"
        numbers = f"{self.heaviest_bytes:,} bytes per rank, {self.limit_bytes or 0:,} would fit"
        what = f"a log of gradients with rounds of W = {self.window} does not fit into an iteration ({numbers})"
        if self.gradients_fit:
            why = f"a longer round would, and {self.most_window} steps are the most"
        else:
            why = (
                f"the gradients alone have {self.gradient_bytes:,}, in a round of any length: use MoEvement, which "
                "saves no gradients, or a policy that does not save at each step"
            )
        return f"{what}: {why}{stall}"

    def sentences(self) -> Iterator[str]:
        """Returns sentences that say what the round costs, and whether it fits."""
        yield (
            f"W = {self.window}: {self.mean_bytes:,.0f} bytes per rank and step on average, {self.heaviest_bytes:,} at "
            f"most; gradients alone {self.gradient_bytes:,}, everything in full {self.dense_bytes:,}"
        )
        if self.fits is not None:
            yield self.warning or f"each step fits ({self.limit_bytes:,} bytes)"
        yield (
            f"memory holds {self.held_bytes:,.0f} bytes per rank, up to {self.most_held_bytes:,.0f} in the round after "
            f"a dense step; a failure costs the step under way, and up to {self.window - 1} optimizer steps"
        )

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, ready for JSON."""
        derived = ("fits", "gradients_fit", "stall_secs", "held_bytes", "most_held_bytes")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}
