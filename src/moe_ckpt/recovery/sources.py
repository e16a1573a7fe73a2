"""A checkpoint as the source of a recovery: its inventory, what must be verified, and how it is loaded.

What memory has of it is read as files of a store (``slot_storage``). Every rank verifies what it needs before training
state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moe_ckpt.core.step import Tier
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ports import Communicator, StateTensor, TrainingState
from moe_ckpt.reading.index import StoredSlice, split_key
from moe_ckpt.reading.memory.slot_storage import SlotStorage
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import MODEL, StoredByKey, check_match, needed_slices, parameters_of, verify_needed
from moe_ckpt.reading.shared_reading import SharedReading, divide, load_slices
from moe_ckpt.reading.slices import in_order
from moe_ckpt.reading.together import together
from moe_ckpt.recovery.recovery_plan import ABSENT, Inventory, RecoveryPlan, plan_recovery


class StorageSource:
    """A dense checkpoint on storage.

    Args:
        reader: Of the store.
        manifest: The checkpoint.
        weights_only: No optimizer state is loaded.

    Attributes:
        shared: What this rank and others read together; None until ``share``, and if there is nothing.
    """

    def __init__(self, reader: StoreReader, manifest: Manifest, *, weights_only: bool = False) -> None:
        self._reader, self._manifest, self._index = reader, manifest, reader.index(manifest)
        self._weights_only = weights_only
        tensors: StoredByKey = self._index.tensors
        if weights_only:
            tensors = {key: group for key, group in tensors.items() if split_key(key).optimizer is None}
        self._kinds: tuple[StoredByKey, ...] = (tensors,)  # what is verified
        self.shared: SharedReading | None = None

    def load(self, comm: Communicator, state: TrainingState) -> None:
        """Verifies what each rank needs, and writes it once all have verified theirs. A collective.

        Raises:
            NotUsableError: On every rank, if it failed on any.
        """
        self.share(comm, state)
        together(comm, lambda: self.verify(state))
        together(comm, lambda: self.prepare_and_write(state))

    def share(
        self, comm: Communicator, state: TrainingState, is_stored: Callable[[str], bool] = lambda path: True
    ) -> None:
        """Divides among the ranks the reading of what several of them need. A collective, before ``verify``.

        Args:
            comm: The ranks.
            state: Of this rank.
            is_stored: Whether the file at a path lies on storage; the same on every rank.
        """
        groups = (group for kind in self._kinds for group in kind.values())
        slices = in_order(stored for group in groups for stored in group if is_stored(stored.path))

        def needed() -> set[StoredSlice]:
            parameters = parameters_of(state)
            return {stored for kind in self._kinds for stored in needed_slices(kind, parameters)}

        self.shared = divide(comm, slices, needed)

    def verify(self, state: TrainingState) -> None:
        """Raises ``DamagedError`` if what this rank reads is damaged."""
        for kind in self._kinds:
            verify_needed(self._reader, kind, parameters_of(state), self.shared)

    def prepare(self, state: TrainingState) -> None:
        """Creates the optimizer state that the checkpoint has, before anything is written."""
        index = self._index
        state.prepare({key: index.meta(key) for key in index.tensors if not key.startswith(MODEL)})
        state.tensors()
        check_match(self._manifest, index, state.specs(), index.tensors)

    def prepare_and_write(self, state: TrainingState) -> None:
        """Does ``prepare``, and writes everything, verified, into the live tensors. A collective if reading is shared.

        Raises:
            DamagedError: There is damage since ``verify``.
        """

        def prepared() -> Sequence[StateTensor]:
            if self._weights_only:
                return parameters_of(state)
            self.prepare(state)
            return state.tensors()

        load_slices(self._reader, self._kinds[0], prepared, self.shared)


def planned(
    reader: StoreReader, manifest: Manifest, slots: SlotStorage | None = None, beneath: Manifest | None = None
) -> RecoveryPlan:
    """Returns where each operator of a checkpoint comes from. Arguments as of ``inventories_of``."""
    first = manifest.window[0].step if manifest.window else None
    inventories = inventories_of(reader, manifest, slots, beneath)
    return plan_recovery(manifest.directory, manifest.step, tuple(manifest.operators), inventories, first=first)


def inventories_of(
    reader: StoreReader, manifest: Manifest, slots: SlotStorage | None, beneath: Manifest | None
) -> tuple[Inventory, ...]:
    """Returns what a checkpoint takes from memory of this node, of other nodes, and from storage.

    An operator counts for the farthest place that something of it comes from.

    Args:
        reader: Of the checkpoint.
        manifest: The checkpoint, which was proved to be whole.
        slots: What of it is in memory; None if all is on storage.
        beneath: The checkpoint on storage that those slots are laid over, if any.
    """
    names: list[tuple[Tier, str]] = []
    if slots is None:
        beneath = manifest
    else:
        names += zip((Tier.HOST, Tier.PEER), slots.places, strict=False)
    storage = len(names)
    places = {op: at for at, op in enumerate(manifest.operators)}
    far = np.zeros(len(places), dtype=np.int64)
    nbytes = np.zeros(len(places), dtype=np.int64)
    for stored in reader.index(manifest).live:
        at = places.get(stored.entry.operator)
        if at is None:
            continue
        distance = storage
        if slots is not None and stored.path in slots.files:
            distance = 0 if storage == 1 or slots.is_near(stored.path) else 1
        far[at] = max(far[at], distance)
        nbytes[at] += stored.nbytes
    steps = np.array([record.step for record in manifest.operators.values()], dtype=np.int64)
    if manifest.window:  # which is of its last step, wherever its slots are
        steps = np.where(far < storage, manifest.step, steps)
    if beneath is not None:
        names.append((Tier.STORAGE, beneath.directory))
    return tuple(
        Inventory(tier, name, np.where(far == number, steps, ABSENT), nbytes)
        for number, (tier, name) in enumerate(names)
    )
