"""Seals the newest step when training stops at a failure, so that only what failed goes back.

Between two updates, parameters and optimizer state are those of the newest step. A rank that learns of a failure (its
own exception, a peer's death, SIGTERM) copies its share of a complete checkpoint into memory that outlives the process
before it ends, whatever the policy saved of that step. If every rank does, the run resumes from that step.

Snapshots of this kind (``Step.parting``) are identified by the step and have no number, so that ranks that stopped at
different steps never seem to have sealed one together. They count as newer than all snapshots that were due.

Data-parallel ranks have the same experts. So a survivor also seals the experts that the next rank in its group writes,
in case that rank is gone. Such a share is lent: it lacks the other rank's plain state (random numbers, position in the
data), so it only supplies experts to a checkpoint of the same step.

If data-parallel ranks have the same state, a survivor lends the whole share of the other rank, and each rank seals its
own plain state as soon as a step has ended. Together, nothing is lost with a rank that is killed between two updates,
even while its own snapshot is still being copied; but a snapshot of everything takes the place of all that, and must
have been sealed. A rank that dies in an update which the others complete has no plain state of their step.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_ckpt.commit.persisting import SnapshotThread
from moe_ckpt.core.placement import lends
from moe_ckpt.core.step import Contents, Facts, SnapshotPlan, Step
from moe_ckpt.core.tokens import NO_COUNTS, Counts
from moe_ckpt.errors import MoECheckpointError, NotFiniteError
from moe_ckpt.format.shard import seal_of
from moe_ckpt.format.slot import STATE, SlotHeader, SlotPart, encode_slot
from moe_ckpt.ledger.freshness import UNKNOWN
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.ports import StateTensor
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.session.snapshotting import Snapshotter
from moe_ckpt.slices.checksums import checksums_of
from moe_ckpt.slices.compiling import CompiledPart
from moe_ckpt.slices.copying import slice_view
from moe_ckpt.slices.cuts import no_cuts
from moe_ckpt.slices.snapshot import Encode, Plain, Snapshot, state_file
from moe_ckpt.threads import TaskThread, ThreadName

log = logging.getLogger("moe_ckpt")

AGREEMENT_SECS, AGREEMENT_PORTION = 5.0, 0.25
"""Most seconds, and largest portion of the remaining time, for which survivors try to agree on the tokens of the newest
step: sealing takes time as well."""
_SEALING_PORTION = 0.05
"""Largest portion of an iteration for which an update waits for a snapshot that is being sealed."""
_PLANNING_NBYTES = 20 << 10
"""Approximate memory for planning an operator of this rank's share that was never planned before."""
_Counted = tuple[Counts, Counts | None]


class _Newest(NamedTuple):
    """The newest step, how its plain state is encoded, and the tokens that this rank counted in it."""

    step: int
    plain: Encode
    tokens: Deferred[StepTokens]


@dataclass(frozen=True)
class Survived:
    """The share that this rank keeps of the newest step.

    Attributes:
        step: The step.
        nbytes: Bytes of tensors; 0 if a snapshot of everything was already under way.
        secs: Time that sealing took.
        problem: Why nothing is sealed; empty if it is.
        is_open: True if it may still be sealed before the process ends.
    """

    step: int
    nbytes: int = 0
    secs: float = 0.0
    problem: str = ""
    is_open: bool = False


class Patience:
    """Makes updates wait for snapshots that are still being sealed, for at most 5 % of an iteration each.

    If sealing takes longer than an iteration, waiting does not help: after a wait that timed out there is no other
    until a snapshot has been sealed in time without one.

    Args:
        now: ``perf_counter``.
    """

    def __init__(self, now: float) -> None:
        self._update_began = now
        self._in_vain = False

    def update_begins(self, now: float, sealer: SnapshotThread) -> None:
        """Waits if that may help. On the training thread.

        Args:
            now: ``perf_counter``.
            sealer: The thread that seals snapshots.
        """
        since, self._update_began = now - self._update_began, now
        if not sealer.in_flight:
            self._in_vain = False
        elif not self._in_vain:
            self._in_vain = not sealer.wait(0, _SEALING_PORTION * since)


