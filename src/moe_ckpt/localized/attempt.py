"""Returns to the newest step so that only the pipeline stages that lost ranks go back (MoEvement, section 3.4).

Stages whose ranks all sealed the newest step (``survivors``) load that step. The other stages load the newest
checkpoint, and compute the steps since then again alone, with the messages that their neighbours logged. If anything is
missing, all ranks go back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import CoverageError
from moe_ckpt.format.manifest import Manifest, age_of, prune_manifest
from moe_ckpt.ledger.freshness import STALE
from moe_ckpt.localized.exchange import LogExchange, Received
from moe_ckpt.localized.log_files import SealedLog
from moe_ckpt.localized.segments import LocalRecovery, local_recoveries
from moe_ckpt.notices import announce
from moe_ckpt.ports import TrainingState
from moe_ckpt.reading.collective import NotUsableError, on_all_ranks
from moe_ckpt.reading.memory.memory_checkpoints import SURVIVORS_SUFFIX, MemoryCheckpoints
from moe_ckpt.reading.memory.memory_shares import MemoryCheckpoint, Share, checkpoints_of, is_agreed
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.reading.memory.slot_views import LaidSnapshots, SnapshotFacts
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import needed_slices, parameters_of
from moe_ckpt.reading.shared_reading import SharedReading, TensorLoader
from moe_ckpt.recovery.executing import Opener, Recovery, Restored, opening_checkpoint
from moe_ckpt.recovery.replay import StepReplay
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.session.session import CheckpointSession

log = logging.getLogger("moe_ckpt")


@dataclass(frozen=True)
class LocalPart:
    """This rank's part in a recovery in which some stages go back.

    Attributes:
        recovery: The ranks that go back, and the step that all reach.
        since: Step from which the ranks that go back compute.
        goes_back: True if this rank goes back.
        history: ``LogHeader.history`` of the logs, which new logs continue.
        received: For each step that this rank computes again, the messages over its stage's boundaries.
        recounts: True if no rank knew all ranks' tokens of the last of these steps. ``Restored.joined`` then lacks the
            tokens of the ranks that go back, which count them again.
    """

    recovery: LocalRecovery
    since: int
    goes_back: bool
    history: int
    received: dict[int, Received]
    recounts: bool = False

    @property
    def steps(self) -> range:
        """The steps that are computed again."""
        return range(self.since + 1, self.recovery.step + 1)


MOST_LOCAL_STARTS = 2
"""Number of starts in a row that completed no step, after which all ranks go back, since the kept state or the logs may
be the cause. One start is enough if a step that was computed again is known to differ."""


class _AllGoBackError(Exception):
    """All ranks must go back, although some kept a step. Raised on every rank, and caught in this module."""


class _NoLogError(_AllGoBackError):
    """No rank has a log that is needed. An older step may not need it."""


class LocalAttempt:
    """Tries to let only some stages go back. On every rank, on the training thread.

    Args:
        recovery: The recovery of all ranks.
        memory: The contents of memory slots.
        stage_of: Pipeline stage of each rank.
        logs: Logs of earlier lives of the run that this rank has.
        diverged: True if on this rank a step that was computed again from logs was not what it was the first time, and
            no step has ended since.

    Attributes:
        part: This rank's part; None unless ``make`` returned something.
    """

    def __init__(
        self,
        recovery: Recovery,
        memory: MemoryCheckpoints,
        stage_of: Sequence[int],
        logs: Sequence[SealedLog],
        *,
        diverged: bool,
    ) -> None:
        self._recovery, self._memory = recovery, memory
        self._stage_of, self._logs, self._has_diverged = stage_of, logs, diverged
        self._kept_state = KeptState(memory, recovery.comm.world_size)
        self._tried = False
        self.part: LocalPart | None = None

    def make(self, directory: str, opener: Opener | None) -> Restored | None:
        """Loads the newest step, or ``directory`` on ranks that go back. A collective.

        Args:
            directory: The newest checkpoint that all ranks could return to.
            opener: As of ``Recovery.attempt``.

        Returns:
            The restored state; None if all ranks have to go back, and for all checkpoints but the first. If some ranks
            had kept their state, a message says why they go back all the same.
        """
        tried, self._tried = self._tried, True
        refused: tuple[LocalRecovery, str] | None = None
        for local in () if tried else local_recoveries(self._stage_of, self._kept_state.steps()):
            if age_of(directory)[1] > local.step:
                break
            try:
                return self._made(local, directory, opener)
            except _NoLogError as error:
                refused = refused or (local, str(error))
                continue
            except _AllGoBackError as error:
                refused = local, str(error)
            except NotUsableError as error:
                if error.problem is not None:
                    message = "rank %d cannot use the kept state of step %d: %s"
                    log.warning(message, self._recovery.comm.rank, local.step, error.problem)
                refused = local, f"rank {error.rank} cannot use its kept state; see its warning"
            break
        if refused is not None and self._recovery.comm.rank == 0:
            local, why = refused
            keepers = len(self._stage_of) - len(local.ranks)
            announce("%d ranks kept step %d, but all go back: %s", keepers, local.step, why, level=logging.WARNING)
        return None

    def _made(self, local: LocalRecovery, directory: str, opener: Opener | None) -> Restored | None:
        recovery = self._recovery
        comm, state = recovery.comm, recovery.state
        sealed = self._kept_state.of_step(local.step)
        starts = max(share.starts for share in sealed.shares)
        if starts >= MOST_LOCAL_STARTS:
            raise _AllGoBackError(f"the last {starts} starts, in which some stages went back, completed no step")
        if any(largest(comm, [self._has_diverged])):
            raise _AllGoBackError(
                "what some stages computed again, at a start since, was not what it had been the first time"
            )
        opened = None if opener is None else on_all_ranks(comm, opener())
        if opened is not None and opened.logged:
            raise _AllGoBackError(f"{directory} in memory is a step of a gradient log")
        reader = recovery.reader if opened is None else opened.reader
        manifest = on_all_ranks(comm, lambda: reader.manifest(directory)) if opened is None else opened.manifest
        if not manifest.window and any(record.step != manifest.step for record in manifest.operators.values()):
            raise _AllGoBackError(f"{manifest.directory} has older experts, so steps cannot be repeated exactly")
        since = manifest.window[0].step if manifest.window else manifest.step
        if since >= local.step:
            return None
        if manifest.generation > self._kept_state.generation:
            raise _AllGoBackError(f"{manifest.directory} is of a later start than their kept state")
        lives = range(manifest.generation, self._kept_state.generation + 1)
        exchange = LogExchange(comm, self._logs, local, since, lives)
        if exchange.gap is not None:
            rank, step = exchange.gap
            why = ", which it may not have ended" if step == local.step else ""
            raise _NoLogError(f"rank {rank} has no upstream log of step {step}{why}")
        on_all_ranks(comm, lambda: reader.prove(manifest))
        [described] = self._memory.describe([sealed], local.ranks)
        lay_over = self._kept_state.laid_over
        retained = on_all_ranks(comm, lambda: lay_over(sealed, described, reader, manifest, opened))
        on_all_ranks(comm, lambda: retained.reader.prove(retained.manifest))
        received = exchange.received()
        goes_back = comm.rank in local.ranks
        if opened is not None:
            opened.slots.fetch(recovery.spans(opened) if goes_back else ())
        retained.slots.fetch(() if goes_back else recovery.spans(retained))
        self._memory.note_lasting_start(sealed.shares)
        mine = (reader, manifest) if goes_back else (retained.reader, retained.manifest)
        restored, source = on_all_ranks(comm, lambda: opening_checkpoint(recovery, *mine))
        on_all_ranks(comm, lambda: None if goes_back else require_all_kept(retained, state, local.step))
        if goes_back and restored.replay is None:
            restored = replace(restored, replay=StepReplay(manifest))
        if comm.rank == 0:
            self._say_local(local, since, manifest)
        shared = self._divide(reader, manifest, opened, goes_back=goes_back)
        if goes_back:
            source.shared = shared
        planned_at = time.time()
        on_all_ranks(comm, source.verify)
        on_all_ranks(comm, source.prepare_and_write)
        recounts = not is_agreed(sealed.snapshots[0])
        self.part = LocalPart(local, since, goes_back, exchange.history, received, recounts=recounts)
        joined = _all_as_of(local.step, retained)
        return replace(restored, joined=joined, from_memory=True, planned_unix_secs=planned_at)

    def _divide(
        self, reader: StoreReader, manifest: Manifest, opened: OpenedMemory | None, *, goes_back: bool
    ) -> SharedReading | None:
        """Divides among the ranks that go back what they read of storage. A collective of all ranks.

        The other ranks need nothing, and have no part in the reading from then on: they do not wait for what ranks that
        go back send to one another, also in a replay, and nothing of it passes through training's groups.
        """
        index, files_in_memory = reader.index(manifest), frozenset(() if opened is None else opened.slots.files)
        comm, state = self._recovery.comm, self._recovery.state
        kinds = (index.tensors, *index.replay.values())
        loader = TensorLoader(reader, kinds, lambda: parameters_of(state) if goes_back else [])
        loader.share(comm, lambda path: path not in files_in_memory, agrees=False)
        return loader.shared

    def _say_local(self, local: LocalRecovery, since: int, manifest: Manifest) -> None:
        stages = [f"{first}" if first == last else f"{first} to {last}" for first, last in local.segments]
        announce(
            "%d of %d ranks, of pipeline stage %s, go back to step %d (%s), and compute steps %d to %d again from the "
            "logs of their neighbours. The others keep step %d",
            *(len(local.ranks), len(self._stage_of), ", ".join(stages), since, manifest.directory),
            *(since + 1, local.step, local.step),
        )


def require_all_kept(retained: OpenedMemory, state: TrainingState, step: int) -> None:
    """Raises ``CoverageError`` if this rank, which keeps its state, holds what a rank that is lost had to seal.

    A tensor that two stages share, as tied embeddings, is sealed by one of them.
    """
    index, operators = retained.reader.index(retained.manifest), retained.manifest.operators
    needed = {stored.entry.operator for stored in needed_slices(index.tensors, parameters_of(state))}
    lost = sorted(op for op in needed if operators[op].step != step)
    if lost:
        reason = f"only a lost rank sealed it at step {step}, although another stage holds it too (tied embeddings)"
        raise CoverageError(", ".join(lost), (reason,))


def _all_as_of(step: int, retained: OpenedMemory) -> Restored:
    """Returns the state from which all ranks go on when they have reached ``step`` together."""
    records = {op: replace(record, step=step) for op, record in retained.manifest.operators.items()}
    return Restored(
        replace(retained.manifest, operators=records),
        {},
        retained.tokens_from_memory(tuple(records)),
        from_memory=True,
        beneath=retained.beneath,
    )


class KeptState:
    """The state of the newest step that surviving ranks sealed (``survivors``), laid over an older checkpoint.

    The same on every rank. On the training thread.

    Args:
        memory: The contents of memory slots.
        ranks: Number of ranks of the run.
    """

    def __init__(self, memory: MemoryCheckpoints, ranks: int) -> None:
        self._memory, self._ranks = memory, ranks

    @property
    def generation(self) -> int:
        """Generation of the newest life that memory has a share of."""
        return max((share.generation for share in self._memory.shares), default=0)

    def steps(self) -> list[int | None]:
        """Returns for each rank the newest step that it sealed in the newest life; None if it sealed none.

        All are None if that life had another number of ranks.
        """
        steps: list[int | None] = [None] * self._ranks
        for share in self._sealed():
            steps[share.writer] = max(share.step, steps[share.writer] or 0)
        return steps

    def _sealed(self) -> list[Share]:
        """Returns the fresh shares that ranks sealed of their own state in the newest life."""
        return [
            share
            for share in self._memory.shares
            if share.is_own_at_parting
            and share.freshness != STALE
            and (share.generation, share.writers) == (self.generation, self._ranks)
        ]

    def of_step(self, step: int) -> MemoryCheckpoint:
        """Returns the sealed shares of a step that ``steps`` returned."""
        identity = self.generation, step
        sealed = (one for one in checkpoints_of(self._memory.shares) if one.is_parting)
        return next(one for one in sealed if (one.generation, one.step) == identity)

    def laid_over(
        self,
        sealed: MemoryCheckpoint,
        described: SnapshotFacts,
        reader: StoreReader,
        manifest: Manifest,
        opened: OpenedMemory | None,
    ) -> OpenedMemory:
        """Opens what ranks sealed of the newest step, laid over an older checkpoint. Reads no slice.

        Args:
            sealed: See ``of_step``.
            described: The facts of that step from all ranks. If they had not agreed on its tokens, those of the ranks
                that compute it again are missing.
            reader: Reader of the older checkpoint.
            manifest: Manifest of the older checkpoint. In a sparse window, each operator is as of its anchor.
            opened: The older checkpoint, if memory has a part of it.

        Raises:
            MoECheckpointError: This rank cannot open it.
        """
        memory, facts = self._memory, described.require_facts(sealed.step)
        is_last = manifest.step == sealed.step  # a window that ends with that step has its plain state as well
        [part] = memory.parts(sealed, [described], SURVIVORS_SUFFIX if is_last else "")
        view = LaidSnapshots(list(manifest.files), dict(manifest.operators))
        view.slots |= {} if opened is None else opened.slots.files
        host_only = part.host_only
        others = frozenset(stored.entry.operator for stored in part.slices()) - host_only
        covered = memory.covered(part, host_only | others, manifest, reader=reader)
        view.lay(part, stored=sorted(covered & others), host_only=sorted(covered & host_only))
        view.slots |= part.files
        view.brought_to(described.contents, facts)
        beneath = opened.beneath if opened is not None else manifest
        whole = memory.whole(sealed, facts, view.operators, beneath)
        writers = {rank for snapshot in sealed.snapshots for rank, shares in snapshot.items() if not shares[0].is_lent}
        states = tuple(state for state in part.states if state.rank in writers)
        whole = replace(whole, states=manifest.states if is_last else states)
        whole = prune_manifest(whole, view.files, {part.directory, manifest.directory} if is_last else {part.directory})
        overlaid, slots = memory.reading(whole, view.slots_of(whole), [part])
        return OpenedMemory(overlaid, slots, whole, beneath, view.fresh)


class Rejoining:
    """Keeps this rank in line with the others until all ranks have reached the same step. On the training thread.

    Args:
        part: This rank's part in the recovery.
        joined: The state from which all ranks go on (``Restored.joined``).
        session: Goes on from that state.

    Attributes:
        part: As the argument.
    """

    def __init__(self, part: LocalPart, joined: Restored, session: CheckpointSession) -> None:
        self.part = part
        self._joined, self._session = joined, session

    def wait(self) -> None:
        """Makes a rank that keeps its state wait before its first step, until the others have computed theirs again.

        Does nothing on ranks that go back.

        Raises:
            PeerLostError: A rank is gone.
        """
        if self.part.goes_back:
            return
        for _ in self.part.steps:
            self._session.comm.everyone(b"")  # so that no wait is longer than one step
            self._session.tier.left_slots.step_replayed(equal=True)
        self._go_on(None)

    def step_replayed(self, tokens: Deferred[StepTokens], *, last: bool) -> None:
        """See ``driver.host.LocalizedRecovery``."""
        self._session.comm.everyone(b"")
        if last:
            self._go_on(tokens)

    def _go_on(self, tokens: Deferred[StepTokens] | None) -> None:
        """Goes on together. tokens: Tokens of the last step, on a rank that has computed it again."""
        joined = with_recounted_tokens(self._joined, self._recounted(tokens)) if self.part.recounts else self._joined
        self._session.resume_from(joined.manifest, **joined.going_on)

    def _recounted(self, tokens: Deferred[StepTokens] | None) -> Counts:
        """Returns ``[L, E]`` tokens of the ranks that go back, in the step at which all meet. A collective."""
        none = np.zeros_like(self._session.run_ledger.tokens.applied)
        mine = (lambda: none) if tokens is None else (lambda: tokens.result().applied)
        agreed = self._session.comm.start_agreement(mine, np.zeros(1, dtype=np.int64))
        return agreed.result()[0]


def with_recounted_tokens(joined: Restored, recounted: Counts) -> Restored:
    """Returns ``joined`` with the tokens that were counted again.

    Args:
        joined: The state from which all ranks go on.
        recounted: ``[L, E]`` tokens of all ranks that go back, in the last step.
    """
    tokens = joined.manifest.tokens
    applied = recounted + np.asarray(tokens["applied"], dtype=np.int64).reshape(recounted.shape)
    seen = joined.tokens_from_host  # every operator is as of the last step
    return replace(
        joined,
        manifest=replace(joined.manifest, tokens={**tokens, "applied": applied.tolist()}),
        tokens_from_host=None if seen is None else recounted + seen.reshape(recounted.shape),
    )
