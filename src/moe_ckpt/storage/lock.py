"""One run per store.

Local: a POSIX record lock on ``<root>/.lock``. The kernel drops it when the process dies, however it
dies; forked data-loader workers do not inherit it, so a stray worker cannot keep the store locked; NFS
carries it between hosts. Its trap: closing *any* descriptor of the file drops the lock, so within the
process nothing else should open it. The registry below sees to that for this package, and refuses a
second lock on the same store by the same process, which the kernel would grant. Other code (a copy of
the store made by a callback) is not kept from it, so the lock is taken again before each commit; the
name in the file tells whether another run had it meanwhile.

Remote, and local file systems without locks: a lease, an object that the holder renews.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

from moe_ckpt.errors import StoreInUseError, StoreUnwritableError
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.local import ACCESS, Access, make_directories
from moe_ckpt.threads import ThreadName, named_thread

log = logging.getLogger("moe_ckpt")

LOCK_NAME = ".lock"
_LEASE = re.compile(r"lock_(\d{8,})\.json")
_TAKEN = frozenset({errno.EACCES, errno.EAGAIN})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_MAX_TEXT_BYTES = 4096
_FRESH_SHARE = 0.2
"""The part of a lease's time for which it need not be renewed again."""
_WAIT_SHARE = 0.1
"""The part of a lease's time after which the thread looks again."""
_END_SECS = 1.0
"""Longest wait for the thread, which may be waiting for a server."""

_registry_guard = threading.Lock()
_registry: dict[str, tuple[int, str]] = {}
"""Root -> (process id, owner): the stores that this process holds. A forked child ignores its parent's."""


class StoreLock:
    """Keeps other runs out of a store from ``acquire`` to ``release`` (or the process's death).

    Taken by rank 0 only, before the first write of the run.

    Args:
        storage: Of the store.
        owner: What names this run to others, and over restarts (a job id, see ``job_name``): a lease left by a killed
            process of the same owner is taken over at once.
        ttl_secs: A lease not renewed for so long is considered dead.
        clock: Seconds since the epoch, for leases.
        access: Of the lock's file, see ``LocalStorage``.
    """

    def __init__(
        self,
        storage: Storage,
        owner: str,
        *,
        ttl_secs: float = 600.0,
        clock: Callable[[], float] = time.time,
        access: str = "private",
    ) -> None:
        self.owner = owner
        self._root = storage.root
        self._ttl_secs = ttl_secs
        self._lease = _Lease(storage, owner, ttl_secs, clock)
        self._guard = threading.RLock()
        self._file = _FileLock(storage.root, owner, ACCESS[access])
        self._lost_to = ""
        self._released = threading.Event()
        self._thread: threading.Thread | None = None
        self._taken: _FileLock | _Lease | None = None
        """From ``acquire`` to ``release``, also while another run holds what ``retake`` could not get back."""

    @property
    def is_lost(self) -> bool:
        """True if another run was seen to have the store, or to have had it. Only own files may be touched then."""
        return bool(self._lost_to)

    def acquire(self) -> None:
        """Takes the lock without waiting.

        Raises:
            StoreInUseError: Names the holder.
            StoreUnwritableError: The lock cannot be written.
        """
        with self._guard:
            self._register()
            self._lost_to, self._released = "", threading.Event()
            try:
                if "://" not in self._root and self._file.acquire():
                    self._taken = self._file
                else:
                    self._lease.acquire()
                    self._taken = self._lease
            except StoreUnwritableError:
                raise
            except OSError as error:
                raise StoreUnwritableError(f"the lock of the store {self._root} cannot be taken: {error}") from error
            finally:
                if self._taken is None:
                    self._unregister()

    def renew_meanwhile(self) -> None:
        """Keeps the lock on a thread of its own until ``release``.

        An upload may take longer than a lease lasts, and the kernel drops its lock if other code of this process opens
        and closes the lock file.
        """
        with self._guard:
            self._thread = named_thread(ThreadName.LEASE, self._renew, self._released)
            self._thread.start()

    def confirm(self) -> None:
        """Makes sure that the lock is held, just before a commit into a store that was seen to be this run's.

        It renews a lease, unless that was done lately; or takes the kernel's lock again, and makes a new lock file if
        the old one was deleted or replaced. It does nothing if the lock was not taken.

        Raises:
            StoreInUseError: Another run has, or had, the store: do not commit.
            OSError: The store did not answer.
        """
        with self._noticing_loss():
            if self._taken is not None and not self._taken.keep():
                path = os.path.join(self._root, LOCK_NAME)
                log.warning("the lock file %s was deleted or replaced during training; it is made again", path)
                self._taken.retake()

    def retake(self) -> None:
        """Takes the lock again after the store, and perhaps the lock with it, was emptied or replaced.

        Raises:
            StoreInUseError: Another run was quicker.
            OSError: The store did not answer.
        """
        with self._guard:
            self._lost_to = ""
            with self._noticing_loss():
                if self._taken is not None:
                    self._taken.retake()

    def release(self) -> None:
        """Releases the store. Does nothing if the lock is not held."""
        with self._guard:
            taken, self._taken = self._taken, None
            if taken is None:
                return
            self._released.set()
            try:
                taken.drop()
            finally:
                self._unregister()
        if self._thread is not None:
            self._thread.join(_END_SECS)

    def __enter__(self) -> StoreLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _register(self) -> None:
        with _registry_guard:
            pid, owner = _registry.get(self._root, (0, ""))
            if pid == os.getpid():
                raise StoreInUseError(self._root, f"{owner}, in this same process {pid}")
            _registry[self._root] = (os.getpid(), self.owner)

    def _unregister(self) -> None:
        with _registry_guard:
            _registry.pop(self._root, None)

    @contextlib.contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """Notes a loss of the lock. Raises at once if it was lost before, since another run may have written since."""
        with self._guard:
            if self._lost_to:
                raise StoreInUseError(self._root, self._lost_to)
            try:
                yield
            except StoreInUseError as error:
                self._lost_to = error.holder
                raise

    def _renew(self, released: threading.Event) -> None:
        while not released.wait(self._ttl_secs * _WAIT_SHARE):
            try:
                with self._noticing_loss():
                    if self._taken is not None:
                        self._taken.keep()
            except StoreInUseError as error:
                log.warning("%s", error)
                return  # the next commit is told as well
            except OSError as error:
                log.warning("the lock of the store could not be renewed, retrying: %s", error)


