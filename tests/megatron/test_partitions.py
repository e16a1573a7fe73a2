"""Megatron on nodes with networks of their own: cut off for less and for more than the timeout, slow.

Only the way of copies is cut: Megatron's own groups, made before, go on.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import megatron_gpt
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Tally, digests
from tests.support.megatron_two_lives import RANKS, WARM, require_versions, second_life
from tests.support.networks import Network, network_or_skip
from tests.support.processes import run_ranks, start_ranks

pytestmark = pytest.mark.slow

SHARDED = {"dist_opt": True, "precision": "bf16"}
SETUPS = {
    "ep2-dp2": (Setup(ep=2, layers=2, num_microbatches=2, **SHARDED), 0),
    "pp2-ep2": (Setup(pp=2, ep=2, layers=2, num_microbatches=2, **SHARDED), 2),
}
"""Each with a node, other than the victim, whose copies do not lie with the victim."""
TIMEOUT_SECS = 10.0
VICTIM = 1
WELL, LAST = 3, 7
LINK_MBIT_PER_SEC = 2


def attached(built: megatron_gpt.Built, root: str, rank: int, network: Network) -> Any:
    """Joins the rank's network between its groups and its copies."""
    from moe_ckpt import Memory, megatron
    from moe_ckpt.megatron import checkpoint
    from moe_ckpt.policies import Dense

    plain = checkpoint.make_communicator

    def entering(*args: Any, **kwargs: Any) -> Any:
        comm = plain(*args, **kwargs)
        network.enter(rank)
        return comm

    checkpoint.make_communicator = entering
    node = Path(root, f"node_{rank}")
    node.mkdir(exist_ok=True)
    return megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=Dense(),
        dirpath=f"{root}/store",
        memory=Memory(directory=node, replicas=1, storage_every=1000, survivor_secs=0),
        timeout_secs=TIMEOUT_SECS,
    )


class Training:
    """One rank's first life, and what it writes down of each iteration."""

    def __init__(self, rank: int, root: str, network: Network, setup: Setup) -> None:
        self.built, self.rank, self.network = megatron_gpt.build(setup, 1), rank, network
        self.ckpt, self.tally = attached(self.built, root, rank, network), Tally(self.built)
        self.ckpt.resume()
        self.replicator = self.ckpt.session.tier.replicator
        self._log = Path(root, f"rank_{rank}.jsonl")
        self.iteration = 0

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            self.iteration += 1
            megatron_gpt.forward_backward(self.built, self.iteration - 1)
            self.ckpt.before_step()
            made, _ = megatron_gpt.update(self.built)
            self.ckpt.after_step(self.iteration, consumed_samples=self.built.consumed_samples, updated=made)
            line = {"tokens": self.tally.take(), "digests": digests(self.built)}
            with self._log.open("a") as log:
                log.write(json.dumps(line) + "\n")
            self.ckpt.session.drain(self.iteration)

    def copied(self) -> None:
        until = time.monotonic() + 60.0
        while self.replicator.lag_steps:
            assert time.monotonic() < until, "copies do not come through"
            time.sleep(0.01)
        dist.barrier()

    def switch(self, turn: Any, *how: Any) -> None:
        dist.barrier()
        if self.rank == 0:
            turn(VICTIM, *how)
        dist.barrier()

    def note(self, root: str, **told: Any) -> None:
        Path(root, f"told_{self.rank}.json").write_text(json.dumps(told))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def cut_off(rank: int, _: int, root: str, network: Network, setup: Setup) -> None:
    life = Training(rank, root, network, setup)
    life.train(WELL)
    life.copied()
    life.switch(network.cut)
    began = time.monotonic()
    life.train()
    trained = time.monotonic() - began
    dist.barrier()
    time.sleep(max(0.0, TIMEOUT_SECS / 3 - (time.monotonic() - began)))
    lagged = life.replicator.lag_steps
    life.switch(network.heal)
    life.copied()
    short = sorted(life.replicator.lost)
    life.switch(network.cut)
    life.train(LAST - WELL - 1)
    time.sleep(2.5 * TIMEOUT_SECS)
    life.note(root, trained=trained, lagged=lagged, short=short, long=sorted(life.replicator.lost))


