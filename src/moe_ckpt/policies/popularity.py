"""In which order a sparse window anchors operators, and when that order is made anew (MoEvement, section 3.5).

Experts come in ascending popularity: what is anchored last is frozen longest while a window is replayed, and a frozen
operator needs no weight gradient and no optimizer step, so the most used experts should be those. Ties go by layer,
then by index.

Popularity ``A`` of an expert (appendix B of the paper):

- ``hard_count``: tokens routed to it since the newest window began.
- ``soft_count``: gate probabilities, summed over the same tokens.
- ``time_decayed``: tokens per step, with weights that fall off with age.
- ``capacity_normalised``: ``A / C``, tokens over capacity. ``C`` is the expert's even share of its layer, the layer's
  tokens times top-k over its number of experts: what a capacity factor of 1 would let it take. Its order differs from
  that of ``hard_count`` where layers differ in their number of experts or in top-k. Experts of one layer are taken to
  be alike.

``round_robin`` goes by turns instead, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, repeat
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog, MoELayer, Remembered
from moe_ckpt.core.placement import interleaved_order
from moe_ckpt.core.window import Window
from moe_ckpt.policies.base import DECAYED, GATE_WEIGHTS, TOKENS, PolicyContext

_COUNTED = {"soft_count": GATE_WEIGHTS, "time_decayed": DECAYED, "round_robin": None}
"""What is counted for an order, if it is not tokens (``Needs.popularity``)."""
ORDERS = ("hard_count", "soft_count", "time_decayed", "capacity_normalised", "round_robin")
_ROUNDING = 1e-12
"""Relative error that a quotient of two shares may carry; a change must exceed its threshold by more."""

Shares = Mapping[str, float]
"""Operator id of an expert -> its share of its layer's popularity."""


@dataclass(frozen=True)
class Ordering:
    """Order of operators: a value, part of a policy.

    Attributes:
        kind: One of ``ORDERS``.
        change, experts: An order is made anew when the activation frequency of at least the portion ``experts`` of all
            experts changed by more than the portion ``change`` (``changed``).
    """

    kind: str = "hard_count"
    change: float = 0.10
    experts: float = 0.25

    @property
    def counted(self) -> str | None:
        """See ``Needs.popularity``."""
        return _COUNTED.get(self.kind, TOKENS)

    def order(self, context: PolicyContext) -> tuple[tuple[str, ...], Shares | None]:
        """The order for a window that begins now, and the activation frequencies when it was made.

        The newest window's order is used again, with the frequencies it was made by, unless they changed enough.

        A model without MoE layers has one order: operators from the output side to the input side, the reverse of the
        catalog (appendix E of the paper). While the front is still frozen, a replay's backward pass may end at the
        deepest anchored layer; the other way round it would have to run to the input from the first replay on.
        """
        catalog, former = context.model.catalog, _of_this_model(context)
        if not catalog.experts:
            return tuple(op.id for op in reversed(catalog.operators)), None
        if self.kind == "round_robin":
            return _with_others(catalog, _next_in_turn(context, former)), None
        values = popularity(self.kind, catalog, context.tokens.popularity)
        now = shares(catalog, values)
        if former is not None and not (now and self.changed(former.frequencies, now, len(catalog.experts))):
            return former.order, former.frequencies
        # A stable sort keeps between equals the order of layers, and in each the experts of one owner after another's.
        turns = _in_turns(catalog.layers, context.model.placement.owners)
        ascending = turns[np.argsort(values.numbers[turns], kind="stable")]
        return _with_others(catalog, list(map(values.operators.__getitem__, ascending.tolist()))), now or None

    def changed(self, before: Shares | None, now: Shares, experts: int) -> bool:
        """True when so much has changed that the order should be made anew.

        An expert has changed when its share differs by more than ``change`` of what it was; one that had none, when it
        has any. Experts of layers that got no token since are not in ``now``, and count as unchanged.

        Args:
            before: None if the former order was made without knowing any: then anything known is a change.
            experts: How many the model has.
        """
        if before is None:
            return True
        limit = self.change + _ROUNDING
        if isinstance(before, ByExpert) and isinstance(now, ByExpert) and before.operators is now.operators:
            was, share = before.numbers, now.numbers
        else:
            was, share = _numbers(map(before.get, now, repeat(0.0))), _numbers(now.values())
        moved = np.count_nonzero(np.abs(share - was) > was * limit)
        return bool(moved >= self.experts * experts - _ROUNDING)


def _with_others(catalog: Catalog, experts: Sequence[str]) -> tuple[str, ...]:
    """Gates and non-experts come behind all experts, in the order of the catalog, since every token uses them."""
    return (*experts, *(op.id for op in catalog.always_saved))


