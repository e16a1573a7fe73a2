"""Once per step, exchanges the ranks' status, and books which snapshots are complete in memory or committed now."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from moe_ckpt.commit.persisting import FailureCount
from moe_ckpt.commit.pipeline import Pipeline
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import SaveFailedError
from moe_ckpt.format.manifest import step_dir
from moe_ckpt.ledger.ledger import Anchors
from moe_ckpt.ports import Communicator
from moe_ckpt.run.agreement import Deferred, StepAgreement, StepConsensus, StepTokens
from moe_ckpt.run.meter import Meter
from moe_ckpt.run.options import Settings
from moe_ckpt.run.run_ledger import InFlight, RunLedger
from moe_ckpt.tiers.memory_tier import MemoryTier

log = logging.getLogger("moe_ckpt")

OnEnd = Callable[[InFlight, bool], None]
"""Called with each snapshot of whose end all ranks know, and whether it was committed."""


class Bookkeeper:
    """Sends each step's numbers to the other ranks, receives theirs, and records them. For the training thread only.

    Args:
        catalog: Of the model.
        comm: The ranks.
        settings: The user's.
        on_end: See ``OnEnd``.
        logs_for_peers: Gradients are logged for peers. If a peer misses one step, later gradients are of no use to it.

    Attributes:
        run_ledger: Equal on every rank between two calls.
        meter: Measures on this rank.
        failures: Counts checkpoints that failed.
        agreement: Of the ranks on each step.
        consensus: The newest that was received, without its events (snapshots that ended), which are booked once.
        committed_directory: Of the newest checkpoint; None before the first.
        sent_step: The step of the newest ``send``.
        applied: ``[L, E]`` tokens that experts have processed by the end of ``sent_step``, once the ranks have agreed.
    """

    def __init__(
        self, catalog: Catalog, comm: Communicator, settings: Settings, on_end: OnEnd, *, logs_for_peers: bool = False
    ) -> None:
        self.run_ledger = RunLedger(catalog, outlives_process=settings.memory is not None)
        self.meter = Meter()
        self.failures = FailureCount()
        self.committed_directory: str | None = None
        self.agreement = StepAgreement(comm)
        self._on_end = on_end
        self._logs_for_peers, self._leads = logs_for_peers, comm.rank == 0
        self._max_in_flight = settings.max_in_flight
        self.consensus = StepConsensus()
        self._newest_ended = -1
        self._tokens_of_next_step: Future[Counts] = Future()
        self.sent_step = -1
        self.applied: Future[Counts] = Future()

    @property
    def anchors(self) -> Anchors:
        """The anchors of the gradient log, if the policy keeps one."""
        return self.run_ledger.ledger.anchors

    def tokens_at(self, *, step_is_agreed: bool) -> Future[Counts]:
        """Returns ``[L, E]`` tokens that experts have processed by the end of the step, for a snapshot that begins now.

        Args:
            step_is_agreed: ``receive`` was called for the step, or training has not begun. Else the tokens come when
                the ranks have agreed on the step, even before ``receive`` is called.
        """
        if not step_is_agreed:
            return self._tokens_of_next_step
        tokens: Future[Counts] = Future()
        tokens.set_result(self.run_ledger.tokens.applied.copy())
        return tokens

    def send(self, step: int, tokens: Deferred[StepTokens], pipeline: Pipeline, *, edited: bool = False) -> None:
        """Begins to agree on the end of ``step``. Called by all ranks, once a step.

        Args:
            step: Optimizer steps done.
            tokens: Of this rank.
            pipeline: Of the session.
            edited: See ``StepConsensus``; of this rank.
        """
        applied_before = self.run_ledger.tokens.applied.copy()
        persister, memory, room = pipeline.persister, pipeline.memory, pipeline.room
        ended, outlives, newest = persister.fates(self._newest_ended), memory is not None, self.committed_directory
        if ended:
            self.meter.record_transfers(ended)
        if memory is not None and memory.replicator is not None:
            sent = memory.replicator.send_bytes_per_sec
            self.meter.send_bytes_per_sec = sent or self.meter.send_bytes_per_sec
        status = StepConsensus(
            busy=room.is_short,
            # If so, memory takes the next snapshot, and storage does not.
            storage_busy=persister.in_flight >= self._max_in_flight,
            copies_behind=room.copies_behind,
            used_up=outlives and room.is_used_up,
            tight=outlives and room.is_tight,
            edited=edited,
            gone=outlives and self._leads and newest is not None and persister.is_gone(newest),
            ended=tuple((fate.committed, fate.lost) for fate in ended),
            persist_secs=max((fate.persist_secs for fate in ended), default=None),
            secs=time.monotonic(),
            sends=pipeline.compiler.mirrors.sends,
            measured=self.meter.measured(),
            in_memory=() if memory is None else memory.reports(),
        )
        agreed = self.agreement.send(step, tokens, status)
        total, self._tokens_of_next_step = self._tokens_of_next_step, Future()

        def deliver(agreement: Future[tuple[Counts, Counts]]) -> None:
            """On the thread that agrees."""
            error = agreement.exception()
            if error is None:
                total.set_result(applied_before + tokens.result().split(agreement.result()[0]).applied)
            else:
                total.set_exception(error)

        agreed.add_done_callback(deliver)
        self.sent_step, self.applied = step, total

    def give_up(self) -> None:
        """Ends the wait of a snapshot for the tokens of a step that was never sent, because training failed."""
        upcoming, self._tokens_of_next_step = self._tokens_of_next_step, Future()
        cause = "training failed before the ranks agreed on its tokens"
        upcoming.set_exception(SaveFailedError(self.run_ledger.last_step or 0, (cause,)))

    def receive(self, pipeline: Pipeline) -> StepConsensus:
        """Books the agreement of the newest ``send``, unless that was done. Returns the newest consensus.

        Raises:
            PeerLostError: A peer is gone.
        """
        received = self.agreement.receive()
        if received is not None:
            step, tokens, consensus = received
            self.run_ledger.routed(tokens.applied, tokens.soft, tokens.assigned)
            self.run_ledger.exact(step)
            if tokens.deficit is not None:
                self.run_ledger.deficit = tokens.deficit
            if pipeline.memory is not None:
                self.settle(pipeline.memory, consensus.in_memory)
            numbers = sorted(self.run_ledger.pending)  # snapshots end in this order on rank 0
            for number, (committed, lost) in zip(numbers, consensus.ended, strict=False):
                self._newest_ended = number
                self.meter.resolved(consensus.persist_secs or 0.0)
                snapshot = self.book(number, committed)
                if lost:
                    self._forget()
                self.failures.note(snapshot.contents.window, committed=committed)
            if consensus.gone and not any(committed for committed, _ in consensus.ended):
                self._forget()
            self.consensus = replace(consensus, ended=(), in_memory=(), gone=False)
        return self.consensus

    def settle(self, memory: MemoryTier, maxima: Sequence[int]) -> None:
        """Books which snapshots are complete in memory, by ``memory.reports()`` of all ranks.

        Must not be called while another exchange of these reports is under way.

        Args:
            memory: This rank's.
            maxima: The maximum over ranks of each report.
        """
        for settled in memory.settle(maxima):
            self.run_ledger.in_memory(settled.number, complete=settled.complete, copied=settled.copied)
            if settled.complete and (settled.copied or not self._logs_for_peers):
                continue
            self.anchors.broken(settled.number)
            if self._logs_for_peers and self._leads and self.anchors.log_operators:
                log.info(
                    "a peer lacks the copy of a step, so later gradients are of no use there: %d operators are sent in "
                    "full again",
                    len(self.anchors.log_operators),
                )

    def _forget(self) -> None:
        """Notes that storage lost files: nothing there may be built upon, so that the next checkpoint is complete."""
        self.run_ledger.forget()
        self.committed_directory = None

    def book(self, number: int, committed: bool) -> InFlight:
        """Books the end of a snapshot, and returns its entry."""
        snapshot = self.run_ledger.resolved(number, committed=committed)
        if committed and snapshot.contents.is_checkpoint:
            self.committed_directory = step_dir(snapshot.step, snapshot.identity.generation)
        self._on_end(snapshot, committed)
        return snapshot
