"""The header of a memory slot, as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moe_ckpt.core.step import GradientGroups, WindowPlace
from moe_ckpt.core.tokens import NO_COUNTS, FaultRecord
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.sealed import seal, unseal
from moe_ckpt.format.slot import SlotHeader, decode_slot, encode_slot
from tests.support.replicas import slot_header

HEADER = slot_header("run", 9, 0, 1, 2, 64, ())


@pytest.mark.parametrize("mlt", [0.0, 0.1 + 0.2])
def test_faults_come_back_with_their_mlt(mlt):
    header = replace(HEADER, facts=replace(HEADER.facts, faults=(FaultRecord(5, 7, 2, 70, mlt),)))
    found = decode_slot(encode_slot(header), "a")
    assert found == replace(header, facts=header.facts)
    assert found.facts.applied.tolist() == header.facts.applied.tolist() == [[9]]


def test_a_portion_above_all_is_damage():
    header = replace(HEADER, facts=replace(HEADER.facts, faults=(FaultRecord(5, 7, 2, 70, 1.5),)))
    with pytest.raises(DamagedError, match="mlt"):
        decode_slot(encode_slot(header), "a")


def test_counts_that_are_no_table_are_damage():
    raw = encode_slot(HEADER)
    body = unseal(raw[8 : 8 + int.from_bytes(raw[:8], "little")], "a")
    body["facts"]["applied"] = [[1, 2], [3]]
    document = seal(body)
    with pytest.raises(DamagedError, match="rows of different lengths"):
        decode_slot(len(document).to_bytes(8, "little") + document, "a")


def edited(header: SlotHeader, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """The slot as a writer with a mistake would have sealed it."""
    raw = encode_slot(header)
    end = 8 + int.from_bytes(raw[:8], "little")
    body = unseal(raw[8:end], "a")
    edit(body)
    document = seal(body)
    return len(document).to_bytes(8, "little") + document + raw[end:]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda body: body["contents"].update(since=body["sequence"] + 1), "since .* is after .sequence"),
        (lambda body: body.update(rank=body["world_size"]), "rank .* is not below"),
        (lambda body: body["contents"].update(window={"start": 1, "size": 2, "slot": 2}), "window.slot 2 is not below"),
        (lambda body: body["facts"].update(faults=[[1, 2]]), "faults"),
        (lambda body: body["facts"].update(faults=[[1, 2, 3, 4]]), "mlt has 0 numbers for 1 recoveries"),
    ],
)
def test_fields_that_contradict_one_another_are_damage(edit, said):
    with pytest.raises(DamagedError, match=said):
        decode_slot(edited(HEADER, edit), "a")


def test_fields_of_a_later_version_are_ignored():
    window = {"start": 1, "size": 2, "slot": 1, "later": 5}
    raw = edited(HEADER, lambda body: body["contents"].update(window=window, later=6))
    assert decode_slot(raw, "a").contents.window == WindowPlace(1, 2, 1)


def test_what_a_copy_lacks_is_said_of_it():
    assert decode_slot(encode_slot(replace(HEADER, sent=True)), "a").sent


def test_a_step_of_a_gradient_log_says_what_it_needs():
    header = replace(HEADER, contents=replace(HEADER.contents, since=7))
    assert decode_slot(encode_slot(header), "a").contents.since == 7


def test_what_gradients_lead_to_is_told_where_that_is_not_everything():
    header = replace(HEADER, contents=replace(HEADER.contents, since=7, gradients=("expert/0/1",)))
    assert decode_slot(encode_slot(header), "a").contents.gradients == ("expert/0/1",)
    assert decode_slot(encode_slot(HEADER), "a").contents.gradients == ()


def test_gradients_in_slots_of_their_own_are_named_by_the_step_and_by_themselves():
    contents = replace(HEADER.contents, since=7, groups=GradientGroups(((3, 4), (6,)), NO_COUNTS))
    step = decode_slot(encode_slot(replace(HEADER, contents=contents, gradient_slots=(0, 1))), "a")
    assert (step.contents.groups.groups, step.gradient_slots) == (((3, 4), (6,)), (0, 1))
    alone = decode_slot(encode_slot(replace(HEADER, only="gradients", gradient_slot=1)), "a")
    assert (alone.only, alone.gradient_slot, alone.contents.groups) == ("gradients", 1, None)


def test_tokens_that_ranks_had_not_agreed_on_come_back_beside_those_that_they_had():
    header = replace(HEADER, facts=replace(HEADER.facts, counted=np.array([[3, 0, 41]])))
    assert decode_slot(encode_slot(header), "a").facts.counted.tolist() == [[3, 0, 41]]


@pytest.mark.parametrize("version", [0, 2, 10])
def test_another_version_is_named_and_refused(version: int):
    with pytest.raises(DamagedError, match=rf"format_version is {version}, but must be 1"):
        decode_slot(edited(HEADER, lambda body: body.update(format_version=version)), "a")
