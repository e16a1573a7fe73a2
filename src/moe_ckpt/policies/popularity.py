"""Orders the operators of a sparse window, and decides when that order is made anew (MoEvement, section 3.5).

Experts come in ascending popularity. The operator that is anchored last is frozen longest while a window is replayed,
and a frozen operator needs no weight gradient and no optimizer step; so the most used experts come last. Equally
popular experts are ordered by layer, then by index.

Popularity ``A`` of an expert (appendix B of the paper):

- ``hard_count``: tokens routed to it since the newest window began.
- ``soft_count``: gate probabilities, summed over the same tokens.
- ``time_decayed``: tokens per step, with weights that fall off with age.
- ``capacity_normalised``: ``A / C``, tokens over capacity. ``C`` is the expert's even share of its layer, the layer's
  tokens times top-k over its number of experts: what a capacity factor of 1 would let it take. The order differs from
  that of ``hard_count`` if layers differ in their number of experts or in top-k. Experts of one layer are assumed to be
  alike.

``round_robin`` takes experts in turn instead, for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from math import fsum
from typing import Any

import numpy.typing as npt

from moe_ckpt.core.operators import Catalog, MoELayer, Remembered, expert_id, grid_of
from moe_ckpt.core.placement import interleaved_order
from moe_ckpt.core.window import Window
from moe_ckpt.policies.base import DECAYED, GATE_WEIGHTS, TOKENS, PolicyContext

_COUNTED = {"soft_count": GATE_WEIGHTS, "time_decayed": DECAYED, "round_robin": None}
"""``Needs.popularity`` of the orders that do not go by tokens."""
ORDERS = ("hard_count", "soft_count", "time_decayed", "capacity_normalised", "round_robin")
_ROUNDING = 1e-12
"""Relative error of a quotient of two shares; a change must exceed its threshold by more."""

Shares = Mapping[str, float]
"""Operator id of an expert -> its share of its layer's popularity."""


@dataclass(frozen=True)
class Ordering:
    """Orders operators. It is a value, part of a policy.

    Attributes:
        kind: One of ``ORDERS``.
        change: Portion by which an expert's activation frequency must differ for the expert to count as changed.
        experts: Portion of all experts that must have changed before the order is made anew.
    """

    kind: str = "hard_count"
    change: float = 0.10
    experts: float = 0.25

    @property
    def counted(self) -> str | None:
        """The popularity that the order needs (``Needs.popularity``)."""
        return _COUNTED.get(self.kind, TOKENS)

    def order(self, context: PolicyContext) -> tuple[tuple[str, ...], Shares | None]:
        """Returns the order for a window that begins now, and the activation frequencies by which it was made.

        The newest window's order and its frequencies are used again unless frequencies changed enough.

        A model without MoE layers has one order: operators from the output side to the input side, the reverse of the
        catalog (appendix E of the paper). While the front is still frozen, a replay's backward pass may end at the
        deepest anchored layer; in the other order it would have to run to the input from the first replay on.
        """
        catalog, former = context.model.catalog, context.run.window
        if former is not None and not _is_of_model(former.slots, catalog.by_id):
            former = None
        if not catalog.experts:
            return tuple(op.id for op in reversed(catalog.operators)), None
        if self.kind == "round_robin":
            return _with_others(catalog, _next_in_turn(context, former)), None
        values = popularity(self.kind, catalog, context.tokens.popularity)
        frequencies = shares(catalog, values)
        if former is not None and not (
            frequencies and self.changed(former.frequencies, frequencies, len(catalog.experts))
        ):
            return former.order, former.frequencies
        # The sort is stable: among equally popular experts, layers keep their order, and owners take turns.
        turns = _in_turns(catalog.layers, context.model.placement.owners)
        return _with_others(catalog, sorted(turns, key=values.__getitem__)), frequencies or None

    def changed(self, before: Shares | None, now: Shares, experts: int) -> bool:
        """Returns whether so many experts have changed that the order should be made anew.

        An expert has changed if its share differs by more than ``change`` of what it was; one that had none, if it has
        any. Experts of layers without tokens are not in ``now``, and count as unchanged.

        Args:
            before: Shares by which the former order was made; None if none were known: then any are a change.
            now: Shares of the newest steps.
            experts: Number of experts of the model.
        """
        if before is None:
            return True
        limit = self.change + _ROUNDING
        pairs = ((before.get(op, 0.0), share) for op, share in now.items())
        moved = sum(abs(share - was) > was * limit for was, share in pairs)
        return moved >= self.experts * experts - _ROUNDING


def _with_others(catalog: Catalog, experts: Sequence[str]) -> tuple[str, ...]:
    """Returns ``experts``, and behind them gates and non-experts in catalog order, since every token uses those."""
    return (*experts, *(op.id for op in catalog.always_saved))


def popularity(kind: str, catalog: Catalog, counts: npt.NDArray[Any]) -> dict[str, float]:
    """Returns ``A`` of every expert by its operator id, layer by layer; 0 while nothing is known.

    Args:
        kind: One of ``ORDERS``.
        catalog: Of the model.
        counts: ``TokenFacts.popularity``.
    """
    values: list[float] = []
    is_known = counts.shape == grid_of(catalog.layers)
    for layer in catalog.layers:
        row = counts[layer.index, : layer.experts].astype(float).tolist() if is_known else [0.0] * layer.experts
        total = fsum(row)
        if kind == "capacity_normalised" and total > 0:
            row = [tokens * layer.experts / total for tokens in row]
        values += row
    return dict(zip(catalog.experts_in_order, values, strict=True))


def shares(catalog: Catalog, values: Mapping[str, float]) -> dict[str, float]:
    """Returns each expert's activation frequency, its share of its layer's popularity, of layers that have any."""
    frequencies: dict[str, float] = {}
    rows = iter(values.items())
    for layer in catalog.layers:
        row = list(islice(rows, layer.experts))
        # Unlike a vectorised sum, fsum gives the same on every processor, so that all ranks decide alike.
        total = fsum(value for _, value in row)
        if total > 0:
            frequencies |= {expert: value / total for expert, value in row}
    return frequencies


@lru_cache(maxsize=8)
def _in_turns(layers: tuple[MoELayer, ...], owners: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
    """Returns experts layer by layer, one of each owner rank in turn, so that a run of them loads the ranks evenly."""
    pairs = zip(layers, owners, strict=True)
    return tuple(expert_id(layer.index, expert) for layer, row in pairs for expert in interleaved_order(row))


_is_of_model = Remembered(lambda slots, by_id: set(chain.from_iterable(slots)) == by_id.keys(), most=4)
"""Returns whether slots of a window have exactly the operators of a model."""


def _next_in_turn(context: PolicyContext, former: Window | None) -> tuple[str, ...]:
    """Returns experts, one place further in their pipeline stage than in the former window.

    So of a stage with n experts each is in every place once in n windows. (Windows join the slots of all stages.)

    Without a former window the step decides which expert begins, so that a run that fails often does not always begin
    with the same one.
    """
    catalog, stage_of = context.model.catalog, context.model.placement.stage_of
    if former is None:
        experts, places = catalog.experts_in_order, context.run.step % len(catalog.experts)
        return (*experts[places:], *experts[:places])
    stages: dict[int, list[str]] = {}
    for op in filter(catalog.expert_at.__contains__, former.order):
        stages.setdefault(stage_of.get(op, 0), []).append(op)
    return tuple(chain.from_iterable([*experts[1:], experts[0]] for experts in stages.values()))
