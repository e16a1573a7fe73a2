"""Position of a training loop (``Progress``), and the order in which it must call the adapter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.compat import runs_on_samples
from moe_ckpt.megatron.optimizers import finish_update, leaves
from moe_ckpt.megatron.world import is_rank_zero
from moe_ckpt.modeling.optimizer_state import require_plain
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


class Loop:
    """The position of the training loop; checks the order of its calls.

    Attributes:
        begun_at: Where training began in this process.
        iteration: Iterations done; ``consumed_samples`` and ``counters`` are those of the newest.
        moved: An iteration was done in this process.
        is_updating: An update has begun that no iteration has counted, so weights may be those of the next one.
    """

    def __init__(self) -> None:
        self.moved = self.is_updating = False
        self._joined = True
        self._asked_for_samples = False
        self.stand_at(Progress())

    def stand_at(self, progress: Progress) -> None:
        """Sets where training begins."""
        self.begun_at = progress
        self.iteration, self.consumed_samples = progress.iteration, progress.consumed_samples
        self.counters: Mapping[str, Any] = progress.counters

    def join(self) -> None:
        """The copy under way is joined, and weights change."""
        self._joined = self.is_updating = True

    def require_counted(self, call: str, *, saves: bool = True) -> None:
        """Raises ``ConfigError`` between an update and ``after_step``: the state has no iteration's number yet.

        Args:
            call: For the message.
            saves: It would save the state.
        """
        if saves and self.is_updating:
            at = self.iteration + 1
            raise ConfigError(
                f"{call}: weights are no longer those of iteration {self.iteration}, for optimizer.step() or "
                f"before_step() was called since, and after_step({at}) was not, so nothing can be saved under its own "
                f"number. Call after_step({at}, consumed_samples=...) first: a loop that ends early does so after it"
            )

    def step(self, iteration: int, consumed_samples: int | None, counters: Mapping[str, Any] | None) -> None:
        """Records ``after_step``. Raises ``ConfigError`` unless it follows an optimizer step and the last iteration."""
        if not self._joined:
            raise ConfigError(
                f"after_step({iteration}): neither optimizer.step() of the optimizer given to attach nor before_step() "
                f"was called since iteration {self.iteration}, so the snapshot of that iteration may be torn. If "
                "something else changes the weights, call before_step() right before it; for an iteration without an "
                "update call skip() instead of after_step()"
            )
        self._move("after_step", iteration, consumed_samples, counters)
        self._joined = False

    def skip(
        self, iteration: int, consumed_samples: int | None, counters: Mapping[str, Any] | None, *, updated: bool = False
    ) -> None:
        """Records ``skip``. Raises ``ConfigError`` unless it follows the last iteration, or after an update.

        Args:
            updated: An update that has begun since changed weights.
        """
        if updated:
            self.require_counted(f"skip({iteration})")
        self._move("skip", iteration, consumed_samples, counters)

    def _move(
        self, call: str, iteration: int, consumed_samples: int | None, counters: Mapping[str, Any] | None
    ) -> None:
        if iteration != self.iteration + 1:
            raise ConfigError(
                f"{call}({iteration}) follows iteration {self.iteration}: call after_step, or skip, once per "
                "iteration, with the number of iterations done, and start from what resume() returned"
            )
        if counters is not None:
            require_plain(counters, "counters")
            self.counters = deepcopy(dict(counters))
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
        self.iteration, self.moved, self.is_updating = iteration, True, False


class StepWatch:
    """Wraps ``optimizer.step``: calls one function before it, another after it, a third where it ends alone.

    An exception may come when inner optimizers have stepped: the distributed optimizer gathers weights last. Then this
    rank's part of the update is completed without the others.

    Megatron's optimizers have no hooks, and a ``ChainedOptimizer`` does not call ``step`` of those that it chains, so
    the method of this object is replaced. After ``close`` a wrapper under another one only calls through.

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
        self._handles: list[RemovableHandle] = []
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
        """Raises ``ConfigError`` if an iteration made several updates, of which a replay would make one right."""
        steps, self._steps = self._steps, 0
        if steps > 1 and options.needs.windows:
            raise ConfigError(
                f"{type(options.policy).__name__} needs one optimizer.step() per iteration, and this iteration made "
                f"{steps}. Call after_step() after each of them, or use Dense or MoC"
            )

    def before_writing(self, call: Callable[[], None]) -> None:
        """Runs ``call``, from here on, when an inner optimizer is about to write to parameters."""

        def begins(inner: Any, *_: Any) -> None:
            self._begun.add(id(inner))
            call()

        def ends(inner: Any, *_: Any) -> None:
            self._ended.add(id(inner))

        counted = self._stopwatch.around
        for leaf in leaves(self._optimizer):
            self._handles.append(leaf.optimizer.register_step_pre_hook(counted(begins)))
            self._handles.append(leaf.optimizer.register_step_post_hook(counted(ends)))

    def _end_alone(self) -> None:
        """``step`` failed: ends it if no inner optimizer was in the middle of its own."""
        if not self._begun or self._begun != self._ended:
            return
        try:
            is_whole = finish_update(self._optimizer, tuple(self._ended))
        except Exception as error:  # older checkpoints count
            log.warning("the update that failed cannot be completed on this rank alone: %r", error)
            return
        if is_whole:
            self.updated = True
            self._alone()

    def close(self) -> None:
        """Removes the wrapper. May be called twice."""
        self._open = False
        while self._handles:
            self._handles.pop().remove()
        if vars(self._optimizer).get("step") is self._wrapper:
            if self._replaced is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._replaced


class FirstForward:
    """Calls a function once, before the model's first forward pass in training mode, whichever module begins it."""

    def __init__(self, chunks: Sequence[nn.Module], call: Callable[[], None]) -> None:
        self._modules = {id(module) for chunk in chunks for module in chunk.modules()}
        self._call = call
        # A hook of all modules until then, because some schedules never call the forward of a chunk.
        self._handle: torch.utils.hooks.RemovableHandle | None = register_module_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._handle is not None and module.training and id(module) in self._modules and not runs_on_samples():
            self.close()
            self._call()

    def close(self) -> None:
        """Removes the hook. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
