"""The books of one run, kept alike on every rank: what was routed, begun, committed and lost.

Policies decide from nothing else. Fed by the session: ``routed`` each step, ``begun`` and ``resolved`` for
each snapshot, ``adopt`` after a restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from moe_ckpt.core.ledger import Ledger
from moe_ckpt.core.operators import Catalog, experts_among
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.tokens import Counts, FaultRecord, TokenBook
from moe_ckpt.core.window import Window
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.policies.base import Activity, Measured, PolicyContext

_DECAY = 0.9
"""Share of the past in the time-decayed activity (see ``policies.base.Activity``)."""


@dataclass(frozen=True, eq=False)
class Pending:
    """A snapshot whose outcome the ranks have not agreed on yet.

    operators: go to storage; held: stay in host memory besides. applied: the token book as of ``step``.
    window, slot: the sparse window that it is a part of.
    """

    catalog: Catalog
    step: int
    generation: int
    operators: tuple[str, ...]
    held: tuple[str, ...]
    applied: Counts
    relaid: Mapping[str, int]
    window: Window | None = None
    slot: int = 0

    @property
    def is_checkpoint(self) -> bool:
        """True if it stands by itself, or ends its sparse window."""
        return self.window is None or self.slot + 1 == self.window.size

    @property
    def is_complete(self) -> bool:
        """True if nothing else is needed to open it, and it is of one step."""
        return self.window is None and len(self.operators) == len(self.catalog.everything)

    @cached_property
    def experts(self) -> Counts:
        """``[n, 2]``: ``(layer, expert)`` of what is on storage, as of ``step``, once it is committed."""
        if self.window is None:
            return places(self.catalog, self.operators)
        return places(self.catalog, self.catalog.everything if self.is_checkpoint else ())


def places(catalog: Catalog, operators: Sequence[str]) -> Counts:
    """``[n, 2]``: ``(layer, expert)`` of the experts among ``operators``."""
    if operators is catalog.everything:
        return catalog.all_experts
    at = catalog.places_of(tuple(operators))
    return catalog.layer_and_expert[at[catalog.is_expert[at]]]


class Books:
    """Token book, ledger and the snapshots under way.

    popularity: ``[L, E]`` tokens routed in the newest step, summed over ranks.
    at_risk_tokens: what the experts of the newest committed step lack.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.tokens = TokenBook(len(catalog.layers), max((layer.experts for layer in catalog.layers), default=0))
        self.ledger = Ledger()
        self._never_saved = catalog.everything
        self.index = 0
        self.last_step: int | None = None
        self.committed_step: int | None = None
        self.newest: Pending | None = None
        self.pending: dict[int, Pending] = {}
        self._committed_at = self._never()
        self.at_risk_tokens = 0
        self.popularity = self.tokens.applied.copy()
        self.window: Window | None = None
        self.next_slot = 0
        self._is_void = False
        self._hard = self.tokens.applied.copy()
        self._soft = np.zeros(self._hard.shape)
        self._decayed = np.zeros(self._hard.shape)

    def _never(self) -> Counts:
        return np.full((self.tokens.layers, self.tokens.experts), -1, dtype=np.int64)

    def check(self, manifest: Manifest) -> None:
        """Raise ``DamagedError`` unless a checkpoint of a model of this fingerprint tells of the catalog's layers.

        Before anything of it is loaded: ``adopt`` would find the token counts to be of another shape.
        """
        here = [(layer.name, layer.experts) for layer in self.catalog.layers]
        there = [(layer.name, layer.experts) for layer in manifest.model.layers]
        if here != there:
            path = f"{manifest.directory}/{MANIFEST_NAME}"
            raise DamagedError(path, f"its MoE layers are {there}, the model's {here}", step=manifest.step)

    def adopt(self, manifest: Manifest, *, same_store: bool, held: Counts | None) -> FaultRecord:
        """Go on from a restored checkpoint. held: see ``TokenBook.recover``."""
        tokens = TokenBook.from_dict(manifest.tokens, self.tokens.layers, self.tokens.experts)
        fault = self._go_on(tokens, manifest.step, manifest.index, held)
        if same_store:
            self.committed_step = manifest.step
            self.at_risk_tokens = int(self.tokens.unsaved().sum())  # of experts that memory had newer than storage
            for op, record in manifest.operators.items():
                step = manifest.step if manifest.window else record.step
                if not manifest.window:
                    self.ledger.record(Tier.STORAGE, step, (op,))
                for layer, expert in experts_among(self.catalog, (op,)):
                    self._committed_at[layer, expert] = step
        return fault

    def _go_on(self, tokens: TokenBook, step: int, index: int, held: Counts | None) -> FaultRecord:
        """From checkpoint number ``index``, which is of ``step`` and has seen ``tokens``."""
        self.tokens = tokens
        self.index, self.last_step = index + 1, step
        return tokens.recover(step, held)

    def continue_from(self, tokens: Mapping[str, Any], index: int) -> None:
        """Go on from a dense checkpoint of another kind, which lacks no expert's tokens."""
        self.tokens = TokenBook.from_dict(tokens, self.tokens.layers, self.tokens.experts)
        self.tokens.saved = {Tier.STORAGE: self.tokens.applied.copy()}
        self.index = index

    def routed(self, applied: Counts, soft: Counts | None = None, assigned: Counts | None = None) -> None:
        """One step's tokens ``[L, E]``, summed over ranks, whose update really ran, and their gate weights.

        assigned: what the router assigned, where that is not the same; popularity goes by it.
        """
        popularity = applied if assigned is None else assigned
        self.tokens.apply(applied)
        self.popularity = popularity
        self._hard = self._hard + popularity
        self._soft = self._soft if soft is None else self._soft + soft
        self._decayed = _DECAY * self._decayed + (1 - _DECAY) * popularity

    def begun(self, sequence: int, pending: Pending) -> None:
        self.pending[sequence] = self.newest = pending
        self.index += 1
        self.last_step = pending.step
        self.window, self.next_slot = pending.window, pending.slot + 1
        if pending.slot == 0:
            self._hard, self._soft = np.zeros_like(self._hard), np.zeros_like(self._soft)

    def resolved(self, sequence: int, *, committed: bool) -> Pending:
        """A snapshot ended; what it saved counts from now on, if it was committed."""
        pending = self.pending.pop(sequence)
        if not committed and pending.window is not None and pending.window == self.window:
            self.give_up_window()
        if committed and pending.is_checkpoint:
            self._hold(pending)
            self.tokens.mark_saved(Tier.STORAGE, pending.experts, pending.applied)
            # The buffer that was written from is kept until the next one is: it holds what storage got, and more.
            in_memory = np.concatenate([pending.experts, places(self.catalog, pending.held)])
            self.tokens.mark_held(in_memory, pending.applied)
            stored = self.tokens.saved[Tier.STORAGE]
            self.at_risk_tokens = int((pending.applied - stored).clip(min=0).sum())
            self.committed_step = pending.step
        return pending

    def forget(self) -> None:
        """What storage held is gone, as far as it may be built upon: as if nothing had ever been saved."""
        self.ledger.forget(Tier.STORAGE)
        self.tokens.forget_saved()
        self._never_saved = self.catalog.everything
        self._committed_at = self._never()
        self.committed_step = None
        self.at_risk_tokens = int(self.tokens.unsaved().sum())
        self.give_up_window()
        self._is_void = True

    @property
    def needs_everything(self) -> bool:
        """True after ``forget``, until a checkpoint of everything is under way or committed."""
        return self._is_void and not any(pending.is_complete for pending in self.pending.values())

    def give_up_window(self) -> None:
        """No further slot of the window under way will be saved."""
        self.window, self.next_slot = None, 0

    def _hold(self, pending: Pending) -> None:
        self._is_void = self._is_void and not pending.is_complete
        # A window's parts are of different steps, so that no partial checkpoint may build on one of them.
        if pending.window is None:
            self.ledger.record(Tier.STORAGE, pending.step, pending.operators)
        self._committed_at[tuple(pending.experts.T)] = pending.step

    def context(self, step: int, ranks: int, popularity: Counts, measured: Measured) -> PolicyContext:
        """Everything a policy may know at ``step``."""
        under_way = [self.pending[sequence] for sequence in sorted(self.pending)]
        chosen_at = self._committed_at.copy()
        for pending in under_way:
            chosen_at[tuple(pending.experts.T)] = pending.step
        return PolicyContext(
            step=step,
            catalog=self.catalog,
            last_step=self.last_step,
            index=self.index,
            chosen_at=chosen_at,
            ranks=ranks,
            missing=self._missing(under_way),
            unsaved={tier: self.tokens.unsaved(tier) for tier in (Tier.STORAGE, Tier.HOST)},
            expected_unsaved=self.tokens.expecting((pending.experts, pending.applied) for pending in under_way),
            popularity=popularity,
            measured=measured,
            faults=tuple(self.tokens.faults),
            lost_tokens=self.tokens.lost_tokens,
            routed_tokens=self.tokens.routed_tokens,
            window=self.window,
            next_slot=self.next_slot,
            activity=Activity(self._hard, self._soft, self._decayed),
            nothing_safe=self.last_step is not None
            and self.committed_step is None
            and not any(pending.is_checkpoint for pending in under_way),
        )

    def _missing(self, under_way: Sequence[Pending]) -> tuple[str, ...]:
        """Operators that no checkpoint holds, committed or under way. What was saved once stays so."""
        self._never_saved = self.ledger.missing(self._never_saved)
        running = {op for pending in under_way for op in pending.operators} if self._never_saved else set()
        return tuple(op for op in self._never_saved if op not in running)

    def oldest_expert_steps(self, step: int) -> int:
        """Steps since the state of the expert whose newest committed copy is the oldest; 0 before the first."""
        held = self._committed_at[self._committed_at >= 0]
        return step - int(held.min()) if held.size else 0

    def expert_steps(self) -> Counts:
        """``[L, E]`` step of each expert's newest committed copy; -1 where there is none yet."""
        return self._committed_at.copy()

    def expert_ages(self, step: int) -> Counts:
        """``[L, E]`` steps since each expert's newest committed copy; -1 where there is none yet."""
        return np.where(self._committed_at < 0, -1, step - self._committed_at)

    @property
    def at_risk_plt(self) -> float:
        """PLT if the run failed now and came back to the newest committed step."""
        routed = self.tokens.routed_tokens
        return (self.tokens.lost_tokens + self.at_risk_tokens) / routed if routed else 0.0
