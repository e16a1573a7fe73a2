"""The Megatron recipe in processes: what ranks really hold, and a run that is killed and comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra")
pytest.importorskip("megatron")

from recipes.gpt_moe_megatron.config import RunConfig
from recipes.gpt_moe_megatron.runlog import read
from recipes.gpt_moe_megatron.sizes import compose
from tests.support import warm
from tests.support.processes import run_ranks

WARM = warm.MEGATRON
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gpt_moe_megatron"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "lo"}
COUNTS = """
import json, sys
from dataclasses import asdict
from recipes.gpt_moe_megatron.counting import Precision, rank_counts
from recipes.gpt_moe_megatron.sizes import compose
run = compose(json.loads(sys.argv[1]))
found = [(asdict(c), asdict(c.state_bytes(Precision.of(run.trainer.precision), run.parallel.distributed_optimizer)))
         for c in rank_counts(run.model, run.parallel)]
print(json.dumps(found))
"""
SHARDED = ("trainer.precision=bf16", "parallel.distributed_optimizer=true", "parallel.overlap=true")
PLAIN_BYTES = 32 * 1024
"""More than what a rank's random generators take in a checkpoint."""


def python(*args, timeout=500):
    env = os.environ | ENVIRONMENT
    command = [warm.python(WARM), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def held(rank: int, world_size: int, run: RunConfig) -> dict[str, int]:
    """What is on this rank after one update, read off Megatron's own objects."""
    from recipes.gpt_moe_megatron.model import build, prepare_cpu
    from recipes.gpt_moe_megatron.train import Training

    prepare_cpu()
    built = build(run)
    training = Training(run, built)
    training.gradients(0)
    assert training.update().updated
    named = [pair for chunk in built.chunks for pair in chunk.named_parameters()]
    weights = {id(parameter) for _, parameter in named}
    inner = [leaf.optimizer for leaf in built.optimizer.chained_optimizers]
    updated = [p for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
    moments = [m for optimizer in inner for s in optimizer.state.values() for m in (s["exp_avg"], s["exp_avg_sq"])]
    return {
        "expert": sum(p.numel() for name, p in named if ".experts." in name),
        "dense": sum(p.numel() for name, p in named if ".experts." not in name),
        "weights": sum(p.nbytes for _, p in named),
        "gradients": sum(p.main_grad.nbytes for _, p in named),
        "masters": sum(p.nbytes for p in updated if id(p) not in weights),
        "moments": sum(m.nbytes for m in moments),
    }


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["parallel=pp2_ep2", *SHARDED], id="distributed"),
        pytest.param(["parallel=pp2_ep2", "trainer.precision=bf16"], id="masters", marks=pytest.mark.slow),
        pytest.param(["parallel=single", "parallel.pp=2", "parallel.vpp=2"], id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_ranks_hold_what_sizes_says(overrides):
    run = compose([*overrides, "trainer.global_batch=4"])
    ranks = run.parallel.ranks
    found = run_ranks(held, ranks, run, preload=WARM)
    for stage, (count, state) in enumerate(json.loads(python("-c", COUNTS, json.dumps(overrides)))):
        here = found[stage * ranks // run.parallel.pp : (stage + 1) * ranks // run.parallel.pp]
        for name in ("dense", "expert"):
            assert {rank[name] for rank in here} == {count[name]}
        for name in ("weights", "gradients"):
            assert {rank[name] for rank in here} == {state[name]}
        for name in ("masters", "moments"):  # dealt evenly but for the padding of buffers, so in sum
            assert sum(rank[name] for rank in here) == len(here) * state[name]


def launched(run_dir, *overrides):
    """Each rank's log of a run of four processes under torchrun.sh."""
    program = [str(RECIPE.parent / "launch" / "torchrun.sh"), str(RECIPE / "train.py")]
    command = [*program, f"run_dir={run_dir}", "trainer.train_iters=8", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [read(run_dir / f"log.rank{rank}.jsonl") for rank in range(4)], done.stdout


def events(log, name):
    return [row for row in log if row.get("event") == name]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The same run without a checkpoint and without a kill."""
    logs, printed = launched(tmp_path_factory.mktemp("unbroken"), *SHARDED, "~moe_ckpt")
    assert printed.count("loss") == 8
    return [events(log, "finished")[0] for log in logs]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["dense", "moevement"])
def test_a_killed_run_ends_as_an_unbroken_one(policy, unbroken, tmp_path):
    window = ["moe_ckpt.policy.window=2"] if policy == "moevement" else []
    logs, _ = launched(tmp_path, *SHARDED, f"moe_ckpt/policy={policy}", *window, "faults.kills=1", "faults.seed=3")
    assert len((tmp_path / "kills.jsonl").read_text().splitlines()) == 1
    for before, log in zip(unbroken, logs, strict=True):
        assert [row["generation"] for row in events(log, "process_start")] == [0, 1]
        assert 0 < events(log, "resumed")[-1]["iteration"] < 8
        after = events(log, "finished")[0]
        assert (before["parameters"], before["loss"]) == (after["parameters"], after["loss"])
    if policy == "dense":
        saves_as_told(logs, "dense_bytes", *SHARDED)


def saves_as_told(logs, name, *overrides):
    """Each rank's last checkpoint has its part of what sizes.py says, and the state of the rank's generators."""
    facts = json.loads(python(str(RECIPE / "sizes.py"), "--json", *overrides))
    saved = sum(
        [row for row in log if "iteration" in row and "event" not in row][-1]["moe_ckpt/nbytes"] for log in logs
    )
    plain, uneven = divmod(saved - facts[name], len(logs))
    assert not uneven
    assert 0 <= plain < PLAIN_BYTES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_moc_saves_what_sizes_says(tmp_path):
    logs, _ = launched(tmp_path, "moe_ckpt/policy=moc", "moe_ckpt.policy.k=2")
    saves_as_told(logs, "moc_bytes", "--k=2")
    assert logs[0][-2]["moe_ckpt/k"] == 2


def test_an_unknown_setting_is_refused_before_anything_starts():
    command = [str(RECIPE / "train.py"), "moe_ckpt.policy.kk=2"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    assert done.returncode != 0
    assert "kk" in done.stderr
