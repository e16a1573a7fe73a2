"""How copies on peers begin: what ranks tell one another, and which of it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_ckpt import Memory
from moe_ckpt.errors import ConfigError, StoreError
from moe_ckpt.memory import directory
from moe_ckpt.memory.directory import node_of
from moe_ckpt.peers.replication import open_replication
from tests.unit.engine_parts import ThreadRanks, run_threads

TIMEOUT_SECS = 30.0


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def no_slots(nbytes: int):
    raise AssertionError("nobody sends anything")


def begin(root: Path, ranks: int, choose) -> list:
    """Per rank what opening gave: who holds its copies, None, or the error. choose: rank -> settings, a node each."""

    def one(comm):
        node = root / f"node_{choose(comm.rank).pop('node', comm.rank)}"
        node.mkdir(exist_ok=True)
        chosen = {key: value for key, value in choose(comm.rank).items() if key != "node"}
        try:
            made = open_replication(comm, Memory(directory=node, **chosen), "run", 3, no_slots, TIMEOUT_SECS)
        except (ConfigError, StoreError) as error:
            return error
        if made is None:
            return None
        assert made.close(TIMEOUT_SECS)
        return made.roster

    threads = {each.name for each in threading.enumerate()}
    found = run_threads(ThreadRanks(ranks), one)
    left = {each.name for each in threading.enumerate()} - threads
    assert not any(name.startswith("moe_ckpt-replicate") for name in left)
    return found


def test_every_rank_knows_the_same(tmp_path):
    rosters = begin(tmp_path, 4, lambda rank: {"replicas": 1, "failure_domain": f"rack{rank // 2}"})
    assert [roster.rank for roster in rosters] == [0, 1, 2, 3]
    assert len({(r.placement, r.addresses, r.secret, r.generation) for r in rosters}) == 1
    assert rosters[0].placement.peers_of == ((2,), (3,), (0,), (1,))
    assert {host for host, _ in rosters[0].addresses} == {"127.0.0.1"}


def test_ranks_of_one_directory_are_one_node(tmp_path):
    rosters = begin(tmp_path, 4, lambda rank: {"replicas": 1, "node": rank % 2})
    assert rosters[0].placement.peers_of == ((1,), (0,), (3,), (2,))
    (tmp_path / "link").symlink_to(tmp_path / "node_0")
    assert node_of(str(tmp_path / "link")) == node_of(str(tmp_path / "node_0")) != node_of(str(tmp_path / "node_1"))


def test_a_machine_of_several_names_is_one_node(tmp_path):
    """Containers with --ipc=host: each has a host name of its own, and all have the machine's /dev/shm."""
    elsewhere = ["unshare", "--user", "--map-root-user", "--uts", "--"]
    if subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace for a host name can be made here")
    named = "import socket, sys; socket.sethostname('elsewhere'); from moe_ckpt.memory.directory import node_of; "
    asks = [*elsewhere, sys.executable, "-c", named + "print(node_of(sys.argv[1]))", str(tmp_path)]
    found = subprocess.run(asks, capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == node_of(str(tmp_path))


def test_names_of_machines_count_where_the_kernel_does_not_tell_them_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "boot_id", lambda: "")
    names = []
    for name in ("a", "b"):
        monkeypatch.setattr(directory.socket, "gethostname", lambda name=name: name)
        names.append(node_of(str(tmp_path)))
    assert names[0] != names[1]


def test_no_copies_need_no_peers(tmp_path):
    assert begin(tmp_path, 2, lambda _: {}) == [None, None]
    assert begin(tmp_path, 1, lambda _: {}) == [None]


@pytest.mark.parametrize(
    ("ranks", "choose", "said"),
    [
        (2, lambda rank: {"replicas": rank}, "replicas=0 on rank 0, replicas=1 on rank 1"),
        (2, lambda _: {"replicas": 1, "node": 0}, r"replicas=1.*0 other nodes \(1 in all\)"),
        (3, lambda _: {"replicas": 3}, r"replicas=3.*2 other nodes \(3 in all\)"),
        (1, lambda _: {"replicas": 1}, r"replicas=1.*0 other nodes \(1 in all\)"),
        (2, lambda _: {"replicas": 1, "failure_domain": "r"}, "failure_domain='r'.*all 2 nodes"),
        (
            2,
            lambda rank: {"replicas": 1, "failure_domain": "r" if rank else None},
            "failure_domain=None on rank 0, failure_domain=a name on rank 1",
        ),
        (
            3,
            lambda rank: {"replicas": 1, "failure_domain": f"r{rank}", "node": rank // 2},
            "rank 1 says 'r1', and rank 0, on the same node .*, says 'r0'",
        ),
    ],
)
def test_what_cannot_be_is_said_alike_on_every_rank(tmp_path, ranks, choose, said):
    errors = begin(tmp_path, ranks, choose)
    assert {type(error) for error in errors} == {ConfigError}
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(ConfigError, match=said):
        raise errors[0]


def test_a_rank_that_cannot_listen_stops_all(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_ckpt.peers.wire.own_address", lambda: "192.0.2.1")  # of no network
    errors = begin(tmp_path, 2, lambda _: {"replicas": 1})
    assert {type(error) for error in errors} == {StoreError}
    assert str(errors[0]) == str(errors[1])
    assert "cannot take copies of peers" in str(errors[0])


def test_fewer_nodes_outside_a_domain_than_copies_are_a_warning_with_numbers(tmp_path, caplog):
    rosters = begin(tmp_path, 4, lambda rank: {"replicas": 2, "failure_domain": f"rack{rank // 3}"})
    assert rosters[0].placement.short == (0, 1, 2)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("Memory(replicas=2): 3 of 4 ranks (ranks 0, 1, 2) have fewer copies, at least 1")


def test_everybody_hears_of_everyone():
    payloads = [b"", b"\x00", bytes(range(256)) * 3, b"x" * 7]
    assert run_threads(ThreadRanks(4), lambda comm: comm.everyone(payloads[comm.rank])) == [payloads] * 4
    assert run_threads(ThreadRanks(2), lambda comm: comm.everyone(b"")) == [[b"", b""]] * 2
