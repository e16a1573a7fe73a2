"""One run per store, with real processes and real kills."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid

import pytest

from moe_ckpt.errors import StoreInUseError, StoreUnwritableError
from moe_ckpt.storage import LocalStorage, RemoteStorage, StoreLock, open_storage
from moe_ckpt.storage.lock import job_name
from moe_ckpt.testing import FaultyStorage

HOLDER = """
    import sys, time
    from moe_ckpt.storage import StoreLock, open_storage
    lock = StoreLock(open_storage(sys.argv[1]), "job-17")
    lock.acquire()
    print("held", flush=True)
    time.sleep(600)
"""
TRYER = """
    import sys
    from moe_ckpt.errors import StoreInUseError
    from moe_ckpt.storage import StoreLock, open_storage
    try:
        StoreLock(open_storage(sys.argv[1]), "job-18").acquire()
        print("free")
    except StoreInUseError as error:
        print(error)
"""


@contextlib.contextmanager
def running(program, root):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(root)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def holder(tmp_path):
    with running(HOLDER, tmp_path) as process:
        yield process


def try_from_another_process(root):
    command = [sys.executable, "-c", textwrap.dedent(TRYER), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path, holder):
    lock = StoreLock(LocalStorage(tmp_path), "job-18")
    with pytest.raises(StoreInUseError, match=rf"job-17, process {holder.pid} on .*own dirpath") as raised:
        lock.acquire()
    assert raised.value.path == str(tmp_path)


def test_kill_minus_nine_frees_the_store(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with StoreLock(LocalStorage(tmp_path), "job-18") as lock:
        lock.confirm()
        assert "job-18, process" in try_from_another_process(tmp_path)


def test_a_second_holder_in_the_same_process_is_refused_and_does_no_harm(tmp_path):
    """POSIX would grant it, and closing its descriptor would then free the first one's lock."""
    with StoreLock(LocalStorage(tmp_path), "first"):
        with pytest.raises(StoreInUseError, match="first, in this same process"):
            StoreLock(LocalStorage(tmp_path), "second").acquire()
        assert "first, process" in try_from_another_process(tmp_path)
    assert try_from_another_process(tmp_path) == "free"
    with StoreLock(LocalStorage(tmp_path), "second"):
        pass


def test_other_stores_are_free(tmp_path):
    with StoreLock(LocalStorage(tmp_path / "a"), "x"), StoreLock(LocalStorage(tmp_path / "b"), "x"):
        pass


def test_a_forked_child_neither_keeps_nor_frees_the_lock(tmp_path):
    """Data-loader workers are forked: one that outlives its trainer must not keep the store locked."""
    lock = StoreLock(LocalStorage(tmp_path), "parent")
    lock.acquire()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(read_end, 1)
        finally:
            os._exit(0)
    try:
        assert "parent" in try_from_another_process(tmp_path)
        lock.release()
        assert try_from_another_process(tmp_path) == "free"
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


# --- a lock that the kernel has dropped ---


@pytest.fixture
def lost(tmp_path):
    """A lock that this process holds no more: it has opened and closed the lock's file once more."""
    with StoreLock(LocalStorage(tmp_path / "store"), "job-1") as lock:
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        yield lock


def test_a_dropped_lock_is_taken_again(tmp_path, lost):
    lost.confirm()
    assert "job-1, process" in try_from_another_process(tmp_path / "store")
    assert not lost.is_lost


def test_a_thread_takes_a_dropped_lock_again_between_commits(tmp_path, lost, monkeypatch):
    lock_again, again = lost._file.keep, threading.Event()
    monkeypatch.setattr(lost._file, "keep", lambda: [lock_again(), again.set()])
    monkeypatch.setattr(lost, "_ttl_secs", 0.1)
    lost.renew_meanwhile()
    assert again.wait(60)
    assert "job-1, process" in try_from_another_process(tmp_path / "store")


