"""The adapter that a Megatron training loop drives: one object, called around each optimizer step."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.operators import grid_of
from moe_ckpt.driver.attached import UNCOUNTED, AttachedCheckpoint
from moe_ckpt.driver.host import GradientLogging, Stateful
from moe_ckpt.driver.states import Action
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.megatron.compat import runs_on_samples
from moe_ckpt.megatron.host import MegatronHost, Progress, all_stateful, unmoved_by_captures
from moe_ckpt.megatron.inventory import ModelInventory, chunks_of, take_inventory, unwrap_module
from moe_ckpt.megatron.optimizers import StepWatch, exchange_norm_groups, inner_optimizers, require_weights_gathered
from moe_ckpt.megatron.routing import RouterCounter
from moe_ckpt.megatron.training_state import MegatronTrainingState
from moe_ckpt.megatron.world import local_ranks, require_groups
from moe_ckpt.notices import announce
from moe_ckpt.policies.base import GATE_WEIGHTS, Policy
from moe_ckpt.ports import Communicator
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.events import Observer, StepRecord
from moe_ckpt.run.options import Options, OptionValues, make_options
from moe_ckpt.stopwatch import timed

if TYPE_CHECKING:
    from typing_extensions import Unpack


def attach(
    model_chunks: Sequence[nn.Module] | nn.Module,
    optimizer: Any,
    scheduler: Stateful | None = None,
    *,
    policy: Policy | None = None,
    dirpath: str | os.PathLike[str] = "checkpoints",
    stateful: Mapping[str, Stateful] | None = None,
    **options: Unpack[OptionValues],
) -> MegatronCheckpoint:
    """Checkpoints a Megatron training loop. A collective of all ranks, called when model and optimizer are complete.

    Args:
        model_chunks: This rank's model, or its chunks under interleaved pipelining, wrapped (DDP, Float16Module) or
            not.
        optimizer: The optimizer that ``get_megatron_optimizer`` made for these chunks.
        scheduler: The ``OptimizerParamScheduler``, or any object with ``state_dict`` and ``load_state_dict``.
        policy: Decides what is saved at which step. None: ``CheckFreq()``.
        dirpath: The store, a directory that all ranks see, or an fsspec URL. One run per store.
        stateful: Further objects to save, by name, such as a data loader: plain data and tensors only.
        **options: See ``moe_ckpt.run.options.Options``. ``resume="never"`` starts with the model as it is.

    Raises:
        MissingPackageError: Megatron-Core is not installed.
        UnsupportedError: An unknown optimizer, expert container or version; or ``state_from`` is set.
        CoverageError: The ranks together do not hold every expert and every element exactly once.
        ConfigError: Process groups are not set up, or settings contradict each other.
        StoreError: The directory cannot be used.
    """
    chosen = megatron_options("megatron.attach", policy, dirpath, options)
    return MegatronCheckpoint(chosen, model_chunks, optimizer, scheduler, stateful or {})


def megatron_options(
    where: str, policy: Policy | None, dirpath: str | os.PathLike[str], values: OptionValues
) -> Options:
    """Returns the checked options of a run under Megatron. Arguments: ``make_options``.

    Raises:
        ConfigError: An unknown option, or a value that cannot be.
        UnsupportedError: ``state_from`` is set.
    """
    chosen = make_options(where, policy, dirpath, values, ("stateful",))
    if chosen.state_from is not None:
        raise UnsupportedError(
            f"{where}(state_from={chosen.state_from!r}): Megatron's optimizers keep state of another form than those "
            "of Lightning, transformers, torchtitan and PyTorch loops. Set weights_from= to begin from weights alone"
        )
    return chosen


class MegatronCheckpoint(AttachedCheckpoint):
    """Checkpoints one training loop. All ranks call each method, on the training thread.

    Attributes:
        options: As given, checked.
        policy: The policy.
        dirpath: Directory or URL of the store.
        metrics: The torchmetrics of ``moe_ckpt.metrics`` for this rank in this process, updated at each step; None if
            torchmetrics is not installed.
        stopwatch: Counts how long checkpointing keeps the training thread.
        upstream: Logs the messages over the boundaries of this rank's stage; None without
            ``Memory(upstream_bytes=...)``.

    Args:
        options: Checked.
        model_chunks, optimizer, scheduler, stateful: As of ``attach``.
        count_update: ``driver.host.Host.count_update`` of a loop.
    """

    _host: MegatronHost

    def __init__(
        self,
        options: Options,
        model_chunks: Sequence[nn.Module] | nn.Module,
        optimizer: Any,
        scheduler: Stateful | None,
        stateful: Mapping[str, Stateful],
        count_update: Callable[[], bool] = lambda: False,
    ) -> None:
        require_groups()
        chunks, objects = chunks_of(model_chunks), all_stateful(scheduler, stateful)
        exchange_norm_groups(optimizer)
        if options.needs.windows or options.needs.gradients:
            require_weights_gathered(optimizer)
        inventory = take_inventory(chunks)
        comm = make_communicator(options.timeout_secs, late=torch.cuda.is_available())
        with ExitStack() as failing:  # a caller may catch an error and train without checkpoints
            failing.callback(comm.close)
            state = MegatronTrainingState(inventory, optimizer, comm)
            super().__init__(MegatronHost(chunks, state, optimizer, objects, count_update), options)
            failing.callback(self.close, 0.0)
            self._chunks, self.policy, self.dirpath = chunks, options.policy, options.dirpath
            self._open(comm, inventory, optimizer)
            failing.pop_all()
        self._watch = StepWatch(
            optimizer,
            inner_optimizers(optimizer),
            before=self.before_step,
            after=self._stepped,
            note=self._driver.note,
            stopwatch=self.stopwatch,
        )
        self._undo.callback(self._watch.close)
        self._undo.enter_context(unmoved_by_captures())

    def _open(self, comm: Communicator, inventory: ModelInventory, optimizer: Any) -> None:
        """Hooks what counts tokens and watches messages, and opens the store."""
        options, state, chunks = self.options, self._host.state, self._chunks
        world = state.world
        options.policy.check(world.catalog)
        world.require_updates()
        self._counter = RouterCounter(
            [(world.numbers[layer.name], layer.router) for layer in inventory.layers],
            *grid_of(world.layers),
            chunks=[unwrap_module(chunk) for chunk in chunks],
            soft=options.needs.popularity == GATE_WEIGHTS,
            frozen=world.frozen_experts,
            stopwatch=self.stopwatch,
        )
        self._undo.callback(self._counter.close)
        gate = None
        if options.needs.bubbles and len(set(world.stages.values())) > 1:
            from moe_ckpt.bubbles.gate import watch_pipeline

            gate = watch_pipeline(chunks, self._undo)
        boost = None
        if options.needs.boost is not None:
            from moe_ckpt.boost.life import Boosting
            from moe_ckpt.boost.megatron import RouterPort

            ports = {world.numbers[layer.name]: RouterPort(layer.name, layer.router) for layer in inventory.layers}
            boost = Boosting(options.needs.boost, ports, grid_of(world.layers), comm, self.stopwatch)
        self.metrics, observers = _metrics()
        self.upstream = None
        if options.memory is not None and options.memory.upstream_bytes is not None:
            from moe_ckpt.localized.megatron import PipelineStage

            self.upstream = PipelineStage(self._driver, world.stages, chunks)

        def open_log() -> GradientLogging:
            from moe_ckpt.gradient_log.megatron import loop_log

            return loop_log(inventory, optimizer, chunks, self._driver)

        self._driver.open(
            comm,
            world.catalog,
            state,
            placement=world.placement(
                state.dense_peers, experts_apart=not state.shards, expert_peers=state.expert_peers
            ),
            observers=observers,
            boost=boost,
            gate=gate,
            open_log=open_log,
            pinned=torch.cuda.is_available(),
            localized=self.upstream,
            local_ranks=local_ranks(comm),
        )
        if self.upstream is not None:
            self._undo.callback(self.upstream.close)

    @property
    def iteration(self) -> int:
        """The number of iterations done."""
        return self._host.step

    # --- once, before training ---

    def resume(self, otherwise: Callable[[], Progress] | None = None) -> Progress:
        """Resumes from the newest checkpoint that all ranks can load, on this layout or another. Once, before training.

        When it returns, tensors, schedules and counters are restored. Random number generators are restored in
        ``begin_training``, so data loaders and iterators that are built in between may draw from them; on another
        layout they are not restored. From a sparse window (MoEvement) training resumes at the window's first step, and
        the loop computes the steps up to its last again, exactly.

        Args:
            otherwise: Called on all ranks if no checkpoint is loaded: loads the state with which the run starts, for
                instance by ``import_torch_dist``, and returns its position. None to start with the model as it is.

        Raises:
            NoCheckpointError: There are checkpoints, but none that can be used.
            ConfigError: The checkpoint and this run contradict each other.
        """
        loop = self._host.loop

        def begin(load: Callable[[], Progress]) -> None:
            loop.begin_at(load())
            if loop.begun_at.restored:
                self._host.generators.schedule()

        self._driver.resume(None if otherwise is None else functools.partial(begin, otherwise))
        if self.upstream is not None:
            self.upstream.resumed(self.iteration)
        self._undo.callback(on_first_forward(self._chunks, self.begin_training).remove)
        if self._driver.restored is not None:
            self._quieten_loaders()
        return loop.begun_at

    def begin_training(self) -> None:
        """Restores the random number generators: the second phase of ``resume``.

        A hook calls it before the first training forward pass. Call it earlier if the first iteration draws random
        numbers before that, as a dataset may when it is read. Later calls do nothing.

        Raises:
            ConfigError: ``resume`` was not called.
        """
        lifecycle, generators = self._driver.lifecycle, self._host.generators
        if lifecycle.is_training:
            return
        lifecycle.require(Action.BEGIN, "begin_training()")
        if self.upstream is not None:
            self.upstream.boundary.begin()
        generators.restore_scheduled()
        generators.record()
        # Pipeline stages arrive one after the other, so none may wait for the others here.
        self._driver.begin(new=self._driver.restored_step is None, wait=False)

    def _epoch_begins(self) -> None:
        if self._driver.lifecycle.allows(Action.BEGIN):
            self.begin_training()

    # --- every iteration ---

    @timed
    def before_step(self) -> None:
        """Waits for the copy under way, which reads what the optimizer changes. Called by ``optimizer.step()``.

        Call it where something else changes weights, before or instead of ``optimizer.step()``.

        Raises:
            ConfigError: ``resume`` was not called, or ``finish`` or ``close`` was, or no forward pass was seen.
        """
        self._driver.lifecycle.require(Action.JOIN, "before_step()")
        self._require_begun()
        self._driver.before_update()
        self._host.loop.is_updating = True

    def _require_begun(self) -> None:
        """Begins training if it has not begun. Raises ``ConfigError`` if it is too late for that."""
        if not self._driver.lifecycle.allows(Action.BEGIN):
            return
        if self._host.generators.due or (self._driver.restored_step is None and self.options.needs.windows):
            raise ConfigError(
                "no training forward pass of the model that was given to megatron.attach was seen before this "
                "optimizer step, so random number generators were not restored in time. If the model is in eval mode, "
                "call model.train(); else call begin_training() between resume() and the first forward pass"
            )
        self.begin_training()

    def _stepped(self) -> None:
        """Runs after ``optimizer.step()``. In a replay it loads the window's weights, which a validation may read."""
        if self._driver.replaying is not None:
            self._driver.replaying.put_back(self.iteration + 1)
        if self._driver.gradients is not None:
            self._driver.gradients.copies_written()
        if self._watch.steps == UNCOUNTED:
            self._driver.say.uncounted(self.iteration, UNCOUNTED)

    @timed
    def after_step(
        self,
        iteration: int,
        *,
        consumed_samples: int | None = None,
        updated: bool | None = None,
        counters: Mapping[str, Any] | None = None,
    ) -> StepRecord:
        """Counts the tokens, and starts a checkpoint if one is due. Call it after ``optimizer.step()`` and the
        scheduler.

        Args:
            iteration: Iterations done, this one included.
            consumed_samples: Training samples consumed so far; ``resume`` returns it. None: unchanged, with a warning.
            updated: False if fp16 overflowed and the step was skipped, so its tokens do not count. None: the value that
                ``optimizer.step()`` returned on this rank.
            counters: Further values that ``resume`` returns (``Progress.counters``): plain data by name, which a replay
                does not compare. None: unchanged.

        Raises:
            ConfigError: No optimizer step came before, or iterations are not counted one by one.
        """
        self._require_begun()
        self._driver.lifecycle.require(Action.STEP, "after_step()")
        updated = self._watch.updated if updated is None else updated
        tokens = end_iteration(self, iteration, consumed_samples, counters, updated=updated)
        if self.upstream is not None:
            self.upstream.step_ends()  # before anything may end the process, or raise
        record = self._driver.after_update(tokens, updated=updated)
        if self.upstream is not None:
            self.upstream.step_begins(iteration + 1)
        return record

    @timed
    def skip(
        self, iteration: int, consumed_samples: int | None = None, *, counters: Mapping[str, Any] | None = None
    ) -> None:
        """Counts an iteration that consumed data, but computed and changed nothing; call it instead of ``after_step``.

        The iteration gets no checkpoint; that of the next one includes its position in the data.

        Args:
            iteration: As of ``after_step``.
            consumed_samples: As of ``after_step``.
            counters: As of ``after_step``.

        Raises:
            ConfigError: As ``after_step``; or the iteration's ``optimizer.step()`` has changed weights.
            ReplayDivergedError: The iteration was computed before the failure, and is needed again.
        """
        self._driver.lifecycle.require(Action.JOIN, "skip()")
        self.begin_training()
        self._driver.require_skipped(iteration)
        if self._watch.updated:
            self._host.loop.require_counted(f"skip({iteration})")
        self._watch.iteration_ends(self._driver.options)
        self.discard_tokens()  # of passes whose update an overflow left out
        self._host.loop.count_iteration("skip", iteration, consumed_samples, counters)
        self._host.generators.record()
        if self.upstream is not None:
            self.upstream.step_begins(iteration + 1)

    @timed
    def discard_tokens(self) -> None:
        """Discards the tokens routed since the last iteration, if Megatron's rerun machine repeats a forward pass."""
        self._counter.discard()
        if self._driver.boost is not None:
            self._driver.boost.discard()

    def _leave_peers(self) -> None:
        if self.upstream is not None:
            self.upstream.boundary.begin()  # others may have to compute steps again, though this rank has none left
            self.upstream.close()


