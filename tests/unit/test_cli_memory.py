"""``moe-ckpt memory`` tells what lies there, and frees what nobody holds."""

from __future__ import annotations

import json
import shutil

import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.memory.directory import RankDirectory, holder_of
from moe_ckpt.memory.slot import STARTS_SUFFIX
from moe_ckpt.tiers import host_memory
from tests.support.spoiled import flip
from tests.unit.test_engine_memory import files, life, slots, train_and_fail, where  # noqa: F401 - a fixture
from tests.unit.test_engine_memory_only import make_nodes, replicated


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    yield
    host_memory.release_host_memory()


def told(capsys, *arguments: str) -> dict:
    code = main(["memory", *arguments, "--json"])
    return {"code": code, **json.loads(capsys.readouterr().out)}


def test_an_empty_directory(tmp_path, capsys):
    assert main(["memory", "--directory", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds nothing of this user\n"
    assert main(["memory", "clear", "--directory", str(tmp_path)]) == 0


def test_what_a_failed_run_left(where, capsys):  # noqa: F811
    train_and_fail(where)
    found = told(capsys, "--directory", str(where[1]))
    [rank] = found["ranks"]
    assert (rank["rank"], rank["generation"], rank["pid"]) == (0, 0, 0)
    assert rank["owner"]["store"] == str(where[0])
    assert {slot["step"] for slot in rank["slots"]} == {5, 6}, "5 is not released before 6 is complete everywhere"
    assert main(["memory", "--directory", str(where[1])]) == 0
    out = capsys.readouterr().out
    assert "nobody" in out
    assert main(["memory", "explain", "--directory", str(where[1])]) == 0
    assert "step 6" in (out := capsys.readouterr().out)
    assert "slices, all bytes intact" in out
    assert main(["memory", "clear", "--directory", str(where[1])]) == 0
    assert "freed" in capsys.readouterr().out
    assert files(where[1]) == []


def test_what_a_process_uses_is_shown_and_left_alone(where, capsys):  # noqa: F811
    with life(where) as only:
        only.go(3, settle=True)
        found = told(capsys, "--directory", str(where[1]))
        assert found["ranks"][0]["pid"] > 0
        before = files(where[1])
        assert main(["memory", "clear", "--directory", str(where[1])]) == 2, "what was asked for is not done"
        assert "a running process holds it, so nothing was changed" in capsys.readouterr().out
        assert files(where[1]) == before
        only.go(1, settle=True)


def test_of_a_run_that_a_process_uses_no_start_is_forgotten(where, capsys):  # noqa: F811
    """Not on the ranks either that have no process any more."""
    train_and_fail(where)
    slot = slots(where[1])[0]
    starts = slot.with_suffix(STARTS_SUFFIX)
    starts.write_bytes(b".")
    other = slot.parent.with_name("rank_00001")
    shutil.copytree(slot.parent, other)
    held = RankDirectory.take(other)
    assert main(["memory", "retry", "--directory", str(where[1])]) == 2
    assert "so nothing was changed" in capsys.readouterr().out
    assert starts.exists()
    held.release()
    assert main(["memory", "retry", "--directory", str(where[1])]) == 0
    assert not starts.exists()


def test_damage_is_found_and_named(where, capsys):  # noqa: F811
    train_and_fail(where)
    for slot in slots(where[1]):
        flip(slot)
    assert main(["memory", "--directory", str(where[1])]) == 0, "list reads no slice"
    capsys.readouterr()
    assert main(["memory", "explain", "--directory", str(where[1])]) == 1
    assert "checksum mismatch" in capsys.readouterr().out


def test_copies_are_told_from_what_is_a_rank_s_own(where, tmp_path, capsys):  # noqa: F811
    nodes = make_nodes(tmp_path, 2)
    replicated(where, nodes, steps=3)
    assert main(["memory", "explain", "--directory", str(nodes[0])]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "step 3 (copy of rank 1)," in out
    assert "step 3," in out
    [rank] = told(capsys, "--directory", str(nodes[0]))["ranks"]
    assert {slot["writer"] for slot in rank["slots"] if slot["step"] == 3} == {0, 1}


def test_only_the_runs_that_are_asked_for(where, capsys):  # noqa: F811
    train_and_fail(where)
    [rank] = told(capsys, "--directory", str(where[1]))["ranks"]
    said = f"no run whose ID starts with zz; there is {rank['run_id']}\n"
    for action, code in (("list", 0), ("explain", 0), ("clear", 2), ("retry", 2)):
        assert main(["memory", action, "--directory", str(where[1]), "--run", "zz"]) == code
        printed = capsys.readouterr()
        assert (printed.err if code else printed.out) == ("moe-ckpt memory: " if code else "") + said
    assert told(capsys, "--directory", str(where[1]), "--run", "zz")["ranks"] == []
    assert main(["memory", "clear", "--directory", str(where[1]), "--run", "zz", "--json"]) == 2
    assert files(where[1])
    assert main(["memory", "clear", "--directory", str(where[1]), "--run", rank["run_id"][:6]]) == 0
    assert not files(where[1])


def test_a_lock_is_seen_from_another_process(where):  # noqa: F811
    import multiprocessing

    context = multiprocessing.get_context("fork")
    with life(where) as only:
        only.go(1, settle=True)
        [path] = {each.parent for each in files(where[1])}
        receiver, sender = context.Pipe(duplex=False)

        def look():
            from moe_ckpt.memory import directory

            directory._owned.clear()  # a fork knows what its parent knew
            sender.send(holder_of(path))

        process = context.Process(target=look)
        process.start()
        process.join(120)
        import os

        assert receiver.recv() == os.getpid()
    assert holder_of(path) == 0
