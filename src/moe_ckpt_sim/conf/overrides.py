"""Refuses overrides that name unknown settings, with a message that lists the known ones.

Hydra accepts any key that is added with ``+``, although nothing would read it; for an unknown key it only advises to
add it.

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
"""The only group without a required choice."""
VALUES = ("duration_secs", "seed")
"""Settings that belong to no group."""


def require_known_places(overrides: Sequence[Override], groups: Mapping[str, object]) -> None:
    """Require each override that adds something to add it to a known group or value, and none to set up Hydra itself.

    Args:
        groups: The known groups.

    Raises:
        ConfigError: names the override.
    """
    for one in overrides:
        target = one.package or one.key_or_group
        first = re.split("[./]", target)[0]
        if "hydra" in (first, re.split("[./]", one.key_or_group)[0]):
            raise ConfigError(
                f"{one.input_line}: Hydra's own settings have no effect here: no job is started and no output "
                "directory is made; use --config-dir for your own groups"
            )
        added = one.is_add() or one.is_force_add() or one.package
        if added and first not in (*groups, *VALUES):
            raise ConfigError(f"{one.input_line}: nothing reads {target!r}; {known_groups(groups)}")


def require_choice(text: str, groups: Mapping[str, Mapping[str, object]]) -> None:
    """Require ``text``, of the form key=value, to choose something if the key is a group.

    Raises:
        ConfigError: it chooses nothing, or null for a group that requires a choice; the message lists the choices.
    """
    key, _, value = (part.strip() for part in text.lstrip("+").partition("="))
    if key in groups and (not value or (value.lower() == "null" and key != OPTIONAL)):
        raise ConfigError(f"{text}: no such choice; there are {', '.join(groups[key])}")


def without_null(chosen: Sequence[str]) -> list[str]:
    """Leave out ``setup=null`` and setups before it. It means no setup, but Hydra knows null only as a default."""
    mine = [at for at, text in enumerate(chosen) if text.partition("=")[0] == OPTIONAL]
    none = [at for at in mine if chosen[at].partition("=")[2].lower() == "null"]
    last = max(none, default=-1)
    return [text for at, text in enumerate(chosen) if at not in mine or at > last]


def no_such_key(overrides: Sequence[str], tree: Tree, groups: Mapping[str, object]) -> ConfigError | None:
    """The error for the first of ``overrides`` whose key is not in ``tree``; None if all keys are.

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
                names = list(node) if at else [*groups, *VALUES]
                instead = _named(parts[-1], tree) or _spelled(parts, at, names)
                hint = f"did you mean {' or '.join(f'{one}={value}' for one in instead)}? " if instead else ""
                return ConfigError(f"{key}: no such setting; {hint}{_has(parts[:at], names, groups)}")
            node = node[part]
    return None


def known_groups(groups: Mapping[str, object]) -> str:
    """The groups and settings that exist, in words."""
    return f"there are the groups {', '.join(sorted(groups))} and the settings {', '.join(VALUES)}"


def _has(parts: Sequence[str], names: Sequence[str], groups: Mapping[str, object]) -> str:
    if not parts:
        return known_groups(groups)
    return f"{'.'.join(parts)} has {', '.join(name for name in names if not name.startswith('_')) or 'none'}"


def _named(name: str, tree: Tree) -> list[str]:
    """The keys in the tree whose last part is ``name``."""
    return [key for key in _keys(tree) if key.rpartition(".")[2] == name]


def _spelled(parts: Sequence[str], at: int, names: Sequence[str]) -> list[str]:
    """The key with part ``at`` replaced by the name that is spelled most like it."""
    return [".".join([*parts[:at], name, *parts[at + 1 :]]) for name in get_close_matches(parts[at], names, 1)]


def _keys(tree: Tree, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if not name.startswith("_"):
            yield prefix + name
            if isinstance(value, dict):
                yield from _keys(value, f"{prefix}{name}.")
