"""Only pipeline stages that lost something go back: the others keep their state, and all end as if nobody had died."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_ckpt.format.sealed import seal
from moe_ckpt.localized.log_files import SEND, Channel, Message, SealedLog, decode_log, encode_log
from moe_ckpt.megatron.checkpoint import MegatronCheckpoint
from moe_ckpt.memory.directory import MESSAGES_SUFFIX, SEALED_SUFFIX
from moe_ckpt.reading.memory.memory_checkpoints import MemoryCheckpoints
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import LocalStorage, open_storage
from tests.megatron.exactness import (
    Case,
    Ended,
    finish,
    kill,
    life_of,
    one_life,
    require_exact,
    require_killed,
    split_lives,
    start_life,
    uninterrupted,
)
from tests.megatron.test_exact import PIPELINE_EXPERTS, SHARDED
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Journal
from tests.support.processes import start_ranks
from tests.support.tensor_reads import tensor_bytes_read
from tests.support.verifying import verify_store

WARM = "tests.support.megatron_warm"
RARELY = {"storage_every": 1000, "upstream_bytes": 1 << 24}
WINDOWS = ("MoEvement", {"window": 3})


def case(setup: Setup, at, policy=WINDOWS, **more) -> Case:
    return Case(setup, policy, (at,), memory=True, copies=RARELY, survives=True, **more)


def again(directory: Path, ranks: int = 4) -> list[list[int]]:
    """Of each rank, iterations that the last life computed again before it went on."""
    lives = [split_lives(Journal(str(directory / "journal"), rank).lines())[-1] for rank in range(ranks)]
    return [[line["updated"] for line in life if line.get("replayed")] for life in lives]


@pytest.mark.parametrize(
    ("setup", "lost"),
    [(Setup(**PIPELINE_EXPERTS), 0), pytest.param(Setup(**PIPELINE_EXPERTS, **SHARDED), 1, marks=pytest.mark.slow)],
)
def test_one_stage_goes_back_alone(setup, lost, tmp_path):
    run = case(setup, (2 * lost, 6, "forward"))
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[2, 3, 4, 5] if rank // 2 == lost else [] for rank in range(4)]
    assert "2 of 4 ranks, of pipeline stage" in ended.said
    assert "all continue from" not in ended.said, "the others keep their step"


def test_a_window_that_ends_with_the_newest_step(tmp_path):
    """Ranks that kept that step need not replay it."""
    run = case(Setup(**PIPELINE_EXPERTS), (3, 7, "forward"))
    kill(run, tmp_path)
    require_exact(run, tmp_path, finish(run, tmp_path))
    assert again(tmp_path) == [[], [], [5, 6], [5, 6]]


def save_at_4() -> None:
    """As Megatron-LM's ``--save-interval``."""
    after_step = MegatronCheckpoint.after_step

    def and_save(ckpt: MegatronCheckpoint, iteration: int, **facts: Any) -> Any:
        record = after_step(ckpt, iteration, **facts)
        if iteration == 4 and not record.replayed:
            ckpt.save(wait=False)
        return record

    MegatronCheckpoint.after_step = and_save


@pytest.mark.slow
def test_after_a_complete_checkpoint_beside_a_step_of_a_window(tmp_path):
    """It has another generation, and so have the logs that lead on from it."""
    at = (0, 7, "forward")
    run = replace(case(Setup(**PIPELINE_EXPERTS), at), copies={**RARELY, "storage_every": 1})
    require_killed(start_life(run, replace(life_of(run, tmp_path), kill=at, sabotage=save_at_4)), at)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert "go back to step 4 (step_00000004_g1)" in ended.said
    assert again(tmp_path) == [[5, 6], [5, 6], [], []]


def test_without_a_log_all_go_back_and_lose_nothing(tmp_path):
    run = replace(case(Setup(**PIPELINE_EXPERTS), (0, 6, "forward")), copies={"storage_every": 1000})
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[2, 3]] * 4


PIPELINE = Setup(layers=4, pp=4, num_microbatches=4, experts=4)
FP16 = replace(PIPELINE, precision="fp16", loss_scale=2.0**20)
TIED = replace(FP16, tied=True)
INTERLEAVED = replace(PIPELINE, layers=8, vpp=2)
BIASED = replace(PIPELINE, expert_bias=True)
on_both_schedules = pytest.mark.parametrize("setup", [PIPELINE, INTERLEAVED], ids=["1f1b", "interleaved"])
DENSE = ("Dense", {"every_n_steps": 4})


