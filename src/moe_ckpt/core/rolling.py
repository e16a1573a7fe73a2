"""A rolling schedule: at each step some operators are anchored, and of all others the consumed gradients are saved.

W steps make a round, in which every operator is anchored once. With ``f`` bytes per parameter in full (12 in mixed
precision: master weight and two moments) and ``g`` of gradient, a step weighs ``f/W + g (W - 1)/W`` per parameter. The
more steps a round has, the closer that is to ``g``, and the longer a replay. A sparse window (MoEvement, section 3.2)
weighs ``f/W + 2 (W - 1)/(2 W)``, since half of its operators, on average, need nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_ckpt.core.window import OperatorBytes, balance, pack


@dataclass(frozen=True)
class LoggedBytes:
    """Size of one operator in the whole model.

    Attributes:
        full: Master weights, or weights where there are none, and optimizer state.
        gradient: What the optimizer consumes in one update.
    """

    full: int
    gradient: int


def bytes_per_parameter(window: int, gradient: float, full: float = 12.0) -> float:
    """Returns the bytes that each step saves per parameter, with rounds of ``window`` steps.

    Raises:
        ValueError: ``window`` is below 1.
    """
    if window < 1:
        raise ValueError(f"a round of {window} steps")
    return full / window + gradient * (window - 1) / window


def saved_factor(gradient: float, full: float = 12.0) -> float:
    """Returns how many times fewer bytes a gradient has than the full state (MoEtion: up to 5, in Algorithm 3)."""
    return full / gradient


def slot_bytes(slots: Sequence[Iterable[str]], sizes: Mapping[str, LoggedBytes]) -> tuple[int, ...]:
    """Returns what each step of a round saves, all ranks together: its anchors, and gradients of all other operators.

    Args:
        slots: Of one round; together all operators.
        sizes: Of all operators.
    """
    gradients = sum(size.gradient for size in sizes.values())
    return tuple(gradients + sum(sizes[op].full - sizes[op].gradient for op in slot) for slot in slots)


def fewest_slots(
    order: Sequence[str], sizes: Mapping[str, LoggedBytes], limit_bytes: int
) -> tuple[tuple[str, ...], ...] | None:
    """Returns ``order`` cut into the shortest round of which no step weighs more than ``limit_bytes``.

    Returns:
        The slots; None where gradients, or a single operator with them, weigh more than that.
    """
    left = limit_bytes - sum(sizes[op].gradient for op in order)
    return None if left < 0 else pack(order, _beyond_gradients(order, sizes), left)


def even_slots(order: Sequence[str], sizes: Mapping[str, LoggedBytes], most_slots: int) -> tuple[tuple[str, ...], ...]:
    """Returns ``order`` cut into at most ``most_slots`` steps, of which the heaviest weighs as little as it can.

    Raises:
        ValueError: ``most_slots`` is below 1.
    """
    return balance(order, _beyond_gradients(order, sizes), most_slots)


def _beyond_gradients(order: Sequence[str], sizes: Mapping[str, LoggedBytes]) -> dict[str, OperatorBytes]:
    """Returns what anchoring an operator costs beyond its gradient, in the terms of sparse windows."""
    return {op: OperatorBytes(max(0, sizes[op].full - sizes[op].gradient), 0) for op in order}
