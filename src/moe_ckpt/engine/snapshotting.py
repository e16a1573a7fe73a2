"""Begins the snapshots that plans name, and waits until they have ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, cast

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.plan import SnapshotPlan, Tier, save_full
from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.agreement import StepConsensus
from moe_ckpt.engine.backlog import Backlog, PeerCopies, StorageFlush
from moe_ckpt.engine.bookkeeping import Bookkeeper
from moe_ckpt.engine.context import RunContext
from moe_ckpt.engine.events import SnapshotBegan, SnapshotEnded, StepRecord
from moe_ckpt.engine.live import LiveState
from moe_ckpt.engine.planning import Planner, anchoring, gradient_factor
from moe_ckpt.engine.resolving import Fate
from moe_ckpt.engine.run_ledger import Pending, places
from moe_ckpt.engine.session_resources import SessionResources
from moe_ckpt.engine.snapshot import Encode, Snapshot, plain_of
from moe_ckpt.errors import SaveFailedError
from moe_ckpt.policies.base import PolicyContext, needs_of
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.request import SnapshotRequest

log = logging.getLogger("moe_ckpt")

Capture = Callable[[], Mapping[str, Any]]
"""Gives the plain training state of this moment; called only when a snapshot begins."""


class _Ways(NamedTuple):
    """Where a snapshot goes from memory: to storage, to peers."""

    stored: bool
    copied: bool


_EVERYWHERE = _Ways(stored=True, copied=True)
_TELLING_SECS = 0.005
"""From one question for what ranks have in memory to the next."""


class Snapshotter:
    """Makes requests from plans, hands them to the pipeline and records them. For the training thread only.

    Attributes:
        booking: Updates the ledger.
        live: The training state.
        planner: Asks the policy.
        backlog: Counts snapshots that were left out or waited for.
        flush: Says which snapshots go to storage.
        copies: Says which go to peers.
        updates: That changed weights in this process.
        newest: The snapshot that began last.
    """

    def __init__(self, run: RunContext, resources: SessionResources) -> None:
        needs = needs_of(run.policy)
        self._leaves_out = needs.gradients is not None and needs.partial
        self.booking = Bookkeeper(run.catalog, run.comm, run.settings, self._ended, logs_for_peers=self._leaves_out)
        self.live = LiveState(self.booking.run_ledger.ledger, run.state, run.placement, needs.stored_gradients)
        self.planner = Planner(run.policy, self.live, run.comm.rank, run.settings)
        self.backlog = Backlog(run.settings, run.comm)
        self.flush = StorageFlush(run.settings, windows=needs.windows, rank=run.comm.rank)
        self.copies = PeerCopies(run.settings, rank=run.comm.rank)
        self.updates = 0
        self.newest: Snapshot | None = None
        self._run = run
        self._resources = resources
        self._end_secs = run.settings.timeout_secs
        self._anchored_as: dict[str, int] = {}
        self._begun: set[tuple[int, ...]] = set()

    @property
    def skips(self) -> int:
        """Checkpoints that storage did not get because it was behind, whether memory has them or nothing has."""
        return self.backlog.skips + self.flush.skips

    def step_begins(self, *, updated: bool = True) -> None:
        """The state of another step is final: tensors may differ from before, and the time to wait at the end is reset.

        Args:
            updated: Its update was made, not left out because gradients overflowed.
        """
        self.updates += updated
        self.live.forget()
        self._end_secs = self._run.settings.timeout_secs

    def with_memory_facts(self, context: PolicyContext, consensus: StepConsensus) -> PolicyContext:
        """The context with what the policy may know of memory: where this step's snapshot will go from there."""
        memory, settings = context.memory, self._run.settings.memory
        if self._run.gradients is not None:
            memory = replace(memory, anchored_at=self.booking.anchors.steps)
        if settings is not None:
            tiers = {Tier.HOST}
            if self.flush.expects(context.run.step, consensus, self.booking.run_ledger):
                tiers.add(Tier.STORAGE)
            pipeline = self._resources.pipeline
            if settings.replicas and pipeline.memory is not None and pipeline.memory.replicator is not None:
                tiers.add(Tier.PEER)
            memory = replace(memory, tiers=frozenset(tiers), sends=consensus.sends)
        return replace(context, memory=memory)

    def with_anchors(self, plan: SnapshotPlan, *, edited: bool = False) -> SnapshotPlan:
        """Returns the plan, with operators in full instead of gradients that no recovery could apply.

        Gradients need an anchor, which is a full copy of the operator at an earlier step. If an operator lacks one, the
        plan becomes one of everything; for a policy that leaves experts out, those operators alone are saved in full.

        Args:
            plan: Equal on every rank.
            edited: The step does not follow from its gradients, or, where ranks agree late, the step before does not.
        """
        if edited and plan.gradients:
            everything, planned = self._run.catalog.everything, {*plan.operators(), *plan.gradients}
            return save_full(plan.step, everything) if planned.issuperset(everything) else anchoring(plan, planned)
        if not plan.gradients or self._since(plan.operators(), plan.gradients) is not None:
            return plan
        if not self._leaves_out:
            return save_full(plan.step, self._run.catalog.everything)
        without = self.booking.anchors.without_anchor(plan.gradients)
        return anchoring(plan, without)

    def _since(self, anchored: tuple[str, ...], gradients: tuple[str, ...]) -> int | None:
        sequence = self._resources.pipeline.next_memory_sequence
        return self.booking.anchors.since(sequence, anchored, gradients if self._leaves_out else None)

    def not_logged(self, *, updated: bool) -> None:
        """No snapshot of this step began.

        Args:
            updated: Weights changed in it.
        """
        if updated:
            self.booking.anchors.broken()

    def carry_out(
        self,
        plan: SnapshotPlan,
        plain: Encode,
        consensus: StepConsensus,
        *,
        step_is_agreed: bool,
        before_training: bool = False,
    ) -> StepRecord:
        """Begin what the plan names, unless storage is too far behind. Returns what became of it.

        Args:
            plan: Not empty; equal on every rank.
            plain: Gives the plain state.
            consensus: What the ranks agreed on.
            step_is_agreed: See ``Bookkeeper.tokens_at``.
            before_training: Nothing is computed yet, so that memory is waited for, and the ranks may not be here yet.
        """
        pipeline = self._resources.pipeline
        if pipeline.memory is not None:
            pipeline.memory.goes_on(None if plan.window is None else plan.window.start)
        if not self.backlog.admits(plan, pipeline, busy=consensus.busy, measured=consensus.measured):
            if plan.window is not None:  # the first slot too: one under way was to end, since its tensors changed
                self.booking.run_ledger.give_up_window()
            return StepRecord(plan.step, skipped=True)
        if plan.halt is not None or (consensus.used_up and (plan.wait or self._run.settings.when_busy == "wait")):
            self._settle_memory()
        outlives = self._run.settings.memory is not None
        tight = outlives and not plan.gradients and (consensus.tight or self.planner.is_tight(plan))
        stored = self.flush.goes(plan, consensus, self.booking.run_ledger, tight=tight)
        if tight and not stored and not plan.slot:  # it would take the place of the newest one that memory has
            self.backlog.leave_out(plan, "earlier ones are still being written, and memory has no room for two")
            return StepRecord(plan.step, skipped=True)
        ways = _Ways(stored, self.copies.go(plan, consensus))
        last, how = plan.halt is not None, {"step_is_agreed": step_is_agreed, "before_training": before_training}
        snapshot = self._begin(plan, plain, last=last, ways=ways, **how)
        if snapshot is None:
            return StepRecord(plan.step, skipped=True)
        self.booking.meter.copies(snapshot.plan.total_nbytes)
        return StepRecord(
            plan.step,
            begun=True,
            waited=snapshot.waited,
            nbytes=snapshot.nbytes,
            experts_saved=len(places(self._run.catalog, snapshot.request.operators)),
            frozen_nbytes=snapshot.frozen_nbytes,
            window=0 if plan.window is None else plan.window.size,
            slot=plan.slot,
            to_storage=stored,
            gradient_factor=gradient_factor(plan, self.live.sizes),
        )

    def save_complete(self, step: int, capture: Capture) -> None:
        """Begin a snapshot of everything, unless the newest one is just that."""
        newest, everything = self.booking.run_ledger.newest, self._run.catalog.everything
        if newest is not None and newest.step == step:
            if newest.operators == everything:
                return
            self._resources.generation += 1  # a partial checkpoint of this step has taken the name
            if self._resources.memory is not None:
                self._resources.memory.files.note_generation(self._resources.generation)
        self._settle_memory()
        plain = plain_of(capture, self._run.comm.rank)
        self._begin(save_full(step, everything), plain, last=True, step_is_agreed=True)

    def _settle_memory(self) -> None:
        """Where some rank's budget is used up, the ranks tell each other what memory has before the step ends: older
        snapshots make room then. A collective, while no step is being agreed on."""
        pipeline, memory = self._resources.pipeline, self._resources.memory
        until = time.monotonic() + self._end_secs
        while memory is not None:
            lacking = pipeline.room.is_used_up and not memory.is_settled
            if lacking:
                pipeline.stages.wait(0, max(0.0, until - time.monotonic()))
            numbers = int(lacking), int(time.monotonic() >= until), *memory.reports()
            lacks, late, *reduced = largest(self._run.comm, numbers)
            self.booking.settle(memory, reduced)
            if late or not lacks:
                return
            time.sleep(_TELLING_SECS)

    def begin_survivor(
        self, plan: SnapshotPlan, plain: Encode, tokens: tuple[Counts, Counts | None], of: int, patience_secs: float
    ) -> Snapshot:
        """Begin a snapshot for memory alone, which is not recorded in the ledger, because training stops.

        Args:
            plan: Of the newest step.
            plain: Gives the plain state.
            tokens: ``applied`` and ``own`` of ``format.slot.StepFacts``.
            of: Rank whose share is saved.
            patience_secs: See ``Pipeline.begin``.
        """
        tensors, specs = self.live.describe_for(plan)
        ways = _Ways(stored=False, copied=False)
        request, _ = self._request(plan, specs, step_is_agreed=True, ways=ways)
        applied: Future[Counts] = Future()
        applied.set_result(tokens[0])
        request = replace(request, applied=applied, rank_tokens=tokens[1], survivors_of=of)
        # Nobody is asked about it, so that it begins.
        return cast(Snapshot, self._resources.pipeline.begin(request, tensors, specs, plain, patience_secs))

    def drain(self, step: int, *, last: bool = False) -> Sequence[Fate]:
        """Wait until nothing is copied or written any more; returns the snapshots that ended, the newest last.

        Args:
            step: The newest one, for the message.
            last: The run ends, and what it waited for its last snapshot counts as well.

        Raises:
            SaveFailedError: Storage did not finish in time.
        """
        pipeline, timeout_secs = self._resources.pipeline, self._run.settings.timeout_secs
        pipeline.join()
        if not pipeline.wait(self._end_secs if last else timeout_secs):
            raise self._not_in_time(step, timeout_secs)
        return pipeline.stages.persister.fates(-1)

    def wait(self, step: int) -> None:
        """Waits as ``drain`` does, in training: says what storage did not finish in time, and raises nothing."""
        try:
            self.drain(step)
        except SaveFailedError as error:
            log.warning("%s. Training continues", error)

    def _begin(
        self,
        plan: SnapshotPlan,
        plain: Encode,
        *,
        last: bool,
        step_is_agreed: bool,
        ways: _Ways = _EVERYWHERE,
        before_training: bool = False,
    ) -> Snapshot | None:
        """Begin a snapshot. None if the ranks leave it out, since one of them has no memory for it.

        Args:
            plan: What to save.
            plain: Gives the plain state.
            last: Of the run, so that what it waits for is left to ``drain`` to complain about.
            step_is_agreed: See ``Bookkeeper.tokens_at``.
            ways: Where it goes from memory.
            before_training: See ``carry_out``.
        """
        settings, live = self._run.settings, self.live
        patience_secs = self._end_secs if last else settings.timeout_secs
        tensors, specs = live.describe_for(plan)
        request, pending = self._request(plan, specs, step_is_agreed=step_is_agreed, ways=ways)
        consumed = None if self._run.gradients is None else self._run.gradients.step(tensors)
        layout_facts = live.layout.changes, specs, request.compute_types, live.is_held_by_each
        live.forget()
        began = time.perf_counter()
        parts = request, tensors, specs, plain, patience_secs, consumed
        agree = None if last or before_training else self._agree_on(plan)
        waits = last or before_training or plan.wait or settings.when_busy == "wait"
        starts = not last and self.newest is None and self.updates <= 1
        snapshot = self._resources.pipeline.begin(*parts, last=last, waits=waits, agree=agree, starts=starts)
        if snapshot is None:
            self._left_out(plan, pending)
            return None
        self.newest = snapshot
        self._note_anchors(request, pending, snapshot.memory_sequence, plan.together)
        if last:
            self._end_secs = max(0.0, self._end_secs - (time.perf_counter() - began))
        self.backlog.waits += snapshot.waited
        in_memory = None if self._resources.pipeline.memory is None else snapshot.memory_sequence
        self.booking.run_ledger.begun(snapshot.sequence, pending, in_memory)
        if ways.stored:
            self.planner.begun(pending)
        self._run.tell(SnapshotBegan(snapshot.nbytes, *layout_facts))
        return snapshot

    def _agree_on(self, plan: SnapshotPlan) -> Callable[[bool], bool] | None:
        """Returns what makes the ranks agree whether each of them has memory for the snapshot. None: they need not.

        They do once for plans of a shape: after that, each knows beforehand what it lacks (``Room.is_short``).
        """
        if self._run.comm.world_size == 1:
            return bool
        saved = plan.operators(), plan.operators(Tier.HOST), plan.compute_only, plan.gradients
        shape = 0 if plan.window is None else plan.window.size, plan.slot, *map(len, saved)
        if shape in self._begun:
            return None

        def agree(has_memory: bool) -> bool:
            [lacking] = largest(self._run.comm, [int(not has_memory)])
            if not lacking:
                self._begun.add(shape)
            return not lacking

        return agree

    def _left_out(self, plan: SnapshotPlan, pending: Pending) -> None:
        self.backlog.leave_out(plan, self._resources.pipeline.room.trouble)
        if pending.stored:
            self.flush.failed(pending)
        if plan.window is not None:
            self.booking.run_ledger.give_up_window()

    def _note_anchors(
        self, request: SnapshotRequest, pending: Pending, sequence: int, together: Sequence[tuple[str, ...]]
    ) -> None:
        """A snapshot of a gradient log began, or another one, which is an anchor if it has everything."""
        if self._run.gradients is None:  # nobody asks for anchors
            return
        anchors = self.booking.anchors
        if self._leaves_out:
            anchors.begun(sequence, request.step, request.operators, request.gradients)
            self._anchored_as.update(pending.relaid)
            if not pending.copied:  # peers miss it, so that no later gradient is of use to them
                anchors.broken()
        elif request.since is None and not pending.is_complete:
            anchors.broken()
        else:
            anchors.begun(sequence, request.step, request.operators, together=together)
            self._anchored_as.update(pending.relaid)

    def _request(
        self, plan: SnapshotPlan, specs: Sequence[TensorSpec], *, step_is_agreed: bool, ways: _Ways
    ) -> tuple[SnapshotRequest, Pending]:
        """The next snapshot from the plan, the existing tensors and the ledger, and its entry in the ledger."""
        run_ledger, generation = self.booking.run_ledger, self._resources.generation
        relaid = self.live.layout.update(specs)
        window = plan.window if plan.window is not None and plan.window.size > 1 else None
        operators, host_only = plan.operators(), plan.operators(Tier.HOST)
        rescued = run_ledger.rescued
        overdue = {op for op, since in relaid.items() if not plan.gradients or self._anchored_as.get(op) != since}
        if self._leaves_out:  # what gradients alone lead to, and is left out now, would be lost with them
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
        pending = Pending(
            catalog=self._run.catalog,
            step=plan.step,
            generation=generation,
            operators=operators,
            host_only=host_only,
            applied=run_ledger.tokens.applied.copy(),
            relaid=relaid,
            window=window,
            slot=plan.slot,
            stored=ways.stored,
            copied=ways.copied,
            sends_host_only=plan.sends_host_only,
            gradients=gradients,
        )
        sets = self._run.catalog.sets
        experts = sets.experts if window is None else 0
        request = SnapshotRequest(
            step=plan.step,
            generation=generation,
            index=run_ledger.index,
            operators=operators,
            host_only=host_only,
            compute_only=plan.compute_only,
            compute_types=self.live.compute_types,
            window=window,
            slot=plan.slot,
            applied=self.booking.tokens_at(step_is_agreed=step_is_agreed),
            faults=tuple(run_ledger.tokens.faults),
            policy=self._run.policy.describe(),
            measured=self.booking.measured,
            base=self.booking.committed_directory or "",
            lost=run_ledger.tokens.lost_since if run_ledger.tokens.lost_since.any() else None,
            stored=ways.stored,
            copied=ways.copied,
            updates=self.updates,
            sends_host_only=plan.sends_host_only,
            experts=experts and experts & sets.of(pending.operators_in(Tier.HOST)),
            sent=experts and experts & sets.of(pending.operators_in(Tier.PEER)),
            gradients=gradients,
            since=since,
            groups=None if since is None or self._leaves_out else self.booking.anchors.grouped(gradients),
            is_partial_log=self._leaves_out,
        )
        return request, pending

    def _ended(self, pending: Pending, committed: bool) -> None:
        """A snapshot was booked as ended."""
        self._run.tell(SnapshotEnded(committed))
        self.planner.ended(pending, committed=committed)
        if not committed:
            self.flush.failed(pending)

    def _not_in_time(self, step: int, secs: float) -> SaveFailedError:
        """What to raise when earlier snapshots were not out of the way after so long."""
        pipeline, newest = self._resources.pipeline, self.booking.run_ledger.committed_step
        writing, root = pipeline.stages.persister.writing, self._run.storage.root
        newest_text = (
            "no checkpoint is committed" if newest is None else f"the newest checkpoint is that of step {newest}"
        )
        if writing is None and pipeline.memory is not None:
            cause = f"earlier snapshots were still being copied, or sent to peers, after {secs:g} s (timeout_secs)"
            hint = "check whether this machine has memory left, and whether peers are slow"
            return SaveFailedError(step, (cause, f"{newest_text} on storage; {hint}, or raise timeout_secs"))
        cause = f"the storage of {root} did not finish within {secs:g} s (timeout_secs)"
        if writing is not None:
            cause += f", it has been writing the checkpoint of step {writing[0]} for {writing[1]:.0f} s"
        return SaveFailedError(step, (cause, f"{newest_text}; check whether that storage hangs, or raise timeout_secs"))
