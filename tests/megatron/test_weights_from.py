"""``weights_from=`` and ``load_weights`` under Megatron: another layout, new optimizer, masters that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.interop.export import export
from tests.megatron import weights_rank
from tests.support.megatron_gpt import Setup
from tests.support.processes import run_ranks

BASE = Setup(
    *(1, 1), dropout=0.0, hidden=16, ffn=16, vocab=32, seq=8, layers=2, num_microbatches=2, precision="bf16",
    expert_bias=True,
)  # fmt: skip
PP2, EP2_SHARDED = replace(BASE, pp=2), replace(BASE, ep=2, dist_opt=True)
WARM = "tests.support.megatron_warm"


def begun(place: Path, setup: Setup, source: str, weights: dict[str, str]) -> None:
    views = run_ranks(weights_rank.begin, 2, str(place), setup, source, f"new from {source}", preload=WARM)
    assert views[0]["weights"] == weights
    for view in views:
        assert view["life 0"] == (0, False)
        assert view["life 1"] == (1, True), "a restart goes on from its own store"
        assert view["masters"]
        assert view["state"] == 0
    assert views[0]["trained"] != weights


def test_a_new_run_with_the_weights_of_another_layout(tmp_path: Path):
    [weights, _] = run_ranks(weights_rank.train, 2, str(tmp_path), PP2, preload=WARM)
    begun(tmp_path, EP2_SHARDED, "store", weights)


@pytest.mark.slow
def test_a_new_run_with_exported_weights_where_each_rank_has_other_layers(tmp_path: Path):
    [weights, _] = run_ranks(weights_rank.train, 2, str(tmp_path), EP2_SHARDED, preload=WARM)
    export(tmp_path / "store", "safetensors", tmp_path / "exported")
    begun(tmp_path, PP2, "exported", weights)


@pytest.mark.slow
def test_weights_alone_into_a_model_without_an_optimizer(tmp_path: Path):
    [weights, _] = run_ranks(weights_rank.train, 2, str(tmp_path), PP2, preload=WARM)
    [alone] = run_ranks(weights_rank.load_alone, 1, str(tmp_path), BASE, "store", preload=WARM)
    assert alone == weights
