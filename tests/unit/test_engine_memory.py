"""Snapshots in slots: what a life leaves in its memory directory brings the next one back, verified."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import signal
import stat
from functools import partial
from pathlib import Path

import pytest

from moe_ckpt import Memory
from moe_ckpt.errors import (
    ConfigError,
    DamagedError,
    HostMemoryError,
    MemoryFullError,
    StoreError,
    StoreUnwritableError,
)
from moe_ckpt.memory import limits, mapping
from moe_ckpt.memory import slot as slot_module
from moe_ckpt.memory.directory import RankDirectory, make_rank_directory, rank_directories, user_directory
from moe_ckpt.memory.files import MemoryFiles, remove_run, sweep
from moe_ckpt.memory.left_slots import SlotChecker
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers import host_memory
from tests.support.deleting import delete_tree
from tests.support.slots import create_slot
from tests.support.spoiled import bytes_of, files_of_slots, spoil_experts, spoil_slot
from tests.unit.engine_parts import ALL, Life, ThreadRanks, run_threads, sequential
from tests.unit.test_engine_host_tier import assert_state, come_back

EVERYTHING_AT_6 = dict.fromkeys(ALL, 6)


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


@pytest.fixture
def where(tmp_path):
    """(store, memory directory)"""
    memory = tmp_path / "memory"
    memory.mkdir()
    return tmp_path / "store", memory


def life(where, policy=None, **settings) -> Life:
    store, memory = where
    return Life(LocalStorage(store), policy=policy or Dense(), memory=Memory(directory=memory), **settings)


def train_and_fail(where, policy=None, steps=6, **settings) -> Life:
    with life(where, policy, **settings) as first:
        first.go(steps, settle=True)
    return first


def files(memory: Path) -> list[Path]:
    return sorted(path for path in memory.rglob("*") if path.is_file())


def slots(memory: Path) -> list[Path]:
    return [path.with_suffix("") for path in files(memory) if path.suffix == ".head"]


def test_the_next_life_comes_back_from_memory_and_reads_no_expert_from_storage(where, caplog):
    train_and_fail(where)
    spoil_experts(where[0] / "step_00000006")
    with caplog.at_level(logging.INFO, "moe_ckpt"), life(where) as second:
        restored, fault = come_back(second)
        assert restored.manifest.step == 6
        assert_state(second, EVERYTHING_AT_6)
        assert fault.lost_tokens == 0
        second.go(2, settle=True)
    assert "from memory: this node" in caplog.text


def test_storage_gives_what_memory_does_not(where):
    train_and_fail(where)
    delete_tree(where[1])
    where[1].mkdir()
    with life(where) as second:
        come_back(second)
        assert_state(second, EVERYTHING_AT_6)


@pytest.mark.parametrize("how", ["flipped", "truncated", "header flipped", "header truncated", "no header"])
def test_a_damaged_slot_is_set_aside_and_storage_is_read(where, how, caplog):
    train_and_fail(where)
    for slot in slots(where[1]):
        if how == "no header":
            slot.with_suffix(".head").unlink()
        elif how == "truncated":
            file, begin, nbytes = bytes_of(slot)
            os.truncate(file, min(file.stat().st_size, begin + nbytes // 2))
        else:
            spoil_slot(slot, {"flipped": "flip", "header flipped": "header", "header truncated": "header cut"}[how])
    with life(where) as second:
        come_back(second)
        assert_state(second, EVERYTHING_AT_6)
    if how == "flipped":
        assert "is damaged: it is set aside, and not used\n" in caplog.text
    elif how != "no header":
        assert "is damaged: it is set aside, and not used: " in caplog.text


def test_moc_holds_more_in_memory_than_on_storage(where):
    policy = MoC(k=1, snapshot_k=4)
    train_and_fail(where, policy)
    with life(where, policy) as second:
        restored, fault = come_back(second)
        assert_state(second, EVERYTHING_AT_6)
        assert fault.lost_tokens == 0
        assert restored.tokens_from_host is not None
        assert {record.step for record in restored.beneath.operators.values()} != {6}, "storage has older ones"


def test_a_clean_end_leaves_nothing(where):
    with life(where) as only:
        only.go(3, settle=True)
        assert len(slots(where[1])) >= 1
        only.finish()
    assert files(where[1]) == []
    assert list(user_directory(str(where[1])).iterdir()) == []


def test_memory_that_is_not_wanted_any_more_is_released(where):
    train_and_fail(where)
    held = sum(path.stat().st_size for path in files_of_slots(where[1]))
    assert 0 < host_memory.release_host_memory(where[0]) <= held
    assert files(where[1]) == []


def test_files_are_private(where):
    train_and_fail(where)
    assert files(where[1])
    for path in where[1].rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_at_most_three_snapshots_lie_there(where):
    with life(where) as only:
        for _ in range(12):
            only.go(1, settle=True)
            assert sum(path.stat().st_size for path in files_of_slots(where[1])) <= 4096 + 3 * 1280


def test_a_slot_that_is_being_written_has_no_header(where):
    seen = []

    def look(phase):
        if phase == "copy":
            written = {buffer.begin for buffer in only.session._snapshots.pipeline._pool._lent}
            seen.append({int(path.name.partition("@")[2]) for path in slots(where[1])} & written)

    with life(where, on_phase=look) as only:
        only.go(5, settle=True)
    assert max(map(len, seen)) <= 2, "the newest, and one that is being superseded"


def test_ranks_share_what_each_of_them_wrote(where):
    def train(comm):
        with life(where, comm=comm, local_ranks=2) as one:
            one.go(6, settle=True)

    run_threads(ThreadRanks(2), train)
    spoil_experts(where[0] / "step_00000006")
    found = {}

    def again(comm):
        with life(where, comm=comm, local_ranks=2) as one:
            come_back(one)
            assert_state(one, EVERYTHING_AT_6)
            found[comm.rank] = True

    run_threads(ThreadRanks(2), again)
    assert found == {0: True, 1: True}


def test_fewer_ranks_take_what_the_others_left(where):
    def train(comm):
        with life(where, comm=comm, local_ranks=2) as one:
            one.go(6, settle=True)

    run_threads(ThreadRanks(2), train)
    spoil_experts(where[0] / "step_00000006")
    with life(where) as second:
        come_back(second)
        assert_state(second, EVERYTHING_AT_6)


def test_memory_on_some_ranks_only_is_refused_by_all(where):
    store, memory = where
    raised = {}

    def begin(comm):
        chosen = Memory(directory=memory) if comm.rank else None
        try:
            with Life(LocalStorage(store), policy=Dense(), memory=chosen, comm=comm):
                pass
        except ConfigError as error:
            raised[comm.rank] = str(error)

    run_threads(ThreadRanks(2), begin)
    assert "memory=None on rank 0, but rank 1 has it on" in raised[0]
    assert "on rank 1, but rank 0 has it off" in raised[1]


def test_ranks_that_disagree_on_what_goes_to_storage_are_refused_by_all(where):
    store, memory = where
    raised = {}

    def begin(comm):
        chosen = Memory(directory=memory, storage_every=10 if comm.rank else 1)
        try:
            with Life(LocalStorage(store), policy=Dense(), memory=chosen, comm=comm):
                pass
        except ConfigError as error:
            raised[comm.rank] = str(error)

    run_threads(ThreadRanks(2), begin)
    for rank, mine, others in ((0, "1", "10"), (1, "10", "1")):
        assert f"storage_every={mine} on rank {rank}" in raised[rank]
        assert f"storage_every={others} on rank {1 - rank}" in raised[rank]


@pytest.mark.parametrize(
    ("setting", "values", "said"),
    [
        ("survivor_secs", (20, 5), ("20.0", "5.0")),
        ("survivor_secs", (0, 5), ("0.0", "5.0")),
        ("storage_every", ("60s", "2min"), ("60.0", "120.0")),
        ("upstream_bytes", (None, 1000), ("None", "a size")),
    ],
)
def test_ranks_that_disagree_on_a_setting_are_told_both_values_and_both_ranks(where, setting, values, said):
    """Rank 1 has another one than ranks 0 and 2. All raise, and none of them leaves anything behind."""
    store, memory = where
    raised = {}

    def begin(comm):
        chosen = Memory(directory=memory, **{setting: values[comm.rank == 1]})
        try:
            with Life(LocalStorage(store), policy=Dense(), memory=chosen, comm=comm):
                pass
        except ConfigError as error:
            raised[comm.rank] = str(error)

    run_threads(ThreadRanks(3), begin)
    assert len(raised) == 3
    for text in raised.values():
        assert f"{setting}={said[0]} on rank 0, {setting}={said[1]} on rank 1" in text
    assert files(memory) == []


def test_nodes_may_have_budgets_of_their_own(where, tmp_path):
    """One has room for many snapshots, the other for as few as there must be: they come back to the same step."""
    with life((tmp_path / "sizes", where[1])) as first:
        first.go(1, settle=True)
        nbytes = max(path.stat().st_size for path in files(where[1]))
    nodes = [tmp_path / "small", tmp_path / "large"]
    for node in nodes:
        node.mkdir()

    def train(comm, back=False):
        budget = (8 if comm.rank else 2) * nbytes
        chosen = {"memory": Memory(directory=nodes[comm.rank], storage_every=100), "host_memory_bytes": budget}
        with Life(LocalStorage(where[0]), policy=Dense(), comm=comm, **chosen) as each:
            if back:
                restored, _ = come_back(each)
                assert (restored.manifest.step, restored.origin) == (6, "memory")
                assert_state(each, EVERYTHING_AT_6)
            each.go(6, settle=True)

    run_threads(ThreadRanks(2), train)
    run_threads(ThreadRanks(2), partial(train, back=True))


def test_a_directory_that_one_rank_cannot_use_stops_all(where, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(limits, "file_system", lambda path: "ext4")
    monkeypatch.setattr(limits, "_said", {str(where[1])})
    store, memory = where
    raised = {}

    def begin(comm):
        chosen = Memory(directory=tmp_path / "nowhere" if comm.rank else memory)
        try:
            with Life(LocalStorage(store), policy=Dense(), memory=chosen, comm=comm):
                pass
        except (ConfigError, StoreError) as error:
            raised[comm.rank] = error

    run_threads(ThreadRanks(2), begin)
    assert "there is no such directory" in str(raised[1])
    assert f"mkdir -p {tmp_path / 'nowhere'}" in str(raised[1])
    assert "rank 1 could not open its memory directory" in str(raised[0])
    assert "not on a tmpfs" not in caplog.text
    assert files(memory) == []


def test_what_a_rank_left_is_verified_while_it_waits_for_the_others(where, monkeypatch):
    """The check of its newest snapshots has begun before the ranks tell that they have what they left."""
    train_and_fail(where)
    checked, begun, agreed = SlotChecker.__init__, [], host_memory.largest

    def noting(self, slots):
        begun.append([found.header.step for found in slots])
        checked(self, slots)

    def telling(comm, numbers):
        begun.append("told")
        return agreed(comm, numbers)

    monkeypatch.setattr(SlotChecker, "__init__", noting)
    monkeypatch.setattr(host_memory, "largest", telling)
    with life(where) as second:
        restored, _ = come_back(second)
        assert (restored.manifest.step, restored.origin) == (6, "memory")
    assert begun == ["told", [6, 5], "told"]


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_one_rank_cannot_take_over_stops_all(where, tmp_path, monkeypatch, replicas):
    store, _ = where
    take_left, raised = MemoryFiles.take_left, {}

    def failing(self, *, same_rank):
        if self.rank == 1 and not same_rank:
            raise OSError(5, "Input/output error")
        return take_left(self, same_rank=same_rank)

    monkeypatch.setattr(MemoryFiles, "take_left", failing)
    nodes = [tmp_path / "here", tmp_path / "there"]
    for node in nodes:
        node.mkdir()

    def begin(comm):
        try:
            with Life(LocalStorage(store), memory=Memory(directory=nodes[comm.rank], replicas=replicas), comm=comm):
                pass
        except StoreError as error:
            raised[comm.rank] = error

    run_threads(ThreadRanks(2), begin)
    assert type(raised[1]) is StoreUnwritableError
    assert "Input/output error" in str(raised[1])
    assert "rank 1 could not open its memory directory" in str(raised[0])
    assert files(nodes[0]) == files(nodes[1]) == []


@pytest.mark.parametrize(
    ("place", "kind"),
    [("/data/run", "ext4"), ("/data/my run/x", "xfs"), ("/dev/shm/x", ""), ("/dev/shmelter", "ext4"), ("/", "ext4")],
)
def test_a_directory_that_is_no_tmpfs_is_warned_of_once(tmp_path, monkeypatch, caplog, place, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
        "/dev/b /data ext4 rw 0 0\n/dev/c /data/my\\040run xfs rw 0 0\n"
    )
    monkeypatch.setattr(limits, "_said", set())
    monkeypatch.setattr(limits, "file_system", partial(limits.file_system, mounts=str(mounts)))
    for _ in range(2):
        limits.say_file_system(place)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(kind)
    for line in said:
        assert f"Memory(directory={place!r}) lies on {kind}, not on a tmpfs" in line
        assert "not synced" in line


def test_a_full_tmpfs_costs_the_tier_and_not_the_run(where, monkeypatch, caplog):
    monkeypatch.setattr("moe_ckpt.memory.arena.free_bytes", lambda place: 7)
    train_and_fail(where)
    assert caplog.text.count("kept in private memory") == 1
    assert "--shm-size" in caplog.text
    with Life(LocalStorage(where[0]), policy=Dense()) as second:
        come_back(second)
        assert_state(second, EVERYTHING_AT_6)


def test_a_directory_that_cannot_be_written_is_named(where, monkeypatch):
    """One that is full is no error yet: what the run left there makes room."""

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(RankDirectory, "describe", fails)
    said = r"Memory\(directory=.*memory'\) cannot be used: .*Input/output error"
    with pytest.raises(StoreUnwritableError, match=said), life(where):
        pass
    monkeypatch.undo()
    with life(where) as again:
        again.go(1, settle=True)


def test_no_room_is_an_error_before_a_byte_is_written(where, monkeypatch):
    monkeypatch.setattr(
        mapping.Pages, "_touch", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(MemoryFullError, match=r"a snapshot of this rank needs 1,000 there") as caught:
        create_slot(where[1] / "slot_000", 1000)
    assert caught.value.needed_bytes == 1000
    assert [path.stat().st_size for path in files(where[1])] == [0]


def test_a_header_without_room_names_the_directory_and_what_to_do(where, monkeypatch):
    def full(descriptor, _):
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    slot = create_slot(where[1] / "slot_000", 1000)
    monkeypatch.setattr(slot_module, "open", full, raising=False)
    with pytest.raises(MemoryFullError, match=rf"{where[1]} has .* a snapshot of this rank needs 7 there.*--shm-size"):
        slot.seal(b"header!")
    assert not slot.is_sealed
    assert [path.name for path in files(where[1])] == ["copies"]


def test_a_directory_that_others_may_write_is_not_trusted(where):
    taken = where[1] / f"moe_ckpt-{os.geteuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    with pytest.raises(ConfigError, match="nothing in it can be trusted"), life(where):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"directory": ""}, "directory=''"),
        ({"directory": "memory://x"}, "must be a directory of this node"),
        ({"directory": 3}, "directory=3"),
        ({"replicas": -1}, "replicas=-1.*whole number from 0 to 16"),
        ({"replicas": 17}, "replicas=17"),
        ({"replicas": True}, "replicas=True"),
        ({"replicas": "1"}, "replicas='1'"),
        ({"replicas": 1, "failure_domain": " "}, "failure_domain=' '"),
        ({"replicas": 1, "failure_domain": 3}, "failure_domain=3"),
        ({"replicas": 1, "failure_domain": "r" * 257}, "of 1 to 256 characters"),
        ({"failure_domain": "rack"}, "failure_domain='rack'.*give replicas=1"),
    ],
)
def test_settings_that_cannot_be(given, said):
    with pytest.raises(ConfigError, match=said):
        Memory(**given)


def test_a_budget_below_one_snapshot_is_refused_with_both_sizes_and_the_setting_in_force(where, tmp_path):
    raised, nodes = {}, ThreadRanks(2)

    def begin(comm, nbytes):
        node = tmp_path / f"node_{comm.rank}"
        node.mkdir(exist_ok=True)
        small = comm.rank == 1  # the other rank's has room
        given = {"memory": Memory(directory=node), "host_memory_bytes": nbytes or 100 if small else None}
        try:
            with Life(LocalStorage(where[0]), policy=Dense(), comm=comm, **given) as each:
                each.go(1)
        except (HostMemoryError, RuntimeError) as error:
            raised[comm.rank] = error
            nodes.abandon()

    run_threads(nodes, partial(begin, nbytes=None))
    error = raised[1]
    assert isinstance(error, HostMemoryError)
    assert error.budget_bytes == 100
    needed = f"needs {error.needed_bytes:,} bytes of host memory on rank 1, but its budget is 100 bytes. "
    assert f"{needed}Set host_memory_bytes to {error.needed_bytes} or more; " in str(error)
    assert "free" not in str(error), "somebody gave it"
    raised.clear()
    run_threads(ThreadRanks(2), partial(begin, nbytes=error.needed_bytes))
    assert raised == {}, "as advised"


def test_a_budget_that_nobody_gave_is_said_to_be_half_of_what_was_free(where, monkeypatch):
    monkeypatch.setattr(host_memory, "default_budget_bytes", lambda local_ranks, left_bytes=0: 100)
    said = r"100 bytes\. That is half of what was free .* Set host_memory_bytes to \d+ or more"
    with life(where) as only, pytest.raises(HostMemoryError, match=said):
        only.go(1)


def test_what_runs_left_that_are_over_is_swept(where, tmp_path):
    train_and_fail(where)
    root = str(where[1])
    [run] = user_directory(root).iterdir()
    [(_, _, path)] = rank_directories(run)
    another = run.with_name("another")
    assert sweep(another) == 0, "it may be waiting for its restart"
    assert sweep(run) == 0
    told = json.loads((path / "owner.json").read_text())
    (path / "owner.json").write_text(json.dumps(told | {"boot_id": "before"}))
    assert sweep(run) == 0, "its own"
    assert sweep(another) > 0
    assert not run.exists()


def test_what_a_living_process_holds_is_left_alone(where):
    with life(where) as only:
        only.go(2, settle=True)
        [run] = user_directory(str(where[1])).iterdir()
        before = files(where[1])
        assert remove_run(run) is False
        assert files(where[1]) == before
        only.go(1, settle=True)


def test_a_slot_of_another_version_is_not_read(where):
    train_and_fail(where)
    for slot in slots(where[1]):
        path = slot.with_suffix(".head")
        path.write_bytes(path.read_bytes().replace(b'"format_version":1', b'"format_version":9'))
        with pytest.raises(DamagedError):
            Slot.open(slot)


def test_a_second_process_of_the_same_rank_is_refused(where):
    """Two nodes that share one directory by mistake."""
    first = make_rank_directory(str(where[1]), "run", 0, 3, "store")
    with pytest.raises(ConfigError, match=r"is in use by process [1-9]"):
        make_rank_directory(str(where[1]), "run", 0, 3, "store")
    first.remove()


def test_partial_checkpoints_are_found_too(where):
    policy = MoC(k=1)
    train_and_fail(where, policy)
    with life(where, policy) as second:
        restored, _ = come_back(second)
        versions = {op: record.step for op, record in restored.manifest.operators.items()}
        assert_state(second, versions)
        saved = {op for op, step in versions.items() if step == 6}
        assert {f"expert/{layer}/{expert}" for layer, expert in sequential(5)} <= saved


def test_what_a_paused_process_of_an_earlier_life_holds_is_not_read(where, caplog):
    """It may wake up and write on; storage gives what it had."""
    train_and_fail(where)
    [path] = {each.parent for each in files(where[1])}
    context = multiprocessing.get_context("spawn")
    holding = context.Event()
    paused = context.Process(target=hold, args=(path, holding))
    paused.start()
    try:
        assert holding.wait(60)
        os.kill(paused.pid, signal.SIGSTOP)
        before = {each: each.read_bytes() for each in files(where[1]) if each.name != "lock"}
        with caplog.at_level(logging.INFO, "moe_ckpt"), life(where) as second:
            come_back(second)
            assert_state(second, EVERYTHING_AT_6)
            second.go(2, settle=True)
            second.finish()
        assert f"process {paused.pid} holds it" in caplog.text
        assert {each: each.read_bytes() for each in files(where[1]) if each.name != "lock"} == before
    finally:
        paused.kill()
        paused.join()


def hold(path, holding):
    """A process that owns a directory of slots."""
    taken = RankDirectory.take(path)
    assert taken is not None
    holding.set()
    signal.pause()
