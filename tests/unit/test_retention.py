"""Which checkpoints stay: literals for the rules, simulated MoC runs for the spare."""

from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ckpt.errors import ConfigError
from moe_ckpt.ledger import retention
from moe_ckpt.ledger.retention import CheckpointRecord, RetentionPolicy, groups_to_delete, retained_directories


def record(step, paths=None, generation=0, parent=None):
    directory = f"g{generation}s{step}"
    own = frozenset({f"{directory}/MANIFEST"}) | frozenset(paths or {f"{directory}/all"})
    return CheckpointRecord(directory, generation, step, own, parent)


def without_spares():
    return mock.patch.object(retention, "_spares", return_value=[])


def steps(records, **policy):
    kept = retained_directories(records, RetentionPolicy(**policy))
    return sorted(r.step for r in records if r.directory in kept)


def test_nothing_to_keep():
    assert retained_directories([], RetentionPolicy()) == frozenset()


def test_the_newest_few_stay_in_any_order_of_input():
    records = [record(s) for s in (3, 1, 5, 2, 4)]
    assert steps(records) == [4, 5]
    assert steps(records, keep_last=3) == [3, 4, 5]
    assert steps(records, keep_last=9) == [1, 2, 3, 4, 5]


def test_a_later_generation_is_newer_than_a_later_step():
    records = [record(100), record(101), record(51, generation=1), record(52, generation=1)]
    assert kept_of(records, keep_last=1) == {"g1s52"}


def life(generation, of_steps, parent=None):
    return [record(s, generation=generation, parent=parent) for s in of_steps]


def kept_of(records, **policy):
    with without_spares():
        return retained_directories(records, RetentionPolicy(**policy))


def test_what_a_run_came_back_to_is_kept_beside_what_it_passed_over():
    """Step 3 was damaged, so the run went back to step 2: the only good one, until there are two new ones."""
    old, new = life(0, (1, 2, 3)), life(1, (3, 4), parent=(0, 2))
    assert kept_of(old + new[:1]) == {"g0s2", "g0s3", "g1s3"}
    assert kept_of(old + new) == {"g1s3", "g1s4"}


def test_with_keep_last_1_what_the_run_came_back_to_is_the_spare():
    old, new = life(0, (1, 2, 3)), life(1, (3, 4, 5), parent=(0, 2))
    assert kept_of(old + new[:1], keep_last=1) == {"g1s3"}
    assert retained_directories(old + new[:1], RetentionPolicy(keep_last=1)) == {"g0s2", "g0s3", "g1s3"}
    assert retained_directories(old + new[:2], RetentionPolicy(keep_last=1)) == {"g1s3", "g1s4"}


def test_the_line_goes_through_all_lives():
    lives = life(0, (1, 2, 3, 4)) + life(1, (3, 4, 5), parent=(0, 2)) + life(2, (5,), parent=(1, 4))
    assert kept_of(lives, keep_last=2) == {"g1s4", "g2s5"} | {"g1s5"}
    assert kept_of(lives, keep_last=4) == {"g0s2", "g1s3", "g1s4", "g2s5"} | {"g1s5"}
    assert kept_of(lives, keep_last=5) == {"g0s1", "g0s2", "g1s3", "g1s4", "g2s5"} | {"g0s4", "g1s5"}


def test_a_run_may_come_back_to_the_same_checkpoint_twice():
    """Its first new checkpoint was damaged too, and others of the first life in between."""
    lives = life(0, (1, 2, 3)) + life(1, (3,), parent=(0, 2)) + life(2, (3, 4), parent=(0, 2))
    assert kept_of(lives[:-1]) == {"g0s2", "g1s3", "g2s3"}
    assert kept_of(lives) == {"g2s3", "g2s4"}


