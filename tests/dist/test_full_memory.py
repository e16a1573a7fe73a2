"""All ranks fail and live on: a new run in the same processes comes back from their memory, and reads no storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.core.step import Tier
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.tiers import host_memory
from tests.dist.test_host_tier import EXPERTS, TIMEOUT_SECS, Life, join
from tests.support.processes import run_ranks
from tests.support.tensor_reads import tensor_bytes_read

STEPS = 4
POLICIES = {"dense": Dense(), "moc-all": MoC(k=EXPERTS), "two-level": MoC(k=1, snapshot_k=EXPERTS)}


def body(rank: int, world: int, root: str, fsdp: bool, policy: str):
    """One life that ends by an exception on all ranks, and the next one, in groups of its own."""
    dist.barrier()
    join(root, "first", rank, world)
    life = Life(root, fsdp, seed=0, policy=POLICIES[policy])
    for _ in range(STEPS):
        life.train()
        assert life.session._snapshots.pipeline.wait(TIMEOUT_SECS)
    before = life.whole()
    life.session.close(TIMEOUT_SECS)
    join(root, "second", rank, world)
    second = Life(root, fsdp, seed=1 + rank, policy=POLICIES[policy])
    with tensor_bytes_read() as read:
        restored, fault = second.resume()
    after = second.whole()
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    for _ in range(2):
        second.train()
    second.session.finish(second.step, lambda: {"plain": second.state.plain()}, save_last=True)
    assert host_memory.release_host_memory() == 0
    sources = {row.source.tier for row in restored.plan.rows()}
    return read, restored.manifest.step, fault.lost_tokens, sources, second.whole()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.quick("ddp-dense", "ddp-moc-all", "fsdp2-two-level")
def test_ranks_that_live_on_read_no_tensor_from_storage(tmp_path: Path, fsdp: bool, policy: str):
    first, second = run_ranks(body, 2, str(tmp_path), fsdp, policy)
    for read, step, lost, sources, _ in (first, second):
        assert read == []
        assert (step, lost, sources) == (STEPS, 0, {Tier.HOST})
    assert all(torch.equal(first[-1][key], value) for key, value in second[-1].items())
