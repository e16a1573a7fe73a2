"""Megatron-LM's own pretrain_gpt.py with one line in it, killed and started again: equal to a run that nobody killed.

Equal means: every loss, validation loss and gradient norm of every life, and every parameter, master weight and moment
at the end.
"""

from __future__ import annotations

import functools
import json
import signal
import tempfile
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from moe_ckpt import newest_step
from tests.megatron import megatron_lm_refusals
from tests.megatron.test_bad_input import assert_refused
from tests.support.megatron_lm import MODEL, PIPELINE_EXPERTS, WARM, Journal, Life, live, require_megatron_lm
from tests.support.processes import run_ranks, start_ranks
from tests.support.torchrun import torchrun

RANKS = 4
LIFE_SECS = 500.0
DENSE, WINDOWS = "Dense(every_n_steps=1)", "MoEvement(window=3)"
SHARDED = "--bf16 --use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"

Kill = tuple[int, int, str]


@dataclass(frozen=True)
class Case:
    """kills: see ``Life.kill``, one per life but the last. arguments: of pretrain_gpt.py, beside the model's."""

    policy: str
    kills: tuple[Kill, ...]
    arguments: str = ""
    steps: int = 8


FAST = {"windows": Case(WINDOWS, ((1, 8, "update"),), "--dataloader-type cyclic --iterations-to-skip 4")}
"""Megatron counts iterations to skip from 0: the fifth is skipped, in the middle of the window 4, 6, 7."""
SLOW = {
    "dense": Case(DENSE, ((2, 4, "update"), (0, 7, "end")), "--dataloader-type cyclic --iterations-to-skip 2 5"),
    "dense, in order": Case(DENSE, ((1, 5, "end"),), "--bf16 --use-distributed-optimizer"),
    "windows, replay": Case(
        WINDOWS,
        ((1, 8, "update"), (3, 6, "update")),
        "--dataloader-type cyclic --iterations-to-skip 4 --bf16 --use-distributed-optimizer",
        steps=10,
    ),
    "windows, workers": Case(WINDOWS, ((0, 7, "end"),), "--num-workers 1 --eval-interval 2"),
    "windows, fp16": Case(WINDOWS, ((3, 8, "update"),), "--fp16 --initial-loss-scale 4194304", steps=9),
    "windows, rampup": Case(WINDOWS, ((2, 7, "end"),), "--rampup-batch-size 2 2 8 --train-samples 26", steps=0),
}


@pytest.fixture(autouse=True)
def tree() -> str:
    return require_megatron_lm()


def arguments(case: Case) -> str:
    steps = f" --train-iters {case.steps}" if case.steps else ""
    return f"{MODEL} {PIPELINE_EXPERTS}{steps} {case.arguments}"


def line(policy: str, directory: Path, more: str = "") -> str:
    return f"policy={policy}, dirpath={str(directory / 'store')!r}, when_busy='wait', timeout_secs=60{more}"


@functools.cache
def unbroken(script: str, installed: bool = True, draws: bool = False) -> tuple[list[dict[str, Any]], ...]:
    """What each rank notes of a run that saves nothing and nobody kills.

    installed: False for the script as it is. On a CPU dropout draws from the generator that making data iterators
    draws from, and what is installed keeps the two apart: the random numbers are others then, though as random.
    draws: see ``Life``.
    """
    with tempfile.TemporaryDirectory() as directory:
        journal = f"{directory}/journal"
        saves_nothing = line("Dense(every_n_steps=1000000)", Path(directory), ", save_last=False")
        life = Life(script, journal, saves_nothing if installed else None, draws=draws)
        run_ranks(live, RANKS, life, timeout=LIFE_SECS, preload=WARM)
        return tuple(Journal(f"{journal}.{rank}").lives()[0] for rank in range(RANKS))


