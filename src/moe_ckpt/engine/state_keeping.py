"""Seals each step's plain state in memory that outlives the process, as soon as the step has ended.

Data-parallel ranks hold the same parameters and optimizer state, but each has random numbers and a position in the data
of its own. So where one is killed while its snapshot is still being copied, its peers have all of the newest step but
that: see ``core.survivors``.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_ckpt.core.freshness import UNKNOWN
from moe_ckpt.core.survivors import STATE, survivor_sequence
from moe_ckpt.engine.agreement import StepTokens
from moe_ckpt.engine.buffers import roomy
from moe_ckpt.engine.deferred import Deferred
from moe_ckpt.engine.snapshot import Plain
from moe_ckpt.engine.writing import checksums_of, state_file
from moe_ckpt.format.slot import SlotHeader, SlotPart, StepFacts, encode_slot
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.slices.compiling import CompiledPart
from moe_ckpt.slices.copying import target

log = logging.getLogger("moe_ckpt")
_NO_COUNTS = np.zeros((0, 0), dtype=np.int64)


class _Step(NamedTuple):
    """books: ``StepFacts.index``. ready: Set on a device when ``plain`` is there; None where it is already."""

    number: int
    books: int
    plain: Plain
    ready: torch.cuda.Event | None
    tokens: Deferred[StepTokens]


class StateKeeper:
    """Keeps the newest step's plain state in a slot of its own. ``keep`` and ``close`` are for the training thread.

    Args:
        files: Make slots.
        world_size: Of the run.
    """

    def __init__(self, files: MemoryFiles, world_size: int) -> None:
        self._files, self._world_size = files, world_size
        self._slot: Slot | None = None
        self._part: CompiledPart | None = None
        self._problem = ""
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moe_ckpt-state", daemon=True)
        self._thread.start()

    def keep(self, step: int, index: int, plain: Plain, tokens: Deferred[StepTokens]) -> None:
        """Returns at once.

        Args:
            plain: Of the step, which nobody writes to any more.
            tokens: Of the step, as this rank counts them.
        """
        ready = None
        if any(tensor.is_cuda for _, tensor in plain[1]):
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._steps.put(_Step(step, index, plain, ready, tokens))

    def close(self) -> None:
        """Waits for what is under way. What is sealed stays. Twice does no harm."""
        self._steps.put(None)
        self._thread.join()

    # --- on the thread ---

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            problem = ""
            try:
                self._seal(step)
            except Exception as error:  # whatever it is, training goes on, and a kill may cost a step more
                problem = f"{type(error).__name__}: {error}"
            if problem and not self._problem:
                log.warning("memory does not hold the plain state of step %d: %s", step.number, problem)
            self._problem = problem

    def _seal(self, step: _Step) -> None:
        encoded, side = step.plain
        part = self._compiled(side)
        slot = self._files.make(roomy(max(1, part.nbytes)))
        try:
            if step.ready is not None:
                step.ready.synchronize()
            for entry, (_, tensor) in zip(part.side_entries(), side, strict=True):
                target(entry, slot.memory).copy_(tensor)
            slot.seal(encode_slot(self._header(step, part, slot, encoded)))
        except BaseException:
            slot.remove()
            raise
        older, self._slot = self._slot, slot
        if older is not None:
            older.remove()

    def _compiled(self, side: list[tuple[Any, torch.Tensor]]) -> CompiledPart:
        """The part that these tensors make: that of the step before, where they are alike."""
        entries = tuple(entry for entry, _ in side)
        if self._part is None or self._part.given_side != entries:
            self._part = CompiledPart(STATE, (), entries, ())
        return self._part

    def _header(self, step: _Step, part: CompiledPart, slot: Slot, encoded: Any) -> SlotHeader:
        files, number = self._files, step.number
        parts: tuple[SlotPart, ...] = ()
        if part.nbytes:
            checksums = checksums_of(part, slot.memory[: part.nbytes])
            template = part.header(files.run_id, files.rank, number)
            parts = (SlotPart(part.kind, 0, b"".join(template.render(number, files.generation, checksums))),)
        return SlotHeader(
            run_id=files.run_id,
            life=files.life,
            sequence=survivor_sequence(number),
            step=number,
            generation=files.generation,
            rank=files.rank,
            world_size=self._world_size,
            boot_id=files.boot_id,
            nbytes=slot.memory.numel(),
            freshness=UNKNOWN,
            facts=StepFacts(step.books, "", (), None, _NO_COUNTS, own=step.tokens.result().applied),
            state=state_file(encoded, number, files.generation, files.run_id, files.rank, self._world_size),
            parts=parts,
            only=STATE,
        )
