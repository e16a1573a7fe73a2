"""What sparse windows (MoEvement) ask of Lightning, beside what every checkpoint does.

They promise that steps can be computed again exactly. So what cannot be is refused when training starts, and what the
steps depended on is written down: the norms that clipping went by, and the types in which kernels read the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision

from moe_ckpt.callbacks.freezing import ClipNorms, Freezing, may_leave_out
from moe_ckpt.callbacks.replaying import Replaying
from moe_ckpt.callbacks.support import inexact
from moe_ckpt.core.operators import Catalog
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.dtypes import dtype_name
from moe_ckpt.modeling.compute_types import ComputeTypeProbe

log = logging.getLogger("moe_ckpt")

_PROBED_BATCHES = 4
"""An expert that none of these uses is saved in its own type."""


class Windows:
    """From ``on_fit_start`` until ``close``, of a policy that uses windows, or while one is brought back.

    replaying: the window that is being brought back.
    """

    def __init__(self, trainer: Any, module: pl.LightningModule, catalog: Catalog) -> None:
        self.replaying: Replaying | None = None
        self._trainer = trainer
        self._module = module
        self._catalog = catalog
        self._norms = ClipNorms(trainer)
        self._probe = ComputeTypeProbe(module) if _casts(trainer, module) else None
        self._probed = 0

    def check(self, policy: str, isolate_validation: bool) -> None:
        """Raise ``ConfigError`` if steps could not be computed again exactly, now and not after a failure."""
        reasons = inexact(self._trainer, isolate_validation)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self._trainer.optimizers):
            reasons.append("an update of LBFGS joins all parameters, those that are not there yet too")
        if self.replaying is not None:
            policy = "The sparse window that training goes on from"
        if reasons:
            raise ConfigError(
                f"{policy} computes steps again after a failure, so a resume must be exact, and this one would not be: "
                f"{'; '.join(reasons)}. Or choose a policy that needs no replay (Dense, MoC)."
            )

    def check_updates(self, policy: str, updates: int) -> None:
        """Raise if one batch made more updates than replay can put in place: that happens at its end only."""
        optimizers = len(self._trainer.optimizers)
        if updates > optimizers:
            raise ConfigError(
                f"{policy} needs one update of each optimizer per batch, and this batch made {updates} with "
                f"{optimizers} optimizer(s). Step once per batch, or use Dense or MoC."
            )

    def refuse_backward(self, policy: str) -> None:
        """A backward pass begins, and this batch has updated weights already. Raises: see ``check_updates``."""
        raise ConfigError(
            f"{policy} needs all backward passes of a batch to come before its updates, and here an optimizer stepped "
            "first: when the step is computed again, the pass would read weights that are not yet in place. Step the "
            "optimizers after the last backward pass, or use Dense or MoC."
        )

    def leave_out_of(self, checkpoint: dict[str, Any]) -> None:
        """Another callback saves a checkpoint: while a window is brought back, optimizer state is none of the run's.

        Without it Lightning loads the weights, and refuses to go on training from them.
        """
        if self.replaying is not None and checkpoint.pop("optimizer_states", None) is not None:
            log.warning(
                "a callback saves step %d while the sparse window of steps %d to %d is computed again: without "
                "optimizer state, which is not complete before step %d",
                self._trainer.global_step,
                *self.replaying.steps,
                self.replaying.steps[1],
            )

    def say_unfinished(self) -> bool:
        """Training ends. True, and a warning, if the window is not back yet."""
        if self.replaying is not None and self._trainer.is_global_zero:
            log.warning(
                "training ended at step %d, before the sparse window of steps %d to %d was computed again: nothing was "
                "saved, and the optimizer state in memory is incomplete. The store is as it was; the next start goes "
                "on from that window.",
                self._trainer.global_step,
                *self.replaying.steps,
            )
        return self.replaying is not None

    def begin_replay(self, ours: Collection[Callback]) -> None:
        """Training begins in the middle of a window. ours: callbacks that do not look at gradients."""
        if self.replaying is not None:
            spare = may_leave_out(self._trainer, self._module, self._norms, ours)
            freezing = Freezing(self._trainer, self._module, self._catalog) if spare else None
            self.replaying.begin(self._norms, freezing)

    def batch_begins(self) -> None:
        if self._probe is not None:
            self._probe.start()

    def gradients_done(self) -> None:
        """After a backward pass; what optimizers read does not count."""
        if self._probe is not None:
            self._probe.stop()

    def before_update(self) -> None:
        """All gradients of a step are there, and nobody has used them yet."""
        if self.replaying is not None:
            self.replaying.before_update()

    def recorded(self) -> Mapping[str, Any]:
        """What a replay of this step must know besides; part of the step's plain state."""
        return {"norms": list(self._norms.taken)}

    def step_ends(self, session: CheckpointSession) -> None:
        """Forget this step's norms; after a few of them, tell the session what kernels read. On every rank."""
        self._norms.taken.clear()
        if self._probe is None:
            return
        self._probed += 1
        if self._probed == _PROBED_BATCHES:
            probe, self._probe = self._probe, None
            probe.stop()
            narrow, wide = session.largest(probe.narrow()), session.largest(probe.wide())
            found = probe.types(narrow, wide)
            session.set_compute_types({name: dtype_name(dtype) for name, dtype in found.items()})

    def close(self) -> None:
        """Take back everything that was put on the trainer or the module. Safe to call twice."""
        self.gradients_done()
        if self.replaying is not None:
            self.replaying.close()
        self._norms.close()


def _casts(trainer: Any, module: pl.LightningModule) -> bool:
    """Whether weights may be read in another type than their own, and it can be found out which.

    Averaging callbacks read the weights themselves, also while steps are computed again. What a compiler makes of the
    model cannot be watched.
    """
    averaged = any(isinstance(c, (WeightAveraging, StochasticWeightAveraging)) for c in trainer.callbacks)
    compiled = any(isinstance(m, torch._dynamo.eval_frame.OptimizedModule) for m in module.modules())
    mixed = isinstance(trainer.precision_plugin, MixedPrecision)
    return mixed and module.automatic_optimization and not averaged and not compiled
