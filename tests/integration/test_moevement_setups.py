"""MoEvement under kill -9, however the run is set up: precision, optimizer, clipping, accumulation, models, windows.

Each run dies in the middle of a window, and its next life too, most often while it computes a window again. Dropout is
on in all of them. Where a run dies is the matter of ``test_moevement_kills``.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    events,
    live,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    recomputed,
    split_lives,
)

BASE = Run(None, policy=("moevement", 3), callback={"when_busy": "wait"})


def _run(model: dict[str, Any] | None = None, window: int = 3, order: str = "hard_count", **more: Any) -> Run:
    """A run of 20 batches; ``more``: fields of ``Run``, or of its trainer."""
    fields = {name: more.pop(name) for name in list(more) if name in Run.__dataclass_fields__}
    return replace(
        BASE, policy=("moevement", window), options={"order": order}, model=model or {}, trainer=more, **fields
    )


LISTED = {"stacked": False}
LAG = 2
"""Snapshots that may be under way when a run dies; see ``test_moevement_kills``."""
FAST = {
    "fused-clipped-by-norm-accumulated": _run(
        {"optimizer": "fused"}, gradient_clip_val=0.1, accumulate_grad_batches=3, epochs=3
    ),
    "adafactor-biased-experts-4": _run({"optimizer": "adafactor"}, 4, kind="biased-experts"),
    "sgd-listed-clipped-by-value-2": _run(
        LISTED | {"optimizer": "sgd"}, 2, "round_robin", gradient_clip_val=0.01, gradient_clip_algorithm="value"
    ),
    "foreach-listed-bf16-mixed-5-accumulated": _run(
        LISTED, 5, "round_robin", precision="bf16-mixed", gradient_clip_val=0.1, accumulate_grad_batches=3, epochs=3
    ),
    "manual-two-optimizers": _run(kind="manual"),
    "scaler": _run(kind="overflowing", gradient_clip_val=0.1),
    "epoch-scheduled": _run(kind="epoch-scheduled", window=5),
    "validation-and-average": _run(beside=("ema",), validate=True, val_check_interval=3),
    "no-moe": _run(kind="no-moe", window=2),
}
SLOW = {
    "forloop-listed-bf16-true-1": _run(LISTED | {"optimizer": "forloop"}, 1, precision="bf16-true"),
    "manual-once": _run(kind="manual-once"),
    "adafactor-5": _run({"optimizer": "adafactor"}, 5),
    "adafactor-listed-3": _run(LISTED | {"optimizer": "adafactor"}, precision="bf16-mixed", gradient_clip_val=0.1),
    "adafactor-bf16-true-5": _run({"optimizer": "adafactor"}, 5, precision="bf16-true"),
    "validation": _run(validate=True, val_check_interval=3, window=5),
    "average-bf16-mixed": _run(beside=("ema",), precision="bf16-mixed"),
    "average-listed": _run(LISTED, 5, beside=("ema",)),
    "swa": _run(beside=("swa",), epochs=4),
    "model-checkpoint-beside": _run(beside=("modelcheckpoint",), validate=True),
    "scaler-accumulated": _run(kind="overflowing", accumulate_grad_batches=2, epochs=3),
    "workers": _run(workers=2),
    "skips-when-busy": replace(_run(epochs=3), callback={}),
    "sized-by-itself": replace(_run(epochs=4), policy=("moevement", None)),
    "more-experts-listed": _run({"stacked": False, "experts": 12, "top_k": 1}, 5),
    "mixtral": _run(kind="mixtral", gradient_clip_val=0.1),
    "mixtral-sgd-5": _run({"optimizer": "sgd"}, 5, kind="mixtral"),
    "mixtral-bf16-mixed": _run(kind="mixtral", precision="bf16-mixed"),
    "mixtral-bf16-true": _run(kind="mixtral", precision="bf16-true"),
    "qwen3": _run(kind="qwen3", gradient_clip_val=0.1),
    "qwen3-bf16-mixed-5": _run(kind="qwen3", window=5, precision="bf16-mixed", gradient_clip_val=0.1),
    "qwen3-bf16-true-2": _run(kind="qwen3", window=2, precision="bf16-true"),
}

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")
OPTIMIZERS = ("fused", "adamw", "forloop", "sgd", "adafactor")
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def _drawn(precision: str, optimizer: str, seed: int) -> Run:
    """Everything else by lot, so that over the seeds every pair of choices comes up."""
    rng = random.Random(f"{precision} {optimizer} {seed}")
    clipping = CLIPPING[rng.choice(list(CLIPPING))]
    if (precision, optimizer) == ("bf16-mixed", "fused"):
        clipping = {}  # Lightning refuses it
    accumulated = rng.choice((1, 3))
    return _run(
        {"optimizer": optimizer, "stacked": rng.random() < 0.5},
        rng.choice((1, 2, 3, 5)),
        rng.choice(("hard_count", "soft_count", "time_decayed", "capacity_normalised", "round_robin")),
        precision=precision,
        accumulate_grad_batches=accumulated,
        epochs=4 if accumulated == 1 else 6,
        **clipping,
    )


def _dies_and_comes_back(run: Run, crashes: list[tuple[str, int]]) -> None:
    died = 0
    for crash in crashes:
        died += live(replace(run, crash=crash)) == KILLED
        assert_store_sound(run, ended=False)
    assert died, "no life was killed"
    assert live(run) == 0, output(run)
    assert_store_sound(run, ended=True)
    assert_promises_kept(run)
    assert_same_run(run)
    assert len(split_lives(events(run))) > 1
    skipped = 2 if run.kind == "overflowing" else 1  # steps that a scaler skips count, but are not saved
    if run.policy[1] is not None and run.callback:
        assert max(recomputed(run), default=0) <= skipped * (2 * run.policy[1] - 1 + LAG), recomputed(run)


def _moments(run: Run) -> list[tuple[str, int]]:
    """Deep enough into training that two windows are through, and then again early in the next life."""
    each = run.trainer.get("accumulate_grad_batches", 1)
    return [("compute", 13 + (each > 1) * 14), ("compute", 2)]


@pytest.mark.parametrize("name", FAST)
def test_comes_back_equal(name, place):  # noqa: F811
    _dies_and_comes_back(placed(FAST[name], place), _moments(FAST[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_comes_back_equal_too(name, place):  # noqa: F811
    _dies_and_comes_back(placed(SLOW[name], place), _moments(SLOW[name]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("precision", "optimizer"), list(itertools.product(PRECISIONS, OPTIMIZERS)))
def test_any_set_up(precision, optimizer, seed, place):  # noqa: F811
    run = placed(_drawn(precision, optimizer, seed), place)
    print(run.policy, run.options, run.model, run.trainer)
    rng = random.Random(seed)
    phases = ("compute", "copy", "write", "fsync", "rename", "manifest", "gc")
    crashes = [(rng.choice(phases), rng.randint(1, 4)) for _ in range(2)]  # so that none comes after the end
    print(crashes)
    _dies_and_comes_back(run, [("compute", rng.randint(8, 19)), *crashes])