class _FileLock:
    """The kernel's lock on ``<root>/.lock``, whose content names the holder."""

    def __init__(self, root: str, owner: str, access: Access) -> None:
        self._root = root
        self._path = os.path.join(root, LOCK_NAME)
        self._access = access
        self._owner = owner
        self._text = b""
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """False where the file system has no locks."""
        make_directories(self._root, self._access)
        descriptor = self._access.create(self._path, os.O_RDWR)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                self._lock(descriptor)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return False
                raise
            self._text = f"{_describe(self._owner)}\n".encode()[:_MAX_TEXT_BYTES]
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._text, 0)
            undo.pop_all()
        self._descriptor = descriptor
        return True

    def keep(self) -> bool:
        """Locks the open file again, should the kernel have dropped its lock.

        Returns:
            False if the lock file was deleted or replaced: it may belong to another store by now, which only
            ``StoreLock.confirm`` may judge.
        """
        try:
            if self._descriptor is None or not os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        self._lock(self._descriptor)
        text = os.pread(self._descriptor, _MAX_TEXT_BYTES, 0)
        if text != self._text:
            holder = _text_of(text) or "which has not written its name"
            raise StoreInUseError(self._root, f"{holder}, which had the store meanwhile")
        return True

    def retake(self) -> None:
        """Locks the file that is there now, or makes one."""
        self.drop()  # first: closing it afterwards would drop the new lock, were it the same file all the time
        if not self.acquire():
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), self._path)

    def drop(self) -> None:
        """Unlocks the file, which stays: removing it would race with the next holder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        """Raises ``StoreInUseError`` if another process has locked the file."""
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            holder = _text_of(os.pread(descriptor, _MAX_TEXT_BYTES, 0))
            raise StoreInUseError(self._root, holder or "which has not written its name yet") from None


class _Lease:
    """Numbered objects ``lock_<n>.json``; the highest number is the holder.

    A renewal writes n + 1 and then deletes n, so that the store is never seen without a lease, and a
    takeover that loses the race fails on the name. Object stores give no stronger promise that all of
    them keep, so the holder checks at every renewal that it still is the holder: that the newest object
    has its nonce. It may be one more than the holder knows of, where the answer to an upload was lost.
    """

    def __init__(self, storage: Storage, owner: str, ttl_secs: float, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._owner = owner
        self._ttl_secs = ttl_secs
        self._clock = clock
        self._nonce = secrets.token_hex(8)
        self._number = self._tried = 0
        self._renewed_unix_secs = -math.inf

    def acquire(self) -> None:
        try:
            numbers = self._numbers()
            if numbers:
                with contextlib.suppress(FileNotFoundError):  # released between listing and reading
                    holder, owner, _, renewed_unix_secs = self._read(_lease_name(numbers[-1]))
                    if owner != self._owner and self._clock() - renewed_unix_secs < self._ttl_secs:
                        raise StoreInUseError(self._storage.root, holder)
            self._advance(numbers)
        except OSError:
            with contextlib.suppress(OSError):
                self.drop()  # it may have landed, and would keep out another job until it has run out
            raise

    def keep(self) -> bool:
        """Renews the lease unless that was done so lately that nobody can have taken it over. Returns True."""
        if not 0 <= self._clock() - self._renewed_unix_secs < self._ttl_secs * _FRESH_SHARE:
            self._renew()
        return True

    def _renew(self) -> None:
        numbers = self._numbers()
        if not numbers:
            raise StoreInUseError(self._storage.root, "unknown: this run's lease was deleted")
        holder, _, nonce, _ = self._read(_lease_name(numbers[-1]))
        if nonce != self._nonce:
            raise StoreInUseError(self._storage.root, f"{holder}, which took over the lease")
        self._advance(numbers)

    def retake(self) -> None:
        """Renews the lease; one that was deleted is written again."""
        if self._numbers():
            self._renew()
        else:
            self._put(self._number + 1)

    def _advance(self, numbers: list[int]) -> None:
        self._put(numbers[-1] + 1 if numbers else 1)
        for number in numbers:
            self._storage.delete(_lease_name(number))

    def drop(self) -> None:
        for number in {self._number, self._tried}:
            if self._is_own(number):
                self._storage.delete(_lease_name(number))

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for name in self._storage.list("") if (match := _LEASE.fullmatch(name)))

    def _read(self, name: str) -> tuple[str, str, str, float]:
        """(holder in words, owner, nonce, time of renewal)."""
        raw = self._storage.read(name, 0, _MAX_TEXT_BYTES)
        try:
            body = json.loads(bytes(raw))
            return str(body["holder"]), str(body["owner"]), str(body["nonce"]), float(body["unix_secs"])
        except (ValueError, KeyError, TypeError):
            raise StoreInUseError(
                self._storage.root, f"unknown: {name} cannot be read; delete it if no run is active"
            ) from None

    def _is_own(self, number: int) -> bool:
        """That name may be another run's by now."""
        try:
            return self._read(_lease_name(number))[2] == self._nonce
        except (FileNotFoundError, StoreInUseError):
            return False

    def _put(self, number: int) -> None:
        renewed = self._clock()
        body = {"owner": self._owner, "holder": _describe(self._owner), "nonce": self._nonce, "unix_secs": renewed}
        self._tried = number
        try:
            self._storage.write(_lease_name(number), [json.dumps(body).encode()])
        except FileExistsError:
            if self._is_own(number):  # of an upload whose answer was lost, and that was not listed yet
                self._number = number
                return
            raise StoreInUseError(self._storage.root, "a run that took the lock a moment earlier") from None
        self._number, self._renewed_unix_secs = number, renewed


def _lease_name(number: int) -> str:
    return f"lock_{number:08d}.json"


def _text_of(raw: bytes) -> str:
    return raw.decode(errors="replace").strip()


def _describe(owner: str) -> str:
    return f"{owner}, process {os.getpid()} on {socket.gethostname()}"


def job_name() -> str:
    """Name of this job for the store's lock: a job id that outlives a restart, or one that no other process has.

    A process number is no such name: in each of two containers it may be 1.
    """
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        value = os.environ.get(variable)
        if value and value != "none":
            return f"{variable}={value}"
    return f"no job id, start {_start_of(os.getpid())}"


@functools.cache
def _start_of(pid: int) -> str:
    """Returns a text that is always the same in this process, and another one in every other, forked ones included."""
    return secrets.token_hex(4)
