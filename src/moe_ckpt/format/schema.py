"""Schemas of documents as data: checks of single values, combined into checks of whole documents.

A ``Check`` says what is wrong with a value: "" for nothing, or where and what, such as ``.files[3].rank is -1, but must
be a whole number of at least 0``. It never raises, whatever it is given. Every document of a store, and a run's
profile, is checked this way before anything else reads it (``require``).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_ckpt.errors import DamagedError

Check = Callable[[Any], str]

MOST_WHOLE = 2**63 - 1
"""What an int64 holds; token counts, steps and sizes meet numpy and the process group as such."""
MOST_DEPTH = 128
"""Lists and objects within one another. Ten are usual; readers, copies and trainers walk through them recursively."""
_HUGE = 1e300
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60


def require(check: Check, value: Any, path: str, what: str = "", **where: int | None) -> None:
    """Raise ``DamagedError`` naming the field, unless ``check`` finds nothing wrong.

    Args:
        path: Of the file.
        what: Said before the fault.
        **where: ``step`` and ``rank`` of the file, as far as they are known.
    """
    fault = check(value)
    if fault:
        field = f"field {fault.removeprefix('.')}" if fault.startswith((".", "[")) else f"the document{fault}"
        raise DamagedError(path, f"{what}{field}", **where)


def shown(value: Any) -> str:
    """Returns a value's ``repr`` of at most a line, whatever the value is."""
    try:
        return _shown.repr(value)
    except Exception:  # somebody's __repr__
        return f"a {type(value).__name__}"


# --- single values ---


def value(test: Callable[[Any], bool], requirement: str) -> Check:
    """Returns a check by ``test``.

    Args:
        requirement: What the value must be, in words.
    """

    def check(datum: Any) -> str:
        return "" if test(datum) else f" is {shown(datum)}, but must be {requirement}"

    return check


def anything(datum: Any) -> str:
    return ""


def whole(least: int = 0, most: int = MOST_WHOLE) -> Check:
    """An integer, which true and false are not."""
    bound = f" and at most {most:,}" if most < MOST_WHOLE else ""
    requirement = f"a whole number of at least {least}{bound}"
    return value(lambda datum: type(datum) is int and least <= datum <= most, requirement)


def number(least: float = 0.0, *, above: bool = False, most: float = _HUGE, requirement: str = "") -> Check:
    """A finite integer or float from ``least``, or ``above`` it, to ``most``."""

    def test(datum: Any) -> bool:
        if isinstance(datum, bool) or not isinstance(datum, (int, float)):
            return False
        return datum <= most and (datum > least if above else datum >= least)  # NaN is neither

    return value(test, requirement or f"a finite number {'above' if above else 'of at least'} {least:g}")


def one_of(*choices: Any) -> Check:
    names = " or ".join(map(repr, choices))
    return value(lambda datum: any(type(datum) is type(choice) and datum == choice for choice in choices), names)


def _is_text(datum: Any) -> bool:
    """Text that every file and terminal takes: JSON can spell halves of characters."""
    if not isinstance(datum, str):
        return False
    try:
        datum.encode()
    except UnicodeEncodeError:
        return False
    return True


text = value(_is_text, "text")
flag = value(lambda datum: isinstance(datum, bool), "true or false")


def matching(pattern: re.Pattern[str], requirement: str) -> Check:
    """Accepts text that ``pattern`` matches from beginning to end."""
    return value(lambda datum: _is_text(datum) and pattern.fullmatch(datum) is not None, requirement)


# --- put together ---


def maybe(check: Check) -> Check:
    """Accepts null, or what ``check`` accepts."""

    def checked(datum: Any) -> str:
        fault = "" if datum is None else check(datum)
        return f"{fault}, or null" if fault else ""

    return checked


def listing(item_check: Check, *, least: int = 0, most: int | None = None) -> Check:
    """A list of things of one kind."""

    def check(datum: Any) -> str:
        if not isinstance(datum, list):
            return f" is {shown(datum)}, but must be a list"
        if len(datum) < least or (most is not None and len(datum) > most):
            return f" has {len(datum)} items, but must have at least {least}" + (f" and at most {most}" if most else "")
        for at, item in enumerate(datum):
            fault = item_check(item)
            if fault:
                return f"[{at}]{fault}"
        return ""

    return check


