"""Records the gradients that optimizers consumed in a step, until the snapshot that logs them has read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moe_ckpt.core.operators import Remembered
from moe_ckpt.driver.run import Driver
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.format.shard import GRADIENT, TORCH_DTYPES, itemsize
from moe_ckpt.gradient_log.capture import ConsumedGradients, GradientCapture, GradientConsumer, module_units
from moe_ckpt.gradient_log.edits import EditedSteps, EditWatch, Named
from moe_ckpt.gradient_log.optimizers import OptimizerReplay
from moe_ckpt.gradient_log.returning import LogReturn
from moe_ckpt.gradient_log.units import Device, Tensors, Unit, UnitBlock, UpdateLayout
from moe_ckpt.modeling.blocks import block_in
from moe_ckpt.modeling.optimizer_state import class_name
from moe_ckpt.policies.base import Policy, needs_of
from moe_ckpt.ports import GradientRecord, StateTensor, StepGradients
from moe_ckpt.reading.memory.slot_storage import OpenedMemory
from moe_ckpt.recovery.executing import Recovery
from moe_ckpt.stopwatch import Stopwatch

Attach = Callable[[GradientConsumer, torch.dtype | None], GradientCapture]
"""(consumer, type to which wider gradients are rounded before each update) -> hooks on a framework's optimizers."""
_Region = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(parameter, offsets, shape) of a block."""


class RunLog(GradientConsumer, GradientRecord):
    """The gradient log of a training loop: recorded during training, and replayed after a failure.

    It keeps references, and copies only gradients that are overwritten before their step ends. For the training thread,
    from ``begin`` on.

    Args:
        attach: Gives consumed gradients to a consumer (``capture_gradients``, here and in
            ``gradient_log.megatron``).
        optimizers: Optimizers of this rank.
        policy: Policy of the run: its needs, and its name for messages.
        release: Called before gradients are overwritten; returns when they are no longer read.
        keys: Per optimizer, the number in the keys of its state; None for the number of the optimizer.
        copies: Weights that are made from the updated ones (``copies_written``).
        gathered: As of ``EditWatch``.
        finish: As of ``LogReturn``.

    Raises:
        UnsupportedError: The policy logs gradients, and ``attach`` refuses these optimizers.
    """

    def __init__(
        self,
        attach: Attach,
        optimizers: Sequence[Optimizer],
        policy: Policy,
        release: Callable[[], None],
        *,
        keys: Sequence[int] | None = None,
        copies: Named = (),
        gathered: bool = False,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        needs = needs_of(policy)
        if needs.gradients:
            attach(self, None).close()  # so that it refuses before training
        self._attach, self._finish = attach, finish
        self._optimizers = tuple(optimizers)
        self._release = release
        self._keys = tuple(range(len(self._optimizers)) if keys is None else keys)
        self._stored = needs.stored_gradients
        """Type in which wider gradients are saved, as named in headers, because they were rounded to it."""
        self._capture: GradientCapture | None = None
        self._consumed: list[ConsumedGradients] = []
        self._edits = EditWatch(self._optimizers, copies, gathered=gathered)
        self._edited_steps = EditedSteps(type(policy).__name__)
        self._groups: dict[tuple[int, str], int] = {}
        """(optimizer, name of a unit) -> number of its param group, after the step before."""
        # Cached for the same tensors, of the training state or of the optimizers.
        self._gradients_of = Remembered(partial(_Gradients, self._stored), most=1)
        self._layout_of = Remembered(self._encoded_layout, most=1)
        self._groups_of = Remembered(_groups, most=1)

    def begin(self) -> None:
        """Training begins."""
        self._capture = self._attach(self, None if self._stored is None else TORCH_DTYPES[self._stored])
        self._consumed.clear()
        self._groups = self._groups_of(self._capture.tensors(), self._capture)
        self._edits.begin(self._capture)

    def close(self) -> None:
        """Removes all hooks. Safe to call twice."""
        if self._capture is not None:
            self._capture.close()

    def copies_written(self) -> None:
        """Notes that the weights that are made from the updated ones are current."""
        if self._capture is not None:
            self._edits.copies_written(updated=bool(self._consumed))

    def along(self, recovery: Recovery, opened: OpenedMemory) -> LogReturn:
        """Begins the return to a step of a gradient log.

        Args:
            recovery: The recovery.
            opened: The step.
        """
        return LogReturn(recovery, opened, self._replay, self._finish)

    def _replay(self) -> OptimizerReplay:
        """Returns the optimizers to step. The capture, which is closed before they step, only describes their units."""
        capture = self._attach(self, None)
        try:
            return OptimizerReplay(self._optimizers, capture.units(), capture.tensors())
        finally:
            capture.close()

    # --- GradientConsumer ---

    def consume(self, gradients: ConsumedGradients) -> None:
        """See ``GradientConsumer``.

        Raises:
            UnsupportedError: The update overwrites its gradients.
            ConfigError: The optimizer has made an update in this step already.
        """
        number = gradients.update.optimizer
        if not gradients.stay:
            raise UnsupportedError(
                f"optimizer {number}, a fused {type(self._optimizers[number]).__name__}, applies the loss scale and "
                "writes the unscaled gradients back while it steps, so they cannot be copied during training. Create "
                "it with fused=False, or use bf16, or a policy that saves full state."
            )
        if any(consumed.update.optimizer == number for consumed in self._consumed):
            raise ConfigError(
                f"optimizer {number} made two updates in one step, but a log of gradients holds one. Step once per "
                "batch, or use a policy that saves full state."
            )
        self._edits.before_update(number, first=not self._consumed)
        self._consumed.append(gradients)

    def release(self, *, dropped: bool = False) -> None:
        """See ``GradientConsumer``. Gradients of a step that has not ended are copied on their device if necessary."""
        if self._consumed:  # zeroed, or followed by a backward pass, in the batch of the update
            self._consumed = [consumed.apart_from_training(dropped=dropped) for consumed in self._consumed]
        else:
            self._release()

    # --- ports.GradientRecord ---

    def step(self, tensors: Sequence[StateTensor]) -> StepGradients:
        """See ``ports.GradientRecord``.

        Raises:
            UnsupportedError: An optimizer keeps state that is neither of its parameter's shape nor a count.
        """
        capture = self._capture
        if capture is None:
            return StepGradients((), {"updates": [], "counts": []}, ())
        edited, described = tuple(self._edited_names()), self._gradients_of(tensors)
        gradients = [
            described(unit, piece, gradient)
            for consumed in self._consumed
            for unit, gradient in zip(consumed.units, consumed.gradients, strict=True)
            for piece in unit.pieces
        ]
        updates = [{**vars(one.update), "groups": list(one.update.groups)} for one in self._consumed]
        layout = self._layout_of(capture.tensors(), capture)
        plain = {"updates": updates, "counts": list(self._edits.counts()), "layout": layout}
        return StepGradients(gradients, plain, edited)

    def edited(self, step: int) -> bool:
        """See ``ports.GradientRecord``."""
        return self._edited_steps.ends(step, self._edited_names())

    def _edited_names(self) -> Sequence[str]:
        changed = (name for consumed in self._consumed for name in consumed.changed())
        return tuple(dict.fromkeys((*changed, *self._edits.edited(), *self._regrouped())))

    def _regrouped(self) -> Sequence[str]:
        """Returns the names of units that are in another param group than after the previous step.

        Optimizers that have these groups cannot repeat an update that was made without them.
        """
        if self._capture is None:
            return ()
        before, now = self._groups, self._groups_of(self._capture.tensors(), self._capture)
        return () if now is before else [key[1] for key in before | now if before.get(key) != now.get(key)]

    def forget(self) -> None:
        self._consumed.clear()
        if self._capture is not None:
            self._groups = self._groups_of(self._capture.tensors(), self._capture)
        self._edits.forget()

    def _encoded_layout(self, tensors: Tensors, capture: GradientCapture) -> Mapping[str, Any]:
        updated = next(iter(tensors.values()), None)
        device = Device.of(torch.device("cpu") if updated is None else block_in(updated.detach()).device)
        return UpdateLayout(tuple(map(class_name, self._optimizers)), self._keys, capture.units(), device).encoded()


def _groups(tensors: Tensors, capture: GradientCapture) -> dict[tuple[int, str], int]:
    return {(unit.optimizer, unit.name): unit.group for unit in capture.units()}


class _Gradients:
    """Describes the gradients of blocks. The descriptions do not change from step to step, and are cached.

    Args:
        stored: Type in which wider gradients are saved, as named in headers; None for their own.
        tensors: The training state. A gradient is held and written by the ranks that hold and write the optimizer state
            of its block, or the weights if there is no state.
    """

    def __init__(self, stored: str | None, tensors: Sequence[StateTensor]) -> None:
        self._stored = stored
        self._templates: dict[_Region, StateTensor] = {}
        for tensor in tensors:
            region = tensor.parameter, tuple(tensor.offsets), tuple(tensor.local.shape)
            if region not in self._templates or not tensor.key.startswith("model/"):
                self._templates[region] = tensor
        self._described: dict[tuple[int, torch.dtype], tuple[UnitBlock, StateTensor]] = {}
        """By id of a block, which is kept alive so that the id is unique, and type of the gradient."""

    def __call__(self, unit: Unit, piece: UnitBlock, gradient: torch.Tensor) -> StateTensor:
        """Returns the part of a unit's gradient that belongs to one of its blocks."""
        described = self._described.get((id(piece), gradient.dtype))
        if described is None:
            described = self._described[id(piece), gradient.dtype] = piece, self._describe(unit, piece, gradient)
        is_whole = piece.box.shape == unit.shape and piece.stride == unit.stride
        return described[1].with_local(gradient if is_whole else piece.view(gradient))

    def _describe(self, unit: Unit, piece: UnitBlock, local: torch.Tensor) -> StateTensor:
        template = self._templates.get((piece.parameter, tuple(piece.box.offsets), tuple(piece.box.shape)))
        if template is None:
            raise UnsupportedError(
                f"the optimizer updates a block of {piece.parameter} at {piece.box.offsets} that is not part of the "
                "training state: its gradients cannot be logged. Use a policy that saves full state."
            )
        is_wider = self._stored is not None and local.element_size() > itemsize(self._stored)
        return StateTensor(
            key=f"{GRADIENT}{unit.optimizer}/{piece.parameter}",
            parameter=piece.parameter,
            local=local.new_empty(0),
            offsets=piece.box.offsets,
            global_shape=template.global_shape,
            replicated=template.replicated,
            duplicate=template.duplicate,
            writer=template.writer,
            stored=self._stored if is_wider else None,
        )


