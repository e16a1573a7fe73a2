"""Skips work in the replay of a sparse window: parameters not anchored yet need no gradients and no update.

An optimization that must not change results. It concerns whole parameters only; the update of single rows of a stack
of experts is overwritten instead.

- Clipping needs the norm of all gradients, so norms are recorded at each step and reused in the replay.
- A model without MoE layers is anchored from its output to its input, and the backward pass ends behind the last
  anchored layer. Elsewhere anchored experts lie in the first layers too, and only weight gradients are skipped: where a
  layer's input required none, reentrant activation checkpointing would drop the gradients behind it.
- DDP and FSDP2 reduce zeros in place of what is skipped, so that the rest lies where it did, and is added up in the
  same order. On one or two ranks DDP arranges its buckets by the first step of a process, in which nothing is skipped;
  on more, ``bucket_order`` has done so before.
- Which parameters had no gradient is recorded, too: another one that has none ends the replay.
- Nothing is skipped where torch.compile was at work: without some gradients it makes another program.
- Nothing is skipped where others may read gradients: manual optimization, hooks of module or callbacks, a scaler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from moe_ckpt.callbacks.compat import Private
from moe_ckpt.callbacks.support import overrides
from moe_ckpt.driver.host import loading_state
from moe_ckpt.errors import ReplayDivergedError
from moe_ckpt.modeling.names import is_compiled, parameters_of
from moe_ckpt.recovery.replay import StepSource
from moe_ckpt.windows.replay import WindowReplay

_LOOKS_AT_GRADIENTS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
)


class ClipNorms:
    """Records the gradient norms that clipping uses, from ``on_fit_start`` until ``close``.

    Attributes:
        taken: Norms of the current step, one per clipped optimizer.
        prescribed: Norms to clip by instead, in the same order.
    """

    def __init__(self, trainer: Any) -> None:
        self.taken: list[torch.Tensor] = []
        self.prescribed: list[torch.Tensor] = []
        self._plugin = trainer.precision_plugin
        self.active = type(self._plugin).clip_grad_by_norm is Precision.clip_grad_by_norm
        if self.active:
            self._plugin.clip_grad_by_norm = self._clip

    def _clip(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Replaces ``Precision.clip_grad_by_norm``: records the norm, or uses a given one."""
        parameters = list(self._plugin.main_params(optimizer))
        if self.prescribed:
            norm = self.prescribed.pop(0).to(parameters[0].device)
        else:
            norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            # Of sharded gradients it is a partial sum; torch 2.9 rounds differently with that than with a whole norm.
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(parameters, clip_val, _alike(norm, parameters))
        self.taken.append(norm)

    def close(self) -> None:
        if self.active:
            self.active = False
            del self._plugin.clip_grad_by_norm


