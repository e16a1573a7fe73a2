"""States of random number generators: always those of this moment, whoever has drawn from them."""

import random

import pytest

from moe_ckpt.modeling.rng import capture_rng, restore_rng

DRAWS = {
    "one number": random.random,
    "bits": lambda: random.getrandbits(17),
    "the first of two from a bell curve": lambda: (random.seed(1), random.gauss(0, 1)),
    "the second": lambda: random.gauss(0, 1),
    "as many as its words": lambda: [random.random() for _ in range(312)],
    "another seed": lambda: random.seed(5),
    "a state set back": lambda: random.setstate(random.Random(3).getstate()),
    "nothing": lambda: None,
}


@pytest.fixture(autouse=True)
def _as_before():
    state = capture_rng()
    yield
    restore_rng(state)


@pytest.mark.parametrize("what", DRAWS)
def test_pythons_state_is_that_of_this_moment(what):
    capture_rng()
    DRAWS[what]()
    assert capture_rng()["python"] == random.getstate()
    DRAWS[what]()
    assert capture_rng()["python"] == random.getstate()


def test_a_generator_in_the_place_of_pythons_is_asked(monkeypatch):
    capture_rng()
    other = random.Random(7)
    monkeypatch.setattr(random, "getstate", other.getstate)
    assert capture_rng()["python"] == other.getstate()
    monkeypatch.setattr(random, "getstate", random.SystemRandom().random)
    assert isinstance(capture_rng()["python"], float)
