"""The books of one run, kept alike on every rank: what was routed, begun, committed and lost.

Policies decide from nothing else. Fed by the session: ``routed`` each step, ``begun`` and ``resolved`` for
each snapshot, ``adopt`` after a restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts, FaultRecord, TokenBook
from moe_ckpt.engine.commit import experts_among
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.policies.base import Measured, PolicyContext


@dataclass(frozen=True, eq=False)
class Pending:
    """A snapshot whose outcome the ranks have not agreed on yet.

    operators: go to storage; held: stay in host memory besides. applied: the token book as of ``step``.
    """

    catalog: Catalog
    step: int
    generation: int
    operators: tuple[str, ...]
    held: tuple[str, ...]
    applied: Counts
    relaid: Mapping[str, int]

    @cached_property
    def experts(self) -> list[tuple[int, int]]:
        """``(layer, expert)`` of what goes to storage."""
        return experts_among(self.catalog, self.operators)


class Books:
    """Token book, ledger and the snapshots under way.

    popularity: ``[L, E]`` tokens routed in the newest step, summed over ranks.
    at_risk_tokens: what the experts of the newest committed step lack.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.tokens = TokenBook(len(catalog.layers), max((layer.experts for layer in catalog.layers), default=0))
        self.ledger = Ledger()
        self.index = 0
        self.last_step: int | None = None
        self.committed_step: int | None = None
        self.newest: Pending | None = None
        self.pending: dict[int, Pending] = {}
        self._committed_at = self._never()
        self.at_risk_tokens = 0
        self.popularity = self.tokens.applied.copy()

    def _never(self) -> Counts:
        return np.full((self.tokens.layers, self.tokens.experts), -1, dtype=np.int64)

    def adopt(self, manifest: Manifest, *, same_store: bool, held: Counts | None) -> FaultRecord:
        """Go on from a restored checkpoint. held: see ``TokenBook.recover``."""
        self.tokens = TokenBook.from_dict(manifest.tokens, self.tokens.layers, self.tokens.experts)
        fault = self.tokens.recover(manifest.step, held)
        self.index = manifest.index + 1
        self.last_step = manifest.step
        if same_store:
            self.committed_step = manifest.step
            self.at_risk_tokens = int(self.tokens.unsaved().sum())  # of experts that memory had newer than storage
            for op, record in manifest.operators.items():
                self._hold(record.step, (op,))
        return fault

    def continue_from(self, tokens: Mapping[str, Any], index: int) -> None:
        """Go on from a dense checkpoint of another kind, which lacks no expert's tokens."""
        self.tokens = TokenBook.from_dict(tokens, self.tokens.layers, self.tokens.experts)
        self.tokens.saved = {Tier.STORAGE: self.tokens.applied.copy()}
        self.index = index

    def routed(self, popularity: Counts) -> None:
        """One step's tokens ``[L, E]``, summed over ranks, whose update really ran."""
        self.tokens.apply(popularity)
        self.popularity = popularity

    def begun(self, sequence: int, pending: Pending) -> None:
        self.pending[sequence] = self.newest = pending
        self.index += 1
        self.last_step = pending.step

    def resolved(self, sequence: int, *, committed: bool) -> Pending:
        """A snapshot ended; what it saved counts from now on, if it was committed."""
        pending = self.pending.pop(sequence)
        if committed:
            self._hold(pending.step, pending.operators)
            self.tokens.mark_saved(Tier.STORAGE, pending.experts, pending.applied)
            # The buffer that was written from is kept until the next one is: it holds what storage got, and more.
            self.tokens.mark_held(pending.experts + experts_among(self.catalog, pending.held), pending.applied)
            stored = self.tokens.saved[Tier.STORAGE]
            self.at_risk_tokens = int((pending.applied - stored).clip(min=0).sum())
            self.committed_step = pending.step
        return pending

    def _hold(self, step: int, operators: tuple[str, ...]) -> None:
        self.ledger.record(Tier.STORAGE, step, operators)
        for layer, expert in experts_among(self.catalog, operators):
            self._committed_at[layer, expert] = step

    def context(self, step: int, ranks: int, popularity: Counts, measured: Measured) -> PolicyContext:
        """Everything a policy may know at ``step``."""
        under_way = [self.pending[sequence] for sequence in sorted(self.pending)]
        running = {op for pending in under_way for op in pending.operators}
        never_saved = self.ledger.missing(op.id for op in self.catalog.operators)
        chosen_at = self._committed_at.copy()
        for pending in under_way:
            for layer, expert in pending.experts:
                chosen_at[layer, expert] = pending.step
        return PolicyContext(
            step=step,
            catalog=self.catalog,
            last_step=self.last_step,
            index=self.index,
            chosen_at=chosen_at,
            ranks=ranks,
            missing=tuple(op for op in never_saved if op not in running),
            unsaved={tier: self.tokens.unsaved(tier) for tier in (Tier.STORAGE, Tier.HOST)},
            expected_unsaved=self.tokens.expecting((pending.experts, pending.applied) for pending in under_way),
            popularity=popularity,
            measured=measured,
            faults=tuple(self.tokens.faults),
            lost_tokens=self.tokens.lost_tokens,
            routed_tokens=self.tokens.routed_tokens,
        )

    def oldest_expert_steps(self, step: int) -> int:
        """Steps since the state of the expert whose newest committed copy is the oldest; 0 before the first."""
        held = self._committed_at[self._committed_at >= 0]
        return step - int(held.min()) if held.size else 0

    def expert_ages(self, step: int) -> Counts:
        """``[L, E]`` steps since each expert's newest committed copy; -1 where there is none yet."""
        return np.where(self._committed_at < 0, -1, step - self._committed_at)

    @property
    def at_risk_plt(self) -> float:
        """PLT if the run failed now and came back to the newest committed step."""
        routed = self.tokens.routed_tokens
        return (self.tokens.lost_tokens + self.at_risk_tokens) / routed if routed else 0.0
