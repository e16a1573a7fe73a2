"""``GradientLog``: each step saves some operators in full (anchors), and the gradients of all others.

Between two anchors an operator's state follows from the anchor and the consumed gradients (``ledger.ledger``). So a
recovery needs only optimizer steps: it restores the newest step, and only the step under way is trained again.
MoEtion's Algorithm 3 (arXiv 2412.15411 v1) sends gradients for the same reason, for experts that were sent in full at
the step before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from moe_ckpt.core.operators import Catalog, Remembered
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.tokens import Counts
from moe_ckpt.core.user_text import named_arguments
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import AS_CONSUMED, BF16, TOKENS, Needs, PolicyContext, require_sizes
from moe_ckpt.policies.rolling import LogReport, Rounds, most_held_bytes_per_parameter
from moe_ckpt.policies.selectors import in_shape

AUTO = "auto"


@named_arguments
@dataclass(frozen=True)
class GradientLog:
    """Saves at every step: anchors of some operators (each operator once in W steps), gradients of the others.

    With ``f`` bytes per parameter in full and ``g`` of gradient a step saves ``f/W + g (W - 1)/W`` bytes per parameter.
    W is the smallest number of steps with which a rank can copy that during forward and backward at the measured rate
    and, where peers hold copies, send it within an iteration. While rates are not known, W is ``most_window``, with
    which each step saves least.

    A round is divided by bytes only, in an order that never changes. In a rolling schedule each operator is at each
    distance from its anchor equally often, so the order does not change the cost of a recovery; a new order would leave
    some operators without a new anchor for up to two rounds. (MoEvement anchors popular experts last, since operators
    that are not anchored yet do less work in a replay. Here a replay consists of optimizer steps, which cost the same
    for every expert.) Popularity decides only in the round after everything was saved: steps whose operators got most
    tokens come first, since an expert without tokens has no gradient, and an operator that was not updated since its
    anchor needs no replay.

    Everything is saved in full at the first step, when a checkpoint on storage is due (storage gets dense checkpoints,
    no logs), and when storage lacks an operator. An operator without a complete chain of gradients is anchored at once.

    Needs memory that outlives the process (``moe_ckpt.Memory``), whose ``storage_every`` sets how
    often a checkpoint is written to storage: by default each step is a dense checkpoint.

    Attributes:
        window: W, or ``"auto"`` to compute it as above. Shorter if memory has no room for such a round.
        grad_dtype: ``"as_consumed"`` logs gradients as wide as optimizers consume them. ``"bf16"`` rounds them to bf16
            before each update, on every rank, and logs those: 2 bytes per parameter instead of 4. Training and replay
            are equal in every bit, but training differs from training without it. Gradients of 16 bits are not changed.

    Raises:
        ConfigError: A value out of range.
    """

    window: int | str = AUTO
    grad_dtype: str = AS_CONSUMED
    most_window: ClassVar[int] = 16
    """Upper bound on W, even if a step then does not fit, since memory holds a round and a replay is as long as one."""

    def __post_init__(self) -> None:
        if self.grad_dtype not in (AS_CONSUMED, BF16):
            raise ConfigError(
                f"GradientLog(grad_dtype={self.grad_dtype!r}): choose {AS_CONSUMED!r}, or {BF16!r} to round gradients "
                "before each update, which changes training"
            )
        window = self.window
        if window != AUTO and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ConfigError(
                f"GradientLog(window={window!r}): window must be a whole number of at least 1, the steps in which "
                f"every operator is anchored once, or {AUTO!r} to compute it from measurements"
            )

    @property
    def needs(self) -> Needs:
        return Needs(
            sizes=True,
            popularity=TOKENS,
            gradients=self.grad_dtype,
            tiers=True,
            alone=True,
            next_due=self.next_due,
            warning=self.warning,
        )

    def check(self, catalog: Catalog) -> None:
        """Accepts any model that has at least as many operators as a round has steps."""
        count = len(catalog.operators)
        if not count:
            raise ConfigError("GradientLog: the model has no parameters, so there is nothing to save")
        if isinstance(self.window, int) and self.window > count:
            raise ConfigError(
                f"GradientLog(window={self.window}): the model has only {count} operators, and every step of a round "
                f"anchors one; give a window of at most {count}"
            )

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        """Returns a dense plan, or anchors and gradients of all other operators.

        Raises:
            ConfigError: There is no memory that outlives the process, or ``context`` lacks sizes or anchors.
        """
        catalog, run = context.model.catalog, context.run
        if not context.memory.outlives_process:
            raise ConfigError(
                "GradientLog keeps its log in memory that outlives the process, and there is none: give "
                "memory=moe_ckpt.Memory(storage_every=...), or Hydra's moe_ckpt/memory=local or replicated"
            )
        if run.last_step is None or run.nothing_safe or run.missing or context.memory.storage_due:
            return self._everything(context)
        anchored_at = self._anchored_at(context)
        rounds = self._rounds(context)
        window = self._window(context, rounds)
        number = self._next(context, rounds, window, anchored_at)
        if (anchored_at >= 0).all():
            now, others = rounds.parted(window)[number]
            return SnapshotPlan(run.step, now, gradients=others) if others else self._everything(context)
        anchored = anchored_at < 0
        anchored[rounds.places(window)[number]] = True
        for group in context.model.coupled:
            places = catalog.places_of(tuple(sorted(group)))
            anchored[places] = anchored[places].any()
        if anchored.all():
            return self._everything(context)
        return SnapshotPlan(run.step, catalog.ids_of(anchored), gradients=catalog.ids_of(~anchored))

    def explain(self, context: PolicyContext) -> LogReport:
        """Returns the round that ``context.run.step`` belongs to, with its costs.

        Raises:
            ConfigError: ``context`` lacks sizes.
        """
        rounds = self._rounds(context)
        window = self._window(context, rounds)
        steps = rounds.rank_bytes(window)
        return LogReport(
            window=len(steps),
            dense_bytes=rounds.dense_bytes,
            gradient_bytes=rounds.gradient_bytes,
            heaviest_bytes=max(steps),
            mean_bytes=sum(steps) / len(steps),
            limit_bytes=self._limit_bytes(context, rounds, window),
            most_window=self.most_window,
            unlimited=self._window_by_time(context, rounds),
            iteration_secs=context.measured.recent_iteration_secs,
        )

    def warning(self, context: PolicyContext) -> str | None:
        """See ``Needs.warning``; None until rates are measured, since W is arbitrary before."""
        return None if context.measured.copy_bytes() is None else self.explain(context).warning

    # --- how long a round is ---

    def _window(self, context: PolicyContext, rounds: Rounds) -> int:
        """Returns the fewest steps that fit, or those of the round under way if that is little longer.

        Returns fewer if host memory has no room for a round.
        """
        fewest, memory = self._window_by_time(context, rounds), context.memory
        if memory.snapshot_bytes is None or not memory.outlives_process:
            return fewest
        budget = memory.snapshot_bytes * memory.at_once

        def held(window: int) -> float:
            log = most_held_bytes_per_parameter(window, rounds.gradient_bytes, rounds.dense_bytes)
            return log + memory.at_once * max(rounds.rank_bytes(window))

        return next((window for window in range(fewest, 1, -1) if held(window) <= budget), 1)

    def _window_by_time(self, context: PolicyContext, rounds: Rounds) -> int:
        """Returns ``_window`` for unlimited host memory."""
        if isinstance(self.window, int):
            return self.window
        most = min(self.most_window, rounds.most)
        limits = {window: self._limit_bytes(context, rounds, window) or 0 for window in range(1, most + 1)}
        fitting = [window for window, limit in limits.items() if max(rounds.rank_bytes(window)) <= limit]
        if not fitting:
            return most
        fewest = fitting[0]
        little_longer = [window for window in fitting if window <= fewest + fewest // 4 + 1]
        if len(context.memory.anchored_at) != len(context.model.catalog.operators):
            return fewest
        # A round under way goes on: what was anchored together lately is anchored together in it, too.
        slots = {
            window: [context.memory.anchored_at[slot] for slot in rounds.places(window)] for window in little_longer
        }
        return next((w for w, steps in slots.items() if all(at.min() == at.max() for at in steps)), fewest)

    def _limit_bytes(self, context: PolicyContext, rounds: Rounds, window: int) -> int | None:
        """Returns the most bytes of a step: what can be copied, or sent to peers if that is less; None if not known."""
        measured, memory = context.measured, context.memory
        copied = measured.copy_bytes(memory.budget_fraction)
        sendable = measured.send_bytes(1, memory.budget_fraction) if memory.sends_copies else None
        if copied is None or sendable is None:
            return copied
        sends = memory.sends
        weights = sends.shared_weights and sends.expert_weights
        sent = max(rounds.rank_bytes(window, shared=sends.shared, experts=sends.experts, weights=weights))
        return min(copied, sendable * max(rounds.rank_bytes(window)) // sent) if sent else copied

    # --- which operators are anchored ---

    def _everything(self, context: PolicyContext) -> SnapshotPlan:
        """Returns a dense plan, with the groups that will be anchored together in the next round, if they are known."""
        everything = context.model.catalog.everything
        if not context.model.sizes:
            return SnapshotPlan(context.run.step, everything)
        rounds = self._rounds(context)
        return SnapshotPlan(context.run.step, everything, together=rounds.slots(self._window(context, rounds)))

    def _next(self, context: PolicyContext, rounds: Rounds, window: int, anchored_at: Counts) -> int:
        """Returns the number of the slot with the oldest anchor; of several such slots, of the one with most tokens."""
        slots = rounds.places(window)
        oldest = [int(anchored_at[slot].min()) for slot in slots]
        waiting = [at for at, step in enumerate(oldest) if step == min(oldest)]
        if len(waiting) > 1:
            waiting.sort(key=_tokens(context, slots).__getitem__, reverse=True)  # stable: then the first of the round
        return waiting[0]

    def _anchored_at(self, context: PolicyContext) -> Counts:
        if len(context.memory.anchored_at) != len(context.model.catalog.operators):
            raise ConfigError(
                "GradientLog: MemoryFacts.anchored_at must have every operator of the catalog, "
                f"{len(context.model.catalog.operators)}, and has {len(context.memory.anchored_at)}"
            )
        return context.memory.anchored_at

    def _rounds(self, context: PolicyContext) -> Rounds:
        model = context.model
        require_sizes("GradientLog", model.catalog, model.sizes)
        return _rounds(model.catalog, model.sizes, model.placement, model.coupled)

    def next_due(self, context: PolicyContext) -> int:
        """See ``Needs.next_due``: every step, once."""
        return max(context.run.step, (context.run.last_step or 0) + 1)

    def describe(self) -> dict[str, Any]:
        return {"name": "gradient_log", **asdict(self)}


def _tokens(context: PolicyContext, slots: tuple[Counts, ...]) -> list[int]:
    """Returns the tokens that the experts of each slot got recently."""
    catalog, tokens = context.model.catalog, context.tokens.popularity
    of_operator = np.zeros(len(catalog.operators), dtype=np.int64)
    experts = catalog.all_experts
    of_operator[catalog.is_expert] = in_shape(context, tokens, 0)[tuple(experts.T)]
    return [int(of_operator[slot].sum()) for slot in slots]


_rounds = Remembered(Rounds, most=4)
"""Cached, since cutting is slow. ``sizes`` is a new object only when the model's tensors change."""
