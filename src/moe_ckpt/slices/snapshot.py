"""One snapshot on this rank: its contents, the memory with its bytes, and the plain state, which is copied at once;
its checksums, its files on storage, and the acknowledgement of these.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moe_ckpt.core.step import Contents, Facts, Step
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import StoreUnwritableError, torn_snapshot
from moe_ckpt.format.manifest import (
    GROUPS,
    STATE_KIND,
    FileRecord,
    StateRecord,
    file_row,
    shard_path,
    state_path,
    state_row,
    step_dir,
)
from moe_ckpt.format.sealed import digest, encode_document
from moe_ckpt.format.shard import Checksums, SliceEntry, dtype_name, seal_of
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.ledger.coverage import PRIME, Box
from moe_ckpt.ledger.freshness import FRESH, STALE, UNKNOWN, LastChecksums, combined_freshness
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.slices.checksums import Checker, judged_in
from moe_ckpt.slices.compiling import GRADIENTS, CompiledPart, CompiledPlan
from moe_ckpt.slices.copying import Copy, copy_here
from moe_ckpt.storage.base import Chunk, Storage

_COVER_NBYTES = 16
Plain = tuple[Any, list[tuple[SliceEntry, torch.Tensor]]]
"""A rank's plain state, encoded, and its tensors."""
Encode = Callable[..., Plain]
"""Returns the plain state as of its first call, with further entries that are given by name."""


@dataclass(eq=False)
class SnapshotPart:
    """A part of a snapshot in host memory. Once it is sealed, it has checksums, and must not change any more.

    Attributes:
        number: In the order in which the parts are copied.
        begin: First byte in the part's buffer.
        compiled: The part of the plan.
        memory: ``[nbytes]`` uint8, the part's bytes. Of what duplicates another rank's share, a slice is used only
            if its checksum is that rank's.
        checksums: Of the slices.
        header: Head and seal of the shard (``format.shard``).
        not_finite: Key of the first slice with NaN or infinity; empty if there is none.
    """

    number: int
    begin: int
    compiled: CompiledPart
    memory: torch.Tensor
    checksums: Checksums = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    header: tuple[bytes, ...] = ()
    not_finite: str = ""


@dataclass(eq=False)
class Snapshot:
    """One snapshot on this rank, from the copy to the outcome.

    Attributes:
        identity: Of the snapshot.
        contents: Of the snapshot.
        facts: Of its step.
        applied: ``[L, E]`` tokens processed by its step, which come when the ranks have agreed on the step.
        plan: The slices that this rank copies and writes.
        buffers: Host memory, one for each of ``plan.buffers``.
        parts: All parts of the plan in these buffers, in the order in which they are copied.
        copy: The copy under way.
        state: Plain state, encoded; its tensors are among the slices.
        began_at: ``time.perf_counter`` of the beginning.
        waited: Training waited for an earlier snapshot before this one could begin.
        refused: Why this rank could not copy it, so that it fails on every rank; None if it could.
        sealed: The parts of this rank's share, then the gradients of ``plan.slots``, once they have checksums; None
            before.
        state_file: Bytes of the state file; empty before.
        freshness: Result of comparing checksums with earlier ones (``ledger.freshness``).
    """

    identity: Step
    contents: Contents
    facts: Facts
    applied: Future[Counts]
    plan: CompiledPlan
    buffers: Sequence[Buffer]
    parts: Sequence[SnapshotPart]
    copy: Copy
    state: Any
    began_at: float
    waited: bool = False
    refused: str | None = None
    sealed: tuple[SnapshotPart, ...] | None = None
    state_file: bytes = b""
    freshness: int = UNKNOWN

    @property
    def buffer(self) -> Buffer:
        """Memory of ``plan.parts``."""
        return self.buffers[0]

    @property
    def pieces(self) -> Sequence[Buffer]:
        """The buffers of ``plan.slots``."""
        return self.buffers[1 : 1 + len(self.plan.slots)]

    @property
    def step(self) -> int:
        return self.identity.step

    @property
    def directory(self) -> str:
        return step_dir(self.step, self.identity.generation)

    @property
    def nbytes(self) -> int:
        """Tensor bytes that this rank writes, with gradients that it logs."""
        parts = (part.compiled for part in self.parts)
        return sum(part.nbytes for part in parts if part.is_written or part.kind == GRADIENTS)

    @property
    def written(self) -> tuple[CompiledPart, ...]:
        """The parts that become shards."""
        return tuple(part.compiled for part in self.parts if part.compiled.is_written)

    def not_finite(self, *, written: bool = False) -> str:
        """Returns the key of the first slice with NaN or infinity; empty if there is none.

        Args:
            written: Look only at slices that go to storage.
        """
        every = (sealed for sealed in self.sealed or () if sealed.compiled.is_written or not written)
        return next((sealed.not_finite for sealed in every if sealed.not_finite), "")

    def mirrors(self) -> dict[int, list[SnapshotPart]]:
        """Returns rank -> the parts of its share of the same snapshot that this rank's state also holds."""
        mirrors: dict[int, list[SnapshotPart]] = {}
        for part in self.parts:
            if part.compiled.source is not None:
                mirrors.setdefault(part.compiled.source, []).append(part)
        return mirrors


