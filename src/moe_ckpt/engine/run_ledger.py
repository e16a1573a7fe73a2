"""The ledger of one run, equal on every rank: routed tokens, snapshots under way, and saved versions.

Policies decide from nothing else. Fed by the session: ``routed`` each step, ``begun`` and ``resolved`` for
each snapshot, ``resume_from`` after a restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts, FaultRecord, TokenBook
from moe_ckpt.core.window import Window, operators_at_step
from moe_ckpt.engine.activity import RoutingActivity
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.policies.base import Measured, MemoryFacts, ModelFacts, PolicyContext, RunFacts, TokenFacts


@dataclass(frozen=True, eq=False)
class Pending:
    """A snapshot whose outcome the ranks have not agreed on yet.

    Attributes:
        operators: Go to storage.
        host_only: Stay in host memory besides.
        applied: The token book as of ``step``.
        window, slot: The sparse window that it is a part of.
        stored: It goes to storage at all.
        copied: ``operators`` go to peers, where there are any.
        sends_host_only: So do ``host_only``.
        gradients: What else memory brings to this step, by the gradients that are saved of it.
    """

    catalog: Catalog
    step: int
    generation: int
    operators: tuple[str, ...]
    host_only: tuple[str, ...]
    applied: Counts
    relaid: Mapping[str, int]
    window: Window | None = None
    slot: int = 0
    stored: bool = True
    copied: bool = True
    sends_host_only: bool = True
    gradients: tuple[str, ...] = ()

    @property
    def is_checkpoint(self) -> bool:
        """True if it is self-contained, or ends its sparse window."""
        return self.window is None or self.slot + 1 == self.window.size

    def operators_in(self, tier: Tier) -> tuple[str, ...]:
        """Returns the operators that memory holds in full, or that of peers, once it is a checkpoint there."""
        if self.window is not None:
            return operators_at_step((), self.catalog.everything, self.window, self.slot)
        if tier is Tier.PEER and not self.copied:
            return ()
        full = self._copied if tier is Tier.HOST or self.sends_host_only else self.operators
        if not self.gradients:
            return full
        whole = len(full) + len(self.gradients) == len(self.catalog.everything)
        return self.catalog.everything if whole else (*full, *self.gradients)

    @cached_property
    def _copied(self) -> tuple[str, ...]:
        """The very same object each time, to be known again at once."""
        return (*self.operators, *self.host_only) if self.host_only else self.operators

    @property
    def is_complete(self) -> bool:
        """True if nothing else is needed to open it, and it is of one step."""
        return self.window is None and len(self.operators) == len(self.catalog.everything)

    @cached_property
    def experts(self) -> Counts:
        """``[n, 2]``: ``(layer, expert)`` of what is on storage, as of ``step``, once it is committed."""
        return places(self.catalog, self.stored_operators)

    @property
    def stored_operators(self) -> tuple[str, ...]:
        """Returns the operators that storage has as of ``step``, once it is committed."""
        return operators_at_step(self.operators, self.catalog.everything, self.window, self.slot)


def places(catalog: Catalog, operators: Sequence[str]) -> Counts:
    """``[n, 2]``: ``(layer, expert)`` of the experts among ``operators``."""
    if operators is catalog.everything:
        return catalog.all_experts
    at = catalog.places_of(tuple(operators))
    return catalog.layer_and_expert[at[catalog.is_expert[at]]]


@dataclass
class _Lacks:
    """What is missing.

    Attributes:
        in_memory: The newest sparse window of which some rank's memory will not have a step.
        on_storage: The same of storage.
        everything: Nothing on storage may be built upon (``RunLedger.forget``).
    """

    in_memory: Window | None = None
    on_storage: Window | None = None
    everything: bool = False


class RunLedger:
    """The ledger of saved versions, routing activity, and the snapshots under way.

    Args:
        catalog: Of the model.
        outlives_process: Memory keeps snapshots by itself, whatever becomes of them on storage.

    Attributes:
        ledger: What is safe where, and the tokens.
        activity: What was routed lately.
        index: Checkpoints begun in this run.
        last_step: Step of the newest of them; None before the first.
        committed_step: Of the newest committed checkpoint; None before the first.
        newest: The snapshot for storage that began last, in this life.
        pending: Snapshots under way to storage, by sequence.
        sealing: Snapshots of which it is not known whether every rank has them in its memory, by memory sequence.
        window: The sparse window under way; ``next_slot`` is the place in it that comes next.
        deficit: ``[L, E]`` lost tokens that boosted experts must still make up; None without a boost in this process.
    """

    def __init__(self, catalog: Catalog, *, outlives_process: bool = False) -> None:
        self.catalog = catalog
        self.outlives_process = outlives_process
        self.ledger = Ledger(catalog)
        self.activity = RoutingActivity(self.ledger.tokens.applied.shape)
        self.index = 0
        self.last_step: int | None = None
        self.committed_step: int | None = None
        self.newest: Pending | None = None
        self.pending: dict[int, Pending] = {}
        self.sealing: dict[int, Pending] = {}
        self.window: Window | None = None
        self.next_slot = 0
        self.deficit: Counts | None = None
        self._rescued: frozenset[str] = frozenset()
        self._lacks = _Lacks()

    @property
    def tokens(self) -> TokenBook:
        """Returns the tokens routed, saved and lost."""
        return self.ledger.tokens

    @property
    def popularity(self) -> Counts:
        """``[L, E]`` tokens routed in the newest step, summed over ranks."""
        return self.activity.newest

    def check(self, manifest: Manifest) -> None:
        """Raise ``DamagedError`` unless the checkpoint's MoE layers are those of the catalog.

        Before anything of it is loaded: ``resume_from`` would find the token counts to be of another shape.
        """
        here = [(layer.name, layer.experts) for layer in self.catalog.layers]
        stored = [(layer.name, layer.experts) for layer in manifest.model.layers]
        if here != stored:
            path = f"{manifest.directory}/{MANIFEST_NAME}"
            raise DamagedError(path, f"its MoE layers are {stored}, the model's {here}", step=manifest.step)

    def resume_from(
        self,
        manifest: Manifest,
        *,
        same_store: bool,
        tokens_from_host: Counts | None,
        beneath: Manifest | None = None,
    ) -> FaultRecord:
        """Resume from a restored checkpoint.

        Args:
            manifest: Of it.
            same_store: The run's own store has something of it.
            tokens_from_host: See ``TokenBook.recover``.
            beneath: What the store has, if the checkpoint itself was in memory only.
        """
        tokens = TokenBook.from_dict(manifest.tokens, self.tokens.layers, self.tokens.experts)
        self.ledger.tokens = tokens
        self.index, self.last_step = manifest.index + 1, manifest.step
        fault = tokens.recover(manifest.step, tokens_from_host)
        if self.outlives_process and tokens_from_host is not None:
            self._rescued = self._newer()
        if same_store:
            stored = beneath or manifest
            self.committed_step = stored.step
            book = TokenBook.from_dict(stored.tokens, tokens.layers, tokens.experts)
            tokens.lost_since = tokens.saved[Tier.STORAGE] - book.saved[Tier.STORAGE]
            versions = {op: record.step for op, record in stored.operators.items()}
            if stored.window:
                versions = dict.fromkeys(versions, stored.step)
            self.ledger.restore(versions, book.applied, whole=not stored.window)
        return fault

    def _newer(self) -> frozenset[str]:
        """Experts that came back newer than storage has them: it lacks tokens that the return has not lost."""
        lacks = self.tokens.unsaved() > 0
        return frozenset(op for op, at in self.catalog.expert_at.items() if lacks[at])

    def continue_from(self, tokens: Mapping[str, Any], index: int) -> None:
        """Go on from a dense checkpoint of another kind, which lacks no expert's tokens."""
        self.ledger.tokens = TokenBook.from_dict(tokens, self.tokens.layers, self.tokens.experts)
        self.tokens.saved = {Tier.STORAGE: self.tokens.applied.copy()}
        self.index = index

    def routed(self, applied: Counts, soft: Counts | None = None, assigned: Counts | None = None) -> None:
        """One step's tokens ``[L, E]``, summed over ranks, whose update really ran, and their gate weights.

        Args:
            assigned: What the router assigned, where that is not the same; popularity is computed from it.
        """
        self.tokens.apply(applied)
        self.activity.add(applied if assigned is None else assigned, soft)

    def exact(self, step: int) -> None:
        """``tokens`` are now those of the end of ``step``; a snapshot of it that began earlier gets them."""
        for under_way in (self.pending, self.sealing):
            for sequence, pending in under_way.items():
                if pending.step == step:
                    updated = replace(pending, applied=self.tokens.applied.copy())
                    self.newest = updated if self.newest is pending else self.newest
                    under_way[sequence] = updated

    def begun(self, sequence: int, pending: Pending, memory_sequence: int | None = None) -> None:
        """A snapshot began.

        Args:
            sequence: Of those that go to storage; means nothing if this one does not.
            pending: The snapshot.
            memory_sequence: Of those in memory that outlives the process; None if it is not.
        """
        if pending.stored:
            self.pending[sequence] = self.newest = pending
            self.index += 1
        if memory_sequence is not None:
            self.sealing[memory_sequence] = pending
        self.last_step = pending.step
        self.window, self.next_slot = pending.window, pending.slot + 1
        if pending.slot == 0:
            self.activity.begin_window()

    def in_memory(self, memory_sequence: int, *, complete: bool, copied: bool = False) -> None:
        """Every rank has a snapshot in its memory; or, not ``complete``, one of them will never have it.

        Args:
            memory_sequence: Of the snapshot.
            complete: See above.
            copied: So have the peers of every rank.
        """
        pending = self.sealing.pop(memory_sequence)
        if complete:
            if pending.is_checkpoint:
                operators = pending.operators_in(Tier.HOST)
                self.ledger.hold(operators, pending.step, pending.applied)
                if copied:
                    self.ledger.hold(pending.operators_in(Tier.PEER), pending.step, pending.applied, Tier.PEER)
                self._rescued -= frozenset(operators)
        elif pending.window is not None:
            self._lacks.in_memory = pending.window
            self._end_window_that_is_lost(on_storage=not pending.stored)

    def resolved(self, sequence: int, *, committed: bool) -> Pending:
        """A snapshot ended; what it saved counts from now on, if it was committed."""
        pending = self.pending.pop(sequence)
        if not committed and pending.window is not None:
            self._lacks.on_storage = pending.window
            self._end_window_that_is_lost(in_memory=not self.outlives_process)
        if committed and pending.is_checkpoint:
            in_host = None if self.outlives_process else pending.host_only
            whole = pending.window is None
            self.ledger.record(pending.step, pending.stored_operators, pending.applied, in_host=in_host, whole=whole)
            self.ledger.pay(pending.relaid)
            self._lacks.everything = self._lacks.everything and not pending.is_complete
            self.committed_step = pending.step
        return pending

    def forget(self) -> None:
        """Versions on storage are gone: no partial checkpoint may build on them, as if nothing had been saved."""
        self.ledger.forget()
        self.committed_step = None
        self.give_up_window()
        self._lacks.everything = True

    @property
    def needs_everything(self) -> bool:
        """True after ``forget``, until a checkpoint of everything is under way or committed."""
        return self._lacks.everything and not any(pending.is_complete for pending in self.pending.values())

    def _end_window_that_is_lost(self, *, in_memory: bool = False, on_storage: bool = False) -> None:
        """The window under way ends here if neither will have all of it. While memory may, a bad disk costs it nothing.

        Args:
            in_memory: Memory will not have it, whatever is known of it.
            on_storage: Storage will not.
        """
        in_memory = in_memory or self._lacks.in_memory == self.window
        if in_memory and (on_storage or self._lacks.on_storage == self.window):
            self.give_up_window()

    def give_up_window(self) -> None:
        """No further slot of the window under way will be saved."""
        self.window, self.next_slot = None, 0

    def context(
        self, step: int, placement: Placement, measured: Measured | None = None, popularity: str | None = None
    ) -> PolicyContext:
        """Returns what the ledger tells a policy at ``step``; the planner adds facts about tensors and memory.

        Args:
            step: Optimizer steps done.
            placement: Ranks that hold the model.
            measured: Times and rates.
            popularity: ``Needs.popularity``.
        """
        under_way = [self.pending[sequence] for sequence in sorted(self.pending)]
        unsafe = self.committed_step is None and not any(pending.is_checkpoint for pending in under_way)
        run = RunFacts(
            step=step,
            last_step=self.last_step,
            index=self.index,
            missing=self._missing(under_way),
            nothing_safe=unsafe and self.last_step is not None,
            window=self.window,
            next_slot=self.next_slot,
            faults=tuple(self.tokens.faults),
        )
        tiers = frozenset({Tier.STORAGE, Tier.HOST} if self.outlives_process else {Tier.STORAGE})
        return PolicyContext(
            ModelFacts(self.catalog, placement),
            run,
            measured or Measured(),
            self._token_facts(under_way, popularity),
            MemoryFacts(tiers=tiers),
        )

    @property
    def rescued(self) -> frozenset[str]:
        """Experts whose copies in slots of an earlier life are newer than storage's: the next snapshot must have them.

        Whatever the policy says, because those slots are deleted when a snapshot of this life is complete.
        """
        if not self._rescued:
            return self._rescued
        begun = (pending.operators_in(Tier.HOST) for pending in self.sealing.values())
        return self._rescued.difference(*begun)

    def _token_facts(self, under_way: Sequence[Pending], popularity: str | None) -> TokenFacts:
        """Tokens of each tier, once the snapshots under way are complete there."""
        arriving = {Tier.STORAGE: [(pending.experts, pending) for pending in under_way]}
        sealing = [self.sealing[sequence] for sequence in sorted(self.sealing)]
        for tier in (Tier.HOST, Tier.PEER) if self.outlives_process else ():
            arriving[tier] = [
                (places(self.catalog, pending.operators_in(tier)), pending)
                for pending in sealing
                if tier is Tier.HOST or pending.copied
            ]
        expected, chosen_at = {}, {}
        for tier, snapshots in arriving.items():
            expected[tier] = self.tokens.expecting(((experts, pending.applied) for experts, pending in snapshots), tier)
            chosen_at[tier] = self.ledger.expert_steps(tier)
            for experts, pending in snapshots:
                chosen_at[tier][tuple(experts.T)] = pending.step
        routed, counted = self.tokens.applied.sum(axis=1), self.activity.popularity(popularity)
        return TokenFacts(self.tokens.unsaved(), expected, chosen_at, routed, counted)

    def _missing(self, under_way: Sequence[Pending]) -> tuple[str, ...]:
        """Operators that no checkpoint holds for a partial one to build on, committed or under way."""
        absent = self.ledger.lacking
        for pending in under_way:
            if not pending.is_checkpoint:  # only the last slot of a window makes one, and that may never come
                continue
            if pending.window is not None:
                absent[:] = True
            else:
                absent[self.catalog.places_of(pending.operators)] = False
        if not absent.any():
            return ()
        everything = self.catalog.everything
        return everything if absent.all() else tuple(compress(everything, absent.tolist()))
