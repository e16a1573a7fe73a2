"""What data-parallel peers hold alike is not sent: EP2 x DP2, with and without the distributed optimizer.

Without it everything is alike on some rank. With it the weights are, which every rank gathers at the end of a step; the
optimizer's state is divided.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_ckpt.core.operators import Catalog
from moe_ckpt.core.step import SnapshotPlan
from moe_ckpt.policies.base import Needs, PolicyContext
from tests.dist.test_mirrors import same_as_its_source
from tests.dist.test_replication import texts, warnings_of
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
RANKS, STEPS = 4, 4
EXPERTS_DATA = {"ep": 2, "layers": 2, "num_microbatches": 1, "hidden": 128, "ffn": 128}
BF16 = {"precision": "bf16", "dist_opt": True}
CASES = {
    "plain": (Setup(**EXPERTS_DATA), 1.0),
    "divided, bf16": (Setup(**EXPERTS_DATA, **BF16), 2 / 14),
    "divided, fp32": (Setup(**EXPERTS_DATA, dist_opt=True), 4 / 12),
    "divided, bf16, grouped": (Setup(**EXPERTS_DATA, **BF16, grouped=True), 2 / 14),
    "divided, gathered later": (Setup(**EXPERTS_DATA, **BF16, overlap_param_gather=True), 0.0),
}
SLOW = ("plain", "divided, fp32", "divided, bf16, grouped")


class Told:
    """Saves everything at each step, and keeps what it was told."""

    needs = Needs(sizes=True, tiers=True)

    def __init__(self) -> None:
        self.told: list[PolicyContext] = []

    def check(self, catalog: Catalog) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"name": "told"}

    def plan(self, context: PolicyContext) -> SnapshotPlan:
        self.told.append(context)
        return SnapshotPlan(context.run.step, context.model.catalog.everything)


def copies(rank: int, world_size: int, root: str, setup: Setup) -> dict[str, Any]:
    built = megatron_gpt.build(setup, 1)
    from moe_ckpt import Memory, megatron

    policy, node, said = Told(), Path(root, f"node_{rank}"), warnings_of()
    node.mkdir()
    ckpt = megatron.attach(
        built.chunks,
        built.optimizer,
        policy=policy,
        dirpath=f"{root}/store",
        memory=Memory(directory=node, replicas=1, storage_every=1000),
        when_busy="wait",
        timeout_secs=60.0,
    )
    ckpt.resume()
    replicator = ckpt.session.tier.replicator
    for iteration in range(1, STEPS + 1):
        megatron_gpt.train_step(built, iteration - 1)
        before = replicator.sent_bytes, replicator.saved_bytes
        record = ckpt.after_step(iteration)
        ckpt.session.drain(iteration)
        while replicator.lag_steps:
            pass
    dist.barrier()
    found = {"sent": replicator.sent_bytes, "saved": replicator.saved_bytes, "said": texts(said)}
    said_bytes = record.replica_sent_nbytes, record.replica_saved_nbytes
    found["told"] = all(least <= told for least, told in zip(before, said_bytes, strict=True)) and said_bytes[0] > 0
    found["told"] &= said_bytes[0] <= found["sent"] and said_bytes[1] <= found["saved"]
    found["equal"] = [same_as_its_source(root, slot) for slot in replicator.store.held().values()]
    told = policy.told[-1]
    sends, sizes, experts = told.memory.sends, told.model.sizes, told.model.catalog.expert_at
    full = sum(size.full for size in sizes.values())
    found["sends"] = tuple(sends)
    found["reckoned"] = sum(sends.nbytes(size, expert=op in experts) for op, size in sizes.items()) / full
    found["gradients"] = sum(size.gradient for size in sizes.values()) / full
    dist.barrier()
    ckpt.close()
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
@pytest.mark.quick("divided, bf16")
def test_what_peers_hold_alike_is_not_sent(name: str, tmp_path: Path):
    setup, portion = CASES[name]
    ranks = run_ranks(copies, RANKS, str(tmp_path), setup, preload=WARM)
    sent, saved = (sum(rank[what] for rank in ranks) for what in ("sent", "saved"))
    assert saved / (saved + sent) == pytest.approx(portion, abs=0.05), "beside headers"
    for rank in ranks:
        assert rank["equal"]
        assert all(rank["equal"])
        assert rank["told"], "the step's record says what was sent until then, and what was not"
        assert not [text for text in rank["said"] if "differ" in text]
        gathered = setup.dist_opt and not setup.overlap_param_gather
        assert rank["reckoned"] == pytest.approx(1 - portion, abs=0.01), "what budgets count is what is sent"
        assert rank["gradients"] == pytest.approx(4 / 14 if setup.precision == "bf16" else 4 / 12, abs=0.01)
        assert rank["sends"] == (setup.dist_opt, setup.dist_opt) + (setup.dist_opt and not gathered,) * 2
