"""A rank dies by ``kill -9``; the survivor forms a new group in the same process, with what its memory still holds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_ckpt import Memory
from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.placement import everywhere
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.modeling.discover import build_catalog
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.policies import MoC
from moe_ckpt.policies.base import Policy
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.lock import StoreLock
from moe_ckpt.tiers import host_memory
from tests.dist.test_training_state_fsdp2 import Model, sharded
from tests.support.processes import PATIENCE_SECS, start_ranks
from tests.unit.engine_parts import told

LAYERS, EXPERTS, FATAL_STEP, MORE_STEPS = 2, 5, 8, 3
TIMEOUT_SECS = 60.0


def join(root: str, name: str, rank: int, world_size: int) -> None:
    """Leave the process group there is and form another one, as a restarter inside the process does."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{root}/{name}", rank=rank, world_size=world_size)


def node_memory(root: str) -> Path:
    directory = Path(root, f"node_{dist.get_rank()}")
    directory.mkdir(exist_ok=True)
    return directory


class Life:
    """One life of a rank: model, optimizer and session, all new.

    memory: arguments of ``Memory``, where snapshots lie in slots, of a node for each rank.
    policy: MoC with all experts in memory, unless another one is given.
    """

    def __init__(
        self, root: str, fsdp: bool, seed: int, memory: dict | None = None, policy: Policy | None = None
    ) -> None:
        self.fsdp = fsdp
        self.model = sharded(seed) if fsdp else Model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.state = TorchTrainingState(self.model, [self.optimizer])
        self.storage = LocalStorage(f"{root}/store")
        self.comm = make_communicator(TIMEOUT_SECS)
        catalog = build_catalog(self.model)
        run = RunContext(
            storage=self.storage,
            policy=policy or MoC(k=1, snapshot_k=EXPERTS),
            catalog=catalog,
            state=self.state,
            comm=self.comm,
            settings=Settings(
                retention=RetentionPolicy(keep_last=100),
                when_busy="wait",
                timeout_secs=TIMEOUT_SECS,
                memory=None if memory is None else Memory(directory=node_memory(root), **memory),
            ),
            placement=everywhere(catalog.layers, self.comm.world_size),
            lock=StoreLock(self.storage, "a run"),
        )
        self.session = CheckpointSession(run)
        self.session.open()
        self.step = 0

    def train(self, die: bool = False) -> None:
        """One step; ``die`` ends the process when the peer waits for its gradients."""
        generator = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        loss = self.model(torch.randn(20, 8, generator=generator)).square().mean()
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.zero_grad()
        loss.backward()
        if not self.fsdp:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
        self.session.before_update()
        self.optimizer.step()
        self.step += 1
        self.session.after_update(self.step, told(counts_of(dist.get_rank())), lambda: {"plain": self.state.plain()})

    def resume(self):
        """(Restored, FaultRecord)"""
        restored = resume_newest(self.storage, self.comm, self.state, self.session.tier)
        assert restored is not None
        self.state.load_plain(restored.plain["plain"])
        self.step = restored.manifest.step
        return restored, self.session.resume_from(restored.manifest, **restored.going_on)

    def whole(self) -> dict[str, torch.Tensor]:
        """All tensors, put together and copied. A collective where they are sharded."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"model/{name}"] = _whole(parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optim/0/{name}/{key}"] = _whole(value)
        return found


def _whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def counts_of(rank: int) -> np.ndarray:
    return np.arange(1, 1 + LAYERS * EXPERTS, dtype=np.int64).reshape(LAYERS, EXPERTS) * (rank + 1)


def expected(history: dict[int, dict], step: int, versions: dict[str, int]) -> dict[str, torch.Tensor]:
    """The state of ``step`` with each expert's rows as of its version."""
    state = {key: value.clone() for key, value in history[step].items()}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            version = versions[expert_id(layer, expert)]
            for key, value in state.items():
                if f"layers.{layer}.experts." in key and value.ndim:
                    value[expert] = history[version][key][expert]
    return state


def live_until_the_peer_dies(root: str, rank: int, fsdp: bool) -> dict[int, dict[str, torch.Tensor]]:
    """The first life. Returns what the survivor saw at every step."""
    life = Life(root, fsdp, seed=0)
    history = {}
    try:
        while True:
            life.train(die=rank == 1 and life.step == FATAL_STEP - 1)
            history[life.step] = life.whole()
    except RuntimeError:
        life.session.close(TIMEOUT_SECS)
    assert len(history) == FATAL_STEP - 1
    return history


