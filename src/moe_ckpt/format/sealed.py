"""Sealed JSON: a JSON document with the checksum of its own bytes.

Parts that many documents have in common are fragments, which are encoded once and inserted into each. A state file has
the names of all parameters, tens of thousands with many experts, and is written at every step.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from itertools import chain, compress
from typing import Any

import xxhash

from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.schema import MOST_DEPTH, Schema, require, shown

_MARK = secrets.token_hex(16)
"""Stands for a fragment until the document is encoded. Drawn in each process, so that no document has it."""


class Fragment:
    """An encoded list or object of JSON-ready values, for use in documents. It never changes.

    Attributes:
        value: The list or object. Fragments ``of_rows`` do not have it.
        raw: As JSON.
    """

    def __init__(self, value: list[Any] | dict[str, Any]) -> None:
        self.value = value
        self.raw = encode_json(value)

    @classmethod
    def of_rows(cls, rows: bytes) -> Fragment:
        """Returns a list of encoded items: each is a plain value or a list of these, as JSON, and a comma."""
        made = cls.__new__(cls)
        made.raw = b"[%b]" % rows[:-1]
        return made


class FixedStrings(list[str]):
    """A list of strings in the plain state that never changes, so that ``encode_tree`` encodes it once.

    Attributes:
        fragment: The list for documents.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        super().__init__(strings)
        self.fragment = Fragment(list(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedStrings:
        return self


def nesting(document: Any, most: int) -> int:
    """Returns how deep lists and objects are nested; ``most + 1`` where there are more than ``most``.

    Not recursive, and no Python runs for a number or a text. What a fragment has in it does not count.
    """
    level, depth = _containers([document]), 0
    while level and depth <= most:
        depth += 1
        level = _containers(list(chain.from_iterable(e.values() if isinstance(e, dict) else e for e in level)))
    return depth


def _containers(values: list[Any]) -> list[Any]:
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, (dict, list, tuple))}
    return list(compress(values, map(kinds.__contains__, map(type, values)))) if kinds else []


def encode_json(document: Any) -> bytes:
    """Returns the document as compact JSON, in ASCII.

    Raises:
        ValueError: it holds NaN or infinity.
        TypeError: it holds something that is neither plain data nor a fragment.
    """
    fragments: list[bytes] = []

    def default(value: Any) -> str:
        if not isinstance(value, Fragment):
            raise TypeError(f"{type(value).__name__} is no JSON")
        fragments.append(value.raw)
        return _MARK

    text = json.dumps(document, separators=(",", ":"), allow_nan=False, default=default)
    between = map(str.encode, text.split(f'"{_MARK}"'))
    return b"".join(chain.from_iterable(zip(between, [*fragments, b""], strict=True)))


Chunk = bytes | bytearray | memoryview

_OPEN = b'{"xxh3_128": "'
_MIDDLE = b'", "body": '
_CLOSE = b"}\n"
_DIGEST_LENGTH = 32
_BODY_AT = len(_OPEN) + _DIGEST_LENGTH + len(_MIDDLE)
FRAME_NBYTES = _BODY_AT + len(_CLOSE)
"""Bytes of a sealed document beside its body."""
MAX_SEALED_BYTES = 1 << 30
"""Refused above this size before parsing: the largest manifest known (61 x 256 experts) is about 2 MB."""


def seal(body: dict[str, Any]) -> bytes:
    """Returns the bytes of a sealed document. Fragments are not encoded again. State of others is nested no deeper than
    readers go (``format.tree``).

    Raises:
        ValueError: it holds NaN or infinity (encode those first).
    """
    raw = encode_json(body)
    return _OPEN + digest(raw).encode() + _MIDDLE + raw + _CLOSE


