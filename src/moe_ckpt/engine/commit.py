"""Rank 0: turn the ranks' acknowledgements into a part and a manifest, prove it complete, write it last."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial

from moe_ckpt.core import freshness
from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.remembered import Remembered
from moe_ckpt.core.tokens import Counts, TokenBook, window_began
from moe_ckpt.core.versions import Versions
from moe_ckpt.core.window import Window, operators_at_step
from moe_ckpt.engine.run_ledger import places
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.engine.view import PART, Names, Needed, View, WrittenPart
from moe_ckpt.engine.writing import Acknowledgement, names_in, write_named
from moe_ckpt.errors import CoverageError, FilesGoneError, SaveFailedError
from moe_ckpt.format.fragment import Fragment
from moe_ckpt.format.manifest import (
    MANIFEST_NAME,
    PART_NAME,
    Manifest,
    ModelRecord,
    SlotRecord,
)
from moe_ckpt.format.part import encode_part
from moe_ckpt.slices.claims import Claims
from moe_ckpt.slices.request import SnapshotRequest
from moe_ckpt.storage.base import Storage


class CoverDiffersError(CoverageError):
    """The ranks did not write what was planned; what is wrong is not known yet."""


@dataclass(frozen=True)
class Abandoned:
    """Files of steps that can no longer be committed.

    Attributes:
        names: Directory -> known to have been written there.
    """

    names: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Slot:
    """A step that all ranks have written: one of the window under way, or a checkpoint by itself.

    applied: As of its request. Ranks may agree on that later than the step is written.
    """

    window: Window | None
    step: int
    part: WrittenPart
    names: Names
    applied: Future[Counts]

    @property
    def directory(self) -> str:
        return self.part.record.directory


class SavedOperators:
    """The operators that requests save in full; what has no element is left out. Not safe for several threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        # Encoded once, since partial checkpoints hold others each time.
        self._rows = [json.dumps(op).encode() + b"," for op in catalog.everything]
        self._claimed: int | None = None
        self._found: Callable[[tuple[str, ...]], tuple[Fragment, Counts]]

    def of(self, request: SnapshotRequest, claims: Claims) -> tuple[Fragment, Counts]:
        """Returns operators as a list of ids, for documents, and by place. Found once for the newest few requests."""
        if claims.operators != self._claimed:
            self._claimed, self._found = claims.operators, Remembered(partial(self._find, claims.operators))
        return self._found(request.operators)

    def _find(self, claimed: int, operators: tuple[str, ...]) -> tuple[Fragment, Counts]:
        saved = self._catalog.sets.places(claimed & self._catalog.sets.of(operators))
        return Fragment.of_rows(b"".join(map(self._rows.__getitem__, saved.tolist()))), saved


