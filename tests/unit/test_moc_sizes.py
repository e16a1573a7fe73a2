"""The counted numbers of docs/sizes.md: what the PEC paper's model weighs, and what its busiest rank writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("rich")

from benchmarks import moc_sizes

H, LAYERS, EXPERTS, VOCABULARY, CONTEXT = 768, 12, 8, 50257, 1024
EXPERT = 4 * H * H * 2 + 4 * H + H
ATTENTION = 4 * H * H + 4 * H
NORMS = (2 * LAYERS + 1) * 2 * H
GATES = LAYERS // 2 * EXPERTS * H
P_EXPERT = LAYERS // 2 * EXPERTS * EXPERT
P_REST = (VOCABULARY + CONTEXT) * H + LAYERS * ATTENTION + LAYERS // 2 * EXPERT + NORMS + GATES
"""By hand: embeddings, attention, the MLPs of every other block (one is as large as an expert), norms, gates."""

DOCUMENT = (Path(__file__).parents[2] / "docs" / "sizes.md").read_text()
RESULTS = json.loads((moc_sizes.report.RESULTS / "moc_sizes.json").read_text())


@pytest.fixture(scope="module")
def tied():
    return moc_sizes.subject()


def test_the_parameters_are_those_of_the_formula(tied):
    assert (tied.expert_parameters, tied.parameters) == (P_EXPERT, P_REST + P_EXPERT) == (226_676_736, 322_818_816)
    steps = 4 * len({unit.span.parameter for unit in tied.weights.units})  # stacks count at their gates
    assert tied.expert_bytes == 12 * P_EXPERT
    assert tied.non_expert_bytes == 12 * P_REST + steps
    assert len(tied.catalog.parameters) * 4 == steps


def test_sizes_by_k(tied):
    share = [round(tied.size(k) / tied.size(8), 3) for k in range(1, 9)]
    assert share == [0.386, 0.473, 0.561, 0.649, 0.737, 0.824, 0.912, 1.0]


def test_one_variant_gives_the_papers_figures():
    """A head of its own and the causal masks give all of the paper's ratios, two of them to the last digit."""
    figures = moc_sizes.reconstruction(moc_sizes.subject("untied, masks"))
    told = moc_sizes.PAPER
    for name in ("K=1 of full", "K=1 sharded, busiest rank, of every rank writing all in full"):
        assert round(figures[name], 3) == round(told[name], 3), name
    assert figures["times the dense model"] == pytest.approx(told["times the dense model"], abs=0.01)
    assert figures["K=1 with every rank writing all, of full"] == pytest.approx(0.85, abs=0.005)
    assert figures["adaptive to equal"] == pytest.approx(told["adaptive to equal"], abs=0.01)


@pytest.mark.parametrize("selector", ["sequential", "load_aware"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_adaptive_is_below_equal_and_close_to_the_lowest(tied, ranks, selector):
    found = moc_sizes.peaks(tied, ranks, selector, 1)
    for all_ranks, none, equal, whole, adaptive, lowest in zip(
        *(getattr(found, way) for way in moc_sizes.WAYS), strict=True
    ):
        assert lowest <= adaptive < lowest + (1 << 16)
        assert adaptive < whole <= equal < none <= all_ranks
    assert found.lowest == [-(-tied.size(1) // ranks)] * 8, "one full round, and the mean can be had"
    kept = next(p for p in RESULTS["peaks"]["rounds"] if (p["ranks"], p["selector"]) == (ranks, selector))
    if selector == "sequential":
        assert [kept[way] for way in moc_sizes.WAYS] == [getattr(found, way) for way in moc_sizes.WAYS]


def test_a_round_saves_every_expert(tied):
    rounds = moc_sizes.round_of(tied.catalog, 8, "sequential", 3)
    saved = [op for operators in rounds for op in operators if op.startswith("expert/")]
    assert len(rounds) == 3
    assert set(saved) == {op.id for op in tied.catalog.experts}
    assert len(saved) == 3 * 3 * 6


def test_the_document_says_what_was_counted(tied):
    models = RESULTS["models"]
    assert models["tied"]["size_by_k"] == [tied.size(k) for k in range(1, 9)]
    for name, model in models.items():
        sizes = model["size_by_k"]
        row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| {name} |"))
        assert [f"{size / sizes[-1]:.1%}" for size in sizes[:-1]] == row.replace(" ", "").split("|")[4:11]


def test_it_runs_as_a_program(tmp_path, capsys):
    assert moc_sizes.main(f"--ranks 2 --selectors sequential --k 4 --write --out {tmp_path}".split()) == 0
    written = json.loads((tmp_path / "moc_sizes.json").read_text())
    assert written["models"] == RESULTS["models"]
    assert len(written["peaks"]["rounds"][0]["adaptive"]) == 2
    assert "of full" in capsys.readouterr().out
