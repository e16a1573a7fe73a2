"""The pool of host buffers keeps to its budget whatever is asked of it, and reuses what it has."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_ckpt.engine import buffers, host_buffer
from moe_ckpt.engine.buffers import HostBufferPool, default_budget_bytes
from moe_ckpt.engine.cgroups import available_bytes
from moe_ckpt.engine.host_buffer import HostBuffer
from moe_ckpt.engine.host_tier import HostTier, KeptCheckpoint
from moe_ckpt.errors import HostMemoryError

BUDGET = 10_000
PAGE = 4096
MB = 1 << 20


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


KINDS = (host_buffer.WHOLE, host_buffer.PIECES, host_buffer.MIRRORED)


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 4000)), max_size=5), st.integers(0, 2))
    )
)
def test_several_buffers_are_lent_together_or_none(asked):
    """Each step gives back what some of the snapshots had, then asks for one more."""
    pool = HostBufferPool(BUDGET)
    lent = []
    for needs, give_back in asked:
        for buffer in [buffer for each in lent[:give_back] for buffer in each]:
            pool.give_back(buffer)
        del lent[:give_back]
        before = sum(buffer.nbytes for each in lent for buffer in each)
        found = pool.acquire_all(needs)
        if found is None:
            assert pool.fits(BUDGET - before), "what was had of it is back"
        else:
            assert [buffer.kind for buffer in found] == [kind for kind, _ in needs]
            assert all(buffer.nbytes >= nbytes for buffer, (_, nbytes) in zip(found, needs, strict=True))
            lent.append(found)
        every = [buffer for each in lent for buffer in each]
        assert len({*every}) == len(every), "one buffer is lent out twice"
        assert sum(buffer.nbytes for buffer in every) <= pool.held_bytes <= BUDGET


def test_buffers_of_gradients_go_round():
    """As in a log of 5 groups of operators: each step needs 4, and gives back what is older than its group's anchor."""
    pool, made = HostBufferPool(100 * MB), set()
    there: dict[tuple[int, int], HostBuffer] = {}
    for step in range(40):
        needs = [
            (host_buffer.WHOLE, 6 * MB),
            *[(host_buffer.PIECES, 2 * MB + 1 + group) for group in range(5) if group != step % 5],
        ]
        whole, *found = pool.acquire_all(needs)
        places = (group for group in range(5) if group != step % 5)
        there |= {(step, group): buffer for group, buffer in zip(places, found, strict=True)}
        made |= {whole, *found}
        for key in [key for key in there if key[1] == step % 5]:
            pool.give_back(there.pop(key))
        pool.give_back(whole)
    assert len(there) == 10, "4 + 3 + 2 + 1"
    assert len(made) == 1 + 14, "and 4 that come in: none was made anew for want of one of its size"


def test_a_returned_buffer_is_lent_again():
    pool = HostBufferPool(BUDGET)
    first = pool.acquire(1000)
    pool.give_back(first)
    assert pool.acquire(900) is first
    assert pool.held_bytes == first.nbytes


def test_the_smallest_buffer_that_fits_is_lent():
    pool = HostBufferPool(BUDGET)
    large, small = pool.acquire(4000), pool.acquire(1500)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.acquire(1200) is small


def test_buffers_of_the_wrong_size_make_room():
    pool = HostBufferPool(BUDGET)
    small = [pool.acquire(3072) for _ in range(3)]
    for buffer in small:
        pool.give_back(buffer)
    assert pool.held_bytes == 3 * 3072
    whole = pool.acquire(BUDGET)
    assert whole.nbytes == pool.held_bytes == BUDGET
    assert pool.acquire(1) is None, "all of it is lent out"


def test_a_huge_buffer_is_not_lent_for_a_small_snapshot():
    """It would be lent out for a few bytes, and the next dense checkpoint would have to wait for it."""
    pool = HostBufferPool(100 << 20)
    huge = pool.acquire(88 << 20)
    pool.give_back(huge)
    small = pool.acquire(2 << 20)
    assert small.nbytes == 2 << 20
    assert pool.held_bytes == 90 << 20
    assert pool.acquire(20 << 20) is not None, "the free huge one was given up for it"
    assert pool.held_bytes == 22 << 20


