"""Who owns what in a memory directory, with real processes that race, die, and leave things behind."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import json
import logging
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.cli.memory import survey
from moe_ckpt.errors import ConfigError
from moe_ckpt.memory import directory as directories
from moe_ckpt.memory import limits
from moe_ckpt.memory.arena import ARENA
from moe_ckpt.memory.directory import (
    ELSEWHERE,
    LOCK,
    OWNER,
    RankDirectory,
    holder_of,
    make_rank_directory,
    owner_of,
    rank_directories,
    run_directory,
    slots_in,
    user_directory,
)
from moe_ckpt.memory.files import MemoryFiles, remove_run, sweep
from moe_ckpt.memory.slot import Slot
from moe_ckpt.tiers import host_memory
from moe_ckpt.tiers.buffers import BufferPool
from tests.support.deleting import delete_tree
from tests.unit.engine_parts import ThreadRanks, run_threads
from tests.unit.test_engine_host_tier import assert_state, come_back
from tests.unit.test_engine_memory import (
    EVERYTHING_AT_6,
    files,
    life,
    slots,
    train_and_fail,
    where,  # noqa: F401 - a fixture
)

FORK = multiprocessing.get_context("fork")
RACE_SECS = 1.5
RUN, STORE = "run", "/a/store"


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


@pytest.fixture
def root() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="moe_ckpt_test_") as path:
        yield path


def life_of(root: str, generation: int, rank: int = 0, store: str = STORE) -> MemoryFiles:
    return MemoryFiles(root, RUN, generation, "life", rank, store)


def left_by(root: str, generation: int, rank: int = 0, store: str = STORE, run: str = RUN) -> Path:
    """A directory of a dead process, with a slot that has a header, which says nothing."""
    made = make_rank_directory(root, run, generation, rank, store)
    for name in (ARENA, "slot_000@0.head"):
        (made.path / name).write_bytes(b"x")
    made.release()
    return made.path


def told_by(process: Any, receiver: Any) -> Any:
    process.start()
    try:
        assert receiver.poll(60), "the other process says nothing"
        return receiver.recv()
    finally:
        process.join(60)


# --- races ---


def keep_removing(root: str, stop: Any, sender: Any) -> None:
    """``moe-ckpt memory clear``, and other runs that begin, again and again."""
    trouble: list[str] = []
    while not stop.is_set():
        try:
            remove_run(run_directory(root, RUN, STORE))
            sweep(run_directory(root, "another", STORE))
        except BaseException as error:  # all there is, for the test to show
            trouble.append(repr(error))
    sender.send(trouble)


def test_a_life_that_begins_while_others_remove_keeps_its_directory(root):
    stop = FORK.Event()
    receiver, sender = FORK.Pipe(duplex=False)
    user_directory(root)
    remover = FORK.Process(target=keep_removing, args=(root, stop, sender))
    remover.start()
    until, lives = time.monotonic() + RACE_SECS, itertools.count(0, 2)
    try:
        for generation in lives:
            for rank in range(4):
                left_by(root, generation, rank)
            begun = life_of(root, generation + 1)
            slot = begun.make(4096)
            begun.open_arena(1 << 20)
            begun.grow(4096)
            begun.take_left(same_rank=True)
            begun.take_left(same_rank=False)
            assert slot.is_there, generation
            assert not begun.arena.is_gone, generation
            begun.close(keep=False)
            if time.monotonic() > until and generation > 20:
                break
    finally:
        stop.set()
        trouble = receiver.recv() if receiver.poll(60) else ["the other process has failed"]
        remover.join(60)
    assert trouble == []


def own_for_a_moment(path: Path, stop: Any, sender: Any) -> None:
    found: collections.Counter[str] = collections.Counter()
    while not stop.is_set() or found["taken"] < 10:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        taken = RankDirectory.take(path)
        if taken is None:
            continue
        found["taken"] += 1
        try:
            os.close(os.open(path / "owned", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            found["two owners"] += 1
        except FileNotFoundError:
            found["removed under its owner"] += 1
        taken.remove()
    sender.send(found)


def test_a_directory_has_one_owner_while_processes_take_and_remove_it(root):
    """It lies in no run's directory, so that nothing above it is removed."""
    path = Path(root, "a", "b", "c", "rank_00000")
    stop = FORK.Event()
    pipes = [FORK.Pipe(duplex=False) for _ in range(3)]
    for above in (path.parent, path.parent.parent, Path(root)):
        above.mkdir(parents=True, exist_ok=True)
        (above / "stays").touch()
    owners = [FORK.Process(target=own_for_a_moment, args=(path, stop, sender)) for _, sender in pipes]
    for each in owners:
        each.start()
    time.sleep(RACE_SECS)
    stop.set()
    found: collections.Counter[str] = collections.Counter()
    for receiver, _ in pipes:
        assert receiver.poll(60), "a process has failed"
        found += receiver.recv()
    for each in owners:
        each.join(60)
    assert found.pop("taken") >= 30
    assert dict(found) == {}


