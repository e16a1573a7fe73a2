"""Fragments: the same bytes as without them, and no way around the limit of depth."""

from __future__ import annotations

import copy
import json

import pytest

from moe_ckpt.errors import UnencodableStateError
from moe_ckpt.format.sealed import FixedStrings, Fragment, encode_json, nesting, seal, unseal
from moe_ckpt.format.tree import decode_tree, encode_tree
from moe_ckpt.recovery.replay import are_plain_states_equal

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


def test_no_string_of_a_document_is_taken_for_a_fragment():
    hostile = ["moe_ckpt.fragment", "moe_ckpt.fragment'", '"moe_ckpt.fragment"', "moe_ckpt.fragment''"]
    body = {"a": [*hostile, Fragment(NAMES), *hostile], "moe_ckpt.fragment": Fragment(["moe_ckpt.fragment"])}
    plain = {"a": [*hostile, NAMES, *hostile], "moe_ckpt.fragment": ["moe_ckpt.fragment"]}
    assert encode_json(body) == json.dumps(plain, separators=(",", ":")).encode()
    assert encode_json([Fragment([Fragment(["a"])]), "b"]) == b'[[["a"]],"b"]'


def test_fixed_strings_are_a_list_until_they_stand_in_a_document():
    names = FixedStrings(iter(NAMES))
    assert isinstance(names, list)
    assert names == NAMES
    tree = {"groups": [{"params": names, "lr": 0.1}]}
    encoded, _ = encode_tree(tree)
    assert encoded["groups"][0]["params"] is names.fragment
    assert copy.deepcopy(tree)["groups"][0]["params"] is names
    assert are_plain_states_equal(tree, {"groups": [{"params": NAMES, "lr": 0.1}]}), (
        "a replay compares it with what was read"
    )
    expected = {"groups": [{"params": NAMES, "lr": 0.1}]}
    assert decode_tree(encoded, {}.__getitem__) == expected
    assert type(decode_tree(encoded, {}.__getitem__)["groups"][0]["params"]) is list
    assert decode_tree(unseal(seal({"state": encoded}), "f")["state"], {}.__getitem__) == expected
    assert seal({"state": encoded}) == seal({"state": encode_tree(expected)[0]})


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("times", [0, 1, 2, 5])
def test_depth_counts_lists_and_objects_within_one_another(kind, times):
    document = nested(times, kind) if times else 1
    assert nesting(document, 99) == times
    assert nesting({"a": 1, "b": [document]}, 99) == times + 2
    assert nesting(document, times) <= times
    if times:
        assert nesting(document, times - 1) == times


@pytest.mark.parametrize("kind", [list, dict])
def test_no_state_is_deeper_than_readers_go_because_of_fixed_strings(kind):
    deep, inside = nested(125, kind), FixedStrings(["a"])
    innermost = deep
    while innermost:
        innermost = innermost["x"] if kind is dict else innermost[0]
    innermost.update(x=inside) if kind is dict else innermost.append(inside)
    encoded, _ = encode_tree(deep)
    assert decode_tree(unseal(seal({"state": encoded}), "f")["state"], {}.__getitem__) == deep
    with pytest.raises(UnencodableStateError, match="more than 125 lists and dicts"):
        encode_tree([deep])


def test_what_is_no_json_is_refused_when_the_fragment_is_made():
    for wrong in ([float("nan")], [object()]):
        with pytest.raises((ValueError, TypeError)):
            Fragment(wrong)