@pytest.mark.parametrize(
    ("setup", "policy", "dead", "steps"),
    [
        (PIPELINE, WINDOWS, (1, 2), [5, 6, 7]),
        pytest.param(PIPELINE, WINDOWS, (0, 2), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(PIPELINE, DENSE, (3,), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(FP16, WINDOWS, (0,), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(TIED, WINDOWS, (3, 1), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(BIASED, WINDOWS, (1,), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(BIASED, DENSE, (2, 0), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(INTERLEAVED, WINDOWS, (2,), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(INTERLEAVED, DENSE, (0, 3), [5, 6, 7], marks=pytest.mark.slow),
        pytest.param(INTERLEAVED, WINDOWS, (1, 2), [5, 6, 7], marks=pytest.mark.slow),
    ],
)
def test_several_stages(setup, policy, dead, steps, tmp_path):
    """Neighbours recover together, others side by side."""
    run = case(setup, (dead[0], 8, "forward"), policy, together=dead[1:], steps=9)
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [steps if rank in dead else [] for rank in range(4)]


_NOTING: list[Any] = []


def note_reads(place: Path) -> None:
    """In each rank of the last life: writes down the shards, and bytes of tensors in them, that it reads of a store."""
    _NOTING.append(tensor_bytes_read())
    noted, read = _NOTING[-1].__enter__(), LocalStorage.read

    def reading(self, *args):
        raw = read(self, *args)
        (place / f"reads.{dist.get_rank()}").write_text(json.dumps(noted))
        return raw

    LocalStorage.read = reading


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "directory", "states"),
    [(DENSE, "step_00000004", 1), (WINDOWS, "step_00000006", 5)],
    ids=["dense", "windows"],
)
def test_ranks_that_go_back_read_once_what_they_hold_alike(policy, directory, states, tmp_path):
    """Their node is lost with its memory, so that what they load is on storage. The other stage reads no tensor."""
    run = case(Setup(**PIPELINE_EXPERTS), (0, 8, "forward"), policy, together=(1,), steps=9)
    run = replace(run, copies={**RARELY, "storage_every": 1})
    kill(run, tmp_path)
    shutil.rmtree(tmp_path / "memory" / "node_0")
    shutil.copytree(tmp_path / "store", tmp_path / "before")
    ended = finish(run, tmp_path, partial(note_reads, tmp_path))
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[5, 6, 7], [5, 6, 7], [], []], ended.said
    reader = StoreReader(open_storage(str(tmp_path / "before")))
    index = reader.index(reader.manifest(directory))
    stage = sum(each.nbytes for each in index.live if re.search(r"embedding\.|layers\.[0-1]\.", each.entry.key))
    own = sum(each.nbytes for key, each in index.side.items() if key.startswith(("side/0/", "side/1/")))
    noted = [json.loads((tmp_path / f"reads.{rank}").read_text()) for rank in range(4)]
    read = [sum(nbytes for _, nbytes in reads) for reads in noted]
    # Verified first, then loaded; each rank's own generators when a step is opened, and again when it is repeated.
    # What a window's replay repeats each rank reads by itself (``WindowReplay.repeat``).
    repeated = sum(read) - 2 * stage - states * own
    assert 0 < repeated < 2 * stage if policy is WINDOWS else repeated == 0
    assert max(read) < 0.6 * sum(read)
    assert read[2:] == [0, 0]


@pytest.mark.slow
@on_both_schedules
@pytest.mark.parametrize(
    ("second", "dead", "steps"),
    [((1, 2, "replay"), 1, [5, 6, 7]), ((2, 0, "resume"), 1, [5, 6, 7]), ((3, 9, "forward"), 3, [5, 6, 7, 8])],
    ids=["the same again", "next to it", "just after"],
)
def test_a_rank_dies_during_the_recovery_or_just_after_it(setup, second, dead, steps, tmp_path):
    """What a killed process sealed outlives it: only the first one is lost until training gets on."""
    run = replace(case(setup, (1, 8, "forward"), steps=10), kills=((1, 8, "forward"), second))
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [steps if rank == dead else [] for rank in range(4)]


@pytest.mark.slow
def test_after_two_recoveries_of_some_stages_that_came_to_nothing_all_go_back(tmp_path):
    """Whatever is wrong with what was kept or logged, a global recovery does without it."""
    run = replace(case(PIPELINE, (1, 8, "forward"), steps=10), kills=((1, 8, "forward"), *[(1, 2, "replay")] * 2))
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[5, 6]] * 4
    assert "kept step 7, but all go back: the last 2 starts" in ended.said


@pytest.mark.slow
@on_both_schedules
def test_a_node_is_lost_beside_a_recovery(setup, tmp_path):
    """Rank 1 goes back; before it is done, ranks 2 and 3 are lost with their memory, and go back with it."""
    run = replace(case(setup, (1, 8, "forward"), steps=10), copies={**RARELY, "replicas": 1})
    run = replace(run, kills=((1, 8, "forward"), (2, 0, "resume")))
    kill(run, tmp_path)
    shutil.rmtree(tmp_path / "memory" / "node_1")
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[]] + [[5, 6, 7]] * 3


UNCOUNTED = (1, 7, "updated")
"""Rank 1 dies after its update, before ranks agree on tokens: nobody knows those of iteration 7 that it had routed."""


def require_every_token(run: Case, ended: Ended) -> None:
    """Each expert's tokens are those of the run that nobody killed; none are lost, nor taken for lost."""
    expected = uninterrupted(run.setup, run.ranks, run.steps)
    for mine, one in zip(ended.results, expected, strict=True):
        assert mine["saved"]["applied"] == one["saved"]["applied"]
        assert sum(map(sum, mine["saved"]["applied"])) > 0
        assert [(fault[1], fault[2]) for fault in mine["saved"]["faults"]] == [(0, 0)] * len(mine["saved"]["faults"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "policy", "dead", "more", "steps"),
    [
        (PIPELINE, WINDOWS, (), (), {1: [5, 6, 7]}),
        (PIPELINE, WINDOWS, (), ((1, 3, "replay"),), {1: [5, 6, 7]}),
        (PIPELINE, WINDOWS, (), ((2, 0, "resume"),), {1: [5, 6, 7]}),
        (PIPELINE, WINDOWS, (), ((1, 3, "replay"),) * 2, {0: [5, 6], 1: [5, 6], 2: [5, 6], 3: [5, 6]}),
        (PIPELINE, WINDOWS, (), ((3, 8, "updated"),), {3: [5, 6, 7, 8]}),
        (INTERLEAVED, WINDOWS, (2,), (), {1: [5, 6, 7], 2: [5, 6, 7]}),
        (PIPELINE, DENSE, (3,), (), {1: [5, 6, 7], 3: [5, 6, 7]}),
    ],
    ids=["one", "in the replay", "a neighbour", "three times", "the next iteration", "neighbours", "apart"],
)
def test_a_rank_dies_between_its_update_and_the_agreement_on_tokens(setup, policy, dead, more, steps, tmp_path):
    """Ranks that compute the iteration again count its tokens again."""
    run = replace(case(setup, UNCOUNTED, policy, together=dead, steps=10), kills=(UNCOUNTED, *more))
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    require_every_token(run, ended)
    assert again(tmp_path) == [steps.get(rank, []) for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "at", "steps"),
    [
        (PIPELINE, (1, 6, "updated"), [2, 3, 4, 5, 6]),
        (Setup(**PIPELINE_EXPERTS, **SHARDED), (3, 7, "updated"), [5, 6, 7]),
        (Setup(layers=4, pp=2, tp=2, ep=2, num_microbatches=4, experts=4), (0, 7, "updated"), [5, 6, 7]),
    ],
    ids=["a window's last", "experts and shards", "tensors"],
)
def test_a_rank_dies_before_the_agreement_on_tokens_of_a_stage(setup, at, steps, tmp_path):
    """All that ranks of a stage share is within it: experts, tensors, shards of the optimizer."""
    run = case(setup, at, steps=10)
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    require_every_token(run, ended)
    assert again(tmp_path) == [steps if rank * setup.pp // 4 == at[0] * setup.pp // 4 else [] for rank in range(4)]


def test_a_damaged_log_lets_all_go_back(tmp_path):
    run = case(Setup(**PIPELINE_EXPERTS), (0, 6, "forward"))
    kill(run, tmp_path)
    [log] = (tmp_path / "memory" / "node_1").rglob("rank_00002/upstream_00000004.messages")
    raw = bytearray(log.read_bytes())
    raw[len(raw) // 2] ^= 1
    log.write_bytes(raw)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[2, 3]] * 4
    assert "2 ranks kept step 5, but all go back" in ended.said
    assert "is damaged" in ended.said


Messages = list[tuple[Message, bytes]]


def reseal(path: Path, change: Callable[[Messages], None], *, counted: bool = False, **header: Any) -> None:
    """The log again, with other messages or other values in its header, and right checksums.

    path: of its files, without a suffix. change: of the messages, each with its bytes. counted: how many there are is
    told as well.
    """
    sealed, messages = path.with_suffix(SEALED_SUFFIX), path.with_suffix(MESSAGES_SUFFIX)
    before, raw = decode_log(sealed.read_bytes(), str(sealed)), messages.read_bytes()
    bodies = io.BytesIO(raw)
    pairs = [(message, bodies.read(message.nbytes)) for message in before.messages]
    change(pairs)
    after = b"".join(body for _, body in pairs)
    messages.write_bytes(after)
    made = encode_log(replace(before, messages=tuple(message for message, _ in pairs), **header))
    body = json.loads(made)["body"]
    for channel in () if counted else body["channels"]:  # as it was sealed: how many were sent
        sent = Channel(channel["kind"], tuple(channel["ranks"]))
        channel["messages"] = sum(message.channel == sent for message in before.messages)
    sealed.write_bytes(seal(body))


def sends(messages: Messages) -> list[int]:
    """Places of those that rank 2 sent to rank 0."""
    return [at for at, (each, _) in enumerate(messages) if each.channel == Channel(SEND, (2, 0))]


def dropped(messages: Messages) -> None:
    del messages[sends(messages)[0]]


def doubled(messages: Messages) -> None:
    first = sends(messages)[0]
    messages.insert(first, messages[first])


def swapped(messages: Messages) -> None:
    one, other = sends(messages)[:2]
    assert messages[one][0].shape == messages[other][0].shape
    assert messages[one][1] != messages[other][1]
    messages[one], messages[other] = messages[other], messages[one]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "header", "why"),
    [
        (dropped, {}, "a message lacks"),
        (doubled, {}, "a message lacks, or is there twice"),
        (swapped, {}, "in the place of another one"),
        (lambda messages: None, {"history": 5}, "has no upstream log of step"),
    ],
    ids=["missing", "twice", "swapped", "history"],
)
def test_a_log_that_is_not_what_was_sent_lets_all_go_back(change, header, why, tmp_path, capfd):
    run = case(Setup(**PIPELINE_EXPERTS), (0, 6, "forward"))
    kill(run, tmp_path)
    [log] = (tmp_path / "memory" / "node_1").rglob("rank_00002/upstream_00000004.messages")
    reseal(log.with_suffix(""), change, **header)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[2, 3]] * 4
    assert "2 ranks kept step 5, but all go back" in ended.said
    assert why in capfd.readouterr().err + ended.said, "damage is found when the run attaches, a gap when it resumes"


