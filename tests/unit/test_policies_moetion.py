"""MoEtion: how many experts a budget buys, on which ranks, which ones they are, and what is refused."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import tokens_at_risk
from benchmarks.lost_tokens import Workload
from benchmarks.moc_sim import SimulatedRun
from benchmarks.moc_sim import catalog as bare
from benchmarks.tokens_at_risk import InTurn, risks
from moe_ckpt.core.placement import Placement, everywhere, water_level
from moe_ckpt.core.step import Tier
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies import Dense, Guarded, MoC, MoEtion, Policy, needs_of
from moe_ckpt.policies.base import Measured, MemoryFacts, Sends, require_served
from moe_ckpt.policies.moetion import MOST_GRADIENTS, PROBED_CHECKPOINTS, why_no_gradients
from moe_ckpt.policies.selectors import STALE_ROUNDS
from tests.support.constants import Unprobed
from tests.unit.builders import catalog, context, experts_in, memory, with_facts

MODEL = catalog(2, 4)
"""8 experts; 2 gates and 1 embedding, which are 36 bytes."""


def weighing(model, expert=12, rest=12):
    return {op.id: OperatorBytes(expert if op.expert is not None else rest, 2) for op in model.operators}


def at(rate, iteration=1.0):
    """Measurements with which ``rate * iteration`` bytes fit on a rank."""
    return Measured(recent_iteration_secs=iteration, copy_bytes_per_sec=rate, persist_bytes_per_sec=rate)


def facts(limit=60.0, model=MODEL, step=9, **more):
    """A run whose experts were all saved at step 8, on which ``limit`` bytes of a checkpoint fit."""
    shape = (len(model.layers), max(layer.experts for layer in model.layers))
    known = {
        "last_step": 8,
        "index": 8,
        "measured": at(limit),
        "sizes": weighing(model),
        "chosen_at": np.full(shape, 8),
        "expected_unsaved": np.zeros(shape, dtype=np.int64),
    }
    return context(model, step, **{**known, **more})


def chosen(policy, **known):
    return experts_in(policy.plan(facts(**known)).full)


# --- how many ---


def test_the_first_checkpoint_is_dense_whatever_is_known():
    everything = tuple(op.id for op in MODEL.operators)
    for policy in (MoEtion(), MoEtion(experts=1), InTurn()):
        for measured in (Measured(), at(60.0)):
            assert policy.plan(facts(missing=everything, measured=measured)).full == everything


def test_gates_and_non_experts_are_always_saved_and_what_is_left_buys_experts():
    for limit, count in ((60, 2), (71, 2), (72, 3), (84, 4), (131, 7), (132, 8), (10**9, 8)):
        plan = MoEtion().plan(facts(float(limit)))
        assert set(plan.full) >= {op.id for op in MODEL.always_saved}
        assert len(experts_in(plan.full)) == count, limit
        assert plan.k == count // 2


def test_the_budget_is_what_the_slower_rate_saves_between_two_checkpoints():
    measured = Measured(recent_iteration_secs=2.0, copy_bytes_per_sec=90.0, persist_bytes_per_sec=30.0)
    assert MoEtion().budget_bytes(measured) == 60
    assert MoEtion(every_n_steps=3).budget_bytes(measured) == 180, "180 are copied in one iteration, and no more"
    assert MoEtion(every_n_steps=4).budget_bytes(measured) == 180
    assert MoEtion(every_n_steps=4).budget_bytes(replace(measured, update_secs=0.5)) == 135
    assert MoEtion(every_n_steps=3).budget_bytes(measured, budget_fraction=0.25) == 45
    known = replace(at(144.0), persist_bytes_per_sec=48.0)
    assert len(chosen(MoEtion(every_n_steps=3), measured=known, budget_fraction=0.5)) == 3


@pytest.mark.parametrize(
    "measured", [Measured(), Measured(recent_iteration_secs=9.0), replace(at(900.0), copy_bytes_per_sec=None)]
)
def test_while_rates_are_unknown_one_expert_per_layer_is_saved_so_that_they_get_measured(measured):
    assert MoEtion().budget_bytes(measured) is None
    assert len(chosen(MoEtion(), measured=measured)) == 2


@pytest.mark.parametrize("limit", [1.0, 35.0, 36.0, 59.0])
def test_a_budget_below_one_expert_per_layer_saves_as_many_nevertheless(limit):
    assert len(chosen(MoEtion(), limit=limit)) == 2


def test_between_intervals_nothing_is_saved():
    policy = MoEtion(every_n_steps=3)
    assert not policy.plan(facts(step=8, last_step=6))
    assert policy.plan(facts(step=9, last_step=6))
    assert policy.next_due(facts(step=7, last_step=6)) == 9


def test_a_fixed_number_of_experts_per_layer_needs_neither_rates_nor_sizes():
    unsaved = np.array([[9, 8, 7, 6], [1, 0, 0, 1]])
    for measured in (Measured(), at(10**9)):
        plan = MoEtion(experts=2).plan(facts(measured=measured, sizes={}, expected_unsaved=unsaved))
        assert experts_in(plan.full) == {(0, 0), (0, 1), (0, 2), (0, 3)}
        assert plan.k == 2


def test_layers_of_different_sizes_are_bought_at_the_price_of_the_largest_expert():
    sizes = weighing(MODEL) | {"expert/1/0": OperatorBytes(24, 2)}
    assert len(chosen(MoEtion(), limit=108.0, sizes=sizes)) == 3


# --- which ---


def test_layers_get_their_share_by_unsaved_tokens_and_save_the_busiest():
    unsaved = np.array([[5, 90, 5, 80], [3, 9, 8, 0]])  # 180 : 20 of 4 experts: 3.6 and 0.4
    assert chosen(MoEtion(), limit=84.0, expected_unsaved=unsaved) == {(0, 0), (0, 1), (0, 2), (0, 3)}
    unsaved = np.array([[5, 90, 5, 50], [3, 9, 38, 0]])  # 150 : 50
    assert chosen(MoEtion(), limit=84.0, expected_unsaved=unsaved) == {(0, 0), (0, 1), (0, 3), (1, 2)}


def test_ties_go_to_the_oldest_then_to_the_lowest_index():
    unsaved = np.array([[7, 7, 7, 7], [7, 7, 7, 7]])
    ages = np.array([[8, 8, 7, 8], [8, 8, 8, 8]])
    assert chosen(MoEtion(), expected_unsaved=unsaved, chosen_at=ages) == {(0, 2), (1, 0)}


def test_what_checkpoints_under_way_save_counts_as_saved():
    later = np.array([[0, 1, 0, 0], [0, 0, 1, 0]])
    found = chosen(MoEtion(), expected_unsaved=later, unsaved=9 - later)
    assert found == {(0, 1), (1, 2)}


def test_an_expert_that_no_checkpoint_holds_is_saved_out_of_turn_and_counts():
    unsaved = np.array([[9, 0, 0, 0], [9, 0, 0, 0]])
    found = chosen(MoEtion(), expected_unsaved=unsaved, missing=("expert/0/3", "non_expert/embed"))
    assert found == {(0, 3), (0, 0)}


def test_round_robin_saves_the_oldest_of_every_layer_alike():
    policy, model = InTurn(experts=1), bare(2, 4)
    run = SimulatedRun(policy, model)
    busy = np.array([[100, 0, 0, 0], [0, 0, 0, 9]])
    saved = [sorted(experts_in(run.step(busy).full)) for _ in range(9)]
    assert len(saved[0]) == 8
    assert saved[1:] == [[(0, e), (1, e)] for e in (0, 1, 2, 3)] * 2


def test_round_robin_gives_what_cannot_be_divided_to_each_layer_in_turn():
    model = catalog(3, 4)
    counts = Counter()
    for index in range(3):  # 48 bytes of rest, 4 experts over 3 layers
        found = chosen(InTurn(), model=model, limit=96.0, index=index)
        counts.update(layer for layer, _ in found)
    assert counts == {0: 4, 1: 4, 2: 4}


def test_an_expert_nobody_uses_is_saved_after_a_few_rounds_at_no_more_than_half_of_a_checkpoint():
    """8 experts at 4 per checkpoint: a round is 2."""
    unsaved = np.array([[9, 9, 0, 0], [9, 9, 0, 0]])
    patience = 2 * STALE_ROUNDS
    for age, found in (
        (patience, {(0, 0), (0, 1), (1, 0), (1, 1)}),
        (patience + 1, {(0, 2), (0, 3), (0, 0), (1, 0)}),
    ):
        ages = np.array([[99, 99, 100 - age, 100 - age]] * 2)
        known = {"step": 100, "last_step": 99, "index": 100, "limit": 84.0}
        assert chosen(MoEtion(), expected_unsaved=unsaved, chosen_at=ages, **known) == found


@pytest.mark.parametrize(
    "known",
    [
        {"index": 9},  # checkpoints were made every 10 steps on average: a round is 20 steps
        {
            "index": 100,
            "policy": MoEtion(every_n_steps=10),
            "last_step": 90,
            "measured": replace(at(84.0), persist_bytes_per_sec=8.4),
        },
        {"index": 100, "chosen_at": np.zeros((0, 0), dtype=np.int64)},  # nothing known of ages
    ],
    ids=["storage-is-slow", "interval", "unknown"],
)
def test_nobody_is_overdue_where_checkpoints_are_rare_or_ages_unknown(known):
    unsaved = np.array([[9, 9, 0, 0], [9, 9, 0, 0]])
    ages = np.array([[99, 99, 40, 40]] * 2)
    base = {"policy": MoEtion(), "step": 100, "last_step": 99, "limit": 84.0, "chosen_at": ages}
    assert chosen(**{**base, "expected_unsaved": unsaved, **known}) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_what_goes_first_is_not_at_risk_when_the_rest_is_shared_out():
    unsaved = np.array([[2, 2, 2, 100], [6, 6, 6, 6]])
    ages = np.array([[99, 99, 99, 50], [99, 99, 99, 99]])
    known = {"step": 100, "last_step": 99, "index": 100, "limit": 84.0}
    found = chosen(MoEtion(), expected_unsaved=unsaved, chosen_at=ages, **known)
    assert found == {(0, 3), (0, 0), (1, 0), (1, 1)}  # 6 : 24 of the 3 that are left


def test_a_layer_whose_experts_go_first_has_only_the_others_to_save():
    unsaved = np.array([[0, 0, 0, 90], [10, 10, 10, 0], [12, 6, 6, 6]])
    missing = ("expert/0/0", "expert/0/1", "expert/0/2")
    found = chosen(MoEtion(), model=catalog(3, 4), limit=132.0, expected_unsaved=unsaved, missing=missing)
    # Of 4, layer 0 can take 1; the other 3 are 1.5 and 1.5, and layer 2 is the one that has its turn.
    assert found == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (2, 1)}


@pytest.mark.parametrize(("kind", "wait"), [(MoEtion, 4 * STALE_ROUNDS + 8), (InTurn, 4)])
def test_every_expert_comes_round_however_uneven_the_load(kind, wait):
    """16 experts at 4 per checkpoint: a round is 4. Popular waits for the last of those that become overdue at once."""
    run = SimulatedRun(kind(experts=1), bare(4, 4))
    busy = np.zeros((4, 4), dtype=np.int64)
    busy[:, 0] = 1000
    newest = np.ones((4, 4), dtype=np.int64)
    for step in range(1, 101):
        for pair in experts_in(run.step(busy).full):
            newest[pair] = step
        assert step - newest.min() <= wait + 1


# --- on which ranks ---


def apart(experts, ep, layers=2, divided=1, stages=1):
    """Expert parallelism over ``ep`` ranks, each expert's bytes over ``divided`` ranks, in stages of ``layers``."""
    width = ep * divided
    owners = [
        tuple(s * width + e * ep // experts for e in range(experts)) for s in range(stages) for _ in range(layers)
    ]
    stage_of = {f"expert/{row}/{e}": row // layers for row in range(layers * stages) for e in range(experts)}
    stage_of |= {f"gate/{row}": row // layers for row in range(layers * stages)}
    return Placement(tuple(owners), tuple(range(width)), (width,) * stages, stage_of, True, divided)


def test_under_expert_parallelism_each_owner_buys_with_what_its_share_of_the_rest_leaves():
    """2 ranks: 18 bytes of the rest each; 42 leave room for 2 experts of 4 on each."""
    unsaved = np.array([[9, 8, 7, 6], [5, 4, 1, 0]])
    found = chosen(MoEtion(), limit=42.0, placement=apart(4, 2), ranks=2, expected_unsaved=unsaved)
    # 3.0 and 1.0 of 4: layer 0 takes 0, 1 of rank 0, which is full then, and 2 of rank 1; layer 1 gets one of rank 1.
    assert found == {(0, 0), (0, 1), (0, 2), (1, 2)}
    assert len(chosen(MoEtion(), limit=41.0, placement=apart(4, 2), ranks=2)) == 2
    # Two ranks share each expert: 9 bytes of the rest and 6 of each expert.
    assert len(chosen(MoEtion(), limit=33.0, placement=apart(4, 2, divided=2), ranks=4)) == 8
    assert len(chosen(MoEtion(), limit=26.0, placement=apart(4, 2, divided=2), ranks=4)) == 4


def test_what_a_layer_cannot_save_because_its_owners_are_full_is_handed_on():
    """2 experts on each of 2 ranks, shares of 1, 1 and 2. Rank 0 is full when the third layer asks for its second."""
    unsaved = np.array([[25, 0], [25, 0], [10, 40]])
    known = {"model": catalog(3, 2), "placement": apart(2, 2, layers=3), "ranks": 2, "limit": 48.0}
    assert chosen(MoEtion(), expected_unsaved=unsaved, **known) == {(0, 0), (1, 0), (2, 1), (0, 1)}


def test_a_fixed_number_of_experts_is_even_over_the_owners():
    unsaved = np.array([[9, 8, 0, 0], [7, 6, 0, 0]])
    for where in (apart(4, 2), everywhere(MODEL.layers, 2)):
        found = chosen(MoEtion(experts=1), placement=where, ranks=2, expected_unsaved=unsaved)
        assert found == {(0, 0), (1, 2)}
    evenly = replace(everywhere(MODEL.layers, 2), experts_whole=False)
    found = chosen(MoEtion(experts=1), placement=evenly, ranks=2, expected_unsaved=unsaved)
    assert found == {(0, 0), (1, 0)}


def test_stages_buy_for_themselves():
    """The second stage has twice the ranks' room for experts, and no say in what the first saves."""
    model = catalog(4, 4)
    sizes = weighing(model) | {"gate/0": OperatorBytes(60, 2)}
    where = apart(4, 1, stages=2)
    unsaved = np.zeros((4, 4), dtype=np.int64)
    unsaved[2:] = 1000
    found = chosen(MoEtion(), model=model, limit=108.0, sizes=sizes, placement=where, ranks=2, expected_unsaved=unsaved)
    # Stage 0: the embedding, 60 + 12 of gates, 24 left: 2 experts. Stage 1: 24 of gates, 84 left: 7.
    assert Counter(layer // 2 for layer, _ in found) == {0: 2, 1: 7}
    # What experts weigh in another stage does not matter.
    known = {"model": model, "limit": 108.0, "placement": where, "ranks": 2, "expected_unsaved": unsaved}
    found = chosen(MoEtion(), sizes=sizes | {"expert/3/0": OperatorBytes(24, 2)}, **known)
    assert Counter(layer // 2 for layer, _ in found) == {0: 2, 1: 3}


def test_under_plain_data_parallelism_no_owner_has_more_than_fits_it():
    """2 ranks, 44 bytes each: (88 - 36) / 12 = 4 experts together, and at most 3 on either."""
    unsaved = np.array([[9, 9, 0, 0], [9, 9, 0, 0]])
    found = chosen(MoEtion(), limit=44.0, ranks=2, expected_unsaved=unsaved)
    assert found == {(0, 0), (0, 1), (1, 0), (1, 2)}
    sharded = replace(everywhere(MODEL.layers, 2), experts_whole=False)
    found = chosen(MoEtion(), limit=44.0, ranks=2, expected_unsaved=unsaved, placement=sharded)
    assert found == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_an_expert_too_large_for_any_rank_alone_is_saved_over_the_budget():
    """Together 4 ranks could save 3 experts; but each is written by one, which has time for less than one."""
    model = catalog(2, 4)
    assert len(chosen(MoEtion(), model=model, sizes=weighing(model, 12, 0), limit=11.0, ranks=4)) == 2


def heaviest(context, operators):
    """Bytes on the rank that saves most, recounted from the catalog: see ``cadence.Division``."""
    catalog, placement, sizes = context.model.catalog, context.model.placement, context.model.sizes
    peak = 0
    for stage, width in enumerate(placement.stages):
        own = Counter()
        rest = 0
        for op in (catalog.by_id[name] for name in operators):
            if placement.stage_of.get(op.id, 0) != stage:
                continue
            if op.expert is None:
                rest += sizes[op.id].full
            else:
                own[placement.owners[op.layer][op.expert]] += sizes[op.id].full
        most = max(own.values(), default=0)
        if placement.expert_ranks is not None:
            peak = max(peak, -(-rest // width) + -(-most // placement.expert_ranks))
        elif placement.experts_whole:
            loads = sorted(own.values()) + [0] * (width - len(own))
            peak = max(peak, most, water_level(loads, rest) if rest else 0)
        else:
            peak = max(peak, -(-(rest + own.total()) // width))
    return peak


runs = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "experts": st.sampled_from([2, 4, 6]),
        "ranks": st.sampled_from([1, 2]),
        "kind": st.sampled_from(["plain", "sharded", "apart", "divided", "staged"]),
        "expert": st.integers(1, 40),
        "rest": st.integers(0, 40),
        "seed": st.integers(0, 2**16),
    }
)


def made(run, limit=100.0, **more):
    layers, experts, ranks, kind = run["layers"], run["experts"], run["ranks"], run["kind"]
    stages = 2 if kind == "staged" else 1
    model = catalog(layers * stages, experts)
    if kind in ("plain", "sharded"):
        placement = replace(everywhere(model.layers, ranks), experts_whole=kind == "plain")
    else:
        placement = apart(experts, ranks, layers, divided=2 if kind == "divided" else 1, stages=stages)
    rng = np.random.default_rng(run["seed"])
    shape = (layers * stages, experts)
    known = {
        "sizes": weighing(model, run["expert"], run["rest"]),
        "placement": placement,
        "expected_unsaved": rng.integers(0, 100, shape) * rng.integers(0, 2, shape),
        "chosen_at": rng.integers(20, 100, shape),
    }
    return facts(limit, model, 100, **{**known, "last_step": 99, "index": 99, **more})


@settings(max_examples=200)
@given(run=runs, limit=st.integers(0, 1500), policy=st.sampled_from([MoEtion(), InTurn()]))
def test_the_heaviest_rank_keeps_to_any_budget_that_pays_for_one_expert_per_layer(run, limit, policy):
    known = made(run, float(limit))
    plan = policy.plan(known)
    least = policy.plan(with_facts(known, measured=Measured()))
    if heaviest(known, least.full) <= limit:
        assert heaviest(known, plan.full) <= limit
    else:
        assert len(experts_in(plan.full)) >= len(known.model.catalog.layers)


@settings(max_examples=60)
@given(run=runs, limit=st.integers(0, 1000), more=st.integers(0, 500))
def test_a_larger_budget_never_saves_fewer_and_one_for_all_saves_all(run, limit, more):
    small, large = (len(experts_in(MoEtion().plan(made(run, float(n))).full)) for n in (limit, limit + more))
    assert len(made(run).model.catalog.layers) <= small <= large
    assert len(experts_in(MoEtion().plan(made(run, 1e9)).full)) == len(made(run).model.catalog.experts)


@settings(max_examples=60)
@given(run=runs, limit=st.integers(100, 1000))
def test_no_budget_is_left_that_would_buy_another_expert(run, limit):
    known = made(run, float(limit))
    operators = MoEtion().plan(known).full
    if heaviest(known, operators) > limit:
        return
    for op in known.model.catalog.experts:
        if op.id not in operators:
            assert heaviest(known, (*operators, op.id)) > limit


@settings(max_examples=30)
@given(run=runs, limit=st.integers(100, 500), seed=st.integers(0, 99))
def test_all_ranks_plan_alike_whatever_order_their_dicts_are_in(run, limit, seed):
    known = made(run, float(limit))
    sizes, stage_of = list(known.model.sizes.items()), list(known.model.placement.stage_of.items())
    random.Random(seed).shuffle(sizes)
    random.Random(seed).shuffle(stage_of)
    placement = replace(known.model.placement, stage_of=dict(stage_of), peers=(1,))
    other = with_facts(known, sizes=dict(sizes), placement=placement)
    for policy in (MoEtion(), InTurn(), MoEtion(experts=1)):
        assert policy.plan(known) == policy.plan(other)


# --- what it is for ---


@pytest.mark.parametrize("seed", range(3))
def test_popular_experts_first_leave_far_fewer_tokens_at_risk_than_taking_turns(seed):
    """The paper reports about half; a third of the experts is saved, and the load is as skewed as S = 0.2."""
    work = Workload(layers=4, experts=16, skewness=0.2, steps=120)
    popular, _ = risks(MoEtion(experts=5), work, seed)
    in_turn, _ = risks(InTurn(experts=5), work, seed)
    assert popular.mean() < 0.6 * in_turn.mean()


def test_round_robin_and_moc_in_turn_leave_about_as_many_tokens_at_risk():
    work = Workload(layers=4, experts=16, skewness=0.2, steps=120)
    ours, theirs = (risks(p, work, 0)[0].mean() for p in (InTurn(experts=4), MoC(k=4)))
    assert ours == pytest.approx(theirs, rel=0.05)


def test_the_comparison_that_the_documentation_shows_runs(tmp_path, capfd):
    assert tokens_at_risk.main(f"--seeds 1 --steps 30 --shapes 1 --write --out {tmp_path}".split()) == 0
    rows = json.loads((tmp_path / "tokens_at_risk.json").read_text())["rows"]
    assert [row["wanted_skewness"] for row in rows] == list(tokens_at_risk.SKEWNESS)
    assert rows[-1]["mean"]["popular"] < 0.6 * rows[-1]["mean"]["round_robin"]
    assert "popular / round robin" in capfd.readouterr().out


# --- what it says and refuses ---


def test_it_is_a_policy_that_is_told_sizes_where_it_goes_by_them():
    assert isinstance(MoEtion(), Policy)
    said = {"every_n_steps": 1, "experts": 2, "capacity_boost": 0.1, "recompute": False}
    assert MoEtion(experts=2).describe() == {"name": "moetion", **said}
    assert needs_of(MoEtion()).sizes
    assert needs_of(Guarded(MoEtion())).sizes
    assert not any(needs_of(policy).sizes for policy in (MoEtion(experts=2), Guarded(MoC()), MoC(), Dense()))
    assert not needs_of(MoEtion()).windows


def test_a_guard_adds_what_the_budget_for_lost_tokens_asks_for():
    unsaved = np.array([[50, 40, 30, 0], [0, 0, 0, 0]])
    known = facts(expected_unsaved=unsaved, unsaved=unsaved, routed_tokens=200)
    plan = Guarded(MoEtion(), 0.05).plan(known)
    assert experts_in(plan.full) >= {(0, 0), (0, 1), (0, 2)}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"every_n_steps": 0}, r"MoEtion\(every_n_steps=0\).*whole number of at least 1"),
        ({"experts": 0}, r"MoEtion\(experts=0\).*whole number of at least 1"),
        ({"experts": 1.5}, r"MoEtion\(experts=1.5\)"),
        ({"experts": True}, r"MoEtion\(experts=True\)"),
        ({"capacity_boost": 0}, r"MoEtion\(capacity_boost=0\): the portion .* above 0 and at most 1, such as 0.1 for"),
        ({"capacity_boost": -0.1}, r"MoEtion\(capacity_boost=-0.1\)"),
        ({"capacity_boost": 1.01}, r"MoEtion\(capacity_boost=1.01\)"),
        ({"capacity_boost": float("nan")}, r"MoEtion\(capacity_boost=nan\)"),
        ({"capacity_boost": True}, r"MoEtion\(capacity_boost=True\).*None switches it off"),
        ({"capacity_boost": "10%"}, r"MoEtion\(capacity_boost='10%'\)"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(bad, words):
    with pytest.raises(ConfigError, match=words):
        MoEtion(**bad)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"MoEtion\(experts=5\): the model has only 8 experts in 2 MoE layers, 4 per"):
        MoEtion(experts=5).check(MODEL)
    MoEtion(experts=4).check(MODEL)
    with pytest.raises(ConfigError, match=r"register_moe.*Dense"):
        MoEtion().check(catalog(0, 0))


def test_sizes_that_are_missing_are_an_error_that_names_one():
    with pytest.raises(ConfigError, match=r"ModelFacts.sizes.*11 are not there, such as non_expert/embed.*experts="):
        MoEtion().plan(facts(sizes={}))


# --- memory that outlives the process: two sets ---


def in_memory(copied: float, sent: float | None, model=MODEL, seed=0, **more) -> dict:
    """Not due on storage; the tokens of both memories are drawn."""
    rng = np.random.default_rng(seed)
    shape = (len(model.layers), max(layer.experts for layer in model.layers))
    tiers = (Tier.HOST, Tier.PEER)
    tables = {
        "expected_unsaved": {tier: rng.integers(0, 100, shape) for tier in tiers},
        "chosen_at": {tier: np.full(shape, 8) for tier in Tier},
    }
    measured = Measured(
        recent_iteration_secs=1.0, copy_bytes_per_sec=copied, persist_bytes_per_sec=1.0, send_bytes_per_sec=sent
    )
    facts_of_memory = memory(**{"storage_due": False, "replicas": 1, **more})
    return {"memory": facts_of_memory, "measured": measured, "model": model, **tables}


def sets_of(policy=MoEtion(), **known):  # noqa: B008 - it is frozen
    """(sent, what stays here besides)"""
    plan = policy.plan(facts(**known))
    assert not plan.sends_memory_only
    assert {op.id for op in known["model"].always_saved} <= set(plan.full)
    return experts_in(plan.full), experts_in(plan.memory_only)


def test_the_slow_way_gets_fewer_experts_and_each_those_that_it_lacks_most():
    """36 bytes of gates and the rest, 12 of each expert: 84 pay for 4 of them, 60 for 2."""
    known = in_memory(copied=84.0, sent=60.0)
    unsaved = known["expected_unsaved"]
    unsaved[Tier.HOST][:], unsaved[Tier.PEER][:] = 0, 0
    unsaved[Tier.HOST][0] = [9, 8, 7, 6]
    unsaved[Tier.PEER][1] = [5, 9, 7, 8]
    sent, here = sets_of(**known)
    assert sent == {(1, 1), (1, 3)}, "what peers lack most"
    assert here == {(0, 0), (0, 1)}, "and beside it what this memory lacks most"


def test_storage_pays_for_nothing_that_stays_in_memory():
    sent, here = sets_of(**in_memory(copied=36 + 8 * 12.0, sent=36 + 8 * 12.0))
    assert (len(sent), here) == (8, set()), "at a byte per second to storage"


@pytest.mark.parametrize(
    ("facts_of", "count"),
    [({}, 2), ({"sends": Sends(shared=False)}, 5), ({"sends": Sends(experts=False)}, 6), ({"replicas": 0}, 6)],
    ids=["all is sent", "peers have the rest", "peers have the experts", "no peers"],
)
def test_what_peers_have_anyway_is_not_paid_for(facts_of, count):
    sent, here = sets_of(**in_memory(copied=36 + 6 * 12.0, sent=60.0, **facts_of))
    assert (len(sent), len(sent | here)) == (count, 6)


def test_weights_that_data_parallel_peers_have_alike_are_not_paid_for():
    """A third of 36 bytes of gates and the rest, and of the 12 of each expert, are weights: 60 pay for (60-24)/8."""
    sizes = {op: replace(size, weights=size.full // 3) for op, size in weighing(MODEL).items()}
    known = in_memory(copied=36 + 8 * 12.0, sent=60.0)
    for sends, count in (
        (Sends(), 2),
        (Sends(shared_weights=False, expert_weights=False), 4),
        (Sends(shared_weights=False), 3),
        (Sends(expert_weights=False), 3),
    ):
        sent, here = sets_of(**{**known, "memory": replace(known["memory"], sends=sends)}, sizes=sizes)
        assert (len(sent), len(sent | here)) == (count, 8)


def test_until_a_copy_was_sent_one_expert_of_each_layer_goes():
    sent, here = sets_of(**in_memory(copied=36 + 6 * 12.0, sent=None))
    assert (len(sent), len(sent | here)) == (2, 6)


@given(st.integers(30, 200), st.integers(30, 200), st.integers(0, 1000), st.booleans())
def test_budgets_are_kept_and_the_sent_ones_are_among_those_here(copied: int, sent: int, seed: int, shared: bool):
    to_peers, here = sets_of(**in_memory(float(copied), float(sent), seed=seed, sends=Sends(shared=shared)))
    least = len(MODEL.layers)
    assert not to_peers & here
    assert len(to_peers) <= max(least, (sent - 36 * shared) // 12)
    assert len(to_peers | here) <= max(least, (copied - 36) // 12)
    assert len(to_peers) == max(least, min(8, (sent - 36 * shared) // 12, (copied - 36) // 12))


# --- optimizer recomputation (Algorithm 3) ---


def held(model=MODEL, **steps):
    """``MemoryFacts.anchored_at``, by expert: e01 is expert 1 of layer 0."""
    found = np.full(len(model.operators), -1)
    for name, step in steps.items():
        found[model.index_of[f"expert/{name[1]}/{name[2]}"]] = step
    return found


def recomputed(policy=Unprobed(recompute=True), **known):  # noqa: B008 - it is frozen
    """(in full, by gradients)"""
    plan = policy.plan(facts(**known))
    assert not set(plan.full) & set(plan.gradients)
    return experts_in(plan.full), experts_in(plan.gradients)


def wanting(*wanted, copied=10**6, sent=36 + 2 * 12.0, **more):
    """Two experts fit on the way to peers, and these lack most there."""
    known = in_memory(copied=float(copied), sent=sent)
    unsaved = known["expected_unsaved"][Tier.PEER]
    unsaved[:] = 0
    for at, expert in enumerate(reversed(wanted)):
        unsaved[expert] = 10 + at
    return {**known, **more}


def test_an_expert_that_peers_got_at_the_step_before_is_sent_as_a_gradient():
    assert recomputed(**wanting((0, 0), (1, 1)), anchored_at=held(e00=8)) == ({(1, 1)}, {(0, 0)})
    assert recomputed(**wanting((0, 0), (1, 1)), anchored_at=held(e00=3, e11=8)) == (set(), {(0, 0), (1, 1)})
    assert recomputed(Unprobed(), **wanting((0, 0), (1, 1)), anchored_at=held(e00=8)) == (
        {(0, 0), (1, 1)},
        set(),
    )


def test_an_expert_that_is_left_out_from_now_on_is_sent_in_full_before():
    """It was sent as a gradient, from an anchor at 5, and takes the place of the one that lacks least."""
    known = wanting((0, 0), (1, 1), anchored_at=held(e02=5, e00=8))
    assert recomputed(**known) == ({(0, 2)}, {(0, 0)})
    assert recomputed(**{**known, "anchored_at": held(e02=8, e00=8)}) == ({(1, 1)}, {(0, 0)}), "in full already"
    both = wanting((0, 0), (1, 1), anchored_at=held(e02=5, e13=6, e00=7))
    assert recomputed(**both) == ({(0, 2), (1, 3)}, {(0, 0)}), "nothing that only gradients lead to is left out"


def test_after_so_many_gradients_an_expert_is_sent_in_full():
    for anchor, gradient in ((9 - MOST_GRADIENTS, True), (8 - MOST_GRADIENTS, False)):
        full, gradients = recomputed(**wanting((0, 0), (1, 1)), anchored_at=held(e00=anchor))
        assert ((0, 0) in gradients, (0, 0) in full) == (gradient, not gradient)


def test_gradients_begin_when_probing_has_ended():
    """What they lead to, if anything, is sent in full at once, also in the place of what is wanted most."""
    known = wanting((0, 0), (1, 1), anchored_at=held(e00=8))
    slower = replace(known["measured"], copy_interference_secs=0.0)
    late = {"step": PROBED_CHECKPOINTS, "last_step": PROBED_CHECKPOINTS - 1, "index": PROBED_CHECKPOINTS - 1}
    late["anchored_at"] = held(e00=PROBED_CHECKPOINTS - 1)
    policy = MoEtion(recompute=True)
    assert recomputed(policy, **known) == ({(0, 0), (1, 1)}, set())
    assert recomputed(policy, **{**known, "measured": slower}) == ({(1, 1)}, {(0, 0)})
    assert recomputed(policy, **{**known, **late})[1] == {(0, 0)}, "it is given up"
    behind = {**known, "anchored_at": held(e02=5, e13=6)}
    assert recomputed(policy, **behind) == ({(0, 2), (1, 3)}, set())
    small = {**behind, "step": 7, "last_step": 6, "index": 6, "anchored_at": held(e02=4, e13=5, e00=3)}
    assert recomputed(policy, **small) == ({(0, 2), (1, 3), (0, 0)}, set()), "more than the two of a small one"


@pytest.mark.parametrize(
    "changed",
    [
        {"replicas": 0},
        {"sends": Sends(experts=False)},
        {"sends": Sends(shared=False, experts=False)},
        {"storage_due": True},
    ],
    ids=["no peers", "peers have experts", "peers have everything", "storage is due"],
)
def test_gradients_are_sent_only_where_peers_need_them(changed):
    known = wanting((0, 0), (1, 1), anchored_at=held(e00=8))
    known["memory"] = memory(**{"storage_due": False, "replicas": 1, **changed})
    assert recomputed(**known)[1] == set()


def test_what_an_optimizer_couples_is_sent_in_full():
    known = wanting((0, 0), (1, 1), anchored_at=held(e00=8, e11=8))
    known["coupled"] = (frozenset({"expert/0/0", "expert/0/1"}),)
    assert recomputed(**known) == ({(0, 0)}, {(1, 1)})


@given(st.integers(0, 10**6), st.lists(st.integers(-1, 8), min_size=8, max_size=8), st.integers(60, 140))
def test_nothing_that_only_gradients_lead_to_is_left_out(seed, anchors, sent):
    known = in_memory(copied=10.0**6, sent=float(sent), seed=seed)
    names = [f"e{layer}{expert}" for layer in range(2) for expert in range(4)]
    known["anchored_at"] = held(**dict(zip(names, anchors, strict=True)))
    full, gradients = recomputed(**known)
    behind = {(int(name[1]), int(name[2])) for name, at in zip(names, anchors, strict=True) if 0 <= at < 8}
    assert behind <= full | gradients
    there = {(int(name[1]), int(name[2])) for name, at in zip(names, anchors, strict=True) if at >= 0}
    assert gradients <= there
    assert len(full | gradients) <= max(len(behind), 2, (sent - 36) // 12), "experts are bought at their full price"


def test_why_no_gradient_is_sent():
    """Silent as long as some expert's may be, and without recompute."""
    every, peers = MODEL.experts_in_order, memory(storage_due=False, replicas=1)
    apart = replace(peers, sends=Sends(shared=False, shared_weights=False))
    for known in ({}, {"memory": apart}, {"memory": MemoryFacts()}, {"coupled": (frozenset(every[1:]),)}):
        assert why_no_gradients(facts(**{"memory": peers, **known})) is None
    alike = facts(memory=replace(peers, sends=Sends(experts=False)))
    assert "the peers that hold copies train the same experts" in why_no_gradients(alike)
    halves = frozenset(every[:3]), frozenset((*every[3:], "gate/0"))
    assert "Adafactor" in why_no_gradients(facts(memory=peers, coupled=halves))
    assert (needs_of(MoEtion(recompute=True)).warning, needs_of(MoEtion()).warning) == (why_no_gradients, None)


def test_recompute_needs_a_checkpoint_at_each_step_and_memory():
    with pytest.raises(ConfigError, match=r"recompute=True, every_n_steps=2.*every_n_steps=1, or recompute=False"):
        MoEtion(every_n_steps=2, recompute=True)
    with pytest.raises(ConfigError, match=r"MoEtion\(recompute='yes'\): choose True or False"):
        MoEtion(recompute="yes")
    with pytest.raises(ConfigError, match=r"MoEtion logs the gradients.*give memory=moe_ckpt.Memory"):
        require_served(MoEtion(recompute=True))
    assert needs_of(MoEtion(recompute=True)).gradients
    assert not needs_of(MoEtion()).gradients


def test_what_goes_to_storage_fits_all_its_ways():
    """The time since storage got the last one counts for storage alone."""
    known = in_memory(copied=36 + 6 * 12.0, sent=36 + 5 * 12.0, storage_due=True)
    known |= {"step": 2000, "last_step": 1999}
    known["chosen_at"][Tier.STORAGE][:] = 2000 - (36 + 4 * 12)
    plan = MoEtion().plan(facts(**known))
    assert (len(experts_in(plan.full)), plan.memory_only) == (4, ())
    known["chosen_at"][Tier.STORAGE][:] = 1000
    assert len(experts_in(MoEtion().plan(facts(**known)).full)) == 5
