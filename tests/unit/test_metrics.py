"""The metrics: their numbers, their pictures, and what ranks, checkpoints and collections do to them."""

from __future__ import annotations

import builtins
import types

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moe_ckpt.core.tokens import AtRisk, normalized_hhi
from moe_ckpt.errors import ConfigError, MissingPackageError
from moe_ckpt.metrics import CheckpointMetrics, facts_of
from moe_ckpt.policies.base import Measured
from moe_ckpt.run.events import StepEnded, StepRecord, StepReplayed, TrainingEnded
from moe_ckpt.run.run_ledger import RunLedger
from tests.support import run_ranks
from tests.unit.builders import catalog

mpl.use("Agg")

FIRST = {
    "lost_tokens": 30, "routed_tokens": 1000, "at_risk_tokens": 50,
    "at_risk_mlt": 0.25, "mlt_newest": 0.125, "mlt_worst": 0.5, "owed_tokens": 2**24 + 1,
    "k": 2, "popularity": [[8, 0], [4, 4]],
    "nbytes": 100, "stall_ns": 4_000_000, "worst_stall_ns": 4_000_000, "steps": 1, "experts": [2, 2],
    "oldest_expert_steps": 3, "ages": [[0, 3], [-1, 1]],
    "unsaved": [[0, 40], [7, 3]], "frozen_nbytes": 40, "window_age": 2, "window_size": 3, "window_slot": 1,
}  # fmt: skip
SECOND = FIRST | {
    "lost_tokens": 60, "routed_tokens": 4000, "at_risk_tokens": 20,
    "at_risk_mlt": 0.0625, "mlt_newest": 0.0, "mlt_worst": 0.75, "owed_tokens": 90,
    "k": 4, "popularity": [[0, 8], [4, 4]],
    "nbytes": 0, "stall_ns": 1_000_000, "worst_stall_ns": 1_000_000, "oldest_expert_steps": 2, "ages": [[1, 2], [0, 2]],
    "unsaved": [[9, 4], [0, 3]], "frozen_nbytes": 0, "window_age": 1, "window_size": 4, "window_slot": 0,
}  # fmt: skip
AFTER_BOTH = {
    "plt": 0.015, "at_risk": 0.005, "mlt_if_failed_now": 0.0625, "mlt_newest": 0.0, "mlt_worst": 0.75, "k": 4.0,
    "owed_tokens": 90.0, "skewness": 0.0, "bytes": 50.0, "stall_ms_mean": 2.5,
    "stall_ms_worst": 4.0, "oldest_expert_steps": 2, "expert_ages": [[1, 2], [0, 2]],
    "unsaved_tokens": [[9, 4], [0, 3]], "bytes_full": 30.0, "bytes_compute": 20.0, "window_age": 1.0,
    "window_size": 4.0, "window_slot": 0.0,
}  # fmt: skip
SECOND_ALONE = AFTER_BOTH | {
    "skewness": 0.5, "bytes": 0.0, "stall_ms_mean": 1.0, "stall_ms_worst": 1.0, "bytes_full": 0.0, "bytes_compute": 0.0,
}  # fmt: skip


def plain(results):
    return {name: value.tolist() for name, value in results.items()}


def same(results, expected):
    found = plain(results)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.allclose(found[name], value, rtol=1e-6, atol=1e-7), name


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


# --- skewness ---


def test_skewness_of_known_loads():
    counts = np.array([[5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0], [0, 0, 0, 0]])
    assert normalized_hhi(counts).tolist() == pytest.approx([0.0, 1.0, 1 / 3, 0.0])


def test_skewness_goes_by_each_layers_own_number_of_experts():
    counts = np.array([[5, 5, 5, 5], [7, 7, 0, 0], [9, 0, 0, 0]])
    assert normalized_hhi(counts, [4, 2, 1]).tolist() == pytest.approx([0.0, 0.0, 0.0])


