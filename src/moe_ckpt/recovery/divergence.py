"""Whether a step that was computed again is the step that it was: by all that does not depend on weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from moe_ckpt.errors import ReplayDivergedError

Repeated = tuple[str, Callable[[Mapping[str, Any]], Any]]
"""(what it is, where it is found in an adapter's plain state): random numbers, schedules, positions in the data."""


def require_repeated(
    step: int, parts: Iterable[Repeated], recorded: Mapping[str, Any], captured: Mapping[str, Any]
) -> None:
    """Called after each step of a replay. recorded, captured: plain state of the first time and of this one.

    Raises:
        ReplayDivergedError: names the first of ``parts`` that differs.
    """
    for name, part in parts:
        try:
            before = part(recorded)
        except (LookupError, TypeError) as error:
            raise ReplayDivergedError(step, f"{name} was not recorded ({type(error).__name__}: {error})") from error
        if not same_plain(before, part(captured)):
            raise ReplayDivergedError(step, f"{name} differs from what was recorded")


def same_plain(one: Any, other: Any) -> bool:
    """True if two values of plain state are equal, tensors and arrays in them to the last bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_plain(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_plain, one, other))
    if isinstance(one, (torch.Tensor, Mapping, list, tuple)) or isinstance(other, (torch.Tensor, Mapping, list, tuple)):
        return False
    found = one == other
    return bool(found.all()) if hasattr(found, "all") else bool(found)
