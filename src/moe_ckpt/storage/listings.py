"""Lists directories again only if a name may have been added or removed since.

A file system records when a directory last changed: its stamp. A listing is still true if the stamp is the same, and
if the listing was made so long after the change that a coarse clock cannot hide another one. Stamps are checked: the
stamp of a directory in which this process has just written must differ, and now and then the directory that was not
listed for longest is listed anyway; if its names differ, stamps are no longer used. If a storage has no stamps, all
directories are listed, several at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.storage.base import Stamp, Stamped, Storage
from moe_ckpt.threads import ThreadName, named_pool

log = logging.getLogger("moe_ckpt")

_COARSE_NS, _FINE_NS = 2_000_000_000, 250_000_000
"""Changes so far apart have different stamps. Coarse: FAT's clock has two seconds. Fine: clocks with nanoseconds tick
every 10 ms at most, but some file systems note a second change only after 100 ms."""
_CALLS_PER_CHECK = 8
_LISTERS = 8
"""Threads, where each listing is a message to a server."""


@dataclass(frozen=True)
class _DirectoryListing:
    """The names in a directory.

    Attributes:
        stamp: Of the directory, taken just before the listing.
        at_unix_ns: A time before the stamp was taken, by the file system's clock.
    """

    names: frozenset[str]
    stamp: Stamp | None
    at_unix_ns: int

    def still_holds(self, stamp: Stamp | None) -> bool:
        """Returns whether the listing is true still, if the directory's stamp is this now."""
        if stamp is None or stamp != self.stamp:
            return False
        is_fine = stamp.changed_unix_ns % 1_000_000 > 0
        return stamp.changed_unix_ns + (_FINE_NS if is_fine else _COARSE_NS) < self.at_unix_ns


class Listings:
    """Lists the directories of a storage. For one thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._stamped = storage if isinstance(storage, Stamped) else None
        self._seen: dict[str, _DirectoryListing] = {}  # those that were not listed for longest first
        self._written: tuple[str, Stamp | None] = "", None
        self._believed = True
        self._calls = 0

    def names(self, directories: Sequence[str], latest: str | None = None) -> dict[str, frozenset[str]]:
        """Returns the names in each of the directories; the same object as last time if the names are the same.

        Args:
            directories: All that matter now; others are forgotten.
            latest: A directory in which files were written just now, so that its stamp gives the time.

        Raises:
            OSError: The storage does not answer.
        """
        self._calls += 1
        written, before_writing = self._written
        moved = before_writing is not None and self._stamp(written) not in (None, before_writing)
        stamps = {
            directory: self._stamp(directory) for directory in (*directories, *([] if latest is None else [latest]))
        }
        now = max((stamp.changed_unix_ns for stamp in stamps.values() if stamp is not None), default=0)
        unchanged = [
            directory for directory, seen in self._seen.items() if moved and seen.still_holds(stamps.get(directory))
        ]
        checked = unchanged[: self._calls % _CALLS_PER_CHECK == 0]
        spared = set(unchanged[len(checked) :])
        for directory, names in self._list([directory for directory in directories if directory not in spared]).items():
            before = self._seen.pop(directory, None)
            if before is not None and before.names == names:
                names = before.names
            elif directory in checked and self._stamp(directory) == stamps[directory]:
                self._believed = False
                log.warning(
                    "%s does not report when a directory changes: directories are listed each time", self._storage.root
                )
            self._seen[directory] = _DirectoryListing(names, stamps[directory], now)
        for directory in self._seen.keys() - set(directories):
            del self._seen[directory]
        return {directory: self._seen[directory].names for directory in directories}

    def expect_change(self, directory: str) -> None:
        """Notes that a file is written into a directory now, so that its stamp must differ next time."""
        self._written = directory, self._seen[directory].stamp if directory in self._seen else None

    def _stamp(self, directory: str) -> Stamp | None:
        return self._stamped.stamp(directory) if self._believed and self._stamped is not None else None

    def _list(self, directories: Sequence[str]) -> dict[str, frozenset[str]]:
        if self._stamped is not None or len(directories) < 2:
            return {directory: frozenset(self._storage.list(directory)) for directory in directories}
        with named_pool(ThreadName.LIST, min(_LISTERS, len(directories))) as pool:
            return dict(zip(directories, map(frozenset, pool.map(self._storage.list, directories)), strict=True))
