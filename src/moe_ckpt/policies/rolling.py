"""The rolling schedule of a gradient log: each step anchors some operators, and saves the gradients of all others.

W steps make a round, in which every operator is anchored once. With ``f`` bytes per parameter in full (12 in mixed
precision: master weight and two moments) and ``g`` bytes of gradient, a step has ``f/W + g (W - 1)/W`` bytes per
parameter. The more steps a round has, the closer that is to ``g``, and the longer is a replay. A sparse window
(MoEvement, section 3.2) has ``f/W + 2 (W - 1)/(2 W)``, since on average half of its operators are not saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.window import Lane, OperatorBytes, lanes_of, merge_coupled, side_by_side
from moe_ckpt.ledger.ledger import MOST_SLOTS

Slots = tuple[tuple[str, ...], ...]
"""Per step of a round, the anchored operators."""


def held_bytes_per_parameter(window: int, gradient: float, full: float = 12.0, slots: int = MOST_SLOTS) -> float:
    """Returns the bytes per parameter that the newest step of a log needs: anchors, and the gradients since.

    An operator's gradients are deleted when it is anchored again: on average those of half of W - 1 steps exist. If
    operators of several steps share a slot, their gradients stay until the last of them is anchored.

    Args:
        window: Steps of a round.
        gradient: Bytes of a gradient per parameter.
        full: Bytes per parameter in full.
        slots: Most slots for the gradients of one step.

    Raises:
        ValueError: ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"a round of {window} steps")
    together = max(1.0, window / slots)
    return full + gradient * (window + together - 2) / 2


def most_held_bytes_per_parameter(window: int, gradient: float, full: float = 12.0, slots: int = MOST_SLOTS) -> float:
    """Returns the most bytes per parameter that the newest step of a log ever needs.

    It needs them at the end of the first round after a dense step, which is kept until every operator has a newer
    anchor.

    Args:
        window: As of ``held_bytes_per_parameter``, and so are the others.
        gradient: Bytes of a gradient per parameter.
        full: Bytes per parameter in full.
        slots: Most slots for the gradients of one step.

    Raises:
        ValueError: ``window`` is below 1.
    """
    return held_bytes_per_parameter(window, gradient, full, slots) + full * (window - 1) / window


def _beyond_gradient(size: OperatorBytes) -> int:
    """Returns the bytes that anchoring an operator costs beyond its gradient."""
    return max(0, size.full - size.consumed)


class Rounds:
    """The rounds of one model on one layout, of any number of steps. Results are cached.

    Within each pipeline stage operators come in the catalog's order, with one expert of each owner in turn. That order
    never changes, so that every operator is anchored again exactly one round later.

    Args:
        catalog: Of the model.
        sizes: Sizes of all operators in the whole model.
        placement: The ranks that hold operators.
        coupled: Groups of operators that are anchored at the same step.
    """

    def __init__(
        self,
        catalog: Catalog,
        sizes: Mapping[str, OperatorBytes],
        placement: Placement,
        coupled: Sequence[Collection[str]] = (),
    ) -> None:
        order, self._sizes, self._members = merge_coupled(catalog.everything, sizes, coupled)
        self._lanes = lanes_of(order, placement)
        self._catalog = catalog
        self._beyond_gradients = {op: OperatorBytes(_beyond_gradient(self._sizes[op]), 0) for op in order}

    @property
    def most(self) -> int:
        """Most steps of a round in which each step has an anchor."""
        return max((len(lane.order) for lane in self._lanes), default=1)

    @lru_cache(maxsize=64)  # noqa: B019 - rounds are few and stay; so are the next ones
    def _cuts(self, window: int) -> tuple[Slots, ...]:
        """Returns the slots of each lane. Each cut makes the heaviest step as light as it can be."""
        return tuple(lane.balance(self._beyond_gradients, window) for lane in self._lanes)

    @lru_cache(maxsize=64)  # noqa: B019
    def slots(self, window: int) -> Slots:
        """Returns the operators that are anchored at each of at most ``window`` steps."""
        units = side_by_side(self._cuts(window))
        return tuple(tuple(op for unit in slot for op in self._members[unit]) for slot in units)

    @lru_cache(maxsize=64)  # noqa: B019
    def places(self, window: int) -> tuple[Counts, ...]:
        """Returns ``slots`` as places in the catalog."""
        return tuple(self._catalog.places_of(slot) for slot in self.slots(window))

    @lru_cache(maxsize=64)  # noqa: B019
    def parted(self, window: int) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
        """Returns for each step the anchored operators and all others, in catalog order: the same objects each time."""
        masks = map(self._catalog.mask, self.slots(window))
        return tuple((self._catalog.ids_of(anchored), self._catalog.ids_of(~anchored)) for anchored in masks)

    @lru_cache(maxsize=64)  # noqa: B019
    def rank_bytes(
        self, window: int, *, shared: bool = True, experts: bool = True, weights: bool = True
    ) -> tuple[int, ...]:
        """Returns the bytes of each step of a round on the rank that has most: anchors, and gradients of the others.

        Args:
            window: Steps of the round.
            shared: Count gates and non-experts.
            experts: Count experts.
            weights: Count the weights of anchors.
        """
        is_expert = self._catalog.expert_at.__contains__
        counted = {op for op, members in self._members.items() if (experts if is_expert(members[0]) else shared)}
        cuts = self._cuts(window)
        steps = max(map(len, cuts), default=0)
        sizes = self._sizes if weights else self._without_weights
        loads = [_on_a_rank(lane, cut, sizes, counted) for lane, cut in zip(self._lanes, cuts, strict=True)]
        padded = [[*load[1:], *load[:1] * (steps - len(load) + 1)] for load in loads]
        return tuple(map(max, zip(*padded, strict=True)))

    @cached_property
    def _without_weights(self) -> dict[str, OperatorBytes]:
        return {
            op: replace(size, full=size.full - size.weights, gradient=size.consumed) for op, size in self._sizes.items()
        }

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all operators on the rank that has most, below which no step can be."""
        return max(_on_a_rank(lane, (), self._sizes, self._members.keys())[0] for lane in self._lanes)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all operators in full on the rank that has most."""
        return max(self.rank_bytes(1))


