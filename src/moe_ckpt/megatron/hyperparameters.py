"""What Megatron's optimizers hold beside tensors: hyperparameters, step counts, loss scales.

On another layout the groups are others (without expert parallelism there are none of experts), so a group is known by
what made it a group: its multipliers and flags. What finds no group of its kind is set by the scheduler anyway.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_ckpt.megatron.optimizers import STEP, leaves, read_step, write_step
from moe_ckpt.modeling.param_groups import IMPLEMENTATION_FLAGS, fitted, require_plain

log = logging.getLogger("moe_ckpt")

_Kind = tuple[tuple[str, Any], ...]

_EXPERT = "is_expert_parallel"
_NOT_OURS = IMPLEMENTATION_FLAGS | {"params", STEP}


def read(optimizer: Any) -> dict[str, Any]:
    """Plain data: {"step": int or None, "groups": [...], "scalers": [state or None of each leaf]}.

    Raises:
        UnencodableStateError: names a value that is no plain data.
    """
    groups = []
    for number, group in enumerate(_groups(optimizer)):
        entry = {key: value for key, value in group.items() if key not in _NOT_OURS}
        require_plain(entry, f"optimizer/param_groups/{number}")
        groups.append(entry)
    scalers = [s.state_dict() if (s := _scaler(leaf)) is not None else None for leaf in leaves(optimizer)]
    return {"step": read_step(optimizer), "groups": groups, "scalers": scalers}


def write(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Inverse of ``read``, after the optimizers' tensors were made."""
    there: Sequence[Mapping[str, Any]] = stored["groups"]
    for group, entry in _matched(list(_groups(optimizer)), there):
        for key in entry.keys() - {_EXPERT}:
            group[key] = fitted(group.get(key), entry[key])
    write_step(optimizer, stored["step"])
    scales = [state for state in stored["scalers"] if state]  # a constant scale has no state
    for number, leaf in enumerate(leaves(optimizer)):
        scaler = _scaler(leaf)
        if scaler is not None and scales:  # each sees its own overflows: by position, as far as there are as many
            scaler.load_state_dict(scales[min(number, len(scales) - 1)])


def _scaler(leaf: Any) -> Any:
    return getattr(leaf, "grad_scaler", None)


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    for leaf in leaves(optimizer):
        yield from leaf.optimizer.param_groups


def _matched(
    here: Sequence[dict[str, Any]], there: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Each group with the stored one of its kind: the one at its own place, if they are of one kind throughout.

    Several of one kind (``decoupled_lr`` makes two) come in one order on every layout. With expert parallelism experts
    have groups of their own, without it they are in the dense ones.
    """
    if [_kind(group) for group in here] == [_kind(entry) for entry in there]:
        yield from zip(here, there, strict=True)
        return
    used: Counter[_Kind] = Counter()
    for group in here:
        kind = _kind(group)
        found = [entry for entry in there if _kind(entry) == kind]
        found = found or [entry for entry in there if _without_expert(_kind(entry)) == _without_expert(kind)]
        if found:
            yield group, found[min(used[kind], len(found) - 1)]
            used[kind] += 1
        else:
            log.info("no param group of kind %s in the checkpoint; the scheduler sets its rates", kind)


def _without_expert(kind: _Kind) -> _Kind:
    return tuple(entry for entry in kind if entry[0] != _EXPERT)


def _kind(group: Mapping[str, Any]) -> _Kind:
    """What tells Megatron's groups apart (``wd_mult``, ``lr_mult``, ``is_expert_parallel``, ...)."""
    telling = {key: value for key, value in group.items() if key.endswith("_mult") or key.startswith("is_")}
    return tuple(sorted(telling.items()))
