"""Local disks (and anything mounted as a directory) by plain ``os`` calls: who may read files, how they become durable.

Rules of this file:

1. A file is written under a temporary name in its own directory (never in ``$TMPDIR``, which may lie on
   another filesystem), synced, given its name, and then the directory is synced. A reader sees all or nothing.
2. A failed fsync is final: the kernel may have marked the lost pages clean, so a second fsync that
   succeeds would prove nothing. The temporary is abandoned and the error raised.
3. An existing name is never replaced.
4. No path leads out of the root, neither by ``..`` nor through a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.errors import DamagedError, StoreUnwritableError
from moe_ckpt.format.manifest import MANIFEST_NAME
from moe_ckpt.storage.base import Chunk, Stamp, split_path

log = logging.getLogger("moe_ckpt")

_PIECE_NBYTES = 8 << 20
"""Bytes per write call: an interrupt or a full disk is noticed within milliseconds, at no cost in speed."""
_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp")
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_NO_PLACE = (errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Access:
    """Modes of new files and directories.

    Attributes:
        exact: Whatever the umask; otherwise less the umask, as usual.
    """

    file_mode: int
    directory_mode: int
    exact: bool = False

    def create(self, path: str, flags: int) -> int:
        """Opens a file, which is made if there is none, and is no link: its descriptor. Raises ``OSError``."""
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, self.file_mode)
        if self.exact:
            with contextlib.suppress(PermissionError):  # a file system without modes, or a file of another user
                os.fchmod(descriptor, self.file_mode)
        return descriptor

    def make_directory(self, path: str) -> None:
        """``os.mkdir``. A set-group-ID bit that the parent hands down stays. Raises ``OSError``."""
        os.mkdir(path, self.directory_mode)
        if self.exact:
            with contextlib.suppress(PermissionError):
                os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & 0o7000 | self.directory_mode)


PRIVATE = Access(0o600, 0o700)
ACCESS = {"private": PRIVATE, "group": Access(0o640, 0o750, exact=True), "umask": Access(0o666, 0o777)}
"""The choices of the option ``access``."""


def access_of(path: str) -> str:
    """Returns the choice that a store's file was made with, as its mode tells; "private" if it is not there."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError:
        return "private"
    if mode & 0o777 == ACCESS["group"].file_mode:
        return "group"
    return "umask" if mode & 0o077 else "private"


