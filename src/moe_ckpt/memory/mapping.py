"""Maps memory for this process alone, and page-locks it for CUDA.

A forked child, such as a data loader's worker, would keep the memory of a file that its parent has deleted until the
child ends. So a child gets no descriptor of the file, and private zeros in place of the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

Identity = tuple[int, int]
"""Device and inode."""


def identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def identity_at(path: Path) -> Identity | None:
    """Returns the identity of the file with this name; None if there is none, or nobody can tell."""
    try:
        return identity(path.lstat())
    except OSError:  # it is gone, or cannot be looked at
        return None


LOCK_NBYTES = 64 << 20
"""Memory is locked for CUDA in pieces that end where an address is a multiple of this: a copy from a GPU must not cross
such an end (``slices.copying``)."""
PAGE_NBYTES = mmap.PAGESIZE
_FIXED, _NORESERVE, _POPULATE_WRITE = 0x10, 0x4000, 23
"""``MAP_FIXED``, ``MAP_NORESERVE`` and ``MADV_POPULATE_WRITE`` of Linux."""
_HUGE_NBYTES = 2 << 20
_FAILED = ctypes.c_void_p(-1).value
"""``MAP_FAILED``."""
_mapped: dict[int, tuple[int, int]] = {}
"""Address of each mapping of this process -> (bytes, descriptor)."""


class Pages:
    """Owns a range of addresses, and the file behind it, which grows.

    Memory that CUDA has locked must be unlocked before it is unmapped, on whichever thread its last user is. So the
    tensors of ``bytes``, and their views, keep this object alive, and its end unlocks and unmaps the memory.

    Args:
        limit: Bytes of addresses, at least. Only the first ``ready`` of them may be touched.
        descriptor: Of the file, which this object closes; -1 for anonymous memory.

    Attributes:
        limit: Bytes of addresses.
        descriptor: As given.
        ready: Bytes that exist, have been touched by this process or an earlier one and, where asked for, page-locked.

    Raises:
        OSError: The addresses cannot be mapped.
    """

    def __init__(self, limit: int, descriptor: int = -1) -> None:
        self.descriptor, self._address, self.limit = descriptor, 0, _up(max(1, limit), PAGE_NBYTES)
        self._locked: dict[int, tuple[int, int | None]] = {}  # offset -> process and device
        self.ready = 0
        try:
            self._address = _aligned(self.limit)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        _mapped[self._address] = self.limit, descriptor
        if descriptor >= 0:
            _map(self._address, self.limit, mmap.MAP_SHARED | _FIXED, descriptor)
        shape, data = (self.limit,), (self._address, False)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": data}

    @property
    def file_nbytes(self) -> int:
        """Returns the bytes of the file; 0 without one."""
        return os.fstat(self.descriptor).st_size if self.descriptor >= 0 else 0

    def reuse(self) -> None:
        """Counts pages that an earlier process has touched as ``ready``: all at the file's beginning. To find the first
        hole takes 10 ms for each GB, and to map pages at their first use a fraction of the time that it takes to make
        them. Not for the training thread."""
        with contextlib.suppress(OSError):  # there is no file, or it is empty
            self.ready = min(self.limit, os.lseek(self.descriptor, 0, os.SEEK_HOLE)) // PAGE_NBYTES * PAGE_NBYTES

    def close_file(self) -> None:
        """Closes the file, of which no more will be mapped: a rank may have more slots than it may have files open."""
        os.close(self.descriptor)
        self.descriptor = -1
        _mapped[self._address] = self.limit, -1

    def bytes(self, begin: int, nbytes: int) -> torch.Tensor:
        """Returns ``[nbytes]`` uint8, a view."""
        return torch.from_numpy(np.asarray(self)[begin : begin + nbytes])

    def grow(self, end: int, *, locks: bool = False, touches: bool = True) -> None:
        """Makes the memory from ``ready`` to ``end``. Slow; not for the training thread.

        Args:
            end: Rounded up to whole pages, and, where they are locked, to where CUDA's next piece begins.
            locks: Page-lock the memory, for copies from a GPU.
            touches: Have the kernel make the pages now, and not at their first use.

        Raises:
            OSError: There is no room; ``ready`` stays.
            RuntimeError: CUDA refuses to lock the memory; ``ready`` stays, and no later call of CUDA meets the error.
        """
        begin, end = self.ready, min(self.limit, _up(end, LOCK_NBYTES if locks else PAGE_NBYTES))
        if end <= begin:
            return
        before = self.file_nbytes
        try:
            if self.descriptor < 0:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
                _map(self._address + begin, end - begin, flags, -1)
            elif before < end:
                os.ftruncate(self.descriptor, end)
            if touches or locks:
                self._touch(begin, end)
            if locks:
                self._lock(begin, end)
        except (OSError, RuntimeError):
            if self.descriptor >= 0 and before < end:
                os.ftruncate(self.descriptor, max(before, begin))
            raise
        self.ready = end

    def _touch(self, begin: int, end: int) -> None:
        if self.descriptor >= 0 and end - begin >= _HUGE_NBYTES:  # if the tmpfs has huge pages: a tenth of the time
            _LIBRARY.madvise(self._address + begin, end - begin, mmap.MADV_HUGEPAGE)
        if not _LIBRARY.madvise(self._address + begin, end - begin, _POPULATE_WRITE):
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # EFAULT: the file system is full
            raise OSError(errno.ENOSPC if code == errno.EFAULT else code, os.strerror(errno.ENOSPC))
        if self.descriptor >= 0:  # a kernel before Linux 5.14
            os.posix_fallocate(self.descriptor, begin, end - begin)
        pages = np.asarray(self)[begin:end:PAGE_NBYTES]
        pages |= np.uint8(0)

    def shrink(self, end: int) -> None:
        """Gives back the memory behind ``end``, rounded up to whole pages, which nobody may use any more.

        Raises:
            OSError: The file cannot be truncated.
        """
        end = _up(end, PAGE_NBYTES)
        for begin in [begin for begin in self._locked if begin + LOCK_NBYTES > end]:
            end = max(end, min(self.limit, begin + LOCK_NBYTES)) if begin < end else end
        if end >= max(self.ready, self.file_nbytes):
            return
        for begin in [begin for begin in self._locked if begin >= end]:
            self._unlock(begin)
        self.ready = min(self.ready, end)
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, end)
        else:
            self.drop(end, self.limit)

    def drop(self, begin: int, end: int) -> None:
        """Gives back unused pages of anonymous memory; the addresses stay."""
        begin, end = _up(begin, PAGE_NBYTES), end // PAGE_NBYTES * PAGE_NBYTES
        if self.descriptor < 0 and begin < end:
            _LIBRARY.madvise(self._address + begin, end - begin, mmap.MADV_DONTNEED)

    def _lock(self, begin: int, end: int) -> None:
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        owner = os.getpid(), torch.cuda.current_device() if is_used else None
        done: list[int] = []
        try:
            while begin < end:
                to = min(end, (begin // LOCK_NBYTES + 1) * LOCK_NBYTES)
                code = int(_cuda().cudaHostRegister(self._address + begin, to - begin, 0))
                if code:
                    _clear_error()
                    torch.cuda.check_error(code)
                self._locked[begin] = owner
                done.append(begin)
                begin = to
        except BaseException:
            for offset in done:
                self._unlock(offset)
            raise

    def _unlock(self, begin: int) -> None:
        process, device = self._locked.pop(begin)
        if process != os.getpid():  # a forked child has neither these pages nor CUDA
            return
        # Any thread may be the last user, and one that has not chosen a device would make a context on the first one.
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            if int(_cuda().cudaHostUnregister(self._address + begin)):
                _clear_error()

    def unlock(self) -> None:
        """Ends page-locking. Copies from a GPU into the memory take longer then, and are still right."""
        for begin in tuple(self._locked):
            self._unlock(begin)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends, or CUDA has ended
            self.unlock()
        if self._address and _mapped.pop(self._address, None) is not None:
            _LIBRARY.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self.limit))  # other threads go on
            if self.descriptor >= 0:
                os.close(self.descriptor)


def page_locked(data: torch.Tensor) -> torch.Tensor:
    """Returns a copy in page-locked memory, which a GPU reads at the speed of the bus; ``data`` itself if CUDA has no
    such memory. Torch reuses the memory once the copies that streams of torch make from it are done. On any thread.

    Args:
        data: Contiguous, on the host.
    """
    try:
        copied = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return data
    copy_alone(copied, data)
    return copied


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a contiguous tensor on the host into one of the same type and size, on the calling thread alone: ``copy_``
    would use all cores."""
    target_bytes, source_bytes = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (target, source))
    target_bytes[:] = source_bytes


