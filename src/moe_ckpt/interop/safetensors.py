"""Models in safetensors files: one file, or a directory of them as transformers saves models.

An export writes them, ``from_pretrained`` opens it, and weights are loaded from them, also from those of others. Only
headers are read when a source is opened. Such files have no checksums: what is compared is that every tensor lies
inside its file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from moe_ckpt.errors import ConfigError, DamagedError, NoCheckpointError
from moe_ckpt.format.shard import MAX_HEADER_BYTES, TORCH_DTYPES, dtype_name
from moe_ckpt.interop.hub_names import hub_model
from moe_ckpt.interop.whole import WholeCheckpoint
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.storage.base import Chunk, Storage
from moe_ckpt.storage.local import ACCESS, create_file

log = logging.getLogger("moe_ckpt")

SUFFIX = ".safetensors"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class FileTensor:
    """Position of one tensor in a file.

    Attributes:
        offset: Of its first byte in the file.
    """

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def model_files(storage: Storage) -> tuple[str, ...]:
    """Returns a directory's files of the model: ``model.safetensors``, those that its index names, or the only one.

    Raises:
        NoCheckpointError: There are none, or several without an index.
        DamagedError: The index is not one.
    """
    names = storage.list()
    if SINGLE_NAME in names:
        return (SINGLE_NAME,)
    if INDEX_NAME in names:
        return _indexed(storage, names)
    candidates = [name for name in names if name.endswith(SUFFIX)]
    if len(candidates) != 1:
        what = f"holds {len(candidates)} of them ({', '.join(candidates[:4])})" if candidates else "holds none"
        raise NoCheckpointError(
            f"{storage.root} {what}: a directory of safetensors files needs {SINGLE_NAME} or {INDEX_NAME}, or name one "
            "file of it"
        )
    return (candidates[0],)


def _indexed(storage: Storage, names: Iterable[str]) -> tuple[str, ...]:
    path = f"{storage.root}/{INDEX_NAME}"
    try:
        files = {str(name) for name in json.loads(bytes(storage.read(INDEX_NAME)))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(path, f"is no index of safetensors files ({error!r})") from error
    absent = sorted(files - set(names))  # also refuses names that lead out of the directory
    if absent or not files:
        raise DamagedError(path, f"names files that are not there: {', '.join(absent[:4]) or 'none at all'}")
    return tuple(sorted(files))


def read_tables(storage: Storage, paths: Iterable[str]) -> dict[str, FileTensor]:
    """Returns every tensor of the files, by name.

    Raises:
        DamagedError: A file is no safetensors file, is cut short, or two of them hold one name.
    """
    tables: dict[str, FileTensor] = {}
    for path in paths:
        where = f"{storage.root}/{path}"
        try:
            tensors = _table(storage, path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise DamagedError(where, f"is no complete safetensors file ({error})") from error
        twice = tables.keys() & tensors.keys()
        if twice:
            raise DamagedError(where, f"holds {min(twice)!r}, which {tables[min(twice)].path} holds too")
        tables |= tensors
    return tables


def _table(storage: Storage, path: str) -> dict[str, FileTensor]:
    size = storage.size(path)
    length = int.from_bytes(storage.read(path, 0, 8), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length:,} bytes does not fit into {size:,}")
    header = json.loads(bytes(storage.read(path, 8, length)))
    header.pop("__metadata__", None)
    return {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}


def _entry(path: str, name: str, fields: dict[str, Any], start: int, size: int) -> FileTensor:
    dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"{name} is of type {dtype!r}, which is not known")
    whole = isinstance(shape, list) and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    if not whole or end - begin != prod(shape) * TORCH_DTYPES[dtype].itemsize or start + end > size:
        raise ValueError(f"{name} of shape {shape} cannot lie at bytes {begin} to {end} of {size - start:,}")
    return FileTensor(path, name, str(dtype), tuple(shape), start + begin)


def read_block(storage: Storage, tensor: FileTensor, box: Box) -> torch.Tensor:
    """Returns a block of a tensor. Of its first dimension only the rows that are wanted are read.

    Raises:
        DamagedError: The file is shorter than it was.
    """
    dtype = TORCH_DTYPES[tensor.dtype]
    first, rows = (box.offsets[0], box.shape[0]) if tensor.shape else (0, 1)
    shape = (rows, *tensor.shape[1:]) if tensor.shape else ()
    row_nbytes = prod(tensor.shape[1:]) * dtype.itemsize
    nbytes = rows * row_nbytes
    if not nbytes:
        return torch.empty(box.shape, dtype=dtype)
    raw = bytearray(storage.read(tensor.path, tensor.offset + first * row_nbytes, nbytes))
    if len(raw) < nbytes:
        present = f"{len(raw):,} of {nbytes:,} bytes are there"
        raise DamagedError(f"{storage.root}/{tensor.path}", f"{tensor.name}: {present}")
    values = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    for dim, (start, length) in enumerate(zip(box.offsets[1:], box.shape[1:], strict=True), start=1):
        values = values.narrow(dim, start, length)
    return values


SUMMARY_NAME = "checkpoint.json"
OTHER_NAME = "other.safetensors"
"""Tensors outside the prefix that was taken off."""
MAX_FILE_BYTES = 50 * 10**9
"""As transformers 5 splits models."""

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True)
class _ExportedTensor:
    """One tensor to write.

    Attributes:
        source: Its key in the checkpoint, or the tensor itself.
        part: Takes it out of the tensor of that key; None for all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    source: str | torch.Tensor
    part: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