def test_a_parent_that_is_gone_still_tells_which_older_ones_the_run_stands_on():
    """Its manifest may be damaged by now, and then it is no record."""
    records = life(0, (1, 2, 4)) + life(1, (4,), parent=(0, 3))
    assert kept_of(records) == {"g0s2", "g0s4", "g1s4"}
    of_two_lives = life(0, (1, 2, 3)) + life(1, (4, 6), parent=(0, 2)) + life(2, (6,), parent=(1, 5))
    assert kept_of(of_two_lives, keep_last=3) == {"g0s2", "g1s4", "g2s6"} | {"g1s6"}
    without_step_4 = life(0, (1, 2, 3)) + life(1, (6,), parent=(0, 2)) + life(2, (6,), parent=(1, 5))
    assert kept_of(without_step_4, keep_last=3) == {"g0s1", "g0s2", "g2s6"} | {"g0s3", "g1s6"}


@pytest.mark.parametrize("parent", [None, (1, 2), (2, 1)], ids=["none", "itself", "later"])
def test_without_a_known_origin_everything_older_counts(parent):
    older = life(0, (1, 2, 3))
    assert kept_of([*older, *life(1, (3,), parent)], keep_last=3) == {"g0s2", "g0s3", "g1s3"}


def test_where_a_whole_life_is_gone_everything_older_counts():
    passed_over = life(2, (5, 6), parent=(0, 3))
    records = life(0, (1, 2, 3)) + passed_over + life(3, (5,), parent=(1, 4))
    assert kept_of(records) == {"g0s3", "g3s5"} | {"g2s6"}


def test_milestones_stay_in_their_newest_generation_only():
    records = [record(s) for s in range(1, 26)] + [record(s, generation=1) for s in range(18, 30)]
    assert kept_of(records, keep_last=1, keep_every_n_steps=10) == {"g0s10", "g1s20", "g1s29"}


def test_a_milestone_of_the_line_stays_before_a_newer_one_that_was_passed_over():
    lives = life(0, (8, 10, 12, 20, 21)) + life(1, (10, 11), parent=(0, 8)) + life(2, (11, 13), parent=(0, 12))
    assert kept_of(lives, keep_last=1, keep_every_n_steps=10) == {"g0s10", "g0s20", "g2s13"}


def test_whole_checkpoints_need_no_extra_spare():
    assert steps([record(s) for s in range(10)], keep_last=2) == [8, 9]


def test_the_oldest_is_kept_while_nothing_is_disjoint_from_the_newest():
    records = [record(s, {"shared", str(s)}) for s in range(1, 8)]
    assert steps(records, keep_last=2) == [1, 6, 7]
    assert kept_of(records, keep_last=2) == {"g0s6", "g0s7"}


def test_the_spare_is_the_newest_disjoint_one_and_the_next_candidate_waits():
    sharing = [record(s, {"shared", str(s)}) for s in (5, 6, 7, 8)]
    records = [record(1), record(3), *sharing]
    assert steps(records, keep_last=1) == [3, 5, 8]


def test_the_candidate_takes_over():
    records = [record(3, {"a"}), record(5, {"b"}), record(7, {"c"}), record(8, {"c", "d"})]
    assert steps(records, keep_last=1) == [5, 7, 8]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"keep_last": 0}, "keep_last=0 must be a whole number"),
        ({"keep_last": 1.5}, r"keep_last=1\.5"),
        ({"keep_last": True}, "keep_last=True"),
        ({"keep_every_n_steps": 0}, "keep_every_n_steps=0"),
    ],
)
def test_bad_settings_are_refused(settings_, message):
    with pytest.raises(ConfigError, match=message):
        RetentionPolicy(**settings_)


def test_groups_to_delete_spares_named_files_and_directories_in_use():
    kept = [record(2, {"g0s1/expert", "g0s2/all"})]
    groups = {"g0s2": ["MANIFEST", "all"], "g0s1": ["all", "expert"], "g0s3": ["all"], "g0s10": ["all"]}
    assert groups_to_delete(groups, kept, {"g0s3"}) == {"g0s1": ["all"], "g0s10": ["all"]}
    assert groups_to_delete({}, kept) == {}


