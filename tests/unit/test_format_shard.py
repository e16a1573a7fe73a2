"""Shards: the official safetensors reader reads them, headers round trip, contradictions are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import CoverageError, DamagedError, UnsupportedError
from moe_ckpt.format.shard import (
    ALIGNMENT,
    METADATA_KEY,
    SEAL,
    TORCH_DTYPES,
    ShardHeader,
    SliceEntry,
    decode_header,
    dtype_name,
    encode_header,
    head_of,
    itemsize,
    lay_out,
    require_distinct,
    seal_of,
    split_header,
)
from moe_ckpt.ledger.coverage import Box
from tests.support.replicas import with_checksums

entries = st.builds(
    lambda key, dtype, dims, cpu: SliceEntry(
        key=f"model/{key}",
        operator="expert/0/1",
        dtype=dtype,
        offsets=tuple(d[0] for d in dims),
        shape=tuple(d[1] for d in dims),
        global_shape=tuple(d[0] + d[1] + d[2] for d in dims),
        checksum=0,
        on_param_device=not cpu,
    ),
    st.text(min_size=1, max_size=8),
    st.sampled_from(sorted(TORCH_DTYPES)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3)), max_size=3),
    st.booleans(),
)
entry_lists = st.lists(entries, max_size=8, unique_by=lambda e: e.name)


def header(slices):
    return ShardHeader("run", 7, 2, 1, tuple(slices))


def entry(key="model/w", dtype="F32", **changes):
    plain = SliceEntry(key, "expert/0/1", dtype, (1, 0), (1, 3), (4, 3), checksum=0xABABABABABABABAB)
    return replace(plain, **changes)


@given(entry_lists)
def test_header_round_trip(slices):
    written = header(lay_out(slices))
    raw = encode_header(written)
    assert len(raw) % ALIGNMENT == 0
    assert decode_header(raw, "f") == written


@given(entry_lists, st.integers(0, 2**63), st.integers(0, 2**63), st.data())
def test_only_the_seal_of_a_shard_changes_from_step_to_step(slices, step, generation, data):
    placed = lay_out(slices)
    numbers = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=len(placed), max_size=len(placed)))
    checksums = np.array(numbers, dtype=np.uint64)
    head = head_of("run", 3, placed, [e.end for e in placed])
    whole = ShardHeader("run", step, generation, 3, with_checksums(placed, checksums))
    raw = encode_header(whole)
    assert raw == head + seal_of(step, generation, checksums)
    assert decode_header(raw, "f") == whole
    pieces = split_header(raw, "f")
    assert (*pieces[:3], pieces[3].tolist()) == (head, step, generation, numbers)


@given(entry_lists)
def test_layout_is_gapless_aligned_and_complete(slices):
    placed = lay_out(slices)
    assert sorted(e.name for e in placed) == sorted(e.name for e in slices)
    at = 0
    for e in placed:
        assert (e.begin, e.end - e.begin) == (at, e.nbytes)
        assert e.begin % itemsize(e.dtype) == 0
        at = e.end
    assert header(placed).data_nbytes == at
    assert lay_out(list(reversed(slices))) == placed


def test_rows_of_one_tensor_are_neighbours():
    rows = [entry(offsets=(row, 0)) for row in (2, 0, 10, 1)]
    placed = lay_out([*rows, entry("model/v"), entry("model/x")])
    assert [(e.key, e.offsets[0]) for e in placed] == [
        ("model/v", 1), ("model/w", 0), ("model/w", 1), ("model/w", 2), ("model/w", 10), ("model/x", 1),
    ]  # fmt: skip


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
def test_the_official_reader_reads_a_shard(dtype):
    torch_dtype = TORCH_DTYPES[dtype]
    nbytes = 3 * torch_dtype.itemsize
    data = torch.arange(nbytes, dtype=torch.uint8) % (2 if dtype == "BOOL" else 60)
    scalar = SliceEntry("optim/0/w/step", "gate/0", "F32", (), (), (), on_param_device=False)
    placed = lay_out([entry(dtype=dtype), scalar])
    content = {"model/w@1,0": bytes(data.tolist()), "optim/0/w/step@": torch.tensor(5.0).numpy().tobytes()}
    raw = encode_header(header(placed)) + b"".join(content[e.name] for e in placed)
    read = safetensors.torch.load(raw)
    assert read.pop(SEAL).tolist() == [7, 2, *(e.checksum for e in placed)]
    assert read.keys() == content.keys()
    assert read["model/w@1,0"].dtype == torch_dtype
    assert read["model/w@1,0"].shape == (1, 3)
    assert torch.equal(bits(read["model/w@1,0"]), data)
    assert read["optim/0/w/step@"].item() == 5.0


def test_an_empty_shard_is_a_shard():
    assert safetensors.torch.load(encode_header(header([])))[SEAL].tolist() == [7, 2]
    assert decode_header(encode_header(header([])), "f").data_nbytes == 0


def test_names_boxes_and_sizes():
    assert entry().name == "model/w@1,0"
    assert entry().box == Box((1, 0), (1, 3))
    assert (entry().nbytes, entry(dtype="BF16").nbytes) == (12, 6)


def tables(raw):
    table = json.loads(split_header(raw, "f")[0][8:])
    return table, json.loads(table["__metadata__"][METADATA_KEY])


def packed(table, meta):
    table = {**table, "__metadata__": {METADATA_KEY: json.dumps(meta)}}
    raw = json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw + seal_of(7, 2, np.array([entry().checksum], dtype=np.uint64))


def drop(where, *keys):
    def change(table, meta):
        at = table if where == "table" else meta
        for key in keys[:-1]:
            at = at[key]
        del at[keys[-1]]

    return change


def put(value, where, *keys):
    def change(table, meta):
        at = table if where == "table" else meta
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return change


NAME = "model/w@1,0"


@pytest.mark.parametrize(
    "change",
    [
        drop("table", NAME),
        drop("meta", "slices", NAME),
        drop("meta", "run_id"),
        drop("meta", "rank"),
        drop("meta", "slices"),
        put([], "meta", "slices"),
        put([24, 35], "table", NAME, "data_offsets"),
        put([0, 12], "table", NAME, "data_offsets"),
        put([-12, 0], "table", NAME, "data_offsets"),
        put([12], "table", NAME, "data_offsets"),
        drop("table", SEAL),
        put("I64", "table", SEAL, "dtype"),
        put([4], "table", SEAL, "shape"),
        put([0, 16], "table", SEAL, "data_offsets"),
        put("Q99", "table", NAME, "dtype"),
        put([1, 4], "table", NAME, "shape"),
        put("U64", "table", NAME, "dtype"),
        put("", "meta", "slices", NAME, 0),
        put([4], "meta", "slices", NAME, 1),
        put([1, 2], "meta", "slices", NAME, 1),
        put([True, 3], "meta", "slices", NAME, 1),
        put("13", "meta", "slices", NAME, 1),
        put([1 << 70, 3], "meta", "slices", NAME, 1),
        put("\ud800", "meta", "slices", NAME, 0),
        put(["expert/0/1", [5, 3], "gpu"], "meta", "slices", NAME),
        put(None, "meta", "slices", NAME),
        put([], "table", NAME),
        put([], "table", NAME, "dtype"),
        put([1.0, 3], "table", NAME, "shape"),
        put(["expert/0/1"], "meta", "slices", NAME),
        put({"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}, "table", "model/extra@0"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(change):
    table, meta = tables(encode_header(header(lay_out([entry()]))))
    assert decode_header(packed(table, meta), "f").slices == lay_out([entry()])
    change(table, meta)
    with pytest.raises(DamagedError, match=r"^d/f: not a shard header of this format"):
        decode_header(packed(table, meta), "d/f")


@pytest.mark.parametrize(
    "name", ["model/w", "model/w@", "model/w@1", "model/w@01,0", "w@1,0", "model/w@1,0,", "optim/w@1,0"]
)
def test_a_slice_that_is_not_named_by_its_key_and_offsets_is_refused(name):
    table, meta = tables(encode_header(header(lay_out([entry()]))))
    table[name], meta["slices"][name] = table.pop(NAME), meta["slices"].pop(NAME)
    with pytest.raises(DamagedError, match=r"^d/f: not a shard header of this format"):
        decode_header(packed(table, meta), "d/f")


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0" * 7, b"\0" * 8, (5).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]", b"\xff" * 40],
)
def test_other_bytes_are_no_header(raw):
    with pytest.raises(DamagedError, match="not a shard header of this format"):
        decode_header(raw, "f")


def test_someone_elses_safetensors_file_is_refused():
    raw = safetensors.torch.save({"w": torch.zeros(2)})
    length = int.from_bytes(raw[:8], "little")
    with pytest.raises(DamagedError, match="not a shard header of this format"):
        decode_header(raw[: 8 + length], "f")


def test_any_changed_header_byte_changes_its_digest_or_is_refused():
    raw = encode_header(header(lay_out([entry()])))
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 0x04
        assert xxhash.xxh3_128_hexdigest(bytes(damaged)) != xxhash.xxh3_128_hexdigest(raw)


def test_dtype_names_round_trip_and_unknown_ones_are_refused():
    assert all(TORCH_DTYPES[dtype_name(dtype)] is dtype for dtype in TORCH_DTYPES.values())
    with pytest.raises(UnsupportedError, match=r"tensors of torch\.complex128 cannot be stored; supported are torch"):
        dtype_name(torch.complex128)


def test_a_slice_that_is_written_twice_is_refused():
    """Its header has one place for both, so the checkpoint's proof would see one."""
    doubled = lay_out([entry(), entry("model/v"), entry(shape=(2, 3))])
    with pytest.raises(CoverageError, match=r"what rank 1 writes at step 7: model/w@1,0 is written twice"):
        encode_header(header(doubled))
    with pytest.raises(CoverageError, match=r"what rank 1 writes at step 7: model/w@1,0 is written twice"):
        require_distinct(1, 7, doubled)
