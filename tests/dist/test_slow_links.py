"""A link on which a copy takes many steps: training keeps its pace, memory is bounded, a node may be lost still."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks.memory_tiers_rank import Shard
from moe_ckpt import Memory
from moe_ckpt.cli.memory import survey
from moe_ckpt.comm.communicator import make_communicator
from moe_ckpt.core.placement import everywhere
from moe_ckpt.policies import Dense
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.run.context import RunContext
from moe_ckpt.run.events import StepRecord
from moe_ckpt.run.options import Settings
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.lock import StoreLock
from tests.support.networks import Network, network_or_skip
from tests.support.processes import run_ranks, start_ranks

pytestmark = pytest.mark.slow

TIMEOUT_SECS = 60.0
MIB = 2
LINK_MBIT_PER_SEC = 16
"""A copy takes a second."""
STEP_SECS = 0.05
WELL_STEPS, SLOW_STEPS = 6, 80


class Life:
    """A rank that is a node, with its copy on the other one; each checkpoint holds everything."""

    def __init__(self, root: str, network: Network | None = None) -> None:
        rank = dist.get_rank()
        comm = make_communicator(TIMEOUT_SECS)
        if network is not None:
            network.enter(rank)
        node = Path(root, f"node_{rank}")
        node.mkdir(exist_ok=True)
        self.step, self.state = 0, Shard(rank, MIB)
        self.storage = LocalStorage(f"{root}/store")
        memory = Memory(directory=node, replicas=1, storage_every=1000)
        run = RunContext(
            storage=self.storage,
            policy=Dense(),
            catalog=self.state.catalog,
            state=self.state,
            comm=comm,
            settings=Settings(timeout_secs=TIMEOUT_SECS, local_ranks=2, memory=memory),
            placement=everywhere(self.state.catalog.layers, comm.world_size),
            lock=StoreLock(self.storage, "a run"),
        )
        self.session = CheckpointSession(run)
        self.session.open()
        layers = self.state.catalog.layers
        self._tokens = StepTokens(np.ones((len(layers), layers[0].experts), dtype=np.int64))

    def train(self) -> StepRecord:
        """One step, the checkpoint before which is sealed, but not sent."""
        self.wait()
        time.sleep(STEP_SECS)
        dist.barrier()  # gradients
        self.session.before_update()
        self.step += 1
        self.state.update(self.step)
        return self.session.after_update(self.step, Deferred(lambda: self._tokens), self.state.plain)

    def wait(self) -> None:
        """Until all checkpoints are sealed here."""
        assert self.session._snapshots.pipeline.first.wait(0, TIMEOUT_SECS)


def _until_killed(rank: int, _: int, root: str, network: Network) -> None:
    life = Life(root, network)
    replicator = life.session.tier.replicator
    for _step in range(WELL_STEPS):
        life.train()
    while replicator.lag_steps:
        time.sleep(0.01)
    dist.barrier()
    sent = replicator.sent_bytes
    if rank == 0:
        network.slow(1, LINK_MBIT_PER_SEC)
    dist.barrier()
    records = [life.train() for _ in range(SLOW_STEPS + 3)]  # what is sealed is agreed on a step later
    life.wait()
    found = {
        "begun": all(record.begun for record in records),
        "to peers": (replicator.sent_bytes - sent) // (MIB << 20),
        "in memory": records[-1].memory_step,
        "nbytes": max(record.memory_nbytes for record in records),
        "lag": records[-1].replica_lag_steps,
        "held": life.step - replicator.lag_steps,
    }
    Path(root, f"rank_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, list[dict]]:
    """What was left of a run whose node 1 was behind a slow link, and what each rank knew at its end."""
    root = tmp_path_factory.mktemp("slow_link")
    with network_or_skip(2, slow=True) as network:
        ended = start_ranks(_until_killed, 2, str(root), network, timeout=3 * TIMEOUT_SECS)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * 2, [each.error for each in ended]
    return root, [json.loads((root / f"rank_{rank}.json").read_text()) for rank in range(2)]


def test_no_step_waits_for_the_link(killed):
    _, ranks = killed
    for rank in ranks:
        assert rank["begun"], "every step has its checkpoint"
        assert rank["in memory"] >= WELL_STEPS + SLOW_STEPS, "and every rank holds it"
    assert ranks[0]["to peers"] < SLOW_STEPS / 3


def test_memory_is_bounded_and_the_lag_is_told(killed):
    _, ranks = killed
    for rank in ranks:
        assert rank["nbytes"] < 16 * (MIB << 20)
    assert ranks[0]["lag"] > 5


def test_what_is_sealed_is_whole(killed):
    root, _ = killed
    for node in ("node_0", "node_1"):
        slots = [slot for facts in survey(str(root / node), verify=True) for slot in facts.slots]
        assert {slot.state for slot in slots} <= {"sealed", "open"}, [slot.problem for slot in slots]


def _come_back(_: int, __: int, root: str) -> int:
    life = Life(root)
    restored = resume_newest(life.storage, life.session.comm, life.state, life.session.tier)
    assert restored is not None
    life.state.require(restored.manifest.step)
    life.session.close()
    return int(restored.manifest.step)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_the_newest_step_that_the_nodes_left_have_comes_back(killed, tmp_path: Path, lost: int | None):
    root, ranks = killed
    shutil.copytree(root, tmp_path / "kept")
    if lost is not None:
        shutil.rmtree(root / f"node_{lost}")
    try:  # where it was: memory knows its store by its place
        one, other = run_ranks(_come_back, 2, str(root), timeout=2 * TIMEOUT_SECS)
    finally:
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "kept", root)
    assert one == other
    assert one >= (WELL_STEPS + SLOW_STEPS if lost is None else min(rank["held"] for rank in ranks))
