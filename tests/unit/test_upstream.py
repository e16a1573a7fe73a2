"""Upstream logs: what is written comes back, what is missing, damaged or out of order is found, budgets hold."""

from __future__ import annotations

import json
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt import Memory, attach
from moe_ckpt.comm.communicator import GlooCommunicator, SoloCommunicator
from moe_ckpt.errors import ConfigError, DamagedError, PeerLostError, ReplayDivergedError
from moe_ckpt.format.sealed import seal
from moe_ckpt.localized import exchange, log_files, recording
from moe_ckpt.localized.boundary import Boundary
from moe_ckpt.localized.exchange import Answers, LogExchange, is_for
from moe_ckpt.localized.log_files import SEND, Channel, LogHeader, Message, decode_log, encode_log, sealed_logs
from moe_ckpt.localized.recording import UpstreamLog
from moe_ckpt.localized.segments import LocalRecovery
from moe_ckpt.memory.directory import MESSAGES_SUFFIX, SEALED_SUFFIX, is_log, log_path
from moe_ckpt.policies import Dense
from moe_ckpt.reading.collective import NotUsableError
from tests.support.acted_gpu import ActedGPU
from tests.support.processes import run_ranks

HEADER = LogHeader("run", "life", 3, 3, 1, 4, "")
TO_NEXT, TO_PREVIOUS = Channel(SEND, (1, 2)), Channel(SEND, (1, 0))
NORM = Channel("all_reduce", (0, 1, 2, 3))


@pytest.fixture
def log(tmp_path):
    made = UpstreamLog(tmp_path, HEADER, 1 << 20)
    yield made
    made.close()


def one_step(log: UpstreamLog, step: int, *messages: tuple[Channel, torch.Tensor]) -> None:
    log.step_begins(step)
    for channel, tensor in messages:
        log.append(channel, tensor)
    log.step_ends().wait(30)


