"""Checkpoints that lie in the memory of this job's nodes, as checkpoints beside those of the store.

After a restart every rank tells what slots it has. The newest snapshot of which every writer's share is somewhere is a
checkpoint, whether storage has it or not; of one that storage has, memory may have any part. Manifest and index are
made of the slots' headers, and ``recovery.slot_storage`` gives the bytes, so that it is opened, proved, verified and
restored as any other. A slot in which damage is found is set aside, and the next source is taken.
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moe_ckpt.core.coverage import Box, prove_cover
from moe_ckpt.core.memory_shares import MemoryCheckpoint, Share, base_of, checkpoints_of, nearest
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts, TokenBook
from moe_ckpt.engine.compiling import HELD
from moe_ckpt.engine.memory_tier import MemoryTier
from moe_ckpt.errors import CoverageError, DamagedError, RecoveryLoopError
from moe_ckpt.format.fragment import Fragment, encode_json
from moe_ckpt.format.manifest import (
    FileRecord,
    Manifest,
    OperatorRecord,
    SlotRecord,
    StateRecord,
    kind_of,
    parse_step_dir,
    shard_path,
    state_path,
    step_dir,
)
from moe_ckpt.format.part import pruned
from moe_ckpt.format.sealed import digest
from moe_ckpt.format.shard import ShardHeader, SliceEntry, decode_header
from moe_ckpt.format.slot import SlotHeader, StepFacts
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.index import blocks_of
from moe_ckpt.recovery.reader import StoreReader
from moe_ckpt.recovery.slot_storage import STATE, SlotFile, SlotStorage
from moe_ckpt.recovery.together import DAMAGED, NotUsableError, together

log = logging.getLogger("moe_ckpt")

MOST_STARTS = 3
"""From one checkpoint in memory without a step that ended: what is wrong is with it, or with what computes from it."""


@dataclass(frozen=True, eq=False)
class OpenedMemory:
    """A checkpoint of which memory gives at least a part.

    Attributes:
        reader: Reads it.
        slots: What of it is in memory.
        manifest: Of it.
        beneath: The checkpoint on storage that it is, or that it is laid over; None if storage has nothing of it.
        fresh: Operators that storage does not have as of its step.
    """

    reader: StoreReader
    slots: SlotStorage
    manifest: Manifest
    beneath: Manifest | None
    fresh: frozenset[str]

    def tokens_from_memory(self, operators: Iterable[str]) -> Counts | None:
        """``[L, E]`` tokens seen by those experts among ``operators`` that storage has older; None if it has all."""
        chosen = self.fresh.intersection(operators)
        applied = np.asarray(self.manifest.tokens["applied"], dtype=np.int64)
        seen = np.zeros_like(applied)
        for layer, record in enumerate(self.manifest.model.layers):
            for expert in range(record.experts):
                if expert_id(layer, expert) in chosen:
                    seen[layer, expert] = applied[layer, expert]
        return seen if chosen else None


class MemoryCheckpoints:
    """What the slots of earlier lives hold together. Made and used by all ranks, on the training thread.

    Args:
        comm: The ranks.
        tier: This rank's slots.
        reader: Of the store; what it has read already is not read again.

    Raises:
        PeerLostError: A peer is gone.
    """

    def __init__(self, comm: Communicator, tier: MemoryTier, reader: StoreReader) -> None:
        self._comm, self._tier, self._reader = comm, tier, reader
        self._used: Mapping[str, Share] = {}
        self._given_up: set[str] = set()
        self._noted: set[int] = set()
        self._said: set[str] = set()
        self._own = tier.left.found
        mine = [_told(each, number) for number, each in enumerate(self._own)]
        payload = json.dumps([tier.node, [str(each.slot.path) for each in self._own], mine]).encode()
        self._shares: list[Share] = []
        self._paths: dict[Share, str] = {}
        for holder, raw in enumerate(comm.everyone(payload)):
            node, paths, told = json.loads(raw)
            for path, fields in zip(paths, told, strict=True):
                share = _share(holder, node, fields)
                self._shares.append(share)
                self._paths[share] = path

    def offered(self, stored: Sequence[str]) -> list[str]:
        """Directories of what memory has whole, or has a part of beside storage, newest first.

        Args:
            stored: Directories of the checkpoints on storage.
        """
        standing = [each for each in checkpoints_of(self._shares) if self._stands(each, stored)]
        whole = {step_dir(each.step, each.generation) for each in standing if each.is_complete}
        parts = {step_dir(each.step, each.generation) for each in standing if not each.is_window}
        return sorted((whole | parts.intersection(stored)) - self._given_up, key=age_of, reverse=True)

    def _stands(self, checkpoint: MemoryCheckpoint, stored: Sequence[str]) -> bool:
        """Whether storage still has what it had when the checkpoint began, or what replaced that.

        It has not if somebody went back by removing checkpoints, or by putting an older copy of the store in its place:
        what memory holds would undo that.
        """
        base, begun = age_of(checkpoint.base), checkpoint.generation
        stands = not checkpoint.base or any(
            name == checkpoint.base or (age_of(name)[0] == begun and age_of(name) > base) for name in stored
        )
        if not stands and self._comm.rank == 0 and checkpoint.base not in self._said:
            self._said.add(checkpoint.base)
            log.warning(
                "memory holds step %d, which came after %s. That checkpoint is not on storage any more, so memory is "
                "not used",
                checkpoint.step,
                checkpoint.base,
            )
        return stands

    def open(self, directory: str, stored: Sequence[str]) -> OpenedMemory:
        """Open what memory has of a checkpoint. A collective; reads no slice.

        Raises:
            NotUsableError: Some rank cannot open it.
            RecoveryLoopError: Too many starts have gone on from it, and ended no step.
        """
        candidates = [e for e in checkpoints_of(self._shares) if step_dir(e.step, e.generation) == directory]
        checkpoint = min(candidates, key=lambda each: not each.is_complete)
        self._note_start(directory, checkpoint)
        snapshots = self._describe(checkpoint)
        beneath = self._beneath(checkpoint, stored)
        return together(self._comm, lambda: self._opened(checkpoint, snapshots, beneath))

    def set_aside(self, directory: str, problem: Exception | None) -> None:
        """A checkpoint cannot be used as it is: take nothing more from the slots that ranks found damage in.

        A collective. Where that changes nothing, the checkpoint is not offered again.

        Args:
            directory: Of the checkpoint.
            problem: This rank's own, if any.
        """
        if problem is not None:
            log.warning("what memory holds of %s cannot be used as it is: %s", directory, problem)
        path = problem.path if isinstance(problem, DamagedError) else ""
        share = self._used.get(path)
        mine = [] if share is None else [share.holder, share.number]
        bad = {tuple(told) for raw in self._comm.everyone(json.dumps(mine).encode()) if (told := json.loads(raw))}
        for holder, number in sorted(bad):
            if holder == self._comm.rank:
                slot = self._own[number].slot
                slot.quarantine()
                log.warning("the memory slot %s is damaged: it is set aside, and not used", slot.path)
        self._shares = [share for share in self._shares if (share.holder, share.number) not in bad]
        if not bad:
            self._given_up.add(directory)

    def keep_only(self, step: int | None) -> None:
        """The run goes on: let go of all slots but those of the checkpoint opened last, if it is of that ``step``.

        Args:
            step: None if memory gave nothing.
        """
        shares = () if step is None else self._used.values()
        numbers = {share.number for share in shares if share.holder == self._comm.rank}
        kept = [self._own[number] for number in sorted(numbers)]
        self._own = ()  # nobody but ``left`` knows what it lets go of
        self._tier.left.keep(kept)
        self._tier.complete_step = step

    # --- opening ---

    def _note_start(self, directory: str, checkpoint: MemoryCheckpoint) -> None:
        """Count this start on every slot of the checkpoint, wherever it lies, until it gets somewhere."""
        shares = checkpoint.shares
        starts = max(share.starts for share in shares)
        if starts >= MOST_STARTS:
            slots = [f"{self._paths[share]} (rank {share.writer}'s, on rank {share.holder})" for share in shares]
            files = self._tier.files
            raise RecoveryLoopError(directory, starts, slots, files.run_id, str(files.path.parents[3]))
        for number in {share.number for share in shares if share.holder == self._comm.rank} - self._noted:
            self._noted.add(number)
            self._own[number].slot.note_start()

    def _beneath(self, checkpoint: MemoryCheckpoint, stored: Sequence[str]) -> Manifest | None:
        """The checkpoint on storage to lay it over; None if there is none that can be read."""
        known = [(*age_of(name), name) for name in stored]
        for name in base_of(checkpoint, known):
            try:
                return together(self._comm, lambda name=name: self._reader.manifest(name))  # type: ignore[misc]
            except NotUsableError as error:
                if error.kind != DAMAGED:
                    raise
        return None

    def _describe(self, checkpoint: MemoryCheckpoint) -> list[_SnapshotFacts]:
        """What every rank must know of the slots: headers of their shards, and once what a manifest needs."""
        mine: list[bytes] = []
        for place, snapshot in enumerate(checkpoint.snapshots):
            for writer, shares in snapshot.items():
                if shares[0].holder == self._comm.rank:
                    header = self._own[shares[0].number].header
                    mine += _packed_header(place, writer, header, tells=writer == min(snapshot))
        found = [_SnapshotFacts() for _ in checkpoint.snapshots]
        for raw in self._comm.everyone(b"".join(mine)):
            for place, writer, described, facts in _unpacked_headers(raw):
                found[place].writers[writer] = described
                if facts is not None:
                    found[place].facts = StepFacts.decoded(facts)
        return found

    def _opened(
        self, checkpoint: MemoryCheckpoint, snapshots: Sequence[_SnapshotFacts], beneath: Manifest | None
    ) -> OpenedMemory:
        directory = step_dir(checkpoint.step, checkpoint.generation)
        files: dict[str, SlotFile] = {}
        parts = []
        for snapshot, described in zip(checkpoint.snapshots, snapshots, strict=True):
            part = _Part(step_dir(next(iter(snapshot.values()))[0].step, checkpoint.generation))
            for writer, shares in sorted(snapshot.items()):
                part.add(writer, nearest(shares, self._comm.rank, self._tier.node), described.writers[writer])
            parts.append(part)
            files |= part.files
        if beneath is not None and beneath.directory == directory and not checkpoint.is_window:
            [part] = parts
            files = part.known_to(beneath)
            whole = checkpoint.is_complete and len(files) == len(part.files)
            manifest, fresh = _beside(beneath, part, part.kept if whole else self._covered(part, beneath))
        else:
            manifest, fresh = self._manifest(checkpoint, snapshots, parts, beneath)
        self._used = {path: file.share for path, file in files.items()}
        slots = SlotStorage(self._reader.storage, self._comm, self._tier.node, self._own, self._paths, files)
        reader = StoreReader(slots, patience_secs=0.0)  # storage beneath the slots is patient itself
        reader.add(manifest, {rec: h for part in parts for rec, h in part.headers.items() if rec.path in files})
        return OpenedMemory(reader, slots, manifest, beneath, fresh)

    def _manifest(
        self,
        checkpoint: MemoryCheckpoint,
        snapshots: Sequence[_SnapshotFacts],
        parts: Sequence[_Part],
        beneath: Manifest | None,
    ) -> tuple[Manifest, frozenset[str]]:
        """The manifest of a checkpoint that storage does not have, and the operators that memory has of it."""
        facts = snapshots[-1].require_facts(checkpoint.step)
        files = [] if beneath is None or checkpoint.is_window else list(beneath.files)
        operators = {} if beneath is None or checkpoint.is_window else dict(beneath.operators)
        fresh: set[str] = set()
        for part, snapshot in zip(parts, snapshots, strict=True):
            held = snapshot.require_facts(checkpoint.step).operators
            fresh |= part.lay_over(files, operators, held=() if isinstance(held, Fragment) else held, kept=part.kept)
        book = TokenBook.from_dict({} if beneath is None else beneath.tokens, *self._grid)
        book.applied = np.asarray(facts.applied, dtype=np.int64).reshape(book.applied.shape)
        book.faults = list(facts.faults)
        book.saved = {Tier.STORAGE: book.saved[Tier.STORAGE]}
        *before, last = parts
        view = Manifest(
            run_id=self._tier.files.run_id,
            step=checkpoint.step,
            generation=checkpoint.generation,
            world_size=checkpoint.writers,
            index=facts.index,
            created_unix_secs=time.time(),
            model=self._tier.model,
            files=(),
            operators=operators,
            states=tuple(last.states),
            parent=None if beneath is None else beneath.directory,
            policy=facts.policy,
            measured=facts.measured,
            tokens=book.to_dict(),
            window=tuple(SlotRecord(part.step, tuple(part.states)) for part in before),
        )
        return pruned(view, files, {part.directory for part in parts}), frozenset(fresh)

    def _covered(self, part: _Part, beneath: Manifest) -> frozenset[str]:
        """Operators that some slots hold whole, besides what goes to storage, though other slots are gone."""
        blocks = blocks_of(self._reader.index(beneath), part.kept)
        found: dict[str, list[tuple[str, Box]]] = {}
        for entry in part.kept_slices():
            found.setdefault(entry.operator, []).append((entry.key, entry.box))
        return frozenset(op for op, those in found.items() if _covers(op, blocks[op], those))

    @property
    def _grid(self) -> tuple[int, int]:
        layers = self._tier.model.layers
        return len(layers), max((layer.experts for layer in layers), default=0)


def _beside(stored: Manifest, part: _Part, held: frozenset[str]) -> tuple[Manifest, frozenset[str]]:
    """A checkpoint that storage has, with what only memory has of its step; and the operators of that.

    Args:
        stored: The checkpoint.
        part: The slots.
        held: Operators that the slots have whole.
    """
    files, operators = list(stored.files), dict(stored.operators)
    fresh = part.lay_over(files, operators, kept=held)
    return pruned(replace(stored, operators=operators), files, {stored.directory}), frozenset(fresh)


def _covers(operator: str, wanted: Mapping[str, Sequence[Box]], found: Sequence[tuple[str, Box]]) -> bool:
    try:
        prove_cover(operator, wanted, found)
    except CoverageError as error:
        log.info("not all of %s survived in memory, it stays as storage has it: %s", operator, str(error))
        return False
    return True


def age_of(directory: str) -> tuple[int, int]:
    """(generation, step) of a step directory."""
    step, generation = parse_step_dir(directory) or (-1, -1)
    return generation, step


# --- what ranks tell each other of slots ---


def _told(found: FoundSlot, number: int) -> list[Any]:
    header = found.header
    window = header.facts.window
    place = None if window is None else [window.start, window.size, window.slot]
    return [
        number,
        header.life,
        header.generation,
        header.sequence,
        header.step,
        header.rank,
        header.world_size,
        place,
        header.facts.base,
        found.slot.starts,
        header.freshness,
    ]


def _share(holder: int, node: str, told: Sequence[Any]) -> Share:
    number, life, generation, sequence, step, writer, writers, place, base, starts, freshness = told
    window = None if place is None else (place[0], place[1], place[2])
    of = number, life, generation, sequence, step, writer, writers, window, base, starts, freshness
    return Share(holder, node, *of)


@dataclass(frozen=True, eq=False)
class _Described:
    """One writer's slot. state: (bytes, digest) of its state file. parts: (kind, first byte, header of its shard)."""

    state: tuple[int, str]
    parts: tuple[tuple[str, int, bytes], ...]


