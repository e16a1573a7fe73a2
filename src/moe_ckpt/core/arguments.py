"""Error messages for arguments that do not exist: they name the nearest valid argument, or all."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from moe_ckpt.errors import ConfigError

Kind = TypeVar("Kind")


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns the end of an error message: the known name nearest to ``name``, or all known names."""
    close = difflib.get_close_matches(name, names, 1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(names))}"


def named_arguments(kind: type[Kind]) -> type[Kind]:
    """Class decorator for dataclasses that users write down, on top of ``dataclass``.

    Wrong arguments raise ``ConfigError`` with the class, the argument and the nearest right one, in place of a
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
                raise ConfigError(f"{kind.__name__}({name}=...): no such option; {nearest(name, names)}")
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
