"""Commits on rank 0: makes part and manifest of the ranks' acknowledgements, proves them, writes the manifest last.

``ledger.ledger`` computes which part has the newest version of every operator; ``View`` has the files of that part.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from moe_ckpt.commit.keeping import PART, Abandoned, Names, Needed, StoreKeeper, needed_of
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import Tier
from moe_ckpt.core.tokens import Counts, TokenBook, window_began
from moe_ckpt.errors import CoverageError, FilesGoneError, SaveFailedError
from moe_ckpt.format.manifest import (
    KINDS,
    MANIFEST_NAME,
    PART_NAME,
    Manifest,
    PartRecord,
    SlotRecord,
    age_of,
    encode_part,
)
from moe_ckpt.ledger import freshness
from moe_ckpt.ledger.ledger import Ledger, Versions
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.run_ledger import expert_indices
from moe_ckpt.slices.snapshot import Acknowledgement, Snapshot, names_in, write_named

NOT_COVERED = "the ranks' shares do not cover it exactly"
"""The cause of a failure after which each rank sends rank 0 the boxes that it wrote."""


@dataclass(frozen=True, eq=False)
class WrittenPart:
    """The part that one step wrote, with the files of all ranks.

    Attributes:
        record: As manifests name it.
        names: Of the ranks' files.
        operators: ``[n]`` places in the catalog of the operators that it has in full.
        not_finite: The first tensor with NaN or infinity; empty if there is none.
    """

    record: PartRecord
    names: Names
    operators: Counts
    not_finite: str = ""


@dataclass(frozen=True, eq=False)
class View:
    """The parts of one complete checkpoint.

    Attributes:
        versions: The number of the part that has each operator's newest version. Not changed any more.
        numbered: Number, from 1 on -> part, of the parts that the checkpoint wrote itself or that have an operator's
            newest version; the newest first.
    """

    versions: Versions
    numbered: Mapping[int, WrittenPart] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, catalog: Catalog) -> View:
        """Returns the view of a committed checkpoint (see ``format.manifest.compose_manifest``)."""
        names = needed_of(manifest)
        numbers = {part.directory: number for number, part in enumerate(reversed(manifest.parts), start=1)}
        versions = Versions(catalog)
        first_numbers = (numbers[record.files[0].path.partition("/")[0]] for record in manifest.operators.values())
        versions.replace(catalog.places_of(tuple(manifest.operators)), list(first_numbers))
        parts = {
            number: WrittenPart(part, names[part.directory], versions.places_of(number), manifest.not_finite)
            for part in manifest.parts
            if len(versions.places_of(number := numbers[part.directory]))
        }
        return cls(versions, parts)

    def beneath(self, newer: Iterable[WrittenPart]) -> View:
        """Returns the view of a checkpoint that wrote the parts ``newer``, the newest last, and has the rest here."""
        versions, first = self.versions.copy(), max(self.numbered, default=0) + 1
        written = dict(enumerate(newer, first))
        for number, part in written.items():
            versions.record(part.operators, number)
        live = versions.live()
        rest = {number: part for number, part in self.numbered.items() if number in live}
        return View(versions, dict(reversed(written.items())) | rest)

    def needed(self) -> Needed:
        """Returns the files that the checkpoint needs: the shards with an operator's newest version, by their kinds."""
        is_expert = self.versions.catalog.is_expert
        live = dict(zip(KINDS, map(self.versions.live, (is_expert, ~is_expert)), strict=True))
        needed_names: Needed = {}
        for number, part in self.numbered.items():
            kinds = (kind for kind in KINDS if number in live[kind])
            needed_names[part.record.directory] = {kind: part.names.get(kind, frozenset()) for kind in kinds} | PART
        return needed_names


