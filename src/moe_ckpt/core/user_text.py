"""Reads and writes text of users: sizes in bytes, durations, lists of ranks, and the names of arguments."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any, TypeVar

from moe_ckpt.errors import ConfigError

_NUMBER = r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*"
_SIZE = re.compile(_NUMBER + r"([KMGTP]?)(i?)B?\s*", re.ASCII | re.IGNORECASE)
_PREFIXES = ("", "K", "M", "G", "T", "P")
_DURATION = re.compile(_NUMBER + r"([a-zA-Z]*)\s*", re.ASCII)
_SECS = {
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(nbytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def name_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """(3,) -> 'rank 3', (0, 1) -> 'ranks 0, 1'.

    Args:
        ranks: At least one.
        most: Ranks beyond this number are not listed, only counted.
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"ranks {', '.join(map(str, ranks[:most]))}{more}"


def parse_bytes(value: object, name: str) -> int:
    """Returns a size in bytes.

    Args:
        value: A whole number, or text such as ``"800MB"``, ``"1.5 GiB"`` or ``"4096"``. MB counts in thousands, MiB in
            powers of 1024.
        name: Name of the setting, for the message.

    Raises:
        ConfigError: ``value`` is no size, or less than one byte.
    """
    size = _size(value)
    if size is None or size < 1:
        raise ConfigError(f"{name}={value!r}: must be a number of bytes of at least 1, such as 8_000_000_000 or '8GB'")
    return size


def _size(value: object) -> int | None:
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or (match[3] and not match[2]):
            return None
        number = float(match[1]) * (1024 if match[3] else 1000) ** _PREFIXES.index(match[2].upper())
        return int(number) if isfinite(number) else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_secs(value: object, name: str, longest_secs: float) -> float:
    """Returns a duration in seconds.

    Args:
        value: A number of seconds, or text such as ``"90"``, ``"90s"``, ``"10min"``, ``"2h"`` or ``"7d"``.
        name: Name of the setting, for the message.
        longest_secs: The longest duration that makes sense for it.

    Raises:
        ConfigError: ``value`` is no duration, not above 0, or longer than ``longest_secs``.
    """
    secs = _secs(value)
    if secs is None or not 0 < secs <= longest_secs:
        raise ConfigError(
            f"{name}={value!r}: must be greater than 0 and at most {longest_secs:g} seconds; "
            "give a number of seconds, or text such as '90s', '10min' or '2h'"
        )
    return secs


def _secs(value: object) -> float | None:
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        unit = None if match is None else _SECS.get(match[2].lower())
        return None if match is None or unit is None else float(match[1]) * unit
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


Kind = TypeVar("Kind")


def suggest_name(name: str, names: Sequence[str]) -> str:
    """Returns the end of an error message: the known name nearest to ``name``, or all known names."""
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(names))}"


def named_arguments(kind: type[Kind]) -> type[Kind]:
    """Decorates a dataclass that users construct, on top of ``dataclass``.

    Wrong arguments raise ``ConfigError`` with the class, the argument and the nearest right one, instead of a
    ``TypeError`` about ``__init__``.
    """
    arguments = [field for field in fields(kind) if field.init]  # type: ignore[arg-type]
    names = [field.name for field in arguments]
    needed = [field.name for field in arguments if field.default is MISSING and field.default_factory is MISSING]
    init = kind.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in names:
                raise ConfigError(f"{kind.__name__}({name}=...): no such option; {suggest_name(name, names)}")
        if len(args) > len(names):
            raise ConfigError(f"{kind.__name__} was given {len(args)} options; there are: {', '.join(names)}")
        positional = names[: len(args)]
        for name in values:
            if name in positional:
                raise ConfigError(f"{kind.__name__}({name}=...): {name} is given twice, once without its name")
        for name in needed:
            if name not in positional and name not in values:
                raise ConfigError(f"{kind.__name__}(): {name} is missing; write {kind.__name__}({name}=...)")
        init(self, *args, **values)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind
