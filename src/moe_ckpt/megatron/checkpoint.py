"""The adapter that a Megatron training loop drives: one object, called around each optimizer step.

Policies, engine and recovery are those that the Lightning callback uses. What is Megatron's own is found by the other
modules of this package; this one calls things in the right order.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_ckpt.engine.comm import make_communicator
from moe_ckpt.engine.options import Options, OptionValues, make_options
from moe_ckpt.engine.record import StepRecord
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.megatron.inventory import require_experts, take_inventory
from moe_ckpt.megatron.optimizers import require_quiet_weights
from moe_ckpt.megatron.resuming import Replaying, load, require_same_layout
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
from moe_ckpt.megatron.world import World, exchange
from moe_ckpt.notices import announce
from moe_ckpt.policies.base import Policy, uses_gate_weights, uses_windows
from moe_ckpt.recovery.resume import Restored, resume_newest
from moe_ckpt.storage import StoreLock, open_storage
from moe_ckpt.storage.lock import job_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("moe_ckpt")


@dataclass(frozen=True)
class Progress:
    """Where training goes on.

    iteration: iterations that are done; the next one to compute is ``iteration + 1``, counted from 1.
    consumed_samples: samples of the training data that were consumed by then, as ``after_step`` was told.
    restored: False for a run that begins from nothing.
    """

    iteration: int = 0
    consumed_samples: int = 0
    restored: bool = False


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
    chosen = make_options("megatron.attach", policy, dirpath, options)
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
            self._storage = open_storage(options.dirpath, options.on_phase)
            self._session = CheckpointSession(
                storage=self._storage,
                policy=options.policy,
                catalog=world.catalog,
                state=self._state,
                comm=comm,
                settings=replace(options, pinned=torch.cuda.is_available(), local_ranks=local_ranks(comm)),
                placement=world.placement(groups.dense, experts_apart=not self._state.shards),
                lock=StoreLock(self._storage, job_name()),
                on_phase=options.on_phase,
            )
            self._session.open()
        except BaseException:
            self._counter.close()  # whoever catches this and goes on without checkpoints has no use for its hooks
            raise
        self._step = 0
        self._consumed = 0
        self._joined = True
        self._resumed = False
        self._replaying: Replaying | None = None

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

    def resume(self, otherwise: Callable[[], Progress] | None = None) -> Progress:
        """Go on from the newest checkpoint that all ranks can load, on this layout or another. Once, before training.

        At its end the random number generators stand where they stood (on another layout, where they were left): build
        everything that draws from them before.
        After a failure in the middle of a sparse window (MoEvement), training goes on at the window's first step, and
        the steps up to its last are computed again exactly, by the same loop.

        otherwise: called on all ranks if there is no checkpoint (or none is to be taken): loads what the run begins
            from, ``import_torch_dist`` for instance, and says where that stands. None to begin with the model as it is.

        Raises:
            NoCheckpointError: there are checkpoints, but none that can be used.
            ConfigError: the checkpoint and this run contradict each other.
        """
        if self._resumed:
            raise ConfigError("MegatronCheckpoint.resume() was called twice: call it once, before the first step")
        self._resumed = True
        restored = None
        if self.options.resume != "never":
            restored = resume_newest(self._storage, self._comm, self._state, self._session.host_tier, self._admits)
        progress = self._begin(otherwise) if restored is None else self._go_on(restored)
        self._session.training_begins()
        return progress

    def _begin(self, otherwise: Callable[[], Progress] | None) -> Progress:
        progress = Progress() if otherwise is None else otherwise()
        self._step, self._consumed = progress.iteration, progress.consumed_samples
        if uses_windows(self.policy):
            self._session.begin_run(self._capture, self._step)
        return progress

    def _admits(self, manifest: Manifest, plain: Mapping[str, Any]) -> None:
        require_same_layout(plain.get("layout", {}), self._layout, manifest)

    def _go_on(self, restored: Restored) -> Progress:
        plain = restored.plain
        load(self._storage, restored.manifest, plain, self._state, self._stateful)
        self._step, self._consumed = int(plain["iteration"]), int(plain["consumed_samples"])
        self.restored_step = restored.manifest.step
        if restored.replay is not None:
            self._replaying = Replaying(restored.replay)
            self._say(
                "resumed at iteration %d; the sparse window up to %d is computed again", self._step, self.restored_step
            )
        else:
            self._adopt(restored)
        if plain["layout"] == self._layout:
            restore_generators(plain["rng"])
        else:  # no rank is the one whose numbers these are
            self._say("the checkpoint is of the layout %s: random numbers go on as seeded now", plain["layout"])
        return Progress(self._step, self._consumed, restored=True)

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

    def before_step(self) -> None:
        """Just before ``optimizer.step()``: waits for the copy under way, for it reads what the optimizer changes.

        Raises:
            ConfigError: ``resume`` was not called, or ``finish`` or ``close`` was.
        """
        if not self._resumed:
            raise ConfigError(
                "MegatronCheckpoint.resume() was not called, so training would begin anew beside the checkpoints that "
                "there may be. Call it before the first step; to begin anew, megatron.attach(resume='never')"
            )
        self._session.before_update()
        self._joined = True

    def after_step(self, iteration: int, *, consumed_samples: int = 0, updated: bool = True) -> StepRecord:
        """After ``optimizer.step()`` and the scheduler: books the tokens, and begins the next checkpoint if one is due.

        iteration: iterations done, this one included.
        consumed_samples: of the training data, by now; comes back from ``resume``.
        updated: what ``optimizer.step()`` said; False if fp16 overflowed and the step was skipped, so that its tokens
            do not count.

        Raises:
            ConfigError: ``before_step`` was not called, or iterations are not counted one by one.
            SaveFailedError: too many checkpoints failed in a row.
        """
        began = time.perf_counter()
        self._check(iteration)
        self._step, self._consumed, self._joined = iteration, consumed_samples, False
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

    def _check(self, iteration: int) -> None:
        if not self._joined:
            raise ConfigError(
                "MegatronCheckpoint.before_step() was not called before this optimizer step: the snapshot of the step "
                "before may be torn. Call it right before optimizer.step()"
            )
        if iteration != self._step + 1:
            raise ConfigError(
                f"after_step({iteration}) follows iteration {self._step}: call it after every iteration, with the "
                "number of iterations done, and start from what resume() returned"
            )

    def _replayed(self, replaying: Replaying) -> StepRecord:
        """A step of a sparse window was computed again; with its last one, the run goes on from there."""
        replaying.advance(self._step, self._capture())
        if replaying.done:
            self._replaying = None
            self._adopt(Restored(replaying.manifest, {}))
        self.last = StepRecord(self._step, replayed=True, committed_step=replaying.manifest.step)
        return self.last

    def _capture(self) -> dict[str, Any]:
        """This rank's plain state of this moment."""
        return {
            "framework": "megatron",
            "iteration": self._step,
            "consumed_samples": self._consumed,
            "layout": self._layout,
            "plain": self._state.plain(),
            "stateful": capture_stateful(self._stateful),
            "rng": capture_generators(),
        }

    def finish(self) -> None:
        """Training ended well: leave a complete checkpoint of the last state, and wait for it.

        Raises:
            SaveFailedError: it could not be committed.
        """
        unfinished = self._replaying is not None
        if unfinished:
            log.warning("training ended before a sparse window was computed again: nothing was saved")
        save_last = self.options.save_last and self.last is not None and not unfinished
        try:
            self._session.finish(self._step, self._capture, save_last=save_last)
        finally:
            self._counter.close()

    def close(self, timeout_secs: float | None = None) -> None:
        """Let go of threads, lock and hooks after a failure. Safe to call twice, and after ``finish``."""
        self._counter.close()
        self._session.close(timeout_secs)

    def __enter__(self) -> MegatronCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None and self._session.is_open:  # else it was finished inside
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
