"""The directories of slots, the processes that own them, and what dead processes left there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import socket
import stat
import struct
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_ckpt.errors import ConfigError, MemoryFullError
from moe_ckpt.memory.arena import ARENA, COPIES, telling_if_full
from moe_ckpt.memory.mapping import PAGE_NBYTES, Identity, identity, identity_at
from moe_ckpt.memory.options import DEFAULT_ROOT
from moe_ckpt.memory.slot import AT, HEADER_SUFFIX, STARTS_SUFFIX, data_of
from moe_ckpt.storage.local import PRIVATE, make_directories

log = logging.getLogger("moe_ckpt")

LOCK = "lock"
"""Never opened but to lock it: closing any descriptor of it drops this process's lock."""
OWNER = "owner.json"
_GENERATION, _RANK = re.compile(r"\d{6,}"), re.compile(r"rank_(\d{5,})")
_NAMED = re.compile(r"names_(\d{6,})")
"""An empty file in a rank's directory: see ``generation_note``."""
DIVERGED = "diverged"
"""An empty file in a rank's directory: steps that its life computed again from upstream logs had another result than at
first, and no life has ended a step since."""
_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})
_MOST_OWNER_NBYTES = 4096
_TRIES = 64
_PATIENCE_SECS, _PAUSE_SECS = 1.0, 0.005
"""Longest wait for a process that removes the slots of dead ones, and the pause between two attempts."""

ELSEWHERE = -1
"""Stands for a holder that has no number here, since it is in another pid namespace."""

_FLOCK = "hhqqi"
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""

_owned: set[Identity] = set()
"""Locks that this process holds. POSIX locks do not prevent a process from taking its own lock twice."""
_owned_guard = threading.Lock()
MESSAGES_SUFFIX, SEALED_SUFFIX = ".messages", ".sealed"
"""Suffixes of the files of an upstream log, in the directory of a rank: messages, and a header, which is written
last."""
_LOG_NAME = re.compile(r"upstream_\d{8,}")


@dataclass(frozen=True)
class Owner:
    """The process that made a rank's directory. Unknown fields are 0 or empty."""

    pid: int = 0
    host: str = ""
    boot_id: str = ""
    store: str = ""
    begun_unix_secs: float = 0.0


class RankDirectory:
    """The slots of one rank in one life of a run, locked by this process until ``release`` or its death.

    A record lock, as ``storage.lock``: forked data-loader workers do not inherit it.

    Attributes:
        path: ``<root>/moe_ckpt-<uid>/<run>/<generation>/rank_<rank>``.
        is_described: The directory has a file that says who owns it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.is_described = False
        self._descriptor = descriptor
        self._identity = identity(os.fstat(descriptor))

    @classmethod
    def take(cls, path: Path) -> RankDirectory | None:
        """Locks a directory that exists; None if another process holds it, or it does not exist.

        Raises:
            OSError: The directory cannot be locked.
        """
        with _owned_guard:
            for _ in range(_TRIES):
                if _is_owned(path):
                    return None
                try:
                    descriptor = PRIVATE.create(str(path / LOCK), os.O_RDWR)
                except (FileNotFoundError, NotADirectoryError):
                    return None
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    os.close(descriptor)
                    if error.errno in _TAKEN:
                        return None
                    raise
                taken = cls(path, descriptor)
                if identity_at(path / LOCK) == taken._identity:
                    _owned.add(taken._identity)
                    return taken
                os.close(descriptor)  # its owner has removed it meanwhile, and the next one locks a new file
            return None

    def describe(self, store: str) -> None:
        """Writes down who owns the directory, once, for people and for ``sweep``.

        Raises:
            MemoryFullError: The file system has no free page.
            OSError: The file cannot be written.
        """
        if self.is_described:
            return
        owner = Owner(os.getpid(), socket.gethostname(), boot_id(), store, time.time())
        flags = os.O_WRONLY | os.O_TRUNC
        with telling_if_full(self.path, PAGE_NBYTES), open(PRIVATE.create(str(self.path / OWNER), flags), "w") as file:
            json.dump(vars(owner), file)
        self.is_described = True

    @property
    def slots(self) -> list[Path]:
        """Returns the paths of the sealed slots, without suffix."""
        return slots_in(self.path)

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing in the directory but its lock, its owner and notes of generations."""
        return all(path.name in (LOCK, OWNER) or _NAMED.fullmatch(path.name) for path in entries(self.path))

    def note(self, name: str) -> None:
        """Makes an empty file, whose name tells later lives something: ``DIVERGED``, or that of ``generation_note``.

        Raises:
            OSError: The file cannot be made.
        """
        os.close(PRIVATE.create(str(self.path / name), os.O_WRONLY))

    @property
    def diverged(self) -> bool:
        """Returns whether a life diverged: see ``DIVERGED``."""
        return (self.path / DIVERGED).exists()

    def forget_divergence(self) -> None:
        """Removes the note ``DIVERGED``."""
        if self.diverged:
            _delete(self.path / DIVERGED)

    def clear_unsealed(self) -> None:
        """Deletes unreadable files: bytes without a header, and slots that were set aside as damaged."""
        present = {path.name: path for path in entries(self.path)} if self._is_held else {}
        sealed = [path for path in slots_in(self.path) if data_of(path)[0].name in present]
        stays = {f"{path.name}{suffix}" for path in sealed for suffix in (HEADER_SUFFIX, STARTS_SUFFIX)}
        stays |= {LOCK, OWNER, DIVERGED, *(data_of(path)[0].name for path in sealed)}
        for name, path in present.items():
            if name not in stays and not _NAMED.fullmatch(name) and not is_log(name, present.keys()):
                _delete(path)

    def drop_arenas(self) -> None:
        """Deletes arenas that have no sealed slot."""
        used = {data_of(path)[0].name for path in self.slots}
        for name in (ARENA, COPIES) if self._is_held else ():
            if name not in used:
                _delete(self.path / name)

    def remove_logs(self) -> None:
        """Deletes the upstream logs."""
        for path in entries(self.path):
            if _LOG_NAME.fullmatch(path.stem):
                _delete(path)

    def clear(self) -> None:
        """Deletes all files but the lock."""
        for path in entries(self.path):
            if path.name != LOCK:
                _delete(path)

    def remove(self) -> None:
        """Deletes the directory with all files, and the run's directories above it that are empty then. Unlocks it.

        Nothing is deleted after ``release``, since another process may own the directory by then. A file that cannot be
        deleted stays, with a warning.
        """
        if self._is_held:
            self.clear()
            _delete(self.path / LOCK)
        self.release()
        remove_empty(self.path, self.path.parent, self.path.parent.parent)

    @property
    def is_gone(self) -> bool:
        """True if somebody has deleted the directory although it was locked."""
        return self._descriptor >= 0 and identity_at(self.path / LOCK) != self._identity

    @property
    def _is_held(self) -> bool:
        """False after ``release``, or if somebody has removed the directory and another process made it again."""
        return self._descriptor >= 0 and identity_at(self.path / LOCK) in (None, self._identity)

    def release(self) -> None:
        """Unlocks the directory. A second call has no effect."""
        with _owned_guard:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
                _owned.discard(self._identity)


