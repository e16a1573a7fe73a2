"""Schemas of documents, which have the form of the documents.

A ``Schema`` is one of these:

* a ``Check`` of a value: says what is wrong with it, "" for nothing. It never raises, whatever it is given;
* ``{"name": schema, "other?": schema}``: an object with these fields, of which those with a question mark may be
  missing. Other fields are of later versions, and ignored;
* ``[schema]``: a list of things of one kind.

A fault names the field and the value, such as ``.files[3].rank is -1, but must be a whole number of at least 0``. Every
document of a store, and a run's profile, is checked this way before anything else reads it (``require``).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_ckpt.errors import DamagedError

Check = Callable[[Any], str]
Schema = Check | Mapping[str, "Schema"] | list["Schema"]

MOST_WHOLE = 2**63 - 1
"""Largest int64: token counts, steps and sizes become such numbers in numpy and in messages."""
MOST_DEPTH = 128
"""Most levels of lists and objects. Ten are usual; readers, copies and trainers visit them recursively."""
_HUGE = 1e300
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60


def require(schema: Schema, value: Any, path: str, what: str = "", **where: int | None) -> None:
    """Raises ``DamagedError``, which names the field, unless ``value`` fits.

    Args:
        path: Of the file.
        what: Text before the fault.
        **where: ``step`` and ``rank`` of the file, as far as they are known.
    """
    fault = fault_in(schema, value)
    if fault:
        field = f"field {fault.removeprefix('.')}" if fault.startswith((".", "[")) else f"the document{fault}"
        raise DamagedError(path, f"{what}{field}", **where)


def fault_in(schema: Schema, datum: Any) -> str:
    """Returns the first thing that is wrong with a value; "" for nothing."""
    if callable(schema):
        return schema(datum)
    if isinstance(schema, list):
        return listing(*schema)(datum)
    if not isinstance(datum, dict):
        return f" is {shown(datum)}, but must be an object"
    missing = next((name for name in schema if not name.endswith("?") and name not in datum), None)
    if missing is not None:
        return f".{missing} is missing"
    for field, field_schema in schema.items():
        name = field.removesuffix("?")
        fault = fault_in(field_schema, datum[name]) if name in datum else ""
        if fault:
            return f".{name}{fault}"
    return ""


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
    """Returns True for text that can be encoded: JSON can have halves of characters."""
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


def maybe(schema: Schema) -> Check:
    """Accepts null, or what fits ``schema``."""

    def check(datum: Any) -> str:
        fault = "" if datum is None else fault_in(schema, datum)
        return f"{fault}, or null" if fault else ""

    return check


def both(first: Schema, then: Schema) -> Check:
    """Joins two schemas; ``then`` is checked only if ``first`` fits."""
    return lambda datum: fault_in(first, datum) or fault_in(then, datum)


def listing(item_schema: Schema, *, least: int = 0, most: int | None = None) -> Check:
    """A list, or a tuple of plain state, of things of one kind, of bounded length."""

    def check(datum: Any) -> str:
        if not isinstance(datum, (list, tuple)):
            return f" is {shown(datum)}, but must be a list"
        if len(datum) < least or (most is not None and len(datum) > most):
            return f" has {len(datum)} items, but must have at least {least}" + (f" and at most {most}" if most else "")
        for at, item in enumerate(datum):
            fault = fault_in(item_schema, item)
            if fault:
                return f"[{at}]{fault}"
        return ""

    return check


def row(columns: Mapping[str, Schema]) -> Check:
    """A list with one item for each of ``columns``, in this order."""

    def check(datum: Any) -> str:
        if not isinstance(datum, list) or len(datum) != len(columns):
            return f" is {shown(datum)}, but must be a list of {', '.join(columns)}"
        return fault_in(columns, dict(zip(columns, datum, strict=True)))

    return check


def table(columns: Mapping[str, Check]) -> Check:
    """Returns a check of a long list of ``row(columns)``: whole numbers within bounds, or texts. Columns are checked as
    a whole, and rows only if a column has a fault."""
    slowly, checks = listing(row(columns)), list(columns.values())

    def check(datum: Any) -> str:
        if not isinstance(datum, list) or set(map(type, datum)) != {list} or set(map(len, datum)) != {len(checks)}:
            return slowly(datum)
        return "" if all(map(_is_sound, checks, zip(*datum, strict=True))) else slowly(datum)

    return check


def _is_sound(check: Check, column: Sequence[Any]) -> bool:
    """Returns whether all values of a column fit, by checking few of them; False also if that is not enough.

    Whole numbers have bounds, so that the smallest and the largest are enough.
    """
    kinds = set(map(type, column))
    if kinds == {str}:
        return _is_text("".join(column)) if check is text else not any(map(check, set(column)))
    return not any(map(check, (min(column), max(column)) if kinds == {int} else column))


def mapping(values: Schema, keys: Check = text) -> Check:
    """An object whose keys, and whose values, are of one kind."""

    def check(datum: Any) -> str:
        if not isinstance(datum, dict):
            return f" is {shown(datum)}, but must be an object"
        for name, item in datum.items():
            fault = keys(name)
            if fault:
                return f" has a key that{fault}"
            fault = fault_in(values, item)
            if fault:
                return f"[{shown(name)}]{fault}"
        return ""

    return check


def like(template: Any) -> Schema:
    """Returns the schema of values with the same structure: numbers where ``template`` has numbers, and so on.

    Only fields of both are compared, so that versions of a trainer may differ in others.
    """
    if isinstance(template, dict):
        return {f"{name}?": like(entry) for name, entry in template.items()}
    if type(template) in (int, float):
        return _countable
    return _several if isinstance(template, (list, tuple)) else anything


_countable = value(lambda datum: type(datum) is float or (type(datum) is int and abs(datum) <= MOST_WHOLE), "a number")
_several = value(lambda datum: isinstance(datum, (list, tuple)), "a list")
