"""What each rank really writes is what was dealt to it, and any number of ranks gets every bit back.

Real gloo ranks, real DDP, AdamW's own state; the embedding is far more than a rank's share, so that it is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.placement import GRAIN_BYTES, everywhere, water_level
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.modeling.discover import build_catalog, find_moe_layers
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.policies import MoC
from moe_ckpt.reading.reader import StoreReader, check_checkpoint
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.slices.assignment import Sharder, weigh
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.lock import StoreLock
from tests.support import run_ranks
from tests.unit.engine_parts import told

VOCABULARY, WIDTH, HIDDEN, EXPERTS, STEPS = 3001, 32, 200, 4, 5


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x):
        weights, indices = F.linear(x, self.weight).softmax(-1).topk(2)
        return weights, indices


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        every = torch.einsum("tw,ehw->teh", hidden_states, self.up_proj).tanh()
        every = torch.einsum("teh,ewh->tew", every, self.down_proj)
        chosen = every.gather(1, top_k_index[..., None].expand(-1, -1, WIDTH))
        return (chosen * top_k_weights[..., None]).sum(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = Experts()

    def forward(self, x):
        weights, indices = self.gate(x)
        return x + self.experts(x, indices, weights)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x) * self.scale, self.embed.weight)


def made() -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(5)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(state: TorchTrainingState) -> dict[str, torch.Tensor]:
    return {tensor.key: tensor.local.detach().clone() for tensor in state.tensors()}


def train(rank: int, world_size: int, root: str) -> dict[str, torch.Tensor]:
    """A few steps with a partial checkpoint each, and a complete last one. Returns the last state."""
    model, optimizer = made()
    wrapped = DistributedDataParallel(model)
    catalog = build_catalog(model, find_moe_layers(model))
    state = TorchTrainingState(model, [optimizer])
    storage = LocalStorage(root)
    comm = make_communicator(60.0)
    run = RunContext(
        storage=storage,
        policy=MoC(k=1),
        catalog=catalog,
        state=state,
        comm=comm,
        settings=Settings(retention=RetentionPolicy(keep_last=100), when_busy="wait", host_memory_bytes=1 << 28),
        placement=everywhere(catalog.layers, comm.world_size),
        lock=StoreLock(storage, "a run"),
    )
    session = CheckpointSession(run)
    session.open()
    generator = torch.Generator().manual_seed(rank)
    counts = np.ones((2, EXPERTS), dtype=np.int64)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(VOCABULARY, (64,), generator=generator)
        F.cross_entropy(wrapped(tokens), tokens).backward()
        session.before_update()
        optimizer.step()
        optimizer.zero_grad()
        session.after_update(step, told(counts), lambda: {"rank": rank, "buffer": torch.ones(3)})
    session.finish(STEPS, lambda: {"rank": rank, "buffer": torch.ones(3)}, save_last=True)
    return state_of(state)


def resume(root: str) -> dict[str, torch.Tensor]:
    model, optimizer = made()
    state = TorchTrainingState(model, [optimizer])
    comm = make_communicator(60.0)
    try:
        restored = resume_newest(LocalStorage(root), comm, state)
        assert restored is not None
        assert restored.manifest.step == STEPS
    finally:
        comm.close()
    return state_of(state)


def body(rank: int, world_size: int, write: str | None, read: str | None) -> tuple[dict | None, dict | None]:
    restored = None if read is None else resume(read)
    dist.barrier()
    return None if write is None else train(rank, world_size, write), restored


@dataclass(frozen=True)
class Run:
    """A store, every rank's last state, and what each rank had restored first of another store."""

    ranks: int
    store: Path
    states: list[dict[str, torch.Tensor]]
    restored: list[dict[str, torch.Tensor]]


def run(tmp_path_factory: pytest.TempPathFactory, ranks: int, before: Run | None = None) -> Run:
    store = tmp_path_factory.mktemp(f"of_{ranks}")
    read = None if before is None else str(before.store)
    states, restored = zip(*run_ranks(body, ranks, str(store), read), strict=True)
    return Run(ranks, store, list(states), list(restored))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory, two):
    return run(tmp_path_factory, 4, two)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.slow)])
