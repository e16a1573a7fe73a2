"""The slices that all ranks together must write for a plan: the other side of the coverage proof.

Each of the N ranks accounts for about an N-th of the tensors. It computes a sum per operator once per set of tensors,
and adds up those of a plan's operators. So a new plan takes time for the operators that it names, not for the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import repeat
from math import prod
from zlib import crc32

import numpy as np
import numpy.typing as npt

from moe_ckpt.core.operators import Catalog, Operator, Remembered
from moe_ckpt.core.tokens import Counts
from moe_ckpt.format.sealed import Fragment
from moe_ckpt.format.shard import REPLAY
from moe_ckpt.ledger.coverage import PRIME, Box, cover_sum
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.assignment import has_rows, holders, is_weight
from moe_ckpt.slices.local_state import Repeated

_Scattered = tuple[str, frozenset[str], int]
"""(home, operators with rows of the parameter, sum) of state without rows."""


class Claims:
    """The slices for which one rank must account. Made on the training thread, used by those that seal and write.

    Args:
        catalog: Of the model.
        specs: All tensors, of all ranks.
        rank: Whose claims.
        ranks: N.
    """

    def __init__(self, catalog: Catalog, specs: Sequence[TensorSpec], rank: int, ranks: int) -> None:
        self._catalog = catalog
        self._specs = specs
        self._rank, self._ranks = rank, ranks

    def own_sum(self, operators: Collection[str], compute_only: Collection[str], *, in_window: bool) -> int:
        """Returns the ``cover_sum`` of the slices for which this rank must account in a plan.

        Args:
            operators: Saved in full.
            compute_only: Operators of which only compute weights are saved.
            in_window: The plan is a slot of a sparse window: see ``LocalState.replay_cuts``.
        """
        full, light, scattered = self._sums
        total = sum(map(full.get, operators, repeat(0)))
        if in_window:
            total += sum(map(light.get, compute_only, repeat(0)))
            chosen = frozenset(operators)
            total += sum(part for home, parts, part in scattered if home not in chosen and not parts.isdisjoint(chosen))
        return total % PRIME

    def boxes(
        self, operators: Collection[str], compute_only: Collection[str], *, in_window: bool
    ) -> Mapping[str, list[Box]]:
        """Returns all boxes that the ranks together must write, to find missing ones when sums differ."""
        chosen, resting = frozenset(operators), frozenset(compute_only)
        repeated = Repeated(self._catalog, chosen)
        boxes: dict[str, list[Box]] = {}
        for operator, spec, box in self._blocks():
            if operator.id in chosen:
                boxes.setdefault(spec.key, []).append(box)
            if is_weight(spec):
                again = operator.id in resting
            else:
                again = not has_rows(self._catalog, spec) and repeated.has(spec.parameter, operator)
            if in_window and again:
                boxes.setdefault(REPLAY + spec.key, []).append(box)
        return boxes

    def _blocks(self, specs: Iterable[TensorSpec] | None = None) -> Iterator[tuple[Operator, TensorSpec, Box]]:
        """Yields the block of each operator in each tensor with elements; by default in all tensors."""
        for spec in self._specs if specs is None else specs:
            for operator, span in holders(self._catalog, spec) if prod(spec.global_shape) else ():
                yield operator, spec, box_of_rows(*span.rows(spec.global_shape), spec.global_shape)

    @cached_property
    def is_saved(self) -> npt.NDArray[np.bool_]:
        """``[operators]`` True for operators that have elements: parameters may be empty."""
        return self._catalog.mask(tuple({operator.id for operator, _, _ in self._blocks()}))

    @cached_property
    def saved(self) -> Remembered[tuple[Fragment, Counts]]:
        """Returns those of some operators that have elements: their ids, encoded for documents, and their numbers in
        the catalog. Caches the newest results."""
        return Remembered(partial(_saved, self._catalog, self.is_saved))

    @cached_property
    def _sums(self) -> tuple[Mapping[str, int], Mapping[str, int], Sequence[_Scattered]]:
        """Sums of each operator's state and of its compute weights, and state that a slot may have to repeat."""
        full: dict[str, int] = {}
        light: dict[str, int] = {}
        scattered: list[_Scattered] = []
        mine = (spec for spec in self._specs if crc32(spec.key.encode()) % self._ranks == self._rank)
        for operator, spec, box in self._blocks(mine):
            full[operator.id] = full.get(operator.id, 0) + cover_sum([(spec.key, box)])
            if not is_weight(spec) and has_rows(self._catalog, spec):
                continue
            again = cover_sum([(REPLAY + spec.key, box)])
            if is_weight(spec):
                light[operator.id] = light.get(operator.id, 0) + again
                continue
            parts = frozenset(op.id for op, _ in self._catalog.spans_of[spec.parameter])
            if parts - {operator.id}:
                scattered.append((operator.id, parts, again))
        return full, light, scattered


@lru_cache(maxsize=1 << 14)
def box_of_rows(start: int, stop: int, global_shape: tuple[int, ...]) -> Box:
    """Returns the box of the rows ``[start, stop)`` of a tensor, whole in all other dimensions."""
    rest = global_shape[1:]
    return Box((start, *(0 for _ in rest)), (stop - start, *rest)) if global_shape else Box((), ())


def _saved(catalog: Catalog, is_saved: npt.NDArray[np.bool_], operators: tuple[str, ...]) -> tuple[Fragment, Counts]:
    places = np.flatnonzero(is_saved & catalog.mask(operators))
    return Fragment(list(map(catalog.everything.__getitem__, places.tolist()))), places
