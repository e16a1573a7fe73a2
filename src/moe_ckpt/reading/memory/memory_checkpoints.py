"""Offers what the memory of this job's nodes holds as checkpoints, beside those of the store.

After a restart every rank says which slots it has. A snapshot is a checkpoint if some rank holds each writer's share,
whether storage has it or not; of a checkpoint that storage has, memory may give any part. Manifest and index are made
of the slots' headers, and ``reading.memory.slot_storage`` gives the bytes, so that such a checkpoint is opened, proved,
verified and restored like any other. A damaged slot is excluded, and another source takes its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from moe_ckpt.comm.communicator import answers_of
from moe_ckpt.core.operators import EXPERT
from moe_ckpt.core.step import Facts, Tier
from moe_ckpt.core.tokens import TokenBook, window_began
from moe_ckpt.core.user_text import name_ranks
from moe_ckpt.errors import CoverageError, DamagedError, OtherLayoutError, RecoveryLoopError, StepRemovedError
from moe_ckpt.format.manifest import Manifest, OperatorRecord, SlotRecord, age_of, prune_manifest, step_dir
from moe_ckpt.ledger.coverage import Box, prove_cover
from moe_ckpt.memory.files import FoundSlot
from moe_ckpt.memory.slot import set_aside
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.collective import answer_of, result_of
from moe_ckpt.reading.index import blocks_of
from moe_ckpt.reading.memory.memory_shares import (
    MemoryCheckpoint,
    Share,
    bases_of,
    beneath_of,
    checkpoints_of,
    fullest,
    nearest,
    newer_than,
    snapshots_of,
    teller_of,
    without_damaged,
    without_log,
)
from moe_ckpt.reading.memory.slot_storage import LoggedSnapshot, OpenedMemory, RankMemory, SlotFile, SlotStorage
from moe_ckpt.reading.memory.slot_views import (
    LaidSnapshots,
    SlotFiles,
    SnapshotFacts,
    packed_header,
    share_of,
    shares_of,
    unpacked_headers,
)
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.slices.compiling import GRADIENTS

log = logging.getLogger("moe_ckpt")

_EXPERTS = "expert"
"""Kind of the shards of experts."""
SURVIVORS_SUFFIX = "_survivors"
"""Ending of the directory's name for what survivors sealed of a step that has another snapshot, too."""
MOST_STARTS = 3
"""How many starts from one checkpoint in memory may end no step: then the checkpoint, or the script, is at fault."""

_GONE = (
    "%s is gone from storage, or its MANIFEST.json is, and memory has steps up to %d that follow it: the run goes on "
    "from there as far as memory has everything. If you removed it in order to go back, stop, run moe-ckpt memory "
    "clear on every node, and start again"
)


