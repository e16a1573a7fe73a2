"""Compares each snapshot of this rank with the one before: see ``ledger.freshness``."""

from __future__ import annotations

from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.ledger.freshness import FRESH, STALE, UNKNOWN, Checksums, of_all
from moe_ckpt.slices.compiling import GRADIENTS
from moe_ckpt.slices.snapshot import SealedPart, Snapshot


class FreshnessWatch:
    """Watches slices for the sealing thread. It knows them by number on a shelf, and forgets them with the shelf."""

    def __init__(self) -> None:
        self._entries: list[SliceEntry] | None = None
        self._checksums = Checksums()
        self._of_window = UNKNOWN
        self._fresh_after = -1

    def seen(self, snapshot: Snapshot) -> int:
        """Returns what the checksums of a sealed snapshot show: ``UNKNOWN``, ``STALE`` or ``FRESH``.

        In a logged step, all operators saved in full may belong to an optimizer that made no update. Gradients that
        another optimizer consumed show that training continues; their checksums say nothing about the state.

        A sparse window is judged as a whole, at its last slot: perhaps no operator of one slot was updated, such as
        experts that got no tokens.

        Two snapshots after the same update agree: if one is fresh, so is the other. A complete one at the end, beside
        a partial one, may have nothing to compare but frozen experts.
        """
        updates, window, parts = snapshot.facts.updates, snapshot.contents.window, snapshot.sealed or ()
        verdict = of_all(
            self._of(sealed, updates) for sealed in parts if sealed.part.cuts and sealed.part.kind != GRADIENTS
        )
        if verdict == FRESH:
            self._fresh_after = updates
        elif verdict == STALE and updates == self._fresh_after:
            verdict = FRESH
        consumed = any(sealed.part.cuts for sealed in parts if sealed.part.kind == GRADIENTS)
        if window is None:
            return UNKNOWN if consumed and verdict == STALE else verdict
        self._of_window = verdict if window.slot == 0 else of_all((self._of_window, verdict))
        return self._of_window if window.is_last or self._of_window == FRESH else UNKNOWN

    def _of(self, sealed: SealedPart, updates: int) -> int:
        slices = sealed.part.slices
        if slices.entries is not self._entries:
            self._entries, self._checksums = slices.entries, Checksums()
        self._checksums.add([entry.key for entry in slices.entries[len(self._checksums) :]])
        return self._checksums.seal(slices.numbers, sealed.checksums, updates)
