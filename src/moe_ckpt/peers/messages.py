"""The messages of one connection: a copy is offered, accepted or refused, sent, verified, and acknowledged or not.

An offer is a fixed record and the slot's header; the bytes follow only after the holder has reserved room for them. So
no memory is allocated before its length was checked, and a refusal costs no bytes. Nothing is unpickled.
"""

from __future__ import annotations

import enum
import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from moe_ckpt.errors import DamagedError, MemoryFullError
from moe_ckpt.format.shard import MAX_HEADER_BYTES
from moe_ckpt.format.slot import SlotHeader
from moe_ckpt.peers.store import HeaderReader, Incoming, ReplicaStore, decode_sent_header
from moe_ckpt.peers.wire import CHUNK_NBYTES, Link, Wire
from moe_ckpt.ports import GatedTransfer
from moe_ckpt.slices.snapshot import SnapshotPart

log = logging.getLogger("moe_ckpt")

_MAGIC = b"mockcopy"
_OFFER = struct.Struct("<8sQQQQQ")
_ANSWER = struct.Struct("<QIQQ")
_RUN = struct.Struct("<QQ")
_MOST_RUNS = 1 << 20
_MOST_SLOTS = 1 << 10
"""Most slots of one snapshot."""
_GATHERED_NBYTES = 1 << 16
"""Runs with fewer bytes are sent together."""
_MOST_HEADER_NBYTES = 4 * MAX_HEADER_BYTES
_MOST_DATA_NBYTES = 1 << 44
"""More than the memory of any host. Room is reserved before a byte is taken in any case."""


HeldBack = Callable[[int], GatedTransfer | None]


class Status(enum.IntEnum):
    """The answer of a holder about a copy."""

    SEND = 1
    """Room is reserved, and bytes are requested: ``needed`` runs follow the answer, with ``free`` bytes in all."""
    HELD = 2
    """All slices arrived undamaged, and the slot is sealed."""
    FULL = 3
    DAMAGED = 4
    FAILED = 5


@dataclass(frozen=True, eq=False)
class SealedSlot:
    """A sealed slot, which must not change until its copies are acknowledged.

    Attributes:
        step: Step whose state it has.
        memory: ``[nbytes]`` uint8 on the host: the slot's bytes from the first to the end of the last slice.
        header: Header of the slot, as it was sealed.
    """

    step: int
    memory: torch.Tensor
    header: bytes


@dataclass(frozen=True)
class Answer:
    """A holder's answer.

    Attributes:
        status: The answer.
        needed: Bytes that are needed, if the holder's memory is full; see also ``Status.SEND``.
        free: Bytes that are free, if the holder's memory is full; see also ``Status.SEND``.
    """

    status: Status
    needed: int = 0
    free: int = 0


class Sent(NamedTuple):
    """One copy that was sent.

    Attributes:
        answer: The holder's last answer.
        nbytes: Bytes that were sent.
        secs: Time from the first of these bytes until the holder had verified all, without the time in which they were
            held back.
    """

    answer: Answer
    nbytes: int = 0
    secs: float = 0.0


def send_copy(
    wire: Wire,
    sequence: int,
    share: SealedSlot,
    held_back: HeldBack = lambda nbytes: None,
    more: int = 0,
) -> Sent:
    """Sends one copy, on the source's side.

    Args:
        wire: The connection.
        sequence: Of the snapshot.
        share: The slot.
        held_back: Returns the transfer that holds back so many bytes; None if they may go at once.
        more: Number of slots of the same snapshot that follow.

    Raises:
        OSError: The holder is gone, hangs, or sends an invalid answer.
    """
    nbytes = share.memory.numel()
    wire.send(_OFFER.pack(_MAGIC, sequence, more, share.step, len(share.header), nbytes))
    wire.send(share.header)
    answer = _answer(wire, sequence)
    if answer.status is not Status.SEND:
        return Sent(answer)
    if answer.needed > _MOST_RUNS:
        raise ConnectionAbortedError(f"{answer.needed:,} runs of copy {sequence} are wanted")
    runs = list(_RUN.iter_unpack(wire.receive(_RUN.size * answer.needed)))
    if any(not begin <= end <= nbytes for begin, end in runs):
        raise ConnectionAbortedError(f"bytes are wanted of copy {sequence} that it does not have")
    wanted_nbytes = sum(end - begin for begin, end in runs)
    transfer = held_back(wanted_nbytes)
    began = time.perf_counter()
    _send_runs(wire.send if transfer is None else partial(_send_admitted, wire, transfer), share.memory, runs)
    answer = _answer(wire, sequence)
    held_secs = 0.0 if transfer is None else transfer.held_secs
    return Sent(answer, wanted_nbytes, time.perf_counter() - began - held_secs)


def _send_admitted(wire: Wire, transfer: GatedTransfer, data: memoryview | bytes) -> None:
    """Sends chunks, each of which the transfer admits."""
    view = memoryview(data)
    for at in range(0, len(view), transfer.chunk_nbytes):
        chunk = view[at : at + transfer.chunk_nbytes]
        transfer.admit(len(chunk))
        wire.send(chunk)


def _send_runs(
    send: Callable[[memoryview | bytes], None], slot_bytes: torch.Tensor, runs: list[tuple[int, int]]
) -> None:
    small, memory = bytearray(), slot_bytes.numpy().data
    for begin, end in runs:
        if end - begin < _GATHERED_NBYTES:
            small += memory[begin:end]
        if small and (end - begin >= _GATHERED_NBYTES or len(small) >= _GATHERED_NBYTES):
            send(bytes(small))
            small.clear()
        if end - begin >= _GATHERED_NBYTES:
            send(memory[begin:end])
    if small:
        send(bytes(small))


