"""The position of a Megatron loop, and the hooks on its optimizer and model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from moe_ckpt.driver.attached import LoopPosition
from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.compat import runs_on_samples
from moe_ckpt.megatron.optimizers import finish_update, leaves
from moe_ckpt.megatron.world import is_rank_zero
from moe_ckpt.notices import announce
from moe_ckpt.run.options import Options
from moe_ckpt.stopwatch import Stopwatch

log = logging.getLogger("moe_ckpt")


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
        self._joined = True
        self._asked_for_samples = False
        self.begin_at(Progress())

    def begin_at(self, progress: Progress) -> None:
        """Sets the position at which training begins."""
        self.begun_at, self.consumed_samples = progress, progress.consumed_samples
        self.set_position(progress.iteration, progress.counters)

    def join(self) -> None:
        """Notes that the copy under way was joined, and that weights change next."""
        self._joined = self.is_updating = True

    def count_update(self, iteration: int, consumed_samples: int | None, counters: Mapping[str, Any] | None) -> None:
        """Records ``after_step``. Raises as ``count``, and ``ConfigError`` if no optimizer step came before."""
        if not self._joined:
            raise ConfigError(
                f"after_step({iteration}): neither optimizer.step() of the optimizer given to attach nor before_step() "
                f"was called since iteration {self.step}, so the snapshot of that iteration may be torn. If "
                "something else changes the weights, call before_step() right before it; for an iteration without an "
                "update call skip() instead of after_step()"
            )
        self._count("after_step", iteration, consumed_samples, counters)
        self._joined = False

    def skip(
        self, iteration: int, consumed_samples: int | None, counters: Mapping[str, Any] | None, *, updated: bool = False
    ) -> None:
        """Records ``skip``. Raises as ``count``, and ``ConfigError`` after an update.

        Args:
            updated: An update that has begun since changed weights.
        """
        if updated:
            self.require_counted(f"skip({iteration})")
        self._count("skip", iteration, consumed_samples, counters)

    def _count(
        self, call: str, iteration: int, consumed_samples: int | None, counters: Mapping[str, Any] | None
    ) -> None:
        self.count(call, iteration, counters)
        if consumed_samples is not None:
            self.consumed_samples = consumed_samples
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


class StepWatch:
    """Wraps ``optimizer.step`` with calls of functions.

    If inner optimizers have stepped when it raises (the distributed optimizer gathers weights last), this rank's part
    of the update is completed without other ranks.

    Megatron's optimizers have no hooks, and a ``ChainedOptimizer`` does not call ``step`` of its members, so the method
    of this object is replaced. After ``close`` a wrapper that others have wrapped only calls the original.

    Args:
        optimizer: Megatron's.
        before: Called before a step.
        after: Called after a step.
        alone: Called after a step that raised, if this rank's part of the update was completed.
        stopwatch: Counts the time of ``before`` and ``after``.

    Attributes:
        updated: Whether the newest step changed the weights, by its result; None before the first.
    """

    def __init__(
        self,
        optimizer: Any,
        before: Callable[[], None],
        after: Callable[[], None],
        alone: Callable[[], None],
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self._optimizer, self._stopwatch = optimizer, stopwatch or Stopwatch()
        self._step: Callable[..., Any] = optimizer.step
        self._replaced = vars(optimizer).get("step")
        counted = self._stopwatch.around
        self._before, self._after, self._alone = counted(before), counted(after), alone
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._open = True
        self.updated: bool | None = None
        self._steps = 0
        self._hooks = ExitStack()
        self._wrapper = self._stepping
        optimizer.step = self._wrapper

    def _stepping(self, *args: Any, **kwargs: Any) -> Any:
        if not self._open:
            return self._step(*args, **kwargs)
        self._before()
        self._begun.clear()
        self._ended.clear()
        try:
            result = self._step(*args, **kwargs)
        except Exception:
            self._end_alone()
            raise
        self.updated = bool(result[0]) if isinstance(result, tuple) and result else True
        self._steps += 1
        self._after()
        return result

    def iteration_ends(self, options: Options) -> None:
        """Raises ``ConfigError`` if an iteration made several updates, since a replay is right for one only."""
        steps, self._steps = self._steps, 0
        if steps > 1 and options.needs.windows:
            raise ConfigError(
                f"{type(options.policy).__name__} needs one optimizer.step() per iteration, and this iteration made "
                f"{steps}. Call after_step() after each of them, or use Dense or MoC"
            )

    def before_writing(self, call: Callable[[], None]) -> None:
        """Adds a function that runs when an inner optimizer is about to write to parameters."""

        def begins(inner: Any, *_: Any) -> None:
            self._begun.add(id(inner))
            call()

        def ends(inner: Any, *_: Any) -> None:
            self._ended.add(id(inner))

        counted = self._stopwatch.around
        for leaf in leaves(self._optimizer):
            self._hooks.callback(leaf.optimizer.register_step_pre_hook(counted(begins)).remove)
            self._hooks.callback(leaf.optimizer.register_step_post_hook(counted(ends)).remove)

    def _end_alone(self) -> None:
        """Completes a step that raised, unless an inner optimizer was in the middle of its own."""
        if not self._begun or self._begun != self._ended:
            return
        try:
            is_whole = finish_update(self._optimizer, tuple(self._ended))
        except Exception as error:  # then recovery uses an older checkpoint
            log.warning("the update that failed cannot be completed on this rank alone: %r", error)
            return
        if is_whole:
            self.updated = True
            self._alone()

    def close(self) -> None:
        """Removes the wrapper. May be called twice."""
        self._open = False
        self._hooks.close()
        if vars(self._optimizer).get("step") is self._wrapper:
            if self._replaced is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._replaced


class FirstForward:
    """Calls a function once, before the first forward pass of any of the model's modules in training mode."""

    def __init__(self, chunks: Sequence[nn.Module], call: Callable[[], None]) -> None:
        self._modules = {id(module) for chunk in chunks for module in chunk.modules()}
        self._call = call
        # Until then a hook of all modules, because some schedules never call the forward of a chunk.
        self._handle: RemovableHandle | None = register_module_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._handle is not None and module.training and id(module) in self._modules and not runs_on_samples():
            self.close()
            self._call()

    def close(self) -> None:
        """Removes the hook. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
