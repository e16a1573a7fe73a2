"""A rank's plain state from before an update, completed with what the update changed on another rank. Pure.

A rank that dies in an update which the others end leaves what it had when its gradients were on their way: random
numbers, buffers, its position in the data. A rank that lives on knows its own state before and after, and so what
counters, schedules and hooks made of it. What was alike before is alike after; what an update leaves alone on every
rank is as it was. Where neither holds, the dead rank's state is unknown, and none is made up.

All is on trees as ``format.tree`` encodes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_ckpt.format.fragment import Fragment

Path = tuple[str, ...]
Change = tuple[list[str | int], Any, Any]
"""(path of a value, what it was, what it became)."""
AFTER = "+after"
"""Ending of the name of a tensor as of the update's end, which another rank has."""
_ANOTHER = "changed in the update, and was not the same on the rank that lived on before"


def replaced(tree: Any, path: Sequence[str], value: Any) -> Any:
    """Returns ``tree`` with another value at ``path``; what is not on the way there is shared.

    Raises:
        KeyError: There is nothing to be replaced.
    """
    if not path:
        return value
    if not isinstance(tree, dict) or path[0] not in tree:
        raise KeyError(path[0])
    return {**tree, path[0]: replaced(tree[path[0]], path[1:], value)}


def changes(before: Any, after: Any) -> list[Change]:
    """Returns what differs, each by its own path, or the innermost list or object with other members."""
    found: list[Change] = []
    _compare(before, after, [], found)
    return found


def _compare(before: Any, after: Any, path: list[str | int], found: list[Change]) -> None:
    if before is after:
        return
    if type(before) is not type(after):
        found.append((path, before, after))
    elif isinstance(before, dict):
        if before.keys() != after.keys():
            found.append((path, before, after))
            return
        for key, value in before.items():
            _compare(value, after[key], [*path, key], found)
    elif isinstance(before, list) and before != after and len(before) == len(after):
        for at, (one, other) in enumerate(zip(before, after, strict=True)):
            _compare(one, other, [*path, at], found)
    elif isinstance(before, Fragment):
        if before.raw != after.raw:
            found.append((path, before, after))
    elif before != after:
        found.append((path, before, after))


def said(path: Iterable[str | int]) -> str:
    """A path as text."""
    return "/".join(map(str, path))


def brought_on(before: Mapping[str, Any], checksums: Mapping[str, str], lent: Mapping[str, Any]) -> Any:
    """Returns a rank's plain state after an update. Tensors that it has from the other rank are named with ``AFTER``.

    Args:
        before: ``foreseen`` of that rank.
        checksums: Of its tensors, by name.
        lent: ``lesson`` of a rank that ended the update.

    Raises:
        ValueError: Nobody knows it; says why.
    """
    if "changes" not in lent:
        raise ValueError("the rank that lived on does not know what the update changed")
    if before["changed"] is None:
        raise ValueError("it had not ended a step of that life, so that nobody knows what changes on it alone")
    alone = sorted(set(before["changed"]).difference(lent["changed"]))
    if alone:
        raise ValueError(f"{alone[0]} changes in its updates, and not in those of the rank that lived on")
    tree, names = before["state"], dict(lent["tensors"])
    for path, was, became in lent["changes"]:
        tree = _changed(tree, path, was, became, path)
    for name, checksum in names.items():
        if checksums.get(name) != checksum:
            raise ValueError(f"{name} {_ANOTHER}")
    return _renamed(tree, names) if names else tree


def _changed(tree: Any, path: Sequence[str | int], was: Any, became: Any, whole: Sequence[str | int]) -> Any:
    if not path:
        if tree != was:
            raise ValueError(f"{said(whole)} {_ANOTHER}")
        return became
    first, rest = path[0], path[1:]
    try:
        inner = tree[first]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"{said(whole)} {_ANOTHER}") from None
    inner = _changed(inner, rest, was, became, whole)
    if isinstance(tree, dict):
        return {**tree, first: inner}
    return [inner if at == first else each for at, each in enumerate(tree)]


def _renamed(tree: Any, names: Collection[str]) -> Any:
    if isinstance(tree, list):
        return [_renamed(each, names) for each in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind == "tensor" and tree["v"] in names:
        return {**tree, "v": tree["v"] + AFTER}
    if kind == "array" and tree["v"][0] in names:
        return {**tree, "v": [tree["v"][0] + AFTER, *tree["v"][1:]]}
    return {key: _renamed(value, names) for key, value in tree.items()}


def foreseen(state: Any, changed: Collection[str] | None) -> dict[str, Any]:
    """Returns what a rank seals of its plain state before an update.

    Args:
        state: Its plain state.
        changed: What updates of this life have changed of it; None before the first.
    """
    return {"state": state, "changed": None if changed is None else sorted(changed)}


class Lesson(NamedTuple):
    """What an update changed of a rank's plain state.

    Attributes:
        changes: But for tensors.
        tensors: Names of those that it changed or made -> checksum before; None where there was none.
    """

    changes: Sequence[Change]
    tensors: Mapping[str, str | None]

    def encoded(self, changed: Collection[str]) -> dict[str, Any]:
        """For a document.

        Args:
            changed: What updates of this life have changed.
        """
        found = [list(each) for each in self.changes]
        return {"changes": found, "tensors": dict(self.tensors), "changed": sorted(changed)}