def _on_a_rank(lane: Lane, slots: Slots, sizes: Mapping[str, OperatorBytes], counted: Collection[str]) -> list[int]:
    """Returns the bytes on the lane's busiest rank: of a step without anchors, and of each of ``slots``."""
    shared, owned = [0] * (len(slots) + 1), dict[int, list[int]]()
    for op in filter(counted.__contains__, lane.order):
        row = owned.setdefault(lane.owners[op], [0] * len(shared)) if op in lane.owners else shared
        row[0] += sizes[op].consumed
    for at, slot in enumerate(slots, 1):
        for op in filter(counted.__contains__, slot):
            row = owned[lane.owners[op]] if op in lane.owners else shared
            row[at] += _beyond_gradient(sizes[op])
    for row in (shared, *owned.values()):
        row[1:] = [row[0] + more for more in row[1:]]
    most = map(max, zip(*owned.values(), strict=True)) if owned else [0] * len(shared)
    return [-(-n // lane.ranks) + -(-m // lane.expert_ranks) for n, m in zip(shared, most, strict=True)]


@dataclass(frozen=True)
class LogReport:
    """Explains the choice of a round (``GradientLog.explain``). It decides nothing.

    All bytes are those of the rank that has most.

    Attributes:
        window: W, the number of steps of a round.
        dense_bytes: Bytes of all operators in full.
        gradient_bytes: Bytes of all gradients, below which no step of a round can be.
        heaviest_bytes: Bytes of the round's heaviest step.
        mean_bytes: Mean bytes of its steps.
        limit_bytes: Most bytes that a step may have; None while not known.
        most_window: Most steps of a round that were allowed.
        iteration_secs: Time of an iteration; None while not known.
        unlimited: W with unlimited host memory; 0 while not known.
    """

    window: int
    dense_bytes: int
    gradient_bytes: int
    heaviest_bytes: int
    mean_bytes: float
    limit_bytes: int | None = None
    most_window: int = 0
    iteration_secs: float | None = None
    unlimited: int = 0

    @property
    def fits(self) -> bool | None:
        """True if each step keeps within the limit; None if that is not known."""
        return None if self.limit_bytes is None else self.heaviest_bytes <= self.limit_bytes

    @property
    def stall_secs(self) -> float | None:
        """Seconds for which the heaviest step exceeds its time; None if that is not known."""
        if not self.limit_bytes or not self.iteration_secs:
            return None
        return max(0.0, self.heaviest_bytes / self.limit_bytes - 1) * self.iteration_secs

    @property
    def most_held_bytes(self) -> float:
        """Most bytes of the log in memory, at the end of the first round after a dense step."""
        return most_held_bytes_per_parameter(self.window, self.gradient_bytes, self.dense_bytes) + self.mean_bytes

    @property
    def warning(self) -> str | None:
        """A sentence if steps exceed their time, or if host memory has no room for the best round; otherwise None."""
        warnings = [warning for warning in (self._memory_warning, self._time_warning) if warning is not None]
        return "; ".join(warnings) if warnings else None

    @property
    def _memory_warning(self) -> str | None:
        if self.unlimited <= self.window:
            return None
        return (
            f"host memory has no room for rounds of W = {self.unlimited}, so W = {self.window}; host_memory_bytes sets "
            "how much it has"
        )

    @property
    def _time_warning(self) -> str | None:
        if self.fits is not False:
            return None
        stall = "" if self.stall_secs is None else f"; training stalls by up to {self.stall_secs:.3g} s per step"
        numbers = f"{self.heaviest_bytes:,} bytes per rank, {self.limit_bytes or 0:,} would fit"
        what = f"a log of gradients with rounds of W = {self.window} does not fit into an iteration ({numbers})"
        if self.gradient_bytes < (self.limit_bytes or 0):
            why = f"a longer round would, and {self.most_window} steps are the most"
        else:
            why = (
                f"the gradients alone have {self.gradient_bytes:,}, in a round of any length: use MoEvement, which "
                "saves no gradients, or a policy that does not save at each step"
            )
        return f"{what}: {why}{stall}"
