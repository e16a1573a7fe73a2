"""A checkpoint of which memory gives a part, as it is opened; and the slots that it is found in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moe_ckpt.core.operators import EXPERT
from moe_ckpt.core.tokens import Counts
from moe_ckpt.format.manifest import Manifest, ModelRecord
from moe_ckpt.memory.left_slots import LeftSlots
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.memory.slot_storage import SlotStorage
from moe_ckpt.reading.memory.slot_views import place_of
from moe_ckpt.reading.reader import StoreReader


class RankMemory(Protocol):
    """The memory of a run as far as one rank reaches it: a tier of ``engine``, or whoever looks from outside.

    Attributes:
        node: Names what reaches its slots: this machine, or this process.
        model: That is trained.
        complete_step: Step of the newest checkpoint that the ranks hold.
        outlives_process: It keeps snapshots by itself; else a commit on storage makes them checkpoints.
        run_id: Of the store.
        root: ``Memory(directory=...)``; empty for a process's own memory.
    """

    node: str
    model: ModelRecord
    complete_step: int | None
    outlives_process: bool

    @property
    def run_id(self) -> str: ...

    @property
    def root(self) -> str: ...

    @property
    def left_slots(self) -> LeftSlots:
        """The slots that earlier lives left."""
        ...


@dataclass(frozen=True, eq=False)
class LoggedSnapshot:
    """One snapshot of a gradient log.

    Attributes:
        manifest: Of what it holds in full, and of the ranks' plain states.
        gradients: What it holds of them, of all ranks.
    """

    manifest: Manifest
    gradients: tuple[StoredSlice, ...]


@dataclass(frozen=True, eq=False)
class OpenedMemory:
    """A checkpoint of which memory gives at least a part.

    Attributes:
        reader: Reads it.
        slots: What of it is in memory.
        manifest: Of it.
        beneath: The checkpoint on storage that it is, or that it is laid over; None if storage has nothing of it.
        fresh: Operators that memory has, and storage not as of the same step -> the tokens that they have seen, if they
            are experts.
        logged: Its snapshots, if it is a step of a gradient log; the manifest says the step of each anchor then.
        chained: Operators whose anchors gradients bring to its step. The others are as the manifest says.
        survivor_slices: What ranks that lived on sealed of the last step of a gradient log.
    """

    reader: StoreReader
    slots: SlotStorage
    manifest: Manifest
    beneath: Manifest | None
    fresh: Mapping[str, int]
    logged: tuple[LoggedSnapshot, ...] = ()
    chained: frozenset[str] = frozenset()
    survivor_slices: tuple[StoredSlice, ...] = ()

    def tokens_from_memory(self, operators: Iterable[str]) -> Counts | None:
        """Returns ``[L, E]`` tokens seen by those experts among ``operators`` that storage has older; None if it has
        all."""
        chosen = self.fresh.keys() & set(operators)
        seen = np.zeros_like(np.asarray(self.manifest.tokens["applied"], dtype=np.int64))
        for operator in chosen:
            if operator.startswith(EXPERT):
                seen[place_of(operator)] = self.fresh[operator]
        return seen if chosen else None
