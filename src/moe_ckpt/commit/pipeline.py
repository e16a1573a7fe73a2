"""The snapshot pipeline of one rank: live tensors -> host buffer -> shards -> commit.

If buffers outlive the process, a snapshot is sealed in between, and not every snapshot goes on to storage.

Three buffers are in use: one is copied into or waits, one is written from, and the newest committed one is kept for
recovery. A snapshot for which no buffer is free is skipped or waits, as configured; before that, the buffer that is
kept for recovery is given up. No buffer is written to before it has been given back.

The pipeline knows nothing of policies or tokens. ``begin`` and ``join`` are called on the training thread; everything
else happens on the copy thread, the persist thread, and the one that makes buffers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from moe_ckpt.commit.commit import Committer
from moe_ckpt.commit.persisting import MemorySealer, SnapshotResolver, SnapshotThread
from moe_ckpt.commit.room import Room
from moe_ckpt.core.step import Contents, Facts, Step
from moe_ckpt.core.tokens import Counts
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.ports import StateTensor, StepGradients, TensorSpec
from moe_ckpt.run.context import RunContext
from moe_ckpt.slices.assignment import ComputeTypes
from moe_ckpt.slices.checksums import Checker, checking_threads
from moe_ckpt.slices.compiling import CompiledPart, PlanCompiler
from moe_ckpt.slices.copying import Copier, Copy
from moe_ckpt.slices.snapshot import Encode, Snapshot, copy_at_once, parts_in
from moe_ckpt.threads import ThreadName
from moe_ckpt.tiers.host_memory import keep_for_next_session
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")

_IDLE_SECS = 5.0
"""Longest wait for threads that have nothing to do."""


class Pipeline:
    """Owns the buffers and the threads; ``close`` releases the memory. Not safe for use from several threads.

    Args:
        run: The session's context.
        tier: Keeps snapshots in memory.
        committer: Commits, on rank 0; None elsewhere.

    Attributes:
        generation: Life of the run, which names step directories.
        committer: As given.
        tier: As given.
        memory: The tier, if the snapshots that it keeps outlive the process.
        compiler: Turns contents into what this rank copies and writes.
        snapshot_bytes: The most bytes that one snapshot of this rank may have.
        persister: The thread that writes snapshots to storage, and commits them.
        first: The thread that takes each snapshot first, and seals it; with private memory, the ``persister``.
        room: Finds host memory for the next snapshot.
        next_number: The number of the next snapshot.
    """

    def __init__(self, run: RunContext, tier: MemoryTier, committer: Committer | None) -> None:
        self.tier, self._pool, self._root = tier, tier.pool, run.storage.root
        self.memory = tier if tier.outlives_process else None
        self.generation, self.committer, self.next_number = tier.generation, committer, 0
        if tier.replicator is not None:
            tier.replicator.store.expects_mirrors = True
        self.compiler = PlanCompiler(run.catalog, run.placement, run.comm.rank, run.comm.world_size, tier.sources)
        self._gate = run.gate
        self._copier = Copier(run.on_phase, run.gate)
        self._checker = Checker(run.settings.checksum_threads or checking_threads(run.settings.local_ranks))
        threads: list[SnapshotThread] = []
        try:
            resolve = SnapshotResolver(run, committer, self.tier, self._checker).resolve
            looks_gone = None if committer is None else committer.keeper.looks_gone
            self.persister = self.first = SnapshotThread(ThreadName.PERSIST, resolve, looks_gone)
            threads.append(self.persister)
            if self.memory is not None:
                sealer = MemorySealer(run, self.memory, self.persister.submit, self._checker)
                self.first = SnapshotThread(ThreadName.SEAL, sealer.resolve)
                threads.append(self.first)
            self.room = Room(run, self.tier, self.first, self.persister)
        except BaseException:  # no thread to be had, for instance
            for thread in threads:
                thread.close(_IDLE_SECS)
            self._checker.close()
            self._copier.close()
            raise
        # The most that one snapshot may have, where as many as may be under way are of that size.
        self.snapshot_bytes = self._pool.budget_bytes // run.settings.max_in_flight
        self._copy: Copy | None = None
        self._consumed: tuple[CompiledPart, ...] = ()

    def identify(self, step: int, *, parting: bool = False) -> Step:
        """Returns the identity of the next snapshot, or of what survivors seal of ``step``."""
        number = step if parting else self.next_number
        return Step(self.tier.run_id, self.tier.life, self.generation, step, number, parting)

    def begin(
        self,
        identity: Step,
        contents: Contents,
        facts: Facts,
        *,
        applied: Future[Counts],
        tensors: Sequence[StateTensor],
        specs: Sequence[TensorSpec],
        compute_types: ComputeTypes,
        plain: Encode,
        patience_secs: float,
        gradients: StepGradients | None = None,
        last: bool = False,
        waits: bool = True,
        agree: Callable[[bool], bool] | None = None,
        starts: bool = False,
    ) -> Snapshot | None:
        """Starts a snapshot; returns at once unless the pipeline is full. Returns None if the ranks leave it out.

        The plain state is copied before ``begin`` returns. Parameters and optimizer state must not change before
        ``join`` returns.

        Args:
            identity: Of the snapshot.
            contents: Of the snapshot.
            facts: Of its step.
            applied: See ``Snapshot``.
            tensors: This rank's tensors.
            specs: The tensors of all ranks.
            compute_types: See ``PlanCompiler.compile``.
            plain: Gives the plain state.
            patience_secs: Longest wait for host memory that earlier snapshots use. A snapshot that gets none fails on
                every rank, because peers may have begun it already: see ``Snapshot.refused``.
            gradients: What the step consumed, if that is logged. They must not change before ``release`` returns.
            last: It is the run's last snapshot: see ``MemoryTier.drop``.
            waits: See ``Room.find``.
            agree: Takes whether this rank has memory for the snapshot, and says, equally on every rank, whether it
                begins. None: it begins in any case.
            starts: See ``Room.find``.

        Raises:
            HostMemoryError: At the start: the snapshot can never fit the budget.
            UnencodableStateError: Of the first snapshot: the plain state holds what only pickle could write.
        """
        self.join()  # an earlier one of this step: on a GPU its writing waits for the join
        refused: str | None = None
        try:
            log_entry = None if gradients is None else {**gradients.plain, "since": contents.since}
            encoded, side = plain() if log_entry is None else plain(gradient_log=log_entry)
        except Exception as error:  # of user code, or of state that cannot be encoded
            if not self.next_number:
                raise
            encoded, side, refused = None, [], f"{type(error).__name__}: {error}"
        consumed = gradients.tensors if gradients is not None and contents.gradients else ()
        entries = [entry for entry, _ in side]
        plan = self.compiler.compile(contents, tensors, specs, entries, consumed, compute_types)
        sizes, began = plan.sizes, time.monotonic()
        buffers, waited = None, False
        if refused is None:
            buffers, waited = self.room.find(
                identity,
                contents,
                sizes,
                patience_secs,
                last=last,
                waits=waits,
                skips=agree is not None and not waits and not contents.slot,
                starts=starts,
            )
        if agree is not None and not agree(refused is not None or not self.room.trouble):
            for buffer in buffers or ():
                self._pool.give_back(buffer)
            self.room.note_use(contents, sizes)
            return None
        if buffers is None:
            refused = (
                refused
                or self.room.trouble
                or _no_room(contents, plan.nbytes, self._pool.budget_bytes, patience_secs, time.monotonic() - began)
            )
            plan, buffers = replace(plan, buffers=((),), slots=()), [Buffer.empty()]
        elif gradients is not None and contents.gradients and gradients.changed:
            refused = (
                f"gradients or weights of {len(gradients.changed)} parameters ({min(gradients.changed)}, ...) were "
                "changed by something other than the optimizer, so the update cannot be logged"
            )
        parts = parts_in(plan, buffers)
        self._consumed = tuple(part.compiled for part in parts if part.compiled.is_consumed)
        on_device = copy_at_once(parts, side)
        if self._gate is not None:  # the next iteration begins, in which it may hold copies and sends back
            self._gate.step_begins()
        self._copy = self._copier.start([(part.compiled.copies, part.memory) for part in parts], on_device=on_device)
        snapshot = Snapshot(
            identity=identity,
            contents=contents,
            facts=facts,
            applied=applied,
            plan=plan,
            buffers=buffers,
            parts=parts,
            copy=self._copy,
            state=encoded,
            began_at=time.perf_counter(),
            waited=waited,
            refused=refused,
        )
        self.next_number += not identity.parting
        self.first.expect()
        if self.memory is not None:
            self.memory.begin(snapshot)
            if contents.to_storage:
                self.persister.expect()
        self.first.submit(snapshot)
        self.room.note_use(contents, sizes)
        return snapshot

    def join(self) -> None:
        """Waits until the snapshot under way no longer reads live tensors. If its copy fails, that snapshot fails."""
        if self._gate is not None:
            self._gate.update_begins()
        if self._copy is None:
            return
        copy, self._copy = self._copy, None
        consumed, self._consumed = self._consumed, ()
        with contextlib.suppress(Exception):  # the persist thread gets the same error, and every rank its cause
            copy.join()
        for part in consumed:
            part.release()
        if copy.changed:
            self.compiler.add_unstable(copy.changed)
            log.warning(
                "%d tensors (%s, ...) changed outside optimizer steps while they were being copied; from now on "
                "training waits until they are copied, which takes time",
                len(copy.changed),
                min(copy.changed),
            )

    def release(self) -> None:
        """Waits until the snapshot under way no longer reads gradients, and drops its references to them."""
        if self._consumed:
            self.join()

    def wait(self, timeout_secs: float) -> bool:
        """Waits until no snapshot is under way; returns False if that took longer than ``timeout_secs``.

        Raises:
            RuntimeError: A peer is gone.
        """
        if self._gate is not None:
            self._gate.release()  # training waits: nothing is held back until the next iteration begins
        until = time.monotonic() + timeout_secs
        return self.first.wait(0, timeout_secs) and self.persister.wait(0, max(0.0, until - time.monotonic()))

    def wait_for_seal(self, timeout_secs: float) -> None:
        """Waits until the newest step of a gradient log is sealed, so that a failure costs one step, not two.

        It warns if that takes longer than ``timeout_secs``.
        """
        if not self.first.wait(0, timeout_secs):
            log.warning(
                "the step before is not sealed in memory after %g s (timeout_secs). Training goes on; a failure costs "
                "two steps until it is",
                timeout_secs,
            )

    def raise_fatal(self) -> None:
        """Raises, once, the error that ended a thread."""
        for thread in (self.first, self.persister):
            if thread.fatal is not None:
                thread.raise_fatal()

    def close(self, timeout_secs: float, *, keep: bool, afterwards: Callable[[], None]) -> bool:
        """Stops the threads after what is queued.

        Args:
            timeout_secs: Longest wait for that.
            keep: Training failed, so that what memory keeps stays for a restart in this process.
            afterwards: See ``SnapshotThread.close``.

        Returns:
            False if writing was still going on.
        """
        if self._gate is not None:
            self._gate.release()  # training waits: nothing is held back until the next iteration begins
        try:
            self.join()
        finally:
            self.room.close()
            until = time.monotonic() + timeout_secs
            try:
                if self.first is not self.persister:
                    self.first.close(timeout_secs)
                ended = self.persister.close(max(0.0, until - time.monotonic()), afterwards)
                self._checker.close()
            finally:
                self._copier.close()
                keep_for_next_session(self.tier, self._root, keep=keep)
        return ended


def _no_room(contents: Contents, nbytes: int, budget_bytes: int, patience_secs: float, waited_secs: float) -> str:
    """Says why a snapshot got no buffer."""
    if contents.since is None and waited_secs >= patience_secs:
        return f"earlier checkpoints were still being written after a wait of {patience_secs:.1f} s"
    more = ", or anchor more operators in each step" if contents.since is not None else ""
    return (
        f"a budget of {budget_bytes:,} bytes has no room for {nbytes:,} more beside the checkpoints that memory must "
        f"keep; raise host_memory_bytes{more}"
    )
