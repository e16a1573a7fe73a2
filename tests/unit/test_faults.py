"""The fault tools themselves: they must break exactly what they say, and only once."""

import errno
import signal
import subprocess
import sys

import pytest

from moe_ckpt.errors import ConfigError, StoreUnwritableError
from moe_ckpt.storage import LocalStorage, Storage
from moe_ckpt.testing import PHASES, FaultyStorage, Kill, KillSchedule, crash_at


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def use_every_verb(storage):
    storage.write("d/f", [b"abc"])
    storage.read("d/f", 1, 1)
    storage.size("d/f")
    storage.list("d")
    storage.exists("d/f")
    storage.delete("d/f")
    storage.clean_temporaries("d")
    storage.delete_dir("d")


def test_a_faulty_storage_without_a_fault_is_the_storage_itself(storage):
    faulty = FaultyStorage(storage, fail_at=None)
    assert isinstance(faulty, Storage)
    assert faulty.root == storage.root
    faulty.probe()
    assert faulty.write("d/f", [b"abc"]) == 3
    assert faulty.read("d/f", 1, 1) == b"b"
    assert faulty.size("d/f") == 3
    assert faulty.list("d") == ["f"]
    assert faulty.exists("d/f")
    faulty.delete("d/f")
    faulty.delete_dir("d")
    assert faulty.clean_temporaries("") == 0
    assert storage.list() == []
    assert len(faulty.calls) == 9
    assert faulty.calls[:2] == [("probe", ""), ("write", "d/f")]
    assert faulty.failures == 0


def test_every_verb_can_be_the_nth_call(storage):
    failed = []
    for n in range(1, 9):
        faulty = FaultyStorage(storage, n)
        with pytest.raises(OSError, match="injected") as raised:
            use_every_verb(faulty)
        assert raised.value.errno == errno.EIO
        failed.append(faulty.calls[-1][0])
        assert faulty.failures == 1
        storage.delete("d/f")
    assert failed == ["write", "read", "size", "list", "exists", "delete", "clean_temporaries", "delete_dir"]
    use_every_verb(FaultyStorage(storage, 9))


def test_a_failing_probe_keeps_its_contract(storage):
    with pytest.raises(StoreUnwritableError, match=r"cannot be written: .*injected"):
        FaultyStorage(storage, 1).probe()


def test_once_or_persistent(storage):
    once = FaultyStorage(storage, 2)
    outcomes = [_works(once) for _ in range(4)]
    assert outcomes == [True, False, True, True]
    dead = FaultyStorage(storage, 2, OSError(errno.ENOSPC, "full"), persistent=True)
    assert [_works(dead) for _ in range(4)] == [True, False, False, False]
    assert dead.failures == 3


def test_only_chosen_verbs_are_counted(storage):
    faulty = FaultyStorage(storage, 1, verbs={"write"})
    assert _works(faulty)
    with pytest.raises(OSError, match="injected"):
        faulty.write("d/f", [b"x"])
    assert not storage.exists("d/f")


def test_the_given_error_is_raised_afresh(storage):
    error = OSError(errno.ENOSPC, "disk full")
    dead = FaultyStorage(storage, 1, error, persistent=True)
    raised = []
    for _ in range(2):
        with pytest.raises(OSError, match="disk full") as caught:
            dead.list()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert {e.errno for e in raised} == {errno.ENOSPC}


def test_bad_arguments_are_refused(storage):
    with pytest.raises(ConfigError, match="fail_at=0"):
        FaultyStorage(storage, 0)
    with pytest.raises(ConfigError, match=r"unknown phase 'sync'; the phases are compute, copy"):
        crash_at("sync")
    with pytest.raises(ConfigError, match="n=0"):
        crash_at("write", 0)
    with pytest.raises(ConfigError, match="4 kills do not fit into the 3 steps from 1 to 3"):
        KillSchedule.draw(0, 4, 1, 1, 3)
    with pytest.raises(ConfigError, match="unknown phase 'x'"):
        KillSchedule.draw(0, 1, 1, 1, 3, phases=("x",))
    for text in ("no json", '[{"rank": 1}]', "3", '[{"step": 1, "rank": 0, "phase": "x"}]'):
        with pytest.raises(ConfigError):
            KillSchedule.from_json(text)


def test_crash_at_the_nth_time_only():
    killed = []
    on_phase = crash_at("rename", 2, kill=lambda: killed.append(seen[-1]))
    seen = []
    for phase in ["write", "rename", "write", "rename", "rename"]:
        seen.append(f"{len(seen)}{phase}")
        on_phase(phase)
    assert killed == ["3rename"]


