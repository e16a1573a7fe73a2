"""Begins the snapshots that plans name, and waits until they have ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

from moe_ckpt.comm.communicator import largest
from moe_ckpt.commit.pipeline import Pipeline
from moe_ckpt.core.step import Contents, Facts, PeerPart, SnapshotPlan, Tier, WindowPlace
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import needs_of
from moe_ckpt.run.agreement import StepConsensus
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.events import SnapshotBegan, SnapshotEnded, StepRecord
from moe_ckpt.run.planning import LiveState, Planner, gradient_factor, with_anchors
from moe_ckpt.run.run_ledger import InFlight, expert_indices
from moe_ckpt.session.backlog import Backlog
from moe_ckpt.session.bookkeeping import Bookkeeper
from moe_ckpt.slices.snapshot import Encode, Snapshot, plain_of

log = logging.getLogger("moe_ckpt")

Capture = Callable[[], Mapping[str, Any]]
"""Returns the plain training state of this moment; called only when a snapshot begins."""


_TELLING_SECS = 0.005
"""Pause between two agreements on what the ranks have in memory."""


class Snapshotter:
    """Makes snapshots from plans, hands them to the pipeline and records them. For the training thread only.

    Attributes:
        opened: The pipeline; None unless the session is open.
        booking: Updates the ledger.
        live: The training state.
        planner: Asks the policy.
        backlog: Decides which snapshots begin, and whether they go to storage and to peers.
        updates: Updates that changed weights in this process.
        newest: The snapshot that began last, unless one begins at the moment or was left out since.
        end_secs: The rest of the longest wait for the run's last snapshots.
    """

    def __init__(self, run: RunContext) -> None:
        self.opened: Pipeline | None = None
        needs = needs_of(run.policy)
        self._leaves_out = needs.gradients is not None and needs.partial
        self._popularity = needs.popularity
        self.booking = Bookkeeper(run.catalog, run.comm, run.settings, self._ended, logs_for_peers=self._leaves_out)
        self.live = LiveState(self.booking.run_ledger.ledger, run.state, run.placement, needs.stored_gradients)
        self.planner = Planner(run.policy, self.live, run.comm.rank, run.settings)
        self.backlog = Backlog(run.settings, run.comm, windows=needs.windows)
        self.updates = 0
        self.newest: Snapshot | None = None
        self._is_first = True
        self._run = run
        self.end_secs = run.settings.timeout_secs
        self._anchored_as: dict[str, int] = {}
        self._begun: set[tuple[int, ...]] = set()
        self._shape: tuple[int, ...] = ()

    @property
    def pipeline(self) -> Pipeline:
        """Returns the pipeline. Raises ``ConfigError`` unless the session is open."""
        if self.opened is None:
            raise ConfigError("CheckpointSession: call open() first, and nothing after finish() or close()")
        return self.opened

    def step_begins(self, *, updated: bool = True) -> None:
        """Notes that the state of another step is final: its tensors may be others, and ``end_secs`` begins anew.

        Args:
            updated: False if the step's update was left out, because gradients overflowed, or may have been.
        """
        self.updates += updated
        self.live.forget()
        self.end_secs = self._run.settings.timeout_secs

    def plan(self, step: int, consensus: StepConsensus | None = None) -> SnapshotPlan:
        """Returns what to save at ``step``, equally on every rank.

        Args:
            step: Optimizer steps done.
            consensus: What the ranks agreed on; None before training.
        """
        ledger, run = self.booking.run_ledger, self._run
        if consensus is not None and ledger.needs_everything:
            return SnapshotPlan(step, run.catalog.everything)
        measured = None if consensus is None else consensus.measured
        context = ledger.context(step, self.live.placement, measured, self._popularity)
        if run.comm.agrees_late:
            unsaved = context.tokens.unsaved + ledger.likely(step)
            context = replace(context, tokens=replace(context.tokens, unsaved=unsaved))
        facts: dict[str, Any] = {}
        if consensus is not None and run.gradients is not None:
            facts["anchored_at"] = self.booking.anchors.steps
        if consensus is not None and run.settings.memory is not None:  # the tiers of this step's snapshot
            tiers = {Tier.HOST}
            if self.backlog.expects_storage(step, consensus, ledger):
                tiers.add(Tier.STORAGE)
            if run.settings.memory.replicas and self.pipeline.tier.replicator is not None:
                tiers.add(Tier.PEER)
            facts |= {"tiers": frozenset(tiers), "sends": consensus.sends}
        plan = self.planner.plan(replace(context, memory=replace(context.memory, **facts)))
        if consensus is None or not plan.gradients:
            return plan
        return self._with_anchors(plan, edited=consensus.edited)

    def _with_anchors(self, plan: SnapshotPlan, *, edited: bool) -> SnapshotPlan:
        """Returns the plan, with operators in full instead of gradients that no recovery could apply.

        Gradients need an anchor, a full copy of the operator at an earlier step. If an operator lacks one, the plan
        becomes one of everything; for a policy that leaves experts out, only those operators are saved in full.

        Args:
            plan: Equal on every rank.
            edited: The step does not follow from its gradients, or, if ranks agree late, the step before does not.
        """
        everything, planned = self._run.catalog.everything, {*plan.full, *plan.gradients}
        if edited:
            return (
                SnapshotPlan(plan.step, everything) if planned.issuperset(everything) else with_anchors(plan, planned)
            )
        if self._since(plan.full, plan.gradients) is not None:
            return plan
        if not self._leaves_out:
            return SnapshotPlan(plan.step, everything)
        return with_anchors(plan, self.booking.anchors.without_anchor(plan.gradients))

    def _since(self, anchored: tuple[str, ...], gradients: tuple[str, ...]) -> int | None:
        number = self.pipeline.next_number
        return self.booking.anchors.since(number, anchored, gradients if self._leaves_out else None)

    def carry_out(
        self,
        plan: SnapshotPlan,
        plain: Encode,
        consensus: StepConsensus,
        *,
        step_is_agreed: bool,
        before_training: bool = False,
    ) -> StepRecord:
        """Begins the snapshot of a plan, unless storage is too far behind. Returns the record of the step.

        Args:
            plan: Not empty; equal on every rank.
            plain: Returns the plain state.
            consensus: Of the ranks.
            step_is_agreed: See ``Bookkeeper.tokens_at``.
            before_training: No step was computed yet: memory is waited for, and other ranks may not have come yet.
        """
        pipeline = self.pipeline
        if pipeline.memory is not None:
            pipeline.memory.goes_on(None if plan.window is None else plan.window.start)
        if not self.backlog.begins(plan, pipeline, consensus):
            return self._left_out(plan)
        if consensus.used_up and (plan.wait or self._run.settings.when_busy == "wait"):
            self._settle_memory()
        outlives = self._run.settings.memory is not None
        tight = outlives and not plan.gradients and (consensus.tight or self.planner.is_tight(plan))
        stored = self.backlog.to_storage(plan, consensus, self.booking.run_ledger, tight=tight)
        if tight and not stored and not plan.slot:  # it would replace the newest checkpoint in memory
            self.backlog.leave_out(plan, "earlier ones are still being written, and memory has no room for two")
            return self._left_out(plan)
        snapshot = self._begin(
            plan,
            plain,
            step_is_agreed=step_is_agreed,
            to_storage=stored,
            to_peers=self.backlog.to_peers(plan, consensus),
            before_training=before_training,
        )
        if snapshot is None:
            return self._left_out(plan)
        self.booking.meter.copied_nbytes = snapshot.plan.nbytes
        return StepRecord(
            plan.step,
            begun=True,
            waited=snapshot.waited,
            nbytes=snapshot.nbytes,
            experts_saved=len(expert_indices(self._run.catalog, snapshot.contents.full)),
            frozen_nbytes=sum(part.frozen_nbytes for part in snapshot.written),
            window=0 if plan.window is None else plan.window.size,
            slot=plan.slot,
            to_storage=stored,
            gradient_factor=gradient_factor(plan, self.live.sizes) if plan.gradients else None,
        )

    def _left_out(self, plan: SnapshotPlan) -> StepRecord:
        """Returns the record of a step whose snapshot does not begin."""
        if plan.window is not None:  # a first slot, too: a window under way was to end, since its tensors changed
            self.booking.run_ledger.give_up_window()
        return StepRecord(plan.step, skipped=True)

    def save_complete(self, step: int, capture: Capture, *, again: bool) -> None:
        """Begins a snapshot of everything, unless the newest one is that. A collective.

        Args:
            step: Optimizer steps done.
            capture: Returns the plain state.
            again: Also begin one if the newest one is that, and has failed.
        """
        newest, everything = self.booking.run_ledger.newest, self._run.catalog.everything
        if newest is not None and newest.step == step:
            if newest.contents.full == everything and not (again and self._has_failed(newest)):
                return
            pipeline = self.pipeline
            pipeline.generation += 1  # another checkpoint of this step has the name already
            if pipeline.memory is not None:
                pipeline.memory.files.note_generation(pipeline.generation)
        self._settle_memory()
        plain = plain_of(capture, self._run.comm.rank)
        self._begin(SnapshotPlan(step, everything), plain, last=True, step_is_agreed=True)

    def _has_failed(self, snapshot: InFlight) -> bool:
        """Returns whether every rank knows that a snapshot has failed on storage. A collective."""
        number = snapshot.identity.number
        fates = [fate.committed for fate in self.pipeline.persister.fates(number - 1) if fate.number == number]
        [others] = largest(self._run.comm, [int(fates != [False])])
        return not others

    def _settle_memory(self) -> None:
        """If some rank's budget is used up, has the ranks agree now on what memory has, so that older snapshots give up
        their room. A collective, while no step is being agreed on."""
        pipeline, memory = self.pipeline, self.pipeline.memory
        until = time.monotonic() + self.end_secs
        while memory is not None:
            lacking = pipeline.room.is_used_up and not memory.is_settled
            if lacking:
                pipeline.first.wait(0, max(0.0, until - time.monotonic()))
            numbers = int(lacking), int(time.monotonic() >= until), *memory.reports()
            lacks, late, *reduced = largest(self._run.comm, numbers)
            self.booking.settle(memory, reduced)
            if late or not lacks:
                return
            time.sleep(_TELLING_SECS)

    def begin_parting(
        self,
        plan: SnapshotPlan,
        plain: Encode,
        tokens: tuple[Counts, Counts | None],
        of: int | None,
        patience_secs: float,
    ) -> Snapshot:
        """Begins a snapshot in memory because training stops. It is not recorded in the ledger.

        Args:
            plan: Of the newest step.
            plain: Returns the plain state.
            tokens: ``applied`` and ``counted`` of ``Facts``.
            of: Rank whose share is saved; None for this one.
            patience_secs: See ``Pipeline.begin``.
        """
        tensors, specs = self.live.describe_for(plan)
        pipeline = self.pipeline
        applied: Future[Counts] = Future()
        applied.set_result(tokens[0])
        contents = self._contents(plan, self.live.note_layout(specs), to_storage=False, to_peers=False)
        snapshot = pipeline.begin(
            pipeline.identify(plan.step, parting=True),
            replace(contents, on_behalf_of=of),
            replace(self._facts(), counted=tokens[1]),
            applied=applied,
            tensors=tensors,
            specs=specs,
            compute_types=self.live.compute_types,
            plain=plain,
            patience_secs=patience_secs,
        )
        return cast(Snapshot, snapshot)  # without ``agree`` it begins

    def _begin(
        self,
        plan: SnapshotPlan,
        plain: Encode,
        *,
        step_is_agreed: bool,
        last: bool = False,
        to_storage: bool = True,
        to_peers: bool = True,
        before_training: bool = False,
    ) -> Snapshot | None:
        """Begins a snapshot. None if the ranks leave it out, since one of them has no memory for it.

        Args:
            plan: Operators to save.
            plain: Returns the plain state.
            step_is_agreed: See ``Bookkeeper.tokens_at``.
            last: It is the run's last one: ``drain`` reports what it waits for too long.
            to_storage: It goes to storage.
            to_peers: It goes to peers.
            before_training: See ``carry_out``.
        """
        settings, live, pipeline = self._run.settings, self.live, self.pipeline
        patience_secs = self.end_secs if last else settings.timeout_secs
        tensors, specs = live.describe_for(plan)
        relaid = live.note_layout(specs)
        contents, facts = self._contents(plan, relaid, to_storage=to_storage, to_peers=to_peers), self._facts()
        entry = InFlight(pipeline.identify(plan.step), contents, facts.applied, relaid)
        consumed = None if self._run.gradients is None else self._run.gradients.step(tensors)
        layout_facts = live.changes, specs, live.compute_types, live.is_held_by_each
        live.forget()
        began = time.perf_counter()
        starts = not last and self._is_first and self.updates <= 1
        # Freed now, and not beside the copying thread, which takes the core where every core has a thread.
        self.newest = None
        snapshot = pipeline.begin(
            entry.identity,
            contents,
            facts,
            applied=self.booking.tokens_at(step_is_agreed=step_is_agreed),
            tensors=tensors,
            specs=specs,
            compute_types=live.compute_types,
            plain=plain,
            patience_secs=patience_secs,
            gradients=consumed,
            last=last,
            waits=last or before_training or plan.wait or settings.when_busy == "wait",
            agree=None if last or before_training else bool if self._run.comm.world_size == 1 else self._agree_on(plan),
            starts=starts,
        )
        if snapshot is None:
            self.backlog.leave_out(plan, pipeline.room.trouble)
            if to_storage:
                self.backlog.failed(plan.step, contents.window)
            return None
        self.newest, self._is_first = snapshot, False
        if self._run.gradients is not None:
            self._note_anchors(entry, plan.together)
        if last:
            self.end_secs = max(0.0, self.end_secs - (time.perf_counter() - began))
        self.backlog.waits += snapshot.waited
        self.booking.run_ledger.begun(entry, None if contents.window is None else plan.window)
        if to_storage and contents.is_complete(self._run.catalog.everything):
            self.planner.dense_step = plan.step
        self._run.tell(SnapshotBegan(snapshot.nbytes, *layout_facts))
        return snapshot

    def _agree_on(self, plan: SnapshotPlan) -> Callable[[bool], bool] | None:
        """Returns a function by which the ranks agree whether each of them has memory for a snapshot; None if they need
        not.

        They agree for a plan of a new shape, and for one of everything after one of another shape. Otherwise each rank
        knows beforehand whether it lacks memory (``Room.is_short``).
        """
        saved = plan.full, plan.memory_only, plan.compute, plan.gradients
        shape = 0 if plan.window is None else plan.window.size, plan.slot, *map(len, saved)
        before, self._shape = self._shape, shape
        is_larger = len(plan.full) == len(self._run.catalog.everything) and shape != before
        if shape in self._begun and not is_larger:
            return None

        def agree(has_memory: bool) -> bool:
            [lacking] = largest(self._run.comm, [int(not has_memory)])
            if not lacking:
                self._begun.add(shape)
            return not lacking

        return agree

    def _note_anchors(self, snapshot: InFlight, together: Sequence[tuple[str, ...]]) -> None:
        """Notes the anchors of a snapshot that began. One that is not of a gradient log has anchors if it has
        everything."""
        anchors, contents, number = self.booking.anchors, snapshot.contents, snapshot.identity.number
        if self._leaves_out:
            anchors.begun(number, snapshot.step, contents.full, contents.gradients)
            self._anchored_as.update(snapshot.relaid)
            if not contents.to_peers:  # peers lack it, so that they cannot use later gradients
                anchors.broken()
        elif contents.since is None and not contents.is_complete(self._run.catalog.everything):
            anchors.broken()
        else:
            anchors.begun(number, snapshot.step, contents.full, together=together)
            self._anchored_as.update(snapshot.relaid)

    def _contents(self, plan: SnapshotPlan, relaid: Mapping[str, int], *, to_storage: bool, to_peers: bool) -> Contents:
        """Returns the contents of the next snapshot: those of the plan, and operators that the ledger requires.

        Args:
            plan: Equal on every rank.
            relaid: See ``InFlight``.
            to_storage: It goes to storage.
            to_peers: It goes to peers.
        """
        run_ledger, window = self.booking.run_ledger, None
        if plan.window is not None and plan.window.size > 1:
            window = WindowPlace(plan.window.start, plan.window.size, plan.slot)
        operators, host_only = plan.full, plan.memory_only
        rescued = run_ledger.rescued
        overdue = {op for op, since in relaid.items() if not plan.gradients or self._anchored_as.get(op) != since}
        if self._leaves_out:  # an operator that only gradients bring up to date must not be left out now
            overdue |= {*self.booking.anchors.log_operators}.difference(plan.gradients)
        if (overdue or rescued) and window is None:
            due = overdue | rescued | set(operators)
            operators = tuple(op for op in self._run.catalog.everything if op in due)
        if host_only:
            chosen = frozenset(operators)
            host_only = tuple(op for op in host_only if op not in chosen)
        gradients, since = plan.gradients, None
        if gradients:
            chosen = frozenset(operators)
            gradients = tuple(op for op in gradients if op not in chosen)
            since = self._since(operators, gradients) if gradients else None
        whole = PeerPart.EVERYTHING if plan.sends_memory_only else PeerPart.STORED
        return Contents(
            full=operators,
            memory_only=host_only,
            compute=plan.compute,
            gradients=gradients,
            groups=None if since is None or self._leaves_out else self.booking.anchors.grouped(gradients),
            window=window,
            since=since,
            to_storage=to_storage,
            to_peers=whole if to_peers else PeerPart.NOTHING,
        )

    def _facts(self) -> Facts:
        tokens, measured = self.booking.run_ledger.tokens, self.booking.meter.measurements
        agreed = self.booking.consensus.measured.copy_interference_secs
        if agreed is not None:  # a restart does not measure it again
            measured["copy_interference_secs"] = agreed
        return Facts(
            index=self.booking.run_ledger.index,
            base=self.booking.committed_directory or "",
            applied=tokens.applied.copy(),
            faults=tuple(tokens.faults),
            policy=self._run.policy.describe(),
            measured=measured,
            lost=tokens.lost_since if tokens.lost_since.any() else None,
            updates=self.updates,
        )

    def _ended(self, snapshot: InFlight, committed: bool) -> None:
        """Notes that a snapshot was booked as ended."""
        self._run.tell(SnapshotEnded(committed))
        if not committed:
            if snapshot.step == self.planner.dense_step:
                self.planner.dense_step = 0
            self.backlog.failed(snapshot.step, snapshot.contents.window)
