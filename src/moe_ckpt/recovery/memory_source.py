"""The memory of this job's processes as a source of a recovery (MoC, "two-level PEC").

Storage may hold some experts of a checkpoint in versions older than its step. A rank that has such an expert in the
recovery buffer of exactly this checkpoint offers it to all. Memory that outlived a process is another source
(``memory_checkpoints``).

A slice is offered only after its checksum matched, and used only if all ranks received its expert whole. Bytes are sent
only if some rank needs a slice that it does not have: with one process, or the same sharding as before, none are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.coverage import Box, prove_cover
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.plan import Tier
from moe_ckpt.core.recovery_plan import ABSENT, Inventory
from moe_ckpt.core.tokens import Counts
from moe_ckpt.engine.host_tier import HostTier, KeptCheckpoint, as_values, checksum
from moe_ckpt.errors import CoverageError, DamagedError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.shard import SliceEntry
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.recovery.index import TensorIndex, blocks_of
from moe_ckpt.recovery.restore import box_of
from moe_ckpt.recovery.slices import block

log = logging.getLogger("moe_ckpt")

_BATCH_NBYTES = 64 << 20
"""Experts are received and written in groups of this size, which bounds the memory for that."""

Expert = tuple[int, int]
Wanted = Mapping[str, Mapping[str, Sequence[Box]]]
"""operator -> key of a tensor -> the blocks of it that belong to the operator."""


@dataclass(frozen=True)
class Offer:
    """An undamaged slice in the memory of rank ``source``."""

    entry: SliceEntry
    source: int


class MemorySource:
    """The ``sources.Source`` of experts that the ranks' memory has newer than storage.

    The constructor is a collective of the training thread, one small agreement if nothing survived anywhere.

    Args:
        manifest: Of the checkpoint.
        index: Its slices on storage.
        comm: The ranks.
        tier: What survived in this process; None if nothing.

    Raises:
        PeerLostError: A peer is gone.
    """

    def __init__(self, manifest: Manifest, index: TensorIndex, comm: Communicator, tier: HostTier | None) -> None:
        self._manifest = manifest
        self._comm = comm
        self._stale = stale_experts(manifest)
        self._own: dict[str, tuple[SliceEntry, torch.Tensor]] = {}
        self._offers: dict[str, list[Offer]] = {}
        found = () if tier is None else tier.find(manifest.run_id, manifest.step, manifest.generation)
        kept = [each for each in found if _is_of(each, manifest, index)]
        if len(kept) < len(found):
            log.warning("what host memory holds of %s is not what storage holds; it is not used", manifest.directory)
        [survived] = largest(comm, [len(kept)])
        if not survived:
            return
        wanted = blocks_of(index, self._stale)
        for each in kept:
            self._own |= _verified(each, wanted, index)
        self._offers = _complete(wanted, _exchange(comm, self._own))

    def inventory(self) -> Inventory:
        """Returns the operators that the ranks together have whole."""
        operators = tuple(self._manifest.operators)
        steps = np.full(len(operators), ABSENT, dtype=np.int64)
        nbytes = np.zeros(len(operators), dtype=np.int64)
        for at, operator in enumerate(operators) if self._offers else ():
            offers = self._offers.get(operator, ())
            if offers:
                steps[at] = self._manifest.step
                nbytes[at] = sum(offer.entry.nbytes for offer in offers)
        return Inventory(Tier.HOST, "memory", steps, nbytes)

    def write(self, operators: Collection[str], state: TrainingState) -> tuple[str, ...]:
        """Writes these operators into the live tensors of every rank. A collective.

        Returns:
            Those that did not arrive whole on every rank, and were written on none.

        Raises:
            PeerLostError: A peer is gone. The state may mix versions: recover again.
        """
        offers = {operator: self._offers[operator] for operator in operators}
        every = [offer.entry for group in offers.values() for offer in group]
        if not every:
            return ()
        live: dict[str, list[StateTensor]] = {}
        for tensor in state.tensors():
            live.setdefault(tensor.key, []).append(tensor)
        lacking = largest(self._comm, [entry.name not in self._own and any(_targets(live, entry)) for entry in every])
        sent = {entry.name for entry, lacks in zip(every, lacking, strict=True) if lacks}
        absent: list[str] = []
        for batch in _batches(offers):
            group = [offer for operator in batch for offer in offers[operator]]
            received = self._receive([offer for offer in group if offer.entry.name in sent])
            known = {offer.entry.name: offer.entry.checksum for offer in group}
            if received and _anywhere(self._comm, any(checksum(data) != known[n] for n, data in received.items())):
                log.warning("%s did not arrive whole everywhere, they stay as storage has them", ", ".join(batch))
                absent += batch
                continue
            for entry in (offer.entry for offer in group):
                self._copy(entry, received, _targets(live, entry))
        return tuple(absent)

    def _receive(self, offers: Sequence[Offer]) -> dict[str, torch.Tensor]:
        """Returns name -> bytes of these slices. Each source sends all of its slices at once, to all ranks."""
        received: dict[str, torch.Tensor] = {}
        for source in sorted({offer.source for offer in offers}):
            entries = [offer.entry for offer in offers if offer.source == source]
            payload = b""
            if self._comm.rank == source:
                payload = b"".join(self._own[entry.name][1].numpy().tobytes() for entry in entries)
            whole = torch.frombuffer(bytearray(self._comm.share(payload, source)), dtype=torch.uint8)
            at = 0
            for entry in entries:
                received[entry.name] = whole[at : at + entry.nbytes]
                at += entry.nbytes
        return received

    @torch.no_grad()
    def _copy(
        self, entry: SliceEntry, received: Mapping[str, torch.Tensor], targets: Iterable[tuple[StateTensor, Box]]
    ) -> None:
        """Writes a slice that this rank has, or received, into the live tensors."""
        for tensor, common in targets:
            data = self._own[entry.name][1] if entry.name in self._own else received[entry.name]
            source = block(as_values(entry, data), entry.offsets, common)
            block(tensor.local.detach(), tensor.offsets, common).copy_(source)

    def seen(self, operators: Collection[str]) -> Counts | None:
        """Returns ``[L, E]`` tokens seen by those that storage has older, 0 for others; None if there are none."""
        operators = [operator for operator in operators if operator in self._stale]
        if not operators:
            return None
        applied = np.asarray(self._manifest.tokens["applied"], dtype=np.int64)
        seen = np.zeros_like(applied)
        for operator in operators:
            seen[self._stale[operator]] = applied[self._stale[operator]]
        return seen


def stale_experts(manifest: Manifest) -> dict[str, Expert]:
    """Returns operator -> (layer, expert) of the experts whose stored version is older than the checkpoint."""
    return {
        operator: (layer, expert)
        for layer, record in enumerate(manifest.model.layers)
        for expert in range(record.experts)
        if manifest.operators[operator := expert_id(layer, expert)].step < manifest.step
    }


def _is_of(kept: KeptCheckpoint, manifest: Manifest, index: TensorIndex) -> bool:
    """Returns whether what was written from this buffer is what the manifest names.

    Their checksums tell, and that of the state file, which every rank writes; the bytes themselves are verified when
    they are offered.
    """
    if kept.state_digest not in {record.digest for record in manifest.states}:
        return False
    try:
        entries = [entry for part in kept.parts if part.is_written for entry in part.entries if entry.operator]
    except DamagedError as error:
        log.warning("%s", error)
        return False
    written = {
        (stored.entry.name, stored.entry.checksum)
        for group in index.tensors.values()
        for stored in group
        if stored.path.startswith(f"{manifest.directory}/")
    }
    return all((entry.name, entry.checksum) in written for entry in entries)


def _anywhere(comm: Communicator, here: bool) -> bool:
    return bool(largest(comm, [here])[0])


def _verified(kept: KeptCheckpoint, wanted: Wanted, index: TensorIndex) -> dict[str, tuple[SliceEntry, torch.Tensor]]:
    """Returns name -> (slice, bytes) of what this rank has of ``wanted``, undamaged and of the restored tensors."""
    found = {}
    for entry, data in kept.slices():
        if entry.key not in wanted.get(entry.operator, {}):
            continue
        meta = index.meta(entry.key)
        if (entry.dtype, entry.global_shape) != (meta.dtype, meta.global_shape):
            continue
        if checksum(data) == entry.checksum:
            found[entry.name] = (entry, data)
        else:
            log.warning(
                "slice %s of %s, held in host memory since step %d, is damaged; storage's copy is taken",
                entry.name,
                entry.operator,
                kept.step,
            )
    return found


def _exchange(comm: Communicator, own: Mapping[str, tuple[SliceEntry, torch.Tensor]]) -> list[Offer]:
    """Returns the offers of all ranks, in the same order on each; each slice once."""
    mine = json.dumps([_encoded(entry) for entry, _ in own.values()]).encode()
    offers: dict[str, Offer] = {}
    for source in range(comm.world_size):
        for fields in json.loads(comm.share(mine, source)):
            entry = _decoded(fields)
            offers.setdefault(entry.name, Offer(entry, source))
    return list(offers.values())


def _encoded(entry: SliceEntry) -> list[Any]:
    return [entry.key, entry.operator, entry.dtype, entry.offsets, entry.shape, entry.global_shape, entry.checksum]


def _decoded(fields: list[Any]) -> SliceEntry:
    key, operator, dtype, offsets, shape, global_shape, digest = fields
    return SliceEntry(key, operator, dtype, tuple(offsets), tuple(shape), tuple(global_shape), checksum=digest)


def _complete(wanted: Wanted, offers: Iterable[Offer]) -> dict[str, list[Offer]]:
    """Returns operator -> its offers, of operators that are offered whole."""
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


def _targets(live: Mapping[str, Sequence[StateTensor]], entry: SliceEntry) -> Iterator[tuple[StateTensor, Box]]:
    """Yields the live tensors, by key, with elements of the slice, each with the common block."""
    for tensor in live.get(entry.key, ()):
        common = entry.box.overlap(box_of(tensor))
        if common is not None and common.volume:
            yield tensor, common


def _batches(offers: Mapping[str, Sequence[Offer]]) -> Iterator[list[str]]:
    """Yields whole operators, in groups of bounded size."""
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
