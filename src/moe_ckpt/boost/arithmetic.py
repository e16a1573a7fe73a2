"""Computes the extra capacity of stale experts, until they have made up for their lost tokens.

MoEtion (arXiv 2412.15411 v1), section 6: "these recovering experts process 10% more tokens until the lost tokens are
replenished", out of capacity that other experts leave unused. Each rank has two rows of whole numbers per layer,
``[E]`` each:

    backlog   tokens that the expert has still to process beyond its ordinary share
    carried   the rounded-off part of earlier passes' portions, in units of ``1 / UNIT`` token

Each forward pass of a rank is decided by itself: ``allowance`` computes how many more tokens each expert may get,
``share`` divides the unused capacity, and the tokens taken are subtracted from the backlog. So a boost ends exactly
with the last lost token, and ranks need no messages.

The functions use only operations that numpy arrays and torch tensors have in common: tests and simulations call them
with the former, routers with the latter, which stay on their device.
"""

from __future__ import annotations

from typing import Any

UNIT = 1_000_000
"""Parts of a token."""

Ints = Any
"""Whole numbers, ``[E]`` unless it says otherwise: a numpy array or a torch tensor of int64."""


def parts_of(boost: float) -> int:
    """Returns ``boost`` (0.1: 10 % more) as a whole number of ``1 / UNIT``."""
    return max(1, round(boost * UNIT))


def allowance(ordinary: Ints, outstanding: Ints, carried: Ints, parts: int) -> tuple[Ints, Ints]:
    """Returns the extra tokens that each expert may get in one pass: its portion and the carried remainder.

    Args:
        ordinary: Tokens that the expert gets, or has room for, without a boost.
        outstanding: Tokens still to make up, which the extra tokens do not exceed.
        carried: Rounded-off part of earlier passes. Whole tokens that were allowed and not used are not carried.
        parts: Result of ``parts_of``.

    Returns:
        The extra tokens; and ``carried`` for the next pass, 0 for experts without a backlog.
    """
    due = (ordinary * parts + carried) * (outstanding > 0)
    return (due // UNIT).clip(max=outstanding), due % UNIT


def share(demand: Ints, pool: Ints) -> Ints:
    """Divides ``pool`` (one number) in proportion to the demand; no expert gets more than its demand.

    Shares are rounded down; one more goes to the first of those that were rounded, until the sum is
    ``min(pool, demand.sum())``.
    """
    total = demand.sum()
    total_dealt = pool.clip(max=total)
    dealt = demand * total_dealt // total.clip(min=1)
    rounded = demand * total_dealt % total.clip(min=1) > 0
    return dealt + (rounded & (rounded.cumsum(0) <= total_dealt - dealt.sum()))


def capacities(capacity: int, unused: Ints, extra: Ints) -> Ints:
    """Returns the capacity of each expert of a layer, after some experts got ``extra`` out of unused capacity.

    The sum of capacities does not change, and no expert has less than it uses.

    Args:
        capacity: Capacity of each expert without a boost.
        unused: Part of the capacity that the expert does not use.
        extra: Tokens beyond ``capacity``; in sum at most that of ``unused``, and 0 for experts with unused capacity.
    """
    return capacity + extra - share(unused, extra.sum())


def deal(tokens: Ints, ranks: int, number: int) -> Ints:
    """Returns one rank's part of lost tokens. The parts differ by at most one, and sum to ``tokens``.

    The remainder of each expert begins with another rank.

    Args:
        tokens: ``[..., E]``, a numpy array.
        ranks: Number of ranks that route tokens to these experts.
        number: Number of the rank among them, from 0.
    """
    over = tokens % ranks
    first = tokens.cumsum(-1) - tokens  # so that single lost tokens of many experts do not all go to one rank
    return tokens // ranks + ((number - first) % ranks < over)
