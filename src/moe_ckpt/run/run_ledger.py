"""The ledger of one run, equal on every rank: routed tokens, snapshots under way, and saved versions.

Policies decide from it alone. The session calls ``routed`` each step, ``begun`` and ``resolved`` for each snapshot, and
``resume_from`` after a restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.step import Contents, Step, Tier
from moe_ckpt.core.tokens import Counts, FaultRecord, TokenBook
from moe_ckpt.core.window import Window
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.ledger.ledger import Ledger
from moe_ckpt.policies.base import (
    DECAYED,
    GATE_WEIGHTS,
    Measured,
    MemoryFacts,
    ModelFacts,
    PolicyContext,
    RunFacts,
    TokenFacts,
)

_DECAY = 0.9
"""Share of the past in the time-decayed activity (see ``policies.base.Needs``)."""
_UNCOUNTED: Counts = np.zeros((0, 0), dtype=np.int64)


class RoutingActivity:
    """Tokens routed in the newest step, since a window began, and with time decay; all ``[L, E]``.

    Attributes:
        newest: Tokens of the newest step, summed over ranks.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.newest: Counts = np.zeros(shape, dtype=np.int64)
        self._decayed = np.zeros(shape)
        # Never written to. New large tables at each step would be fresh memory each time, which is slow.
        self._nothing = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        for table in self._nothing:
            table.setflags(write=False)
        self.begin_window()

    def begin_window(self) -> None:
        """Resets the counts since a window's first slot."""
        self._hard, self._soft = self._nothing

    def add(self, routed: Counts, soft: Counts | None = None) -> None:
        """Adds one step.

        Args:
            soft: Gate weights, if a policy uses them.
        """
        self.newest = routed
        self._hard = self._hard + routed
        self._soft = self._soft if soft is None else self._soft + soft
        self._decayed = _DECAY * self._decayed + (1 - _DECAY) * routed

    def popularity(self, kind: str | None) -> npt.NDArray[Any]:
        """Returns ``TokenFacts.popularity``.

        Args:
            kind: ``Needs.popularity``.
        """
        if kind is None:
            return _UNCOUNTED
        counts = {GATE_WEIGHTS: self._soft, DECAYED: self._decayed}.get(kind, self._hard)
        # If a router does not return its weights, tokens count instead, in all layers, so that these can be compared.
        unweighed = self._hard.any(axis=1) & ~counts.any(axis=1)
        return self._hard if unweighed.any() else counts


@dataclass(eq=False)
class InFlight:
    """A snapshot on whose outcome the ranks have not agreed yet.

    Attributes:
        identity: Of the snapshot.
        contents: Of the snapshot.
        applied: ``[L, E]`` tokens that experts had processed by its step.
        relaid: Operators that had to be saved, each with the change of the layout that required it.
    """

    identity: Step
    contents: Contents
    applied: Counts
    relaid: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.identity.step


def expert_indices(catalog: Catalog, operators: Sequence[str]) -> Counts:
    """Returns ``[n, 2]``: ``(layer, expert)`` of the experts among ``operators``."""
    if operators is catalog.everything:
        return catalog.all_experts
    at = catalog.places_of(tuple(operators))
    return catalog.layer_and_expert[at[catalog.is_expert[at]]]


