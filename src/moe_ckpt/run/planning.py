"""Asks the policy what to save, and gives it the facts about the tensors that exist now.

Optimizers make their state when they first need it: at the first step, or much later, when a frozen expert thaws. A
partial checkpoint with some rows saved before that and some after would not be whole. So operators with new or removed
tensors are saved, whatever the plan, until a checkpoint has them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.window import OperatorBytes, lanes_of, share_bytes
from moe_ckpt.ledger.ledger import Ledger
from moe_ckpt.policies.base import Policy, PolicyContext, needs_of
from moe_ckpt.ports import Reading, StateTensor, TensorSpec, TrainingState
from moe_ckpt.run.options import Settings
from moe_ckpt.slices.assignment import ComputeTypes, coupled_operators, operator_bytes
from moe_ckpt.slices.cuts import Numbers, ranges

log = logging.getLogger("moe_ckpt")

_MANY = 4
"""If a plan has one in so many operators or more, reading all addresses is quicker than finding the plan's tensors."""
_NOTHING = Reading((), np.zeros(0, dtype=np.int64))


class LiveState:
    """Lists the tensors once per step, and weighs operators when their tensors change. For the training thread only.

    Args:
        ledger: Of the run.
        state: Of this rank.
        placement: Ranks of the operators.
        gradient_dtype: Header name of the type in which wider gradients are saved; None for their own.

    Attributes:
        changes: How often the set of tensors has changed; equal on every rank.
        placement: Ranks of the operators.
        compute_types: Types in which kernels read the parameters; see ``set_compute_types``.
        sizes: Bytes of every operator, as of the last ``weigh``.
        coupled: Groups of operators whose rows an optimizer mixes, as of the last ``weigh``.
    """

    def __init__(
        self, ledger: Ledger, state: TrainingState, placement: Placement, gradient_dtype: str | None = None
    ) -> None:
        self.changes = 0
        self.placement = placement
        self.compute_types: ComputeTypes = {}
        self.sizes: Mapping[str, OperatorBytes] = {}
        self.coupled: tuple[frozenset[str], ...] = ()
        self._ledger, self._catalog = ledger, ledger.catalog
        self._here: _Here | None = None
        self._state = state
        self._gradient_dtype = gradient_dtype
        self._described: tuple[Sequence[StateTensor], Sequence[TensorSpec]] | None = None
        self._keys: dict[str, frozenset[str]] | None = None  # of each parameter
        self._noted: Sequence[TensorSpec] | None = None
        self._weighed_at = -1
        self._alike_at, self._alike = -1, False

    def describe(self) -> tuple[Sequence[StateTensor], Sequence[TensorSpec]]:
        """Returns this rank's tensors and those of all ranks, listed once per step. Addresses may be old: see
        ``describe_for``."""
        if self._described is None:
            tensors = self._state.tensors(of=_NOTHING)
            self._described = tensors, self._state.specs()
        return self._described

    def describe_for(self, plan: SnapshotPlan) -> tuple[Sequence[StateTensor], Sequence[TensorSpec]]:
        """Returns the same as ``describe``, with current addresses of all tensors that the plan saves or the ledger
        requires."""
        saved = plan.full, plan.memory_only, plan.compute, self._ledger.mandatory
        read: Reading | None = None  # all tensors
        if self._here is not None and sum(map(len, saved)) * _MANY < len(self._catalog.everything):
            chosen = np.concatenate([self._catalog.places_of(tuple(operators)) for operators in saved])
            read = self._here.of(chosen)
        tensors = self._state.tensors(of=read, listed=self._described is not None)
        if self._here is None or self._here.tensors is not tensors:
            self._here = _Here(self._catalog, tensors)
        self._described = tensors, self._state.specs()
        return self._described

    def forget(self) -> None:
        """Drops the list of ``describe``, since the tensors may change from now on."""
        self._described = None

    def set_compute_types(self, types: ComputeTypes) -> None:
        """Sets the types in which kernels read the parameters, equal on every rank; by default their own."""
        self.compute_types = dict(types)
        self._weighed_at = -1

    @property
    def is_held_alike(self) -> bool:
        """Returns whether each peer holds every tensor as a whole, and not a part (FSDP2, sharded optimizers)."""
        if self._alike_at != self.changes:
            tensors, _ = self.describe()
            self._alike_at, self._alike = self.changes, all(tensor.replicated for tensor in tensors)
        return self._alike

    @property
    def is_held_by_each(self) -> bool:
        """Returns whether each rank holds all training state, as under plain data parallelism."""
        return self.placement.experts_whole and self.is_held_alike

    def note_layout(self, specs: Sequence[TensorSpec]) -> Mapping[str, int]:
        """Notes new and removed tensors in the ledger, which then requires their operators.

        Args:
            specs: Of the tensors that exist now.

        Returns:
            The operators that must be saved: see ``Ledger.mandatory``.
        """
        if specs is not self._noted:
            self._noted, before = specs, self._keys
            keys: dict[str, set[str]] = {}
            for tensor in specs:
                keys.setdefault(tensor.parameter, set()).add(tensor.key)
            self._keys = after = {parameter: frozenset(key_set) for parameter, key_set in keys.items()}
            if before is not None and after != before:
                self.changes += 1
                for parameter in after.keys() | before.keys():
                    if after.get(parameter) != before.get(parameter):
                        self._ledger.owe(_holders(self._catalog, parameter), self.changes)
        return self._ledger.mandatory

    def weigh(self) -> int:
        """Brings ``sizes`` and ``coupled`` up to date. Returns ``changes``."""
        _, specs = self.describe()
        self.note_layout(specs)
        if self._weighed_at != self.changes:
            self._weighed_at = self.changes
            if not self.is_held_alike:  # FSDP2: experts are divided over all ranks
                self.placement = replace(self.placement, experts_whole=False)
            self.sizes = operator_bytes(self._catalog, specs, self.compute_types, self._gradient_dtype)
            self.coupled = coupled_operators(self._catalog, specs)
        return self.changes