def written(request):
    return request.getfixturevalue(request.param)


def manifests(root: Path) -> list[Manifest]:
    reader = StoreReader(LocalStorage(root))
    found = [reader.manifest(name) for name in reversed(reader.directories())]
    for manifest in found:
        check_checkpoint(reader, manifest)
    return found


def written_bytes(root: Path, manifest: Manifest, ranks: int) -> list[int]:
    """``[R]`` tensor bytes that lie in each rank's files of this checkpoint; the files hold nothing else."""
    own = [record for record in manifest.files if record.path.startswith(f"{manifest.directory}/")]
    on_disk = {path.relative_to(root).as_posix() for path in (root / manifest.directory).glob("*.safetensors")}
    assert {record.path for record in own} == on_disk
    headers = StoreReader(LocalStorage(root)).headers(manifest)
    loads = [0] * ranks
    for record in own:
        slices = headers[record.path].slices
        assert (root / record.path).stat().st_size == record.header_nbytes + sum(entry.nbytes for entry in slices)
        loads[record.rank] += sum(entry.nbytes for entry in slices if entry.operator)
    return loads


def planned_bytes(manifest: Manifest, ranks: int) -> tuple[list[int], int, int]:
    """(loads, peak's lower bound, biggest preload) of the operators that the checkpoint saved, on a fresh model."""
    model, optimizer = made()
    F.cross_entropy(model(torch.arange(8)), torch.arange(8)).backward()
    optimizer.step()
    tensors = TorchTrainingState(model, [optimizer]).tensors()
    catalog = build_catalog(model, find_moe_layers(model))
    saved = {op for op, record in manifest.operators.items() if record.step == manifest.step}
    dealt = Sharder(catalog, everywhere(catalog.layers, ranks), tensors).assign(saved)
    weights, owners = weigh(catalog, tensors), everywhere(catalog.layers, ranks).owner_of
    preload = [0] * ranks
    for op in saved & weights.experts.keys():
        preload[owners[op]] += weights.experts[op]
    rest = sum(unit.nbytes for unit in weights.units)
    return list(dealt.shares.loads), water_level(preload, rest), max(preload)


def test_each_rank_writes_what_was_dealt_to_it(written):
    root, ranks = written.store, written.ranks
    found = manifests(root)
    assert [m.step for m in found] == [*range(1, STEPS + 1), STEPS]
    partial = 0
    for manifest in found:
        planned, level, preload = planned_bytes(manifest, ranks)
        assert written_bytes(root, manifest, ranks) == planned
        partial += sum(record.step < manifest.step for record in manifest.operators.values()) > 0
        assert max(planned) < max(level + GRAIN_BYTES, preload + 1)
    assert partial == STEPS - 1


def test_the_embedding_lies_in_the_files_of_several_ranks(written):
    index = StoreReader(LocalStorage(written.store)).index(manifests(written.store)[-1])
    slices = (stored for group in index.tensors.values() for stored in group)
    assert len({stored.file.rank for stored in slices if stored.entry.operator == "non_expert/embed"}) >= 2


def test_one_process_gets_every_bit_back(written):
    assert_same(resume(str(written.store)), written.states[0])
    assert not torch.equal(written.states[0]["model/embed.weight"], made()[0].embed.weight), "nothing was trained"


@pytest.mark.slow
def test_four_ranks_get_every_bit_back_of_two(two, four):
    for restored in four.restored:
        assert_same(restored, two.states[0])


@pytest.mark.slow
def test_three_ranks_get_every_bit_back_of_four(four):
    for _, restored in run_ranks(body, 3, None, str(four.store)):
        assert_same(restored, four.states[0])


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert found.keys() == truth.keys()
    assert [key for key, value in truth.items() if not torch.equal(found[key], value)] == []