@given(hnp.arrays(np.int64, (3, 6), elements=st.integers(0, 10**12)))
def test_skewness_lies_between_even_and_one_expert_and_knows_no_scale(counts):
    skew = normalized_hhi(counts)
    assert ((skew >= 0) & (skew <= 1)).all()
    assert np.allclose(normalized_hhi(counts * 3), skew)
    assert np.allclose(normalized_hhi(counts[:, ::-1]), skew)


def test_skewness_follows_the_papers_expectation():
    """Appendix D: draws of p from a symmetric Dirichlet(alpha) have E[HHI] = (alpha + 1) / (alpha * E + 1)."""
    alpha, experts = 0.3, 16
    shares = np.random.default_rng(0).dirichlet([alpha] * experts, 4000)
    expected = ((alpha + 1) / (alpha * experts + 1) - 1 / experts) / (1 - 1 / experts)
    assert normalized_hhi(np.round(shares * 10**9).astype(np.int64)).mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("counts", "experts", "said"),
    [
        ([1, 2], None, r"wanted \[layers, experts\]"),
        ([[1, 2]], [2, 2], "one number between 1 and 2"),
        ([[1, 2]], [3], "one number between 1 and 2"),
        ([[1, -2]], None, "negative"),
        ([[1, 2]], [1], "beyond a layer's experts"),
    ],
)
def test_skewness_refuses_what_makes_no_sense(counts, experts, said):
    with pytest.raises(ConfigError, match=said):
        normalized_hhi(np.array(counts), experts)


# --- numbers ---


def test_names_and_values_of_the_collection():
    collection = CheckpointMetrics()
    collection.update(**FIRST)
    collection.update(**SECOND)
    same(collection.compute(), AFTER_BOTH)


def two_steps():
    """Records of two steps, each with the ledger after it."""
    run_ledger = RunLedger(catalog(layers=2, experts=2))
    for record, tokens in (
        (StepRecord(4, nbytes=9, frozen_nbytes=4, stall_secs=0.004, k=1, routed_tokens=16), [[8, 0], [4, 4]]),
        (StepRecord(5, nbytes=2, stall_secs=0.001, k=2, routed_tokens=32, lost_tokens=3), [[1, 7], [4, 4]]),
    ):
        run_ledger.routed(np.array(tokens))
        yield record, run_ledger


def test_steps_are_noted_as_numbers_and_become_tensors_when_a_metric_is_asked_for(monkeypatch):
    noted, updated = CheckpointMetrics(), CheckpointMetrics()
    kept = noted["stall"]  # a user may keep one, and ask it later
    for record, run_ledger in two_steps():
        updated.update(**facts_of(record, run_ledger))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a tensor was made"))
            noted.note(record, run_ledger)
    expected = plain(updated.compute())
    assert plain(kept.compute()) == {"stall_ms_mean": 2.5, "stall_ms_worst": 4.0}
    assert np.array_equal([*plain(noted.compute())], [*expected])
    same({name: value.nan_to_num(-1) for name, value in noted.compute().items()}, no_nan(expected))


def no_nan(values):
    return {name: np.nan_to_num(value, nan=-1) for name, value in values.items()}


def test_what_was_noted_goes_with_a_copy_and_not_beyond_a_reset():
    metrics = CheckpointMetrics()
    (first, run_ledger), (second, _) = two_steps()
    metrics.note(first, run_ledger)
    copied = metrics.clone()
    metrics.reset()
    metrics.note(second, run_ledger)
    assert [each["stall"].compute()["stall_ms_worst"].item() for each in (copied, metrics)] == [4.0, 1.0]
    assert [each["bytes"].compute() for each in (copied, metrics)] == [9, 2]
    metrics.persistent(True)
    metrics.note(second, run_ledger)
    assert metrics.state_dict()["stall.steps"] == 2