def unseal(raw: Chunk, path: str) -> dict[str, Any]:
    """Returns the body of a sealed document. ``path`` is for messages only.

    Raises:
        DamagedError: the frame, the checksum or the JSON is not what was written.
    """
    with memoryview(raw) as data:
        if len(data) > MAX_SEALED_BYTES:
            raise DamagedError(path, f"{len(data):,} bytes are more than a sealed file may have")
        if len(data) < FRAME_NBYTES:
            raise DamagedError(path, f"truncated: {len(data)} bytes")
        with data[_BODY_AT : -len(_CLOSE)] as body:
            written = bytes(data[len(_OPEN) : len(_OPEN) + _DIGEST_LENGTH])
            if not _is_framed(data) or digest(body).encode() != written:
                raise DamagedError(path, "checksum mismatch")
            parsed = parse_json(body, path, "the body")
    if not isinstance(parsed, dict):
        raise DamagedError(path, "the body is no JSON object")
    return parsed


def encode_document(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a sealed document of a kind, in the version of this format; see ``seal``."""
    return seal({"kind": kind, "format_version": FORMAT_VERSION, **fields})


def decode_document(raw: Chunk, path: str, kind: str, schema: Schema, what: str) -> dict[str, Any]:
    """Returns the body of a sealed document, which fits a schema.

    Args:
        raw: The document.
        path: For messages.
        kind: It must be of this kind.
        schema: Of the body.
        what: Text before a fault.

    Raises:
        DamagedError: The document is not as it was written, or not of this kind or schema.
        FormatVersionError: The document is of a version that this package does not read.
    """
    body = unseal(raw, path)
    check_version(body, path, kind)
    require(schema, body, path, what)
    return body


def check_version(body: Mapping[str, Any], path: str, kind: str) -> None:
    """Raises ``DamagedError`` unless a body is of ``kind``, ``FormatVersionError`` unless it is of the version that
    this package reads."""
    if body.get("kind") != kind:
        raise DamagedError(path, f"is a {shown(body.get('kind'))}, not a {kind!r}")
    version = body.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatVersionError(path, version, FORMAT_VERSION)


def require_frame(head: Chunk, tail: Chunk, path: str) -> None:
    """Raises ``DamagedError`` unless a file with this beginning and end may be a sealed document.

    Called before the whole is read, so that a file with zeros behind its document, for instance, costs no memory.

    Args:
        head, tail: First and last ``FRAME_NBYTES`` of the file.
        path: Of the file.
    """
    if not _is_framed(memoryview(bytes(head) + bytes(tail))):
        raise DamagedError(path, "checksum mismatch: it does not begin and end like a sealed file")


def _is_framed(data: memoryview) -> bool:
    middle = data[_BODY_AT - len(_MIDDLE) : _BODY_AT]
    return data[: len(_OPEN)] == _OPEN and middle == _MIDDLE and data[-len(_CLOSE) :] == _CLOSE


def parse_json(raw: Chunk, path: str, what: str = "it") -> Any:
    """Parses a JSON text strictly: no NaN, no infinities, not nested deeper than ``MOST_DEPTH``.

    Args:
        what: The text's name in messages.

    Raises:
        DamagedError: anything else.
    """
    try:
        parsed = json.loads(bytes(raw), parse_constant=_refuse)
    except RecursionError:
        raise DamagedError(path, f"{what} is no JSON of this format: it is nested too deep") from None
    except (ValueError, OverflowError) as error:
        raise DamagedError(path, f"{what} is no JSON ({error})") from error
    if nesting(parsed, MOST_DEPTH) > MOST_DEPTH:
        raise DamagedError(path, f"{what} is no JSON of this format: it is nested more than {MOST_DEPTH} times")
    return parsed


def with_tuples(value: Any) -> Any:
    """Returns what JSON gave, with tuples in place of lists."""
    return tuple(map(with_tuples, value)) if isinstance(value, list) else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number: all must be finite")


def digest(*raw: Chunk) -> str:
    """Returns XXH3-128 of all chunks together, as 32 hex digits: it detects damage, and is no protection against
    forgery."""
    state = xxhash.xxh3_128()
    for chunk in raw:
        state.update(chunk)
    return state.hexdigest()
