"""Reading a store: identity, committed steps, manifests, headers, tensors and state, all verified.

A manifest is sealed and has the checksum of every part, a part those of shard headers and state files, a header those
of slices. Nothing is used before its checksum matched, nothing is unpickled, and sizes are compared with the files'.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, TypeVar

import torch

from moe_ckpt.errors import (
    CoverageError,
    DamagedError,
    NoCheckpointError,
    NotFiniteError,
    StepRemovedError,
    StoreError,
    sparse_window,
)
from moe_ckpt.format.contents import STATE_FILE, state_contents
from moe_ckpt.format.manifest import (
    MANIFEST_NAME,
    STATE_KIND,
    STORE_NAME,
    FileRecord,
    Manifest,
    Part,
    PartRecord,
    StateRecord,
    compose_manifest,
    parse_step_dir,
    state_path,
    step_of,
)
from moe_ckpt.format.run_records import Identity
from moe_ckpt.format.schema import require
from moe_ckpt.format.sealed import decode_document, digest
from moe_ckpt.format.shard import TORCH_DTYPES, ShardHeader
from moe_ckpt.format.tree import decode_tree
from moe_ckpt.memory.left_slots import READERS
from moe_ckpt.reading import index as indexing
from moe_ckpt.reading.index import StoredSlice, TensorIndex
from moe_ckpt.reading.slices import Use, block, find_damage, naming_storage_errors, read_run, runs_of
from moe_ckpt.reading.step_storage import PATIENCE_SECS, StepStorage, listed_again
from moe_ckpt.run.documents import map_steps, read_commit, read_header, read_part, read_parts, read_sealed
from moe_ckpt.storage import Storage, open_storage
from moe_ckpt.storage.base import Chunk, ReadableStorage
from moe_ckpt.threads import ThreadName, map_ahead

_HEADER_READERS = 4
_log = logging.getLogger("moe_ckpt")

T = TypeVar("T")


class StoreReader:
    """Reads one store, and remembers what it has verified. Not thread-safe.

    Methods raise ``DamagedError`` for bytes that are missing or not those that were written, ``StoreForbiddenError`` if
    this user may not read them, and ``StoreUnreadableError`` if storage still fails after retries of ``patience_secs``
    in all. If a step was removed after it was listed, they raise ``StepRemovedError``.

    Attributes:
        storage: Of the store; tells a step that was removed from one that is damaged.
        identity_damage: What is wrong with ``store.json``, if ``identity`` did without it.
        verified: Slices in memory that were verified, and need not be verified again.
    """

    def __init__(self, storage: ReadableStorage, patience_secs: float = PATIENCE_SECS) -> None:
        self.storage = StepStorage(storage, patience_secs)
        self.identity_damage: DamagedError | None = None
        self.verified: set[StoredSlice] = set()
        self._in_memory: Collection[str] = ()
        self._is_sound: Callable[[str], bool] = lambda path: False
        self._identity: Identity | None = None
        self._manifests: dict[str, Manifest] = {}
        self._parts: dict[PartRecord, Part] = {}
        self._headers: dict[FileRecord, ShardHeader] = {}
        self._index: tuple[Manifest, TensorIndex] | None = None
        self._proven: TensorIndex | None = None

    def identity(self) -> Identity:
        """Returns the run that this store belongs to, with a warning from the manifests if ``store.json`` is damaged.

        Raises:
            FormatVersionError: The store has a version that this package does not read.
            DamagedError: ``store.json`` is missing or damaged, and the manifests do not agree, or none can be read.
        """
        if self._identity is None:
            try:
                with naming_storage_errors(STORE_NAME):
                    raw = read_sealed(self.storage, STORE_NAME)
                self._identity = Identity.decode(raw, STORE_NAME)
            except DamagedError as error:
                self._identity = self._inferred_identity(error)
        return self._identity

    def _inferred_identity(self, damage: DamagedError) -> Identity:
        manifests: dict[tuple[str, str], Manifest] = {}
        for directory in self.directories():
            try:
                with naming_storage_errors(f"{directory}/{MANIFEST_NAME}"):
                    manifest = read_commit(self.storage, directory)
            except (DamagedError, StepRemovedError):
                continue
            manifests[manifest.run_id, manifest.model.fingerprint] = manifest
        if not manifests:
            if self.storage.exists(STORE_NAME):
                raise damage
            raise DamagedError(STORE_NAME, f"is missing, so that {self.storage.root} is no moe_ckpt store")
        if len(manifests) > 1:
            others = ", ".join(manifest.directory for manifest in manifests.values())
            raise DamagedError(STORE_NAME, f"{damage.reason}, and these are of different runs: {others}")
        _log.warning("%s/%s: %s; its content is read from the manifests", self.storage.root, STORE_NAME, damage.reason)
        self.identity_damage = damage
        [((run_id, fingerprint), oldest)] = manifests.items()
        return Identity(run_id, fingerprint, oldest.created_unix_secs)

    def directories(self) -> list[str]:
        """Returns the committed step directories, newest first by (generation, step)."""
        committed = self._committed()
        names = [name for name in reversed(committed) if committed[name]]
        self.storage.note_listed(names)
        return names

    def uncommitted(self) -> list[str]:
        """Returns the step directories that are newer than every committed one, newest first.

        The run is writing them, or ended while it did, or their manifests are gone. An older directory without a
        manifest may have files that newer checkpoints need.
        """
        committed = self._committed()
        return [*takewhile(lambda name: not committed[name], reversed(committed))]

    def _committed(self) -> dict[str, bool]:
        """Returns step directory -> whether it has a manifest, oldest first."""
        with naming_storage_errors(self.storage.root):
            return map_steps(self.storage, lambda name: self.storage.exists(f"{name}/{MANIFEST_NAME}"))

    def manifest(self, directory: str) -> Manifest:
        """Returns the manifest of a step directory. Raises ``DamagedError`` if it is of another directory or run."""
        if directory not in self._manifests:
            path = f"{directory}/{MANIFEST_NAME}"
            with naming_storage_errors(path, step_of(directory)):
                manifest = read_commit(self.storage, directory)
            identity = self.identity()
            if manifest.run_id != identity.run_id:
                raise DamagedError(
                    path, f"belongs to run {manifest.run_id}, but the store to {identity.run_id}", step=manifest.step
                )
            if manifest.model.fingerprint != identity.fingerprint:
                raise DamagedError(path, "is of another model than the store", step=manifest.step)
            self.storage.note_opened(manifest)
            self._manifests[directory] = compose_manifest(manifest, read_parts(manifest, self._parts, self._part))
            self.storage.note_opened(self._manifests[directory])
        return self._manifests[directory]

    def add(
        self, manifest: Manifest, headers: Mapping[FileRecord, ShardHeader], is_sound: Callable[[str], bool]
    ) -> None:
        """Adds a checkpoint of which some files are in memory.

        Args:
            manifest: Of the checkpoint.
            headers: The headers of those files.
            is_sound: Tells whether every slice of the file at a path has been verified already.
        """
        self._manifests[manifest.directory] = manifest
        self._headers |= headers
        self._in_memory = {record.path for record in headers}
        self._is_sound = functools.cache(is_sound)

    def verify(self, slices: Iterable[StoredSlice]) -> None:
        """Raises ``DamagedError`` if a slice is damaged.

        Slices in memory are not compared again by later reads; others are, since storage may return other bytes then.
        """
        todo = set(slices)
        for _, error in find_damage(self.storage, (stored for stored in todo if not self._is_sound(stored.path))):
            if error is not None:
                raise error
        self.verified |= {stored for stored in todo if stored.path in self._in_memory}

    def _part(self, record: PartRecord) -> Chunk:
        with naming_storage_errors(record.path, step_of(record.directory)):
            return read_part(self.storage, record)

    def headers(self, manifest: Manifest) -> dict[str, ShardHeader]:
        """Returns the header of every shard that the manifest names, by path."""
        todo = [record for record in manifest.files if record not in self._headers]
        for _ in map_ahead(ThreadName.HEADERS, _HEADER_READERS, self.header, todo):
            pass
        headers = {record.path: self._headers[record] for record in manifest.files}
        for record in manifest.files:
            run_id = headers[record.path].run_id
            if run_id != manifest.run_id:
                raise DamagedError(record.path, f"belongs to run {run_id}", step=record.step, rank=record.rank)
        return headers

    def header(self, record: FileRecord) -> ShardHeader:
        """Returns one shard's header. On any thread."""
        if record not in self._headers:
            with naming_storage_errors(record.path, record.step, record.rank):
                self._headers[record] = read_header(self.storage, record)
        return self._headers[record]

    def index(self, manifest: Manifest) -> TensorIndex:
        """Returns the index of a checkpoint; the last one is kept."""
        if self._index is None or self._index[0] is not manifest:
            self._index = (manifest, indexing.build_index(manifest, self.headers(manifest)))
        return self._index[1]

    def prove(self, manifest: Manifest) -> None:
        """Raises ``CoverageError`` unless the checkpoint has every element of every tensor exactly once."""
        index = self.index(manifest)
        if index is not self._proven:  # its proof takes as long as reading it
            indexing.prove(manifest, index)
            self._proven = index

    def read_many(
        self, slices: Iterable[StoredSlice], *, locked: bool = False
    ) -> Iterator[tuple[StoredSlice, torch.Tensor]]:
        """Yields each slice once, with its verified values, in file order. The next slices are read meanwhile.

        The tensors share memory with neighbouring slices: copy what is to be kept.

        Args:
            slices: What to read.
            locked: The values go to a GPU: they are in page-locked memory, except slices larger than ``RUN_NBYTES``.

        Raises:
            DamagedError: At the first slice whose bytes are missing or differ from what was written.
        """
        read = functools.partial(read_run, self.storage, verified=self.verified, locked=locked)
        for pairs in map_ahead(ThreadName.READ, READERS, read, runs_of(slices)):
            yield from pairs

    def use_many(self, slices: Iterable[StoredSlice], use: Use) -> None:
        """Calls ``use`` with each slice and its verified values, on the threads that read them, in any order.

        When it raises, slices behind the damaged one may have been used.
        """

        def read_and_use(run: list[StoredSlice]) -> None:
            for stored, values in read_run(self.storage, run, self.verified):
                use(stored, values)

        for _ in map_ahead(ThreadName.READ, READERS, read_and_use, runs_of(slices)):
            pass

    def tensor(self, manifest: Manifest, key: str) -> torch.Tensor:
        """Returns a whole tensor, assembled from its slices. Prove the checkpoint first."""
        index = self.index(manifest)
        meta = index.meta(key)
        whole = torch.empty(meta.global_shape, dtype=TORCH_DTYPES[meta.dtype], device="cpu")
        for stored, values in self.read_many(index.tensors[key]):
            block(whole, (0,) * whole.dim(), stored.entry.box).copy_(values)
        return whole

    def state(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """Returns one rank's plain training state (loops, schedulers, buffers, RNG).

        Raises:
            CoverageError: The checkpoint was written by fewer ranks.
        """
        record = next((r for r in manifest.states if r.rank == rank), None)
        if record is None:
            have = f"{len(manifest.states)} ranks wrote it, there is no state of rank {rank}"
            raise CoverageError(f"checkpoint {manifest.directory}", (have,))
        body = self._state_body(manifest, record)
        prefix = f"side/{rank}/"
        side = [stored for key, stored in self.index(manifest).side.items() if key.startswith(prefix)]
        tensors = {stored.entry.key: values.clone() for stored, values in self.read_many(side)}
        try:
            state = decode_tree(body["state"], lambda name: tensors[prefix + name])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"its content cannot be decoded ({error!r})"
            raise DamagedError(record.path, reason, step=manifest.step, rank=rank) from error
        require(state_contents, state, record.path, "it holds no state of a rank: ", step=manifest.step, rank=rank)
        return dict(state)

    def _state_body(self, manifest: Manifest, record: StateRecord) -> dict[str, Any]:
        where = {"step": manifest.step, "rank": record.rank}
        if record.path != state_path(manifest.directory, record.rank):
            raise DamagedError(record.path, f"is not where {manifest.directory} keeps the state", **where)
        with naming_storage_errors(record.path, **where):
            raw = read_sealed(self.storage, record.path)
            if len(raw) != record.nbytes:
                raise DamagedError(record.path, f"has {len(raw):,} bytes, the manifest says {record.nbytes:,}")
            if digest(raw) != record.digest:
                raise DamagedError(record.path, "checksum mismatch (damaged, or another rank's file)")
            body = decode_document(raw, record.path, STATE_KIND, STATE_FILE, "no state file of this format: ")
        facts = tuple(body[name] for name in ("run_id", "step", "generation", "rank"))
        if facts != (manifest.run_id, manifest.step, manifest.generation, record.rank):
            raise DamagedError(record.path, f"is the state of (run, step, generation, rank) {facts}", **where)
        return body


def check_checkpoint(reader: StoreReader, manifest: Manifest, *, slices: bool = True) -> None:
    """Raises unless everything that a checkpoint needs is there and undamaged.

    Args:
        reader: Of the store.
        manifest: The checkpoint.
        slices: False to leave slices of model and optimizer to the restore that follows.

    Raises:
        DamagedError: Bytes are damaged; names the file, its step and rank, and the slice.
        CoverageError: Parts are missing.
    """
    reader.prove(manifest)
    require_states(manifest)
    for slot in manifest.slots:
        for record in slot.states:
            reader.state(slot, record.rank)
    if slices:
        reader.verify(reader.index(manifest).live)


def require_states(manifest: Manifest) -> None:
    """Raises ``CoverageError`` unless the manifest names the plain state of every rank, once, at every step."""
    for slot in manifest.slots:
        ranks = sorted(record.rank for record in slot.states)
        if ranks != list(range(manifest.world_size)):
            reason = f"step {slot.step} has the states of ranks {ranks}, of {manifest.world_size}"
            raise CoverageError(f"checkpoint {manifest.directory}", (reason,))


def choose(
    reader: StoreReader, check: Callable[[Manifest], object], *, most: int = 1, dense: bool = False
) -> tuple[list[Manifest], list[Manifest]]:
    """Returns the newest usable checkpoints, and the sparse windows that are newer still, each newest first.

    Args:
        reader: Of the store. Only manifests are read; those that are damaged, or of values that are not finite, are
            skipped with a warning.
        check: Raises ``DamagedError`` or ``CoverageError`` for a checkpoint that is to be skipped.
        most: How many.
        dense: Sparse windows are no such checkpoints.

    Raises:
        NoCheckpointError: There are checkpoints, but none is usable. (After nothing, the caller would start from
            nothing, and retention would delete what a person might still save.)
        StepRemovedError: Of ``MOST_LISTINGS`` listings, in each a step was removed while it was read.
    """
    problems: list[str] = []

    def listed() -> tuple[list[Manifest], list[Manifest]]:
        problems.clear()
        chosen, windows = list[Manifest](), list[Manifest]()
        for directory in reader.directories():
            try:
                manifest = reader.manifest(directory)
                if manifest.not_finite:
                    raise NotFiniteError(directory, manifest.not_finite)
                is_other = dense and bool(manifest.window)
                if not is_other:
                    check(manifest)
            except (DamagedError, CoverageError, NotFiniteError) as error:
                _log.warning("checkpoint %s is skipped: %s", directory, error)
                problems.append(f"{directory} ({error})")
                continue
            if not is_other:
                chosen.append(manifest)
            elif not chosen:
                windows.append(manifest)
            if len(chosen) == most:
                break
        return chosen, windows

    chosen, windows = listed_again(listed)
    if problems and not chosen:
        raise NoCheckpointError(
            f"no checkpoint in {reader.storage.root} is usable: {'; '.join(problems[:8])}. To start over, move the "
            "directory away or choose another dirpath."
        )
    return chosen, windows


def newest_good(reader: StoreReader) -> Manifest | None:
    """Returns the newest checkpoint that verifies, but for slices; None if the store has none. Raises as ``choose``."""
    chosen, _ = choose(reader, lambda manifest: check_checkpoint(reader, manifest, slices=False))
    return next(iter(chosen), None)


def require_dense(manifest: Manifest) -> None:
    """Raises ``UnsupportedError`` for a checkpoint that is a sparse window."""
    if manifest.window:
        raise sparse_window(manifest.directory, manifest.window[0].step, manifest.step)


def choose_dense(
    reader: StoreReader, check: Callable[[Manifest], object] = lambda manifest: None, *, most: int = 1
) -> tuple[list[Manifest], list[Manifest]]:
    """Returns at least one dense checkpoint, and windows, as ``choose``.

    Raises:
        UnsupportedError: There are only sparse windows.
        NoCheckpointError: There are no checkpoints, or all dense ones are damaged.
    """
    chosen, windows = choose(reader, check, most=most, dense=True)
    if windows and not chosen:
        require_dense(windows[0])
    if not chosen:
        raise NoCheckpointError(f"the store {reader.storage.root} has no committed step yet")
    return chosen, windows


def newest_step(dirpath: str | os.PathLike[str]) -> int | None:
    """Returns the newest step that a store has a checkpoint of, or None if it has none.

    Reads names and one manifest (the next older one where that is damaged), no tensors; creates, locks and changes
    nothing. For a launcher that must decide, before model and processes exist, whether there is anything to go on from.

    Args:
        dirpath: A store, or a directory or fsspec URL that may become one; it need not exist.

    Returns:
        The step, counted as training counts (iterations in Megatron). A sparse window counts as its last step, though
        training goes on at its first one, and computes the others again.

    Raises:
        NoCheckpointError: There are checkpoints, but no manifest of them can be read: a run would not start either.
        StoreError: The directory cannot be read, or belongs to something else.
    """
    reader = StoreReader(open_storage(os.fspath(dirpath)))
    try:
        chosen, _ = choose(reader, lambda manifest: None)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"the store {reader.storage.root} cannot be read: {error}") from error
    return chosen[0].step if chosen else None


