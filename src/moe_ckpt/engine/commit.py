"""Rank 0: turn the ranks' acknowledgements into a manifest, prove it complete, write it last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_ckpt.core.coverage import prove_cover
from moe_ckpt.core.operators import Catalog, experts_among
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts, TokenBook
from moe_ckpt.core.window import Window
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.engine.writing import Acknowledgement, check_acknowledgements, write_named
from moe_ckpt.errors import CoverageError, FilesGoneError, SaveFailedError
from moe_ckpt.format.manifest import (
    MANIFEST_NAME,
    FileRecord,
    LayerRecord,
    Manifest,
    ModelRecord,
    OperatorRecord,
    SlotRecord,
)
from moe_ckpt.format.shard import REPLAY
from moe_ckpt.storage.base import Storage

Holding = tuple[int, tuple[FileRecord, ...]]
"""(step, shards) of one operator's newest committed version."""


@dataclass(frozen=True)
class Abandoned:
    """What steps that cannot be committed any more have left. paths: files that the ranks are known to have written."""

    directories: frozenset[str] = frozenset()
    paths: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Slot:
    """A step of the window under way that all ranks have written, and that no manifest names yet."""

    directory: str
    window: Window
    record: SlotRecord
    holdings: Mapping[str, Holding]
    files: tuple[FileRecord, ...]


