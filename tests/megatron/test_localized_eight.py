"""As ``test_localized``, with eight processes: several ranks of one stage, experts and shards within it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tests.megatron.exactness import finish, kill, require_exact
from tests.megatron.test_exact import SHARDED
from tests.megatron.test_localized import RARELY, again, case, require_every_token
from tests.support.megatron_gpt import Setup

EIGHT = {"layers": 4, "num_microbatches": 4, "experts": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "dead", "stages"),
    [
        (Setup(**EIGHT, pp=4), (2,), {1}),
        (Setup(**EIGHT, pp=4, **SHARDED), (2, 5), {1, 2}),
        (Setup(**EIGHT, pp=4), (0, 1, 7), {0, 3}),
        (Setup(**EIGHT, pp=2, ep=2), (1, 2), {0}),
        (Setup(**EIGHT, pp=2, ep=2, **SHARDED), (6,), {1}),
    ],
    ids=["pp4-dp2-one", "pp4-dp2-neighbours", "pp4-dp2-apart", "pp2-ep2-dp2-two", "pp2-ep2-dp2-one"],
)
def test_eight_ranks(setup, dead, stages, tmp_path):
    run = case(setup, (dead[0], 8, "forward"), together=dead[1:], steps=9, ranks=8)
    kill(run, tmp_path)
    require_exact(run, tmp_path, finish(run, tmp_path))
    assert again(tmp_path, 8) == [[5, 6, 7] if rank * setup.pp // 8 in stages else [] for rank in range(8)]


EIGHTS = {"pp4-dp2": Setup(**EIGHT, pp=4), "pp2-ep2-dp2": Setup(**EIGHT, pp=2, ep=2)}
on_eight = pytest.mark.parametrize("layout", EIGHTS)


def of_stage(setup: Setup, rank: int) -> list[int]:
    """All ranks of a rank's stage."""
    return [each for each in range(8) if each * setup.pp // 8 == rank * setup.pp // 8]


@pytest.mark.slow
@on_eight
@pytest.mark.parametrize(
    ("second", "dead", "steps"),
    [
        ((2, 2, "replay"), 2, [5, 6, 7]),
        ((3, 2, "replay"), 2, [5, 6, 7]),
        ((4, 0, "resume"), 2, [5, 6, 7]),
        ((5, 9, "forward"), 5, [5, 6, 7, 8]),
    ],
    ids=["the same again", "its peer", "next to it", "just after"],
)
def test_one_of_eight_ranks_dies_during_the_recovery_or_just_after_it(layout, second, dead, steps, tmp_path):
    setup = EIGHTS[layout]
    run = replace(case(setup, (2, 8, "forward"), steps=10, ranks=8), kills=((2, 8, "forward"), second))
    kill(run, tmp_path)
    require_exact(run, tmp_path, finish(run, tmp_path))
    assert again(tmp_path, 8) == [steps if rank in of_stage(setup, dead) else [] for rank in range(8)]


@pytest.mark.slow
@on_eight
@pytest.mark.parametrize("more", [(), ((3, 3, "replay"),)], ids=["once", "its peer in the replay"])
def test_one_of_eight_ranks_dies_before_the_agreement_on_tokens(layout, more, tmp_path):
    """Others of its stage have sealed what they counted, and count it once more: it counts once."""
    setup = EIGHTS[layout]
    run = replace(case(setup, (2, 7, "updated"), steps=10, ranks=8), kills=((2, 7, "updated"), *more))
    kill(run, tmp_path)
    ended = finish(run, tmp_path)
    require_exact(run, tmp_path, ended)
    require_every_token(run, ended)
    assert again(tmp_path, 8) == [[5, 6, 7] if rank in of_stage(setup, 2) else [] for rank in range(8)]


@pytest.mark.slow
@on_eight
def test_a_node_of_two_of_eight_ranks_is_lost(layout, tmp_path):
    setup = EIGHTS[layout]
    run = replace(case(setup, (2, 8, "forward"), steps=10, ranks=8), copies={**RARELY, "replicas": 1}, together=(3,))
    kill(run, tmp_path)
    shutil.rmtree(tmp_path / "memory" / "node_1")
    require_exact(run, tmp_path, finish(run, tmp_path))
    assert again(tmp_path, 8) == [[5, 6, 7] if rank in of_stage(setup, 2) else [] for rank in range(8)]


@pytest.mark.slow
@on_eight
def test_a_node_of_eight_ranks_is_lost_next_to_a_recovery(layout, tmp_path):
    """PP4: stage 2 joins stage 1. PP2: no stage is whole any more, and all go back."""
    setup = EIGHTS[layout]
    run = replace(case(setup, (2, 8, "forward"), steps=10, ranks=8), copies={**RARELY, "replicas": 1})
    run = replace(run, kills=((2, 8, "forward"), (4, 0, "resume")))
    kill(run, tmp_path)
    shutil.rmtree(tmp_path / "memory" / "node_2")
    require_exact(run, tmp_path, finish(run, tmp_path))
    lost = [*of_stage(setup, 2), *of_stage(setup, 4)]
    steps = [5, 6, 7] if len(lost) < 8 else [5, 6]
    assert again(tmp_path, 8) == [steps if rank in lost else [] for rank in range(8)]
