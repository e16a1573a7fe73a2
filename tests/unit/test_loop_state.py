"""The state of Lightning's loops, read without Lightning's own copies, is what Lightning itself would save."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress, _ProcessedTracker, _Progress

from moe_ckpt.callbacks.lightning_state import loop_state


class Compare(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for loop in (trainer.fit_loop, trainer.validate_loop):
            found, theirs = loop_state(loop), loop.state_dict()
            assert found == theirs
            assert list(found) == list(theirs)
        self.seen.append(found := loop_state(trainer.fit_loop))
        assert deepcopy(found) == self.seen[-1]


def test_it_is_lightnings_own_at_each_batch(tmp_path):
    compare = Compare()
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(
        accelerator="cpu", max_epochs=2, limit_train_batches=2, limit_val_batches=1, callbacks=[compare],
        enable_checkpointing=False, default_root_dir=tmp_path, **options,
    ).fit(BoringModel())  # fmt: skip
    batches = [state["epoch_loop.batch_progress"]["total"]["processed"] for state in compare.seen]
    assert batches == [1, 2, 3, 4], "what was read does not change with the loop"


@dataclass
class Odd(_BaseProgress):
    total: _ProcessedTracker = field(default_factory=_ProcessedTracker)
    times: list[float] = field(default_factory=lambda: [0.5])


@dataclass
class Own(_BaseProgress):
    number: int = 1

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.number}


class Loop(_Loop):
    def __init__(self) -> None:
        self.odd, self.own, self.plain = Odd(), Own(), _Progress()


def test_what_is_no_number_is_copied_and_what_has_a_state_of_its_own_is_asked():
    loop = Loop()
    found = loop_state(loop, "inner.")
    assert found == loop.state_dict(prefix="inner.")
    loop.odd.times.append(1.5)
    loop.odd.total.ready += 1
    assert found["inner.odd"]["times"] == [0.5]
    assert found["inner.odd"]["total"]["ready"] == 0
