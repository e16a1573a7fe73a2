"""Memory that CUDA has page-locked: by whom, when it is unlocked, and what a refusal leaves. CUDA is acted."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from moe_ckpt import Memory
from moe_ckpt.engine.buffers import HostBufferPool
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.storage import LocalStorage
from tests.support.acted_gpu import CUDA, ActedGPU
from tests.unit.engine_parts import Life
from tests.unit.test_engine_host_tier import come_back
from tests.unit.test_engine_memory import no_memory_of_other_tests, where  # noqa: F401 - fixtures


@pytest.fixture
def gpu():
    with ActedGPU() as acted:
        yield acted


@pytest.fixture
def files(tmp_path):
    made = MemoryFiles(str(tmp_path), "a" * 32, 1, "life", 0, "/a/store")
    yield made
    made.close(keep=False)


def life(where, policy=None, **settings) -> Life:  # noqa: F811
    memory = Memory(directory=where[1])
    return Life(LocalStorage(where[0]), policy=policy or Dense(), memory=memory, pinned=True, **settings)


def ends_well(each: Life) -> None:
    each.finish()


def fails(each: Life) -> None:
    each.session.close()


@pytest.mark.parametrize("end", [ends_well, fails])
@pytest.mark.parametrize("policy", [Dense(), MoC(k=1)], ids=["dense", "moc"])
def test_a_run_leaves_no_page_locked_that_is_unmapped(where, gpu, policy, end):  # noqa: F811
    """Its end unmaps slots that were lent, and the next session of the process maps others at the same addresses."""
    for begin in (lambda each: None, come_back) if end is fails else (lambda each: None,):
        with life(where, policy) as each:
            begin(each)
            each.go(4, settle=True)
            assert gpu.locked
            end(each)
        del each
        gc.collect()
        gpu.require_mapped()
    assert not gpu.locked, "nobody uses the memory any more"


def test_a_slot_that_is_lent_when_its_pool_retires_is_unlocked_by_its_last_user(gpu, files):
    pool = HostBufferPool(1 << 20, pinned=True, make_slot=files.make)
    lent = pool.acquire(5000)
    view = lent.memory[100:200]
    pool.retire()
    del lent
    gc.collect()
    assert list(gpu.locked.values()) == [view.untyped_storage().nbytes()]
    view.fill_(7)
    thread = threading.Thread(target=lambda: locals_of.clear())
    locals_of = [view]
    del view
    thread.start()
    thread.join()
    assert not gpu.locked


def test_a_slot_that_is_cut_is_unlocked_before(gpu, files):
    pool = HostBufferPool(1 << 30, pinned=True, make_slot=files.make)
    assert pool.foresee(50 << 20, 60 << 20, 1)
    buffer = pool.acquire(20 << 20)
    assert list(gpu.locked.values()) == [buffer.nbytes]
    assert os.stat(buffer.slot.path.with_suffix(".data")).st_size == buffer.nbytes < 50 << 20


def test_what_cuda_refuses_to_lock_leaves_no_error_to_the_next_call(gpu, files, caplog):
    pool = HostBufferPool(1 << 20, pinned=True, make_slot=files.make)
    gpu.refusals = 1
    buffer = pool.acquire(5000)
    assert (buffer.slot, buffer.registered) == (None, False)
    assert "kept in private memory" in caplog.text
    buffer.memory[:4].copy_(torch.ones(4, dtype=torch.uint8).to(CUDA), non_blocking=True)
    pool.give_back(buffer)
    assert pool.acquire(9000).registered
    assert len(gpu.locked) == 1


def test_of_buffers_that_cuda_locks_only_in_part_none_stays_lent(gpu, files):
    pool = HostBufferPool(1 << 20, pinned=True, make_slot=files.make)

    def second_fails(nbytes: int) -> None:
        gpu.refusals = int(nbytes > 6000)

    with pytest.raises(RuntimeError, match="CUDA error"):
        pool.acquire_all([("whole", 5000), ("pieces", 9000)], require=second_fails)
    assert not pool._lent
    assert gpu.last_error() == 0
    pool.retire()
    gc.collect()
    assert not gpu.locked


def test_a_forked_child_unlocks_nothing(gpu, files):
    slot = files.make(5000)
    slot.pages.lock(5000)
    child = os.fork()
    if not child:
        slot.pages.unlock()
        os._exit(len(gpu.unlockers))
    assert os.waitpid(child, 0)[1] == 0
    assert gpu.locked