def come_back(root: str, fsdp: bool, memory: dict | None = None) -> tuple[Life, dict]:
    """The second life up to its first step, and what is to be told of it."""
    life = Life(root, fsdp, 1 + dist.get_rank(), memory)
    restored, fault = life.resume()
    on_storage = restored.beneath or restored.manifest
    stored = {op: record.step for op, record in on_storage.operators.items()}
    newer = [] if restored.tokens_from_host is None else np.argwhere(restored.tokens_from_host).tolist()
    told = {
        "step": restored.manifest.step,
        "stored": stored,
        "newer": {expert_id(*at) for at in newer},
        "fault": fault,
        "books": life.session.run_ledger.tokens.to_dict(),
        "state": life.whole(),
        "applied": restored.manifest.tokens["applied"],
    }
    return life, told


def lost_by_hand(step: int, versions: dict[str, int], ranks: int) -> int:
    per_step = sum(counts_of(rank) for rank in range(ranks))
    lacking = {(layer, e): step - versions[expert_id(layer, e)] for layer in range(LAYERS) for e in range(EXPERTS)}
    return sum(steps * int(per_step[at]) for at, steps in lacking.items())


def check_survivor(history, told) -> dict[str, int]:
    """The state is that of the step, experts as new as memory or storage has them. Returns their versions."""
    step = told["step"]
    assert FATAL_STEP - 3 <= step < FATAL_STEP, "two may be under way, and may or may not have been committed in time"
    versions = told["stored"] | dict.fromkeys(told["newer"], step)
    wanted = expected(history, step, versions)
    assert told["state"].keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(told["state"][key], value), key
    assert told["fault"].lost_tokens == lost_by_hand(step, versions, ranks=2)
    return versions


def body_join(third: int, _: int, root: str):
    """Processes 0 and 1 train; 1 is killed; 2, fresh, takes its place beside the survivor."""
    dist.barrier()  # a rank that is still connecting must not find that others have left the group
    if third == 2:
        join(root, "second", 1, 2)
    else:
        join(root, "first", third, 2)
        history = live_until_the_peer_dies(root, third, fsdp=False)
        join(root, "second", 0, 2)
    life, told = come_back(root, fsdp=False)
    if third == 0:
        check_survivor(history, told)
    for _step in range(MORE_STEPS):
        life.train()
    life.session.finish(life.step, lambda: {"plain": life.state.plain()}, save_last=True)
    assert host_memory.release_host_memory() == 0
    return told, life.whole(), life.session.run_ledger.tokens.to_dict()


def test_a_fresh_rank_gets_what_the_survivor_holds(tmp_path: Path):
    survivor, victim, fresh = start_ranks(body_join, 3, str(tmp_path), grace=PATIENCE_SECS)
    assert victim.exitcode == -signal.SIGKILL
    assert survivor.ok, survivor.error
    assert fresh.ok, fresh.error
    (told, after, books), (told_fresh, after_fresh, books_fresh) = survivor.value, fresh.value
    stale = {op for op, step in told["stored"].items() if step < told["step"]}
    owned = {expert_id(layer, e) for layer in range(LAYERS) for e in range(3)}  # the survivor's of 5: 0, 1 and 2
    assert told["newer"] == stale & owned != set(), "the survivor's experts, from memory"
    assert stale - owned, "the dead rank's, from storage"
    assert {k: v for k, v in told.items() if k != "state"} == {k: v for k, v in told_fresh.items() if k != "state"}
    for mine, theirs in ((told["state"], told_fresh["state"]), (after, after_fresh)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert books == books_fresh
    assert books["faults"][0][:2] == [told["step"], told["fault"].lost_tokens]


def body_shrink(rank: int, _: int, root: str, sharded_after: bool):
    """Two ranks of FSDP2; the survivor goes on alone."""
    dist.barrier()  # as above
    join(root, "first", rank, 2)
    history = live_until_the_peer_dies(root, rank, fsdp=True)
    join(root, "second", 0, 1)
    life, told = come_back(root, fsdp=sharded_after)
    check_survivor(history, told)
    life.train()
    life.session.finish(life.step, lambda: {"plain": life.state.plain()}, save_last=True)
    return {k: v for k, v in told.items() if k != "state"}


@pytest.mark.parametrize("sharded_after", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fsdp2", "plain"])
def test_the_survivor_of_two_sharded_ranks_goes_on_alone(tmp_path: Path, sharded_after):
    """It holds rows 0 to 2 of every stack: those experts are whole, the others are storage's."""
    survivor, victim = start_ranks(body_shrink, 2, str(tmp_path), sharded_after, grace=PATIENCE_SECS)
    assert victim.exitcode == -signal.SIGKILL
    assert survivor.ok, survivor.error
    told = survivor.value
    stale = {op for op, step in told["stored"].items() if step < told["step"]}
    assert told["newer"] == {op for op in stale if int(op.rpartition("/")[2]) < 3} != set()
    assert told["fault"].lost_tokens > 0