@pytest.mark.slow
def test_a_log_of_an_earlier_life_lets_all_go_back(tmp_path):
    """It is of the right step, but what was sent then belongs to a state that the run went back behind."""
    run = case(Setup(**PIPELINE_EXPERTS), (0, 2, "forward"), steps=10)
    run = replace(run, kills=(*run.kills, (0, 9, "forward")))
    kill(run, tmp_path)
    [log] = (tmp_path / "memory" / "node_1").rglob("rank_00002/upstream_00000008.messages")
    sealed = log.with_suffix(SEALED_SUFFIX)
    generation = decode_log(sealed.read_bytes(), str(sealed)).generation
    reseal(log.with_suffix(""), lambda messages: None, generation=generation - 1)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    [steps] = {tuple(each) for each in again(tmp_path)}
    assert steps, "all ranks compute the same ones again"
    assert "2 ranks kept step 8, but all go back: rank 2 has no upstream log of step 8" in ended.said


def renumbered(change: Callable[[Messages], None]) -> Callable[[Messages], None]:
    """As by a program that sent other messages: all of them have numbers in order."""

    def made(messages: Messages) -> None:
        change(messages)
        seen: Counter[Channel] = Counter()
        for at, (each, body) in enumerate(messages):
            messages[at] = replace(each, number=seen[each.channel]), body
            seen[each.channel] += 1

    return made


