"""A run, its checkpoints and its failures, without tensors: the library's own policies and ledgers, driven by counts.

What a real run does around them is repeated here: a checkpoint begun at one step is committed some steps later and
known to the ledger later still, it can fail or be skipped, and a failure returns to a committed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from moe_ckpt.core.operators import (
    Catalog,
    MoELayer,
    Operator,
    OperatorKind,
    Span,
    expert_id,
    gate_id,
)
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Contents, SnapshotPlan, Step, Tier
from moe_ckpt.core.tokens import Counts, FaultRecord, TokenBook
from moe_ckpt.format.manifest import Manifest, ModelRecord, OperatorRecord
from moe_ckpt.policies.base import MemoryFacts, Policy
from moe_ckpt.run.run_ledger import InFlight, RunLedger, expert_indices


def catalog(layers: int, experts: int) -> Catalog:
    """``layers`` MoE layers of ``experts`` experts, with nothing else but gates."""
    operators: list[Operator] = []
    parameters: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        gate, stack = f"{layer}.gate", f"{layer}.experts"
        parameters |= {gate: (experts, 1), stack: (experts, 1)}
        operators.append(Operator(gate_id(layer), OperatorKind.GATE, (Span(gate),), layer))
        operators += [
            Operator(expert_id(layer, e), OperatorKind.EXPERT, (Span(stack, e, e + 1),), layer, e)
            for e in range(experts)
        ]
    moe = tuple(MoELayer(layer, f"{layer}", experts, 1) for layer in range(layers))
    return Catalog(tuple(operators), moe, parameters)


@dataclass
class _Writing:
    """A checkpoint under way. written, told: steps at whose start it is on storage, and the ledger knows."""

    snapshot: InFlight
    faults: tuple[FaultRecord, ...]
    index: int
    written: int
    told: int
    fails: bool


class SimulatedRun:
    """One run under ``policy``. ``step`` trains one step; ``fail`` ends the process and restarts it.

    store: committed manifests, oldest first. Only the newest ``keep`` stay. storage_every: steps from one checkpoint
    on storage to the next, where memory that outlives the process has all of them; None without such memory.
    """

    def __init__(
        self, policy: Policy, model: Catalog, ranks: int = 1, keep: int = 8, storage_every: int | None = None
    ) -> None:
        policy.check(model)
        self.policy, self.model, self.ranks, self.keep = policy, model, ranks, keep
        self.storage_every, self.stored_at = storage_every, -(storage_every or 0)
        self.store: list[Manifest] = []
        self.generation = -1
        self.sequence = 0
        self._restart()

    def _restart(self) -> None:
        self.run_ledger = RunLedger(self.model, outlives_process=self.storage_every is not None)
        self.now = 0
        self.generation += 1
        self._writing: list[_Writing] = []
        self._saved: Counts = self.run_ledger.tokens.saved[Tier.STORAGE].copy()
        self._holdings: Mapping[str, OperatorRecord] = {}

    def step(
        self, counts: Counts, *, delay: int = 1, tell: int = 0, fails: bool = False, busy: bool = False
    ) -> SnapshotPlan:
        """One optimizer step that routed ``counts`` [L, E], then the policy's turn.

        delay: steps until what is begun now is on storage. tell: further steps until the ledger knows. fails: it is not
        committed. busy: what is planned is skipped.
        """
        self.now += 1
        self._settle()
        self.run_ledger.routed(counts)
        context = self.run_ledger.context(self.now, everywhere(self.model.layers, self.ranks))
        if self.storage_every is not None and self.now < self.stored_at + self.storage_every:
            context = replace(context, memory=MemoryFacts(tiers=frozenset({Tier.HOST})))
        plan = self.policy.plan(context)
        if plan and not context.memory.storage_due:
            self._begun(plan, to_storage=False)
        elif plan and not busy:
            self.stored_at = self.now
            self._begin(plan, delay, tell, fails)
        return plan

    def _begun(self, plan: SnapshotPlan, *, to_storage: bool) -> InFlight:
        """The entry of a snapshot, which is complete in memory at once, if that outlives the process."""
        self.sequence += 1
        identity = Step("simulated", "", self.generation, plan.step, self.sequence)
        contents = Contents(plan.full, plan.memory_only, to_storage=to_storage)
        snapshot = InFlight(identity, contents, self.run_ledger.tokens.applied.copy())
        self.run_ledger.begun(snapshot)
        if self.run_ledger.outlives_process:
            self.run_ledger.in_memory(self.sequence, complete=True)
        return snapshot

    def _begin(self, plan: SnapshotPlan, delay: int, tell: int, fails: bool) -> None:
        faults, index = tuple(self.run_ledger.tokens.faults), self.run_ledger.index
        snapshot = self._begun(plan, to_storage=True)
        before = self._writing[-1] if self._writing else None
        written = max(self.now + delay, before.written if before else 0)
        told = max(written + tell, before.told if before else 0)
        self._writing.append(_Writing(snapshot, faults, index, written, told, fails))
        self._commit(self.now)

    def _settle(self) -> None:
        self._commit(self.now)
        while self._writing and self._writing[0].told <= self.now:
            done = self._writing.pop(0)
            self.run_ledger.resolved(done.snapshot.identity.number, committed=not done.fails)

    def _commit(self, now: int) -> None:
        """As ``commit.commit.Committer`` does it, in the order of the checkpoints."""
        newest = self.store[-1] if self.store else None
        for done in self._writing:
            known = newest is not None and newest.generation == self.generation and newest.step >= done.snapshot.step
            if done.written > now or done.fails or known:
                continue
            book = TokenBook(*self._saved.shape)
            book.saved[Tier.STORAGE] = self._saved
            saved, applied = done.snapshot.contents.full, done.snapshot.applied
            book.mark_saved(Tier.STORAGE, expert_indices(self.model, saved), applied)
            book.applied, book.faults = applied, list(done.faults)
            self._holdings = {
                **self._holdings,
                **{op: OperatorRecord(done.snapshot.step, ()) for op in saved},
            }
            newest = self._manifest(done, book)
            self.store = [*self.store, newest][-self.keep :]

    def _manifest(self, done: _Writing, book: TokenBook) -> Manifest:
        return Manifest(
            run_id="simulated",
            step=done.snapshot.step,
            generation=self.generation,
            world_size=self.ranks,
            index=done.index,
            created_unix_secs=0.0,
            model=ModelRecord(""),
            files=(),
            operators=self._holdings,
            states=(),
            policy=self.policy.describe(),
            tokens=book.to_dict(),
        )

    def fail(self, back: int = 0, survives: Counts | None = None) -> FaultRecord | None:
        """Kill the run now. It returns to the newest committed checkpoint, or ``back`` before it.

        survives: ``[L, E]`` of bool, experts whose copy in host memory is still there (only with the newest one).
        None is returned where nothing was committed and the run begins anew.
        """
        self._commit(self.now)
        newest = self.run_ledger.newest
        self.store = self.store[: len(self.store) - back] if back < len(self.store) else self.store[:1]
        self._restart()
        if not self.store:
            return None
        manifest = self.store[-1]
        held = None
        if survives is not None and newest is not None and newest.step == manifest.step:
            held = np.zeros_like(newest.applied)
            for pair in [
                (self.model.by_id[op].layer, self.model.by_id[op].expert) for op in newest.contents.memory_only
            ]:
                held[pair] = newest.applied[pair] * survives[pair]
        fault = self.run_ledger.resume_from(manifest, same_store=True, tokens_from_host=held)
        self.now = manifest.step
        self._saved = self.run_ledger.tokens.saved[Tier.STORAGE].copy()
        self._holdings = manifest.operators
        return fault
