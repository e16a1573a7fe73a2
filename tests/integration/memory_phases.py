"""Kills this process in the middle of what it does with memory slots and their copies, where no phase is announced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_ckpt.memory import slot as slot_module
from moe_ckpt.memory.directory import RankDirectory
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.mapping import Pages
from moe_ckpt.memory.slot import HEADER_SUFFIX, Slot
from moe_ckpt.peers.store import ReplicaStore
from moe_ckpt.peers.wire import Wire
from moe_ckpt.testing import kill_process


def kill_in(phase: str, n: int) -> None:
    """The ``n``-th time that the phase is reached. In this process only, which is about to die."""
    owner, name, deadly = PHASES[phase]
    real = getattr(owner, name)
    calls = itertools.count(1)

    def killing(*args: Any, **options: Any) -> Any:
        if next(calls) == n:
            deadly(real, *args)
            kill_process()
        return real(*args, **options)

    setattr(owner, name, staticmethod(killing) if isinstance(vars(owner).get(name), staticmethod) else killing)


def _after(real: Callable[..., Any], *args: Any) -> None:
    real(*args)


def _before(real: Callable[..., Any], *args: Any) -> None:
    pass


def _half_sealed(real: Callable[..., Any], slot: Slot, header: bytes) -> None:
    slot.path.with_suffix(".tmp").write_bytes(header[: len(header) // 2])


def _half_removed(real: Callable[..., Any], path: Path) -> None:
    path.with_suffix(HEADER_SUFFIX).unlink(missing_ok=True)


def _half_cleared(real: Callable[..., Any], directory: RankDirectory) -> None:
    _half_removed(real, min(directory.slots))


def _half_sent(real: Callable[..., Any], wire: Wire, data: Any) -> None:
    real(wire, memoryview(data)[: len(data) // 2])


PHASES: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "reserve": (Pages, "_touch", _after),
    "seal": (Slot, "seal", _half_sealed),
    "sealed": (Slot, "seal", _after),
    "unseal": (Slot, "unseal", _after),
    "remove": (slot_module, "remove_files", _half_removed),
    "send": (Wire, "send", _half_sent),
    "verified": (ReplicaStore, "keep", _before),
    "acknowledge": (ReplicaStore, "keep", _after),
    "sweep": (RankDirectory, "clear_unsealed", _before),
    "clear": (RankDirectory, "clear", _half_cleared),
    "end": (MemoryFiles, "close", _before),
}
"""Phase -> whose function it is and what is done of it before the process dies."""
