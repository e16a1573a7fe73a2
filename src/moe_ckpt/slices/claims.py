"""What all ranks together must write for a plan: the other side of the coverage proof.

Each of the N ranks answers for about an N-th of the tensors. What it must add up is a sum per operator, made once per
set of tensors, and the claim of a plan is the sum of its operators'. So a plan that was never seen before costs what it
names, not what the model has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from math import prod
from zlib import crc32

from moe_ckpt.core.operators import Catalog, Remembered
from moe_ckpt.core.tokens import Counts
from moe_ckpt.format.sealed import Fragment
from moe_ckpt.format.shard import REPLAY
from moe_ckpt.ledger.coverage import PRIME, Box, cover_sum
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.assignment import has_rows, holders, is_weight
from moe_ckpt.slices.local_state import box_of_rows, wanted_boxes, wanted_replay

_Scattered = tuple[str, frozenset[str], int]
"""(home, operators with rows of the parameter, sum) of state without rows."""


class Claims:
    """The slices that one rank must account for. For the persist thread only, except its creation.

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
        """Returns the ``cover_sum`` of what this rank must account for, in a plan that saves ``operators``.

        Args:
            operators: Are saved in full.
            compute_only: Of which only compute weights are saved.
            in_window: The plan is a slot of a sparse window: see ``wanted_replay``.
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
        """All boxes that the ranks together must write, to say what is missing when sums differ."""
        chosen = frozenset(operators)
        boxes = wanted_boxes(self._catalog, chosen, self._specs)
        if in_window:
            boxes |= wanted_replay(self._catalog, chosen, frozenset(compute_only), self._specs)
        return boxes

    @cached_property
    def operators(self) -> int:
        """Operators that have anything to save (``OperatorSets``): not all, where parameters are empty."""
        held_by = (holders(self._catalog, spec) for spec in self._specs if prod(spec.global_shape))
        return self._catalog.sets.of(tuple({operator.id for holders_of in held_by for operator, _ in holders_of}))

    @cached_property
    def _sums(self) -> tuple[Mapping[str, int], Mapping[str, int], Sequence[_Scattered]]:
        """Per operator, of all its state and of its compute weights; and state that any slot may have to repeat."""
        full: dict[str, int] = {}
        light: dict[str, int] = {}
        scattered: list[_Scattered] = []
        for spec in self._specs_of_rank():
            rows, weight = has_rows(self._catalog, spec), is_weight(spec)
            for operator, span in holders(self._catalog, spec):
                box = box_of_rows(*span.rows(spec.global_shape), spec.global_shape)
                full[operator.id] = full.get(operator.id, 0) + cover_sum([(spec.key, box)])
                if not weight and rows:
                    continue
                again = cover_sum([(REPLAY + spec.key, box)])
                if weight:
                    light[operator.id] = light.get(operator.id, 0) + again
                    continue
                parts = frozenset(op.id for op, _ in self._catalog.spans_of[spec.parameter])
                if parts - {operator.id}:
                    scattered.append((operator.id, parts, again))
        return full, light, scattered

    def _specs_of_rank(self) -> Iterator[TensorSpec]:
        for spec in self._specs:
            if prod(spec.global_shape) and crc32(spec.key.encode()) % self._ranks == self._rank:
                yield spec


class SavedOperators:
    """The operators that snapshots save in full; what has no element is left out. Not safe for several threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        # Encoded once, since partial checkpoints hold others each time.
        self._rows = [json.dumps(op).encode() + b"," for op in catalog.everything]
        self._claimed: int | None = None
        self._found: Callable[[tuple[str, ...]], tuple[Fragment, Counts]]

    def of(self, operators: tuple[str, ...], claims: Claims) -> tuple[Fragment, Counts]:
        """Returns operators as a list of ids, for documents, and by place. Found once for the newest few tuples."""
        if claims.operators != self._claimed:
            self._claimed, self._found = claims.operators, Remembered(partial(self._find, claims.operators))
        return self._found(operators)

    def _find(self, claimed: int, operators: tuple[str, ...]) -> tuple[Fragment, Counts]:
        saved = self._catalog.sets.places(claimed & self._catalog.sets.of(operators))
        return Fragment.of_rows(b"".join(map(self._rows.__getitem__, saved.tolist()))), saved