class RunLedger:
    """The ledger of saved versions, routing activity, and the snapshots under way.

    Args:
        catalog: Of the model.
        outlives_process: Memory keeps snapshots, whether storage has them or not.

    Attributes:
        ledger: Versions in each tier, and the tokens.
        activity: Tokens routed lately.
        index: Checkpoints begun in this run.
        last_step: Step of the newest of them; None before the first.
        committed_step: Step of the newest committed checkpoint; None before the first.
        newest: The snapshot for storage that began last in this life.
        pending: Snapshots under way to storage, by number.
        sealing: Snapshots that some ranks may not have in their memory yet, by number.
        window: The sparse window under way, whose next slot is ``next_slot``.
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
        self.newest: InFlight | None = None
        self.pending: dict[int, InFlight] = {}
        self.sealing: dict[int, InFlight] = {}
        self.window: Window | None = None
        self.next_slot = 0
        self.deficit: Counts | None = None
        self._newest_applied = np.zeros_like(self.tokens.applied)
        self._rescued: frozenset[str] = frozenset()
        self._lost_windows: dict[Tier, int] = {}  # first step of the newest window that some rank's tier will not have
        self._lacks_everything = False  # nothing on storage may be built upon (``forget``)

    @property
    def tokens(self) -> TokenBook:
        """Returns the tokens routed, saved and lost."""
        return self.ledger.tokens

    def check(self, manifest: Manifest) -> None:
        """Raises ``DamagedError`` unless the checkpoint's MoE layers are those of the catalog.

        Call it before anything is loaded, since ``resume_from`` needs token counts of the same shape.
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
        """Resumes from a restored checkpoint.

        Args:
            manifest: Of the checkpoint.
            same_store: The run's own store has a part of it.
            tokens_from_host: See ``TokenBook.recover``.
            beneath: The checkpoint on storage, if the restored one was in memory.
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
        """Returns the experts that were restored from newer copies than storage has."""
        lacks = self.tokens.unsaved() > 0
        return frozenset(op for op, at in self.catalog.expert_at.items() if lacks[at])

    def continue_from(self, tokens: Mapping[str, Any], index: int) -> None:
        """Continues from a dense checkpoint in another format, in which no expert lacks tokens."""
        self.ledger.tokens = TokenBook.from_dict(tokens, self.tokens.layers, self.tokens.experts)
        self.tokens.saved = {Tier.STORAGE: self.tokens.applied.copy()}
        self.index = index

    def routed(self, applied: Counts, soft: Counts | None = None, assigned: Counts | None = None) -> None:
        """Adds the tokens of one step, summed over ranks.

        Args:
            applied, soft, assigned: See ``StepTokens``. Popularity counts ``assigned``.
        """
        self.tokens.apply(applied)
        self._newest_applied = applied
        self.activity.add(applied if assigned is None else assigned, soft)

    def likely(self, step: int) -> Counts:
        """Returns an estimate of the tokens ``[L, E]`` of ``step``, on which the ranks have not agreed yet.

        These are the tokens of the step before, or the mean of all steps if that is more.
        """
        return np.maximum(self._newest_applied, -(-self.tokens.applied // max(1, step - 1)))

    def exact(self, step: int) -> None:
        """Notes that ``tokens`` are now those of the end of ``step``, for a snapshot of the step that began earlier."""
        for snapshot in (*self.pending.values(), *self.sealing.values()):
            if snapshot.step == step:
                snapshot.applied = self.tokens.applied.copy()

    def begun(self, snapshot: InFlight, window: Window | None = None) -> None:
        """Notes that a snapshot began.

        Args:
            snapshot: Its entry.
            window: The sparse window of the snapshot.
        """
        contents = snapshot.contents
        if contents.to_storage:
            self.pending[snapshot.identity.number] = self.newest = snapshot
            self.index += 1
        if self.outlives_process:
            self.sealing[snapshot.identity.number] = snapshot
        self.last_step = snapshot.step
        self.window, self.next_slot = window, contents.slot + 1
        if contents.slot == 0:
            self.activity.begin_window()

    def in_memory(self, number: int, *, complete: bool, copied: bool = False) -> None:
        """Notes the outcome of a snapshot in memory.

        Args:
            number: Of the snapshot.
            complete: Every rank has it; False if one of them never will.
            copied: The peers of every rank have their copies.
        """
        snapshot = self.sealing.pop(number)
        contents = snapshot.contents
        if complete:
            if contents.is_checkpoint:
                operators = contents.brings(Tier.HOST, self.catalog.everything)
                self.ledger.hold(operators, snapshot.step, snapshot.applied)
                if copied:
                    sent = contents.brings(Tier.PEER, self.catalog.everything)
                    self.ledger.hold(sent, snapshot.step, snapshot.applied, Tier.PEER)
                if self._rescued:
                    self._rescued -= frozenset(operators)
        else:
            self._lose_window(contents, Tier.HOST)

    def resolved(self, number: int, *, committed: bool) -> InFlight:
        """Notes the end of a snapshot on storage, whose versions count from now on if it was committed. Returns its
        entry."""
        snapshot = self.pending.pop(number)
        contents, everything = snapshot.contents, self.catalog.everything
        if not committed:
            self._lose_window(contents, Tier.STORAGE)
        elif contents.is_checkpoint:
            in_host = None if self.outlives_process else contents.memory_only
            stored, whole = contents.brings(Tier.STORAGE, everything), contents.window is None
            self.ledger.record(snapshot.step, stored, snapshot.applied, in_host=in_host, whole=whole)
            if snapshot.relaid:
                self.ledger.pay(snapshot.relaid)
            self._lacks_everything = self._lacks_everything and not contents.is_complete(everything)
            self.committed_step = snapshot.step
        return snapshot

    def forget(self) -> None:
        """Forgets all versions on storage, since files are gone: no partial checkpoint may build on them."""
        self.ledger.forget()
        self.committed_step = None
        self.give_up_window()
        self._lacks_everything = True

    @property
    def needs_everything(self) -> bool:
        """True after ``forget``, until a checkpoint of everything is under way or committed."""
        everything = self.catalog.everything
        is_coming = any(snapshot.contents.is_complete(everything) for snapshot in self.pending.values())
        return self._lacks_everything and not is_coming

    def _lose_window(self, contents: Contents, tier: Tier) -> None:
        """Notes that a tier will not have a snapshot, nor its window. Gives up the window under way if no tier will
        have that: a failed disk does not matter while memory may."""
        if contents.window is not None:
            self._lost_windows[tier] = contents.window.start
            tiers = [Tier.HOST] * self.outlives_process + [Tier.STORAGE] * contents.to_storage
            if self.window is not None and all(self._lost_windows.get(tier) == self.window.start for tier in tiers):
                self.give_up_window()

    def give_up_window(self) -> None:
        """Gives up the window under way: no further slot of it will be saved."""
        self.window, self.next_slot = None, 0

    def context(
        self, step: int, placement: Placement, measured: Measured | None = None, popularity: str | None = None
    ) -> PolicyContext:
        """Returns the context of a policy at ``step``; the planner adds facts about tensors and memory.

        Args:
            step: Optimizer steps done.
            placement: Ranks of the operators.
            measured: Times and rates.
            popularity: ``Needs.popularity``.
        """
        under_way = [self.pending[number] for number in sorted(self.pending)]
        unsafe = self.committed_step is None and not any(one.contents.is_checkpoint for one in under_way)
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
        """Experts whose copies in slots of an earlier life are newer than those on storage.

        The next snapshot must have them, whatever the plan, since those slots are deleted when a snapshot of this life
        is complete.
        """
        if not self._rescued:
            return self._rescued
        everything = self.catalog.everything
        begun = (snapshot.contents.brings(Tier.HOST, everything) for snapshot in self.sealing.values())
        return self._rescued.difference(*begun)

    def _token_facts(self, under_way: Sequence[InFlight], popularity: str | None) -> TokenFacts:
        """Returns the tokens that each tier will have once the snapshots under way are complete there."""
        going = {Tier.STORAGE: under_way}
        if self.outlives_process:
            going[Tier.HOST] = [self.sealing[number] for number in sorted(self.sealing)]
            going[Tier.PEER] = [snapshot for snapshot in going[Tier.HOST] if snapshot.contents.to_peers]
        everything, expected, chosen_at = self.catalog.everything, {}, {}
        for tier, snapshots in going.items():
            arriving = [(expert_indices(self.catalog, one.contents.brings(tier, everything)), one) for one in snapshots]
            expected[tier] = self.tokens.expecting([(experts, one.applied) for experts, one in arriving], tier)
            chosen_at[tier] = self.ledger.expert_steps(tier)
            for experts, snapshot in arriving:
                chosen_at[tier][tuple(experts.T)] = snapshot.step
        routed, counted = self.tokens.applied.sum(axis=1), self.activity.popularity(popularity)
        return TokenFacts(self.tokens.unsaved(), expected, chosen_at, routed, counted)

    def _missing(self, under_way: Sequence[InFlight]) -> tuple[str, ...]:
        """Returns the operators of which no checkpoint, committed or under way, has a version to build on."""
        absent = self.ledger.lacking
        for contents in (snapshot.contents for snapshot in under_way):
            if not contents.is_checkpoint:  # only the last slot of a window makes one, and that may never come
                continue
            if contents.window is not None:
                absent[:] = True
            else:
                absent[self.catalog.places_of(contents.full)] = False
        return self.catalog.ids_of(absent) if absent.any() else ()
