"""When a run knows what saving itself makes an iteration longer (``Measured.interference_secs``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies import MoEtion
from moe_ckpt.policies.base import Measured, PolicyContext
from tests.support.tiny_moe import TinyMoE, loader


def fitted(root: Path, every: int, steps: int, *, probe: bool = True, experts: int = 4) -> list[Measured]:
    """What the policy was told at each step."""
    told: list[Measured] = []

    @dataclass(frozen=True)
    class Told(MoEtion):
        @property
        def probes(self) -> bool:
            return probe and super().probes

        def plan(self, context: PolicyContext) -> SnapshotPlan:
            told.append(context.measured)
            return super().plan(context)

        def describe(self) -> dict[str, Any]:
            return {"name": "told"}

    (root / "node").mkdir(exist_ok=True)
    memory = Memory(directory=root / "node", storage_every=1000)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MoECheckpoint(Told(every_n_steps=every), root / "store", memory=memory, when_busy="wait")],
    )  # fmt: skip
    trainer.fit(TinyMoE(experts=experts), loader())
    return told


@pytest.mark.parametrize("every", [1, 5])
def test_it_takes_iterations_without_a_checkpoint_beside_them(every: int, tmp_path: Path):
    told = fitted(tmp_path, every, 30, probe=False)
    assert len(told) == 30
    assert told[-1].recent_iteration_secs, "what there is, saving or not"
    assert told[-1].copy_interference_secs is None, "nothing was compared"
    if every == 1:
        assert all(each.iteration_secs is None and not each.interference_secs for each in told)
    else:
        assert told[-1].iteration_secs
        assert told[-1].interference_secs == max(0.0, told[-1].recent_iteration_secs - told[-1].iteration_secs)


def test_small_checkpoints_at_the_beginning_tell_it_where_each_iteration_has_one(tmp_path: Path):
    told = fitted(tmp_path, 1, 90, experts=16)
    assert told[-1].iteration_secs is None, "no iteration was without a checkpoint"
    known = [each.copy_interference_secs for each in told]
    assert known[0] is None
    assert known[-1] is not None
    assert told[-1].interference_secs == known[-1] >= 0.0, "0 where it is not to be told from chance"