class ByExpert(Mapping[str, float]):
    """A number for each of some experts, in the order of their layers: a mapping that is made of an array.

    Attributes:
        operators: Their ids; of all experts of a catalog always the same object.
        numbers: One for each.
    """

    def __init__(self, operators: tuple[str, ...], numbers: npt.NDArray[np.float64]) -> None:
        self.operators, self.numbers = operators, numbers

    @cached_property
    def _by_id(self) -> dict[str, float]:
        return dict(zip(self.operators, self.numbers.tolist(), strict=True))

    def __getitem__(self, operator: str) -> float:
        return self._by_id[operator]

    def __iter__(self) -> Iterator[str]:
        return iter(self.operators)

    def __len__(self) -> int:
        return len(self.operators)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._by_id})"


def popularity(kind: str, catalog: Catalog, counts: npt.NDArray[Any]) -> ByExpert:
    """``A`` of every expert, by its operator id, layer by layer; 0 while nothing is known.

    Args:
        kind: One of ``ORDERS``.
        catalog: Of the model.
        counts: ``TokenFacts.popularity``.
    """
    table = _table(catalog, counts)
    if kind == "capacity_normalised":
        table = [_over_even_share(tokens) for tokens in table]
    return ByExpert(catalog.experts_in_order, np.concatenate([_NONE, *table]))


def shares(catalog: Catalog, values: ByExpert) -> ByExpert:
    """Activation frequency: each expert's share of its layer's popularity. Layers with none are left out."""
    ends = np.cumsum([layer.experts for layer in catalog.layers])
    spans = [(end - layer.experts, end) for layer, end in zip(catalog.layers, ends.tolist(), strict=True)]
    # fsum: the same on every processor, which a vectorised sum is not, so that all ranks decide alike.
    totals = [fsum(values.numbers[first:end].tolist()) for first, end in spans]
    active = [(first, end, total) for (first, end), total in zip(spans, totals, strict=True) if total > 0]
    numbers = np.concatenate([_NONE, *(values.numbers[first:end] / total for first, end, total in active)])
    if len(active) == len(spans):
        return ByExpert(values.operators, numbers)
    return ByExpert(tuple(chain.from_iterable(values.operators[first:end] for first, end, _ in active)), numbers)


_NONE = np.zeros(0)


def _numbers(values: Iterable[float]) -> npt.NDArray[np.float64]:
    return np.fromiter(values, np.float64)


@lru_cache(maxsize=8)
def _in_turns(layers: tuple[MoELayer, ...], owners: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.int64]:
    """Experts layer by layer, one of each owner rank in turn, so that a run of them loads the ranks evenly.

    As places in ``Catalog.experts_in_order``.
    """
    firsts = np.cumsum([0, *(layer.experts for layer in layers)])[:-1].tolist()
    rows = zip(firsts, owners, strict=True)
    return np.array([first + expert for first, row in rows for expert in interleaved_order(row)], dtype=np.int64)


def _table(catalog: Catalog, values: Any) -> list[npt.NDArray[np.float64]]:
    """``[L, E]`` as rows, each as long as its layer has experts; zeros if ``values`` is not of the model's shape."""
    sizes = [layer.experts for layer in catalog.layers]
    if values.shape != (len(sizes), max(sizes, default=0)):
        return [np.zeros(size) for size in sizes]
    return [row[:size] for row, size in zip(values.astype(np.float64), sizes, strict=True)]


def _over_even_share(tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total = fsum(tokens.tolist())
    return tokens * len(tokens) / total if total > 0 else np.zeros(len(tokens))


def _of_this_model(context: PolicyContext) -> Window | None:
    """The newest window, if there is one and it has this model's operators."""
    window = context.run.window
    return window if window is None or _is_of_model(window.slots, context.model.catalog.by_id) else None


def note_proven(catalog: Catalog, window: Window) -> None:
    """The window has just this model's operators, which it takes long to find out."""
    _is_of_model.note(True, window.slots, catalog.by_id)


_is_of_model = Remembered(lambda slots, by_id: set(chain.from_iterable(slots)) == by_id.keys(), most=4)
"""Returns whether slots of a window have just the operators of a model."""


def _next_in_turn(context: PolicyContext, former: Window | None) -> tuple[str, ...]:
    """Experts, one place further than in the former window: in E·L windows each is in every place once.

    With no former window the step decides who begins, so that a run that fails often does not always begin alike.
    """
    experts = context.model.catalog.by_id.keys() - {op.id for op in context.model.catalog.always_saved}
    if former is not None:
        return _rotated([op for op in former.order if op in experts], 1)
    return _rotated([op for op, *_ in context.model.catalog.experts_by_layer], context.run.step)


def _rotated(ops: Sequence[str], places: int) -> tuple[str, ...]:
    at = places % len(ops)
    return (*ops[at:], *ops[:at])
