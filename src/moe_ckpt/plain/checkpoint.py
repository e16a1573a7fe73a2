"""The adapter of PyTorch loops: one object, which the loop calls around each optimizer step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from moe_ckpt.driver.attached import UNCOUNTED, AttachedCheckpoint
from moe_ckpt.driver.host import GradientLogging, Stateful
from moe_ckpt.driver.states import Action, Moment
from moe_ckpt.driver.torch_model import open_torch
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.modeling.routing import TrainingPasses
from moe_ckpt.modeling.updates import Updates
from moe_ckpt.plain.host import PlainHost, Position, torch_loader, torch_model, torch_optimizer
from moe_ckpt.policies.base import Policy
from moe_ckpt.run.events import StepRecord
from moe_ckpt.run.options import Options, OptionValues, make_options
from moe_ckpt.stopwatch import timed

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attach(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    policy: Policy | None = None,
    dirpath: str | os.PathLike[str] = "checkpoints",
    stateful: Mapping[str, Stateful] | None = None,
    **options: Unpack[OptionValues],
) -> PlainCheckpoint:
    """Checkpoints a PyTorch training loop. A collective of all ranks, called when model and optimizers are complete.

    Args:
        model: The model: as it is, in ``DistributedDataParallel``, sharded by ``fully_shard`` (FSDP2), compiled or not.
        optimizers: All torch optimizers that update it.
        policy: Decides what is saved at which step. None: ``CheckFreq()``.
        dirpath: The store, a directory that all ranks see, or an fsspec URL. One run per store.
        stateful: Objects that are saved besides, by name: schedulers, a gradient scaler, a data loader with
            ``state_dict`` (torchdata's ``StatefulDataLoader``). Plain data and tensors only.
        **options: See ``moe_ckpt.run.options.Options``. ``resume="never"`` starts with the model as it is.

    Raises:
        UnsupportedError: The model is sharded in a way in which no expert can be saved alone (FSDP1).
        ConfigError: An object of ``stateful`` cannot be saved, or options contradict each other.
        StoreError: The directory cannot be used.
    """
    chosen = make_options("moe_ckpt.attach", policy, dirpath, options, ("stateful",))
    is_one = isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable)
    listed: list[Any] = [optimizers] if is_one else list(optimizers)  # type: ignore[arg-type]
    return PlainCheckpoint(chosen, model, listed, stateful or {})


class PlainCheckpoint(AttachedCheckpoint):
    """Checkpoints one training loop. All ranks call each method, on the training thread.

    Attributes:
        options: As given, checked.
        stopwatch: Counts how long checkpointing keeps the training thread.

    Args:
        options: Checked.
        model, optimizers, stateful: As of ``attach``.
    """

    _host: PlainHost

    def __init__(
        self, options: Options, model: nn.Module, optimizers: Sequence[Optimizer], stateful: Mapping[str, Stateful]
    ) -> None:
        model, optimizers = torch_model(model), [torch_optimizer(optimizer) for optimizer in optimizers]
        _require_usable(model, optimizers)
        self._uses_lbfgs = any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers)
        if not isinstance(stateful, Mapping):
            raise ConfigError(
                f"moe_ckpt.attach(stateful={type(stateful).__name__}): give the objects by name, as in "
                "stateful={'lr': scheduler}, so that a restart finds each again"
            )
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        stateful = {name: torch_loader(name, target) for name, target in stateful.items()}
        super().__init__(PlainHost(model, optimizers, stateful, ranks), options)
        if options.needs.windows:
            self._require_repeatable()

        def open_log() -> GradientLogging:
            from moe_ckpt.gradient_log.recording import loop_log

            return loop_log(optimizers, self._host.module, self._driver)

        passes = TrainingPasses()
        passes.in_batch = True  # a forward pass in eval mode is training's if it records gradients
        self._counter = open_torch(
            self._driver,
            self._host.module,
            self._host.state,
            passes,
            on_device=torch.cuda.is_available(),
            open_log=open_log,
            local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        self._updates, self._applied = 0, Updates()  # since the newest step
        self._optimizers = len(optimizers)
        self._stepped = 0  # updates made since the newest step
        self._modules = frozenset(self._host.module.modules())
        self._refusing: RemovableHandle | None = None
        self._warns_of_position = all(isinstance(target, _WITHOUT_POSITION) for target in stateful.values())
        self._undo.callback(self._counter.close)
        self._undo.callback(self._admit_passes)
        for optimizer in optimizers:
            self._undo.callback(optimizer.register_step_pre_hook(self._before_update).remove)
            self._undo.callback(optimizer.register_step_post_hook(self._updated).remove)

    # --- once, before training ---

    def resume(self, *, step: int = 0) -> Position:
        """Resumes from the newest checkpoint that all ranks can load. Once, before ``iter(loader)``.

        When it returns, tensors, optimizers, ``stateful`` objects and random number generators are restored. From a
        sparse window (MoEvement) training resumes at the window's first step, and the loop computes the steps up to its
        last again, exactly.

        Args:
            step: Steps that the loop has done already, used if the store has no checkpoint yet.

        Returns:
            The position at which the loop goes on.

        Raises:
            NoCheckpointError: There are checkpoints, but none that can be used.
            ConfigError: The checkpoint and this run contradict each other, or a data loader is being iterated.
        """
        driver, host, loop = self._driver, self._host, self._host.loop
        for name, loader in host.stateful.items():
            _require_not_iterated(name, getattr(loader, "loader", loader))
        loop.set_position(step, {})
        driver.resume()
        restored = driver.restored
        if driver.replaying is not None:
            self._require_repeatable()
        elif host.buckets.inexact is not None:
            driver.say.inexact(f"a resume will not be exact: {host.buckets.inexact}")
        host.generators.restore_scheduled()
        if restored is not None:
            self._quieten_loaders()
            driver.say.passed_over(host.step, step)
            if host.step:
                host.buckets.arrange()
        driver.begin(new=driver.restored_step is None)
        return Position(loop.step, restored is not None, loop.counters)

    def restore_generators(self) -> None:
        """Restores the random numbers of the newest step again, if the loop has drawn some before its first batch."""
        self._host.generators.restore_newest()

    # --- every step ---

    def before_step(self) -> None:
        """Waits for the copy under way, which reads the weights. ``optimizer.step()`` calls it.

        Call it if other code changes weights, before or instead of ``optimizer.step()``, and before they are moved to
        another device.

        Raises:
            ConfigError: ``resume`` was not called, or ``finish`` or ``close`` was.
        """
        self._before_update()

    @timed
    def _before_update(self, *_: Any) -> None:
        self._driver.lifecycle.require(Action.JOIN, "optimizer.step()")
        if not self._host.loop.is_updating:
            self._driver.before_update()
        self._counter.update_begins()
        self._host.loop.is_updating = True
        self._updates += 1
        if self._updates == UNCOUNTED * self._optimizers:
            self._driver.say.uncounted(self._host.step, self._updates)

    @timed
    def _updated(self, optimizer: Any, *_: Any) -> None:
        self._applied.note(optimizer)
        self._stepped += 1
        replaying = self._driver.replaying
        if replaying is not None and self._stepped == replaying.recorded.get("stepped", self._optimizers):
            replaying.put_back(self._host.step + 1)  # before the loop averages or evaluates the weights
        if self._refusing is None and (replaying is not None or self._driver.options.needs.windows):
            self._refusing = register_module_forward_pre_hook(self._refuse_pass)
        self._driver.note(Moment.WRITTEN)

    def _require_repeatable(self) -> None:
        """Raises ``ConfigError`` unless the steps of a sparse window can be computed again exactly."""
        if self._uses_lbfgs:
            raise ConfigError(f"{_INEXACT}LBFGS computes passes within its update. Use another optimizer, Dense or MoC")
        if self._host.buckets.inexact is not None:
            raise ConfigError(
                "steps of a sparse window (MoEvement) are computed again after a failure, so a resume must be exact, "
                f"and this one would not be: {self._host.buckets.inexact}. Or use GradientLog, Dense or MoC"
            )

    def _refuse_pass(self, module: nn.Module, _: Any) -> None:
        if module in self._modules and module.training and torch.is_grad_enabled():
            self._admit_passes()
            raise ConfigError(
                f"{_INEXACT}a forward pass in training mode begins after optimizer.step(). Step the optimizers after "
                "the last backward pass and call after_step then; or use GradientLog, Dense or MoC"
            )

    def _admit_passes(self) -> None:
        refusing, self._refusing = self._refusing, None
        if refusing is not None:
            refusing.remove()

    @timed
    def after_step(
        self, step: int, *, updated: bool | None = None, counters: Mapping[str, Any] | None = None
    ) -> StepRecord:
        """Counts the tokens, and starts a checkpoint if one is due. Call it after optimizer and schedulers.

        Args:
            step: Steps done, this one included.
            updated: False if weights did not change, so the step's tokens do not count. None: False if no optimizer
                stepped since, as after an overflow that a gradient scaler skips.
            counters: Values that ``resume`` returns (``Position.counters``), such as an epoch: plain data by name.
                None: unchanged.

        Raises:
            ConfigError: Steps are not counted one by one, or ``resume`` was not called.
            ReplayDivergedError: A replayed step differs from the recorded one.
        """
        self._driver.lifecycle.require(Action.STEP, "after_step()")
        self._admit_passes()
        if counters is None and self._warns_of_position:
            self._warns_of_position = False
            self._driver.say.no_position()
        if not self._host.loop.is_updating:
            self._driver.before_update()
        self._host.buckets.note()
        self._host.loop.count("after_step", step, counters)
        self._updates, applied = 0, self._applied.take()
        self._host.stepped, self._stepped = self._stepped, 0
        return self._driver.after_update(self._counter.take(), updated=applied if updated is None else updated)


def _require_usable(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raises unless both can be saved and restored."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"moe_ckpt.attach: {type(model).__name__} is no torch.nn.Module. Give the model, and then its optimizers"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            "moe_ckpt.attach: the model is sharded by FullyShardedDataParallel (FSDP1), whose flat parameters mix "
            "experts, so no expert can be saved alone. Shard it with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if not optimizers:
        raise ConfigError("moe_ckpt.attach: give the optimizer, or all of them in a list")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"moe_ckpt.attach: {type(optimizer).__name__} is no torch.optim.Optimizer. Give the optimizer that a "
                "wrapper holds, which is the one that updates parameters"
            )


_INEXACT = (
    "steps of a sparse window (MoEvement) are computed again after a failure, which needs all passes of a step to come "
    "before its updates, since others read weights that are not restored yet; but "
)
_WITHOUT_POSITION = (LRScheduler, torch.amp.GradScaler, nn.Module, Optimizer)
"""Types of objects in ``stateful`` that know no position in the data."""
_OWN_REFERENCES = 3
"""References to an iterator that is not in use: the loader's, and two of ``_require_not_iterated``."""


def _require_not_iterated(name: str, loader: Any) -> None:
    """Raises if an iterator of a data loader is in use, since it would not get the restored position."""
    iterator = getattr(loader, "_iterator", None) if isinstance(loader, DataLoader) else None
    if iterator is not None and sys.getrefcount(iterator) > _OWN_REFERENCES:
        raise ConfigError(
            f"resume(): the data loader stateful={{{name!r}: ...}} is being iterated, and an iterator keeps its own "
            "position in the data. Call resume() before iter(loader), and before the loop over it"
        )
