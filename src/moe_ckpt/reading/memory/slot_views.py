"""Slots of memory seen as a checkpoint: snapshots as the files of step directories, one laid over the other."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moe_ckpt.core.step import Contents, Facts, Step
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import FileRecord, Manifest, OperatorRecord, StateRecord, kind_of, shard_path, state_path
from moe_ckpt.format.sealed import digest, encode_json, with_tuples
from moe_ckpt.format.shard import ShardHeader, decode_header
from moe_ckpt.format.slot import GRADIENTS as GRADIENTS_ALONE
from moe_ckpt.format.slot import STATE, TENSORS, SlotHeader, SlotPart, decode_facts, encode_facts
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.memory.memory_shares import MemoryCheckpoint, Share, SlotKey, slot_key
from moe_ckpt.reading.memory.slot_storage import STATE as STATE_FILE
from moe_ckpt.reading.memory.slot_storage import SlotFile
from moe_ckpt.slices.compiling import GRADIENTS, HOST_ONLY


@dataclass(frozen=True, eq=False)
class Described:
    """The description of one writer's slot.

    Attributes:
        key: Names the slot in its snapshot.
        state: (bytes, digest) of its state file.
        parts: (kind, first byte, header of its shard).
        rank_tokens: ``Facts.counted``.
    """

    key: SlotKey
    state: tuple[int, str] = (0, "")
    parts: tuple[tuple[str, int, bytes], ...] = ()
    rank_tokens: Counts | None = None


UnpackedHeader = tuple[int, Described, Mapping[str, Any] | None]
"""(number of the snapshot, slot, contents and facts as ``format.slot.encode_facts``)."""


class SnapshotFacts:
    """The facts of one snapshot.

    Attributes:
        slots: By their keys.
        contents: Of the snapshot, as one of the slots says.
        facts: Of its step, as the same slot says.
    """

    def __init__(self) -> None:
        self.slots: dict[SlotKey, Described] = {}
        self.contents = Contents(())
        self.facts: Facts | None = None

    def add(self, described: Described, facts: Mapping[str, Any] | None = None) -> None:
        """Adds one slot, with contents and facts of the snapshot, if it is this slot that says them."""
        self.slots[described.key] = described
        if facts is not None:
            self.contents, self.facts = decode_facts(facts)

    def require_facts(self, step: int) -> Facts:
        """Returns ``facts``. Raises ``DamagedError`` if no rank knows them."""
        if self.facts is None:
            raise DamagedError(f"memory slots of step {step}", "no rank has facts of the step", step=step)
        return self.facts

    def require_shape(self, step: int, shape: tuple[int, int]) -> None:
        """Raises ``DamagedError`` unless tokens are those of experts of the model.

        Args:
            shape: ``[L, E]``.
        """
        facts = self.require_facts(step)
        for counts in (facts.applied, facts.lost):
            if counts is not None and counts.shape != shape and (counts.size or 0 not in shape):
                reason = f"its token counts have the shape {counts.shape}, and the model's experts {shape}"
                raise DamagedError(f"memory slots of step {step}", reason, step=step)

    def settle(self, recounted: Collection[int] = ()) -> None:
        """Completes the facts once all ranks have sent theirs: where the ranks had not agreed on the tokens of a step
        when one of them died, those of each rank are summed now.

        Args:
            recounted: Writers whose tokens are counted again, so that what they sealed of them does not count.
        """
        if self.facts is None or self.facts.counted is None:
            return
        counted = [
            slot.rank_tokens
            for (writer, only, _), slot in self.slots.items()
            if slot.rank_tokens is not None and only != GRADIENTS_ALONE and writer not in recounted
        ]
        if any(tokens.shape != self.facts.applied.shape for tokens in counted):  # nobody knows what they are
            self.facts = None
            return
        self.facts = replace(self.facts, applied=sum(counted, start=self.facts.applied), counted=None)


def packed_header(position: int, header: SlotHeader, *, tells: bool) -> list[bytes]:
    """Packs the header of a slot for ``unpacked_headers``, which takes one after the other.

    Args:
        position: Number of the snapshot.
        header: Of the slot.
        tells: Contents and facts, which all slots of the snapshot have alike, are taken from this one.
    """
    fields = [
        position,
        slot_key(header.rank, header.only, header.gradient_slot),
        [len(header.state), digest(header.state)],
        [[part.kind, part.begin, len(part.raw)] for part in header.parts],
        encode_facts(header.contents, header.facts) if tells else None,
        None if header.facts.counted is None else header.facts.counted.tolist(),
    ]
    meta = encode_json(fields)
    return [struct.pack("<Q", len(meta)), meta, *(part.raw for part in header.parts)]


def unpacked_headers(raw: bytes) -> Iterable[UnpackedHeader]:
    """Yields what each ``packed_header`` was given."""
    at = 0
    while at < len(raw):
        [nbytes] = struct.unpack_from("<Q", raw, at)
        at += 8 + nbytes
        position, key, state, sizes, facts, tokens = json.loads(raw[at - nbytes : at])
        parts = []
        for kind, begin, size in sizes:
            parts.append((kind, begin, raw[at : at + size]))
            at += size
        counted = None if tokens is None else np.asarray(tokens, dtype=np.int64)
        yield position, Described(tuple(key), tuple(state), tuple(parts), counted), facts


class SlotFiles:
    """The slots of one snapshot as the files of a directory.

    Args:
        directory: Name of the directory.
        step: Of the snapshot.
        checkpoint: What the snapshot is, or is a step of.
        snapshot: Facts of the snapshot.
    """

    def __init__(self, directory: str, step: int, checkpoint: MemoryCheckpoint, snapshot: SnapshotFacts) -> None:
        self.directory, self.step, self.checkpoint, self.snapshot = directory, step, checkpoint, snapshot
        self.files: dict[str, SlotFile] = {}
        self.records: dict[str, list[FileRecord]] = {}
        self.headers: dict[FileRecord, ShardHeader] = {}
        self.states: list[StateRecord] = []

    def add(self, share: Share, full: Share, described: Described, here: Sequence[SlotPart] = ()) -> None:
        """Adds one slot.

        Args:
            share: Where it is taken from.
            full: The same of what was not sent to peers.
            described: The slot.
            here: Parts of the slot, if this rank has it; their headers may be decoded already.

        Raises:
            DamagedError: A header of a shard cannot be decoded.
        """
        writer, only, piece = described.key
        if share.only not in (TENSORS, GRADIENTS_ALONE):  # else the plain state lies in another slot
            path = state_path(self.directory, writer)
            self.states.append(StateRecord(path, *described.state, writer))
            self.files[path] = SlotFile(share, STATE_FILE, b"", 0, described.state[0])
        for number, (kind, begin, raw) in enumerate(described.parts):
            path = shard_path(self.directory, writer, f"{kind}_{piece}" if only == GRADIENTS_ALONE else kind)
            is_here = number < len(here) and here[number].raw == raw
            header = here[number].header(path) if is_here else decode_header(raw, path)
            record = FileRecord(path, len(raw) + header.data_nbytes, len(raw), digest(raw), self.step, writer)
            self.files[path] = SlotFile(full if kind == HOST_ONLY else share, number, raw, begin, header.data_nbytes)
            self.records.setdefault(kind, []).append(record)
            self.headers[record] = header

    def slices(self, *kinds: str) -> Iterator[StoredSlice]:
        """Yields the slices of operators in shards of these kinds; by default in all but those of gradients."""
        for kind in kinds or (kind for kind in self.records if kind != GRADIENTS):
            for record in self.records.get(kind, ()):
                yield from (StoredSlice(entry, record) for entry in self.headers[record].slices if entry.operator)

    def operators(self, kind: str) -> frozenset[str]:
        """Returns the operators that have slices in shards of this kind."""
        return frozenset(stored.entry.operator for stored in self.slices(kind))

    @property
    def host_only(self) -> frozenset[str]:
        """Operators that have slices which this snapshot does not bring to storage."""
        return self.operators(HOST_ONLY)

    def known_to(self, stored: Manifest) -> dict[str, SlotFile]:
        """Returns the files that are byte for byte those of a checkpoint on storage, and those that never go there."""
        unchanged = {record.path for record in self.headers.keys() & set(stored.files)}
        unchanged |= {record.path for record in set(self.states).intersection(stored.states)}
        unchanged |= {record.path for record in self.records.get(HOST_ONLY, ())}
        return {path: file for path, file in self.files.items() if path in unchanged}


class LaidSnapshots:
    """Snapshots in memory, laid over a checkpoint on storage and over one another: the newest of each operator counts.

    Attributes:
        files: The files of all of them.
        operators: The newest version of each operator.
        slots: Path -> slot, of those files that are slots.
        fresh: As of ``OpenedMemory``.
    """

    def __init__(self, files: list[FileRecord], operators: dict[str, OperatorRecord]) -> None:
        self.files, self.operators = files, operators
        self.slots: dict[str, SlotFile] = {}
        self.fresh: dict[str, Counts] = {}

    def lay(self, part: SlotFiles, *, stored: Iterable[str] | None = None, host_only: Iterable[str] = ()) -> None:
        """Lays the slots of a snapshot on top.

        Args:
            part: The slots.
            stored: Operators that the part has in full and that go to storage; None to leave them all out.
            host_only: Operators that the part has in full and that stay in host memory.
        """
        shards: dict[str, tuple[FileRecord, ...]] = {}
        for kind, records in part.records.items():
            if kind != GRADIENTS and (kind == HOST_ONLY or stored is not None):
                shards[kind] = tuple(records)
                self.files += records
                self.slots |= {record.path: part.files[record.path] for record in records}
        laid = {op: OperatorRecord(part.step, shards.get(kind_of(op), ())) for op in stored or ()}
        laid |= {op: OperatorRecord(part.step, shards[HOST_ONLY]) for op in host_only}
        self.operators |= laid
        if laid:
            self.fresh |= dict.fromkeys(laid, part.snapshot.require_facts(part.step).applied)

    def brought_to(self, contents: Contents, facts: Facts) -> frozenset[str]:
        """Returns the operators that gradients or a replay bring from their anchors to the checkpoint's step."""
        brought = frozenset(contents.gradients or self.operators.keys() - set(contents.full))
        self.fresh |= dict.fromkeys(brought if contents.gradients else self.operators, facts.applied)
        return brought

    def slots_of(self, manifest: Manifest) -> dict[str, SlotFile]:
        """Returns those of ``slots`` that a manifest names."""
        named = manifest.paths
        return {path: file for path, file in self.slots.items() if path in named}


