"""Seals the newest step when training stops at a failure, so that only what failed goes back.

Between two updates, parameters and optimizer state are those of the newest step. A rank that hears of a failure (its
own exception, a peer's death, SIGTERM) copies all that it writes of a complete checkpoint into memory that outlives the
process before it goes, whatever the policy saved of that step. If every rank does, the run resumes from there.

Snapshots of this kind have the step in common (``Step.parting``), and no number: ranks that stopped at different steps
never seem to have sealed one together. It counts as newer than all that were due.

Data-parallel ranks hold the same experts. So a survivor also seals the experts that the next rank in its group writes:
if that one is gone, they are not. That share is lent: it lacks the other rank's plain state (random numbers, position
in the data), so that it gives experts to a checkpoint of the same step, and is no part of one that stands by itself.

Where data-parallel ranks hold the same state, a survivor lends all that the other rank writes, and each rank seals
its plain state by itself as soon as a step has ended: with both nothing is lost with a rank that is killed between two
updates, also while what it saves itself is still being copied. A rank that dies in an update which the others end has
no plain state of their step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import numpy as np
import torch

from moe_ckpt.commit.persisting import SnapshotThread
from moe_ckpt.commit.pipeline import Pipeline
from moe_ckpt.core.placement import lends
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.core.tokens import Counts
from moe_ckpt.errors import MoECheckpointError, NotFiniteError
from moe_ckpt.ports import StateTensor
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.session.snapshotting import Snapshotter
from moe_ckpt.slices.snapshot import Encode, Snapshot
from moe_ckpt.survivors.state_keeping import StateKeeper
from moe_ckpt.tiers.limits import requires_room

log = logging.getLogger("moe_ckpt")

AGREEMENT_SECS, AGREEMENT_PORTION = 5.0, 0.25
"""So long ranks that are still there have to agree on the tokens of the newest step, and such a part of the time that
is left at most: sealing takes time as well."""
_SEALING_PORTION = 0.05
"""Of an iteration: the longest that an update waits for a snapshot that is being sealed."""
_PLANNING_NBYTES = 20 << 10
"""Of an operator of this rank's share that was never planned before, roughly."""
_Counted = tuple[Counts, Counts | None]


@dataclass(frozen=True)
class Survived:
    """The share that this rank keeps of the newest step.

    Attributes:
        step: Its number.
        nbytes: Of tensors; 0 if a snapshot of everything was on its way anyhow.
        secs: That it took.
        problem: Why there is nothing; empty if there is.
        is_open: There may yet be something: what has begun goes on until the process ends.
    """

    step: int
    nbytes: int = 0
    secs: float = 0.0
    problem: str = ""
    is_open: bool = False


class Patience:
    """The time that updates wait for snapshots that are still being sealed: at most 5 % of an iteration each.

    Where sealing takes longer than an iteration, no wait is long enough: after one that timed out there is none until a
    snapshot has been sealed in time without it.

    Args:
        now: ``perf_counter``.
    """

    def __init__(self, now: float) -> None:
        self._update_began = now
        self._in_vain = False

    def update_begins(self, now: float, sealer: SnapshotThread) -> None:
        """Wait, if that may be of use. On the training thread.

        Args:
            now: ``perf_counter``.
            sealer: Has what is under way.
        """
        since, self._update_began = now - self._update_began, now
        if not sealer.in_flight:
            self._in_vain = False
        elif not self._in_vain:
            self._in_vain = not sealer.wait(0, _SEALING_PORTION * since)