def open_step(path: str | os.PathLike[str], *, dense: bool = False) -> tuple[StoreReader, Manifest]:
    """Returns the checkpoint at a path or URL: a step directory, a link to one, or a store (its newest good step).

    Manifest, headers and state are verified here, slices when they are read.

    Args:
        path: See there.
        dense: Of a store the newest good dense step; newer sparse windows are named in the log.

    Raises:
        NoCheckpointError: There is no committed checkpoint; says what is there.
        UnsupportedError: The store has sparse windows alone, and ``dense``.
        DamagedError: The named step is damaged.
        StepRemovedError: The named step was removed meanwhile, or of a store one after the other.
    """
    reader, directory = open_store(path)
    if directory is not None:
        named = reader.manifest(directory)
        if named.not_finite:
            _log.warning("%s; it is read because it was named", NotFiniteError(directory, named.not_finite))
        return reader, named
    if dense:
        [newest], windows = choose_dense(reader, lambda manifest: check_checkpoint(reader, manifest, slices=False))
        if windows:
            _log.warning(
                "%s is taken; newer, but a sparse window without one state of all weights: %s",
                newest.directory,
                windows[0].directory,
            )
        return reader, newest
    manifest = newest_good(reader)
    if manifest is None:
        raise NoCheckpointError(f"the store {path} has no committed step yet")
    return reader, manifest