class LocalStorage:
    """Implements ``storage.base.Storage`` below one directory.

    Args:
        root: The directory; it need not exist.
        on_phase: Called with "manifest" before a commit record is written, and with "write", "fsync" (of the file, then
            of its directory), "rename" and "gc" (each deletion) just before the respective action. Tests kill the
            process there.
        access: "private": files are created with mode 0600 and directories with 0700 (less the umask), for weights are
            private data. "group": with 0640 and 0750, whatever the umask. "umask": as the umask says.
    """

    def __init__(
        self, root: str | os.PathLike[str], on_phase: Callable[[str], None] | None = None, *, access: str = "private"
    ) -> None:
        self._access = ACCESS[access]
        self.root = os.path.realpath(os.path.expanduser(root))
        self._on_phase: Callable[[str], None] = on_phase or (lambda phase: None)
        self._durable: str | None = None

    def __repr__(self) -> str:
        return f"LocalStorage({self.root!r})"

    def probe(self) -> None:
        """Create the root if need be, and write and delete a small file in it.

        Raises:
            StoreUnwritableError: Names the directory and the reason. Call before training starts.
        """
        temporary = os.path.join(self.root, _temporary_name("probe"))
        try:
            self._make_directory(self.root)
            try:
                create_file(temporary, [b"moe_ckpt"], self._access)
            finally:
                _unlink(temporary)
        except OSError as error:
            raise StoreUnwritableError(
                f"the store's directory {self.root} cannot be written: {error.strerror or error}. "
                "Choose another dirpath, or make room or give this user the right to write there."
            ) from error
        if self._access.exact and not stat.S_IMODE(os.stat(self.root).st_mode) & stat.S_IRGRP:
            log.warning(
                "access='group', but the existing directory %s is closed to its group: chmod -R g+rX opens it and its "
                "files",
                self.root,
            )

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        """See ``Storage.write``. A directory made for the file stays after an error: other ranks may use it."""
        target = self._locate(path)
        directory, name = os.path.split(target)
        if name == MANIFEST_NAME:
            self._on_phase("manifest")
        self._make_directory(directory)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "a checkpoint file is never overwritten", target)
        temporary = os.path.join(directory, _temporary_name(name))
        try:
            nbytes = create_file(temporary, chunks, self._access, self._on_phase)
            self._on_phase("rename")
            _publish(temporary, target)
        finally:
            _unlink(temporary)
        with contextlib.ExitStack() as undo:
            undo.callback(_unlink, target)
            self._on_phase("fsync")
            _sync_directory(directory)
            undo.pop_all()
        return nbytes

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytearray:
        """See ``Storage.read``. Allocates no more than the file holds, whatever ``nbytes`` says."""
        target = self._locate(path)
        # O_NONBLOCK: opening a FIFO that someone planted would hang for ever.
        try:
            descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DamagedError(path, "is a symbolic link") from error
            raise
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            _require_regular(path, status)
            file.seek(offset)
            return read_up_to(file.fileno(), sys.maxsize if nbytes is None else nbytes)

    def size(self, path: str) -> int:
        status = os.lstat(self._locate(path))
        _require_regular(path, status)
        return status.st_size

    def list(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._locate(path, itself=True)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def stamp(self, path: str) -> Stamp | None:
        """See ``Stamped.stamp``; None for a link. It is opened, for which network file systems ask their server."""
        target = "/".join((self.root, *split_path(path, self.root)))
        try:
            descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # whoever then lists the directory learns why
            return None
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        return Stamp(changed, (status.st_mtime_ns, status.st_ino, status.st_dev, status.st_size, status.st_nlink))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._locate(path))

    def delete(self, path: str) -> None:
        """See ``Storage.delete``. The removal of a commit record is synced before the files it names can go."""
        target = self._locate(path)
        self._on_phase("gc")
        try:
            os.unlink(target)
        except FileNotFoundError:
            return
        if os.path.basename(target) == MANIFEST_NAME:
            _sync_directory(os.path.dirname(target))

    def delete_dir(self, path: str) -> None:
        try:
            os.rmdir(self._locate(path))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise

    def clean_temporaries(self, path: str) -> int:
        """See ``Storage.clean_temporaries``. No writer may be at work in the directory."""
        names = [name for name in self.list(path) if _TEMPORARY.fullmatch(name)]
        for name in names:
            self.delete(f"{path}/{name}" if path else name)
        return len(names)

    def _locate(self, path: str, *, itself: bool = False) -> str:
        """Absolute path of a store path; the directories on the way may be links as long as they stay inside.

        Args:
            path: Relative to the root.
            itself: So may what lies there; else it is not followed.

        Raises:
            DamagedError: A link leads out of the root.
        """
        parts = split_path(path, self.root)
        way = parts if itself else parts[:-1]
        level = self.root
        for part in way:
            level = os.path.join(level, part)
            if os.path.islink(level):  # rarely; to ask for each level from the file system's root on takes long
                level = os.path.realpath(os.path.join(self.root, *way))
                if level != self.root and os.path.commonpath([level, self.root]) != self.root:
                    raise DamagedError(path, f"leads out of the store {self.root}, to {level}")
                break
        return os.path.join(level, *parts[len(way) :])

    def _make_directory(self, directory: str) -> None:
        """Make the directory and its parents, and sync every name from the root's parent downwards.

        An existing directory may have been made by another rank or by a dead writer that never synced it,
        so its name is synced too, once per directory in a row.
        """
        created = make_directories(directory, self._access)
        if directory == self._durable and not created:
            return
        names = set(created)
        level = directory
        while level != self.root:
            names.add(level)
            level = os.path.dirname(level)
        for name in sorted(names):
            _sync_directory(os.path.dirname(name))
        self._durable = directory


def replace_file(path: str | os.PathLike[str], data: Chunk) -> None:
    """Replace the file at ``path`` by ``data`` atomically: for reports, never for a store's files.

    Whoever reads sees the old file or the new one, whatever dies when. Missing directories are made.

    Raises:
        OSError: the old file is untouched.
    """
    directory, name = os.path.split(os.path.realpath(path))
    make_directories(directory)
    temporary = os.path.join(directory, _temporary_name(name))
    try:
        create_file(temporary, [data], PRIVATE)
        os.replace(temporary, os.path.join(directory, name))
    finally:
        _unlink(temporary)
    _sync_directory(directory)


def read_up_to(descriptor: int, nbytes: int) -> bytearray:
    """Reads so many bytes from where the descriptor stands, or what is left of the file.

    Raises:
        OSError: It cannot be read. EAGAIN, too, which Python's file objects take for the end of the file.
    """
    remaining = os.fstat(descriptor).st_size - os.lseek(descriptor, 0, os.SEEK_CUR)
    buffer, done = bytearray(max(0, min(nbytes, remaining))), 0
    with memoryview(buffer) as view:
        while done < len(view) and (got := os.readv(descriptor, [view[done:]])):
            done += got
    del buffer[done:]
    return buffer


