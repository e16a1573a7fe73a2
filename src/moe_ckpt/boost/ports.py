"""Applies a capacity boost to the routers of a torch model (``boost.layer``).

A module with the attribute ``moe_boost`` asks it by itself. In any other layer that calls ``topk`` over scores of its E
experts, the result of that call is changed inside its forward pass. The returned scores are those of the chosen
experts, without a bias, so that the model computes weights from them as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moe_ckpt.boost.layer import BoostPort, LayerBoost
from moe_ckpt.modeling.blocks import is_dtensor
from moe_ckpt.modeling.discover import FoundLayer
from moe_ckpt.modeling.routing import LiveHook, TrainingPasses

ATTRIBUTE = "moe_boost"


def boost_ports(
    layers: Sequence[FoundLayer], shared: str | None = None, passes: TrainingPasses | None = None
) -> dict[int, BoostPort]:
    """Returns the port of each MoE layer, by its number.

    Args:
        layers: MoE layers of the live model.
        shared: Why no layer can apply a boost; None if layers can.
        passes: Knows which forward passes belong to training; None: those of modules in training mode.
    """
    training_passes, ports = passes or TrainingPasses(), dict[int, BoostPort]()
    for layer in layers:
        # The first module that has the attribute asks: a router, or the layer.
        asking = next((module for module in (*layer.routers, layer.layer) if hasattr(module, ATTRIBUTE)), None)
        kind = TopKPort if asking is None else AttributePort
        ports[layer.info.index] = kind(layer, layer.layer if asking is None else asking, training_passes, shared)
    return ports


class _ModulePort(BoostPort):
    """Base class of ports with hooks on one module.

    Args:
        layer: MoE layer of the model.
        module: Module of the layer.
        passes: As of ``boost_ports``.
        refused: Why it cannot apply a boost; None if it can.
    """

    def __init__(self, layer: FoundLayer, module: nn.Module, passes: TrainingPasses, refused: str | None) -> None:
        super().__init__(layer.info.name, layer.info.experts, type((*layer.routers, layer.layer)[0]).__name__)
        self._module, self._passes, self._refused = module, passes, refused
        self._k = layer.info.top_k

    def refusal(self) -> str | None:
        return self._refused

    def _enclose(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._handles.append(self._module.register_forward_pre_hook(LiveHook(before)))
        self._handles.append(self._module.register_forward_hook(LiveHook(after), always_call=True))


class AttributePort(_ModulePort):
    """The port of a module whose forward asks ``self.moe_boost``, unless that is None."""

    def attach(self, boost: LayerBoost) -> None:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            setattr(module, ATTRIBUTE, boost if self._passes.include(module) else None)

        self._enclose(before, lambda module, args, output: setattr(module, ATTRIBUTE, None))

    def detach(self) -> None:
        super().detach()
        setattr(self._module, ATTRIBUTE, None)


class TopKPort(_ModulePort):
    """The port of a layer that calls ``topk`` once per forward pass, over the last dimension, of E scores."""

    _asked = _choices = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: list[_Choosing] = []

    def refusal(self) -> str | None:
        if self._refused is not None or self._choices == self._asked:
            return self._refused
        how = (
            "calls torch.topk over the scores of its experts more than once" if self._choices else "calls no torch.topk"
        )
        of = f"{self.experts} experts" if self._k is None else f"{self.experts} experts for the best {self._k}"
        return (
            f"it {how} ({of}) in an eager forward pass of {type(self._module).__name__}. Let its forward ask "
            f"self.{ATTRIBUTE}, see docs/moetion.md"
        )

    def attach(self, boost: LayerBoost) -> None:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._passes.include(module):
                mode = _Choosing(self._is_choice, boost)
                mode.__enter__()  # type: ignore[no-untyped-call]
                self._open.append(mode)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._open:
                self._asked, self._choices = self._asked + 1, self._choices + self._leave()

        self._enclose(before, after)

    def detach(self) -> None:
        super().detach()
        while self._open:  # of a pass that a KeyboardInterrupt or the like ended, after which torch runs no hook
            self._leave()

    def _leave(self) -> int:
        mode = self._open.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return mode.choices

    def _is_choice(self, scores: torch.Tensor, k: int, dim: int) -> bool:
        last = dim in (-1, scores.ndim - 1) and scores.is_floating_point() and scores.shape[-1:] == (self.experts,)
        # Group-limited routers take the best two of each group first, of [T, groups, E / groups], with one group too.
        of_groups = scores.ndim > 2 and scores.shape[-2] == 1
        chooses = last and not of_groups and (k < self.experts if self._k is None else k == self._k)
        if chooses and is_dtensor(scores):
            self._refused = (
                "its scores are a DTensor, so tensor-parallel ranks may route the same tokens, and would choose "
                "differently. A boost needs data-parallel ranks (DDP, FSDP2)"
            )
        return chooses and self._refused is None


class _Choosing(TorchFunctionMode):
    """Changes the results of ``topk`` over scores of experts, while it is entered."""

    def __init__(self, is_choice: Callable[[torch.Tensor, int, int], bool], boost: LayerBoost) -> None:
        super().__init__()
        self._is_choice, self._boost = is_choice, boost
        self.choices = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        result = func(*args, **keywords)
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        named = keywords | dict(zip(("input", "k", "dim", "largest"), args, strict=False))
        scores: Any = named.get("input", named.get("self"))
        if not named.get("largest", True) or not self._is_choice(scores, named["k"], named.get("dim", -1)):
            return result
        self.choices += 1
        flat = scores.reshape(-1, scores.shape[-1])
        chosen = self._boost.select(flat.detach(), result[1].reshape(len(flat), -1)).reshape(result[1].shape)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
