"""Asks the policy what to save, after telling it what it has to know of the tensors that exist now."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.placement import Placement
from moe_ckpt.core.plan import SnapshotPlan
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.engine.books import Pending
from moe_ckpt.engine.layout import Layout
from moe_ckpt.engine.shares import ComputeTypes, inseparable, operator_bytes
from moe_ckpt.policies.base import Policy, PolicyContext, SparsePolicy, uses_sizes, uses_windows
from moe_ckpt.ports import StateTensor, TensorSpec, TrainingState

log = logging.getLogger("moe_ckpt")


class Planner:
    """Knows the tensors of this step, what operators weigh and who holds them. For the training thread only.

    Attributes:
        layout: Which tensors exist for each parameter.
        compute_types: What kernels read of the parameters; see ``set_compute_types``.
        sizes: Bytes of every operator, for policies that go by them.
        dense_step: Step of the newest dense checkpoint, committed or under way; 0 if that is not known.
        room: Most bytes of one rank's snapshot that host memory leaves room for, the minimum over ranks; None if
            nobody goes by it.
    """

    def __init__(self, policy: Policy, catalog: Catalog, state: TrainingState, placement: Placement, rank: int) -> None:
        self.layout = Layout(catalog)
        self.compute_types: ComputeTypes = {}
        self.sizes: Mapping[str, OperatorBytes] = {}
        self.dense_step = 0
        self.room: int | None = None
        self._policy = policy
        self._catalog = catalog
        self._state = state
        self._placement = placement
        self._rank = rank
        self._described: tuple[Sequence[StateTensor], Sequence[TensorSpec]] | None = None
        self._inseparable: tuple[frozenset[str], ...] = ()
        self._sized_at = self._window_layout = self._window_size = -1

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """Returns the policy's decision; one about windows or bytes is told what the operators weigh now."""
        policy = self._policy
        changes = self._weigh() if uses_windows(policy) or uses_sizes(policy) else 0
        context = replace(context, placement=self._placement, sizes=self.sizes)
        if not uses_windows(policy):
            return policy.plan(context)
        if changes != self._window_layout:  # optimizer state came or went: a window of both is not whole
            context = replace(context, window=None, next_slot=0)
        context = replace(
            context, inseparable=self._inseparable, snapshot_bytes=self.room, dense_step=self.dense_step
        )
        plan = policy.plan(context)
        if plan.window is not None and plan.slot == 0:
            self._window_layout = changes
            self._say_window(policy, plan.window.size, context)
        return plan

    def _say_window(self, policy: SparsePolicy, size: int, context: PolicyContext) -> None:
        """Tell, on one rank, that windows have another length from now on, and whether training will stall for it."""
        if size == 1 and self._window_size > 1:  # a dense checkpoint between two windows
            return
        if size != self._window_size and self._rank == 0 and context.step:
            warning = policy.explain(context).warning
            log.info("step %d: a sparse window of %d steps begins", context.step, size)
            if warning is not None:
                log.warning("%s", warning)
        self._window_size = size

    def begun(self, pending: Pending) -> None:
        """A snapshot began."""
        if pending.is_complete:
            self.dense_step = pending.step

    def failed(self, pending: Pending) -> None:
        """It was not committed."""
        if pending.step == self.dense_step:
            self.dense_step = 0

    def describe(self) -> tuple[Sequence[StateTensor], Sequence[TensorSpec]]:
        """Returns this rank's tensors and those of all; listed once per step, though a window asks twice."""
        if self._described is None:
            tensors = self._state.tensors()
            self._described = tensors, self._state.specs()
        return self._described

    def forget(self) -> None:
        """The tensors that ``describe`` listed may be others from now on."""
        self._described = None

    def set_compute_types(self, types: ComputeTypes) -> None:
        """What kernels read of the parameters, alike on every rank; their own types until this is called."""
        self.compute_types = dict(types)
        self._sized_at = -1

    def _weigh(self) -> int:
        """Bring ``sizes`` up to date; returns how often the set of tensors has changed."""
        tensors, specs = self.describe()
        self.layout.update(specs)
        if self._sized_at != self.layout.changes:
            self._sized_at = self.layout.changes
            if not all(tensor.replicated for tensor in tensors):  # FSDP2: experts are divided over all ranks
                self._placement = replace(self._placement, experts_whole=False)
            self.sizes = operator_bytes(self._catalog, specs, self.compute_types)
            self._inseparable = inseparable(self._catalog, specs)
        return self.layout.changes
