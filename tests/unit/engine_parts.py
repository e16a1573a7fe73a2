"""A real session around a hand-made training state: for tests of the engine without model and framework.

``Life`` is one life of a run of ``TinyState``. Several ranks are several threads (``run_threads``) that
talk through ``ThreadRanks``; the storage is a real directory.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.core.operators import Catalog, expert_id
from moe_ckpt.core.placement import everywhere
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.modeling.training_state import specs_of
from moe_ckpt.policies import MoC, Policy
from moe_ckpt.ports import Communicator, Reading, StateTensor, TensorSpec
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.events import Observer, StepRecord
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.base import Chunk, Storage
from moe_ckpt.storage.lock import StoreLock
from moe_ckpt.testing import FaultyStorage
from tests.support.store_builder import values_at
from tests.unit.builders import catalog

KEEP_ALL = RetentionPolicy(keep_last=1000)
PATIENCE_SECS = 120.0
"""Longest wait in a test for what should happen at once, on a machine that may be busy."""


MODEL = catalog(2, 4)
ALL = {op.id for op in MODEL.operators}
ALWAYS = {op.id for op in MODEL.always_saved}


def sequential(number: int) -> set[tuple[int, int]]:
    """Experts that MoC(k=1) saves on one rank in the partial checkpoint of this number, from 1, since a dense one."""
    return {(layer, (number - 1 + layer) % 4) for layer in range(2)}


def versions_after(checkpoints: list[tuple[int, set[tuple[int, int]]]]) -> dict[str, int]:
    """Operator -> step of its newest copy, after these (step, experts) checkpoints, the first of them dense."""
    versions = {}
    for number, (step, experts) in enumerate(checkpoints):
        saved = ALL if number == 0 else ALWAYS | {expert_id(*e) for e in experts}
        versions.update(dict.fromkeys(saved, step))
    return versions


def steps_of_experts(versions: dict[str, int]) -> np.ndarray:
    """``[L, E]``"""
    return np.array([[versions[expert_id(layer, e)] for e in range(4)] for layer in range(2)])


class TinyState:
    """All ranks hold everything; the tensors at ``step`` are a pure function of key and step.

    ``change`` replaces what ``tensors()`` gives: a test's way to break one rank's share.
    """

    buffers = ()

    def __init__(self, model: Catalog) -> None:
        self.held: dict[str, StateTensor] = {}
        self.change: Callable[[list[StateTensor]], list[StateTensor]] = lambda tensors: tensors
        self._specs: Sequence[TensorSpec] = ()
        for name, shape in model.parameters.items():
            for key, its_shape in ((f"model/{name}", shape), *_optim(name, shape)):
                self.held[key] = StateTensor(key, name, torch.zeros(its_shape), (0,) * len(its_shape), its_shape)

    def advance(self, step: int) -> None:
        for key, tensor in self.held.items():
            tensor.local.copy_(values_at(step, key, tensor.global_shape, torch.float32))

    def tensors(self, of: Reading | None = None, *, listed: bool = False) -> Sequence[StateTensor]:
        return self.change(list(self.held.values()))

    def specs(self) -> Sequence[TensorSpec]:
        found = specs_of(self.tensors())
        self._specs = found if found != self._specs else self._specs
        return self._specs

    def plain(self) -> Mapping[str, Any]:
        return {}

    def require_loadable(self, plain: Mapping[str, Any]) -> None:
        """Takes everything."""

    def prepare(self, wanted: Mapping[str, Any]) -> None:
        assert set(wanted) == {key for key in self.held if key.startswith("optim/")}

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        raise NotImplementedError


def _optim(name: str, shape: tuple[int, ...]) -> Iterable[tuple[str, tuple[int, ...]]]:
    return ((f"optim/0/{name}/exp_avg", shape), (f"optim/0/{name}/step", ()))


def told(counts: np.ndarray) -> Deferred[StepTokens]:
    """Tokens of one step, as a counter on the CPU gives them."""
    tokens = StepTokens(counts.copy())
    return Deferred(lambda: tokens)


class GatedStorage(LocalStorage):
    """Writes into step directories wait while the gate is closed: storage as slow as a test wants it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.gate.set()

    def write(self, path: str, chunks: Iterable[Chunk]) -> int:
        if path.startswith("step_") and not self.gate.wait(PATIENCE_SECS):
            raise TimeoutError("a test forgot to open the gate")
        return super().write(path, chunks)


