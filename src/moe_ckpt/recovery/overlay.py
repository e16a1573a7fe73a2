"""After a restore: newer experts from host memory that survived the fault (MoC, "two-level PEC").

Storage has restored step s, some experts in versions older than s. Whoever still holds such an expert in the
recovery buffer of exactly this checkpoint gives it to all: each expert returns at the newest version that
any surviving tier holds. Non-experts, and state without rows such as Adam's step count, are never older
than s, so nothing but rows of experts changes.

What is held is offered by its holder only after its checksum matched, and taken only where all ranks
received it whole. Bytes are sent only if some rank needs what it does not hold itself: with one process, or
sharded parameters on the same ranks as before, none are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_ckpt.core.coverage import Box, prove_cover
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.host_tier import HeldCheckpoint, HostTier, as_values, checksum
from moe_ckpt.errors import CoverageError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.recovery.index import TensorIndex
from moe_ckpt.recovery.restore import block, box_of

log = logging.getLogger("moe_ckpt")

_BATCH_NBYTES = 64 << 20
"""Experts are checked and written in groups of this size; it bounds the memory that receiving needs."""

Expert = tuple[int, int]
Wanted = Mapping[str, Mapping[str, Sequence[Box]]]
"""operator -> key of a tensor -> the blocks of it that belong to the operator."""


@dataclass(frozen=True)
class Offer:
    """A slice that ``source`` holds, undamaged."""

    entry: SliceEntry
    source: int


def overlay(
    manifest: Manifest, index: TensorIndex, comm: Communicator, state: TrainingState, tier: HostTier | None
) -> Counts | None:
    """Put newer experts from surviving host memory over those that storage had.

    A collective, called by all ranks on the training thread right after ``restore`` of ``manifest``; where nothing
    survived anywhere, it is one small agreement.

    tier: what this process held before the fault, None if nothing.

    Returns ``[L, E]``: the tokens that the experts put back so have seen (those applied as of this step), 0 for all
    others; None if there are none. Equal on every rank.

    Raises:
        RuntimeError: a peer is gone. The state may then mix both versions: restore again.
    """
    held = None if tier is None else tier.find(manifest.run_id, manifest.step, manifest.generation)
    if held is not None and not _is_of(held, manifest, index):
        log.warning("what host memory holds of %s is not what storage holds; it is not used", manifest.directory)
        held = None
    if not _anywhere(comm, held is not None):
        return None
    stale = stale_experts(manifest)
    wanted = _blocks(index, stale)
    own = _verified(held, wanted, index) if held is not None else {}
    offers = _complete(wanted, _exchange(comm, own))
    experts = _Writer(comm, state, own).write(offers)
    if comm.rank == 0 and stale:
        log.info(
            "%d of %d experts that storage holds in older versions came back from host memory",
            len(experts),
            len(stale),
        )
    if not experts:
        return None
    applied = np.asarray(manifest.tokens["applied"], dtype=np.int64)
    seen = np.zeros_like(applied)
    for operator in experts:
        seen[stale[operator]] = applied[stale[operator]]
    return seen


def stale_experts(manifest: Manifest) -> dict[str, Expert]:
    """Operator -> (layer, expert) of the experts whose newest stored version is older than the checkpoint."""
    return {
        operator: (layer, expert)
        for layer, record in enumerate(manifest.model.layers)
        for expert in range(record.experts)
        if manifest.operators[operator := expert_id(layer, expert)].step < manifest.step
    }


def _is_of(held: HeldCheckpoint, manifest: Manifest, index: TensorIndex) -> bool:
    """True if the bytes that went to storage from this buffer are those that the manifest stands for."""
    written = {
        (stored.entry.name, stored.entry.checksum)
        for group in index.tensors.values()
        for stored in group
        if stored.path.startswith(f"{manifest.directory}/")
    }
    return all(
        (entry.name, entry.checksum) in written
        for part in held.parts
        if part.is_written
        for entry in part.entries
        if entry.operator
    )


def _anywhere(comm: Communicator, here: bool) -> bool:
    return bool(_largest(comm, [here])[0])


def _largest(comm: Communicator, values: Sequence[int]) -> list[int]:
    _, largest = comm.agree(np.zeros(0, dtype=np.int64), np.asarray(values, dtype=np.int64))
    return [int(value) for value in largest]


def _blocks(index: TensorIndex, operators: Collection[str]) -> dict[str, dict[str, list[Box]]]:
    """All that belongs to each operator, by what storage holds of its older version: the same tensors and rows."""
    found: dict[str, dict[str, list[Box]]] = {op: {} for op in operators}
    for key, group in index.tensors.items():
        for stored in group:
            if stored.entry.operator in found and stored.entry.box.volume:
                found[stored.entry.operator].setdefault(key, []).append(stored.entry.box)
    return found


def _verified(
    held: HeldCheckpoint, wanted: Wanted, index: TensorIndex
) -> dict[str, tuple[SliceEntry, torch.Tensor]]:
    """Name -> (slice, bytes) of what this rank can give: wanted, of the restored tensors, and undamaged."""
    found = {}
    for entry, data in held.slices():
        if entry.key not in wanted.get(entry.operator, {}):
            continue
        meta = index.meta(entry.key)
        if (entry.dtype, entry.global_shape) != (meta.dtype, meta.global_shape):
            continue
        if checksum(data) == entry.checksum:
            found[entry.name] = (entry, data)
        else:
            log.warning(
                "slice %s of %s, held in host memory since step %d, is damaged; the expert stays as storage has it",
                entry.name,
                entry.operator,
                held.step,
            )
    return found


def _exchange(comm: Communicator, own: Mapping[str, tuple[SliceEntry, torch.Tensor]]) -> list[Offer]:
    """What every rank has to offer, in the same order on all; each slice once."""
    mine = json.dumps([_told(entry) for entry, _ in own.values()]).encode()
    offers: dict[str, Offer] = {}
    for source in range(comm.world_size):
        for fields in json.loads(comm.share(mine, source)):
            entry = _heard(fields)
            offers.setdefault(entry.name, Offer(entry, source))
    return list(offers.values())


def _told(entry: SliceEntry) -> list[Any]:
    return [entry.key, entry.operator, entry.dtype, entry.offsets, entry.shape, entry.global_shape, entry.checksum]


def _heard(fields: list[Any]) -> SliceEntry:
    key, operator, dtype, offsets, shape, global_shape, digest = fields
    return SliceEntry(key, operator, dtype, tuple(offsets), tuple(shape), tuple(global_shape), checksum=digest)


def _complete(wanted: Wanted, offers: Iterable[Offer]) -> dict[str, list[Offer]]:
    """Operator -> its slices, for the operators that are offered whole: half of an expert is of no use."""
    by_operator: dict[str, list[Offer]] = {}
    for offer in offers:
        by_operator.setdefault(offer.entry.operator, []).append(offer)
    whole = {}
    for operator, group in by_operator.items():
        try:
            prove_cover(operator, wanted.get(operator, {}), [(offer.entry.key, offer.entry.box) for offer in group])
        except CoverageError as error:
            log.info("not all of %s survived in host memory, it stays as storage has it: %s", operator, error)
        else:
            whole[operator] = group
    return whole


class _Writer:
    """Brings offered slices to the ranks that need them, and writes them into the live tensors."""

    def __init__(
        self, comm: Communicator, state: TrainingState, own: Mapping[str, tuple[SliceEntry, torch.Tensor]]
    ) -> None:
        self._comm = comm
        self._own = {name: data for name, (_, data) in own.items()}
        self._live: dict[str, list[StateTensor]] = {}
        for tensor in state.tensors():
            self._live.setdefault(tensor.key, []).append(tensor)

    def write(self, offers: Mapping[str, Sequence[Offer]]) -> list[str]:
        """The operators that all ranks now have in the offered version."""
        every = [offer for group in offers.values() for offer in group]
        if not every:
            return []
        lacking = _largest(self._comm, [self._lacks(offer.entry) for offer in every])
        sent = {offer.entry.name for offer, lacks in zip(every, lacking, strict=True) if lacks}
        done: list[str] = []
        for operators in _batches(offers):
            group = [offer for operator in operators for offer in offers[operator]]
            received = self._receive([offer for offer in group if offer.entry.name in sent])
            damaged = self._damaged(received, group)
            if received and _anywhere(self._comm, damaged):
                log.warning("%s did not arrive whole everywhere, they stay as storage has them", ", ".join(operators))
                continue
            self._copy(received, group)
            done += operators
        return done

    def _lacks(self, entry: SliceEntry) -> bool:
        return entry.name not in self._own and any(True for _ in self._targets(entry))

    def _targets(self, entry: SliceEntry) -> Iterator[tuple[StateTensor, Box]]:
        """The live tensors that hold elements of the slice, each with the common block."""
        for tensor in self._live.get(entry.key, ()):
            common = entry.box.overlap(box_of(tensor))
            if common is not None and common.volume:
                yield tensor, common

    def _receive(self, offers: Sequence[Offer]) -> dict[str, torch.Tensor]:
        """Name -> bytes of these slices, which their sources send to everybody, all of one source at once."""
        received: dict[str, torch.Tensor] = {}
        for source in sorted({offer.source for offer in offers}):
            entries = [offer.entry for offer in offers if offer.source == source]
            payload = b""
            if self._comm.rank == source:
                payload = b"".join(self._own[entry.name].numpy().tobytes() for entry in entries)
            whole = torch.frombuffer(bytearray(self._comm.share(payload, source)), dtype=torch.uint8)
            at = 0
            for entry in entries:
                received[entry.name] = whole[at : at + entry.nbytes]
                at += entry.nbytes
        return received

    def _damaged(self, received: Mapping[str, torch.Tensor], offers: Iterable[Offer]) -> bool:
        return any(
            checksum(received[offer.entry.name]) != offer.entry.checksum
            for offer in offers
            if offer.entry.name in received
        )

    @torch.no_grad()
    def _copy(self, received: Mapping[str, torch.Tensor], offers: Iterable[Offer]) -> None:
        for offer in offers:
            entry = offer.entry
            targets = list(self._targets(entry))
            if not targets:
                continue
            data = self._own[entry.name] if entry.name in self._own else received[entry.name]
            values = as_values(entry, data)
            for tensor, common in targets:
                source = block(values, entry.offsets, common)
                block(tensor.local.detach(), tensor.offsets, common).copy_(source)


def _batches(offers: Mapping[str, Sequence[Offer]]) -> Iterator[list[str]]:
    """Whole operators, in groups of bounded size."""
    batch: list[str] = []
    nbytes = 0
    for operator, group in offers.items():
        size = sum(offer.entry.nbytes for offer in group)
        if batch and nbytes + size > _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(operator)
        nbytes += size
    if batch:
        yield batch