def open_store(path: str | os.PathLike[str]) -> tuple[StoreReader, str | None]:
    """Returns the reader of the store at a path or URL, and the step directory, if that is what the path names.

    Raises:
        NoCheckpointError: There is no store, or no such committed step; says what is there.
    """
    storage, directory = locate(path)
    reader = StoreReader(storage)
    committed = reader.directories()
    if directory is None and not committed and not storage.exists(STORE_NAME):
        count = len(storage.list())
        entries = f"it has no {STORE_NAME} and no step among its {count} entr{'y' if count == 1 else 'ies'}"
        raise NoCheckpointError(
            f"{path} is neither a step directory nor a store of moe_ckpt: "
            f"{entries if count else 'there is nothing, or it is a file'}. "
            "Give a directory such as <dirpath>/step_00000120."
        )
    if directory is not None and directory not in committed:
        fate = "was not committed" if storage.exists(directory) else "does not exist"
        have = f"committed there: {', '.join(committed[:6])}" if committed else "no step is committed there"
        raise NoCheckpointError(f"checkpoint {path} {fate} (no {MANIFEST_NAME}); {have}")
    return reader, directory


def with_step(path: str | os.PathLike[str], use: Callable[[StoreReader, Manifest], T], *, dense: bool = False) -> T:
    """Returns what ``use`` makes of the checkpoint at a path or URL, as ``open_step`` takes it.

    If retention removes the step of a store while it is used, the store's newest one is used in its place.

    Raises:
        StepRemovedError: The named step was removed meanwhile, or of a store one after the other.
        MoECheckpointError: As ``open_step``, and what ``use`` raises.
    """
    if split_step(path)[1] is not None:
        return use(*open_step(path))
    return listed_again(lambda: use(*open_step(path, dense=dense)))


def locate(path: str | os.PathLike[str]) -> tuple[Storage, str | None]:
    """Returns (the store's storage, name of the step directory or None) of a path, as ``split_step``."""
    root, directory = split_step(path)
    return open_storage(root), directory


def split_step(path: str | os.PathLike[str]) -> tuple[str, str | None]:
    """Returns (path or URL of the store, name of the step directory or None) of a path.

    Local links are followed, so that a link named "last" is a step; the path of a manifest is one, too.
    """
    text = os.fspath(path)
    if "://" not in text:
        text = os.path.realpath(os.path.expanduser(text))
    text = text.rstrip("/").removesuffix(f"/{MANIFEST_NAME}")
    parent, _, name = text.rpartition("/")
    return (text or "/", None) if parse_step_dir(name) is None else (parent or "/", name)
