"""What ranks answer for: together all boxes of a plan, whatever is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.ledger.coverage import PRIME, cover_sum
from moe_ckpt.ports import TensorSpec
from moe_ckpt.slices.claims import Claims
from tests.unit.builders import catalog

MODEL = catalog(2, 4)
SPECS = [
    TensorSpec(key, name, "F32", shape)
    for name, whole in MODEL.parameters.items()
    for key, shape in (
        (f"model/{name}", whole),
        (f"optim/0/{name}/exp_avg", whole),
        (f"optim/0/{name}/row", whole[:1]),
        (f"optim/0/{name}/step", ()),
    )
]


@pytest.mark.parametrize("in_window", [False, True])
@given(chosen=st.sets(st.sampled_from(MODEL.everything)), light=st.sets(st.sampled_from(MODEL.everything)))
def test_the_ranks_sums_add_up_to_the_boxes(in_window, chosen, light):
    light = light - chosen if in_window else set()
    for ranks in (1, 3):
        claims = [Claims(MODEL, SPECS, rank, ranks) for rank in range(ranks)]
        total = sum(claim.own_sum(chosen, light, in_window=in_window) for claim in claims) % PRIME
        boxes = claims[0].boxes(chosen, light, in_window=in_window)
        assert total == cover_sum((key, box) for key, group in boxes.items() for box in group)
