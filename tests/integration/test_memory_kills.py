"""Memory slots under kill -9: the run ends as if nothing had happened, and what they hold is not read from storage."""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.cli.main import main
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    committed,
    events,
    forget,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    split_lives,
)
from tests.support.spoiled import spoil_experts

WAIT = {"when_busy": "wait"}
DENSE = Run(None, policy=("dense", 1), callback=WAIT)
PHASES = ("copy", "write", "fsync", "rename", "manifest", "gc", "compute")


def in_memory(run: Run, place: Path) -> Run:  # noqa: F811
    memory = place / "memory"
    memory.mkdir(exist_ok=True)
    return replace(placed(run, place), memory=str(memory))


def kill_often(run: Run, rng: random.Random) -> None:
    """Kills up to ten lives at random moments, at least one, and lets the next one end.

    Three in a row may not get as far as a step on a machine under load; then it is as the message says.
    """
    kills, code = 0, KILLED
    while not kills:
        while kills < 10 and (code := live(run, rng.uniform(0.02, 0.3))) == KILLED:
            kills += 1
            retry(run)
        if not kills:  # the first life came to its end before it was killed: all begins anew
            forget(run)
    print(f"{kills} lives were killed")
    assert code == 0 or live(run) == 0, output(run)


def retry(run: Run) -> None:
    """Lives that are killed before their first step are no loop, which the library cannot know."""
    for node in Path(run.memory).iterdir() if run.replicas else [run.memory]:
        assert main(["memory", "retry", "--directory", str(node)]) == 0


def left(run: Run) -> list[Path]:
    return [path for path in Path(run.memory).rglob("*") if path.is_file()]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.quick("copy", "write", "manifest", "compute")
def test_killed_in_a_phase_the_run_goes_on_from_memory(phase, place):  # noqa: F811
    run = in_memory(DENSE, place)
    assert live(replace(run, crash=(phase, 9))) == KILLED, output(run)
    assert [path for path in left(run) if path.suffix == ".head"], "something survived"
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    assert left(run) == [], "a clean end leaves nothing"


def test_what_a_finished_run_left_is_removed_by_a_start_that_trains_nothing(place):  # noqa: F811
    """The store says that the run ended, and then the process died before it had removed its slots."""
    run = in_memory(DENSE, place)
    assert live(replace(run, crash=("end", 1))) == KILLED, output(run)
    assert left(run)
    assert live(run) == 0, output(run)
    assert "nothing is left to train" in output(run)
    assert_same_run(run)
    assert left(run) == [], output(run)


def test_no_expert_is_read_from_storage_that_memory_holds(place):  # noqa: F811
    run = in_memory(DENSE, place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    newest = committed(run.store)[-1]
    spoil_experts(Path(run.store, newest))
    assert live(run) == 0, output(run)
    assert "damaged" not in output(run)
    step = split_lives(events(run))[-1][0]["step"]
    assert step >= int(newest.split("_")[1]), "which is damaged on storage; memory may be a step ahead of it"
    assert_same_run(run)


def test_without_memory_the_same_damage_costs_a_checkpoint(place):  # noqa: F811
    """So the test above can fail."""
    run = placed(DENSE, place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    newest = committed(run.store)[-1]
    spoil_experts(Path(run.store, newest))
    assert live(run) == 0, output(run)
    assert split_lives(events(run))[-1][0]["step"] < int(newest.split("_")[1])


def test_a_node_that_lost_its_memory_reads_storage(place):  # noqa: F811
    run = in_memory(DENSE, place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    for path in left(run):
        path.unlink()
    assert live(run) == 0, output(run)
    assert_same_run(run)


def test_moc_loses_no_token_while_memory_holds_what_storage_does_not(place):  # noqa: F811
    """K = 1 on storage, all four in memory: as exact as a dense checkpoint, until memory is lost."""
    run = in_memory(replace(DENSE, policy=("moc", 1), options={"snapshot_k": 4}), place)
    for crash in (("compute", 9), ("write", 12), ("manifest", 8)):
        assert live(replace(run, crash=crash)) == KILLED, output(run)
        life = split_lives(events(run))[-1][0]
        assert life["step"] is None or life["lost"] == 0
    assert live(run) == 0, output(run)
    assert_same_run(run)


@pytest.mark.parametrize("policy", [("moc", 1), ("moetion", 1)])
@pytest.mark.quick("policy0")
def test_what_is_known_to_be_damaged_is_not_built_upon(policy, place):  # noqa: F811
    """Memory has the experts of the damaged shard, whose round is longer than the life that begins from there.

    Memory may also have all experts as new as storage has them, as far as it came before the kill: then nobody reads
    the damaged shard, and it is tried again.
    """
    options = {"experts": 1} if policy[0] == "moetion" else {}
    policy = ("moetion in turn", policy[1]) if policy[0] == "moetion" else policy
    for number in range(8):
        directory = place / str(number)
        directory.mkdir()
        run = in_memory(replace(DENSE, policy=policy, options=options), directory)
        assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
        spoil_experts(Path(run.store, committed(run.store)[-2]))
        assert live(replace(run, crash=("manifest", 3))) == KILLED, output(run)
        if "Memory has what was in it" in output(run):
            break
    else:
        pytest.fail("no start has read the damaged shard")
    newest = committed(run.store)[-1]
    assert newest.endswith("_g1")
    for path in left(run):
        path.unlink()
    assert live(run) == 0, output(run)
    assert split_lives(events(run))[-1][0]["step"] == int(newest.split("_")[1])


def test_moc_loses_tokens_when_memory_is_lost(place):  # noqa: F811
    run = in_memory(replace(DENSE, policy=("moc", 1), options={"snapshot_k": 4}), place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    for path in left(run):
        path.unlink()
    assert live(run) == 0, output(run)
    assert split_lives(events(run))[-1][0]["lost"] > 0


@pytest.fixture
def small(request, tmp_path):
    """A tmpfs of so many bytes. Only root can mount one, and not in every container."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no tmpfs of its own can be mounted here: {made.stderr.strip()}; run this test as root")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("small", "for_weights_too"), [(40_960, True), (262_144, True), (393_216, False)], indirect=["small"]
)
@pytest.mark.quick("40960-True", "393216-False")
def test_a_tmpfs_that_is_too_small_costs_memory_and_not_the_run(small, for_weights_too, place):  # noqa: F811
    """No SIGBUS: what does not fit lies in private memory, and storage has it all the same.

    Where weights and optimizer state alone do not fit, it is said before training.
    """
    run = replace(placed(DENSE, place), memory=str(small))
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    said = re.search(r"has [\d,]+ bytes free, and the slots .* will need about [\d,]+: .*--shm-size", output(run))
    assert (said is not None) == for_weights_too, output(run)
    assert said is None or said.start() < output(run).index("training starts from scratch")
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random_times(seed, place):  # noqa: F811
    rng = random.Random(seed)
    run = in_memory(replace(DENSE, epochs=3), place)
    kill_often(run, rng)
    assert_same_run(run)
    assert_promises_kept(run)
    assert left(run) == []


@pytest.mark.slow
def test_two_ranks_killed_together(place):  # noqa: F811
    run = in_memory(replace(DENSE, ranks=2), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 9)))
    assert live_ranks(run) == [0, 0], output(run)
    assert_same_run(run)
    assert left(run) == []