def failing(root: Path, fail_at: int | None, persistent: bool = False) -> FaultyStorage:
    """Fails the n-th write into a step directory (three files per checkpoint, its part and the manifest)."""

    class Failing(FaultyStorage):
        def write(self, path, chunks):
            return super().write(path, chunks) if path.startswith("step_") else self.inner.write(path, chunks)

    return Failing(LocalStorage(root), fail_at, persistent=persistent, verbs={"write"})


class Life:
    """One life of a run: a session, its state, and what each step reported.

    counts: ``[L, E]`` tokens of every step.
    """

    def __init__(
        self,
        storage: Storage,
        model: Catalog | None = None,
        policy: Policy | None = None,
        comm: Communicator | None = None,
        on_phase: Callable[[str], None] | None = None,
        observers: Sequence[Observer] = (),
        **settings: Any,
    ) -> None:
        self.model = model or catalog(2, 4)
        self.storage = storage
        self.observers = observers
        self.state = TinyState(self.model)
        self.step = 0
        self.records: list[StepRecord] = []
        layers = len(self.model.layers)
        self.counts = np.arange(1, 1 + layers * 4, dtype=np.int64).reshape(layers, 4)
        comm = comm or SoloCommunicator()
        run = RunContext(
            storage=storage,
            policy=policy or MoC(k=1),
            catalog=self.model,
            state=self.state,
            comm=comm,
            settings=Settings(**{"retention": KEEP_ALL, "timeout_secs": PATIENCE_SECS, **settings}),
            on_phase=on_phase,
            observers=observers,
            placement=everywhere(self.model.layers, comm.world_size),
            lock=StoreLock(storage, "a run"),
        )
        self.session = CheckpointSession(run)

    def __enter__(self) -> Life:
        self.session.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()

    def go(self, steps: int = 1, *, settle: bool = False) -> StepRecord:
        """Train so many steps; with ``settle`` each checkpoint is resolved before the next step begins."""
        for _ in range(steps):
            self.session.before_update()
            self.step += 1
            self.state.advance(self.step)
            self.records.append(self.session.after_update(self.step, told(self.counts), self.capture))
            if settle:
                self.settle()
        return self.records[-1]

    def settle(self) -> None:
        """Wait until nothing is on its way; the books learn of it at the next step."""
        assert self.session._snapshots.pipeline.wait(PATIENCE_SECS)

    def capture(self) -> dict[str, Any]:
        return {"step": self.step, "buffer": torch.full((3,), float(self.step)), "empty": torch.empty(0)}

    def finish(self, **how: Any) -> None:
        self.session.finish(self.step, self.capture, **{"save_last": True, **how})


class ThreadRanks:
    """What ``world_size`` threads exchange; ``comm(rank)`` is one's communicator.

    ``on_agree(rank)`` is called before each agreement.
    """

    def __init__(self, world_size: int, on_agree: Callable[[int], None] = lambda rank: None) -> None:
        self.world_size = world_size
        self.on_agree = on_agree
        self.training, self.persist = _Meeting(world_size), _Meeting(world_size)
        self.sent = {pair: queue.SimpleQueue() for pair in itertools.product(range(world_size), repeat=2)}

    def comm(self, rank: int) -> ThreadCommunicator:
        return ThreadCommunicator(self, rank)

    def abandon(self) -> None:
        self.training.barrier.abort()
        self.persist.barrier.abort()