class _SnapshotFacts:
    """One snapshot. writers: Writer -> its slot. facts: Those of the lowest of them."""

    def __init__(self) -> None:
        self.writers: dict[int, _Described] = {}
        self.facts: StepFacts | None = None

    def require_facts(self, step: int) -> StepFacts:
        """``facts``, which some rank has told."""
        if self.facts is None:
            raise DamagedError(f"memory slots of step {step}", "no rank tells of the step", step=step)
        return self.facts


def _packed_header(place: int, writer: int, header: SlotHeader, *, tells: bool) -> list[bytes]:
    """For ``_unpacked_headers``, one after the other. tells: What all writers have alike is in this one."""
    told = [
        place,
        writer,
        [len(header.state), digest(header.state)],
        [[part.kind, part.begin, len(part.raw)] for part in header.parts],
        header.facts.encoded() if tells else None,
    ]
    meta = encode_json(told)
    return [struct.pack("<Q", len(meta)), meta, *(part.raw for part in header.parts)]


def _unpacked_headers(raw: bytes) -> Iterable[tuple[int, int, _Described, Mapping[str, Any] | None]]:
    at = 0
    while at < len(raw):
        [nbytes] = struct.unpack_from("<Q", raw, at)
        at += 8 + nbytes
        place, writer, state, told, facts = json.loads(raw[at - nbytes : at])
        parts = []
        for kind, begin, size in told:
            parts.append((kind, begin, raw[at : at + size]))
            at += size
        yield place, writer, _Described(tuple(state), tuple(parts)), facts


