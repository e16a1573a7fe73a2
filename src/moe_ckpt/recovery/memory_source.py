"""The memory of this job's processes as a source of a recovery (MoC, "two-level PEC" and "triple buffering").

A rank offers what it has in the recovery buffer of exactly this checkpoint. Of operators that storage has in the same
version this saves reading them. Storage may also hold some experts in versions older than the checkpoint's step: then
they come back newer. Memory that outlived a process is another source (``memory_checkpoints``).

A slice is offered only after its checksum matched, and used only if all ranks received its operator whole. Bytes are
sent to the ranks that need a slice and do not have it: with one process, or the same sharding as before, to none.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
from moe_ckpt.recovery.index import StoredSlice, TensorIndex, blocks_of
from moe_ckpt.recovery.restore import box_of
from moe_ckpt.recovery.slices import block

log = logging.getLogger("moe_ckpt")

_BATCH_NBYTES = 64 << 20
"""A rank receives operators in groups of this size, and writes them, which bounds the memory for that."""

Expert = tuple[int, int]
Flags = npt.NDArray[np.bool_]
OperatorBoxes = Mapping[str, Mapping[str, Sequence[Box]]]
"""operator -> key of a tensor -> the blocks of it that belong to the operator."""


@dataclass(frozen=True)
class Offer:
    """An undamaged slice in the memory of rank ``source``."""

    entry: SliceEntry
    source: int


class MemorySource:
    """The ``sources.OperatorSource`` of what the ranks' memory has, some of it newer than storage.

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
        self._sound: dict[str, tuple[SliceEntry, torch.Tensor]] = {}
        self._offers: dict[str, list[Offer]] = {}
        in_memory = () if tier is None else tier.find(manifest.run_id, manifest.step, manifest.generation)
        usable = [checkpoint for checkpoint in in_memory if _is_of(checkpoint, manifest, index)]
        if len(usable) < len(in_memory):
            log.warning("the part of %s in host memory differs from storage, and is not used", manifest.directory)
        [survived] = largest(comm, [len(usable)])
        if not survived:
            return
        boxes = blocks_of(index, self._stale)
        shares = []
        for checkpoint in usable:
            sound, damaged = _verified(checkpoint, boxes, index)
            self._sound |= sound
            shares.append((_rank_of(checkpoint, manifest), damaged))
        offers = [offer for offer in self._sound.values() if offer[0].operator in boxes]
        older, damaged_of = _exchange(comm, offers, shares)
        self._offers = {**_of_this_step(manifest, index, damaged_of), **_complete(boxes, older)}

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
        return Inventory(Tier.HOST, "this job's processes", steps, nbytes)

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
        mine = [entry.name not in self._sound and any(_targets(live, entry)) for entry in every]
        lacking = np.stack([_unpacked(raw, len(every)) for raw in self._comm.everyone(np.packbits(mine).tobytes())])
        absent: list[str] = []
        for batch, columns in _batches(offers, lacking):
            group = [offer for operator in batch for offer in offers[operator]]
            received = self._receive(group, lacking[:, columns])
            if lacking[:, columns].any():
                checksums = {offer.entry.name: offer.entry.checksum for offer in group}
                differs = any(checksum(data) != checksums[name] for name, data in received.items())
                if any(largest(self._comm, [differs])):
                    log.warning(
                        "%s did not arrive completely on all ranks, so the versions on storage are used",
                        ", ".join(batch),
                    )
                    absent += batch
                    continue
            for entry in (offer.entry for offer in group):
                self._copy(entry, received, _targets(live, entry))
        return tuple(absent)

    def _receive(self, offers: Sequence[Offer], lacking: Flags) -> dict[str, torch.Tensor]:
        """Returns name -> bytes of the slices that this rank lacks, and sends what others do. A collective.

        Args:
            offers: Of some slices.
            lacking: ``[ranks, slices]``, who needs each and does not have it.
        """
        rank, received = self._comm.rank, {}
        outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
        expected: dict[int, list[torch.Tensor]] = defaultdict(list)
        for other, at in np.argwhere(lacking).tolist():
            entry, source = offers[at].entry, offers[at].source
            if other == rank:
                received[entry.name] = torch.empty(entry.nbytes, dtype=torch.uint8)
                expected[source].append(received[entry.name])
            elif source == rank:
                outgoing[other].append(self._sound[entry.name][1])
        if lacking.any():
            self._comm.swap(outgoing, expected)
        return received

    @torch.no_grad()
    def _copy(
        self, entry: SliceEntry, received: Mapping[str, torch.Tensor], targets: Iterable[tuple[StateTensor, Box]]
    ) -> None:
        """Writes a slice that this rank has, or received, into the live tensors."""
        for tensor, common in targets:
            data = self._sound[entry.name][1] if entry.name in self._sound else received[entry.name]
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