@pytest.mark.slow
@pytest.mark.parametrize("change", [dropped, doubled], ids=["missing", "twice"])
def test_after_a_recovery_that_diverged_all_go_back_at_the_next_start(change, tmp_path):
    run = case(Setup(**PIPELINE_EXPERTS), (0, 6, "forward"))
    kill(run, tmp_path)
    [log] = (tmp_path / "memory" / "node_1").rglob("rank_00002/upstream_00000004.messages")
    reseal(log.with_suffix(""), renumbered(change), counted=True)
    outcomes = start_life(run, replace(life_of(run, tmp_path), seed=2))
    assert not any(outcome.ok for outcome in outcomes)
    assert "ReplayDivergedError" in (outcomes[0].error or "")
    run = replace(run, kills=(*run.kills, (0, 0, "diverged")))
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path) == [[2, 3]] * 4
    why = "what some stages computed again, at a start since, was not what it had been the first time"
    assert f"but all go back: {why}" in ended.said
    assert list((tmp_path / "memory").rglob("diverged")) == []


def skipping(rank: int, world_size: int, root: str, skipped: int, dies: int) -> tuple[list[int], str, int]:
    """Returns the iterations that one life computed, its error, and how many objects of its resume were left behind.

    Rank 1 is killed in iteration ``dies``.
    """
    from moe_ckpt import Memory, megatron, policies

    built, computed = megatron_gpt.build(Setup(layers=2, pp=2, num_microbatches=2, experts=4), 1), []
    memory = Memory(directory=f"{root}/memory", **RARELY)
    with megatron.attach(
        *(built.chunks, built.optimizer, built.scheduler),
        policy=policies.Dense(every_n_steps=4),
        dirpath=f"{root}/store",
        memory=memory,
        when_busy="wait",
        timeout_secs=30.0,
    ) as ckpt:
        progress = ckpt.resume()
        built.consumed_samples = progress.consumed_samples
        try:
            for iteration in range(progress.iteration + 1, 11):
                if iteration == skipped:
                    ckpt.skip(iteration, built.consumed_samples)
                    continue
                megatron_gpt.forward_backward(built, iteration - 1)
                if (rank, iteration) == (1, dies):
                    os.kill(os.getpid(), signal.SIGKILL)
                ckpt.before_step()
                made, _ = megatron_gpt.update(built)
                ckpt.after_step(iteration, consumed_samples=built.consumed_samples, updated=made)
                computed.append(iteration)
            gc.collect()
            left = sum(isinstance(kept, (StoreReader, MemoryCheckpoints, SealedLog)) for kept in gc.get_objects())
            ckpt.finish()
        except Exception as error:
            ckpt.close(10.0, error)
            return computed, str(error), 0
    return computed, "", left


