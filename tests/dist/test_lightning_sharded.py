"""Two real gloo ranks under Lightning: DDP and FSDP2 (ModelParallelStrategy), stopped and resumed."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from moe_ckpt_sim.cluster.surviving import Survivors
from moe_ckpt_sim.planner.profile import read_profile
from tests.support import run_ranks
from tests.support.tensor_reads import tensor_bytes_read


def _fit(
    rank: int,
    world_size: int,
    root: str,
    strategy: str,
    stop: int | None,
    how: str,
    max_steps: int = 14,
    window: int | None = None,
    log: int | None = None,
) -> dict:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    from moe_ckpt.callbacks import MoECheckpoint
    from moe_ckpt.driver import run as driver_run
    from moe_ckpt.memory.options import Memory
    from moe_ckpt.policies import Dense, GradientLog, MoEvement
    from tests.support.tiny_moe import TinyMoE, Tokens, state_of

    class Sharded(TinyMoE):
        def configure_model(self):
            if strategy == "fsdp2" and not hasattr(self, "sharded"):
                self.sharded = True
                for block in self.blocks:
                    fully_shard(block.moe.experts, mesh=self.device_mesh["data_parallel"])
                fully_shard(self, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            if stop is not None and self.trainer.global_step == stop:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    looked: list[str] = []
    resume_newest = driver_run.resume_newest

    def looking(*args, **kwargs):
        looked.append("for the newest")
        return resume_newest(*args, **kwargs)

    driver_run.resume_newest = looking
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    os.environ.update(NODE_RANK="0", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
    pl.seed_everything(7, verbose=False)
    model = Sharded()
    policy = Dense(1) if window is None else MoEvement(window)
    beside = {}
    if log is not None:
        policy = GradientLog(window=log)
        Path(root, "memory").mkdir(parents=True, exist_ok=True)
        # Both processes live on when training stops, and would seal all of it: there would be no update to make again.
        beside["memory"] = Memory(directory=f"{root}/memory", storage_every=1000, survivor_secs=0)
    beside["profile"] = f"{root}/profile.json"
    checkpoint = MoECheckpoint(policy, f"{root}/store", when_busy="wait", **beside)
    chosen = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(world_size, 1, process_group_backend="gloo"),
        "single": lambda: "auto",
    }[strategy]()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=chosen,
        max_steps=max_steps,
        max_epochs=-1,
        logger=False,
        callbacks=[checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    step_dir = None
    if how == "ckpt_path":
        step_dir = max((p for p in Path(root, "store").glob("step_*") if (p / "MANIFEST.json").exists()), key=str)
    try:
        sampler = StatefulDistributedSampler(Tokens(64), world_size, rank, shuffle=True, seed=3)
        with tensor_bytes_read() as noted:
            trainer.fit(model, StatefulDataLoader(Tokens(64), 4, sampler=sampler), ckpt_path=step_dir)
    except (KeyboardInterrupt, SystemExit):
        pass
    if how == "ckpt_path" and strategy == "fsdp2":
        (scores,) = trainer.validate(Sharded(), DataLoader(Tokens(8), 4), ckpt_path=checkpoint.last_model_path)
        expected = trainer.validate(model, DataLoader(Tokens(8), 4))
        assert [scores] == expected
    return {
        "state": {name: _part(value) for name, value in state_of(model, trainer.optimizers[0]).items()},
        "losses": model.losses,
        "restored": checkpoint.restored_step,
        "routed": checkpoint.last.routed_tokens if checkpoint.last else None,
        "resumed": [message for message in said if message.startswith("resumed at step")],
        "looked": looked,
        "read": sum(nbytes for _, nbytes in noted),
        "remade": checkpoint.recovery_plan and checkpoint.recovery_plan.updates,
        "warned": [message for message in said if "is of world size" in message],
    }


def _part(value) -> tuple[bool, bytes]:
    """Whether this is one of several rows' parts, and this rank's bytes: equality of those is ``torch.equal``."""
    sharded = hasattr(value, "to_local")
    local = value.to_local() if sharded else value
    return sharded, local.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _whole(ranks) -> dict[str, bytes]:
    """Parts along dim 0 put together."""
    first = ranks[0]["state"]
    return {
        name: b"".join(rank["state"][name][1] for rank in ranks) if first[name][0] else first[name][1] for name in first
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_resume_exactly(tmp_path, strategy):
    """By themselves, and again from the same place by ``ckpt_path``."""
    whole = run_ranks(_fit, 2, str(tmp_path / "whole"), strategy, None, "auto")
    before = run_ranks(_fit, 2, str(tmp_path / "broken"), strategy, 6, "auto")
    shutil.copytree(tmp_path / "broken", tmp_path / "again")
    shutil.copytree(tmp_path / "broken", tmp_path / "alone")
    after = [
        run_ranks(_fit, 2, str(tmp_path / root), strategy, None, how)
        for root, how in (("broken", "auto"), ("again", "ckpt_path"))
    ]
    for rank in range(2):
        for run, how in zip(after, ("auto", "ckpt_path"), strict=True):
            assert run[rank]["restored"] == 6
            assert run[rank]["state"] == whole[rank]["state"]
            assert {**before[rank]["losses"], **run[rank]["losses"]} == whole[rank]["losses"]
            assert run[rank]["routed"] == whole[rank]["routed"] == 14 * 4 * 2 * 2 * 2  # steps, batch, k, layers, ranks
            assert run[rank]["warned"] == []
            # Also under ModelParallelStrategy, which loads what ckpt_path names after on_fit_start.
            assert len(run[rank]["resumed"]) == (1 if rank == 0 else 0)
            assert run[rank]["looked"] == (["for the newest"] if how == "auto" else [])
    # What is named is read once, too: where the ranks load into live tensors after it was verified, else as it comes.
    found, named = (sum(rank["read"] for rank in run) for run in after)
    assert named <= found * (0.6 if strategy == "ddp" else 1.05)

    # One process takes over from two: whole tensors from shards, equal to what the two ranks held at step 6.
    (alone,) = run_ranks(_fit, 1, str(tmp_path / "alone"), "single", None, "auto", 6)
    assert alone["restored"] == 6
    assert _whole([alone]) == _whole(before)
    (warning,) = alone["warned"]
    assert "is of world size 2, and this run's is 1" in warning
    assert "data positions of rank 1 are dropped" in warning


@pytest.mark.parametrize(("strategy", "alike"), [("ddp", True), ("fsdp2", False)])
def test_a_profile_tells_whether_one_rank_can_give_back_what_another_had(tmp_path, strategy, alike):
    run_ranks(_fit, 2, str(tmp_path), strategy, None, "auto", 8)
    found = read_profile(tmp_path / "profile.json")
    (life,) = found.lives
    assert (life.pp, life.dp, life.ep, life.held_alike) == (1, 2, 1, alike)
    layout = found.layout()
    assert layout.sends(1).nothing == alike  # two nodes of one process each would send copies of shards
    assert Survivors(layout, seal=True).have_everything({1}) == alike


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.quick("fsdp2")
def test_a_sparse_window_comes_back_exactly(tmp_path, strategy):
    """Also where the rows of a stack of experts are spread over the ranks, whose windows anchor them one by one."""
    whole = run_ranks(_fit, 2, str(tmp_path / "whole"), strategy, None, "auto", 14, 3)
    before = run_ranks(_fit, 2, str(tmp_path / "broken"), strategy, 9, "auto", 14, 3)
    after = run_ranks(_fit, 2, str(tmp_path / "broken"), strategy, None, "auto", 14, 3)
    for rank in range(2):
        assert after[rank]["restored"] in (6, 9)
        assert after[rank]["state"] == whole[rank]["state"]
        assert {**before[rank]["losses"], **after[rank]["losses"]} == whole[rank]["losses"]
        assert after[rank]["routed"] == whole[rank]["routed"]


@pytest.mark.slow
def test_a_gradient_log_of_shards_comes_back_exactly(tmp_path):
    whole = run_ranks(_fit, 2, str(tmp_path / "whole"), "fsdp2", None, "auto", 14, None, 3)
    before = run_ranks(_fit, 2, str(tmp_path / "broken"), "fsdp2", 9, "auto", 14, None, 3)
    after = run_ranks(_fit, 2, str(tmp_path / "broken"), "fsdp2", None, "auto", 14, None, 3)
    for rank in range(2):
        assert after[rank]["restored"] == 9
        assert after[rank]["remade"] in ((6, 9), (7, 9)), "updates are made once more"
        assert after[rank]["state"] == whole[rank]["state"]
        assert {**before[rank]["losses"], **after[rank]["losses"]} == whole[rank]["losses"]
