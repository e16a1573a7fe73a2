"""Snapshots of which the ranks do not know yet whether all have them: in which order, and who was asked about what."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field


@dataclass
class Unsettled:
    """Snapshots of one rank, by sequence; the order is the same on all ranks.

    Attributes:
        open: Those that began, the oldest first.
        asked: Those of them that the agreement under way is about.
        next: The sequence after the newest that began.
    """

    open: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    next: int = 0

    def begun(self, sequence: int) -> None:
        """A snapshot began."""
        self.open.append(sequence)
        self.next = sequence + 1

    def ask(self, most: int, copied: Callable[[int], bool]) -> list[int]:
        """Returns the oldest, at most so many that peers get and so many others: what the next agreement is about."""
        sent = [sequence for sequence in self.open if copied(sequence)]
        others = [sequence for sequence in self.open if not copied(sequence)]
        self.asked = [*sent[:most], *others[:most]]
        return self.asked

    def answered(self) -> list[int]:
        """Returns what the agreement that has ended was about."""
        asked, self.asked = self.asked, []
        return asked

    def ended(self, sequences: Collection[int]) -> None:
        """The ranks know what became of them."""
        self.open = [sequence for sequence in self.open if sequence not in sequences]