def parts_in(plan: CompiledPlan, buffers: Sequence[Buffer]) -> list[SnapshotPart]:
    """Returns the parts of a plan, in buffers of ``plan.sizes``."""
    numbers = itertools.count()
    return [
        SnapshotPart(next(numbers), begin, part, buffer.memory[begin : begin + part.nbytes])
        for parts, buffer in zip(plan.buffers, buffers, strict=True)
        for begin, part in parts
    ]


def plain_of(capture: Callable[[], Mapping[str, Any]], rank: int) -> Encode:
    """Returns a function that encodes the plain state of its first call, once."""
    captured = functools.cache(capture)
    encoded = functools.cache(lambda: side_tensors(captured(), rank))
    return lambda **more: side_tensors({**captured(), **more}, rank) if more else encoded()


def side_tensors(state: Any, rank: int) -> Plain:
    """Encodes the plain state. Its tensors become slices of their own, which are copied before training continues,
    since buffers and random numbers may change during the next forward pass.

    Args:
        state: Plain state.
        rank: Of this process.

    Raises:
        UnencodableStateError: names the path of a value that only pickle could hold.
    """
    encoded, tensors = encode_tree(state)
    slices = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype, name)
        entry = SliceEntry(f"side/{rank}/{name}", "", dtype, (0,) * len(shape), shape, shape)
        slices.append((entry, tensor.detach()))
    return encoded, slices


def copy_at_once(parts: Sequence[SnapshotPart], side: list[tuple[SliceEntry, torch.Tensor]]) -> bool:
    """Copies slices that may change before the next optimizer step, on the training thread.

    Args:
        parts: Of the snapshot.
        side: Tensors of the plain state.

    Returns:
        As ``copy_here``.
    """
    sources = {entry.name: source for entry, source in side}
    on_device = False
    for part in parts:
        side_copies = ((entry, sources[entry.name]) for entry in part.compiled.side_entries())
        on_device |= copy_here([*part.compiled.copies.at_once, *side_copies], part.memory)
    return on_device


# --- checksums and files ---


def seal_snapshot(snapshot: Snapshot, rank: int, world_size: int, checker: Checker) -> None:
    """Computes the checksums of all slices, and checks that their values are finite, during the copy and after it.

    Raises:
        StoreError: Tensors changed while they were being copied.
    """
    share = [part for part in snapshot.parts if part.compiled.source is None]
    checked = checker.check(share, judged_in(snapshot.state), snapshot.copy.wait_for)
    snapshot.copy.wait_on_host()
    if snapshot.copy.changed:
        raise torn_snapshot(snapshot.step, snapshot.copy.changed)
    step, generation, run_id = snapshot.step, snapshot.identity.generation, snapshot.identity.run
    snapshot.state_file = state_file(snapshot.state, step, generation, run_id, rank, world_size)
    for part, (checksums, first) in zip(share, checked, strict=True):
        part.checksums, part.not_finite = checksums, first
        part.header = part.compiled.head(run_id, rank, step), seal_of(step, generation, checksums)
    snapshot.sealed = tuple(share)


