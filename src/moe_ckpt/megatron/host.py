"""The host of a Megatron training loop: its iteration, and its plain state, read and restored."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moe_ckpt.driver.attached import LoopHost, LoopPosition
from moe_ckpt.driver.changes import Change, batches_of, changes_between, trainable_changes
from moe_ckpt.driver.host import Stateful, loading_state
from moe_ckpt.errors import ConfigError, OtherLayoutError
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.interop.weights import LoadedWeights
from moe_ckpt.megatron.compat import changed_attributes, rng_tracker
from moe_ckpt.megatron.inventory import architecture
from moe_ckpt.megatron.optimizers import SCHEDULER, changes, configured_hyperparameters, write_settings
from moe_ckpt.megatron.training_state import RESTING, MegatronTrainingState
from moe_ckpt.megatron.world import is_rank_zero, layout
from moe_ckpt.modeling.rng import Generators, capture_rng, restore_rng
from moe_ckpt.notices import announce
from moe_ckpt.ports import Communicator
from moe_ckpt.recovery.executing import Restored
from moe_ckpt.recovery.replay import Repeated, are_plain_states_equal

_Plain = Mapping[str, Any]

_REPEATED: tuple[Repeated, ...] = (
    ("the hyperparameters of the optimizer", lambda state: state["plain"]["optimizer"]),
    ("the state of the scheduler or of another object in stateful=", lambda state: state["stateful"]),
    ("the number of consumed samples", lambda state: state["consumed_samples"]),
    ("an expert bias or another buffer of a router, so tokens were routed otherwise", lambda s: s["plain"]["buffers"]),
)


@dataclass(frozen=True)
class Progress:
    """The position at which training starts or resumes.

    Attributes:
        iteration: Iterations done; the next one to compute is ``iteration + 1``, counted from 1.
        consumed_samples: Training samples consumed so far, as given to ``after_step``.
        restored: False for a new run.
        counters: Further counters of the loop, as given to ``after_step`` or ``skip``; empty for a new run.
    """

    iteration: int = 0
    consumed_samples: int = 0
    restored: bool = False
    counters: Mapping[str, Any] = field(default_factory=dict)


class Loop(LoopPosition):
    """The position of a Megatron loop; its steps are iterations.

    Attributes:
        begun_at: The position at which training began in this process.
        consumed_samples: Those of the newest iteration.
    """

    unit, arguments = "iteration", ", consumed_samples=..."

    def __init__(self) -> None:
        super().__init__()
        self._asked_for_samples = False
        self.begin_at(Progress())

    def begin_at(self, progress: Progress) -> None:
        """Sets the position at which training begins."""
        self.begun_at, self.consumed_samples = progress, int(progress.consumed_samples)
        self.set_position(progress.iteration, progress.counters)

    def require_joined(self, iteration: int) -> None:
        """Raises ``ConfigError`` if no optimizer step came before ``after_step``."""
        if not self.is_updating:
            raise ConfigError(
                f"after_step({iteration}): neither optimizer.step() of the optimizer given to attach nor before_step() "
                f"was called since iteration {self.step}, so the snapshot of that iteration may be torn. If "
                "something else changes the weights, call before_step() right before it; for an iteration without an "
                "update call skip() instead of after_step()"
            )

    def count_iteration(
        self, call: str, iteration: int, consumed_samples: int | None, counters: Mapping[str, Any] | None
    ) -> None:
        """Records ``call``, which is ``after_step`` or ``skip``. Raises as ``count``."""
        self.count(call, iteration, counters)
        if consumed_samples is not None:
            self.consumed_samples = int(consumed_samples)
        elif not self._asked_for_samples:
            self._asked_for_samples = True
            if is_rank_zero():
                announce(
                    "%s(%d) was called without consumed_samples, so the next start will be at consumed_samples=%d: a "
                    "loop or a loader that goes on by that count would repeat data. Give the number of training "
                    "samples consumed so far; 0 if the data are found by the iteration alone, or by an object in "
                    "stateful=",
                    *(call, iteration, self.consumed_samples),
                    level=logging.WARNING,
                )


class MegatronHost(LoopHost):
    """One training loop. Arguments: as of ``MegatronCheckpoint``; ``state`` is that of ``chunks`` and ``optimizer``."""

    framework, attach = "Megatron", "megatron.attach"
    loop: Loop

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        state: MegatronTrainingState,
        optimizer: Any,
        stateful: Mapping[str, Stateful],
        count_update: Callable[[], bool],
    ) -> None:
        super().__init__(stateful, Loop())
        self._count_update = count_update
        self.state = state
        self.generators = Generators(capture_generators, restore_generators)
        self._optimizer = optimizer
        self._settings = functools.partial(configured_hyperparameters, optimizer, stateful)
        batches = {name: batches_of(loader) for name, loader in self.loaders.items()}
        self._configured: _Plain = self._settings() | {RESTING: self.state.trained.resting(), "batches": batches}
        self._layout, self._architecture = layout(chunks), architecture(chunks[0])

    def admits(self, manifest: Manifest, plain: _Plain) -> None:
        """Raises also for a window or a gradient log of another layout."""
        super().admits(manifest, plain)
        is_log = plain.get("gradient_log", {}).get("since") is not None
        if not manifest.window and not is_log:
            return
        differing = _differing(plain["layout"], self._layout)
        if differing:
            raise OtherLayoutError(
                manifest.directory,
                f"of a run with other parallel degrees ({differing})",
                "Start with those of that run; a dense checkpoint, such as its last one, can be loaded with others.",
                "a gradient log" if is_log else "a sparse window",
            )

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        """Restores everything but tensors and random numbers.

        Raises:
            ConfigError: The checkpoint is of a run with other buffers.
            StoreError: An object does not take the state that is stored of it.
        """
        plain, stored = restored.plain, restored.plain["plain"]
        with loading_state("the model and its optimizer", restored.path):
            self.state.load_plain(stored)
        # After the optimizer, as in Megatron: a schedule that overrides the checkpoint's writes its rates there.
        restore_stateful(self.stateful, plain["stateful"], restored.path)
        self.restore_loader_generators(plain)
        if is_same_schedule(self.stateful.get(SCHEDULER), plain["stateful"].get(SCHEDULER)):
            # The loop may have changed the schedule's values since, and loading has written these again.
            with loading_state("the hyperparameters of the optimizer", restored.path):
                write_settings(self._optimizer, stored["optimizer"]["groups"])
        iteration, consumed, counters = plain["iteration"], plain["consumed_samples"], plain["counters"]
        self.loop.begin_at(Progress(int(iteration), int(consumed), restored=True, counters=counters))
        inexact, trained = other_layout(plain["layout"], self._layout), self.state.trained
        resting = trained.resting()
        before = plain["configured"]
        with loading_state("the settings of optimizer and scheduler", restored.path):
            changed = changes(before, self._configured, self._settings())
        batches = before.get("batches", {}), self._configured["batches"]
        changed += changes_between("data loader ", *batches, from_checkpoint=False)
        if inexact is None:
            trained.rest(stored[RESTING])
            if list(before[RESTING]) != list(resting):  # else training itself has changed it
                changed += trainable_changes(trained.resting(), resting)
            self._configured = before
            self.generators.schedule(plain["rng"])
        return changed, inexact  # on another layout no rank here has these random numbers

    def load_weights(self, path: str, comm: Communicator) -> LoadedWeights:
        if self.step:
            raise ConfigError(
                f"megatron.attach(weights_from={path!r}) and what was given to resume(otherwise=...), which starts at "
                f"iteration {self.step}, contradict each other: give one of them"
            )
        return self.state.load_weights(path)

    def repeated(self, before: _Plain, recorded: _Plain) -> Iterable[Repeated]:
        idle = idle_generators(before["rng"], recorded["rng"])
        numbers = lambda state: {name: value for name, value in state["rng"].items() if name not in idle}  # noqa: E731
        return (("the state of the random number generators", numbers), *_REPEATED)

    def capture(self, *, described: bool = False) -> dict[str, Any]:
        if self.generators.state is None:
            self.generators.record()
        return {
            "framework": "megatron",
            "iteration": self.step,
            "consumed_samples": self.loop.consumed_samples,
            "counters": self.loop.counters,
            "layout": self._layout,
            "architecture": self._architecture,
            "plain": self.state.plain(),
            "stateful": self._states(),
            "loader_generators": self.loader_generators(),
            "configured": self._configured,
            "rng": self.generators.state,
        }

    def _states(self) -> dict[str, Any]:
        """Returns the states of stateful objects. A loader that was not iterated yet draws no number of the run."""
        is_first = any(loader._iterator is None for loader in self.loaders.values())
        before = capture_generators() if is_first else None
        states = {name: target.state_dict() for name, target in self.stateful.items()}
        if before is not None:
            restore_generators(before)
        return states

    def count_update(self) -> bool:
        return self._count_update()


def idle_generators(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Returns names of the generators that a recorded step did not use, so that a replay need not compare them.

    With a GPU this may be torch's generator of the CPU: only the making of data iterators draws from it, which happens
    at other times after a restart.

    Args:
        before: States by name, after the step before.
        after: States after the step.
    """
    return frozenset(
        {"torch"} if "cuda" in after and are_plain_states_equal(before.get("torch"), after.get("torch")) else ()
    )


