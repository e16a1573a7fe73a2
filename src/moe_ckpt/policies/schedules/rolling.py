"""A rolling schedule: at each step some operators are anchored, and of all others the consumed gradients are saved.

W steps make a round, in which every operator is anchored once. With ``f`` bytes per parameter in full (12 in mixed
precision: master weight and two moments) and ``g`` of gradient, a step weighs ``f/W + g (W - 1)/W`` per parameter. The
more steps a round has, the closer that is to ``g``, and the longer a replay. A sparse window (MoEvement, section 3.2)
weighs ``f/W + 2 (W - 1)/(2 W)``, since half of its operators, on average, need nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np

from moe_ckpt.core.anchors import MOST_SLOTS
from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Lane, OperatorBytes, balance, lanes_of, merge_coupled, pack, side_by_side

Slots = tuple[tuple[str, ...], ...]
"""Per step of a round, the operators that are anchored."""


@dataclass(frozen=True)
class LoggedBytes:
    """Size of one operator in the whole model.

    Attributes:
        full: Master weights, or weights where there are none, and optimizer state.
        gradient: What the optimizer consumes in one update.
        weights: See ``OperatorBytes``.
    """

    full: int
    gradient: int
    weights: int = 0


def bytes_per_parameter(window: int, gradient: float, full: float = 12.0) -> float:
    """Returns the bytes that each step saves per parameter, with rounds of ``window`` steps.

    Raises:
        ValueError: ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"a round of {window} steps")
    return full / window + gradient * (window - 1) / window


