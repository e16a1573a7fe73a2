"""``Memory``: the options of snapshots in host memory that outlive the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from moe_ckpt.core.cadence import StorageCadence
from moe_ckpt.core.user_text import named_arguments, parse_bytes, parse_secs
from moe_ckpt.errors import ConfigError

DEFAULT_ROOT = "/dev/shm"
MOST_REPLICAS = 16
LONGEST_DOMAIN = 256
TORCHRUN_GRACE_SECS = 30.0
"""From SIGTERM to SIGKILL, when one of torchrun's ranks has failed."""


_T = TypeVar("_T")


@named_arguments
@dataclass(frozen=True)
class Memory:
    """Keeps snapshots in files on a tmpfs, so that they survive the end of the process (``kill -9``).

    With ``replicas`` they survive the loss of the node as well.

    Attributes:
        directory: Where the files lie; None for ``/dev/shm``. Another tmpfs, or a local disk, which is slower and gives
            a warning. Nodes must not share it.
        replicas: Copies of each rank's snapshots in the memory of that many other nodes, which need as much room there.
        failure_domain: Name of the rack or switch that fails together with this node: copies lie outside of it. The
            same on all ranks of a node. None: each node fails alone.
        storage_every: Which checkpoints in memory are also written to storage (``core.cadence.StorageCadence``): 1 is
            each of them, a whole number n one in n steps, a duration such as "10min" one when this time has passed
            since the last; "auto" chooses by the rate of failures and the cost of writing.
        survivor_secs: When training stops at a failure, each surviving rank takes at most this time to seal the newest
            step in memory; a number of seconds, or text such as "20s". Must be less than the time that the launcher
            waits before it kills (torchrun: 30 s, SLURM: ``KillWait``). 0: never.
        upstream_bytes: The most that this rank's log of messages over the boundaries of its pipeline stage may take, as
            a number or as text such as "8GB": with the log, only stages that lost state go back after a failure
            (Megatron). None: nothing is logged.

    Raises:
        ConfigError: An invalid value.
    """

    directory: str | os.PathLike[str] | None = None
    replicas: int = 0
    failure_domain: str | None = None
    storage_every: int | float | str = 1
    survivor_secs: float | str = 20.0
    upstream_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.directory is not None:
            text = os.fspath(self.directory) if isinstance(self.directory, (str, os.PathLike)) else None
            if not isinstance(text, str) or not text.strip() or "\0" in text or "://" in text:
                raise ConfigError(
                    f"Memory(directory={self.directory!r}): must be a directory of this node, such as {DEFAULT_ROOT}"
                )
            object.__setattr__(self, "directory", text)
        self._check_replicas()
        self._check_survivors()
        _of_memory(lambda: self.cadence)  # raises for what cannot be

    def _check_replicas(self) -> None:
        count, domain = self.replicas, self.failure_domain
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_REPLICAS:
            raise ConfigError(f"Memory(replicas={count!r}): must be a whole number from 0 to {MOST_REPLICAS}")
        if domain is not None:
            if not isinstance(domain, str) or not domain.strip() or len(domain) > LONGEST_DOMAIN:
                raise ConfigError(
                    f"Memory(failure_domain={domain!r}): must be the name of this node's rack or switch, of 1 to "
                    f"{LONGEST_DOMAIN} characters, such as os.environ['RACK']"
                )
            if not count:
                raise ConfigError(f"Memory(failure_domain={domain!r}) says where copies lie; give replicas=1 or more")

    def _check_survivors(self) -> None:
        value = self.survivor_secs
        off = value == 0 and not isinstance(value, (bool, str))
        secs = 0.0 if off else _of_memory(lambda: parse_secs(value, "survivor_secs", 3600.0), "0 for never, or ")
        if secs > TORCHRUN_GRACE_SECS and "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError(
                f"Memory(survivor_secs={value!r}): torchrun kills ranks {TORCHRUN_GRACE_SECS:g} s after it has asked "
                "them to end, which cuts off anything longer. Set less than that"
            )
        object.__setattr__(self, "survivor_secs", secs)
        if self.upstream_bytes is not None:
            size = _of_memory(lambda: parse_bytes(self.upstream_bytes, "upstream_bytes"))
            object.__setattr__(self, "upstream_bytes", size)
            if not secs:
                raise ConfigError(
                    "Memory(upstream_bytes=..., survivor_secs=0): the log is of use only where the other ranks keep "
                    "their state. Set survivor_secs, such as 20"
                )

    @property
    def sealing_secs(self) -> float:
        """``survivor_secs`` as a number."""
        return float(self.survivor_secs)

    @property
    def shared(self) -> list[str]:
        """Returns the settings that must be equal on all ranks, as text.

        Each rank decides alone which snapshots go to storage, and what it keeps at a failure: with other settings, the
        others would wait for it, or keep their part for nothing. Directories, names and sizes may differ by node.
        """
        return [
            f"replicas={self.replicas}",
            f"failure_domain={None if self.failure_domain is None else 'a name'}",
            f"storage_every={self.cadence.every!r}",
            f"survivor_secs={self.sealing_secs!r}",
            f"upstream_bytes={None if self.upstream_bytes is None else 'a size'}",
        ]

    @property
    def cadence(self) -> StorageCadence:
        """Returns the cadence with which checkpoints go on to storage."""
        return StorageCadence(self.storage_every)

    @property
    def root(self) -> str:
        """The directory that is used."""
        return DEFAULT_ROOT if self.directory is None else os.path.abspath(self.directory)


def _of_memory(made: Callable[[], _T], also: str = "") -> _T:
    """Returns what ``made`` gives. Its error says that the setting is one of ``Memory``.

    Args:
        made: Raises ``ConfigError`` as ``name=value: must be ...``.
        also: What the value may be besides.
    """
    try:
        return made()
    except ConfigError as error:
        setting, _, rest = str(error).partition(": must be ")
        raise ConfigError(f"Memory({setting}): must be {also}{rest}") from None
