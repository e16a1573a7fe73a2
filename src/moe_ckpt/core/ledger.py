"""Which version of every operator is safe in which tier, and which step is therefore recoverable.

"Newest consistent" is computed here and nowhere else. Pure bookkeeping: the engine records what it
committed, the recovery planner and the policies read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moe_ckpt.core.plan import Fidelity, Tier


@dataclass(frozen=True, order=True)
class Version:
    """One saved state of an operator: the optimizer step it belongs to."""

    step: int
    fidelity: Fidelity = field(default=Fidelity.FULL, compare=False)


@dataclass
class Ledger:
    """Newest version of every operator, per tier."""

    _versions: dict[Tier, dict[str, Version]] = field(default_factory=dict)
    _newest_step: dict[Tier, int] = field(default_factory=dict)

    def record(self, tier: Tier, step: int, operators: Iterable[str], fidelity: Fidelity = Fidelity.FULL) -> None:
        """Note that ``operators`` are now held by ``tier`` as of ``step``. Called after commit, never before.

        Raises:
            ValueError: a newer version is recorded already; versions only move forward within a run.
        """
        held = self._versions.setdefault(tier, {})
        named = dict.fromkeys(operators, Version(step, fidelity))
        newest = self._newest_step.get(tier, step)
        if step < newest:
            for op in named:
                if op in held and held[op].step > step:
                    raise ValueError(f"{op} is recorded at step {held[op].step}, cannot go back to step {step}")
        held.update(named)
        self._newest_step[tier] = max(step, newest)

    def forget(self, tier: Tier) -> None:
        """Everything that ``tier`` held is gone: its operators are missing again."""
        self._versions.pop(tier, None)
        self._newest_step.pop(tier, None)

    def versions(self, tier: Tier = Tier.STORAGE) -> Mapping[str, Version]:
        return dict(self._versions.get(tier, {}))

    def missing(self, operators: Iterable[str], tier: Tier = Tier.STORAGE) -> tuple[str, ...]:
        """The operators that this tier has never held: a partial checkpoint must include them."""
        held = self._versions.get(tier, {})
        return tuple(op for op in operators if op not in held)

    def oldest_step(self, tier: Tier = Tier.STORAGE) -> int | None:
        """Step of the stalest operator, or None if the tier is empty."""
        held = self._versions.get(tier, {})
        return min((v.step for v in held.values()), default=None)

    def newest(self, tiers: Iterable[Tier]) -> Mapping[str, tuple[Tier, Version]]:
        """For every operator the newest version that any of the surviving ``tiers`` holds.

        Ties go to the tier named first (give the fastest first).
        """
        best: dict[str, tuple[Tier, Version]] = {}
        for tier in tiers:
            for op, version in self._versions.get(tier, {}).items():
                if op not in best or version.step > best[op][1].step:
                    best[op] = (tier, version)
        return best
