"""The arena: made once, in the background; unlocked before it is unmapped; its rooms are what its file has."""

from __future__ import annotations

import errno
import gc
import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from moe_ckpt.errors import MemoryFullError
from moe_ckpt.memory import arena as arena_module
from moe_ckpt.memory import mapping
from moe_ckpt.memory.arena import Arena
from moe_ckpt.memory.mapping import Pages
from moe_ckpt.slices import copying
from tests.support.acted_gpu import CUDA, ActedGPU

needs_tmpfs = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs")
PIECE = 1 << 16
MB = 1 << 20


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(mapping, "LOCK_NBYTES", PIECE)
    monkeypatch.setattr(arena_module, "_PIECE_NBYTES", PIECE)
    gc.collect()  # what tests before have locked is not unlocked in the middle of this one
    with ActedGPU() as acted:
        acted.locking_secs_per_byte = 0.0
        yield acted


@pytest.fixture(params=["file", "anonymous"])
def path(request, tmp_path):
    return tmp_path / "arena" if request.param == "file" else None


def test_rooms_are_lent_of_what_was_made_only(path):
    arena = Arena(MB, path=path)
    assert arena.take([100]) is None
    assert arena.grow(10_000)
    assert not arena.grow(10_000), "it is there"
    assert arena.ready == 12288
    one, other = arena.take([100, 5000])
    one.memory.fill_(1)
    other.memory.fill_(2)
    assert arena.take([8000]) is None
    assert arena.grow(arena.end_for([8000]))
    third = arena.take([8000])[0]
    third.memory.fill_(3)
    assert (int(one.memory.sum()), int(other.memory.sum())) == (100, 10_000)
    arena.free(other)
    assert arena.take([5000])[0].begin == other.begin
    with pytest.raises(ValueError, match="not in list"):
        arena.free(third), arena.free(third)
    assert not arena.grow(10 * MB) or arena.ready == MB


def test_the_training_thread_asks_the_kernel_for_nothing(path, monkeypatch):
    arena = Arena(MB, path=path)
    arena.grow(MB)
    called = []

    class Library:
        def __getattr__(self, name):
            called.append(name)
            return lambda *_: 0

    gc.collect()  # what tests before have mapped is not unmapped in the middle of this one
    monkeypatch.setattr(mapping, "_LIBRARY", Library())
    buffers = arena.take([1000, 2000, 3000])
    for buffer in buffers:
        buffer.memory.fill_(7)
        arena.free(buffer)
    assert called == []


def test_a_file_is_what_the_next_process_goes_on_with(tmp_path):
    first = Arena(MB, path=tmp_path / "arena")
    first.grow(100_000)
    buffer = first.take([300, 50_000])[1]
    buffer.memory.copy_(torch.arange(50_000) % 251)
    del first
    second = Arena(1000, path=tmp_path / "arena")
    assert (second.ready, second.nbytes) == (0, 102_400)
    adopted = second.adopt(buffer.begin, 50_000)
    assert torch.equal(adopted.memory, (torch.arange(50_000) % 251).to(torch.uint8))
    with pytest.raises(ValueError, match="overlaps"):
        second.adopt(buffer.begin + 64, 10)
    with pytest.raises(ValueError, match="not in a file"):
        second.adopt(102_400, 10)
    assert second.grow(1)
    assert second.ready == 102_400, "its pages exist"
    assert not second.grow(second.nbytes)
    [other] = second.take([50_000])
    other.memory.fill_(9)
    assert torch.equal(adopted.memory, (torch.arange(50_000) % 251).to(torch.uint8))
    assert second.adopted_nbytes == 50_000
    second.free(adopted)
    assert second.adopted_nbytes == 0


@pytest.fixture
def shared_memory():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@needs_tmpfs
def test_pages_that_the_process_before_did_not_live_to_touch_are_not_ready(shared_memory):
    first = Arena(MB, path=shared_memory / "arena")
    first.grow(100_000)
    del first
    os.truncate(shared_memory / "arena", MB)
    second = Arena(MB, path=shared_memory / "arena")
    assert second.grow(1)
    assert (second.ready, second.nbytes) == (102_400, MB)
    assert second.grow(MB)
    assert os.stat(shared_memory / "arena").st_blocks * 512 == second.ready == MB


