"""Who besides the run's user may read a store's files: the modes of what is created."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass


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
        """``os.open`` of a file that is created: its descriptor. Raises ``OSError``."""
        descriptor = os.open(path, flags, self.file_mode)
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
ACCESS = {
    "private": PRIVATE,
    "group": Access(0o640, 0o750, exact=True),
    "umask": Access(0o666, 0o777),
}
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
