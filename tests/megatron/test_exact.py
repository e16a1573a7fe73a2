"""``kill -9`` of one rank of a Megatron run anywhere: the run that is started again ends like one that nobody killed.

Layouts, containers of experts, types, optimizers, features of the model, policies and moments of the kill are combined
in pairs: ``test_every_value_meets_others`` says what the cases below must cover.
"""

from __future__ import annotations

from importlib.metadata import version
from itertools import permutations

import pytest

from tests.megatron.exactness import Case, check
from tests.support.megatron_gpt import Setup

MODEL = {"num_microbatches": 2}
PIPELINE_EXPERTS = {**MODEL, "pp": 2, "ep": 2}
EXPERTS_DATA = {**MODEL, "ep": 2}
TENSOR_EXPERTS = {**MODEL, "tp": 2, "ep": 2}
INTERLEAVED = {**MODEL, "pp": 2, "vpp": 2, "ep": 2}
BF16 = {"precision": "bf16"}
GROUPED = {**BF16, "grouped": True}
SKIPS = {"precision": "fp16", "loss_scale": 2.0**20}
"""Gradients overflow in the first iterations and in another one later, so that Megatron makes no update in them."""
SKIPS_MORE = {"precision": "fp16", "loss_scale": 2.0**22}
"""The first checkpoints hold no state of the optimizer."""
SKIPS_ALL = {"precision": "fp16", "loss_scale": 2.0**32}
SHARDED = {"dist_opt": True}
OVERLAPPED = {**SHARDED, "overlap_param_gather": True}


def dense(every: int) -> tuple[str, dict[str, int]]:
    return "Dense", {"every_n_steps": every}


def moevement(window: int) -> tuple[str, dict[str, int]]:
    return "MoEvement", {"window": window}


FAST = {
    "windows": Case(
        Setup(**PIPELINE_EXPERTS, **GROUPED, **SHARDED, expert_bias=True),
        moevement(3),
        ((1, 8, "train"), (2, 1, "replay")),
        steps=9,
    ),
    "dense": Case(Setup(**EXPERTS_DATA), dense(2), ((0, 4, "manifest"),), steps=6),
    "skipped": Case(
        Setup(**TENSOR_EXPERTS, **SKIPS, **OVERLAPPED), moevement(3), ((1, 11, "train"),), ranks=2, steps=11
    ),
}
SLOW = {
    "pp2-ep2-mtp": Case(
        Setup(**PIPELINE_EXPERTS, **SHARDED, mtp=1), moevement(3), ((1, 8, "train"), (2, 1, "replay")), steps=9
    ),
    "pp2-ep2-mtp-tied": Case(
        Setup(**PIPELINE_EXPERTS, **BF16, mtp=1, tied=True), moevement(2), ((3, 6, "train"),), steps=8
    ),
    "ep2-dp2-mtp": Case(Setup(**EXPERTS_DATA, **GROUPED, mtp=2, expert_bias=True), dense(2), ((0, 4, "manifest"),)),
    "pp2-ep2-tied-shared": Case(
        Setup(**PIPELINE_EXPERTS, **SHARDED, tied=True, shared_experts=True),
        dense(1),
        ((2, 3, "copy"), (3, 6, "train")),
    ),
    "pp2-ep2-skipped": Case(
        Setup(**PIPELINE_EXPERTS, **SKIPS_MORE, dense_first=True, glu=True),
        moevement(2),
        ((3, 5, "rename"), (0, 0, "resume")),
    ),
    "pp2-ep2-mla": Case(
        Setup(**PIPELINE_EXPERTS, **BF16, **OVERLAPPED, mla=True),
        moevement(4),
        ((0, 8, "train"), (3, 2, "replay")),
        steps=10,
    ),
    "pp2-ep2-first-window": Case(
        Setup(**PIPELINE_EXPERTS, mla=True, recompute=True), moevement(3), ((2, 2, "write"), (1, 2, "copy"))
    ),
    "ep2-dp4-bias": Case(
        Setup(**EXPERTS_DATA, **GROUPED, **OVERLAPPED, expert_bias=True),
        moevement(3),
        ((0, 6, "gc"), (2, 8, "train")),
        steps=10,
    ),
    "ep2-dp4-skipped-capacity": Case(
        Setup(**EXPERTS_DATA, **SKIPS_ALL, **SHARDED, capacity_factor=1.0),
        dense(3),
        ((1, 2, "train"), (3, 4, "write")),
        reseed=False,
    ),
    "ep2-dp4-recompute": Case(
        Setup(**EXPERTS_DATA, **SHARDED, recompute=True, dense_first=True),
        moevement(2),
        ((3, 4, "fsync"), (2, 0, "resume")),
    ),
    "ep2-dp4-tied": Case(
        Setup(**EXPERTS_DATA, **GROUPED, tied=True, mla=True),
        dense(1),
        ((1, 3, "train"), (2, 0, "resume"), (0, 6, "rename")),
    ),
    "tp2-ep2-recompute": Case(
        Setup(**TENSOR_EXPERTS, **GROUPED, recompute=True), moevement(3), ((2, 6, "fsync"),), steps=9
    ),
    "tp2-ep2-bias": Case(
        Setup(**TENSOR_EXPERTS, **SHARDED, glu=True, expert_bias=True), dense(1), ((0, 4, "manifest"),)
    ),
    "tp2-ep2-skipped": Case(
        Setup(**TENSOR_EXPERTS, **SKIPS, **OVERLAPPED, shared_experts=True),
        moevement(2),
        ((1, 6, "train"), (3, 1, "replay")),
    ),
    "tp2-ep2-etp2-capacity": Case(
        Setup(**TENSOR_EXPERTS, **GROUPED, **SHARDED, etp=None, capacity_factor=1.25, glu=True),
        moevement(4),
        ((0, 6, "manifest"), (3, 9, "copy")),
        steps=10,
    ),
    "interleaved-bias": Case(
        Setup(**INTERLEAVED, **GROUPED, **SHARDED, experts=8, expert_bias=True, dense_first=True),
        moevement(2),
        ((0, 5, "gc"), (3, 7, "write")),
    ),
    "interleaved-capacity": Case(
        Setup(**INTERLEAVED, dense_first=True, capacity_factor=1.25, tied=True),
        moevement(4),
        ((2, 8, "train"), (0, 3, "replay")),
        steps=10,
    ),
    "interleaved-skipped": Case(
        Setup(**INTERLEAVED, **SKIPS, **SHARDED, recompute=True), dense(2), ((3, 4, "rename"), (0, 6, "gc"))
    ),
    "eight-ranks": Case(
        Setup(**PIPELINE_EXPERTS, **GROUPED, **OVERLAPPED, shared_experts=True),
        moevement(3),
        ((6, 7, "train"), (1, 1, "replay")),
        ranks=8,
        steps=9,
    ),
}