def _is_of(checkpoint: KeptCheckpoint, manifest: Manifest, index: TensorIndex) -> bool:
    """Returns whether what was written from this buffer is what the manifest names.

    Their checksums tell, and that of the state file, which every rank writes; the bytes themselves are verified when
    they are offered.
    """
    if checkpoint.state_digest not in {record.digest for record in manifest.states}:
        return False
    try:
        entries = [entry for part in checkpoint.parts if part.is_written for entry in part.entries if entry.operator]
    except DamagedError as error:
        log.warning("%s", error)
        return False
    written = {
        (stored.entry.name, stored.entry.checksum)
        for group in index.tensors.values()
        for stored in group
        if _is_own(stored, manifest)
    }
    return all((entry.name, entry.checksum) in written for entry in entries)


def _verified(
    checkpoint: KeptCheckpoint, boxes: OperatorBoxes, index: TensorIndex
) -> tuple[dict[str, tuple[SliceEntry, torch.Tensor]], list[str]]:
    """Returns (name -> (slice, bytes) of the restored tensors, undamaged; names of the damaged ones).

    Args:
        checkpoint: By this process.
        boxes: Operators that storage has in older versions. Of the others memory has what was written.
        index: Of what storage has.
    """
    sound, damaged = {}, []
    for entry, data in checkpoint.slices():
        if entry.key not in index.tensors or (entry.operator in boxes and entry.key not in boxes[entry.operator]):
            continue
        meta = index.meta(entry.key)
        if (entry.dtype, entry.global_shape) != (meta.dtype, meta.global_shape):
            continue
        if checksum(data) == entry.checksum:
            sound[entry.name] = (entry, data)
        else:
            damaged.append(entry.name)
            log.warning(
                "slice %s of %s, held in host memory since step %d, is damaged; the copy on storage is used",
                entry.name,
                entry.operator,
                checkpoint.step,
            )
    return sound, damaged


def _rank_of(checkpoint: KeptCheckpoint, manifest: Manifest) -> int:
    """Returns the rank whose share this is, which may have another number now."""
    return next(record.rank for record in manifest.states if record.digest == checkpoint.state_digest)


def _exchange(
    comm: Communicator, slices: Iterable[tuple[SliceEntry, torch.Tensor]], shares: Sequence[tuple[int, Sequence[str]]]
) -> tuple[list[Offer], dict[int, tuple[int, frozenset[str]]]]:
    """Returns what all ranks have, in the same order on each.

    Args:
        comm: The ranks.
        slices: This rank's slices of operators that storage has in older versions.
        shares: Whose shares this rank has, by the ranks of the life before, and what of each is damaged.

    Returns:
        The offers of ``slices``, each once; rank of the life before -> (who has its share, what is damaged in it).
    """
    mine = json.dumps([[_encoded(entry) for entry, _ in slices], shares]).encode()
    offers: dict[str, Offer] = {}
    damaged_of: dict[int, tuple[int, frozenset[str]]] = {}
    for source in range(comm.world_size):
        listed, theirs = json.loads(comm.share(mine, source))
        for fields in listed:
            entry = _decoded(fields)
            offers.setdefault(entry.name, Offer(entry, source))
        for rank, damaged in theirs:
            damaged_of.setdefault(rank, (source, frozenset(damaged)))
    return list(offers.values()), damaged_of


