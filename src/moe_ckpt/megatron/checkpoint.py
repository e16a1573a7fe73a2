"""The adapter that a Megatron training loop drives: one object, called around each optimizer step.

Policies, engine and recovery are those that the Lightning callback uses. What is Megatron's own is found by the other
modules of this package; this one calls things in the right order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_ckpt.engine.comm import make_communicator
from moe_ckpt.engine.options import Options, OptionValues, make_options
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.errors import ConfigError, SaveFailedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.megatron.inventory import require_experts, take_inventory
from moe_ckpt.megatron.loop import FirstForward, Loop, StepWatch
from moe_ckpt.megatron.optimizers import require_quiet_weights
from moe_ckpt.megatron.progress import Progress
from moe_ckpt.megatron.resuming import Replaying, load, require_megatron, require_same_layout, say_other_layout
from moe_ckpt.megatron.routing import RouterCounter
from moe_ckpt.megatron.side import (
    Stateful,
    all_stateful,
    capture_generators,
    capture_stateful,
    restore_generators,
)
from moe_ckpt.megatron.state import MegatronTrainingState
from moe_ckpt.megatron.topology import (
    data_parallel_groups,
    expert_rank,
    layout,
    local_ranks,
    require_groups,
    stage,
)
from moe_ckpt.megatron.weights import begin_with_weights
from moe_ckpt.megatron.world import World, exchange
from moe_ckpt.notices import announce
from moe_ckpt.policies.base import Policy, uses_gate_weights, uses_windows
from moe_ckpt.recovery.resume import Restored, resume_newest
from moe_ckpt.storage import StoreLock, open_storage
from moe_ckpt.storage.lock import job_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("moe_ckpt")


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
    """Checkpoint a Megatron training loop. A collective: all ranks, when model and optimizer are complete.

    model_chunks: this rank's model, or its chunks under interleaved pipelining, wrapped (DDP, Float16Module) or not.
    optimizer: what ``get_megatron_optimizer`` made of these chunks.
    scheduler: the ``OptimizerParamScheduler``, or anything with ``state_dict`` and ``load_state_dict``.
    stateful: name -> whatever else must come back, such as a data loader: plain data and tensors only.
    policy, dirpath, options: as of the Lightning callback; see ``moe_ckpt.engine.options.Options``.
        ``resume="never"`` starts from what the model holds now.

    Raises:
        MissingPackageError: Megatron-Core is not installed.
        UnsupportedError: an optimizer, an expert container or a version that is not known here.
        CoverageError: the ranks together do not hold every expert and every element once.
        ConfigError: process groups are not set up, or settings contradict each other.
        StoreError: the directory cannot be used.
    """
    require_groups()
    chosen = make_options("megatron.attach", policy, dirpath, options, ("stateful",))
    beside = all_stateful(scheduler, stateful or {})
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    if uses_windows(chosen.policy):
        require_quiet_weights(optimizer)
    return MegatronCheckpoint(chunks, optimizer, beside, chosen)


class MegatronCheckpoint:
    """What ``attach`` returns. Every method is called by all ranks, on the training thread.

    last: what the newest step cost; see ``moe_ckpt.engine.record.StepRecord``. ``last.halt`` is the reason why the
        policy asks for training to end, else None.
    metrics: the torchmetrics of ``moe_ckpt.metrics``, updated at each step, of this rank in this process; None where
        torchmetrics is not installed.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizer: Any,
        stateful: Mapping[str, Stateful],
        options: Options,
    ) -> None:
        inventory = take_inventory(chunks)
        self._state = MegatronTrainingState(inventory, optimizer)
        comm = make_communicator(options.timeout_secs)
        world = exchange(self._state.holding(stage(), expert_rank()), comm)
        require_experts(len(world.layers), [type(chunk).__name__ for chunk in chunks])
        self._settle(world, comm.rank)
        numbers = {layer.name: layer.index for layer in world.layers}
        self._counter = RouterCounter(
            [(numbers[found.name], found.router) for found in inventory.layers],
            len(world.layers),
            max(layer.experts for layer in world.layers),
            soft=uses_gate_weights(options.policy),
        )
        self.options = options
        self.last: StepRecord | None = None
        self.restored_step: int | None = None
        self.metrics: Any = _metrics([layer.experts for layer in world.layers])
        self._stateful = stateful
        self._layout = layout(chunks)
        self._comm = comm
        groups = data_parallel_groups()
        try:
            self._storage = open_storage(options.dirpath, options.on_phase, access=options.access)
            self._session = CheckpointSession(
                storage=self._storage,
                policy=options.policy,
                catalog=world.catalog,
                state=self._state,
                comm=comm,
                settings=replace(options, pinned=torch.cuda.is_available(), local_ranks=local_ranks(comm)),
                placement=world.placement(groups.dense, experts_apart=not self._state.shards),
                lock=StoreLock(self._storage, job_name(), access=options.access),
                on_phase=options.on_phase,
            )
            self._session.open()
        except BaseException:
            self._counter.close()  # whoever catches this and goes on without checkpoints has no use for its hooks
            raise
        self._chunks = chunks
        self._loop = Loop()
        self._watch = StepWatch(optimizer, self.before_step, self._stepped)
        self._first: FirstForward | None = None
        self._generators: Mapping[str, Any] | None = None
        self._generators_due = self._first_save_due = self._undrained = False
        self._replaying: Replaying | None = None
        self._finished = False

    def _settle(self, world: World, rank: int) -> None:
        world.catalog  # noqa: B018  the proof comes before anything else
        world.require_updates()
        self._state.settle(world, rank, data_parallel_groups())

    @property
    def policy(self) -> Policy:
        """The policy, within its guard if there is one."""
        return self.options.policy

    @property
    def dirpath(self) -> str:
        """Directory or URL of the store."""
        return self.options.dirpath

    @property
    def session(self) -> CheckpointSession:
        """Catalog, books and the newest committed step."""
        return self._session

    @property
    def iteration(self) -> int:
        """Iterations that are done."""
        return self._loop.iteration

    @property
    def replaying(self) -> bool:
        """True while the iterations of a sparse window are computed again: memory holds no state of the run then."""
        return self._replaying is not None

    # --- once, before training ---

    def resume(self, otherwise: Callable[[], Progress] | None = None) -> Progress:
        """Go on from the newest checkpoint that all ranks can load, on this layout or another. Once, before training.

        Tensors, schedules and counters are in place when it returns. Random number generators follow in a second
        phase, ``begin_training``, so that whatever is built in between (data loaders, their iterators) may draw from
        them; on another layout they stay as they are.
        After a failure in the middle of a sparse window (MoEvement), training goes on at the window's first step, and
        the steps up to its last are computed again exactly, by the same loop.

        Args:
            otherwise: Called on all ranks if there is no checkpoint (or none is to be taken): loads what the run begins
                from, ``import_torch_dist`` for instance, and says where that stands. None to begin with the model as
                it is.

        Raises:
            NoCheckpointError: There are checkpoints, but none that can be used.
            ConfigError: The checkpoint and this run contradict each other.
        """
        self._loop.resume()
        restored = None
        if self.options.resume != "never":
            tier = self._session.host_tier
            restored = resume_newest(
                self._storage, self._comm, self._state, tier, self._admits, **self.options.reading
            )
        progress = self._begin(otherwise) if restored is None else self._go_on(restored)
        self._loop.stand_at(progress)
        self._first = FirstForward(self._chunks, self.begin_training)
        return progress

    def _begin(self, otherwise: Callable[[], Progress] | None) -> Progress:
        progress = Progress() if otherwise is None else otherwise()
        if self.options.weights_from is not None:
            begin_with_weights(self.options.weights_from, progress.iteration, self._state, self._comm)
        elif otherwise is None and self.options.resume == "never":
            self._say("training starts new, as resume='never' says; it is saved in %s", self.dirpath)
        elif otherwise is None:
            self._say("training starts new: %s holds no checkpoint yet", self.dirpath)
        if progress.restored:
            self._generators, self._generators_due = capture_generators(), True
        self._first_save_due = uses_windows(self.policy)
        return progress

    def _admits(self, manifest: Manifest, plain: Mapping[str, Any]) -> None:
        self._session.books.check(manifest)
        require_megatron(plain, manifest)
        if manifest.window:
            require_same_layout(plain["layout"], self._layout, manifest)

    def _go_on(self, restored: Restored) -> Progress:
        plain = restored.plain
        load(self._storage, restored, self._state, self._stateful)
        progress = Progress(
            int(plain["iteration"]), int(plain["consumed_samples"]), restored=True, counters=plain.get("counters", {})
        )
        self.restored_step = restored.manifest.step
        if restored.replay is not None:
            self._replaying = Replaying(restored.replay, plain)
            self._say(
                "resumed at iteration %d from %s: the sparse window up to iteration %d is computed again",
                progress.iteration,
                os.path.join(self.dirpath, restored.manifest.directory),
                self.restored_step,
            )
        else:
            self._adopt(restored)
        if plain["layout"] == self._layout:
            self._generators, self._generators_due = plain["rng"], True
        else:  # no rank is the one whose numbers these are
            say_other_layout(plain["layout"], self._layout, self._comm.rank)
        return progress

    def _adopt(self, restored: Restored) -> None:
        fault = self._session.adopt(restored.manifest, held=restored.held)
        self._say(
            "resumed at iteration %d from %s: %d experts are older than that, %d tokens lost (PLT %.4f)",
            restored.manifest.step,
            os.path.join(self.dirpath, restored.manifest.directory),
            fault.stale_experts,
            fault.lost_tokens,
            self._session.books.tokens.plt,
        )

    def _say(self, message: str, *values: object) -> None:
        """Once per job."""
        if self._comm.rank == 0:
            announce(message, *values)

    def begin_training(self) -> None:
        """The second phase of ``resume``: put the random number generators where the checkpoint has them.

        Calls itself in front of the first training forward pass. Call it earlier where something that belongs to the
        first iteration draws before that: a dataset that draws when it is read. Later calls do nothing.

        Raises:
            ConfigError: ``resume`` was not called.
        """
        self._loop.require_resumed()
        if self._first is None:
            return
        self._first.close()
        self._first = None
        if self._generators_due and self._generators is not None:
            restore_generators(self._generators)
        self._generators = capture_generators()
        if self._first_save_due:
            # Pipeline stages get here one after the other, so nobody may wait for the others yet.
            self._session.begin_run(self._capture, self._loop.iteration, wait=False)
            self._undrained = True
        self._session.training_begins()

    # --- every iteration ---

    def before_step(self) -> None:
        """Waits for the copy under way, for it reads what the optimizer changes. Called by ``optimizer.step()`` itself.

        Call it where something else changes weights before ``optimizer.step()``, or in place of that.

        Raises:
            ConfigError: ``resume`` was not called, or ``finish`` or ``close`` was, or no forward pass was seen.
        """
        self._loop.require_resumed()
        if self._first is not None and self._session.is_open:
            if self._generators_due or self._first_save_due:
                raise ConfigError(
                    "no training forward pass of the model that was given to megatron.attach was seen before this "
                    "optimizer step, so random number generators were not put back in time. Call "
                    "begin_training() between resume() and the first forward pass"
                )
            self.begin_training()
        self._session.before_update()
        if self._undrained:
            self._session.drain(self._loop.iteration)
            self._undrained = False
        self._loop.join()

    def _stepped(self) -> None:
        """``optimizer.step()`` is done: weights of a step that is computed again are needed at once, by validation."""
        if self._replaying is not None:
            self._replaying.put_back(self._loop.iteration + 1)

    def after_step(
        self,
        iteration: int,
        *,
        consumed_samples: int = 0,
        updated: bool | None = None,
        counters: Mapping[str, Any] | None = None,
    ) -> StepRecord:
        """Book the tokens, and begin the next checkpoint if one is due. After ``optimizer.step()`` and the scheduler.

        Args:
            iteration: Iterations done, this one included.
            consumed_samples: Of the training data, by now; comes back from ``resume``.
            updated: False if fp16 overflowed and the step was skipped, so that its tokens do not count. None: what
                ``optimizer.step()`` returned on this rank.
            counters: Whatever else comes back from ``resume`` (``Progress.counters``): plain data by name. Not
                compared when steps are computed again. None: as told before.

        Raises:
            ConfigError: No optimizer step came before, or iterations are not counted one by one.
            SaveFailedError: Too many checkpoints failed in a row.
        """
        began = time.perf_counter()
        self._loop.step(iteration, consumed_samples, counters)
        self._generators = capture_generators()
        updated = self._watch.updated is not False if updated is None else updated
        counted = self._counter.take()
        if self._replaying is not None:
            return self._replayed(self._replaying)
        assigned = counted.applied if counted.assigned is None else counted.assigned
        applied = counted.applied if updated else counted.applied * 0
        self._session.add_stall(time.perf_counter() - began)
        self.last = self._session.after_update(iteration, applied, self._capture, counted.soft, assigned)
        if self.metrics is not None:
            self.metrics.update(**_facts(self.last, self._session))
        return self.last

    def skip(self, iteration: int, consumed_samples: int = 0, *, counters: Mapping[str, Any] | None = None) -> None:
        """In place of ``after_step`` for an iteration that consumed data, but computed and changed nothing.

        No checkpoint is made of it: the next iteration's says that its data was consumed.

        Args:
            iteration, consumed_samples, counters: As of ``after_step``.

        Raises:
            ConfigError: As ``after_step``.
            ReplayDivergedError: The iteration was computed before the failure, and is needed again.
        """
        self._loop.require_resumed()
        self.begin_training()
        if self._replaying is not None:
            self._replaying.skip(iteration)
        self._loop.skip(iteration, consumed_samples, counters)
        self._generators = capture_generators()

    def discard_tokens(self) -> None:
        """Forget the tokens routed since the last iteration, for its forward pass is run again (rerun machine)."""
        self._counter.discard()

    def _replayed(self, replaying: Replaying) -> StepRecord:
        """A step of a sparse window was computed again; with its last one, the run goes on from there."""
        step = self._loop.iteration
        replaying.compare(step, self._capture())
        if replaying.done:
            self._replaying = None
            self._adopt(Restored(replaying.manifest, {}))
        self.last = StepRecord(step, replayed=True, committed_step=replaying.manifest.step)
        return self.last

    def _capture(self) -> dict[str, Any]:
        """This rank's plain state after the newest iteration."""
        return {
            "framework": "megatron",
            "iteration": self._loop.iteration,
            "consumed_samples": self._loop.consumed_samples,
            "counters": self._loop.counters,
            "layout": self._layout,
            "plain": self._state.plain(),
            "stateful": capture_stateful(self._stateful),
            "rng": capture_generators() if self._generators is None else self._generators,
        }

    def save(self, *, wait: bool = True) -> bool:
        """Save a complete checkpoint of the newest iteration now, whatever the policy: the job may be about to end.

        All ranks, after ``after_step`` or ``skip``, before the next iteration begins. Nothing is written twice if the
        newest checkpoint is just that.

        Args:
            wait: Until it is committed; else it is written beside training as any other.

        Returns:
            False while a sparse window is computed again: memory holds no state that the run ever had, and what a
            restart will take is in the store already.

        Raises:
            SaveFailedError: It could not be committed, or not in time.
        """
        self._loop.require_resumed()
        if self._replaying is not None:
            return False
        step = self._loop.iteration
        self._session.save_complete(step, self._capture)
        ended = self._session.drain(step) if wait else ()
        if ended and not ended[-1].committed:
            raise SaveFailedError(ended[-1].step, (ended[-1].cause or "unknown",))
        return True

    # --- once, at the end ---

    def finish(self) -> None:
        """Training ended well: leave a complete checkpoint of the last state, and wait for it.

        Safe to call twice, and just before ``sys.exit``.

        Raises:
            SaveFailedError: It could not be committed.
        """
        if self._finished:
            return
        self._finished = True
        unfinished = self._replaying is not None
        if unfinished:
            log.warning("training ended before a sparse window was computed again: nothing was saved")
        save_last = self.options.save_last and self._loop.moved and not unfinished
        try:
            self._session.finish(self._loop.iteration, self._capture, save_last=save_last)
        finally:
            self._release()

    def _release(self) -> None:
        """Take off everything that hangs on the model and the optimizer."""
        self._counter.close()
        self._watch.close()
        if self._first is not None:
            self._first.close()

    def close(self, timeout_secs: float | None = None) -> None:
        """Let go of threads, lock and hooks after a failure. Safe to call twice, and after ``finish``."""
        self._release()
        self._session.close(timeout_secs)

    def __enter__(self) -> MegatronCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None and self._session.is_open:  # else it was finished or closed inside
                self.finish()
        finally:
            self.close(10.0)


def _metrics(experts: Sequence[int]) -> Any:
    """None without torchmetrics, which Megatron's users need not have."""
    try:
        from moe_ckpt.metrics import checkpoint_metrics
    except ImportError:
        return None
    return checkpoint_metrics(experts, sync_on_compute=False)


def _facts(record: StepRecord, session: CheckpointSession) -> dict[str, Any]:
    from moe_ckpt.metrics.collection import facts

    return facts(record, session.books)
