"""MoC(k="auto", snapshot_k="auto") under real Lightning: K follows what the ranks measured, alike on all."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.core.operators import OperatorKind
from moe_ckpt.policies import MoC
from moe_ckpt.policies.base import Measured
from moe_ckpt.reading.reader import open_step
from moe_ckpt.run.meter import Meter
from tests.support import run_ranks
from tests.support.tiny_moe import TinyMoE, loader

LAYERS, EXPERTS = 2, 4
AUTO = MoC(k="auto", snapshot_k="auto")


class Seen(pl.Callback):
    """Of each step, K, and how many experts went to storage."""

    def __init__(self) -> None:
        self.k, self.stored = [], []
        self.shared = self.expert = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        checkpoint = trainer.callbacks[-1]
        if checkpoint.last is None:
            return
        session = checkpoint._fit.session
        sizes, catalog = session._snapshots.live.sizes, session.catalog
        self.shared = sum(sizes[op.id].full for op in catalog.always_saved)
        self.expert = max(sizes[op.id].full for op in catalog.operators if op.kind is OperatorKind.EXPERT)
        self.k.append(checkpoint.last.k)
        self.stored.append(checkpoint.last.experts_saved)


def fit(root, *, max_steps=6, strategy="auto", devices=1):
    pl.seed_everything(3, verbose=False)
    seen, checkpoint = Seen(), MoECheckpoint(AUTO, root, when_busy="wait", save_last=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=max_steps, logger=False,
        callbacks=[seen, checkpoint], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(TinyMoE(), loader(64, shuffle=False))
    return seen, checkpoint


def test_a_run_goes_by_what_it_measures_and_comes_back(tmp_path):
    seen, _ = fit(tmp_path)
    assert seen.k[0] >= 1
    assert seen.stored[0] == LAYERS * EXPERTS, "the first checkpoint is dense"
    assert all(1 <= k <= EXPERTS for k in seen.k)
    assert seen.stored[1:] == [LAYERS * k for k in seen.k[1:]]
    manifest = open_step(tmp_path)[1]
    assert (manifest.policy["k"], manifest.policy["snapshot_k"]) == ("auto", "auto")
    assert {"update_secs", "copy_bytes_per_sec", "persist_bytes_per_sec"} <= manifest.measured.keys()
    again, checkpoint = fit(tmp_path, max_steps=9)
    assert checkpoint.restored_step == 6
    assert all(1 <= k <= EXPERTS for k in again.k)


def _two_ranks(rank: int, world_size: int, root: str) -> tuple[list[int], list[int]]:
    from lightning.pytorch.strategies import DDPStrategy

    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    measured, known = Meter.measured, Seen()

    def told(meter: Meter) -> Measured:
        """Rank 1 has time for all gates and non-experts and two experts of each layer, rank 0 for everything."""
        if measured(meter).copy_bytes_per_sec is None:
            return Measured()
        needed = (known.shared + LAYERS * 2 * known.expert) / world_size + 1
        rate = needed if rank == 1 else 100 * needed
        return Measured(recent_iteration_secs=1.0, copy_bytes_per_sec=2 * rate, persist_bytes_per_sec=rate)

    Meter.measured = told  # type: ignore[method-assign]
    pl.seed_everything(3, verbose=False)
    checkpoint = MoECheckpoint(AUTO, root, when_busy="wait", save_last=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=14,
        logger=False, callbacks=[known, checkpoint], enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(TinyMoE(), loader(64, shuffle=False))
    return known.k, known.stored


def test_two_ranks_that_measure_differently_have_one_k_that_of_the_slower(tmp_path):
    first, second = run_ranks(_two_ranks, 2, str(tmp_path))
    assert first == second
    ks, stored = first
    # 1 until a rank knows its rates, and that of rank 0 as long as it alone does.
    assert ks[-3:] == [2, 2, 2]
    assert stored[-3:] == [LAYERS * 2] * 3
