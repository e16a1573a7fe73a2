"""A header that is like one before is known again, and gives what decoding it would; anything else is decoded."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ckpt.errors import DamagedError
from moe_ckpt.format.shard import ShardHeader, SliceEntry, encode_header, lay_out_in_order
from moe_ckpt.format.slot import SlotHeader, SlotPart
from moe_ckpt.peers import store as replica_store
from moe_ckpt.peers.store import Extents, HeaderReader
from moe_ckpt.slices.checksums import digests_of
from tests.support.replicas import slot_header, with_checksums

SIZES = (16, 0, 7, 100)


def header(
    step: int, prefix: str = "w", *, seed: int = 0, nbytes: int = 10_000, told: dict | None = None
) -> SlotHeader:
    """Two parts, the second of which lies first. told: what the parts say otherwise."""
    rng = np.random.default_rng([step, seed])
    parts = []
    for kind, begin in (("expert", 5000), ("non_expert", 0)):
        entries = lay_out_in_order(
            SliceEntry(f"model/{prefix}{at}", "dense", "U8", (0,), (size,), (size,), on_param_device=bool(at % 2))
            for at, size in enumerate(SIZES)
        )
        facts = {"run_id": "run", "step": step, "generation": 7, "rank": 2} | (told or {})
        slices = with_checksums(entries, rng.integers(0, 2**64, len(entries), dtype=np.uint64))
        parts.append(SlotPart(kind, begin, encode_header(ShardHeader(**facts, slices=slices))))
    return slot_header("run", step, 7, 2, 4, nbytes, tuple(parts))


def plainly(found: SlotHeader) -> Extents:
    """By decoding alone."""
    rows = [
        (part.begin + each.begin, part.begin + each.end, each.checksum, each.name)
        for part in found.parts
        for each in found.slices(part, "x")
    ]
    *listed, names = map(list, zip(*sorted(rows, key=lambda row: row[0]), strict=True))
    return Extents(*listed, digests_of(names))


def told(extents: Extents) -> dict:
    return vars(extents) | {"names": extents.names.tolist()}


def test_what_is_known_again_is_what_decoding_gives():
    reader = HeaderReader()
    for step in range(10, 30):
        for prefix in ("w", "other", "v"):  # as policies save other slices in turns
            found = header(step, prefix, seed=len(prefix))
            assert told(reader.extents(found, "x")) == told(plainly(found))
    assert reader.decoded == 3, "both parts have the same slices: one head"
    assert plainly(header(10)).nbytes == reader.extents(header(10), "x").nbytes == 5000 + sum(SIZES)


@pytest.mark.parametrize("facts", [{"step": 12}, {"rank": 3}, {"generation": 6}, {"run_id": "rum"}])
def test_a_part_of_another_snapshot_is_refused_though_its_like_is_known(facts):
    reader = HeaderReader()
    reader.extents(header(11), "x")
    with pytest.raises(DamagedError, match="a part is of"):
        reader.extents(header(13, told=facts), "x")


def test_slices_beyond_the_slot_are_refused_though_they_are_known():
    reader = HeaderReader()
    reader.extents(header(11), "x")
    with pytest.raises(DamagedError, match="ends beyond the slot"):
        reader.extents(header(12, nbytes=5100), "x")


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[:-8], lambda raw: raw + bytes(8), lambda raw: raw[:-1], lambda raw: b""]
)
def test_a_seal_of_another_length_is_refused_though_the_head_is_known(spoil):
    reader, good = HeaderReader(), header(11)
    reader.extents(good, "x")
    spoiled = SlotHeader(**{**vars(good), "parts": (SlotPart("expert", 0, spoil(good.parts[0].raw)),)})
    with pytest.raises(DamagedError):
        reader.extents(spoiled, "x")


def test_texts_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(replica_store, "_CACHED_NBYTES", 3 * len(header(11).parts[0].raw))
    reader = HeaderReader()
    for round_ in range(2):
        for prefix in "abcde":
            reader.extents(header(11 + round_, prefix), "x")
    assert reader.decoded == 10, "each is forgotten before it comes again"
    assert len(reader._layouts) <= 3


def test_a_header_of_nothing_has_no_bytes():
    empty = SlotHeader(**{**vars(header(11)), "parts": ()})
    assert HeaderReader().extents(empty, "x").nbytes == 0
    part = SlotPart("expert", 0, encode_header(ShardHeader("run", 11, 7, 2, ())))
    nothing = SlotHeader(**{**vars(header(11)), "parts": (part, part)})
    assert HeaderReader().extents(nothing, "x").nbytes == 0