@dataclass
class Committer:
    """Commits steps, and knows what is committed so far. Lives on rank 0's persist thread.

    Attributes:
        parent: Directory of the checkpoint that this life of the run returned to; for a generation that was begun
            inside this life, of the newest checkpoint before it. Retention follows it.
        require_whole: Called with each manifest, and what it needs on storage, before it is written; raises if
            something of that is not there.
    """

    storage: Storage
    catalog: Catalog
    run_id: str
    world_size: int
    model: ModelRecord
    parent: str | None = None
    passed_over: tuple[str, ...] = ()
    require_whole: Callable[[Manifest, Needed], None] = lambda manifest, needed: None
    _view: View = field(init=False)
    _tokens: TokenBook = field(init=False)
    _slots: list[_Slot] = field(default_factory=list)
    _given_up: list[_Slot] = field(default_factory=list)
    _newest: Manifest | None = None
    _name_sets: dict[bytes, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._forget()

    @cached_property
    def _nothing(self) -> View:
        return View(Versions(self.catalog))

    @cached_property
    def _saved_operators(self) -> SavedOperators:
        return SavedOperators(self.catalog)

    def resume_from(self, ledger: Ledger, stored: Manifest | None) -> None:
        """Start from the checkpoint that the run resumes from.

        Args:
            ledger: Of the run, whose tokens are those of the checkpoint.
            stored: What the store has of the checkpoint, to whose files partial ones will refer; None if nothing.
        """
        self._tokens.saved = {Tier.STORAGE: ledger.tokens.saved[Tier.STORAGE].copy()}
        if stored is not None:
            self.parent, self._newest, self.passed_over = stored.directory, None, stored.passed_over
            # What a window holds is of different steps: a partial checkpoint must not build on it.
            self._view = self._nothing if stored.window else View.of(stored, self.catalog)

    def commit(self, snapshot: Snapshot, acknowledged: Acknowledgement) -> Manifest | None:
        """Write the manifest of ``snapshot``; when it returns, the checkpoint exists.

        The steps of a sparse window are only remembered, and None is returned, until its last one: that writes one
        manifest of all. A life that ends before has no use for them, and garbage collection removes their files.

        Args:
            snapshot: This rank's.
            acknowledged: By all ranks.

        Raises:
            SaveFailedError: a rank failed, or an earlier step of the window did, or the snapshot is stale. Nothing is
                committed.
            CoverDiffersError: what the ranks wrote is not what was planned. Likewise.
            CoverageError: an operator was never saved. Likewise.
            FilesGoneError: files that older checkpoints wrote are gone, and the next one must hold everything.
            OSError: the part or the manifest could not be written.
        """
        if acknowledged.causes:
            raise SaveFailedError(snapshot.step, acknowledged.causes)
        if acknowledged.is_stale:
            raise SaveFailedError(snapshot.step, (freshness.CAUSE,))
        request = snapshot.request
        where = f"checkpoint of step {request.step}"
        if acknowledged.ranks != self.world_size or acknowledged.cover:
            raise CoverDiffersError(where, ("the ranks' shares do not cover it exactly",))
        before = self._slots_before(request)
        self._given_up += [slot for slot in self._slots if slot not in before]
        self._slots = before
        slot = self._write_part(snapshot, acknowledged)
        if request.window is not None:
            self._slots = [*before, slot]
            if request.slot + 1 < request.window.size:
                return None
        view = (self._nothing if request.window else self._view).beneath(written.part for written in (*before, slot))
        missing = view.versions.lacks(self.catalog.sets.places(snapshot.plan.claims.operators))
        if missing:
            raise CoverageError(where, tuple(f"{op} has never been saved" for op in sorted(missing)))
        tokens = self._tokens_at(request)
        if self._newest is not None and self._newest.generation != request.generation:
            self.parent = self._newest.directory
        manifest = self._manifest(request, view, tokens, before)
        try:
            self.require_whole(
                manifest, view.needed() | {written.directory: dict(written.names) for written in (*before, slot)}
            )
        except FilesGoneError:
            self._forget()
            raise
        write_named(self.storage, f"{manifest.directory}/{MANIFEST_NAME}", [manifest.encode()])
        self._slots = []
        self._view = self._nothing if manifest.window else view
        self._tokens, self._newest = tokens, manifest
        return manifest

    def _write_part(self, snapshot: Snapshot, acknowledged: Acknowledgement) -> _Slot:
        request = snapshot.request
        fragment, saved = self._saved_operators.of(request, snapshot.plan.claims)
        record, raw = encode_part(
            self.run_id,
            request.step,
            request.generation,
            self.world_size,
            files=acknowledged.file_rows,
            states=acknowledged.state_rows,
            operators=fragment,
        )
        write_named(self.storage, record.path, [raw])
        names = self._names(acknowledged)
        part = WrittenPart(record, names, saved, acknowledged.first_not_finite)
        return _Slot(request.window, request.step, part, {**names, **PART}, request.applied)

    def _names(self, acknowledged: Acknowledgement) -> Names:
        """Names of the ranks' files, by group. Sets that are equal to the last step's are the same objects."""
        before = self._name_sets
        self._name_sets = {lines: before.get(lines) or names_in(lines) for lines in acknowledged.lines.values()}
        return {group: self._name_sets[lines] for group, lines in acknowledged.lines.items()}

    def _forget(self) -> None:
        """Nothing on storage may be built upon any more."""
        self._view, self.parent, self._newest = self._nothing, None, None
        self._tokens = Ledger(self.catalog).tokens

    @property
    def begun(self) -> Sequence[str]:
        """Directories of the window under way, in the order of its steps."""
        return [slot.directory for slot in self._slots]

    def superseded(self) -> Abandoned:
        """Returns, once, the files of windows that were given up."""
        slots, self._given_up = self._given_up, []
        return _abandoned(slots)

    def abandon(self, snapshot: Snapshot, acknowledged: Acknowledgement) -> Abandoned:
        """``commit`` has failed. Returns what can be deleted: the step's files, and those of its window's earlier
        steps."""
        self._given_up += self._slots
        self._slots = []
        written = frozenset({PART_NAME}).union(*map(names_in, acknowledged.lines.values()))
        return Abandoned({**self.superseded().names, snapshot.directory: written})

    def _slots_before(self, request: SnapshotRequest) -> list[_Slot]:
        """The earlier steps of the request's window. Raises ``SaveFailedError`` if one of them was not written."""
        before = [] if request.slot == 0 else [slot for slot in self._slots if slot.window == request.window]
        if len(before) != request.slot:
            raise SaveFailedError(request.step, ("an earlier step of its window was not saved",))
        return before

    def _tokens_at(self, request: SnapshotRequest) -> TokenBook:
        """Returns the tokens as of the checkpoint, once it is committed."""
        book = TokenBook(self._tokens.layers, self._tokens.experts)
        book.applied, book.faults = request.applied.result(), list(request.faults)
        book.saved = {Tier.STORAGE: self._tokens.saved[Tier.STORAGE].copy()}
        operators = operators_at_step(request.operators, self.catalog.everything, request.window, request.slot)
        book.mark_saved(Tier.STORAGE, places(self.catalog, operators), book.applied)
        return book

    def _manifest(self, request: SnapshotRequest, view: View, tokens: TokenBook, before: Sequence[_Slot]) -> Manifest:
        return Manifest(
            run_id=self.run_id,
            step=request.step,
            generation=request.generation,
            world_size=self.world_size,
            index=request.index,
            created_unix_secs=time.time(),
            model=self.model,
            files=(),
            operators={},
            states=(),
            parent=self.parent,
            policy=dict(request.policy),
            measured=dict(request.measured),
            tokens=tokens.to_dict(Fragment.of_counts) | window_began(before[0].applied.result() if before else None),
            window=tuple(SlotRecord(slot.step, ()) for slot in before),
            passed_over=self.passed_over,
            parts=tuple(part.record for part in view.parts),
            not_finite=view.not_finite,
        )


def _abandoned(slots: Sequence[_Slot]) -> Abandoned:
    return Abandoned({slot.directory: frozenset[str]().union(*slot.names.values()) for slot in slots})