def test_a_run_that_is_about_to_make_its_directory_is_not_over(root):
    own, run = run_directory(root, RUN, STORE), user_directory(root) / "young"
    (run / "000000").mkdir(parents=True)
    sweep(own)
    assert run.exists()
    for path in (run / "000000", run):
        os.utime(path, (0, 0))
    sweep(own)
    assert not run.exists()


def test_what_is_no_file_of_ours_outlives_the_run(root):
    path = left_by(root, 0)
    (path.parent / "notes").mkdir()
    (path.parent / "notes" / "mine").write_text("dear")
    assert remove_run(run_directory(root, RUN, STORE))
    assert [each.name for each in files(Path(root))] == ["mine"]


# --- owners ---


def test_a_directory_is_taken_once_by_whatever_name(root, tmp_path):
    made = make_rank_directory(root, RUN, 0, 0, STORE)
    Path(tmp_path, "link").symlink_to(root)
    same = Path(tmp_path, "link", *made.path.relative_to(root).parts)
    assert RankDirectory.take(same) is None
    assert holder_of(same) == os.getpid()
    receiver, sender = FORK.Pipe(duplex=False)

    def take() -> None:
        directories._owned.clear()  # a fork knows what its parent knew
        sender.send(RankDirectory.take(made.path) is None)

    assert told_by(FORK.Process(target=take), receiver) is True, "this process has lost its lock"
    made.remove()


def test_what_was_released_or_made_anew_is_not_removed(root):
    made = make_rank_directory(root, RUN, 0, 0, STORE)
    delete_tree(made.path)
    other = make_rank_directory(root, RUN, 0, 0, STORE)
    made.remove()
    assert (other.path / OWNER).exists()
    other.release()
    other.remove()
    assert (other.path / OWNER).exists()


def test_a_file_in_place_of_a_directory_is_nobodys(root):
    path = user_directory(root) / "file"
    path.touch()
    assert RankDirectory.take(path) is None
    assert RankDirectory.take(path / "below") is None


@pytest.mark.parametrize("text", ['{"pid": 1e999}', "[" * 100_000, '{"pid": "x"}', "", "[]"])
def test_an_owner_that_says_nonsense_is_unknown(root, text):
    path = left_by(root, 0)
    told = {"host": "h", "boot_id": "b", "store": "s", "begun_unix_secs": 0}
    if text.startswith("{"):
        text = json.dumps(told)[:-1] + ", " + text[1:]
    (path / OWNER).write_text(text)
    assert owner_of(path).store == ""


@pytest.mark.skipif(sys.platform != "linux", reason="pid namespaces are Linux's")
def test_a_process_of_another_pid_namespace_is_shown_as_one(root, capsys):
    script = (
        "import sys, time\n"
        "from moe_ckpt.memory.directory import make_rank_directory, holder_of\n"
        f"made = make_rank_directory({root!r}, {RUN!r}, 0, 0, {STORE!r})\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    look = f"from moe_ckpt.cli.main import main; main(['memory', '--directory', {root!r}])"
    inside = ["unshare", "--pid", "--fork"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespace can be made here; run this test as root")
    holder = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        path = run_directory(root, RUN, STORE) / "000000" / "rank_00000"
        assert holder_of(path) == holder.pid
        said = subprocess.run([*inside, sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
        assert "a process of another namespace" in said
        code = f"import pathlib, moe_ckpt.memory.directory as d; print(d.holder_of(pathlib.Path({str(path)!r})))"
        told = subprocess.run([*inside, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert int(told) == ELSEWHERE
    finally:
        holder.communicate("")


# --- what earlier lives left ---


def test_an_odd_entry_of_one_directory_costs_no_other(root, caplog):
    for rank in range(3):
        left_by(root, 0, rank)
    odd = run_directory(root, RUN, STORE) / "000000" / "rank_00001"
    (odd / LOCK).unlink()
    (odd / LOCK).mkdir()
    (odd.parent / "rank_00000" / "directory").mkdir()
    begun = life_of(root, 1, rank=0)
    begun.take_left(same_rank=True)
    begun.take_left(same_rank=False)
    assert [path.parent.name + "/" + path.name for path in begun.paths[1:]] == [
        "000000/rank_00000",
        "000000/rank_00002",
    ]
    assert f"the content of {odd} is not used" in caplog.text
    begun.close(keep=False)
    assert holder_of(odd.parent / "rank_00000") == 0, "no lock is kept"
    assert {path.parent for path in files(Path(root))} == {odd}


def test_an_odd_entry_of_another_run_stops_none(root, caplog):
    path = left_by(root, 0, run="other")
    (path / "directory").mkdir()
    owner = path / OWNER
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"boot_id": "before"}))
    locked = left_by(root, 0, run="third")
    owner = locked / OWNER
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"boot_id": "before"}))
    (locked / LOCK).unlink()
    (locked / LOCK).mkdir()
    assert sweep(run_directory(root, RUN, STORE)) > 0
    assert not (path / ARENA).exists()
    assert f"{path / 'directory'} cannot be removed" in caplog.text
    assert f"{run_directory(root, 'third', STORE)} is not touched" in caplog.text


