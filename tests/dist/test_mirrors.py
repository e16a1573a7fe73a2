"""What a peer's training state has alike is not sent to its copies, which are whole all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.memory.slot import Slot
from tests.dist.test_host_tier import Life
from tests.dist.test_memory import killed, lose, started_again, wait_for_copies
from tests.dist.test_replication import texts, warnings_of
from tests.support.processes import run_ranks

STEPS, OTHER_BITS_AT = 4, 3


def copies(rank: int, ranks: int, root: str, fsdp: bool, other_bits: bool) -> dict:
    """Trains, and compares the newest copies with what their sources have."""
    said = warnings_of()
    life = Life(root, fsdp, seed=0, memory={"replicas": 1, "storage_every": 1000})
    replicator = life.session.tier.replicator
    for step in range(1, STEPS + 1):
        if other_bits and rank == 1 and step == OTHER_BITS_AT:
            with torch.no_grad():
                next(iter(life.model.parameters())).view(-1)[0] += 1.0
        life.train()
        life.session.drain(life.step)
        wait_for_copies(life)
    dist.barrier()
    found = {"sent": replicator.sent_bytes, "saved": replicator.saved_bytes, "said": texts(said)}
    found["equal"] = [same_as_its_source(root, slot) for slot in replicator.store.held().values()]
    dist.barrier()
    life.session.close()
    return found


def same_as_its_source(root: str, copy: Slot) -> bool:
    """To the last bit of every slice."""
    slot, header = Slot.open(copy.path)
    sources = (path.with_suffix("") for path in Path(root).glob(f"node_*/**/rank_{header.rank:05d}/*.head"))
    own = next(s for s, h in map(Slot.open, sources) if (h.rank, h.identity) == (header.rank, header.identity))
    for part in header.parts:
        for entry in header.slices(part, "a copy"):
            begin, end = part.begin + entry.begin, part.begin + entry.end
            if not torch.equal(slot.memory[begin:end], own.memory[begin:end]):
                return False
    return True


def test_plain_data_parallelism_sends_next_to_nothing(tmp_path: Path):
    for rank in run_ranks(copies, 2, str(tmp_path), False, False):
        assert rank["equal"], "a copy lies here"
        assert all(rank["equal"])
        assert rank["saved"] > 0
        assert not [text for text in rank["said"] if "differ" in text]


@pytest.mark.slow
def test_where_everything_is_sharded_everything_is_sent(tmp_path: Path):
    for rank in run_ranks(copies, 2, str(tmp_path), True, False):
        assert all(rank["equal"])
        assert rank["equal"]
        assert rank["saved"] < rank["sent"] / 100, "step counts, which all have alike, and what lies between parts"


def test_a_peer_with_other_bits_is_named_and_gets_those_of_the_source(tmp_path: Path):
    ranks = run_ranks(copies, 2, str(tmp_path), False, True)
    assert all(all(rank["equal"]) for rank in ranks)
    assert any("slices of step 3 differ between rank" in text for rank in ranks for text in rank["said"])


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.quick("1")
def test_a_lost_node_comes_back_from_what_its_peer_had_anyway(tmp_path: Path, lost: int):
    killed(tmp_path, False, replicas=1, storage_every=1000)
    lose(tmp_path, lost)
    told = started_again(tmp_path, False, replicas=1, storage_every=1000)
    assert told["fault"].lost_tokens == 0
