"""Rates of this machine: measured on the library's own ways, told with their spread, nothing left behind."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import pytest

from moe_ckpt.errors import ConfigError, StoreError, StoreUnwritableError
from moe_ckpt.slices import copying
from moe_ckpt.slices.copying import Copier
from moe_ckpt.storage import LocalStorage
from moe_ckpt_sim.planner import rates
from moe_ckpt_sim.planner.rates import MIB, Rates, measure
from tests.support.clocks import Clock
from tests.support.processes import run_ranks

SMALL = {"copy_bytes": MIB, "network_bytes": MIB, "file_bytes": MIB, "repeats": 3}


@pytest.fixture
def no_network(monkeypatch):
    """For tests of the rest: two processes that import torch take seconds."""
    monkeypatch.setattr(rates, "_loopback", lambda nbytes, repeats: [1.0] * (repeats + 1))


def check(found: Rates) -> None:
    for rate in (found.copy, found.network, found.storage_write, found.storage_read):
        assert 1e4 < rate.slowest_bytes_per_sec <= rate.bytes_per_sec <= rate.fastest_bytes_per_sec < 1e13
        assert rate.nbytes == MIB
        assert rate.repeats == 3
        assert rate.how


def test_all_rates_of_one_process(tmp_path):
    told = []
    found = measure(tmp_path, **SMALL, progress=lambda *what: told.append(what))
    check(found)
    assert "loopback: no network" in found.network.how
    assert str(tmp_path) in found.storage_write.how
    assert os.listdir(tmp_path) == []
    assert [what for what, done, total in told if done == total] == ["network", "copy", "storage"]
    assert all(0 <= done <= total for _, done, total in told)
    assert found.to_dict()["copy"]["bytes_per_sec"] == found.copy.bytes_per_sec


def _ranks(rank: int, world_size: int, directory: str) -> dict:
    found = measure(directory, **SMALL)
    check(found)
    return found.to_dict()


def test_ranks_send_to_one_another(tmp_path):
    one, two = run_ranks(_ranks, 2, str(tmp_path))
    assert one["network"] == two["network"]  # the slowest rank's, on all
    assert one["network"]["how"] == "gloo, each of 2 ranks to the next"
    assert os.listdir(tmp_path) == []


def test_median_and_spread_leave_the_first_repeat_out():
    rate = rates._rate("how", 100, [1000.0, 1.0, 4.0, 2.0])
    assert (rate.bytes_per_sec, rate.slowest_bytes_per_sec, rate.fastest_bytes_per_sec) == (50.0, 25.0, 100.0)
    assert rate.repeats == 3


def test_slower_links_have_lower_rates(tmp_path, no_network, monkeypatch):
    """What is timed is the write with its fsync, the read and the copy, and nothing else."""
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    monkeypatch.setattr(copying, "time", clock)

    def slowed(kind, name, secs):
        real = getattr(kind, name)

        def slow(*args, **more):
            clock.sleep(secs)
            return real(*args, **more)

        monkeypatch.setattr(kind, name, slow)

    slowed(LocalStorage, "write", 0.05)
    slowed(LocalStorage, "read", 0.02)
    slowed(Copier, "_copy", 0.01)  # called for each half
    found = measure(tmp_path, **SMALL)
    assert found.storage_write.bytes_per_sec == pytest.approx(MIB / 0.05)
    assert found.storage_read.bytes_per_sec == pytest.approx(MIB / 0.02)
    assert found.copy.bytes_per_sec == pytest.approx(MIB / 0.02)


@pytest.mark.parametrize(
    ("setting", "value"), [("copy_bytes", 0), ("repeats", 0), ("file_bytes", 1.5), ("repeats", True)]
)
def test_bad_numbers(tmp_path, setting, value):
    with pytest.raises(ConfigError, match=re.escape(f"measure({setting}={value!r})")):
        measure(tmp_path, **{**SMALL, setting: value})


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(ConfigError, match=f"{name}.*is not a directory"):
            measure(tmp_path / name, **SMALL)
    assert os.listdir(tmp_path) == ["file"]


def test_a_directory_that_cannot_be_written(no_network):
    with pytest.raises(StoreUnwritableError, match="/proc"):
        measure("/proc", **SMALL)


def test_too_little_room_is_seen_before_anything_is_written(tmp_path, no_network):
    room = os.statvfs(tmp_path)
    with pytest.raises(StoreUnwritableError, match="smaller file_bytes"):
        measure(tmp_path, **{**SMALL, "file_bytes": room.f_bavail * room.f_frsize})
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile_is_left_as_it_was(tmp_path, no_network):
    """A limit on the size of files fails the very write that a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
    try:
        with pytest.raises(StoreUnwritableError, match=r"file of 1,048,576 bytes.*smaller file_bytes"):
            measure(tmp_path, **SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path, no_network, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, **SMALL)
    assert os.listdir(tmp_path) == []


def test_processes_that_cannot_talk_are_an_error_and_end(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StoreError, match="two local processes could not communicate"):
        rates._loopback(MIB, 1)
    slow = [["/bin/sleep", "60"], ["/bin/sleep", "60"]]
    with pytest.raises(subprocess.TimeoutExpired), rates._started(slow) as processes:
        processes[0].communicate(timeout=0.05)
    assert [process.returncode for process in processes] == [-9, -9]
