"""One slot: bytes in a mapped file, and the header beside them that says what they are."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from pathlib import Path

from moe_ckpt.errors import DamagedError, MemoryFullError, MemoryGoneError
from moe_ckpt.format.shard import MAX_HEADER_BYTES
from moe_ckpt.format.slot import SlotHeader, decode_slot
from moe_ckpt.memory.identity import identity, identity_at
from moe_ckpt.memory.mapping import Pages
from moe_ckpt.storage.access import PRIVATE
from moe_ckpt.storage.local import free_bytes, read_up_to

log = logging.getLogger("moe_ckpt")

DATA_SUFFIX, HEADER_SUFFIX, QUARANTINE_SUFFIX = ".data", ".head", ".damaged"
STARTS_SUFFIX = ".starts"
"""One byte for each start of the run that went on from the slot and got nowhere."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_PIECE_NBYTES = 64 << 20
"""Reserved by one call: signals, as a profiler sends a hundred in a second, may make the kernel begin a call again."""
_MOST_HEADER_NBYTES = 4 * MAX_HEADER_BYTES


class Slot:
    """Bytes of a file, mapped, until ``remove``; the last user of ``memory`` unmaps them.

    Not safe for use from several threads at once, nor in a forked child, which finds zeros there.

    Attributes:
        path: Of its files, without a suffix.
        memory: ``[nbytes]`` uint8, the mapped bytes.
        pages: Of these bytes.
    """

    def __init__(self, path: Path, descriptor: int, nbytes: int) -> None:
        self.path = path
        self._identity = identity(os.fstat(descriptor))
        self.pages = Pages(descriptor, nbytes)
        self.memory = self.pages.bytes()

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Slot:
        """Reserve ``nbytes`` in a new file, so that a full tmpfs is an error here and no SIGBUS later.

        Raises:
            MemoryFullError: There is no room. Nothing is left behind.
            OSError: The file cannot be made.
        """
        data = path.with_suffix(DATA_SUFFIX)
        descriptor = PRIVATE.create(str(data), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # posix_fallocate would take all that there is first, so that others, as a DataLoader's workers, found none.
            if free_bytes(descriptor) < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for begin in range(0, nbytes, _PIECE_NBYTES):
                os.posix_fallocate(descriptor, begin, min(_PIECE_NBYTES, nbytes - begin))
            return cls(path, descriptor, nbytes)
        except OSError as error:
            data.unlink(missing_ok=True)
            if error.errno in _FULL:
                raise MemoryFullError(str(path.parent), nbytes, shutil.disk_usage(path.parent).free) from error
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def open(cls, path: Path) -> tuple[Slot, SlotHeader]:
        """Map a slot that was sealed, with its header. Its slices are not verified.

        Raises:
            DamagedError: The header is damaged, or the bytes are fewer than it says.
            OSError: There is no such slot, or it cannot be read.
        """
        header_path = path.with_suffix(HEADER_SUFFIX)
        header = decode_slot(_read(header_path), str(header_path))
        descriptor = os.open(path.with_suffix(DATA_SUFFIX), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes < header.nbytes:
                raise DamagedError(
                    str(path.with_suffix(DATA_SUFFIX)),
                    f"it has {nbytes:,} bytes, but its header says {header.nbytes:,}",
                    step=header.step,
                    rank=header.rank,
                )
            return cls(path, descriptor, nbytes), header
        finally:
            os.close(descriptor)

    def seal(self, header: bytes) -> None:
        """From here on the slot may be read by whoever comes after this process. Its bytes must not change any more.

        Raises:
            MemoryFullError: There is no room for the header.
            MemoryGoneError: Somebody has deleted the slot.
            OSError: It cannot be written.
        """
        if not self.is_there:
            raise MemoryGoneError(str(self.path))
        unfinished = self.path.with_suffix(".tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(PRIVATE.create(str(unfinished), flags), "wb") as file:
                file.write(header)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if error.errno in _FULL:
                free = shutil.disk_usage(self.path.parent).free
                raise MemoryFullError(str(self.path.parent), len(header), free) from error
            raise
        unfinished.rename(self.path.with_suffix(HEADER_SUFFIX))

    @property
    def is_there(self) -> bool:
        """Whether its bytes are those of the file that has its name; not once somebody has deleted that."""
        return identity_at(self.path.with_suffix(DATA_SUFFIX)) == self._identity

    @property
    def is_sealed(self) -> bool:
        """Whether whoever comes after this process may read it."""
        return self.path.with_suffix(HEADER_SUFFIX).exists()

    def unseal(self) -> None:
        """The bytes are about to change."""
        self.path.with_suffix(HEADER_SUFFIX).unlink(missing_ok=True)

    def move(self, path: Path) -> None:
        """Give it another name on the same file system, unsealed. Its memory stays where it is.

        Raises:
            OSError: It has the old name still, sealed or not.
        """
        self.unseal()
        self.forget_starts()
        self.path.with_suffix(DATA_SUFFIX).rename(path.with_suffix(DATA_SUFFIX))
        self.path = path

    def shrink(self, nbytes: int) -> None:
        """Give back what lies behind the first ``nbytes``. Nobody may know ``memory`` then, which becomes another.

        Raises:
            OSError: It stays as large as it is.
        """
        self.pages.unlock()
        self.memory = self.memory[:nbytes]  # first: what is cut off must not be touched any more
        os.truncate(self.path.with_suffix(DATA_SUFFIX), nbytes)

    def remove(self) -> None:
        """Delete the files; a warning tells of trouble. Whoever still uses ``memory`` keeps it."""
        remove_files(self.path)

    def quarantine(self) -> None:
        """A slice is damaged."""
        set_aside(self.path)

    @property
    def starts(self) -> int:
        """How many starts in a row went on from it and got nowhere."""
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


def remove_files(path: Path) -> None:
    """Delete a slot's files; a warning tells of trouble."""
    try:
        for suffix in (HEADER_SUFFIX, STARTS_SUFFIX, DATA_SUFFIX, ".tmp"):
            path.with_suffix(suffix).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the memory slot %s cannot be removed: %s", path, error)


def forget_starts(path: Path) -> None:
    """Count the starts that go on from a slot anew."""
    with contextlib.suppress(OSError):  # else it is refused too early, and the message says what to do
        path.with_suffix(STARTS_SUFFIX).unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Nobody reads a damaged slot any more. Its header stays for whoever looks, until its directory is let go of."""
    with contextlib.suppress(OSError):  # else it is found damaged again
        path.with_suffix(HEADER_SUFFIX).rename(path.with_suffix(QUARANTINE_SUFFIX))


def read_header(path: Path) -> bytes:
    """What a sealed slot's header is now, not looked into; empty if there is none.

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
