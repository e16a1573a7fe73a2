"""One slot: a room of an arena, which outlives the process, and the header beside it that says what its bytes are."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import weakref
from pathlib import Path

import torch

from moe_ckpt.errors import DamagedError, MemoryFullError, MemoryGoneError
from moe_ckpt.format.shard import MAX_HEADER_BYTES
from moe_ckpt.format.slot import SlotHeader, decode_slot
from moe_ckpt.memory.arena import ARENA, COPIES, FULL, Arena, Buffer
from moe_ckpt.memory.mapping import Identity, Pages, identity, identity_at
from moe_ckpt.storage.local import PRIVATE, read_up_to

log = logging.getLogger("moe_ckpt")

HEADER_SUFFIX, QUARANTINE_SUFFIX = ".head", ".damaged"
STARTS_SUFFIX = ".starts"
"""One byte for each start of the run that went on from the slot and got nowhere."""
OWN, COPY = "slot", "copy"
"""How the names of slots begin that are in ``ARENA`` and in ``COPIES``. After ``AT`` comes the first byte there."""
AT = "@"
_SPARE = "spare.tmp"
"""The header that was unsealed last: the next one is written into its pages. To free them takes training's time."""
_MOST_HEADER_NBYTES = 4 * MAX_HEADER_BYTES


class Slot:
    """Bytes of a file, mapped, until ``remove``.

    Not safe for use from several threads at once, nor in a forked child, which finds zeros there.

    Args:
        path: Of its files, without a suffix.
        memory: ``[nbytes]`` uint8, the mapped bytes.
        file: They are of.
        room: Given back by ``remove``; None if somebody else does that.
        pages: That map the bytes for this slot alone; None for a room of this life's arenas.
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
        self._room, self._pages = room, pages

    @classmethod
    def of(cls, path: Path, room: Buffer, *, frees: bool = False) -> Slot:
        """A slot of this life.

        Args:
            path: Without suffix, and without the place in the arena.
            room: Of the arena in the same directory that the name belongs to.
            frees: ``remove`` gives the room back.
        """
        file = None if room.arena is None else room.arena.identity
        return cls(path.with_name(f"{path.name}{AT}{room.begin}"), room.memory, file, room if frees else None)

    @classmethod
    def open(cls, path: Path) -> tuple[Slot, SlotHeader]:
        """Map a slot that was sealed, with its header. Its slices are not verified.

        Raises:
            DamagedError: The header is damaged, or the bytes are fewer than it says.
            OSError: There is no such slot, or it cannot be read.
        """
        header_path = path.with_suffix(HEADER_SUFFIX)
        header = decode_slot(_read(header_path), str(header_path))
        data, begin = data_of(path)
        descriptor = os.open(data, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        pages = Pages(status.st_size, descriptor)
        if status.st_size < begin + header.nbytes:
            raise DamagedError(
                str(data),
                f"it has {max(0, status.st_size - begin):,} bytes there, but its header says {header.nbytes:,}",
                step=header.step,
                rank=header.rank,
            )
        return cls(path, pages.bytes(begin, header.nbytes), identity(status), pages=pages), header

    def adopt(self, arena: Arena) -> None:
        """Keep its room from being lent, if it is one of this arena, until it was removed and nobody uses ``memory``.

        Raises:
            ValueError: Another room has some of its bytes.
        """
        if self.file == arena.identity:
            self._room = arena.adopt(data_of(self.path)[1], self.memory.numel())

    def seal(self, header: bytes) -> None:
        """Seals the slot, which later processes may read from here on. Its bytes must not change any more.

        Raises:
            MemoryFullError: There is no room for the header.
            MemoryGoneError: Somebody has deleted the slot.
            OSError: It cannot be written.
        """
        if not self.is_there:
            raise MemoryGoneError(str(self.path))
        unfinished = self.path.with_suffix(".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(_SPARE).rename(unfinished)
            with open(PRIVATE.create(str(unfinished), flags), "wb") as file:
                file.write(header)
                file.truncate()
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if error.errno in FULL:
                free = shutil.disk_usage(self.path.parent).free
                raise MemoryFullError(str(self.path.parent), len(header), free) from error
            raise
        unfinished.rename(self.path.with_suffix(HEADER_SUFFIX))

    @property
    def is_there(self) -> bool:
        """Returns whether its bytes are those of the file of its name; not once somebody has deleted that."""
        return identity_at(data_of(self.path)[0]) == self.file

    @property
    def is_sealed(self) -> bool:
        """Returns whether whoever comes after this process may read it."""
        return self.path.with_suffix(HEADER_SUFFIX).exists()

    def unseal(self) -> None:
        """The bytes are about to change."""
        with contextlib.suppress(FileNotFoundError):
            self.path.with_suffix(HEADER_SUFFIX).rename(self.path.with_name(_SPARE))

    def remove(self) -> None:
        """Delete the files; a warning tells of trouble. Whoever still uses ``memory`` of an earlier life keeps it."""
        room, self._room = self._room, None
        if not remove_files(self.path) or room is None or room.arena is None:
            return
        if self._pages is None:
            room.arena.free(room)
        else:
            weakref.finalize(self._pages, room.arena.free, room)

    def quarantine(self) -> None:
        """A slice is damaged."""
        set_aside(self.path)

    @property
    def starts(self) -> int:
        """Returns how many starts in a row went on from it and got nowhere."""
        try:
            return self.path.with_suffix(STARTS_SUFFIX).stat().st_size
        except OSError:
            return 0

    def note_start(self) -> None:
        """One more start goes on from it; a warning tells of trouble."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(PRIVATE.create(str(self.path.with_suffix(STARTS_SUFFIX)), flags), "ab") as file:
                file.write(b".")
        except OSError as error:
            log.warning("cannot record that this start resumes from %s: %s", self.path, error)

    def withdraw_start(self) -> None:
        """This start gets somewhere: what ``note_start`` wrote is taken back."""
        with contextlib.suppress(OSError):
            os.truncate(self.path.with_suffix(STARTS_SUFFIX), max(0, self.starts - 1))

    def forget_starts(self) -> None:
        """Count anew."""
        forget_starts(self.path)


