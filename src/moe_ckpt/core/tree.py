"""The tree over which ranks combine small messages: binomial, rooted at rank 0, and computed by every rank alone.

The parent of a rank is the rank without its lowest bit that is set. So the subtree of a rank is the ranks that follow
it, up to that bit, and what a subtree sends up is in the order of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeNode:
    """One rank's place in the tree.

    Attributes:
        rank: Which.
        ranks: How many there are, R.
    """

    rank: int
    ranks: int

    @property
    def parent(self) -> int | None:
        """None for rank 0."""
        return self.rank & (self.rank - 1) if self.rank else None

    @property
    def children(self) -> tuple[int, ...]:
        """In ascending order, smallest subtree first."""
        children = []
        bit = 1
        while self.rank + bit < self.ranks and not self.rank & bit:
            children.append(self.rank + bit)
            bit <<= 1
        return tuple(children)

    @property
    def messages(self) -> int:
        """Messages that this rank sends for one value combined at rank 0 and broadcast."""
        return len(self.children) + (0 if self.parent is None else 1)
