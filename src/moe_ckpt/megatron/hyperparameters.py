"""The hyperparameters, step counts and loss scales of Megatron's optimizers, and how they differ between runs.

Another layout has other param groups (without expert parallelism none of experts), so groups are matched by their
multipliers and flags. The scheduler sets the values of a group that matches none.

And the kind of the inner optimizers, so that no other kind takes over their state. Megatron uses Transformer Engine's
Adam where installed, else Apex's, else torch's. Their update and state are the same, so a run may change between them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe_ckpt.driver.changes import Change, differing, plain_values, same
from moe_ckpt.driver.host import Stateful
from moe_ckpt.errors import optimizer_changed
from moe_ckpt.megatron.optimizers import STEP, leaves, read_step, write_step
from moe_ckpt.modeling.optimizer_state import IMPLEMENTATION_FLAGS, class_name, fitted, require_plain

log = logging.getLogger("moe_ckpt")

_Kind = tuple[tuple[str, Any], ...]

SCHEDULER = "scheduler"
"""Name of the scheduler among what is saved beside model and optimizer."""
EXPERT = "is_expert_parallel"
_NOT_OURS = IMPLEMENTATION_FLAGS | {"params", STEP}
_SCHEDULED = frozenset({"lr", "weight_decay"})
"""What Megatron's scheduler sets in param groups, from settings of its own."""
_POSITION = frozenset({"num_steps", "step"})


def read(optimizer: Any) -> dict[str, Any]:
    """Returns {"step": int or None, "groups": [...], "scalers": [state or None of each leaf]}.

    Raises:
        UnencodableStateError: A value, which is named, is no plain data.
    """
    groups = settings(optimizer)
    for number, entry in enumerate(groups):
        require_plain(entry, f"optimizer/param_groups/{number}")
    scalers = [None if scaler is None else scaler.state_dict() for scaler in _scalers(optimizer)]
    return {"step": read_step(optimizer), "groups": groups, "scalers": scalers}


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Returns what the param groups hold beside parameters and step counts."""
    return [{key: value for key, value in group.items() if key not in _NOT_OURS} for group in _groups(optimizer)]


def write(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Writes what ``read`` returned, after the optimizers' tensors were made."""
    write_settings(optimizer, stored["groups"])
    write_step(optimizer, stored["step"])
    scales = [state for state in stored["scalers"] if state]  # a constant scale has no state
    for number, scaler in enumerate(_scalers(optimizer)):
        if scaler is not None and scales:  # by position, since each has its own overflows
            scaler.load_state_dict(scales[min(number, len(scales) - 1)])


def write_settings(optimizer: Any, stored: Sequence[Mapping[str, Any]]) -> None:
    """Writes what ``settings`` gave into the param groups."""
    for group, entry in matched(list(_groups(optimizer)), stored):
        for key in entry.keys() - {EXPERT}:
            group[key] = fitted(group.get(key), entry[key])


def _scalers(optimizer: Any) -> list[Any]:
    return [getattr(leaf, "grad_scaler", None) for leaf in leaves(optimizer)]


def _groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    for leaf in leaves(optimizer):
        yield from leaf.optimizer.param_groups


def matched(
    here: Sequence[dict[str, Any]], stored: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Yields each group with the stored one of its kind: by position, if the kinds are equal throughout.

    Several of one kind (``decoupled_lr`` makes two) have the same order on every layout. Experts have groups of their
    own under expert parallelism, and are in the dense ones without it.
    """
    if [_kind(group) for group in here] == [_kind(entry) for entry in stored]:
        yield from zip(here, stored, strict=True)
        return
    used: Counter[_Kind] = Counter()
    for group in here:
        kind = _kind(group)
        candidates = [entry for entry in stored if _kind(entry) == kind]
        candidates = candidates or [entry for entry in stored if _without_expert(_kind(entry)) == _without_expert(kind)]
        if candidates:
            yield group, candidates[min(used[kind], len(candidates) - 1)]
            used[kind] += 1
        else:
            log.info("no param group of kind %s in the checkpoint; the scheduler sets its rates", kind)


def _without_expert(kind: _Kind) -> _Kind:
    return tuple(entry for entry in kind if entry[0] != EXPERT)


def _kind(group: Mapping[str, Any]) -> _Kind:
    """Returns what distinguishes Megatron's groups (``wd_mult``, ``lr_mult``, ``is_expert_parallel``, ...)."""
    return tuple(sorted((key, v) for key, v in group.items() if key.endswith("_mult") or key.startswith("is_")))


def configured(optimizer: Any, stateful: Mapping[str, Stateful]) -> dict[str, Any]:
    """Returns the present hyperparameters of optimizer and scheduler, as plain data."""
    return as_plain(settings(optimizer), stateful[SCHEDULER].state_dict() if SCHEDULER in stateful else {})


def as_plain(groups: Sequence[Mapping[str, Any]], scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of param groups and scheduler state that the user chooses."""
    scheduler = plain_values(scheduler)
    computed = _SCHEDULED if "max_lr" in scheduler else frozenset()
    return {
        "groups": [_without(plain_values(group), computed | _POSITION) for group in groups],
        "scheduler": _without(scheduler, _POSITION),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], used: Mapping[str, Any]) -> list[Change]:
    """Returns the differences, each once, also where several param groups and the scheduler have it.

    Args:
        before: Result of ``configured`` when the run began.
        now: When this process began.
        used: After the checkpoint was loaded, so that it tells whose value is used.
    """
    differences: dict[tuple[str, str, str], Change] = {}
    places = {id(group): number for number, group in enumerate(now["groups"])}
    pairs = [
        ("optimizer ", old, new, used["groups"][places[id(new)]])
        for new, old in matched(now["groups"], before["groups"])
    ]
    for name, old, new, in_force in [*pairs, ("scheduler ", before["scheduler"], now["scheduler"], used["scheduler"])]:
        for change in differing(name, old, new, from_checkpoint=True):
            key = change.where.removeprefix(name)
            if key != EXPERT:  # a flag of the layout
                retained = same(old.get(key), in_force.get(key))
                differences.setdefault((key, change.before, change.now), replace(change, from_checkpoint=retained))
    return list(differences.values())


def _without(values: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def read_classes(optimizer: Any) -> list[dict[str, str]]:
    """Returns ``{"class": ..., "kind": ...}`` of the rank's inner optimizers, each once; kinds: Adam, AdamW, SGD."""
    kinds = {(class_name(leaf.optimizer), _kind_of(leaf.optimizer)) for leaf in leaves(optimizer)}
    return [{"class": name, "kind": kind} for name, kind in sorted(kinds)]


def require_same_kind(optimizer: Any, plain: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` unless stored state is of the running optimizer's kind. Changes nothing.

    Args:
        optimizer: Megatron's.
        plain: ``MegatronTrainingState.plain()`` of the checkpoint.
    """
    running, stored = read_classes(optimizer), plain["optimizer_classes"]
    here, before = ({entry["kind"] for entry in entries} for entries in (running, stored))
    if before and here and not before & here:  # a rank whose parameters are all frozen has no optimizer
        names = (", ".join(entry["class"] for entry in entries) for entries in (stored, running))
        raise optimizer_changed("the optimizer", *names)


def _kind_of(inner: Any) -> str:
    name = type(inner).__name__.removeprefix("Fused")
    return "AdamW" if name == "Adam" and type(inner).__name__ != name and getattr(inner, "adam_w_mode", True) else name
