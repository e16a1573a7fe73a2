"""The header of a memory slot, as bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.core.tokens import FaultRecord
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.slot import decode_slot, encode_slot
from tests.support.replicas import slot_header

HEADER = slot_header("run", 9, 0, 1, 2, 64, ())


@pytest.mark.parametrize("mlt", [0.0, 0.1 + 0.2, None])
def test_faults_come_back_with_their_mlt(mlt):
    header = replace(HEADER, facts=replace(HEADER.facts, faults=(FaultRecord(5, 7, 2, 70, mlt),)))
    assert decode_slot(encode_slot(header), "a") == replace(header, facts=header.facts)


def test_a_portion_above_all_is_damage():
    header = replace(HEADER, facts=replace(HEADER.facts, faults=(FaultRecord(5, 7, 2, 70, 1.5),)))
    with pytest.raises(DamagedError, match="mlt"):
        decode_slot(encode_slot(header), "a")