def test_an_iteration_that_is_skipped_now_and_was_computed_then_lets_all_go_back(tmp_path):
    """Somebody takes it for what ended the job. Its log must not answer for the next one."""
    (tmp_path / "memory").mkdir()
    lives = [start_ranks(skipping, 2, str(tmp_path), *life, preload=WARM) for life in ((0, 8), (6, 0), (6, 0))]
    assert lives[0][1].exitcode == -signal.SIGKILL
    computed, error, _ = lives[1][1].value
    assert computed == [5]
    assert "step 6 again did not repeat it: it is skipped now, and was computed then" in error
    assert [outcome.value for outcome in lives[2]] == [([5, 7, 8, 9, 10], "", 0)] * 2


def test_what_two_stages_share_is_lost_with_the_one_that_sealed_it(tmp_path):
    run = case(replace(TIED, pp=2), (0, 6, "forward"), ranks=2)
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    assert again(tmp_path, 2) == [[2, 3]] * 2
    assert "tied embeddings" in ended.said


@pytest.mark.slow
def test_a_loop_that_ends_where_the_others_wait(tmp_path):
    """Ranks that keep the last iteration have none to compute, and wait at the end for those that go back."""
    run = case(PIPELINE, (1, 8, "forward"), steps=9)
    kill(run, tmp_path)
    run = replace(run, steps=7)
    ended = finish(run, tmp_path)
    assert again(tmp_path) == [[], [5, 6, 7], [], []]
    assert [found["tensors"] for found in ended.results] == [each["tensors"] for each in uninterrupted(PIPELINE, 4, 7)]
    [_] = (tmp_path / "store").glob("step_00000007*/MANIFEST.json")
    assert verify_store(open_storage(str(tmp_path / "store"))) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_ranks_die_at_random_moments(seed, tmp_path):
    """Ten lives that are killed whenever it happens: in a pass, in an update, while sealing, in a recovery."""
    draw = random.Random(seed)
    setup = draw.choice([PIPELINE, INTERLEAVED, FP16, Setup(**PIPELINE_EXPERTS, **SHARDED)])
    run = case(setup, (0, 10**6, "never"), steps=150)
    killed = 0
    for number in range(10):
        victims = tuple(draw.sample(range(4), draw.choice([1, 1, 2])))
        lost = (draw.uniform(0.1, 3.0), victims)
        outcomes = one_life(run, tmp_path, number, lost)
        died = [rank for rank, outcome in enumerate(outcomes) if outcome.exitcode == -signal.SIGKILL]
        assert set(died) <= set(victims)
        killed += len(died)
        if any(outcome.ok for outcome in outcomes):
            break  # some ended the run, and others may have been lost meanwhile: the last life comes back to that
        assert died, [(each.exitcode, (each.error or "")[-1500:]) for each in outcomes]
    assert killed >= 3, "else hardly anything is shown"
    require_exact(run, tmp_path, finish(run, tmp_path))