def test_what_is_written_comes_back(log, tmp_path):
    sent = torch.randn(3, 5).to(torch.bfloat16)
    count, nothing = torch.tensor(7), torch.empty(0, 4)
    log.step_begins(8)
    log.append(TO_NEXT, sent)
    before = sent.clone()
    sent.zero_()  # as Megatron frees what it has sent
    log.append(NORM, count)
    log.append(TO_PREVIOUS, nothing)
    log.append(TO_NEXT, before.t())
    log.step_ends().wait(30)
    [found] = sealed_logs(tmp_path)
    assert (found.header.step, found.header.rank, found.header.world_size) == (8, 1, 4)
    channels, tensors = zip(*((each.channel, tensor) for each, tensor in found.messages()), strict=True)
    assert channels == (TO_NEXT, NORM, TO_PREVIOUS, TO_NEXT)
    for one, other in zip(tensors, (before, count, nothing, before.t()), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_sent_from_a_gpu_may_change_at_once(tmp_path):
    """As gradients that two stages share are scaled where they lie."""
    with ActedGPU() as gpu:
        log, sent = UpstreamLog(tmp_path, HEADER, 1 << 20), torch.ones(4, device="cuda")
        log.step_begins(1)
        log.append(NORM, sent)
        sent.zero_()
        log.step_ends().wait(30)
        log.close()
        assert gpu.waits == []
        assert gpu.joins == 0
    [(_, logged)] = next(iter(sealed_logs(tmp_path))).messages()
    assert logged.tolist() == [1.0] * 4


def test_a_host_without_memory_for_a_message_ends_the_log_and_not_training(tmp_path, caplog):
    with ActedGPU() as gpu:
        log, gpu.refusals = UpstreamLog(tmp_path, HEADER, 1 << 20), 1
        one_step(log, 1, (TO_NEXT, torch.ones(4, device="cuda")))
        one_step(log, 2, (TO_NEXT, torch.ones(4, device="cuda")))
        log.close()
    assert caplog.text.count("keeps no upstream log") == 1
    assert "a message of rank 1 to rank 2 cannot be copied: CUDA error" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_never_ends_its_work_does_not_keep_training_from_ending(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_CLOSE_SECS", 0.2)
    log, never = UpstreamLog(tmp_path, HEADER, 1 << 20), threading.Event()
    log.step_begins(1)
    log._tasks.put(lambda: never.wait(5))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 4
    never.set()


def test_a_step_that_did_not_end_is_no_log(log, tmp_path):
    log.step_begins(1)
    log.append(TO_NEXT, torch.ones(4))
    assert sealed_logs(tmp_path) == []
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_the_budget_holds_and_the_oldest_go_first(tmp_path):
    log = UpstreamLog(tmp_path, HEADER, 100)
    for step in range(1, 8):
        one_step(log, step, (TO_NEXT, torch.ones(10)))
        assert log.nbytes <= 100
    assert sorted(one.step for one in log._sizes) == [6, 7]
    log.close()
    assert [each.header.step for each in sealed_logs(tmp_path)] == [6, 7]


def test_one_step_above_the_budget_ends_the_log_and_says_so(tmp_path, caplog):
    log = UpstreamLog(tmp_path, HEADER, 100)
    one_step(log, 1, (TO_NEXT, torch.ones(10)))
    one_step(log, 2, (TO_NEXT, torch.ones(20)), (TO_NEXT, torch.ones(20)))
    log.close()
    assert "step 2 alone take more than the budget of 100 bytes: raise Memory(upstream_bytes=...)" in caplog.text
    assert "all ranks go back" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_full_memory_ends_the_log_and_not_training(log, tmp_path, caplog, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_files, "write_all", full)
    one_step(log, 1, (TO_NEXT, torch.ones(10)))
    one_step(log, 2, (TO_NEXT, torch.ones(10)))
    log.close()
    assert caplog.text.count("keeps no upstream log") == 1
    assert "needs 40 there" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_what_is_superseded_goes(log, tmp_path):
    for step in range(1, 5):
        one_step(log, step, (TO_NEXT, torch.ones(10)))
    log.drop(3)
    log.close()
    assert [each.header.step for each in sealed_logs(tmp_path)] == [4]


@pytest.mark.parametrize("suffix", [MESSAGES_SUFFIX, SEALED_SUFFIX])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_is_found(log, tmp_path, suffix, how):
    one_step(log, 1, (TO_NEXT, torch.ones(10)), (NORM, torch.ones(1)))
    path = log_path(tmp_path, 1).with_suffix(suffix)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.unlink() if how == "gone" else path.write_bytes(raw if how == "flipped" else raw[:-1])
    if suffix == SEALED_SUFFIX:
        assert sealed_logs(tmp_path) == []
    else:
        [found] = sealed_logs(tmp_path)
        with pytest.raises((DamagedError, FileNotFoundError)):
            list(found.messages())


def test_what_earlier_lives_left_counts_and_goes_first(log, tmp_path):
    for step in (1, 2):
        one_step(log, step, (TO_NEXT, torch.ones(100)))
    log.close()
    own = tmp_path / "next"
    own.mkdir()
    after = UpstreamLog(own, replace(HEADER, generation=4, history=4), 1000, sealed_logs(tmp_path))
    one_step(after, 3, (TO_NEXT, torch.ones(100)))
    assert after.nbytes == 800
    assert [each.header.step for each in sealed_logs(tmp_path)] == [2]
    after.drop(2)
    one_step(after, 4, (TO_NEXT, torch.ones(100)))
    assert (after.nbytes, sealed_logs(tmp_path)) == (800, [])
    after.close()
    assert [each.header.step for each in sealed_logs(own)] == [3, 4]


def step_once(root: Path, **logs: str) -> None:
    """One start of a run, which ends after a step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    memory = Memory(directory=str(root), storage_every=1000, **logs)
    ckpt = attach(model, optimizer, policy=Dense(), dirpath=root / "store", memory=memory)
    begun = ckpt.resume().step
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    ckpt.after_step(begun + 1)
    ckpt.close(failure="the test ends it")


def test_what_a_run_left_that_logs_nothing_any_more_goes(tmp_path):
    step_once(tmp_path)
    [place] = {path.parent for path in tmp_path.rglob("rank_00000/*.head")}
    left = UpstreamLog(place, HEADER, 1 << 20)
    one_step(left, 1, (TO_NEXT, torch.ones(10)))
    left.close()
    assert [each.header.step for each in sealed_logs(place)] == [1]
    step_once(tmp_path)
    assert list(tmp_path.rglob("upstream_*")) == []


def test_a_log_of_another_step_is_refused(log, tmp_path, caplog):
    one_step(log, 1, (TO_NEXT, torch.ones(10)))
    for suffix in (MESSAGES_SUFFIX, SEALED_SUFFIX):
        log_path(tmp_path, 1).with_suffix(suffix).rename(log_path(tmp_path, 2).with_suffix(suffix))
    assert sealed_logs(tmp_path) == []
    assert "it is of step 1" in caplog.text


@pytest.mark.parametrize(("histories", "gap"), [((3, 3, 3), None), ((3, 4, 4), (0, 1)), ((3, 4, 3), (0, 2))])
def test_logs_of_one_history_count(histories, gap, tmp_path):
    """That of the newest life: what all ranks went back behind, and computed again, may not be what it was."""
    for number, history in enumerate(histories):
        step, generation = number + 1, number + 3
        header = replace(HEADER, rank=0, world_size=1, generation=generation, history=generation)
        of_life = UpstreamLog(tmp_path, header, 1 << 20)
        of_life.continue_history(history)
        one_step(of_life, step, (TO_NEXT, torch.ones(2)))
        of_life.close()
    kept = sealed_logs(tmp_path)
    found = LogExchange(SoloCommunicator(), kept, LocalRecovery(3, (), ()), since=0, lives=range(3, 6))
    assert (found.history, found.gap) == (histories[-1], gap)


class Meagre:
    """``torch`` of a process that gets no memory."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, nbytes, **how):
        raise RuntimeError("not enough memory")


def without_memory(rank: int, world_size: int, path: str) -> tuple[str, float]:
    """Rank 1 computes a step again, and has no room for what rank 0 sent it."""
    if rank == 0:
        of_rank = UpstreamLog(Path(path), replace(HEADER, rank=0, world_size=2), 1 << 20)
        one_step(of_rank, 1, (Channel(SEND, (0, 1)), torch.ones(2)))
        of_rank.close()
    else:
        exchange.torch = Meagre()
    comm = GlooCommunicator(30.0)
    kept = sealed_logs(Path(path)) if rank == 0 else []
    found = LogExchange(comm, kept, LocalRecovery(1, (), (1,)), since=0, lives=range(HEADER.generation + 1))
    assert found.gap is None
    began = time.monotonic()
    try:
        found.received()
    except (NotUsableError, PeerLostError, RuntimeError) as error:
        return f"{type(error).__name__}: {getattr(error, 'problem', error)}", time.monotonic() - began
    finally:
        comm.close()
    return "", 0.0


def test_a_rank_without_memory_for_what_it_was_sent_keeps_nobody_waiting(tmp_path):
    (told, waited), (own, _) = run_ranks(without_memory, 2, str(tmp_path))
    assert own == "NotUsableError: not enough memory"
    assert told == "NotUsableError: None"
    assert waited < 10


MESSAGE = Message(TO_NEXT, 0, "F32", (2, 3), "0" * 16)
HEADER = LogHeader(*("run", "life", 2, 1, 1, 4, "pp=4", 5), (MESSAGE, Message(NORM, 0, "F64", (3,), "1" * 16)))


def test_headers_come_back():
    assert decode_log(encode_log(HEADER), "a.sealed") == HEADER
    assert HEADER.nbytes == 48


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format_version",), 2),
        (("history",), -1),
        (("kind",), "moe_ckpt.slot"),
        (("messages", 0, 3), [2, -4]),
        (("messages", 0, 0), 2),
        (("messages", 0, 0), 1),
        (("messages", 0, 1), 1),
        (("channels", 0, "messages"), 2),
        (("messages", 0, 2), "F31"),
        (("step",), -1),
    ],
)
def test_headers_that_contradict_themselves_are_refused(where, value):
    body = json.loads(encode_log(HEADER))["body"]
    at = body
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    with pytest.raises(DamagedError, match=r"a\.sealed"):
        decode_log(seal(body), "a.sealed")


