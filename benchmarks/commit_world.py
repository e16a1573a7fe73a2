"""One rank of a world whose other ranks are acted: its own session, real; what the others send, built by the library.

All ranks hold everything. Experts have Qwen3-MoE's three matrices, with AdamW 12 slices, of a few elements, so that
time is spent on names and proofs, not on bytes. Experts are written by their owners, the rest is dealt out.

Three classes know how ranks commit today, and are what changes with it: ``Share`` is what a rank writes,
``Acknowledging`` what it says of it, ``ActedPeers`` who sends what to whom.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import xxhash

from benchmarks.acting import ActedRank
from moe_ckpt.comm.lane import TreeNode
from moe_ckpt.core.operators import (
    Catalog,
    MoELayer,
    Operator,
    OperatorKind,
    Span,
    expert_id,
    gate_id,
    non_expert_id,
)
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.step import Fate, SnapshotPlan, Superseded
from moe_ckpt.format.manifest import FileRecord, StateRecord, group_of, shard_path, state_path, step_dir
from moe_ckpt.format.sealed import digest
from moe_ckpt.format.shard import REPLAY, seal_of
from moe_ckpt.ledger.coverage import PRIME, Box, cover_sum
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.policies.base import Policy
from moe_ckpt.ports import Reading, StateTensor, TensorSpec
from moe_ckpt.slices.assignment import Sharder
from moe_ckpt.slices.claims import Claims
from moe_ckpt.slices.compiling import CompiledPart
from moe_ckpt.slices.cuts import Cuts
from moe_ckpt.slices.local_state import LocalState
from moe_ckpt.slices.snapshot import acknowledge, side_tensors
from moe_ckpt.threads import ThreadName

PERSIST_THREAD = ThreadName.PERSIST.value
_WIDTH = 4
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_RNG_BYTES = 5056  # torch's generator, which each rank saves
_REMEMBERED = 8  # plans
PlanKey = tuple[tuple[str, ...], tuple[str, ...], bool]
"""(operators, those saved as compute weights only, part of a window or not)."""


class State:
    """``ports.TrainingState``: weights, AdamW's moments and step counts, all views of the same few numbers."""

    buffers = ()

    def __init__(self, layers: int, experts: int) -> None:
        self.catalog = _catalog(layers, experts)
        numbers, count = torch.ones(max(experts, 16), _WIDTH), torch.tensor(1.0)
        results = []
        for name, shape in self.catalog.parameters.items():
            for key in (f"model/{name}", f"optim/0/{name}/exp_avg", f"optim/0/{name}/exp_avg_sq"):
                results.append(StateTensor(key, name, numbers[: shape[0], : shape[1]], (0, 0), shape))
            results.append(StateTensor(f"optim/0/{name}/step", name, count, (), ()))
        self._tensors = tuple(results)
        self._specs = specs_of(self._tensors)

    def tensors(self, of: Reading | None = None, *, listed: bool = False) -> Sequence[StateTensor]:
        return self._tensors

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def plain(self, *, described: bool = False) -> Mapping[str, Any]:
        """What each rank saves besides."""
        return {"loop": {"step": 1, "epoch": 0}, "rng": torch.zeros(_RNG_BYTES, dtype=torch.uint8)}

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def prepare(self, requested: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        raise NotImplementedError


def _catalog(layers: int, experts: int) -> Catalog:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (16, _WIDTH)}
    operators = [Operator(non_expert_id("embed_tokens"), OperatorKind.NON_EXPERT, (Span("embed_tokens.weight"),))]
    for layer in range(layers):
        attention = [f"layers.{layer}.self_attn.{name}.weight" for name in _ATTENTION]
        shapes |= dict.fromkeys(attention, (_WIDTH, _WIDTH))
        spans = tuple(Span(name) for name in attention)
        operators.append(Operator(non_expert_id(f"layers.{layer}.self_attn"), OperatorKind.NON_EXPERT, spans))
        shapes[f"layers.{layer}.mlp.gate.weight"] = (experts, _WIDTH)
        operators.append(Operator(gate_id(layer), OperatorKind.GATE, (Span(f"layers.{layer}.mlp.gate.weight"),), layer))
        for expert in range(experts):
            names = [f"layers.{layer}.mlp.experts.{expert}.{name}.weight" for name in _PROJECTIONS]
            shapes |= dict.fromkeys(names, (_WIDTH, _WIDTH))
            spans = tuple(Span(name) for name in names)
            operators.append(Operator(expert_id(layer, expert), OperatorKind.EXPERT, spans, layer, expert))
    moe = tuple(MoELayer(layer, f"layers.{layer}.mlp", experts, 2) for layer in range(layers))
    return Catalog(tuple(operators), moe, shapes)


