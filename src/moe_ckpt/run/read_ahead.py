"""Reads the files from which a run will most likely resume into the page cache, while the process builds its model.

It has no other effect: the resume reads and verifies all files, which takes less time then.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import partial

from moe_ckpt.threads import ThreadName, named_thread

log = logging.getLogger("moe_ckpt")

_PIECE_NBYTES = 4 << 20
_under_way = set[threading.Event]()


def begin(dirpath: str | os.PathLike[str]) -> None:
    """Begins to read, on a thread, the files of the newest checkpoint in a directory that this rank has written.

    A rank that resumes needs mostly files that the same rank wrote. Its number comes from the launcher, since there is
    no process group yet.

    Args:
        dirpath: Of the store; nothing is read of a URL.
    """
    if "://" not in os.fspath(dirpath) and os.path.isdir(dirpath):
        stop = threading.Event()
        _under_way.add(stop)
        named_thread(ThreadName.READ, _read, os.fspath(dirpath), stop, suffix="-ahead").start()


def end() -> None:
    """Stops reading ahead: from here on the run itself reads."""
    while _under_way:
        _under_way.pop().set()


def _read(dirpath: str, stop: threading.Event) -> None:
    # These import torch, and programs that train nothing have options too.
    from moe_ckpt.format.manifest import MANIFEST_NAME, composed
    from moe_ckpt.run.documents import each_step, read_commit, read_part, read_parts
    from moe_ckpt.storage.base import split_path
    from moe_ckpt.storage.local import LocalStorage

    try:
        storage, rank = LocalStorage(dirpath), int(os.environ.get("RANK", "0"))
        steps = each_step(storage, lambda name: storage.exists(f"{name}/{MANIFEST_NAME}"))
        newest = next((name for name in reversed(steps) if steps[name]), None)
        if newest is None or stop.is_set():
            return
        manifest = read_commit(storage, newest)
        whole = composed(manifest, read_parts(manifest, {}, partial(read_part, storage)))
        for path in [record.path for record in whole.files if record.rank == rank]:
            _read_file(os.path.join(storage.root, *split_path(path, storage.root)), stop)
    except Exception as error:  # the resume meets the same error, and reports it
        log.info("%s is not read ahead: %s", dirpath, error)


def _read_file(path: str, stop: threading.Event) -> None:
    buffer = bytearray(_PIECE_NBYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while not stop.is_set() and os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)