def state_file(state: Any, step: int, generation: int, run_id: str, rank: int, world_size: int) -> bytes:
    """Returns the bytes of the file of a rank's plain state.

    Args:
        state: Plain state, encoded.
        step, generation, run_id, rank, world_size: Of the snapshot and the rank.
    """
    return encode_document(
        STATE_KIND,
        {
            "run_id": run_id,
            "step": step,
            "generation": generation,
            "rank": rank,
            "world_size": world_size,
            "state": state,
        },
    )


def write_share(storage: Storage, snapshot: Snapshot, rank: int) -> tuple[tuple[FileRecord, ...], StateRecord]:
    """Writes this rank's shards and state durably. Returns their records. Raises ``OSError`` if storage fails."""
    files = []
    for sealed in snapshot.sealed or ():
        if sealed.compiled.is_written:
            header, path = sealed.header, shard_path(snapshot.directory, rank, sealed.compiled.kind)
            nbytes = write_named(storage, path, [*header, sealed.memory.numpy().data])
            files.append(FileRecord(path, nbytes, sum(map(len, header)), digest(*header), snapshot.step, rank))
    path = state_path(snapshot.directory, rank)
    write_named(storage, path, [snapshot.state_file])
    return tuple(files), StateRecord(path, len(snapshot.state_file), digest(snapshot.state_file), rank)


def write_named(storage: Storage, path: str, chunks: Sequence[Chunk]) -> int:
    """Writes a file as ``Storage.write`` does, and returns its size. An error names the file, which errors of a full
    disk or of fsync do not.

    Raises:
        StoreUnwritableError: a subclass of ``OSError``.
    """
    try:
        return storage.write(path, chunks)
    except OSError as error:
        room = _room(storage, chunks) if error.errno == errno.ENOSPC else ""
        raise StoreUnwritableError(f"{path} cannot be written: {error}{room}") from error


def _room(storage: Storage, chunks: Sequence[Chunk]) -> str:
    """Returns the size of a file, and the free bytes of the full disk if they are known, for people."""
    needed = sum(memoryview(chunk).nbytes for chunk in chunks)
    try:
        free = shutil.disk_usage(storage.root).free
    except OSError:  # an object store, or a disk that does not answer
        return f" (it has {needed:,} bytes)"
    return f" (it has {needed:,} bytes, and {free:,} are free)"


class FreshnessWatch:
    """Compares the checksums of slices with those of earlier snapshots. For the thread that seals."""

    def __init__(self) -> None:
        self._checksums = LastChecksums()
        self._of_window = UNKNOWN
        self._fresh_after = -1

    def seen(self, snapshot: Snapshot) -> int:
        """Returns the freshness of a sealed snapshot: ``UNKNOWN``, ``STALE`` or ``FRESH``.

        In a step of a gradient log, all operators saved in full may belong to an optimizer that made no update.
        Gradients that another optimizer consumed show that training continues; their checksums do not count.

        A sparse window is judged as a whole, at its last slot, since perhaps no operator of one slot was updated, such
        as experts without tokens.

        Of two snapshots after the same update, both are fresh if one is: a complete one at the end, after a partial
        one, may have only frozen experts to compare.
        """
        updates, window = snapshot.facts.updates, snapshot.contents.window
        parts = [(part.compiled, part.checksums) for part in snapshot.sealed or () if part.compiled.cuts]
        verdict = combined_freshness(
            self._checksums.seal(part.shelved, part.slices, checksums, updates)
            for part, checksums in parts
            if part.kind != GRADIENTS
        )
        if verdict == FRESH:
            self._fresh_after = updates
        elif verdict == STALE and updates == self._fresh_after:
            verdict = FRESH
        consumed = any(part.kind == GRADIENTS for part, _ in parts)
        if window is None:
            return UNKNOWN if consumed and verdict == STALE else verdict
        self._of_window = verdict if window.slot == 0 else combined_freshness((self._of_window, verdict))
        return self._of_window if window.is_last or self._of_window == FRESH else UNKNOWN


# --- acknowledgements ---


