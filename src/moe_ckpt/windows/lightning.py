"""Ensures that Lightning can compute the steps of sparse windows (MoEvement) again exactly.

Runs in which that is impossible are refused when training starts. The types in which kernels read weights are observed
in the first batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from moe_ckpt.callbacks.lightning_state import overrides
from moe_ckpt.callbacks.support import reasons_for_inexact_resume
from moe_ckpt.errors import ConfigError
from moe_ckpt.format.shard import dtype_name
from moe_ckpt.modeling.bucket_order import BucketOrder
from moe_ckpt.modeling.names import is_compiled
from moe_ckpt.recovery.replay import StepReplay, are_plain_states_equal
from moe_ckpt.session.session import CheckpointSession
from moe_ckpt.slices.assignment import ComputeTypes
from moe_ckpt.stopwatch import Stopwatch
from moe_ckpt.windows.compute_types import AS_STORED, ComputeTypeProbe

log = logging.getLogger("moe_ckpt")

_PROBED_BATCHES = 4
"""Number of observed batches. Experts without tokens in these are saved in their own type."""
_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
)
_OF_MODULES = (*_HOOKS, "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
_KEEPS = ("state_dict", "on_save_checkpoint")
_HARMLESS = ("lightning.pytorch.", "moe_ckpt.")
"""Packages whose callbacks read no weights, except those in ``_READERS``."""
_READERS = frozenset(
    f"lightning.pytorch.callbacks.{name}"
    for name in ("weight_averaging", "stochastic_weight_avg", "pruning", "lambda_function")
)
"""``LambdaCallback`` calls functions of the user."""


class Windows:
    """Watches a fit from ``on_fit_start`` until ``close``, under a policy with windows, or during a replay of one.

    Args:
        trainer: Trainer of the fit.
        module: The model.
        policy: Class name of the policy.
        stopwatch: Counts the time of watching the first batches.
    """

    def __init__(self, trainer: Any, module: pl.LightningModule, policy: str, stopwatch: Stopwatch) -> None:
        self._trainer, self._policy = trainer, policy
        self._module = module
        self._probe = ComputeTypeProbe(module, stopwatch) if _casts(trainer, module) else None
        self._probed = 0
        self._agreed: Callable[[], ComputeTypes] | None = None
        self._values: _OwnValues | None = None

    def check(self, replaying: StepReplay | None, buckets: BucketOrder) -> None:
        """Raises ``ConfigError`` if steps cannot be computed again exactly.

        Args:
            replaying: The window that is replayed; None without one.
            buckets: Buckets of DDP.
        """
        reasons = reasons_for_inexact_resume(self._trainer, buckets)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self._trainer.optimizers):
            reasons.append("an update of LBFGS uses all parameters, also those that are not restored yet")
        if reasons:
            who = self._policy if replaying is None else "The sparse window that training resumes from"
            raise ConfigError(
                f"{who} computes steps again after a failure, so a resume must be exact, and this one would not be: "
                f"{'; '.join(reasons)}. Or choose a policy that needs no replay (Dense, MoC)."
            )

    def check_updates(self, updates: int) -> None:
        """Raises if a batch made more updates than one per optimizer: a replay loads the window at its end only."""
        optimizers = len(self._trainer.optimizers)
        if updates > optimizers:
            raise ConfigError(
                f"{self._policy} needs one update of each optimizer per batch, and this batch made {updates} with "
                f"{optimizers} optimizer(s). Step once per batch, or use Dense or MoC."
            )

    def refuse_backward(self) -> None:
        """Raises because a backward pass begins after an update of the same batch."""
        raise ConfigError(
            f"{self._policy} needs all backward passes of a batch to come before its updates, and here an optimizer "
            "stepped first: when the step is computed again, the pass would read weights that are not restored yet. "
            "Step the optimizers after the last backward pass, or use GradientLog, Dense or MoC."
        )

    def strip_optimizer_state(self, checkpoint: dict[str, Any], replaying: StepReplay) -> None:
        """Removes optimizer state, which is invalid during a replay, from another callback's checkpoint.

        Without it Lightning loads the weights, and refuses to resume training from them.
        """
        if checkpoint.pop("optimizer_states", None) is not None:
            log.warning(
                "a callback saves step %d while the sparse window of steps %d to %d is computed again: without "
                "optimizer state, which is not complete before step %d",
                self._trainer.global_step,
                *replaying.steps,
                replaying.steps[1],
            )

    def resumed(self, replaying: StepReplay) -> None:
        """Notes that optimizers are as at the first step of the replayed window."""
        if replaying.steps[0] > 0:  # at step 0 hooks changed the hyperparameters of the run, too
            self._values = _OwnValues(self._trainer.optimizers)

    def hooks_begin(self) -> None:
        """Sets aside hyperparameters that hooks at the beginning of training have set. Before an epoch or a batch."""
        if self._values is not None and self._values.set_aside() and self._trainer.is_global_zero:
            log.warning(
                "hyperparameters of optimizers that were set before training hold once the sparse window is computed "
                "again: %s. Its steps are computed with the run's",
                "; ".join(self._values.changes),
            )

    def replayed(self) -> None:
        """Ends the replay: hyperparameters that were set aside hold again."""
        values, self._values = self._values, None
        if values is not None:
            values.put_back()

    def batch_begins(self) -> None:
        if self._probe is not None:
            self._probe.start()

    def gradients_done(self) -> None:
        """Ends the watch of reads after a backward pass: reads of the optimizers do not count."""
        if self._probe is not None:
            self._probe.stop()

    def before_update(self, session: CheckpointSession) -> None:
        """Gives the session the types that kernels read, once. When gradients of a step are final, before clipping.

        Waiting for other ranks is cheap here, since the agreement on the previous step, which was sent first, has
        arrived.
        """
        if self._agreed is not None:
            session.set_compute_types(self._agreed())
            self._agreed = None

    def step_ends(self, session: CheckpointSession) -> None:
        """Begins to agree on the types that kernels read, after a few steps. On all ranks.

        It does not wait: the result is received before the next update.
        """
        if self._probe is None:
            return
        self._probed += 1
        if self._probed == _PROBED_BATCHES:
            probe, self._probe = self._probe, None
            probe.stop()
            reads = probe.reads()
            if self._has_readers(probe.types(reads), session.comm.rank):
                reads = [AS_STORED] * len(reads)
            mine = np.array(reads, dtype=np.int64)
            agreed = session.comm.start_agreement(lambda: np.zeros(0, dtype=np.int64), mine)

            def types() -> ComputeTypes:
                narrow = probe.types(agreed.result()[1].tolist())
                return {name: dtype_name(dtype) for name, dtype in narrow.items()}

            self._agreed = types

    def _has_readers(self, types: Mapping[str, torch.dtype], rank: int) -> bool:
        """Returns whether other code than kernels may read weights on this rank; rank 0 logs what that costs.

        Args:
            types: In which kernels read weights that are stored in another type.
            rank: Of this process.
        """
        readers = weight_readers(self._trainer, self._module)
        if readers and types and rank == 0:
            log.info(
                "%s may read weights when a batch ends, and what is made of them is saved: so each frozen operator of "
                "a sparse window is saved in full precision instead of %s, which makes windows longer and changes no "
                "result. Without that (state_dict and on_save_checkpoint of a callback, copies of weights in the "
                "module), slots are lighter. docs/moevement.md",
                " and ".join(readers),
                " and ".join(sorted({dtype_name(dtype) for dtype in types.values()})),
            )
        return bool(readers)

    def close(self) -> None:
        """Stops watching. Safe to call twice."""
        self.gradients_done()


class _OwnValues:
    """Hyperparameters that a user's hooks set at a resume, with which no step of the window was computed.

    Args:
        optimizers: The restored optimizers.

    Attributes:
        changes: The values that were set aside, as text.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._stored = [deepcopy({key: value for key, value in g.items() if key != "params"}) for g in self._groups]
        self._user_values: list[dict[str, Any]] | None = None
        self.changes: Collection[str] = ()

    def set_aside(self) -> bool:
        """Restores the stored values, on the first call. Returns whether there were other values."""
        if self._user_values is not None:
            return False
        pairs = list(zip(self._groups, self._stored, strict=True))
        self._user_values = [
            {key: g[key] for key in old if not are_plain_states_equal(old[key], g.get(key))} for g, old in pairs
        ]
        texts = [
            f"{key} {old[key]} -> {value}"
            for values, (_, old) in zip(self._user_values, pairs, strict=True)
            for key, value in values.items()
        ]
        self.changes = dict.fromkeys(texts)
        for group, old in pairs:
            group.update(old)
        return bool(self.changes)

    def put_back(self) -> None:
        """Restores the user's values."""
        for group, values in zip(self._groups, self._user_values or (), strict=False):
            group.update(values)


