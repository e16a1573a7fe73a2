"""Manifests: read back, refusal of what makes no sense, names of directories and files."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import (
    LayerRecord,
    Manifest,
    ModelRecord,
    PartRecord,
    SlotRecord,
    group_of,
    group_path,
    parse_step_dir,
    shard_path,
    state_path,
    step_dir,
)
from moe_ckpt.format.sealed import seal, unseal

COUNTS = [[1, 2, 3, 4], [5, 6, 7, 0]]
MANIFEST = Manifest(
    run_id="r",
    step=8,
    generation=2,
    world_size=2,
    index=5,
    created_unix_secs=1.5,
    model=ModelRecord("f" * 32, (LayerRecord("layers.0.moe", 4, 2), LayerRecord("layers.1.moe", 4)), {"b": "a"}),
    files=(),
    operators={},
    states=(),
    parent="step_00000007",
    policy={"name": "moc", "k": 1},
    measured={"iteration_secs": 0.25, "copy_bytes_per_sec": 1e9},
    tokens={"applied": COUNTS, "saved": {"storage": COUNTS}, "faults": [[7, 2, 1, 40]], "mlt": [0.5]},
    parts=(PartRecord("step_00000008_g2", 100, "aa"), PartRecord("step_00000007", 200, "bb")),
)
WINDOWED = replace(
    MANIFEST, window=(SlotRecord(7, ()),), parts=(MANIFEST.parts[0], PartRecord("step_00000007_g2", 200, "bb"))
)


def body_of(manifest=MANIFEST):
    return unseal(manifest.encode(), "m")


def test_round_trip():
    bare = replace(MANIFEST, parent=None, policy={}, measured={}, tokens={})
    for manifest in (MANIFEST, WINDOWED, bare, replace(MANIFEST, not_finite="a")):
        assert Manifest.decode(manifest.encode(), "m") == manifest


def test_paths_and_directory():
    assert MANIFEST.directory == "step_00000008_g2"
    assert MANIFEST.paths == {"step_00000008_g2/PART.json", "step_00000007/PART.json"}


def test_every_changed_byte_is_seen():
    raw = MANIFEST.encode()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 0x01
        with pytest.raises(DamagedError):
            Manifest.decode(damaged, "m")


@pytest.mark.parametrize("version", [0, 2, 3, "1", None, True])
def test_other_versions_are_refused_with_what_to_do(version):
    raw = seal({**body_of(), "format_version": version})
    reason = (
        r"m is in on-disk format version .* reads version 1 only\. Open or export it with .*, or start the run anew"
    )
    with pytest.raises(FormatVersionError, match=reason):
        Manifest.decode(raw, "m")


def test_another_kind_is_refused():
    with pytest.raises(DamagedError, match=r"is a 'moe_ckpt\.store', not a 'moe_ckpt\.manifest'"):
        Manifest.decode(seal({**body_of(), "kind": "moe_ckpt.store"}), "m")


@pytest.mark.parametrize("key", sorted(set(body_of()) - {"kind", "format_version"}))
def test_every_missing_or_mistyped_field_is_refused(key):
    body = body_of()
    without = {k: v for k, v in body.items() if k != key}
    with pytest.raises(DamagedError, match="not a manifest of this format"):
        Manifest.decode(seal(without), "m")
    for wrong in (True, -1, "\ud800", [7], [[[]]], {"a": {}}, 2**63):
        if key == "policy" and isinstance(wrong, dict):
            continue
        with pytest.raises(DamagedError, match=f"not a manifest of this format: field {key}"):
            Manifest.decode(seal({**body, key: wrong}), "m")


@pytest.mark.parametrize("measured", [7, [1.0], {"iteration_secs": -1.0}, {"iteration_secs": None}, {"x": "fast"}])
def test_measurements_that_make_no_sense_are_refused(measured):
    with pytest.raises(DamagedError, match="not a manifest of this format"):
        Manifest.decode(seal({**body_of(), "measured": measured}), "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"applied": [[1, 2, 3, 4]]}, "tokens do not have 2 layers of 4 experts"),
        ({"faults": [[7, 2, 1]]}, r"tokens.faults\[0\] is"),
        ({"mlt": []}, "tokens.mlt has 0 numbers for 1 recoveries"),
        ({"mlt": [None]}, r"tokens.mlt\[0\]"),
    ],
)
def test_tokens_that_make_no_sense_are_refused(changes, message):
    body = body_of()
    with pytest.raises(DamagedError, match=f"^m: not a manifest of this format: field .*{message}"):
        Manifest.decode(seal({**body, "tokens": {**body["tokens"], **changes}}), "m")


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_step_directories_round_trip(step, generation):
    assert parse_step_dir(step_dir(step, generation)) == (step, generation)


def test_step_directories_by_hand():
    assert step_dir(12, 0) == "step_00000012"
    assert step_dir(12, 3) == "step_00000012_g3"
    assert step_dir(123456789, 1) == "step_123456789_g1"


@pytest.mark.parametrize(
    "name",
    [
        "step_12", "step_000000012", "step_00000012_g0", "step_00000012_g01", "step_00000012_g", "step_00000012/",
        "step_00000012.tmp", "xstep_00000012", "step_0000001\u0662", "step_-0000012", "last", "",
    ],
)  # fmt: skip
def test_other_names_are_no_step_directories(name):
    assert parse_step_dir(name) is None


def test_own_files():
    assert shard_path("d", 3, "expert") == group_path("d", 3, "expert") == "d/rank_00003_expert.safetensors"
    assert state_path("d", 3) == group_path("d", 3, "state") == "d/rank_00003_state.json"
    own = {
        "MANIFEST.json": "MANIFEST.json",
        "PART.json": "PART.json",
        "rank_00000_state.json": "state",
        "rank_12345_expert.safetensors": "expert",
        "rank_100000_non_expert.safetensors": "non_expert",
    }
    assert {name: group_of(name) for name in own} == own
    foreign = ["notes.txt", "MANIFEST.json.bak", "rank_0_state.json", "rank_00000_state.safetensors", "model.ckpt"]
    foreign += ["rank_00000_expert.json", "rank_00000_non_expert.safetensors\n", "PART.json.1"]
    assert [group_of(name) for name in foreign] == [None] * len(foreign)