_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.mmap.restype = ctypes.c_void_p
_LIBRARY.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBRARY.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int, nbytes: int, flags: int, descriptor: int, rights: int = mmap.PROT_READ | mmap.PROT_WRITE) -> int:
    """Calls ``mmap``, and returns the address. Raises ``OSError``."""
    at: int | None = _LIBRARY.mmap(address, nbytes, rights, flags, descriptor, 0)
    if at is None or at == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return at


def _aligned(nbytes: int) -> int:
    """Reserves addresses for so many bytes, the first a multiple of ``LOCK_NBYTES``. Returns the first."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    at = _map(0, nbytes + LOCK_NBYTES, flags, -1, rights=0)
    address = _up(at, LOCK_NBYTES)
    for begin, end in ((at, address), (address + nbytes, at + nbytes + LOCK_NBYTES)):
        if begin < end:
            _LIBRARY.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))
    return address


def _up(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain


def _cuda() -> Any:
    """Returns the part of the CUDA runtime that torch offers, which page-locks memory."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_error() -> None:
    """Clears CUDA's last error, for which the thread's next kernel would fail. Torch does not clear it."""
    for library in (None, f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).cudaGetLastError()
            return


def _forget_in_child() -> None:
    """Replaces inherited mappings by zeros, so that a forked child that touches them neither crashes nor changes files
    of its parent."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
    for address, (nbytes, descriptor) in list(_mapped.items()):
        with contextlib.suppress(OSError):
            _map(address, nbytes, flags, -1)
            if descriptor >= 0:
                os.close(descriptor)
    _mapped.clear()


os.register_at_fork(after_in_child=_forget_in_child)
