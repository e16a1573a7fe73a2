"""A run leaves no memory page-locked that it unmaps. CUDA is acted; the arena's own tests are in test_arena.py."""

from __future__ import annotations

import gc

import pytest

from moe_ckpt import Memory, threads
from moe_ckpt.memory import mapping
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.storage import LocalStorage
from moe_ckpt.tiers.buffers import WorkThread
from tests.support.acted_gpu import ActedGPU
from tests.unit.engine_parts import Life
from tests.unit.test_engine_host_tier import come_back
from tests.unit.test_engine_memory import no_memory_of_other_tests, where  # noqa: F401 - fixtures


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(mapping, "LOCK_NBYTES", mapping.PAGE_NBYTES)
    gc.collect()  # what tests before have locked is not unlocked in the middle of this one
    with ActedGPU() as acted:
        yield acted


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


@pytest.mark.parametrize("leaves_captures_alone", [True, False])
def test_memory_is_locked_and_unlocked_while_a_graph_is_captured(gpu, monkeypatch, leaves_captures_alone):
    if not leaves_captures_alone:
        monkeypatch.setattr(threads, "_disturb_no_capture", lambda: None)
    pages, thread = mapping.Pages(4 * mapping.PAGE_NBYTES), WorkThread()
    with gpu.capturing():
        thread.submit(lambda: pages.grow(pages.limit, locks=True)).result()
        thread.submit(pages.unlock).result()
    thread.close()
    calls = [("moe_ckpt-make", call) for call in ("cudaHostRegister", "cudaHostUnregister") for _ in range(4)]
    assert (gpu.meanwhile, gpu.disturbances) == ((calls, []) if leaves_captures_alone else ([], calls))