@dataclass
class Committer:
    """What is committed so far, and how the next step joins it. Lives on rank 0's persist thread.

    holdings: operator -> its newest committed version; from the restored manifest after a restart.
    saved: per expert, the applied tokens that its committed copy has seen.
    parent: directory of the checkpoint that this life of the run returned to; for a generation that was begun inside
        this life, of the newest checkpoint before it. Retention follows it.
    require_whole: called with each manifest before it is written; raises if a file that it names is not there.
    """

    storage: Storage
    catalog: Catalog
    run_id: str
    world_size: int
    aliases: Mapping[str, str]
    saved: Counts
    holdings: dict[str, Holding] = field(default_factory=dict)
    parent: str | None = None
    passed_over: tuple[str, ...] = ()
    require_whole: Callable[[Manifest], None] = lambda manifest: None
    _slots: list[_Slot] = field(default_factory=list)
    _given_up: list[_Slot] = field(default_factory=list)
    _newest: Manifest | None = None

    def adopt(self, manifest: Manifest) -> None:
        """Start from a restored checkpoint: partial checkpoints will refer to its files."""
        self.parent, self._newest = manifest.directory, None
        self.passed_over = manifest.passed_over
        self.holdings = {
            op: (record.step, tuple(manifest.files[i] for i in record.files))
            for op, record in manifest.operators.items()
            if not manifest.window
        }

    def commit(self, snapshot: Snapshot, acknowledgements: Sequence[Acknowledgement]) -> Manifest | None:
        """Write the manifest of ``snapshot``; when it returns, the checkpoint exists.

        The steps of a sparse window are only remembered, and None is returned, until its last one: that writes one
        manifest of all. A life that ends before has no use for them, and garbage collection removes their files.

        Raises:
            SaveFailedError: a rank failed, or an earlier step of the window did. Nothing is committed.
            CoverageError: what the ranks wrote is not what was planned. Likewise.
            FilesGoneError: files that older checkpoints wrote are gone, and the next one must hold everything.
            OSError: the manifest could not be written.
        """
        causes = check_acknowledgements(acknowledgements)
        if causes:
            raise SaveFailedError(snapshot.step, causes)
        new = self._new_holdings(snapshot, acknowledgements)
        before = self._slots_before(snapshot)
        self._given_up += [slot for slot in self._slots if slot not in before]
        self._slots = before
        if snapshot.window is None:
            holdings = self.holdings | new
        else:
            self._slots = [*before, _slot_of(snapshot, snapshot.window, acknowledgements, new)]
            if snapshot.slot + 1 < snapshot.window.size:
                return None
            holdings = {op: held for slot in self._slots for op, held in slot.holdings.items()}
        missing = tuple(f"{op.id} has never been saved" for op in self.catalog.operators if op.id not in holdings)
        if missing:
            raise CoverageError(f"checkpoint of step {snapshot.step}", missing)
        saved = self._saved_after(snapshot)
        if self._newest is not None and self._newest.generation != snapshot.generation:
            self.parent = self._newest.directory
        manifest = self._manifest(snapshot, acknowledgements, holdings, saved, before)
        try:
            self.require_whole(manifest)
        except FilesGoneError:
            self._forget()
            raise
        write_named(self.storage, f"{manifest.directory}/{MANIFEST_NAME}", [manifest.encode()])
        self._slots = []
        # What a window holds is of different steps: a partial checkpoint must not build on it.
        self.holdings, self.saved = {} if manifest.window else holdings, saved
        self._newest = manifest
        return manifest

    def _forget(self) -> None:
        """Nothing on storage may be built upon any more."""
        self.holdings, self.parent, self._newest = {}, None, None
        self.saved = np.zeros_like(self.saved)

    def superseded(self) -> Abandoned:
        """Returns, once, what windows that were given up have left."""
        slots, self._given_up = self._given_up, []
        return _abandoned(slots)

    def abandon(self, snapshot: Snapshot, acknowledgements: Sequence[Acknowledgement]) -> Abandoned:
        """``commit`` has failed. Returns what can go: the step's files, and those of its window's earlier steps."""
        self._given_up += self._slots
        self._slots = []
        before = self.superseded()
        return Abandoned(before.directories | {snapshot.directory}, before.paths | _paths(acknowledgements))

    def _new_holdings(self, snapshot: Snapshot, acknowledgements: Sequence[Acknowledgement]) -> dict[str, Holding]:
        files: dict[str, list[FileRecord]] = {op: [] for op in snapshot.operators}
        found = []
        for ack in acknowledgements:
            for record, header in ack.files:
                for entry in header.slices:
                    if not entry.operator:
                        continue
                    found.append((entry.key, entry.box))
                    if entry.key.startswith(REPLAY):
                        continue
                    holders = files.setdefault(entry.operator, [])
                    if record not in holders:
                        holders.append(record)
        prove_cover(f"checkpoint of step {snapshot.step}", snapshot.wanted(), found)
        return {op: (snapshot.step, tuple(records)) for op, records in files.items()}

    def _slots_before(self, snapshot: Snapshot) -> list[_Slot]:
        """The earlier steps of the snapshot's window. Raises ``SaveFailedError`` if one of them was not written."""
        before = [] if snapshot.slot == 0 else [slot for slot in self._slots if slot.window == snapshot.window]
        if len(before) != snapshot.slot:
            raise SaveFailedError(snapshot.step, ("an earlier step of its window was not saved",))
        return before

    def _saved_after(self, snapshot: Snapshot) -> Counts:
        book = TokenBook(*self.saved.shape)
        book.saved[Tier.STORAGE] = self.saved.copy()
        if snapshot.window is not None:  # replay brings every expert to this step
            book.mark_saved(Tier.STORAGE, experts_among(self.catalog, snapshot.window.order), snapshot.applied)
        book.mark_saved(Tier.STORAGE, experts_among(self.catalog, snapshot.operators), snapshot.applied)
        return book.saved[Tier.STORAGE]

    def _manifest(
        self,
        snapshot: Snapshot,
        acknowledgements: Sequence[Acknowledgement],
        holdings: Mapping[str, Holding],
        saved: Counts,
        before: Sequence[_Slot] = (),
    ) -> Manifest:
        files: dict[FileRecord, int] = {}
        for record in (record for _, records in holdings.values() for record in records):
            files.setdefault(record, len(files))
        # Side tensors live in this step's own shards, which hold them even where no operator does.
        own = (record for ack in acknowledgements for record, _ in ack.files)
        for record in [*(record for slot in before for record in slot.files), *own]:
            files.setdefault(record, len(files))
        book = TokenBook(*saved.shape)
        book.applied, book.saved, book.faults = snapshot.applied, {Tier.STORAGE: saved}, list(snapshot.faults)
        return Manifest(
            run_id=self.run_id,
            step=snapshot.step,
            generation=snapshot.generation,
            world_size=self.world_size,
            index=snapshot.index,
            created_unix_secs=time.time(),
            model=ModelRecord(
                self.catalog.fingerprint(),
                tuple(LayerRecord(layer.name, layer.experts, layer.top_k) for layer in self.catalog.layers),
                dict(self.aliases),
            ),
            files=tuple(files),
            operators={
                op: OperatorRecord(step, tuple(files[record] for record in records))
                for op, (step, records) in holdings.items()
                if records  # one without a single element has nothing that could be restored
            },
            states=tuple(ack.state for ack in acknowledgements if ack.state is not None),
            parent=self.parent,
            policy=dict(snapshot.policy),
            measured=dict(snapshot.measured),
            tokens=book.to_dict(),
            window=tuple(slot.record for slot in before),
            passed_over=self.passed_over,
        )


def _slot_of(
    snapshot: Snapshot,
    window: Window,
    acknowledgements: Sequence[Acknowledgement],
    holdings: Mapping[str, Holding],
) -> _Slot:
    states = tuple(ack.state for ack in acknowledgements if ack.state is not None)
    files = tuple(record for ack in acknowledgements for record, _ in ack.files)
    return _Slot(snapshot.directory, window, SlotRecord(snapshot.step, states), holdings, files)


def _paths(acknowledgements: Sequence[Acknowledgement]) -> frozenset[str]:
    files = [record.path for ack in acknowledgements for record, _ in ack.files]
    return frozenset(files + [ack.state.path for ack in acknowledgements if ack.state is not None])


def _abandoned(slots: Sequence[_Slot]) -> Abandoned:
    files = [record.path for slot in slots for record in slot.files]
    states = [state.path for slot in slots for state in slot.record.states]
    return Abandoned(frozenset(slot.directory for slot in slots), frozenset(files + states))
