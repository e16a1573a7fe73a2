"""The protocol between a training loop and the adapter: in which order it calls, and where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron.progress import Progress
from moe_ckpt.modeling.param_groups import require_plain


class Loop:
    """The iteration that the loop has reached, and whether it calls in an order that can work.

    Attributes:
        iteration: Iterations that are done.
        consumed_samples, counters: As told with the newest of them.
        moved: True once an iteration was done in this process.
    """

    def __init__(self) -> None:
        self.iteration = 0
        self.consumed_samples = 0
        self.counters: Mapping[str, Any] = {}
        self.moved = False
        self._resumed = False
        self._joined = True

    def resume(self) -> None:
        """``resume`` is called. Raises ``ConfigError`` the second time."""
        if self._resumed:
            raise ConfigError("MegatronCheckpoint.resume() was called twice: call it once, before the first step")
        self._resumed = True

    def stand_at(self, progress: Progress) -> None:
        """Training goes on from here."""
        self.iteration, self.consumed_samples = progress.iteration, progress.consumed_samples
        self.counters = progress.counters

    def require_resumed(self) -> None:
        if not self._resumed:
            raise ConfigError(
                "MegatronCheckpoint.resume() was not called, so training would begin anew beside the checkpoints that "
                "there may be. Call it before the first step; to begin anew, megatron.attach(resume='never')"
            )

    def join(self) -> None:
        """The copy under way no longer reads what the optimizer is about to change."""
        self._joined = True

    def step(self, iteration: int, consumed_samples: int, counters: Mapping[str, Any] | None) -> None:
        """``after_step`` is called.

        Raises:
            ConfigError: no optimizer step came before, or iterations are not counted one by one.
        """
        if not self._joined:
            raise ConfigError(
                f"after_step({iteration}): neither optimizer.step() of the optimizer given to attach nor before_step() "
                f"was called since iteration {self.iteration}, so the snapshot of that iteration may be torn. If "
                "something else changes the weights, call before_step() right before it; for an iteration without an "
                "update call skip() instead of after_step()"
            )
        self._move("after_step", iteration, consumed_samples, counters)
        self._joined = False

    def skip(self, iteration: int, consumed_samples: int, counters: Mapping[str, Any] | None) -> None:
        """``skip`` is called: weights are as they were. Raises as ``step``."""
        self._move("skip", iteration, consumed_samples, counters)

    def _move(self, call: str, iteration: int, consumed_samples: int, counters: Mapping[str, Any] | None) -> None:
        self.require_resumed()
        if iteration != self.iteration + 1:
            raise ConfigError(
                f"{call}({iteration}) follows iteration {self.iteration}: call after_step, or skip, once per "
                "iteration, with the number of iterations done, and start from what resume() returned"
            )
        if counters is not None:
            require_plain(counters, "counters")
            self.counters = deepcopy(dict(counters))
        self.iteration, self.consumed_samples, self.moved = iteration, consumed_samples, True


class StepWatch:
    """Wraps ``optimizer.step``: one function runs before it, another after it.

    Megatron's optimizers have no hooks, and a ``ChainedOptimizer`` does not call ``step`` of those that it chains. So
    the method is replaced on this one object. A wrapper that somebody else puts on top stays whole: after ``close``
    this one only passes on.

    Attributes:
        updated: Whether the newest step changed the weights, as it returned; None before the first.
    """

    def __init__(self, optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._step: Callable[..., Any] = optimizer.step
        self._replaced = vars(optimizer).get("step")
        self._before, self._after = before, after
        self._open = True
        self.updated: bool | None = None
        self._wrapper = self._stepping
        optimizer.step = self._wrapper

    def _stepping(self, *args: Any, **kwargs: Any) -> Any:
        if not self._open:
            return self._step(*args, **kwargs)
        self._before()
        result = self._step(*args, **kwargs)
        self.updated = bool(result[0]) if isinstance(result, tuple) and result else True
        self._after()
        return result

    def close(self) -> None:
        """Take the wrapper off. May be called twice."""
        self._open = False
        if vars(self._optimizer).get("step") is self._wrapper:
            if self._replaced is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._replaced


class FirstForward:
    """Calls a function once, in front of the first training forward pass of a model, whichever of its modules begins.

    Validation before the first iteration, which runs in evaluation mode, does not count.
    """

    def __init__(self, chunks: Sequence[nn.Module], call: Callable[[], None]) -> None:
        self._modules = {id(module) for chunk in chunks for module in chunk.modules()}
        self._call = call
        # A hook of all modules, for as long as nothing was called: with some schedules no forward of a chunk's runs.
        self._handle: torch.utils.hooks.RemovableHandle | None = register_module_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._handle is not None and module.training and id(module) in self._modules:
            self.close()
            self._call()

    def close(self) -> None:
        """Remove the hook. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
