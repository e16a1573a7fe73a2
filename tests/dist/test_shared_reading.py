"""Ranks that need the same of storage read it once together, and every bit arrives. Real gloo ranks under DDP."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.comm.communicator import GlooCommunicator, SoloCommunicator, make_communicator
from moe_ckpt.errors import PeerLostError, StoreError
from moe_ckpt.interop.weights import load_weights
from moe_ckpt.modeling.training_state import TorchTrainingState
from moe_ckpt.reading import shared_reading
from moe_ckpt.reading.collective import NotUsableError
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.recovery.executing import StorageSource
from moe_ckpt.recovery.resume import load_step, resume_newest, whole_tensors
from moe_ckpt.storage import LocalStorage
from tests.dist.test_sharding_bytes import made, state_of, train
from tests.support import run_ranks, start_ranks
from tests.support.tensor_reads import tensor_bytes_read

SMALL_NBYTES = 100_000
"""Of a round: several, and slices that are larger."""


def write(rank: int, world_size: int, root: str) -> dict[str, torch.Tensor]:
    return train(rank, world_size, root)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor], int]:
    """(root, newest state, bytes that one rank alone reads)"""
    root = tmp_path_factory.mktemp("store")
    last = run_ranks(write, 2, str(root))[0]
    with tensor_bytes_read() as noted:
        found, directory = resume(str(root), SoloCommunicator())
    assert directory == newest_of(root)
    require_equal(found, last)
    return root, last, sum(nbytes for _, nbytes in noted)


def newest_of(root: Path | str) -> str:
    return StoreReader(LocalStorage(root)).directories()[0]


def require_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.equal(found[key], values), key


def resume(root: str, comm) -> tuple[dict[str, torch.Tensor], str]:
    model, optimizer = made()
    state = TorchTrainingState(model, [optimizer])
    restored = resume_newest(LocalStorage(root), comm, state)
    return state_of(state), restored.manifest.directory


@contextmanager
def as_ranks_do(rank: int, nodes: int = 1):
    """Inside, small rounds, and ranks divided among machines. Yields the communicator."""
    shared_reading.RUN_NBYTES = SMALL_NBYTES
    shared_reading.this_machine = lambda: str(rank * nodes // dist.get_world_size())
    comm = make_communicator(20.0)
    try:
        yield comm
    finally:
        comm.close()


def shared(rank: int, world_size: int, root: str, nodes: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """(state, bytes of tensors read, bytes sent to other machines)"""
    swap, sent = GlooCommunicator.swap, []

    def noting(self, given, expected):
        for target, group in given.items():
            if target * nodes // world_size != rank * nodes // world_size:
                sent.extend(tensor.numel() for tensor in group)
        swap(self, given, expected)

    GlooCommunicator.swap = noting
    with tensor_bytes_read() as noted, as_ranks_do(rank, nodes) as comm:
        found, directory = resume(root, comm)
    assert directory == newest_of(root)
    return found, sum(nbytes for _, nbytes in noted), sum(sent)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2)])
def test_together_they_read_as_much_as_one_alone_evenly_and_get_every_bit(store, ranks, nodes):
    root, last, alone = store
    results = run_ranks(shared, ranks, str(root), nodes)
    for found, _, _ in results:
        require_equal(found, last)
    read = [nbytes for _, nbytes, _ in results]
    assert alone <= sum(read) < alone + 1000, "beside that, each its own buffers and generators"
    assert max(read) < 1.5 * alone / ranks
    once = alone / 2  # verified first, then loaded
    crossed = sum(nbytes for _, _, nbytes in results)
    assert (crossed == 0) if nodes == 1 else once <= crossed < 1.05 * once, "to another machine once, not to each rank"


def on_a_default_device(rank: int, world_size: int, root: str) -> dict[str, torch.Tensor]:
    """A script made "meta" its default device, in place of "cuda", after it made its model."""
    model, optimizer = made()
    state = TorchTrainingState(model, [optimizer])
    torch.set_default_device("meta")
    with as_ranks_do(rank) as comm:
        resume_newest(LocalStorage(root), comm, state)
    torch.set_default_device(None)
    return state_of(state)


def test_a_default_device_of_the_script_is_not_that_of_messages(store):
    root, last, _ = store
    for found in run_ranks(on_a_default_device, 2, str(root)):
        require_equal(found, last)


class Meagre:
    """``torch`` of a process that gets no memory."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, nbytes, **how):
        if nbytes:
            raise RuntimeError("not enough memory")
        return torch.empty(nbytes, **how)


