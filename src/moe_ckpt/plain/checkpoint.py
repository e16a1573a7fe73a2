"""The adapter that a PyTorch loop drives: one object, called around each optimizer step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.operators import grid_of
from moe_ckpt.driver.attached import AttachedCheckpoint
from moe_ckpt.driver.guests import GradientLogging
from moe_ckpt.driver.host import Stateful
from moe_ckpt.driver.run import Driver
from moe_ckpt.driver.states import Action, Moment, State
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.modeling.bucket_order import BucketOrder
from moe_ckpt.modeling.moe.discover import build_catalog, find_moe_layers
from moe_ckpt.modeling.moe.routing import RoutingCounter, TrainingPasses
from moe_ckpt.modeling.names import tied_aliases
from moe_ckpt.modeling.rng import capture_rng, restore_rng
from moe_ckpt.modeling.state.trainable import FrozenExperts
from moe_ckpt.plain.host import PlainHost, Position
from moe_ckpt.policies.base import GATE_WEIGHTS, Policy
from moe_ckpt.recovery.recovery_plan import RecoveryPlan
from moe_ckpt.recovery.replay import StepSource
from moe_ckpt.run.events import StepRecord
from moe_ckpt.run.options import Options, OptionValues, make_options
from moe_ckpt.stopwatch import timed

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AGAIN = "resume() was called twice: call it once, before the first step"
_OVER = "call nothing after finish() or close(); to train again, attach again"
_ADVICE = {
    State.OPEN: (
        "resume() was not called, so training would start from scratch and ignore existing checkpoints. Call it before "
        "the first step; to start from scratch, use moe_ckpt.attach(resume='never')"
    ),
    **dict.fromkeys((State.READY, State.WINDOW, State.TRAINING, State.REPLAYING), _AGAIN),
    **dict.fromkeys((State.ENDED, State.CLOSED), _OVER),
}


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
        policy: What is saved when; None: ``CheckFreq()``.
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
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    return PlainCheckpoint(chosen, model, listed, stateful or {})


class PlainCheckpoint(AttachedCheckpoint):
    """Checkpoints one training loop. All ranks call each method, on the training thread.

    Attributes:
        options: As given, checked.
        recovery_plan: Where each operator of the checkpoint that training resumed from came from on this rank; None
            before ``resume``, and for a new run.
        survivors: Seals the newest step when training stops; None without such memory.
        stopwatch: Counts how long this keeps the training thread.

    Args:
        options: Checked.
        model, optimizers, stateful: As of ``attach``.
    """

    def __init__(
        self, options: Options, model: nn.Module, optimizers: Sequence[Optimizer], stateful: Mapping[str, Stateful]
    ) -> None:
        _require_usable(model, optimizers, stateful)
        module = model.module if isinstance(model, DistributedDataParallel) else model
        layers = find_moe_layers(module)
        catalog = build_catalog(module, layers)
        options.policy.check(catalog)
        self.options = options
        self.recovery_plan: RecoveryPlan | None = None
        on_device = torch.cuda.is_available()
        comm = make_communicator(options.timeout_secs, late=on_device)
        self._host = PlainHost(module, optimizers, stateful, comm.world_size)
        self._driver = Driver(self._host, options, "step", _ADVICE)
        self.stopwatch = stopwatch = self._driver.stopwatch
        passes = TrainingPasses()
        passes.in_batch = True  # a forward pass in eval mode is training's if it records gradients
        frozen = None
        if options.needs.partial:
            frozen = FrozenExperts(catalog, lambda: self._host.state.parameters(described=True))
        soft = options.needs.popularity == GATE_WEIGHTS
        self._counter = RoutingCounter(module, layers, soft=soft, frozen=frozen, passes=passes, stopwatch=stopwatch)
        try:
            boost = None
            if options.needs.boost is not None:
                from moe_ckpt.boost.life import Boosting
                from moe_ckpt.boost.ports import boost_ports

                ports = boost_ports(layers, None, passes)
                grid = grid_of([layer.info for layer in layers])
                boost = Boosting(options.needs.boost, ports, grid, comm, stopwatch)
            survivors = None
            if options.memory is not None and options.memory.sealing_secs:
                from moe_ckpt.survivors.stopping import survivors_of

                survivors = functools.partial(survivors_of, secs=options.memory.sealing_secs, unit="step")
            self._driver.open(
                comm,
                catalog,
                self._host.state,
                aliases=tied_aliases(module),
                boost=boost,
                survivors=survivors,
                open_log=functools.partial(_open_log, optimizers, module, self._driver),
                pinned=on_device,
                local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            )
        except BaseException:
            self._counter.close()  # a caller may catch this and train without checkpoints
            self._driver.close(0.0)
            raise
        self.survivors = self._driver.survivors
        self._buckets = BucketOrder.of(model, comm.world_size)
        self._updates = self._applied = 0
        self._optimizers, self._stepped = len(optimizers), set[int]()
        self._undo: list[Callable[[], None]] = []
        for optimizer in optimizers:
            before, after = stopwatch.around(self._before_update), stopwatch.around(self._updated)
            self._undo.append(optimizer.register_step_pre_hook(before).remove)
            self._undo.append(optimizer.register_step_post_hook(after).remove)

    # --- once, before training ---

    def resume(self) -> Position:
        """Resumes from the newest checkpoint that all ranks can load. Once, before ``iter(loader)``.

        When it returns, tensors, optimizers, ``stateful`` objects and random number generators are restored. From a
        sparse window (MoEvement) training resumes at the window's first step, and the loop computes the steps up to its
        last again, exactly.

        Returns:
            The position at which the loop goes on.

        Raises:
            NoCheckpointError: There are checkpoints, but none that can be used.
            ConfigError: The checkpoint and this run contradict each other.
        """
        driver, host = self._driver, self._host
        driver.resume()
        restored = driver.restored
        self.recovery_plan = None if restored is None else restored.plan
        if restored is not None:
            host.generators.put_back()
            for name, loader in host.stateful.items():
                state = restored.plain["stateful"][name]
                is_at_end = isinstance(state, Mapping) and state.get("_iterator_finished")
                if isinstance(loader, DataLoader) and not is_at_end:  # the next epoch's seed is due in both
                    self._iterate_quietly(loader)
        if driver.replaying is not None:
            driver.replaying.begin(StepSource())
        if self._buckets is not None and host.step:
            self._buckets.arrange(host.buckets)
        driver.begin(new=restored is None)
        return host.progress

    def _iterate_quietly(self, loader: DataLoader[Any]) -> None:
        """Lets the first iterator of a loader that continues an epoch draw no random number of the run.

        A new iterator draws its seed from torch's generator. The run drew it when the epoch began.
        """
        theirs = loader._get_iterator

        def first() -> Any:
            loader.__dict__.pop("_get_iterator", None)
            before = capture_rng()
            iterator = theirs()
            restore_rng(before)
            return iterator

        loader._get_iterator = first  # type: ignore[method-assign]
        self._undo.append(lambda: loader.__dict__.pop("_get_iterator", None))

    # --- every step ---

    @timed
    def before_step(self) -> None:
        """Waits for the copy under way, which reads what the optimizer changes. Called by ``optimizer.step()``.

        Call it where something else changes weights, before or instead of ``optimizer.step()``, and before they are
        moved to another device.

        Raises:
            ConfigError: ``resume`` was not called, or ``finish`` or ``close`` was.
        """
        self._before_update()

    def _before_update(self, *_: Any) -> None:
        self._driver.lifecycle.require(Action.JOIN, "optimizer.step()")
        if not self._updates:
            self._driver.before_update()
        self._counter.update_begins()
        self._updates += 1

    def _updated(self, optimizer: Any, *_: Any) -> None:
        # A fused optimizer is handed the loss scale, and leaves out an overflow by itself, on the device.
        self._applied += getattr(optimizer, "found_inf", None) is None
        self._stepped.add(id(optimizer))
        if self._driver.replaying is not None and len(self._stepped) == self._optimizers:
            self._driver.replaying.put_back(self._host.step + 1)  # before the loop averages or evaluates the weights
        self._driver.note(Moment.WRITTEN)

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
        if not self._updates:
            self._driver.before_update()
        if self._buckets is not None:
            self._buckets.note()
            self._host.buckets = self._buckets.recorded
        self._host.step_to(step, counters)
        updated = bool(self._applied) if updated is None else updated
        self._updates = self._applied = 0
        self._stepped.clear()
        return self._driver.after_update(self._counter.take(), updated=updated)

    @timed
    def save(self, *, wait: bool = True) -> bool:
        """Saves a complete checkpoint of the newest step, whatever the policy. Call it after ``after_step``.

        Args:
            wait: Wait until it is committed; else it is written during training, as any other.

        Returns:
            Whether there is one. False in a replay, when the model holds no complete state of the run.

        Raises:
            ConfigError: An optimizer stepped since, and ``after_step`` was not called yet.
            SaveFailedError: It could not be committed, or not in time.
        """
        self._require_counted("save()")
        return self._driver.save(wait=wait)

    def _require_counted(self, call: str) -> None:
        if self._updates and not self.replaying:
            raise ConfigError(
                f"{call}: an optimizer stepped since step {self._host.step}, and after_step({self._host.step + 1}) was "
                "not called, so nothing can be saved under its own number. Call it first"
            )

    # --- once, at the end ---

    def finish(self, *, ended: bool = True) -> None:
        """Training ended without an error: saves a complete last checkpoint, and waits for it.

        Safe to call twice. Leaving a ``with`` block calls it.

        Args:
            ended: The run is finished, and a later start says so. False for a job that another one continues.

        Raises:
            ConfigError: An optimizer stepped since the newest step, and ``after_step`` was not called yet.
            SaveFailedError: It could not be committed.
        """
        if self._driver.lifecycle.state is State.ENDED:
            return
        self._require_counted("finish()")
        self._end(moved=self._host.moved, ended=ended)

    def _release(self) -> None:
        self._counter.close()
        while self._undo:
            self._undo.pop()()


def _open_log(optimizers: Sequence[Optimizer], module: nn.Module, driver: Driver) -> GradientLogging:
    from moe_ckpt.gradient_log.lightning import loop_log

    return loop_log(optimizers, module, driver)


def _require_usable(model: nn.Module, optimizers: Sequence[Optimizer], stateful: Mapping[str, Stateful]) -> None:
    """Raises unless all of it can be saved and restored."""
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
    if not isinstance(stateful, Mapping):
        raise ConfigError(
            f"moe_ckpt.attach(stateful={type(stateful).__name__}): give the objects by name, as in "
            "stateful={'lr': scheduler}, so that a restart finds each again"
        )
    for name, target in stateful.items():
        if not (hasattr(target, "state_dict") and hasattr(target, "load_state_dict")):
            advice = " Use torchdata's StatefulDataLoader" if isinstance(target, DataLoader) else ""
            raise ConfigError(
                f"moe_ckpt.attach(stateful={{{name!r}: ...}}): {type(target).__name__} lacks state_dict or "
                f"load_state_dict, so it cannot be restored.{advice or ' Give it both, or leave it out'}"
            )
