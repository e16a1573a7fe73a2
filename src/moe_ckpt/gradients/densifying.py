"""A dense checkpoint of one step of a gradient log, by optimizers without a model: one rank's share after the other.

What a rank wrote of the log's anchors it writes again here, as of the step, from optimizers that hold the units in
which that lies. So the host memory needed is that of the rank with most, and ranks can be dealt out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from moe_ckpt.commit.made_dense import WrittenShare, state_without, write_made_share
from moe_ckpt.format.manifest import state_path
from moe_ckpt.gradients.layout import Device
from moe_ckpt.gradients.log_content import LogContent
from moe_ckpt.gradients.replayed_share import RankShare, Tell, bytes_of, unplaced
from moe_ckpt.reading.index import StoredSlice
from moe_ckpt.reading.memory.gradient_log import PLAIN
from moe_ckpt.reading.memory.opened_memory import OpenedMemory
from moe_ckpt.reading.slices import find_damage
from moe_ckpt.storage.base import Storage


class Densifier:
    """Makes what each rank of a log wrote, as of the log's last step. Reads no slice before ``verify``.

    Args:
        opened: The log, or a checkpoint that stands by itself.

    Raises:
        NoCheckpointError: An operator does not reach the step.
        CoverageError: The log tells nothing of what it was written from.
        DamagedError: What it tells is damaged.
    """

    def __init__(self, opened: OpenedMemory) -> None:
        self._opened, self._reader, self.manifest = opened, opened.reader, opened.manifest
        self._log = LogContent(opened)
        self._shares: dict[int, RankShare] = {}

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices on which updates were made, each once."""
        return tuple(dict.fromkeys(layout.device for layout in self._log.layouts))

    @property
    def updates(self) -> int:
        """Steps whose updates are replayed."""
        return max(0, len(self._opened.logged) - 1)

    def nbytes(self, ranks: Iterable[int]) -> int:
        """Returns how many bytes are read or written for the shares of these ranks."""
        return sum(stored.nbytes for stored in self.inputs(ranks))

    def verify(self, ranks: Iterable[int]) -> None:
        """Raises ``DamagedError`` if a slice that the share of one of these ranks needs is damaged."""
        for stored, error in find_damage(self._reader.storage, set(self.inputs(ranks))):
            if error is not None:
                raise error
            self._reader.note_verified(stored)

    def inputs(self, ranks: Iterable[int]) -> Iterator[StoredSlice]:
        """Yields the slices that the shares of these ranks need."""
        for rank in ranks:
            yield from self._rank(rank).inputs

    def write(
        self,
        storage: Storage,
        rank: int,
        device: torch.device | str,
        tell: Tell = lambda nbytes, what: None,
    ) -> WrittenShare:
        """Makes and writes a rank's share of the checkpoint, which exists once ``commit_made`` was called with all.

        Args:
            storage: Of the store.
            rank: Of those that wrote the log.
            device: To step on.
            tell: Told of progress.

        Raises:
            OSError: It cannot be written.
            CoverageError, UnsupportedError, ReplayDivergedError: As ``RankShare.made``.
        """
        slices = self._rank(rank).made(device, tell)
        prefix = f"side/{rank}/"
        side = {key: stored for key, stored in self._log.side.items() if key.startswith(prefix)}
        plain = [stored for key, stored in side.items() if not key.startswith(f"{prefix}{PLAIN}/")]
        slices += [(unplaced(stored.entry), bytes_of(values)) for stored, values in self._log.read(plain)]
        path = state_path(self.manifest.directory, rank)
        state = state_without(self._reader.storage.read(path), PLAIN, path)
        return write_made_share(storage, self.manifest, rank, slices, state)

    @property
    def parent(self) -> str | None:
        """The parent of the checkpoint, as ``Manifest.parent``: what the life that wrote the log came from."""
        beneath = self._opened.beneath
        if beneath is None or beneath.generation != self.manifest.generation:
            return None if beneath is None else beneath.directory
        return beneath.parent

    def device(self) -> torch.device:
        """Returns what updates are made on here: the kind that trained, if there is one."""
        on_gpu = any(trainer.type == "cuda" for trainer in self.devices) and torch.cuda.is_available()
        return torch.device("cuda" if on_gpu else "cpu")

    def threads(self, device: torch.device) -> int | None:
        """Returns the number of threads that torch must divide updates between, to come to the same bits; None for
        any."""
        counts = {trainer.threads for trainer in self.devices if trainer.type == "cpu"}
        return counts.pop() if device.type == "cpu" and len(counts) == 1 else None

    def _rank(self, rank: int) -> RankShare:
        if rank not in self._shares:
            self._shares[rank] = RankShare(self._log, rank)
        return self._shares[rank]
