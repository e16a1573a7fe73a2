"""Which version of every operator is the newest, by number; and which files of a store have it."""

from __future__ import annotations

import numpy as np
import pytest

from moe_ckpt.commit.commit import View, WrittenPart
from moe_ckpt.format.manifest import PartRecord
from moe_ckpt.ledger.ledger import NEVER, Versions
from tests.unit.builders import catalog

MODEL = catalog(1, 3)
EVERYTHING = np.arange(len(MODEL.operators))
NAMES = {"expert": frozenset({"e"}), "non_expert": frozenset({"n"})}


def place(*operators: str) -> np.ndarray:
    return MODEL.places_of(operators)


def part(directory: str, *operators: str) -> WrittenPart:
    return WrittenPart(PartRecord(directory, 1, "0"), NAMES, place(*operators) if operators else EVERYTHING)


def directories(view: View) -> list[str]:
    return [each.record.directory for each in view.numbered.values()]


def test_the_newest_version_counts_and_never_goes_back():
    versions = Versions(MODEL)
    assert versions.lacks(EVERYTHING) == list(MODEL.everything)
    assert versions.live() == frozenset()
    versions.record(EVERYTHING, 4)
    versions.record(place("expert/0/1"), 6)
    assert versions.live() == {4, 6}
    assert versions.live(~MODEL.is_expert) == {4}
    assert versions.places_of(6).tolist() == place("expert/0/1").tolist()
    with pytest.raises(ValueError, match="expert/0/1 is recorded at step 6, cannot go back to step 5"):
        versions.record(EVERYTHING, 5)
    assert versions.live() == {4, 6}, "nothing of it was recorded"
    versions.add(EVERYTHING, 5)
    assert versions.live() == {5, 6}, "memory has what it had, too"


def test_a_copy_shares_nothing():
    versions = Versions(MODEL)
    versions.record(place("gate/0"), 2)
    copied = versions.copy()
    copied.record(EVERYTHING, 3)
    assert (versions.live(), copied.live()) == ({2}, {3})
    assert versions.numbers[-1] == copied.numbers[-1] == NEVER


def test_a_part_stays_as_long_as_it_has_a_newest_version():
    view = View(Versions(MODEL)).beneath([part("a")]).beneath([part("b", "expert/0/0", "gate/0")])
    assert directories(view) == ["b", "a"]
    others = [op for op in MODEL.everything if op not in ("expert/0/0", "gate/0")]
    assert directories(view.beneath([part("c", *others)])) == ["c", "b"]
    assert directories(view.beneath([part("c"), part("d", "gate/0")])) == ["d", "c"]
    assert directories(view) == ["b", "a"], "a view does not change"


def test_of_a_part_only_the_shards_with_a_newest_version_are_needed():
    rest = [op.id for op in MODEL.always_saved]
    view = View(Versions(MODEL)).beneath([part("a")]).beneath([part("b", *rest)])
    needed = view.needed()
    assert {directory: sorted(groups) for directory, groups in needed.items()} == {
        "a": ["PART.json", "expert"],
        "b": ["PART.json", "non_expert"],
    }


def test_the_part_of_the_step_itself_stays_even_if_it_has_no_operator():
    empty = WrittenPart(PartRecord("b", 1, "0"), {}, np.array([], dtype=np.int64))
    view = View(Versions(MODEL)).beneath([part("a")]).beneath([empty])
    assert directories(view) == ["b", "a"]
    assert directories(view.beneath([part("c", "gate/0")])) == ["c", "a"]
