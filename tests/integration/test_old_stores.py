"""Stores that earlier versions wrote (tests/fixtures): each verifies, comes back bit for bit, and trains on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from moe_ckpt.cli.main import main as moe_ckpt
from tests.fixtures.make_stores import LIGHTNING, MEGATRON, fit, megatron_life
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
ARCHIVES = sorted((Path(__file__).parents[1] / "fixtures").glob("stores-*.tar.xz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.split(".tar")[0])
def stores(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("stores")
    with tarfile.open(request.param) as archive:
        archive.extractall(place, filter="data")
    (directory,) = place.iterdir()
    return directory, json.loads((directory / "expected.json").read_text())


@pytest.mark.parametrize("name", LIGHTNING)
def test_a_lightning_store(stores, name):
    directory, expected = stores
    assert moe_ckpt(["verify", str(directory / name)]) == 0
    found = fit(directory / name, LIGHTNING[name])
    assert found == expected[name]
    assert moe_ckpt(["verify", str(directory / name)]) == 0


@pytest.mark.parametrize(
    "name", [n if n == "megatron_moc" else pytest.param(n, marks=pytest.mark.slow) for n in MEGATRON]
)
def test_a_megatron_store(stores, name):
    directory, expected = stores
    assert moe_ckpt(["verify", str(directory / name)]) == 0
    found = run_ranks(megatron_life, 2, str(directory / name), MEGATRON[name], None, preload=WARM)
    assert found == expected[name]["ranks"]
    assert moe_ckpt(["verify", str(directory / name)]) == 0
