"""Train a GPT-MoE with Megatron-Core and a checkpoint at every iteration. Run by torchrun::

    torchrun --nproc-per-node 8 recipes/gpt_moe_megatron/train.py
    torchrun --nproc-per-node 8 recipes/gpt_moe_megatron/train.py moe_ckpt/policy=moevement moe_ckpt.policy.window=3

The loop is Megatron's own; checkpointing is the four calls on ``ckpt``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by its path, a script does not find the rest of the clone
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hydra
import torch
import torch.distributed as dist

from recipes.gpt_moe_megatron.config import FaultConfig, RunConfig
from recipes.gpt_moe_megatron.data import Feed, source
from recipes.gpt_moe_megatron.model import Built, build, start
from recipes.gpt_moe_megatron.runlog import RunLog, fingerprint

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from moe_ckpt.megatron import MegatronCheckpoint
    from moe_ckpt.run.events import StepRecord

HERE = Path(__file__).resolve().parent

Micro = tuple[torch.Tensor, torch.Tensor] | None


@dataclass
class Outcome:
    """Of one iteration. loss: the mean over the global batch, on the last pipeline stage; None elsewhere."""

    loss: float | None
    updated: bool
    norm: float | None


class Training:
    """Megatron's training loop for a built model, one iteration at a time."""

    def __init__(self, run: RunConfig, built: Built) -> None:
        from megatron.core import parallel_state as groups

        self.run, self.built = run, built
        self.last_stage = groups.is_pipeline_last_stage(ignore_virtual=True)
        self.feed = Feed(
            source(run.data, run.model.vocab, run.model.seq, run.seed),
            run.trainer.micro_batch,
            built.microbatches,
            groups.get_data_parallel_rank(),
            groups.get_data_parallel_world_size(),
            needed=self.last_stage or groups.is_pipeline_first_stage(ignore_virtual=True),
        )
        self._gathers_in_forward = not run.parallel.overlap
        if run.parallel.overlap:  # the first iteration goes by the parameters as they are
            for chunk in built.chunks:
                chunk.disable_forward_pre_hook(param_sync=False)

    def gradients(self, consumed_samples: int) -> float | None:
        """Forward and backward passes of one global batch; the loss on the last pipeline stage."""
        from megatron.core import parallel_state as groups
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = self.built.chunks
        for chunk in chunks:
            chunk.zero_grad_buffer()
        self.built.optimizer.zero_grad()
        batches = [self.feed.iteration(consumed_samples) for _ in chunks]
        losses = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=batches if len(chunks) > 1 else batches[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=self.built.microbatches,
            seq_length=self.run.model.seq,
            micro_batch_size=self.run.trainer.micro_batch,
            forward_only=False,
        )
        if not self.last_stage:
            return None
        loss = torch.stack([each["loss"] for each in losses]).mean()
        group = groups.get_data_parallel_group()
        dist.all_reduce(loss, group=group)
        mean: float = loss.item() / group.size()
        return mean

    def update(self) -> Outcome:
        """Optimizer step, and the scheduler's if it was made: fp16 leaves one out when gradients overflow."""
        from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

        updated, norm, _ = self.built.optimizer.step()
        clear_aux_losses_tracker()
        if updated:
            self.built.scheduler.step(increment=self.run.trainer.global_batch)
            if not self._gathers_in_forward:
                for chunk in self.built.chunks:
                    chunk.enable_forward_pre_hook()
                self._gathers_in_forward = True
        return Outcome(None, bool(updated), None if norm is None else float(norm))

    def finish(self) -> None:
        """Gather what the last update left for the next forward pass to gather."""
        if self.run.parallel.overlap and self._gathers_in_forward:
            for chunk in self.built.chunks:
                chunk.disable_forward_pre_hook()

    def _forward_step(self, batches: Iterator[Micro], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        seq, device = self.run.model.seq, torch.cuda.current_device()
        batch = next(batches)
        tokens, labels = (None, None) if batch is None else (part.to(device) for part in batch)
        positions = torch.arange(seq, device=device).expand(self.run.trainer.micro_batch, seq)
        later = None  # Transformer Engine's attention is causal by itself
        if not self.built.engine:
            later = torch.triu(torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device), diagonal=1)
        return model(tokens, positions, later, labels=labels), _loss


def _loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the first in place


def kill_hook(run: RunConfig) -> Callable[[int], None]:
    """Called between backward pass and update: kills this process where the schedule of ``faults`` says so.

    What has happened is remembered on disk, so that it happens once.
    """
    faults: FaultConfig = run.faults
    if not faults.kills:
        return lambda iteration: None
    from moe_ckpt.testing import KillSchedule

    schedule = KillSchedule.draw(
        faults.seed,
        kills=faults.kills,
        ranks=dist.get_world_size(),
        first_step=max(2, int(run.trainer.train_iters * faults.after)),
        last_step=run.trainer.train_iters,
        phases=("compute",),
    )
    return schedule.hook(dist.get_rank(), Path(run.run_dir) / "kills.jsonl").on_step