class MemoryCheckpoints:
    """The checkpoints that the slots of earlier lives hold together. A collective of all ranks, on the training thread.

    Args:
        comm: The ranks.
        tier: This rank's slots.
        reader: Reads the store; documents that it has read are not read again.

    Attributes:
        stored: Directories of the checkpoints on storage, newest first, as rank 0 lists them.
        used: Path of a file of the checkpoint opened last -> the slot that it comes from.
        paths: (holder, number) -> path of that slot.

    Raises:
        MoECheckpointError, OSError: Rank 0 cannot list the store.
        PeerLostError: A peer is gone.
    """

    def __init__(self, comm: Communicator, tier: RankMemory, reader: StoreReader) -> None:
        self._comm, self._tier, self._reader = comm, tier, reader
        self.used: Mapping[str, Share] = {}
        self._given_up = set[str]()
        self._bad_bases, self._bad_base = set[tuple[str, str]](), ""  # (checkpoint, what it cannot be laid over)
        self._laid_over: Manifest | None = None  # an older checkpoint on storage beneath the one opened last
        self._noted: set[int] = set()
        self._of_other_layout: set[Share] = set()
        self._slots = tier.left_slots.slots
        shares = [vars(share) for share in shares_of(self._slots, comm.rank, tier.node)]
        listed, problem = answer_of(reader.directories) if comm.rank == 0 else ({}, None)
        here = [listed, [str(slot.slot.path) for slot in self._slots], shares]
        ranks = answers_of(comm, here)
        self.stored: list[str] = result_of(ranks[0][0], problem, f"list the store {reader.storage.root}")
        self.shares: list[Share] = []
        self.paths: dict[tuple[int, int], str] = {}
        for holder, (_, paths, offered) in enumerate(ranks):
            self.paths |= {(holder, number): path for number, path in enumerate(paths)}
            self.shares += map(share_of, offered)
        if not tier.outlives_process:  # a commit on storage makes it a checkpoint
            stored = set(self.stored)
            self.shares = [share for share in self.shares if share.directory in stored]
        newest = next(iter(checkpoints_of(self.shares)), None)
        if newest is None or comm.rank or not self.follows_what_is_gone(newest):
            return
        if all((newest.generation, newest.step) > age_of(name) for name in self.stored):
            announce(_GONE, newest.base, newest.step, level=logging.WARNING)

    def follows_what_is_gone(self, checkpoint: MemoryCheckpoint) -> bool:
        """Returns whether storage has lost the checkpoint that this one builds on, and has none that replaced it.

        A file was lost, or a user removed checkpoints or restored an older copy of the store.
        """
        base, begun = age_of(checkpoint.base), checkpoint.generation
        return bool(checkpoint.base) and not any(
            name == checkpoint.base or (age_of(name)[0] == begun and age_of(name) > base) for name in self.stored
        )

    def offered(self) -> list[str]:
        """Returns the directories of checkpoints that memory has whole, or has a part of and storage the rest, newest
        first."""
        checkpoints = checkpoints_of(self.shares)
        whole = {checkpoint.directory for checkpoint in checkpoints if checkpoint.is_complete}
        # A step of a log that storage has was made dense (``moe-ckpt densify``), and is read from storage.
        logs = {checkpoint.directory for checkpoint in checkpoints if checkpoint.is_log}
        whole -= logs & set(self.stored)
        parts = {checkpoint.directory for checkpoint in checkpoints if not (checkpoint.is_window or checkpoint.is_log)}
        return sorted((whole | parts.intersection(self.stored)) - self._given_up, key=age_of, reverse=True)

    def ask(self, directory: str) -> Callable[[], OpenedMemory]:
        """Gathers from all ranks what memory has of a checkpoint, and counts this start. A collective; reads no slice.

        Returns:
            A function that opens the checkpoint, and is no collective. It raises ``MoECheckpointError`` if this rank
            cannot open it, or cannot read the checkpoint on storage that it is laid over.

        Raises:
            RecoveryLoopError: Too many starts have resumed from it, and ended no step.
        """
        checkpoint = checkpoint_in(self.shares, directory, self.stored)
        self._note_start(directory, checkpoint)
        return self.opener(checkpoint)

    def opener(self, checkpoint: MemoryCheckpoint) -> Callable[[], OpenedMemory]:
        """Does the same as ``ask`` for a checkpoint, but counts no start."""
        directory = checkpoint.directory
        bases = (name for name in bases_of(checkpoint, self.stored) if (directory, name) not in self._bad_bases)
        base, self._laid_over = next(bases, ""), None
        described = self.describe([checkpoint])
        older = [] if self._has_all(checkpoint, described) else beneath_of(checkpoint, snapshots_of(self.shares))
        described += self.describe(older) if older else []
        return lambda: self._opened(checkpoint, older, described, self._beneath(base))

    def note_damage_beneath(self, path: str) -> None:
        """Lets ``set_aside`` exclude the older checkpoint on storage that memory is laid over, if it has this file."""
        if self._laid_over is not None and path in self._laid_over.paths:
            self._bad_base = self._laid_over.directory

    def set_aside(
        self, directory: str, problem: Exception | None, *, diverged: bool = False
    ) -> set[tuple[int, int]] | None:
        """Excludes what makes a checkpoint unusable, so that it can be made of something else. A collective.

        Slots in which some rank found damage are not used any more. If the checkpoint on storage that memory is laid
        over is damaged, an older one is taken. Slots that another number of ranks wrote stay until this run has a
        checkpoint of its own, since the number may be a mistake.

        Args:
            directory: Of the checkpoint.
            problem: This rank's own, if any.
            diverged: Updates of a gradient log came to another state on some rank: none of the log's are made again.

        Returns:
            (holder, number) of each damaged slot; None if nothing could be excluded, so that the checkpoint as a whole
            is not offered again.
        """
        if isinstance(problem, OtherLayoutError):
            self._of_other_layout |= set(self.used.values())
        path = problem.path if isinstance(problem, DamagedError) else ""
        share = self.used.get(path)
        mine = [] if share is None else [share.holder, share.number]
        answers = answers_of(self._comm, [mine, self._bad_base, "" if problem is None else str(problem)])
        if self._comm.rank == 0:
            say_unusable(directory, [reason for _, _, reason in answers])
        self._bad_base = ""
        bases = {(directory, name) for _, name, _ in answers if name} - self._bad_bases
        self._bad_bases |= bases
        bad = {(holder, number) for holder, number in (culprit for culprit, _, _ in answers if culprit)}
        self.shares = without_damaged(self.shares, bad)
        if diverged:
            self.shares = without_log(self.shares, age_of(directory)[0])
        if bad or bases or diverged:
            return bad
        # Without what stands in for a rank's own share there may be another checkpoint of the step.
        shares = [share for share in self.shares if not (share.only and share.directory == directory)]
        if len(shares) < len(self.shares):
            self.shares = shares
            return bad
        self._given_up.add(directory)
        return None

    def quarantine(self, slots: Iterable[tuple[int, int]]) -> None:
        """Marks those of the damaged ``slots`` that are this rank's, so that no later start uses them."""
        for holder, number in sorted(slots):
            if holder == self._comm.rank:
                slot = self._slots[number].slot
                set_aside(slot.path)
                log.warning("the memory slot %s is damaged: it is set aside, and not used", slot.path)

    def keep_only(self, step: int | None) -> None:
        """Deletes all slots but those of the checkpoint from which the run resumes.

        Args:
            step: The step of that checkpoint, if memory gave a part of it. None if it gave nothing: then the slots stay
                that only another layout can use.
        """
        slots = list(self._here(self._of_other_layout if step is None else self.used.values()).values())
        self._slots = ()  # so that ``left_slots`` has the only references to what it deletes
        self._tier.left_slots.keep(slots)
        self._tier.complete_step = step

    # --- opening ---

    def note_lasting_start(self, shares: Iterable[Share]) -> None:
        """Counts this start on the slots of ``shares``, which ranks kept of the newest step, until a step ends."""
        for slot in self._here(shares).values():
            self._tier.left_slots.note_start(slot, lasting=True)

    def _note_start(self, directory: str, checkpoint: MemoryCheckpoint) -> None:
        """Counts this start on every slot of the checkpoint, on every node."""
        shares = checkpoint.shares
        starts = max(share.starts for share in shares)
        if starts >= MOST_STARTS:
            slots = [
                f"{self.paths[share.holder, share.number]} (rank {share.writer}'s, on rank {share.holder})"
                for share in shares
            ]
            raise RecoveryLoopError(directory, starts, slots, self._tier.run_id, self._tier.root)
        for number, slot in self._here(shares).items():
            if number not in self._noted:
                self._noted.add(number)
                self._tier.left_slots.note_start(slot)

    def _here(self, shares: Iterable[Share]) -> dict[int, FoundSlot]:
        """Returns those of this rank's slots that ``shares`` are, by their numbers."""
        numbers = {share.number for share in shares if share.holder == self._comm.rank}
        return {number: self._slots[number] for number in sorted(numbers)}

    def _beneath(self, directory: str) -> Manifest | None:
        """Returns the checkpoint on storage of this name, None if it is empty. Raises as ``StoreReader.manifest``."""
        try:
            return self._reader.manifest(directory) if directory else None
        except (DamagedError, CoverageError, StepRemovedError):
            self._bad_base = directory
            raise

    def describe(self, checkpoints: Sequence[MemoryCheckpoint], recounted: Collection[int] = ()) -> list[SnapshotFacts]:
        """Gathers what every rank must know of the slots: headers of their shards, and the facts of each snapshot.

        A collective.

        Args:
            checkpoints: Which checkpoints.
            recounted: As of ``SnapshotFacts.settle``.

        Returns:
            The facts of each snapshot of each checkpoint, in order.
        """
        snapshots = [snapshot for checkpoint in checkpoints for snapshot in checkpoint.snapshots]
        slots_of_all = [slots for checkpoint in checkpoints for slots in checkpoint.slots()]
        facts_of_all = [SnapshotFacts() for _ in snapshots]
        mine: list[bytes] = []
        for position, (snapshot, slots) in enumerate(zip(snapshots, slots_of_all, strict=True)):
            teller_shares = snapshot[teller_of(snapshot)]
            for shares in slots:
                if fullest(shares).holder == self._comm.rank:
                    header = self._slots[fullest(shares).number].header
                    mine += packed_header(position, header, tells=shares is teller_shares)
        for raw in self._comm.everyone(b"".join(mine)):
            for position, described, facts in unpacked_headers(raw):
                facts_of_all[position].add(described, facts)
        for snapshot_facts in facts_of_all:
            snapshot_facts.settle(recounted)
        return facts_of_all

    def _opened(
        self,
        checkpoint: MemoryCheckpoint,
        older: Sequence[MemoryCheckpoint],
        described: Sequence[SnapshotFacts],
        beneath: Manifest | None,
    ) -> OpenedMemory:
        directory = checkpoint.directory
        self._laid_over = beneath if beneath is not None and beneath.directory != directory else None
        logged, chained = tuple[LoggedSnapshot, ...](), frozenset[str]()
        count = len(checkpoint.snapshots)
        parts = self.parts(checkpoint, described[:count])
        layers = [
            self.parts(earlier, [snapshot], SURVIVORS_SUFFIX if earlier.step == checkpoint.step else "")[0]
            for earlier, snapshot in zip(older, described[count:], strict=True)
        ]
        stored = None if beneath is None or checkpoint.is_window or beneath.directory != directory else beneath
        if stored is not None and checkpoint.is_parting and not checkpoint.is_complete:
            parts = self.parts(checkpoint, described[:count], SURVIVORS_SUFFIX)
            view = self._laid(stored, [*layers, *parts])
            manifest = prune_manifest(replace(stored, operators=view.operators), view.files, {directory})
        elif stored is not None and not checkpoint.is_parting:
            [part] = parts
            self._require_same(part, stored)
            view, unchanged = self._laid(stored, layers), part.known_to(stored)
            whole = checkpoint.is_whole and len(unchanged) == len(part.files)
            view.lay(part, host_only=self.covered(part, part.host_only, stored, all_there=whole))
            view.slots |= unchanged
            manifest = prune_manifest(replace(stored, operators=view.operators), view.files, {directory})
        else:  # a complete seal has everything, under the names that storage's files of the step have
            alone = stored is not None or checkpoint.is_window or checkpoint.is_log
            alone = alone and not described[count - 1].contents.gradients
            view = self._laid(None, ()) if alone else self._laid(beneath, layers)
            manifest = self._manifest(parts, view, beneath)
        files = view.slots_of(manifest)
        if checkpoint.is_log:
            pairs = zip(manifest.slots, parts, strict=True)
            logged = tuple(LoggedSnapshot(slot, tuple(part.slices(GRADIENTS))) for slot, part in pairs)
            manifest = replace(manifest, window=())
            files |= {path: file for part in parts for path, file in part.files.items()}
        if checkpoint.is_log or checkpoint.is_window:
            newest = described[count - 1]
            chained = view.brought_to(newest.contents, newest.require_facts(checkpoint.step))
        self.used = {}
        reader, slots = self.reading(manifest, files, [*parts, *layers])
        return OpenedMemory(reader, slots, manifest, beneath, view.fresh, logged, chained=chained)

    def _require_same(self, part: SlotFiles, stored: Manifest) -> None:
        """Refuses slots that are not of the checkpoint that storage has by the same name.

        A life that ended before its first commit may have used that name, or ``densify`` has made the checkpoint.

        Raises:
            CoverageError: Storage has everything as of the step, so that nothing is lost with the slots.
            DamagedError: It has not.
        """
        other = next((state for state in part.states if state not in stored.states), None)
        is_dense = all(record.step == stored.step for record in stored.operators.values())
        if other is not None and is_dense:
            raise CoverageError("storage has another dense checkpoint of the step", ("it is read from there",))
        if other is not None:
            self.used = {other.path: part.files[other.path].share}
            reason = "it differs from storage: another life of the run has used the same name"
            raise DamagedError(other.path, reason, step=stored.step, rank=other.rank)

    def reading(
        self, manifest: Manifest, files: Mapping[str, SlotFile], parts: Iterable[SlotFiles]
    ) -> tuple[StoreReader, SlotStorage]:
        """Returns the reader of a checkpoint of which ``files`` are in slots. These slots are ``used`` from now on.

        Args:
            manifest: Of the checkpoint.
            files: Path -> file.
            parts: The snapshots that the files are of.
        """
        self.used = {**self.used, **{path: file.share for path, file in files.items()}}
        checker = self._tier.left_slots.checker
        checker.only(self._here(self.used.values()).values())
        mine = self._here(file.share for file in files.values())
        slots = SlotStorage(self._reader.storage, self._comm, self._tier.node, mine, self.paths, files, checker=checker)
        if not self._tier.outlives_process:
            slots.places = ("this job's processes",)
        reader = StoreReader(slots, patience_secs=0.0)  # storage beneath the slots is patient itself
        headers = {rec: head for part in parts for rec, head in part.headers.items() if rec.path in files}
        reader.add(manifest, headers, slots.is_sound)
        return reader, slots

    def _has_all(self, checkpoint: MemoryCheckpoint, described: Sequence[SnapshotFacts]) -> bool:
        """Returns whether the checkpoint has every expert by itself, so that it takes none from an older one."""
        contents = described[-1].contents
        if described[-1].facts is None or not checkpoint.is_complete:
            return False
        if checkpoint.is_log and not contents.gradients:  # it has gradients of all others
            return True
        experts = sum(operator.startswith(EXPERT) for operator in contents.full)
        return experts == sum(layer.experts for layer in self._tier.model.layers)

    def parts(
        self, checkpoint: MemoryCheckpoint, described: Sequence[SnapshotFacts], ending: str = ""
    ) -> list[SlotFiles]:
        """Returns the slots of each snapshot, from where this rank takes them, as files.

        Args:
            ending: Of the names of their directories.
        """
        parts = []
        for slots, facts in zip(checkpoint.slots(), described, strict=True):
            step = slots[0][0].step
            facts.require_shape(step, self._tier.model.grid)
            part = SlotFiles(step_dir(step, checkpoint.generation) + ending, step, checkpoint, facts)
            for shares in slots:
                full = [share for share in shares if share.sent == fullest(shares).sent]
                near, complete = (nearest(holders, self._comm.rank, self._tier.node) for holders in (shares, full))
                here = self._slots[complete.number].header.parts if complete.holder == self._comm.rank else ()
                part.add(near, complete, facts.slots[near.key], here)
            parts.append(part)
        return parts

    def _laid(self, beneath: Manifest | None, layers: Sequence[SlotFiles]) -> LaidSnapshots:
        """Lays the whole experts of snapshots, the oldest first, over what storage has, if anything."""
        view = LaidSnapshots([], {}) if beneath is None else LaidSnapshots(list(beneath.files), dict(beneath.operators))
        for part in layers:
            newer = {op for op, record in view.operators.items() if record.step >= part.step}
            host_only, sent = part.host_only - newer, part.operators(_EXPERTS) - part.host_only - newer
            host_only = self.covered(part, host_only, beneath, all_there=part.checkpoint.is_whole)
            sent = self.covered(part, sent, beneath, all_there=part.checkpoint.is_complete)
            if host_only or sent:
                view.lay(part, stored=sent, host_only=host_only)
        return view

    def _manifest(self, parts: Sequence[SlotFiles], view: LaidSnapshots, beneath: Manifest | None) -> Manifest:
        """Returns the manifest of a checkpoint that storage does not have.

        Args:
            parts: The slots of its snapshots.
            view: What they are laid over; they are laid over it here.
            beneath: The checkpoint on storage that the model's other state is of, if there is one.
        """
        for part in parts:
            host_only = self.covered(part, part.host_only, beneath, all_there=part.checkpoint.is_whole)
            view.lay(part, stored=part.snapshot.contents.full, host_only=host_only)
            view.slots |= part.files
        *before, last = parts
        facts = last.snapshot.require_facts(last.step)
        first = before[0].snapshot.require_facts(last.step).applied if before else None
        window = tuple(SlotRecord(part.step, tuple(part.states)) for part in before)
        whole = self.whole(last.checkpoint, facts, view.operators, beneath)
        whole = replace(whole, states=tuple(last.states), window=window, tokens={**whole.tokens, **window_began(first)})
        manifest = prune_manifest(whole, view.files, {part.directory for part in parts})
        if beneath is not None and not {*manifest.files}.isdisjoint(beneath.files):
            manifest = replace(manifest, not_finite=beneath.not_finite)
        return manifest

    def whole(
        self,
        checkpoint: MemoryCheckpoint,
        facts: Facts,
        operators: Mapping[str, OperatorRecord],
        beneath: Manifest | None,
    ) -> Manifest:
        """Returns the manifest of a checkpoint without its files and the ranks' states."""
        book = TokenBook.from_dict({} if beneath is None else beneath.tokens, *self._tier.model.grid)
        if facts.lost is not None and len(book.faults) < len(facts.faults):  # else it was written after all of them
            book.saved[Tier.STORAGE] = book.saved[Tier.STORAGE] + facts.lost.reshape(book.applied.shape)
        book.applied = facts.applied.reshape(book.applied.shape).copy()
        book.faults = list(facts.faults)
        book.saved = {Tier.STORAGE: book.saved[Tier.STORAGE]}
        return Manifest(
            run_id=self._tier.run_id,
            step=checkpoint.step,
            generation=checkpoint.generation,
            world_size=checkpoint.writers,
            index=facts.index,
            created_unix_secs=time.time(),
            model=self._tier.model,
            operators=operators,
            parent=None if beneath is None else beneath.directory,
            policy=facts.policy,
            measured=facts.measured,
            tokens=book.to_dict(),
        )

    def covered(
        self,
        part: SlotFiles,
        operators: frozenset[str],
        beneath: Manifest | None,
        *,
        all_there: bool = False,
        reader: StoreReader | None = None,
    ) -> frozenset[str]:
        """Returns those of ``operators`` that the slots hold whole, although some slots are lost.

        Args:
            part: The slots.
            operators: Which operators are looked for.
            beneath: The checkpoint on storage that shows which tensors an operator has; None if there is none.
            all_there: No slot is lost, so that every operator is whole.
            reader: Of ``beneath``, if that is in memory.
        """
        if all_there or not operators:
            return operators
        if beneath is None:
            return frozenset()
        blocks = blocks_of((reader or self._reader).index(beneath), operators)
        boxes_of: dict[str, list[tuple[str, Box]]] = {}
        for entry in (stored.entry for stored in part.slices() if stored.entry.operator in operators):
            boxes_of.setdefault(entry.operator, []).append((entry.key, entry.box))
        return frozenset(op for op, boxes in boxes_of.items() if _covers(op, blocks[op], boxes))


