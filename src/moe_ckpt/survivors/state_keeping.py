"""Seals each step's plain state in memory that outlives the process, as soon as the step has ended.

Data-parallel ranks have the same parameters and optimizer state, but their own random numbers and position in the data.
If a rank is killed while its snapshot is still being copied, its peers have everything else of the newest step: see
``survivors.newest_step``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from moe_ckpt.core.step import Contents, Facts, Step
from moe_ckpt.core.tokens import NO_COUNTS
from moe_ckpt.format.shard import seal_of
from moe_ckpt.format.slot import STATE, SlotHeader, SlotPart, encode_slot
from moe_ckpt.ledger.freshness import UNKNOWN
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.slices.checksums import checksums_of
from moe_ckpt.slices.compiling import CompiledPart
from moe_ckpt.slices.copying import target
from moe_ckpt.slices.cuts import no_cuts
from moe_ckpt.slices.snapshot import Plain
from moe_ckpt.slices.writing import state_file
from moe_ckpt.threads import TaskThread, ThreadName

log = logging.getLogger("moe_ckpt")


class StateKeeper:
    """Keeps the plain state of the two newest steps in slots: peers may be a step behind this rank.

    Args:
        files: Makes slots.
        world_size: Number of ranks of the run.
    """

    def __init__(self, files: MemoryFiles, world_size: int) -> None:
        self._files, self._world_size = files, world_size
        self._sealed: dict[int, Slot] = {}
        self._newest, self._is_failing = 0, False
        self._thread = TaskThread(ThreadName.STATE, self._failed)

    def keep(self, step: int, index: int, plain: Plain, tokens: Deferred[StepTokens]) -> None:
        """Queues the plain state of a step, and returns at once. For the training thread.

        Args:
            step: The step.
            index: As of ``Facts``.
            plain: Plain state of the step, which does not change any more.
            tokens: Tokens that this rank counted in the step.
        """
        files = self._files
        identity = Step(files.run_id, files.life, files.generation, step, step, parting=True)
        self._thread.put(functools.partial(self._keep, identity, index, plain, _ready(plain[1]), tokens))

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

    def _keep(
        self, identity: Step, index: int, plain: Plain, ready: torch.cuda.Event | None, tokens: Deferred[StepTokens]
    ) -> None:
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
                target(entry, slot.memory).copy_(tensor)
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
