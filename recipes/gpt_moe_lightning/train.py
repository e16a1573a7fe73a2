"""Train a GPT-MoE with a checkpoint at every iteration, on one process or under torchrun.

    python -m recipes.gpt_moe_lightning.train [group=choice ...] [key=value ...]

``train`` is plain Lightning and knows nothing of Hydra; ``main`` turns a composed config into its arguments, and
``command`` composes one from ``conf/`` and the command line, on which everything is Hydra's.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.testing import watch_phases
from recipes.gpt_moe_lightning.data import DataConfig, TextData
from recipes.gpt_moe_lightning.model import GPTMoEConfig, GPTMoELightning, OptimizerConfig
from recipes.gpt_moe_lightning.runlog import Diary, ExpertDiary, RunLog, parameter_hash

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch import Tensor

Precision = Literal["32-true", "64-true", "16-mixed", "16-true", "bf16-mixed", "bf16-true"]
CONF = Path(__file__).resolve().parents[2] / "conf"
DIARY_TABLES = 200
"""About as many tables of all experts are written in a run: what a picture can show."""


@dataclass(frozen=True)
class TrainerConfig:
    """devices counts only without torchrun. timeout_secs: how long a rank waits for another before it fails."""

    accelerator: str = "cpu"
    devices: int = 1
    precision: Precision = "32-true"
    max_steps: int = 100
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = 1.0
    val_batches: int = 32
    timeout_secs: float = 60
    progress_bar: bool = True


@dataclass(frozen=True)
class FaultConfig:
    """kill -9 of random ranks at random steps; the same ones for the same seed.

    nodes: so many of the kills, the last ones, lose a node: its memory directory is deleted, too. Each node must have
    one of its own, as in ``'moe_ckpt.memory.directory=/dev/shm/node_${oc.env:RANK}'``, which is made where it is not.
    after: share of the run in which nothing is killed yet.
    """

    kills: int = 0
    nodes: int = 0
    seed: int = 0
    after: float = 0.1
    phases: tuple[str, ...] = ("compute",)


@dataclass(frozen=True)
class RunConfig:
    """One run. ``run_dir`` must be the same on every rank and after a restart."""

    run_dir: str
    model: GPTMoEConfig = field(default_factory=GPTMoEConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    seed: int = 1


class Faults(Callback):
    """Kills this process where the schedule says so: between the forward and the backward pass."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.on_step = on_step

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.on_step(trainer.global_step + 1)


def kill_hook(config: RunConfig, node_memory: str | None = None) -> Any:
    """This rank's hook of the kill schedule, or None. It remembers on disk which kills have happened.

    node_memory: the directory that a lost node loses.
    """
    if not config.faults.kills:
        return None
    from moe_ckpt.testing import KillSchedule

    schedule = KillSchedule.draw(
        config.faults.seed,
        kills=config.faults.kills,
        ranks=int(os.environ.get("WORLD_SIZE", "1")),
        first_step=max(2, int(config.trainer.max_steps * config.faults.after)),
        last_step=config.trainer.max_steps,
        phases=tuple(config.faults.phases),
        nodes=config.faults.nodes,
    )
    if config.faults.nodes and node_memory is not None:
        os.makedirs(node_memory, mode=0o700, exist_ok=True)  # the node that comes in a lost one's place has none
    memory = Path(config.run_dir) / "kills.jsonl"
    memory.parent.mkdir(parents=True, exist_ok=True)
    return schedule.hook(int(os.environ.get("RANK", "0")), memory, node_memory=node_memory)