def run(directory: Path, script: str, install: str, kill: Kill | None = None) -> None:
    life = Life(script, str(directory / "journal"), install, kill)
    outcomes = start_ranks(live, RANKS, life, timeout=LIFE_SECS, preload=WARM)
    told = [(outcome.exitcode, (outcome.error or "")[-3000:]) for outcome in outcomes]
    if kill is None or kill[2] == "term":
        assert all(outcome.ok for outcome in outcomes), told
    else:
        assert outcomes[kill[0]].exitcode == -signal.SIGKILL, told


def lives(directory: Path, rank: int) -> list[list[dict[str, Any]]]:
    return Journal(str(directory / f"journal.{rank}")).lives()


LOGS = ", upstream_bytes='16MB'"


def in_memory(directory: Path, more: str = "") -> str:
    """For ``line``: checkpoints stay in memory that outlives the processes."""
    (directory / "memory").mkdir()
    return f", memory=Memory(directory={str(directory / 'memory')!r}, storage_every=1000{more})"


def steps_of(life: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {each["step"]: each for each in life if "step" in each}


def validations_of(life: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Those within training; after it the test set is evaluated at the same iteration."""
    ended = next((at for at, each in enumerate(life) if "end" in each), len(life))
    return {each["validated"]: each for each in life[:ended] if "validated" in each}


def require_exact(directory: Path, expected: tuple[list[dict[str, Any]], ...]) -> None:
    for rank, one in enumerate(expected):
        found = lives(directory, rank)
        for number, life in enumerate(found):
            for step, each in steps_of(life).items():
                assert each == steps_of(one)[step], f"rank {rank}, life {number}, iteration {step}"
            for step, each in validations_of(life).items():
                assert each == validations_of(one)[step], f"rank {rank}, life {number}, validation at {step}"
        ended, unbroken = (next(each for each in life if "end" in each) for life in (found[-1], one))
        assert ended["end"] == unbroken["end"], f"rank {rank}"
        assert ended["counted"] == unbroken["counted"], f"rank {rank}: samples consumed, validated, skipped"
        assert max(max(steps_of(life), default=0) for life in found) == max(steps_of(one))


def check(case: Case, directory: Path) -> None:
    expected = unbroken(arguments(case))
    for kill in (*case.kills, None):
        run(directory, arguments(case), line(case.policy, directory), kill)
    require_exact(directory, expected)
    begun = [life[0]["begin"] for life in lives(directory, 0)]
    assert begun[0] == 0
    assert begun[1] > 0, "the second life began anew"
    if case.policy == DENSE:
        assert begun[1] >= case.kills[0][1] - 3


def test_other_versions_of_megatron_lm_are_refused_by_name(tmp_path: Path):
    [found] = run_ranks(megatron_lm_refusals.moved_names, 1, str(tmp_path), preload=WARM)
    assert found.pop("untouched") == ("[]", "")
    core = f"megatron-core {version('megatron-core')}"
    assert len(found) == 30, "each is refused: gone, not called, without a parameter"
    for case, (kind, text) in found.items():
        assert kind == "UnsupportedError", case
        for part in (core, "core_v0.16.1", case.partition(" ")[0].partition("(")[0]):
            assert part in text, (case, text)
    assert not list(tmp_path.iterdir())


def test_an_install_that_nothing_followed_is_said_at_the_end(tmp_path: Path):
    [found] = run_ranks(megatron_lm_refusals.unused, 1, str(tmp_path), preload=WARM)
    assert "nothing was checkpointed: call it before pretrain()" in found["told"][1]
    assert found["refused"][0] == "ConfigError", "Megatron's process groups do not exist"
    assert found["then"][0] == "2", "once each, and not for one that was taken away"
    assert "setting up model and checkpoints failed" in found["then"][1]


def test_a_loader_whose_position_is_not_saved_is_warned_of(tmp_path: Path):
    [found] = run_ranks(megatron_lm_refusals.loaders, 1, str(tmp_path), preload=WARM)
    [told] = found["told"]
    assert "stateful={'loader': ...}" in told


def test_what_cannot_be_checkpointed_is_refused(tmp_path: Path):
    [found] = run_ranks(megatron_lm_refusals.calls, 1, str(tmp_path), preload=WARM)
    assert_refused(
        found,
        {
            "policy": ("ConfigError", "megatron.install", "policy='MoC'"),
            "option": ("ConfigError", "megatron.install(retntion=...)", "did you mean retention?"),
            "twice": ("ConfigError", "called twice", f"{tmp_path}/one", f"{tmp_path}/two"),
            "skip_train": ("ConfigError", "--skip-train", "export_torch_dist"),
            "perform_rl_step": ("UnsupportedError", "--perform-rl-step"),
            "ckpt_convert_format": ("ConfigError", "--ckpt-convert-format", "Leave megatron.install() out"),
            "arguments": ("UnsupportedError", "args.consumed_train_samples"),
        },
    )
    assert found["removed"] == ("(True, True)", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FAST)
def test_killed_and_started_again(name: str, tmp_path: Path):
    check(FAST[name], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SLOW)
def test_killed_and_started_again_in_other_setups(name: str, tmp_path: Path):
    check(SLOW[name], tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("logs", ["", LOGS])
@pytest.mark.parametrize("where", ["fails", pytest.param("log", marks=pytest.mark.slow)])
@pytest.mark.quick("fails-, upstream_bytes='16MB'")
def test_an_error_after_the_update_costs_no_iteration(where: str, logs: str, tmp_path: Path):
    """No rank has come to the iteration's end: its weights are there, and the rest is counted as the loop would. Nor
    does an upstream log of that iteration matter, which is not whole: nobody goes back."""
    memory = in_memory(tmp_path, logs)
    case = Case("Dense(every_n_steps=100)", (), "--dataloader-type cyclic")
    life = Life(arguments(case), str(tmp_path / "journal"), line(case.policy, tmp_path, memory), (1, 7, where))
    outcomes = start_ranks(live, RANKS, life, timeout=LIFE_SECS, preload=WARM)
    assert not any(outcome.ok for outcome in outcomes)
    run(tmp_path, arguments(case), line(case.policy, tmp_path, memory))
    assert [found[-1][0]["begin"] for found in (lives(tmp_path, rank) for rank in range(RANKS))] == [7] * RANKS
    require_exact(tmp_path, unbroken(arguments(case)))


@pytest.mark.timeout(600)
def test_hybrid_models(tree: str, tmp_path: Path):
    """Megatron-LM names HybridModel the successor of GPTModel."""
    if not (Path(tree) / "pretrain_hybrid.py").is_file():
        pytest.skip("this release of Megatron-LM has no pretrain_hybrid.py")
    stack = "--spec tests.support.megatron_hybrid local_stack --hybrid-layer-pattern *E*E"
    script = f"{MODEL} {stack} --expert-model-parallel-size 2 --train-iters 5"
    killed = Life(
        script, str(tmp_path / "journal"), line(DENSE, tmp_path), (1, 4, "update"), program="pretrain_hybrid.py"
    )
    one, other = start_ranks(live, 2, killed, timeout=LIFE_SECS, preload=WARM)
    assert (one.ok, other.exitcode) == (False, -signal.SIGKILL), other.error
    run_ranks(live, 2, replace(killed, kill=None), timeout=LIFE_SECS, preload=WARM)
    alone = replace(killed, kill=None, journal=str(tmp_path / "alone"), line=line(DENSE, tmp_path / "other"))
    run_ranks(live, 2, alone, timeout=LIFE_SECS, preload=WARM)
    require_exact(tmp_path, tuple(Journal(f"{alone.journal}.{rank}").lives()[0] for rank in range(2)))
    assert lives(tmp_path, 0)[-1][0]["begin"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_when_weights_are_gathered_costs_no_iteration(rank: int, tmp_path: Path):
    """The distributed optimizer of the dense parameters has stepped, and that of the experts has not. Each rank keeps
    weights of its own range alone, so that it matters to none whose weights it got."""
    memory = in_memory(tmp_path)
    case = Case("Dense(every_n_steps=100)", (), "--bf16 --use-distributed-optimizer")
    life = Life(arguments(case), str(tmp_path / "journal"), line(case.policy, tmp_path, memory), (rank, 7, "gathers"))
    outcomes = start_ranks(live, RANKS, life, timeout=LIFE_SECS, preload=WARM)
    assert not any(outcome.ok for outcome in outcomes)
    run(tmp_path, arguments(case), line(case.policy, tmp_path, memory))
    assert [found[-1][0]["begin"] for found in (lives(tmp_path, rank) for rank in range(RANKS))] == [7] * RANKS
    require_exact(tmp_path, unbroken(arguments(case)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "logs", "more"),
    [
        ("validates", "", ""),
        pytest.param("validates", LOGS, "", marks=pytest.mark.slow),
        pytest.param("validated", "", "", marks=pytest.mark.slow),
        pytest.param("validates", "", OVERLAPPED, marks=pytest.mark.slow),
    ],
)
def test_an_error_at_a_validation_costs_no_iteration(where: str, logs: str, more: str, tmp_path: Path):
    """Some ranks were through with it, others in the middle: all make it again, on the same batches, before they go on.
    Where all were through with it, nobody does."""
    memory = in_memory(tmp_path, logs)
    case = Case("Dense(every_n_steps=100)", (), more)
    installed = line(case.policy, tmp_path, memory)
    life = Life(arguments(case), str(tmp_path / "journal"), installed, (1, 5, where), draws=True)
    outcomes = start_ranks(live, RANKS, life, timeout=LIFE_SECS, preload=WARM)
    assert not any(outcome.ok for outcome in outcomes)
    run_ranks(live, RANKS, replace(life, kill=None), timeout=LIFE_SECS, preload=WARM)
    for rank in range(RANKS):
        last = lives(tmp_path, rank)[-1]
        assert last[0]["begin"] == 5
        assert sorted(validations_of(last)) == ([5] if where == "validates" else [])
    require_exact(tmp_path, unbroken(arguments(case), draws=True))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_validation_that_the_last_iteration_lacks_is_made_at_the_end(tmp_path: Path):
    memory = in_memory(tmp_path)
    case = Case("Dense(every_n_steps=100)", (), steps=5)
    life = Life(arguments(case), str(tmp_path / "journal"), line(case.policy, tmp_path, memory), (1, 5, "validates"))
    assert not any(outcome.ok for outcome in start_ranks(live, RANKS, life, timeout=LIFE_SECS, preload=WARM))
    run(tmp_path, arguments(case), line(case.policy, tmp_path, memory))
    for rank, expected in enumerate(unbroken(arguments(case))):
        last = lives(tmp_path, rank)[-1]
        wanted, found = ([each["losses"] for each in life if "validated" in each] for life in (expected, last))
        assert len(wanted) == 3, "of the iteration, and at the end of validation data and test data"
        assert found == wanted


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_is_killed_in_a_validation_costs_one_iteration(tmp_path: Path):
    """What it alone had of that iteration is nowhere. The iteration and its validation are made once more."""
    memory = in_memory(tmp_path)
    case = Case(DENSE, (), "")
    run(tmp_path, arguments(case), line(case.policy, tmp_path, memory), (1, 5, "validating"))
    run(tmp_path, arguments(case), line(case.policy, tmp_path, memory))
    assert [found[-1][0]["begin"] for found in (lives(tmp_path, rank) for rank in range(RANKS))] == [4] * RANKS
    require_exact(tmp_path, unbroken(arguments(case)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_starts_all_ranks_again(tmp_path: Path):
    case = Case(WINDOWS, ((1, 8, "update"),), "--dataloader-type cyclic --iterations-to-skip 4")
    job = {
        "arguments": arguments(case),
        "line": line(case.policy, tmp_path),
        "journal": str(tmp_path / "journal"),
        "kills": case.kills,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    said = torchrun(
        "tests.megatron.megatron_lm_rank", str(tmp_path / "job.json"), ranks=RANKS, restarts=1, timeout_secs=600
    )
    require_exact(tmp_path, unbroken(arguments(case)))
    resumed = [text for text in said.splitlines() if "resumed at iteration 4" in text]
    assert len(resumed) == 1, "rank 0 says once what the run goes on from"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["MoC(k=1, every_n_steps=2)", WINDOWS])
def test_exit_intervals(policy: str, tmp_path: Path):
    """Each life ends by ``sys.exit`` with a complete checkpoint, so nothing is computed twice or lost."""
    script = f"{MODEL} {PIPELINE_EXPERTS} --train-iters 8 --dataloader-type cyclic"
    for iteration in (3, 6, 8):
        run(tmp_path, f"{script} --exit-interval 3", line(policy, tmp_path))
        assert newest_step(tmp_path / "store") == iteration
        assert (tmp_path / "store" / "finished.json").exists() == (iteration == 8), "an interval ends no run"
    require_exact(tmp_path, unbroken(script))
    assert [life[0]["begin"] for life in lives(tmp_path, 0)] == [0, 3, 6]
    assert [life[-1]["exit"] for life in lives(tmp_path, 0)] == [0, 0, 0]
    run(tmp_path, f"{script} --exit-interval 3", line(policy, tmp_path))
    assert lives(tmp_path, 0)[-1][0]["begin"] == 8, "there is nothing left to train"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_exit_signal_to_one_rank(tmp_path: Path):
    """All end in good order with a complete checkpoint, though the policy was not due and there is no --save."""
    script = f"{MODEL} {PIPELINE_EXPERTS} --train-iters 6"
    policy = "MoC(k=1, every_n_steps=100)"
    run(tmp_path, f"{script} --exit-signal-handler", line(policy, tmp_path), (2, 4, "term"))
    assert newest_step(tmp_path / "store") == 4
    run(tmp_path, script, line(policy, tmp_path))
    require_exact(tmp_path, unbroken(script))
    assert [life[0]["begin"] for life in lives(tmp_path, 1)] == [0, 4]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_load_beside_an_empty_store_and_save_beside_windows(tmp_path: Path):
    """Megatron's own checkpoint is gone on from where the store is empty; the store is, where it is not."""
    script = f"{MODEL} {PIPELINE_EXPERTS} --train-iters 8 --ckpt-format torch --no-save-rng"
    first = f"{script} --save {tmp_path}/megatron --save-interval 3 --exit-interval 3"
    run_ranks(live, RANKS, Life(first, str(tmp_path / "first")), timeout=LIFE_SECS, preload=WARM)
    load = f"{script} --load {tmp_path}/megatron --no-load-rng"
    run(tmp_path, f"{load} --exit-interval 5", line(DENSE, tmp_path))
    assert newest_step(tmp_path / "store") == 5
    run(tmp_path, load, line(DENSE, tmp_path), (1, 8, "update"))
    run(tmp_path, load, line(DENSE, tmp_path))
    begun = [(life[0]["begin"], life[0]["counted"][0]) for life in lives(tmp_path, 3)]
    assert begun[:2] == [(3, 12), (5, 20)]
    assert begun[2][0] > 5
    assert newest_step(tmp_path / "store") == 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_complete_checkpoints_at_save_interval(tmp_path: Path):
    """--save-interval without --save: complete ones of ours between MoC's partial ones, though MoC is never due."""
    script = f"{MODEL} {PIPELINE_EXPERTS} --train-iters 6"
    policy = "MoC(k=1, every_n_steps=100)"
    run(tmp_path, f"{script} --save-interval 2", line(policy, tmp_path, ", save_last=False"), (0, 6, "update"))
    assert newest_step(tmp_path / "store") == 4
    run(tmp_path, script, line(policy, tmp_path))
    require_exact(tmp_path, unbroken(script))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_installed_changes_no_number(tmp_path: Path):
    script = f"{MODEL} {PIPELINE_EXPERTS} --train-iters 4 --dataloader-type cyclic --attention-dropout 0"
    script += " --hidden-dropout 0 --eval-interval 2"
    run(tmp_path, script, line(WINDOWS, tmp_path))
    require_exact(tmp_path, unbroken(script, installed=False))
