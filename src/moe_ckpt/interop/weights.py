"""Weights alone into a model, for fine-tuning and evaluation: from a store, a step, or safetensors files.

Optimizer state, step counts, schedules and data positions stay where they are. Nothing is written before all ranks
know that names, shapes and (of a store) checksums are right.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from moe_ckpt.comm.communicator import largest
from moe_ckpt.errors import CoverageError, NoCheckpointError, StepRemovedError, StoreError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.shard import TORCH_DTYPES, dtype_name
from moe_ckpt.interop.safetensors import SUFFIX, FileTensor, model_files, read_block, read_tables
from moe_ckpt.interop.whole import module_buffers
from moe_ckpt.modeling import module_state
from moe_ckpt.modeling.names import clean_name, tied_aliases
from moe_ckpt.ports import Communicator, StateTensor, TensorMeta, TrainingState
from moe_ckpt.reading.collective import (
    NotUsableError,
    on_all_ranks,
    on_rank_zero,
    raise_on_all_ranks,
    require_committed,
)
from moe_ckpt.reading.reader import (
    StoreReader,
    check_checkpoint,
    choose_dense,
    locate,
    open_step,
    require_dense,
    split_step,
)
from moe_ckpt.reading.restore import MODEL, box_of, weight_specs
from moe_ckpt.reading.shared_reading import TensorLoader
from moe_ckpt.reading.step_storage import listed_again
from moe_ckpt.storage import Storage, open_storage


class WeightSource:
    """Provides weights. Files have no checksums: nothing to verify, nor to know what came from another rank.

    Attributes:
        title: Says so.
        tensors: What is there, by name.
    """

    title: str
    tensors: Mapping[str, TensorMeta]

    def share(self, comm: Communicator, pairs: Sequence[tuple[str, StateTensor]]) -> None:
        """Divides among the ranks the reading of what several of them need for ``pairs``. A collective."""

    def verify(self, pairs: Sequence[tuple[str, StateTensor]]) -> None:
        """Raises ``DamagedError`` unless what this rank will read of ``pairs`` is as it was written."""

    def copy(self, pairs: Sequence[tuple[str, StateTensor]]) -> None:
        """Writes (name here, where it goes) into live tensors. A collective if reading is shared."""
        raise NotImplementedError


class StoreSource(WeightSource):
    """A dense (or partial) checkpoint of a store."""

    def __init__(self, reader: StoreReader, manifest: Manifest) -> None:
        reader.prove(manifest)
        index, self._reader, self._buffers = reader.index(manifest), reader, module_buffers(reader, manifest)
        stale = manifest.stale_experts
        older = f", of which {stale} experts are older than that" if stale else ""
        self.title = f"step {manifest.step} in {reader.storage.root}/{manifest.directory}{older}"
        keys = {key.removeprefix(MODEL): key for key in index.tensors if key.startswith(MODEL)}
        self._keys = keys | {alias: keys[name] for alias, name in manifest.model.aliases.items() if name in keys}
        self._stored = {key: index.tensors[key] for key in keys.values()}
        self.tensors = {name: index.meta(key) for name, key in self._keys.items()} | {
            name: TensorMeta(dtype_name(value.dtype), tuple(value.shape)) for name, value in self._buffers.items()
        }

    def _named_there(self, pairs: Sequence[tuple[str, StateTensor]]) -> list[StateTensor]:
        """Returns the live tensors of ``pairs`` that are no buffers, by their keys in the checkpoint."""
        return [replace(tensor, key=self._keys[name]) for name, tensor in pairs if name in self._keys]

    def share(self, comm: Communicator, pairs: Sequence[tuple[str, StateTensor]]) -> None:
        self._loader = TensorLoader(self._reader, [self._stored], lambda: self._named_there(pairs))
        self._loader.share(comm)

    def verify(self, pairs: Sequence[tuple[str, StateTensor]]) -> None:
        self._loader.verify()

    @torch.no_grad()
    def copy(self, pairs: Sequence[tuple[str, StateTensor]]) -> None:
        self._loader.write(lambda: self._named_there(pairs))
        for name, tensor in pairs:
            if name not in self._keys:
                tensor.local.copy_(self._buffers[name])


class FileSource(WeightSource):
    """Safetensors files: of ``moe-ckpt export``, of transformers, or of anybody else."""

    def __init__(self, storage: Storage, paths: Iterable[str], title: str) -> None:
        self._storage, self.title = storage, title
        self._files: Mapping[str, FileTensor] = read_tables(storage, paths)
        self.tensors = {n: TensorMeta(t.dtype, t.shape) for n, t in self._files.items()}

    @torch.no_grad()
    def copy(self, pairs: Sequence[tuple[str, StateTensor]]) -> None:
        for name, tensor in pairs:
            tensor.local.copy_(read_block(self._storage, self._files[name], box_of(tensor)))


def open_source(path: str, directory: str | None) -> WeightSource:
    """Returns the source at ``path``.

    Args:
        path: Of a store, a step directory, a safetensors file or a directory of those; or a URL.
        directory: Of a store, the step that was chosen; None for anything else.

    Raises:
        StoreError: It is not there, or damaged.
    """
    storage, _ = locate(path)
    if directory is not None:
        reader = StoreReader(storage)
        return StoreSource(reader, reader.manifest(directory))
    if _is_one_file(storage):
        parent, _, name = storage.root.rpartition("/")
        return FileSource(open_storage(parent or "/"), [name], path)
    return FileSource(storage, model_files(storage), path)


def _is_one_file(storage: Storage) -> bool:
    """Returns whether the root is a safetensors file, and no directory of that name."""
    return storage.root.endswith(SUFFIX) and not storage.list()


def choose(path: str, option: str = "weights_from") -> tuple[str | None, str]:
    """Returns (the step directory to take, None for safetensors files; what is said about skipped steps).

    Called on one rank, so that all take the same step of a store that is being written.

    Args:
        path: Of a store, a step directory or safetensors files.
        option: Where the user gave it, for messages.

    Raises:
        NoCheckpointError: Nothing that could give weights is there.
        UnsupportedError: Only sparse windows are there: no step of them holds all weights.
    """
    storage, step = locate(path)
    if step is not None:
        require_dense(open_step(path)[1])
        return step, ""
    if _is_one_file(storage):
        return None, ""
    reader = StoreReader(storage)
    if not reader.directories():
        if storage.exists("store.json"):
            raise NoCheckpointError(f"{option}={path}: the store has no committed step yet")
        if not any(name.endswith((SUFFIX, ".index.json")) for name in storage.list()):
            raise NoCheckpointError(
                f"{option}={path}: there is neither a store of moe_ckpt, nor a step directory, nor a safetensors "
                "file (pickled files such as .ckpt, .pt and .bin are not read)"
            )
        return None, ""
    [manifest], windows = choose_dense(reader, lambda candidate: check_checkpoint(reader, candidate, slices=False))
    window = windows[0].directory if windows else ""
    passed = f" (newer, but a sparse window without one state of all weights: {window})" if windows else ""
    return manifest.directory, passed


@dataclass(frozen=True)
class LoadedWeights:
    """Result of loading weights.

    Attributes:
        title: Where the weights come from.
        tensors: How many.
        unchanged: Names of the model that kept what they were.
        unused: Names that the source has besides.
    """

    title: str
    tensors: int
    unchanged: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.tensors} tensors from {self.title}"]
        for names, what in ((self.unchanged, "not in the source, unchanged"), (self.unused, "not in the model")):
            if names:
                parts.append(f"{what}: {', '.join(names[:6])}" + (f" and {len(names) - 6} more" * (len(names) > 6)))
        return "; ".join(parts)


def load_module_weights(
    path: str, state: TrainingState, comm: Communicator, module: nn.Module, *, strict: bool = True
) -> LoadedWeights:
    """Loads weights and persistent buffers into a torch module; arguments and errors as of ``load_weights``."""
    return load_weights(
        path,
        state,
        comm,
        module_state.buffers(module),
        strict=strict,
        aliases=tied_aliases(module) | module_state.tied_buffers(module),
        others={clean_name(name) for name in module.state_dict()},
    )


def load_weights(
    path: str | os.PathLike[str],
    state: TrainingState,
    comm: Communicator,
    buffers: Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    aliases: Mapping[str, str] | None = None,
    others: Collection[str] = (),
) -> LoadedWeights:
    """Loads weights and persistent buffers, and nothing else, into a live model. A collective of the training thread.

    Names must agree, but for what all names (or most of them) begin with: ``net.`` of a LightningModule around a
    transformers model, for instance. Floating-point types may differ: values are converted.

    Args:
        path: Of a store (its newest good dense step), a step directory, a safetensors file, or a directory of those.
        state: Of the model, as it is sharded now; its optimizers are not touched.
        comm: Of all ranks.
        buffers: The model's persistent buffers on this rank, live.
        strict: False lets names be missing on either side; shapes must agree anyway.
        aliases: Second names of tied parameters.
        others: Names that the source may have without being loaded (state of metrics).

    Raises:
        CoverageError: Names or shapes do not agree; they are named, and nothing was changed.
        StoreError: The source is not there or damaged.
        StepRemovedError: The named step was removed while it was read, or of a store one after the other.
        UnsupportedError: The source is a sparse window.
    """
    text = os.fspath(path)
    tied = dict(aliases or {})

    def newest() -> LoadedWeights:
        directory, passed = on_rank_zero(comm, lambda: choose(text), f"load weights from {text}")
        with raising_on_all_ranks(comm, text, directory):
            plan = on_all_ranks(comm, lambda: _plan(open_source(text, directory), state, buffers, tied, others))
            used = largest(comm, [name in plan.used for name in plan.names])
            unused = tuple(name for name, of_any in zip(plan.names, used, strict=True) if not of_any)
            on_all_ranks(comm, lambda: plan.check(unused, strict))
            plan.source.share(comm, plan.pairs)
            on_all_ranks(comm, lambda: plan.source.verify(plan.pairs))
        with raising_on_all_ranks(comm, text, directory, " (some weights may be loaded, and others not)"):
            on_all_ranks(comm, lambda: plan.source.copy(plan.pairs))
        return LoadedWeights(plan.source.title + passed, plan.tensors, plan.absent, unused)

    return newest() if split_step(text)[1] is not None else listed_again(newest)


@contextmanager
def raising_on_all_ranks(comm: Communicator, path: str, directory: str | None, outcome: str = "") -> Iterator[None]:
    """The block raises ``NotUsableError`` on all ranks, if it fails on one: each raises an error for users then.

    Args:
        comm: The ranks.
        path: Of the source.
        directory: The step, of a store; None of files.
        outcome: What then is true, for the message.

    Raises:
        StepRemovedError: On every rank, if it failed on any because retention removed the step.
    """
    try:
        yield
    except NotUsableError as failure:
        if directory is not None:
            require_committed(comm, StoreReader(locate(path)[0]).storage, directory)
        try:
            raise_on_all_ranks(comm, failure, path + outcome, "load")
        except StepRemovedError as error:  # but rank 0 sees its manifest
            raise StoreError(str(error)) from error


@dataclass(frozen=True)
class _Plan:
    """The tensors that this rank will load.

    Attributes:
        source: The weights.
        pairs: (name in the source, live tensor).
        tensors: How many tensors of the model have a source.
        absent: Names of the model that the source lacks.
        misfits: Sentences on shapes and types.
        used: Names in the source that are this rank's; those of other pipeline stages are other ranks'.
    """

    source: WeightSource
    pairs: Sequence[tuple[str, StateTensor]]
    tensors: int
    absent: tuple[str, ...]
    misfits: tuple[str, ...]
    used: frozenset[str]

    @property
    def names(self) -> list[str]:
        return sorted(self.source.tensors)

    def check(self, unused: Sequence[str], strict: bool) -> None:
        """Raises unless all fits. unused: by no rank."""
        problems = [f"{name} of the model is not in it" for name in self.absent] if strict else []
        problems += [f"it has {name}, which is not in the model" for name in unused] if strict else []
        problems += self.misfits
        if problems or not self.tensors:
            raise CoverageError(
                f"weights from {self.source.title} do not fit this model, and nothing was loaded (a transformers "
                "directory whose experts are listed one by one is opened by from_pretrained)",
                tuple(problems) or ("it has no tensor of this model",),
            )


def _plan(
    source: WeightSource,
    state: TrainingState,
    buffers: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    others: Collection[str],
) -> _Plan:
    live = [tensor for tensor in state.tensors() if tensor.key.startswith(MODEL)]
    live += [StateTensor(MODEL + n, n, b, (0,) * b.dim(), tuple(b.shape)) for n, b in buffers.items()]
    expected = {spec.parameter: (spec.dtype, tuple(spec.global_shape)) for spec in weight_specs(state.specs())}
    expected |= {name: (dtype_name(buffer.dtype), tuple(buffer.shape)) for name, buffer in buffers.items()}
    name_of = align_names(source.tensors, {*expected, *aliases, *others})
    for alias, name in aliases.items():
        if name not in name_of and alias in name_of:
            name_of[name] = name_of[alias]
    misfits = [
        sentence
        for name, (dtype, shape) in expected.items()
        if name in name_of
        for sentence in _differences(name, dtype, shape, name_of[name], source.tensors[name_of[name]])
    ]
    return _Plan(
        source,
        [(name_of[tensor.parameter], tensor) for tensor in live if tensor.parameter in name_of],
        sum(name in name_of for name in expected),
        tuple(sorted(name for name in expected if name not in name_of)),
        tuple(misfits),
        frozenset(name_of.values()),
    )


def _differences(name: str, dtype: str, shape: tuple[int, ...], source_name: str, meta: TensorMeta) -> list[str]:
    if tuple(meta.global_shape) != shape:
        return [f"{name} has shape {list(shape)} in the model, {source_name} {list(meta.global_shape)} in the source"]
    kinds = [TORCH_DTYPES[one].is_floating_point for one in (dtype, meta.dtype)]
    if dtype != meta.dtype and not all(kinds):
        return [f"{name} is {TORCH_DTYPES[dtype]} in the model, {source_name} {TORCH_DTYPES[meta.dtype]} in the source"]
    return []


def align_names(sources: Collection[str], here: Collection[str]) -> dict[str, str]:
    """Returns name here -> name there, for all that agree once ``common_beginnings`` are taken off."""
    stripped, prefix = common_beginnings(sources, here)
    rest = {name[len(stripped) :]: name for name in sources if name.startswith(stripped)}
    return {name: rest[name[len(prefix) :]] for name in here if name.startswith(prefix) and name[len(prefix) :] in rest}


def common_beginnings(sources: Collection[str], here: Collection[str]) -> tuple[str, str]:
    """Returns what to take off names there, and here, so that most agree.

    Of the beginnings that most names of a side share (``""`` among them) those are taken with which most names agree,
    and of these the shortest.
    """
    best: tuple[int, int, str, str] = (0, 0, "", "")
    for stripped in _beginnings(sources):
        rest = {name[len(stripped) :] for name in sources if name.startswith(stripped)}
        for prefix in _beginnings(here):
            agreeing = sum(name.startswith(prefix) and name[len(prefix) :] in rest for name in here)
            best = max(best, (agreeing, -len(stripped) - len(prefix), stripped, prefix), key=lambda one: one[:2])
    return best[2:]


def _beginnings(names: Collection[str]) -> list[str]:
    """Returns ``""`` and every dotted beginning that more than half of ``names`` share, shortest first."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")[:-1]
        counts.update(".".join(parts[: depth + 1]) + "." for depth in range(len(parts)))
    return ["", *sorted((start for start, count in counts.items() if 2 * count > len(names)), key=len)]
