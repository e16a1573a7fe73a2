"""What an iteration takes while a window is computed again, with and without leaving out work on what is frozen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning.pytorch as pl

from benchmarks.windowed import batches, trainer, workload
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies.dense import Dense
from moe_ckpt.policies.moevement import MoEvement
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from recipes.gpt_moe_lightning.model import GPTMoEConfig

_NEVER = Dense(every_n_steps=1_000_000)
_SETTLE, _ORDINARY = 1, 4


class _Clock(pl.Callback):
    """Times of whole iterations, and CPU time of what the optimizer's loop does in them: forward, backward, update.

    whole, compute: seconds, by whether the iteration was replayed. without: at each iteration, portion of the
    parameters for which no gradient was made.
    """

    def __init__(self, ours: MoECheckpoint) -> None:
        self._ours = ours
        self.whole: dict[bool, list[float]] = {True: [], False: []}
        self.compute: dict[bool, list[float]] = {True: [], False: []}
        self.without: dict[bool, list[float]] = {True: [], False: []}
        self._began = self._computed = self._portion = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        run = loop.run

        def timed(*args: Any, **more: Any) -> Any:
            began = time.process_time()
            result = run(*args, **more)
            self._computed = time.process_time() - began
            return result

        loop.run = timed  # type: ignore[method-assign]  # to time it

        def count(optimizer: Any, *_: Any) -> None:
            counts = [(p.numel(), p.grad is None) for p in pl_module.parameters()]
            self._portion = sum(n for n, without in counts if without) / sum(n for n, _ in counts)

        trainer.optimizers[0].register_step_post_hook(count)  # the closure is over

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._ended()
        self._began = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self._ended()

    def _ended(self) -> None:
        if self._began and self._ours.last is not None:
            self.whole[self._ours.last.replayed].append(time.perf_counter() - self._began)
            self.compute[self._ours.last.replayed].append(self._computed)
            self.without[self._ours.last.replayed].append(self._portion)


class _Curious(pl.Callback):
    """Might look at gradients, so that replay leaves none of them out."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        return


def _train(config: GPTMoEConfig, batch: int, listed: bool, window: int, store: Path) -> tuple[int, int]:
    """A store whose newest checkpoint is a window: its first and last step."""
    ours = MoECheckpoint(MoEvement(window=window), store, save_last=False, when_busy="wait")
    lightning_trainer = trainer(2 * window + 2, store.parent, ours)
    lightning_trainer.fit(workload(config, listed=listed), batches(config, batch))
    reader = StoreReader(open_storage(store))
    slots = reader.manifest(reader.directories()[0]).slots
    return slots[0].step, slots[-1].step


def _resume(config: GPTMoEConfig, batch: int, listed: bool, leave_out: bool, last: int, store: Path) -> _Clock:
    """Compute the window again and a few more iterations; nothing is saved, so that it can be done again."""
    ours = MoECheckpoint(_NEVER, store, save_last=False)
    clock = _Clock(ours)
    lightning_trainer = trainer(
        last + _SETTLE + _ORDINARY, store.parent, clock, *([] if leave_out else [_Curious()]), ours
    )
    lightning_trainer.fit(workload(config, listed=listed), batches(config, batch))
    return clock


def measure(
    config: GPTMoEConfig, batch: int, window: int, rounds: int, home: Path, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """``rounds`` turns of every combination. Raises ``RuntimeError`` if there is no window to compute again."""
    steps, samples = {}, []
    for listed in (True, False):
        tell(f"replay, {_kind(listed)}: training")
        first, last = steps[listed] = _train(config, batch, listed, window, home / _kind(listed) / "store")
        if last == first:
            raise RuntimeError(f"the store of {_kind(listed)} has no window")
    for number in range(rounds):
        turns = [(listed, leave_out) for listed in (True, False) for leave_out in (True, False)]
        for listed, leave_out in turns[number % 4 :] + turns[: number % 4]:
            tell(f"replay, {_kind(listed)}, {'leaving out' if leave_out else 'whole'}: {number + 1} of {rounds}")
            store = home / _kind(listed) / "store"
            clock = _resume(config, batch, listed, leave_out, steps[listed][1], store)
            samples.append({"experts": _kind(listed), "leave_out": leave_out} | _times(clock))
    return samples


def _kind(listed: bool) -> str:
    return "ModuleList" if listed else "stacked"


def _times(clock: _Clock) -> dict[str, list[float]]:
    return {
        "replayed_ms": [t * 1e3 for t in clock.whole[True]],
        "replayed_compute_ms": [t * 1e3 for t in clock.compute[True]],
        "without_gradients": clock.without[True],
        "ordinary_ms": [t * 1e3 for t in clock.whole[False][_SETTLE:]],
        "ordinary_compute_ms": [t * 1e3 for t in clock.compute[False][_SETTLE:]],
    }


def rows(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per combination: a replayed iteration as ratio to an ordinary one of the same fit; median and all rounds."""
    table_rows = []
    for experts, leave_out in dict.fromkeys((s["experts"], s["leave_out"]) for s in samples):
        selected = [s for s in samples if (s["experts"], s["leave_out"]) == (experts, leave_out)]
        compute = [median(s["replayed_compute_ms"]) / median(s["ordinary_compute_ms"]) for s in selected]
        whole = [median(s["replayed_ms"]) / median(s["ordinary_ms"]) for s in selected]
        table_rows.append(
            {
                "experts": experts,
                "leave_out": leave_out,
                "replayed_iterations": len(selected[0]["replayed_ms"]),
                "without_gradients": mean(selected[0]["without_gradients"]),
                "ordinary_ms": median(median(s["ordinary_ms"]) for s in selected),
                "compute_ratio": median(compute),
                "compute_ratios": compute,
                "ratio": median(whole),
                "ratios": whole,
            }
        )
    return table_rows
