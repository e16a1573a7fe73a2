"""Fragments: the same bytes as without them, and no way around the limit of depth."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from moe_ckpt.format.schema import MOST_DEPTH
from moe_ckpt.format.sealed import FixedStrings, Fragment, encode_json, nesting, seal, unseal
from moe_ckpt.format.tree import decode_tree, encode_tree
from moe_ckpt.recovery.replay import same_plain

NAMES = ["a.weight", 'quo"ted', "ümlaut", "moe_ckpt.fragment", ""]


def nested(times, kind=list):
    deep = kind()
    for _ in range(times - 1):
        deep = {"x": deep} if kind is dict else [deep]
    return deep


@pytest.mark.parametrize("value", [[], NAMES, {"a": [1, 2.5, None, True]}, {"$": "tuple", "v": [1]}], ids=str)
def test_a_document_is_the_same_to_the_byte(value):
    def body(part):
        return {"names": part, "between": [1, part, "moe_ckpt.fragment"], "moe_ckpt.fragment": {"last": part}}

    assert seal(body(Fragment(value))) == seal(body(value))
    assert unseal(seal(body(Fragment(value))), "f") == body(value)


TABLES = [[], [[]], [[], []], [[0]], [[0, 1], [2**62, 3]], [[7]] * 3, [[9, 10, 0, 99], [100, 101, 109, 1_000_000]]]


@pytest.mark.parametrize("table", [*TABLES, [[2**63 - 1, 10**18]], [[2**32 - 1, 2**32]], [[10**9 - 1, 10**9]]], ids=str)
def test_a_table_of_counts_is_the_same_to_the_byte(table):
    fragment = Fragment.of_counts(np.asarray(table, dtype=np.int64))
    assert seal({"counts": fragment, "more": 1}) == seal({"counts": table, "more": 1})


@pytest.mark.parametrize("most", [2, 10, 1000, 10**6, 2**33, 2**63])
def test_tables_of_any_counts_are_the_same_to_the_byte(most):
    table = np.random.default_rng(most % 97).integers(0, most, (13, 29))
    assert Fragment.of_counts(table).raw == json.dumps(table.tolist(), separators=(",", ":")).encode()
    assert Fragment.of_counts(table[::2, ::-3]).raw == Fragment.of_counts(table[::2, ::-3].copy()).raw


def test_no_string_of_a_document_is_taken_for_a_fragment():
    hostile = ["moe_ckpt.fragment", "moe_ckpt.fragment'", '"moe_ckpt.fragment"', "moe_ckpt.fragment''"]
    body = {"a": [*hostile, Fragment(NAMES), *hostile], "moe_ckpt.fragment": Fragment(["moe_ckpt.fragment"])}
    plain = {"a": [*hostile, NAMES, *hostile], "moe_ckpt.fragment": ["moe_ckpt.fragment"]}
    assert encode_json(body) == json.dumps(plain, separators=(",", ":")).encode()


def test_fixed_strings_are_a_list_until_they_stand_in_a_document():
    names = FixedStrings(iter(NAMES))
    assert isinstance(names, list)
    assert names == NAMES
    tree = {"groups": [{"params": names, "lr": 0.1}]}
    encoded, _ = encode_tree(tree)
    assert encoded["groups"][0]["params"] is names.fragment
    assert copy.deepcopy(tree)["groups"][0]["params"] is names
    assert same_plain(tree, {"groups": [{"params": NAMES, "lr": 0.1}]}), "a replay compares it with what was read"
    expected = {"groups": [{"params": NAMES, "lr": 0.1}]}
    assert decode_tree(encoded, {}.__getitem__) == expected
    assert type(decode_tree(encoded, {}.__getitem__)["groups"][0]["params"]) is list
    assert decode_tree(unseal(seal({"state": encoded}), "f")["state"], {}.__getitem__) == expected
    assert seal({"state": encoded}) == seal({"state": encode_tree(expected)[0]})


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_depth_counts_lists_and_objects_within_one_another(kind, times):
    document = nested(times, kind) if times else 1
    assert nesting(document) == times
    assert nesting({"a": 1, "b": [document]}) == times + 2
    assert nesting(document, times) <= times
    if times:
        assert nesting(document, times - 1) == times
        assert nesting({"a": [Fragment(document)]}) == times + 2
        assert nesting([Fragment(document), nested(2)]) == max(times, 2) + 1


@pytest.mark.parametrize("kind", [list, dict])
def test_no_document_is_deeper_than_readers_go_because_of_a_fragment(kind):
    part = Fragment(nested(MOST_DEPTH - 2, kind))
    assert unseal(seal({"a": [part]}), "f") == {"a": [part.value]}
    for deeper in ({"a": [[part]]}, {"a": [{"b": part}]}):
        with pytest.raises(ValueError, match="nested more than 128 times"):
            seal(deeper)


def test_what_is_no_json_is_refused_when_the_fragment_is_made():
    for wrong in ([float("nan")], [object()], [Fragment([])]):
        with pytest.raises((ValueError, TypeError)):
            Fragment(wrong)