def load_weights(
    model_chunks: Sequence[nn.Module] | nn.Module,
    weights_from: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    strict: bool = True,
    timeout_secs: float = 600.0,
) -> None:
    """Loads weights and buffers into a model, whatever parallel layout they were saved in. A collective of all ranks.

    For a run that is checkpointed, use ``megatron.attach(weights_from=...)`` instead, which does not load them again at
    a restart. With adapters (PEFT): load before they are added to the model.

    Args:
        model_chunks: As for ``attach``.
        weights_from: A store (its newest dense step), a step directory, or safetensors files that ``moe-ckpt export``
            wrote from a store of Megatron. Names must be Megatron's: files of transformers must be converted first.
        optimizer: Megatron's, if there is one: its master weights are set to the loaded weights. None for evaluation.
        strict: False lets tensors be missing on either side, a new head for instance; shapes must agree anyway.
        timeout_secs: Longest wait for another rank.

    Raises:
        CoverageError: Names or shapes do not agree; the message names them, and nothing was changed.
        StoreError: The source is not there or damaged.
        UnsupportedError: The source is a sparse window (MoEvement).
        ConfigError: Process groups are not set up.
    """
    require_groups()
    inventory = take_inventory(chunks_of(model_chunks))
    comm = make_communicator(timeout_secs)
    try:
        loaded = MegatronTrainingState(inventory, optimizer, comm).load_weights(weights_from, strict=strict)
        if comm.rank == 0:
            announce("loaded %s", loaded)
    finally:
        comm.close()