@pytest.mark.usefixtures("warm_programs")
def test_crash_at_is_a_real_kill_minus_nine():
    code = (
        "import atexit; atexit.register(print, 'cleanup'); "
        "from moe_ckpt.testing import crash_at; crash_at('copy')('copy')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_draws_are_repeatable_spread_and_possible():
    schedule = KillSchedule.draw(7, 40, 3, 10, 99)
    assert schedule == KillSchedule.draw(7, 40, 3, 10, 99)
    assert schedule != KillSchedule.draw(8, 40, 3, 10, 99)
    drawn = [kill.step for kill in schedule.kills]
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 40
    assert 10 <= drawn[0] <= drawn[-1] <= 99
    assert {kill.phase for kill in schedule.kills} == set(PHASES)
    assert {kill.rank for kill in schedule.kills} == {0, 1, 2}
    assert all(kill.rank == 0 for kill in schedule.kills if kill.phase in ("manifest", "gc"))
    assert KillSchedule.draw(1, 0, 1, 1, 1).kills == ()


def test_the_last_kills_lose_their_nodes_and_the_others_stay_as_they_are():
    alone, lost = (KillSchedule.draw(7, 4, 3, 10, 99, nodes=nodes).kills for nodes in (0, 2))
    assert [kill.node for kill in lost] == [False, False, True, True]
    assert [(k.step, k.rank, k.phase) for k in lost] == [(k.step, k.rank, k.phase) for k in alone]
    assert KillSchedule.from_json(KillSchedule(lost).to_json()).kills == lost
    with pytest.raises(ConfigError, match="nodes=5 says how many of the 4 kills"):
        KillSchedule.draw(7, 4, 3, 10, 99, nodes=5)
    with pytest.raises(ConfigError, match=r"rank 2 is to be lost in step 3; node_memory="):
        KillSchedule((Kill(3, 2, "compute", node=True),)).hook(2, "kills")


def test_a_lost_node_takes_its_memory_along_and_no_other(tmp_path):
    for name in ("node_0", "node_1"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "slot").write_bytes(b"x")
    schedule = KillSchedule((Kill(3, 1, "compute"), Kill(4, 1, "compute", node=True)))
    seen = []

    def life(step):
        died_with = lambda: seen.append(sorted(path.name for path in tmp_path.glob("node_*")))  # noqa: E731
        schedule.hook(1, tmp_path / "kills", kill=died_with, node_memory=tmp_path / "node_1").on_step(step)

    life(3)
    life(4)
    life(5)
    assert seen == [["node_0", "node_1"], ["node_0"]]
    assert schedule.fired(tmp_path / "kills") == schedule.kills


def test_json_round_trip():
    schedule = KillSchedule.draw(3, 5, 2, 1, 50, phases=("compute", "write"))
    assert KillSchedule.from_json(schedule.to_json()) == schedule


def test_each_kill_happens_once_over_restarts(tmp_path):
    memory = tmp_path / "kills.jsonl"
    schedule = KillSchedule((Kill(3, 0, "compute"), Kill(3, 0, "write"), Kill(4, 1, "compute"), Kill(5, 0, "gc")))

    class Killed(BaseException):
        pass

    def die():
        raise Killed

    def life(rank):
        """Steps 1 to 6, the phases of each; where it died, or None."""
        hook = schedule.hook(rank, memory, kill=die)
        at = None
        try:
            for step in range(1, 7):
                at = (step, "compute")
                hook.on_step(step)
                for phase in ("copy", "write", "rename") + (("gc",) if step % 4 == 2 else ()):
                    at = (step, phase)
                    hook.on_phase(phase)
        except Killed:
            return at
        return None

    assert [life(0) for _ in range(4)] == [(3, "compute"), (3, "write"), (6, "gc"), None]
    assert [life(1) for _ in range(2)] == [(4, "compute"), None]
    assert life(2) is None
    assert schedule.fired(memory) == (
        Kill(3, 0, "compute"), Kill(3, 0, "write"), Kill(5, 0, "gc"), Kill(4, 1, "compute"),
    )  # fmt: skip


def test_nothing_is_killed_before_the_first_step(tmp_path):
    killed = []
    hook = KillSchedule((Kill(0, 0, "write"),)).hook(0, tmp_path / "m", kill=lambda: killed.append(1))
    hook.on_phase("write")
    assert killed == []
    hook.on_step(0)
    hook.on_phase("write")
    hook.on_phase("write")
    assert killed == [1]


JOB = """
import sys
from moe_ckpt.storage import LocalStorage
from moe_ckpt.testing import KillSchedule
hook = KillSchedule.from_json(sys.argv[2]).hook(0, sys.argv[1] + "/kills.jsonl")
storage = LocalStorage(sys.argv[1], hook.on_phase)
for step in range(1, 6):
    hook.on_step(step)
    if not storage.exists(f"step/{step}"):
        storage.write(f"step/{step}", [b"x"])
"""


@pytest.mark.usefixtures("warm_programs")
def test_a_restarted_job_gets_through_its_kills(tmp_path):
    schedule = KillSchedule((Kill(2, 0, "compute"), Kill(2, 0, "rename"), Kill(4, 0, "fsync")))
    codes = []
    while not codes or codes[-1]:
        assert len(codes) < 9, "killed again at the same place"
        command = [sys.executable, "-c", JOB, str(tmp_path), schedule.to_json()]
        codes.append(subprocess.run(command, check=False, timeout=300).returncode)
    assert codes == [-signal.SIGKILL] * 3 + [0]
    assert schedule.fired(tmp_path / "kills.jsonl") == schedule.kills
    storage = LocalStorage(tmp_path)
    storage.clean_temporaries("step")
    assert storage.list("step") == ["1", "2", "3", "4", "5"]


def _works(storage):
    try:
        storage.list()
    except OSError:
        return False
    return True
