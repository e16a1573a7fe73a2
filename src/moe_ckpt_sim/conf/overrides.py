"""Overrides that ask for what is not there, and what to say of them.

Hydra accepts any key that is added with ``+``, although nothing would read it; of a key that it does not know, it only
says to add it. Here such keys are refused, with those that there are.

Needs Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.types import Override

from moe_ckpt.errors import ConfigError

Tree = dict[str, Any]

OPTIONAL = "setup"
"""The only group of which nothing need be chosen."""
VALUES = ("duration_secs", "seed")
"""Settings that belong to no group."""


def require_known_places(overrides: Sequence[Override], groups: Mapping[str, object]) -> None:
    """Every override that adds something adds it to a group or a value that is read, and none is about Hydra itself.

    Args:
        groups: Those there are.

    Raises:
        ConfigError: names the override.
    """
    for one in overrides:
        place = one.package or one.key_or_group
        first = re.split("[./]", place)[0]
        if "hydra" in (first, re.split("[./]", one.key_or_group)[0]):
            raise ConfigError(
                f"{one.input_line}: Hydra's own settings have no effect here: no job is started and no output "
                "directory is made; use --config-dir for your own groups"
            )
        added = one.is_add() or one.is_force_add() or one.package
        if added and first not in (*groups, *VALUES):
            raise ConfigError(f"{one.input_line}: nothing reads {place!r}; {there_are(groups)}")


def require_choice(text: str, groups: Mapping[str, Mapping[str, object]]) -> None:
    """``text``, of the form key=value, chooses something where it is about a group.

    Raises:
        ConfigError: it chooses nothing, or null where that is no choice; with the choices.
    """
    key, _, value = (part.strip() for part in text.lstrip("+").partition("="))
    if key in groups and (not value or (value.lower() == "null" and key != OPTIONAL)):
        raise ConfigError(f"{text}: no such choice; there are {', '.join(groups[key])}")


def without_null(chosen: Sequence[str]) -> list[str]:
    """``setup=null`` means none, but Hydra knows null only as a default: leave out that and setups before it."""
    mine = [at for at, text in enumerate(chosen) if text.partition("=")[0] == OPTIONAL]
    none = [at for at in mine if chosen[at].partition("=")[2].lower() == "null"]
    last = max(none, default=-1)
    return [text for at, text in enumerate(chosen) if at not in mine or at > last]


def no_such_key(overrides: Sequence[str], tree: Tree, groups: Mapping[str, object]) -> ConfigError | None:
    """What is wrong with the first of ``overrides`` whose key is not in ``tree``; None where all are.

    Args:
        tree: The config as plain data, composed with the choices alone.
    """
    for text in overrides:
        key, _, value = text.partition("=")
        if text[0] in "+~" or key in groups:
            continue
        node: object = tree
        parts = key.split(".")
        for at, part in enumerate(parts):
            if not isinstance(node, dict):
                return ConfigError(f"{key}: {'.'.join(parts[:at])} is one value and has no {part}")
            if part not in node:
                known = list(node) if at else [*groups, *VALUES]
                instead = _named(parts[-1], tree) or _spelled(parts, at, known)
                hint = f"did you mean {' or '.join(f'{one}={value}' for one in instead)}? " if instead else ""
                return ConfigError(f"{key}: no such setting; {hint}{_has(parts[:at], known, groups)}")
            node = node[part]
    return None


def there_are(groups: Mapping[str, object]) -> str:
    """What can be said at all."""
    return f"there are the groups {', '.join(sorted(groups))} and the settings {', '.join(VALUES)}"


def _has(parts: Sequence[str], known: Sequence[str], groups: Mapping[str, object]) -> str:
    if not parts:
        return there_are(groups)
    return f"{'.'.join(parts)} has {', '.join(name for name in known if not name.startswith('_')) or 'none'}"


def _named(name: str, tree: Tree) -> list[str]:
    """Keys anywhere that end so."""
    return [key for key in _keys(tree) if key.rpartition(".")[2] == name]


def _spelled(parts: Sequence[str], at: int, known: Sequence[str]) -> list[str]:
    """The key, with part ``at`` as it was perhaps meant."""
    return [".".join([*parts[:at], name, *parts[at + 1 :]]) for name in get_close_matches(parts[at], known, 1)]


def _keys(tree: Tree, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if not name.startswith("_"):
            yield prefix + name
            if isinstance(value, dict):
                yield from _keys(value, f"{prefix}{name}.")
