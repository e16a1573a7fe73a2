"""Closed forms of size: bytes of partial checkpoints and sparse windows, as the papers count them.

The papers assume that all experts of a layer are equally large, and MoEvement that all operators of a model are. The
library itself adds up real bytes (``core.window``, ``format.manifest``); these forms are for comparison with papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.checks import above_zero, at_least, whole


def pec_bytes(*, non_expert: int, expert_total: int, k: int, experts: int, bytes_per_param: float) -> int:
    """Bytes of a partial-experts checkpoint: ``(P_ne + K/E * P_e) * B`` (PEC, section 3.1).

    Args:
        non_expert, expert_total: Parameters outside of experts, and of all experts of all layers.
        k: Experts saved of the ``experts`` in each layer; all of them make a full checkpoint.
    """
    return round(_pec_params("pec_bytes", non_expert, expert_total, k, experts, bytes_per_param) * bytes_per_param)


def pec_reduction(*, non_expert: int, expert_total: int, k: int, experts: int) -> float:
    """The portion of a full checkpoint that a partial one leaves out, for any bytes per parameter."""
    saved = _pec_params("pec_reduction", non_expert, expert_total, k, experts, 1.0)
    return 1 - saved / (non_expert + expert_total)


def moetion_bytes(
    *, non_expert: int, one_expert: int, selected: Sequence[int], experts: int, bytes_per_param: float
) -> int:
    """Bytes of a checkpoint of MoEtion, which saves S[l] experts of layer l: ``(P_ne + P_one * sum(S)) * B``.

    arXiv 2412.15411 v1, section 4.3. The sizes in section 7.2 are for 10 bytes per parameter.

    Args:
        non_expert, one_expert: Parameters outside of experts, and of one expert.
        selected: S of each layer.

    Raises:
        ConfigError: a layer selects more than it has.
    """
    owner = "moetion_bytes"
    whole(owner, 0, non_expert=non_expert)
    whole(owner, one_expert=one_expert, experts=experts)
    above_zero(owner, bytes_per_param=bytes_per_param)
    for layer, count in enumerate(selected):
        whole(f"{owner}, layer {layer}", 0, selected=count)
        if count > experts:
            raise ConfigError(f"{owner}, layer {layer}: selected={count} of experts={experts}: there are not so many")
    return round((non_expert + one_expert * sum(selected)) * bytes_per_param)


@dataclass(frozen=True)
class CountedWindow:
    """A window whose slots are equal counts of operators.

    Attributes:
        size: W.
        active: Operators anchored per slot; the last slot may have fewer.
    """

    size: int
    active: int


def window_by_count(*, operators: int, full_bytes: float, compute_bytes: float, budget_bytes: float) -> CountedWindow:
    """MoEvement's Algorithm 1, ``FindWindowSize``, as printed, for comparing with the library's packing by bytes.

    It stops at 2 operators per slot even if these do not fit, without saying that training then stalls. It checks only
    the first slot, which is the heaviest.

    Args:
        full_bytes, compute_bytes: Bytes of each operator: masters and optimizer state; compute weights.
        budget_bytes: Bytes that can be copied in an iteration: bandwidth times its time.
    """
    owner = "window_by_count"
    whole(owner, operators=operators)
    above_zero(owner, full_bytes=full_bytes, compute_bytes=compute_bytes, budget_bytes=budget_bytes)
    active = operators
    while active > 2 and full_bytes * active + compute_bytes * (operators - active) > budget_bytes:
        active -= 1
    return CountedWindow(-(-operators // active), active)


def counted_slot_bytes(
    window: CountedWindow, *, operators: int, full_bytes: float, compute_bytes: float
) -> tuple[float, ...]:
    """Bytes of each slot of such a window: its operators in full, those of later slots as compute weights.

    ``GenerateSchedule`` of the same algorithm divides operators in the same way.

    Raises:
        ConfigError: the window is not one of so many operators.
    """
    owner = "counted_slot_bytes"
    whole(owner, operators=operators)
    at_least(owner, 0, full_bytes=full_bytes, compute_bytes=compute_bytes)
    if not (window.active >= 1 and -(-operators // window.active) == window.size):
        raise ConfigError(f"{owner}: {window} does not hold operators={operators}, each of them once")
    ends = [min(operators, (slot + 1) * window.active) for slot in range(window.size)]
    starts = [0, *ends[:-1]]
    return tuple(
        full_bytes * (end - start) + compute_bytes * (operators - end) for start, end in zip(starts, ends, strict=True)
    )


def mean_window_bytes(slots: Sequence[float]) -> float:
    """Mean bytes per iteration of a window with slots of these sizes, by count or from ``core.window.slot_bytes``."""
    if not slots:
        raise ConfigError("mean_window_bytes(slots=()): a window has at least one slot")
    return fsum(slots) / len(slots)


def _pec_params(owner: str, non_expert: int, expert_total: int, k: int, experts: int, bytes_per_param: float) -> float:
    whole(owner, 0, non_expert=non_expert, k=k)
    whole(owner, expert_total=expert_total, experts=experts)
    above_zero(owner, bytes_per_param=bytes_per_param)
    if k > experts:
        raise ConfigError(f"{owner}(k={k}, experts={experts}): k must not exceed experts")
    return non_expert + expert_total * k / experts
