"""The benchmark counts what the formulas and the docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gradient_bytes

DOCS = Path(__file__).parents[2] / "docs" / "gradient_log.md"


@pytest.fixture(scope="module")
def weighed():
    return [gradient_bytes.weigh(kind) for kind in gradient_bytes.KINDS]


def test_a_parameter_in_mixed_precision_weighs_twelve_bytes_and_its_gradient_four(weighed):
    masters = next(each for each in weighed if "masters" in each.name)
    assert (masters.full, masters.gradient) == (pytest.approx(12, abs=0.01), 4)


def test_the_docs_have_the_counted_table(weighed):
    text = DOCS.read_text()
    for row in gradient_bytes.table(weighed):
        assert f"| {' | '.join(row)} |" in text


def test_it_runs(capsys):
    assert gradient_bytes.main([]) == 0
    assert "Bytes per parameter" in capsys.readouterr().out