def recorded(policy: Policy, plans: deque[SnapshotPlan]) -> Policy:
    """The same policy, which notes every plan that saves something."""
    kind: Any = type(policy)

    def plan(self: Any, context: Any) -> SnapshotPlan:
        chosen: SnapshotPlan = kind.plan(self, context)
        if chosen:
            plans.append(chosen)
        return chosen

    noting: Any = type(kind.__name__, (kind,), {"plan": plan})
    recording: Policy = noting(**{declared.name: getattr(policy, declared.name) for declared in fields(kind)})
    return recording


@dataclass(frozen=True)
class Share:
    """What one rank writes for a plan, and what it says of the proof (see ``CompiledPlan.cover_difference``)."""

    parts: tuple[CompiledPart, ...]
    cover: int


class Others:
    """What all ranks together write for a plan, by the library's own dealing and cutting; rank by rank."""

    def __init__(self, state: State, ranks: int) -> None:
        self._state, self._ranks = state, ranks
        self._sharder = Sharder(state.catalog, everywhere(state.catalog.layers, ranks), state.tensors())
        self._local = LocalState(state.catalog, state.tensors())
        self._known: dict[PlanKey, list[Share]] = {}
        self._compute: dict[str, str] = {}

    def shares_of(self, key: PlanKey) -> list[Share]:
        """By rank. Remembered for the last few plans: Dense and a window's slots come again."""
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = self._shares(*key)
        return self._known[key]

    def _shares(self, operators: Sequence[str], frozen: Sequence[str], in_window: bool) -> list[Share]:
        dealt = self._sharder.assign(frozenset(operators), frozenset(frozen), {})
        shared: dict[str, set[int]] = {}
        for (op, _), parts in dealt.shares.parts.items():
            shared.setdefault(op, set()).update(part.rank for part in parts)  # all ranks are peers
        writers = {op: sorted(ranks) for op, ranks in shared.items()} | {op: [r] for op, r in dealt.owners.items()}
        full, light = ([list[str]() for _ in range(self._ranks)] for _ in range(2))
        for given, by_rank in ((operators, full), (frozen, light)):
            for op in given:
                for rank in writers[op]:
                    by_rank[rank].append(op)
        results = [
            self._local.cuts(full[rank], dealt, rank).joined(self._local.cuts(light[rank], dealt, rank, self._compute))
            for rank in range(self._ranks)
        ]
        claims = self._claims(frozenset(operators), frozenset(frozen), in_window)
        return [self._share(rank, cuts, claims[rank]) for rank, cuts in enumerate(results)]

    def _share(self, rank: int, cuts: Cuts, claim: int) -> Share:
        is_expert = self._state.catalog.is_expert[cuts.places]
        by_kind = {"expert": cuts.masked(is_expert), "non_expert": cuts.masked(~is_expert)}
        side = [entry for entry, _ in side_tensors(self._state.plain(), rank)[1]]
        made = [CompiledPart(kind, item, side if kind == "non_expert" else (), ()) for kind, item in by_kind.items()]
        parts = tuple(part for part in made if len(part.slices))
        return Share(parts, (sum(part.cover_sum for part in parts) - claim) % PRIME)

    def _claims(self, operators: frozenset[str], frozen: frozenset[str], in_window: bool) -> list[int]:
        """What each rank answers for, as ``compiling.Claim`` divides it, of all ranks at once."""
        catalog, specs = self._state.catalog, self._state.specs()
        claimed = Claims(catalog, specs, 0, 1).boxes(operators, frozen, in_window=in_window)
        boxes: list[list[tuple[str, Box]]] = [[] for _ in range(self._ranks)]
        for key, group in claimed.items():
            boxes[crc32(key.removeprefix(REPLAY).encode()) % self._ranks] += [(key, box) for box in group]
        return [cover_sum(boxe) for boxe in boxes]


def key_of(plan: SnapshotPlan) -> PlanKey:
    window = plan.window is not None and plan.window.size > 1
    return plan.full, plan.compute if window else (), window


@functools.lru_cache
def _checksum(dtype: str, shape: tuple[int, ...]) -> int:
    """Weights are ones, generators zeros."""
    made = torch.ones(shape) if dtype == "F32" else torch.zeros(shape, dtype=torch.uint8)
    return xxhash.xxh3_64_intdigest(made.reshape(-1).view(torch.uint8).numpy().tobytes())


# --- how ranks commit today ---


