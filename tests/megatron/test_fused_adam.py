"""Adam as Apex and Transformer Engine have it: state made in the first step, one count of steps per param group."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ckpt.cli.main import main
from moe_ckpt.megatron import optimizers
from tests.support import run_ranks, start_ranks
from tests.support.deleting import delete_tree
from tests.support.fused_adam import FusedAdam
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import EXACT, Life, live

WARM = "tests.support.megatron_warm"


def fused(rank: int, world_size: int, life: Life) -> dict[str, Any]:
    from moe_ckpt.testing import megatron_cpu

    megatron_cpu.install()
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with (
        mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.object(distrib_optimizer, "Adam", FusedAdam),
    ):
        return live(rank, world_size, life)


@pytest.mark.parametrize(
    ("setup", "policy"),
    [
        (Setup(layers=2, num_microbatches=1, precision="bf16", dist_opt=True), ("Dense", {"every_n_steps": 2})),
        pytest.param(
            Setup(layers=2, num_microbatches=1, precision="bf16", ep=2),
            ("MoEvement", {"window": 2}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["distributed", "window"],
)
def test_a_run_goes_on_exactly(tmp_path: Path, setup: Setup, policy: tuple[str, dict[str, Any]]):
    life = Life(str(tmp_path / "unbroken"), 5, setup, policy, options={"save_last": False})
    broken = replace(life, store=str(tmp_path / "broken"))
    unbroken = run_ranks(fused, setup.ep, life, preload=WARM)
    run_ranks(fused, setup.ep, replace(broken, steps=3), preload=WARM)
    again = run_ranks(fused, setup.ep, replace(broken, seed=9), preload=WARM)
    assert 0 < again[0]["progress"].iteration < 3
    for one, other in zip(unbroken, again, strict=True):
        assert one["steps"] == 5
        for part in EXACT:
            assert one[part] == other[part], part


LOGGED = Setup(layers=2, num_microbatches=1, precision="bf16", dist_opt=True)
AT = 7


def killed_log(directory: Path) -> Life:
    """A life that is to go on from what a killed one left of a gradient log."""
    log, memory = ("GradientLog", {"window": 3}), str(directory / "memory")
    beside = {"memory": memory, "copies": {"storage_every": 1000}}
    life = Life(str(directory / "store"), AT + 2, LOGGED, log, **beside)
    [outcome] = start_ranks(fused, 1, replace(life, kill=(0, AT + 1, "train")), preload=WARM)
    assert outcome.exitcode == -signal.SIGKILL, outcome.error
    return replace(life, seed=9)


def require_goes_on(life: Life, directory: Path, *, along_log: bool) -> None:
    dense = ("Dense", {"every_n_steps": 1000})
    [unbroken] = run_ranks(fused, 1, Life(str(directory / "unbroken"), life.steps, LOGGED, dense), preload=WARM)
    [again] = run_ranks(fused, 1, life, preload=WARM)
    assert again["progress"].iteration == AT
    assert (again["remade"] is not None) == along_log
    for part in EXACT:
        assert again[part] == unbroken[part], part


def test_its_updates_are_made_once_more(tmp_path: Path):
    require_goes_on(killed_log(tmp_path), tmp_path, along_log=True)


@pytest.mark.slow
def test_its_log_is_made_dense_once_the_class_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    life = killed_log(tmp_path)
    densify = ["densify", life.store, "--directory", str(tmp_path / "memory" / "node_0")]
    assert main(densify) == 2
    assert "optimizer class tests.support.fused_adam.FusedAdam is not registered" in (said := capsys.readouterr().err)
    assert "--import MODULE" in said
    assert main([*densify, "--import", "tests.support.fused_adam_known"]) == 0
    delete_tree(tmp_path / "memory")
    require_goes_on(life, tmp_path, along_log=False)


def test_a_count_of_none_is_that_of_an_optimizer_that_never_stepped(monkeypatch: pytest.MonkeyPatch):
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = FusedAdam([weight], 0.1, (0.9, 0.99), 1e-8, 0.0, True)
    monkeypatch.setattr(optimizers, "leaves", lambda optimizer: (SimpleNamespace(optimizer=optimizer),))
    optimizers.write_step(adam, 7)
    assert optimizers.read_step(adam) == 7
    optimizers.write_step(adam, None)
    assert optimizers.read_step(adam) is None