def test_pages_of_the_process_before_are_locked_again(tmp_path, gpu):
    Arena(2 * PIECE, path=tmp_path / "arena", locks=True).grow(2 * PIECE)
    second = Arena(2 * PIECE, path=tmp_path / "arena", locks=True)
    assert (second.ready, second.nbytes) == (0, 2 * PIECE)
    assert second.grow(second.nbytes)
    assert [nbytes for _, nbytes in gpu.lockers][-2:] == [PIECE] * 2
    del second


def test_it_shrinks_to_its_last_room(path):
    arena = Arena(MB, path=path)
    arena.grow(MB)
    one, other = arena.take([100_000, 200_000])
    arena.shrink(50_000)
    assert arena.ready == 303_104
    arena.free(other)
    arena.shrink(50_000)
    assert arena.ready == arena.nbytes == 102_400
    if path is not None:
        assert path.stat().st_size == 102_400
    one.memory.fill_(1)
    assert arena.grow(MB)
    assert int(arena.take([200_000])[0].memory.sum()) == 0, "given back, and made again"


def test_a_full_file_system_is_an_error_and_leaves_what_there_was(tmp_path, monkeypatch):
    arena = Arena(MB, path=tmp_path / "arena")
    arena.grow(100_000)
    monkeypatch.setattr(arena_module, "free_bytes", lambda descriptor: 50_000)
    monkeypatch.setattr(arena_module, "_RECORDS_NBYTES", 1000)
    with pytest.raises(MemoryFullError, match="50,000 bytes free"):
        arena.grow(200_000)
    assert not arena.grow(102_400)
    with pytest.raises(MemoryFullError):
        arena.grow(102_400 + 40_000, spare=20_000)
    assert arena.grow(102_400 + 40_000)


@needs_tmpfs
def test_pages_that_are_not_to_be_had_are_no_signal(tmp_path, monkeypatch):
    """Between the look at what is free and the making, others may have taken it."""
    arena = Arena(MB, path=tmp_path / "arena")
    arena.grow(100_000)
    monkeypatch.setattr(mapping._LIBRARY, "madvise", lambda *_: mapping.ctypes.set_errno(14) or -1)
    with pytest.raises(MemoryFullError):
        arena.grow(200_000)
    assert (tmp_path / "arena").stat().st_size == arena.ready == 102_400


def test_kernels_that_do_not_make_pages_on_demand(path, monkeypatch):
    """Before Linux 5.14."""
    monkeypatch.setattr(mapping._LIBRARY, "madvise", lambda *_: mapping.ctypes.set_errno(22) or -1)
    arena = Arena(MB, path=path)
    assert arena.grow(100_000)
    assert int(arena.take([100_000])[0].memory.sum()) == 0


# --- page locks ---


def test_it_is_locked_in_pieces_once_and_unlocked_before_it_is_unmapped(path, gpu):
    arena = Arena(10 * PIECE, path=path, locks=True)
    arena.grow(2 * PIECE + 1)
    arena.grow(3 * PIECE)
    assert [nbytes for _, nbytes in gpu.lockers] == [PIECE] * 3
    assert all(address % PIECE == 0 for address in gpu.locked)
    [buffer] = arena.take([2 * PIECE])
    view = buffer.memory[10:20]
    arena.free(buffer)
    arena.take([2 * PIECE])
    assert len(gpu.lockers) == 3, "what is lent again is not locked again"
    del arena, buffer
    gc.collect()
    assert len(gpu.locked) == 3, "somebody uses it"
    thread = threading.Thread(target=lambda: views.clear())
    views = [view]
    del view
    thread.start()
    thread.join()
    gc.collect()
    assert not gpu.locked


def test_what_is_given_back_is_unlocked_before(path, gpu):
    arena = Arena(10 * PIECE, path=path, locks=True)
    arena.grow(4 * PIECE)
    arena.take([PIECE + 1])
    arena.shrink(100)
    assert arena.ready == 2 * PIECE
    assert len(gpu.locked) == 2
    assert arena.grow(4 * PIECE)
    assert len(gpu.locked) == 4


def test_where_cuda_refuses_it_stays_unlocked_and_no_error_stays_behind(path, gpu, caplog):
    arena = Arena(10 * PIECE, path=path, locks=True)
    gpu.refusals = 1
    assert arena.grow(PIECE)
    assert not gpu.locked
    assert "not page-locked" in caplog.text
    [buffer] = arena.take([100])
    buffer.memory[:4].copy_(torch.ones(4, dtype=torch.uint8).to(CUDA), non_blocking=True)
    assert arena.grow(3 * PIECE)
    assert not gpu.locked