def test_a_slot_with_a_damaged_header_is_set_aside_and_freed(where):  # noqa: F811
    train_and_fail(where)
    damaged = slots(where[1])
    for slot in damaged:
        os.truncate(slot.with_suffix(".head"), 9)
    with life(where) as second:
        come_back(second)
        second.go(1, settle=True)
        assert all(slot.with_suffix(".damaged").exists() for slot in damaged)
    assert slots(where[1])
    assert not set(slots_in(damaged[0].parent)) & set(damaged), "their bytes are lent again"


def test_a_kept_directory_has_the_sealed_slots_and_nothing_else(where):  # noqa: F811
    first = life(where)
    with first:
        first.go(4, settle=True)
        path = first.session.tier.files.path
        (path / "slot_800.head").write_bytes(b"without bytes")
        (path / "slot_801.data").write_bytes(b"of nobody")
        (path / "slot_802@0.damaged").write_bytes(b"")
        (path / "slot_803.tmp").write_bytes(b"half a header")
    sealed = {slot.name for slot in slots(where[1])}
    assert len(sealed) >= 1
    names = {path.name for path in files(where[1])}
    assert names == {LOCK, OWNER, ARENA} | {f"{name}.head" for name in sealed}
    for slot in slots(where[1]):
        Slot.open(slot)


def test_a_copy_of_the_store_leaves_the_slots_of_the_first_alone(where, tmp_path, caplog):  # noqa: F811
    train_and_fail(where)
    before = {path: path.read_bytes() for path in files(where[1])}
    copy = tmp_path / "copy"
    shutil.copytree(where[0], copy)
    with caplog.at_level(logging.INFO, "moe_ckpt"), life((copy, where[1])) as other:
        assert other.session.tier.outlives_process
        assert other.session.tier.left_slots.slots == ()
        come_back(other)
        assert_state(other, EVERYTHING_AT_6)
        other.go(1, settle=True)
        other.finish()
    assert "of another run; moe-ckpt memory lists them" in caplog.text
    assert {path: path.read_bytes() for path in files(where[1])} == before
    with life(where) as again:
        assert len(again.session.tier.left_slots.slots) >= 1
        come_back(again)
        again.finish()
    assert files(where[1]) == []


def test_a_clean_end_removes_what_ranks_left_that_are_no_more(where):  # noqa: F811
    def train(comm: Any) -> None:
        with life(where, comm=comm, local_ranks=2) as one:
            one.go(3, settle=True)

    run_threads(ThreadRanks(2), train)
    with life(where) as second:
        come_back(second)
        [run] = user_directory(str(where[1])).iterdir()
        # Of a process that still lived when this life began, and of one that was killed before it said whose it is.
        made = make_rank_directory(str(where[1]), run.name.partition("-")[0], 0, 5, str(where[0]))
        (made.path / ARENA).write_bytes(b"x")
        made.release()
        (run / "000000" / "rank_00006").mkdir()
        second.finish()
    assert files(where[1]) == []
    assert list(user_directory(str(where[1])).iterdir()) == []


def test_two_processes_of_one_rank_are_refused_after_a_moment(root, monkeypatch):
    first = make_rank_directory(root, RUN, 0, 3, STORE)
    remover = threading.Timer(0.1, first.remove)
    remover.start()
    with monkeypatch.context() as busy:
        busy.setattr(directories, "_PATIENCE_SECS", 60.0)
        second = make_rank_directory(root, RUN, 0, 3, STORE)  # whoever held it was removing it
    remover.join()
    with pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}"):
        make_rank_directory(root, RUN, 0, 3, STORE)
    second.remove()


