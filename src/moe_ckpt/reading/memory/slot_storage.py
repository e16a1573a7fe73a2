"""Reads slots of memory as the files of a store, so that a store's reader can prove, verify and restore them.

Each part of a slot is the shard that storage would have: its header, then its bytes. Bytes on other nodes are fetched
before anything reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from moe_ckpt.comm.communicator import answers_of
from moe_ckpt.core.operators import EXPERT
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import Manifest, ModelRecord
from moe_ckpt.ledger.coverage import joined_ranges
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.memory.left_slots import LeftSlots, SlotChecker
from moe_ckpt.memory.slot import Slot
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.collective import STOPS, NotUsableError
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.memory.memory_shares import Share
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.reading_shares import SlotSpan, routes_of
from moe_ckpt.reading.shared_reading import exchange_bytes
from moe_ckpt.storage.base import Chunk, ReadableStorage

STATE = -1
"""Place of a rank's state file among the parts of its slot."""

Span = tuple[str, int, int]
"""(path, first byte, end) of what is to be read of a file, its header included."""


@dataclass(frozen=True, eq=False)
class SlotFile:
    """A part of a slot, as a file.

    Attributes:
        share: The slot.
        part: Number of the part in the slot, or ``STATE``.
        header: The file's first bytes, which every rank has.
        begin: Byte of the slot at which the rest of the file begins.
        nbytes: Bytes of that rest.
    """

    share: Share
    part: int
    header: bytes
    begin: int
    nbytes: int


