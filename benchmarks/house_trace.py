"""Lists the functions of moe_ckpt that training enters: in a step, in a step with a save, in a resume, in a whole run.

The run is a two-layer MoE model under Lightning on one process. A function counts once, by file and first line, in
whatever thread it runs; comprehensions and lambdas do not count, for their number depends on Python's version.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as pl

import moe_ckpt
from benchmarks.step_model import TinyMoE, batches
from moe_ckpt import Memory, policies
from moe_ckpt.callbacks import MoECheckpoint

PACKAGE = str(Path(moe_ckpt.__file__).parent)
LAYERS, EXPERTS = 2, 4
CYCLE = 6
"""Steps between two saves of the counted ``Dense``: enough for the background threads to end the first one."""

Entered = dict[str, list[str]]
"""File of moe_ckpt -> names of the functions in it that were entered."""
RUNS: dict[str, tuple[policies.Policy, bool]] = {
    "Dense": (policies.Dense(), False),
    "Dense with memory": (policies.Dense(), True),
    "CheckFreq": (policies.CheckFreq(), False),
    "MoC": (policies.MoC(k=1), False),
    "MoEtion": (policies.MoEtion(experts=1), False),
    "MoEvement": (policies.MoEvement(window=2), False),
    "GradientLog with memory": (policies.GradientLog(window=4), True),
}
"""Policies of the whole runs, and whether they save to memory too. ``Gemini`` is missing: it needs a second node."""


class Recorder:
    """Collects the code of every function that any thread calls while ``active`` is set.

    Create it before the threads start: before Python 3.12 a thread is followed only from its start.
    """

    def __init__(self) -> None:
        self.active = False
        self.codes: set[CodeType] = set()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.active and event == "call":
            self.codes.add(frame.f_code)

    def begin(self) -> None:
        """Forgets earlier calls and starts to collect."""
        self.codes = set()
        self.active = True

    def end(self) -> Entered:
        """Stops collecting; returns the named functions of moe_ckpt that were called, by their files."""
        self.active = False
        named = {
            (code.co_filename, code.co_firstlineno): getattr(code, "co_qualname", code.co_name)  # Python 3.10 has none
            for code in self.codes
            if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
        }
        entered: Entered = {}
        for (filename, _), name in sorted(named.items()):
            entered.setdefault(filename.removeprefix(f"{PACKAGE}/"), []).append(name)
        return entered


class Window(pl.Callback):
    """Records from the start of batch ``first`` to the start of batch ``end``, both counted from 0."""

    def __init__(self, recorder: Recorder, first: int, end: int) -> None:
        self.recorder, self.first, self.end = recorder, first, end
        self.entered: Entered = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.03)  # an iteration that leaves background threads time to finish
        if trainer.global_step == self.end:
            self.entered = self.recorder.end()
        if trainer.global_step == self.first:
            self.recorder.begin()


def fit(directory: Path, steps: int, policy: policies.Policy, *callbacks: pl.Callback, memory: bool = False) -> None:
    """Trains the toy until ``steps``, with checkpoints below ``directory``."""
    (directory / "memory").mkdir(parents=True, exist_ok=True)
    checkpoint = MoECheckpoint(
        policy,
        directory / "store",
        resume="extend",
        memory=Memory(directory=directory / "memory", storage_every=8) if memory else None,
    )
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoint, *callbacks],
    )
    trainer.fit(TinyMoE(LAYERS, EXPERTS, listed=False), batches(0, 1))


def measure(name: str, directory: Path) -> dict[str, Entered]:
    """Traces one kind of run.

    Args:
        name: "step" for warm steps with and without a save and a resume, all under ``Dense``; else a key of ``RUNS``.
        directory: An empty directory.

    Returns:
        The functions, for each thing that was traced.
    """
    recorder = Recorder()
    if name in RUNS:
        policy, memory = RUNS[name]
        recorder.begin()
        fit(directory, 12, policy, memory=memory)
        return {f"a run under {name}": recorder.end()}
    dense, last = policies.Dense(every_n_steps=CYCLE), 3 * CYCLE - 1
    save = Window(recorder, last - CYCLE, last)
    fit(directory, last + 1, dense, save)
    idle = Window(recorder, last - 1, last)
    fit(directory / "idle", last + 1, dense, idle)
    resume = Window(recorder, -1, last + 1)
    recorder.begin()
    fit(directory, last + 2, dense, resume)
    return {"a warm step with a save": save.entered, "a warm step without": idle.entered, "a resume": resume.entered}


def main(name: str) -> dict[str, Entered]:
    """Measures the run of that name, as ``measure``. Call it in a process of its own, which the recorder slows."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        return measure(name, Path(directory))
