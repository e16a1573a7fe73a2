"""Counts tokens: routed, not yet saved, and lost.

All counts are exact integers of shape ``[L, E]`` (layers with fewer experts are padded with zeros). Callers pass sums
over the ranks that train the same experts, so that every rank decides and reports alike.

PLT, the portion of lost tokens (MoC/PEC, section 3): over all recoveries, the tokens whose updates the recovered
experts lack, divided by tokens * k summed over MoE layers, for the whole run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from moe_ckpt.core.step import Tier
from moe_ckpt.errors import ConfigError

Counts = npt.NDArray[np.int64]
Experts = Iterable[tuple[int, int]] | Counts
"""``(layer, expert)`` of some experts, also as ``[n, 2]``."""
NO_COUNTS: Counts = np.zeros((0, 0), dtype=np.int64)


WINDOW_BEGAN = "window_began"
"""Further key beside those of ``TokenBook.to_dict``: XXH3-64 of the tokens applied by a window's first
step, as little-endian integers of 64 bits."""


def window_began(first: Counts | None) -> dict[str, str]:
    """Returns the further entry that the tokens of a window have.

    Args:
        first: ``[L, E]`` tokens applied by its first step; None for a checkpoint without a window.
    """
    if first is None:
        return {}
    return {WINDOW_BEGAN: xxhash.xxh3_64_hexdigest(np.ascontiguousarray(first, dtype="<i8").data)}


@dataclass(frozen=True)
class FaultRecord:
    """One recovery: the step that it returned to, and the tokens whose updates its experts lack.

    Attributes:
        restored_step: Step that the run returned to.
        lost_tokens: Token-expert pairs that were lost.
        stale_experts: Experts that came back older than ``restored_step``.
        routed_tokens: Token-expert pairs of the run up to ``restored_step``.
        mlt: MLT of this recovery (``tokens_at_risk``).
        lacking: ``[L, E]`` the lost tokens; None if the record was read from a checkpoint.
    """

    restored_step: int
    lost_tokens: int
    stale_experts: int
    routed_tokens: int = 0
    mlt: float = 0.0
    lacking: Counts | None = field(default=None, compare=False, repr=False)


def fault_rows(faults: Iterable[FaultRecord]) -> dict[str, list[Any]]:
    """Returns ``faults`` as plain data: whole numbers in rows, and ``mlt`` beside them."""
    listed = tuple(faults)
    rows = [[f.restored_step, f.lost_tokens, f.stale_experts, f.routed_tokens] for f in listed]
    return {"faults": rows, "mlt": [fault.mlt for fault in listed]}


def faults_in(data: Mapping[str, Any]) -> list[FaultRecord]:
    """Inverse of ``fault_rows``."""
    rows = zip(data["faults"], data["mlt"], strict=True)
    return [FaultRecord(restored, lost, stale, routed, mlt) for (restored, lost, stale, routed), mlt in rows]


@dataclass(frozen=True, eq=False)
class AtRisk:
    """The tokens that a return to a checkpoint would lose.

    Attributes:
        lacking: ``[L, E]`` tokens that the checkpoint's experts have not seen.
        routed: ``[L, E]`` all tokens of the run by the checkpoint's step.
    """

    lacking: Counts
    routed: Counts

    # Cached: they are needed at each step, and numpy lets other threads run while it adds up a table.

    @cached_property
    def tokens(self) -> int:
        return int(self.lacking.sum())

    @cached_property
    def mlt(self) -> float:
        """MLT of a recovery that returns to the checkpoint."""
        return tokens_at_risk(self.lacking, self.routed)


def tokens_at_risk(unsaved: Counts, routed: Counts) -> float:
    """Returns the portion of tokens that a failure would lose: of each MoE layer's tokens, mean over layers; in [0, 1].

    MoEtion (arXiv 2412.15411 v1), section 4.1: with ``unsaved`` as of a checkpoint it is MLT, the momentary lost tokens
    of a recovery from that checkpoint. The paper writes a sum over layers, but its thresholds are about the mean (no
    harm up to 3 %, steep from 6 %; the authors dropped that portion of tokens in every layer).

    Args:
        unsaved: ``[L, E]`` tokens that the recovered experts would lack.
        routed: ``[L, E]`` tokens routed in the period in question, such as ``TokenBook.applied`` for the run so far. A
            layer without tokens has none at risk.
    """
    if not len(routed):
        return 0.0
    lost, totals = unsaved.sum(axis=1).tolist(), routed.sum(axis=1).tolist()
    return fsum(part / whole for part, whole in zip(lost, totals, strict=True) if whole) / len(totals)


@dataclass
class TokenBook:
    """The applied, saved and lost tokens of one run. ``to_dict`` carries them over restarts.

    Attributes:
        layers: L.
        experts: E.
        applied: ``[L, E]`` tokens whose optimizer update was made, since the run began.
        saved: Tier -> ``[L, E]`` value of ``applied`` that each expert's newest copy in that tier has seen. It includes
            tokens lost in later recoveries, since no copy can bring those back.
        faults: Recoveries so far.
        lost_since: ``[L, E]`` the lost tokens in ``saved[Tier.STORAGE]`` that the checkpoint does not know of from
            which the run went on, or over which memory was laid.
    """

    layers: int
    experts: int
    applied: Counts = field(init=False)
    saved: dict[Tier, Counts] = field(init=False)
    faults: list[FaultRecord] = field(init=False, default_factory=list)
    lost_since: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.applied = self._zeros()
        self.saved = {Tier.STORAGE: self._zeros()}
        self.lost_since = self._zeros()

    def _zeros(self) -> Counts:
        return np.zeros((self.layers, self.experts), dtype=np.int64)

    def apply(self, counts: Counts) -> None:
        """Adds one step's routed tokens ``[L, E]``. To be called only if the update was made."""
        self.applied += counts

    def mark_saved(self, tier: Tier, experts: Experts, at: Counts) -> None:
        """Notes that ``tier`` has ``experts`` in the state that had seen ``at`` tokens.

        Args:
            tier: The tier that has the experts.
            experts: ``(layer, expert)`` of each.
            at: ``[L, E]`` copy of ``applied`` from when the snapshot began; the commit comes later.
        """
        if tier not in self.saved:
            self.saved[tier] = self._zeros()
        self._mark(self.saved[tier], experts, at)

    def _mark(self, saved: Counts, experts: Experts, at: Counts) -> None:
        listed = experts if isinstance(experts, np.ndarray) else np.asarray(list(experts), dtype=np.int64)
        rows, columns = listed.reshape(-1, 2).T
        where = rows * self.experts + columns  # one index instead of two: that is much faster
        flat = saved.reshape(-1)
        flat[where] = np.maximum(flat[where], at.reshape(-1)[where])

    def unsaved(self, tier: Tier = Tier.STORAGE) -> Counts:
        """Returns ``U[l][e]``, tokens routed to the expert since its newest copy in ``tier`` or on storage."""
        saved = self.saved[Tier.STORAGE]
        in_memory = None if tier is Tier.STORAGE else self.saved.get(tier)
        return self.applied - (saved if in_memory is None else np.maximum(saved, in_memory))

    def expecting(self, under_way: Iterable[tuple[Experts, Counts]], tier: Tier = Tier.STORAGE) -> Counts:
        """Returns ``unsaved`` as it will be once the saves ``(experts, at)`` that are under way are committed."""
        later = self.applied - self.unsaved(tier)
        for experts, at in under_way:
            self._mark(later, experts, at)
        return self.applied - later

    def mark_in_host(self, experts: Experts, at: Counts) -> None:
        """Notes that this node's memory now has ``experts`` as of ``at``, and nothing older."""
        self.saved[Tier.HOST] = self.saved[Tier.STORAGE].copy()
        self.mark_saved(Tier.HOST, experts, at)

    def forget_saved(self) -> None:
        """Notes that no tier has anything any more."""
        self.saved = {Tier.STORAGE: self._zeros()}

    def recover(self, restored_step: int, tokens_from_host: Counts | None = None) -> FaultRecord:
        """Books the loss of a recovery.

        Tokens that the restored copies lack are lost. Tokens that they have seen but storage has not stay unsaved.

        Args:
            restored_step: Step of the recovery, and of this book.
            tokens_from_host: ``[L, E]`` tokens seen by the copies that came from surviving host memory; 0 for experts
                that came from storage. None if all came from storage.
        """
        stored = self.saved[Tier.STORAGE]
        lacking = self.applied - (stored if tokens_from_host is None else np.maximum(stored, tokens_from_host))
        lost, stale = int(lacking.sum()), int((lacking > 0).sum())
        mlt = tokens_at_risk(lacking, self.applied)
        record = FaultRecord(restored_step, lost, stale, self.routed_tokens, mlt, lacking)
        self.faults.append(record)
        self.saved = {Tier.STORAGE: stored + lacking}
        return record

    @property
    def routed_tokens(self) -> int:
        """Sum over MoE layers of tokens * k: the denominator of PLT."""
        return int(self.applied.sum())

    @property
    def lost_tokens(self) -> int:
        return sum(fault.lost_tokens for fault in self.faults)

    @property
    def plt(self) -> float:
        """Portion of lost tokens of the run so far, at least 0; 0 before anything was routed."""
        return self.plt_after(0)

    def plt_after(self, more: int) -> float:
        """Returns PLT as it would be if a recovery lost so many tokens more."""
        lost = self.lost_tokens + more
        routed = self.routed_tokens if lost else 0
        return lost / routed if routed else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns the book as plain data."""
        return {
            "applied": self.applied.tolist(),
            "saved": {tier.value: counts.tolist() for tier, counts in self.saved.items()},
            **fault_rows(self.faults),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], layers: int, experts: int) -> TokenBook:
        """Inverse of ``to_dict``; an empty book if ``data`` is empty.

        Raises:
            ValueError: The stored counts have another shape than ``[layers, experts]``.
        """
        book = cls(layers, experts)
        if not data:
            return book
        book.applied = book._checked(data["applied"])
        book.saved |= {Tier(tier): book._checked(counts) for tier, counts in data["saved"].items()}
        book.faults = faults_in(data)
        return book

    def _checked(self, counts: Any) -> Counts:
        array = np.asarray(counts, dtype=np.int64)
        expected = (self.layers, self.experts)
        # JSON knows only one empty array, so a model without MoE layers comes back as shape (0,).
        if array.shape != expected and (array.size or self.layers * self.experts):
            raise ValueError(f"token counts have shape {array.shape}, the model has {expected}")
        return array.reshape(expected).copy()


def normalized_hhi(counts: Counts, experts: Sequence[int] | None = None) -> npt.NDArray[np.float64]:
    """Returns ``[L]`` skewness ``S`` of each layer's load: 0 if every expert gets the same, 1 if one gets everything.

    ``HHI = sum p^2``, ``S = (HHI - 1/E) / (1 - 1/E)`` (MoEvement, NSDI'26, appendix D), where ``p`` is the share of
    the layer's tokens that an expert gets. A layer that got no token, or has one expert, is not skewed: 0.

    Args:
        counts: ``[L, E_max]`` tokens per expert; layers with fewer experts are padded with zeros.
        experts: Number of experts of each layer, ``E_max`` for all if None.

    Raises:
        ConfigError: Shapes do not fit, a count is negative, or there are tokens beyond a layer's experts.
    """
    table = np.asarray(counts, dtype=np.float64)
    if table.ndim != 2:
        raise ConfigError(f"normalized_hhi: counts have shape {table.shape}, wanted [layers, experts]")
    layers, width = table.shape
    numbers = np.full(layers, width) if experts is None else np.asarray(experts, dtype=np.int64)
    _check(table, numbers)
    total = table.sum(axis=1)
    skewed = (total > 0) & (numbers > 1)
    shares = table / np.where(total > 0, total, 1.0)[:, None]
    even = 1.0 / np.where(skewed, numbers, 2)
    skew = ((shares**2).sum(axis=1) - even) / (1.0 - even)
    return np.where(skewed, skew.clip(0.0, 1.0), 0.0)  # clip: an even load may round to just below 0


def _check(table: npt.NDArray[np.float64], numbers: npt.NDArray[np.int64]) -> None:
    layers, width = table.shape
    if numbers.shape != (layers,) or (layers and not 1 <= numbers.min() <= numbers.max() <= width):
        raise ConfigError(
            f"normalized_hhi: experts={numbers.tolist()} does not fit counts of shape {table.shape}: "
            f"give one number between 1 and {width} for each of the {layers} layers"
        )
    if table.size and table.min() < 0:
        raise ConfigError("normalized_hhi: a count of tokens is negative")
    if table[np.arange(width) >= numbers[:, None]].any():
        raise ConfigError(f"normalized_hhi: tokens beyond a layer's experts, experts={numbers.tolist()}")