@dataclass
class Run:
    """A MoC run of L layers, E experts, K saved per layer and step, R ranks: the files only, on a pretended disk."""

    layers: int
    experts: int
    k: int
    ranks: int
    policy: RetentionPolicy
    index: int = 0
    generation: int = 0
    step: int = 0
    parent: tuple | None = None
    line: list = field(default_factory=list)
    lines: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)
    views: dict = field(default_factory=dict)
    records: dict = field(default_factory=dict)
    disk: set = field(default_factory=set)

    @property
    def cycle(self):
        return -(-self.experts // self.k)

    def save(self):
        """One step: write, commit, collect; returns the newest record."""
        self.step += 1
        directory = f"g{self.generation}s{self.step}"
        for layer in range(self.layers):
            for i in range(self.k):
                self._write((layer, (layer + self.index * self.k + i) % self.experts), directory)
        for operator in [(la, e) for la in range(self.layers) for e in range(self.experts)]:
            if operator not in self.versions:
                self._write(operator, directory)
        self.index += 1
        own = {f"{directory}/{name}" for name in ("manifest", "non_expert", "state")}
        self.disk |= own
        paths = frozenset(own | set(self.versions.values()))
        newest = CheckpointRecord(directory, self.generation, self.step, paths, self.parent)
        self.records[directory] = newest
        self.line = [*self.line, directory]
        self.lines[directory] = self.line
        self.views[directory] = dict(self.versions)
        kept = retained_directories(self.records.values(), self.policy)
        self.records = {d: r for d, r in self.records.items() if d in kept}
        groups = {
            directory: [path.partition("/")[2] for path in self.disk if path.startswith(f"{directory}/")]
            for directory in {path.partition("/")[0] for path in self.disk}
        }
        deleted = groups_to_delete(groups, self.records.values())
        self.disk -= {f"{directory}/{group}" for directory, gone in deleted.items() for group in gone}
        return newest

    def go_back_to(self, chosen):
        """A fault: the next life of the run starts from a retained checkpoint."""
        self.versions = dict(self.views[chosen.directory])
        self.line = [directory for directory in self.lines[chosen.directory] if directory in self.records]
        self.parent = chosen.order
        self.generation += 1
        self.step = chosen.step

    def _write(self, operator, directory):
        rank = operator[1] * self.ranks // self.experts
        path = f"{directory}/rank{rank}_expert"
        self.versions[operator] = path
        self.disk.add(path)


def runs():
    return st.builds(
        lambda layers, experts, k, ranks, keep_last: Run(
            layers, experts, min(k, experts), ranks, RetentionPolicy(keep_last=keep_last)
        ),
        st.integers(1, 3),
        st.integers(1, 12),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 4),
    )


def check(run, newest, commits_in_this_life):
    assert newest.directory in run.records
    assert set(run.line[-run.policy.keep_last :]) <= run.records.keys(), "what the run stands on is gone"
    settled = run.generation == 0 or commits_in_this_life > 2 * run.cycle + run.policy.keep_last
    assert len(run.records) <= (1 if settled else 2) * (run.policy.keep_last + 2)
    for kept in run.records.values():
        assert kept.groups <= run.disk, "a retained checkpoint misses files"
    assert run.disk == frozenset().union(*(r.groups for r in run.records.values())), "a file that nobody names is left"
    if commits_in_this_life > run.cycle:
        spares = [r for r in run.records.values() if r.groups.isdisjoint(newest.groups)]
        assert spares, "no complete checkpoint is free of the newest one's files"


@settings(max_examples=60, deadline=None)
@given(run=runs())
def test_a_long_run_keeps_few_checkpoints_and_from_the_second_cycle_on_a_spare(run):
    for commits in range(1, 6 * run.cycle + 30):
        check(run, run.save(), commits)


