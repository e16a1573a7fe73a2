"""The budget for lost tokens: how Dynamic-K spends it, and how checkpoints are kept within it.

PLT, the portion of lost tokens, is the tokens lost in all recoveries over the tokens routed (PEC, section 3). MLT, the
momentary lost tokens, is what one recovery loses, of each layer's own tokens (``core.tokens.tokens_at_risk``). All
functions are pure, and everything they need is in the manifest, so their results are the same after a restart.
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
"""default: PEC's Dynamic-K. strict: MoC-System (ASPLOS'25). loose: where the PEC paper saw no harm to quality yet."""

MLT_BUDGETS = {"default": 0.03, "loose": 0.06}
"""MoEtion, arXiv 2412.15411 v1, table 1. default: loss stays flat. loose: beyond it, loss rises sharply."""

_MLT_UNITS = 1 << 40
"""Portions of a layer's tokens are counted in such parts, rounded up: whole numbers, which are equal on all ranks."""


def resolve_budget(value: float | str, owner: str = "plt_budget", names: Mapping[str, float] = PLT_BUDGETS) -> float:
    """The portion of lost tokens that ``value`` stands for: a number between 0 and 1, or one of ``names``.

    Args:
        owner: What the message calls the setting, such as ``MoC(plt_budget=``.

    Raises:
        ConfigError: neither.
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
    """K once ``lost`` of ``routed`` tokens are lost: it doubles whenever half of the budget's rest is used up.

    Dynamic-K, PEC section 3.1. The levels are k, 2k, 4k, ... up to ``experts``, where nothing is lost any more; level i
    may lose ``budget / 2**(i+1)`` of all tokens routed so far. So all levels together stay below the budget, however
    many there are. Tokens routed since then make room: K falls again, to what the run can afford. (The paper only
    ever raises it. A long run that fails often then ends with dense checkpoints, most of its budget unspent.)
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
    """Tokens that may still be lost at this step; below 0 when the budget is broken already.

    Exact, so that PLT never exceeds the budget by a rounding.
    """
    return int(_exactly(budget) * context.tokens.routed_tokens // 1) - context.run.lost_tokens


def _exactly(budget: float) -> Fraction:
    """The number as it is written: 0.15, not the binary fraction just below it."""
    return Fraction(str(budget))


def top_up(context: PolicyContext, stored: Collection[Expert] | Counts, budget: float) -> tuple[Expert, ...]:
    """The wall: experts to save beside ``stored``, so that a fault that returns to this checkpoint keeps the budget.

    A fault returns to a committed checkpoint. If ``lost + unsaved tokens of the experts it does not hold <=
    budget * routed`` was true when each was planned, PLT is within the budget after any fault, whatever K is.
    Returns the fewest experts that do it, those with most unsaved tokens first, then by layer and index; every expert
    with unsaved tokens where even that is not enough.

    Early in a run few tokens were routed, and one round of unsaved tokens is a large share of them, so checkpoints
    are denser: for about ``every_n_steps * (ceil(E/K) - 1) / (2 * budget)`` steps, since ceil(E/K) checkpoints in turn
    leave (ceil(E/K) - 1) / 2 intervals' tokens unsaved on average.

    Args:
        stored: Also as ``[n, 2]``, layer and expert.
    """
    unsaved = _unsaved_without(context, stored)
    return _fewest(unsaved, int(unsaved.sum()) - max(tokens_left(context, budget), 0))


def top_up_mlt(context: PolicyContext, stored: Collection[Expert] | Counts, budget: float) -> tuple[Expert, ...]:
    """Returns ``top_up`` for a budget of MLT: a recovery to this checkpoint loses no more of its layers' tokens.

    Other recoveries do not count. An expert weighs as much as its part of its layer's tokens, rounded up by less than
    1e-12. Early in a run checkpoints are denser for the same time, with the budget of MLT in the place of PLT's.
    """
    portions = _portions(context, _unsaved_without(context, stored))
    allowed = int(_exactly(budget) * len(context.model.catalog.layers) * _MLT_UNITS // 1)
    return _fewest(portions, int(portions.sum()) - allowed)


def _portions(context: PolicyContext, unsaved: Counts) -> Counts:
    """``[L, E]`` part of its layer's tokens, in ``_MLT_UNITS``."""
    routed = context.tokens.routed
    whole = np.maximum(unsaved.sum(axis=1), routed if len(routed) == len(unsaved) else 0)
    parts = unsaved / np.maximum(whole, 1)[:, None]  # one division each, which rounds alike everywhere
    units: Counts = np.ceil(parts * _MLT_UNITS).astype(np.int64)
    return units


def _fewest(weights: Counts, excess: int) -> tuple[Expert, ...]:
    """The fewest experts that weigh ``excess`` together, the heaviest first; all that weigh anything if too few."""
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
