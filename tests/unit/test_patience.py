"""Reads that fail for a moment, for good, or for want of a permission: what a resume makes of each."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys

import pytest

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.errors import (
    ConfigError,
    DamagedError,
    NoCheckpointError,
    StoreError,
    StoreForbiddenError,
    StoreUnreadableError,
)
from moe_ckpt.reading.reader import StoreReader, newest_good
from moe_ckpt.reading.step_storage import StepStorage
from moe_ckpt.recovery.resume import resume_newest
from moe_ckpt.run.options import Options
from moe_ckpt.storage import LocalStorage, RemoteStorage
from moe_ckpt.testing import FaultyStorage
from tests.support.store_builder import LiveState, TinyRun, example
from tests.support.verifying import verify_store
from tests.unit.engine_parts import ThreadRanks, run_threads

READS = ("read", "size", "list", "exists")
TRANSIENT = (errno.ETIMEDOUT, errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ECONNRESET, errno.EBUSY)
NEWEST = "step_00000003"


class Failing(LocalStorage):
    """Reads of paths that end in ``suffix`` raise ``error``, the first ``times`` times."""

    def __init__(self, root, suffix, error, times=10**9):
        super().__init__(root)
        self.suffix, self.error, self.times = suffix, error, times

    def read(self, path, offset=0, nbytes=None):
        if path.endswith(self.suffix) and self.times > 0:
            self.times -= 1
            raise self.error
        return super().read(path, offset, nbytes)


def resume(storage, state=None, comm=None, **options):
    return resume_newest(
        storage, comm or SoloCommunicator(), state or LiveState(), **{"read_patience_secs": 0.05, **options}
    )


@pytest.mark.parametrize("code", TRANSIENT, ids=errno.errorcode.get)
def test_every_read_may_fail_once_and_the_newest_step_comes_back(tmp_path, code, caplog):
    """The n-th call fails for every n: no single hiccup costs a step."""
    example(tmp_path)
    failures = calls = 0
    while failures == calls:
        calls += 1
        faulty = FaultyStorage(LocalStorage(tmp_path), calls, OSError(code, "hiccup"), verbs=READS)
        patient = StepStorage(faulty, 60.0, sleep=lambda secs: None)
        assert resume(patient).manifest.directory == NEWEST
        failures += faulty.failures
    assert failures > 20
    assert "cannot be read" in caplog.text
    assert "could be read at attempt 2" in caplog.text


NOT_YET = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int left = 3;
static int fails(int fd) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) < 0 || !strstr(path, "/slow_file") || left <= 0) return 0;
    left--;
    errno = EAGAIN;
    return 1;
}
#define WRAP(name, args, call) \
    ssize_t name args { \
        ssize_t (*real) args = dlsym(RTLD_NEXT, #name); \
        return fails(fd) ? -1 : real call; \
    }
WRAP(read, (int fd, void *b, size_t n), (fd, b, n))
WRAP(readv, (int fd, const struct iovec *v, int n), (fd, v, n))
WRAP(pread64, (int fd, void *b, size_t n, off64_t o), (fd, b, n, o))
"""
READ_SLOW_FILE = """
import sys
from moe_ckpt.storage import LocalStorage
from moe_ckpt.storage.local import read_whole
from moe_ckpt.reading.step_storage import StepStorage
root, how = sys.argv[1:]
if how == "patient":
    print(bytes(StepStorage(LocalStorage(root)).read("slow_file")))
else:
    try:
        print(LocalStorage(root).read("slow_file") if how == "storage" else read_whole(f"{root}/slow_file", 99))
    except BlockingIOError as error:
        print("EAGAIN", error.errno)
"""


@pytest.fixture(scope="module")
def not_yet(tmp_path_factory):
    """A library under which the first three reads of a file give EAGAIN."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("not_yet")
    (folder / "not_yet.c").write_text(NOT_YET)
    command = [compiler, "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-w", "-o", "not_yet.so", "not_yet.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "not_yet.so")


@pytest.mark.parametrize("how", ["storage", "whole", "patient"])
def test_a_file_that_has_nothing_yet_is_not_at_its_end(how, not_yet, tmp_path):
    """Python's file objects give None, or less than was asked for, at EAGAIN."""
    (tmp_path / "slow_file").write_bytes(b"all of it")
    command = [sys.executable, "-c", READ_SLOW_FILE, str(tmp_path), how]
    done = subprocess.run(command, env={**os.environ, "LD_PRELOAD": not_yet}, capture_output=True, text=True)
    assert done.stdout == ("b'all of it'\n" if how == "patient" else f"EAGAIN {errno.EAGAIN}\n"), done.stderr


def test_pauses_grow_and_are_bounded_in_all():
    waited = []
    patient = StepStorage(_Dead(), 30.0, sleep=waited.append)
    for _ in range(2):
        with pytest.raises(OSError, match="dead"):
            patient.size("x")
    assert waited[:6] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4]
    assert sum(waited) == pytest.approx(30.0)


class _Dead:
    root = "/dead"

    def size(self, path):
        raise OSError(errno.EIO, "dead")


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR])
def test_what_stays_as_it_is_is_not_asked_again(tmp_path, code):
    faulty = FaultyStorage(LocalStorage(tmp_path), 1, OSError(code, "no"), persistent=True)
    with pytest.raises(OSError, match="no"):
        StepStorage(faulty, 60.0).size("x")
    assert len(faulty.calls) == 1