@settings(max_examples=60, deadline=None)
@given(run=runs(), data=st.data())
def test_the_same_over_faults(run, data):
    """Each life goes back to any of the retained checkpoints; the spare is back within one cycle."""
    for _ in range(data.draw(st.integers(1, 4), label="lives")):
        for commits in range(1, data.draw(st.integers(2, 3 * run.cycle + 3), label="commits")):
            check(run, run.save(), commits)
        directory = data.draw(st.sampled_from(sorted(run.records)), label="back to")
        run.go_back_to(run.records[directory])


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 30),
    keep_last=st.integers(1, 5),
    every=st.none() | st.integers(1, 7),
    spare=st.booleans(),
)
def test_the_rules_hold_for_any_history(count, keep_last, every, spare):
    records = [record(s) for s in range(count)]
    policy = RetentionPolicy(keep_last, every)
    kept = retained_directories(records, policy) if spare else kept_of(records, **vars(policy))
    assert records[-1].directory in kept
    wanted = {r.directory for r in records[-keep_last:] + [r for r in records if every and r.step % every == 0]}
    first = {s // every * every: s for s in reversed(range(len(records))) if every and s >= every}
    assert {records[s].directory for s in first.values()} <= kept
    assert wanted <= kept
    assert len(kept - (wanted) - {records[-1].directory}) <= 2 * spare


def not_finite(records, since):
    return [replace(record, finite=record.step < since) for record in records]


def test_a_run_that_became_nan_keeps_its_finite_checkpoints():
    records = not_finite(life(0, range(1, 41)), since=21)
    assert kept_of(records) == {"g0s19", "g0s20", "g0s39", "g0s40"}
    assert kept_of(records, keep_last=1) == {"g0s20", "g0s40"}


def test_the_newest_finite_dense_checkpoint_stays_beside_finite_windows_and_what_is_not_finite():
    records = [replace(each, dense=each.step in (10, 30)) for each in not_finite(life(0, range(1, 41)), since=21)]
    assert kept_of(records, keep_last=1) == {"g0s10", "g0s20", "g0s40"}


def test_what_a_run_came_back_to_counts_among_finite_checkpoints():
    """The second life became NaN as well, at a later step."""
    lives = not_finite(life(0, range(1, 31)), since=21) + not_finite(life(1, range(21, 40), parent=(0, 20)), since=26)
    assert kept_of(lives, keep_last=1) == {"g1s25", "g1s39"}
    assert kept_of(lives[:31], keep_last=1) == {"g1s21"}
    assert kept_of(lives[:31]) == {"g0s20", "g0s30", "g1s21"}


def test_the_spare_of_finite_checkpoints_stays():
    sharing = [record(s, {"shared", str(s)}) for s in (5, 6, 7)]
    records = not_finite([record(1), record(3), *sharing, record(8), record(9)], since=8)
    assert steps(records, keep_last=1) == [3, 5, 7, 8, 9]


def test_a_milestone_whose_step_was_skipped_is_the_next_checkpoint():
    assert steps([record(s) for s in (3, 9, 12, 17, 20, 21, 34, 39, 41)], keep_last=1, keep_every_n_steps=10) == [
        *(12, 20, 34, 39, 41)
    ]
    assert kept_of(life(0, (3, 9, 12, 17, 20, 39)), keep_last=1, keep_every_n_steps=10) == {"g0s12", "g0s20", "g0s39"}
    assert kept_of(life(0, (4, 8, 9)), keep_last=1, keep_every_n_steps=10) == {"g0s9"}


def test_a_milestone_that_was_skipped_is_the_first_of_the_line():
    lives = life(0, (8, 12, 14)) + life(1, (11, 13), parent=(0, 8))
    assert kept_of(lives, keep_last=1, keep_every_n_steps=10) == {"g1s11", "g1s13"}
    twice = life(0, (12, 14)) + life(1, (14, 16), parent=(0, 12))
    assert kept_of(twice, keep_last=1, keep_every_n_steps=10) == {"g0s12", "g1s16"}


def test_the_newest_dense_checkpoint_stays_beside_windows():
    """Only it can go on on another layout. On the run's line too: what a run passed over does not count for it."""
    of_steps = [replace(record(step), dense=step in (2, 5)) for step in range(1, 9)]
    assert kept_of(of_steps, keep_last=1) == {"g0s5", "g0s8"}
    back = [replace(record(step, generation=1, parent=(0, 2)), dense=False) for step in (3, 4)]
    assert kept_of([*of_steps, *back], keep_last=1) == {"g0s2", "g0s5", "g1s4"}
    assert kept_of([record(step) for step in (1, 2)], keep_last=1) == {"g0s2"}
