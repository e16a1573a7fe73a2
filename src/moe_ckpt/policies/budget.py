"""Spends the budget for lost tokens (Dynamic-K), and keeps checkpoints within it.

PLT, the portion of lost tokens, is the tokens lost in all recoveries over the tokens routed (PEC, section 3). MLT, the
momentary lost tokens, is the portion of each layer's tokens that one recovery loses (``core.tokens.tokens_at_risk``).
All functions are pure, and everything that they need is in the manifest, so their results are the same after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction

import numpy as np

from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.base import PolicyContext
from moe_ckpt.policies.selectors import Expert, in_shape

PLT_BUDGETS = {"default": 0.05, "strict": 0.0375, "loose": 0.075}
"""default: PEC's Dynamic-K. strict: MoC-System (ASPLOS'25). loose: the most without harm to quality in the PEC
paper."""

MLT_BUDGETS = {"default": 0.03, "loose": 0.06}
"""MoEtion, arXiv 2412.15411 v1, table 1. default: loss stays flat. loose: beyond it, loss rises sharply."""

_MLT_UNITS = 1 << 40
"""Unit of portions of a layer's tokens, rounded up: whole numbers are equal on all ranks."""


def resolve_budget(value: float | str, owner: str = "plt_budget", names: Mapping[str, float] = PLT_BUDGETS) -> float:
    """Returns the portion of lost tokens for a number between 0 and 1, or a name.

    Args:
        value: The number or the name.
        owner: The setting in the message, such as ``MoC: plt_budget``.
        names: Name -> portion.

    Raises:
        ConfigError: ``value`` is neither.
    """
    if isinstance(value, str) and value in names:
        return names[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1:
        return float(value)
    known_names = ", ".join(f"{name!r} ({budget:.2%})" for name, budget in names.items())
    raise ConfigError(
        f"{owner}={value!r}: the budget for lost tokens must be a number between 0 and 1, both excluded, "
        f"such as 0.05 for 5 %, or one of {known_names}"
    )


def dynamic_k(k: int, experts: int, lost: int, routed: int, budget: float) -> int:
    """Returns K after ``lost`` of ``routed`` tokens are lost: it doubles when half of the remaining budget is used up.

    Dynamic-K, PEC section 3.1. The levels are k, 2k, 4k, ... up to ``experts``, at which no tokens are lost; level i
    may lose ``budget / 2**(i+1)`` of all tokens routed so far. So all levels together stay below the budget. As more
    tokens are routed, K falls again, to what the run can afford. (In the paper K only rises. A long run that fails
    often then ends with dense checkpoints, and most of its budget unspent.)
    """
    allowed, share = Fraction(0), _exactly(budget)
    while k < experts:
        share /= 2
        allowed += share
        if lost <= allowed * routed:
            break
        k = min(2 * k, experts)
    return k


def tokens_left(context: PolicyContext, budget: float) -> int:
    """Returns the number of tokens that may still be lost at this step; below 0 if the budget is exceeded.

    Exact, so that no rounding lets PLT exceed the budget.
    """
    return int(_exactly(budget) * context.tokens.routed_tokens // 1) - context.run.lost_tokens


def _exactly(budget: float) -> Fraction:
    """Returns the decimal number as written: 0.15, not the binary fraction just below it."""
    return Fraction(str(budget))


def top_up(context: PolicyContext, stored: Collection[Expert] | Counts, budget: float) -> tuple[Expert, ...]:
    """Returns experts to save beside ``stored``, so that a failure that returns to this checkpoint keeps the budget.

    A failure returns to a committed checkpoint. If ``lost + unsaved tokens of the experts that it does not have <=
    budget * routed`` was true when each checkpoint was planned, PLT is within the budget after any failure, whatever K
    is. The result has as few experts as possible, those with most unsaved tokens first, then by layer and index; all
    experts with unsaved tokens if even that is not enough.

    Early in a run few tokens were routed, and one round of unsaved tokens is a large share of them, so checkpoints are
    denser: for about ``every_n_steps * (ceil(E/K) - 1) / (2 * budget)`` steps, since ceil(E/K) checkpoints in turn
    leave (ceil(E/K) - 1) / 2 intervals' tokens unsaved on average.

    Args:
        context: Of this step.
        stored: Experts that the checkpoint saves anyway, also as ``[n, 2]``, layer and expert.
        budget: For PLT.
    """
    unsaved = _unsaved_without(context, stored)
    return _fewest(unsaved, int(unsaved.sum()) - max(tokens_left(context, budget), 0))


def top_up_mlt(context: PolicyContext, stored: Collection[Expert] | Counts, budget: float) -> tuple[Expert, ...]:
    """Returns ``top_up`` for a budget of MLT, which limits the loss of a recovery to this checkpoint alone.

    An expert weighs as much as its part of its layer's tokens, rounded up by less than 1e-12. Early in a run
    checkpoints are denser for the same time as with ``top_up``, with the budget of MLT in the formula.
    """
    portions = _portions(context, _unsaved_without(context, stored))
    allowed = int(_exactly(budget) * len(context.model.catalog.layers) * _MLT_UNITS // 1)
    return _fewest(portions, int(portions.sum()) - allowed)


def _portions(context: PolicyContext, unsaved: Counts) -> Counts:
    """Returns ``[L, E]`` unsaved part of the layer's tokens, in ``_MLT_UNITS``."""
    routed = context.tokens.routed
    whole = np.maximum(unsaved.sum(axis=1), routed if len(routed) == len(unsaved) else 0)
    parts = unsaved / np.maximum(whole, 1)[:, None]  # a single division rounds alike on all processors
    units: Counts = np.ceil(parts * _MLT_UNITS).astype(np.int64)
    return units


def _fewest(weights: Counts, excess: int) -> tuple[Expert, ...]:
    """Returns the fewest experts that weigh ``excess`` together, the heaviest first; all with weight if too few."""
    if excess <= 0:
        return ()
    flat = weights.ravel()
    order = np.argsort(-flat, kind="stable")
    needed = int(np.searchsorted(np.cumsum(flat[order]), excess)) + 1
    rows, experts = np.divmod(order[:needed], weights.shape[1])
    return tuple(sorted(zip(rows.tolist(), experts.tolist(), strict=True)))


def _unsaved_without(context: PolicyContext, stored: Collection[Expert] | Counts) -> Counts:
    unsaved = in_shape(context, context.tokens.unsaved, 0).copy()
    listed = stored if isinstance(stored, np.ndarray) else np.asarray(list(stored), dtype=np.int64)
    if len(listed):
        unsaved[tuple(listed.T)] = 0
    return unsaved
