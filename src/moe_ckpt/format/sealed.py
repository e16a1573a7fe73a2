"""Sealed JSON: a JSON document that carries the checksum of its own bytes.

The file is ``{"xxh3_128": "<32 hex>", "body": <body>}\\n``: any JSON tool reads it, and the reader checks
the body's exact bytes and the exact frame around it, so that one flipped bit anywhere is found.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.fragment import encode_json, nesting
from moe_ckpt.format.schema import MOST_DEPTH

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
    """Bytes of the sealed document. Fragments in it are not walked through, nor encoded again.

    Raises:
        ValueError: it holds NaN or infinity (encode those first), or is nested deeper than readers go.
    """
    if nesting(body, MOST_DEPTH) > MOST_DEPTH:
        raise ValueError(f"a document is nested more than {MOST_DEPTH} times, which no reader opens")
    raw = encode_json(body)
    return _OPEN + digest(raw).encode() + _MIDDLE + raw + _CLOSE


def unseal(raw: Chunk, path: str) -> dict[str, Any]:
    """The body of a sealed document. ``path`` is for messages only.

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


def require_frame(head: Chunk, tail: Chunk, path: str) -> None:
    """Raise ``DamagedError`` unless a file that begins and ends so can be a sealed document.

    Args:
        head, tail: Its first and last ``FRAME_NBYTES``. Asked before the whole is read: a file that has grown (zeros
            after what was written, for instance) then costs no memory.
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


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number: all must be finite")


def digest(*raw: Chunk) -> str:
    """XXH3-128 of all that is given, as 32 hex digits: detects damage, is no protection against forgery."""
    state = xxhash.xxh3_128()
    for chunk in raw:
        state.update(chunk)
    return state.hexdigest()