def _alike(norm: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns ``norm`` as a DTensor, where gradients are."""
    sharded = next((parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)), None)
    if sharded is None:
        return norm
    return DTensor.from_local(norm, sharded.device_mesh, [Replicate()] * sharded.device_mesh.ndim, run_check=False)


class SparingRecompute(StepSource):
    """Training's own passes, without gradients and updates of parameters that are not anchored yet.

    Args:
        replay: Of the window.
        trainer: Of the fit.
        module: The model.
        has_experts: It has MoE layers.
        norms: Of clipping.
    """

    def __init__(
        self, replay: WindowReplay, trainer: Any, module: pl.LightningModule, *, has_experts: bool, norms: ClipNorms
    ) -> None:
        self._replay = replay
        self._module, self._norms, self._has_experts = module, norms, has_experts
        self._parameters = dict(parameters_of(module))
        self._reducing = _Reducing.of(trainer, module)
        self._frozen: frozenset[str] = frozenset()
        self._expected: frozenset[str] | None = None  # parameters without a gradient; None: not recorded
        self._spared: WithoutGradients | None = None
        self._step = 0

    def prepare(self, recorded: Mapping[str, Any]) -> None:
        self._release()
        replay = self._replay
        self._frozen, self._step = replay.frozen_parameters(), replay.upcoming_step
        facts = recorded["replay"]
        with loading_state("the steps of a sparse window", replay.upcoming_path):
            self._norms.prescribed = list(facts["norms"])
            self._expected = frozenset(facts["without_gradient"]) if "without_gradient" in facts else None
        frozen = [self._parameters[name] for name in sorted(self._frozen) if self._parameters[name].requires_grad]
        eager = not facts.get("compiled", False)
        if self._reducing is not None and self._expected is not None and eager and self._reducing.spares(frozen):
            connected = self._has_experts or facts.get("reentrant", True)
            self._spared = WithoutGradients(self._module.modules(), frozen, connected=connected)

    def before_backward(self, loss: torch.Tensor) -> None:
        if self._spared is not None and not loss.requires_grad:
            loss.requires_grad_()  # nothing that it depends on is anchored

    def before_update(self) -> None:
        for name in self._frozen:
            self._parameters[name].grad = None  # clipping and update pass over it
        if self._expected is None:
            return
        for name, parameter in self._parameters.items():
            if name in self._expected:
                parameter.grad = None  # FSDP2 has made zeros
            elif parameter.grad is None and parameter.requires_grad and name not in self._frozen:
                raise ReplayDivergedError(
                    self._step,
                    f"{name} has no gradient now, but had one then. If your own checkpointing function drops gradients "
                    "when its input requires none, override on_after_backward in your module: then a replay computes "
                    "everything",
                )

    def _release(self) -> None:
        if self._spared is not None:
            self._spared.close()
        if self._reducing is not None:
            self._reducing.release()
        self._spared, self._frozen, self._expected = None, frozenset(), None

    def close(self) -> None:
        self._release()
        self._norms.prescribed = []


class _Reducing:
    """Reduces gradients as the strategy does if some are not computed. On a single device there is nothing to do."""

    @staticmethod
    def of(trainer: Any, module: pl.LightningModule) -> _Reducing | None:
        """Returns the instance for the trainer's strategy; None if all gradients must be computed."""
        strategy = trainer.strategy
        if is_compiled(module):
            return None  # other gradients would be another program, with other roundings
        if isinstance(strategy, SingleDeviceStrategy):
            return _Reducing()
        if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
            plain = Private(strategy).ddp_comm_hook is None and not strategy.model.static_graph
            return _InBuckets(strategy.model, module) if plain else None
        if isinstance(strategy, ModelParallelStrategy) and Private(strategy).tensor_parallel_size == 1:
            sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
            if sharded and all(hasattr(part, "set_reduce_scatter_unused_params") for part in sharded):
                return _InShards(sharded)
        return None

    def spares(self, frozen: Sequence[nn.Parameter]) -> bool:
        """Prepares a step without gradients of ``frozen``. Returns False if the step must compute them."""
        return True

    def release(self) -> None:
        """The step is over."""


class _InBuckets(_Reducing):
    """DDP waits for each parameter's hook, and takes zeros where there is no gradient."""

    def __init__(self, model: DistributedDataParallel, module: nn.Module) -> None:
        self._model, self._module = model, module
        # Else the next step lays them out, and all gradients are needed for that.
        self._arranged = model.find_unused_parameters or model._has_rebuilt_buckets
        self._handle: RemovableHandle | None = None

    def spares(self, frozen: Sequence[nn.Parameter]) -> bool:
        if not self._arranged:
            self._arranged = True
            return False
        if not self._model.find_unused_parameters:
            self._handle = self._module.register_forward_hook(lambda module, args, output: with_loss(output, frozen))
        return True

    def release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class _InShards(_Reducing):
    """FSDP2 would leave out of its messages what has no gradient, so that the rest lay elsewhere in them."""

    def __init__(self, sharded: Sequence[FSDPModule]) -> None:
        self._sharded = [module for module in sharded if not _takes_zeros(module)]

    def spares(self, frozen: Sequence[nn.Parameter]) -> bool:
        for module in self._sharded:
            module.set_reduce_scatter_unused_params(True, recurse=False)
        return True

    def release(self) -> None:
        for module in self._sharded:
            module.set_reduce_scatter_unused_params(False, recurse=False)


def _takes_zeros(module: FSDPModule) -> bool:
    """Returns whether the user has set what ``_InShards`` sets."""
    groups: Any = module._get_fsdp_state()._fsdp_param_groups
    return bool(groups) and all(group.reduce_scatter_unused_params for group in groups)


def may_leave_out(trainer: Any, module: pl.LightningModule, norms: ClipNorms, ours: Collection[Callback]) -> bool:
    """Returns whether only the optimizers read gradients."""
    if not module.automatic_optimization or getattr(trainer.precision_plugin, "scaler", None) is not None:
        return False
    if trainer.gradient_clip_val and not norms.active:
        return False
    others = [callback for callback in trainer.callbacks if callback not in ours]
    return not any(is_overridden(name, module) for name in _LOOKS_AT_GRADIENTS) and not any(
        overrides(callback, name) for callback in others for name in _LOOKS_AT_GRADIENTS
    )


class WithoutGradients:
    """Makes passes leave out some gradients, from the constructor until ``close``. On the training thread.

    Everybody but the forward pass of the module that owns such a parameter sees it as ever: reducers, sharding hooks
    and optimizers find ``requires_grad``, so that what ranks do together stays the same. A parameter that is also used
    outside of its module's forward pass gets the gradient of that use.

    Args:
        modules: Of the model, all of them.
        frozen: Their parameters that get no gradient.
        connected: Outputs require gradients as if nothing were frozen, so that reentrant checkpoints keep the gradients
            behind them, and a loss always has a backward pass. Else it ends behind the last parameter that is not
            frozen.
    """

    def __init__(self, modules: Iterable[nn.Module], frozen: Collection[nn.Parameter], *, connected: bool) -> None:
        self._connected = connected
        self._handles: list[RemovableHandle] = []
        self._entered: dict[nn.Module, list[list[nn.Parameter]]] = {}
        chosen = {id(parameter) for parameter in frozen if parameter.requires_grad}
        for module in modules:
            names = [name for name, parameter in module._parameters.items() if id(parameter) in chosen]
            if names:
                self._watch(module, names)

    def _watch(self, module: nn.Module, names: Collection[str]) -> None:
        calls = self._entered[module] = []

        def enter(module: nn.Module, args: Any) -> None:
            # By name, for FSDP2 puts other parameters there for the time of the pass.
            here = [module._parameters[name] for name in names] if torch.is_grad_enabled() else []
            calls.append([parameter for parameter in here if parameter is not None and parameter.requires_grad])
            for parameter in calls[-1]:
                parameter.requires_grad_(False)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            spared = calls.pop() if calls else []
            for parameter in spared:
                parameter.requires_grad_(True)
            return _connected(output, spared) if spared and self._connected else None

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def close(self) -> None:
        """Removes the hooks. Safe to call twice."""
        while self._handles:
            self._handles.pop().remove()
        for calls in self._entered.values():
            for parameter in (spared for call in calls for spared in call):
                parameter.requires_grad_(True)
            calls.clear()


def _connected(output: Any, parameters: Collection[nn.Parameter]) -> Any:
    """Returns a module's output, such that its first floating-point tensor requires gradients."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad or not output.is_floating_point():
            return None
        return without_gradient(output, parameters)
    if type(output) not in (tuple, list) or any(isinstance(t, torch.Tensor) and t.requires_grad for t in output):
        return None
    made = list(output)
    for index, value in enumerate(made):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            made[index] = without_gradient(value, parameters)
            break
    return type(output)(made)


def without_gradient(tensor: torch.Tensor, parameters: Collection[nn.Parameter]) -> torch.Tensor:
    """Returns a copy of ``tensor`` that depends on ``parameters``, of which its backward pass makes no gradient.

    Their hooks run all the same, as DDP needs it.
    """
    result: torch.Tensor = _WithoutGradient.apply(tensor, *parameters)  # type: ignore[no-untyped-call]
    return result


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.count = len(parameters)
        return tensor.clone()  # a view could not be changed in place afterwards

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0], *[None] * ctx.count)


def with_loss(output: Any, parameters: Collection[nn.Parameter]) -> Any:
    """Returns what a training step returned, with a loss made by ``without_gradient``; None if there is no loss."""
    if isinstance(output, torch.Tensor):
        return without_gradient(output, parameters)
    if isinstance(output, Mapping) and isinstance(output.get("loss"), torch.Tensor):
        return {**output, "loss": without_gradient(output["loss"], parameters)}
    return None


class ReentrantCheckpoints:
    """Notices whether torch's reentrant activation checkpoints are in use, from the constructor until ``close``."""

    def __init__(self) -> None:
        self.seen = False
        self._forward = vars(CheckpointFunction)["forward"]
        original: Any = CheckpointFunction.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.seen = True
            return original(*args, **kwargs)

        self._ours = staticmethod(forward)
        setattr(CheckpointFunction, "forward", self._ours)  # noqa: B010 - types forbid the plain form

    def close(self) -> None:
        """Stops noticing; may be called twice."""
        if vars(CheckpointFunction)["forward"] is self._ours:
            setattr(CheckpointFunction, "forward", self._forward)  # noqa: B010 - as above
