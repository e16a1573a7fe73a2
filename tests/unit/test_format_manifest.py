"""Manifests of versions 1 and 2: read back, refusal of what leads out of the store, names of directories and files."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import (
    FileRecord,
    LayerRecord,
    Manifest,
    ModelRecord,
    OperatorRecord,
    SlotRecord,
    StateRecord,
    group_of,
    group_path,
    parse_step_dir,
    shard_path,
    state_path,
    step_dir,
)
from moe_ckpt.format.sealed import seal, unseal
from tests.support.old_manifests import encode_old

SHARD = "step_00000007/rank_00000_expert.safetensors"
COUNTS = [[1, 2, 3, 4], [5, 6, 7, 0]]
MANIFEST = Manifest(
    run_id="r",
    step=8,
    generation=2,
    world_size=2,
    index=5,
    created_unix_secs=1.5,
    model=ModelRecord("f" * 32, (LayerRecord("layers.0.moe", 4, 2), LayerRecord("layers.1.moe", 4)), {"b": "a"}),
    files=(
        FileRecord("step_00000008_g2/rank_00000_non_expert.safetensors", 100, 80, "aa", 8, 0),
        FileRecord(SHARD, 200, 160, "bb", 7, 0),
    ),
    operators={"gate/0": OperatorRecord(8, (0,)), "expert/0/0": OperatorRecord(7, (0, 1))},
    states=tuple(StateRecord(f"step_00000008_g2/rank_0000{rank}_state.json", 30, "cc", rank) for rank in range(2)),
    parent="step_00000007",
    policy={"name": "moc", "k": 1},
    measured={"iteration_secs": 0.25, "copy_bytes_per_sec": 1e9},
    tokens={"applied": COUNTS, "saved": {"storage": COUNTS}, "faults": [[7, 2, 1], [7, 2, 1, 40]]},
)


def body_of(manifest):
    return unseal(encode_old(manifest), "m")


def test_round_trip():
    assert Manifest.decode(encode_old(MANIFEST), "m") == MANIFEST
    bare = replace(MANIFEST, parent=None, policy={}, tokens={}, files=(), operators={})
    assert Manifest.decode(encode_old(bare), "m") == bare


def test_paths_and_directory():
    assert MANIFEST.directory == "step_00000008_g2"
    assert MANIFEST.paths == {f.path for f in MANIFEST.files} | {s.path for s in MANIFEST.states}


def test_every_changed_byte_is_seen():
    raw = encode_old(MANIFEST)
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 0x01
        with pytest.raises(DamagedError):
            Manifest.decode(damaged, "m")


@pytest.mark.parametrize(
    "path",
    [
        "../step_00000007/rank_00000_expert.safetensors",
        "step_00000007/../../etc/passwd",
        "step_00000007/../rank_00000_expert.safetensors",
        "/step_00000007/rank_00000_expert.safetensors",
        "/etc/passwd",
        "step_00000007//rank_00000_expert.safetensors",
        "step_00000007/rank_00000_expert.safetensors\n",
        "step_00000007/rank_00000_expert.safetensors/../x",
        "step_00000007\\rank_00000_expert.safetensors",
        "step_00000007/rank_00000_state.json",
        "step_0000000\u0667/rank_00000_expert.safetensors",
        "s3://bucket/rank_00000_expert.safetensors",
        "",
    ],
)
def test_shard_paths_that_are_not_of_this_format_are_refused(path):
    bad = replace(MANIFEST, files=(replace(MANIFEST.files[0], path=path), MANIFEST.files[1]))
    with pytest.raises(DamagedError, match="must be a path of this format"):
        Manifest.decode(encode_old(bad), "m")


@pytest.mark.parametrize("path", ["../rank_00000_state.json", "step_00000007/x.json", SHARD, "/a_state.json"])
def test_state_paths_that_are_not_of_this_format_are_refused(path):
    bad = replace(MANIFEST, states=(replace(MANIFEST.states[0], path=path),))
    with pytest.raises(DamagedError, match="must be a path of this format"):
        Manifest.decode(encode_old(bad), "m")


@pytest.mark.parametrize("version", [0, 4, "1", None])
def test_other_versions_are_refused_with_what_to_do(version):
    raw = seal({**body_of(MANIFEST), "format_version": version})
    with pytest.raises(FormatVersionError, match=r"m is in on-disk format version .* reads 1, 2, 3\. Open it with"):
        Manifest.decode(raw, "m")


WINDOWED = replace(
    MANIFEST,
    window=(
        SlotRecord(
            MANIFEST.step - 2,
            tuple(replace(state, path=f"step_00000001/rank_0000{state.rank}_state.json") for state in MANIFEST.states),
        ),
    ),
)


def test_a_window_is_of_version_2_and_comes_back():
    assert body_of(WINDOWED)["format_version"] == 2
    assert Manifest.decode(encode_old(WINDOWED), "m") == WINDOWED
    assert "step_00000001/rank_00000_state.json" in WINDOWED.paths
    assert body_of(MANIFEST)["format_version"] == 1


@pytest.mark.parametrize(
    "changes", [{"window": []}, {"format_version": 1}, {"window": [[10**6, []]]}, {"window": [[1, []], [1, []]]}]
)
def test_a_window_of_the_wrong_version_or_out_of_order_is_refused(changes):
    with pytest.raises(DamagedError, match="the steps of its window"):
        Manifest.decode(seal({**body_of(WINDOWED), **changes}), "m")


def test_another_kind_is_refused():
    with pytest.raises(DamagedError, match=r"is a 'moe_ckpt\.store', not a 'moe_ckpt\.manifest'"):
        Manifest.decode(seal({**body_of(MANIFEST), "kind": "moe_ckpt.store"}), "m")


@pytest.mark.parametrize("key", sorted(set(body_of(MANIFEST)) - {"kind", "format_version", "measured"}))
def test_every_missing_or_mistyped_field_is_refused(key):
    body = body_of(MANIFEST)
    without = {k: v for k, v in body.items() if k != key}
    with pytest.raises(DamagedError, match="not a manifest of this format"):
        Manifest.decode(seal(without), "m")
    for wrong in (True, -1, "\ud800", [7], [[[]]], {"a": {}}, 2**63):
        if key == "policy" and isinstance(wrong, dict):
            continue
        with pytest.raises(DamagedError, match=f"not a manifest of this format: field {key}"):
            Manifest.decode(seal({**body, key: wrong}), "m")


def test_older_files_tell_of_no_measurements():
    body = {key: value for key, value in body_of(MANIFEST).items() if key != "measured"}
    assert Manifest.decode(seal(body), "m") == replace(MANIFEST, measured={})


@pytest.mark.parametrize("measured", [7, [1.0], {"iteration_secs": -1.0}, {"iteration_secs": None}, {"x": "fast"}])
def test_measurements_that_make_no_sense_are_refused(measured):
    with pytest.raises(DamagedError, match="not a manifest of this format"):
        Manifest.decode(seal({**body_of(MANIFEST), "measured": measured}), "m")


@pytest.mark.parametrize(
    ("op", "row", "message"),
    [
        ("gate/0", [8, 2], "gate/0 names a file that is not listed"),
        ("gate/0", [8, 0, 10**9], "gate/0 names a file that is not listed"),
        ("gate/0", [8, -1], r"operators\['gate/0'\]\[1\] is -1, but must be a whole number of at least 0"),
        ("gate/0", [8, True], r"operators\['gate/0'\]\[1\] is True, but must be a whole number"),
        ("gate/0", [8, 2**63], r"operators\['gate/0'\]\[1\] is 9223372036854775808, but must be a whole number"),
        ("gate/0", [], "must be a version and at least one file"),
        ("gate/0", [8], "must be a version and at least one file"),
        ("gate/0", [None], r"operators\['gate/0'\]\[0\] is None, but must be a whole number"),
        ("gate/0", {}, r"operators\['gate/0'\] is \{\}, but must be a list"),
        ("gate/0", [9, 0], "gate/0 is of step 9, which is after the checkpoint's own"),
        ("gate/2", [8, 0], "gate/2 is of no layer of the model"),
        ("expert/0/4", [8, 0], "expert/0/4 is of no layer of the model, or beyond its experts"),
        ("expert/0/04", [8, 0], "has a key that is 'expert/0/04', but must be the id of an operator"),
        ("gate/\u0661", [8, 0], "must be the id of an operator"),
        ("non_expert/\ud800", [8, 0], "must be the id of an operator"),
    ],
)
def test_an_operator_that_is_nowhere_or_makes_no_sense_is_refused(op, row, message):
    body = body_of(MANIFEST)
    with pytest.raises(DamagedError, match=f"^m: not a manifest of this format: field .*{message}"):
        Manifest.decode(seal({**body, "operators": {**body["operators"], op: row}}), "m")


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
