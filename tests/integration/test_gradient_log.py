"""A gradient log in memory under kill -9: the run goes on from its newest step by optimizer steps."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.cli.main import main
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.slot import SlotHeader
from moe_ckpt.ledger.retention import newest_checkpoint
from moe_ckpt.memory.slot import Slot
from tests.integration.crash_run import Run, build, loaders
from tests.integration.lives import (
    KILLED,
    PRELOAD,
    assert_same_run,
    events,
    exit_code,
    live,
    live_ranks,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    recomputed,
    split_lives,
)
from tests.support.deleting import delete_tree
from tests.support.processes import run_ranks
from tests.support.spoiled import bytes_of

LOG = Run(None, policy=("log", 3), to_storage=1000, callback={"when_busy": "wait"})


def logged(run: Run, place: Path) -> Run:  # noqa: F811
    memory = place / "memory"
    memory.mkdir(exist_ok=True)
    return replace(placed(run, place), memory=str(memory))


def updates(run: Run) -> list[int]:
    """Of each return: how many updates the plan said were repeated."""
    which = r"then the (?:(\d+) updates of steps .*|update of step \d+ is) repeated, from the consumed gradients"
    found = re.findall(which, output(run))
    return [int(each or 1) for each in found]


def test_killed_the_run_goes_on_from_the_newest_step(place):  # noqa: F811
    run = logged(LOG, place)
    assert live(replace(run, crash=("compute, sealed", 9))) == KILLED, output(run)
    assert live(replace(run, sabotage="tells at once")) == 0, output(run)
    assert_same_run(run)
    assert "rank 0 has repeated 1 of 2 updates of the gradient log" in output(run)
    assert split_lives(events(run))[-1][0]["step"] == 8, "the step under way was the ninth"
    assert updates(run) == [2], output(run)
    assert recomputed(run) == [0]


def test_of_slow_seals_a_kill_costs_the_newest_step_alone(place):  # noqa: F811
    run = logged(LOG, place)
    assert live(replace(run, crash=("compute", 7), sabotage="seals slowly")) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert split_lives(events(run))[-1][0]["step"] == 5, "the step under way was the seventh"
    assert recomputed(run) == [1]


def test_an_update_that_waits_no_longer_for_a_seal_says_so(place):  # noqa: F811
    run = logged(replace(LOG, epochs=1, callback={"when_busy": "wait", "timeout_secs": 0.2}), place)
    assert live(replace(run, crash=("compute", 7), sabotage="seals slowly")) == KILLED, output(run)
    assert "the step before is not sealed in memory after 0.2 s (timeout_secs)" in output(run)


def test_hooks_of_the_users_own_are_no_part_of_a_replay(place):  # noqa: F811
    """What was logged has passed through them already."""
    run = logged(replace(LOG, kind="hooked", model={"optimizer": "sgd"}), place)
    assert live(replace(run, crash=("compute, sealed", 9))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert recomputed(run) == [0]


def test_a_param_group_that_is_added_costs_no_step(place):  # noqa: F811
    """An update before it cannot be made by optimizers that have it."""
    run = logged(replace(LOG, kind="adding"), place)
    assert live(replace(run, crash=("compute, sealed", 12))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert recomputed(run) == [0]


ROUNDED = {"grad_dtype": "bf16"}
BIASED = replace(LOG, policy=("gradient-log", 5), kind="biased-experts", model={"optimizer": "adafactor"})
"""Part of the optimizer's state of a stack of experts is no expert's, and goes with the gate."""
VARIATIONS = {
    "clipped": replace(LOG, trainer={"gradient_clip_val": 0.1}),
    "bf16": replace(LOG, trainer={"precision": "bf16-true", "gradient_clip_val": 0.1}),
    "bf16-mixed": replace(LOG, trainer={"precision": "bf16-mixed"}),
    "accumulated": replace(LOG, trainer={"accumulate_grad_batches": 2}, epochs=3),
    "fused": replace(LOG, model={"optimizer": "fused"}),
    "forloop": replace(LOG, model={"optimizer": "forloop"}),
    "sgd": replace(LOG, model={"optimizer": "sgd"}),
    "adafactor": replace(LOG, model={"optimizer": "adafactor"}),
    "experts-without-tokens": replace(LOG, model={"stacked": False, "experts": 8, "top_k": 1}),
    "fp16-overflowing": replace(LOG, kind="overflowing", epochs=3),
    "manual": replace(LOG, kind="manual-once"),
    "two-optimizers": replace(LOG, kind="manual-apart"),
    "zeroed-behind-each-update": replace(LOG, kind="manual"),
    "two-backward-passes": replace(LOG, kind="manual-twice"),
    "validated": replace(LOG, validate=True, trainer={"val_check_interval": 3}),
    "averaged": replace(LOG, beside=("ema",), validate=True),
    "biased-routers": replace(LOG, kind="biased"),
    "epoch-scheduled": replace(LOG, kind="epoch-scheduled", epochs=3),
    "storage-often": replace(LOG, to_storage=4),
    "one-group": replace(LOG, policy=("log", 1)),
    "long-round": replace(LOG, policy=("log", 7)),
    "the-policy": replace(LOG, policy=("gradient-log", 4)),
    "the-policy-sized": replace(LOG, policy=("gradient-log", "auto")),
    "the-policy-coupled": replace(LOG, policy=("gradient-log", 3), model={"optimizer": "adafactor"}),
    "the-policy-biased-experts": BIASED,
    "the-policy-flat-experts": replace(BIASED, kind="flat-experts"),
    "skipping": replace(LOG, to_storage=4, callback={}),
    "little-room": replace(LOG, to_storage=5, callback={"when_busy": "wait", "host_memory_bytes": 400_000}),
    "hardly-room": replace(LOG, to_storage=5, callback={"when_busy": "wait", "host_memory_bytes": 260_000}),
    "slow-copy": replace(LOG, slow_copy_secs=0.05),
    "odd": replace(LOG, kind="odd"),
    "odd-nadam": replace(LOG, kind="odd", model={"optimizer": "sgd"}),
    "rounded": replace(LOG, policy=("gradient-log", 3), options=ROUNDED, trainer={"gradient_clip_val": 0.1}),
    "rounded-accumulated": replace(
        LOG, policy=("gradient-log", 3), options=ROUNDED, trainer={"accumulate_grad_batches": 2}, epochs=3
    ),
    "rounded-manual": replace(LOG, policy=("gradient-log", 3), options=ROUNDED, kind="manual-once"),
    "rounded-fp16": replace(LOG, policy=("gradient-log", 3), options=ROUNDED, kind="overflowing", epochs=3),
}


@pytest.mark.parametrize("kind", ["biased-experts", "flat-experts"])
def test_what_is_no_experts_is_as_new_as_the_experts(kind, place):  # noqa: F811
    run = logged(replace(BIASED, kind=kind), place)
    for crash in (7, 6):
        assert live(replace(run, crash=("compute, sealed", crash))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert recomputed(run) == [0, 0]


def test_a_log_that_anchors_them_apart_is_refused(place):  # noqa: F811
    run = logged(BIASED, place)
    assert live(replace(run, crash=("compute, sealed", 9), sabotage="gates apart")) == KILLED, output(run)
    assert exit_code(run) == 1, output(run)
    assert "so the log leads to wrong numbers: anchor them together, and run moe-ckpt memory clear" in output(run)
    assert main(["densify", run.store, "--directory", run.memory]) == 2
    assert main(["memory", "clear", "--directory", run.memory]) == 0
    assert live(run) == 0, output(run)
    assert_same_run(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIATIONS)
def test_however_a_run_is_set_up(name, place):  # noqa: F811
    run = logged(VARIATIONS[name], place)
    # Where a step is not sealed in each backward pass, the kill does not wait for the seal of the one before.
    allowed = dict.fromkeys(("accumulated", "rounded-accumulated", "fp16-overflowing", "rounded-fp16"), 1)
    allowed |= {"two-backward-passes": 1, "skipping": 3, "little-room": 2, "hardly-room": 3}
    moment = "compute" if name in allowed else "compute, sealed"
    for crash in (7, 5):
        assert live(replace(run, crash=(moment, crash))) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert max(recomputed(run)) <= allowed.get(name, 0)
    if name in ("one-group", "the-policy-sized"):
        return  # all operators are anchored in each step
    assert name in ("skipping", "little-room", "hardly-room") or len(updates(run)) == 2, output(run)
    assert name != "hardly-room" or "has no room for" in output(run)


BESIDE = ("shrinking", "shrinking-silently", "replacing", "forgetting")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != BESIDE[1])) for kind in BESIDE]
)
def test_what_others_change_beside_the_optimizer_is_saved_in_full(kind, place):  # noqa: F811
    run = logged(replace(LOG, kind=kind), place)
    # Steps in full are sealed later: a kill may cost one.
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    assert "were changed by something other than the optimizer" in output(run)
    assert kind == "forgetting" or "saves full state instead of gradients at each step" in output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)
    assert max(recomputed(run)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shrinking", "shrinking-silently", "forgetting"])
def test_what_others_change_on_two_ranks(kind, place):  # noqa: F811
    run = logged(replace(LOG, ranks=2, kind=kind), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 8)))
    assert live_ranks(run) == [0, 0], output(run)
    assert_same_run(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        "updates with own hyperparameters",
        "gradients before clipping",
        "anchors too early",
        "counts not set",
        "newest update left out",
        "rounded in the log only",
    ],
)
def test_what_an_exact_return_needs(wrong, place):  # noqa: F811
    run = logged(replace(LOG, trainer={"gradient_clip_val": 0.1}), place)
    assert live(replace(run, crash=("compute", 9), sabotage=wrong)) == KILLED, output(run)
    assert live(replace(run, sabotage=wrong)) == 0, output(run)
    if "came to another state than the run's" in output(run):
        assert_same_run(run)  # from an older step
    else:
        with pytest.raises(AssertionError):
            assert_same_run(run)


def test_a_log_that_leads_elsewhere_costs_the_steps_since_the_newest_full_one(place):  # noqa: F811
    """Also where the next start would repeat its updates in the same way; storage has the older step."""
    run = logged(replace(LOG, to_storage=4), place)
    assert live(replace(run, crash=("compute, sealed", 8))) == KILLED, output(run)
    assert live(replace(run, sabotage="anchors too early")) == 0, output(run)
    assert "did not come to step" in output(run)
    assert "came to another state than the run's: none of its steps is used" in output(run)
    assert split_lives(events(run))[-1][0]["step"] == 4
    assert_same_run(run)


@pytest.mark.slow
def test_a_log_that_leads_two_ranks_elsewhere(place):  # noqa: F811
    run = logged(replace(LOG, ranks=2, to_storage=4), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 8)))
    assert live_ranks(replace(run, sabotage="anchors too early")) == [0, 0], output(run)
    assert "came to another state than the run's: none of its steps is used" in output(run)
    assert_same_run(run)


def test_a_damaged_gradient_costs_the_steps_that_need_it(place):  # noqa: F811
    run = logged(LOG, place)
    assert live(replace(run, crash=("compute, sealed", 9))) == KILLED, output(run)
    logged_alone = (path for path in sealed(run) if header_of(path).only == "gradients")
    spoil(max(logged_alone, key=lambda path: header_of(path).identity.number), "gradient")
    assert live(run) == 0, output(run)
    assert "is damaged: it is set aside, and not used" in output(run)
    assert split_lives(events(run))[-1][0]["step"] == 7, "an older step that can be reached"
    assert_same_run(run)


@pytest.mark.slow
def test_a_damaged_anchor_costs_all_steps_that_need_it(place):  # noqa: F811
    run = logged(replace(LOG, to_storage=6), place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    dense = [path for path in sealed(run) if header_of(path).contents.since is None]
    spoil(max(dense, key=lambda path: header_of(path).identity.number), "expert")
    assert live(run) == 0, output(run)
    assert "is damaged: it is set aside, and not used" in output(run)
    assert split_lives(events(run))[-1][0]["step"] == 6, output(run)
    assert_same_run(run)


@pytest.mark.slow
def test_killed_while_it_returns_the_run_returns_again(place):  # noqa: F811
    run = logged(LOG, place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    for _ in range(2):
        assert live(replace(run, sabotage="killed in a replay")) == KILLED, output(run)
    assert live(run) == 0, output(run)
    assert_same_run(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_random_times(seed, place):  # noqa: F811
    rng = random.Random(seed)
    run = logged(replace(LOG, policy=("log", rng.randint(2, 6)), to_storage=rng.choice([7, 1000]), epochs=3), place)
    kills = 0
    for kill_after_secs in (*(rng.uniform(0.02, 0.3) for _ in range(10)), None):
        assert main(["memory", "retry", "--directory", run.memory]) == 0
        if live(run, kill_after_secs) != KILLED:
            break
        kills += 1
    print(f"{seed}: {kills} lives were killed")
    assert kills, "or this shows nothing"
    assert_same_run(run)
    assert max(recomputed(run)) <= 1


SEVERAL = {
    "ddp": replace(LOG, ranks=2, epochs=4),
    "ddp-3": replace(LOG, ranks=3, epochs=3),
    "ddp-4": replace(LOG, ranks=4, epochs=4),
    "fsdp2": replace(LOG, ranks=2, sharded=True, epochs=4),
    "fsdp2-4": replace(LOG, ranks=4, sharded=True, epochs=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layout", SEVERAL)
def test_ranks_killed_at_random_times_and_their_nodes_lost(layout, seed, place):  # noqa: F811
    """Ranks are nodes. One is killed, and the others with it; sometimes its node is lost, too."""
    rng = random.Random(f"{layout} {seed}")
    run = logged(replace(SEVERAL[layout], replicas=1, policy=("log", rng.randint(2, 5))), place)
    kills, lossy = 0, set()
    for _ in range(7):
        assert main(["memory", "retry", "--directory", run.memory]) == 0
        rank = rng.randrange(run.ranks)
        if KILLED not in live_ranks(run, (rank, rng.uniform(0.02, 0.6))):
            break
        kills += 1
        if rng.random() < 0.3:
            delete_tree(Path(run.memory, f"node_{rank}"))
            lossy.add(len(split_lives(events(run))))
    else:
        assert live_ranks(run) == [0] * run.ranks, output(run)
    assert_same_run(run)
    # Behind a lost node the newest copies on peers count: of steps this quick a busy machine leaves some out there.
    bounded = {life: steps for life, steps in again(run).items() if life not in lossy}
    print(f"{layout} {seed}: {kills} kills, computed again {again(run)}, behind lost nodes {sorted(lossy)}")
    assert kills, "or this shows nothing"
    assert max(bounded.values(), default=0) <= 1


def again(run) -> dict[int, int]:
    """Number of each life but the first -> steps that all ranks of one before it had ended, and that it computes again.

    A step that some rank had not ended was under way.
    """
    found, reached = {}, 0
    for number, lives in enumerate(zip(*(split_lives(events(run, rank)) for rank in range(run.ranks)), strict=False)):
        if number:
            found[number] = max(0, reached - (lives[0][0]["step"] or 0))
        steps = [[line["step"] for line in life if line["event"] == "batch"] for life in lives]
        reached = max(reached, min(max(each, default=0) for each in steps))
    return found


def test_what_cannot_be_logged_is_refused_by_name(place):  # noqa: F811
    run = logged(replace(LOG, model={"optimizer": "fused"}, kind="overflowing"), place)
    assert exit_code(run) not in (0, KILLED)
    assert "applies the loss scale" in output(run)


def test_without_memory_the_policy_is_refused():
    with pytest.raises(ConfigError, match=r"give memory=moe_ckpt.Memory"):
        build(replace(LOG, store="nowhere"))


def sealed(run: Run) -> list[Path]:
    """Bytes of the slots that may be read."""
    return list(Path(run.memory).rglob("*.head"))


def header_of(data: Path) -> SlotHeader:
    return Slot.open(data)[1]


def spoil(data: Path, kind: str) -> None:
    """Flips a bit in every slice of a part of a slot."""
    header = header_of(data)
    [part] = [part for part in header.parts if part.kind == kind]
    path, first, _ = bytes_of(data)
    with path.open("r+b") as file:
        for entry in header.slices(part, str(data)):
            file.seek(first + part.begin + entry.begin)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


TWO = replace(LOG, ranks=2, trainer={"gradient_clip_val": 0.1})


@pytest.mark.slow
def test_two_ranks_killed_together(place):  # noqa: F811
    run = logged(TWO, place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 4)))
    assert live_ranks(run) == [0, 0], output(run)
    assert_same_run(run)
    assert updates(run), output(run)
    assert max(recomputed(run)) == 0


@pytest.mark.slow
def test_a_lost_node_comes_back_to_the_newest_step_from_its_peer(place):  # noqa: F811
    run = logged(replace(TWO, replicas=1), place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 4)))
    shutil.rmtree(Path(run.memory, "node_1"))
    assert live_ranks(run) == [0, 0], output(run)
    assert re.search(r"peers: other nodes|rank 1 received [1-9]", output(run)), output(run)
    assert updates(run), output(run)
    assert_same_run(run)


@pytest.mark.slow
def test_gradients_that_peers_have_alike_are_not_sent(tmp_path):
    run_ranks(_train_beside_a_peer, 2, str(tmp_path), timeout=200.0, preload=PRELOAD)


def _train_beside_a_peer(rank, world_size, directory):
    run = logged(replace(TWO, replicas=1, samples=80, epochs=1), Path(directory))
    trainer, module, _ = build(run, rank)
    ours = next(each for each in trainer.callbacks if isinstance(each, MoECheckpoint))
    watched = Watched(ours)
    trainer.callbacks.insert(0, watched)
    trainer.fit(module, *loaders(run))
    assert watched.newest.step == 9
    # A rank's share: half of 80 kB in the first step, then of 26 kB of anchors and 18 kB of gradients in each of 8.
    assert watched.newest.replica_saved_nbytes > 40_000 + 8 * 16_000, "anchors alone are 13 kB"
    assert watched.newest.gradient_factor == pytest.approx((26 + 3 * 18) / (26 + 18), rel=0.15), "12 bytes, not 4"


class Watched(pl.Callback):
    """Keeps what the newest step cost, before it is the last."""

    def __init__(self, ours: MoECheckpoint) -> None:
        self.ours, self.newest = ours, None

    def on_train_batch_end(self, *args) -> None:
        self.newest = self.ours.last or self.newest


class Counted(pl.Callback):
    """Counts, behind each step, the slots of gradients that the newest checkpoint in memory has."""

    def __init__(self, ours: MoECheckpoint) -> None:
        self.ours, self.found = ours, []

    def on_train_batch_end(self, *args) -> None:
        tier = self.ours._fit.session._snapshots.pipeline.memory
        with tier._lock:
            entries = list(tier._entries.values())
            newest = newest_checkpoint(entries)
            there = [e for e in entries if newest and e.complete and e.number <= newest[-1].number]
            self.found.append(sum(place >= 0 for entry in there for place in entry.buffers))


def test_of_older_steps_only_the_gradients_since_the_anchors_stay(place):  # noqa: F811
    """With rounds of 4 steps those of 3, 2 and 1 steps: 6 slots of a fourth of the operators each. 12 would be all."""
    run = logged(replace(LOG, policy=("gradient-log", 4), epochs=1), place)
    trainer, module, _ = build(run, 0)
    counted = Counted(next(each for each in trainer.callbacks if isinstance(each, MoECheckpoint)))
    trainer.callbacks.append(counted)
    trainer.fit(module, *loaders(run))
    assert len(counted.found) > 6
    assert counted.found[-1] == max(counted.found) == 6, counted.found


def test_gradients_rounded_for_everybody_take_two_bytes(place):  # noqa: F811
    """And training is another than without: the option says so."""
    run = logged(VARIATIONS["rounded"], place)
    assert live(replace(run, crash=("compute", 9))) == KILLED, output(run)
    found = [header_of(path) for path in Path(run.memory).rglob("*.head")]
    slices = [
        entry
        for header in found
        for part in header.parts
        for entry in header.slices(part, "")
        if entry.key.startswith("grad/")
    ]
    assert slices
    assert {entry.dtype for entry in slices} == {"BF16"}
    assert live(run) == 0, output(run)
    assert_same_run(run)
    with pytest.raises(AssertionError):
        assert_same_run(replace(run, options={}))