def test_a_dropped_lock_that_another_run_has_taken_is_lost(tmp_path, lost):
    with running(HOLDER, tmp_path / "store") as other:
        for _ in range(2):
            with pytest.raises(StoreInUseError, match=rf"job-17, process {other.pid} on "):
                lost.confirm()
        assert lost.is_lost


def test_a_dropped_lock_that_another_run_had_meanwhile_is_lost(tmp_path, lost):
    """What the other one wrote is unknown to this one."""
    assert try_from_another_process(tmp_path / "store") == "free"
    for _ in range(2):
        with pytest.raises(StoreInUseError, match=r"job-18, process \d+ on .*, which had the store meanwhile"):
            lost.confirm()
    assert lost.is_lost


def test_a_deleted_lock_file_is_made_again_for_a_commit(tmp_path, caplog):
    with StoreLock(LocalStorage(tmp_path), "job-1") as lock:
        (tmp_path / ".lock").unlink()
        lock._taken.keep()
        assert os.listdir(tmp_path) == [], "whose store it is, is seen only at a commit"
        lock.confirm()
        assert "job-1, process" in try_from_another_process(tmp_path)
        lock.confirm()
    assert caplog.text.count("deleted or replaced") == 1


def test_a_deleted_lock_file_that_another_run_has_made_again_is_its_own(tmp_path):
    with StoreLock(LocalStorage(tmp_path), "job-1") as lock:
        (tmp_path / ".lock").unlink()
        with running(HOLDER, tmp_path), pytest.raises(StoreInUseError, match="job-17, process"):
            lock.confirm()
        with pytest.raises(StoreInUseError, match="job-17, process"):
            lock.confirm()
        assert lock.is_lost, "also when the other one has ended: what it wrote is unknown"


def test_what_was_never_taken_or_is_released_is_not_taken_again(tmp_path):
    lock = StoreLock(LocalStorage(tmp_path), "job-1")
    lock.confirm()
    with lock:
        pass
    lock.confirm()
    assert try_from_another_process(tmp_path) == "free"


