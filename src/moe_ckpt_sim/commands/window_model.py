"""What a policy would know about a model, put together from one of its checkpoints."""

from __future__ import annotations

import argparse
import re
from math import prod

import numpy as np

from moe_ckpt.core.operators import Catalog, MoELayer, Operator, OperatorKind, Span
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.tokens import Counts, TokenBook
from moe_ckpt.core.window import OperatorBytes
from moe_ckpt.errors import DamagedError
from moe_ckpt.format.manifest import MANIFEST_NAME, Manifest
from moe_ckpt.format.shard import SliceEntry, itemsize
from moe_ckpt.policies.base import Measured, MemoryFacts, ModelFacts, PolicyContext, RunFacts, TokenFacts
from moe_ckpt.reading.reader import StoreReader

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
_EXPERT = re.compile(r"expert/(\d+)/(\d+)", re.ASCII)
_GATE = re.compile(r"gate/(\d+)", re.ASCII)


def context_of(reader: StoreReader, manifest: Manifest, args: argparse.Namespace) -> PolicyContext:
    """The context of a step after the checkpoint's, measured as ``args`` say.

    Popularity is that of the whole run so far: the counts of the newest window alone are not stored.
    """
    catalog = catalog_of(manifest)
    return PolicyContext(
        ModelFacts(
            catalog,
            everywhere(catalog.layers, args.ranks or manifest.world_size),
            sizes_of(reader, manifest, COMPUTE_BYTES.get(args.compute_dtype)),
        ),
        # After step 0 comes a run's first window, which is not like those that follow.
        RunFacts(manifest.step + 1, last_step=max(1, manifest.step)),
        Measured(
            recent_iteration_secs=args.iteration_secs,
            copy_bytes_per_sec=args.bandwidth,
            persist_bytes_per_sec=args.bandwidth,
        ),
        TokenFacts(popularity=_tokens(manifest, catalog)),
        MemoryFacts(args.budget_fraction, args.host_memory),
    )


def catalog_of(manifest: Manifest) -> Catalog:
    """A catalog with the operators that a manifest names.

    Each stands for one made-up parameter: a policy asks for ids, kinds and layers only. Non-experts are sorted by
    name, with numbers in them by value, since a checkpoint does not keep the order of the model's modules.
    """
    operators = [_operator(name) for name in manifest.operators]
    operators.sort(key=lambda op: (op.layer is None, op.layer or 0, op.expert is None, op.expert or 0, _natural(op.id)))
    layers = tuple(MoELayer(at, x.name, x.experts, x.top_k) for at, x in enumerate(manifest.model.layers))
    return Catalog(tuple(operators), layers, dict.fromkeys(manifest.operators, (1,)))


def _operator(name: str) -> Operator:
    span = (Span(name),)
    if match := _EXPERT.fullmatch(name):
        return Operator(name, OperatorKind.EXPERT, span, int(match[1]), int(match[2]))
    if match := _GATE.fullmatch(name):
        return Operator(name, OperatorKind.GATE, span, int(match[1]))
    return Operator(name, OperatorKind.NON_EXPERT, span)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts 'layers.10' behind 'layers.9'."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def sizes_of(reader: StoreReader, manifest: Manifest, compute_itemsize: int | None = None) -> dict[str, OperatorBytes]:
    """Bytes of every operator, all ranks together, from the headers of the shards; no tensor is read.

    Args:
        compute_itemsize: Bytes per element of what forward and backward read, where that is narrower than the weights.
    """
    full = dict.fromkeys(manifest.operators, 0)
    compute = dict.fromkeys(manifest.operators, 0)
    for key, group in reader.index(manifest).tensors.items():
        for stored in group:
            full[stored.entry.operator] += stored.nbytes
            if key.startswith("model/"):
                compute[stored.entry.operator] += _compute_bytes(stored.entry, compute_itemsize)
    return {op: OperatorBytes(full[op], compute[op]) for op in full}


def _compute_bytes(entry: SliceEntry, compute_itemsize: int | None) -> int:
    width = itemsize(entry.dtype)
    if compute_itemsize is not None and entry.dtype.startswith(("F", "BF")):
        width = min(width, compute_itemsize)
    return prod(entry.shape) * width


def _tokens(manifest: Manifest, catalog: Catalog) -> Counts:
    if not manifest.tokens or not catalog.layers:
        return np.zeros((0, 0), dtype=np.int64)
    experts = max(layer.experts for layer in catalog.layers)
    try:
        return TokenBook.from_dict(manifest.tokens, len(catalog.layers), experts).applied
    except (KeyError, TypeError, ValueError) as error:
        path = f"{manifest.directory}/{MANIFEST_NAME}"
        raise DamagedError(path, f"its token counts cannot be read ({error})", step=manifest.step) from error
