"""Builds stores by hand, straight from the format's records: no engine, no storage layer.

``StoreBuilder`` writes any slices for any ranks and steps. ``TinyRun`` uses it to write the checkpoints of
a small MoE model (one layer, four stacked experts) and remembers what each one must give back.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import xxhash

from moe_ckpt.format import FORMAT_VERSION
from moe_ckpt.format.manifest import (
    MANIFEST_NAME,
    STORE_NAME,
    FileRecord,
    LayerRecord,
    Manifest,
    ModelRecord,
    Part,
    PartRecord,
    StateRecord,
    compose_manifest,
    encode_part,
    file_row,
    shard_path,
    state_path,
    state_row,
    step_dir,
)
from moe_ckpt.format.run_records import Identity
from moe_ckpt.format.sealed import Fragment, digest, seal
from moe_ckpt.format.shard import TORCH_DTYPES, ShardHeader, SliceEntry, dtype_name, encode_header, lay_out
from moe_ckpt.format.tree import encode_tree
from moe_ckpt.ledger.coverage import Box
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.ports import Reading, StateTensor, TensorMeta, TensorSpec

LAYER = LayerRecord("blocks.0.moe", 4, 2)


@dataclass(frozen=True)
class Block:
    """A block of one tensor that ``rank`` writes for ``operator``."""

    rank: int
    operator: str
    key: str
    values: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


@dataclass
class StoreBuilder:
    """Writes checkpoints one after the other; a partial one takes the rest from those before it.

    parts: of the newest checkpoint, newest first. listed: of a step and the
    operators that it writes, those that its part says it holds.
    """

    root: Path
    run_id: str = "run-a"
    fingerprint: str = "f" * 32
    world_size: int = 2
    layers: tuple[LayerRecord, ...] = (LAYER,)
    aliases: Mapping[str, str] = field(default_factory=dict)
    parts: list[tuple[PartRecord, Part]] = field(default_factory=list)
    listed: Callable[[int, set[str]], Collection[str]] = lambda step, operators: operators
    count: int = 0

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / STORE_NAME).write_bytes(Identity(self.run_id, self.fingerprint, 1.7e9).encode())

    def commit(
        self,
        step: int,
        blocks: Sequence[Block],
        states: Sequence[Any],
        generation: int = 0,
        tokens: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Manifest:
        """Write one checkpoint and return its manifest; ``changes`` replace fields of the manifest."""
        directory = step_dir(step, generation)
        (self.root / directory).mkdir()
        written: list[tuple[FileRecord, ShardHeader]] = []
        records = []
        for rank, state in enumerate(states):
            encoded, tensors = encode_tree(state)
            mine = [block for block in blocks if block.rank == rank]
            for name, values in tensors.items():
                mine.append(Block(rank, "", f"side/{rank}/{name}", values, (0,) * values.dim(), tuple(values.shape)))
            for kind in ("expert", "non_expert"):
                chosen = [b for b in mine if (kind == "expert") == b.operator.startswith("expert/")]
                if chosen:
                    written.append(self._shard(directory, step, generation, rank, kind, chosen))
            records.append(self._state(directory, step, generation, rank, len(states), encoded))
        fresh = {entry.operator for _, header in written for entry in header.slices if entry.operator}
        part = Part(
            run_id=self.run_id,
            step=step,
            generation=generation,
            world_size=len(states),
            files=tuple(record for record, _ in written),
            states=tuple(records),
            operators=tuple(sorted(self.listed(step, fresh))),
        )
        newer: set[str] = set()
        kept = []
        for each in [self._write_part(part), *self.parts]:
            if not newer.issuperset(each[1].operators):
                kept.append(each)
            newer.update(each[1].operators)
        self.parts = kept
        bare = Manifest(
            run_id=self.run_id,
            step=step,
            generation=generation,
            world_size=len(states),
            index=self.count,
            created_unix_secs=1.7e9 + step,
            model=ModelRecord(self.fingerprint, self.layers, self.aliases),
            files=(),
            operators={},
            states=(),
            policy={"name": "moc", "k": 2},
            tokens=tokens or {},
            parts=tuple(record for record, _ in kept),
        )
        self.count += 1
        bare = dataclasses.replace(bare, **changes)
        self.write_manifest(directory, bare)
        return compose_manifest(bare, [part for _, part in kept])

    def write_manifest(self, directory: str, manifest: Manifest) -> None:
        """Whatever there was."""
        (self.root / directory / MANIFEST_NAME).write_bytes(manifest.encode())

    def change_part(self, manifest: Manifest, **changes: Any) -> None:
        """Replaces fields of the newest checkpoint's own part."""
        record, _ = self._write_part(dataclasses.replace(self.parts[0][1], **changes))
        self.write_manifest(manifest.directory, dataclasses.replace(manifest, parts=(record, *manifest.parts[1:])))

    def _write_part(self, part: Part) -> tuple[PartRecord, Part]:
        rows = {"files": b"".join(map(file_row, part.files)), "states": b"".join(map(state_row, part.states))}
        facts = (part.run_id, part.step, part.generation, part.world_size)
        record, raw = encode_part(*facts, **rows, operators=Fragment(list(part.operators)))
        (self.root / record.path).write_bytes(raw)
        return record, part

    def _shard(
        self, directory: str, step: int, generation: int, rank: int, kind: str, blocks: Sequence[Block]
    ) -> tuple[FileRecord, ShardHeader]:
        raw: dict[str, bytes] = {}
        entries = []
        for b in blocks:
            entry = SliceEntry(
                key=b.key,
                operator=b.operator,
                dtype=dtype_name(b.values.dtype),
                offsets=b.offsets,
                shape=tuple(b.values.shape),
                global_shape=b.global_shape,
                on_param_device=not b.key.endswith("/step"),
            )
            raw[entry.name] = as_bytes(b.values)
            entries.append(dataclasses.replace(entry, checksum=xxhash.xxh3_64_intdigest(raw[entry.name])))
        laid = lay_out(entries)
        header = ShardHeader(self.run_id, step, generation, rank, laid)
        head = encode_header(header)
        content = head + b"".join(raw[entry.name] for entry in laid)
        path = shard_path(directory, rank, kind)
        (self.root / path).write_bytes(content)
        return FileRecord(path, len(content), len(head), digest(head), step, rank), header

    def _state(
        self, directory: str, step: int, generation: int, rank: int, world_size: int, encoded: Any
    ) -> StateRecord:
        body = {
            "kind": "moe_ckpt.state",
            "format_version": FORMAT_VERSION,
            "run_id": self.run_id,
            "step": step,
            "generation": generation,
            "rank": rank,
            "world_size": world_size,
            "state": encoded,
        }
        raw = seal(body)
        path = state_path(directory, rank)
        (self.root / path).write_bytes(raw)
        return StateRecord(path, len(raw), digest(raw), rank)


