"""The host of a Lightning trainer: its step, and its plain state, read and restored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from moe_ckpt.callbacks.finished import continue_finished, ended
from moe_ckpt.callbacks.lightning_state import (
    HYPER_PARAMETERS,
    capture_checkpoint,
    check_state,
    plain_hparams,
    restore_checkpoint,
)
from moe_ckpt.callbacks.loop_position import count_steps
from moe_ckpt.driver.changes import (
    Change,
    Groups,
    differing,
    groups_of,
    optimizer_changes,
    plain_values,
    same,
    schedules_of,
    trainable_changes,
)
from moe_ckpt.driver.host import End
from moe_ckpt.driver.torch_model import TorchHost
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.format.run_records import Finished
from moe_ckpt.modeling.names import is_compiled
from moe_ckpt.modeling.routing import TrainingPasses
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.recovery.executing import Restored, rank_of_state
from moe_ckpt.recovery.replay import Repeated
from moe_ckpt.recovery.resume import other_ranks
from moe_ckpt.run.options import Options

if TYPE_CHECKING:
    from moe_ckpt.windows.lightning import Windows

_Plain = Mapping[str, Any]


class LightningHost(TorchHost):
    """The trainer of one fit, from ``on_fit_start`` on.

    Args:
        trainer: The trainer.
        module: The model.
        options: Of the run.
        count_update: See ``driver.host.Host``.

    Attributes:
        windows: Checks of sparse windows; None if none is written or replayed.
        passes: Tells which forward passes are training's.
        settled: The newest batch made a step, so no accumulated gradients wait for another batch.
        ended: Training ended without an exception.
    """

    module: pl.LightningModule

    def __init__(
        self, trainer: Any, module: pl.LightningModule, options: Options, count_update: Callable[[], bool]
    ) -> None:
        super().__init__(module, trainer.optimizers)
        self._count_update = count_update
        self.trainer = trainer
        self.windows: Windows | None = None
        self.passes = TrainingPasses()
        self.settled, self.ended = True, False
        self._options = options
        frozen = hashlib.sha256("\n".join(_untrained(self.state)).encode()).hexdigest()[:16]
        self._configured = configured(trainer) | {"frozen": frozen}
        self._retained_state: tuple[int, _Plain] | None = None

    @property
    def step(self) -> int:
        return int(self.trainer.global_step)

    def admits(self, manifest: Manifest, plain: _Plain) -> None:
        rank = rank_of_state(manifest, self.trainer.global_rank)
        check_state(self.trainer, plain, state_path(manifest.slots[0].directory, rank))
        began = [len(groups) for groups in plain["configured"]["optimizers"]]
        self.state.add_stored_groups(plain["plain"], began)

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        plain = restored.plain
        same = plain["configured"]["frozen"] == self._configured["frozen"]  # then training itself has frozen or thawed
        thawed = [] if same else trainable_changes(plain["plain"]["frozen"], _untrained(self.state))
        self._load_model(plain, restored.path)
        differences = changes(self.trainer, plain, self._configured) + thawed
        self._configured = plain["configured"]
        restore_checkpoint(self.trainer, plain["checkpoint"], restored.path)
        return differences, other_ranks(restored.manifest, self.trainer.world_size)

    @property
    def _scheduled(self) -> Iterable[Any]:
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return [*schedulers, getattr(self.trainer.precision_plugin, "scaler", None)]

    def _count_from(self, step: int) -> None:
        count_steps(self.trainer, step)

    def continue_finished(
        self, manifest: Manifest, finished: Finished, differences: Sequence[Change], plt: float
    ) -> tuple[bool, str]:
        return continue_finished(self.trainer, self._options, manifest, finished, differences, plt), ""

    def repeated(self, before: _Plain, recorded: _Plain) -> Iterable[Repeated]:
        return *super().repeated(before, recorded), *_REPEATED

    def capture(self, *, described: bool = False) -> _Plain:
        if self._retained_state is not None and self._retained_state[0] == self.step:
            return self._retained_state[1]
        return {
            "framework": "lightning",
            "checkpoint": capture_checkpoint(self.trainer),
            "plain": self.state.plain(described=described),
            "rng": self.generators.state,
            "configured": self._configured,
        }

    def keep(self) -> None:
        """Keeps the plain state of this step: Lightning and callbacks may change it before training ends."""
        self._retained_state = self.step, deepcopy(self.capture())

    @property
    def has_newest_state(self) -> bool:
        """Returns whether the newest step's plain state is still known, so that a checkpoint of it can be made now."""
        return self.settled or (self._retained_state is not None and self._retained_state[0] == self.step)

    def count_update(self) -> bool:
        return self._count_update()

    def end(self) -> End | None:
        return ended(self.trainer)


