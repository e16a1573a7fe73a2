"""A dense checkpoint on storage that this rank's own slots of a gradient log give its share of, beside training.

Training logs the step as any other. The persist thread writes the share: what is updated comes from ``OwnLog``, a few
tensors at a time, and goes to its place in the shard at once. So no second copy of the rank's share is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import xxhash

from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.placement import Placement
from moe_ckpt.engine.snapshot import Snapshot
from moe_ckpt.engine.writing import write_named, write_placed
from moe_ckpt.errors import ConfigError, CoverageError
from moe_ckpt.format.finite import all_finite, judged_in
from moe_ckpt.format.manifest import KINDS, FileRecord, StateRecord, shard_path, state_path
from moe_ckpt.format.sealed import digest, unseal
from moe_ckpt.format.shard import ShardHeader, SliceEntry, encode_header, lay_out
from moe_ckpt.format.slot import SlotHeader, decode_slot
from moe_ckpt.memory.slot import Slot, read_header
from moe_ckpt.ports import Communicator, StateTensor
from moe_ckpt.storage.base import Chunk, Storage

_UNKNOWN = "0" * 16
"""In place of a checksum, as long as one."""
_INSTEAD = "dense_from='training' copies such a step in full, in any layout"


@dataclass(frozen=True, eq=False)
class OwnSlot:
    """A sealed slot of this rank, which stays as it is as long as it is read.

    Attributes:
        path: For messages.
        header: Of it.
        memory: ``[nbytes]`` uint8.
    """

    path: str
    header: SlotHeader
    memory: torch.Tensor


def opened_slots(slots: Sequence[Slot]) -> list[OwnSlot]:
    """Returns them with their headers. Raises ``DamagedError`` if one is damaged, ``OSError`` if it cannot be read."""
    return [OwnSlot(str(s.path), decode_slot(read_header(s.path), str(s.path)), s.memory) for s in slots]


class OwnLog(Protocol):
    """This rank's part of a log, from the oldest anchor to the step that is made (``gradients.own_log``)."""

    @property
    def state(self) -> bytes:
        """The rank's state file of that step, as a dense checkpoint has it."""
        ...

    def side(self) -> Iterator[tuple[SliceEntry, torch.Tensor]]:
        """Yields the tensors of that state with their bytes, ``[nbytes]`` uint8."""
        ...

    def slices(self, wanted: Sequence[SliceEntry]) -> Iterator[tuple[SliceEntry, torch.Tensor]]:
        """Yields each of ``wanted``, in any order, with its bytes as of that step, ``[nbytes]`` uint8 on the host.

        Raises:
            DamagedError: A slice of the log is.
            CoverageError: The log does not lead there with this rank's slots alone.
            UnsupportedError, ReplayDivergedError: As ``gradients.densifying.Densifier.share``.
        """
        ...


OpenLog = Callable[[Sequence[OwnSlot]], OwnLog]
"""Reads the plain state of slots that follow one another; no slice of model or optimizers. Raises as ``slices``."""


def require_whole_units(tensors: Sequence[StateTensor], placement: Placement, comm: Communicator) -> None:
    """Refuses, on every rank, what a rank's own slots do not hold all of. A collective.

    Args:
        tensors: Of this rank.
        placement: Who holds what.
        comm: The ranks.

    Raises:
        ConfigError: The option cannot be used; says why, and what to do.
    """
    reason = _refusal(tensors, placement)
    [refused] = largest(comm, [int(bool(reason))])
    if refused:
        raise ConfigError(f"dense_from='log': {reason or 'another rank cannot use it, and says why'}. {_INSTEAD}")


def _refusal(tensors: Sequence[StateTensor], placement: Placement) -> str:
    if torch.full((1,), 1e-40).mul_(1.0).item() == 0.0:
        return (
            "torch.set_flush_denormal(True) holds for the training thread alone, so that updates made on another one "
            "would round the smallest numbers otherwise"
        )
    for tensor in tensors:
        if tensor.local.device.type != "cpu":
            return (
                f"{tensor.parameter} is trained on a device of type {tensor.local.device.type!r}, and updates are made "
                "once more on the CPU only, where last bits may differ"
            )
        if tensor.replicated and tensor.key.startswith("model/") and len(placement.peers) > 1:
            return (
                f"{tensor.parameter} is held by {len(placement.peers)} ranks, of which each logs a part of its "
                "gradients (DDP, or Megatron without the distributed optimizer), but an update is made of the whole "
                "tensor. FSDP2 and Megatron's use_distributed_optimizer give each rank its own tensors"
            )
    return ""


def write_from_log(
    storage: Storage, snapshot: Snapshot, log: OwnLog, run_id: str, rank: int
) -> tuple[tuple[FileRecord, ...], StateRecord, str]:
    """Makes and writes this rank's share of ``snapshot``, as ``engine.writing.write_share`` writes a copied one.

    Returns:
        What that does, and the key of the first slice with NaN or infinity.

    Raises:
        OSError: It cannot be written.
        DamagedError, CoverageError, UnsupportedError, ReplayDivergedError: As ``OwnLog.slices``.
    """
    request = snapshot.request
    header = ShardHeader(run_id, request.step, request.generation, rank, ())
    own = {part.kind: part.slices.listed() for _, part in snapshot.plan.own}
    files, spoiled = [], list[str]()
    for kind in KINDS:
        side = list(log.side()) if kind == "non_expert" else []
        wanted = own.get(kind, [])
        if wanted or side:
            path = shard_path(snapshot.directory, rank, kind)
            files.append(_write_shard(storage, path, header, wanted, log, side, spoiled))
    path = state_path(snapshot.directory, rank)
    write_named(storage, path, [log.state])
    judged = judged_in(unseal(log.state, path)["state"] if spoiled else None)
    record = StateRecord(path, len(log.state), digest(log.state), rank)
    return tuple(files), record, next(filter(judged, spoiled), "")


def _write_shard(
    storage: Storage,
    path: str,
    header: ShardHeader,
    wanted: Sequence[SliceEntry],
    log: OwnLog,
    side: Sequence[tuple[SliceEntry, torch.Tensor]],
    spoiled: list[str],
) -> FileRecord:
    """spoiled: gets the keys of slices with NaN or infinity."""
    placed = {each.name: each for each in lay_out([*wanted, *(entry for entry, _ in side)])}
    blank = replace(header, slices=tuple(replace(each, checksum=_UNKNOWN) for each in placed.values()))
    begin, checksums = len(encode_header(blank)), dict[str, str]()
    raw = b""

    def pieces() -> Iterator[tuple[int, Chunk]]:
        nonlocal raw
        for those in (iter(side), log.slices(wanted)):
            for entry, values in those:
                data = values.numpy().data
                checksums[entry.name] = xxhash.xxh3_64_hexdigest(data)
                if entry.operator and not all_finite(data, entry.dtype):
                    spoiled.append(entry.key)
                yield begin + placed[entry.name].begin, data
        missing = placed.keys() - checksums.keys()
        if missing:
            raise CoverageError(path, tuple(f"{name} was not made" for name in sorted(missing)))
        slices = tuple(replace(each, checksum=checksums[each.name]) for each in placed.values())
        raw = encode_header(replace(header, slices=slices))
        yield 0, raw

    nbytes = write_placed(storage, path, begin + max(each.end for each in placed.values()), pieces())
    return FileRecord(path, nbytes, len(raw), digest(raw), header.step, header.rank)