def _of_this_step(
    manifest: Manifest, index: TensorIndex, damaged_of: Mapping[int, tuple[int, frozenset[str]]]
) -> dict[str, list[Offer]]:
    """Returns operator -> its offers, of those whose every slice on storage was written from a buffer that is there.

    Args:
        manifest: Of the checkpoint.
        index: Its slices on storage.
        damaged_of: See ``_exchange``.
    """
    offers: dict[str, list[Offer]] = {}
    absent: set[str] = set()
    for stored in index.live:
        operator = stored.entry.operator
        source, damaged = damaged_of.get(stored.file.rank, (None, frozenset()))
        if source is None or stored.entry.name in damaged or not _is_own(stored, manifest):
            absent.add(operator)
        else:
            offers.setdefault(operator, []).append(Offer(stored.entry, source))
    return {operator: group for operator, group in offers.items() if operator not in absent}


def _is_own(stored: StoredSlice, manifest: Manifest) -> bool:
    """Returns whether a slice was written for this very checkpoint."""
    return stored.path.startswith(f"{manifest.directory}/")


def _encoded(entry: SliceEntry) -> list[Any]:
    return [entry.key, entry.operator, entry.dtype, entry.offsets, entry.shape, entry.global_shape, entry.checksum]


def _decoded(fields: list[Any]) -> SliceEntry:
    key, operator, dtype, offsets, shape, global_shape, digest = fields
    return SliceEntry(key, operator, dtype, tuple(offsets), tuple(shape), tuple(global_shape), checksum=digest)


def _complete(boxes: OperatorBoxes, offers: Iterable[Offer]) -> dict[str, list[Offer]]:
    """Returns operator -> its offers, of operators that are offered whole."""
    by_operator: dict[str, list[Offer]] = {}
    for offer in offers:
        by_operator.setdefault(offer.entry.operator, []).append(offer)
    whole = {}
    for operator, group in by_operator.items():
        try:
            prove_cover(operator, boxes.get(operator, {}), [(offer.entry.key, offer.entry.box) for offer in group])
        except CoverageError as error:
            log.info("not all of %s survived in host memory, so the version on storage is used: %s", operator, error)
        else:
            whole[operator] = group
    return whole


def _targets(live: Mapping[str, Sequence[StateTensor]], entry: SliceEntry) -> Iterator[tuple[StateTensor, Box]]:
    """Yields the live tensors, by key, with elements of the slice, each with the common block."""
    for tensor in live.get(entry.key, ()):
        common = entry.box.overlap(box_of(tensor))
        if common is not None and common.volume:
            yield tensor, common


def _batches(offers: Mapping[str, Sequence[Offer]], lacking: Flags) -> Iterator[tuple[list[str], slice]]:
    """Yields whole operators, in groups of which no rank lacks more than a bounded size, and their slices' places.

    Args:
        offers: Of operators.
        lacking: ``[ranks, slices]``, who needs each and does not have it.
    """
    batch: list[str] = []
    nbytes = np.zeros(len(lacking), dtype=np.int64)
    first = at = 0
    for operator, group in offers.items():
        sizes = np.array([offer.entry.nbytes for offer in group], dtype=np.int64)
        more = lacking[:, at : at + len(group)] @ sizes
        if batch and (nbytes + more).max() > _BATCH_NBYTES:
            yield batch, slice(first, at)
            batch, nbytes, first = [], np.zeros_like(nbytes), at
        batch.append(operator)
        nbytes += more
        at += len(group)
    if batch:
        yield batch, slice(first, at)


def _unpacked(raw: bytes, count: int) -> Flags:
    """Returns a rank's row of what is lacking, ``[count]``."""
    return np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=count).astype(np.bool_)


def side_tensors(tier: HostTier, manifest: Manifest) -> dict[tuple[str, int], torch.Tensor]:
    """Returns (name, checksum) -> values of what ranks keep beside operators, undamaged, as far as it is kept here."""
    tensors = {}
    for checkpoint in tier.find(manifest.run_id, manifest.step, manifest.generation):
        for part in (
            checkpoint.parts if checkpoint.state_digest in {record.digest for record in manifest.states} else ()
        ):
            try:
                entries = [entry for entry in part.entries if not entry.operator]
            except DamagedError:  # said where operators are looked for
                continue
            for entry in entries:
                data = checkpoint.buffer.memory[part.base + entry.begin : part.base + entry.end]
                if checksum(data) == entry.checksum:
                    tensors[entry.name, entry.checksum] = as_values(entry, data)
    return tensors
