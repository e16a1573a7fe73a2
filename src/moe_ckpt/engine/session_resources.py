"""Beginning and end of a session: the store and its lock, rank 0's committer, the threads."""

from __future__ import annotations

import enum
import logging

from moe_ckpt.engine import host_tier
from moe_ckpt.engine.commit import Committer
from moe_ckpt.engine.context import RunContext
from moe_ckpt.engine.events import Closed, Opened
from moe_ckpt.engine.host_memory import open_memory
from moe_ckpt.engine.keeping import StoreKeeper
from moe_ckpt.engine.memory_tier import MemoryTier
from moe_ckpt.engine.opening import open_store
from moe_ckpt.engine.pipeline import Pipeline
from moe_ckpt.errors import ConfigError

log = logging.getLogger("moe_ckpt")


class _Phase(enum.Enum):
    MADE = "call open() first"
    OPEN = ""
    CLOSED = "call nothing after finish() or close()"
    """The store is released, or its lock is left to the thread that still writes."""


class SessionResources:
    """Made, then open, then closed, each once; or closed without ever having been open.

    Attributes:
        generation: Life of the run, which names step directories.
        committer: On rank 0.
        keeper: On rank 0.
    """

    def __init__(self, run: RunContext) -> None:
        self.generation = 0
        self.committer: Committer | None = None
        self.keeper: StoreKeeper | None = None
        self._run = run
        self._phase = _Phase.MADE
        self._pipeline: Pipeline | None = None

    def open(self) -> Pipeline:
        """Take possession of the store and start the threads. Where that fails, ``close`` must follow."""
        run, settings = self._run, self._run.settings
        opened = open_store(run.storage, run.catalog, run.comm, run.lock, run.settings.retention)
        self.keeper = opened.keeper
        memory = open_memory(run, opened.run_id, opened.generation)
        try:
            self.generation = memory.generation
            run.comm.enter(memory.generation)
            if opened.keeper is not None:
                self.committer = Committer(
                    run.storage,
                    run.catalog,
                    opened.run_id,
                    run.comm.world_size,
                    run.model,
                    require_whole=opened.keeper.require_whole,
                )
            pipeline = self._pipeline = Pipeline(run, opened.run_id, memory, self.committer, self.keeper)
        except BaseException:
            host_tier.leave(memory.tier, keep=True)  # no pipeline will
            raise
        self._phase = _Phase.OPEN
        run.tell(
            Opened(
                catalog=run.catalog,
                placement=run.placement,
                policy=run.policy.describe(),
                run_id=opened.run_id,
                generation=memory.generation,
                ranks=run.comm.world_size,
                ranks_per_node=min(settings.local_ranks, run.comm.world_size),
                host_memory_bytes=pipeline.snapshot_bytes * settings.max_in_flight,
                replicas=0 if settings.memory is None else settings.memory.replicas,
            )
        )
        return pipeline

    @property
    def is_open(self) -> bool:
        return self._phase is _Phase.OPEN

    @property
    def pipeline(self) -> Pipeline:
        """Raises ``ConfigError`` unless the session is open."""
        if self._pipeline is None:
            raise ConfigError(f"CheckpointSession: {self._phase.value}")
        return self._pipeline

    @property
    def memory(self) -> MemoryTier | None:
        """Memory that outlives the process, if the session is open and has it."""
        return None if self._pipeline is None else self._pipeline.memory

    def close(self, timeout_secs: float | None, *, keep: bool) -> None:
        """Stop the threads, and release the store. Safe to call twice.

        Args:
            timeout_secs: Longest wait for the thread that writes; None for that of the settings.
            keep: Training failed: leave the recovery buffer in memory.
        """
        try:
            self._run.tell(Closed(finished=not keep))
        finally:
            self._let_go(self._run.settings.timeout_secs if timeout_secs is None else timeout_secs, keep=keep)

    def _let_go(self, timeout_secs: float, *, keep: bool) -> None:
        release = self._run.lock.release
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            # Its thread may write on: whoever comes next in this process must not share the store with it.
            self._phase = _Phase.CLOSED
            if not pipeline.close(timeout_secs, keep=keep, afterwards=release):
                log.warning(
                    "a checkpoint is still being written; training does not wait for it, but the store stays "
                    "locked until it ends%s",
                    "" if self._run.comm.world_size == 1 else ". Ranks no longer wait for each other to commit it",
                )
        elif self._phase is _Phase.MADE:
            release()
            self._phase = _Phase.CLOSED
        self._run.comm.close()