def traits(case):
    """Dimension -> values that a case has in it."""
    setup = case.setup
    degrees = {"tp": setup.tp, "pp": setup.pp, "vpp": setup.vpp or 1, "ep": setup.ep}
    named = (
        "tied",
        "shared_experts",
        "expert_bias",
        "mla",
        "mtp",
        "dense_first",
        "recompute",
        "glu",
        "capacity_factor",
    )
    return {
        "layout": {" ".join(f"{name}{size}" for name, size in degrees.items() if size > 1)},
        "experts": {"grouped" if setup.grouped else "one by one"},
        "precision": {setup.precision},
        "optimizer": {"overlapped" if setup.overlap_param_gather else "sharded" if setup.dist_opt else "whole"},
        "feature": {name for name in named if getattr(setup, name)},
        "policy": {f"{case.policy[0]} {case.policy[1].get('window', '')}"},
        "kill": {phase for _, _, phase in case.kills},
    }


def test_every_value_meets_others():
    """Each value of each dimension occurs with at least two values of every other one."""
    met: dict[tuple[str, str, str], set[str]] = {}
    for one, other in permutations(("layout", "experts", "precision", "optimizer", "feature", "policy", "kill"), 2):
        for found in map(traits, [*FAST.values(), *SLOW.values()]):
            for value in found[one]:
                met.setdefault((one, value, other), set()).update(found[other])
    for key in (
        ("experts", "grouped", "precision"),
        ("precision", "fp32", "experts"),
        ("precision", "fp16", "experts"),
    ):
        del met[key]  # Megatron's GroupedMLP takes bf16 only
    assert not {key: values for key, values in met.items() if len(values) < 2}


@pytest.mark.parametrize("name", FAST)
def test_killed_and_started_again(name, tmp_path):
    ended = check_case(FAST[name], tmp_path)
    if name == "skipped":
        again = [line["made"] for line in ended.lives[-1] if line.get("replayed")]
        assert set(again) == {False, True}, "a step without an update, among others, was to be computed again"


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_killed_and_started_again_in_other_setups(name, tmp_path):
    check_case(SLOW[name], tmp_path)


def test_windows_of_a_model_whose_input_is_not_trained(tmp_path):
    frozen = Setup(**EXPERTS_DATA, frozen=("embedding", "layers.0.self_attention"))
    ended = check_case(Case(frozen, moevement(4), ((1, 10, "train"),), ranks=2, steps=11), tmp_path)
    assert len(ended.replayed(-1)) == 3


@pytest.mark.skipif(version("megatron-core") < "0.19", reason="heads that are clipped by themselves came with 0.19")
def test_windows_of_heads_that_are_clipped_by_themselves(tmp_path):
    setup = Setup(layers=2, num_microbatches=1, ep=2, mtp=1, mtp_detached=True, clip=0.01)
    check_case(Case(setup, moevement(4), ((1, 10, "train"),), ranks=2, steps=11), tmp_path)


def check_case(case, directory):
    ended = check(case, directory)
    for life, (_, _, phase) in enumerate(case.kills):
        if phase == "replay":
            replayed = ended.replayed(life + 1)
            assert replayed, "the life after the one killed in a replay did not replay"
            assert ended.resumed[life] == ended.resumed[life - 1], "another checkpoint stood in for the window"
    assert max(recomputed(ended)) <= bound(case), recomputed(ended)
    if case.setup.precision == "fp16":
        made = [line["made"] for life in ended.lives for line in life if "made" in line]
        assert set(made) == ({False} if case.setup.loss_scale == SKIPS_ALL["loss_scale"] else {False, True})
    return ended


def recomputed(ended):
    """Updates that each life but the first made again, or would have had to."""
    found, reached = [], 0
    for life in ended.lives:
        found.append(reached - life[0]["resumed"])
        reached = max([reached, *(line["updated"] for line in life if "updated" in line)])
    return found[1:]


def bound(case):
    """Two checkpoints may be under way, and a window counts from its first step."""
    window = case.policy[1].get("window")
    return 3 * case.policy[1]["every_n_steps"] if window is None else 2 * window - 1 + 2
