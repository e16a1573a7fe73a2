"""The pool of host buffers keeps to its budget whatever is asked of it, and uses again what it has."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_ckpt.core.step import Contents, Step
from moe_ckpt.errors import HostMemoryError
from moe_ckpt.memory import limits
from moe_ckpt.memory.arena import Buffer
from moe_ckpt.memory.files import MemoryFiles
from moe_ckpt.memory.limits import available_bytes, default_budget_bytes
from moe_ckpt.memory.slot import Slot
from moe_ckpt.policies import Dense
from moe_ckpt.tiers.buffers import BufferPool, arena_limit
from moe_ckpt.tiers.memory_tier import MemoryTier

BUDGET = 10_000
PAGE = 4096
MB = 1 << 20


def most(budget: int) -> int:
    return -(-arena_limit(budget) // PAGE) * PAGE


@given(st.lists(st.tuples(st.lists(st.integers(0, 4000), min_size=1, max_size=5), st.integers(0, 2)), max_size=40))
def test_several_buffers_are_lent_together_or_none_and_never_more_than_the_budget(asked):
    """Each step gives back what some of the snapshots had, then asks for one more."""
    pool = BufferPool(BUDGET)
    lent = []
    for sizes, give_back in asked:
        for buffer in [buffer for each in lent[:give_back] for buffer in each]:
            pool.give_back(buffer)
        del lent[:give_back]
        promised, before = pool.fits(sum(sizes)), pool.lent_bytes
        try:
            found = pool.acquire(sizes)
        except HostMemoryError:
            assert sum(sizes) > BUDGET
            continue
        assert found is None or promised
        assert found is not None or not promised or lent, "gaps can only be between others"
        if found is None:
            assert pool.lent_bytes == before, "what was had of it is back"
        else:
            assert [buffer.nbytes for buffer in found] == [max(1, nbytes) for nbytes in sizes]
            lent.append(found)
        every = [buffer for each in lent for buffer in each]
        for number, buffer in enumerate(every):
            buffer.memory.fill_(number % 251)
        assert all(bool((buffer.memory == number % 251).all()) for number, buffer in enumerate(every))
        assert sum(buffer.nbytes for buffer in every) == pool.lent_bytes <= BUDGET + len(every)
        assert pool.held_bytes <= most(BUDGET)


def test_buffers_of_gradients_go_round():
    """As in a log of 5 groups of operators: each step needs 4, and gives back what is older than its group's anchor."""
    pool = BufferPool(100 * MB)
    there: dict[tuple[int, int], Buffer] = {}
    for step in range(40):
        whole, *found = pool.acquire([6 * MB, *[2 * MB + 1 + group for group in range(5) if group != step % 5]])
        places = (group for group in range(5) if group != step % 5)
        there |= {(step, group): buffer for group, buffer in zip(places, found, strict=True)}
        for key in [key for key in there if key[1] == step % 5]:
            pool.give_back(there.pop(key))
        pool.give_back(whole)
        if step == 10:
            held = pool.held_bytes
    assert len(there) == 10, "4 + 3 + 2 + 1"
    assert pool.held_bytes == held <= (6 + 14 * 2 + 2) * MB


def test_what_was_made_is_lent_again():
    pool = BufferPool(BUDGET)
    [first] = pool.acquire([1000])
    pool.give_back(first)
    assert pool.acquire([900])[0].begin == first.begin
    assert pool.held_bytes == PAGE