def _answer(wire: Wire, sequence: int) -> Answer:
    of, status, needed, free = _ANSWER.unpack(wire.receive(_ANSWER.size))
    if of != sequence or status not in Status.__members__.values():
        raise ConnectionAbortedError(f"the answer {status} to {of} is for {sequence}")
    return Answer(Status(status), needed, free)


class CopyReceiver:
    """The holder's side of one connection.

    Args:
        wire: The connection.
        link: The two ends of the connection.
        run_id: Of the store.
        store: Keeps the copies.
        patience_secs: Longest wait for this rank's own snapshot of the same step, before all bytes are requested.
    """

    def __init__(self, wire: Wire, link: Link, run_id: str, store: ReplicaStore, patience_secs: float) -> None:
        self._wire, self._link, self._run_id, self._store = wire, link, run_id, store
        self._patience_secs = patience_secs
        self._reader = HeaderReader()

    def run(self) -> None:
        """Receives copies until the source ends the connection.

        Raises:
            OSError: The source is gone, hung in the middle of a copy, or sent an invalid offer.
        """
        newest, offer = (-1, 0), bytearray(_OFFER.size)
        while self._wire.receive_into(memoryview(offer), idle=True):
            magic, sequence, more, step, header_nbytes, nbytes = _OFFER.unpack(offer)
            is_next = (sequence, -more) > newest and more < _MOST_SLOTS
            if magic != _MAGIC or not is_next or header_nbytes > _MOST_HEADER_NBYTES or nbytes > _MOST_DATA_NBYTES:
                raise ConnectionAbortedError(
                    f"copy {sequence} (header {header_nbytes:,} bytes, {nbytes:,} in all, {more} slots after it) was "
                    f"offered after copy {newest[0]}, which {-newest[1]} slots were to follow"
                )
            newest = sequence, -more
            self._answer(sequence, self._receive(sequence, more, step, header_nbytes, nbytes))

    def _answer(self, sequence: int, answer: Answer) -> None:
        self._wire.send(_ANSWER.pack(sequence, answer.status, answer.needed, answer.free))

    def _receive(self, sequence: int, more: int, step: int, header_nbytes: int, nbytes: int) -> Answer:
        """Receives one offered copy. Returns the answer to the source."""
        link, store = self._link, self._store
        raw = self._wire.receive(header_nbytes)
        try:
            header = decode_sent_header(raw, self._run_id, link.generation, link.source, step)
            extents = self._reader.extents(header, f"the copy of rank {link.source}")
            incoming = store.reserve(header, raw, extents, nbytes)
        except DamagedError as error:
            log.warning("a copy was refused: %s", str(error))
            return Answer(Status.DAMAGED)
        except MemoryFullError as error:
            return Answer(Status.FULL, error.needed_bytes, error.free_bytes)
        except OSError as error:
            log.warning("no copy of rank %d can lie here: %s", link.source, str(error))
            return Answer(Status.FAILED)
        try:
            self._fill(incoming, store.mirror_of(link.source, sequence, self._patience_secs, again=more > 0), step)
            requested = incoming.requested
            self._answer(sequence, Answer(Status.SEND, len(requested), sum(end - at for at, end in requested)))
            self._wire.send(b"".join(_RUN.pack(*run) for run in requested))
            damaged = self._take(incoming)
        except OSError:
            store.discard(incoming)
            raise
        if damaged is not None:
            store.discard(incoming)
            log.warning(
                "the copy of rank %d's step %d was refused: checksum mismatch in slice %s",
                *(link.source, step, _name_at(header, damaged)),
            )
            return Answer(Status.DAMAGED)
        try:
            store.keep(link.source, sequence, incoming)
        except OSError as error:
            store.discard(incoming)
            log.warning("the copy of rank %d's step %d cannot be kept: %s", link.source, step, str(error))
            return Answer(Status.FAILED)
        return Answer(Status.HELD)

    def _fill(self, incoming: Incoming, mirrors: Sequence[SnapshotPart], step: int) -> None:
        """Fills the copy from this rank's own state. Keeps no reference to that, since its memory is needed soon."""
        link, differ = self._link, 0
        for mirror in mirrors:
            differ += incoming.fill(mirror)
        if differ:
            log.warning(
                "%d slices of step %d differ between rank %d and rank %d, which should hold the same; those of rank %d "
                "are sent to its copy",
                *(differ, step, link.source, link.holder, link.source),
            )

    def _take(self, incoming: Incoming) -> int | None:
        """Receives the requested bytes. Returns the first byte of the first damaged slice; None if there is none."""
        damaged: int | None = None
        for first, end in incoming.requested:
            for begin in range(first, end, CHUNK_NBYTES):
                chunk = incoming.memory[begin : min(begin + CHUNK_NBYTES, end)]
                if not self._wire.receive_into(chunk):
                    raise ConnectionResetError("the connection ended in the middle of a copy")
                if damaged is None:
                    damaged = incoming.verify(begin + len(chunk))
        return damaged


def _name_at(header: SlotHeader, begin: int) -> str:
    """Returns the name of the slice that begins at byte ``begin``."""
    entries = ((part.begin + entry.begin, entry) for part in header.parts for entry in header.slices(part, "a copy"))
    return next((f"{entry.name} of {entry.operator}" for at, entry in entries if at == begin and entry.nbytes), "?")
