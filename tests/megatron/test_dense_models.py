"""Models without MoE layers: policies that choose no experts save them and bring them back to the last bit."""

from __future__ import annotations

import pytest

from tests.megatron.exactness import Case, check
from tests.megatron.test_exact import BF16, MODEL, SHARDED, SKIPS
from tests.megatron.test_gradient_log import COPIES, LOG, MEMORY
from tests.support.megatron_gpt import Setup

DENSE = {**MODEL, "experts": 0}
PIPELINE = {**DENSE, "pp": 2}
TENSOR = {**DENSE, "tp": 2, "etp": None}
WINDOWS = ("MoEvement", {"window": 3})
MEASURED = {"profile_steps": 2, "max_interval": 2}

CASES = {
    "windows": Case(Setup(**PIPELINE), WINDOWS, ((1, 8, "train"), (0, 1, "replay")), ranks=2, steps=9),
    "windows-sharded": Case(Setup(**PIPELINE, **BF16, **SHARDED), WINDOWS, ((2, 8, "train"),), steps=9),
    "windows-skipped": Case(Setup(**TENSOR, **SKIPS), WINDOWS, ((1, 11, "train"),), ranks=2, steps=11),
    "dense": Case(Setup(**TENSOR, **SHARDED), ("Dense", {"every_n_steps": 2}), ((0, 4, "manifest"),), steps=6),
    "measured": Case(Setup(**DENSE), ("CheckFreq", MEASURED), ((0, 7, "train"),), ranks=1),
    "memory": Case(Setup(**PIPELINE), ("Gemini", {"every_n_steps": 1}), ((1, 6, "train"),), memory=True, copies=COPIES),
    "log": Case(Setup(**PIPELINE, **BF16, **SHARDED), LOG, ((2, 7, "train"),), memory=True, copies=MEMORY),
}
FAST = ("windows",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CASES])
def test_a_killed_run_of_a_dense_model(name, tmp_path):
    case = CASES[name]
    ended = check(case, tmp_path)
    assert ended.resumed[-1] > 0
    if name == "windows":
        assert ended.replayed(-1), "a window was computed again"