class _Meeting:
    def __init__(self, world_size: int) -> None:
        self.slots: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=PATIENCE_SECS)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value. A missing rank raises ``BrokenBarrierError``, a RuntimeError, as gloo does."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadCommunicator:
    agrees_late = False

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.world_size = ranks.world_size

    def agree(self, summed, largest):
        self._ranks.on_agree(self.rank)
        found = self._ranks.training.exchange(self.rank, (summed.copy(), largest.copy()))
        return sum(s for s, _ in found), np.maximum.reduce([m for _, m in found])

    def everyone(self, payload):
        return self._ranks.training.exchange(self.rank, payload)

    def swap(self, given, expected):
        for rank, group in given.items():
            if group:
                self._ranks.sent[self.rank, rank].put([tensor.clone() for tensor in group])
        for rank, group in expected.items():
            if group:
                for into, tensor in zip(group, self._received(rank), strict=True):
                    into.copy_(tensor)

    def _received(self, source):
        until = time.monotonic() + PATIENCE_SECS
        while True:
            try:
                return self._ranks.sent[source, self.rank].get(timeout=0.05)
            except queue.Empty:
                if self._ranks.training.barrier.broken or time.monotonic() > until:
                    raise RuntimeError(f"rank {source} sends nothing") from None

    def start_agreement(self, summed, largest):
        agreed = Future()
        agreed.set_result(self.agree(summed(), largest))
        return agreed

    def broadcast(self, payload: bytes, source: int = 0) -> bytes:
        return self._ranks.training.exchange(self.rank, payload)[source]

    def combine(self, columns: Sequence[bytes]) -> list[bytes] | None:
        found = self._ranks.persist.exchange(self.rank, list(columns))
        return None if self.rank else [b"".join(parts) for parts in zip(*found, strict=True)]

    def announce(self, payload: bytes) -> bytes:
        return self._ranks.persist.exchange(self.rank, payload)[0]

    def enter(self, generation: int) -> None:
        pass

    def close(self) -> None:
        pass


def run_threads(ranks: ThreadRanks, body: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """Results of ``body(comm)`` in one thread per rank; the first error, which also frees the others."""
    results: list[Any] = [None] * ranks.world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ranks.comm(rank))
        except BaseException as error:  # a thread's boundary: raised below
            errors.append(error)
            ranks.abandon()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_SECS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


# --- what is on disk ---


def manifests(root: Path) -> list[Manifest]:
    """All committed checkpoints, oldest first, each proven whole and undamaged."""
    reader = StoreReader(LocalStorage(root))
    found = [reader.manifest(name) for name in reversed(reader.directories())]
    for manifest in found:
        check_checkpoint(reader, manifest)
    return found


def assert_view(root: Path, model: Catalog, manifest: Manifest, versions: Mapping[str, int]) -> None:
    """Each operator of the view is at the step of ``versions``, and its values are those of that step."""
    assert {op: record.step for op, record in manifest.operators.items()} == dict(versions)
    reader = StoreReader(LocalStorage(root))
    tensors = reader.index(manifest).tensors
    assert set(tensors) == set(TinyState(model).held)
    for key in tensors:
        found = reader.tensor(manifest, key)
        for rows, operator in _rows_of(model, key):
            step = versions[operator]
            expected = values_at(step, key, tuple(found.shape), torch.float32)
            assert torch.equal(found[rows], expected[rows]), f"{key} {rows} is not that of step {step}"


def _rows_of(model: Catalog, key: str) -> list[tuple[Any, str]]:
    """(rows, operator) of one tensor of a catalog that ``builders.catalog`` made with stacked experts."""
    name = key.partition("/")[2] if key.startswith("model/") else key.split("/")[2]
    for layer in model.layers:
        if name == f"{layer.name}.w":
            if key.endswith("/step"):
                return [(..., f"gate/{layer.index}")]
            return [(e, f"expert/{layer.index}/{e}") for e in range(layer.experts)]
        if name == f"{layer.name}.gate.weight":
            return [(..., f"gate/{layer.index}")]
    return [(..., "non_expert/embed")]