# --- a file system that fails ---


def in_trouble(root: str, how: str, sender: Any) -> None:
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("moe_ckpt").addHandler(Said())
    gc.collect()  # what the parent left holds descriptors, which a collection would give back in the middle
    gc.disable()
    begun = life_of(root, 0)
    begun.open_arena(1 << 20)
    pool = BufferPool(1 << 20, files=begun)
    [first] = pool.acquire([5000]) or [None]
    assert first is not None
    assert first.slot is not None
    if how == "removed":
        delete_tree(Path(root))
    elif how == "descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        try:
            for _ in itertools.count():
                os.open("/dev/null", os.O_RDONLY)
        except OSError:
            pass
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    found = [pool.acquire([5000]) for _ in range(3)]
    sender.send(([each is not None and each[0].slot is None for each in found], said))


@pytest.mark.parametrize("how", ["removed", "size"])
def test_private_memory_serves_whatever_the_file_system_has(root, how):
    receiver, sender = FORK.Pipe(duplex=False)
    private, said = told_by(FORK.Process(target=in_trouble, args=(root, how, sender)), receiver)
    assert private == [True, True, True]
    [warning] = said
    reason = {"removed": "no such directory", "size": "File too large"}[how]
    assert "is kept in private memory" in warning
    assert reason in warning


def test_snapshots_take_no_descriptors(root):
    receiver, sender = FORK.Pipe(duplex=False)
    private, said = told_by(FORK.Process(target=in_trouble, args=(root, "descriptors", sender)), receiver)
    assert (private, said) == ([False, False, False], [])


def test_training_goes_on_without_its_directory(where, caplog):  # noqa: F811
    with life(where) as only:
        only.go(2, settle=True)
        delete_tree(where[1])
        only.go(3, settle=True)
        only.finish()
    where[1].mkdir()
    with life(where) as second:
        come_back(second)
        assert second.step == 5
    assert "memory does not hold the checkpoint" in caplog.text


# --- the budget ---


def test_what_the_dead_life_left_counts_as_free(where, monkeypatch):  # noqa: F811
    """Memory that a tmpfs takes is not free: a machine of so much memory that a snapshot takes 2/5 of it."""
    with life(where) as first:
        first.go(1, settle=True)
        nbytes = first.session.tier.nbytes // 1
    machine = int(2.5 * nbytes) + 4096

    def available() -> int:
        return max(0, machine - sum(path.stat().st_size for path in files(where[1])))

    monkeypatch.setattr(limits, "available_bytes", available)
    monkeypatch.setattr(limits, "cgroup_bytes", lambda **_: None)
    with life(where, when_busy="wait") as second:
        come_back(second)
        assert second.session._snapshots.pipeline._pool.budget_bytes >= nbytes
        second.go(2, settle=True)
        assert second.session.committed_directory is not None


def test_a_container_s_limit_is_no_less_for_what_another_one_left(tmp_path):
    for name, value in (("memory.max", 1000), ("memory.current", 300)):
        (tmp_path / name).write_text(str(value))
    assert limits.cgroup_bytes(str(tmp_path)) == 700
    assert limits.cgroup_bytes(str(tmp_path), left_bytes=200) == 900
    assert limits.cgroup_bytes(str(tmp_path), left_bytes=5000) == 1000


# --- what people are told ---


def keep_training(place: tuple[Path, Path], stop: Any) -> None:
    with life(place) as one:
        while not stop.is_set():
            one.go(1, settle=True)


def test_a_healthy_run_at_work_is_not_called_damaged(where, capsys):  # noqa: F811
    stop = FORK.Event()
    training = FORK.Process(target=keep_training, args=(where, stop))
    training.start()
    until, looked = time.monotonic() + RACE_SECS, 0
    try:
        while training.is_alive() and (looked <= 20 or time.monotonic() < until):
            found = [slot for each in survey(str(where[1]), verify=True) for slot in each.slots]
            assert [slot.problem for slot in found if slot.problem] == []
            looked += bool(found)
    finally:
        stop.set()
        training.join()
    assert training.exitcode == 0
    assert looked > 20
    assert main(["memory", "explain", "--directory", str(where[1])]) == 0
    assert list(rank_directories(user_directory(str(where[1])) / "none")) == []
