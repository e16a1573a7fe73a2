"""Training that is stopped by an exception or SIGTERM goes on from its newest step, whatever the policy saved of it."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.cli.main import main
from moe_ckpt.format.slot import decode_slot
from moe_ckpt.memory.options import TORCHRUN_GRACE_SECS
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    LIFE_SECS,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    events,
    exit_code,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    recomputed,
    split_lives,
    start,
    started_ranks,
)
from tests.integration.test_gradient_log import LOG
from tests.integration.test_memory_kills import DENSE, in_memory, left
from tests.integration.test_memory_layouts import under_way
from tests.integration.test_memory_rarely_stored import RARELY, restored
from tests.integration.test_moevement_kills import WINDOWS

LAUNCHER_SECS = 120.0
"""Until ranks that live on, and have not heard of it, are terminated."""
POLICIES = {
    "dense every step": replace(DENSE, to_storage=RARELY),
    "dense rarely": replace(DENSE, policy=("dense", 100)),
    "moc": replace(DENSE, policy=("moc", 1), to_storage=RARELY),
    "moc stored": replace(DENSE, policy=("moc", 1)),
    "moetion": replace(DENSE, policy=("moetion", 1), options={"experts": 1}, to_storage=RARELY),
    "moetion stored": replace(DENSE, policy=("moetion", 1), options={"experts": 1}),
    "moevement": replace(WINDOWS, to_storage=RARELY),
}
SLOW_TOO = [
    pytest.param(policy, marks=pytest.mark.slow) if policy.startswith("moetion") else policy for policy in POLICIES
]
every_policy = pytest.mark.parametrize("policy", SLOW_TOO)


def said(run: Run) -> str:
    """All that every life said."""
    return Path(f"{run.log}.txt").read_text()


@every_policy
@pytest.mark.parametrize("how", ["raise", "sigterm"])
@pytest.mark.quick(
    "raise-dense every step",
    "raise-dense rarely",
    "raise-moc",
    "raise-moc stored",
    "raise-moevement",
    "sigterm-dense every step",
)
def test_the_run_goes_on_from_the_newest_step(policy, how, place):  # noqa: F811
    run = in_memory(POLICIES[policy], place)
    for n in (9, 4):
        before = len(events(run))
        assert exit_code(replace(run, crash=(how, n))) == (how == "raise"), "Lightning's own for SIGTERM is 0"
        assert not Path(run.out).exists()
        done = [line["step"] for line in events(run)[before:] if line["event"] == "batch"][-1]
        assert f"keeps its state of step {done} in memory" in said(run)
    assert live(run) == 0, output(run)
    assert restored(run) == done
    assert split_lives(events(run))[-1][0].get("lost", 0) == 0
    assert_same_run(run)
    assert_promises_kept(run)
    assert_store_sound(run, ended=True)
    assert max(recomputed(run)) <= 1
    assert left(run) == []


def lose(
    run: Run,
    victim: int,
    n: int | None = None,
    secs: float = 0.0,
    how: str = "forward",
    beside: tuple[int, ...] = (),
    alike: tuple[int, ...] = (),
    lines: int = 1,
) -> list[int]:
    """Exit codes of the ranks under DDP: one dies at its ``n``-th backward pass, and so do those ``alike``; or so many
    seconds after so many events of this life, wherever it is, and others ``beside`` it; the rest hear of it.

    Not always: in some broadcasts of Gloo those that live on wait for each other. Whoever waits for long is terminated,
    as torchrun does at once."""
    seen = len(events(run))
    crash_of = lambda rank: (how, n) if n is not None and rank in (victim, *alike) else None  # noqa: E731
    with started_ranks(run, crash_of) as started:
        if n is None:
            while started[victim].is_alive() and len(events(run)) < seen + lines:
                time.sleep(0.002)
            started[victim].join(secs)
            for rank in (victim, *beside):
                started[rank].kill()
        for secs, end in ((LAUNCHER_SECS, "terminate"), (TORCHRUN_GRACE_SECS, "kill")):
            until = time.monotonic() + secs
            for process in started:
                process.join(max(0.0, until - time.monotonic()))
            for process in started:
                getattr(process, end)()
        return [process.exitcode for process in started]


@pytest.mark.parametrize("n", [9, pytest.param(4, marks=pytest.mark.slow)])
@every_policy
@pytest.mark.quick("dense rarely-9", "moc-9", "moevement-9")
def test_nothing_is_lost_that_a_data_parallel_rank_has(policy, n, place):  # noqa: F811
    """MoC saves one expert of four at each step, the rare dense policy nothing: the rank that lives on seals what both
    write, and the other one has sealed its plain state."""
    run = in_memory(replace(POLICIES[policy], ranks=2), place)
    assert lose(run, 1, n) == [1, KILLED]
    assert f"keeps its state of step {n - 1} in memory" in said(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == n - 1
    assert split_lives(events(run))[-1][0].get("lost", 0) == 0
    assert_same_run(run)
    assert left(run) == []


@every_policy
@pytest.mark.quick("dense rarely", "moc stored")
def test_tokens_that_the_ranks_had_not_agreed_on_are_summed_at_the_return(policy, place, tmp_path):  # noqa: F811
    """The dead rank had ended its step, and told nobody its tokens: each rank's own lie beside its state."""
    run = in_memory(replace(POLICIES[policy], ranks=2), place)
    assert lose(run, 1, 9, how="ended") == [1, KILLED]
    assert "rank 0 keeps its state of step 9 in memory" in said(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == 9, said(run)
    assert split_lives(events(run))[-1][0].get("lost", 0) == 0
    assert max(recomputed(run)) == 0
    assert_same_run(run)
    alone = in_memory(replace(POLICIES[policy], ranks=2), tmp_path)
    assert live_ranks(alone) == [0, 0]
    assert events(run)[-1]["applied"] == events(alone)[-1]["applied"]
    assert left(run) == []


SAVED_AT_EACH_STEP = [policy for policy in POLICIES if policy not in ("dense rarely", "moevement")]


ANY = range(10**6)
"""Batches: a rank may have died between the loss and the line of any."""
IN_AN_UPDATE = ("reduced", "updating", "updated", "hook")
BACK_TO = {"dense rarely": None, "moevement": 6}
"""Newest checkpoint before step 9 that every rank has; of other policies that of step 8."""
QUICK_ENOUGH = {("dense every step", "reduced"), ("moc", "updating"), ("dense rarely", "updated")}
QUICK_ENOUGH |= {("moevement", "hook")}
in_every_update = pytest.mark.parametrize(
    ("policy", "how"),
    [
        pytest.param(policy, how, marks=() if (policy, how) in QUICK_ENOUGH else pytest.mark.slow)
        for policy in POLICIES
        for how in IN_AN_UPDATE
    ],
)


@in_every_update
def test_a_rank_of_ddp_that_dies_in_an_update_that_the_others_end_takes_all_back(how, policy, place):  # noqa: F811
    """The others stand one step further, and nobody has the dead rank's plain state of it: all meet at the newest
    checkpoint that every rank has."""
    run = in_memory(replace(POLICIES[policy], ranks=2), place)
    assert lose(run, 1, 9, how=how) == [1, KILLED]
    assert "rank 0 keeps its state of step 9 in memory" in said(run)
    assert live_ranks(run) == [0, 0], output(run)
    step = BACK_TO.get(policy, 8)
    assert restored(run) == step
    if step is not None:
        assert "rank 0 kept step 9 when training stopped, but the other ranks' state of it is lost" in said(run)
    if policy.startswith(("moc", "moetion")):
        assert split_lives(events(run))[-1][0]["lost"] > 0, "counted, as each step saves one expert of four"
    else:
        assert_same_run(run, unwritten=[8])
    assert left(run) == []


@pytest.mark.slow
def test_a_rank_of_which_the_update_fails_goes_back_with_the_others(place):  # noqa: F811
    """It seals nothing, being between two steps."""
    run = in_memory(replace(POLICIES["dense every step"], ranks=2), place)
    assert lose(run, 1, 9, how="failing") == [1, 1]
    assert "rank 0 keeps its state of step 9 in memory" in said(run)
    assert "rank 1 keeps its state" not in said(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == 8
    assert_same_run(run, unwritten=[8])
    assert left(run) == []


@pytest.mark.slow
def test_two_of_four_ranks_that_die_between_two_updates_cost_nothing(place):  # noqa: F811
    """Each by the rank before it."""
    run = in_memory(replace(POLICIES["dense rarely"], ranks=4, epochs=4), place)
    assert lose(run, 1, 9, alike=(3,)) == [1, KILLED, 1, KILLED]
    assert live_ranks(run) == [0] * 4, output(run)
    assert restored(run) == 8
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.parametrize("policy", SAVED_AT_EACH_STEP)
@pytest.mark.quick("dense every step", "moc stored")
def test_a_rank_of_fsdp_that_dies_in_an_update_that_the_others_end_costs_one_step(policy, place):  # noqa: F811
    """They stand one step apart, and meet at the newest that both have."""
    run = in_memory(replace(POLICIES[policy], ranks=2, sharded=True), place)
    assert lose(run, 1, 9, how="updated") == [1, KILLED]
    assert "rank 0 keeps its state of step 9 in memory" in said(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == 8
    assert "rank 0 kept step 9 when training stopped, but the other ranks' state of it is lost" in said(run)
    assert max(recomputed(run)) == 1
    if policy == "dense every step":
        assert_same_run(run)
    assert left(run) == []


@pytest.mark.slow
def test_where_tensors_are_divided_nobody_lends_them(place):  # noqa: F811
    """FSDP2: what the dead rank had of the newest step nobody else has."""
    run = in_memory(replace(POLICIES["dense rarely"], ranks=2, sharded=True), place)
    assert lose(run, 1, 9) == [1, KILLED]
    assert kept_step(run) is None
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) is None, "nothing was saved before"
    assert "cannot be used" not in said(run)
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_beside_a_gradient_log_all_ranks_come_back_along_it(ranks, place):  # noqa: F811
    """FSDP2: each rank has its own part of everything, so that what survivors sealed is no checkpoint."""
    run = in_memory(replace(LOG, ranks=ranks, sharded=True, epochs=4), place)
    codes = lose(run, 1, 9)
    assert codes == [KILLED if rank == 1 else 1 for rank in range(ranks)]
    assert live_ranks(run) == [0] * ranks, output(run)
    assert restored(run) == 8
    assert "repeated, from the consumed gradients" in said(run)
    assert_same_run(run)


LOGS = {"ddp": replace(LOG, ranks=4, epochs=8), "fsdp2": replace(LOG, ranks=4, epochs=8, sharded=True)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", LOGS)
def test_ranks_beside_a_gradient_log_die_at_random_times(layout, seed, place):  # noqa: F811
    """One of four or two of them, six times, wherever they are; the others seal what they have."""
    rng = random.Random(f"{layout} {seed}")
    run = in_memory(replace(LOGS[layout], policy=("log", rng.randint(2, 5))), place)
    died, unwritten = 0, set[int]()
    for _ in range(6):
        assert main(["memory", "retry", "--directory", str(run.memory)]) == 0
        first, *others = rng.sample(range(4), rng.choice([1, 2]))
        codes = lose(run, first, secs=rng.uniform(0.0, 0.8), beside=tuple(others))
        died += codes.count(KILLED)
        if codes == [0] * 4:
            break
        unwritten |= under_way(run)
    else:
        assert live_ranks(run) == [0] * 4, output(run)
    print(f"{layout} {seed}: {died} ranks killed, computed again {recomputed(run)}")
    assert died, "or this shows nothing"
    assert_same_run(run, unwritten)
    assert max(recomputed(run)) <= 1
    assert left(run) == []


TORN = {
    "in it": ({"crash": ("failing", 9)}, "the newest step is not sealed after StopHere: parameters are between two"),
    "right after it": ({"sabotage": "update fails"}, "its update is made, but the batch has not come to its end"),
}


@pytest.mark.parametrize("when", TORN)
def test_a_torn_step_is_not_sealed(when, place):  # noqa: F811
    """An exception in the middle of an update leaves neither the old step nor the new one."""
    run, (how, message) = in_memory(POLICIES["dense every step"], place), TORN[when]
    assert exit_code(replace(run, **how)) == 1
    assert "keeps its state" not in said(run)
    assert message in said(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)


ALL_BEHIND = ("dense rarely", "moevement")


@pytest.mark.parametrize("how", ["callback raises", "module raises", "schedule raises"])
@every_policy
@pytest.mark.quick(
    "dense every step-callback raises", "moc-callback raises", "dense rarely-module raises", "moevement-schedule raises"
)
def test_an_error_behind_an_update_costs_no_step(policy, how, place):  # noqa: F811
    """Before Lightning comes to the end of the batch: the update is made, so the step is counted and sealed."""
    if how != "callback raises" and policy not in ALL_BEHIND:
        pytest.skip("two policies are enough")
    run = in_memory(POLICIES[policy], place)
    assert exit_code(replace(run, crash=(how, 9))) == 1
    assert "keeps its state of step 9 in memory" in said(run)
    assert "on_train_batch_end of " in said(run), "a user's hook that was cut off is named"
    assert live(run) == 0, output(run)
    assert restored(run) == 9
    assert split_lives(events(run))[-1][0].get("lost", 0) == 0
    assert max(recomputed(run)) == 0
    assert_same_run(run, unwritten=[8] if how == "schedule raises" else [])
    assert left(run) == []


HOOKS_DUE = {
    "ema": ("EMAWeightAveraging", {"beside": ("ema",)}),
    "own average": ("OwnAverage", {"beside": ("own average",)}),
    "module": ("ShrinkingMoE", {"kind": "shrinking"}),
}


@pytest.mark.parametrize("due", HOOKS_DUE)
def test_a_step_that_hooks_had_still_to_change_is_not_sealed(due, place):  # noqa: F811
    """What is sealed would be no state of the run: the averages, or the weights, lack that step."""
    name, more = HOOKS_DUE[due]
    run = in_memory(replace(POLICIES["dense every step"], **more), place)
    assert exit_code(replace(run, crash=("callback raises", 9))) == 1
    assert f"but on_train_batch_end of {name} had still to run" in said(run)
    assert "keeps its state" not in said(run)
    assert live(run) == 0, output(run)
    assert restored(run) == 8
    assert_same_run(run)
    assert left(run) == []


def test_a_rank_of_ddp_of_which_a_hook_fails_costs_nothing(place):  # noqa: F811
    """The other rank hears of it in the next backward pass, and both have the step."""
    run = in_memory(replace(POLICIES["moc"], ranks=2), place)
    assert lose(run, 1, 9, how="callback raises") == [1, 1]
    assert "rank 1 keeps its state of step 9 in memory" in said(run)
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == 9, said(run)
    assert max(recomputed(run)) == 0
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.parametrize("how", ["validating", "epoch end"])
@every_policy
@pytest.mark.quick("dense every step-validating", "moc-epoch end", "dense rarely-epoch end", "moevement-validating")
def test_an_error_between_two_batches_costs_no_step(policy, how, place):  # noqa: F811
    """After an epoch's last step: hooks may change weights there, and nobody has."""
    run = in_memory(replace(POLICIES[policy], validate=True), place)
    assert exit_code(replace(run, crash=(how, 1))) == 1
    assert "keeps its state of step 10 in memory" in said(run)
    assert live(run) == 0, output(run)
    assert restored(run) == 10
    assert split_lives(events(run))[-1][0].get("lost", 0) == 0
    assert max(recomputed(run)) == 0
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.parametrize("how", ["validating", pytest.param("epoch end", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kills", [False, True])
def test_a_rank_that_fails_between_two_batches_costs_no_step(kills, how, place):  # noqa: F811
    run = in_memory(replace(POLICIES["dense rarely"], validate=True, ranks=2), place)
    dead = {"validating": "killed validating", "epoch end": "killed at epoch end"}[how] if kills else how
    step = 5  # of an epoch of two ranks
    assert lose(run, 1, 1, how=dead) == [1, KILLED if kills else 1]
    assert f"rank 0 keeps its state of step {step} in memory" in said(run)
    assert (f"rank 1 keeps its state of step {step} in memory" in said(run)) != kills
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == step
    assert_same_run(run)
    assert left(run) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["validating", "epoch end"])
def test_an_error_between_two_batches_under_fsdp_costs_no_step(how, place):  # noqa: F811
    run = in_memory(replace(POLICIES["dense rarely"], validate=True, ranks=2, sharded=True), place)
    assert lose(run, 0, 1, how=how, alike=(1,)) == [1, 1]
    assert live_ranks(run) == [0, 0], output(run)
    assert restored(run) == 5
    assert_same_run(run)
    assert left(run) == []


def test_weights_that_a_callback_has_put_in_are_not_sealed(place):  # noqa: F811
    """A validation on averaged weights, which torch does not count as written to."""
    run = in_memory(replace(POLICIES["dense every step"], validate=True, beside=("ema",)), place)
    assert exit_code(replace(run, crash=("validating", 1))) == 1
    assert "keeps its state" not in said(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)


def test_tensors_that_appeared_without_a_checkpoint_are_sealed(place):  # noqa: F811
    run = in_memory(replace(POLICIES["dense rarely"], beside=("rebinding",)), place)
    assert exit_code(replace(run, crash=("raise", 9))) == 1
    assert "keeps its state of step 8 in memory" in said(run)
    assert live(run) == 0, output(run)
    assert restored(run) == 8
    assert_same_run(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_stopped_at_random_times(seed, place):  # noqa: F811
    """Of whatever moment, in whatever part of a step: what is sealed is a state that the run has had."""
    rng = random.Random(seed)
    run = in_memory(replace(POLICIES[rng.choice(["dense rarely", "moevement"])], epochs=4), place)
    for _ in range(10):
        process = start(run)
        seen = len(events(run))
        try:
            while process.is_alive() and len(events(run)) == seen:
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.3))
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)
            process.join(LIFE_SECS)
        finally:
            process.close()
        if Path(run.out).exists():
            break
    if not Path(run.out).exists():
        assert live(run) == 0, output(run)
    assert_same_run(run)
    assert left(run) == []


def kept_step(run: Run) -> int | None:
    """The step of which memory has the survivor's share, the dead rank's as that one lent it, and its plain state."""
    headers = [decode_slot(path.read_bytes(), str(path)) for path in Path(run.memory).rglob("*.head")]
    newest = max((header.identity.generation for header in headers), default=0)
    found: dict[int, set[str]] = {}
    for header in headers:
        if header.identity.generation == newest and header.sealer is not None:
            found.setdefault(header.step, set()).add(f"{header.rank} {header.only}")
    both = [{f"{rank} tensors", f"{rank} state"} for rank in range(2)]
    return max((step for step, told in found.items() if any(each <= told for each in both)), default=None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("policy", SAVED_AT_EACH_STEP)
def test_a_rank_dies_around_its_updates_again_and_again(policy, sharded, seed, place):  # noqa: F811
    """Ten times, one rank or the other: before an update, right after it, or when its step is over."""
    rng = random.Random(f"{policy} {sharded} {seed}")
    run = in_memory(replace(POLICIES[policy], ranks=2, epochs=16, sharded=sharded), place)
    kills = 0
    for _ in range(10):
        codes = lose(run, rng.randrange(2), rng.randint(2, 7), how=rng.choice(["forward", "updated", "ended"]))
        if Path(run.out).exists():
            break
        assert KILLED in codes
        kills += 1
    if not Path(run.out).exists():
        assert live_ranks(run) == [0, 0], output(run)
    assert kills >= 5
    assert max(recomputed(run)) <= 1
    if policy == "dense every step":
        assert_same_run(run, unwritten=ANY)
    assert left(run) == []