@dataclass(frozen=True)
class Acknowledgement:
    """The files that one or several ranks made durable. Each field has the bytes of all ranks, in their order.

    So acknowledgements are put together by joining bytes, and rank 0 needs no Python for each single rank. It commits
    only because of their content, never because of a barrier. Their size does not grow with the model.

    Attributes:
        errors: Reasons of ranks whose files do not count: ``[rank, reason]`` as JSON, and a comma each.
        covers: ``CompiledPlan.cover_difference`` of each rank's plan.
        experts, others, states: Names of files, one line each, by ``format.manifest.GROUPS``.
        file_rows, state_rows: Rows of the part document (``format.manifest``).
        freshness: One byte of each rank (``ledger.freshness``).
        not_finite: The first NaN or infinity of each rank that has any: ``[rank, key]`` as JSON, and a comma each.
    """

    errors: bytes = b""
    covers: bytes = bytes(_COVER_NBYTES)
    experts: bytes = b""
    others: bytes = b""
    states: bytes = b""
    file_rows: bytes = b""
    state_rows: bytes = b""
    freshness: bytes = bytes(1)
    not_finite: bytes = b""

    @classmethod
    def failed(cls, rank: int, reason: str) -> Acknowledgement:
        return cls(errors=json.dumps([rank, reason]).encode() + b",")

    @property
    def columns(self) -> list[bytes]:
        """Returns the fields as columns for ``Communicator.combine``."""
        return [*vars(self).values()]

    @property
    def causes(self) -> tuple[str, ...]:
        """Returns the reasons why the checkpoint must not be committed; none if it may."""
        return tuple(f"rank {rank}: {reason}" for rank, reason in json.loads(b"[%b]" % self.errors[:-1]))

    @property
    def first_not_finite(self) -> str:
        """Returns the first tensor with NaN or infinity, for people; empty if all values are finite."""
        rows = json.loads(b"[%b]" % self.not_finite[:-1])
        return f"{rows[0][1]} on rank {rows[0][0]}" if rows else ""

    @property
    def cover(self) -> int:
        """Returns 0 if the ranks' shares tile the plan."""
        words = np.frombuffer(self.covers, dtype="<u4").reshape(-1, 4).sum(axis=0, dtype=np.uint64).tolist()
        return int(sum(word << 32 * at for at, word in enumerate(words)) % PRIME)

    @property
    def lines(self) -> dict[str, bytes]:
        """Returns group -> names of the ranks' files, for ``names_in``."""
        columns = zip(GROUPS, (self.experts, self.others, self.states), strict=True)
        return {group: lines for group, lines in columns if lines}


def acknowledge(
    files: Sequence[FileRecord], state: StateRecord, cover: int, freshness: int = UNKNOWN, not_finite: str = ""
) -> Acknowledgement:
    """Returns the acknowledgement of a rank.

    Args:
        files: Shards that it wrote.
        state: State file that it wrote.
        cover: ``CompiledPlan.cover_difference`` of its plan.
        freshness: Of its share.
        not_finite: See ``SnapshotPart``; of the shards.
    """
    lines = {record.kind: record.path.rpartition("/")[2].encode() + b"\n" for record in files}
    return Acknowledgement(
        covers=cover.to_bytes(_COVER_NBYTES, "little"),
        experts=lines.get("expert", b""),
        others=lines.get("non_expert", b""),
        states=state.path.rpartition("/")[2].encode() + b"\n",
        file_rows=b"".join(map(file_row, files)),
        state_rows=state_row(state),
        freshness=bytes([freshness]),
        not_finite=json.dumps([state.rank, not_finite]).encode() + b"," if not_finite else b"",
    )


@functools.lru_cache(maxsize=8)  # ranks mostly write files of the same names at each step
def names_in(lines: bytes) -> frozenset[str]:
    """Returns the names of files in ``Acknowledgement.lines``."""
    return frozenset(lines.decode().split())


def encode_boxes(boxes: Sequence[tuple[str, Box]]) -> bytes:
    """Encodes boxes for ``decode_boxes`` on another rank. Results of several ranks may be joined."""
    return b"".join(json.dumps([key, box.offsets, box.shape]).encode() + b"," for key, box in boxes)


def decode_boxes(raw: bytes) -> list[tuple[str, Box]]:
    """Inverse of ``encode_boxes``."""
    return [(key, Box(tuple(offsets), tuple(shape))) for key, offsets, shape in json.loads(b"[%b]" % raw[:-1])]
