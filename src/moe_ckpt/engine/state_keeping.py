"""Seals each step's plain state in memory that outlives the process, as soon as the step has ended.

Data-parallel ranks hold the same parameters and optimizer state, but each has random numbers and a position in the data
of its own. So where one is killed while its snapshot is still being copied, its peers have all of the newest step but
that: see ``core.survivors``. Before an update, what it has of the step to come is sealed as well: see
``format.foreseen``.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_ckpt.core.freshness import UNKNOWN
from moe_ckpt.core.survivors import BEFORE, STATE, survivor_sequence
from moe_ckpt.engine.agreement import StepTokens
from moe_ckpt.engine.deferred import Deferred
from moe_ckpt.engine.host_buffer import roomy
from moe_ckpt.engine.snapshot import Plain
from moe_ckpt.engine.writing import checksums_of, state_file
from moe_ckpt.format.foreseen import AFTER, Lesson, Path, changes, foreseen, replaced, said
from moe_ckpt.format.slot import SlotHeader, SlotPart, StepFacts, encode_slot
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.slices.compiling import CompiledPart
from moe_ckpt.slices.copying import target
from moe_ckpt.slices.cuts import no_cuts

log = logging.getLogger("moe_ckpt")
_NO_COUNTS = np.zeros((0, 0), dtype=np.int64)
Pieces = Sequence[tuple[Path, Plain]]
"""Parts of the plain state, and where in it they are."""


class _Step(NamedTuple):
    """books: ``StepFacts.index``. ready: Set on a device when all tensors are there; None where they are already.
    pieces: What is known before the update of the step, which is to come; None of one that has ended. done: Set when
    the thread is through with it."""

    number: int
    books: int
    plain: Plain
    ready: torch.cuda.Event | None
    tokens: Deferred[StepTokens]
    pieces: Pieces | None = None
    done: threading.Event | None = None


class _Asked(NamedTuple):
    number: int
    of: int
    answer: Future[Plain]


class _Sealed(NamedTuple):
    """checksums: Of the side tensors, by name."""

    number: int
    only: str
    slot: Slot
    encoded: Any
    checksums: Mapping[str, str]


class StateKeeper:
    """Keeps the plain state of the newest steps in slots of their own. All but the thread's is for the training thread.

    Args:
        files: Make slots.
        world_size: Of the run.
    """

    def __init__(self, files: MemoryFiles, world_size: int) -> None:
        self._files, self._world_size = files, world_size
        self._sealed: list[_Sealed] = []
        self._ended: _Step | None = None
        self._part: CompiledPart | None = None
        self._problems: dict[str, str] = {}
        self._changed: set[str] | None = None
        self._lesson: Lesson | None = None
        self._steps: queue.SimpleQueue[_Step | _Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="moe_ckpt-state", daemon=True)
        self._thread.start()

    def keep(self, step: int, index: int, plain: Plain, tokens: Deferred[StepTokens]) -> None:
        """Returns at once.

        Args:
            plain: Of the step; no longer written to.
            tokens: Of the step, as this rank counts them.
        """
        self._steps.put(_Step(step, index, plain, _ready(plain[1]), tokens))

    def keep_before(self, step: int, index: int, pieces: Pieces, tokens: Deferred[StepTokens]) -> threading.Event:
        """The update of ``step`` is to come. Returns at once.

        Args:
            pieces: What may have changed since the step before ended, or all, at the empty path; no longer written to.
            tokens: As of ``keep``.

        Returns:
            Set once it is sealed, or cannot be.
        """
        tensors, done = [each for _, (_, side) in pieces for each in side], threading.Event()
        self._steps.put(_Step(step, index, ({}, []), _ready(tensors), tokens, pieces, done))
        return done

    def lesson(self, step: int, of: int, secs: float) -> Plain:
        """Returns what this rank's update of ``step`` changed of its plain state (``format.foreseen.Lesson``).

        Args:
            step: Which ``keep`` was given last.
            of: Rank that is to learn it.
            secs: The longest that it may take.

        Raises:
            TimeoutError: It takes longer.
        """
        asked = _Asked(step, of, Future())
        self._steps.put(asked)
        return asked.answer.result(secs)

    def close(self, timeout_secs: float) -> None:
        """Waits for what is under way. What is sealed stays. Twice does no harm.

        Args:
            timeout_secs: The longest that it may take: a device whose peers died gives nothing any more.
        """
        self._steps.put(None)
        self._thread.join(timeout_secs)
        if self._thread.is_alive():
            log.warning("the plain state of the newest step is still not in memory; nobody waits for it any longer")

    # --- on the thread ---

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            if isinstance(step, _Asked):
                step.answer.set_result(self._told(step))
                continue
            problem, when = "", "" if step.pieces is None else " before its update"
            try:
                self._keep(step)
            except Exception as error:  # whatever it is, training goes on, and a kill may cost a step more
                problem = f"{type(error).__name__}: {error}"
            if step.done is not None:
                step.done.set()
            if problem and not self._problems.get(when):
                log.warning("memory does not hold the plain state of step %d%s: %s", step.number, when, problem)
            self._problems[when] = problem

    def _keep(self, step: _Step) -> None:
        if step.ready is not None:
            step.ready.synchronize()
        if step.pieces is not None:
            plain = self._before(step.number, step.pieces)
            if plain is not None:
                self._let_go(old for old in self._sealed if old.only == BEFORE)  # of an update that was left out
                self._sealed.append(self._seal(step, BEFORE, plain, foreseen(plain[0], self._changed)))
            return
        self._ended = None
        now = self._seal(step, STATE, step.plain, step.plain[0])
        self._ended = step
        self._compare(now)
        # Peers may still stand a step behind this rank, which goes on: until another step has ended.
        self._let_go(old for old in self._sealed if old.only != STATE or old.number != step.number - 1)
        self._sealed.append(now)

    def _before(self, number: int, pieces: Pieces) -> Plain | None:
        """The plain state before the update of a step; None if it is not known."""
        whole = next((plain for path, plain in pieces if not path), None)
        if whole is not None:
            return whole
        before = self._ended
        return _with_pieces(before.plain, pieces, self._files.rank) if before and before.number == number - 1 else None

    def _let_go(self, old: Iterable[_Sealed]) -> None:
        gone = list(old)
        for each in gone:
            each.slot.remove()
        self._sealed = [each for each in self._sealed if each not in gone]

    def _compare(self, now: _Sealed) -> None:
        """The step has ended: what its update changed."""
        self._lesson = None
        before = next((each for each in self._sealed if (each.number, each.only) == (now.number, BEFORE)), None)
        if before is None:
            return
        found = changes(before.encoded, now.encoded)
        was = before.checksums
        tensors = {name: was.get(name) for name, checksum in now.checksums.items() if was.get(name) != checksum}
        self._changed = (self._changed or set()).union(tensors, (said(path) for path, _, _ in found))
        self._lesson = Lesson(found, tensors)

    def _told(self, asked: _Asked) -> Plain:
        if self._lesson is None or self._ended is None or self._ended.number != asked.number:
            return {}, []
        prefix, side = f"side/{self._files.rank}/", []
        for entry, tensor in self._ended.plain[1]:
            name = entry.key.removeprefix(prefix)
            if name in self._lesson.tensors:
                side.append((replace(entry, key=f"side/{asked.of}/{name}{AFTER}"), tensor))
        return self._lesson.encoded(self._changed or ()), side

    def _seal(self, step: _Step, only: str, plain: Plain, state: Any) -> _Sealed:
        encoded, side = plain
        part = self._compiled(side)
        slot = self._files.make(roomy(max(1, part.nbytes)))
        try:
            entries = part.side_entries()
            for entry, (_, tensor) in zip(entries, side, strict=True):
                target(entry, slot.memory).copy_(tensor)
            sums = checksums_of(part, slot.memory[: part.nbytes]) if part.nbytes else np.zeros(0, dtype=np.uint64)
            slot.seal(encode_slot(self._header(step, only, part, sums, slot, state)))
        except BaseException:
            slot.remove()
            raise
        prefix = f"side/{self._files.rank}/"
        named = zip(entries, part.side, strict=True) if part.nbytes else ()
        found = {entry.key.removeprefix(prefix): f"{int(sums[at]):016x}" for entry, at in named}
        return _Sealed(step.number, only, slot, encoded, found)

    def _compiled(self, side: Sequence[tuple[Any, torch.Tensor]]) -> CompiledPart:
        """The part that these tensors make: that of the step before, where they are alike."""
        entries = tuple(entry for entry, _ in side)
        if self._part is None or self._part.given_side != entries:
            self._part = CompiledPart(STATE, no_cuts(), entries, ())
        return self._part

    def _header(self, step: _Step, only: str, part: CompiledPart, checksums: Any, slot: Slot, state: Any) -> SlotHeader:
        files, number = self._files, step.number
        parts: tuple[SlotPart, ...] = ()
        if part.nbytes:
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
            state=state_file(state, number, files.generation, files.run_id, files.rank, self._world_size),
            parts=parts,
            only=only,
        )


def _ready(tensors: Sequence[tuple[Any, torch.Tensor]]) -> torch.cuda.Event | None:
    """What tells that they are there; None where they are already."""
    if not any(tensor.is_cuda for _, tensor in tensors):
        return None
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return ready


def _with_pieces(plain: Plain, pieces: Pieces, rank: int) -> Plain:
    """Plain state with other parts."""
    encoded, side = plain
    for path, (piece, tensors) in pieces:
        encoded = replaced(encoded, path, piece)
        key, new = "/".join(("side", str(rank), *path)), {entry.key: (entry, tensor) for entry, tensor in tensors}
        found = []  # in the order that is there, by which a part is compiled
        for each in side:
            name = each[0].key
            if name != key and not name.startswith(f"{key}/"):
                found.append(each)
            elif name in new:
                found.append(new.pop(name))
        side = [*found, *new.values()]
    return encoded, side
