"""What a loop may do besides four lines: draw between resume and the first step, skip, count, save, end twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.megatron import Progress
from moe_ckpt.megatron.host import idle_generators
from tests.megatron import loop_calls
from tests.megatron.loop_calls import Plan
from tests.support import run_ranks

WARM = "tests.support.megatron_warm"
DENSE = ("Dense", {"every_n_steps": 1})
WINDOWS = ("MoEvement", {"window": 3})


def only(function, tmp_path: Path, *args):
    [found] = run_ranks(function, 1, str(tmp_path), *args, preload=WARM)
    return found


PLANS = (
    Plan(DENSE, timed=True),
    Plan(WINDOWS, timed=True),
    Plan(DENSE, begin="call"),
    Plan(WINDOWS, begin="call"),
    Plan(DENSE, skipped=frozenset({1, 4})),
    Plan(WINDOWS, skipped=frozenset({1, 6, 9})),
)


def test_lives_that_draw_between_resume_and_the_first_step(tmp_path: Path):
    for plan, told in zip(PLANS, only(loop_calls.lives, tmp_path, PLANS, (4, 8, 10)), strict=True):
        require_equal(plan, *told)


def require_equal(plan: Plan, first: dict, second: dict, third: dict, unbroken: dict) -> None:
    assert second["progress"].restored
    assert first["said"][0].startswith("training starts from scratch: ")
    for life in (second, third):
        resumed, *_ = (said for said in life["said"] if not said.startswith("recovery plan"))
        assert resumed.startswith(f"resumed at iteration {life['progress'].iteration} from "), life["said"]
        assert [said for said in life["said"] if "resumed at" in said] == [resumed], "once, replay or not"
    assert third["progress"].iteration > second["progress"].iteration
    for life in (first, second, third):
        for what in ("losses", "drawn"):
            assert life[what] == {at: unbroken[what][at] for at in life[what]}, (plan, what)
        assert 0 < life["new"] == life["measured"], "metrics leave out what is computed again"
    assert third["digests"] == unbroken["digests"], plan
    assert third["consumed"] == unbroken["consumed"]
    counters = third["progress"].counters
    assert counters["iterations"] == third["progress"].iteration
    if plan.timed:
        assert counters["life"] < 2


def test_every_moment_in_which_a_hook_keeps_the_training_thread_is_part_of_the_stall(tmp_path: Path):
    for hook, told in only(loop_calls.stalls, tmp_path).items():
        assert [secs for secs, _ in told] == [calls for _, calls in told], hook
        assert all(calls for _, calls in told), hook


def test_complete_checkpoints_on_demand_and_an_end_said_twice(tmp_path: Path):
    found = only(loop_calls.saving, tmp_path)
    assert (found["before"], found["opened"]) == (None, None)
    assert found["saved"][:2] == (True, 3), "MoC was not due before iteration 4"
    assert found["saved again"] == (True, 0)
    assert found["partial"][:2] == (True, 4)
    assert found["skipped late"].startswith("skip(): call nothing after finish() or close()")
    assert found["finished"] == 5
    assert not found["wrapped"]
    progress, digests, lost = found["back"]
    assert progress == Progress(5, 10, restored=True, counters={"valid": 7})
    assert digests == found["partial"][2]
    assert lost == 0


def test_the_end_of_a_run_and_other_settings_are_said(tmp_path: Path):
    found = only(loop_calls.ending, tmp_path)
    for name in ("cut short", "ended", "started again", "other settings", "other settings still", "its own"):
        assert " MoE layers of " in found[name].pop(0)
    assert [each[:28] for each in found["cut short"]] == ["training starts from scratch"]
    assert found["cut short, noted when the store was let go of"] == ["False"]
    assert found["ended, noted when the store was let go of"] == ["True"]
    [resumed] = found["ended"]
    assert "resumed at iteration 2 from " in resumed
    assert "(PLT 0.00%)" in resumed
    assert "is finished" not in resumed
    [again] = found["started again"]
    assert "resumed at iteration 4 from " in again
    assert "The run is finished (training ended): training that ends at iteration 4 does nothing" in again
    end, changes = found["other settings"]
    assert "is finished" in end
    wanted = "optimizer max_lr 0.01 -> 0.02; optimizer min_lr 0.001 -> 0.002 (training continues with the checkpoint's)"
    assert changes == f"hyperparameters differ from the checkpoint's: {wanted}"
    assert found["other settings, in force"] == ["0.01"]
    end, still = found["other settings still"]
    assert "is finished" not in end, "it went on since"
    assert still == changes, "compared with what the run began with"
    assert len(found["its own"]) == 1


def test_an_error_behind_an_update_says_what_is_not_kept(tmp_path: Path):
    said = only(loop_calls.broken_off, tmp_path)
    assert said == [
        "training stops (ZeroDivisionError), and rank 0 does not keep iteration 2 in memory: its update is made, but "
        "the loop has not come to the end of the iteration, usually because it waits for a rank that died"
    ]


def test_a_run_is_not_saved_between_an_update_and_its_iteration(tmp_path: Path):
    """Weights of iteration N + 1 must never be committed as those of N."""
    for (name, _), found in zip(loop_calls.LEFT, only(loop_calls.left_in_between, tmp_path), strict=True):
        for call, at in (("finish", 3), ("save", 3), ("skip", 3), ("with", 5)):
            assert f"weights are no longer those of iteration {at - 1}" in found[call], (name, call)
            assert f"Call after_step({at}, consumed_samples=...) first" in found[call]
        assert found["counted"] is True, name
        iteration, right = found["back"]
        assert iteration >= 3, name
        assert right, (name, iteration)


def test_an_iteration_that_does_not_say_how_far_the_data_came(tmp_path: Path):
    found = only(loop_calls.without_samples, tmp_path)
    assert found["given"] == []
    [warning] = found["not given"]
    assert warning.startswith("after_step(2) was called without consumed_samples, so the next start will be at ")
    assert found["back"] == Progress(4, 2, restored=True), "unchanged"


def test_a_run_that_begins_from_what_the_caller_loaded(tmp_path: Path):
    found = only(loop_calls.begun_elsewhere, tmp_path)
    assert found["progress"] == Progress(500, 8000, counters={"valid": 3})
    assert found["back"] == Progress(501, 1002, restored=True, counters={"valid": 3})


def test_a_window_whose_iterations_are_skipped_otherwise(tmp_path: Path):
    found = only(loop_calls.replayed_otherwise, tmp_path)
    assert "computing step 7 again did not repeat it: it is skipped now, and was computed then" in found["skipped now"]
    assert "computing step 6 again did not repeat it: it is computed now, and was skipped" in found["skipped then"]
    assert found["began"] == 4
    assert found["saved"] is False


def test_an_update_without_a_forward_pass(tmp_path: Path):
    said = only(loop_calls.no_forward, tmp_path)
    assert said.startswith("ConfigError: no training forward pass of the model")
    assert "begin_training()" in said


def test_a_model_left_in_eval_mode(tmp_path: Path):
    """Only routers in training mode are counted: said once, where an update shows that training was meant."""
    found = only(loop_calls.in_eval_mode, tmp_path)
    [said] = found["eval"]
    assert said.startswith("iteration 1 updated the weights, but no router")
    assert "model.train()" in said
    assert found["routed eval"] == 0 < found["routed training"]
    assert found["training"] == found["eval, no update"] == found["eval, no MoE layer"] == []
    assert found["back in eval"].startswith("ConfigError: no training forward pass")
    assert "eval mode, call model.train()" in found["back in eval"]


def test_which_generators_say_something_of_a_step():
    on_gpu = {"torch": [1], "cuda": [1]}
    assert idle_generators(on_gpu, {"torch": [1], "cuda": [2]}) == {"torch"}
    assert idle_generators(on_gpu, {"torch": [2], "cuda": [2]}) == frozenset(), "the step drew from it"
    assert idle_generators({"torch": [1]}, {"torch": [1]}) == frozenset(), "the model is on the CPU"


def test_tokens_of_passes_whose_update_is_skipped_do_not_count(tmp_path: Path):
    found = only(loop_calls.skipped_behind_a_pass, tmp_path)
    assert found[True] == found[False] > 0


@pytest.mark.parametrize(("seed", "workers"), [(None, 0), (3, 0), (None, 1), (3, 1)])
@pytest.mark.quick("None-0", "3-1")
def test_later_epochs_are_shuffled_alike(tmp_path: Path, seed: int | None, workers: int):
    """After restarts in the middle of an epoch, and at its end; with the run's generator, and the loader's own."""
    killed, whole = (
        only(loop_calls.epochs, tmp_path / str(len(ends)), seed, workers, ends) for ends in ((1, 6, 8, 12), (12,))
    )
    assert killed == whole


def test_a_careless_loop_is_told(tmp_path: Path):
    first, second = only(loop_calls.careless, tmp_path)
    changed, uncounted = (
        "data loader data.batch_size 2 -> 4 (training continues with this script's)",
        "stepped 16 times",
    )
    assert not any(changed in each or uncounted in each for each in first)
    assert sum(changed in each for each in second) == sum(uncounted in each for each in second) == 1, second


def test_counts_may_be_of_any_type_and_state_of_any_form(tmp_path: Path):
    assert only(loop_calls.odd_values, tmp_path) == (1, 16, {0: 1}, 3, 0.5)
