"""Sparse windows: a dense checkpoint spread over W consecutive steps (MoEvement, section 3.2).

At each step of a window the operators of its slot are anchored: saved at full fidelity. Operators of later slots are
saved as the weights that the forward and backward pass reads (compute fidelity), so that the step can be computed
again. Operators of earlier slots are not saved, since a replay computes them from their anchors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise, repeat, zip_longest
from operator import attrgetter, is_

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Remembered
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.step import SnapshotPlan


@dataclass(frozen=True)
class OperatorBytes:
    """Size of one operator in the whole model, not of one rank's share.

    Attributes:
        full: Bytes of weights and optimizer state.
        compute: Bytes of the weights that the forward and backward pass reads.
        gradient: Bytes of the gradients that the optimizer consumes in one update; None if not known (``consumed``).
        weights: The part of ``full`` that is the model's own weights, which all ranks of a distributed optimizer hold.
            Master weights are not part of it. 0 if weights are not saved, or not known.
    """

    full: int
    compute: int
    gradient: int | None = None
    weights: int = 0

    def sent(self, *, weights: bool) -> int:
        """Returns the bytes of ``full`` that must be sent to a peer.

        Args:
            weights: True if the peer lacks the model's weights.
        """
        return self.full if weights else self.full - self.weights

    @property
    def consumed(self) -> int:
        """Bytes that the optimizer consumes in one update; without ``gradient``, estimated from the other two sizes.

        If ``full`` is more than four times ``compute``, it has masters and moments in a wider type, each about a third,
        and gradients are as wide as masters (Megatron's main gradients). Otherwise optimizers read the gradients that
        backward made, which are as wide as the parameters.
        """
        if self.gradient is not None:
            return self.gradient
        return self.full // 3 if self.full > 4 * self.compute else self.compute


_FULL, _COMPUTE = attrgetter("full"), attrgetter("compute")


@dataclass(frozen=True)
class Window:
    """Assigns operators to the slots that anchor them.

    Attributes:
        start: Step of the first slot.
        slots: W tuples of operator ids; every operator of the model is in exactly one.
        frequencies: Per expert, its share of its layer's activity when the order was made. Later shares are compared
            with it to decide whether the order is made anew.
    """

    start: int
    slots: tuple[tuple[str, ...], ...]
    frequencies: Mapping[str, float] | None = None

    @property
    def size(self) -> int:
        """W."""
        return len(self.slots)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """All operators, in the order in which they are anchored."""
        return tuple(chain.from_iterable(self.slots))

    def frozen(self, slot: int) -> tuple[str, ...]:
        """Returns the operators that are anchored after ``slot``. The same object every time."""
        if slot not in self._frozen:
            self._frozen[slot] = tuple(chain.from_iterable(self.slots[slot + 1 :]))
        return self._frozen[slot]

    @cached_property
    def _frozen(self) -> dict[int, tuple[str, ...]]:
        return {}


def slot_plan(window: Window, slot: int, step: int) -> SnapshotPlan:
    """Returns the plan of one step of a window: anchors in full, operators of later slots as compute weights."""
    return SnapshotPlan(step, window.slots[slot], compute=window.frozen(slot), window=window, slot=slot)


def slot_bytes(slots: Sequence[Collection[str]], sizes: Mapping[str, OperatorBytes]) -> tuple[int, ...]:
    """Returns the bytes of each slot's snapshot, all ranks together: its anchors in full, and later slots' compute."""
    full, compute = ([sum(map(kind, map(sizes.__getitem__, slot))) for slot in slots] for kind in (_FULL, _COMPUTE))
    return tuple(nbytes + sum(compute[at + 1 :]) for at, nbytes in enumerate(full))


def merge_coupled(
    order: Sequence[str], sizes: Mapping[str, OperatorBytes], groups: Sequence[Collection[str]]
) -> tuple[list[str], dict[str, OperatorBytes], dict[str, tuple[str, ...]]]:
    """Merges each of ``groups`` into one operator, so that no slot boundary divides a group.

    The merged operator takes the place and the id of the group's last member.

    Args:
        order: Operators in the order in which they are anchored.
        sizes: Of all operators.
        groups: Groups without common members.

    Returns:
        The order and the sizes of the merged operators; and for each id the members, in their order.
    """
    if not groups:
        return list(order), {op: sizes[op] for op in order}, {op: (op,) for op in order}
    group_of = {op: number for number, group in enumerate(groups) for op in group}
    members: dict[int, list[str]] = {}
    for op in order:
        if op in group_of:
            members.setdefault(group_of[op], []).append(op)
    of_last = {group[-1]: tuple(group) for group in members.values()}
    glued = [op for op in order if op not in group_of or op in of_last]
    members_of = {op: of_last.get(op, (op,)) for op in glued}
    return glued, {op: _together([sizes[one] for one in group]) for op, group in members_of.items()}, members_of


def _together(members: Sequence[OperatorBytes]) -> OperatorBytes:
    """Returns the size of several operators together."""
    gradients = [size.gradient for size in members]
    gradient = None if gradients.count(None) == len(gradients) else sum(size.consumed for size in members)
    full, compute = sum(size.full for size in members), sum(size.compute for size in members)
    return OperatorBytes(full, compute, gradient, sum(size.weights for size in members))


def balance(order: Sequence[str], sizes: Mapping[str, OperatorBytes], most_slots: int) -> tuple[tuple[str, ...], ...]:
    """Returns ``Lane.balance`` for operators whose bytes all ranks share."""
    return Lane(tuple(order), 1).balance(sizes, most_slots)


_SHARED = -1
"""Stands for the owner of an operator that has none."""


@dataclass(frozen=True)
class Lane:
    """Operators whose bytes the same ranks share: those of one pipeline stage, or all.

    Attributes:
        order: The operators, in the order in which they are anchored.
        ranks: Number of ranks. They have even shares, except for experts that have an owner.
        owners: Expert -> its owner.
        expert_ranks: Number of ranks that share the bytes of each expert that has an owner.
    """

    order: tuple[str, ...]
    ranks: int
    owners: Mapping[str, int] = field(default_factory=dict)
    expert_ranks: int = 1

    def pack(
        self, sizes: Mapping[str, OperatorBytes], limit_bytes: int, most_slots: int | None = None
    ) -> tuple[tuple[str, ...], ...] | None:
        """Cuts the order into the fewest slots of which none weighs more than ``limit_bytes``.

        Slots are runs of the order, each as long as possible. That is best: a slot that starts later in the order never
        weighs more, so nothing is gained by ending the one before it early. (MoEvement's Algorithm 1 counts operators
        as if all had one size, and gives all slots equally many.)

        Args:
            sizes: Of all operators.
            limit_bytes: Most bytes of one slot, all ranks together.
            most_slots: Most slots; None for any number.

        Returns:
            The slots; None if there is no such cut, or if it has more than ``most_slots``.
        """
        return _cut(self.order, _Runs(self._nbytes(sizes)).ends(limit_bytes, most_slots))

    def balance(self, sizes: Mapping[str, OperatorBytes], most_slots: int) -> tuple[tuple[str, ...], ...]:
        """Cuts the order into at most ``most_slots`` slots, the heaviest of which weighs as little as possible.

        Among all such cuts it takes one with the fewest slots: if a single large operator decides, more slots would
        make recovery longer and nothing lighter. Among those it takes one that anchors as early as possible, so that
        the window's slots together hold the fewest compute weights.

        Raises:
            ValueError: ``most_slots`` is below 1.
        """
        if most_slots < 1:
            raise ValueError(f"a window of {most_slots} slots")
        if most_slots == 1:
            return (self.order,) if self.order else ()
        runs = _Runs(self._nbytes(sizes))
        limits = range(runs.dense_bytes)
        enough = bisect_left(limits, True, key=lambda limit: runs.ends(limit, most_slots) is not None)
        return _cut(self.order, runs.ends(enough, most_slots)) or ()

    @cached_property
    def _nbytes(self) -> Remembered[npt.NDArray[np.int64]]:
        """Returns ``_bytes_of`` the order. It is asked for several times, and looking up thousands of names is slow."""
        return Remembered(partial(_bytes_of, self.order), most=1)

    @cached_property
    def _owner_numbers(self) -> npt.NDArray[np.int64]:
        return _owners_of(self.order, self.owners)

    def most_on_a_rank(self, slots: Sequence[Iterable[str]], sizes: Mapping[str, OperatorBytes]) -> list[int]:
        """Returns the bytes of each slot's snapshot on the rank that has most of it.

        Args:
            slots: Operators of this lane.
            sizes: Of all operators.
        """
        listed = list(map(tuple, slots))
        operators = tuple(chain.from_iterable(listed))
        if len(operators) == len(self.order) and all(map(is_, operators, self.order)):
            nbytes, owners = self._nbytes(sizes), self._owner_numbers
        else:
            nbytes, owners = _bytes_of(operators, sizes), _owners_of(operators, self.owners)
        slot_of = np.repeat(np.arange(len(listed)), list(map(len, listed)))
        of_owners, owner_of = np.unique(owners, return_inverse=True)
        weights = np.zeros((2, len(of_owners) * len(listed)), dtype=np.int64)
        for row, nbytes_of_kind in zip(weights, nbytes, strict=True):
            np.add.at(row, owner_of * len(listed) + slot_of, nbytes_of_kind)
        full, compute = weights.reshape(2, len(of_owners), len(listed))
        with_later = full + compute[:, ::-1].cumsum(axis=1)[:, ::-1] - compute
        owned = with_later[of_owners != _SHARED].max(axis=0, initial=0).tolist()
        even = with_later[of_owners == _SHARED].sum(axis=0).tolist()
        return [-(-n // self.ranks) + -(-m // self.expert_ranks) for n, m in zip(even, owned, strict=True)]


def lanes_of(order: Sequence[str], placement: Placement) -> tuple[Lane, ...]:
    """Returns one lane for each pipeline stage, with its operators in the given order.

    Experts that have an owner come one of each owner in turn, so that no slot weighs more on one rank because the order
    happens to bring its experts together. Experts of one owner keep their order.
    """
    ops_of_stage: list[list[str]] = [[] for _ in placement.stages] if len(placement.stages) > 1 else [list(order)]
    for op in order if len(ops_of_stage) > 1 else ():
        ops_of_stage[placement.stage_of.get(op, 0)].append(op)
    pairs = zip(ops_of_stage, placement.stages, strict=True)
    if placement.expert_ranks is None:
        return tuple(Lane(tuple(ops), width) for ops, width in pairs if ops)
    return tuple(_lane_in_turns(ops, width, placement.owner_of, placement.expert_ranks) for ops, width in pairs if ops)


def _lane_in_turns(order: Sequence[str], ranks: int, owners: Mapping[str, int], expert_ranks: int) -> Lane:
    """Returns a lane in which the experts that have an owner come one of each owner in turn."""
    dealt = _in_turns(_owners_of(order, owners))
    return Lane(tuple(map(order.__getitem__, dealt.tolist())), ranks, owners, expert_ranks)


def _in_turns(owner_of: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    experts = np.flatnonzero(owner_of != _SHARED)
    _, first, owner = np.unique(owner_of[experts], return_index=True, return_inverse=True)
    by_owner = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[by_owner], np.arange(len(first)))
    turn = np.empty(len(experts), dtype=np.int64)
    turn[by_owner] = np.arange(len(experts)) - begins[owner[by_owner]]
    dealt = np.arange(len(owner_of))
    dealt[experts] = experts[np.lexsort((first[owner], turn))]  # the owner of the first expert begins
    return dealt


def side_by_side(cuts: Sequence[Sequence[tuple[str, ...]]]) -> tuple[tuple[str, ...], ...]:
    """Joins the slots of several lanes: all first slots, all second slots, and so on."""
    if len(cuts) == 1:
        return tuple(cuts[0])
    return tuple(tuple(op for slot in slots for op in slot) for slots in zip_longest(*cuts, fillvalue=()))


def share_bytes(
    slots: Sequence[Iterable[str]], sizes: Mapping[str, OperatorBytes], lanes: Sequence[Lane]
) -> tuple[int, ...]:
    """Returns the bytes of each slot's snapshot on the rank that has most of it."""
    if len(lanes) == 1:
        return tuple(lanes[0].most_on_a_rank(slots, sizes))
    lane_of = {op: number for number, lane in enumerate(lanes) for op in lane.order}
    parts: list[list[list[str]]] = [[[] for _ in slots] for _ in lanes]
    for at, slot in enumerate(slots):
        for op in slot:
            if op in lane_of:
                parts[lane_of[op]][at].append(op)
    bytes_of_lanes = [lane.most_on_a_rank(part, sizes) for lane, part in zip(lanes, parts, strict=True)]
    return tuple(map(max, zip(*bytes_of_lanes, strict=True)))


def _owners_of(operators: Sequence[str], owners: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Returns ``[n]`` the owner of each operator; ``_SHARED`` if it has none."""
    return np.fromiter(map(owners.get, operators, repeat(_SHARED)), np.int64, len(operators))


def _bytes_of(operators: Sequence[str], sizes: Mapping[str, OperatorBytes]) -> npt.NDArray[np.int64]:
    """Returns ``[2, n]`` the bytes of each operator in full, and of its compute weights."""
    numbers, nbytes = _looked_up(sizes)
    return nbytes[:, np.fromiter(map(numbers.__getitem__, operators), np.int64, len(operators))]


def _weighed(sizes: Mapping[str, OperatorBytes]) -> tuple[Mapping[str, int], npt.NDArray[np.int64]]:
    """Returns operator -> its number, and ``_bytes_of`` all operators in the order of their numbers."""
    rows = sizes.values()
    nbytes = np.array([np.fromiter(map(kind, rows), np.int64, len(rows)) for kind in (_FULL, _COMPUTE)])
    return {op: number for number, op in enumerate(sizes)}, nbytes


_looked_up = Remembered(_weighed, most=4)
"""The same ``sizes`` object is used for many steps, and never changed."""


class _Runs:
    """Computes how far a slot may reach, in O(log n).

    A slot that anchors ``order[a:b]`` weighs ``full of order[a:b] + compute of order[b:] = reach[b] - done[a]``, where
    ``done[a]`` is full of ``order[:a]`` and ``reach[b] = done[b] + compute of order[b:]``.
    """

    def __init__(self, nbytes: npt.NDArray[np.int64]) -> None:
        """nbytes: ``_bytes_of`` the operators, in their order."""
        full, compute = nbytes
        done = np.concatenate([[0], np.cumsum(full)])
        reach = done + compute.sum() - np.concatenate([[0], np.cumsum(compute)])
        self._done: list[int] = done.tolist()
        # The minimum from each place on, so that it is sorted even if compute weights outweigh an operator.
        self._reach: list[int] = np.minimum.accumulate(reach[::-1])[::-1].tolist()

    @property
    def dense_bytes(self) -> int:
        return self._done[-1]

    def ends(self, limit_bytes: int, most: int | None = None) -> list[int] | None:
        """Returns the ends of the longest slots within the limit; None if there are none, or more than ``most``."""
        ends: list[int] = []
        at, last = 0, len(self._done) - 1
        while at < last:
            end = bisect_right(self._reach, limit_bytes + self._done[at]) - 1
            if end <= at or len(ends) == most:
                return None
            ends.append(end)
            at = end
        return ends


def _cut(order: Sequence[str], ends: list[int] | None) -> tuple[tuple[str, ...], ...] | None:
    if ends is None:
        return None
    return tuple(tuple(order[start:end]) for start, end in pairwise([0, *ends]))
