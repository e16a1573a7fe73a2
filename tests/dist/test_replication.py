"""Copies of memory slots between real processes: equal to the last bit, verified, bounded, and nobody hangs."""

from __future__ import annotations

import logging.handlers
import os
import random
import re
import signal
import subprocess
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.cli.memory import survey
from moe_ckpt.format.slot import decode_slot, encode_slot
from moe_ckpt.memory.arena import COPIES
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.slot import Slot
from moe_ckpt.peers.messages import SealedSlot
from tests.support.processes import run_ranks, start_ranks
from tests.support.replicas import RUN, Rank, bytes_of, resources

MIB = 1 << 20
PATIENCE_SECS = 120.0
"""Longest wait for what must come soon."""
ROUNDS = 50


def warnings_of() -> logging.handlers.BufferingHandler:
    said = logging.handlers.BufferingHandler(1000)
    said.setLevel(logging.WARNING)
    logging.getLogger("moe_ckpt").addHandler(said)
    return said


def texts(said: logging.handlers.BufferingHandler) -> list[str]:
    return [record.getMessage() for record in said.buffer]


# --- all are well ---

SIZE = MIB + 17


def _flawed(rank: Rank, sequence: int) -> list[SealedSlot]:
    """What this rank submits: of the sequences 2 to 7 each has a flaw on one rank."""
    if (rank.rank, sequence) == (2, 3):
        return []
    facts = {(0, 4): {"generation": 6}, (0, 5): {"rank": 3}, (1, 6): {"step": 5}}.get((rank.rank, sequence), {})
    slot, share = rank.seal(sequence, SIZE, **facts)
    if (rank.rank, sequence) == (1, 2):
        slot.memory[SIZE // 3] ^= 1
    if (rank.rank, sequence) == (3, 7):
        share = SealedSlot(sequence, slot.memory[: SIZE - 1], share.header)
    return [share]


FLAWED = {2: 1, 3: 2, 4: 0, 5: 0, 6: 1, 7: 3}
"""Sequence -> the rank whose copies must not count."""


def _well(_: int, __: int, root: str) -> dict:
    rank = Rank(root, 1, 2, PATIENCE_SECS)
    said, found = warnings_of(), {}
    sources = rank.replicator.roster.placement.sources_of[rank.rank]
    for sequence in range(1, 8):
        acknowledged = rank.replicator.submit(sequence, *_flawed(rank, sequence)).result(PATIENCE_SECS)
        dist.barrier()
        found[sequence] = acknowledged, [source for source in sources if rank.holds(source, sequence, SIZE)]
        dist.barrier()
    found["said"] = texts(said)
    rank.replicator.store.release_except([6])
    found["except"] = sorted(sequence for _, sequence in rank.replicator.store.held())
    dist.barrier()
    found |= _several_slots(rank)
    found |= _many_rounds(rank)
    found["sources"], found["lag"] = list(sources), rank.replicator.lag_steps
    found["sent"] = rank.replicator.sent_bytes
    dist.barrier()
    found["closed"] = rank.close()
    return found


def _several_slots(rank: Rank) -> dict:
    """A step of a gradient log: of its two slots of gradients rank 1's second one is damaged at first."""
    found = {}
    for sequence in (8, 9):
        slots = [rank.seal(sequence, SIZE) for _ in range(3)]
        shares = []
        for place, (slot, share) in enumerate(slots[:2]):
            alone = replace(decode_slot(share.header, "a"), only="gradients", gradient_slot=place)
            slot.seal(encode_slot(alone))
            shares.append(SealedSlot(sequence, share.memory, encode_slot(alone)))
        if (rank.rank, sequence) == (1, 8):
            slots[1][0].memory[SIZE // 3] ^= 1
        acknowledged = rank.replicator.submit(sequence, *shares, slots[2][1]).result(PATIENCE_SECS)
        dist.barrier()
        there = sorted((key[0], key[2]) for key in rank.replicator.store._kept if key[1] == sequence)
        found[sequence] = acknowledged, there
    rank.replicator.store.release_except([9], over={(9, 0)})
    found["over"] = sorted((key[1], key[2]) for key in rank.replicator.store._kept)
    dist.barrier()
    return found


def _many_rounds(rank: Rank) -> dict:
    """Training that goes on, with two slots of its own in turns; of copies the newest two sequences are needed."""
    sources = rank.replicator.roster.placement.sources_of[rank.rank]
    own: list = [None, None]
    seen, wrong = [], []
    for sequence in range(100, 100 + ROUNDS):
        at = sequence % 2
        own[at], share = rank.seal(sequence, SIZE, own[at])
        acknowledged = rank.replicator.submit(sequence, share).result(PATIENCE_SECS)
        dist.barrier()
        rank.release_before(sequence - 1)
        if acknowledged != 2 or not all(rank.holds(source, sequence, SIZE) for source in sources):
            wrong.append(sequence)
        heads = [Slot.open(path.with_suffix(""))[1] for path in rank.files.path.glob("*.head")]
        wrong += [head for head in heads if head.rank != rank.rank and 100 <= head.step < sequence - 1]
        files = len(list(rank.files.path.glob("copy_*.head"))), (rank.files.path / COPIES).stat().st_size
        seen.append((*resources(), files, rank.replicator.store.nbytes, len(rank.replicator.store.held())))
        dist.barrier()
    last = weakref.ref(share)
    del share
    deadline = time.monotonic() + PATIENCE_SECS
    while last() is not None and time.monotonic() < deadline:  # by the threads that sent it
        time.sleep(0.01)
    return {"wrong": wrong, "seen": seen, "let go": last() is None}


@pytest.fixture(scope="module")
def well(tmp_path_factory) -> list[dict]:
    return run_ranks(_well, 4, str(tmp_path_factory.mktemp("well")))


def test_peers_hold_equal_copies(well):
    for rank in well:
        assert rank[1] == (2, rank["sources"])
        assert len(rank["sources"]) == 2


@pytest.mark.parametrize("sequence", FLAWED)
@pytest.mark.quick("2", "4", "7")
def test_what_is_not_as_its_header_says_is_refused_and_the_rest_goes_on(well, sequence):
    """A flipped byte, nothing, an old generation, another rank's or step's header, fewer bytes than announced."""
    for at, rank in enumerate(well):
        acknowledged, held = rank[sequence]
        assert acknowledged == (0 if at == FLAWED[sequence] else 2)
        assert held == [source for source in rank["sources"] if source != FLAWED[sequence]]


def test_a_step_of_several_slots_is_held_when_all_of_them_are(well):
    for at, rank in enumerate(well):
        acknowledged, there = rank[9]
        assert acknowledged == 2
        assert there == [(source, place) for source in sorted(rank["sources"]) for place in (-1, 0, 1)]
        assert rank["over"] == sorted((9, place) for place in (-1, 1) for _ in rank["sources"])
        acknowledged, there = rank[8]
        assert acknowledged == (0 if at == 1 else 2)
        assert [place for source, place in there if source == 1] == [0] * (1 in rank["sources"]), "the rest is not sent"


def test_refusals_are_explained(well):
    said = "\n".join(text for rank in well for text in rank["said"])
    assert "checksum mismatch in slice model/expert.3@0" in said
    assert "generation 6, rank 0, step 4; expected: run a-run, generation 7 or later" in said
    assert f"{SIZE - 1:,} bytes were announced, but its header says {SIZE:,}" in said


def test_fifty_steps_need_no_more_than_five(well):
    for rank in well:
        assert rank["wrong"] == []
        assert rank["let go"]
        warm = rank["seen"][4:]
        assert set(warm) == {warm[0]}, "descriptors, threads, files and bytes stay as they are"
        assert warm[0][-1] == 2 * len(rank["sources"]), "two sequences of each source"
        assert rank["except"] == [6] * (2 - (1 in rank["sources"]))
        assert rank["lag"] == 0
        assert rank["sent"] > ROUNDS * 2 * SIZE
        assert rank["closed"]


# --- peers that are paused, or gone ---

TIMEOUT_SECS = 6.0
LARGE = 24 * MIB
"""More than sockets take without their peer."""


def _failure(rank: Rank, future: Future[int]) -> tuple[str, float]:
    began = time.monotonic()
    assert future.result(PATIENCE_SECS) == 0
    return "".join(rank.replicator.lost.values()), time.monotonic() - began


def _failing(_: int, __: int, root: str) -> dict:
    """Ranks 0 and 1 are one node, 2 and 3 the other: each has its one copy at the rank two further on."""
    rank = Rank(root, 2, 1, TIMEOUT_SECS)
    said, found, me = warnings_of(), {}, rank.rank
    pids: list = [None] * 4
    dist.all_gather_object(pids, os.getpid())

    def submit(sequence: int) -> Future[int]:
        return rank.replicator.submit(sequence, rank.seal(sequence, LARGE)[1])

    found["well"] = submit(1).result(PATIENCE_SECS)
    dist.barrier()
    if me == 0:
        os.kill(pids[2], signal.SIGSTOP)
        pending = submit(2)
        try:
            found["early"] = pending.result(TIMEOUT_SECS / 3)
        except NotYet:
            found["early"] = "not yet"
        os.kill(pids[2], signal.SIGCONT)
        found["short pause"] = pending.result(PATIENCE_SECS)
    dist.barrier()
    if me == 0:
        os.kill(pids[2], signal.SIGSTOP)
        found["long pause"] = _failure(rank, submit(3))
        found["given up"] = _failure(rank, submit(4))
        os.kill(pids[2], signal.SIGCONT)
        found["lag"] = rank.replicator.lag_steps
    if me == 1:  # its peer is well, on the same node as the one that is paused
        found["beside"] = submit(3).result(PATIENCE_SECS)
    dist.barrier()
    if me == 2:
        found["back"] = submit(5).result(PATIENCE_SECS)
    dist.barrier()
    found["lost"] = sorted(rank.replicator.lost)
    if me == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if me == 1:
        found["killed"] = _failure(rank, submit(6))
    if me == 2:
        found["after"] = submit(6).result(PATIENCE_SECS)
    found["said"] = texts(said)
    began = time.monotonic()
    found["closed"] = rank.close(TIMEOUT_SECS), time.monotonic() - began
    return found


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("failing")
    outcomes = start_ranks(_failing, 4, str(root), grace=3 * PATIENCE_SECS)
    assert outcomes[3].exitcode == -signal.SIGKILL, outcomes[3].error
    for outcome in outcomes[:3]:
        assert outcome.ok, outcome.error
    return [outcome.value | {"root": root} for outcome in outcomes[:3]]


def test_a_short_pause_of_a_peer_only_delays(failing):
    assert [rank["well"] for rank in failing] == [1, 1, 1]
    assert failing[0]["early"] == "not yet"
    assert failing[0]["short pause"] == 1


def test_a_long_pause_costs_this_peer_and_no_other(failing):
    error, secs = failing[0]["long pause"]
    assert error.startswith("it did not take the copy of step 3: TimeoutError")
    assert secs > TIMEOUT_SECS / 2
    again, at_once = failing[0]["given up"]
    assert again == error
    assert at_once < TIMEOUT_SECS / 2
    assert failing[0]["lag"] == 2
    assert failing[1]["beside"] == 1
    [said] = [text for text in failing[0]["said"] if "gets no more copies" in text]
    assert said.startswith("rank 2 gets no more copies of rank 0 until the run is restarted")
    assert "1 steps behind" in said


def test_who_was_paused_itself_gives_up_nobody(failing):
    assert failing[2]["back"] == 1
    assert [rank["lost"] for rank in failing] == [[2], [], []]


def test_a_killed_peer_fails_what_was_meant_for_it(failing):
    error, secs = failing[1]["killed"]
    assert error.startswith("it did not take the copy of step 6: ")
    assert secs < TIMEOUT_SECS, "its connection tells, and not the timeout"
    assert failing[2]["after"] == 1


def test_copies_outlive_their_holder_and_say_whose_they_are(failing):
    """Rank 3 was killed; whoever starts on its node next finds what rank 1 had sent there, and rank 3's own."""
    files = MemoryFiles(str(failing[0]["root"] / "node_1"), RUN, 8, "another-life", 0, "a-store")
    try:
        files.take_left(same_rank=True)
        found = files.take_left(same_rank=False)
        assert {(each.header.rank, each.header.step) for each in found} == {(1, 1), (1, 3), (3, 1)}
        for each in found:
            expected = bytes_of(each.header.rank, each.header.step, LARGE)
            assert torch.equal(each.slot.memory[:LARGE], expected)
    finally:
        files.close(keep=False)


def test_an_end_beside_lost_peers_is_bounded(failing):
    for rank in failing:
        ended, secs = rank["closed"]
        assert ended
        assert secs < PATIENCE_SECS


# --- no room ---

ROOM = 20 * MIB


def _crowded(me: int, _: int, root: str) -> dict:
    rank = Rank(root, 1, 1, PATIENCE_SECS)
    said, found = warnings_of(), {"acknowledged": []}
    slots, own = [], None
    for sequence in (1, 2, 3):
        if me == 1 and sequence == 3:
            slots.pop().remove()
        if me == 1 and sequence == 1:
            slots.append(rank.files.make(ROOM - 9 * MIB))  # with what it sends itself, there is no room for another's
        dist.barrier()
        own, share = rank.seal(sequence, 4 * MIB, own)
        dist.barrier()
        found["acknowledged"].append(rank.replicator.submit(sequence, share).result(PATIENCE_SECS))
        dist.barrier()
        rank.release_before(sequence)
    found["said"] = texts(said)
    found["closed"] = rank.close()
    return found


def test_a_peer_without_room_refuses_says_so_once_and_takes_copies_again(tmp_path: Path):
    (tmp_path / "node_1").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM - 2 * MIB}", "tmpfs", str(tmp_path / "node_1")]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs of its own can be mounted here: {made.stderr.strip()}; run this test as root")
    try:
        here, there = run_ranks(_crowded, 2, str(tmp_path))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "node_1")], check=True)
    assert here["acknowledged"] == [0, 0, 1]
    assert there["acknowledged"] == [1, 1, 1]
    [said] = [text for text in here["said"] if "has no room" in text]
    assert said.startswith("rank 1 has no room for the copy of step 1 of rank 0: ")
    needed, free = re.search(r"([\d,]+) bytes are needed in its memory directory, ([\d,]+) are free", said).groups()
    assert int(free.replace(",", "")) < int(needed.replace(",", "")) <= 5 * MIB, "beside what there is"


# --- killed at any moment ---


def _until_killed(me: int, _: int, root: str, delay_secs: float) -> None:
    rank = Rank(root, 1, 1, PATIENCE_SECS)
    sealed = [rank.seal(at, LARGE // 2) for at in range(5)]  # more than slots there, so that each gets other bytes
    dist.barrier()
    if me == 1:
        threading.Timer(delay_secs, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for sequence in range(1, 100_000):
        if not rank.replicator.submit(sequence, sealed[sequence % 5][1]).result(PATIENCE_SECS):
            break
        rank.release_before(sequence - 1)
    rank.replicator.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_whenever_a_holder_is_killed_what_is_sealed_is_whole(tmp_path: Path, seed: int):
    delay_secs = random.Random(seed).uniform(0.0, 0.5)
    alive, killed = start_ranks(_until_killed, 2, str(tmp_path), delay_secs, grace=PATIENCE_SECS)
    assert alive.ok, alive.error
    assert killed.exitcode == -signal.SIGKILL
    for node in ("node_0", "node_1"):
        for facts in survey(str(tmp_path / node), verify=True):
            assert {slot.state for slot in facts.slots} <= {"sealed", "open"}, [slot.problem for slot in facts.slots]
