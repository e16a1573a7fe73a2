"""Little memory, for real: memory cgroups with a limit, and file systems in memory of a given size. It takes root."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOTS = {"/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")}
_ROOTS |= {"/sys/fs/cgroup": ("memory.max", "memory.peak", "memory.events")}
_numbers = itertools.count()


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup. Picklable: ranks get it as an argument, and join it.

    Attributes:
        path: Where it is.
        names: Of its files for the limit, the peak and kills.
    """

    path: Path
    names: tuple[str, str, str]

    def join(self, pid: int = 0) -> None:
        """A process is in it from here on, with what it takes after that. pid: 0 is the one that calls."""
        (self.path / "cgroup.procs").write_text(str(pid or os.getpid()))

    def limit(self, nbytes: int) -> None:
        (self.path / self.names[0]).write_text(str(nbytes))

    @property
    def peak(self) -> int:
        return int((self.path / self.names[1]).read_text())

    @property
    def kills(self) -> int:
        """By the kernel, for lack of memory."""
        told = dict(line.split() for line in (self.path / self.names[2]).read_text().splitlines())
        return int(told["oom_kill"])


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Cgroup]:
    """One of its own. Skips the test where none can be made."""
    for root, names in _ROOTS.items():
        group = Path(root, f"moe_ckpt_test_{os.getpid()}_{next(_numbers)}")
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / names[0]).exists():
                break
            group.rmdir()
    else:
        pytest.skip("no memory cgroup can be made here; run this test as root")
    try:
        yield Cgroup(group, names)
    finally:
        group.rmdir()


@contextlib.contextmanager
def small_file_systems(nbytes: int, *directories: Path) -> Iterator[None]:
    """A tmpfs of so many bytes on each of these directories. Skips the test where none can be mounted."""
    with contextlib.ExitStack() as mounted:
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
            mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(directory)]
            made = subprocess.run(mount, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"no tmpfs of its own can be mounted here: {made.stderr.strip()}; run this test as root")
            mounted.callback(subprocess.run, ["umount", "-l", str(directory)], check=True)
        yield


def fill(directory: Path) -> None:
    """Somebody else takes all that a file system has."""
    with contextlib.suppress(OSError), open(directory / "filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
            filler.flush()