def held_bytes_per_parameter(window: int, gradient: float, full: float = 12.0, slots: int = MOST_SLOTS) -> float:
    """Returns the bytes per parameter that the newest step of a log needs: anchors, and the gradients since.

    An operator's gradients go when it is anchored again: of W - 1 steps half are there on average. Where operators of
    several steps share a slot, they stay until the last of these is anchored.

    Args:
        window: Steps of a round.
        gradient: Bytes of a gradient per parameter.
        full: Bytes in full.
        slots: Most slots of gradients of one step.

    Raises:
        ValueError: ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"a round of {window} steps")
    together = max(1.0, window / slots)
    return full + gradient * (window + together - 2) / 2


def most_held_bytes_per_parameter(window: int, gradient: float, full: float = 12.0, slots: int = MOST_SLOTS) -> float:
    """Returns the most that the newest step needs: at the end of the first round after a dense step, which stays whole
    until every operator has a newer anchor.

    Args:
        window: See ``held_bytes_per_parameter``.
        gradient: Likewise.
        full: Likewise.
        slots: Likewise.

    Raises:
        ValueError: ``window`` is below 1.
    """
    return held_bytes_per_parameter(window, gradient, full, slots) + full * (window - 1) / window


def saved_factor(gradient: float, full: float = 12.0) -> float:
    """Returns how many times fewer bytes a gradient has than the full state (MoEtion: up to 5, in Algorithm 3)."""
    return full / gradient


def slot_bytes(slots: Sequence[Iterable[str]], sizes: Mapping[str, LoggedBytes]) -> tuple[int, ...]:
    """Returns what each step of a round saves, all ranks together: its anchors, and gradients of all other operators.

    Args:
        slots: Of one round; together all operators.
        sizes: Of all operators.
    """
    gradients = sum(size.gradient for size in sizes.values())
    return tuple(gradients + sum(sizes[op].full - sizes[op].gradient for op in slot) for slot in slots)


def fewest_slots(
    order: Sequence[str], sizes: Mapping[str, LoggedBytes], limit_bytes: int
) -> tuple[tuple[str, ...], ...] | None:
    """Returns ``order`` cut into the shortest round of which no step weighs more than ``limit_bytes``.

    Returns:
        The slots; None where gradients, or a single operator with them, weigh more than that.
    """
    room = limit_bytes - sum(sizes[op].gradient for op in order)
    return None if room < 0 else pack(order, _beyond_gradients(order, sizes), room)


def even_slots(order: Sequence[str], sizes: Mapping[str, LoggedBytes], most_slots: int) -> tuple[tuple[str, ...], ...]:
    """Returns ``order`` cut into at most ``most_slots`` steps, of which the heaviest weighs as little as it can.

    Raises:
        ValueError: ``most_slots`` is below 1.
    """
    return balance(order, _beyond_gradients(order, sizes), most_slots)


def _beyond_gradients(order: Sequence[str], sizes: Mapping[str, LoggedBytes]) -> dict[str, OperatorBytes]:
    """Returns what anchoring an operator costs beyond its gradient, in the terms of sparse windows."""
    return {op: OperatorBytes(max(0, sizes[op].full - sizes[op].gradient), 0) for op in order}


class Rounds:
    """The rounds of one model on one layout, of any number of steps; each is computed on first use.

    Operators come in the catalog's order, of each pipeline stage by itself, with one expert of each owner in turn: that
    order never changes, so that every operator is anchored again exactly a round later. Each cut makes the heaviest
    step as light as it can be.

    Args:
        catalog: Of the model.
        sizes: Of all operators, in the whole model.
        placement: Who holds what.
        coupled: Groups of operators that are anchored at the same step.
    """

    def __init__(
        self,
        catalog: Catalog,
        sizes: Mapping[str, OperatorBytes],
        placement: Placement,
        coupled: Sequence[Collection[str]] = (),
    ) -> None:
        order, merged, self._members = merge_coupled(catalog.everything, sizes, coupled)
        self._sizes = {op: LoggedBytes(size.full, size.consumed, size.weights) for op, size in merged.items()}
        self._lanes = lanes_of(order, placement)
        self._catalog = catalog
        self._cuts: dict[int, tuple[Slots, tuple[Counts, ...]]] = {}
        self._parted: dict[int, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {}
        self._weights: dict[tuple[int, bool, bool, bool], tuple[int, ...]] = {}

    @property
    def most(self) -> int:
        """Steps of the longest round: no step of it is without an anchor."""
        return max((len(lane.order) for lane in self._lanes), default=1)

    def slots(self, window: int) -> Slots:
        """Returns the operators that are anchored at each of at most ``window`` steps."""
        return self._cut(window)[0]

    def places(self, window: int) -> tuple[Counts, ...]:
        """Returns the same as places in the catalog."""
        return self._cut(window)[1]

    def parted(self, window: int) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Returns, for each step, the anchored operators and all others, in catalog order: the same objects each
        time."""
        if window not in self._parted:
            parts = []
            for places in self.places(window):
                anchored = np.zeros(len(self._catalog.operators), dtype=bool)
                anchored[places] = True
                chosen = (tuple(compress(self._catalog.everything, mask.tolist())) for mask in (anchored, ~anchored))
                parts.append((next(chosen), next(chosen)))
            self._parted[window] = tuple(parts)
        return self._parted[window]

    def _cut(self, window: int) -> tuple[Slots, tuple[Counts, ...]]:
        if window not in self._cuts:
            units = side_by_side([even_slots(lane.order, self._sizes, window) for lane in self._lanes])
            slots = tuple(tuple(op for unit in slot for op in self._members[unit]) for slot in units)
            index_of = self._catalog.index_of
            self._cuts[window] = slots, tuple(np.array([index_of[op] for op in slot], dtype=np.int64) for slot in slots)
        return self._cuts[window]

    def rank_bytes(
        self, window: int, *, shared: bool = True, experts: bool = True, weights: bool = True
    ) -> tuple[int, ...]:
        """Returns what each step of a round saves on the rank that has most: anchors, and gradients of the others.

        Args:
            window: Steps of the round.
            shared: What is no expert counts.
            experts: Experts count.
            weights: So do weights of what is anchored.
        """
        key = window, shared, experts, weights
        if key not in self._weights:
            is_expert = self._catalog.expert_at.__contains__
            counted = {op for op, members in self._members.items() if (experts if is_expert(members[0]) else shared)}
            cuts = [even_slots(lane.order, self._sizes, window) for lane in self._lanes]
            steps = max(map(len, cuts), default=0)
            sizes = self._sizes if weights else self._without_weights
            loads = [_on_a_rank(lane, cut, sizes, counted) for lane, cut in zip(self._lanes, cuts, strict=True)]
            padded = [[*load[1:], *load[:1] * (steps - len(load) + 1)] for load in loads]
            self._weights[key] = tuple(map(max, zip(*padded, strict=True)))
        return self._weights[key]

    @cached_property
    def _without_weights(self) -> dict[str, LoggedBytes]:
        return {op: LoggedBytes(size.full - size.weights, size.gradient) for op, size in self._sizes.items()}

    @cached_property
    def gradient_bytes(self) -> int:
        """Gradients of all operators, on the rank that has most: no step saves less."""
        return max(_on_a_rank(lane, (), self._sizes, self._members.keys())[0] for lane in self._lanes)

    @property
    def dense_bytes(self) -> int:
        """All operators in full, on the rank that has most."""
        return max(self.rank_bytes(1))


def _on_a_rank(lane: Lane, slots: Slots, sizes: Mapping[str, LoggedBytes], counted: Collection[str]) -> list[int]:
    """Bytes on the lane's busiest rank: of a step that anchors nothing, and of each of ``slots``."""
    shared, owned = [0] * (len(slots) + 1), dict[int, list[int]]()
    for op in filter(counted.__contains__, lane.order):
        row = owned.setdefault(lane.owners[op], [0] * len(shared)) if op in lane.owners else shared
        row[0] += sizes[op].gradient
    for at, slot in enumerate(slots, 1):
        for op in filter(counted.__contains__, slot):
            row = owned[lane.owners[op]] if op in lane.owners else shared
            row[at] += max(0, sizes[op].full - sizes[op].gradient)
    for row in (shared, *owned.values()):
        row[1:] = [row[0] + more for more in row[1:]]
    most = map(max, zip(*owned.values(), strict=True)) if owned else [0] * len(shared)
    return [-(-n // lane.ranks) + -(-m // lane.expert_ranks) for n, m in zip(shared, most, strict=True)]