class PrivateSlot(Slot):
    """A room of this process's own memory, which goes with the process: there are no files.

    Args:
        name: Tells people what it holds.
        room: The memory.
    """

    def __init__(self, name: str, room: Buffer) -> None:
        super().__init__(Path(name), room.memory, None)
        self.room = room

    def quarantine(self) -> None:
        """Does nothing: whoever set it aside frees it."""

    @property
    def starts(self) -> int:
        """Returns 0: a process that goes back again and again is stopped by whoever restarts it."""
        return 0

    def note_start(self) -> None:
        """Does nothing: see ``starts``."""

    def withdraw_start(self) -> None:
        """Does nothing: see ``starts``."""

    def forget_starts(self) -> None:
        """Does nothing: see ``starts``."""


def data_of(path: Path) -> tuple[Path, int]:
    """Returns the file that a slot's bytes are in, and the first of them.

    Args:
        path: Of any of the slot's files.
    """
    name, _, begin = path.with_suffix("").name.partition(AT)
    data = path.with_name(COPIES if name.startswith(COPY) else ARENA)
    return data, int(begin) if begin.isdecimal() else 0


def remove_files(path: Path) -> bool:
    """Delete a slot's files; a warning tells of trouble. Returns whether nobody takes its bytes for a checkpoint."""
    try:
        for suffix in (HEADER_SUFFIX, STARTS_SUFFIX, ".tmp"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        return True
    except OSError as error:
        log.warning("the memory slot %s cannot be removed: %s", path, error)
        return False


def forget_starts(path: Path) -> None:
    """Count the starts that go on from a slot anew."""
    with contextlib.suppress(OSError):  # else it is refused too early, and the message says what to do
        path.with_suffix(STARTS_SUFFIX).unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Nobody reads a damaged slot any more. Its header stays for whoever looks, until its directory is let go of."""
    with contextlib.suppress(OSError):  # else it is found damaged again
        path.with_suffix(HEADER_SUFFIX).rename(path.with_suffix(QUARANTINE_SUFFIX))


def read_header(path: Path) -> bytes:
    """Reads a sealed slot's header as it is now, not looked into; empty if there is none.

    Raises:
        DamagedError: It is too large to be one.
        OSError: It cannot be read.
    """
    try:
        return _read(path.with_suffix(HEADER_SUFFIX))
    except FileNotFoundError:
        return b""


def _read(path: Path) -> bytes:
    """A header's file, of a bounded size."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        raw = bytes(read_up_to(file.fileno(), _MOST_HEADER_NBYTES + 1))
    if len(raw) > _MOST_HEADER_NBYTES:
        raise DamagedError(str(path), f"more than {_MOST_HEADER_NBYTES:,} bytes are too long for the header of a slot")
    return raw