@given(st.binary(max_size=200))
def test_other_bytes_are_no_header(raw):
    with pytest.raises(DamagedError):
        decode_log(raw, "a.sealed")


def answers(*sent: tuple[Channel, torch.Tensor]) -> Answers:
    received: dict[Channel, list[tuple[Message, torch.Tensor]]] = {}
    for channel, tensor in sent:
        before = received.setdefault(channel, [])
        message = Message(channel, len(before), "F32", tuple(tensor.shape), "")
        before.append((message, tensor))
    return Answers(5, received)


def test_answers_come_in_order():
    found = answers((TO_NEXT, torch.ones(2)), (NORM, torch.full((1,), 9.0)), (TO_NEXT, torch.zeros(2)))
    into = torch.full((1, 2), 5.0, requires_grad=True)
    found.give(TO_NEXT, into)
    assert into.tolist() == [[1.0, 1.0]]
    found.give(TO_NEXT, into)
    assert into.tolist() == [[0.0, 0.0]]
    with pytest.raises(ReplayDivergedError, match=r"all_reduce of ranks 0, 1, 2, 3 was received then, and not now"):
        found.require_all_given()
    found.give(NORM, torch.empty(1))
    found.require_all_given()


def test_a_message_too_many_or_of_another_shape_is_refused():
    found = answers((TO_NEXT, torch.ones(2)))
    with pytest.raises(ReplayDivergedError, match="rank 1 to rank 0 is needed now, but the upstream log has no"):
        found.give(TO_PREVIOUS, torch.empty(2))
    with pytest.raises(ReplayDivergedError, match=r"is F32 \[3\] now, and was F32 \[2\]"):
        found.give(TO_NEXT, torch.empty(3))
    with pytest.raises(ReplayDivergedError, match="is F64"):
        answers((TO_NEXT, torch.ones(2))).give(TO_NEXT, torch.empty(2, dtype=torch.float64))


