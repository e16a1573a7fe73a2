"""One slot: a room of an arena, which outlives the process, and the header beside it that describes its bytes."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from pathlib import Path

import torch

from moe_ckpt.errors import DamagedError, MemoryGoneError
from moe_ckpt.format.shard import MAX_HEADER_BYTES
from moe_ckpt.format.slot import SlotHeader, decode_slot
from moe_ckpt.memory.arena import ARENA, COPIES, Arena, Buffer, telling_if_full
from moe_ckpt.memory.mapping import Identity, Pages, identity, identity_at
from moe_ckpt.storage.local import PRIVATE, read_up_to

log = logging.getLogger("moe_ckpt")

HEADER_SUFFIX, QUARANTINE_SUFFIX = ".head", ".damaged"
STARTS_SUFFIX = ".starts"
"""A file with one byte for each start of the run that resumed from the slot and did not advance."""
OWN_PREFIX, COPY_PREFIX = "slot", "copy"
"""Prefixes of the names of slots in ``ARENA`` and in ``COPIES``. After ``AT`` comes the first byte of the room."""
AT = "@"
_SPARE = "spare.tmp"
"""The header that was unsealed last. The next one is written into its pages, since freeing them delays training."""
_MOST_HEADER_NBYTES = 4 * MAX_HEADER_BYTES


class Slot:
    """Mapped bytes of a file, until ``remove``; or a room of private memory, which ends with the process.

    A private slot has no files, so that there is nothing to rename or delete, and no starts are counted: those within
    one process are counted by the program that restarts training.

    Not safe for use from several threads at once, nor in a forked child, which has zeros in place of the bytes.

    Args:
        path: Of the slot's files, without a suffix; of private memory a name for people.
        memory: ``[nbytes]`` uint8, the mapped bytes.
        file: Identity of the file that has the bytes; None for private memory.
        room: Room of an arena that ``remove`` gives back; None if the room is another object's to give back. That of a
            private slot is the owner's to give back.
        pages: Map the bytes for this slot alone; None for a room of this life's arenas.
    """

    def __init__(
        self,
        path: Path,
        memory: torch.Tensor,
        file: Identity | None,
        room: Buffer | None = None,
        pages: Pages | None = None,
    ) -> None:
        self.path, self.memory, self.file = path, memory, file
        self.room, self._pages = room, pages

    @classmethod
    def of(cls, path: Path, room: Buffer, *, frees: bool = False) -> Slot:
        """Returns a slot of this life.

        Args:
            path: Of the slot's files, without a suffix and without the first byte.
            room: In the arena of the same directory that the name's prefix stands for.
            frees: ``remove`` gives the room back.
        """
        file = None if room.arena is None else room.arena.identity
        return cls(path.with_name(f"{path.name}{AT}{room.begin}"), room.memory, file, room if frees else None)

    @classmethod
    def open(cls, path: Path) -> tuple[Slot, SlotHeader]:
        """Maps a sealed slot. Returns it with its header; slices are not verified.

        Raises:
            DamagedError: The header is damaged, or the file has fewer bytes than the header says.
            OSError: There is no such slot, or it cannot be read.
        """
        header_path = path.with_suffix(HEADER_SUFFIX)
        header = decode_slot(_read(header_path), str(header_path))
        data, begin = data_of(path)
        descriptor = os.open(data, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        pages = Pages(status.st_size, descriptor)
        pages.close_file()
        if status.st_size < begin + header.nbytes:
            raise DamagedError(
                str(data),
                f"it has {max(0, status.st_size - begin):,} bytes there, but its header says {header.nbytes:,}",
                step=header.step,
                rank=header.rank,
            )
        return cls(path, pages.bytes(begin, header.nbytes), identity(status), pages=pages), header

    def adopt(self, arena: Arena) -> None:
        """Takes the slot's room in an arena, if that has the same file, until the slot is removed and ``memory`` is not
        used any more.

        Raises:
            ValueError: Another room has some of the bytes.
        """
        if self.file == arena.identity:
            self.room = arena.adopt(data_of(self.path)[1], self.memory.numel())

    def seal(self, header: bytes) -> None:
        """Seals the slot: later processes may read it from now on, and its bytes must not change any more.

        Raises:
            MemoryFullError: There is no room for the header.
            MemoryGoneError: Somebody has deleted the file with the bytes.
            OSError: The header cannot be written.
        """
        if not self.is_there:
            raise MemoryGoneError(str(self.path))
        unfinished = self.path.with_suffix(".tmp")
        try:
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(_SPARE).rename(unfinished)
            full = telling_if_full(self.path.parent, len(header))
            with full, open(PRIVATE.create(str(unfinished), os.O_WRONLY), "wb") as file:
                file.write(header)
                file.truncate()
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        unfinished.rename(self.path.with_suffix(HEADER_SUFFIX))

    @property
    def is_there(self) -> bool:
        """Returns whether the file with the bytes still has its name; False once somebody has deleted it."""
        return identity_at(data_of(self.path)[0]) == self.file

    @property
    def is_sealed(self) -> bool:
        """Returns whether later processes may read the slot."""
        return self.path.with_suffix(HEADER_SUFFIX).exists()

    def unseal(self) -> None:
        """Makes the slot unreadable for later processes, before its bytes change."""
        with contextlib.suppress(FileNotFoundError):
            self.path.with_suffix(HEADER_SUFFIX).rename(self.path.with_name(_SPARE))

    def remove(self) -> None:
        """Deletes the slot's files; an error is a warning. ``memory`` of an earlier life stays while it is used."""
        room, self.room = self.room, None
        if not remove_files(self.path) or room is None or room.arena is None:
            return
        if self._pages is None:
            room.arena.free(room)
        else:
            weakref.finalize(self._pages, room.arena.free, room)

    @property
    def starts(self) -> int:
        """Returns how many starts in a row have resumed from the slot without advancing."""
        try:
            return self.path.with_suffix(STARTS_SUFFIX).stat().st_size
        except OSError:
            return 0

    def note_start(self) -> None:
        """Counts one more start that resumes from the slot; an error is a warning."""
        if self.file is None:
            return
        path = str(self.path.with_suffix(STARTS_SUFFIX))
        try:
            with open(PRIVATE.create(path, os.O_WRONLY | os.O_APPEND), "ab") as file:
                file.write(b".")
        except OSError as error:
            log.warning("cannot record that this start resumes from %s: %s", self.path, error)

    def withdraw_start(self) -> None:
        """Takes the last ``note_start`` back."""
        with contextlib.suppress(OSError):
            os.truncate(self.path.with_suffix(STARTS_SUFFIX), max(0, self.starts - 1))