@pytest.mark.parametrize("percent", [60, 78, 95])
def test_two_buffers_that_use_up_the_budget_are_lent_also_behind_a_smaller_one(percent):
    """The first snapshot of a start may be smaller than the next ones, and leaves a gap that none of them fits."""
    nbytes = 10 * MB
    pool = BufferPool(2 * nbytes)
    [first] = pool.acquire([nbytes * percent // 100])
    [second] = pool.acquire([nbytes])
    pool.give_back(first)
    assert pool.acquire([nbytes]) is not None
    assert pool.lent_bytes == pool.budget_bytes
    pool.give_back(second)


def test_a_buffer_given_back_twice_is_an_error():
    pool = BufferPool(BUDGET)
    [buffer] = pool.acquire([1000])
    pool.give_back(buffer)
    with pytest.raises(ValueError, match="returned twice"):
        pool.give_back(buffer)
    one, other = pool.acquire([1000, 1000])
    assert one.begin != other.begin


def test_memory_for_three_snapshots_is_made_ahead_and_no_more():
    pool = BufferPool(100 * MB)
    [first] = pool.acquire([2 * MB])
    assert [pool.make_ahead(2 * MB, 3) for _ in range(4)] == [True, True, False, False]
    assert pool.held_bytes == 6 * MB
    others = pool.take([2 * MB])[0], pool.take([2 * MB])[0]
    assert pool.held_bytes == 6 * MB, "nothing had to be made for them"
    assert len({buffer.begin for buffer in (*others, first)}) == 3
    assert pool.take([2 * MB]) is None, "that would have to be made"
    assert pool.acquire([2 * MB]) is not None


def test_the_memory_of_a_dense_checkpoint_serves_partial_ones():
    pool = BufferPool(100 * MB)
    [dense] = pool.acquire([32 * MB])
    pool.give_back(dense)
    assert not pool.make_ahead(2 * MB, 3)
    assert all(pool.take([2 * MB]) for _ in range(16))
    assert pool.held_bytes == 32 * MB


def test_nothing_is_made_ahead_beyond_the_budget():
    pool = BufferPool(5 * MB)
    pool.acquire([2 * MB])
    assert [pool.make_ahead(2 * MB, 3), pool.make_ahead(2 * MB, 3)] == [True, False]


def test_what_another_pool_made_counts():
    other, pool = BufferPool(BUDGET), BufferPool(BUDGET)
    [buffer] = other.acquire([6000])
    pool.adopt(buffer)
    assert not pool.fits(6000)
    assert pool.fits(6000, spare=buffer.nbytes)
    assert pool.acquire([6000]) is None
    pool.give_back(buffer)
    assert pool.acquire([6000]) is not None


def test_what_cannot_be_unsealed_stays_readable_and_is_never_written_to(tmp_path, monkeypatch):
    files = MemoryFiles(str(tmp_path), "a" * 32, 0, "life", 0, "/a/store")
    files.open_arena(arena_limit(BUDGET))
    pool = BufferPool(BUDGET, files=files)
    [old] = pool.acquire([4000])
    old.memory.fill_(7)
    old.slot.seal(b"header")
    pool.give_back(old)
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "unseal", lambda slot: (_ for _ in ()).throw(OSError("read-only")))
        assert pool.take([1000]) is None
        assert pool.take([1000]) is None
    for size in (1000, 2000):  # some of the old room, and the rest of it
        for buffer in pool.acquire([size]) or ():
            assert not old.slot.is_sealed or not old.overlaps(buffer)
    files.close(keep=False)


# --- the roles that buffers go through ---


def tier_of(pool: BufferPool) -> MemoryTier:
    """Private memory of a run."""
    run = SimpleNamespace(comm=SimpleNamespace(rank=0), model=None, catalog=None, policy=Dense())
    return MemoryTier(run, "run", 0, "life", pool)


def snapshot_in(buffer: Buffer, number: int) -> SimpleNamespace:
    identity = Step("run", "life", 0, number, number)
    plan = SimpleNamespace(slots=())
    return SimpleNamespace(
        identity=identity, contents=Contents(()), step=number, buffer=buffer, buffers=[buffer], plan=plan
    )


class Roles(RuleBasedStateMachine):
    """What a pipeline does with its pool and its host tier, in any order that can happen.

    Every buffer's first byte tells who wrote to it last, so that lending one that is in use shows.
    """

    @initialize(copies=st.integers(1, 5), copied=st.integers(1, 2000))
    def begin(self, copies, copied):
        self.pool = BufferPool(copies * 2200)
        self.tier = tier_of(self.pool)
        self.number = 0
        self.snapshots: list[tuple[int, Buffer]] = []
        self.offered = False
        self.kept: list[tuple[int, Buffer]] = []  # one recovery buffer; after a fault sometimes two

    @rule(nbytes=st.integers(1, 2000))
    def snapshot(self, nbytes):
        """A snapshot begins, at the expense of the recovery buffer if it must."""
        if len(self.snapshots) == 2:
            return
        promised = self.pool.fits(nbytes, self.tier.droppable_bytes)
        buffers = self.pool.acquire([nbytes])
        if buffers is None and self.tier.drop():
            self.kept = []
            buffers = self.pool.acquire([nbytes])
        assert promised or buffers is None
        if buffers is None:
            assert not promised or self.snapshots, "gaps can only be between others"
            return
        [buffer] = buffers
        self.number += 1
        buffer.memory.fill_(self.number % 251)
        self.snapshots.append((self.number, buffer))

    @precondition(lambda self: self.snapshots and not self.offered)
    @rule()
    def write(self):
        number, buffer = self.snapshots[0]
        header = SimpleNamespace(step=number, identity=SimpleNamespace(generation=0), parts=())
        self.tier.offer(snapshot_in(buffer, number), header)
        self.offered = True

    @precondition(lambda self: self.snapshots)
    @rule(committed=st.booleans())
    def resolve(self, committed):
        """The oldest snapshot ends. One that was not offered (complete, or failed at once) may do either."""
        number, buffer = self.snapshots.pop(0)
        self.tier.ended(snapshot_in(buffer, number), committed=committed)
        if committed and self.offered:
            self.kept = [(number, buffer)]
        self.offered = False

    @rule()
    def make_ahead(self):
        self.pool.make_ahead(1000, 3)

    @rule()
    def another_life(self):
        """The session ends by a fault; a new one takes over in the same process."""
        if self.offered:  # its commit may have happened unheard: kept beside the other
            self.kept.append(self.snapshots[0])
        surrendered = self.tier.surrender()
        assert [held.header.step for held in surrendered] == [number for number, _ in self.kept]
        self.pool = BufferPool(self.pool.budget_bytes)
        self.tier = tier_of(self.pool)
        self.tier.take_over(surrendered)
        self.snapshots, self.offered = [], False

    @invariant()
    def no_buffer_in_use_was_written_to(self):
        in_use = [*self.snapshots, *self.kept]
        assert len({buffer for _, buffer in in_use}) == len(in_use), "one buffer has two roles"
        for number, buffer in in_use:
            assert bool((buffer.memory == number % 251).all()), f"buffer {number} was overwritten"
        assert self.tier.droppable_bytes == sum(buffer.nbytes for _, buffer in self.kept)
        held = [(checkpoint.header.step, checkpoint.slot.room) for checkpoint in self.tier.holds()]
        assert held == self.kept + self.snapshots[: self.offered]

    @invariant()
    def the_budget_is_kept(self):
        inherited = sum(buffer.nbytes for _, buffer in self.kept)
        assert self.pool.lent_bytes <= max(self.pool.budget_bytes, inherited)
        assert self.pool.held_bytes <= most(self.pool.budget_bytes)


Roles.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_no_role_is_ever_shared = Roles.TestCase


def test_what_can_never_fit_is_refused_with_both_numbers():
    pool = BufferPool(BUDGET)
    with pytest.raises(HostMemoryError, match=r"10,001 bytes.*10,000 bytes.*host_memory_bytes") as caught:
        pool.acquire([BUDGET + 1])
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (BUDGET + 1, BUDGET)
    assert isinstance(caught.value, MemoryError)
    assert pool.acquire([BUDGET]) is not None, "the refusal cost nothing"


def test_threads_share_one_budget():
    pool = BufferPool(BUDGET)
    seen, wrong = [], []

    def work():
        for _ in range(300):
            lent = pool.acquire([2000])
            seen.append(pool.lent_bytes)
            for buffer in lent or ():
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
    assert limits.cgroup_bytes(cgroup(tmp_path, limit, used)) == left


def test_no_cgroup_means_no_limit(tmp_path):
    assert limits.cgroup_bytes(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("limit", "usable"), [(None, 1000 * PAGE), (400 * PAGE, 400 * PAGE), (9000 * PAGE, 1000 * PAGE)]
)
def test_the_default_is_half_of_what_is_free_shared_by_local_ranks(monkeypatch, limit, usable):
    monkeypatch.setattr(limits, "available_bytes", lambda: 1000 * PAGE)
    monkeypatch.setattr(limits, "cgroup_bytes", lambda **_: limit)
    assert default_budget_bytes(1) == usable // 2
    assert default_budget_bytes(4) == usable // 8
    assert default_budget_bytes(0) == usable // 2


def test_page_cache_makes_room(monkeypatch, tmp_path):
    """A data set that was read fills all memory with page cache, which the kernel gives up when memory is needed."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\nCached: 7900 kB\n")
    monkeypatch.setattr(limits, "available_bytes", lambda: available_bytes(str(tmp_path / "meminfo")))
    monkeypatch.setattr(limits, "cgroup_bytes", lambda **_: None)
    assert default_budget_bytes(1) == 4000 * 1024


def test_where_the_kernel_does_not_say_what_is_available_free_pages_count(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "available_bytes", lambda: available_bytes(str(tmp_path / "none")))
    monkeypatch.setattr(limits.os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": PAGE}.__getitem__)
    monkeypatch.setattr(limits, "cgroup_bytes", lambda **_: None)
    assert default_budget_bytes(1) == 500 * PAGE


def test_the_default_here_is_a_sensible_number():
    assert 0 < default_budget_bytes(1) < 1 << 50