def test_forward_gives_the_value_of_the_step_and_goes_on_with_all():
    collection = CheckpointMetrics()
    collection(**FIRST)
    same(collection(**SECOND), SECOND_ALONE)
    same(collection.compute(), AFTER_BOTH)


def after(name, *steps):
    """A metric after ``steps``, facts of which differ from ``FIRST``."""
    collection = CheckpointMetrics()
    for step in steps:
        collection.update(**FIRST | step)
    return collection[name]


def test_before_anything_was_routed_nothing_is_lost():
    assert after("plt", {"lost_tokens": 0, "routed_tokens": 0}).compute() == 0


def test_large_counts_are_exact():
    assert after("plt", {"lost_tokens": 2**53 + 1, "routed_tokens": 2**54}).lost_tokens == 2**53 + 1
    metrics, run_ledger = CheckpointMetrics(), RunLedger(catalog(layers=2, experts=2))
    metrics.note(StepRecord(1, stall_secs=100_000.0), run_ledger)
    for step in range(1000):
        metrics.note(StepRecord(step + 2, stall_secs=1e-6), run_ledger)  # lost in a float that holds 28 hours
    metrics.catch_up()
    assert metrics["stall"].stall_ns == 100_000 * 10**9 + 1000 * 1000


def test_what_is_not_known_is_nan():
    run_ledger = RunLedger(catalog(layers=2, experts=2))
    with pytest.warns(UserWarning, match="before the ``update``"):
        found = plain(CheckpointMetrics().compute())
    metrics = CheckpointMetrics()
    metrics.note(StepRecord(3, window=0, slot=2), run_ledger)
    for values in (found, plain(metrics.compute())):
        assert {name for name, value in values.items() if np.isnan(value).any()} == {
            "k", "owed_tokens", "mlt_newest", "mlt_worst", "window_age", "window_size", "window_slot",
        }  # fmt: skip


def test_skewness_goes_by_each_layers_experts():
    skew = after("skewness", {"popularity": np.array([[4, 0, 0, 0], [3, 3, 0, 0]]), "experts": [4, 2]})
    assert skew.compute() == pytest.approx(0.5)


def test_tables_are_copies():
    """The ledger may go on counting in the array that was given."""
    table = np.array([[1, 2], [0, 0]])
    ages = after("expert_ages", {"ages": table})
    skew = after("skewness", {"popularity": table})
    table += 5
    assert ages.compute().tolist() == skew.popularity.tolist() == [[1, 2], [0, 0]]


def test_state_dict_round_trip():
    collection, other = CheckpointMetrics(), CheckpointMetrics()
    collection.update(**FIRST)
    assert collection.state_dict() == {}  # as with any torchmetrics metric, until asked for
    collection.persistent(True)
    state = collection.state_dict()
    other.persistent(True)
    other.load_state_dict(state)
    other.update(**SECOND)
    same(other.compute(), AFTER_BOTH)


def test_what_the_metrics_ask_for_comes_from_record_and_books():
    run_ledger = RunLedger(catalog(layers=2, experts=2))
    run_ledger.routed(np.array([[8, 0], [4, 4]]))
    run_ledger.ledger.at_risk = AtRisk(np.array([[1, 0], [4, 0]]), np.array([[8, 0], [4, 4]]))
    record = StepRecord(
        9, at_risk_mlt=0.25, nbytes=9, frozen_nbytes=4, k=1, routed_tokens=16, lost_tokens=2, stall_secs=0.5,
        oldest_expert_steps=1,
        window=3, slot=2, committed_step=7,
    )  # fmt: skip
    assert set(facts_of(record, run_ledger)) == set(FIRST)
    collection = CheckpointMetrics()
    collection.note(record, run_ledger)
    found = plain(collection.compute())
    assert found["at_risk"] == pytest.approx(5 / 16)
    assert found["mlt_if_failed_now"] == record.at_risk_mlt == 0.25
    assert np.isnan([found["mlt_newest"], found["mlt_worst"]]).all(), "there was no failure yet"
    assert found["skewness"] == pytest.approx(0.5)
    assert found["unsaved_tokens"] == [[8, 0], [4, 4]]
    assert found["expert_ages"] == [[-1, -1], [-1, -1]]
    assert (found["bytes_full"], found["bytes_compute"], found["bytes"]) == (5, 4, 9)
    assert (found["window_age"], found["window_size"], found["window_slot"]) == (2, 3, 2)


