"""The order of an epoch, dealt to any sequence of worlds: nobody's sample twice, none left out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from moe_ckpt.data import RecoverableDistributedSampler
from moe_ckpt.errors import ConfigError

lives = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), max_size=4)
"""World size, batch size, batches until the stop."""


def sampler(length: int, replicas: int = 1, rank: int = 0, state=None, **options) -> RecoverableDistributedSampler:
    made = RecoverableDistributedSampler(range(length), replicas, rank, **options)
    if state is not None:
        made.load_state_dict(state)
    return made


def live(length: int, replicas: int, batch: int, stop: int | None, state, **options):
    """What the ranks of one life train on, batch by batch, and the position it leaves."""
    ranks = [sampler(length, replicas, rank, state, **options) for rank in range(replicas)]
    expected = ranks[0].remaining
    batches = [list(BatchSampler(rank, batch, drop_last=False)) for rank in ranks]
    assert [sum(map(len, of_rank)) for of_rank in batches] == [expected] * replicas
    seen = []
    for turn in zip(*batches, strict=True):
        if stop is not None and len(seen) == stop:
            break
        assert len({len(part) for part in turn}) == 1  # or ranks would wait for each other forever
        seen.append([sample for part in turn for sample in part])
        for rank, part in zip(ranks, turn, strict=True):
            rank.advance(len(part))
    assert len({tuple(rank.state_dict().items()) for rank in ranks}) == 1
    return seen, ranks[0].state_dict()


def whole_epoch(length, stops, last, **options):
    """Samples that were trained on in one epoch, and what was left when the last life began."""
    state, seen = None, []
    for replicas, batch, stop in stops:
        if state is not None and state["consumed"] == length:
            break
        batches, state = live(length, replicas, batch, stop, state, **options)
        seen += [sample for part in batches for sample in part]
    rest = length - (state or {"consumed": 0})["consumed"]
    batches, _ = live(length, *last, None, state, **options)
    return seen + [sample for part in batches for sample in part], rest


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_default_device_of_the_script_changes_nothing(shuffle):
    expected = whole_epoch(9, [], (2, 3), shuffle=shuffle)
    with torch.device("meta"):
        assert whole_epoch(9, [], (2, 3), shuffle=shuffle) == expected


@given(st.integers(0, 60), lives, st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_an_epoch_is_trained_on_exactly_once(length, stops, replicas, batch, shuffle, seed):
    """Where what is left at the last start divides by the ranks; otherwise fewer repeats than there are ranks.

    A life before the last may have come to the epoch's end, too, and have repeated samples there.
    """
    seen, rest = whole_epoch(length, stops, (replicas, batch), shuffle=shuffle, seed=seed)
    count = Counter(seen)
    assert set(count) == set(range(length))
    if rest:
        assert len(seen) - length == -rest % replicas
    else:
        assert len(seen) - length < 5


@given(st.integers(0, 60), lives, st.integers(1, 5), st.integers(1, 4))
def test_dropping_leaves_out_fewer_than_there_are_ranks(length, stops, replicas, batch):
    seen, rest = whole_epoch(length, stops, (replicas, batch), drop_last=True)
    assert len(seen) == len(set(seen)) == length - rest % replicas


@given(st.integers(1, 40), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 3))
def test_without_a_restart_it_is_torchs_sampler(length, replicas, shuffle, drop_last, seed, epoch):
    for rank in range(replicas):
        ours = sampler(length, replicas, rank, shuffle=shuffle, drop_last=drop_last, seed=seed)
        torchs = DistributedSampler(range(length), replicas, rank, shuffle, seed, drop_last)
        for each in (ours, torchs):
            each.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(torchs), torchs.num_samples, torchs.total_size)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 6))
def test_batches_done_and_left_add_up(length, replicas, batch, stop):
    """The number of batches is that of a whole epoch: what loops count with does not change by a resume."""
    done, state = live(length, replicas, batch, stop, None)
    rest, _ = live(length, replicas, batch, None, state)
    loader = DataLoader(range(length), batch, sampler=sampler(length, replicas, 0, state))
    assert len(done) + len(rest) == len(loader)
    assert done + rest == live(length, replicas, batch, None, None)[0]


def test_the_example_of_the_docstring():
    """A training loop of one's own, broken off in the second epoch while workers have fetched ahead."""
    kept: list[dict[str, int]] = []
    trained: list[list[int]] = [[], [], []]

    def train(steps: int | None) -> None:
        sampler = RecoverableDistributedSampler(range(24))
        loader = DataLoader(range(24), batch_size=4, sampler=sampler, num_workers=1)
        if kept:
            sampler.load_state_dict(kept[-1])
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            for batch in loader:
                trained[epoch] += batch.tolist()
                sampler.advance(len(batch))
                kept.append(sampler.state_dict())
                if len(kept) == steps:
                    return

    train(8)
    assert kept[-1] == {"epoch": 1, "consumed": 8, "seed": 0, "length": 24, "shuffle": 1}
    train(12)  # to the end of the second epoch
    train(None)
    for epoch, samples in enumerate(trained):
        generator = torch.Generator().manual_seed(epoch)
        assert samples == torch.randperm(24, generator=generator).tolist()