def data_of(path: Path) -> tuple[Path, int]:
    """Returns the file with a slot's bytes, and the first of them.

    Args:
        path: Of any of the slot's files.
    """
    name, _, begin = path.with_suffix("").name.partition(AT)
    data = path.with_name(COPIES if name.startswith(COPY_PREFIX) else ARENA)
    return data, int(begin) if begin.isdecimal() else 0


def remove_files(path: Path) -> bool:
    """Deletes a slot's files, the header first. Returns False, with a warning, if one of them cannot be deleted."""
    try:
        for suffix in (HEADER_SUFFIX, STARTS_SUFFIX, ".tmp"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        return True
    except OSError as error:
        log.warning("the memory slot %s cannot be removed: %s", path, error)
        return False


def forget_starts(path: Path) -> None:
    """Sets the count of starts that resumed from a slot to 0."""
    with contextlib.suppress(OSError):  # at worst the slot is refused too early, with a message that says what to do
        path.with_suffix(STARTS_SUFFIX).unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Makes a damaged slot unreadable. Its header stays under another name until its directory is unlocked."""
    with contextlib.suppress(OSError):  # at worst the next reader meets the damage again
        path.with_suffix(HEADER_SUFFIX).rename(path.with_suffix(QUARANTINE_SUFFIX))


def read_header(path: Path) -> bytes:
    """Returns the bytes of a sealed slot's header, not decoded; empty if the slot is not sealed.

    Raises:
        DamagedError: The file is too large for a header.
        OSError: The file cannot be read.
    """
    try:
        return _read(path.with_suffix(HEADER_SUFFIX))
    except FileNotFoundError:
        return b""


def _read(path: Path) -> bytes:
    """Reads the file of a header, whose size is bounded."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        raw = bytes(read_up_to(file.fileno(), _MOST_HEADER_NBYTES + 1))
    if len(raw) > _MOST_HEADER_NBYTES:
        raise DamagedError(str(path), f"more than {_MOST_HEADER_NBYTES:,} bytes are too long for the header of a slot")
    return raw
