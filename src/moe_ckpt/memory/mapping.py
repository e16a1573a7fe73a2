"""Maps files for this process alone.

A forked child, such as a data loader's worker, would keep the memory of a slot that its parent has deleted for as long
as it lives. So it gets no descriptor, and private zeros in place of the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from typing import Any

import numpy as np
import torch

_SLOT = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-s .*/moe_ckpt-\d+/.+/rank_\d{5,}/slot_\d+\.data(?: \(deleted\))?\n")
"""A line of ``/proc/self/maps``."""
_FIXED = 0x10
"""``MAP_FIXED`` of Linux."""
_FAILED = ctypes.c_void_p(-1).value
"""``MAP_FAILED``."""
_mapping = [False]
"""Whether this process has ever mapped one."""


class Pages:
    """Owns the mapping of an open file. CUDA may page-lock it, and has to let go of it before it is unmapped.

    That is so whoever used the bytes last, and on whichever thread: the tensor of ``bytes`` and each view of it keep
    this object alive, which unlocks the pages, and unmaps them then, when nobody uses them any more.

    Args:
        descriptor: Of the file. It may be closed.
        nbytes: Of the file.

    Raises:
        OSError: They cannot be mapped.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._locked: tuple[int, int | None] | None = None  # process and device
        self._address = 0
        _mapping[0] = True
        self._nbytes = max(1, nbytes)
        self._address = _map(0, self._nbytes, mmap.MAP_SHARED, descriptor)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (self._address, False)}

    def bytes(self) -> torch.Tensor:
        """Returns ``[nbytes]`` uint8."""
        return torch.from_numpy(np.asarray(self))

    @property
    def is_locked(self) -> bool:
        """Whether CUDA was told to page-lock them."""
        return self._locked is not None

    def lock(self, nbytes: int) -> None:
        """Page-lock the first ``nbytes``, for copies from a GPU. Takes as long as making them.

        Raises:
            RuntimeError: CUDA refuses it. They are not locked then, and no later call of CUDA meets the error.
        """
        self.unlock()
        code = int(_cuda().cudaHostRegister(self._address, nbytes, 0))
        if code:
            _clear_error()
            torch.cuda.check_error(code)
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._locked = os.getpid(), torch.cuda.current_device() if is_used else None

    def unlock(self) -> None:
        """They are page-locked no longer. Must come before anything that takes pages away."""
        locked, self._locked = self._locked, None
        if locked is None or locked[0] != os.getpid():  # a forked child has neither these pages nor CUDA
            return
        device = locked[1]
        # Any thread may be the last user, and one that has not chosen a device would make a context on the first one.
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            if int(_cuda().cudaHostUnregister(self._address)):
                _clear_error()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends, or CUDA has ended
            self.unlock()
        if self._address:
            _LIBRARY.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self._nbytes))  # other threads go on


_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.mmap.restype = ctypes.c_void_p
_LIBRARY.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def _map(address: int, nbytes: int, flags: int, descriptor: int) -> int:
    """Returns where they are. Raises ``OSError``."""
    at: int | None = _LIBRARY.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if at is None or at == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return at


def _cuda() -> Any:
    """The CUDA runtime, of which torch has what page-locks memory."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_error() -> None:
    """CUDA keeps the error of a call for the thread's next kernel, which would fail for it. torch does not clear it."""
    for library in (None, f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).cudaGetLastError()
            return


def _let_go_in_child() -> None:
    """Whatever the child does with what it has inherited, it finds memory there, and the slots are its parent's."""
    if not _mapping[0]:
        return
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for found in filter(None, map(_SLOT.fullmatch, lines.readlines())):
            begin, end = int(found[1], 16), int(found[2], 16)
            _map(begin, end - begin, flags, -1)


os.register_at_fork(after_in_child=_let_go_in_child)