def as_bytes(values: torch.Tensor) -> bytes:
    flat = values.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


PARAMETERS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed.weight": ((7, 4), torch.bfloat16),
    "blocks.0.moe.gate.weight": ((4, 4), torch.float32),
    "blocks.0.moe.experts": ((4, 3, 2), torch.float32),
    "scale": ((), torch.float32),
}
OPERATOR_OF = {
    "embed.weight": "non_expert/embed",
    "blocks.0.moe.gate.weight": "gate/0",
    "scale": "non_expert/rest",
}
STACK = "blocks.0.moe.experts"


def values_at(step: int, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What the tensor ``key`` is at ``step``; a pure function, different for every key and step."""
    if key.endswith("/step"):
        return torch.tensor(float(step))
    generator = torch.Generator().manual_seed(crc32(key.encode()) + step)
    return torch.randn(shape, generator=generator).to(dtype)


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """The whole training state of the tiny model at ``step``: parameters and one Adam."""
    found = {}
    for fqn, (shape, dtype) in PARAMETERS.items():
        found[f"model/{fqn}"] = values_at(step, f"model/{fqn}", shape, dtype)
        for name in ("exp_avg", "exp_avg_sq"):
            key = f"optim/0/{fqn}/{name}"
            found[key] = values_at(step, key, shape, torch.float32)
        found[f"optim/0/{fqn}/step"] = values_at(step, f"optim/0/{fqn}/step", (), torch.float32)
    return found


def operator_of(key: str, row: int) -> str:
    fqn = key.split("/")[1] if key.startswith("model/") else key.split("/")[2]
    if fqn == STACK:
        return "gate/0" if key.endswith("/step") else f"expert/0/{row}"
    return OPERATOR_OF[fqn]


@dataclass
class TinyRun:
    """The store of a run of the tiny model.

    sharded: every rank writes its rows of every tensor (as FSDP2 would); otherwise experts and the rest are
    dealt out to the ranks whole. views: directory -> what its checkpoint must give back.
    """

    root: Path
    world_size: int = 2
    sharded: bool = False
    builder: StoreBuilder = field(init=False)
    views: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    states: dict[str, list[Any]] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = StoreBuilder(self.root, world_size=self.world_size, aliases={"head.weight": "embed.weight"})
        self._view: dict[str, torch.Tensor] = {}

    def save(self, step: int, experts: Collection[int] = range(4), generation: int = 0) -> str:
        """Commit ``step`` with everything but the experts not named; returns the directory."""
        blocks: list[Block] = []
        for key, whole in tensors_at(step).items():
            view = self._view.setdefault(key, torch.zeros_like(whole))
            for rank, start, stop in self._rows(key, whole):
                operator = operator_of(key, start)
                if operator.startswith("expert/") and start not in experts:
                    continue
                part = whole[start:stop] if whole.dim() else whole
                offsets = (start, *[0] * (whole.dim() - 1)) if whole.dim() else ()
                blocks.append(Block(rank, operator, key, part, offsets, tuple(whole.shape)))
                (view[start:stop] if whole.dim() else view).copy_(part)
        directory = step_dir(step, generation)
        self.states[directory] = [self._state(step, rank) for rank in range(self.world_size)]
        self.manifests[directory] = self.builder.commit(
            step, blocks, self.states[directory], generation, self._tokens(step)
        )
        self.views[directory] = {key: whole.clone() for key, whole in self._view.items()}
        return directory

    def _rows(self, key: str, whole: torch.Tensor) -> list[tuple[int, int, int]]:
        """(rank, first row, end row) of the blocks of one tensor; an expert's row is a block of its own."""
        ranks = self.world_size
        if not whole.dim():
            return [(0, 0, 1)]
        rows = whole.shape[0]
        if STACK in key:
            return [(row * ranks // rows, row, row + 1) for row in range(rows)]
        if not self.sharded:
            return [(len(key) % ranks, 0, rows)]
        share = -(-rows // ranks)
        return [(r, r * share, min(rows, r * share + share)) for r in range(ranks) if r * share < rows]

    def _state(self, step: int, rank: int) -> dict[str, Any]:
        defaults = torch.optim.AdamW([torch.zeros(1)], lr=0.1 / step, betas=(0.9, 0.99)).param_groups[0]
        group = {key: value for key, value in defaults.items() if key != "params"}
        return {
            "framework": "lightning",
            "checkpoint": {
                "epoch": 0,
                "global_step": step,
                "pytorch-lightning_version": "2.6.6",
                "loops": {"fit_loop": {"state_dict": {}, "total": step}},
                "callbacks": {},
                "lr_schedulers": [{"last_epoch": step, "base_lrs": [0.1]}],
            },
            "plain": {
                "buffers": {"running": torch.arange(3.0) + step, "seen": torch.tensor(step)},
                "frozen": [],
                "optimizers": [
                    {
                        "class": "torch.optim.AdamW",
                        "param_groups": [
                            {**group, "params": ["embed.weight", "scale"]},
                            {**group, "lr": 0.5, "params": ["blocks.0.moe.gate.weight", STACK]},
                        ],
                        "scalars": {},
                    }
                ],
                "extra_state": {},
            },
            "configured": {"optimizers": [[{"lr": 0.1}]], "schedulers": [], "training": {}, "frozen": ""},
            "rng": generators(rank),
        }

    def _tokens(self, step: int) -> dict[str, Any]:
        more = [0] * (self.builder.layers[0].experts - 4)
        return {
            "applied": [[10 * step, 20 * step, 0, 5 * step, *more]],
            "saved": {"storage": [[10 * step, 20 * step, 0, step, *more]]},
            "faults": [[1, 7, 2, 70]],
            "mlt": [0.1],
        }


def generators(seed: int) -> dict[str, Any]:
    """States of generators that were never used, as ``modeling.rng.capture_rng`` gives them."""
    return {
        "python": random.Random(seed).getstate(),
        "numpy": np.random.RandomState(seed).get_state(),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }


def megatron_state(step: int, rank: int, buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A rank's plain state as the Megatron adapter writes it."""
    group = {"lr": 0.1, "wd_mult": 1.0, "is_expert_parallel": False, "betas": (0.9, 0.99)}
    return {
        "framework": "megatron",
        "iteration": step,
        "consumed_samples": 8 * step,
        "layout": {"pipeline": 2, "tensor": 1},
        "plain": {
            "buffers": dict(buffers),
            "optimizer": {"step": step, "groups": [group], "scalers": [None]},
            "optimizer_classes": [{"class": "torch.optim.AdamW", "kind": "AdamW"}],
            "frozen": [],
            "resting": [],
        },
        "configured": {"groups": [{"wd_mult": 1.0}], "scheduler": {}, "resting": []},
        "counters": {},
        "stateful": {"scheduler": {"num_steps": step}},
        "rng": generators(rank) | {"tracker": {"model-parallel-rng": generators(rank)["torch"]}},
    }


def example(root: Path, **options: Any) -> TinyRun:
    """Steps 1 (dense), 2 (experts 0 and 1), 3 (expert 2): the view of step 3 needs all three directories."""
    run = TinyRun(root, **options)
    run.save(1)
    run.save(2, experts=(0, 1))
    run.save(3, experts=(2,))
    return run


class LiveState:
    """A ``TrainingState`` of the tiny model on one of ``ranks`` ranks, filled with a marker value.

    Tensors are sharded by rows (``dim`` 0) or by the last dimension (``dim`` -1); optimizer state is lazy.
    """

    MARK = -77.0

    buffers = ()

    def __init__(self, rank: int = 0, ranks: int = 1, dim: int = 0, parameters: Mapping[str, Any] = PARAMETERS) -> None:
        self.rank, self.ranks, self.dim = rank, ranks, dim
        self.held: dict[str, StateTensor] = {}
        self.prepared = False
        self._specs: Sequence[TensorSpec] = ()
        for fqn, (shape, dtype) in parameters.items():
            self._make(f"model/{fqn}", shape, dtype)

    def _make(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        box = self._box(shape)
        local = torch.full(box.shape, self.MARK, dtype=dtype, requires_grad=key.startswith("model/"))
        fqn = key.split("/")[1] if key.startswith("model/") else key.split("/")[2]
        self.held[key] = StateTensor(key, fqn, local, box.offsets, shape, replicated=self.ranks == 1)

    def _box(self, shape: tuple[int, ...]) -> Box:
        if not shape:
            return Box((), ())
        dim = self.dim % len(shape)
        share = -(-shape[dim] // self.ranks)
        start = min(shape[dim], self.rank * share)
        offsets, local = [0] * len(shape), list(shape)
        offsets[dim], local[dim] = start, min(share, shape[dim] - start)
        return Box(tuple(offsets), tuple(local))

    def tensors(self, of: Reading | None = None, *, listed: bool = False) -> Sequence[StateTensor]:
        return list(self.held.values())

    def specs(self) -> Sequence[TensorSpec]:
        found = specs_of(self.tensors())
        self._specs = found if found != self._specs else self._specs
        return self._specs

    def plain(self) -> Mapping[str, Any]:
        return {}

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        """Takes everything."""

    def prepare(self, wanted: Mapping[str, TensorMeta]) -> None:
        self.prepared = True
        for key, meta in wanted.items():
            self._make(key, meta.global_shape, TORCH_DTYPES[meta.dtype])

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def expected(self, view: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
        whole = view[key]
        box = self._box(tuple(whole.shape))
        for dim, (start, length) in enumerate(zip(box.offsets, box.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole

    def untouched(self) -> bool:
        return not self.prepared and all(bool((t.local == self.MARK).all()) for t in self.held.values())
