"""Megatron-LM's own pretrain_gpt.py with one line in it: only the stage that lost a rank goes back.

Its loop exchanges more over all stages than forward and backward passes do: gathered timers, barriers, maxima of
elapsed times, validations. What is compared is as in ``test_megatron_lm``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.test_megatron_lm import (
    WINDOWS,
    Kill,
    arguments,
    lives,
    require_exact,
    run,
    steps_of,
    tree,  # noqa: F401 - a fixture
    unbroken,
    validations_of,
)
from tests.megatron.test_megatron_lm import Case as Script
from tests.megatron.test_megatron_lm import line as alone_line
from tests.support.megatron_lm import MODEL
from tests.support.plain_store import read_body

LOGGED = "--log-interval 2 --log-params-norm --log-throughput --timing-log-level 2 --exit-duration-in-mins 600"
NO_VALIDATION = "--eval-interval 1000"
TOKENS = 4 * 16 * 2
"""Of each MoE layer in one iteration: sequences, their length, experts of each token."""


def line(policy: str, directory: Path) -> str:
    memory = f"Memory(directory={str(directory / 'memory')!r}, storage_every=1000, upstream_bytes='16MB')"
    return alone_line(policy, directory, f", memory={memory}")


def computed(directory: Path, ranks: int = 4) -> list[list[int]]:
    """Of each rank, the iterations that its last life computed."""
    return [sorted(steps_of(lives(directory, rank)[-1])) for rank in range(ranks)]


def check(script: str, policy: str, kills: tuple[Kill, ...], directory: Path) -> None:
    (directory / "memory").mkdir()
    expected = unbroken(script)
    for kill in (*kills, None):
        run(directory, script, line(policy, directory), kill)
    require_exact(directory, expected)


def went_back(directory: Path, since: int) -> set[int]:
    """Ranks whose last life computed iterations up to ``since`` again."""
    return {rank for rank, iterations in enumerate(computed(directory)) if iterations and iterations[0] <= since}


@pytest.mark.timeout(600)
def test_one_stage_goes_back_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"{arguments(Script(WINDOWS, (), steps=10))} {LOGGED} {NO_VALIDATION}"
    check(script, WINDOWS, ((2, 7, "update"),), tmp_path)
    assert computed(tmp_path)[:2] == [[7, 8, 9, 10]] * 2, "the first stage keeps iteration 6"
    assert went_back(tmp_path, 6) == {2, 3}
    said = capfd.readouterr()
    assert "2 of 4 ranks, of pipeline stage 1, go back to step 4" in said.out + said.err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", ["", "--num-layers-per-virtual-pipeline-stage 1"])
def test_a_validation_in_between_is_not_made_again(more: str, tmp_path: Path) -> None:
    """After the fifth iteration, and again after the tenth, on the batches that are due then."""
    script = f"{arguments(Script(WINDOWS, (), steps=11))} {LOGGED} {more}"
    check(script, WINDOWS, ((2, 7, "update"),), tmp_path)
    assert computed(tmp_path)[:2] == [[7, 8, 9, 10, 11]] * 2, "the first stage keeps iteration 6"
    assert went_back(tmp_path, 6) == {2, 3}
    for rank in range(4):
        assert sorted(validations_of(lives(tmp_path, rank)[-1])) == [10]


DENSE = "Dense(every_n_steps=4)"
SHARDED = "--bf16 --use-distributed-optimizer"
SETUPS = {
    "dense": (DENSE, "", ((1, 7, "update"),), {0, 1}),
    "shards": (WINDOWS, SHARDED, ((1, 7, "update"),), {0, 1}),
    "fp16": (WINDOWS, "--fp16 --initial-loss-scale 4194304", ((3, 13, "update"),), {2, 3}),
    "overlap": (WINDOWS, f"{SHARDED} --overlap-grad-reduce --overlap-param-gather", ((2, 7, "update"),), {2, 3}),
    "tensorboard": (WINDOWS, "--tensorboard-dir {root}/tb --log-timers-to-tensorboard", ((2, 7, "update"),), {2, 3}),
    "signals": (WINDOWS, "--exit-signal-handler --exit-interval 1000", ((0, 7, "update"),), {0, 1}),
    "save": (WINDOWS, "--save {root}/megatron --save-interval 3 --ckpt-format torch", ((2, 8, "update"),), {2, 3}),
    "in the recovery": (WINDOWS, "", ((2, 7, "update"), (2, 6, "update")), {2, 3}),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETUPS)
def test_one_stage_goes_back_alone_in_other_setups(name: str, tmp_path: Path) -> None:
    policy, more, kills, stage = SETUPS[name]
    steps = 3 + kills[0][1]
    script = f"{arguments(Script(policy, (), steps=steps))} {LOGGED} {NO_VALIDATION} {more.format(root=tmp_path)}"
    check(script, policy, kills, tmp_path)
    assert went_back(tmp_path, kills[0][1] - 1) == stage


FOUR = f"{MODEL} --pipeline-model-parallel-size 4 --train-iters 10"
INTERLEAVED = f"{MODEL} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --train-iters 10"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "rank", "stage"), [(FOUR, 1, {1}), (FOUR, 3, {3}), (INTERLEAVED, 1, {0, 1})])
def test_other_pipelines(script: str, rank: int, stage: set[int], tmp_path: Path) -> None:
    check(f"{script} {LOGGED} {NO_VALIDATION}", WINDOWS, ((rank, 7, "update"),), tmp_path)
    assert went_back(tmp_path, 6) == stage


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_behind_a_skipped_iteration_all_go_back(tmp_path: Path) -> None:
    """Iteration 6 has no log."""
    skipped = "--iterations-to-skip 5 --dataloader-type cyclic"
    script = f"{arguments(Script(WINDOWS, (), steps=10))} {LOGGED} {NO_VALIDATION} {skipped}"
    check(script, WINDOWS, ((2, 8, "update"),), tmp_path)
    assert went_back(tmp_path, 7) == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("where", "stage"), [("logged", {2, 3}), ("end", {0, 1, 2, 3})])
def test_a_rank_dies_between_its_update_and_the_agreement_on_tokens(
    where: str, stage: set[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM logs in between, over all stages: where the others miss the rank there, they have no log of the
    iteration."""
    script = f"{arguments(Script(WINDOWS, (), steps=10))} {LOGGED} {NO_VALIDATION}"
    check(script, WINDOWS, ((2, 7, where),), tmp_path)
    assert went_back(tmp_path, 6) == stage
    [last] = (tmp_path / "store").glob("step_00000010*/MANIFEST.json")
    book = read_body(last)["tokens"]
    assert [sum(layer) for layer in book["applied"]] == [10 * TOKENS] * 4
    assert [lost for _, lost, *_ in book["faults"]] == [0]
    said = capfd.readouterr()
    why = "2 ranks kept step 7, but all go back: rank 0 has no upstream log of step 7, which it may not have ended"
    assert (why in said.out + said.err) == (where == "end")