def without_memory(rank: int, world_size: int, root: str) -> str:
    if rank == 1:
        shared_reading.torch = Meagre()
    with as_ranks_do(rank) as comm:
        try:
            resume(root, comm)
        except Exception as error:  # told
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_without_memory_for_what_is_handed_over_keeps_nobody_waiting(store):
    told, own = run_ranks(without_memory, 2, str(store[0]))
    assert own == "RuntimeError: not enough memory"
    assert told.startswith("StoreError: rank 1 ")


def damaged(rank: int, world_size: int, root: str, when: str) -> tuple[dict[str, torch.Tensor], str, list[str]]:
    """(state, step, warnings)"""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("moe_ckpt").addHandler(handler)
    newest = newest_of(root)
    flag = Path(root, "flipped")

    def flip() -> None:
        if rank == 0:
            reader = StoreReader(LocalStorage(root))
            own = (each for each in reader.index(reader.manifest(newest)).live if each.path.startswith(newest))
            stored = max(own, key=lambda each: each.nbytes)
            path = Path(root, stored.path)
            raw = bytearray(path.read_bytes())
            raw[stored.offset + 1] ^= 1
            path.write_bytes(raw)
            flag.touch()
        while not flag.exists():
            time.sleep(0.01)

    verify = StorageSource.verify

    def verified(self):
        verify(self)
        if when == "after it was verified":
            flip()

    StorageSource.verify = verified
    with as_ranks_do(rank) as comm:
        if when == "before":
            flip()
        found, directory = resume(root, comm)
    return found, directory, said


@pytest.mark.parametrize("when", ["before", "after it was verified"])
def test_damage_that_one_reader_sees_makes_all_ranks_take_the_older_checkpoint(store, tmp_path, when):
    root = tmp_path / "store"
    shutil.copytree(store[0], root)
    (one, first, said), (other, second, said_there) = run_ranks(damaged, 2, str(root), when)
    newest, older, *_ = StoreReader(LocalStorage(store[0])).directories()
    assert first == second == older
    require_equal(one, other)
    alone = tmp_path / "older"
    shutil.copytree(store[0], alone)
    shutil.rmtree(alone / newest)
    require_equal(one, resume(str(alone), SoloCommunicator())[0])
    saw = ["checksum mismatch" in " ".join(each) for each in (said, said_there)]
    assert saw.count(True) == 1, (said, said_there)  # only the rank that was to read it has read it