def _casts(trainer: Any, module: pl.LightningModule) -> bool:
    """Returns whether kernels may read weights in another type than their own, and these types can be observed.

    Compiled models cannot be observed. All ranks must come to the same result, since they agree on types afterwards.
    """
    mixed = isinstance(trainer.precision_plugin, MixedPrecision)
    return mixed and module.automatic_optimization and not is_compiled(module)


def weight_readers(trainer: Any, module: pl.LightningModule) -> list[str]:
    """Returns the names of callbacks, and of the module, that may read weights in a hook and keep results.

    A replay with frozen weights in the type of the kernels (bf16) would give such readers (averages, targets) rounded
    values. Whether a hook reads weights is not known in advance, so every hook in training that can keep results
    counts. Forward and backward passes do not count, since their reads are observed.
    """
    readers = [type(callback).__name__ for callback in trainer.callbacks if _may_keep(callback)]
    if any(is_overridden(name, module) for name in _OF_MODULES) and _has_room(module):
        readers.append(f"the hooks of {type(module).__name__}")
    return list(dict.fromkeys(readers))


def _may_keep(callback: Callback) -> bool:
    return (any(_of_others(callback, _HOOKS)) and any(overrides(callback, name) for name in _KEEPS)) or (
        any(_of_others(callback, _KEEPS)) and any(overrides(callback, name) for name in _HOOKS)
    )


def _of_others(callback: Callback, names: tuple[str, ...]) -> Iterator[bool]:
    """Yields for each overridden method whether it may read weights: code outside of ``_HARMLESS`` may."""
    for name in names:
        if name in vars(callback):
            yield True
        elif overrides(callback, name):
            where = next(kind.__module__ for kind in type(callback).__mro__ if name in vars(kind))
            yield where in _READERS or not f"{where}.".startswith(_HARMLESS)


def _has_room(module: pl.LightningModule) -> bool:
    """Returns whether the module may keep a copy of weights: untrained matrices in the shapes of trained ones, or a
    hook.

    Vectors do not count, since running statistics of a norm have the shape of its weights.
    """
    trained = {parameter.shape for parameter in module.parameters() if parameter.requires_grad}
    frozen = (parameter for parameter in module.parameters() if not parameter.requires_grad)
    copies = any(tensor.ndim > 1 and tensor.shape in trained for tensor in chain(module.buffers(), frozen))
    return copies or is_overridden("on_save_checkpoint", module)