def slots_in(directory: Path) -> list[Path]:
    """Returns the paths of the sealed slots in a rank's directory, without suffix."""
    return sorted(path.with_suffix("") for path in directory.glob(f"*{AT}*{HEADER_SUFFIX}"))


def _is_owned(path: Path) -> bool:
    """True if this process has locked a directory, under any name. It must not open the lock's file again: closing that
    would unlock it."""
    return identity_at(path / LOCK) in _owned


def entries(path: Path) -> list[Path]:
    """Returns the sorted entries of a directory; none, with a warning, if it cannot be read."""
    try:
        return sorted(path.iterdir())
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            log.warning("%s cannot be read: %s", path, error)
        return []


def _delete(path: Path) -> None:
    """Deletes a file; an error is a warning."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)


def remove_empty(*paths: Path) -> None:
    """Removes directories in this order, until one is not empty."""
    for path in paths:
        try:
            path.rmdir()
        except OSError:  # another rank's files, or it is gone
            return


def user_directory(root: str) -> Path:
    """Returns the directory of all runs of this user below ``root``.

    Raises:
        ConfigError: ``root`` is no directory, or another user has taken the name.
    """
    if not os.path.isdir(root):
        raise ConfigError(
            f"Memory(directory={root!r}): there is no such directory on {socket.gethostname()}. Make it on every node "
            f"before the run (mkdir -p {shlex.quote(root)}), or give an existing tmpfs, such as {DEFAULT_ROOT}"
        )
    path = Path(root, f"moe_ckpt-{os.geteuid()}")  # it is never removed: another user could take the name
    with contextlib.suppress(FileExistsError):
        PRIVATE.make_directory(str(path))
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path} is not a private directory of user {os.geteuid()} (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}), so nothing in it can be trusted. Remove it, or give "
            "Memory(directory=...) another one"
        )
    return path


def run_directory(root: str, run_id: str, store: str) -> Path:
    """Returns the directory of a run below ``root``.

    A copy of a store has the same ``run_id``. The path of the store tells the two runs apart, so that neither touches
    slots of the other.

    Raises:
        ConfigError: As ``user_directory``.
    """
    return user_directory(root) / f"{run_id}-{hashlib.blake2b(store.encode(), digest_size=4).hexdigest()}"


def make_rank_directory(root: str, run_id: str, generation: int, rank: int, store: str) -> RankDirectory:
    """Makes a rank's directory for this life of a run, and locks it.

    If the file system has no free page, the owner is written down later, before the first slot: there may be room once
    the run has taken over its earlier slots.

    Raises:
        ConfigError: As ``user_directory``; or a living process uses the directory.
        OSError: The directory cannot be made.
    """
    path = run_directory(root, run_id, store) / f"{generation:06d}" / f"rank_{rank:05d}"
    made = _made(path)
    if made is None:
        raise ConfigError(
            f"{path} is in use by {said_holder(holder_of(path))}. Nodes of one run must not share "
            f"Memory(directory={root!r}), and a store serves one job at a time"
        )
    try:
        made.clear()  # files of a life of this generation that ended before anybody knew of it
        made.describe(store)
    except MemoryFullError as error:
        log.info("%s: the owner is written down when there is room: %s", path, error)
    except OSError:
        made.remove()
        raise
    return made


def _made(path: Path) -> RankDirectory | None:
    """Makes and locks a directory; None if another process holds it for longer than ``_PATIENCE_SECS``.

    A process that removes its own directory removes empty directories above it as well, so that the new one may vanish
    before it is locked: then it is made again.
    """
    until = time.monotonic() + _PATIENCE_SECS
    while True:
        is_last = time.monotonic() > until
        try:
            make_directories(str(path), PRIVATE)
            made = RankDirectory.take(path)
            if made is not None or is_last:
                return made
        except (FileNotFoundError, NotADirectoryError):  # both occur if a directory above has just vanished
            if is_last:
                raise
        time.sleep(_PAUSE_SECS)


def rank_directories(run: Path) -> Iterator[tuple[int, int, Path]]:
    """Yields (generation, rank, path) of one run's directories, the newest life first."""
    for generation in sorted(_named(run, _GENERATION), key=lambda path: -int(path.name)):
        for path in sorted(_named(generation, _RANK)):
            yield int(generation.name), int(path.name.removeprefix("rank_")), path