def unreadable(rank: int, world_size: int, root: str) -> str:
    """Rank 1 gets no answer when it reads for both."""
    read, prepared = LocalStorage.read, []
    prepare_and_write = StorageSource.prepare_and_write

    def preparing(self):
        prepared.append(True)
        prepare_and_write(self)

    def refusing(self, path, offset=0, nbytes=None):
        if prepared and rank == 1:
            raise OSError(5, "Input/output error")
        return read(self, path, offset, nbytes)

    LocalStorage.read, StorageSource.prepare_and_write = refusing, preparing
    model, optimizer = made()
    with as_ranks_do(rank) as comm:
        try:
            resume_newest(LocalStorage(root), comm, TorchTrainingState(model, [optimizer]), read_patience_secs=0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "resumed"


def test_a_rank_that_storage_does_not_answer_ends_the_start_on_all(store):
    one, other = run_ranks(unreadable, 2, str(store[0]))
    assert one.startswith("StoreError: rank 1 cannot resume from checkpoint")
    assert other.startswith("StoreUnreadableError")


def disturbed(rank: int, world_size: int, root: str) -> tuple[dict[str, torch.Tensor], str, int]:
    """Rank 1 receives one wrong bit with every transfer."""
    swap = GlooCommunicator.swap

    def flipping(self, given, expected):
        swap(self, given, expected)
        if rank == 1:
            for tensor in (tensor for group in expected.values() for tensor in group):
                tensor[0] ^= 1

    GlooCommunicator.swap = flipping
    with tensor_bytes_read() as noted, as_ranks_do(rank) as comm:
        found, directory = resume(root, comm)
    return found, directory, sum(nbytes for _, nbytes in noted)


def test_what_arrives_damaged_is_read_from_storage(store):
    root, last, alone = store
    (one, first, read), (other, second, more) = run_ranks(disturbed, 2, str(root))
    assert first == second == newest_of(root)
    require_equal(one, last)
    require_equal(other, last)
    assert read + more > alone
    assert read < 0.75 * alone


def killed(rank: int, world_size: int, root: str) -> tuple[str, float]:
    """Rank 1 is killed while bytes are handed over, in the third round."""
    swap, times = GlooCommunicator.swap, []

    def dying(self, given, expected):
        times.append(time.monotonic())
        if rank == 1 and len(times) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        swap(self, given, expected)

    GlooCommunicator.swap = dying
    with as_ranks_do(rank) as comm:
        try:
            resume(root, comm)
        except PeerLostError as error:
            return str(error), time.monotonic() - times[-1]
    return "resumed", 0.0


def test_kill_9_of_a_rank_while_bytes_are_handed_over_ends_the_others_and_the_next_start_is_right(store):
    root, last, _ = store
    outcomes = start_ranks(killed, 4, str(root), grace=60.0)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome.ok, outcome.error
        said, secs = outcome.value
        assert "lost the connection to a peer while waiting for the other ranks to send what they hold" in said
        assert secs < 45
    require_equal(run_ranks(shared, 2, str(root), 1)[1][0], last)


def named(
    rank: int, world_size: int, root: str, what: str, fault: str = ""
) -> tuple[dict[str, torch.Tensor], int, str]:
    """(state, bytes of tensors read, error) of a step that is named, or of its weights."""
    read, directory = LocalStorage.read, newest_of(root)
    model, optimizer = made()
    state = TorchTrainingState(model, [optimizer])

    def refusing(self, path, offset=0, nbytes=None):
        if path.endswith(".safetensors") and offset > 0:  # a header is read from the beginning
            raise OSError(5, "Input/output error")
        return read(self, path, offset, nbytes)

    def dying(self, given, expected):
        os.kill(os.getpid(), signal.SIGKILL)

    StoreReader.__init__.__defaults__ = (0.0,)  # tries nothing again
    if rank == 1 and fault == "unreadable":
        LocalStorage.read = refusing
    if rank == 1 and fault == "killed":
        GlooCommunicator.swap = dying

    def opens():
        reader = StoreReader(LocalStorage(root))
        manifest = reader.manifest(directory)
        reader.prove(manifest)
        return reader, manifest

    found, said = {}, ""
    with tensor_bytes_read() as noted, as_ranks_do(rank) as comm:
        try:
            if what == "whole":
                found = whole_tensors(comm, *opens())
            elif what == "weights":
                load_weights(f"{root}/{directory}", state, comm, {})
            else:
                load_step(comm, opens, state)
            found = found or state_of(state)
        except NotUsableError as error:
            said = f"rank {error.rank}: {error.problem}"
        except StoreError as error:
            said = f"{type(error).__name__}: {error}"
    return found, sum(nbytes for _, nbytes in noted), said


@pytest.mark.parametrize("what", ["whole", "step", "weights"])
@pytest.mark.quick("whole", "weights")
def test_a_step_that_is_named_is_read_once(store, what):
    root, last, alone = store
    results = run_ranks(named, 2, str(root), what)
    once = alone / 2  # verified first, then loaded
    if what == "weights":
        last = {key: values for key, values in last.items() if key.startswith("model/")}
        once = sum(values.nbytes for values in last.values())
    for found, _, _ in results:
        require_equal(found, last)
    passes = 1 if what == "whole" else 2
    read = [nbytes for _, nbytes, _ in results]
    assert sum(read) == pytest.approx(passes * once, abs=1000), "beside that, buffers and generators"
    assert max(read) < 0.75 * passes * once


@pytest.mark.parametrize("what", ["whole", "step", "weights"])
@pytest.mark.quick("step")
def test_a_rank_that_cannot_read_its_part_of_a_named_step_fails_all(store, what):
    (_, _, one), (_, _, other) = run_ranks(named, 2, str(store[0]), what, "unreadable")
    assert "Input/output error" in other
    assert one.startswith(("rank 1: ", "StoreError: rank 1 cannot load"))


@pytest.mark.parametrize("what", ["whole", "weights"])
@pytest.mark.quick("whole")
def test_kill_9_of_a_rank_that_reads_a_named_step_ends_the_others(store, what):
    one, other = start_ranks(named, 2, str(store[0]), what, "killed", grace=60.0)
    assert other.exitcode == -signal.SIGKILL
    assert one.ok, one.error
    assert one.value[2].startswith("PeerLostError: ")
    assert "to send what they hold" in one.value[2]