class Survivor:
    """Knows the newest step, and seals it. On the training thread, or while that stands still.

    Args:
        run: The session's.
        snapshots: Likewise.

    Attributes:
        lends: Whether this rank has what others write of the newest step as they have it.
    """

    def __init__(self, run: RunContext, snapshots: Snapshotter) -> None:
        self._run, self._snapshots = run, snapshots
        self._step: int | None = None
        self._plain: Encode | None = None
        self._tokens: Deferred[StepTokens] | None = None
        self._states: StateKeeper | None = None
        self._patience = Patience(time.perf_counter())
        self._weights: Fingerprint | None = None
        self.lends = True

    def step_ends(self, step: int, plain: Encode, tokens: Deferred[StepTokens]) -> None:
        """See ``session.session.NewestStep``."""
        self._step, self._plain, self._tokens = step, plain, tokens

    def note_weights(self) -> None:
        """Others may write to weights and optimizer state of the newest step from here on."""
        self._weights = Fingerprint(self._run.state.tensors())

    def has_noted_weights(self) -> bool:
        """Returns whether weights are what they were at ``note_weights``."""
        return self._weights is not None and self._weights.fits(self._run.state.tensors())

    def keep_plain(self, *, described: bool) -> None:
        """See ``session.session.NewestStep``: tensors of the plain state are copied."""
        if self._plain is None:
            return
        if not described:  # the plain state goes by it
            self._snapshots.live.describe()
        try:
            encoded, side = self._plain()
        except Exception as error:  # of user code, or of state that cannot be encoded
            log.warning("the plain state of step %s is not kept: %r", self._step, error)
            self._plain = None
            return
        copied = encoded, [(entry, tensor.clone()) for entry, tensor in side]
        self._plain = lambda **_: copied
        if self._step is None or self._tokens is None or not self._is_lent_whole:
            return
        memory = self._snapshots.pipeline.memory
        if self._states is None and memory is not None:
            self._states = StateKeeper(memory.files, self._run.comm.world_size)
        if self._states is not None:
            self._states.keep(self._step, self._snapshots.booking.run_ledger.index, copied, self._tokens)

    def update_begins(self, now: float) -> None:
        """From here on no rank can return to the newest step unless it is sealed: a rank that is killed in this update
        would then cost two steps. So this waits a little for a seal that is not done yet.

        Args:
            now: ``perf_counter``.
        """
        self._patience.update_begins(now, self._snapshots.pipeline.first)

    @property
    def _is_lent_whole(self) -> bool:
        """Whether another rank holds all that this one writes, but its plain state."""
        live = self._snapshots.live
        return self._run.comm.world_size > 1 and live.is_held_by_each

    def close(self, timeout_secs: float) -> None:
        """Closes as ``StateKeeper.close`` does."""
        if self._states is not None:
            self._states.close(timeout_secs)

    def seal(self, secs: float) -> Survived | None:
        """Seals everything that this rank writes of the newest step. Nothing may change parameters meanwhile.

        Args:
            secs: The longest that it may take.

        Returns:
            What became of it; None if no step has ended yet.
        """
        began, step, plain = time.monotonic(), self._step, self._plain
        opened = self._snapshots.opened
        if step is None or plain is None or opened is None or opened.memory is None:
            return None
        self._step = None  # once
        try:
            nbytes = self._seal(step, plain, began + secs)
        except (FutureTimeoutError, TimeoutError):
            return Survived(step, problem=f"not sealed within {secs:g} s (Memory(survivor_secs))", is_open=True)
        except (MoECheckpointError, OSError, RuntimeError) as error:
            return Survived(step, problem=f"{type(error).__name__}: {error}")
        return Survived(step, nbytes, time.monotonic() - began)

    def _seal(self, step: int, plain: Encode, until: float) -> int:
        """Returns bytes of tensors."""
        catalog, newest = self._run.catalog, self._snapshots.newest
        tokens = self._counted(step, until)
        agreed = tokens[1] is None  # else the newest snapshot waits for tokens that no rank will tell any more
        if agreed and newest is not None and newest.step == step and newest.contents.is_whole(catalog.everything):
            self._wait(newest, until)
            return 0
        _require_room(self._run, self._snapshots.pipeline)

        def begin(plan: SnapshotPlan, plain: Encode, of: int | None = None) -> Snapshot:
            applied, counted = tokens
            if counted is not None and of is not None:
                counted = np.zeros_like(counted)  # the other rank's are beside its plain state
            return self._snapshots.begin_parting(plan, plain, (applied, counted), of, _left(until))

        mine = begin(SnapshotPlan(step, catalog.everything), plain)
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

    def _counted(self, step: int, until: float) -> _Counted:
        """Tokens by the end of the step, if the ranks have agreed on it; else those before it, and this rank's own."""
        booking = self._snapshots.booking
        try:
            if booking.sent_step == step:
                return booking.applied.result(min(AGREEMENT_SECS, AGREEMENT_PORTION * _left(until))), None
        except Exception as error:  # whatever ended the agreement: it is made at the return, of what each rank counted
            log.info("the ranks had not agreed on the tokens of step %d when training stopped: %r", step, error)
            # Else a snapshot of the step that waits for them is in the way of what is sealed now.
            self._run.comm.abort(f"training stopped before the ranks agreed on the tokens of step {step}")
        if self._tokens is None:
            raise RuntimeError("nothing was counted")
        return booking.run_ledger.tokens.applied.copy(), self._tokens.result().applied

    def _wait(self, snapshot: Snapshot, until: float) -> None:
        """Until it is sealed, and what was begun after it as well."""
        pipeline, slot = self._snapshots.pipeline, snapshot.buffer.slot
        pipeline.join()
        in_time = pipeline.first.wait(0, _left(until))
        if slot is not None and slot.is_sealed:
            return
        if not in_time:
            raise TimeoutError
        first = snapshot.not_finite()
        if first:
            raise NotFiniteError("it", first)
        raise RuntimeError(snapshot.refused or "its slot could not be sealed; see the warning above")