# --- of a torch module, in a Lightning fit or in a plain loop ---


def capture_gradients(
    trainer: Any,
    module: Any,
    consumer: GradientConsumer,
    rounded: torch.dtype | None = None,
    stopwatch: Stopwatch | None = None,
) -> GradientCapture:
    """Gives ``consumer`` the gradients of every update, from now until ``GradientCapture.close``.

    With automatic and manual optimization, several optimizers, accumulated gradients, loss scaling and clipping, it
    gets gradients as the optimizer does. Names are those of ``modeling.names.parameters_of``; of DTensors it gets the
    local blocks.

    Args:
        trainer: Trainer whose optimizers are set up, as in ``on_fit_start`` or later.
        module: The model.
        consumer: Gets the gradients.
        rounded: Type to which wider gradients are rounded before each update; None: they are not rounded.
        stopwatch: Counts the time of hooks.

    Raises:
        UnsupportedError: Steps of an optimizer cannot be repeated from gradients, or it holds a parameter that is not
            the model's.
    """
    capture = GradientCapture(trainer.optimizers, module_units(module), consumer, rounded, stopwatch)
    wrapped = module.optimizers(use_pl_optimizer=True)
    # Under manual optimization users zero gradients through Lightning's wrapper, which has its own method.
    wrapped = wrapped if isinstance(wrapped, list) else [wrapped]
    capture.release_before([module, *trainer.optimizers, *wrapped], "zero_grad")
    capture.release_before([trainer.strategy], "backward")
    return capture