def make_trainer(config: TrainerConfig, log: RunLog, callbacks: list[Callback]) -> Trainer:
    """A Trainer that takes the number of processes from torchrun if there is one."""
    under_torchrun = "LOCAL_WORLD_SIZE" in os.environ
    devices = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun else config.devices
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1")) if under_torchrun else 1
    strategy: Any = "auto"
    if devices * nodes > 1:
        backend = "gloo" if config.accelerator == "cpu" else None
        strategy = DDPStrategy(process_group_backend=backend, timeout=timedelta(seconds=config.timeout_secs))
    return Trainer(
        accelerator=config.accelerator,
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        precision=config.precision,
        max_steps=config.max_steps,
        accumulate_grad_batches=config.accumulate_grad_batches,
        gradient_clip_val=config.gradient_clip_val,
        limit_val_batches=config.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=log,
        callbacks=callbacks,
        default_root_dir=log.run_dir,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),  # no second, default one
        enable_progress_bar=config.progress_bar,
        enable_model_summary=False,
        use_distributed_sampler=False,  # TextData shares out the data itself
    )


def train(config: RunConfig, checkpoint: Callback | None = None, faults: Any = None) -> dict[str, Any]:
    """Train to ``max_steps``, from where the checkpoint callback resumes, then validate.

    Returns: ``val_loss`` (nats per token), ``parameters`` (hash) and ``steps``.
    """
    log = RunLog(Path(config.run_dir))
    log.event("process_start")
    seed_everything(config.seed, workers=True, verbose=False)
    module = GPTMoELightning(config.model, config.optimizer)
    data = TextData(config.data, config.model.context, config.seed)
    data.setup()
    log.event("corpus", source=data.corpus.source, sha256=data.corpus.sha256, windows=len(data.train_windows))
    callbacks: list[Callback] = [Diary(log)]
    if faults is not None:
        callbacks.append(Faults(faults.on_step))
    if isinstance(checkpoint, MoECheckpoint):
        callbacks.append(ExpertDiary(log, checkpoint, max(1, config.trainer.max_steps // DIARY_TABLES)))
    if checkpoint is not None:
        callbacks.append(checkpoint)
    trainer = make_trainer(config.trainer, log, callbacks)
    trainer.fit(module, datamodule=data)
    metrics = trainer.validate(module, datamodule=data, verbose=False)[0]
    result = {
        "val_loss": float(metrics["val_loss"]),
        "parameters": parameter_hash(module),
        "steps": trainer.global_step,
    }
    log.event("finished", **result)
    return result


def run_config(cfg: DictConfig) -> RunConfig:
    """The typed form of a composed config. Raises ``TypeError`` for a key that no field has."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf, open_dict

    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        with open_dict(cfg):
            cfg.run_dir = HydraConfig.get().runtime.output_dir
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return RunConfig(
        run_dir=plain["run_dir"],
        seed=plain["seed"],
        model=GPTMoEConfig(**plain["model"]),
        data=DataConfig(**plain["data"]),
        optimizer=OptimizerConfig(**plain["optimizer"]),
        trainer=TrainerConfig(**plain["trainer"]),
        faults=FaultConfig(**plain["faults"]),
    )


def main(cfg: DictConfig) -> float:
    """Run a composed config; the validation loss, for Hydra's sweepers."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    # Lightning prints its messages itself; passed on to Hydra's handler they would all appear twice.
    logging.getLogger("lightning").propagate = not logging.getLogger("lightning").handlers
    config = run_config(cfg)
    faults = kill_hook(config, OmegaConf.select(cfg, "moe_ckpt.memory.directory"))
    watch_phases(None if faults is None else faults.on_phase)
    saves = "_target_" in (cfg.get("moe_ckpt") or {})  # "~moe_ckpt" on the command line leaves it out
    checkpoint = instantiate(cfg.moe_ckpt) if saves else None
    return float(train(config, checkpoint, faults)["val_loss"])


def command() -> None:
    """Trains by the command line. Hydra exits with 1 after it has printed what is wrong with that."""
    import hydra

    from recipes.gpt_moe_lightning.hints import nearest_key

    words = sys.argv[1:]
    if os.environ.get("RANK", "0") != "0":
        sys.argv.insert(1, "hydra.output_subdir=null")  # the ranks would write the same files at once
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(main)()
    except SystemExit as stopped:
        if stopped.code and (hint := nearest_key(words, CONF)):
            print(hint, file=sys.stderr)
        raise


if __name__ == "__main__":
    command()