@dataclass
class SlotStorage:
    """A store of which some ``files`` are read from slots.

    Attributes:
        storage: Of the store.
        comm: The ranks.
        node: This rank's node.
        slots: Number -> slot, of this rank's slots that ``files`` need. No others: a reference keeps a slot's memory.
        paths: (holder, number) -> path of the slot; only slots of this node are opened.
        files: Path -> what is read instead of the store's file.
        checker: Verifies some of this rank's slots ahead of time; None if nothing does.
        places: Names of places for people: the memory that this rank reaches as files, and the rest; or one for all.
    """

    storage: ReadableStorage
    comm: Communicator
    node: str
    slots: Mapping[int, FoundSlot]
    paths: Mapping[tuple[int, int], str]
    files: Mapping[str, SlotFile]
    checker: SlotChecker | None = None
    places: tuple[str, ...] = ("this node", "other nodes")
    _opened: dict[Share, FoundSlot] = field(default_factory=dict)
    _fetched: dict[str, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    """Path -> bytes that came from other nodes, each run with its first byte, counted from the end of the header."""

    def __post_init__(self) -> None:
        self.root = self.storage.root

    def is_near(self, path: str) -> bool:
        """Returns whether this node has the file in memory."""
        return self.files[path].share.node == self.node

    def is_sound(self, path: str) -> bool:
        """Returns whether every slice of a file has been verified ahead of time."""
        file = self.files.get(path)
        if self.checker is None or file is None or file.share.holder != self.comm.rank or file.part == STATE:
            return False
        slot = self.slots[file.share.number]
        return slot.header.parts[file.part].raw == file.header and self.checker.is_sound(slot)

    def needs_others(self, spans: Iterable[Span]) -> bool:
        """Returns whether some span lies on other nodes only, so that all ranks must ``fetch``."""
        return any(True for _ in self._far(spans))

    def needs_storage(self, spans: Iterable[Span]) -> bool:
        """Returns whether some span lies on storage only."""
        return any(path not in self.files for path, _, _ in spans)

    def fetch(self, spans: Iterable[Span]) -> int:
        """Receives bytes from other nodes: once for each node, whose ranks then share them. A collective.

        Args:
            spans: What this rank is going to read.

        Returns:
            How many bytes this rank received from other nodes.

        Raises:
            NotUsableError: On every rank, if one has no memory for it.
            PeerLostError: A peer is gone.
        """
        asked: list[SlotSpan] = []
        problem: Exception | None = None
        try:
            ranges: dict[str, list[tuple[int, int]]] = {}
            for path, begin, end in sorted(self._far(spans)):
                ranges.setdefault(path, []).append((begin, end))
            for path, of_file in ranges.items():
                for begin, end in joined_ranges(of_file):
                    asked.append(SlotSpan(self.files[path].share.holder, path, begin, end))
                    room = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
                    self._fetched.setdefault(path, []).append((begin, room))
        except Exception as error:  # raised once the other ranks, which wait for this one, know
            problem = error
        requests = answers_of(self.comm, [self.node, None if problem else asked])
        for rank, (_, runs) in enumerate(requests):
            if runs is None:
                raise NotUsableError(STOPS, rank, problem)
        me, nodes = self.comm.rank, [node for node, _ in requests]
        needed_by = {rank: [SlotSpan(*run) for run in runs] for rank, (_, runs) in enumerate(requests)}
        routed, received = [], 0
        for run, route in routes_of(nodes, needed_by):
            if run.holder == me or any(me == receiver for _, receiver in (*route.from_source, *route.onward)):
                routed.append((route, self._bytes_of(run.path, run.begin, run.end)))
                received += run.end - run.begin if (run.holder, me) in route.from_source else 0
        exchange_bytes(self.comm, routed)
        return received

    def _far(self, spans: Iterable[Span]) -> Iterable[Span]:
        """Yields the spans that are on other nodes only, counted from the end of each file's header."""
        for path, begin, end in spans:
            file = self.files.get(path)
            if file is not None and file.nbytes and file.share.node != self.node:
                skipped = len(file.header)
                yield path, max(0, begin - skipped), max(0, end - skipped)

    def _bytes_of(self, path: str, begin: int, end: int) -> torch.Tensor:
        """Returns bytes of a file, counted from the end of its header: where they are, or where they are fetched to."""
        file = self.files[path]
        if file.share.node == self.node:
            return _part_of(self._open(file.share), file.part)[begin:end]
        if begin == end:  # of a slice without elements
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        for first, data in self._fetched.get(path, ()):
            if first <= begin and end <= first + len(data):
                return data[begin - first : end - first]
        raise FileNotFoundError(f"{path}: bytes {begin} to {end} were not fetched")

    def _open(self, share: Share) -> FoundSlot:
        if share not in self._opened and share.holder == self.comm.rank:
            self._opened[share] = self.slots[share.number]
        if share not in self._opened:
            path = self.paths[share.holder, share.number]
            opened = FoundSlot(*Slot.open(Path(path)))
            header = opened.header
            now = header.identity, header.rank, header.sealer
            if now != (share.identity, share.writer, share.sealer):
                raise DamagedError(path, "now holds another snapshot", step=share.step)
            self._opened[share] = opened
        return self._opened[share]

    # --- ReadableStorage ---

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> Chunk:
        """See ``ReadableStorage``. Copies nothing unless both header and data are read."""
        file = self.files.get(path)
        if file is None:
            return self.storage.read(path, offset, nbytes)
        size, head = self.size(path), len(file.header)
        end = size if nbytes is None else min(size, offset + nbytes)
        if offset >= head:
            return self._bytes_of(path, offset - head, max(offset, end) - head).numpy().data
        first = file.header[offset:end]
        return first if end <= head else b"".join([first, self._bytes_of(path, 0, end - head).numpy().data])

    def size(self, path: str) -> int:
        """See ``ReadableStorage``."""
        file = self.files.get(path)
        return self.storage.size(path) if file is None else len(file.header) + file.nbytes

    def exists(self, path: str) -> bool:
        """See ``ReadableStorage``."""
        return path in self.files or self.storage.exists(path)

    def list(self, path: str = "") -> list[str]:
        """See ``ReadableStorage``; lists only what the store has."""
        return self.storage.list(path)


def _part_of(slot: FoundSlot, number: int) -> torch.Tensor:
    """Returns the bytes of one part of a slot, and what follows it in the slot."""
    header = slot.header
    if number == STATE:
        return torch.frombuffer(bytearray(header.state), dtype=torch.uint8)
    return slot.slot.memory[header.parts[number].begin :]


class RankMemory(Protocol):
    """The memory that one rank has of a run: a tier of a session, or directories that a command looks at.

    Attributes:
        node: Names this machine, or, for private memory, this process: who can read its slots as files.
        model: The model that is trained.
        complete_step: Step of the newest checkpoint that the ranks hold.
        outlives_process: Snapshots in it are checkpoints by themselves; else a commit on storage makes them so.
        run_id: Names the run that the store belongs to.
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
        manifest: Names what it holds in full, and the ranks' plain states.
        gradients: The consumed gradients that it holds, of all ranks.
    """

    manifest: Manifest
    gradients: tuple[StoredSlice, ...]


@dataclass(frozen=True, eq=False)
class OpenedMemory:
    """A checkpoint of which memory gives at least a part.

    Attributes:
        reader: Reads the checkpoint.
        slots: The part that is in memory.
        manifest: Of the checkpoint.
        beneath: The checkpoint on storage that it is, or that it is laid over; None if storage has no part of it.
        fresh: Operator -> ``[L, E]`` tokens that experts have seen as of its version, for each operator that memory has
            in a version that storage lacks.
        logged: Its snapshots, if it is a step of a gradient log; the manifest then has the step of each anchor.
        chained: Operators that gradients or a replay bring from their anchors to its step. The others are loaded as of
            the step in the manifest.
    """

    reader: StoreReader
    slots: SlotStorage
    manifest: Manifest
    beneath: Manifest | None
    fresh: Mapping[str, Counts]
    logged: tuple[LoggedSnapshot, ...] = ()
    chained: frozenset[str] = frozenset()

    def tokens_from_memory(self, operators: Iterable[str]) -> Counts | None:
        """Returns ``[L, E]`` tokens seen by those experts among ``operators`` that storage has in older versions only.

        Returns None if there are none.
        """
        chosen = self.fresh.keys() & set(operators)
        seen = np.zeros_like(np.asarray(self.manifest.tokens["applied"], dtype=np.int64))
        for operator in chosen:
            if operator.startswith(EXPERT):
                at = tuple(map(int, operator.removeprefix(EXPERT).split("/")))
                seen[at] = self.fresh[operator][at]
        return seen if chosen else None