class Survivor:
    """Seals the newest step. On the training thread, or while that thread waits.

    Args:
        run: Context of the session.
        snapshots: Snapshotter of the session.

    Attributes:
        lends: True if this rank's copies of other ranks' state are of the newest step, too.
    """

    def __init__(self, run: RunContext, snapshots: Snapshotter) -> None:
        self._run, self._snapshots = run, snapshots
        self._newest: _Newest | None = None
        self._states: StateKeeper | None = None
        self._patience = Patience(time.perf_counter())
        self._weights: Fingerprint | None = None
        self.lends = True

    def step_ends(self, step: int, plain: Encode, tokens: Deferred[StepTokens]) -> None:
        """See ``session.session.NewestStep``."""
        self._newest = _Newest(step, plain, tokens)

    def note_weights(self) -> None:
        """Fingerprints weights and optimizer state of the newest step, since other code may change them from now on."""
        self._weights = Fingerprint(self._run.state.tensors())

    def has_noted_weights(self) -> bool:
        """Returns whether weights and optimizer state are as they were at ``note_weights``."""
        return self._weights is not None and self._weights.fits(self._run.state.tensors())

    def keep_plain(self, *, described: bool) -> None:
        """See ``session.session.NewestStep``: tensors of the plain state are copied."""
        if self._newest is None:
            return
        step, plain, tokens = self._newest
        if not described:  # the plain state refers to it
            self._snapshots.live.describe()
        try:
            encoded, side = plain()
            copied = encoded, [(entry, _copied(tensor)) for entry, tensor in side]
        except Exception as error:  # of user code, or of state that cannot be encoded
            log.warning("the plain state of step %s is not kept: %r", step, error)
            self._newest = None
            return
        self._newest = _Newest(step, lambda **_: copied, tokens)
        memory = self._snapshots.pipeline.memory
        if memory is None or not self._is_lent_whole:
            return
        if self._states is None:
            self._states = StateKeeper(memory.files, self._run.comm.world_size)
        identity = self._snapshots.pipeline.identify(step, parting=True)
        self._states.keep(identity, self._snapshots.booking.run_ledger.index, copied, tokens)

    def update_begins(self, now: float) -> None:
        """Waits a little before an update for a snapshot that is still being sealed.

        During the update no rank can return to the newest step unless it is sealed, so that a rank that is killed in it
        would cost two steps.

        Args:
            now: ``perf_counter``.
        """
        self._patience.update_begins(now, self._snapshots.pipeline.first)

    @property
    def _is_lent_whole(self) -> bool:
        """True if another rank has everything that this one writes, except its plain state."""
        live = self._snapshots.live
        return self._run.comm.world_size > 1 and live.is_held_by_each

    def close(self, timeout_secs: float) -> None:
        """Closes as ``StateKeeper.close`` does."""
        if self._states is not None:
            self._states.close(timeout_secs)

    def seal(self, secs: float) -> Survived | None:
        """Seals this rank's share of the newest step. Parameters must not change meanwhile.

        Args:
            secs: Most seconds that it may take.

        Returns:
            The result; None if no step has ended yet.
        """
        began, newest, opened = time.monotonic(), self._newest, self._snapshots.opened
        if newest is None or opened is None or opened.memory is None:
            return None
        self._newest, step = None, newest.step  # once
        try:
            nbytes = self._seal(newest, began + secs)
        except (FutureTimeoutError, TimeoutError):
            return Survived(step, problem=f"not sealed within {secs:g} s (Memory(survivor_secs))", is_open=True)
        except (MoECheckpointError, OSError, RuntimeError) as error:
            return Survived(step, problem=f"{type(error).__name__}: {error}")
        return Survived(step, nbytes, time.monotonic() - began)

    def _seal(self, newest: _Newest, until: float) -> int:
        """Returns bytes of tensors."""
        catalog, begun, step = self._run.catalog, self._snapshots.newest, newest.step
        tokens = self._counted(newest, until)
        agreed = tokens[1] is None  # otherwise the newest snapshot waits for tokens in vain
        if agreed and begun is not None and begun.step == step and begun.contents.is_whole(catalog.everything):
            self._wait(begun, until)
            return 0
        require = self._snapshots.pipeline.room.require
        if require is not None:  # room to plan this rank's share, and the one that it lends
            require(2 * len(catalog.operators) // self._run.comm.world_size * _PLANNING_NBYTES)

        def begin(plan: SnapshotPlan, plain: Encode, of: int | None = None) -> Snapshot:
            applied, counted = tokens
            if counted is not None and of is not None:
                counted = np.zeros_like(counted)  # the other rank's are beside its plain state
            return self._snapshots.begin_parting(plan, plain, (applied, counted), of, _remaining_secs(until))

        mine = begin(SnapshotPlan(step, catalog.everything), newest.plain)
        nbytes = mine.nbytes
        placement = self._run.placement
        alike = placement.expert_peers or placement.peers
        peer = lends(self._run.comm.rank, alike) if self.lends else None
        if peer is not None:
            operators = catalog.everything if self._is_lent_whole else tuple(op.id for op in catalog.experts)
            try:
                nbytes += begin(SnapshotPlan(step, operators), lambda **_: ({}, []), peer).nbytes
            except (MoECheckpointError, OSError) as error:  # its own goes on
                message = "rank %d does not keep what rank %d writes of step %d: %s"
                log.warning(message, self._run.comm.rank, peer, step, error)
        self._wait(mine, until)
        return nbytes

    def _counted(self, newest: _Newest, until: float) -> _Counted:
        """Returns the tokens by the end of the step if ranks have agreed on them; else those before, and this
        rank's."""
        booking, step = self._snapshots.booking, newest.step
        try:
            if booking.sent_step == step:
                return booking.applied.result(min(AGREEMENT_SECS, AGREEMENT_PORTION * _remaining_secs(until))), None
        except Exception as error:  # whatever it is: the return adds what each rank counted
            log.info("the ranks had not agreed on the tokens of step %d when training stopped: %r", step, error)
            # Otherwise a snapshot of the step that waits for them would block the one that is sealed now.
            self._run.comm.abort(f"training stopped before the ranks agreed on the tokens of step {step}")
        if booking.sent_step != step:  # likewise
            booking.give_up()
        return booking.run_ledger.tokens.applied.copy(), newest.tokens.result().applied

    def _wait(self, snapshot: Snapshot, until: float) -> None:
        """Waits until the snapshot is sealed, and those that were begun after it."""
        pipeline, slot = self._snapshots.pipeline, snapshot.buffer.slot
        pipeline.join()
        in_time = pipeline.first.wait(0, _remaining_secs(until))
        if slot is not None and slot.is_sealed:
            return
        if not in_time:
            raise TimeoutError
        first = snapshot.not_finite()
        if first:
            raise NotFiniteError("it", first)
        raise RuntimeError(snapshot.refused or "its slot could not be sealed; see the warning above")


def _remaining_secs(until: float) -> float:
    return max(0.0, until - time.monotonic())


_SAMPLES = 32
"""Compared elements of each tensor: torch does not count writes through ``.data``, which averaging callbacks make."""
_MOST_SAMPLED = 2048
"""Most compared tensors, at even distances: the training thread compares them at each validation. Averaging callbacks
write to most tensors, so that some are enough."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """Address, write count and some elements of each tensor.

    Args:
        tensors: Of a training state, as they are now.
    """

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self._memory = [_memory_of(tensor) for tensor in tensors]
        self._samples = [_sample(tensor.local) for tensor in _sampled(tensors)]

    def fits(self, tensors: Sequence[StateTensor]) -> bool:
        """Returns whether ``tensors`` are the same, and seem not to have been written to."""
        if [_memory_of(tensor) for tensor in tensors] != self._memory:
            return False
        samples = (_sample(tensor.local) for tensor in _sampled(tensors))
        return all(map(torch.equal, samples, self._samples))


def _sampled(tensors: Sequence[StateTensor]) -> Sequence[StateTensor]:
    return tensors[:: -(-len(tensors) // _MOST_SAMPLED) or 1]


def _memory_of(tensor: StateTensor) -> tuple[str, tuple[int, ...], int, int]:
    local = tensor.local
    return tensor.key, tuple(tensor.offsets), local.data_ptr(), local._version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of elements at even distances, as integers of their bits."""
    count = tensor.numel()
    number = min(count, _SAMPLES)
    places = torch.arange(number, device=tensor.device) * count // max(number, 1)
    kind = _INTEGERS.get(tensor.element_size())
    return torch.take(tensor.detach() if kind is None else tensor.detach().view(kind), places)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, on the host if others have filled the GPU."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.to("cpu", copy=True)


class StateKeeper:
    """Keeps the plain state of the two newest steps in slots: peers may be a step behind this rank.

    Older ones do not wait for the thread, since a plain state may be as large as the model (moving averages).

    Args:
        files: Makes slots.
        world_size: Number of ranks of the run.
    """

    def __init__(self, files: MemoryFiles, world_size: int) -> None:
        self._files, self._world_size = files, world_size
        self._sealed: dict[int, Slot] = {}
        self._waiting: dict[int, tuple[Plain, torch.cuda.Event | None]] = {}
        self._newest, self._is_failing = 0, False
        self._thread = TaskThread(ThreadName.STATE, self._failed)

    def keep(self, identity: Step, index: int, plain: Plain, tokens: Deferred[StepTokens]) -> None:
        """Queues the plain state of a step, and returns at once. For the training thread.

        Args:
            identity: Of what survivors seal of the step.
            index: As of ``Facts``.
            plain: Plain state of the step, which does not change any more.
            tokens: Tokens that this rank counted in the step.
        """
        self._waiting[identity.step] = plain, _ready(plain[1])
        for step in sorted(self._waiting)[:-2]:
            self._waiting.pop(step, None)
        self._thread.put(functools.partial(self._keep, identity, index, tokens))

    def close(self, timeout_secs: float) -> None:
        """Waits for queued states. Sealed states stay. May be called twice.

        Args:
            timeout_secs: Longest wait, since a device whose peers died may never finish.
        """
        if not self._thread.close(timeout_secs):
            log.warning("the plain state of the newest step is still not in memory; nobody waits for it any longer")

    # --- on the thread ---

    def _failed(self, error: Exception) -> None:
        """Warns once. Training goes on, and a killed rank may cost one step more."""
        if not self._is_failing:
            problem = f"{type(error).__name__}: {error}"
            log.warning("memory does not hold the plain state of step %d: %s", self._newest, problem)
        self._is_failing = True

    def _keep(self, identity: Step, index: int, tokens: Deferred[StepTokens]) -> None:
        plain, ready = self._waiting.pop(identity.step, (None, None))
        if plain is None:
            return
        self._newest = identity.step
        if ready is not None:
            ready.synchronize()
        slot = self._seal(identity, Facts(index, "", NO_COUNTS, counted=tokens.result().applied), *plain)
        for step in self._sealed.keys() - {identity.step - 1}:
            self._sealed.pop(step).remove()
        self._sealed[identity.step] = slot
        self._is_failing = False

    def _seal(self, identity: Step, facts: Facts, encoded: Any, side: Sequence[tuple[Any, torch.Tensor]]) -> Slot:
        files, step, generation = self._files, identity.step, identity.generation
        part = CompiledPart(STATE, no_cuts(), tuple(entry for entry, _ in side), ())
        slot = files.make(max(1, part.nbytes))
        try:
            for entry, (_, tensor) in zip(part.side_entries(), side, strict=True):
                slice_view(entry, slot.memory).copy_(tensor)
            parts: tuple[SlotPart, ...] = ()
            if part.nbytes:
                seal = seal_of(step, generation, checksums_of(part, slot.memory[: part.nbytes]))
                parts = (SlotPart(part.kind, 0, part.head(files.run_id, files.rank, step) + seal),)
            header = SlotHeader(
                identity,
                rank=files.rank,
                world_size=self._world_size,
                nbytes=slot.memory.numel(),
                freshness=UNKNOWN,
                contents=Contents(()),
                facts=facts,
                state=state_file(encoded, step, generation, files.run_id, files.rank, self._world_size),
                parts=parts,
                only=STATE,
                sealer=files.rank,
            )
            slot.seal(encode_slot(header))
        except BaseException:
            slot.remove()
            raise
        return slot


def _ready(tensors: Sequence[tuple[Any, torch.Tensor]]) -> torch.cuda.Event | None:
    """Returns an event that is set when the tensors are complete; None if they are."""
    if not any(tensor.is_cuda for _, tensor in tensors):
        return None
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return ready