def other_layout(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Says what is inexact because degrees of parallelism differ from the checkpoint's; None if none do."""
    differing = _differing(saved, now)
    if not differing:
        return None
    return (
        f"the checkpoint is of another layout ({differing}): weights and optimizer state are exact, but "
        "random numbers come from the new seed, so training differs from what the run would have computed"
    )


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    texts = (f"{name} {saved.get(name)}, now {degree}" for name, degree in now.items() if saved.get(name) != degree)
    return "; ".join(texts)


def capture_generators() -> dict[str, Any]:
    """Returns the states of Python's, numpy's and torch's generators, and of Megatron's tracker."""
    tracker = rng_tracker()
    states = {  # trackers for CUDA graphs hold generators instead
        name: state.get_state() if isinstance(state, torch.Generator) else state
        for name, state in tracker.get_states().items()
    }
    return capture_rng() | {"tracker": states}


def restore_generators(stored: Mapping[str, Any]) -> None:
    """Restores what ``capture_generators`` returned."""
    restore_rng(stored)
    tracker = rng_tracker()
    states = tracker.get_states()
    for name, state in stored["tracker"].items():
        if isinstance(states.get(name), torch.Generator):
            states[name].set_state(state)
        else:
            states[name] = state
    tracker.set_states(states)


@contextmanager
def unmoved_by_captures() -> Iterator[None]:
    """Restores the generators after each capture of CUDA graphs by Megatron-Core within the block.

    Before Megatron-Core captures modules, it runs them on samples, where dropout draws numbers. A resumed run captures
    at another iteration than the run that it continues, so those numbers must not be missing in training. (Transformer
    Engine restores generators itself, ``cuda_graph_impl="local"`` does not.) The capture itself moves no generator.

    ``restore_generators`` reaches graphs that exist: each reads, at a replay, the state of the generators that it was
    captured with, and ``set_state`` changes that very state.
    """
    graphs = importlib.import_module("megatron.core.transformer.cuda_graphs")
    start, end = graphs._set_capture_start, graphs._set_capture_end
    before: Mapping[str, Any] = {}

    def begins() -> None:
        nonlocal before
        before = capture_generators()
        start()

    def ends() -> None:
        end()
        restore_generators(before)

    with changed_attributes(graphs, _set_capture_start=begins, _set_capture_end=ends):
        yield


def all_stateful(scheduler: Stateful | None, stateful: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """Returns the scheduler and ``stateful`` in one dict. Raises ``ConfigError`` if two have the same name."""
    if scheduler is not None and SCHEDULER in stateful:
        raise ConfigError(
            "megatron.attach was given a scheduler and stateful={'scheduler': ...}: one would replace the other. Give "
            "the second another name"
        )
    return dict(stateful) | ({} if scheduler is None else {SCHEDULER: scheduler})


_OTHER_SCHEDULE = (
    "The schedule of this run differs from the checkpoint's, for instance because it trains longer: set "
    "--override-opt_param-scheduler to continue with this run's schedule, --use-checkpoint-opt_param-scheduler to "
    "continue with the checkpoint's (arguments of Megatron-LM, and of OptimizerParamScheduler with underscores), or "
    "the --train-iters and --lr-decay-iters of the run."
)


def restore_stateful(stateful: Mapping[str, Stateful], stored: Mapping[str, Any], path: str) -> None:
    """Restores stateful objects.

    Args:
        path: Of the state file, for messages.

    Raises:
        StoreError: An object, which is named, does not take its state.
    """
    for name, target in stateful.items():
        is_schedule = any(kind.__name__ == "OptimizerParamScheduler" for kind in type(target).__mro__)
        with loading_state(f"{name} ({type(target).__name__})", path, _OTHER_SCHEDULE if is_schedule else ""):
            if is_schedule:  # it adds the loaded steps to its own, which Megatron-LM's --load may have set already
                target.num_steps = 0  # type: ignore[attr-defined]
            target.load_state_dict(stored[name])


def is_same_schedule(scheduler: Stateful | None, stored: Mapping[str, Any] | None) -> bool:
    """Returns whether a schedule that was loaded has the checkpoint's settings, and not other ones of this run."""
    return (
        scheduler is not None
        and stored is not None
        and are_plain_states_equal(dict(scheduler.state_dict()), dict(stored))
    )