class Committer:
    """Commits steps, and knows what is committed so far. Lives on rank 0's persist thread.

    Args:
        run: The session's.
        keeper: See below.

    Attributes:
        keeper: Proves that what a manifest needs is on storage, before it is written.
        parent: Directory of the checkpoint that this life of the run returned to; for a generation that was begun
            inside this life, of the newest checkpoint before it. Retention follows it.
    """

    def __init__(self, run: RunContext, keeper: StoreKeeper) -> None:
        self.keeper = keeper
        self._run, self._storage, self._catalog = run, run.storage, run.catalog
        self._nothing = View(Versions(run.catalog))
        self._window_parts: list[WrittenPart] = []
        self._window_start = -1
        self._window_applied: Future[Counts] | None = None  # of its first step
        self._given_up: dict[str, frozenset[str]] = {}
        self.parent: str | None = None
        self._newest: Manifest | None = None
        self._view, self._tokens = self._nothing, Ledger(run.catalog).tokens

    def resume_from(self, ledger: Ledger, stored: Manifest | None) -> None:
        """Starts from the checkpoint from which the run resumes.

        Args:
            ledger: Of the run; its tokens are those of the checkpoint.
            stored: The part of the checkpoint on storage, to whose files partial ones will refer; None if nothing.
        """
        self._tokens.saved = {Tier.STORAGE: ledger.tokens.saved[Tier.STORAGE].copy()}
        if stored is not None:
            self.parent, self._newest = stored.directory, None
            # What a window holds is of different steps: a partial checkpoint must not build on it.
            self._view = self._nothing if stored.window else View.of(stored, self._catalog)

    def commit(self, snapshot: Snapshot, acknowledged: Acknowledgement) -> Manifest | None:
        """Writes the manifest of ``snapshot``; when it returns, the checkpoint exists.

        For a step of a sparse window it writes the part only, and returns None, until the last step: that writes one
        manifest of all. If the life ends before, the next collection removes the files.

        Args:
            snapshot: This rank's snapshot.
            acknowledged: The acknowledgements of all ranks.

        Raises:
            SaveFailedError: A rank failed, or an earlier step of the window did, or what the ranks wrote is not what
                was planned, or the snapshot is stale. Nothing is committed.
            CoverageError: An operator was never saved. Nothing is committed.
            FilesGoneError: Files that older checkpoints wrote are gone, and the next one must hold everything.
            OSError: The part or the manifest could not be written.
        """
        if acknowledged.errors:
            raise SaveFailedError(snapshot.step, acknowledged.causes)
        if freshness.combined_freshness(acknowledged.freshness) == freshness.STALE:
            raise SaveFailedError(snapshot.step, (freshness.CAUSE,))
        if len(acknowledged.freshness) != self._run.comm.world_size or acknowledged.cover:
            raise SaveFailedError(snapshot.step, (NOT_COVERED,))
        window, slot = snapshot.contents.window, snapshot.contents.slot
        if not slot:
            self._give_up()
        elif window is not None and (window.start, slot) != (self._window_start, len(self._window_parts)):
            raise SaveFailedError(snapshot.step, ("an earlier step of its window was not saved",))
        parts = [*self._window_parts, self._write_part(snapshot, acknowledged)]
        if window is not None:
            if not slot:
                self._window_start, self._window_applied = window.start, snapshot.applied
            self._window_parts = parts
            if not window.is_last:
                return None
        view = (self._nothing if window else self._view).beneath(parts)
        missing = view.versions.lacks(np.flatnonzero(snapshot.plan.claims.is_saved))
        if missing:
            raise CoverageError(
                f"checkpoint of step {snapshot.step}", tuple(f"{op} has never been saved" for op in sorted(missing))
            )
        tokens = self._tokens_at(snapshot)
        if self._newest is not None and self._newest.generation != snapshot.identity.generation:
            self.parent = self._newest.directory
        manifest = self._manifest(snapshot, view, tokens, parts[:-1])
        try:
            self.keeper.require_whole(
                manifest, view.needed() | {part.record.directory: {**part.names, **PART} for part in parts}
            )
        except FilesGoneError:
            self._forget()
            raise
        write_named(self._storage, f"{manifest.directory}/{MANIFEST_NAME}", [manifest.encode()])
        self._window_parts = []
        self._view = self._nothing if manifest.window else view
        self._tokens, self._newest = tokens, manifest
        return manifest

    def _write_part(self, snapshot: Snapshot, acknowledged: Acknowledgement) -> WrittenPart:
        fragment, saved = snapshot.plan.claims.saved(snapshot.contents.full)
        record, raw = encode_part(
            snapshot.identity.run,
            snapshot.step,
            snapshot.identity.generation,
            self._run.comm.world_size,
            files=acknowledged.file_rows,
            states=acknowledged.state_rows,
            operators=fragment,
        )
        write_named(self._storage, record.path, [raw])
        return WrittenPart(
            record,
            {group: names_in(lines) for group, lines in acknowledged.lines.items()},
            saved,
            acknowledged.first_not_finite,
        )

    def _forget(self) -> None:
        """Forgets what is on storage, so that no later checkpoint builds on it."""
        self._view, self.parent, self._newest = self._nothing, None, None
        self._tokens = Ledger(self._catalog).tokens

    @property
    def begun(self) -> Sequence[str]:
        """The directories of the window under way, in the order of its steps."""
        return [part.record.directory for part in self._window_parts]

    def superseded(self) -> Abandoned:
        """Returns the files of windows that were given up since the last call."""
        abandoned, self._given_up = self._given_up, {}
        return abandoned

    def abandon(self, snapshot: Snapshot, acknowledged: Acknowledgement) -> Abandoned:
        """Gives up the snapshot for which ``commit`` failed, and its window.

        Returns:
            What can be deleted: the files of the step, and those of the window's earlier steps.
        """
        self._give_up()
        written = frozenset({PART_NAME}).union(*map(names_in, acknowledged.lines.values()))
        return {**self.superseded(), snapshot.directory: written}

    def _give_up(self) -> None:
        """Gives up the window under way, if there is one."""
        parts, self._window_parts = self._window_parts, []
        self._given_up |= {part.record.directory: frozenset({PART_NAME}).union(*part.names.values()) for part in parts}

    def _tokens_at(self, snapshot: Snapshot) -> TokenBook:
        """Returns the tokens as of the checkpoint, once it is committed."""
        book = copy(self._tokens)
        book.applied, book.faults = snapshot.applied.result(), list(snapshot.facts.faults)
        book.saved = {Tier.STORAGE: self._tokens.saved[Tier.STORAGE].copy()}
        operators = snapshot.contents.brings(Tier.STORAGE, self._catalog.everything)
        book.mark_saved(Tier.STORAGE, expert_indices(self._catalog, operators), book.applied)
        return book

    def _manifest(self, snapshot: Snapshot, view: View, tokens: TokenBook, before: Sequence[WrittenPart]) -> Manifest:
        facts, first = snapshot.facts, self._window_applied if before else None
        return Manifest(
            run_id=snapshot.identity.run,
            step=snapshot.step,
            generation=snapshot.identity.generation,
            world_size=self._run.comm.world_size,
            index=facts.index,
            created_unix_secs=time.time(),
            model=self._run.model,
            parent=self.parent,
            policy=dict(facts.policy),
            measured=dict(facts.measured),
            tokens=tokens.to_dict() | window_began(None if first is None else first.result()),
            window=tuple(SlotRecord(age_of(part.record.directory)[1], ()) for part in before),
            parts=tuple(part.record for part in view.numbered.values()),
            # Of a checkpoint on which a user went on, nobody knows which part had it: each of its parts says so.
            not_finite=next((part.not_finite for part in view.numbered.values() if part.not_finite), ""),
        )
