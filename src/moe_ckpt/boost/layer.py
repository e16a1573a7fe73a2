"""The capacity boost of one MoE layer on this rank: stale experts make up for their lost tokens.

MoEtion (arXiv 2412.15411 v1), section 6: "these recovering experts process 10% more tokens until the lost tokens are
replenished", out of capacity that other experts leave unused. Each rank has two rows of whole numbers per layer,
``[E]`` each:

    backlog   tokens that the expert has still to process beyond its ordinary share
    carried   the rounded-off part of earlier passes' portions, in units of ``1 / UNIT`` token

Each forward pass of a rank is decided by itself: ``allowance`` computes how many more tokens each expert may get,
``share`` divides the unused capacity, and the tokens taken are subtracted from the backlog. So a boost ends exactly
with the last lost token, and ranks need no messages. These functions use only operations that numpy arrays and torch
tensors have in common: tests and simulations call them with the former, routers with the latter, on their device.

A router with a capacity per expert asks ``LayerBoost.capacities``. A router without one chooses by scores:
``LayerBoost.select`` gives a stale expert the tokens that came nearest to choosing it. That is the effect of a bias on
its score, for the choice only and not for the weights. The bias is computed anew in each forward pass, as the smallest
one that brings in the allowed tokens, so that none remains when the boost ends. A constant bias could only be tuned
from step to step, and would overshoot.

Everything is computed on the router's device, with kernels whose number does not depend on the number of experts, and
nothing waits for a device. Passes that activation checkpointing repeats inside backward repeat their decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moe_ckpt.modeling.routing import is_recomputed
from moe_ckpt.stopwatch import Stopwatch, timed

_NEVER = float("inf")
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


class BoostPort:
    """Applies a boost to the router of one layer of a live model, by hooks. Used on the training thread.

    Attributes:
        layer: Name of the MoE layer.
        experts: E, its number of experts.
        router: Class name of its router, for messages.
    """

    def __init__(self, layer: str, experts: int, router: str) -> None:
        self.layer, self.experts, self.router = layer, experts, router
        self._handles: list[RemovableHandle] = []

    def refusal(self) -> str | None:
        """Returns why the router cannot apply a boost, and what would make it work; None if it can, as far as is known.

        Some ports only know after the first forward pass. Equal on every rank that has the layer.
        """
        raise NotImplementedError

    def attach(self, boost: LayerBoost) -> None:
        """Makes the router ask ``boost`` from its next forward pass in training mode on."""
        raise NotImplementedError

    def detach(self) -> None:
        """Restores the router. May be called twice."""
        while self._handles:
            self._handles.pop().remove()


class LayerBoost:
    """The tokens that the experts of one layer have still to make up on this rank.

    ``capacities`` and ``select`` are for routers, in forward passes of training. Steps end with ``commit`` or
    ``discard``, which books or forgets the tokens that the step's passes took.

    Args:
        backlog: ``[E]`` tokens still to make up, int64.
        carried: ``[E]`` see the module.
        parts: Result of ``parts_of``.
        stopwatch: Counts the time of calls by routers.

    Attributes:
        backlog: As of the newest step. Never changed in place.
        carried: As of the newest step. Never changed in place.
        asked: True if a router has ever asked.
        stopwatch: As the argument.
    """

    def __init__(
        self, backlog: torch.Tensor, carried: torch.Tensor, parts: int, stopwatch: Stopwatch | None = None
    ) -> None:
        self.stopwatch = stopwatch or Stopwatch()
        self.backlog, self.carried = backlog, carried
        self.asked = False
        self._parts = parts
        self._taken, self._carrying = torch.zeros_like(backlog), carried
        self._passes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._repeated = torch.zeros(0, dtype=torch.bool)

    # --- for routers ---

    @timed
    @torch.no_grad()
    def capacities(self, assigned: torch.Tensor, capacity: int) -> torch.Tensor:
        """Returns how many tokens each expert may take in this pass, ``[E]`` int64, in sum ``E * capacity``.

        A stale expert gets up to 10 % more than ``capacity`` (or as the policy says), as far as more tokens choose it
        and other experts leave capacity unused. To be called once per forward pass. Experts must take as many tokens as
        allowed, since these are counted as taken.

        Args:
            assigned: ``[E]`` tokens that chose each expert, before any is dropped.
            capacity: Capacity of each expert without a boost.
        """
        unused = (capacity - assigned).clip(min=0)
        extra = self.extra((assigned - capacity).clip(min=0), unused, capacity)
        room: torch.Tensor = capacities(capacity, unused, extra)
        return room

    @timed
    @torch.no_grad()
    def extra(self, over: torch.Tensor, unused: torch.Tensor, capacity: int) -> torch.Tensor:
        """Returns how many tokens beyond ``capacity`` each expert takes in this pass, ``[E]``.

        Args:
            over: ``[E]`` tokens that chose the expert and would be dropped.
            unused: ``[E]`` unused part of the expert's capacity.
            capacity: Capacity of each expert.
        """
        self._move_to(over.device)

        def decide() -> torch.Tensor:
            most = self._allow(torch.full_like(self.backlog, capacity))
            taken: torch.Tensor = share(over.clip(max=most), unused.sum())
            self._taken = self._taken + taken
            return taken[None]

        return self._decided(torch.cat([over, unused]), decide, rows=1)[0]

    @timed
    @torch.no_grad()
    def select(
        self,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        *,
        real: torch.Tensor | None = None,
        within: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns ``chosen``, in which some tokens have a stale expert in place of their weakest one.

        A stale expert that ``n`` tokens chose gets ``n / 10`` more (or as the policy says): those whose score of it is
        the least below that of the weakest expert they chose. Stale experts lose no tokens. The router computes weights
        for the result as usual: ``scores.gather(-1, chosen)``.

        Args:
            scores: ``[T, E]`` scores of the choice: logits or probabilities, with any bias of the router.
            chosen: ``[T, k]`` experts with the highest scores.
            real: ``[T]`` False for padding, which is neither counted nor moved; None if all tokens are real.
            within: ``[T, E]`` True for experts that the token may choose; None if it may choose all.
        """
        self._move_to(scores.device)
        counted = torch.ones_like(chosen) if real is None else real[:, None].expand_as(chosen).long()
        assigned = torch.zeros_like(self.backlog).scatter_add_(0, chosen.reshape(-1), counted.reshape(-1))
        places = torch.arange(1, len(chosen) + 1, device=chosen.device)
        decision = self._decided(
            torch.cat([assigned, (chosen * places[:, None]).sum()[None]]),
            lambda: torch.stack([self._backlog_now() > 0, self._allow(assigned)]),
            rows=2,
        )
        behind, most = decision[0] > 0, decision[1]
        margin, slot = _margins(scores, chosen, behind)
        open_to = behind & (most > 0) & torch.isfinite(margin)
        for allowed in (None if real is None else real[:, None], within):
            open_to = open_to if allowed is None else open_to & allowed
        expert, takes = _nearest(margin.masked_fill(~open_to, _NEVER), most)
        if not is_recomputed():
            self._taken = self._taken.scatter_add(0, expert, takes.long())
        replacements = torch.where(takes, expert, chosen.gather(1, slot[:, None])[:, 0])
        return chosen.scatter(1, slot[:, None], replacements[:, None])

    # --- for ``boost.life`` ---

    def commit(self) -> None:
        """Subtracts the tokens that the step's passes took, after its update."""
        self.backlog, self.carried = self._backlog_now(), self._carrying
        self.discard()

    def discard(self) -> None:
        """Forgets the passes since the last step, which led to no update."""
        self._taken, self._carrying = torch.zeros_like(self.backlog), self.carried
        self._passes, self._repeated = [], torch.zeros(0, dtype=torch.bool)

    def _backlog_now(self) -> torch.Tensor:
        return self.backlog - self._taken

    def _allow(self, ordinary: torch.Tensor) -> torch.Tensor:
        most: torch.Tensor
        most, self._carrying = allowance(ordinary, self._backlog_now(), self._carrying, self._parts)
        return most

    def _move_to(self, device: torch.device) -> None:
        if self.backlog.device != device:
            self.backlog, self.carried = self.backlog.to(device), self.carried.to(device)
            self._taken, self._carrying = self._taken.to(device), self._carrying.to(device)

    def _decided(self, mark: torch.Tensor, decide: Callable[[], torch.Tensor], rows: int) -> torch.Tensor:
        """Returns ``decide()``, ``[rows, E]``; inside backward the earlier result for the same ``mark`` in this
        step."""
        self.asked = True
        if not is_recomputed():
            fresh_decision = decide()
            self._passes.append((mark, fresh_decision))
            return fresh_decision
        if not self._passes:
            return self.backlog.new_zeros(rows, len(self.backlog))
        marks, decisions = (torch.stack(list(column)) for column in zip(*self._passes, strict=True))
        fresh = torch.zeros(len(marks) - len(self._repeated), dtype=torch.bool, device=mark.device)
        repeated = torch.cat([self._repeated.to(mark.device), fresh])
        # Passes with equal marks are distinguished by their order, which is that of their backward passes.
        fits = (marks == mark).all(dim=1).int() * 2 - repeated.int()
        at = fits.argmax()
        self._repeated = repeated.scatter(0, at[None], torch.ones_like(repeated[:1]))
        decision: torch.Tensor = decisions.index_select(0, at[None])[0]
        return decision * (fits.max() > 0)


def _margins(scores: torch.Tensor, chosen: torch.Tensor, behind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how far each expert is from being chosen by each token, ``[T, E]``, and the place it would take, ``[T]``.

    The distance is infinite for chosen experts, and for tokens that chose only stale experts.
    """
    values = scores.gather(1, chosen).float().masked_fill(behind[chosen], _NEVER)
    weakest, slot = values.min(dim=1)
    return (weakest[:, None] - scores.float()).scatter(1, chosen, _NEVER), slot


def _nearest(margin: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's nearest expert, ``[T]``, and whether it takes the token, ``[T]``.

    Of the tokens that are nearest to it, an expert takes the ``most`` nearest ones; of equally near ones the first.
    """
    distance, expert = margin.min(dim=1)
    by_distance = distance.argsort(stable=True)
    order = by_distance[expert[by_distance].argsort(stable=True)]
    in_order = expert[order]
    ones = torch.ones_like(in_order)
    of_each = torch.zeros_like(most).scatter_add_(0, in_order, ones)
    first = of_each.cumsum(0) - of_each
    rank = ones.cumsum(0) - 1 - first[in_order]
    takes = (rank < most[in_order]) & torch.isfinite(distance[order])
    return expert, torch.zeros_like(takes).scatter(0, order, takes)
