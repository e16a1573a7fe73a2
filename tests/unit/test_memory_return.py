"""A return to what memory holds: how often the ranks wait for one another, and what is said of what is gone."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt import Memory
from moe_ckpt.comm.communicator import largest
from moe_ckpt.core.operators import expert_id
from moe_ckpt.core.step import Step, Tier
from moe_ckpt.driver.messages import Messages
from moe_ckpt.errors import StoreError, StoreUnreadableError
from moe_ckpt.ledger.retention import RetentionPolicy
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.reading.memory import slot_storage
from moe_ckpt.reading.memory.memory_shares import LeftBehind, Share, checkpoints_of, left_behind
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.recovery import resume
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.storage import LocalStorage
from tests.support.deleting import delete_tree
from tests.support.tensor_reads import tensor_bytes_read
from tests.unit.engine_parts import Life, ThreadCommunicator, ThreadRanks, manifests, run_threads
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory_only import (
    life,
    lose,
    make_nodes,
    no_memory_of_other_tests,  # noqa: F401 - a fixture
    replicated,
    wait_for_copies,
    where,  # noqa: F401 - a fixture
)
from tests.unit.test_patience import Failing


@pytest.fixture
def rounds(monkeypatch) -> Counter[str]:
    """Messages of rank 0 in which all ranks wait for one another, while ``resume_newest`` runs; "open/..." while the
    session is opened."""
    found: Counter[str] = Counter()
    inside = threading.local()  # a rank is a thread

    def counted(name: str) -> None:
        plain = getattr(ThreadCommunicator, name)

        def call(self, *args: Any) -> Any:
            found[name] += self.rank == 0 and getattr(inside, "resume", False)
            found[f"open/{name}"] += self.rank == 0 and getattr(inside, "open", False)
            return plain(self, *args)

        monkeypatch.setattr(ThreadCommunicator, name, call)

    def resumed(*args: Any, **kwargs: Any) -> Any:
        inside.resume = True
        try:
            return resume_newest(*args, **kwargs)
        finally:
            inside.resume = False

    plainly = CheckpointSession.open

    def opened(self) -> None:
        inside.open = True
        try:
            plainly(self)
        finally:
            inside.open = False

    for name in ("agree", "everyone", "swap", "broadcast"):
        counted(name)
    monkeypatch.setattr(CheckpointSession, "open", opened)
    monkeypatch.setattr("tests.unit.test_engine_host_tier.resume_newest", resumed)
    return found


def in_resume(rounds: Counter[str]) -> dict[str, int]:
    return {name: times for name, times in rounds.items() if times and "/" not in name}


def test_from_memory_of_their_own_ranks_wait_four_times_for_one_another(where, tmp_path, rounds):  # noqa: F811
    """What they have; its headers; that all opened and verified it; that all wrote it. No more with more ranks."""
    for each in (1, 2):
        (tmp_path / str(each)).mkdir()
        nodes = [node for node in make_nodes(tmp_path / str(each), 2) for _ in range(each)]
        place = (tmp_path / f"store_{each}", where[1])
        replicated(place, nodes)
        rounds.clear()
        assert replicated(place, nodes, again=True, steps=1)[0][1] == "memory"
        assert in_resume(rounds) == {"everyone": 2, "agree": 2}


def test_to_open_memory_ranks_wait_four_times_for_one_another(where, tmp_path, rounds):  # noqa: F811
    """The store; settings and what lies there; that all have theirs; what nobody took, and who holds whose copies."""
    for count in (2, 4):
        (tmp_path / str(count)).mkdir()
        nodes, place = make_nodes(tmp_path / str(count), count), (tmp_path / f"store_{count}", where[1])
        for again in (False, True):
            rounds.clear()
            replicated(place, nodes, again=again, steps=1)
            opened = {name: times for name, times in rounds.items() if times and name.startswith("open/")}
            assert opened == {"open/broadcast": 1, "open/agree": 2, "open/everyone": 1}


def test_bytes_of_other_nodes_take_three_rounds_more(where, tmp_path, rounds):  # noqa: F811
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    lose(nodes[1])
    rounds.clear()
    assert replicated(where, nodes, again=True, steps=1)[0][1] == "memory"
    assert in_resume(rounds) == {"everyone": 3, "agree": 3, "swap": 1}


def test_a_rank_without_memory_for_bytes_of_other_nodes_keeps_nobody_waiting(where, tmp_path, monkeypatch):  # noqa: F811
    def none(*_):
        raise MemoryError("a check")

    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    lose(nodes[1])
    monkeypatch.setattr(slot_storage, "joined_ranges", none)
    raised: dict[int, Exception] = {}

    def body(comm):
        memory = Memory(directory=nodes[comm.rank], storage_every=1000, replicas=1)
        with Life(LocalStorage(where[0]), policy=Dense(), memory=memory, comm=comm) as each:
            try:
                come_back(each)
            except Exception as error:  # told
                raised[comm.rank] = error
                if comm.rank:  # it leaves; in earlier releases the other one waited
                    raise

    with pytest.raises(MemoryError):
        run_threads(ThreadRanks(2), body)
    assert isinstance(raised[0], StoreError), "rank 0 is told"
    assert "rank 1 cannot resume from checkpoint step_00000006: a check" in str(raised[0])


def test_storage_is_named_only_where_something_comes_from_it(where):  # noqa: F811
    with life(where, MoC(k=1)) as first:
        first.go(2, settle=True)
    with life(where, MoC(k=1)) as second:
        restored, _ = come_back(second)
        tiers = [row.source.tier for row in restored.plan.rows()]
        assert (restored.origin, tiers[-1]) == ("memory and step_00000001", Tier.STORAGE)


def test_after_a_complete_checkpoint_peers_go_on_taking_copies(where, tmp_path):  # noqa: F811
    """Of a step that had a partial one, as an evaluation asks for: those that follow have copies, too."""
    nodes = make_nodes(tmp_path, 2)

    def body(comm):
        memory = Memory(directory=nodes[comm.rank], replicas=1)
        with Life(LocalStorage(where[0]), policy=MoC(k=1), memory=memory, comm=comm) as each:
            each.go(3, settle=True)
            wait_for_copies(each)
            each.session.save_complete(each.step, each.capture)
            assert each.session.generation == 1, "the partial one has the name"
            each.go(1, settle=True)
            for _ in range(2):
                wait_for_copies(each)
                each.go(1, settle=True)
            wait_for_copies(each)
            largest(comm, [0])  # nobody ends while somebody sends
            assert max(Slot.open(slot.path)[1].step for slot in each.session.tier.replicator.store.held().values()) == 6

    def back(comm):
        memory = Memory(directory=nodes[comm.rank], replicas=1)
        with Life(LocalStorage(where[0]), policy=MoC(k=1), memory=memory, comm=comm) as each:
            assert come_back(each)[0].manifest.step == 6

    run_threads(ThreadRanks(2), body)
    lose(nodes[1])
    delete_tree(where[0] / "step_00000006_g1")
    run_threads(ThreadRanks(2), back)


def test_a_damaged_checkpoint_on_storage_costs_what_memory_is_laid_over_and_no_step(where, tmp_path):  # noqa: F811
    """Of the manifest that gives run and parent one byte is wrong: memory alone has everything."""
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes)
    path = where[0] / "step_00000001" / "MANIFEST.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert replicated(where, nodes, again=True, steps=1) == dict.fromkeys(range(2), (6, "memory", 0))


@pytest.mark.parametrize("file", ["MANIFEST.json", "rank_00001_expert.safetensors"])
def test_a_damaged_file_beneath_memory_costs_experts_and_no_step(where, file):  # noqa: F811
    """The newest step in memory is laid over the checkpoint before that: a manifest or a shard, it is the same."""

    def train(comm):
        with life(where, MoC(k=1), every=4, comm=comm) as first:
            first.go(6, settle=True)

    def again(comm):
        with life(where, MoC(k=1), every=1, comm=comm) as second:
            restored, fault = come_back(second)
            assert (restored.manifest.step, restored.origin) == (6, "memory and step_00000001")
            assert not restored.rebuilds, "nothing that is damaged is needed"
            assert_state(second, restored.versions)
            lacking = [6 - restored.versions[expert_id(layer, e)] for layer in range(2) for e in range(4)]
            assert fault.lost_tokens == (lacking * second.counts.ravel()).sum() * 2 > 0, "of two ranks"
            second.go(1, settle=True)

    run_threads(ThreadRanks(2), train)
    flip_last(where[0] / "step_00000004" / file)
    run_threads(ThreadRanks(2), again)
    reader = StoreReader(LocalStorage(where[0]))
    newest = reader.manifest(reader.directories()[0])
    assert newest.step == 7
    assert not [path for path in newest.paths if path.startswith("step_00000004/")]


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0xFF
    path.write_bytes(bytes(data))


# --- storage that does not answer ---


def test_what_could_not_be_read_is_kept_though_an_older_step_in_memory_takes_its_place(where):  # noqa: F811
    """Also if that life dies before storage gets a checkpoint of it, and the next one reads no more than memory."""
    policy, retention = MoC(k=1), RetentionPolicy(keep_last=2)
    with life(where, policy, every=4, retention=retention) as first:
        first.go(6, settle=True)
    storage = Failing(where[0], "step_00000004/MANIFEST.json", OSError(errno.EIO, "gone away"), times=0)
    with life(where, policy, every=100, storage=storage, retention=retention) as second:
        storage.times = 10**9
        restored, _ = come_back(second, on_read_error="fallback", read_patience_secs=0.0)
        storage.times = 0
        assert (restored.manifest.step, restored.origin) == (3, "memory and step_00000001")
        second.go(3, settle=True)
    with life(where, policy, every=1, retention=retention) as third:
        restored, _ = come_back(third)
        assert (restored.manifest.generation, restored.manifest.step) == (1, 6)
        third.go(8, settle=True)
    assert manifests(where[0])[-1].step == 14
    assert (where[0] / "step_00000004" / "MANIFEST.json").exists()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_no_start_goes_back_because_storage_does_not_answer_beneath_memory(where, failing_rank):  # noqa: F811
    """It answers again when the next older step is tried: the start ends all the same, and memory keeps the newest."""
    shard, raised = "step_00000001/rank_00000_expert.safetensors", {}

    def train(comm):
        with life(where, MoC(k=1), comm=comm) as first:
            first.go(3, settle=True)

    def again(comm):
        storage = Failing(where[0], shard, OSError(errno.EIO, "gone away"), times=0)
        with life(where, MoC(k=1), storage=storage, comm=comm) as second:
            storage.times = 2 * (comm.rank == failing_rank)
            try:
                come_back(second, read_patience_secs=0.0)
            except StoreError as error:
                raised[comm.rank] = error

    def answered(comm):
        with life(where, MoC(k=1), comm=comm) as third:
            assert come_back(third)[0].manifest.step == 3

    run_threads(ThreadRanks(2), train)
    for _ in range(3):
        raised.clear()
        run_threads(ThreadRanks(2), again)
        assert isinstance(raised[failing_rank], StoreUnreadableError)
        assert f"rank {failing_rank} cannot resume from checkpoint step_00000003" in str(raised[1 - failing_rank])
    run_threads(ThreadRanks(2), answered)


# --- what is gone ---


def share(writer: int, step: int, *, writers: int = 3, generation: int = 1, window: Any = None) -> Share:
    identity = Step("run", "life", generation, step, step)
    return Share(0, "a-node", step, identity, writer, writers, window, "step_00000001")


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ([], LeftBehind()),
        ([share(0, 6), share(2, 6)], LeftBehind(6, (1,))),
        ([share(0, 5), share(0, 6)], LeftBehind(6, (1, 2))),
        ([share(0, 3)], None),
        ([share(0, 6), share(1, 6), share(2, 6)], None),
        ([share(0, 4), share(1, 4), share(2, 4), share(0, 6)], LeftBehind(6, ())),
        ([share(0, 9, generation=0)], None),
        ([share(0, 5, window=(5, 2, 0)), share(1, 6, window=(5, 2, 1))], LeftBehind(6, (0, 1, 2))),
    ],
    ids=["nothing", "a rank", "ranks", "older", "whole", "an older one is whole", "a life before", "a window"],
)
def test_what_is_left_behind(shares: list[Share], found: LeftBehind | None):
    assert left_behind(checkpoints_of(shares), 1, 3) == found


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (LeftBehind(), "no node has a checkpoint of an earlier start in memory: steps after 3"),
        (LeftBehind(4, (1,)), "step 4 is lost, and must be computed again: memory holds only a part of step 4, and"),
        (LeftBehind(6, (1, 2)), "steps 4 to 6 are lost, and must be computed again: memory holds only a part of step"),
        (LeftBehind(4, ()), "step 4 is lost, and must be computed again: memory holds no whole checkpoint of it"),
        (LeftBehind(6, ()), "steps 4 to 6 are lost, and must be computed again: memory holds no whole checkpoint of"),
        (LeftBehind(6, tuple(range(20))), "the part of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more is on no"),
    ],
)
def test_lost_steps_are_named(found: LeftBehind, said: str, caplog):
    Messages("step", "store", 1).left_behind(3, found)
    assert caplog.text == "", "rank 0 says it for all"
    Messages("step", "store", 0).left_behind(3, found)
    assert said in caplog.text


def test_one_more_lost_node_leaves_a_part_behind(where, tmp_path, monkeypatch):  # noqa: F811
    """Three nodes with one copy each, of which two are lost."""
    nodes = make_nodes(tmp_path, 3)
    replicated(where, nodes)
    for node in nodes[:2]:
        delete_tree(Path(node))
        node.mkdir()
    told: list[LeftBehind | None] = []

    def noted(checkpoints, generation, step):
        told.append(left_behind(checkpoints, generation, step))
        return told[-1]

    monkeypatch.setattr(resume, "left_behind", noted)
    assert replicated(where, nodes, again=True, steps=1)[0] == (1, "step_00000001", 0)
    assert {(each.step, len(each.writers)) for each in told} == {(6, 1)}


def test_what_memory_lacks_is_read_from_storage_once_by_ranks_that_hold_the_same(where, rounds):  # noqa: F811
    """What other nodes have is asked for; that all opened it, what each needs, that all verified it, and that all have
    memory for what is handed over, is told."""
    lacking = []

    def train(comm):
        with life(where, MoC(k=1), comm=comm) as first:
            first.go(2, settle=True)

    def again(comm):
        with life(where, MoC(k=1), comm=comm) as second:
            restored, _ = come_back(second)
            lacking.append([row.nbytes for row in restored.plan.rows() if row.source.tier is Tier.STORAGE])
            assert_state(second, {op: each.step for op, each in restored.manifest.operators.items()})

    run_threads(ThreadRanks(2), train)
    rounds.clear()
    with tensor_bytes_read() as noted:
        run_threads(ThreadRanks(2), again)
    [one], [other] = lacking
    assert sum(nbytes for _, nbytes in noted) == 2 * one == 2 * other, "to verify it, and to load it"
    assert in_resume(rounds) == {"everyone": 5, "agree": 5, "swap": 1}
