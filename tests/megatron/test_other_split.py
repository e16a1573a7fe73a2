"""The same parallel degrees, but other layers in each pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support import run_ranks
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Life, live

WARM = "tests.support.megatron_warm"


def split(rank: int, world_size: int, life: Life, first: int) -> dict[str, Any]:
    """A life in which the first stage has ``first`` layers."""
    from tests.support import megatron_gpt

    made = megatron_gpt._transformer_config

    def config(setup: Setup) -> Any:
        found = made(replace(setup, layers=2))
        found.num_layers, found.num_layers_in_first_pipeline_stage = setup.layers, first
        return found

    with mock.patch.object(megatron_gpt, "_transformer_config", config):
        return live(rank, world_size, life)


@pytest.mark.slow
def test_expert_biases_move_with_their_layers(tmp_path: Path):
    setup = Setup(pp=2, layers=3, num_microbatches=2, expert_bias=True)
    life = Life(str(tmp_path / "store"), 3, setup, ("Dense", {"every_n_steps": 1}))
    before = run_ranks(split, 2, life, 2, preload=WARM)
    after = run_ranks(split, 2, replace(life, seed=9), 1, preload=WARM)
    assert [len(each["buffers"]) // 2 for each in (*before, *after)] == [2, 1, 1, 2]
    assert after[0]["progress"].iteration == 3
    for part in ("tensors", "buffers"):
        saved, came = ({k: v for each in told for k, v in each[part].items()} for told in (before, after))
        assert came == saved
