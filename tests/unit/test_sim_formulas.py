"""Closed forms of the simulator: known answers first, then what must hold for all numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moe_ckpt.core.window import OperatorBytes, slot_bytes
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.failures import formulas
from moe_ckpt_sim.failures.formulas import (
    Component,
    component_mtbf_hours,
    daly_interval_secs,
    ettr,
    expected_recovery_secs_dense,
    expected_recovery_secs_sparse,
    moc_overhead_secs,
    most_recovery_secs_dense,
    most_recovery_secs_sparse,
    observed_mtbf_hours,
    overhead_portion,
    system_mtbf_hours,
    wasted_work_secs,
    whole_iterations,
    young_interval_secs,
)
from moe_ckpt_sim.workload import size_formulas
from moe_ckpt_sim.workload.model import ModelSpec
from moe_ckpt_sim.workload.size_formulas import (
    CountedWindow,
    counted_slot_bytes,
    mean_window_bytes,
    moetion_bytes,
    pec_bytes,
    pec_reduction,
    window_by_count,
)

secs = st.floats(1e-3, 1e6)
counts = st.integers(1, 10**6)

# How often a job fails


def test_mtbf_of_4096_gpus_their_hosts_and_switches():
    parts = [Component("gpu", 4096, 25_000), Component("host", 512, 8_000), Component("switch", 32, 100_000)]
    assert system_mtbf_hours(parts) == pytest.approx(4.4, abs=0.05)
    assert system_mtbf_hours(parts) == pytest.approx(1 / (0.16384 + 0.064 + 0.00032))


def test_mtbf_of_10000_gpus_and_their_hosts():
    parts = [Component("gpu", 10_000, 20_000), Component("host", 1_250, 10_000)]
    assert system_mtbf_hours(parts) * 60 == pytest.approx(96)


def test_mtbf_of_llama_3_as_observed():
    hours = observed_mtbf_hours(failures=419, days=54)
    assert hours == pytest.approx(3.1, abs=0.05)
    per_gpu = component_mtbf_hours(system_mtbf_hours=hours, count=16_384)
    assert per_gpu == pytest.approx(50_677, abs=1)
    assert system_mtbf_hours([Component("gpu", 16_384, per_gpu)]) == pytest.approx(hours)


components = st.builds(Component, st.text(max_size=3), counts, st.floats(1, 1e7))


@given(parts=st.lists(components, min_size=1, max_size=6), more=components)
def test_more_parts_fail_sooner(parts, more):
    hours = system_mtbf_hours(parts)
    assert system_mtbf_hours([*parts, more]) < hours
    first = parts[0]
    grown = Component(first.name, first.count + more.count, first.mtbf_hours)
    assert system_mtbf_hours([grown, *parts[1:]]) < hours
    assert hours <= min(one.mtbf_hours / one.count for one in parts) * (1 + 1e-12)


@given(parts=st.lists(components, min_size=1, max_size=8), data=st.data())
def test_mtbf_does_not_depend_on_the_order(parts, data):
    assert system_mtbf_hours(data.draw(st.permutations(parts))) == system_mtbf_hours(parts)


# How often to save


def test_young_of_half_a_minute_and_two_hours():
    assert young_interval_secs(checkpoint_secs=30, mtbf_secs=7200) == pytest.approx(657, abs=0.5)
    assert whole_iterations(interval_secs=657, iteration_secs=0.5) == 1314


@pytest.mark.parametrize(
    ("interval", "saving", "lost"),
    [(200, 15.0, 1.4), (400, 7.5, 2.8), (657, 4.6, 4.6), (1000, 3.0, 6.9), (2000, 1.5, 13.9)],
)
def test_overhead_around_youngs_interval(interval, saving, lost):
    portion = overhead_portion(interval_secs=interval, checkpoint_secs=30, mtbf_secs=7200)
    assert 100 * portion == pytest.approx(saving + lost, abs=0.1)


@pytest.mark.parametrize(("hours", "minutes", "within"), [(24, 117, 0.5), (6, 57, 0.5), (0.25, 9.1, 0.05)])
def test_daly_of_a_five_minute_save(hours, minutes, within):
    found = daly_interval_secs(checkpoint_secs=300, mtbf_secs=hours * 3600)
    assert found / 60 == pytest.approx(minutes, abs=within)


def test_daly_where_saving_takes_longer_than_the_series_holds():
    assert daly_interval_secs(checkpoint_secs=200, mtbf_secs=100) == 100
    assert daly_interval_secs(checkpoint_secs=201, mtbf_secs=100) == 100
    just_below = daly_interval_secs(checkpoint_secs=199.999, mtbf_secs=100)
    assert just_below == pytest.approx(200 * (1 + 1 / 3 + 1 / 9) - 200, abs=0.01)


@given(save=secs, mtbf=secs, factor=st.floats(0.01, 100))
def test_young_has_the_least_overhead(save, mtbf, factor):
    best = young_interval_secs(checkpoint_secs=save, mtbf_secs=mtbf)
    least = overhead_portion(interval_secs=best, checkpoint_secs=save, mtbf_secs=mtbf)
    other = overhead_portion(interval_secs=best * factor, checkpoint_secs=save, mtbf_secs=mtbf)
    assert other >= least * (1 - 1e-12)
    if abs(factor - 1) > 0.01:
        assert other > least


@given(save=secs, times=st.floats(1e4, 1e9))
def test_daly_goes_to_young_for_short_saves(save, times):
    mtbf = save * times
    young = young_interval_secs(checkpoint_secs=save, mtbf_secs=mtbf)
    daly = daly_interval_secs(checkpoint_secs=save, mtbf_secs=mtbf)
    # sqrt(2dM) + d/3 + ... - d: less by two thirds of a save
    assert daly == pytest.approx(young - save * 2 / 3, abs=save * 0.01)
    assert daly < young


@given(save=secs, mtbf=secs, more=st.floats(1.001, 1e3))
def test_fewer_failures_are_saved_for_less_often(save, mtbf, more):
    formulas = [young_interval_secs]
    if save < 2 * mtbf or save >= 2 * mtbf * more:  # Daly's two cases do not meet: at 2M the interval falls by a ninth
        formulas.append(daly_interval_secs)
    for formula in formulas:
        assert formula(checkpoint_secs=save, mtbf_secs=mtbf * more) > formula(checkpoint_secs=save, mtbf_secs=mtbf)


@given(interval=secs, iteration=secs)
def test_whole_iterations_are_the_nearest(interval, iteration):
    n = whole_iterations(interval_secs=interval, iteration_secs=iteration)
    assert n >= 1
    if n > 1:
        assert abs(n - interval / iteration) <= 0.5
    else:
        assert interval / iteration < 1.5


def test_half_iterations_round_up_and_nothing_rounds_to_none():
    found = [whole_iterations(interval_secs=t, iteration_secs=1.0) for t in (0.1, 1.49, 1.5, 2.5, 3.5)]
    assert found == [1, 1, 2, 3, 4]


# What a failure costs


def test_ettr_by_hand():
    recovery = expected_recovery_secs_dense(interval=10, iteration_secs=2.0)
    assert recovery == 10.0
    found = ettr(checkpoint_secs=4, iteration_secs=2, interval=10, recovery_secs=recovery, mtbf_secs=100)
    assert found == pytest.approx(1 / 1.2 / 1.1)
    assert ettr(checkpoint_secs=4, iteration_secs=2, interval=10, recovery_secs=99, mtbf_secs=None) == 1 / 1.2


@given(
    save=st.floats(0, 1e4), iteration=secs, interval=st.integers(1, 10**5), recovery=st.floats(0, 1e6), mtbf=secs,
    more=st.floats(1.0, 1e3),
)  # fmt: skip
def test_ettr_is_a_portion_and_more_failures_never_raise_it(save, iteration, interval, recovery, mtbf, more):
    def of(between):
        return ettr(
            checkpoint_secs=save,
            iteration_secs=iteration,
            interval=interval,
            recovery_secs=recovery,
            mtbf_secs=between,
        )

    assert 0 < of(mtbf) <= 1
    assert of(mtbf) <= of(mtbf * more) <= of(None)
    if more > 1.001 and recovery > mtbf / 1e3:
        assert of(mtbf) < of(mtbf * more)


@given(mtbf=st.floats(600, 1e5), save=st.floats(0.1, 60), iteration=st.floats(0.1, 10))
def test_young_is_close_to_the_best_interval_for_ettr(mtbf, save, iteration):
    """The product of MoEvement and Young's sum have their best interval in the same place."""
    assume(2 * save < mtbf / 4)

    def of(n):
        recovery = expected_recovery_secs_dense(interval=n, iteration_secs=iteration)
        return ettr(checkpoint_secs=save, iteration_secs=iteration, interval=n, recovery_secs=recovery, mtbf_secs=mtbf)

    best = whole_iterations(
        interval_secs=young_interval_secs(checkpoint_secs=save, mtbf_secs=mtbf), iteration_secs=iteration
    )
    assert of(best) >= max(of(max(1, best // 2)), of(best * 2 + 1)) - 1e-12


def test_recovery_of_dense_and_sparse():
    dense = {"interval": 92, "iteration_secs": 2.5}
    assert expected_recovery_secs_dense(**dense) == 115.0
    assert most_recovery_secs_dense(**dense) == 230.0
    assert most_recovery_secs_dense(**dense, down_secs=20) == 250.0
    assert expected_recovery_secs_dense(**dense, down_secs=20) == 135.0
    sparse = {"window": 6, "iteration_secs": 2.5}
    assert expected_recovery_secs_sparse(**sparse) == 22.5
    assert expected_recovery_secs_sparse(**sparse, down_secs=20) == 42.5
    assert most_recovery_secs_sparse(**sparse) == 30.0
    assert most_recovery_secs_sparse(**sparse, down_secs=20) == 50.0


def test_wasted_work():
    assert wasted_work_secs(checkpoint_secs=3, retrieve_secs=5, interval=8, iteration_secs=2.5) == 18.0


def test_moc_overhead():
    found = moc_overhead_secs(save_secs=2, iterations=100, interval=5, restart_secs=[10, 20], lost_secs=[1, 2])
    assert found == 2 * 100 / 5 + 33
    assert moc_overhead_secs(save_secs=2, iterations=0, interval=5, restart_secs=[], lost_secs=[]) == 0


# What checkpoints weigh

PEC_EXPERTS, PEC_REST = 226_676_736, 96_142_080
"""Of the paper's model, docs/sizes.md."""
HEAD, MASKS = 50_257 * 768, 12 * 1024 * 1024 * 4 // 12
"""What the paper most likely saved besides: the head, and masks as many parameters of 12 bytes."""


def test_pec_sizes_are_those_of_the_document():
    share = [round(1 - pec_reduction(non_expert=PEC_REST, expert_total=PEC_EXPERTS, k=k, experts=8), 3) for k in (1, 2)]
    assert share == [0.386, 0.473]
    found = pec_bytes(non_expert=PEC_REST, expert_total=PEC_EXPERTS, k=8, experts=8, bytes_per_param=12)
    assert round(found / 2**20) == 3694


def test_pec_of_the_paper():
    found = pec_reduction(non_expert=PEC_REST + HEAD + MASKS, expert_total=PEC_EXPERTS, k=1, experts=8)
    assert found == pytest.approx(0.542, abs=0.0006)


@given(rest=st.integers(0, 10**12), per=counts, experts=st.integers(1, 256), data=st.data())
def test_pec_grows_with_k_up_to_all(rest, per, experts, data):
    k = data.draw(st.integers(0, experts - 1))
    total = per * experts

    def of(k):
        return pec_bytes(non_expert=rest, expert_total=total, k=k, experts=experts, bytes_per_param=12)

    assert of(k) < of(k + 1)
    assert of(experts) == 12 * (rest + total)
    assert of(k) == pytest.approx(12 * (rest + k * per), rel=1e-12)
    left_out = pec_reduction(non_expert=rest, expert_total=total, k=k, experts=experts)
    assert 1 - of(k) / of(experts) == pytest.approx(left_out, abs=1e-9)


def moetion_model():
    return ModelSpec("moe_gpt_1_6b_64e", 24, 2176, 64, 1, 8704, 50304, learned_positions=True).build()


def test_moetion_of_the_paper():
    """587 GB, of which the six most popular experts of each layer and all the rest are 61 GB."""
    model = moetion_model()
    rest, one = model.total - model.expert_total, model.expert_total // (24 * 64)

    def of(selected):
        return moetion_bytes(non_expert=rest, one_expert=one, selected=[selected] * 24, experts=64, bytes_per_param=10)

    assert of(64) == 10 * model.total
    assert of(64) / 1e9 == pytest.approx(587, rel=0.004)
    assert of(6) / 1e9 == pytest.approx(61, abs=0.5)


@given(selected=st.lists(st.integers(0, 8), max_size=6), rest=st.integers(0, 10**9), one=counts)
def test_moetion_adds_up_over_layers(selected, rest, one):
    sizes = {"one_expert": one, "experts": 8, "bytes_per_param": 10}
    alone = [moetion_bytes(non_expert=0, selected=[count], **sizes) for count in selected]
    assert moetion_bytes(non_expert=rest, selected=selected, **sizes) == 10 * rest + sum(alone)


# Windows by count


@pytest.mark.parametrize(
    ("budget", "size", "active"),
    [(1000, 1, 100), (999.9, 2, 99), (600, 2, 50), (599, 3, 49), (220, 50, 2), (1, 50, 2)],
)
def test_window_by_count_by_hand(budget, size, active):
    """100 operators of 10 bytes, or 2: a slot of A weighs 8 A + 200."""
    found = window_by_count(operators=100, full_bytes=10, compute_bytes=2, budget_bytes=budget)
    assert found == CountedWindow(size, active)


def test_window_by_count_never_goes_below_two():
    """As printed: ``while O_active > 2``."""
    assert window_by_count(operators=5, full_bytes=9, compute_bytes=9, budget_bytes=1) == CountedWindow(3, 2)
    assert window_by_count(operators=2, full_bytes=9, compute_bytes=9, budget_bytes=1) == CountedWindow(1, 2)
    assert window_by_count(operators=1, full_bytes=9, compute_bytes=9, budget_bytes=1) == CountedWindow(1, 1)


operators = st.integers(1, 400)
weights = {"full_bytes": st.integers(2, 50), "compute_bytes": st.integers(1, 10)}


@given(operators=operators, **weights, budget=st.floats(1, 2e4), more=st.floats(0, 1e4))
def test_window_shrinks_with_bandwidth(operators, full_bytes, compute_bytes, budget, more):
    given_ = {"operators": operators, "full_bytes": full_bytes, "compute_bytes": compute_bytes}
    narrow = window_by_count(**given_, budget_bytes=budget)
    wide = window_by_count(**given_, budget_bytes=budget + more)
    assert wide.size <= narrow.size
    assert wide.active >= narrow.active


@given(operators=operators, **weights, budget=st.floats(1, 2e4))
def test_window_by_count_takes_the_most_that_fit(operators, full_bytes, compute_bytes, budget):
    assume(full_bytes > compute_bytes)
    found = window_by_count(
        operators=operators, full_bytes=full_bytes, compute_bytes=compute_bytes, budget_bytes=budget
    )

    def first(active):
        return full_bytes * active + compute_bytes * (operators - active)

    assert found.size == math.ceil(operators / found.active)
    assert found.active <= 2 or first(found.active) <= budget
    assert found.active == operators or first(found.active + 1) > budget


@given(operators=operators, active=st.integers(1, 400), **weights)
def test_slots_weigh_what_the_library_says_of_equal_operators(operators, active, full_bytes, compute_bytes):
    active = min(active, operators)
    names = [str(n) for n in range(operators)]
    slots = [names[at : at + active] for at in range(0, operators, active)]
    sizes = dict.fromkeys(names, OperatorBytes(full_bytes, compute_bytes))
    found = counted_slot_bytes(
        CountedWindow(len(slots), active), operators=operators, full_bytes=full_bytes, compute_bytes=compute_bytes
    )
    assert found == slot_bytes(slots, sizes)
    frozen = sum(operators - min(operators, (n + 1) * active) for n in range(len(slots)))
    mean = (operators * full_bytes + frozen * compute_bytes) / len(slots)
    assert mean_window_bytes(found) == pytest.approx(mean)


# Bad input

GOOD = {
    "observed_mtbf_hours": {"failures": 1, "days": 1},
    "component_mtbf_hours": {"system_mtbf_hours": 1, "count": 1},
    "young_interval_secs": {"checkpoint_secs": 1, "mtbf_secs": 1},
    "daly_interval_secs": {"checkpoint_secs": 1, "mtbf_secs": 1},
    "whole_iterations": {"interval_secs": 1, "iteration_secs": 1},
    "overhead_portion": {"interval_secs": 1, "checkpoint_secs": 1, "mtbf_secs": 1},
    "ettr": {"checkpoint_secs": 1, "iteration_secs": 1, "interval": 1, "recovery_secs": 1, "mtbf_secs": 1},
    "expected_recovery_secs_dense": {"interval": 1, "iteration_secs": 1, "down_secs": 1},
    "most_recovery_secs_dense": {"interval": 1, "iteration_secs": 1, "down_secs": 1},
    "expected_recovery_secs_sparse": {"window": 1, "iteration_secs": 1, "down_secs": 1},
    "most_recovery_secs_sparse": {"window": 1, "iteration_secs": 1, "down_secs": 1},
    "wasted_work_secs": {"checkpoint_secs": 1, "retrieve_secs": 1, "interval": 1, "iteration_secs": 1},
    "moc_overhead_secs": {"save_secs": 1, "iterations": 1, "interval": 1, "restart_secs": (), "lost_secs": ()},
    "pec_bytes": {"non_expert": 1, "expert_total": 1, "k": 1, "experts": 1, "bytes_per_param": 1},
    "pec_reduction": {"non_expert": 1, "expert_total": 1, "k": 1, "experts": 1},
    "moetion_bytes": {"non_expert": 1, "one_expert": 1, "selected": (), "experts": 1, "bytes_per_param": 1},
    "window_by_count": {"operators": 1, "full_bytes": 1, "compute_bytes": 1, "budget_bytes": 1},
}
LISTS = ("restart_secs", "lost_secs", "selected")


def function(name):
    return getattr(formulas, name, None) or getattr(size_formulas, name)


def test_every_formula_is_tried_with_bad_input():
    public = {
        name
        for module in (formulas, size_formulas)
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    others = {"Component", "CountedWindow", "system_mtbf_hours", "counted_slot_bytes", "mean_window_bytes"}
    assert public == set(GOOD) | others


@pytest.mark.parametrize(("name", "field"), [(n, f) for n, fields in GOOD.items() for f in fields if f not in LISTS])
@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "3", True])
def test_bad_numbers_are_refused_by_name(name, field, bad):
    function(name)(**GOOD[name])
    with pytest.raises(ConfigError, match=rf"{name}\({field}=") as caught:
        function(name)(**{**GOOD[name], field: bad})
    assert f"{field} must be" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("young_interval_secs", "mtbf_secs"), ("daly_interval_secs", "checkpoint_secs"), ("ettr", "iteration_secs"),
        ("ettr", "interval"), ("ettr", "mtbf_secs"), ("whole_iterations", "iteration_secs"), ("pec_bytes", "experts"),
        ("observed_mtbf_hours", "failures"), ("expected_recovery_secs_sparse", "window"),
        ("window_by_count", "budget_bytes"), ("window_by_count", "operators"), ("moetion_bytes", "bytes_per_param"),
    ],
)  # fmt: skip
def test_zero_is_refused_where_it_makes_no_sense(name, field):
    with pytest.raises(ConfigError, match=rf"{name}\({field}=0\)"):
        function(name)(**{**GOOD[name], field: 0})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: system_mtbf_hours([]), "at least one component"),
        (lambda: Component("gpu", 0, 1), r"Component 'gpu'\(count=0\)"),
        (lambda: Component("gpu", 1, 0), r"Component 'gpu'\(mtbf_hours=0\)"),
        (lambda: Component("gpu", 1, 1, 0), r"Component 'gpu'\(blast_nodes=0\)"),
        (lambda: pec_bytes(**{**GOOD["pec_bytes"], "k": 2}), r"pec_bytes\(k=2, experts=1\)"),
        (lambda: pec_reduction(**{**GOOD["pec_reduction"], "k": 2}), r"pec_reduction\(k=2, experts=1\)"),
        (lambda: moetion_bytes(**{**GOOD["moetion_bytes"], "selected": [1, 2]}), "layer 1: selected=2 of experts=1"),
        (lambda: moetion_bytes(**{**GOOD["moetion_bytes"], "selected": [-1]}), r"layer 0\(selected=-1\)"),
        (lambda: moc_overhead_secs(**{**GOOD["moc_overhead_secs"], "lost_secs": [1]}), "of 0 faults, lost_secs of 1"),
        (
            lambda: moc_overhead_secs(**{**GOOD["moc_overhead_secs"], "lost_secs": [1, -1], "restart_secs": [1, 1]}),
            r"fault 2\(lost_secs=-1\)",
        ),
        (lambda: mean_window_bytes([]), "at least one slot"),
        (
            lambda: counted_slot_bytes(CountedWindow(2, 3), operators=7, full_bytes=1, compute_bytes=1),
            "does not hold operators=7",
        ),
        (
            lambda: counted_slot_bytes(CountedWindow(2, 0), operators=7, full_bytes=1, compute_bytes=1),
            "does not hold operators=7",
        ),
    ],
)
def test_contradictions_are_refused(call, said):
    with pytest.raises(ConfigError, match=said):
        call()
