"""Survivors of a kill -9 go on in the same processes, a spare in the dead one's place, as if nobody had died."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ckpt import inprocess
from moe_ckpt.errors import ConfigError, MissingPackageError, UnsupportedError
from tests.integration.lives import free_port
from tests.megatron.exactness import differing, uninterrupted
from tests.megatron.test_exact import EXPERTS_DATA, PIPELINE_EXPERTS, SHARDED
from tests.support import warm
from tests.support.inprocess_job import LIFE_SECS, launch, lines, logs, needs_extension, require_one_process
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import EXACT


@dataclass(frozen=True)
class Job:
    """kills: (first rank, iteration, how often its function was called before) of every SIGKILL. delay: before them."""

    setup: Setup
    ranks: int
    spares: int
    kills: tuple[tuple[int, int, int], ...]
    policy: tuple[str, dict[str, Any]] = ("Dense", {"every_n_steps": 1})
    steps: int = 8
    delay: float = 0.0


def start(job: Job, directory: Path) -> list[int]:
    """Exit codes by the rank that each process began as."""
    memory = directory / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    told = {
        "out": str(directory / "out"),
        "store": str(directory / "store"),
        "memory": str(memory),
        "ranks": job.ranks,
        "setup": asdict(job.setup),
        "policy": job.policy[0],
        "arguments": job.policy[1],
        "steps": job.steps,
        "kills": job.kills,
        "delay": job.delay,
    }
    return launch("tests.support.inprocess_run", told, job.ranks + job.spares, directory, warm.python(warm.MEGATRON))


def require_exact(job: Job, directory: Path) -> None:
    expected = uninterrupted(job.setup, job.ranks, job.steps)
    found = {each["rank"]: each for each in map(torch.load, sorted(map(str, directory.glob("out*"))))}
    assert sorted(found) == list(range(job.ranks)), logs(directory)
    for rank, each in found.items():
        for what in EXACT:
            assert differing(expected[rank][what], each[what]) == [], f"rank {rank}: {what}"


JOBS = {
    "experts": Job(Setup(**EXPERTS_DATA), 2, 1, ((1, 5, 0),)),
    "sharded-twice": Job(Setup(**EXPERTS_DATA, **SHARDED), 2, 2, ((1, 4, 0), (3, 7, 1)), steps=9),
    "windows": Job(Setup(**EXPERTS_DATA), 2, 1, ((1, 8, 0),), ("MoEvement", {"window": 3}), steps=10),
    "pipeline": Job(Setup(**PIPELINE_EXPERTS), 4, 1, ((2, 5, 0),)),
    "log": Job(Setup(**EXPERTS_DATA, **SHARDED), 2, 1, ((1, 6, 0),), ("GradientLog", {"window": 3}), delay=0.5),
}


@needs_extension
@pytest.mark.parametrize("name", [n if n == "experts" else pytest.param(n, marks=pytest.mark.slow) for n in JOBS])
def test_survivors_go_on_in_their_processes(name, tmp_path):
    job = JOBS[name]
    codes = start(job, tmp_path)
    killed = {rank for rank, _, _ in job.kills}
    assert [code != 0 for code in codes] == [rank in killed for rank in range(len(codes))], logs(tmp_path)
    require_exact(job, tmp_path)
    most_lost = 2 * job.policy[1]["window"] if job.policy[0] == "MoEvement" else 1
    require_one_process(lines(tmp_path, 0), 1 + len(job.kills), most_lost)
    if name == "log":
        [_, back] = [line for line in lines(tmp_path, 0) if "call" in line]
        assert back["resumed"] == 5
        assert back["remade"] is not None, "the spare comes along the log, and the survivor with it"


@needs_extension
@pytest.mark.slow
def test_without_a_spare_all_end_and_the_next_start_goes_on_from_memory(tmp_path):
    job = Job(Setup(**EXPERTS_DATA), 2, 0, ((1, 5, 0),))
    codes = start(job, tmp_path)
    assert all(codes), logs(tmp_path)
    again = Job(job.setup, 2, 0, ())
    assert start(again, tmp_path) == [0, 0], logs(tmp_path)
    require_exact(job, tmp_path)
    assert [line["resumed"] for line in lines(tmp_path, 0) if "call" in line] in ([0, 3], [0, 4])


@needs_extension
def test_what_the_user_must_mend_is_not_tried_again(tmp_path):
    job = Job(Setup(**EXPERTS_DATA), 2, 0, (), ("MoEvement", {"window": 0}))
    assert all(start(job, tmp_path))
    for rank in range(2):
        assert "RestartAbort" in (tmp_path / f"log{rank}").read_text()
        assert len(lines(tmp_path, rank)) == 1, "its function was called once"


def test_what_is_no_checkpoint_is_refused():
    restart = inprocess.Restart(SimpleNamespace(iteration=0))
    with pytest.raises(UnsupportedError, match=r"object.*MoECheckpoint callback"), restart.keeping(object()):
        pass


LATE = """
import os, sys
from moe_ckpt import inprocess

@inprocess.restartable()
def train(restart):
    print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"])

os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
train()
"""


@needs_extension
def test_a_script_may_name_the_ranks_after_it_has_decorated_its_function():
    """As those do that srun starts, whose variables have other names."""
    port, others = str(free_port()), {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    others.pop("WORLD_SIZE", None)
    commands = [[sys.executable, "-W", "ignore", "-c", LATE, str(rank), port] for rank in range(2)]
    processes = [subprocess.Popen(command, env=others, stdout=subprocess.PIPE, text=True) for command in commands]
    assert [process.communicate(timeout=LIFE_SECS)[0] for process in processes] == ["0 of 2\n", "1 of 2\n"]


def test_torchrun_is_refused(monkeypatch):
    pytest.importorskip("nvidia_resiliency_ext.inprocess", reason="pip install 'moe_ckpt[inprocess]'")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ConfigError, match="torchrun stops all processes"):
        inprocess.restartable(1)(lambda restart: None)()


def test_bad_arguments(monkeypatch):
    pytest.importorskip("nvidia_resiliency_ext.inprocess", reason="pip install 'moe_ckpt[inprocess]'")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        inprocess.restartable(3)(lambda restart: None)()
    with pytest.raises(ConfigError, match="rank_assignment"):
        inprocess.restartable(2, rank_assignment=None)


def test_without_the_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.inprocess", None)
    with pytest.raises(MissingPackageError, match=r"moe_ckpt\[inprocess\]"):
        inprocess.restartable(2)