class Acknowledging:
    """What a rank other than 0 sends when it has written its share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, shares: Sequence[Share], step: int, run_id: str) -> list[list[bytes]]:
        """By rank, of all but the first. Files are made, empty: rank 0 looks for them."""
        (self._root / step_dir(step, 0)).mkdir(exist_ok=True)
        return [self._one(rank, share, step, run_id) for rank, share in enumerate(shares) if rank]

    def delete(self, superseded: Superseded) -> None:
        """What the other ranks do when they hear that a checkpoint is committed."""
        for directory, (whole, groups) in superseded.items():
            for path in (self._root / directory).iterdir():
                if group_of(path.name) in groups and not path.name.startswith("rank_00000_"):
                    path.unlink()
            if whole:
                (self._root / directory).rmdir()

    def _one(self, rank: int, share: Share, step: int, run_id: str) -> list[bytes]:
        directory, files = step_dir(step, 0), []
        for part in share.parts:
            results = [_checksum(entry.dtype, entry.shape) for entry in part.listed()]
            checksums = np.array(results, dtype=np.uint64)
            raw = part.head(run_id, rank, step) + seal_of(step, 0, checksums)
            path = shard_path(directory, rank, part.kind)
            (self._root / path).touch()
            files.append(FileRecord(path, len(raw) + part.nbytes, len(raw), digest(raw), step, rank))
        path = state_path(directory, rank)
        (self._root / path).touch()
        state = StateRecord(path, 600, digest(path.encode()), rank)
        return acknowledge(files, state, share.cover).columns


def _joined(columns: Sequence[Sequence[bytes]]) -> list[bytes]:
    """As ``GlooCommunicator.combine`` joins those of a rank and of its children."""
    return [b"".join(parts) for parts in zip(*columns, strict=True)]


@dataclass
class Traffic:
    """Of one rank's persist thread. A message is what one call hands to a peer."""

    sent: int = 0
    received: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class ActedPeers(ActedRank):
    """``ports.Communicator`` of one rank that answers for all others.

    As rank 0 it gives what the others acknowledge; as another one it sends its own and hears that all is committed.
    acting: processor seconds of the persist thread that went into acting.
    """

    def __init__(self, rank: int, ranks: int, others: Others, plans: deque[SnapshotPlan], root: Path) -> None:
        super().__init__(rank, ranks)
        self.traffic, self.acting = Traffic(), 0.0
        self._others, self._plans, self._root = others, plans, root
        self._run_id = "0" * 32
        self._acknowledging = Acknowledging(root)

    def broadcast(self, payload: bytes, source: int = 0) -> bytes:
        """What rank 0 has opened."""
        if self.rank == 0:
            self._run_id, _ = json.loads(payload)["result"]
            return payload
        return json.dumps({"result": [self._run_id, 0]}).encode()

    def everyone(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world_size

    def swap(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], expected: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        raise NotImplementedError("nothing is recovered here")

    def combine(self, columns: Sequence[bytes]) -> list[bytes] | None:
        if self.rank:  # what its subtree sends it is taken to be as large as its own
            payload, sizes = b"".join(columns), self._subtrees()
            self._count(sent=[payload * (1 + sum(sizes))], received=[payload * size for size in sizes])
            return None
        with self._acting():
            plan = self._plans.popleft()
            acted = self._acknowledging.of(self._others.shares_of(key_of(plan)), plan.step, self._run_id)
            firsts = [0, *accumulate(self._subtrees())]
            received = [_joined(acted[at:to]) for at, to in pairwise(firsts)]
        self._count(received=[b"".join(item) for item in received])
        return _joined([columns, *received])

    def _subtrees(self) -> list[int]:
        """Ranks behind each child of this rank in the tree along which messages go."""
        children = TreeNode(self.rank, self.world_size).children
        return [min(child - self.rank, self.world_size - child) for child in children]

    def announce(self, payload: bytes) -> bytes:
        if self.rank == 0:
            self._count(sent=[payload] * len(self._subtrees()))
            with self._acting():
                self._acknowledging.delete(Fate(*json.loads(payload)).superseded)
            return payload
        answer = self._first_rank_commits()
        self._count(received=[answer], sent=[answer] * len(self._subtrees()))
        return answer

    def _count(self, sent: Sequence[bytes] = (), received: Sequence[bytes] = ()) -> None:
        traffic = self.traffic
        traffic.sent += len(sent)
        traffic.received += len(received)
        traffic.sent_bytes += sum(map(len, sent))
        traffic.received_bytes += sum(map(len, received))

    @contextmanager
    def _acting(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.acting += time.thread_time() - began


def persist_cpu() -> float:
    """Processor seconds that the persist thread of this process has used so far."""
    (thread,) = (thread for thread in threading.enumerate() if thread.name == PERSIST_THREAD)
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