def write_safetensors(
    checkpoint: WholeCheckpoint,
    target: Path,
    progress: Progress,
    strip_prefix: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the model, and a small JSON file that says what it is.

    Where one model of transformers is inside the trained module, its names lose what they have from that module, and
    ``config.json`` is written: ``from_pretrained`` opens the directory. Tensors beside it go to ``other.safetensors``.

    Args:
        checkpoint: Of any framework.
        target: Directory to create.
        progress: Told bytes.
        strip_prefix: What to take off names; None to go by the models of transformers, "" for nothing.
        max_file_bytes: The model is split into files of at most so many bytes.

    Raises:
        ConfigError: No name begins with the prefix.
    """
    pretrained = _chosen(checkpoint, strip_prefix)
    prefix = pretrained["prefix"] if pretrained is not None else strip_prefix or ""
    entries = _entries(checkpoint)
    model, rest = _divided(checkpoint, entries, prefix, tied_once=pretrained is not None)
    if not model:
        example = min(entries, default="nothing")
        raise ConfigError(f"strip_prefix={prefix!r}: no tensor's name begins with it; there is {example}")
    left_out = sorted(name for name, value in checkpoint.extras.items() if not isinstance(value, torch.Tensor))
    about = {"prefix": prefix, "other": sorted(rest), "left_out": left_out}
    _write_model(checkpoint, target, (model, rest), progress, max_file_bytes)
    if pretrained is not None:
        _write_configs(target, model, pretrained["config"], pretrained["generation_config"])
    _write_json(target / SUMMARY_NAME, _summary(checkpoint) | about)


def write_for_hub(
    checkpoint: WholeCheckpoint,
    target: Path,
    progress: Progress,
    config: str | os.PathLike[str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a directory that ``from_pretrained`` opens, of a model of transformers or of Megatron.

    Args:
        checkpoint: Of any framework.
        target: Directory to create.
        progress: Told bytes.
        config: Of Megatron's, which do not say: the directory of the model's ``config.json``, or that file.
        max_file_bytes: The model is split into files of at most so many bytes.

    Raises:
        ConfigError: A config is needed, or is not that of the model.
        UnsupportedError: The model is of a kind whose names are not known; says what knows them.
        CoverageError: The model by the config has other tensors.
    """
    if checkpoint.state.get("framework") != "megatron":
        if config is not None:
            raise ConfigError(f"config={str(config)!r} is for checkpoints of Megatron: others say what their model is")
        if _chosen(checkpoint, None) is None:
            raise ConfigError(
                "--to hf needs a checkpoint of one model of transformers, and this one has none, or several. Export "
                "it --to safetensors, which keeps names, or takes a beginning off them (--strip-prefix)"
            )
        write_safetensors(checkpoint, target, progress, max_file_bytes=max_file_bytes)
        return
    if config is None:
        raise ConfigError(
            "--to hf needs to know which model on the hub a checkpoint of Megatron is: give the directory of its "
            "config.json, --config DIRECTORY (hf download NAME config.json --local-dir DIRECTORY)"
        )
    path = Path(config) / CONFIG_NAME if Path(config).is_dir() else Path(config)
    content = _read_json(path)
    model = hub_model(content, path.parent)
    model.require_architecture(checkpoint.state.get("architecture", {}))
    index = checkpoint.reader.index(checkpoint.manifest)
    shapes = {name: index.meta(key).global_shape for name, key in checkpoint.parameters.items()}
    sources = _entries(checkpoint)
    made = {
        name: replace(sources[tensor.source], shape=tensor.shape, part=tensor.part)
        for name, tensor in model.tensors(shapes, checkpoint.extras).items()
    }
    _write_model(checkpoint, target, (made, {}), progress, max_file_bytes)
    generation = path.parent / "generation_config.json"
    _write_configs(target, made, content, _read_json(generation) if generation.exists() else None)
    _write_json(target / SUMMARY_NAME, _summary(checkpoint))


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no config of a model")
    return content


def _write_configs(
    target: Path, model: Mapping[str, _ExportedTensor], config: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> None:
    main = _main_dtype(model)
    _write_json(target / CONFIG_NAME, {**config, "dtype": str(main).removeprefix("torch.")})
    types = [TORCH_DTYPES[tensor.dtype] for tensor in model.values()]
    rounded = [
        dtype for dtype in types if dtype.is_floating_point and dtype != main and dtype.itemsize >= main.itemsize
    ]
    if rounded:
        log.warning(
            "%d of %d tensors are of another type than %s, the type of most. from_pretrained rounds them to that, but "
            "for those that the model's class keeps; with dtype=%s all values come back",
            len(rounded),
            len(types),
            main,
            max((torch.float32, *rounded), key=lambda dtype: dtype.itemsize),
        )
    if generation is not None:
        _write_json(target / "generation_config.json", generation)


def _write_model(
    checkpoint: WholeCheckpoint,
    target: Path,
    tensors: tuple[Mapping[str, _ExportedTensor], Mapping[str, _ExportedTensor]],
    progress: Progress,
    max_file_bytes: int,
) -> None:
    """Writes the tensors of the model, and others, with an index where there are several files."""
    model, rest = tensors
    target.mkdir()
    files = {path: list(names) for path, names in _split(model, max_file_bytes).items()}
    total = sum(entry.nbytes for entry in (*model.values(), *rest.values()))
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    for path, names in files.items():
        _write_tensors(checkpoint, target / path, {name: model[name] for name in names}, report)
    if rest:
        _write_tensors(checkpoint, target / OTHER_NAME, rest, report)
    if len(files) > 1:
        weight_map = {name: path for path, names in files.items() for name in names}
        size = sum(entry.nbytes for entry in model.values())
        _write_json(target / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _chosen(checkpoint: WholeCheckpoint, strip_prefix: str | None) -> Mapping[str, Any] | None:
    """The model of transformers to write as one: the only one, or that of the prefix."""
    models: Sequence[Mapping[str, Any]] = checkpoint.state.get("plain", {}).get("pretrained", ())
    if strip_prefix is None:
        return models[0] if len(models) == 1 else None
    return next((model for model in models if model["prefix"] == strip_prefix), None)


def _entries(checkpoint: WholeCheckpoint) -> dict[str, _ExportedTensor]:
    index = checkpoint.reader.index(checkpoint.manifest)
    exported = {}
    for name, key in checkpoint.parameters.items():
        meta = index.meta(key)
        exported[name] = _ExportedTensor(meta.dtype, meta.global_shape, key)
    for name, value in checkpoint.extras.items():
        if isinstance(value, torch.Tensor):
            exported[name] = _ExportedTensor(dtype_name(value.dtype), tuple(value.shape), value)
    return exported


def _divided(
    checkpoint: WholeCheckpoint, entries: Mapping[str, _ExportedTensor], prefix: str, *, tied_once: bool
) -> tuple[dict[str, _ExportedTensor], dict[str, _ExportedTensor]]:
    """(the model by names without ``prefix``, all else). tied_once: a tied tensor under one name, as transformers
    saves it."""
    inside = {name: entry for name, entry in entries.items() if name.startswith(prefix)}
    rest = {name: entry for name, entry in entries.items() if not name.startswith(prefix)}
    if tied_once:
        first: dict[str, str] = {}
        aliases = checkpoint.manifest.model.aliases
        for name in sorted(inside, key=lambda name: name in aliases):
            source = inside[name].source
            if isinstance(source, str) and first.setdefault(source, name) != name:
                del inside[name]
        sources = {entry.source for entry in inside.values() if isinstance(entry.source, str)}
        rest = {
            n: entry for n, entry in rest.items() if not isinstance(entry.source, str) or entry.source not in sources
        }
    return {name[len(prefix) :]: entry for name, entry in inside.items()}, rest


def _split(model: Mapping[str, _ExportedTensor], max_file_bytes: int) -> dict[str, Iterable[str]]:
    """File name -> names of its tensors, in the model's order."""
    files: list[list[str]] = [[]]
    nbytes = 0
    for name, entry in model.items():
        if files[-1] and nbytes + entry.nbytes > max_file_bytes:
            files.append([])
            nbytes = 0
        files[-1].append(name)
        nbytes += entry.nbytes
    if len(files) == 1:
        return {SINGLE_NAME: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": names for n, names in enumerate(files, start=1)}


def _write_tensors(
    checkpoint: WholeCheckpoint, path: Path, entries: Mapping[str, _ExportedTensor], report: Callable[[int], None]
) -> None:
    """One file, a tensor at a time. Widest types first, so that each lies at a multiple of its element size."""
    names = sorted(entries, key=lambda name: (-TORCH_DTYPES[entries[name].dtype].itemsize, name))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        entry = entries[name]
        table[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [at, at + entry.nbytes]}
        at += entry.nbytes
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    def chunks() -> Iterator[bytes | memoryview]:
        yield len(header).to_bytes(8, "little") + header
        for name in names:
            source = entries[name].source
            values = checkpoint.tensor(source) if isinstance(source, str) else source
            part = entries[name].part
            values = values if part is None else part(values)
            flat: Any = values.contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(flat)
            report(values.nbytes)

    _write_file(path, chunks())


def _main_dtype(model: Mapping[str, _ExportedTensor]) -> torch.dtype:
    """Returns the type of most of the weights."""
    nbytes: dict[str, int] = {}
    for entry in model.values():
        if TORCH_DTYPES[entry.dtype].is_floating_point:
            nbytes[entry.dtype] = nbytes.get(entry.dtype, 0) + entry.nbytes
    return TORCH_DTYPES[max(nbytes, key=lambda dtype: nbytes[dtype], default="F32")]


def _summary(checkpoint: WholeCheckpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "kind": "moe_ckpt.export",
        "run_id": manifest.run_id,
        "step": manifest.step,
        "checkpoint": manifest.directory,
        "policy": dict(manifest.policy),
        "expert_versions": {op: r.step for op, r in manifest.operators.items() if op.startswith("expert/")},
        "tied": dict(manifest.model.aliases),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_file(path, [(json.dumps(content, indent=2) + "\n").encode()])


def _write_file(path: Path, chunks: Iterable[Chunk]) -> None:
    create_file(str(path), chunks, ACCESS["umask"])
