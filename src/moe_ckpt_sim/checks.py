"""Checks of settings that are numbers: the error names the owner, the field and what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from moe_ckpt.errors import ConfigError

MOST = 1e30
"""Rates, times and sizes above it, or below its inverse, are mistakes that would overflow later."""
MOST_WHOLE = 2**53
"""Larger whole numbers are not exact as floats."""


def not_none(**fields: Any) -> dict[str, Any]:
    """The fields that are not None. Optional fields are checked only where they are set."""
    return {name: value for name, value in fields.items() if value is not None}


def above_zero(owner: str, **fields: Any) -> None:
    """Require every field to be a finite number above 0."""
    for name, value in fields.items():
        if not (_number(value) and value > 0):
            raise ConfigError(f"{owner}({name}={value!r}): {name} must be a finite number above 0")
        if not 1 / MOST <= value <= MOST:
            raise ConfigError(f"{owner}({name}={value!r}): {name} must be between {1 / MOST:g} and {MOST:g}")


def at_least(owner: str, least: float, **fields: Any) -> None:
    """Require every field to be a finite number of at least ``least``."""
    for name, value in fields.items():
        if not (_number(value) and value >= least):
            raise ConfigError(f"{owner}({name}={value!r}): {name} must be a finite number of at least {least:g}")
        if value > MOST:
            raise ConfigError(f"{owner}({name}={value!r}): {name} must not be above {MOST:g}")


def portion(owner: str, **fields: Any) -> None:
    """Require every field to be a number from 0 to 1."""
    for name, value in fields.items():
        if not (_number(value) and 0 <= value <= 1):
            raise ConfigError(f"{owner}({name}={value!r}): {name} must be a number from 0 to 1")


def whole(owner: str, least: int = 1, **fields: Any) -> None:
    """Require every field to be a whole number of at least ``least``."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{owner}({name}={value!r}): {name} must be a whole number of at least {least}")
        if value > MOST_WHOLE:
            raise ConfigError(f"{owner}({name}={value!r}): {name} must not be above {MOST_WHOLE}")


def flag(owner: str, **fields: Any) -> None:
    """Require every field to be true or false."""
    for name, value in fields.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{owner}({name}={value!r}): {name} must be true or false")


def one_of(owner: str, choices: Mapping[str, Any] | tuple[str, ...], **fields: Any) -> None:
    """Require every field to be one of ``choices``."""
    for name, value in fields.items():
        if value not in tuple(choices):
            raise ConfigError(f"{owner}({name}={value!r}): choose from {', '.join(map(repr, choices))}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