def iterate(
    run: RunConfig,
    training: Training,
    log: RunLog,
    kill: Callable[[int], None],
    ckpt: MegatronCheckpoint | None,
    done: int,
    consumed: int,
) -> tuple[int, Outcome]:
    """Iterations after ``done``, up to the last: how many are done then, and what the last one gave."""
    outcome = Outcome(None, True, None)
    while done < run.trainer.train_iters:
        began = time.perf_counter()
        loss = training.gradients(consumed)
        kill(done + 1)
        outcome = training.update()
        outcome.loss = loss
        done, consumed = done + 1, consumed + run.trainer.global_batch
        record = None
        if ckpt is not None:
            record = ckpt.after_step(done, consumed_samples=consumed, updated=outcome.updated)
        report(run, log, done, consumed, outcome, record, time.perf_counter() - began, training.built)
    return done, outcome


def train(run: RunConfig, checkpointing: dict[str, Any] | None = None) -> float | None:
    """Train to ``trainer.train_iters`` from where the newest checkpoint is.

    checkpointing: arguments of ``moe_ckpt.megatron.attach``; None trains without checkpoints.
    Returns the last loss on the last pipeline stage, None elsewhere or if there was nothing left to do.
    """
    start(run.trainer.timeout_secs)
    log = RunLog(run.run_dir, dist.get_rank())
    log.event("process_start")
    built = build(run)
    training, kill = Training(run, built), kill_hook(run)
    ckpt = None
    done = consumed = 0
    if checkpointing is not None:
        from moe_ckpt import megatron

        ckpt = megatron.attach(built.chunks, built.optimizer, built.scheduler, **checkpointing)
        progress = ckpt.resume()  # random states follow in front of the first forward pass
        done, consumed = progress.iteration, progress.consumed_samples
    log.event("resumed", iteration=done, consumed_samples=consumed)
    with contextlib.nullcontext() if ckpt is None else ckpt:  # at an error each rank keeps the state that it has
        done, outcome = iterate(run, training, log, kill, ckpt, done, consumed)
    training.finish()
    log.event("finished", iteration=done, loss=outcome.loss, parameters=fingerprint(built.chunks))
    dist.destroy_process_group()
    return outcome.loss


def report(
    run: RunConfig,
    log: RunLog,
    iteration: int,
    consumed: int,
    outcome: Outcome,
    record: StepRecord | None,
    secs: float,
    built: Built,
) -> None:
    """A line in the diary, and one on the terminal from the last rank, which has the loss."""
    lr = built.optimizer.param_groups[0]["lr"]
    log.iteration(
        iteration,
        record,
        consumed_samples=consumed,
        loss=outcome.loss,
        updated=outcome.updated,
        grad_norm=outcome.norm,
        lr=lr,
        secs=secs,
    )
    due = iteration % run.trainer.log_every == 0 or iteration == run.trainer.train_iters
    if outcome.loss is None or not due or dist.get_rank() != dist.get_world_size() - 1:
        return
    line = f"iteration {iteration:>6}/{run.trainer.train_iters} | samples {consumed:>8} | loss {outcome.loss:.4f}"
    line += f" | lr {lr:.2e} | {secs:.2f} s"
    if record is not None:
        newest = "none yet" if record.committed_step is None else str(record.committed_step)
        line += f" | stall {record.stall_secs * 1000:.0f} ms | {record.nbytes / 1e6:.1f} MB | checkpoint {newest}"
    print(line, flush=True)


def checkpoint_settings(cfg: DictConfig) -> dict[str, Any] | None:
    """The node ``moe_ckpt`` as arguments of ``attach``; None where it was left out (``~moe_ckpt``).

    As for ``moe_ckpt.conf.build_callback``, ``moe_ckpt.dirpath`` goes before ``moe_ckpt.store.dirpath``, and the group
    ``memory: off`` is empty.
    """
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    if "_target_" not in (cfg.get("moe_ckpt") or {}):
        return None
    others = ("_target_", "store")
    settings = {str(key): value for key, value in cfg.moe_ckpt.items() if key not in others}
    results = {key: instantiate(value) if OmegaConf.is_config(value) else value for key, value in settings.items()}
    store: Any = OmegaConf.to_container(cfg.moe_ckpt.store, resolve=True)
    above = {key: results.pop(key, None) for key in ("dirpath", "timeout_secs")}
    where = {**store, **{key: value for key, value in above.items() if value is not None}}
    return {**results, **where, "memory": results.get("memory") or None}


@hydra.main(version_base="1.3", config_path=str(HERE / "conf"), config_name="train")
def main(cfg: DictConfig) -> None:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    train(RunConfig.of(plain), checkpoint_settings(cfg))


if __name__ == "__main__":
    main()