def _require_room(run: RunContext, pipeline: Pipeline) -> None:
    """Raises ``MemoryFullError`` if not even planning, of this rank's share and the other's, may find room."""
    memory, shares = pipeline.memory, 2 * len(run.catalog.operators) // run.comm.world_size
    if memory is not None:
        requires_room(memory.files.path, run.settings.local_ranks)(shares * _PLANNING_NBYTES)


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


_SAMPLES = 32
"""Elements that are looked at of each tensor: torch counts no writes through ``.data``, as averaging callbacks make."""
_MOST_SAMPLED = 2048
"""Tensors that are looked at, at even distances where there are more: the training thread does it, at each validation.
Averaging callbacks write to most of them."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """Address, write count and some elements of each tensor.

    Args:
        tensors: Of a training state, as they are now.
    """

    def __init__(self, tensors: Sequence[StateTensor]) -> None:
        self._places = [_place(tensor) for tensor in tensors]
        self._samples = [_sample(tensor.local) for tensor in _sampled(tensors)]

    def fits(self, tensors: Sequence[StateTensor]) -> bool:
        """Returns whether ``tensors`` are the same, and seem not to have been written to."""
        if [_place(tensor) for tensor in tensors] != self._places:
            return False
        samples = (_sample(tensor.local) for tensor in _sampled(tensors))
        return all(map(torch.equal, samples, self._samples))


def _sampled(tensors: Sequence[StateTensor]) -> Sequence[StateTensor]:
    return tensors[:: -(-len(tensors) // _MOST_SAMPLED) or 1]


def _place(tensor: StateTensor) -> tuple[str, tuple[int, ...], int, int]:
    local = tensor.local
    return tensor.key, tuple(tensor.offsets), local.data_ptr(), local._version


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of elements at even distances, by their bits."""
    count = tensor.numel()
    number = min(count, _SAMPLES)
    places = torch.arange(number, device=tensor.device) * count // max(number, 1)
    kind = _INTEGERS.get(tensor.element_size())
    return torch.take(tensor.detach() if kind is None else tensor.detach().view(kind), places)
