"""A gradient log that other ranks, or another layout, wrote: made a dense checkpoint first, which any run goes on from.

The ranks of this run share out those of the log. Each makes the share of its ones by optimizers without a model, writes
it to storage, and rank 0 commits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from moe_ckpt.commit.made_dense import WrittenShare, commit_made
from moe_ckpt.errors import CoverageError, NoCheckpointError, UnsupportedError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.memory.gradient_log import LoggedSnapshot
from moe_ckpt.reading.memory.opened_memory import OpenedMemory
from moe_ckpt.reading.memory.slot_storage import Span
from moe_ckpt.reading.together import by_rank_zero, together
from moe_ckpt.storage.base import Storage

log = logging.getLogger("moe_ckpt")


class DenseMaker(Protocol):
    """Makes what ranks of a log wrote, as of its last step (``gradients.densifying``)."""

    manifest: Manifest

    @property
    def parent(self) -> str | None:
        """The parent of the checkpoint, as ``Manifest.parent``."""
        ...

    def device(self) -> torch.device:
        """Returns what updates are made on here."""
        ...

    def inputs(self, ranks: Iterable[int]) -> Iterator[StoredSlice]:
        """Yields the slices that the shares of these ranks need."""
        ...

    def verify(self, ranks: Iterable[int]) -> None:
        """Raises ``DamagedError`` if one of these is damaged."""
        ...

    def write(self, storage: Storage, rank: int, device: torch.device) -> WrittenShare:
        """Makes and writes the share of a rank."""
        ...


MakeDense = Callable[[OpenedMemory], DenseMaker]
"""Reads the plain state of the last step of all ranks; no slice of model or optimizers."""


def made_dense(
    comm: Communicator, storage: Storage, opened: OpenedMemory, make: MakeDense, require_fitting: Callable[[], None]
) -> str:
    """Makes a dense checkpoint of a log. A collective.

    Args:
        comm: The ranks.
        storage: Of the store, which this run has locked.
        opened: The log; of its bytes, those on other nodes may not have been fetched.
        make: See ``MakeDense``.
        require_fitting: Raises if this run cannot go on from what is made; the plain states of the last step are there.

    Returns:
        Its directory on storage.

    Raises:
        NotUsableError: Some rank cannot.
        PeerLostError: A peer is gone.
    """
    slots, manifest = opened.slots, opened.manifest
    mine = range(comm.rank, manifest.world_size, comm.world_size)
    everyone, last = range(manifest.world_size), opened.logged[-1:]
    slots.fetch(together(comm, lambda: list(_plain_spans(opened, last, everyone))))
    maker = together(comm, lambda: _made(opened, make))
    together(comm, require_fitting)
    slots.fetch(together(comm, lambda: [*_plain_spans(opened, opened.logged, mine), *_spans(maker.inputs(mine))]))
    together(comm, lambda: maker.verify(mine))
    if comm.rank == 0:
        announce(
            "step %d in memory belongs to a gradient log that %d ranks wrote in another layout. It is first made "
            "dense, and written to %s/%s",
            manifest.step,
            manifest.world_size,
            storage.root,
            manifest.directory,
        )
    written = together(comm, lambda: {rank: _write(maker, storage, rank) for rank in mine})
    payload = json.dumps({rank: [row.decode() for row in share.rows] for rank, share in written.items()}).encode()
    rows = {int(rank): facts for raw in comm.everyone(payload) for rank, facts in json.loads(raw).items()}
    shares = [(rows[rank][0].encode(), rows[rank][1].encode()) for rank in range(manifest.world_size)]

    def commit() -> str:
        return commit_made(storage, manifest, shares, maker.parent).directory

    return by_rank_zero(comm, commit, f"commit {storage.root}/{manifest.directory}")


def _made(opened: OpenedMemory, make: MakeDense) -> DenseMaker:
    try:
        return make(opened)
    except (NoCheckpointError, UnsupportedError) as error:
        raise CoverageError(f"making {opened.manifest.directory} dense", (str(error),)) from error


def _write(maker: DenseMaker, storage: Storage, rank: int) -> WrittenShare:
    try:
        return maker.write(storage, rank, maker.device())
    except UnsupportedError as error:
        raise CoverageError(f"making {maker.manifest.directory} dense", (str(error),)) from error


def _spans(slices: Iterable[StoredSlice]) -> Iterator[Span]:
    for stored in slices:
        yield stored.path, stored.offset, stored.offset + stored.nbytes


def _plain_spans(opened: OpenedMemory, snapshots: Sequence[LoggedSnapshot], ranks: Iterable[int]) -> Iterator[Span]:
    """Yields the plain states of these ranks, with their side tensors."""
    chosen = set(ranks)
    for manifest in (snapshot.manifest for snapshot in snapshots):
        for record in manifest.states:
            if record.rank in chosen:
                yield state_path(manifest.directory, record.rank), 0, record.nbytes
        side = opened.reader.index(manifest).side.values()
        yield from _spans(stored for stored in side if stored.file.rank in chosen)
