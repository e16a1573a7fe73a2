"""Maps files for this process alone.

A forked child, such as a data loader's worker, gets neither the mapping nor a descriptor: it would keep the memory of a
slot that its parent has deleted for as long as it lives.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch


def mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """Returns ``[nbytes]`` uint8, the bytes of an open file, until nobody uses them. The descriptor may be closed.

    Raises:
        OSError: They cannot be mapped.
    """
    try:
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    libc = ctypes.CDLL(None, use_errno=True)
    begin, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes)
    if libc.madvise(begin, size, mmap.MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory
