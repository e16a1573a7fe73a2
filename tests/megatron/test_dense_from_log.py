"""Storage's dense checkpoints made from each rank's own slots under Megatron, beside training, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.core.retention import RetentionPolicy
from moe_ckpt.recovery.reader import StoreReader, check_checkpoint
from moe_ckpt.storage import open_storage
from tests.integration.lives import differences
from tests.megatron.exactness import WARM, Case, finish, kill, life_of, require_exact
from tests.megatron.test_exact import BF16, EXPERTS_DATA, GROUPED, PIPELINE_EXPERTS, SHARDED
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import live
from tests.support.processes import start_ranks

FROM_LOG = ("GradientLog", {"window": 3, "dense_from": "log"})
KEEP_ALL = {"retention": RetentionPolicy(keep_last=1000)}


def case_of(setup: dict, kills=(), **more) -> Case:
    copies = {"storage_every_n_steps": 2}
    return Case(Setup(**setup), FROM_LOG, kills, memory=True, copies=copies, options=KEEP_ALL, steps=8, **more)


CASES = {
    "ep2-dp2-sharded": case_of({**EXPERTS_DATA, **GROUPED, **SHARDED}),
    "pp2-ep2-sharded": case_of({**PIPELINE_EXPERTS, **BF16, **SHARDED, "tied": True}),
    "alone-sharded": case_of({**GROUPED, **BF16, **SHARDED}, ranks=1),
    "alone": case_of({**GROUPED, **BF16}, ranks=1),
}


def stored(place: Path) -> tuple[StoreReader, dict[int, object]]:
    reader = StoreReader(open_storage(str(place / "store")))
    return reader, {manifest.step: manifest for manifest in map(reader.manifest, reader.directories())}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_storage_gets_is_what_the_run_had(name, tmp_path):
    case = CASES[name]
    (tmp_path / "log").mkdir()
    (tmp_path / "dense").mkdir()
    finish(case, tmp_path / "log")
    dense = replace(case, policy=("Dense", {"every_n_steps": 1}), memory=False)
    finish(dense, tmp_path / "dense")
    (ours, found), (theirs, truth) = stored(tmp_path / "log"), stored(tmp_path / "dense")
    made = [step for step in found if "gradient_log" not in ours.state(found[step], 0)]
    assert set(made) >= {4, 6, 8}
    for step in made:
        check_checkpoint(ours, found[step])
        keys = ours.index(found[step]).tensors.keys()
        assert keys == theirs.index(truth[step]).tensors.keys()
        for key in keys:
            one, other = ours.tensor(found[step], key), theirs.tensor(truth[step], key)
            assert not list(differences(one, other, key)), f"step {step}"
        for rank in range(case.ranks):
            mine, told = ours.state(found[step], rank), theirs.state(truth[step], rank)
            assert mine.keys() == told.keys()
            for part in ("plain", "rng"):
                assert not list(differences(mine[part], told[part], part))


@pytest.mark.slow
def test_killed_in_the_middle_of_it_a_job_goes_on(tmp_path):
    case = replace(CASES["ep2-dp2-sharded"], kills=((1, 20, "remade"),))
    kill(case, tmp_path)
    reader, found = stored(tmp_path)
    for manifest in found.values():
        check_checkpoint(reader, manifest)
    require_exact(case, tmp_path, finish(case, tmp_path))


@pytest.mark.slow
def test_without_the_distributed_optimizer_it_is_refused_by_name(tmp_path):
    case = case_of({**EXPERTS_DATA, **GROUPED})
    outcomes = start_ranks(live, case.ranks, life_of(case, tmp_path), timeout=300.0, preload=WARM)
    for outcome in outcomes:
        assert not outcome.ok
        assert "ConfigError: dense_from='log': " in outcome.error
        assert "use_distributed_optimizer give each rank its own tensors" in outcome.error
