"""Where failures come from: they come as often as told, the same for the same seed, and scale with the MTBF."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.conf import register
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.failures.failures import Components, FailureEvent, NoFailures, Poisson, Weibull
from moe_ckpt_sim.failures.formulas import Component, observed_mtbf_hours

CONF = Path(__file__).parents[2] / "src" / "moe_ckpt_sim" / "conf" / "simulate" / "failures"
TABLE = {
    "gpu": {"count": 4096, "mtbf_hours": 25_000},
    "host": {"count": 512, "mtbf_hours": 8_000},
    "switch": {"count": 32, "mtbf_hours": 100_000, "blast_nodes": 16},
}


def first(source, count, nodes=12, seed=0):
    return list(islice(source.events(np.random.Generator(np.random.PCG64(seed)), nodes), count))


def waits(events):
    return np.diff([0.0, *(event.at_secs for event in events)])


SOURCES = [Poisson(600), Weibull(600, 0.7), Weibull(600, 2), Components(TABLE)]


def test_golden_numbers():
    """On any machine; to be changed only if results that were published may change."""
    assert first(Poisson(600), 3, seed=7) == [
        FailureEvent(588.650318, 10),
        FailureEvent(1485.474543, 2),
        FailureEvent(1699.622056, 10),
    ]
    assert first(Weibull(600, 0.7), 3, seed=7) == [
        FailureEvent(461.242919, 10),
        FailureEvent(1302.916942, 2),
        FailureEvent(1411.704855, 10),
    ]
    assert first(Components(TABLE), 3, nodes=512, seed=7) == [
        FailureEvent(15479.934725, 397),
        FailureEvent(19505.945675, 447),
        FailureEvent(19589.243249, 408),
    ]


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_same_seed_same_failures_another_seed_others(source):
    assert first(source, 50) == first(source, 50)
    assert first(source, 50) != first(source, 50, seed=1)


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_they_come_in_order_on_nodes_that_there_are_and_as_often_as_told(source):
    events = first(source, 20_000, nodes=512)
    assert all(a.at_secs <= b.at_secs for a, b in pairwise(events))
    assert {event.node for event in events} == set(range(512))
    assert not any(event.joins for event in events)
    assert all(round(event.at_secs, 6) == event.at_secs for event in events)
    times = sorted({event.at_secs for event in events})  # one failure may take several nodes
    assert times[-1] / len(times) == pytest.approx(source.mean_secs, rel=0.03)


@pytest.mark.parametrize("source", [Poisson(600), Weibull(600), Components(TABLE)], ids=repr)
def test_nodes_are_drawn_evenly(source):
    counts = np.bincount([event.node for event in first(source, 24_000)], minlength=12)
    assert counts.min() > 1800
    assert counts.max() < 2200


@pytest.mark.parametrize("source", [Poisson(600), Weibull(600)], ids=repr)
def test_times_do_not_depend_on_the_number_of_nodes(source):
    few, many = ([event.at_secs for event in first(source, 100, nodes)] for nodes in (3, 2048))
    assert few == many


@given(mtbf=st.floats(1, 1e7), factor=st.floats(1, 1e3), shape=st.floats(0.3, 3), seed=st.integers(0, 99))
def test_more_failures_are_the_same_ones_earlier(mtbf, factor, shape, seed):
    """Coupled by the seed, so that "more failures never raise ETTR" can be seen in single runs."""
    for kind in (Poisson, lambda mean: Weibull(mean, shape)):
        often, rare = first(kind(mtbf), 20, seed=seed), first(kind(mtbf * factor), 20, seed=seed)
        assert [event.node for event in often] == [event.node for event in rare]
        for a, b in zip(often, rare, strict=True):
            assert a.at_secs <= b.at_secs
            assert a.at_secs * factor == pytest.approx(b.at_secs, rel=1e-9, abs=1e-6 * (factor + 1))


@pytest.mark.parametrize("kind", [Poisson, Weibull])
def test_half_the_mtbf_is_half_of_every_time(kind):
    whole, half = first(kind(2.0**20), 200), first(kind(2.0**19), 200)
    assert [event.node for event in whole] == [event.node for event in half]
    for a, b in zip(whole, half, strict=True):  # exactly but for the rounding of each to a microsecond
        assert abs(a.at_secs / 2 - b.at_secs) < 0.8e-6


def test_components_scale_like_poisson():
    half = {name: {**row, "mtbf_hours": row["mtbf_hours"] / 2} for name, row in TABLE.items()}
    often, rare = first(Components(half), 200, nodes=512), first(Components(TABLE), 200, nodes=512)
    assert [event.node for event in often] == [event.node for event in rare]
    assert [event.at_secs * 2 for event in often] == pytest.approx([event.at_secs for event in rare], abs=3e-6)


def test_poisson_has_no_memory_and_weibull_comes_in_bursts():
    def spread(source):
        found = waits(first(source, 20_000))
        return found.std() / found.mean()

    assert spread(Poisson(600)) == pytest.approx(1, rel=0.03)
    assert spread(Weibull(600, 1)) == pytest.approx(1, rel=0.03)
    assert spread(Weibull(600, 0.5)) == pytest.approx(5**0.5, rel=0.05)
    assert spread(Weibull(600, 3)) == pytest.approx(0.363, rel=0.03)


def test_weibull_of_shape_1_is_poisson():
    assert first(Weibull(600, 1), 100) == first(Poisson(600), 100)


# What a cluster is made of


def test_the_mtbf_of_components_is_that_of_their_rates():
    assert Components(TABLE).mean_secs / 3600 == pytest.approx(4.4, abs=0.05)


def test_the_order_of_the_table_does_not_matter():
    table = {"pair": {"count": 9, "mtbf_hours": 70, "blast_nodes": 2}, "node": {"count": 3, "mtbf_hours": 9}}
    turned = dict(reversed(table.items()))
    assert first(Components(turned), 100) == first(Components(table), 100)
    listed = [Component(name, **row) for name, row in turned.items()]
    assert first(Components(listed), 100) == first(Components(table), 100)


@pytest.mark.parametrize(
    ("nodes", "blocks"), [(8, [(0, 1, 2, 3), (4, 5, 6, 7)]), (6, [(0, 1, 2, 3), (4, 5)]), (2, [(0, 1)])]
)
def test_a_switch_takes_its_neighbouring_nodes_at_once(nodes, blocks):
    source = Components({"switch": {"count": 2, "mtbf_hours": 100, "blast_nodes": 4}})
    at_once: dict[float, list[int]] = {}
    for event in first(source, 400, nodes):
        at_once.setdefault(event.at_secs, []).append(event.node)
    groups = [tuple(group) for group in at_once.values()][:-1]
    assert set(groups) == set(blocks)
    for block in blocks:
        assert groups.count(block) == pytest.approx(len(groups) / len(blocks), rel=0.4)


def test_what_fails_is_drawn_by_its_rate():
    table = {"node": {"count": 30, "mtbf_hours": 100}, "pair": {"count": 10, "mtbf_hours": 100, "blast_nodes": 2}}
    sizes: dict[float, int] = {}
    for event in first(Components(table), 20_000):
        sizes[event.at_secs] = sizes.get(event.at_secs, 0) + 1
    pairs = sum(size == 2 for size in sizes.values())
    assert pairs / len(sizes) == pytest.approx(0.25, abs=0.01)


def test_nothing_fails():
    assert first(NoFailures(), 5) == []
    assert NoFailures().mean_secs is None


# Bad input


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Poisson(0), r"Poisson\(mtbf_secs=0\)"),
        (lambda: Poisson("600"), r"Poisson\(mtbf_secs='600'\)"),
        (lambda: Weibull(-1), r"Weibull\(mtbf_secs=-1\)"),
        (lambda: Weibull(600, 0), r"Weibull\(shape=0\): shape must be a finite number of at least 0.1"),
        (lambda: Components({}), "at least one component"),
        (lambda: Components({"gpu": {"count": 3}}), r"table\['gpu'\].*give count and mtbf_hours"),
        (lambda: Components({"gpu": 3}), r"table\['gpu'\]=3.*give count and mtbf_hours"),
        (lambda: Components({"gpu": {"count": 3, "mtbf_hours": 1, "nodes": 2}}), r"table\['gpu'\].*blast_nodes"),
        (lambda: Components({"gpu": {"count": 3, "mtbf_hours": 0}}), r"Component 'gpu'\(mtbf_hours=0\)"),
        (lambda: Components([Component("gpu", 1, 1), Component("gpu", 2, 1)]), "'gpu' is in the table twice"),
    ],
)
def test_bad_settings_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize("source", SOURCES, ids=repr)
def test_no_nodes_are_refused_at_once(source):
    with pytest.raises(ConfigError, match=rf"{type(source).__name__}.events\(nodes=0\)"):
        source.events(np.random.Generator(np.random.PCG64(0)), 0)


# The configs that come with the package


def configured(name, *overrides):
    hydra = pytest.importorskip("hydra")
    from hydra.utils import instantiate

    register()
    asked = [f"failures={name}", "cluster=gpus_4096", *(f"failures.{one}" for one in overrides)]
    with hydra.initialize_config_dir(str(CONF.parent), version_base="1.3"):
        return instantiate(hydra.compose("simulate", asked).failures)


@pytest.mark.parametrize(
    ("name", "hours"),
    [("poisson", 1.0), ("weibull", 1.0), ("components", 4.38), ("llama3", observed_mtbf_hours(failures=419, days=54))],
)
def test_configs_give_the_mtbf_that_they_say(name, hours):
    assert configured(name).mean_secs / 3600 == pytest.approx(hours, abs=0.005)


def test_other_configs():
    assert configured("none") == NoFailures()
    assert configured("poisson", "mtbf_secs=600") == Poisson(600)
    assert configured("components") == Components(TABLE)
    counts = {part.name: part.count for part in configured("components", "table.gpu.count=7").parts}
    assert counts == {"gpu": 7, "host": 512, "switch": 32}
    assert configured("components", "table.gpu.mtbf_hours=50000").mean_secs > configured("components").mean_secs
    assert {path.stem for path in CONF.glob("*.yaml")} == {
        "components", "gcp_like_6h", "llama3", "none", "poisson", "trace", "weibull",
    }  # fmt: skip


def test_neither_torch_nor_hydra_is_needed():
    code = (
        "import sys, moe_ckpt_sim.failures.traces, moe_ckpt_sim.workload.size_formulas; "
        "print({'torch', 'hydra'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
