"""Asks the policy what to save, after giving it the facts about the tensors that exist now."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from moe_ckpt.core.plan import SnapshotPlan, Tier, save_logged
from moe_ckpt.core.window import OperatorBytes, lanes_of, share_bytes
from moe_ckpt.policies.base import Policy, PolicyContext, needs_of
from moe_ckpt.run.live import LiveState
from moe_ckpt.run.options import Settings

log = logging.getLogger("moe_ckpt")


class Planner:
    """Completes the policy's context with facts about live tensors. For the training thread only.

    Args:
        policy: Whom to ask.
        live: The training state.
        rank: 0 tells the user of windows.
        settings: The user's.

    Attributes:
        dense_step: Step of the newest dense checkpoint, committed or under way; 0 if that is not known.
        room: Most bytes of one rank's snapshot that host memory leaves room for, the minimum over ranks; None if
            it is not used.
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
        """Returns the policy's decision; one about windows or bytes gets the current sizes of operators."""
        policy, needs, live = self._policy, self._needs, self._live
        changes = live.weigh() if needs.windows or needs.sizes or needs.gradients else 0
        model = replace(context.model, placement=live.placement, sizes=live.sizes, coupled=live.coupled)
        memory = replace(
            context.memory,
            budget_fraction=self._settings.budget_fraction,
            snapshot_bytes=self.room,
            at_once=self._settings.max_in_flight,
        )
        context = replace(context, model=model, memory=memory)
        if not needs.windows:
            self._say_warning(context)
            return _with_coupled(policy.plan(context), live.coupled)
        run = replace(context.run, dense_step=self.dense_step)
        if changes != self._window_layout:  # optimizer state came or went: a window of both is not whole
            run = replace(run, window=None, next_slot=0)
        context = replace(context, run=run)
        plan = policy.plan(context)
        if plan.window is not None and plan.slot == 0:
            self._window_layout = changes
            self._say_window(plan.window.size, context)
        return plan

    def is_tight(self, plan: SnapshotPlan) -> bool:
        """Returns whether host memory has no room for two of the window that a plan begins; equal on every rank."""
        window, room = plan.window, self.room
        if window is None or plan.slot or window.size == 1 or room is None or not self._live.sizes:
            return False
        lanes = lanes_of(window.order, self._live.placement)
        heaviest = max(share_bytes(window.slots, self._live.sizes, lanes))
        return 2 * window.size * heaviest > room * self._settings.max_in_flight

    def _say_window(self, size: int, context: PolicyContext) -> None:
        """Tell, on one rank, that windows have another length from now on, and whether training will stall for it."""
        if size == 1 and self._window_size > 1:  # a dense checkpoint between two windows
            return
        if size != self._window_size and self._rank == 0 and context.run.step:
            log.info("step %d: %s", context.run.step, _begins(size))
            self._warn(context)
        if context.run.step:  # before training, everything is one snapshot
            self._window_size = size

    def _say_warning(self, context: PolicyContext) -> None:
        """Tell, once and on one rank, what the policy cannot do in this run (``Needs.warning``)."""
        if self._rank == 0 and not self._warned:
            self._warned = self._warn(context) or context.measured.copy_bytes() is not None

    def _warn(self, context: PolicyContext) -> bool:
        """Returns whether there was a warning."""
        why = None if self._needs.warning is None else self._needs.warning(context)
        if why is not None:
            log.warning("%s", why)
        return why is not None

    def begun(self, step: int, *, is_complete: bool) -> None:
        """A snapshot began.

        Args:
            step: Of it.
            is_complete: Storage gets a dense checkpoint by it.
        """
        if is_complete:
            self.dense_step = step

    def ended(self, step: int, *, committed: bool) -> None:
        """It was committed, or failed."""
        if not committed and step == self.dense_step:
            self.dense_step = 0


def gradient_factor(plan: SnapshotPlan, sizes: Mapping[str, OperatorBytes]) -> float | None:
    """Returns how many times more a plan's operators would weigh in full than with gradients; None without these.

    The paper says up to 5 (MoEtion, section 5.2).

    Args:
        plan: Any.
        sizes: Of its operators, where it has gradients.
    """
    if not plan.gradients:
        return None
    in_full = sum(sizes[op].full for op in plan.operators())
    whole = in_full + sum(sizes[op].full for op in plan.gradients)
    sent = in_full + sum(sizes[op].consumed for op in plan.gradients)
    return whole / sent if sent else None


def _with_coupled(plan: SnapshotPlan, groups: Sequence[frozenset[str]]) -> SnapshotPlan:
    """The plan; of a gradient log, operators that an optimizer couples with anchored ones are anchored, too."""
    if not plan.gradients or not groups:
        return plan
    anchored = frozenset(plan.operators())
    return anchoring(plan, anchored.union(*(group for group in groups if not group.isdisjoint(anchored))))


def anchoring(plan: SnapshotPlan, operators: Collection[str]) -> SnapshotPlan:
    """The plan; those of ``operators`` of which it saves the gradients are saved in full."""
    moved = tuple(op for op in plan.gradients if op in operators)
    if not moved:
        return plan
    logged = tuple(op for op in plan.gradients if op not in operators)
    host_only = plan.operators(Tier.HOST)
    return save_logged(
        plan.step,
        (*plan.operators(), *moved),
        logged,
        host_only=host_only,
        k=plan.k,
        sends_host_only=plan.sends_host_only,
    )


def _begins(size: int) -> str:
    if size == 1:
        return "all operators are saved in one step, as a dense checkpoint"
    return f"a sparse window of {size} steps begins"