def test_an_object_store_whose_client_times_out_is_asked_again(monkeypatch):
    import fsspec
    from fsspec.exceptions import FSTimeoutError

    url = "memory://patience"
    RemoteStorage(url).write("d/f", [b"abc"])
    whole, failures = fsspec.filesystem("memory").cat_file, [FSTimeoutError(), ConnectionResetError("peer")]

    def cat_file(path, **options):
        if failures:
            raise failures.pop()
        return whole(path, **options)

    storage = RemoteStorage(url)
    monkeypatch.setattr(storage._fs, "cat_file", cat_file)
    assert StepStorage(storage, 60.0, sleep=lambda secs: None).read("d/f") == b"abc"


@pytest.mark.parametrize("suffix", ["MANIFEST.json", "PART.json", "state.json", "expert.safetensors"])
def test_an_error_that_stays_stops_with_step_rank_and_file(tmp_path, suffix):
    example(tmp_path)
    state = LiveState()
    with pytest.raises(StoreUnreadableError, match=r"cannot be read: gone away.*on_read_error='fallback'") as caught:
        resume(Failing(tmp_path, suffix, OSError(errno.EIO, "gone away")), state)
    assert caught.value.step == 3 or suffix == "expert.safetensors"  # of an older step that the newest needs
    assert suffix in ("MANIFEST.json", "PART.json") or caught.value.rank is not None
    assert caught.value.path.endswith(suffix)
    assert state.untouched()


def test_falling_back_is_a_setting_and_names_what_it_left(tmp_path, capfd, caplog):
    example(tmp_path)
    failing = Failing(tmp_path, f"{NEWEST}/MANIFEST.json", OSError(errno.ETIMEDOUT, "timed out"))
    with caplog.at_level(logging.WARNING):
        restored = resume(failing, on_read_error="fallback")
    assert restored.manifest.directory == "step_00000002"
    assert (tmp_path / NEWEST / "KEEP").exists()
    assert f"resuming from step_00000002: the newer {NEWEST} could not be read" in caplog.text
    everything = Failing(tmp_path, "MANIFEST.json", OSError(errno.ETIMEDOUT, "timed out"))
    with pytest.raises(NoCheckpointError, match="no checkpoint in"):
        resume(everything, on_read_error="fallback")


def test_a_damaged_step_still_falls_back(tmp_path):
    example(tmp_path)
    path = tmp_path / NEWEST / "MANIFEST.json"
    path.write_bytes(path.read_bytes()[:-9])
    restored = resume(LocalStorage(tmp_path))
    assert restored.manifest.directory == "step_00000002"
    assert not (tmp_path / NEWEST / "KEEP").exists()


@pytest.mark.parametrize("on_read_error", ["stop", "fallback"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_refused_permission_is_ours_and_builtin(tmp_path, code, on_read_error):
    example(tmp_path)
    failing = Failing(tmp_path, f"{NEWEST}/rank_00000_state.json", OSError(code, "denied"))
    with pytest.raises(StoreForbiddenError, match=r"denied.*Give this user permission") as caught:
        resume(failing, on_read_error=on_read_error)
    assert isinstance(caught.value, PermissionError)
    assert (caught.value.step, caught.value.rank) == (3, 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EACCES, "denied"), StoreForbiddenError),
        (OSError(errno.EIO, "gone"), StoreUnreadableError),
        (ConfigError("this rank is configured otherwise"), ConfigError),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
    ],
)
def test_all_ranks_leave_together_and_at_once(tmp_path, error, kind):
    """One rank cannot read; the others must not wait for it until a timeout."""
    example(tmp_path)

    def one(comm):
        storage = Failing(tmp_path, f"{NEWEST}/rank_00001_state.json", error)
        try:
            resume(storage, LiveState(comm.rank, 2), comm)
        except Exception as caught:
            return caught
        return None

    first, second = run_threads(ThreadRanks(2), one)
    assert type(second) is kind
    assert type(first) is StoreError
    assert f"rank 1 cannot resume from checkpoint {NEWEST}: " in str(first)
    assert str(second) in str(first)


def test_a_store_that_cannot_be_listed_stops_all_ranks(tmp_path):
    example(tmp_path)

    def one(comm):
        storage = FaultyStorage(LocalStorage(tmp_path), 1, OSError(errno.EACCES, "denied"), True, verbs=("list",))
        with pytest.raises(StoreError) as caught:
            resume(storage, LiveState(comm.rank, 2), comm)
        return caught.value

    first, second = run_threads(ThreadRanks(2), one)
    assert type(first) is StoreForbiddenError
    assert "rank 0 cannot list the store" in str(second)


def test_readers_of_stores_stop_as_well_and_verification_names_the_file(tmp_path):
    example(tmp_path)
    failing = Failing(tmp_path, f"{NEWEST}/MANIFEST.json", OSError(errno.EIO, "gone"))
    with pytest.raises(StoreUnreadableError, match=r"MANIFEST\.json, step 3: cannot be read: gone"):
        newest_good(StoreReader(failing, patience_secs=0.01))
    once = Failing(tmp_path, "00001_expert.safetensors", OSError(errno.EIO, "gone"), times=1)
    assert verify_store(once) == []


def test_the_options_say_what_is_possible():
    assert Options().on_read_error == "stop"
    with pytest.raises(ConfigError, match="on_read_error"):
        Options(on_read_error="ignore")
    for wrong in ("world", None, 0o640):
        with pytest.raises(ConfigError, match="access"):
            Options(access=wrong)


def test_damage_names_are_kept(tmp_path):
    """What patience lets through keeps its type: a missing file is damage."""
    run = TinyRun(tmp_path)
    directory = run.save(1)
    (tmp_path / directory / "rank_00000_state.json").unlink()
    reader = StoreReader(LocalStorage(tmp_path))
    with pytest.raises(DamagedError, match=r"rank_00000_state\.json, step 1, rank 0: is missing"):
        reader.state(reader.manifest(directory), 0)