class _Part:
    """The slots of one snapshot as the files of a step directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.step = age_of(directory)[1]
        self.files: dict[str, SlotFile] = {}
        self.records: dict[str, list[FileRecord]] = {}
        self.headers: dict[FileRecord, ShardHeader] = {}
        self.states: list[StateRecord] = []

    def add(self, writer: int, share: Share, described: _Described) -> None:
        """One writer's slot.

        Raises:
            DamagedError: A header is none.
        """
        path = state_path(self.directory, writer)
        self.states.append(StateRecord(path, *described.state, writer))
        self.files[path] = SlotFile(share, STATE, b"", 0, described.state[0])
        for place, (kind, begin, raw) in enumerate(described.parts):
            path = shard_path(self.directory, writer, kind)
            header = decode_header(raw, path)
            record = FileRecord(path, len(raw) + header.data_nbytes, len(raw), digest(raw), self.step, writer)
            self.files[path] = SlotFile(share, place, raw, begin, header.data_nbytes)
            self.records.setdefault(kind, []).append(record)
            self.headers[record] = header

    @property
    def kept(self) -> frozenset[str]:
        """Operators of which the slots hold something that never goes to storage."""
        return frozenset(entry.operator for entry in self.kept_slices())

    def kept_slices(self) -> Iterator[SliceEntry]:
        """What never goes to storage."""
        for record in self.records.get(HELD, ()):
            yield from self.headers[record].slices

    def lay_over(
        self,
        files: list[FileRecord],
        operators: dict[str, OperatorRecord],
        *,
        held: Iterable[str] | None = None,
        kept: Iterable[str] = (),
    ) -> set[str]:
        """Put this part on top of a view.

        Args:
            files: Of the view; the part's are appended.
            operators: Of the view; those of the part become newer.
            held: What the part holds in full of what goes to storage; None to leave out all of that.
            kept: The same of what never does.

        Returns:
            The operators that are the part's now.
        """
        numbers: dict[str, tuple[int, ...]] = {}
        for kind, records in self.records.items():
            if kind == HELD or held is not None:
                numbers[kind] = tuple(range(len(files), len(files) + len(records)))
                files += records
        found = {op: OperatorRecord(self.step, numbers.get(kind_of(op), ())) for op in held or ()}
        found |= {op: OperatorRecord(self.step, numbers[HELD]) for op in kept}
        operators |= found
        return set(found)

    def known_to(self, stored: Manifest) -> dict[str, SlotFile]:
        """The files that are byte for byte those of a checkpoint on storage, and those that never go there."""
        known = {record.path for record in self.headers.keys() & set(stored.files)}
        known |= {record.path for record in set(self.states).intersection(stored.states)}
        known |= {record.path for record in self.records.get(HELD, ())}
        return {path: file for path, file in self.files.items() if path in known}