def test_release_twice_is_harmless_and_leaves_no_descriptor(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    lock = StoreLock(LocalStorage(tmp_path), "x")
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_root_that_cannot_be_made_is_reported_and_not_remembered(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    lock = StoreLock(LocalStorage(tmp_path / "file" / "store"), "x")
    for _ in range(2):
        with pytest.raises(StoreUnwritableError, match="cannot be taken"):
            lock.acquire()


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def url():
    return f"memory://lock-{uuid.uuid4().hex}"


def leave_behind(lock):
    """What remains of a lease when its process is killed: the object, but no registry."""
    lock._leased = False
    lock._unregister()


def test_a_lease_keeps_others_out_until_it_is_stale(url):
    clock = Clock()
    first = StoreLock(open_storage(url), "job-1", ttl_secs=600, clock=clock)
    first.acquire()
    leave_behind(first)
    second = StoreLock(open_storage(url), "job-2", ttl_secs=600, clock=clock)
    clock.now += 599
    with pytest.raises(StoreInUseError, match="job-1, process"):
        second.acquire()
    clock.now += 1
    second.acquire()
    second.release()
    assert open_storage(url).list() == []


def test_a_renewed_lease_is_not_stale_and_leaves_one_object(url):
    clock = Clock()
    first = StoreLock(open_storage(url), "job-1", clock=clock)
    first.acquire()
    for _ in range(3):
        clock.now += 500
        first.confirm()
    assert len(open_storage(url).list()) == 1
    leave_behind(first)
    with pytest.raises(StoreInUseError):
        StoreLock(open_storage(url), "job-2", clock=clock).acquire()


def test_the_same_job_takes_over_its_own_lease_at_once(url):
    clock = Clock()
    killed = StoreLock(open_storage(url), "job-1", clock=clock)
    killed.acquire()
    leave_behind(killed)
    with StoreLock(open_storage(url), "job-1", clock=clock):
        pass


def test_a_holder_that_was_taken_over_learns_it_and_does_not_write(url):
    clock = Clock()
    slow = StoreLock(open_storage(url), "job-1", clock=clock)
    slow.acquire()
    slow._unregister()  # as if the other were another process
    clock.now += 601
    fast = StoreLock(open_storage(url), "job-2", clock=clock)
    fast.acquire()
    names = open_storage(url).list()
    with pytest.raises(StoreInUseError, match=r"job-2, process .* took over the lease"):
        slow.confirm()
    assert open_storage(url).list() == names
    fast.confirm()


def test_two_takeovers_at_the_same_moment_have_one_winner(url):
    """The second one lists before, and writes after, the first one's takeover."""
    clock = Clock()
    inner = open_storage(url)

    class Overtaken(FaultyStorage):
        def write(self, path, chunks):
            inner.write(path, [b'{"owner": "winner", "holder": "winner", "nonce": "n", "unix_secs": 1000.0}'])
            return super().write(path, chunks)

    with pytest.raises(StoreInUseError, match="a run that took the lock a moment earlier"):
        StoreLock(Overtaken(inner, fail_at=None), "loser", clock=clock).acquire()
    assert b"winner" in inner.read(inner.list()[0])


def test_an_unreadable_lease_says_what_to_delete(url):
    open_storage(url).write("lock_00000004.json", [b"garbage"])
    with pytest.raises(StoreInUseError, match=r"lock_00000004\.json cannot be read; delete it"):
        StoreLock(open_storage(url), "x").acquire()


class NoAnswer(RemoteStorage):
    """An object store whose answer to the next upload is lost after the object has landed."""

    loses = False

    def write(self, path, chunks):
        nbytes = super().write(path, chunks)
        if self.loses:
            self.loses = False
            raise TimeoutError("no answer from the store")
        return nbytes


def test_a_renewal_whose_answer_was_lost_is_the_run_s_own(url):
    storage = NoAnswer(url)
    clock = Clock()
    lock = StoreLock(storage, "job-1", clock=clock)
    lock.acquire()
    clock.now += 500
    for _ in range(2):
        storage.loses = True
        with pytest.raises(TimeoutError):
            lock.confirm()
    lock.confirm()
    assert storage.list() == ["lock_00000004.json"]
    lock.release()
    assert storage.list() == []


def test_no_lease_is_left_behind_a_lost_answer(url):
    storage = NoAnswer(url)
    clock = Clock()
    lock = StoreLock(storage, "job-1", clock=clock)
    storage.loses = True
    with pytest.raises(StoreUnwritableError, match="no answer"):
        lock.acquire()
    assert storage.list() == [], "another job need not wait until it has run out"
    lock.acquire()
    storage.loses = True
    clock.now += 500
    with pytest.raises(TimeoutError):
        lock.confirm()
    lock.release()
    assert storage.list() == []


def test_whoever_lost_a_lease_leaves_the_other_s_alone(url):
    """Somebody deleted the first one's lease, so that the second one's has the same number."""
    clock = Clock()
    first = StoreLock(open_storage(url), "job-1", clock=clock)
    first.acquire()
    clock.now += 500
    open_storage(url).delete("lock_00000001.json")
    first._unregister()  # as if the other were another process
    with StoreLock(open_storage(url), "job-2"):
        with pytest.raises(StoreInUseError, match="job-2"):
            first.confirm()
        first.release()
        assert open_storage(url).list() == ["lock_00000001.json"]


NAME = """
    import sys
    from moe_ckpt.storage.lock import job_name
    print(job_name())
"""


def name_in_another_process(**environment):
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        environment.setdefault(variable, "none")
    # As in a container: the same process number, 1, each time.
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c", textwrap.dedent(NAME)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    if done.stderr.startswith("unshare"):
        pytest.skip(f"no pid namespaces here: {done.stderr}")
    return done.stdout.strip()


def test_two_containers_without_a_job_id_are_two_owners():
    first, second = name_in_another_process(), name_in_another_process()
    assert first != second
    assert first.startswith("no job id, start ")


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"])
def test_a_job_id_names_the_job_over_restarts(variable):
    names = {name_in_another_process(**{variable: "17"}) for _ in range(2)}
    assert names == {f"{variable}=17"}


def test_without_a_job_id_a_process_keeps_its_name_and_a_forked_one_gets_its_own(monkeypatch):
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    name = job_name()
    assert job_name() == name
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.write(write_end, job_name().encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        assert answer.read() not in ("", name)
    os.wait()


def test_a_lease_of_an_earlier_release_is_read(url):
    lease = {"owner": "pid 1", "holder": "pid 1, process 1 on node-7", "nonce": "0" * 16, "unix_secs": time.time()}
    open_storage(url).write("lock_00000007.json", [json.dumps(lease).encode()])
    with pytest.raises(StoreInUseError, match="pid 1, process 1 on node-7"):
        StoreLock(open_storage(url), job_name()).acquire()
    with StoreLock(open_storage(url), job_name(), clock=lambda: lease["unix_secs"] + 600):
        assert open_storage(url).list() == ["lock_00000008.json"]


def test_a_lease_is_renewed_while_its_holder_is_busy(url):
    """An upload may take longer than the lease lasts."""
    lock = StoreLock(open_storage(url), "job-1", ttl_secs=1.0)
    lock.acquire()
    lock.renew_meanwhile()
    lock._unregister()  # as if the other were another process
    for _ in range(8):
        time.sleep(0.25)
        with pytest.raises(StoreInUseError, match=r"job-1|a moment earlier"):  # renewed before or while it is asked
            StoreLock(open_storage(url), "job-2", ttl_secs=1.0).acquire()
    assert int(open_storage(url).list()[0][5:13]) > 2
    lock.release()
    assert open_storage(url).list() == []
    time.sleep(0.5)
    assert open_storage(url).list() == [], "nothing is renewed any more"


def test_a_lease_lost_to_another_run_while_its_holder_is_busy_is_told_at_the_commit(url):
    lock = StoreLock(open_storage(url), "job-1", ttl_secs=1.0)
    lock.acquire()
    lock._unregister()  # as if the other were another process
    time.sleep(1.1)
    with StoreLock(open_storage(url), "job-2", ttl_secs=1.0):
        lock.renew_meanwhile()
        time.sleep(1.0)
        assert lock.is_lost
        with pytest.raises(StoreInUseError, match="job-2"):
            lock.confirm()
        lock.release()
        assert open_storage(url).list() == ["lock_00000002.json"]


def test_the_thread_that_keeps_the_lock_ends_with_it(tmp_path):
    before = set(threading.enumerate())
    with StoreLock(LocalStorage(tmp_path), "job-1") as lock:
        lock.renew_meanwhile()
        assert len(set(threading.enumerate()) - before) == 1
    assert set(threading.enumerate()) == before


def test_in_one_process_a_remote_store_is_refused_too(url):
    with StoreLock(open_storage(url), "same"), pytest.raises(StoreInUseError, match="same process"):
        StoreLock(open_storage(url), "same").acquire()


def test_a_local_file_system_without_locks_gets_a_lease(tmp_path, monkeypatch):
    import errno
    import fcntl

    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with StoreLock(LocalStorage(tmp_path), "x"):
        assert "lock_00000001.json" in os.listdir(tmp_path)
    assert os.listdir(tmp_path) == [".lock"]


def test_the_nth_storage_call_fails_for_every_n(url):
    """A lease that could not be taken is reported, and the next try by the same job works."""
    for n in range(1, 50):
        storage = FaultyStorage(open_storage(f"{url}/{n}"), n)
        lock = StoreLock(storage, "job-1")
        try:
            lock.acquire()
        except StoreUnwritableError:
            lock.acquire()
        assert any(name.startswith("lock_") for name in open_storage(f"{url}/{n}").list())
        leave_behind(lock)
        if not storage.failures:
            break
    assert n > 2
