"""Plain training state as JSON: what goes in comes out, in value and in type; the rest is refused by its path."""

from __future__ import annotations

import enum
import json
import math
import random
from collections import OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.errors import UnencodableStateError
from moe_ckpt.format.sealed import nesting
from moe_ckpt.format.tree import decode_tree, encode_tree


def through_json(tree, prefix=""):
    value, tensors = encode_tree(tree, prefix)
    text = json.dumps(value, allow_nan=False)
    return decode_tree(json.loads(text), tensors.__getitem__)


def same(a, b):
    """Equal in value and in type; NaN equals NaN; tensors and arrays bit by bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return a == b


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text()) | st.binary()
tensors = st.builds(
    lambda dtype, shape: torch.zeros(shape).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
)
arrays = st.builds(
    lambda dtype, n: np.arange(n).astype(dtype),
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64, np.int16, np.float32, np.float64, np.bool_]),
    st.integers(0, 5),
)
trees = st.recursive(
    scalars | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=15,
)


@given(trees)
def test_round_trip(tree):
    assert same(tree, through_json(tree))


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "tensor", "v": "x"},
        {"$": 1},
        [{"$": {"$": "tuple"}}],
        {1: "int", "1": "str"},
        {True: 1, "True": 2},
        {(0, "a"): [()], None: {}},
        {"s": {1, 2, 3}},
        {frozenset({1, 2}): 0, (frozenset(), 1): {frozenset({3})}, "alone": frozenset({4})},
        {"nan": [float("nan"), float("inf"), -float("inf"), -0.0]},
        {"big": 2**200},
        {"lone surrogate": "\ud800"},
    ],
)
def test_awkward_trees_round_trip(tree):
    assert same(tree, through_json(tree))


def test_rng_states_round_trip():
    generator = np.random.RandomState(3)
    python = random.Random(3)
    state = through_json(
        {
            "numpy": generator.get_state(),
            "python": python.getstate(),
            "torch": torch.get_rng_state(),
            "pcg": np.random.default_rng(1).bit_generator.state,
        }
    )
    other = np.random.RandomState(0)
    other.set_state(state["numpy"])
    assert other.randint(1 << 30, size=9).tolist() == generator.randint(1 << 30, size=9).tolist()
    resumed = random.Random()
    resumed.setstate(state["python"])
    assert resumed.random() == python.random()
    assert torch.equal(state["torch"], torch.get_rng_state())
    assert state["pcg"] == np.random.default_rng(1).bit_generator.state


def test_tensors_are_handed_out_by_path_and_not_copied():
    weight = torch.nn.Parameter(torch.ones(2))
    value, found = encode_tree({"callbacks": {"EMA": [weight, 3]}}, prefix="loops")
    assert [*found] == ["loops/callbacks/EMA/0"]
    assert found["loops/callbacks/EMA/0"].data_ptr() == weight.data_ptr()
    assert not found["loops/callbacks/EMA/0"].requires_grad
    assert value == {"callbacks": {"EMA": [{"$": "tensor", "v": "loops/callbacks/EMA/0"}, 3]}}


def test_names_never_collide():
    tree = {"a": {1: torch.tensor(1), "1": torch.tensor(2)}, "a/1": torch.tensor(3), "b": {"c": torch.tensor(4)}}
    _, found = encode_tree(tree)
    assert sorted(int(t) for t in found.values()) == [1, 2, 3, 4]
    assert same(tree, through_json(tree))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint32).reshape(3, 4)[::-1, ::2],
        np.array(7, dtype=np.uint64),
        np.arange(6, dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3), dtype=np.uint16),
    ],
    ids=["strided", "0-d", "big-endian", "fortran", "empty"],
)
def test_arrays_of_any_layout_round_trip(array):
    back = through_json({"a": array})["a"]
    assert back.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(back, array)


def test_subclasses_come_back_as_the_builtin():
    class Mode(str, enum.Enum):
        MIN = "min"

    class Level(enum.IntEnum):
        HIGH = 3

    point = namedtuple("point", "x y")
    tree = {
        "ordered": OrderedDict(a=1),
        "default": defaultdict(int, a=1),
        "point": point(1, 2),
        "size": torch.Size([2, 3]),
        "mode": Mode.MIN,
        "level": Level.HIGH,
        "bytes": bytearray(b"ab"),
    }
    back = through_json(tree)
    assert back["mode"] == "min"
    assert same({k: v for k, v in back.items() if k != "mode"}, {
        "ordered": {"a": 1}, "default": {"a": 1}, "point": (1, 2), "size": (2, 3), "level": 3, "bytes": b"ab",
    })  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.int64(3),
        np.bool_(True),
        np.float64("nan"),
        np.uint64(2**64 - 1),
        np.float16(-0.0),
        np.uint8(7),
    ],
    ids=lambda value: value.dtype.name,
)
def test_numbers_of_numpy_keep_their_type(value):
    """A moving average in float32 would be another one as a float of Python."""
    for tree in (value, [value, 1], {value: value}):
        back = through_json(tree)
        number = back if tree is value else next(iter(back))
        assert type(number) is type(value)
        assert number.tobytes() == value.tobytes()


@pytest.mark.parametrize(
    "number", [["float32", "AA=="], ["float32", ""], ["object", "AAAA"], ["float32"], [1, "AA=="], "x"]
)
def test_numbers_of_numpy_that_are_none_are_refused(number):
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode_tree({"$": "number", "v": number}, {}.__getitem__)


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Custom(), "Custom"),
        (Custom, "type"),
        (lambda: 0, "function"),
        (Decimal("1.5"), "decimal.Decimal"),
        (PurePosixPath("x"), "PurePosixPath"),
        (1j, "complex"),
        (torch.float32, "torch.dtype"),
        (torch.eye(2).to_sparse(), "tensor of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "tensor without memory"),
        (np.array([Custom()]), "numpy array of object"),
        (np.array(["a"]), "numpy array of <U1"),
        (np.array(["2026-01-01"], dtype="M8[D]"), "numpy array of datetime64"),
    ],
)
def test_what_would_need_pickle_is_refused_by_path_and_type(value, named):
    with pytest.raises(UnencodableStateError, match=r"training state at 'callbacks/Mine/0' is a .*" + named):
        encode_tree({"callbacks": {"Mine": [value]}})


def test_the_root_has_a_path_too():
    with pytest.raises(UnencodableStateError, match="training state at '/' is a"):
        encode_tree(Custom())


@pytest.mark.parametrize("tag", ["object", "reduce", "", None])
def test_unknown_tags_are_refused(tag):
    with pytest.raises(ValueError, match="unknown tag"):
        decode_tree({"$": tag, "v": ["os.system", "true"]}, {}.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "float", "v": "1.5"},
        {"$": "float", "v": 10**400},
        {"$": "float", "v": []},
        {"$": "bytes", "v": 7},
        {"$": "bytes", "v": "no base64!"},
        {"$": "tuple", "v": 3},
        {"$": "set", "v": [[]]},
        {"$": "dict", "v": [1]},
        {"$": "dict", "v": [[[], 1]]},
        {"$": "tensor", "v": []},
        {"$": "tensor", "v": "absent"},
        {"$": "array", "v": "x"},
        {"$": "array", "v": ["x", "O"]},
        {"$": "array", "v": ["x", ","]},
        {"$": "array", "v": ["x", "float64"]},
        {"$": "array", "v": ["x", "(2,2)i4"]},
        {"$": [], "v": 1},
        {"$": None},
    ],
)
def test_values_that_no_writer_made_are_refused_by_name(value):
    with pytest.raises((TypeError, ValueError, KeyError)):
        decode_tree({"a": [value]}, {"x": torch.zeros(2)}.__getitem__)


@pytest.mark.parametrize("times", [126, 5000])
def test_state_that_is_nested_too_deep_for_readers_is_not_written(times):
    deep = []
    for _ in range(times):
        deep = [deep]
    with pytest.raises(UnencodableStateError, match="more than 125 lists and dicts within one another"):
        encode_tree({"callbacks": deep})


@given(trees, st.integers(0, 6))
def test_what_is_within_one_another_is_counted_as_readers_count(tree, most):
    value, _ = encode_tree(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_ckpt.format.tree._MOST_DEPTH", most)
        if nesting(value, 99) <= most:
            assert same(value, encode_tree(tree)[0])
        else:
            with pytest.raises(UnencodableStateError, match="within one another"):
                encode_tree(tree)


def test_lists_of_numbers_are_taken_whole_and_all_others_item_by_item():
    class Level(enum.IntEnum):
        HIGH = 3

    class Text(str):
        pass

    tree = {
        "numbers": [1, True, None, "x"],
        "tuple": (1, 2),
        "set": {5},
        "floats": [0.5, 1.5],
        "odd floats": [0.5, math.inf],
        "derived": [Level.HIGH, Text("t")],
    }
    value, _ = encode_tree(tree)
    assert value["numbers"] == [1, True, None, "x"]
    assert value["numbers"] is not tree["numbers"], "the caller may change it before it is written"
    assert value["tuple"] == {"$": "tuple", "v": [1, 2]}
    assert value["floats"] == [0.5, 1.5]
    assert value["odd floats"] == [0.5, {"$": "float", "v": "inf"}]
    assert [type(item) for item in value["derived"]] == [int, str]
    assert decode_tree(value, {}.__getitem__) == {**tree, "derived": [3, "t"]}