def test_a_message_in_the_place_of_another_is_refused_and_told():
    told: list[str] = []
    second = Message(TO_NEXT, 1, "F32", (2,), "")
    found = Answers(5, {TO_NEXT: [(second, torch.ones(2))]}, lambda: told.append("diverged"))
    with pytest.raises(ReplayDivergedError, match="number 0, is needed now, and number 1 is next"):
        found.give(TO_NEXT, torch.empty(2))
    assert told == ["diverged"]


def spoiled(header: LogHeader, how: str) -> LogHeader:
    """``header`` without a message, with one twice, or with two swapped, all of one channel and one shape."""
    one, two, three = header.messages
    kept = {"missing": (one, three), "last missing": (one, two), "twice": (one, two, two, three)}.get(how)
    kept = kept or (two, one, three)
    return replace(header, messages=kept)


@pytest.mark.parametrize("how", ["missing", "last missing", "twice", "swapped"])
def test_messages_that_are_not_all_there_in_their_order_are_refused(how):
    """Whatever their checksums say."""
    messages = tuple(replace(MESSAGE, checksum=f"{at:016x}", number=at) for at in range(3))
    header = replace(HEADER, messages=messages)
    assert decode_log(encode_log(header), "a.sealed") == header
    body = json.loads(encode_log(spoiled(header, how)))["body"]
    body["channels"][0]["messages"] = 3
    with pytest.raises(DamagedError, match="3 were sent, and the log has numbers"):
        decode_log(seal(body), "a.sealed")


def test_who_gives_what_to_whom():
    alone = {2, 3}
    assert is_for(TO_NEXT, 2, alone, 1)
    assert not is_for(TO_NEXT, 2, alone, 0)
    assert not is_for(TO_NEXT, 3, alone, 1)
    assert [is_for(NORM, 3, alone, writer) for writer in (0, 1)] == [True, False]
    assert not is_for(Channel("all_reduce", (2, 3)), 2, alone, 1)
    assert not is_for(Channel("all_reduce", (0, 1)), 2, alone, 0)