def test_an_epoch_dealt_out_begins_anew_without_set_epoch():
    made = sampler(8, shuffle=False, state={"epoch": 0, "consumed": 6, "seed": 0, "length": 8, "shuffle": 0})
    assert [list(made), list(made)] == [[6, 7], list(range(8))]
    broken_off = iter(made)
    next(broken_off)
    assert list(made) == list(range(8))
    made.load_state_dict(made.state_dict() | {"consumed": 8})
    assert [list(made), len(made), made.remaining] == [[], 8, 0]


def test_another_epoch_starts_at_its_beginning_and_the_same_one_does_not():
    made = sampler(8, state={"epoch": 2, "consumed": 6, "seed": 0, "length": 8, "shuffle": 1})
    made.set_epoch(2)
    assert made.consumed == 6
    made.set_epoch(3)
    assert (made.consumed, made.remaining) == (0, 8)


STATE = {"epoch": 1, "consumed": 8, "seed": 3, "length": 24, "shuffle": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 25}, "samples in the dataset: 25 .* 24 "),
        ({"seed": 4}, "seed: 4 .* 3 "),
        ({"shuffle": 0}, "shuffle: 0 .* 1 "),
        ({"consumed": 25}, "sample 25 of 24"),
        ({"consumed": -1}, "sample -1 of 24"),
        ({"epoch": -1}, "epoch -1"),
        ({"yielded": 1}, "not the state of a Recoverable"),
    ],
)
def test_a_foreign_position_is_refused(change, words):
    made = sampler(24, seed=3)
    with pytest.raises(ConfigError, match=words):
        made.load_state_dict(STATE | change)
    assert made.state_dict() == STATE | {"epoch": 0, "consumed": 0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_replicas": 2}, "num_replicas=2, rank=None.*both or neither"),
        ({"rank": 1}, "num_replicas=None, rank=1.*both or neither"),
        ({"num_replicas": 2, "rank": 2}, "num_replicas=2, rank=2.* 0 to 1"),
        ({"dataset": iter(())}, "no length"),
    ],
)
def test_arguments_that_contradict_each_other(arguments, words):
    with pytest.raises(ConfigError, match=words):
        RecoverableDistributedSampler(**{"dataset": range(4), **arguments})


def test_an_epoch_before_the_restored_one_is_refused():
    """As Fabric's loaders begin, in each process."""
    sampler = RecoverableDistributedSampler(range(8), 2, 0)
    sampler.set_epoch(3)
    sampler.advance(1)
    saved = sampler.state_dict()
    resumed = RecoverableDistributedSampler(range(8), 2, 0)
    resumed.load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"set_epoch\(0\): the restored position is in epoch 3"):
        resumed.set_epoch(0)
    resumed.set_epoch(3)
    assert (list(resumed), resumed.state_dict()) == (list(sampler), saved)
    resumed.set_epoch(0)
    assert resumed.consumed == 0


def test_training_does_not_go_backwards():
    with pytest.raises(ConfigError, match="backwards"):
        sampler(4).advance(-1)


def test_a_position_is_of_pythons_numbers():
    """A checkpoint takes no others there."""
    made = sampler(9, seed=np.int64(3))
    made.set_epoch(np.int64(1))
    made.advance(np.int64(4))
    state = made.state_dict()
    assert state == {"epoch": 1, "consumed": 4, "seed": 3, "length": 9, "shuffle": 1}
    assert set(map(type, state.values())) == {int}
