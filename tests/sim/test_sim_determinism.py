"""The same scenario gives the same numbers: whatever the order of mappings, hash seed, process or number of workers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from moe_ckpt.policies import CheckFreq, Dense, MoC, MoEtion, MoEvement
from moe_ckpt_sim.failures.failures import Components, Poisson, Weibull
from moe_ckpt_sim.run.run import simulate
from moe_ckpt_sim.workload.load import ExpertLoad, tokens_of
from tests.sim.builders import LOCAL, scenario

LOAD = ExpertLoad(skewness=0.3, drift=0.4, drift_secs=150.0)
TABLE = {
    "gpu": {"count": 8, "mtbf_hours": 0.5},
    "host": {"count": 4, "mtbf_hours": 1.0},
    "switch": {"count": 2, "mtbf_hours": 1.0, "blast_nodes": 2},
}
RUNS = {
    "dense": (Dense(10), Poisson(150.0), {}),
    "checkfreq": (CheckFreq(), Weibull(200.0), {}),
    "moc": (MoC(k=1, selector="load_aware", plt_budget=0.05), Poisson(200.0), {}),
    "moetion": (MoEtion(experts=3, every_n_steps=5), Poisson(200.0), {}),
    "moevement": (MoEvement(), Components(TABLE), {"system": LOCAL}),
    "moevement on storage": (MoEvement(window=5), Poisson(100.0), {"cluster": {"storage_bytes_per_sec": 5e4}}),
}


def run_of(name, seed=1):
    policy, failures, given = RUNS[name]
    return scenario(policy, failures=failures, seed=seed, load=LOAD, duration_secs=600.0, **given)


def told_by(name, seed=1):
    """As text: floats to nine digits."""
    return json.dumps(simulate(run_of(name, seed)).to_dict(), sort_keys=True)


GOLDEN = {
    "dense": {"ettr": 0.856666667, "failures": 6},
    "checkfreq": {"ettr": 0.926666667, "failures": 6},
    "moc": {"ettr": 0.955, "lost_tokens": 23055, "plt": 0.00982314504, "k": 1},
    "moetion": {"ettr": 0.938333333, "lost_tokens": 10570, "k": 3},
    "moevement": {"ettr": 0.923333333, "failures": 5, "window": 3, "reorders": 4},
    "moevement on storage": {"ettr": 0.538333333, "mean_stall_secs": 0.358319372, "window": 5, "reorders": 4},
}
"""Of seed 1. What a change of the model or of a policy moves, is moved here in the same commit, and said there."""


@pytest.mark.parametrize("name", RUNS)
def test_golden_numbers(name):
    told = simulate(run_of(name)).to_dict(history=False)
    assert {key: told[key] for key in GOLDEN[name]} == GOLDEN[name]


def test_failures_and_loads_come_from_named_generators():
    """PCG64, seeded by ``SeedSequence(seed).spawn(2)``: the first draws failures, the second loads."""
    failures, loads = (np.random.Generator(np.random.PCG64(one)) for one in np.random.SeedSequence(1).spawn(2))
    first = next(Poisson(150.0).events(failures, 4)).at_secs
    told = simulate(run_of("dense"))
    assert told.history[0].at_secs > first > told.history[0].at_secs - 15
    assert tokens_of(LOAD.draw(loads, 4, 8), 1000)[0, :3].tolist() == TOKENS


TOKENS = [326, 3, 194]


def shuffled(mapping, seed):
    items = list(mapping.items())
    random.Random(seed).shuffle(items)
    return dict(items)


@pytest.mark.parametrize("name", RUNS)
def test_the_order_of_mappings_does_not_matter(name):
    tried = run_of(name)
    model = tried.layout.model
    for seed in (7,):
        other = replace(
            model, elements=shuffled(model.elements, seed), stage_layer=shuffled(model.stage_layer, seed + 1)
        )
        sizes = shuffled(model.sizes(tried.precision), seed)
        assert simulate(replace(tried, layout=replace(tried.layout, model=other))) == simulate(tried)
        weighed = replace(other, exact_bytes=sizes)
        assert simulate(replace(tried, layout=replace(tried.layout, model=weighed))) == simulate(tried)


def test_the_order_of_a_table_of_components_does_not_matter():
    tried = run_of("moevement")
    for seed in range(3):
        assert simulate(replace(tried, failures=Components(shuffled(TABLE, seed)))) == simulate(tried)


def test_simulations_do_not_disturb_each_other():
    alone = {name: told_by(name) for name in RUNS}
    backwards = {name: told_by(name) for name in reversed(RUNS)}
    assert alone == backwards


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_the_seed_of_hashes_does_not_matter(hash_seed):
    script = "from tests.sim.test_sim_determinism import RUNS, told_by\nfor name in RUNS: print(told_by(name))"
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src")])
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    assert found.stdout.splitlines() == [told_by(name) for name in RUNS]


@pytest.mark.slow
def test_the_number_of_workers_does_not_matter():
    jobs = [(name, seed) for name in RUNS for seed in range(2)]
    here = [told_by(*job) for job in jobs]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(told_by, *zip(*jobs, strict=True))) == here
