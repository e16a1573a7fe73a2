"""A contestant that fails is a result: it is named with its reason, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LONGEST = 240


@dataclass
class Failures:
    """reasons: contestant -> why it failed, in one line."""

    reasons: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Runs the block. What it raises becomes the reason of ``name``; a first reason stays.

        Not only ``Exception``: torch's ``CheckpointException`` is a ``BaseException``. Ctrl-C goes on, as does
        ``SystemExit``, which Lightning makes of it.
        """
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            self.reasons.setdefault(name, reason(error))

    def __contains__(self, name: object) -> bool:
        return name in self.reasons

    def lines(self) -> list[str]:
        return [f"failed: {name}: {why}" for name, why in self.reasons.items()]


def reason(error: BaseException) -> str:
    """One line: the operating system's word if there is one behind ``error``, and what was raised."""
    raised = f"{type(error).__name__}: {_last_line(str(error))}"
    origin = next((item for item in _chain(error) if isinstance(item, OSError) and item.strerror), None)
    if origin is not None and str(origin.strerror) not in raised:
        raised = f"{origin.strerror} ({raised})"
    if len(raised) <= _LONGEST:
        return raised
    return f"{raised[: _LONGEST // 2]} ... {raised[-_LONGEST // 2 :]}"  # causes are named at the end


def _last_line(text: str) -> str:
    """Of a text that holds a traceback the last line, which says what happened; else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no message)"]
    return lines[-1] if "Traceback (most recent call last)" in text else lines[0]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it came from, and what dcp wraps: ``failures`` holds an error and a stack for each rank."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        wrapped = getattr(one, "failures", None)
        inner = [item[0] for item in wrapped.values() if isinstance(item, tuple)] if isinstance(wrapped, dict) else []
        waiting += [item for item in (*inner, one.__cause__, one.__context__) if isinstance(item, BaseException)]
