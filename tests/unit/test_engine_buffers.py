"""The pool of host buffers keeps to its budget whatever is asked of it, and reuses what it has."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.engine import buffers
from moe_ckpt.engine.buffers import HostBufferPool, default_budget_bytes
from moe_ckpt.errors import HostMemoryError

BUDGET = 10_000
PAGE = 4096


@given(st.lists(st.tuples(st.integers(1, BUDGET), st.integers(0, 3)), max_size=40))
def test_the_budget_is_never_exceeded_and_fits_tells_the_truth(asked):
    """Each step gives back some of the lent buffers, then asks for one more."""
    pool = HostBufferPool(BUDGET)
    lent = []
    for nbytes, give_back in asked:
        for buffer in lent[:give_back]:
            pool.give_back(buffer)
        del lent[:give_back]
        promised = pool.fits(nbytes)
        buffer = pool.acquire(nbytes)
        assert promised == (buffer is not None)
        if buffer is not None:
            assert buffer.nbytes >= nbytes
            assert all(buffer is not other for other in lent), "one buffer is lent out twice"
            lent.append(buffer)
        assert sum(b.nbytes for b in lent) <= pool.held_bytes <= BUDGET
        assert pool.fits(BUDGET - sum(b.nbytes for b in lent)), "what is not lent out can be had"


def test_a_returned_buffer_is_lent_again():
    pool = HostBufferPool(BUDGET)
    first = pool.acquire(1000)
    pool.give_back(first)
    assert pool.acquire(900) is first
    assert pool.held_bytes == 1000


def test_the_smallest_buffer_that_fits_is_lent():
    pool = HostBufferPool(BUDGET)
    large, small = pool.acquire(4000), pool.acquire(1500)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.acquire(1200) is small


def test_buffers_of_the_wrong_size_make_room():
    pool = HostBufferPool(BUDGET)
    small = [pool.acquire(3000) for _ in range(3)]
    for buffer in small:
        pool.give_back(buffer)
    assert pool.held_bytes == 9000
    whole = pool.acquire(BUDGET)
    assert whole.nbytes == pool.held_bytes == BUDGET
    assert pool.acquire(1) is None, "all of it is lent out"


def test_a_huge_buffer_is_not_lent_for_a_small_snapshot():
    """It would be lent out for a few bytes, and the next dense checkpoint would have to wait for it."""
    pool = HostBufferPool(100 << 20)
    huge = pool.acquire(90 << 20)
    pool.give_back(huge)
    small = pool.acquire(2 << 20)
    assert small.nbytes == 2 << 20
    assert pool.held_bytes == 92 << 20
    assert pool.acquire(20 << 20) is not None, "the free huge one was given up for it"
    assert pool.held_bytes == 22 << 20


def test_what_can_never_fit_is_refused_with_both_numbers():
    pool = HostBufferPool(BUDGET)
    with pytest.raises(HostMemoryError, match=r"10,001 bytes.*10,000 bytes.*host_memory_bytes") as caught:
        pool.acquire(BUDGET + 1)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (BUDGET + 1, BUDGET)
    assert isinstance(caught.value, MemoryError)
    assert pool.acquire(BUDGET) is not None, "the refusal cost nothing"


def test_threads_share_one_budget():
    pool = HostBufferPool(BUDGET)
    seen, wrong = [], []

    def work():
        for _ in range(300):
            buffer = pool.acquire(2000)
            seen.append(pool.held_bytes)
            if buffer is not None:
                buffer.memory[0] = 1
                pool.give_back(buffer)

    def run():
        try:
            work()
        except Exception as error:  # told to the test
            wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert max(seen) <= BUDGET
    assert pool.fits(BUDGET)


# --- the default budget ---


def cgroup(tmp_path, limit, used):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("limit", "used", "left"),
    [
        ("1000000\n", "400000\n", 600_000),
        ("1000\n", "4000\n", 0),
        ("max\n", "400000\n", None),
        ("rubbish\n", "4\n", None),
        ("1000\n", "", None),
    ],
)
def test_bytes_left_under_a_cgroup(tmp_path, limit, used, left):
    assert buffers._cgroup_free_bytes(cgroup(tmp_path, limit, used)) == left


def test_no_cgroup_means_no_limit(tmp_path):
    assert buffers._cgroup_free_bytes(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("limit", "usable"), [(None, 1000 * PAGE), (400 * PAGE, 400 * PAGE), (9000 * PAGE, 1000 * PAGE)]
)
def test_the_default_is_half_of_what_is_free_shared_by_local_ranks(monkeypatch, limit, usable):
    monkeypatch.setattr(buffers.os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": PAGE}.__getitem__)
    monkeypatch.setattr(buffers, "_cgroup_free_bytes", lambda: limit)
    assert default_budget_bytes(1) == usable // 2
    assert default_budget_bytes(4) == usable // 8
    assert default_budget_bytes(0) == usable // 2


def test_the_default_here_is_a_sensible_number():
    assert 0 < default_budget_bytes(1) < 1 << 50