@pytest.mark.parametrize(
    ("limit", "said"), [(65536, r"; this process may lock 65,536 bytes \(ulimit -l\)$"), (-1, "CUDA error 2$")]
)
def test_a_limit_of_locked_memory_is_told_where_cuda_refuses(path, gpu, caplog, monkeypatch, limit, said):
    monkeypatch.setattr(arena_module.resource, "getrlimit", lambda which: (limit, limit))
    gpu.refusals = 1
    Arena(10 * PIECE, path=path, locks=True).grow(PIECE)
    assert re.search(said, caplog.messages[-1])


def test_a_full_file_system_is_said_also_where_cuda_refuses(tmp_path, gpu, monkeypatch):
    arena, grow = Arena(10 * PIECE, path=tmp_path / "arena", locks=True), Pages.grow

    def full(pages, end, *, locks=False, touches=True):
        if not locks:
            raise OSError(errno.ENOSPC, "No space left on device")
        grow(pages, end, locks=locks, touches=touches)

    monkeypatch.setattr(Pages, "grow", full)
    gpu.refusals = 1
    with pytest.raises(MemoryFullError, match=f"{tmp_path} has"):
        arena.grow(PIECE)


def test_of_pieces_that_cuda_locks_only_in_part_none_stays_locked(path, gpu, monkeypatch):
    monkeypatch.setattr(arena_module, "_PIECE_NBYTES", 4 * PIECE)
    arena = Arena(10 * PIECE, path=path, locks=True)
    calls = []
    lock = gpu.lock

    def third_fails(address, nbytes):
        calls.append(nbytes)
        return gpu.failed(2) if len(calls) == 3 else lock(address, nbytes)

    monkeypatch.setattr(gpu, "lock", third_fails)
    assert arena.grow(4 * PIECE)
    assert len(calls) == 3
    assert not gpu.locked
    assert arena.ready == 4 * PIECE


def test_private_memory_is_unlocked_when_its_session_ends_and_the_rest_of_it_freed(gpu):
    arena = Arena(10 * PIECE, locks=True)
    arena.grow(4 * PIECE)
    one, other = arena.take([PIECE, PIECE])
    one.memory.fill_(1)
    other.memory.fill_(2)
    arena.free(one)
    arena.retire()
    assert not gpu.locked
    assert int(other.memory.sum()) == 2 * PIECE
    assert int(one.memory.sum()) == 0, "the kernel has its pages"
    assert arena.take([1]) is None


def test_a_forked_child_owns_nothing(path, gpu):
    arena = Arena(10 * PIECE, path=path, locks=True)
    arena.grow(PIECE)
    [buffer] = arena.take([1000])
    buffer.memory.fill_(7)
    child = os.fork()
    if not child:
        is_zero = not int(buffer.memory.sum())
        buffer.memory.fill_(3)
        arena._pages.unlock()
        os._exit(0 if is_zero and not gpu.unlockers else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert int(buffer.memory.sum()) == 7000
    assert gpu.locked


@pytest.mark.parametrize("shape", [(4, 5 * PIECE // 16), (5 * PIECE // 4,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_from_a_gpu_crosses_the_end_of_a_locked_piece(gpu, monkeypatch, shape, dtype):
    """CUDA refuses such a copy."""
    monkeypatch.setattr(copying, "LOCK_NBYTES", PIECE)
    arena = Arena(20 * PIECE, locks=True)
    arena.grow(20 * PIECE)
    source = torch.arange(5 * PIECE // 4, dtype=torch.float32).view(shape).to(CUDA)
    nbytes = source.numel() * dtype.itemsize
    buffer = arena.take([1000, nbytes])[1]
    assert buffer.begin % PIECE
    copying.transfer(source, buffer.memory, dtype, source.shape)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(buffer.memory.view(dtype), torch.arange(5 * PIECE // 4, dtype=torch.float32).to(dtype))


def test_a_file_that_cannot_be_looked_at_counts_as_gone(tmp_path, monkeypatch):
    """Its directory may have lost the right to be searched. It is no error of training."""
    arena = Arena(MB, path=tmp_path / "arena")
    assert not arena.is_gone

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refused)
    assert arena.is_gone
