"""Manifests and the parts that they are made of: views, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.manifest import (
    FileRecord,
    LayerRecord,
    Manifest,
    ModelRecord,
    Part,
    SlotRecord,
    StateRecord,
    compose_manifest,
    encode_part,
    file_row,
    shard_path,
    state_path,
    state_row,
    step_dir,
)
from moe_ckpt.format.schema import anything, listing, one_of, row, table, text, whole
from moe_ckpt.format.sealed import Fragment, digest, seal, unseal

RANKS = 2


def part(step, operators, generation=0, kinds=("expert", "non_expert"), run_id="r"):
    """(how manifests name it, what it is) of a step at which each of two ranks wrote shards of these kinds."""
    directory = step_dir(step, generation)
    files = [
        FileRecord(shard_path(directory, rank, kind), 100, 80, f"{step}{rank}", step, rank)
        for rank in range(RANKS)
        for kind in kinds
    ]
    states = [StateRecord(state_path(directory, rank), 30, "cc", rank) for rank in range(RANKS)]
    rows = {"files": b"".join(map(file_row, files)), "states": b"".join(map(state_row, states))}
    named, raw = encode_part(run_id, step, generation, RANKS, **rows, operators=Fragment(list(operators)))
    assert (named.nbytes, named.digest) == (len(raw), digest(raw))
    decoded = Part.decode(raw, named.path)
    assert decoded == Part(run_id, step, generation, RANKS, tuple(files), tuple(states), tuple(operators))
    return named, decoded


EXPERTS = [f"expert/0/{expert}" for expert in range(4)]
FIRST = part(6, [*EXPERTS, "gate/0", "non_expert/embed"])
SECOND = part(7, ["expert/0/0", "gate/0", "non_expert/embed"])
THIRD = part(8, ["expert/0/1", "gate/0", "non_expert/embed"], generation=2)
PARTS = (THIRD, SECOND, FIRST)
MANIFEST = Manifest(
    run_id="r",
    step=8,
    generation=2,
    world_size=RANKS,
    index=5,
    created_unix_secs=1.5,
    model=ModelRecord("f" * 32, (LayerRecord("layers.0.moe", 4, 2),), {"b": "a"}),
    files=(),
    operators={},
    states=(),
    parent="step_00000007",
    policy={"name": "moc", "k": 1},
    measured={"iteration_secs": 0.25},
    tokens={"applied": [[1, 2, 3, 4]], "saved": {"storage": [[1, 2, 3, 4]]}, "faults": [[7, 2, 1, 40]], "mlt": [0.5]},
    parts=tuple(named for named, _ in PARTS),
)
WINDOWED = replace(
    MANIFEST,
    generation=0,
    parent=None,
    window=(SlotRecord(6, ()), SlotRecord(7, ())),
    parts=tuple(part(step, ())[0] for step in (8, 7, 6)),
)


def view(manifest=MANIFEST, parts=PARTS):
    return compose_manifest(manifest, [each for _, each in parts])


def body_of(manifest=MANIFEST):
    return unseal(manifest.encode(), "m")


def steps_of(manifest):
    return {op: held.step for op, held in manifest.operators.items()}


def test_the_newest_part_that_holds_an_operator_wins():
    found = view()
    newest = dict.fromkeys(("gate/0", "non_expert/embed", "expert/0/1"), 8)
    assert steps_of(found) == {**newest, "expert/0/0": 7, "expert/0/2": 6, "expert/0/3": 6}
    for op, held in found.operators.items():
        paths = [file.path for file in held.files]
        kind = "expert" if op.startswith("expert") else "non_expert"
        directory = {8: "step_00000008_g2"}.get(held.step, step_dir(held.step, 0))
        assert paths == [shard_path(directory, rank, kind) for rank in range(RANKS)]
    assert shard_path("step_00000007", 0, "non_expert") not in found.paths, "superseded"
    assert {"step_00000006/PART.json", "step_00000008_g2/rank_00001_state.json"} <= found.paths
    assert found.states == THIRD[1].states
    assert len({id(held) for held in found.operators.values()}) == 4, "operators of one part share one record"


def test_a_window_is_made_of_its_steps():
    slots = [part(8, EXPERTS[2:]), part(7, EXPERTS[:2]), part(6, ["gate/0"], kinds=("non_expert", "expert"))]
    found = view(replace(WINDOWED, parts=tuple(named for named, _ in slots)), slots)
    assert [slot.step for slot in found.slots] == [6, 7, 8]
    assert found.window == (SlotRecord(6, slots[2][1].states), SlotRecord(7, slots[1][1].states))
    assert len(found.files) == 3 * 2 * RANKS, "with those in which there is only what replay needs"
    for slot, (_, held) in zip(reversed(found.slots), slots, strict=True):
        assert set(slot.operators) == set(held.operators)
        assert {file.step for each in slot.operators.values() for file in each.files} == {slot.step}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (part(7, [], generation=1), "is the part of step_00000007_g1, in the wrong place"),
        (part(7, [], run_id="x"), "step_00000007/PART.json, step 7: belongs to run x"),
        (part(7, ["expert/0/4"]), "expert/0/4 is of no layer of the model, or beyond its experts"),
        (part(7, ["gate/1"]), "gate/1 is of no layer"),
    ],
)
def test_a_part_of_something_else_is_refused(other, message):
    with pytest.raises(DamagedError, match=message):
        view(parts=(THIRD, other, FIRST))


def test_the_newest_part_is_of_as_many_ranks():
    with pytest.raises(DamagedError, match=r"step_00000008_g2/PART\.json, step 8: is of 2 ranks"):
        view(replace(MANIFEST, world_size=4))


PART_BODY = {
    "kind": "moe_ckpt.part",
    "format_version": 1,
    "run_id": "r",
    "step": 6,
    "generation": 0,
    "world_size": 2,
    "files": [["expert", 0, 100, 80, "d"], ["non_expert", 1, 100, 80, "d"]],
    "states": [[1, 30, "c"], [0, 30, "c"]],
    "operators": ["expert/0/0", "gate/0"],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": [["expert", 0, 100, 80, "d"]] * 2}, "files are not one of each kind at most"),
        ({"files": [["expert", 2, 100, 80, "d"]]}, "files are not one of each kind at most, of the ranks 0 to 1"),
        ({"files": [["state", 0, 100, 80, "d"]]}, "kind is 'state', but must be 'expert' or 'non_expert'"),
        ({"files": [["../expert", 0, 100, 80, "d"]]}, "must be 'expert' or 'non_expert'"),
        ({"files": [["expert", -1, 100, 80, "d"]]}, r"files\[0\]\.rank is -1"),
        ({"files": [["expert", 0, 100, 80, "d"]]}, "'gate/0' is in no file"),
        ({"states": [[0, 30, "c"]]}, "states are not of the ranks 0 to 1, one each"),
        ({"states": [[0, 30, "c"]] * 2}, "states are not of the ranks 0 to 1, one each"),
        ({"operators": ["gate/0", "gate/0"]}, "operators has one twice"),
        ({"operators": ["expert/0/04"]}, "must be the id of an operator"),
        ({"world_size": 0}, "world_size is 0"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(changes, message):
    assert Part.decode(seal(PART_BODY), "p").operators == ("expert/0/0", "gate/0")
    with pytest.raises(DamagedError, match=f"^p: not a part of this format: field .*{message}"):
        Part.decode(seal({**PART_BODY, **changes}), "p")


@pytest.mark.parametrize("key", sorted(set(PART_BODY) - {"kind", "format_version"}))
def test_every_missing_or_mistyped_field_of_a_part_is_refused(key):
    with pytest.raises(DamagedError, match=f"not a part of this format: field {key} is missing"):
        Part.decode(seal({k: v for k, v in PART_BODY.items() if k != key}), "p")
    for wrong in (True, -1, "\ud800", [7], [[[]]], {"a": {}}, 2**63):
        with pytest.raises(DamagedError, match=f"not a part of this format: field {key}"):
            Part.decode(seal({**PART_BODY, key: wrong}), "p")


def test_other_kinds_and_versions_are_no_parts():
    with pytest.raises(DamagedError, match=r"is a 'moe_ckpt\.manifest', not a 'moe_ckpt\.part'"):
        Part.decode(MANIFEST.encode(), "p")
    for version in (0, 3, None):
        with pytest.raises(FormatVersionError):
            Part.decode(seal({**PART_BODY, "format_version": version}), "p")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": []}, "parts has 0 items"),
        ({"parts": [["step_00000007", 1, "d"]]}, "parts are not the checkpoint's own and older ones"),
        ({"parts": [["step_8", 1, "d"]]}, "must be the name of a step directory"),
        ({"parts": [["../step_00000008_g2", 1, "d"]]}, "must be the name of a step directory"),
        ({"step": 6, "parts": [["step_00000006_g2", 1, "d"], ["step_00000007", 1, "d"]]}, "a step after the"),
        ({"window": [7]}, "window: the steps of its window are not those of its parts"),
        ({"window": []}, "window has 0 items"),
    ],
)
def test_a_manifest_that_contradicts_its_parts_is_refused(changes, message):
    with pytest.raises(DamagedError, match=f"^m: not a manifest of this format: field .*{message}"):
        Manifest.decode(seal({**body_of(), **changes}), "m")


def test_parts_are_in_order_and_each_once():
    rows = body_of()["parts"]
    for wrong in (rows[::-1], [rows[0], rows[2], rows[1]], [rows[0], rows[1], rows[1]]):
        with pytest.raises(DamagedError, match="newest first"):
            Manifest.decode(seal({**body_of(), "parts": wrong}), "m")


ROW = ["expert", 1, 2]
FAULTS = ["expert", "", "gate", "\ud800", True, -1, 3, 4, 1 << 70, 1.0, float("nan"), None, [], {}, b"x"]


def test_a_table_is_checked_as_a_list_of_rows():
    """By whole columns, and with the same words."""
    columns = {"kind": one_of("expert", "non_expert"), "rank": whole(0, 3), "digest": anything}
    slowly, quickly = listing(row(columns)), table(columns)
    assert quickly([ROW] * 3) == quickly([["expert", 3, "d"], ["non_expert", 0, "e"]]) == quickly([]) == ""
    for fault in FAULTS:
        for at in range(3):
            rows = [list(ROW) for _ in range(5)]
            rows[3][at] = fault
            assert quickly(rows) == slowly(rows), (at, fault)
    for rows in ([ROW, ROW[:2]], [ROW, [*ROW, 1]], [tuple(ROW)], [ROW, None], [ROW, {}], None, {}, "x", [[]]):
        assert quickly(rows) == slowly(rows) != ""
    words = table({"digest": text})
    assert words([["a"], ["b"]]) == ""
    assert words([["a"], ["\ud800"]]).startswith("[1].digest is")
