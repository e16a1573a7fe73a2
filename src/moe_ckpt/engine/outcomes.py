"""Outcomes of snapshots, and the count of failed checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_ckpt.core.window import Window

Superseded = Mapping[str, tuple[bool, Sequence[str]]]


@dataclass(frozen=True)
class StorageOutcome:
    """The message of rank 0 to all ranks about one snapshot.

    Attributes:
        cause: Why it was not committed; None if it was.
        lost: Files that older checkpoints had written are gone, so that nothing on storage may be built upon.
        differs: The ranks' shares do not tile the plan: rank 0 asks for them box by box, to say what is wrong.
        superseded: What no checkpoint needs any more, for each rank to delete its own of it: step directory -> (True if
            nothing of this format is left in it then, groups of files).
    """

    cause: str | None = None
    lost: bool = False
    differs: bool = False
    superseded: Superseded = field(default_factory=dict)

    def encode(self) -> bytes:
        return json.dumps([self.cause, self.lost, self.differs, self.superseded]).encode()

    @classmethod
    def decode(cls, raw: bytes) -> StorageOutcome:
        return cls(*json.loads(raw))


@dataclass(frozen=True)
class Resolution:
    """The end of one snapshot.

    Attributes:
        sequence: See ``Snapshot``.
        step: Likewise.
        directory: Likewise.
        committed: It was.
        cause: Why it was not.
        persist_secs: From its beginning to its end.
        nbytes: Of this rank's tensors.
        copy_secs: To host memory.
        write_secs: From there to the end.
        lost: See ``StorageOutcome``.
    """

    sequence: int
    step: int
    directory: str
    committed: bool
    cause: str | None
    persist_secs: float
    nbytes: int = 0
    copy_secs: float = 0.0
    write_secs: float = 0.0
    lost: bool = False


@dataclass
class FailureCount:
    """Counts checkpoints that failed. The steps of a sparse window are one checkpoint together, and fail as one.

    Attributes:
        total: Of this life of the run.
        in_row: Since the last one that was committed.
    """

    total: int = 0
    in_row: int = 0
    _windows: set[int] = field(default_factory=set)

    def note(self, window: Window | None, slot: int, *, committed: bool) -> bool:
        """Count one snapshot. Returns True if with it one more checkpoint has failed."""
        if committed:
            if window is None or slot + 1 == window.size:
                self.in_row = 0
                self._windows.clear()
            return False
        if window is not None:
            if self.has_failed(window):
                return False
            self._windows.add(window.start)
        self.total += 1
        self.in_row += 1
        return True

    def has_failed(self, window: Window) -> bool:
        """True if a step of this window failed already, so that the others are of no use."""
        return window.start in self._windows