_REPEATED: tuple[Repeated, ...] = (
    ("the state of the learning rate schedulers", lambda state: state["checkpoint"]["lr_schedulers"]),
    (
        "the number of batches",
        lambda state: state["checkpoint"]["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"],
    ),
)


def configured(trainer: Any) -> dict[str, Any]:
    """Returns the script's hyperparameters of optimizers and schedulers, as plain data.

    Called before those of a checkpoint replace them, to be compared with the result at the beginning of the run.
    """
    return {
        "optimizers": groups_of(trainer.optimizers),
        "schedulers": [plain_values(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "training": _training(trainer),
    }


def _training(trainer: Any) -> dict[str, Any]:
    """Returns further settings that decide which steps are made, and by which programs."""
    scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    return {
        **({} if scheduled else {"accumulate_grad_batches": trainer.accumulate_grad_batches}),
        "limit_train_batches": trainer.limit_train_batches,
        "schedules": [name for config in trainer.lr_scheduler_configs for name in schedules_of(config.scheduler)],
        "gradient_clip_val": trainer.gradient_clip_val,
        "precision": str(trainer.precision),
        "torch.compile": is_compiled(trainer.lightning_module),
    }


def _untrained(state: TorchTrainingState) -> list[str]:
    return sorted(name for name, parameter in state.parameters().items() if not parameter.requires_grad)


def changes(trainer: Any, stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Returns the differences between a checkpoint and this script, in the script's order.

    Args:
        trainer: Of this script, with optimizers as they are in the checkpoint.
        stored: Plain state of the checkpoint.
        now: Result of ``configured``.
    """
    differences: list[Change] = []
    checkpoint, before = stored["checkpoint"], stored["configured"]
    for name, owner, key in zip(
        ("module", "datamodule"), (trainer.lightning_module, trainer.datamodule), HYPER_PARAMETERS, strict=True
    ):
        if owner is not None and key in checkpoint:
            differences += differing(f"{name}.", checkpoint[key], plain_hparams(owner, key), from_checkpoint=False)
    optimizers = before["optimizers"]
    if not before["schedulers"]:  # else the present values are the schedulers'
        facts = zip(optimizers, now["optimizers"], groups_of(trainer.optimizers), strict=False)
        optimizers = [_in_force(*of_one) for of_one in facts]
    differences += optimizer_changes(optimizers, now["optimizers"])
    for old, new in zip(before["schedulers"], now["schedulers"], strict=False):
        old, new = ({key: value for key, value in settings.items() if key != "base_lrs"} for settings in (old, new))
        differences += differing("scheduler ", old, new, from_checkpoint=True, decides=False)
    differences += differing("trainer ", before["training"], now["training"], from_checkpoint=False, decides=False)
    return differences


def _in_force(before: Groups, now: Groups, groups: Groups) -> Groups:
    """Returns ``before``; values that differ from the script's are replaced by those that training had set since."""
    in_force: list[Mapping[str, Any]] = []
    for old, new, group in zip(before, now, groups, strict=False):
        set_since = {key: group[key] for key in old if key in group and not same(old[key], new.get(key))}
        in_force.append({**old, **set_since})
    return in_force