# --- ranks ---


SECOND_STALL = FIRST | {"nbytes": 0, "frozen_nbytes": 0, "stall_ns": 1_000_000, "worst_stall_ns": 1_000_000}


def _on_two_ranks(rank: int, world_size: int) -> tuple[dict, dict, dict]:
    stall = {"stall_ns": 4_000_000 // (rank + 1), "worst_stall_ns": 4_000_000 // (rank + 1)}
    mine = FIRST | {"nbytes": 100 * (rank + 1), "frozen_nbytes": 40 * (rank + 1)} | stall
    together, alone = CheckpointMetrics(), CheckpointMetrics(sync_on_compute=False)
    together.update(**mine)
    together.update(**SECOND_STALL)
    alone.update(**mine)
    # counts of this rank alone: 8 and 8 together
    local = after("skewness", {"popularity": [[8, 4]] if rank == 0 else [[0, 4]], "experts": [2]})
    # Only rank 0 computes here: it would wait for ever if that asked rank 1.
    own = plain(alone.compute()) if rank == 0 else {}
    return plain(together.compute()), own, local.compute().item()


def test_over_ranks_bytes_add_up_stalls_are_the_slowest_and_nothing_counts_twice():
    first, second = run_ranks(_on_two_ranks, 2)
    assert first[0] == second[0]
    expected = {
        "plt": 0.03, "at_risk": 0.05, "mlt_if_failed_now": 0.25, "mlt_newest": 0.125, "mlt_worst": 0.5,
        "k": 2.0, "owed_tokens": 2**24 + 1.0, "skewness": 0.5, "bytes": 150.0, "stall_ms_mean": 2.5,
        "stall_ms_worst": 4.0, "oldest_expert_steps": 3, "expert_ages": FIRST["ages"],
        "unsaved_tokens": FIRST["unsaved"], "bytes_full": 90.0, "bytes_compute": 60.0, "window_age": 2.0,
        "window_size": 3.0, "window_slot": 1.0,
    }  # fmt: skip
    same({name: torch.tensor(value) for name, value in first[0].items()}, expected)
    assert first[1]["bytes"] == 100
    assert first[2] == second[2] == 0


# --- pictures ---


def lines(ax):
    return {line.get_label(): line.get_ydata().tolist() for line in ax.lines}


@pytest.mark.parametrize(
    ("name", "values", "drawn", "label"),
    [
        ("plt", [0.0, 0.03], [0, 3], "lost tokens (%)"),
        ("at_risk", [0.01, 0.02], [1, 2], "tokens at risk (%)"),
        ("k", [1, 2], [1, 2], "experts per layer"),
        ("skewness", [0.25, 0.5], [0.25, 0.5], "skewness of expert load"),
        ("bytes", [2e6, 1e6], [2, 1], "written per iteration (MB)"),
        ("owed_tokens", [7, 3], [7, 3], "tokens to make up"),
        ("oldest_expert_steps", [3, 4], [3, 4], "age of the oldest expert (steps)"),
        ("window_age", [1, 2], [1, 2], "age of the newest complete window (steps)"),
    ],
)
def test_curves_show_the_values_in_the_unit_of_the_axis(name, values, drawn, label):
    metric = CheckpointMetrics()[name]
    fig, ax = metric.plot([torch.tensor(value) for value in values])
    (line,) = ax.lines
    assert line.get_ydata().tolist() == pytest.approx(drawn)
    assert list(line.get_xdata()) == [0, 1]
    assert (ax.get_ylabel(), ax.get_xlabel(), ax.get_title()) == (label, "Step", name)
    assert fig is ax.get_figure()
    again = metric.plot(torch.tensor(values, dtype=torch.float64))[1]  # as a MetricTracker hands them out
    assert again.lines[0].get_ydata().tolist() == pytest.approx(drawn)


def test_a_metric_of_several_values_has_a_line_for_each():
    stall, values = CheckpointMetrics()["stall"], []
    for ns in (2_000_000, 4_000_000):
        stall.update(stall_ns=ns, worst_stall_ns=ns, steps=1)
        values.append(stall.compute())
    assert lines(stall.plot(values)[1]) == {"stall_ms_mean": [2.0, 3.0], "stall_ms_worst": [2.0, 4.0]}
    assert lines(stall.plot()[1]) == {"stall_ms_mean": [3.0], "stall_ms_worst": [4.0]}
    fidelity = after("fidelity", {"nbytes": 5_000_000, "frozen_nbytes": 2_000_000})
    assert lines(fidelity.plot()[1]) == {"bytes_full": [3.0], "bytes_compute": [2.0]}


@pytest.mark.parametrize("prefix", [None, "train_"])
def test_the_whole_collection_plots_a_picture_of_each(prefix):
    import matplotlib.pyplot as plt

    collection = CheckpointMetrics().clone(prefix)
    steps = [collection(**FIRST), collection(**SECOND)]
    for several in (False, True):
        pictures = collection.plot(steps if several else None)
        drawn = dict(zip(collection.keys(keep_base=True), (axes for _, axes in pictures), strict=True))
        ms = {"stall_ms_mean": [4.0, 1.0], "stall_ms_worst": [4.0, 1.0]} if several else AFTER_BOTH
        assert lines(drawn["stall"]) == {f"{prefix or ''}{name}": pytest.approx(ms[name] if several else [ms[name]])
                                         for name in ("stall_ms_mean", "stall_ms_worst")}  # fmt: skip
        assert drawn["expert_ages"].get_title() == "expert_ages"
        sizes = [3.0, 4.0] if several else [4.0]
        assert lines(drawn["window"])[f"{prefix or ''}window_size"] == sizes
        assert drawn["window_age"].lines[0].get_ydata().tolist() == ([2.0, 1.0] if several else [1.0])
        plt.close("all")
    with pytest.raises(ValueError, match="same length"):
        collection.plot(ax=[plt.gca()])


def test_plot_draws_the_newest_value_on_the_axes_given():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    plt_metric = after("plt", {"lost_tokens": 1, "routed_tokens": 10})
    assert plt_metric.plot(ax=axes) == (figure, axes)
    assert axes.lines[0].get_ydata().tolist() == pytest.approx([10.0])


@pytest.mark.parametrize(
    ("name", "fact", "label"),
    [("expert_ages", "ages", "steps since the expert was saved"), ("unsaved_tokens", "unsaved", "unsaved tokens")],
)
def test_a_heat_map_of_now(name, fact, label):
    heat = after(name, {fact: [[0, 3, 5], [-1, 1, 0]], "experts": [3, 2], "popularity": np.zeros((2, 3), int)})
    figure, ax = heat.plot()
    (image,) = ax.images
    shown = image.get_array()
    assert np.asarray(shown.filled(-9)).tolist() == [[0, 3, 5], [-9, 1, -9]]  # never saved, and no such expert
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("expert", "MoE layer")
    assert figure.axes[1].get_ylabel() == label


def test_a_heat_map_over_time_has_a_row_per_expert():
    tables = [torch.tensor([[t, t + 1, 0], [10 * t, 0, 0]]) for t in range(4)]
    _, ax = after("unsaved_tokens", {"experts": [3, 1], "popularity": np.zeros((2, 3), int)}).plot(tables)
    (image,) = ax.images
    assert np.asarray(image.get_array()).tolist() == [[0, 1, 2, 3], [1, 2, 3, 4], [0] * 4, [0, 10, 20, 30]]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["0 / 0", "0 / 1", "0 / 2", "1 / 0"]
    assert ax.get_ylim() == (3.5, -0.5)


def test_a_heat_map_of_nothing_is_refused():
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(ConfigError, match="no table"):
        CheckpointMetrics()["expert_ages"].plot()


@pytest.mark.parametrize("name", ["bytes", "expert_ages"])
def test_without_matplotlib_plot_says_what_to_install(name, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    metric = after(name, {})
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackageError, match=r"moe_ckpt\[plot\]"):
        metric.plot()


def step_ended(record, run_ledger):
    return StepEnded(record, 0.0, False, Measured(), run_ledger)


def test_step_log_says_when_k_changes(caplog):
    from moe_ckpt.callbacks.step_log import StepLog

    caplog.set_level("INFO", "moe_ckpt")
    trainer = types.SimpleNamespace(is_global_zero=True, log_every_n_steps=1, loggers=[])
    told = StepLog(trainer=trainer)
    run_ledger = RunLedger(catalog(layers=2, experts=2))
    for step, k in ((1, 1), (2, 1), (3, 2), (4, None), (5, 2)):
        told(step_ended(StepRecord(step, k=k, plt_budget_left=0.01, plt=0.04), run_ledger))
    said = [record.message for record in caplog.records]
    assert said == [
        "step 3: each checkpoint now saves 2 experts per layer (before: 1); PLT 4.00%, 1.00% of all tokens may still "
        "be lost"
    ]


def test_step_log_leaves_out_of_the_metrics_what_is_computed_again():
    from moe_ckpt.callbacks.step_log import StepLog

    heard = []
    logger = types.SimpleNamespace(log_metrics=lambda values, step: heard.append((step, values)))
    trainer = types.SimpleNamespace(is_global_zero=True, log_every_n_steps=1, loggers=[logger])
    told = StepLog(trainer=trainer)
    run_ledger = RunLedger(catalog(layers=2, experts=2))
    for record in (
        StepRecord(4, nbytes=9, frozen_nbytes=3, window=3, slot=2, committed_step=2, lost_tokens=1, routed_tokens=10),
        StepRecord(3, replayed=True, committed_step=4),
        StepRecord(5, committed_step=4, lost_tokens=1, routed_tokens=20),
    ):
        told(StepReplayed(record, run_ledger) if record.replayed else step_ended(record, run_ledger))
    assert heard[1] == (3, {"moe_ckpt/replayed": 1.0})
    names = ("bytes", "bytes_full", "bytes_compute", "window_age", "window_size", "window_slot", "replayed")
    assert [[values.get(f"moe_ckpt/{name}") for name in names] for _, values in (heard[0], heard[2])] == [
        [9, 6, 3, 2, 3, 2, 0], [0, 0, 0, 1, None, None, 0],
    ]  # fmt: skip
    found = told.metrics.compute()
    assert (found["bytes"], found["plt"], found["window_age"]) == (4.5, 0.05, 1)  # means over two steps, not three


def test_the_end_of_training_completes_what_the_ledger_knows_and_counts_no_step():
    metrics = CheckpointMetrics(sync_on_compute=False)
    feed, run_ledger = metrics.observe, RunLedger(catalog(layers=2, experts=2))
    feed(step_ended(StepRecord(4, nbytes=9, lost_tokens=1, routed_tokens=10), run_ledger))
    feed(TrainingEnded(StepRecord(4, nbytes=9, lost_tokens=1, routed_tokens=20), run_ledger))
    found = metrics.compute()
    assert (found["plt"], found["bytes"], metrics["stall"].steps) == (0.05, 9, 1)
