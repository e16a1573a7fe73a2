"""One life of a training run, as checkpointing sees it: the part that every adapter drives.

Per optimizer step, on every rank and on the training thread:

    before_update()   just before the optimizer changes anything: joins the copy under way
    after_update()    when the step's state is final: agrees, plans, starts the next copy

and once each: ``open`` before training, ``adopt`` after a restore, ``finish`` or ``close`` at the end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement, everywhere
from moe_ckpt.core.plan import SnapshotPlan, Tier, save_full
from moe_ckpt.core.tokens import Counts, FaultRecord
from moe_ckpt.engine.agreement import Facts, agree
from moe_ckpt.engine.backlog import Backlog
from moe_ckpt.engine.books import Books, Pending, places
from moe_ckpt.engine.commit import Committer
from moe_ckpt.engine.host_tier import HostTier
from moe_ckpt.engine.keeping import StoreKeeper
from moe_ckpt.engine.meter import Meter
from moe_ckpt.engine.opening import open_store
from moe_ckpt.engine.outcomes import FailureCount
from moe_ckpt.engine.persisting import Resolution
from moe_ckpt.engine.pipeline import Order, Pipeline
from moe_ckpt.engine.planning import Planner
from moe_ckpt.engine.profile import Facts as ProfileFacts
from moe_ckpt.engine.profile import NoRecorder, Recorder
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.engine.settings import Settings
from moe_ckpt.engine.shares import ComputeTypes
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.errors import ConfigError, SaveFailedError
from moe_ckpt.format.manifest import Manifest, step_dir
from moe_ckpt.policies.base import Measured, Policy, uses_windows
from moe_ckpt.ports import Communicator, TrainingState
from moe_ckpt.storage.base import Storage
from moe_ckpt.storage.lock import StoreLock

log = logging.getLogger("moe_ckpt")

_IDLE_SECS = 10.0
"""Longest wait for threads that have nothing to do."""

Capture = Callable[[], Mapping[str, Any]]
"""Gives the plain training state of this moment; called only when a snapshot begins."""


class CheckpointSession:
    """Keeps the books of one rank and drives policy and pipeline. For the training thread only."""

    def __init__(
        self,
        *,
        storage: Storage,
        policy: Policy,
        catalog: Catalog,
        state: TrainingState,
        comm: Communicator,
        settings: Settings | None = None,
        placement: Placement | None = None,
        aliases: Mapping[str, str] | None = None,
        lock: StoreLock | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        policy.check(catalog)
        self.catalog = catalog
        self.books = Books(catalog)
        self.generation = 0
        self.committed_directory: str | None = None
        self._storage = storage
        self._policy = policy
        self._state = state
        self._comm = comm
        self._settings = settings or Settings()
        self._placement = placement or everywhere(catalog.layers, comm.world_size)
        self._aliases = dict(aliases or {})
        self._lock = lock or StoreLock(storage, "CheckpointSession")
        self._on_phase = on_phase
        self._meter = Meter()
        self._settled = -1
        self._failures = FailureCount()
        self._backlog = Backlog(self._settings, comm.rank, self.largest)
        self._stall = 0.0
        self._end_secs = self._settings.timeout_secs
        self._k: int | None = None
        self._plt_budget: float | None = None
        self._planner = Planner(policy, catalog, state, self._placement, comm.rank)
        self._committer: Committer | None = None
        self._keeper: StoreKeeper | None = None
        self._pipeline: Pipeline | None = None
        self._left_to_writer = False
        self._profile = NoRecorder()

    # --- once, before training ---

    def open(self) -> None:
        """Take possession of the store and start the threads. All ranks, before ``adopt``.

        Raises:
            StoreError, ConfigError, OSError: as ``open_store``. Whatever is raised, neither the lock is held nor a
                thread runs then.
        """
        try:
            self._open()
        except BaseException:
            with contextlib.suppress(OSError):  # the lock of a store that does not answer; the first error tells more
                self._close(_IDLE_SECS, keep=True)
            raise

    def _open(self) -> None:
        limits = self._settings.retention, self._settings.read_patience_secs
        opened = open_store(self._storage, self.catalog, self._comm, self._lock, *limits)
        self.generation, self._keeper = opened.generation, opened.keeper
        if opened.keeper is not None:
            self._committer = Committer(
                self._storage,
                self.catalog,
                opened.run_id,
                self._comm.world_size,
                self._aliases,
                self.books.tokens.saved[Tier.STORAGE].copy(),
                require_whole=opened.keeper.require_whole,
            )
        self._pipeline = Pipeline(
            self._storage,
            self.catalog,
            self._placement,
            self._comm,
            self._settings,
            opened.run_id,
            self._committer,
            opened.keeper,
            self._lock.refresh,
            self._on_phase,
        )
        if uses_windows(self._policy):  # of the rank that has least
            [least] = self.largest([-self._pipeline.snapshot_bytes])
            self._planner.room = -least
        if self._settings.profile is not None and self._comm.rank == 0:
            ranks, budget_bytes = self._comm.world_size, self._pipeline.snapshot_bytes * self._settings.max_in_flight
            local_ranks, policy = min(self._settings.local_ranks, ranks), self._policy.describe()
            facts = ProfileFacts(opened.run_id, opened.generation, policy, ranks, local_ranks, budget_bytes)
            self._profile = Recorder(self._settings.profile, self.catalog, self._placement, facts)

    def adopt(self, manifest: Manifest, *, same_store: bool = True, held: Counts | None = None) -> FaultRecord:
        """Go on from a restored checkpoint, and book the tokens that its experts lack.

        held: ``[L, E]`` tokens seen by experts that came back from host memory instead of from storage.

        Called on every rank, after the state was restored and before the first step. A checkpoint of
        another store lends its history, but not its files: the next checkpoint is then dense.
        """
        fault = self.books.adopt(manifest, same_store=same_store, held=held)
        if self._committer is not None:
            self._committer.saved = self.books.tokens.saved[Tier.STORAGE].copy()
        if manifest.world_size == self._comm.world_size:
            self._meter.resume(manifest.measured)
        if same_store:
            self._planner.layout.update(self._state.specs())
            self.committed_directory = manifest.directory
            if uses_windows(self._policy):
                known = 0 if self._keeper is None else self._keeper.dense_step(manifest)
                [self._planner.dense_step] = self.largest([known])
            if self._committer is not None:
                self._committer.adopt(manifest)
        self._profile.adopted(manifest.step)
        return fault

    @property
    def committed_step(self) -> int | None:
        """Newest committed step that this rank knows of."""
        return self.books.committed_step

    @property
    def host_tier(self) -> HostTier:
        """What this process's memory holds: from an earlier session in it, until this one's first commit."""
        return self._running.host_tier

    @property
    def is_open(self) -> bool:
        """True between ``open`` and ``finish`` or ``close``."""
        return self._pipeline is not None

    def continue_books(self, tokens: Mapping[str, Any], index: int) -> None:
        """Go on from a dense checkpoint of another kind, which lacks no expert's tokens."""
        self.books.continue_from(tokens, index)
        if self._committer is not None:
            self._committer.saved = self.books.tokens.saved[Tier.STORAGE].copy()

    def training_begins(self) -> None:
        """The state is complete, and the loop is entered: for the profile only, and so no collective."""
        self._profile.ready()

    # --- every optimizer step ---

    def before_update(self) -> None:
        """Join the copy under way. Must return before the optimizer changes anything."""
        began = time.perf_counter()
        self._running.join()
        ended = time.perf_counter()
        self.add_stall(ended - began)
        self._profile.joined(ended)

    def add_stall(self, secs: float) -> None:
        """Time that training waited, for this or for the adapter itself; part of the next record."""
        self._stall += secs
        self._meter.waited(secs)

    def after_update(
        self,
        step: int,
        counts: Counts,
        capture: Capture,
        soft: Counts | None = None,
        assigned: Counts | None = None,
    ) -> StepRecord:
        """The state after optimizer step ``step`` is final: plan, and start copying.

        counts: ``[L, E]`` tokens of this rank whose update this step applied.
        soft: ``[L, E]`` of their gate weights, in whole numbers of any unit; None if the policy does not go by them.
        assigned: ``[L, E]`` tokens of this rank that the router assigned, those too that were dropped or whose step was
            skipped: what popularity goes by. None if they are the same.

        Raises:
            SaveFailedError: too many checkpoints failed in a row.
            RuntimeError: a peer is gone.
        """
        began = time.perf_counter()
        self._planner.forget()
        pipeline = self._running
        pipeline.raise_fatal()
        pipeline.join()
        loaded = bool(self.books.pending)
        self._meter.lap(began, loaded=loaded)
        self._profile.lap(began, loaded=loaded)
        ended = pipeline.resolutions(self._settled)
        self._meter.moved(ended)
        asked = time.perf_counter()
        told = [part for part in (counts, soft, assigned) if part is not None]
        summed, facts = agree(self._comm, np.concatenate(told), pipeline.busy, ended, self._meter.measured())
        agree_secs = time.perf_counter() - asked
        heard = iter(np.split(summed, len(told)))
        applied = next(heard)
        weights = None if soft is None else next(heard)
        popularity = applied if assigned is None else next(heard)
        self.books.routed(applied, weights, popularity)
        self._settle(facts)
        if self.books.needs_everything:
            plan = save_full(step, self.catalog.everything)
        else:
            plan = self._planner.plan(self.books.context(step, self._comm.world_size, popularity, facts.measured))
        self._end_secs = self._settings.timeout_secs
        record = self._carry_out(plan, capture, facts) if plan else StepRecord(step)
        record = replace(record, halt=plan.halt, **self._budget(plan))
        waited = time.perf_counter() - began - agree_secs
        self._meter.waited(waited)
        stall, self._stall = self._stall + waited, 0.0
        record = self._completed(replace(record, stall_secs=stall, agree_secs=agree_secs))
        self._profile.stepped(record, began, facts.measured, popularity, self._state.specs)
        return record

    def begin_run(self, capture: Capture, step: int = 0, *, wait: bool = True) -> None:
        """Training begins after ``step``: save that state, if the policy wants it, and wait until it is committed.

        Called instead of ``after_update`` by the adapter, before the first step of a run that goes on from nothing.
        wait: False where ranks arrive one after the other; ``drain`` before the first update waits for it then.
        """
        plan = self._planner.plan(self.books.context(step, self._comm.world_size, self.books.popularity, Measured()))
        if plan:
            self._carry_out(replace(plan, wait=wait), capture, Facts())

    def set_compute_types(self, types: ComputeTypes) -> None:
        """What kernels read of the parameters, alike on every rank; their own types until this is called."""
        self._planner.set_compute_types(types)

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Element-wise maximum over ranks. A collective of the training thread."""
        _, largest = self._comm.agree(np.zeros(0, dtype=np.int64), np.asarray(numbers, dtype=np.int64))
        return [int(number) for number in largest]

    def _budget(self, plan: SnapshotPlan) -> dict[str, Any]:
        """K and the budget left, by the newest plan that told them."""
        if plan:
            self._k, self._plt_budget = plan.k, plan.plt_budget
        left = None if self._plt_budget is None else self._plt_budget - self.books.tokens.plt
        return {"k": self._k, "plt_budget_left": left}

    def _settle(self, facts: Facts) -> None:
        """Book the snapshots that rank 0 has resolved since the last step, alike on every rank."""
        for sequence, committed in facts.resolved:
            self._settled = sequence
            self._meter.resolved(facts.persist_secs)
            pending = self._book(sequence, committed)
            if sequence in facts.lost:
                self.books.forget()
                self.committed_directory = None
            self._failures.note(pending.window, pending.slot, committed=committed)
            if self._failures.in_row >= self._settings.max_failures:
                causes = [r.cause for r in self._running.resolutions(-1) if r.sequence == sequence and r.cause]
                raise SaveFailedError(pending.step, (f"{self._failures.in_row} checkpoints failed in a row", *causes))

    def _book(self, sequence: int, committed: bool) -> Pending:
        pending = self.books.resolved(sequence, committed=committed)
        self._profile.resolved(committed)
        if committed and pending.is_checkpoint:
            self._planner.layout.settle(pending.relaid)
            self.committed_directory = step_dir(pending.step, pending.generation)
        if not committed:
            self._planner.failed(pending)
        return pending

    def _carry_out(self, plan: SnapshotPlan, capture: Capture, facts: Facts) -> StepRecord:
        if not self._backlog.admits(plan, self._running, busy=facts.busy, measured=facts.measured):
            if plan.slot:
                self.books.give_up_window()
            return StepRecord(plan.step, skipped=True)
        snapshot = self._begin(plan, capture)
        if plan.wait:
            self.drain(plan.step)
        return StepRecord(
            plan.step,
            begun=True,
            waited=snapshot.waited,
            nbytes=snapshot.nbytes,
            experts_saved=len(places(self.catalog, snapshot.operators)),
            frozen_nbytes=snapshot.frozen_nbytes,
            window=0 if plan.window is None else plan.window.size,
            slot=plan.slot,
        )

    def _begin(self, plan: SnapshotPlan, capture: Capture, *, last: bool = False) -> Snapshot:
        """last: of the run, so that what it waits for is left to ``finish`` to complain about."""
        last = last or plan.halt is not None
        patience_secs = self._end_secs if last else self._settings.timeout_secs
        tensors, specs = self._planner.describe()
        relaid = self._planner.layout.update(specs)
        window = plan.window if plan.window is not None and plan.window.size > 1 else None
        operators = plan.operators()
        if relaid and window is None:
            chosen = relaid.keys() | set(operators)
            operators = tuple(op for op in self.catalog.everything if op in chosen)
        held = plan.operators(Tier.HOST)
        if held:
            stored = frozenset(operators)
            held = tuple(op for op in held if op not in stored)
        tokens = self.books.tokens
        applied = tokens.applied.copy()
        pending = Pending(self.catalog, plan.step, self.generation, operators, held, applied, relaid, window, plan.slot)
        order = Order(
            step=plan.step,
            generation=self.generation,
            index=self.books.index,
            operators=operators,
            held=held,
            frozen=plan.compute_only,
            compute=self._planner.compute_types,
            window=window,
            slot=plan.slot,
            applied=applied,
            faults=tuple(tokens.faults),
            policy=self._policy.describe(),
            measured=self._meter.known,
        )
        self._planner.forget()
        began = time.perf_counter()
        snapshot = self._running.begin(order, tensors, specs, capture, patience_secs)
        if last:
            self._end_secs = max(0.0, self._end_secs - (time.perf_counter() - began))
        self._backlog.waits += snapshot.waited
        if snapshot.refused and not last and self._settings.when_busy == "wait":
            raise self._not_in_time(plan.step, patience_secs)
        self.books.begun(snapshot.sequence, pending)
        self._planner.begun(pending)
        self._profile.begun(snapshot.nbytes, self._planner.layout.changes, specs, self._planner.compute_types)
        return snapshot

    def _completed(self, record: StepRecord) -> StepRecord:
        tokens = self.books.tokens
        return replace(
            record,
            skips=self._backlog.skips,
            waits=self._backlog.waits,
            plt=tokens.plt,
            at_risk_plt=self.books.at_risk_plt,
            lost_tokens=tokens.lost_tokens,
            routed_tokens=tokens.routed_tokens,
            committed_step=self.books.committed_step,
            failed_checkpoints=self._failures.total,
            oldest_expert_steps=self.books.oldest_expert_steps(record.step),
        )

    # --- once, at the end ---

    def save_complete(self, step: int, capture: Capture) -> None:
        """Begin a snapshot of everything, unless the newest one is just that.

        For the last step: its state is worth more than what is due, and other callbacks may change the
        weights (averaging) before ``finish``.
        """
        complete = self.catalog.everything
        newest = self.books.newest
        if newest is not None and newest.step == step:
            if newest.operators == complete:
                return
            self.generation += 1  # a partial checkpoint of this step has taken the name
        self._begin(save_full(step, complete), capture, last=True)

    def drain(self, step: int, at_most_secs: float | None = None) -> Sequence[Resolution]:
        """Wait until nothing is copied or written any more; returns the snapshots that ended, the newest last.

        Args:
            step: The newest one, for the message.
            at_most_secs: Of ``timeout_secs``, what is left; None for all of it.

        Raises:
            SaveFailedError: Storage did not finish in time.
        """
        timeout_secs = self._settings.timeout_secs
        self._running.join()
        if not self._running.wait(timeout_secs if at_most_secs is None else at_most_secs):
            raise self._not_in_time(step, timeout_secs)
        return self._running.resolutions(-1)

    def finish(self, step: int, capture: Capture, *, save_last: bool) -> None:
        """Training ended well: leave a complete checkpoint of the last state, and wait for it.

        Raises:
            SaveFailedError: the last checkpoint could not be committed, or not in time.
        """
        if save_last:
            self.save_complete(step, capture)
        try:
            ended = self.drain(step, self._end_secs)
        except SaveFailedError:
            self._close(0.0, keep=True)
            raise
        # No step follows whose agreement could book these, and none is needed: every rank has seen all.
        for resolution in ended:
            if resolution.sequence in self.books.pending:
                self._book(resolution.sequence, resolution.committed)
        failed = bool(ended) and not ended[-1].committed
        self._close(None, keep=failed)
        if failed:
            raise SaveFailedError(ended[-1].step, (ended[-1].cause or "unknown",))

    def close(self, timeout_secs: float | None = None) -> None:
        """Finish what is under way if that is quick enough, and stop the threads. Safe to call twice.

        Unless ``finish`` came before, training failed: the recovery buffer stays in this process's memory for
        the next session on the same store (see ``engine.host_tier``).
        """
        self._close(timeout_secs, keep=True)

    def _close(self, timeout_secs: float | None, *, keep: bool) -> None:
        self._profile.close(finished=not keep)
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            # Its thread may write on: whoever comes next in this process must not share the store with it.
            self._left_to_writer = True
            timeout_secs = self._settings.timeout_secs if timeout_secs is None else timeout_secs
            if not pipeline.close(timeout_secs, keep=keep, afterwards=self._lock.release):
                log.warning("a checkpoint is still being written; it is not waited for, but keeps the store locked")
        elif not self._left_to_writer:
            self._lock.release()
        self._comm.close()

    @property
    def _running(self) -> Pipeline:
        if self._pipeline is None:
            raise ConfigError("CheckpointSession: call open() first, and nothing after finish() or close()")
        return self._pipeline

    def _not_in_time(self, step: int, secs: float) -> SaveFailedError:
        """What to raise when storage did not answer for so long."""
        writing, newest = self._running.writing, self.committed_step
        cause = f"the storage of {self._storage.root} did not finish within {secs:g} s (timeout_secs)"
        if writing is not None:
            cause += f", it has been writing the checkpoint of step {writing[0]} for {writing[1]:.0f} s"
        kept = "no checkpoint is committed" if newest is None else f"the newest checkpoint is that of step {newest}"
        return SaveFailedError(step, (cause, f"{kept}; see whether that storage hangs, or raise timeout_secs"))
