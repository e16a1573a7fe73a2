"""Values are finite, or not, whatever their type; and which of them training makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.format.sealed import Fragment
from moe_ckpt.format.shard import TORCH_DTYPES, SliceEntry
from moe_ckpt.slices.checksums import all_finite, first_not_finite, judged_in

FLOATS = [name for name, dtype in TORCH_DTYPES.items() if dtype.is_floating_point or dtype.is_complex]
MANY = 1 << 19
"""More than are looked at together, of each type."""


def raw(values):
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_large_and_small_numbers_are_finite(name):
    dtype = TORCH_DTYPES[name]
    if name not in FLOATS:
        assert all_finite(raw(torch.full((9,), 127).to(dtype)), name)
        assert all_finite(raw(torch.full((8,), 255, dtype=torch.uint8)), name)
        return
    limits = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, -limits.tiny], dtype=torch.float64).to(dtype)
    assert all_finite(raw(values), name)
    assert all_finite(raw(torch.full((MANY,), limits.max, dtype=torch.float64).to(dtype)), name), "their sum is not"
    assert all_finite(raw(values[:0]), name)


@pytest.mark.parametrize("name", FLOATS)
@given(place=st.sampled_from([0, 1, 7, MANY // 2, MANY - 1]), bad=st.sampled_from(["nan", "inf", "-inf"]))
def test_one_number_that_is_not_finite_is_found_at_any_place(name, place, bad):
    if name == "F8_E4M3":
        bad = "nan"  # it has no infinities
    values = torch.zeros(MANY, dtype=TORCH_DTYPES[name])
    values[place] = float(bad)
    assert not all_finite(raw(values), name)


def test_infinities_of_both_signs_are_no_finite_sum():
    assert not all_finite(raw(torch.tensor([float("inf"), float("-inf")])), "F32")


def test_the_first_slice_that_counts_is_named():
    entries = [SliceEntry(f"model/{name}", "non_expert/x", "F32", (0,), (2,), (2,)) for name in "abc"]
    values = torch.tensor([1.0, 2.0, float("nan"), 3.0, float("inf"), 4.0])
    assert first_not_finite(entries, raw(values), [8, 16, 24], lambda key: True) == "model/b"
    assert first_not_finite(entries, raw(values), [8, 16, 24], lambda key: key != "model/b") == "model/c"
    assert first_not_finite(entries, raw(values), [8, 16, 24], lambda key: False) == ""


def test_what_requires_no_gradient_does_not_count():
    frozen = Fragment(["layers.0.mask", "decoder.layers.1.mlp.experts.*.w"])
    judged = judged_in({"plain": {"frozen": frozen, "resting": ["tied"]}})
    assert judged("model/layers.0.w")
    assert judged("optim/0/layers.0.w/exp_avg")
    assert judged("model/layers.0.mask.w")
    for key in (
        "model/layers.0.mask",
        "optim/3/layers.0.mask/exp_avg",
        "replay/model/layers.0.mask",
        "model/decoder.layers.1.mlp.experts.7.w",
        "optim/0/tied/exp_avg",
        "grad/0/tied",
    ):
        assert not judged(key), key


@pytest.mark.parametrize("state", [None, {}, {"plain": None}, {"plain": {"frozen": None}, "step": 3}])
def test_where_no_trainer_says_anything_all_counts(state):
    assert judged_in(state)("model/w")


def test_gradients_that_a_loss_scaler_may_have_left_out_do_not_count():
    updates = [{"found_inf": None}, {"found_inf": {"$": "tensor", "v": "x"}}]
    assert not judged_in({"gradient_log": {"updates": updates}})("grad/0/w")
    assert judged_in({"gradient_log": {"updates": updates}})("model/w")
    assert judged_in({"gradient_log": {"updates": updates[:1]}})("grad/0/w")