def _covers(operator: str, needed: Mapping[str, Sequence[Box]], stored: Sequence[tuple[str, Box]]) -> bool:
    try:
        prove_cover(operator, needed, stored)
    except CoverageError as error:
        log.info("not all of %s survived in memory, so the version on storage is used: %s", operator, str(error))
        return False
    return True


def say_unusable(directory: str, reasons: Sequence[str]) -> None:
    """Logs each reason once, with the ranks that gave it, unless all did.

    Args:
        directory: Of a checkpoint in memory.
        reasons: Why it cannot be used, of each rank; empty where it can.
    """
    for reason in dict.fromkeys(filter(None, reasons)):
        ranks = [rank for rank, other in enumerate(reasons) if other == reason]
        where = "" if len(ranks) == len(reasons) else f" by {name_ranks(ranks)}"
        log.warning("%s in memory cannot be used%s: %s", directory, where, reason)


def checkpoint_in(shares: Sequence[Share], directory: str, stored: Sequence[str] = ()) -> MemoryCheckpoint:
    """Returns the checkpoint of this name that memory has whole, or else a part of the snapshot that was due, or else
    what survivors sealed; no step of a log that is ``stored``, too (``MemoryCheckpoints.offered``)."""
    candidates = [one for one in checkpoints_of(shares) if one.directory == directory]
    candidates = [one for one in candidates if not (one.is_log and directory in stored)]
    return min(candidates, key=lambda candidate: 0 if candidate.is_complete else 1 + candidate.is_parting)


def say_kept(shares: Sequence[Share], directory: str) -> None:
    """Announces, when all ranks go back to a checkpoint, which of them had kept a newer step."""
    checkpoint = checkpoint_in(shares, directory)
    newer = newer_than(checkpoint, shares)
    if newer is None:
        return
    why = "the other ranks' state of it is lost: all continue from step %d, the newest that all of them have"
    if checkpoint.is_log:
        why = "the other ranks' gradients of it are lost: all ranks are restored to step %d by the log"
    if checkpoint.writers == 1:
        why = "it cannot be used: the run continues from step %d"
    ranks = name_ranks(newer.writers)
    announce(f"%s kept step %d when training stopped, but {why}", ranks, newer.step, checkpoint.step)
