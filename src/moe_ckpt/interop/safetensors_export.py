"""A checkpoint's model as safetensors files; one of transformers as the directory that ``from_pretrained`` opens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.format.dtypes import TORCH_DTYPES, dtype_name
from moe_ckpt.interop.safetensors_files import INDEX_NAME, SINGLE_NAME
from moe_ckpt.interop.whole import WholeCheckpoint

SUMMARY_NAME = "checkpoint.json"
OTHER_NAME = "other.safetensors"
"""Tensors outside the prefix that was taken off."""
MAX_FILE_BYTES = 50 * 10**9
"""As transformers 5 splits models."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _ExportedTensor:
    """One tensor to write. source: its key in the checkpoint, or the tensor itself."""

    dtype: str
    shape: tuple[int, ...]
    source: str | torch.Tensor

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
    if pretrained is not None:
        _write_json(target / "config.json", {**pretrained["config"], "dtype": _main_dtype(model)})
        if pretrained["generation_config"] is not None:
            _write_json(target / "generation_config.json", pretrained["generation_config"])
    left_out = sorted(name for name, value in checkpoint.extras.items() if not isinstance(value, torch.Tensor))
    about = {"prefix": prefix, "other": sorted(rest), "left_out": left_out}
    _write_json(target / SUMMARY_NAME, _summary(checkpoint) | about)


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
            flat: Any = values.contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(flat)
            report(values.nbytes)

    _write_file(path, chunks())


def _main_dtype(model: Mapping[str, _ExportedTensor]) -> str:
    """Of most of the weights, as torch names it, without ``torch.``."""
    nbytes: dict[str, int] = {}
    for entry in model.values():
        if TORCH_DTYPES[entry.dtype].is_floating_point:
            nbytes[entry.dtype] = nbytes.get(entry.dtype, 0) + entry.nbytes
    largest = max(nbytes, key=lambda dtype: nbytes[dtype], default="F32")
    return str(TORCH_DTYPES[largest]).removeprefix("torch.")


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
    _write_file(path, iter([(json.dumps(content, indent=2) + "\n").encode()]))


def _write_file(path: Path, chunks: Iterator[bytes | memoryview]) -> None:
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