def slowed(rank: int, _: int, root: str, network: Network, setup: Setup) -> None:
    life = Training(rank, root, network, setup)
    life.train(WELL)
    life.copied()
    life.switch(network.slow, LINK_MBIT_PER_SEC)
    began = time.monotonic()
    life.train(LAST - WELL)
    trained, lagged = time.monotonic() - began, life.replicator.lag_steps
    [source, *_] = sorted(life.replicator.roster.placement.sources_of[VICTIM])
    while rank == source and life.replicator.lag_steps >= lagged > 0:
        time.sleep(0.001)  # until a copy has just come through: no answer is on its way then
    life.switch(network.cut)
    told = {"trained": trained, "lagged": lagged, "lost": sorted(life.replicator.lost)}
    life.note(root, **told, source=source, lag=life.replicator.lag_steps)


def killed(body: Any, root: Path, setup: Setup, *, slow: bool = False) -> list[dict[str, Any]]:
    """What each rank told before all were killed."""
    with network_or_skip(RANKS, slow=slow) as network:
        ended = start_ranks(body, RANKS, str(root), network, setup, timeout=240, preload=WARM)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * RANKS, [each.error for each in ended]
    return [json.loads((root / f"told_{rank}.json").read_text()) for rank in range(RANKS)]


def came_back(root: Path, setup: Setup, *lost: int) -> int:
    """The iteration that all come back to without these nodes, every bit as it was."""
    from moe_ckpt.policies import Dense

    for node in lost:
        delete_tree(root / f"node_{node}")
    told = run_ranks(second_life, RANKS, str(root), setup, [Dense()] * RANKS, timeout=240, preload=WARM)
    lines = [[json.loads(raw) for raw in (root / f"rank_{n}.jsonl").read_text().splitlines()] for n in range(RANKS)]
    [step] = {rank["step"] for rank in told}
    wanted = {(layer, expert): step for layer in range(setup.layers) for expert in range(setup.experts)}
    require_versions(told, lines, wanted, step)
    return step


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("which", ["none", "the one cut off", "another"])
def test_a_partition_costs_no_bit(tmp_path: Path, which: str, name: str):
    """A short one delays copies. A long one ends those that go through it: that node's loss costs what came after."""
    setup, other = SETUPS[name]
    lost = {"none": (), "the one cut off": (VICTIM,), "another": (other,)}[which]
    told = killed(cut_off, tmp_path, setup)
    assert all(rank["trained"] < TIMEOUT_SECS for rank in told), "training does not wait for copies"
    assert any(rank["lagged"] for rank in told)
    assert [rank["short"] for rank in told] == [[]] * RANKS
    assert any(VICTIM in rank["long"] for rank in told)
    step = came_back(tmp_path, setup, *lost)
    assert step == (WELL + 1 if VICTIM in lost else LAST)


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("lost", ["the slow one", "the one whose copies it has"])
def test_a_slow_link_costs_the_iterations_that_are_told_and_no_bit(tmp_path: Path, lost: str, name: str):
    """No iteration waits for it. What is sent to the slow node is late, and so are the answers that it gets."""
    setup, _ = SETUPS[name]
    told = killed(slowed, tmp_path, setup, slow=True)
    assert any(rank["lagged"] for rank in told)
    assert all(rank["lost"] == [] for rank in told)
    source = told[VICTIM]["source"]
    if lost == "the slow one":
        assert WELL <= came_back(tmp_path, setup, VICTIM) < LAST
    else:
        assert told[source]["lag"] > 0
        assert came_back(tmp_path, setup, source) == LAST - told[source]["lag"]
