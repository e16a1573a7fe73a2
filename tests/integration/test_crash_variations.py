"""However a run is set up: stopped in the middle of a step and started anew, it ends like the run never stopped.

In one process: an exception stops training at a random batch; a fresh Trainer with a fresh module goes on.
(Real kills are in ``test_crash_kill``; where a run stops matters there, how it is set up matters here.)
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.crash_run import Run, StopHere, build, final_state, loaders
from tests.integration.lives import (
    assert_same_losses,
    assert_store_sound,
    differences,
    fast_directory,
    place,  # noqa: F401 - a fixture
)

VARIATIONS = {
    "adamw": Run(None),
    "fused": Run(None, model={"optimizer": "fused"}),
    "forloop": Run(None, model={"optimizer": "forloop"}),
    "sgd": Run(None, model={"optimizer": "sgd"}),
    "adafactor": Run(None, model={"optimizer": "adafactor"}),
    "listed-experts": Run(None, model={"stacked": False}),
    "every-3": Run(None, policy=("dense", 3), epochs=3),
    "accumulate-3": Run(None, trainer={"accumulate_grad_batches": 3}, epochs=3),
    "bf16-mixed": Run(None, trainer={"precision": "bf16-mixed"}),
    "bf16-true": Run(None, trainer={"precision": "bf16-true"}),
    "clipping": Run(None, trainer={"gradient_clip_val": 0.1}),
    "scaler-with-overflows": Run(None, kind="overflowing", epochs=3),
    "scaler-accumulate-2": Run(None, kind="overflowing", trainer={"accumulate_grad_batches": 2}, epochs=3),
    "epoch-scheduled": Run(None, kind="epoch-scheduled", epochs=3),
    "manual": Run(None, kind="manual"),
    "model-checkpoint-beside": Run(None, beside=("modelcheckpoint",), validate=True),
    "validation": Run(None, validate=True, trainer={"val_check_interval": 3}),
    "ema": Run(None, beside=("ema",), validate=True),
    "swa": Run(None, beside=("swa",), epochs=4),
    "workers": Run(None, workers=2),
    # Every 5 steps: a snapshot is torn by the update after it, which must have happened before the stop.
    "slow-copy": Run(None, slow_copy_secs=0.05, policy=("dense", 5), epochs=3),
}


VARIATIONS = {name: replace(run, slow_copy_secs=max(0.005, run.slow_copy_secs)) for name, run in VARIATIONS.items()}
STOP_BEFORE = {"swa": 40}
"""After the last epoch, SWA passes over the data once more, and Lightning then takes an optimizer step on
whatever gradients the last batch left: gradients are in no checkpoint."""


@dataclass(frozen=True)
class Ended:
    """Final state and log of the last life; ``restored`` is the step that it began at."""

    state: dict[str, Any]
    lines: list[dict[str, Any]]
    restored: int | None


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def life(run: Run, stop_at: int | None = None) -> Ended:
    """A fresh Trainer and module; stopped by an exception in the given batch, if any."""
    trainer, module, recorder = build(run)
    if stop_at is not None:
        module.training_step = _stopping(module.training_step, trainer, stop_at)
    try:
        trainer.fit(module, *loaders(run))
    except StopHere:
        assert stop_at is not None
        return Ended({}, recorder.lines, recorder.lines[0]["step"])
    assert stop_at is None, f"batch {stop_at} was never reached"
    return Ended(final_state(trainer, module), recorder.lines, recorder.lines[0]["step"])


def _stopping(training_step: Any, trainer: Any, at: int) -> Any:
    """The forward pass has run: routing was counted, running statistics have moved."""

    def step(batch: Any, batch_idx: int) -> Any:
        loss = training_step(batch, batch_idx)
        if trainer.fit_loop.epoch_loop.total_batch_idx == at:
            raise StopHere(f"in batch {at}")
        return loss

    return step


@functools.cache
def undisturbed(name: str) -> Ended:
    with tempfile.TemporaryDirectory(prefix="moe_ckpt_truth_", dir=fast_directory()) as directory:
        return life(replace(VARIATIONS[name], store=f"{directory}/store"))


def _stopped_at_random(name: str, directory: Path, seed: int, stops: int) -> None:
    print(f"seed {seed}")
    batches = [line["index"] for line in undisturbed(name).lines if line["event"] == "batch"]
    choice = [batch for batch in batches[4:] if batch < STOP_BEFORE.get(name, len(batches))]
    _stopped_and_resumed(name, directory, sorted(random.Random(seed).sample(choice, stops)))


def _stopped_and_resumed(name: str, directory: Path, stops: list[int]) -> None:
    truth = undisturbed(name)
    run = replace(VARIATIONS[name], store=str(directory / "store"))
    lines = []
    for at in stops:
        stopped = life(run, at)
        lines += stopped.lines
        assert_store_sound(run, ended=True)
    ended = life(run)
    assert ended.restored, "nothing was resumed"
    found = list(differences(ended.state, truth.state))
    assert not found, found[:10]
    assert_same_losses(lines + ended.lines, truth.lines)


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.quick(
    "adamw",
    "adafactor",
    "accumulate-3",
    "bf16-mixed",
    "bf16-true",
    "scaler-with-overflows",
    "epoch-scheduled",
    "manual",
    "validation",
    "ema",
    "swa",
    "workers",
    "slow-copy",
)
def test_stopped_and_resumed(name, place):  # noqa: F811
    _stopped_at_random(name, place, seed=random.SystemRandom().randrange(1 << 32), stops=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", [name for name in VARIATIONS if name != "workers"])
def test_stopped_and_resumed_elsewhere(name, seed, place):  # noqa: F811
    _stopped_at_random(name, place, seed, stops=1 + seed % 3)


@pytest.mark.parametrize("name", ["adamw", "epoch-scheduled", "validation"])
@pytest.mark.parametrize("batch", [9, 10, 11])
@pytest.mark.quick("9-adamw", "10-validation", "11-epoch-scheduled")
def test_stopped_around_the_end_of_an_epoch(name, batch, place):  # noqa: F811
    """Epochs have ten batches. Stopped in batch 10, the run comes back to the last step of the epoch before."""
    _stopped_and_resumed(name, place, [batch])


def test_the_scaler_did_skip():
    """Else the variation with overflows would prove nothing."""
    state = undisturbed("scaler-with-overflows").state
    steps = {int(value) for key, value in state.items() if key.endswith("/step")}
    assert steps == {24}, "30 batches, 6 of which overflow"
    assert state["progress"][0] == 30