def _holders(catalog: Catalog, parameter: str) -> set[str]:
    """Returns the operators that have a part of the parameter, or of its state."""
    return {op.id for op, _ in catalog.spans_of[parameter]} | {catalog.home[parameter]}


class _Here:
    """The tensors of this rank of which each operator has a part; most experts of other ranks have none.

    Args:
        catalog: Of the model.
        tensors: This rank's.
    """

    def __init__(self, catalog: Catalog, tensors: Sequence[StateTensor]) -> None:
        self.tensors = tensors
        positions: dict[str, list[int]] = {}
        for at, tensor in enumerate(tensors):
            positions.setdefault(tensor.parameter, []).append(at)
        sharing: list[list[int]] = [[] for _ in catalog.operators]
        for parameter, indices in positions.items():
            for operator in _holders(catalog, parameter):
                sharing[catalog.index_of[operator]] += indices
        self._counts = np.array(list(map(len, sharing)), dtype=np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts
        self._tensors_of = np.fromiter(chain.from_iterable(sharing), np.int64, int(self._counts.sum()))

    def of(self, operators: Numbers) -> Reading:
        """Returns the tensors of the operators at these places of the catalog."""
        return Reading(self.tensors, self._tensors_of[ranges(self._firsts[operators], self._counts[operators])])


class Planner:
    """Completes the policy's context with facts about live tensors. For the training thread only.

    Args:
        policy: Of the run.
        live: The training state.
        rank: Of this process; rank 0 logs messages for the user.
        settings: The user's.

    Attributes:
        dense_step: Step of the newest dense checkpoint, committed or under way; 0 if it is not known.
        room: The most bytes of one rank's snapshot for which host memory has room, the minimum over ranks; None if the
            policy does not need it.
    """

    def __init__(self, policy: Policy, live: LiveState, rank: int, settings: Settings) -> None:
        self.dense_step = 0
        self.room: int | None = None
        self._policy = policy
        self._needs = needs_of(policy)
        self._live = live
        self._rank, self._settings = rank, settings
        self._window_layout = self._window_size = -1
        self._warned = False

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """Returns the policy's plan. A policy for windows or bytes gets the current sizes of operators."""
        needs, live, run = self._needs, self._live, context.run
        changes = live.weigh() if needs.windows or needs.sizes or needs.gradients else 0
        if needs.windows:
            run = replace(run, dense_step=self.dense_step)
            if changes != self._window_layout:  # optimizer state came or went: a window of both is not whole
                run = replace(run, window=None, next_slot=0)
        model = replace(context.model, placement=live.placement, sizes=live.sizes, coupled=live.coupled)
        memory = replace(
            context.memory,
            budget_fraction=self._settings.budget_fraction,
            snapshot_bytes=self.room,
            at_once=self._settings.max_in_flight,
        )
        context = replace(context, model=model, run=run, memory=memory)
        if not needs.windows and self._rank == 0 and not self._warned:
            self._warned = self._warn(context) or context.measured.copy_bytes() is not None
        plan = self._policy.plan(context)
        if plan.window is not None and plan.slot == 0:
            self._window_layout = changes
            self._say_window(plan.window.size, context)
        if needs.windows or not plan.gradients or not live.coupled:
            return plan
        anchored = frozenset(plan.full)
        return with_anchors(plan, anchored.union(*(group for group in live.coupled if not group.isdisjoint(anchored))))

    def is_tight(self, plan: SnapshotPlan) -> bool:
        """Returns whether host memory lacks room for two windows such as the one that a plan begins; equal on every
        rank."""
        window, room = plan.window, self.room
        if window is None or plan.slot or window.size == 1 or room is None or not self._live.sizes:
            return False
        lanes = lanes_of(window.order, self._live.placement)
        heaviest = max(share_bytes(window.slots, self._live.sizes, lanes))
        return 2 * window.size * heaviest > room * self._settings.max_in_flight

    def _say_window(self, size: int, context: PolicyContext) -> None:
        """Logs, on one rank, that windows have another length from now on, and a warning if training will stall."""
        if size == 1 and self._window_size > 1:  # a dense checkpoint between two windows
            return
        if size != self._window_size and self._rank == 0 and context.run.step:
            dense = "all operators are saved in one step, as a dense checkpoint"
            log.info("step %d: %s", context.run.step, dense if size == 1 else f"a sparse window of {size} steps begins")
            self._warn(context)
        if context.run.step:  # before training, everything is one snapshot
            self._window_size = size

    def _warn(self, context: PolicyContext) -> bool:
        """Returns whether there was a warning."""
        why = None if self._needs.warning is None else self._needs.warning(context)
        if why is not None:
            log.warning("%s", why)
        return why is not None


def gradient_factor(plan: SnapshotPlan, sizes: Mapping[str, OperatorBytes]) -> float | None:
    """Returns the bytes of a plan's operators in full, as a multiple of those with gradients; None without gradients.

    The paper reports up to 5 (MoEtion, section 5.2).

    Args:
        plan: Any.
        sizes: Of its operators, if it has gradients.
    """
    if not plan.gradients:
        return None
    in_full = sum(sizes[op].full for op in plan.full)
    whole = in_full + sum(sizes[op].full for op in plan.gradients)
    sent = in_full + sum(sizes[op].consumed for op in plan.gradients)
    return whole / sent if sent else None


def with_anchors(plan: SnapshotPlan, operators: Collection[str]) -> SnapshotPlan:
    """Returns the plan with those of ``operators`` in full of which it has the gradients: an optimizer couples them
    with anchored ones, or they lack an anchor."""
    moved = tuple(op for op in plan.gradients if op in operators)
    if not moved:
        return plan
    logged = tuple(op for op in plan.gradients if op not in operators)
    return replace(plan, full=(*plan.full, *moved), gradients=logged)
