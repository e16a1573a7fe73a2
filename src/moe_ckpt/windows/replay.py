"""Converts a sparse window to a dense state, by computing its steps again (sparse-to-dense conversion).

A window (MoEvement, section 3.2) has each operator in full as of one of its steps, and as compute weights as of the
steps before. Training resumes at the first step, and computes the others again (``recovery.replay``). After each step,
the window's data of that step replace the optimizer's result: anchored operators in full, and compute weights of
operators that are anchored later. An anchored operator gets exact gradients, because every pass reads exact weights; so
at the window's end all operators are exact in every bit. Updates of operators that are not anchored yet are
meaningless, and are overwritten before anything reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_ckpt.errors import OtherLayoutError
from moe_ckpt.format.manifest import Manifest, state_path
from moe_ckpt.ports import StateTensor, TensorMeta, TrainingState
from moe_ckpt.reading.index import StoredSlice, TensorIndex
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.reading.restore import MODEL, prepare_state, require_fitting
from moe_ckpt.reading.shared_reading import TensorLoader
from moe_ckpt.recovery.executing import Recovery, Restored, StorageSource
from moe_ckpt.recovery.replay import Plain, StepReplay


def open_window(recovery: Recovery, reader: StoreReader, manifest: Manifest) -> tuple[Restored, StorageSource]:
    """Opens a sparse window as ``recovery.executing.opening_checkpoint`` does.

    Raises:
        OtherLayoutError: Another number of ranks computed the window, so that this run would compute other steps.
    """
    rank, world_size = recovery.comm.rank, recovery.comm.world_size
    if world_size != manifest.world_size:
        raise OtherLayoutError(
            manifest.directory,
            f"that {manifest.world_size} ranks computed, and this run has {world_size}",
            f"Start {manifest.world_size} ranks; a dense checkpoint, such as the last of a run that ended well, can be "
            "loaded by any number.",
        )
    reader.prove(manifest)
    plain, *_ = (reader.state(slot, rank) for slot in manifest.slots)  # later steps are read again when they are due
    if recovery.admits is not None:
        recovery.admits(manifest, plain)
    require_fitting(reader, manifest, recovery.state, plain.get("plain"))
    source = WindowSource(reader, manifest, recovery.state, rank)
    path = state_path(manifest.slots[0].directory, rank)
    return Restored(manifest, plain, None, source.replay, path), source


class WindowReplay(StepReplay):
    """The replay of one window. Recovery loads its first step.

    Args:
        loader: Writes what the window has of its steps.
        reader: Reader of the checkpoint.
        manifest: Manifest of the window.
        state: Training state to write.
        rank: This rank.
    """

    def __init__(
        self, loader: TensorLoader, reader: StoreReader, manifest: Manifest, state: TrainingState, rank: int
    ) -> None:
        super().__init__(manifest, loaded=0)
        self._loader, self._reader, self._state, self._rank = loader, reader, state, rank
        self._index: TensorIndex = reader.index(manifest)

    def load(self) -> None:
        step = self.upcoming_step

        def prepared() -> Sequence[StateTensor]:
            prepare_state(self._state, self._optimizer_tensors)
            return self._state.tensors()

        self._loader.write(prepared, self._stored(step))
        super().load()

    def load_agreed(self) -> None:
        self._loader.agreed(self.manifest.directory, self.load)

    def repeat(self) -> None:
        # Always, since torch does not count every write: ``.data``, which Megatron's QK-clip uses, has its own version.
        TensorLoader(self._reader, [self._stored(self._steps[self._loaded - 1])]).write(self._state.tensors)

    def upcoming(self) -> Plain:
        return {} if self.is_loaded else self._reader.state(self.manifest.slots[self._loaded], self._rank)

    @property
    def _optimizer_tensors(self) -> dict[str, TensorMeta]:
        """The optimizer state, also of parameters that are anchored later. They are updated as well, from zeros, and
        some optimizers expect all state tensors of a parameter that has a step count."""
        return {key: self._index.meta(key) for key in self._index.tensors if not key.startswith(MODEL)}

    def _stored(self, step: int) -> dict[str, list[StoredSlice]]:
        """Returns key -> slices of a step: anchors, and compute weights of operators that are anchored later."""
        slices: dict[str, list[StoredSlice]] = {}
        for key, group in self._index.tensors.items():
            if anchored := [stored for stored in group if stored.file.step == step]:
                slices[key] = anchored
        for key, later in self._index.replay.get(step, {}).items():
            slices[key] = [*slices.get(key, ()), *later]
        return slices


class WindowSource(StorageSource):
    """A sparse window: its first step is loaded, and ``replay`` computes the others. All steps are verified, so that
    the replay cannot fail half way."""

    def __init__(self, reader: StoreReader, manifest: Manifest, state: TrainingState, rank: int) -> None:
        super().__init__(reader, manifest, state)
        self.replay = WindowReplay(self, reader, manifest, state, rank)

    def prepare_and_write(self) -> None:
        """Writes the window's first step. The replay creates optimizer state step by step. A collective if reading is
        shared."""
        self.replay.load()