def generation_note(generation: int) -> str:
    """Returns the name of the note that a life has used this generation in names of step directories: no later life may
    use it."""
    return f"names_{generation:06d}"


def newest_named(path: Path) -> int:
    """Returns the newest generation of which a rank's directory has a ``generation_note``; -1 if there is none."""
    matches = (_NAMED.fullmatch(entry.name) for entry in entries(path))
    return max((int(match[1]) for match in matches if match), default=-1)


def _named(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [entry for entry in entries(path) if pattern.fullmatch(entry.name)]


def owner_of(path: Path) -> Owner:
    """Returns the owner of a rank's directory, as far as it is known."""
    try:
        recorded = json.loads((path / OWNER).read_bytes()[:_MOST_OWNER_NBYTES])
        host, boot, store = (str(recorded[name]) for name in ("host", "boot_id", "store"))
        return Owner(int(recorded["pid"]), host, boot, store, float(recorded["begun_unix_secs"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Owner()


def holder_of(path: Path) -> int:
    """Returns the process that has locked a rank's directory; 0 if none has, ``ELSEWHERE`` if it is in another pid
    namespace. Takes no lock itself.
    """
    with _owned_guard:
        if _is_owned(path):
            return os.getpid()
        try:
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
            return 0 if kind == fcntl.F_UNLCK else int(pid) if pid > 0 else ELSEWHERE
        except OSError:
            return 0
        finally:
            os.close(descriptor)


def said_holder(pid: int) -> str:
    """Describes a holder from ``holder_of``, for people."""
    return "nobody" if not pid else "a process of another namespace" if pid == ELSEWHERE else f"process {pid}"


def node_of(root: str) -> str:
    """Returns a name for the node of a memory directory: ranks with the same name reach each other's slots.

    Different directories are different nodes even on one machine. So tests make nodes of processes, and containers with
    a ``/dev/shm`` of their own are told apart, although they fail together with their machine
    (``Memory(failure_domain=...)``). The host name counts only where the kernel has no ``boot_id``, since containers
    that share one ``/dev/shm`` (``--ipc=host``) have different host names.

    Raises:
        OSError: There is no such directory.
    """
    status = os.stat(root)
    return f"{this_machine()} {status.st_dev}:{status.st_ino}"


def this_machine() -> str:
    """Returns a name for this boot of the machine, or that of the host where the kernel gives none."""
    return boot_id() or socket.gethostname()


def boot_id() -> str:
    """Returns the kernel's identifier of this boot of the machine; empty if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def log_path(directory: Path, step: int) -> Path:
    """Returns the path of the upstream log of a step, without a suffix."""
    return directory / f"upstream_{step:08d}"


def is_log(name: str, siblings: Collection[str]) -> bool:
    """Returns whether a file belongs to a sealed upstream log.

    Args:
        name: Of the file.
        siblings: Names of all files in its directory.
    """
    path = Path(name)
    is_named = _LOG_NAME.fullmatch(path.stem) is not None and path.suffix in (MESSAGES_SUFFIX, SEALED_SUFFIX)
    return is_named and all(path.stem + suffix in siblings for suffix in (MESSAGES_SUFFIX, SEALED_SUFFIX))