def read_whole(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The content of a file outside of any store, if it is no larger than such a file may be.

    Raises:
        DamagedError: it is larger.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most_bytes:
            raise DamagedError(os.fspath(path), f"has {nbytes:,} bytes, and such a file at most {most_bytes:,}")
        return bytes(read_up_to(file.fileno(), most_bytes))


def remove_temporaries_of(path: str | os.PathLike[str]) -> None:
    """Remove what a process that died in ``replace_file(path)`` left behind. Nobody may be writing it.

    Raises:
        OSError: the directory cannot be read, or a file not be removed.
    """
    directory, name = os.path.split(os.path.realpath(path))
    for entry in os.listdir(directory) if os.path.isdir(directory) else ():
        if entry.startswith(f".{name}.") and _TEMPORARY.fullmatch(entry):
            os.unlink(os.path.join(directory, entry))


def free_bytes(target: str | int) -> int:
    """Returns the bytes that are free for users in the file system of a path or an open file.

    For a tmpfs without a limit: ``sys.maxsize``.

    Raises:
        OSError: It cannot be asked.
    """
    status = os.statvfs(target)
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize


def make_directories(directory: str, access: Access = PRIVATE) -> list[str]:
    """``os.makedirs`` that gives every level it makes the mode of ``access``, and tells which it made, top first.

    Raises:
        FileNotFoundError: a level cannot be made although its parent exists (below /proc, for instance).
    """
    created: list[str] = []
    missing, refused = [directory], ""
    while missing:
        try:
            access.make_directory(missing[-1])
            created.append(missing.pop())
        except FileExistsError:
            if os.path.isdir(missing[-1]):
                missing.pop()
            elif os.path.lexists(missing[-1]):  # else another process has just removed it, and it is made again
                raise NotADirectoryError(errno.ENOTDIR, "is a file, not a directory", missing[-1]) from None
        except FileNotFoundError:
            parent = os.path.dirname(missing[-1])
            if not os.path.isdir(parent):
                missing.append(parent)
            elif missing[-1] == refused:
                raise
            else:  # once more: another process may have made the parent just now
                refused = missing[-1]
    return created


def create_file(
    path: str, chunks: Iterable[Chunk], access: Access, on_phase: Callable[[str], None] = lambda phase: None
) -> int:
    """Creates a file, writes, syncs and closes it; returns its size in bytes. The caller cleans up."""
    on_phase("write")
    descriptor = access.create(path, os.O_WRONLY | os.O_EXCL)
    # Leaving the block closes the file, which is where network filesystems report late write errors.
    with os.fdopen(descriptor, "wb", buffering=0):
        nbytes = sum(write_all(descriptor, chunk) for chunk in chunks)
        on_phase("fsync")
        os.fsync(descriptor)
    return nbytes


def write_all(descriptor: int, chunk: Chunk) -> int:
    """Writes the whole chunk: a write may take fewer bytes than it was given. Returns its size in bytes."""
    with memoryview(chunk) as whole:
        if not whole.nbytes:
            return 0
        with whole.cast("B") as view:
            done = 0
            while done < len(view):
                wrote = os.write(descriptor, view[done : done + _PIECE_NBYTES])
                if wrote == 0:
                    raise OSError(errno.EIO, "the filesystem took no bytes")
                done += wrote
            return done


def _publish(temporary: str, target: str) -> None:
    """Give the finished file its name, never replacing another file.

    ``link`` fails atomically when the name exists, which ``rename`` does not. Where there are no hard
    links (FAT, some FUSE and cloud mounts) the name is checked and then renamed: two writers could slip
    through the gap, but the store's lock keeps other runs out and no two ranks write the same name.
    """
    try:
        os.link(temporary, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "a checkpoint file is never overwritten", target) from None
        os.rename(temporary, target)


def _sync_directory(directory: str) -> None:
    """Make the names in the directory durable. Filesystems that cannot sync directories are taken as they are."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _temporary_name(name: str) -> str:
    """Random besides the pid: in containers, and on other hosts, the same pid comes back."""
    return f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def _unlink(path: str) -> None:
    """Remove the file if possible; used while another error is on its way out."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(path, f"is not a regular file ({stat.filemode(status.st_mode)})")


def why_unwritable(path: str | os.PathLike[str], error: OSError) -> str:
    """Returns the end of a sentence: what keeps ``path`` from being written, and what to do.

    Args:
        path: Of what was to be written.
        error: What the attempt raised.
    """
    if error.errno in _NO_PLACE:
        above = [parent for parent in Path(path).absolute().parents if not parent.is_dir()]
        if above:
            highest = above[-1]
            obstacle = (
                f"{highest} is a file, not a directory" if highest.exists() else f"there is no directory {highest}"
            )
            return f"{obstacle}; name another place"
    advice = ""
    if error.errno in _FULL:
        advice = "; make room, or name another place"
    elif error.errno in _CLOSED:
        advice = "; name another place"
    return f"{error.strerror or error}{advice}"