def end_iteration(
    ckpt: MegatronCheckpoint,
    iteration: int,
    consumed_samples: int | None,
    counters: Mapping[str, Any] | None,
    *,
    updated: bool,
) -> Deferred[StepTokens]:
    """Counts an iteration that is over, and returns the tokens that this rank routed in it."""
    ckpt._watch.iteration_ends(ckpt._driver.options)
    ckpt._host.loop.require_joined(iteration)
    ckpt._host.loop.count_iteration("after_step", iteration, consumed_samples, counters)
    ckpt._host.generators.record()
    tokens = ckpt._counter.take(iteration if updated and not ckpt.replaying else None)
    return tokens.then(StepTokens.with_assigned)


def _metrics() -> tuple[Any, Sequence[Observer]]:
    """Returns the metrics and the observer that updates them; (None, ()) where torchmetrics is not installed."""
    try:
        from moe_ckpt.metrics import CheckpointMetrics
    except ImportError:
        return None, ()
    metrics = CheckpointMetrics(sync_on_compute=False)
    return metrics, (metrics.observe,)


def on_first_forward(chunks: Sequence[nn.Module], call: Callable[[], None]) -> RemovableHandle:
    """Calls a function once, before the first forward pass of any of the model's modules in training mode."""
    modules = {id(module) for chunk in chunks for module in chunk.modules()}

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and id(module) in modules and not runs_on_samples():
            handle.remove()
            call()

    # Until then a hook of all modules, because some schedules never call the forward of a chunk.
    handle: RemovableHandle = register_module_forward_pre_hook(before)
    return handle
