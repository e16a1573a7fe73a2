"""A Megatron run goes on only if it trains the same parameters; what rests since the middle of a run rests again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.training_state import Trained
from moe_ckpt.megatron.world import HeldTensor
from tests.megatron.exactness import Case, kill, life_of, start_life
from tests.support.megatron_acts import goes_on
from tests.support.megatron_gpt import Built, Setup
from tests.support.megatron_move import Stop, journey
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
ALL = Setup(dropout=0.0, hidden=16, ffn=16, vocab=32, seq=8, layers=2, num_microbatches=2, ep=2)
SOME = replace(ALL, frozen=("layers.1.mlp.experts", "layers.0.mlp.router"))
DENSE = ("Dense", {"every_n_steps": 1})
WINDOW = ("MoEvement", {"window": 2})
LOST = "decoder.layers.0.mlp.router.weight, decoder.layers.1.mlp.experts.0.linear_fc1.weight, "


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(DENSE, id="Dense"),
        pytest.param(WINDOW, id="MoEvement"),
        pytest.param(("MoC", {"k": 1}), id="MoC", marks=pytest.mark.slow),
    ],
)
def test_another_set_of_parameters_is_refused_at_once(tmp_path: Path, policy):
    stops = [
        Stop(first, steps=5, policy=policy, store=store)
        if at == 0
        else Stop(others if at == 1 else first, policy=policy, store=store, resumes=at == 2)
        for store, first, others in (("all", ALL, SOME), ("some", SOME, ALL))
        for at in range(3)
    ]
    for view in run_ranks(journey, 2, str(tmp_path), stops, preload=WARM):
        for place, then, now in ((0, "trained", "frozen"), (3, "frozen", "trained")):
            refused, again = view[place + 1 : place + 3]
            assert refused["error"] == "ConfigError", refused["said"]
            assert refused["untouched"]
            for part in (LOST, f"were {then} in the run that wrote", f"are {now} now", "weights_from="):
                assert part in refused["said"]
            assert again["progress"].restored, "the run that it was goes on"


def test_a_gradient_log_of_other_parameters_makes_nothing_dense(tmp_path: Path):
    log = ("GradientLog", {"window": 2})
    copies = {"storage_every": 1000}
    case = Case(ALL, log, ((1, 5, "train"),), ranks=2, steps=6, memory=True, copies=copies)
    kill(case, tmp_path)
    before = sorted((tmp_path / "store").glob("step_*"))
    for setup, ranks in ((SOME, 2), (replace(SOME, ep=1), 1)):
        other = replace(case, setup=setup, ranks=ranks)
        for outcome in start_life(other, replace(life_of(other, tmp_path), number=1, seed=2)):
            assert LOST in (outcome.error or ""), outcome
            assert "ConfigError" in (outcome.error or "")
    assert sorted((tmp_path / "store").glob("step_*")) == before


def rest(built: Built, iteration: int, updated: bool) -> None:
    """The router of a layer rests from the third iteration on, by a script that says so in the third one only."""
    if iteration == 3 and not updated:
        named = (each for chunk in built.chunks for each in chunk.named_parameters())
        next(p for name, p in named if name.endswith("layers.0.mlp.router.weight")).requires_grad_(False)


@pytest.mark.parametrize("policy", [pytest.param(DENSE, marks=pytest.mark.slow), WINDOW], ids=lambda p: p[0])
def test_what_rests_since_the_middle_of_a_run_rests_again(tmp_path: Path, policy):
    run_ranks(goes_on, 2, str(tmp_path), ALL, policy, rest, (4, 6), preload=WARM)


def trained(**names: bool) -> Trained:
    tensors = {name: HeldTensor(name, "F32", (1,), (None, name), of, None, ()) for name, of in names.items()}
    return Trained([], (), tensors)


def test_all_experts_of_a_layer_have_one_name():
    """Each rank writes the names of the whole model at each step."""
    every = [f"layers.{layer}.mlp.experts.{expert}.fc{at}" for layer in (0, 1) for expert in (0, 1) for at in (1, 2)]
    names = dict.fromkeys(["embedding", *every], True)
    found = trained(**names | dict.fromkeys(["embedding", *every[:4], every[6]], False))
    stored = found.read()
    assert stored["frozen"] == ["embedding", *(f"layers.0.mlp.experts.*.fc{at}" for at in (1, 2)), every[6]]
    found.require_same(stored)
    for name in ("embedding", every[0], every[6]):
        other = dict.fromkeys(["embedding", *every[:4], every[6]], False) | {name: True}
        with pytest.raises(ConfigError, match=f"^{name} was frozen"):
            trained(**names | other).require_same(stored)
    with pytest.raises(ConfigError, match=f"^{every[7]} was trained"):
        trained(**names | dict.fromkeys(["embedding", *every[:4], *every[6:]], False)).require_same(stored)


def test_the_script_says_that_others_rest():
    from moe_ckpt.driver.changes import trainable_changes

    changes = trainable_changes(["a"], ["b"])
    assert [str(each) for each in changes] == ["requires_grad of a False -> True", "requires_grad of b True -> False"]
    assert all(each.from_checkpoint for each in changes)
