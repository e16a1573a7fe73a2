"""Checkpoints of a simulated run on storage, or on their way there, beside those in memory."""

from __future__ import annotations

from moe_ckpt_sim.run.durable import Durable


class Backup:
    """The newest checkpoint on storage, and the one flush at a time that brings the next.

    Times are absolute seconds of the run.

    Attributes:
        durable: What storage holds; None until it holds something.
        begun_secs: When the newest flush began.
        was_cut_off: A failure cut off a flush, and none was begun since.
    """

    def __init__(self) -> None:
        self.durable: Durable | None = None
        self.begun_secs = 0.0
        self.was_cut_off = False
        self._coming: Durable | None = None
        self._sequence: int | None = None
        self._ends_secs = 0.0

    def begin(self, durable: Durable, at_secs: float, takes_secs: float, sequence: int | None = None) -> None:
        """``durable`` is written to storage from ``at_secs`` on.

        Args:
            sequence: Of its snapshot, where storage has its own ledger.
        """
        self._coming, self._sequence, self._ends_secs = durable, sequence, at_secs + takes_secs
        self.begun_secs, self.was_cut_off = at_secs, False

    def cut_off(self) -> None:
        """A failure: what is on its way does not arrive."""
        self.was_cut_off = self.was_cut_off or self._coming is not None
        self._coming = None

    def arrived(self, now_secs: float) -> int | None:
        """What is on storage by ``now_secs`` counts from now on.

        Returns:
            The sequence of a snapshot that has arrived, where it has one.
        """
        if self._coming is None or self._ends_secs > now_secs:
            return None
        self.durable, self._coming = self._coming, None
        return self._sequence

    @property
    def ends_secs(self) -> float | None:
        """When what is on its way to storage is there; None where nothing is."""
        return None if self._coming is None else self._ends_secs

    @property
    def step(self) -> int:
        """Of the newest checkpoint that is on storage or on its way there; 0 where there is none."""
        newest = self._coming or self.durable
        return 0 if newest is None else newest.step