def row(columns: Mapping[str, Check]) -> Check:
    """A list with one item for each of ``columns``, in this order."""

    def check(datum: Any) -> str:
        if not isinstance(datum, list) or len(datum) != len(columns):
            return f" is {shown(datum)}, but must be a list of {', '.join(columns)}"
        for (name, column_check), item in zip(columns.items(), datum, strict=True):
            fault = column_check(item)
            if fault:
                return f".{name}{fault}"
        return ""

    return check


def table(columns: Mapping[str, Check]) -> Check:
    """A long list of ``row(columns)``: whole numbers within bounds, or texts. Columns are checked as a whole; only if
    that finds a fault is it looked for row by row."""
    slowly, checks = listing(row(columns)), list(columns.values())

    def check(datum: Any) -> str:
        if not isinstance(datum, list) or set(map(type, datum)) != {list} or set(map(len, datum)) != {len(checks)}:
            return slowly(datum)
        return "" if all(map(_is_sound, checks, zip(*datum, strict=True))) else slowly(datum)

    return check


def _is_sound(check: Check, column: Sequence[Any]) -> bool:
    """Whether nothing is wrong in a column, by as few of its values as stand for all; False, too, if that cannot tell.

    Whole numbers have bounds, so that the smallest and the largest stand for all.
    """
    kinds = set(map(type, column))
    if kinds == {str}:
        return _is_text("".join(column)) if check is text else not any(map(check, set(column)))
    return not any(map(check, (min(column), max(column)) if kinds == {int} else column))


def mapping(values: Check, keys: Check = text) -> Check:
    """An object whose keys, and whose values, are of one kind."""

    def check(datum: Any) -> str:
        if not isinstance(datum, dict):
            return f" is {shown(datum)}, but must be an object"
        for name, item in datum.items():
            fault = keys(name)
            if fault:
                return f" has a key that{fault}"
            fault = values(item)
            if fault:
                return f"[{shown(name)}]{fault}"
        return ""

    return check


def record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, exact: bool = False) -> Check:
    """An object with named fields, each with its own check.

    Args:
        exact: It has no others; else those are for newer readers, and ignored.
    """
    rest = optional or {}

    def check(datum: Any) -> str:
        if not isinstance(datum, dict):
            return f" is {shown(datum)}, but must be an object"
        missing = [name for name in required if name not in datum]
        if missing:
            return f".{missing[0]} is missing"
        if exact:
            odd = [name for name in datum if name not in required and name not in rest]
            if odd:
                return f".{odd[0]} is not known"
        for fields in (required, rest):
            for name, field_check in fields.items():
                if name in datum:
                    fault = field_check(datum[name])
                    if fault:
                        return f".{name}{fault}"
        return ""

    return check


def both(first: Check, then: Check) -> Check:
    """Joins two checks; ``then`` may rely on what ``first`` found right."""
    return lambda datum: first(datum) or then(datum)


def _is_countable(datum: Any) -> bool:
    return type(datum) is float or (type(datum) is int and abs(datum) <= MOST_WHOLE)


def like(template: Any) -> Check:
    """Checks that state looks like the trainer's state now: numbers where it has numbers, objects where it has objects.

    Only fields that both have are compared, so that versions of a trainer may differ in the others.
    """
    if isinstance(template, dict):
        fields = {name: like(entry) for name, entry in template.items()}

        def check(datum: Any) -> str:
            if not isinstance(datum, dict):
                return f" is {shown(datum)}, but must be an object"
            for name, field_check in fields.items():
                fault = field_check(datum[name]) if name in datum else ""
                if fault:
                    return f"[{name!r}]{fault}"
            return ""

        return check
    if type(template) in (int, float):
        return value(_is_countable, "a number")
    if isinstance(template, (list, tuple)):
        return value(lambda datum: isinstance(datum, (list, tuple)), "a list")
    return anything