def test_what_passes_a_boundary_that_is_alone():
    boundary = Boundary([0, 1, 2, 2], None)
    assert boundary.crosses((0, 1))
    assert not boundary.crosses((2, 3))
    assert boundary.sends(TO_NEXT, torch.ones(1))
    assert not boundary.receives(TO_NEXT, torch.ones(1))
    boundary.go_alone([1, 2, 3], answers((Channel(SEND, (0, 1)), torch.ones(1)), (NORM, torch.ones(1))))
    assert boundary.sends(TO_NEXT, torch.ones(1)), "rank 2 computes it again, too"
    assert not boundary.sends(TO_PREVIOUS, torch.ones(1))
    assert boundary.receives(Channel(SEND, (0, 1)), torch.empty(1))
    assert not boundary.receives(Channel(SEND, (2, 1)), torch.empty(1))
    assert boundary.answers(NORM, [torch.empty(1)])
    assert not boundary.answers(Channel("all_reduce", (1, 2)), [torch.empty(1)])
    boundary.together()
    assert boundary.sends(TO_PREVIOUS, torch.ones(1))


def test_an_evaluation_is_not_logged_and_not_met_halfway(log, tmp_path):
    boundary = Boundary([0, 1, 2, 2], log)
    log.step_begins(1)
    boundary.sends(TO_NEXT, torch.ones(4))
    with torch.no_grad():
        boundary.sends(TO_NEXT, torch.ones(4))
        boundary.receives(Channel(SEND, (0, 1)), torch.ones(4))
    log.step_ends().wait(30)
    one_step(log, 2, (TO_NEXT, torch.ones(4)))
    assert sorted(one.step for one in log._sizes) == [2]
    assert [each.header.step for each in sealed_logs(tmp_path)] == [2]
    boundary.together(7)
    with torch.no_grad(), pytest.raises(ReplayDivergedError, match="evaluates the model right after it"):
        boundary.receives(Channel(SEND, (0, 1)), torch.ones(4))
    boundary.sends(TO_NEXT, torch.ones(4))
    with torch.no_grad():
        assert not boundary.receives(Channel(SEND, (0, 1)), torch.ones(4)), "training goes on together"


def test_a_log_that_is_written_too_slowly_ends(tmp_path, caplog):
    log, hold = UpstreamLog(tmp_path, HEADER, 100), threading.Event()
    log._tasks.put(lambda: hold.wait(30) and None)
    log.step_begins(1)
    log.append(TO_NEXT, torch.ones(20))
    log.step_begins(2)
    log.append(TO_NEXT, torch.ones(20))
    hold.set()
    log.close()
    assert "messages are written more slowly than they are sent: 160 bytes wait" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_cannot_be_logged_ends_the_log(log, caplog):
    boundary = Boundary([0, 1, 2, 2], log)
    log.step_begins(1)
    boundary.refused(Channel("all_to_all", (0, 1)))
    assert "all_to_all of ranks 0, 1" in caplog.text
    assert sorted(one.step for one in log._sizes) == []


def test_files_that_are_logs():
    beside = {"upstream_00000001.messages", "upstream_00000001.sealed", "upstream_00000002.messages"}
    assert [name for name in sorted(beside) if is_log(name, beside)] == sorted(beside)[:2]
    assert not is_log("slot_001.sealed", {"slot_001.sealed", "slot_001.messages"})


@pytest.mark.parametrize("given", [-1, "much", True])
def test_budgets_that_cannot_be(given):
    with pytest.raises(ConfigError, match="upstream_bytes"):
        Memory(upstream_bytes=given)


def test_a_log_without_survivors_helps_nobody():
    assert Memory(upstream_bytes="1KiB").upstream_bytes == 1024
    with pytest.raises(ConfigError, match="survivor_secs"):
        Memory(upstream_bytes=1, survivor_secs=0)


def test_lightning_has_no_stages():
    from moe_ckpt.callbacks import MoECheckpoint

    with pytest.raises(ConfigError, match="Lightning trains without a pipeline"):
        MoECheckpoint(memory=Memory(upstream_bytes="1GB"))


def test_a_loop_without_megatron_has_no_stages_either(tmp_path):
    with pytest.raises(ConfigError, match="only stages of a Megatron pipeline"):
        step_once(tmp_path, upstream_bytes="1MB")
