"""The memory that a container or a scheduler's job leaves: both versions of cgroups, and every level."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_ckpt.memory.limits import cgroup_bytes, cores
from moe_ckpt.slices import checksums

UNLIMITED = str(0x7FFFFFFFFFFFF000)


def version_2(place: Path, limit: str, used: int, inactive: int = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{limit}\n")
    (place / "memory.current").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def version_1(place: Path, limit: str, used: int, inactive: int = 0) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (place / "memory.usage_in_bytes").write_text(f"{used}\n")
    (place / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def root(tmp_path: Path):
    """(root, /proc/self/cgroup): a process of a job's step, under either version."""
    own = tmp_path / "own"
    own.write_text("4:memory:/slurm/job_7/step_0\n3:cpu,cpuacct:/slurm\n0::/system.slice/job_7/step_0\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup", own


@pytest.mark.parametrize("place", ["system.slice/job_7/step_0", "system.slice/job_7", ""])
@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_quota_of_processors_bounds_threads(root, monkeypatch, place, files, count):
    """Of either version, at any level."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert cores(str(root[0]), str(root[1])) == 16
    cgroup = root[0] / place if "cpu.max" in files else root[0] / "cpu,cpuacct/slurm"
    cgroup.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (cgroup / name).write_text(text)
    assert cores(str(root[0]), str(root[1])) == (count or 16)
    monkeypatch.setattr(checksums, "cores", lambda: cores(str(root[0]), str(root[1])))
    assert checksums.checking_threads(1) == (count or 4)


def found(root: tuple[Path, Path], left_bytes: int = 0) -> int | None:
    return cgroup_bytes(str(root[0]), left_bytes, str(root[1]))


def test_without_limits(root):
    assert found(root) is None
    version_2(root[0] / "system.slice/job_7", "max", 400)
    version_1(root[0] / "memory/slurm", UNLIMITED, 400)
    assert found(root) is None


@pytest.mark.parametrize("place", ["system.slice/job_7/step_0", "system.slice/job_7", "system.slice", ""])
def test_the_limit_of_any_level_of_version_2(root, place: str):
    version_2(root[0] / place, "1000", 400)
    assert found(root) == 600


@pytest.mark.parametrize("place", ["slurm/job_7/step_0", "slurm", "", "."])
def test_the_limit_of_any_level_of_version_1(root, place: str):
    version_1(root[0] / "memory" / place, "1000", 400)
    assert found(root) == 600


def test_the_lowest_counts(root):
    version_2(root[0] / "system.slice/job_7/step_0", "1000", 400)
    version_2(root[0] / "system.slice/job_7", "3000", 2900)
    version_2(root[0] / "system.slice/another_job", "10", 10)
    assert found(root) == 100


def test_page_cache_that_nobody_uses_makes_room(root):
    version_2(root[0] / "system.slice/job_7", "1000", 900, inactive=500)
    assert found(root) == 600
    version_1(root[0] / "memory/slurm", "1000", 900, inactive=300)
    assert found(root) == 400
    assert found(root, left_bytes=200) == 600
    assert found(root, left_bytes=10_000) == 1000, "what was left may count elsewhere"


def test_page_cache_in_use_makes_room_where_that_is_asked(root):
    version_2(root[0] / "system.slice/job_7", "1000", 900, inactive=500)
    with (root[0] / "system.slice/job_7/memory.stat").open("a") as stat:
        stat.write("active_file 100\n")
    assert found(root) == 600
    assert cgroup_bytes(str(root[0]), 0, str(root[1]), any_cache=True) == 700


def test_nonsense_is_no_limit(root):
    version_2(root[0] / "system.slice", "rubbish", 1)
    version_1(root[0] / "memory", "-", 1)
    root[1].write_text("0::/system.slice\n\xff\n")
    assert found(root) is None
