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

import torch

_SLOT = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-s .*/moe_ckpt-\d+/.+/rank_\d{5,}/slot_\d+\.data(?: \(deleted\))?\n")
"""A line of ``/proc/self/maps``."""
_FIXED = 0x10
"""``MAP_FIXED`` of Linux."""
_mapping = [False]
"""Whether this process has ever mapped one."""


def mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """Returns ``[nbytes]`` uint8, the bytes of an open file, until nobody uses them. The descriptor may be closed.

    Raises:
        OSError: They cannot be mapped.
    """
    _mapping[0] = True
    try:
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def _let_go_in_child() -> None:
    """Whatever the child does with what it has inherited, it finds memory there, and the slots are its parent's."""
    if not _mapping[0]:
        return
    function = ctypes.CDLL(None).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for found in filter(None, map(_SLOT.fullmatch, lines.readlines())):
            begin, end = int(found[1], 16), int(found[2], 16)
            function(begin, end - begin, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


os.register_at_fork(after_in_child=_let_go_in_child)
