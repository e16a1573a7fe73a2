"""Extra capacity for an expert that came back stale, until it has made up for the tokens that it lost.

MoEtion (arXiv 2412.15411 v1), section 6: "these recovering experts process 10% more tokens until the lost tokens are
replenished", out of capacity that other experts leave unused. Of each layer two rows of whole numbers are kept per
rank, ``[E]`` each:

    left      tokens that the expert has still to process beyond its ordinary share
    carried   what rounding left of earlier passes' portions, in units of ``1 / UNIT`` token

One forward pass of one rank is decided by itself: ``allowance`` says how many more tokens each expert may get,
``share`` deals out what there is, and what was really given is subtracted from ``left``. So a boost ends with the very
token that was lost last, never later, and no rank asks another.

The functions use nothing but what arrays of numpy and tensors of torch have in common: tests and simulations call them
with the former, routers with the latter, which then stay on their device.
"""

from __future__ import annotations

from typing import Any

UNIT = 1_000_000
"""Parts of a token."""

Ints = Any
"""Whole numbers, ``[E]`` unless it says otherwise: a numpy array or a torch tensor of int64."""


def parts_of(boost: float) -> int:
    """``boost`` (0.1: 10 % more) as a whole number of ``1 / UNIT``."""
    return max(1, round(boost * UNIT))


def allowance(ordinary: Ints, outstanding: Ints, carried: Ints, parts: int) -> tuple[Ints, Ints]:
    """Returns the extra tokens that each expert may get in one pass: its portion and the rounding remainder.

    Never more than ``outstanding``.

    Args:
        ordinary: Tokens that the expert gets, or has room for, without a boost.
        outstanding: Tokens still to make up.
        carried: What rounding left of earlier passes. Whole tokens that were allowed and not used are not carried.
        parts: Of ``parts_of``.

    Returns:
        The tokens; and ``carried`` for the next pass, 0 where nothing is left.
    """
    due = (ordinary * parts + carried) * (outstanding > 0)
    return (due // UNIT).clip(max=outstanding), due % UNIT


def share(demand: Ints, pool: Ints) -> Ints:
    """Divides ``pool`` (one number) in proportion to the demand; none gets more than that.

    Shares are rounded down; one more goes to the first of those that were rounded, until the sum is
    ``min(pool, demand.sum())``.
    """
    total = demand.sum()
    total_dealt = pool.clip(max=total)
    dealt = demand * total_dealt // total.clip(min=1)
    rounded = demand * total_dealt % total.clip(min=1) > 0
    return dealt + (rounded & (rounded.cumsum(0) <= total_dealt - dealt.sum()))


def capacities(capacity: int, unused: Ints, extra: Ints) -> Ints:
    """Capacity of each expert of a layer, after some experts got ``extra`` out of unused capacity.

    Their sum is as before, and no expert has less than it uses.

    Args:
        capacity: Of each expert without a boost.
        unused: Of that, what the expert's tokens leave.
        extra: Tokens beyond ``capacity``; in sum at most that of ``unused``, and 0 for experts that leave any.
    """
    return capacity + extra - share(unused, extra.sum())


def deal(tokens: Ints, ranks: int, number: int) -> Ints:
    """Returns one rank's part of lost tokens. The parts differ by at most one, and sum to ``tokens``.

    What cannot be divided begins with another rank for each expert.

    Args:
        tokens: ``[..., E]``, a numpy array.
        ranks: That route tokens to these experts.
        number: Which of them, from 0.
    """
    over = tokens % ranks
    first = tokens.cumsum(-1) - tokens  # so that experts that lost one token each do not all go to one rank
    return tokens // ranks + ((number - first) % ranks < over)