def fit_log(trainer: Any, module: Any, driver: Driver) -> RunLog:
    """Returns the gradient log of a fit.

    Args:
        trainer: Trainer whose optimizers are set up.
        module: The model.
        driver: Driver of the run; its stopwatch counts the time of hooks.

    Raises:
        UnsupportedError: The policy logs gradients, and ``capture_gradients`` refuses.
    """
    attach = partial(capture_gradients, trainer, module, stopwatch=driver.stopwatch)
    return RunLog(attach, trainer.optimizers, driver.options.policy, driver.release_gradients)


def loop_log(optimizers: Sequence[Optimizer], module: nn.Module, driver: Driver) -> RunLog:
    """Returns the gradient log of a loop without a framework, which zeroes gradients through its optimizers.

    Args:
        optimizers: All that update the model.
        module: The model.
        driver: As of ``fit_log``.

    Raises:
        UnsupportedError: As ``fit_log``.
    """

    def attach(consumer: GradientConsumer, rounded: torch.dtype | None) -> GradientCapture:
        capture = GradientCapture(optimizers, module_units(module), consumer, rounded, driver.stopwatch)
        capture.release_before([*optimizers, module], "zero_grad")
        return capture

    return RunLog(attach, optimizers, driver.options.policy, driver.release_gradients)
