"""The setting that was perhaps meant by one that the run config does not have: Hydra only says to add it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def nearest_key(words: Sequence[str], directory: Path) -> str:
    """Says what was perhaps meant by the first unknown key in ``words``; empty where nothing is near.

    A key of the same name anywhere else comes first: it may have moved.
    """
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    tree = _composed(settings, directory)
    keys = list(_keys(tree))
    for word in settings:
        key, _, value = word.lstrip("+~").partition("=")
        if key in keys or "/" in key or key.startswith("hydra."):
            continue
        same = [other for other in keys if other.rpartition(".")[2] == key.rpartition(".")[2]]
        if meant := same or _spelled(key.split("."), tree):
            return f"{key}: no such setting; did you mean {' or '.join(f'{one}={value}' for one in meant)}?"
    return ""


def _spelled(parts: Sequence[str], tree: Any) -> list[str]:
    at = 0
    while isinstance(tree, Mapping) and parts[at] in tree:
        tree, at = tree[parts[at]], at + 1
    near = get_close_matches(parts[at], tree, 1) if isinstance(tree, Mapping) else []
    return [".".join([*parts[:at], name, *parts[at + 1 :]]) for name in near]


def _composed(settings: Sequence[str], directory: Path) -> Mapping[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    choices = [word for word in settings if "." not in word.partition("=")[0]]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(directory), version_base="1.3"):
            config = compose("train", [word for word in choices if "/" in word or not word.startswith("+")])
            tree: Any = OmegaConf.to_container(config)
            return dict(tree)
    except (HydraException, OSError, ValueError):
        return {}


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if not name.startswith("_"):
            yield prefix + name
            if isinstance(value, Mapping):
                yield from _keys(value, f"{prefix}{name}.")