def shares_of(slots: Sequence[FoundSlot], holder: int, node: str) -> list[Share]:
    """Returns the shares that a rank offers. A slot of gradients is no share; the share sealed with it names it.

    Args:
        slots: All slots of the rank.
        holder: The rank.
        node: The rank's node.
    """

    def key(header: SlotHeader) -> tuple[str, int, int]:
        return header.identity.life, header.identity.number, header.rank

    gradient_slots: dict[tuple[str, int, int], dict[int, int]] = {}
    for number, slot in enumerate(slots):
        if slot.header.only == GRADIENTS_ALONE:
            gradient_slots.setdefault(key(slot.header), {})[slot.header.gradient_slot] = number
    shares = []
    for number, header, starts in ((number, slot.header, slot.slot.starts) for number, slot in enumerate(slots)):
        if header.only == GRADIENTS_ALONE:
            continue
        window, groups = header.contents.window, header.contents.groups
        pieces = header.gradient_slots if groups is not None and groups.groups else ()
        numbers = gradient_slots.get(key(header), {})
        shares.append(
            Share(
                holder=holder,
                node=node,
                number=number,
                identity=header.identity,
                writer=header.rank,
                writers=header.world_size,
                window=None if window is None else (window.start, window.size, window.slot),
                base=header.facts.base,
                starts=starts,
                freshness=header.freshness,
                sent=header.sent,
                since=header.contents.since,
                only=header.only,
                sealer=header.sealer,
                unagreed=header.facts.counted is not None and header.only != STATE,
                groups=() if groups is None else groups.groups,
                pieces=pieces,
                held=tuple(numbers.get(piece, -1) for piece in pieces),
            )
        )
    return shares


def share_of(fields: Mapping[str, Any]) -> Share:
    """Returns a share of which another rank sent the fields as JSON, which has no tuples."""
    shared = {name: with_tuples(value) for name, value in fields.items()}
    return Share(**{**shared, "identity": Step(**fields["identity"])})