@given(st.integers(1, 1 << 40))
def test_buffers_have_a_little_room_so_that_they_serve_again(nbytes):
    size = host_buffer.roomy(nbytes)
    assert nbytes <= size <= nbytes + max(1, nbytes // 16)
    assert host_buffer.roomy(size) == size


def test_a_buffer_given_back_twice_is_an_error():
    pool = HostBufferPool(BUDGET)
    buffer = pool.acquire(1000)
    pool.give_back(buffer)
    with pytest.raises(ValueError, match="returned twice"):
        pool.give_back(buffer)
    assert pool.acquire(1000) is buffer
    assert pool.acquire(1000) is not buffer


def test_three_buffers_of_the_usual_size_are_made_ahead_and_no_more():
    pool = HostBufferPool(100 * MB)
    first = pool.acquire(2 * MB)
    assert pool.expect(2 * MB)
    assert not pool.expect(2 * MB), "that is known"
    assert [pool.top_up(3) for _ in range(4)] == [True, True, False, False]
    assert pool.held_bytes == 6 * MB
    others = [pool.acquire(2 * MB) for _ in range(2)]
    assert pool.held_bytes == 6 * MB, "nothing had to be made for them"
    assert len({*others, first}) == 3
    assert pool.expect(3 * MB)
    assert pool.top_up(3)
    assert pool.held_bytes == 9 * MB, "what is lent out stays as it is"
    for buffer in others:
        pool.give_back(buffer)
    assert pool.held_bytes == 5 * MB, "too small from now on: let go of"


def test_the_buffer_of_a_dense_checkpoint_is_let_go_of_once_partial_ones_are_the_rule():
    pool = HostBufferPool(100 * MB)
    dense, partial = pool.acquire(32 * MB), pool.acquire(2 * MB)
    pool.expect(2 * MB)
    pool.give_back(dense)
    assert pool.held_bytes == partial.nbytes
    free = pool.acquire(32 * MB)
    pool.give_back(partial)
    pool.give_back(free)
    assert pool.held_bytes == partial.nbytes


def test_small_snapshots_among_large_ones_use_the_same_buffers():
    """Otherwise every other checkpoint of a rank that owns experts of only some layers would allocate."""
    pool = HostBufferPool(100 * MB)
    first = pool.acquire(20 * MB)
    pool.expect(20 * MB)
    pool.give_back(first)
    for nbytes in (5 * MB, 20 * MB, 2 * MB, 19 * MB):
        buffer = pool.acquire(nbytes)
        assert buffer is first
        pool.give_back(buffer)
    assert pool.held_bytes == first.nbytes


def test_nothing_is_made_ahead_beyond_the_budget():
    pool = HostBufferPool(5 * MB)
    pool.acquire(2 * MB)
    assert not pool.top_up(3), "no size is known yet"
    pool.expect(2 * MB)
    assert [pool.top_up(3), pool.top_up(3)] == [True, False]


def test_what_another_pool_made_counts():
    pool = HostBufferPool(BUDGET)
    buffer = HostBufferPool(BUDGET).acquire(6000)
    pool.adopt(buffer)
    assert not pool.fits(6000)
    assert pool.fits(6000, spare=buffer.nbytes)
    assert pool.acquire(6000) is None
    pool.give_back(buffer)
    assert pool.acquire(6000) is buffer


# --- the roles that buffers go through ---


class Roles(RuleBasedStateMachine):
    """What a pipeline does with its pool and its host tier, in any order that can happen.

    Every buffer's first byte tells who wrote to it last, so that lending one that is in use shows.
    """

    @initialize(copies=st.integers(1, 5), copied=st.integers(1, 2000))
    def begin(self, copies, copied):
        self.pool = HostBufferPool(copies * 2200)
        self.tier = HostTier(0, "run", self.pool)
        self.number = 0
        self.snapshots: list[tuple[int, HostBuffer]] = []
        self.offered = False
        self.kept: list[tuple[int, HostBuffer]] = []  # one recovery buffer; after a fault sometimes two

    @rule(nbytes=st.integers(1, 2000), more=st.booleans())
    def snapshot(self, nbytes, more):
        """A snapshot begins, at the expense of the recovery buffer if it must."""
        if len(self.snapshots) == 2:
            return
        promised = self.pool.fits(nbytes, self.tier.droppable_bytes)
        buffer = self.pool.acquire(nbytes)
        if buffer is None and self.tier.drop():
            self.kept = []
            buffer = self.pool.acquire(nbytes)
        assert (buffer is not None) == promised
        if buffer is None:
            return
        self.number += 1
        buffer.memory.fill_(self.number % 251)
        self.snapshots.append((self.number, buffer))
        if more:
            self.pool.expect(nbytes)

    @precondition(lambda self: self.snapshots and not self.offered)
    @rule()
    def write(self):
        number, buffer = self.snapshots[0]
        self.tier.hold(KeptCheckpoint("run", number, 0, (), buffer))
        self.offered = True

    @precondition(lambda self: self.snapshots)
    @rule(committed=st.booleans())
    def resolve(self, committed):
        """The oldest snapshot ends. One that was not offered (complete, or failed at once) may do either."""
        number, buffer = self.snapshots.pop(0)
        self.tier.resolve(buffer, committed=committed)
        if committed:
            self.kept = [(number, buffer)] if self.offered else []
        self.offered = False

    @rule()
    def make_ahead(self):
        self.pool.top_up(3)

    @rule()
    def another_life(self):
        """The session ends by a fault; a new one takes over in the same process."""
        if self.offered:  # its commit may have happened unheard: kept beside the other
            self.kept.append(self.snapshots[0])
        surrendered = self.tier.surrender()
        assert [held.step for held in surrendered] == [number for number, _ in self.kept]
        self.pool = HostBufferPool(self.pool.budget_bytes)
        self.tier = HostTier(0, "run", self.pool, surrendered)
        self.snapshots, self.offered = [], False

    @invariant()
    def no_buffer_in_use_was_written_to(self):
        in_use = [*self.snapshots, *self.kept]
        assert len({buffer for _, buffer in in_use}) == len(in_use), "one buffer has two roles"
        for number, buffer in in_use:
            assert bool((buffer.memory == number % 251).all()), f"buffer {number} was overwritten"
        assert self.tier.droppable_bytes == sum(buffer.nbytes for _, buffer in self.kept)
        for number, buffer in self.kept:
            assert [held.buffer for held in self.tier.find("run", number, 0)] == [buffer]

    @invariant()
    def the_budget_is_kept(self):
        inherited = sum(buffer.nbytes for _, buffer in self.kept)
        assert self.pool.held_bytes <= max(self.pool.budget_bytes, inherited)


Roles.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_no_role_is_ever_shared = Roles.TestCase


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
    monkeypatch.setattr(buffers, "available_bytes", lambda: 1000 * PAGE)
    monkeypatch.setattr(buffers, "_cgroup_free_bytes", lambda **_: limit)
    assert default_budget_bytes(1) == usable // 2
    assert default_budget_bytes(4) == usable // 8
    assert default_budget_bytes(0) == usable // 2


def test_page_cache_makes_room(monkeypatch, tmp_path):
    """A data set that was read fills all memory with page cache, which the kernel gives up when memory is needed."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\nCached: 7900 kB\n")
    monkeypatch.setattr(buffers, "available_bytes", lambda: available_bytes(str(tmp_path / "meminfo")))
    monkeypatch.setattr(buffers, "_cgroup_free_bytes", lambda **_: None)
    assert default_budget_bytes(1) == 4000 * 1024


def test_where_the_kernel_does_not_say_what_is_available_free_pages_count(monkeypatch, tmp_path):
    monkeypatch.setattr(buffers, "available_bytes", lambda: available_bytes(str(tmp_path / "none")))
    monkeypatch.setattr(buffers.os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": PAGE}.__getitem__)
    monkeypatch.setattr(buffers, "_cgroup_free_bytes", lambda **_: None)
    assert default_budget_bytes(1) == 500 * PAGE


def test_the_default_here_is_a_sensible_number():
    assert 0 < default_budget_bytes(1) < 1 << 50
