"""Sealed JSON: a JSON document that carries the checksum of its own bytes.

The file is ``{"xxh3_128": "<32 hex>", "body": <body>}\\n``: any JSON tool reads it, and the reader checks
the body's exact bytes and the exact frame around it, so that one flipped bit anywhere is found.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

from moe_ckpt.errors import DamagedError

_OPEN = b'{"xxh3_128": "'
_MIDDLE = b'", "body": '
_CLOSE = b"}\n"
_DIGEST_LENGTH = 32
MAX_SEALED_BYTES = 1 << 30
"""Refused above this size before parsing: the largest manifest known (61 x 256 experts) is about 2 MB."""


def seal(body: dict[str, Any]) -> bytes:
    """Bytes of the sealed document. Raises ``ValueError`` for NaN or infinity (encode those first)."""
    raw = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return _OPEN + digest(raw).encode() + _MIDDLE + raw + _CLOSE


def unseal(raw: bytes | bytearray | memoryview, path: str) -> dict[str, Any]:
    """The body of a sealed document. ``path`` is for messages only.

    Raises:
        DamagedError: the frame, the checksum or the JSON is not what was written.
    """
    data = bytes(raw)
    body_at = len(_OPEN) + _DIGEST_LENGTH + len(_MIDDLE)
    if len(data) > MAX_SEALED_BYTES:
        raise DamagedError(path, f"{len(data):,} bytes are more than a sealed file may have")
    if len(data) < body_at + len(_CLOSE):
        raise DamagedError(path, f"truncated: {len(data)} bytes")
    written = data[len(_OPEN) : len(_OPEN) + _DIGEST_LENGTH]
    body = data[body_at : -len(_CLOSE)]
    frame_ok = (
        data.startswith(_OPEN)
        and data[body_at - len(_MIDDLE) : body_at] == _MIDDLE
        and data.endswith(_CLOSE)
    )
    if not frame_ok or digest(body).encode() != written:
        raise DamagedError(path, "checksum mismatch")
    try:
        parsed = json.loads(body)
    except ValueError as error:
        raise DamagedError(path, f"the body is no JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise DamagedError(path, "the body is no JSON object")
    return parsed


def digest(raw: bytes | bytearray | memoryview) -> str:
    """XXH3-128 as 32 hex digits: detects damage, is no protection against forgery."""
    return xxhash.xxh3_128_hexdigest(raw)
