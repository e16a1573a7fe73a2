"""Sealed JSON: any JSON tool reads it, and no changed byte goes unseen."""

from __future__ import annotations

import json

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import DamagedError
from moe_ckpt.format import sealed
from moe_ckpt.format.sealed import seal, unseal

BODY = {"kind": "x", "step": 3, "name": "köln", "list": [1, 2.5, None, True, ""], "nested": {"$": "tag"}}
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), plain, max_size=5))
def test_round_trip(body):
    assert unseal(seal(body), "f") == body
    assert unseal(memoryview(bytearray(seal(body))), "f") == body


def test_any_json_tool_reads_it():
    document = json.loads(seal(BODY))
    assert document["body"] == BODY
    body = json.dumps(BODY, separators=(",", ":")).encode()
    assert document["xxh3_128"] == xxhash.xxh3_128_hexdigest(body)


def test_every_single_changed_byte_is_seen():
    raw = seal(BODY)
    for at in range(len(raw)):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            damaged = bytearray(raw)
            damaged[at] ^= flip
            with pytest.raises(DamagedError, match=r"^step_00000003/MANIFEST\.json: "):
                unseal(damaged, "step_00000003/MANIFEST.json")


def test_every_truncation_and_extension_is_seen():
    raw = seal(BODY)
    for length in range(len(raw)):
        with pytest.raises(DamagedError, match=r"truncated|checksum"):
            unseal(raw[:length], "f")
    for extra in (b"\n", b" ", b"\0", raw):
        with pytest.raises(DamagedError):
            unseal(raw + extra, "f")


def framed(body):
    return b'{"xxh3_128": "' + sealed.digest(body).encode() + b'", "body": ' + body + b"}\n"


@pytest.mark.parametrize("body", [b"[1]", b"3", b"null", b"", b"{", b"\xff"])
def test_a_body_that_is_no_object_is_refused_even_with_its_checksum(body):
    with pytest.raises(DamagedError, match="the body is no JSON"):
        unseal(framed(body), "f")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_refused(number):
    with pytest.raises(ValueError, match="JSON compliant"):
        seal({"loss": number})


@pytest.mark.parametrize(
    "deep", [b"[" * 200 + b"]" * 200, b"[" * 10**6 + b"]" * 10**6, b'{"a":' * 5000 + b"1" + b"}" * 5000]
)
def test_a_body_that_is_nested_too_deep_is_damage_and_no_endless_recursion(deep):
    with pytest.raises(DamagedError, match="nested"):
        unseal(framed(b'{"a":' + deep + b"}"), "f")


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1" * 5000])
def test_numbers_that_json_lacks_or_that_have_no_end_are_damage(number):
    with pytest.raises(DamagedError, match="the body is no JSON"):
        unseal(framed(b'{"a":' + number + b"}"), "f")


def test_a_file_that_is_far_too_large_is_not_parsed(monkeypatch):
    monkeypatch.setattr(sealed, "MAX_SEALED_BYTES", 10)
    with pytest.raises(DamagedError, match="more than a sealed file may have"):
        unseal(seal(BODY), "f")
