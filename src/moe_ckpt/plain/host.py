"""``driver.host.Host`` of a PyTorch loop: its step, its plain state, and how that is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from moe_ckpt.driver.attached import LoopHost
from moe_ckpt.driver.changes import Change, differing, optimizer_changes, schedules_of
from moe_ckpt.driver.host import Stateful, loading_state
from moe_ckpt.driver.torch_model import TorchHost
from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.blocks import has_blocks, is_dtensor, with_blocks, without_blocks
from moe_ckpt.modeling.optimizer_state import require_plain
from moe_ckpt.recovery.executing import Restored
from moe_ckpt.recovery.replay import Repeated
from moe_ckpt.recovery.resume import other_ranks

_Plain = Mapping[str, Any]


@dataclass(frozen=True)
class Position:
    """The position at which training starts or resumes.

    Attributes:
        step: Steps done; the next one to compute is ``step + 1``, counted from 1.
        restored: False for a new run.
        counters: Counters of the loop, as given to ``after_step``; empty for a new run.
    """

    step: int = 0
    restored: bool = False
    counters: Mapping[str, Any] = field(default_factory=dict)


class PlainHost(LoopHost, TorchHost):
    """One training loop.

    Args:
        module: The model, without wrappers of data parallelism.
        optimizers: All that update it.
        stateful: As given to ``attach``.
        world_size: Number of ranks.

    Attributes:
        progress: The position of the loop.
        buckets: The order of DDP's buckets (``modeling.bucket_order``); None where it does not matter.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], stateful: Mapping[str, Stateful], world_size: int
    ) -> None:
        LoopHost.__init__(self, stateful)
        TorchHost.__init__(self, module, optimizers)
        self._world_size = world_size
        self.progress, self._moved = Position(), False
        self.buckets: str | None = None
        schedules = {name: schedules_of(target) for name, target in stateful.items()}
        self._configured = {**self._configured, "schedules": schedules}
        self._is_sharded = any(map(is_dtensor, module.parameters()))

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def moved(self) -> bool:
        return self._moved

    def step_to(self, step: int, counters: Mapping[str, Any] | None) -> None:
        """A step was done. Raises ``ConfigError`` unless it follows the one before."""
        if step != self.step + 1:
            raise ConfigError(
                f"after_step({step}) follows step {self.step}: call it once per optimizer step, with the number of "
                "steps done, and start from progress.step of what resume() returned"
            )
        if counters is None:
            counters = self.progress.counters
        else:
            require_plain(counters, "counters")
            counters = deepcopy(dict(counters))
        self.progress, self._moved = Position(step, self.progress.restored, counters), True

    def load(self, restored: Restored) -> tuple[Sequence[Change], str | None]:
        plain = restored.plain
        self._load_model(plain, restored.path)
        for name, target in self.stateful.items():
            with loading_state(f"{name} ({type(target).__name__})", restored.path):
                state = plain["stateful"][name]
                # a loader makes an iterator, and draws its seed, to tell its state
                target.load_state_dict(without_blocks(state, target.state_dict(), name) if has_blocks(state) else state)
        before, now = plain["configured"], self._configured
        changes = list(optimizer_changes(before["optimizers"], now["optimizers"]))
        changes += differing("schedule ", before["schedules"], now["schedules"], from_checkpoint=False)
        self._configured = {**now, "optimizers": before["optimizers"]}
        self.progress = Position(int(plain["step"]), restored=True, counters=plain["counters"])
        self.buckets = plain["buckets"]
        return changes, other_ranks(restored.manifest, self._world_size)

    @property
    def _scheduled(self) -> Iterable[Any]:
        return self.stateful.values()

    def _count_from(self, step: int) -> None:
        self.progress = Position(step)

    def repeated(self, before: _Plain, recorded: _Plain) -> Iterable[Repeated]:
        stateful = [(f"the state of stateful={{{n!r}: ...}}", _of_stateful(n)) for n in self.stateful]
        return *super().repeated(before, recorded), *stateful

    def capture(self, *, described: bool = False) -> _Plain:
        stateful = {name: target.state_dict() for name, target in self.stateful.items()}
        self.generators.note()  # a loader that was not iterated yet has drawn its seed to tell its state
        return {
            "framework": "torch",
            "step": self.step,
            "counters": self.progress.counters,
            "plain": self.state.plain(described=described),
            "stateful": with_blocks(stateful) if self._is_sharded else stateful,
            "rng": self.generators.state,
            "buckets": self.buckets,
            "configured": self._configured,
        }


def _of_stateful(name: str) -> Callable[[_Plain], Any]:
    return lambda state: state["stateful"][name]
