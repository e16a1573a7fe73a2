"""Runs whose memory has every checkpoint, and whose storage has few: the budget holds whatever fails.

Beside the library's policies and ledgers each run keeps the tokens that every copy of every expert has really seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.moc_sim import catalog
from moe_ckpt import Memory
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Contents, Step, Tier
from moe_ckpt.core.tokens import Counts, FaultRecord, TokenBook
from moe_ckpt.format.manifest import Manifest, ModelRecord, OperatorRecord
from moe_ckpt.policies import Guarded, MoC, MoEtion
from moe_ckpt.policies.selectors import SELECTORS
from moe_ckpt.run.run_ledger import InFlight, RunLedger, expert_indices
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.unit.builders import memory, with_facts
from tests.unit.engine_parts import Life
from tests.unit.test_engine_host_tier import come_back

BUDGET = 0.05


@dataclass
class Saved:
    """A checkpoint in memory or on storage. seen: ``[L, E]`` tokens that the copies in it really saw, 0 where none is.

    applied, faults, lost: as the ledger had them. steps: of each expert's copy; -1 where none is.
    """

    generation: int
    step: int
    index: int
    applied: Counts
    faults: tuple[FaultRecord, ...]
    lost: Counts
    steps: Counts
    seen: Counts
    manifest: Manifest | None = None


class Run:
    """Memory gets every checkpoint, storage one in ``every`` steps. ``step`` trains; ``fail`` ends the process."""

    def __init__(self, policy, model, every: int) -> None:
        self.policy, self.model, self.every = policy, model, every
        self.store: list[Saved] = []
        self.memory: list[Saved] = []
        self.generation = self.sequence = self.now = 0
        self.ledger = RunLedger(model, outlives_process=True)
        self.seen = np.zeros_like(self.ledger.tokens.applied)
        self.writing: list[tuple[int, int, bool, Saved]] = []
        self.stored_at: int | None = None

    def step(self, counts: Counts, *, delay: int = 1, fails: bool = False, complete: bool = True) -> int:
        """One step; returns how many experts its checkpoint holds. delay: steps until storage has it, if it is due."""
        self.now += 1
        self._settle()
        self.ledger.routed(counts)
        self.seen = self.seen + counts
        due = self.stored_at is None or self.now >= self.stored_at + self.every
        context = self.ledger.context(self.now, everywhere(self.model.layers, 1))
        context = with_facts(context, memory=memory(storage_due=due))
        plan = self.policy.plan(context)
        if not plan:
            return 0
        chosen = self.ledger.rescued | set(plan.full)
        stored = tuple(op for op in self.model.everything if op in chosen)
        held = tuple(op for op in plan.memory_only if op not in chosen)
        tokens, index = self.ledger.tokens, self.ledger.index
        self.sequence += 1
        identity, contents = (
            Step("", "", self.generation, self.now, self.sequence),
            Contents(stored, held, to_storage=due),
        )
        self.ledger.begun(InFlight(identity, contents, tokens.applied.copy()))
        saved = self._saved(contents.brings(Tier.HOST, self.model.everything), index)
        self.ledger.in_memory(self.sequence, complete=complete)
        if complete:
            self.memory = [*(each for each in self.memory if each.generation == self.generation), saved]
        if due:
            self.stored_at = None if fails else self.now
            self.writing.append((self.now + delay, self.sequence, fails, self._saved(stored, index)))
        return len(expert_indices(self.model, stored))

    def _saved(self, operators, index) -> Saved:
        tokens, at = self.ledger.tokens, tuple(expert_indices(self.model, operators).T)
        steps, seen = np.full_like(self.seen, -1), np.zeros_like(self.seen)
        steps[at], seen[at] = self.now, self.seen[at]
        lost = tokens.lost_since.copy()
        return Saved(self.generation, self.now, index, tokens.applied.copy(), tuple(tokens.faults), lost, steps, seen)

    def _settle(self) -> None:
        while self.writing and self.writing[0][0] <= self.now:
            _, sequence, fails, saved = self.writing.pop(0)
            # As ``commit.commit``: refused where an expert has no version, since the write that had it has failed.
            committed = not fails and (bool(self.store) or bool((saved.steps >= 0).all()))
            if committed:
                self._commit(saved)
            self.ledger.resolved(sequence, committed=committed)

    def _commit(self, saved: Saved) -> None:
        """As ``commit.commit``: what it does not hold comes from the checkpoint before it."""
        lacks = saved.steps < 0
        book = TokenBook(*saved.applied.shape)
        if self.store:
            before = self.store[-1]
            saved.steps[lacks], saved.seen[lacks] = before.steps[lacks], before.seen[lacks]
            book = TokenBook.from_dict(before.manifest.tokens, *saved.applied.shape)
            if len(before.faults) < len(saved.faults):
                book.saved[Tier.STORAGE] = book.saved[Tier.STORAGE] + saved.lost
        at = book.saved[Tier.STORAGE]
        book.saved = {Tier.STORAGE: np.where(lacks, at, saved.applied)}
        book.applied, book.faults = saved.applied, list(saved.faults)
        saved.manifest = self._manifest(saved, book)
        self.store.append(saved)

    def _manifest(self, saved: Saved, book: TokenBook) -> Manifest:
        record = OperatorRecord(saved.step, ())
        return Manifest(
            run_id="simulated",
            step=saved.step,
            generation=saved.generation,
            world_size=1,
            index=saved.index,
            created_unix_secs=0.0,
            model=ModelRecord(""),
            files=(),
            operators=dict.fromkeys(self.model.everything, record),
            states=(),
            tokens=book.to_dict(),
        )

    def fail(self, *, memory: bool, older: int = 99) -> FaultRecord | None:
        """Kill the run; None if it begins anew.

        memory: It outlives that, with ``older`` of its older snapshots at most.
        """
        self._settle()
        self.writing.clear()
        self.generation += 1
        newest = self.store[-1] if self.store else None
        found = self._kept(older, newest) if memory else []
        self.memory = found
        if found and (newest is None or (found[-1].generation, found[-1].step) >= (newest.generation, newest.step)):
            return self._return_to_memory(found, newest)
        self.memory = []
        if newest is None:
            self.__init__(self.policy, self.model, self.every)
            return None
        self.seen, self.now, self.stored_at = newest.seen.copy(), newest.step, newest.step
        self.ledger = RunLedger(self.model, outlives_process=True)
        return self.ledger.resume_from(newest.manifest, same_store=True, tokens_from_host=None)

    def _kept(self, older: int, beneath: Saved | None) -> list[Saved]:
        """The newest snapshot and ``older`` before it, or more: what storage has not got yet is still being written."""
        first = len(self.memory) - 1 - older
        if beneath is None:
            wholes = [place for place, each in enumerate(self.memory) if (each.steps >= 0).all()]
            first = min(first, max(wholes, default=first))
        return self.memory[max(0, first) :]

    def _return_to_memory(self, found: list[Saved], beneath: Saved | None) -> FaultRecord:
        """As ``reading.memory.memory_checkpoints``: laid over what storage has."""
        top = found[-1]
        assert beneath is not None or any((each.steps >= 0).all() for each in found)
        shape = top.applied.shape
        book = TokenBook.from_dict({} if beneath is None else beneath.manifest.tokens, *shape)
        if beneath is not None and len(beneath.faults) < len(top.faults):
            book.saved[Tier.STORAGE] = book.saved[Tier.STORAGE] + top.lost
        book.applied, book.faults = top.applied.copy(), list(top.faults)
        steps = np.full(shape, -1) if beneath is None else beneath.steps
        self.seen = np.zeros(shape, dtype=np.int64) if beneath is None else beneath.seen.copy()
        held = np.zeros(shape, dtype=np.int64)
        for each in found:  # oldest first
            newer = each.steps > steps
            held[newer], self.seen[newer] = each.applied[newer], each.seen[newer]
        self.now, self.stored_at = top.step, None if beneath is None else beneath.step
        self.ledger = RunLedger(self.model, outlives_process=True)
        return self.ledger.resume_from(
            self._manifest(top, book),
            same_store=beneath is not None,
            tokens_from_host=held,
            beneath=None if beneath is None else beneath.manifest,
        )

    @property
    def lost(self) -> int:
        """Tokens that no live expert has seen, of all that were routed."""
        return int((self.ledger.tokens.applied - self.seen).sum())


def troubled(policy, seed, every, *, steps=120, older=99):
    """Yields the run after every failure. Loads change; storage is late, and fails; memory outlives some failures."""
    rng = np.random.default_rng(seed)
    run = Run(policy, catalog(2, 8), every)
    fault_rate, trouble, gone = rng.uniform(0.01, 0.3), rng.uniform(0, 0.3), rng.uniform(0, 1)
    shares = rng.dirichlet(np.full(8, rng.uniform(0.05, 2)), size=2)
    for _ in range(steps):
        if rng.random() < 0.05:
            shares = rng.dirichlet(np.full(8, rng.uniform(0.05, 2)), size=2)
        counts = rng.multinomial(int(rng.integers(0, 2000)), shares)
        run.step(
            counts,
            delay=int(rng.integers(0, 3)),
            fails=bool(rng.random() < trouble),
            complete=bool(rng.random() > trouble / 3) or not run.memory,
        )
        while rng.random() < fault_rate:
            fault = run.fail(memory=bool(rng.random() > gone), older=int(rng.integers(0, older + 1)))
            if fault is not None:
                yield run, fault


budgeted = st.builds(
    MoC,
    k=st.sampled_from([1, 2, 3]),
    selector=st.sampled_from(sorted(SELECTORS)),
    snapshot_k=st.sampled_from([None, 4]),
    plt_budget=st.sampled_from([BUDGET, 0.01]),
)
guarded = st.builds(
    Guarded,
    policy=st.builds(MoC, k=st.sampled_from([1, 3]), selector=st.sampled_from(sorted(SELECTORS)))
    | st.builds(MoEtion, experts=st.sampled_from([1, 3])),
    budget=st.sampled_from([BUDGET, 0.01]),
)


@settings(max_examples=60, deadline=None)
@example(policy=MoC(k=1, selector="least_loss", plt_budget=BUDGET), seed=3324175746, every=5, older=2)
@given(
    policy=budgeted | guarded,
    seed=st.integers(0, 2**32),
    every=st.sampled_from([1, 5, 25, 1000]),
    older=st.sampled_from([0, 2, 99]),
)
def test_no_sequence_of_faults_breaks_the_budget_with_memory_and_without(policy, seed, every, older):
    """older: how many older snapshots memory has room for at most."""
    budget = policy.budget if isinstance(policy, MoC) else policy.plt_budget
    for run, fault in troubled(policy, seed, every, older=older):
        assert run.ledger.tokens.lost_tokens == run.lost, "each token is lost once"
        assert run.ledger.tokens.plt <= budget
        assert fault.lost_tokens <= budget * fault.routed_tokens


@settings(max_examples=30, deadline=None)
@example(policy=MoEtion(experts=1), seed=1_186_748_566, every=1, older=2)  # its first complete write fails
@given(
    policy=st.builds(MoC, k=st.sampled_from([1, 3]), selector=st.sampled_from(sorted(SELECTORS)))
    | st.builds(MoEtion, experts=st.sampled_from([1, 3])),
    seed=st.integers(0, 2**32),
    every=st.sampled_from([1, 5, 25, 1000]),
    older=st.sampled_from([0, 2, 99]),
)
def test_without_a_budget_lost_tokens_are_counted_once(policy, seed, every, older):
    for run, _ in troubled(policy, seed, every, older=older):
        assert run.ledger.tokens.lost_tokens == run.lost
        assert run.ledger.tokens.plt <= 1


def test_these_runs_lose_more_without_a_budget():
    """They are hard enough: most break every budget where nobody keeps to one."""
    worst = [max((run.ledger.tokens.plt for run, _ in troubled(MoC(), s, 25, older=2)), default=0) for s in range(12)]
    assert sum(plt > 0.075 for plt in worst) > 6


@pytest.fixture
def no_memory_left():
    yield
    host_memory.release_host_memory()


@pytest.mark.parametrize("every", [1000, 3])
def test_real_lives_that_fail_one_after_the_other_lose_each_token_once(tmp_path: Path, every, no_memory_left):
    """Storage has the first step only, or few, so that experts come from there several times."""
    (tmp_path / "memory").mkdir()
    chosen = Memory(directory=tmp_path / "memory", storage_every=every)
    seen = {(layer, e): frozenset[int]() for layer in range(2) for e in range(4)}
    copies: dict[tuple[tuple[int, int], int], frozenset[int]] = {}
    for steps in (3, 1, 1, 2, 1):
        with Life(LocalStorage(tmp_path / "store"), policy=MoC(k=1), memory=chosen) as life:
            if copies:
                restored, _ = come_back(life)
                versions = restored.manifest.operators
                seen = {at: copies[at, versions[f"expert/{at[0]}/{at[1]}"].step] for at in seen}
                lacking = sum((life.step - len(seen[at])) * int(life.counts[at]) for at in seen)
                assert lacking > 0 or every < 1000
                assert life.session.run_ledger.tokens.lost_tokens == lacking
                assert life.session.run_ledger.tokens.plt < 1
            for _ in range(steps):
                life.go(1, settle=True)
                seen = {at: seen[at] | {life.step} for at in seen}
                copies |= {(at, life.step): seen[at] for at in seen}
