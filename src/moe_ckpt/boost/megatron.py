"""Applies a capacity boost to ``TopKRouter`` of Megatron-Core (``boost.layer``).

* With a capacity factor: ``apply_router_token_dropping`` has one capacity for all experts. After it, some dropped
tokens
  are put back, in the order of its drop policy, as many as the boost allows.
* Without one: ``topk_routing_with_score_function`` (moe_utils.py:702) gets the choice from ``router_replay``
  (router_replay.py:114), with the scores of the choice, and Megatron computes the weights of the result. An existing
  replay, of the router or of the user, is asked first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_ckpt.boost.layer import BoostPort, LayerBoost
from moe_ckpt.megatron.routing import Dropping, Watch, attach, detach, graphs_capture_router


class RouterPort(BoostPort):
    """The port of one router.

    Args:
        layer: Name of the MoE layer.
        router: Its ``TopKRouter``.

    Attributes:
        real: ``[T]`` for the pass under way, False for padding; None without padding.
        watch: Sees the tokens that the router drops, in a pass of training.
    """

    def __init__(self, layer: str, router: nn.Module) -> None:
        config: Any = router.config
        super().__init__(layer, int(config.num_moe_experts), type(router).__name__)
        self._router: Any = router
        self.real: torch.Tensor | None = None
        self.watch = Watch()
        self._replaced: _BoostedChoice | None = None

    def refusal(self) -> str | None:
        config = self._router.config
        if graphs_capture_router(config):
            return "CUDA graphs replay the capacity and the choice that they captured. Leave the router out of them"
        if config.moe_expert_capacity_factor is not None and config.moe_pad_expert_input_to_capacity:
            return (
                "moe_pad_expert_input_to_capacity gives each expert the same number of rows, so none can get more. "
                "Train without padding to capacity"
            )
        if config.moe_expert_capacity_factor is not None:
            return None
        if self._router.routing_type == "sinkhorn":
            return "sinkhorn has no scores to choose by. Choose another moe_router_load_balancing_type, or a capacity"
        if config.moe_router_fusion:
            return "moe_router_fusion chooses in one kernel, out of reach. Train without moe_router_fusion"
        if not hasattr(self._router, "router_replay"):
            return "it has no router_replay, which the boost uses in megatron-core 0.16.1 to 0.19.2. Install one"
        return None

    def attach(self, boost: LayerBoost) -> None:
        if self._router.config.moe_expert_capacity_factor is not None:
            self.watch.adjust = lambda dropping: _put_back(dropping, boost, self.real)
            attach(self.watch)
        else:
            self._replaced = _BoostedChoice(self._router.router_replay, boost, self)
            self._router.router_replay = self._replaced
        self._handles.append(self._router.register_forward_pre_hook(self._before, with_kwargs=True))
        self._handles.append(self._router.register_forward_hook(self._after, always_call=True))

    def detach(self) -> None:
        super().detach()
        detach(self.watch)
        if self._replaced is not None and self._router.router_replay is self._replaced:
            self._router.router_replay = self._replaced.before
        self._replaced = None

    def _before(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        padding = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
        self.real = None if padding is None else ~padding.reshape(-1).bool()
        self.watch.running = router.training

    def _after(self, router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.watch.running, self.real = False, None


class _BoostedChoice:
    """Replaces a router's ``router_replay``. before: The replaced one."""

    def __init__(self, before: Any, boost: LayerBoost, port: RouterPort) -> None:
        self.before = before
        self._boost, self._port = boost, port

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scores and indices ``[T, k]`` of the chosen experts; see Megatron's ``RouterReplay``."""
        if self.before is not None:
            values, chosen = self.before.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        else:
            values, chosen = default_compute_topk(scores, topk, num_groups, group_topk)
        if not self._port.watch.running:
            return values, chosen
        within = _of_chosen_groups(chosen, scores, num_groups) if group_topk and num_groups else None
        chosen = self._boost.select(scores.detach(), chosen, real=self._port.real, within=within)
        return scores.gather(1, chosen), chosen


def _of_chosen_groups(chosen: torch.Tensor, scores: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns ``[T, E]``, True for the experts of groups of which the token chose one."""
    size = scores.shape[1] // groups
    taken = torch.zeros(len(scores), groups, dtype=torch.bool, device=scores.device)
    return taken.scatter(1, chosen // size, True).repeat_interleave(size, dim=1)


def _put_back(dropping: Dropping, boost: LayerBoost, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (probs, map) after dropping, with the tokens that boosted experts take beyond their capacity.

    With drop_policy "probs" tokens with the highest weights come first; equal ones, and all with "position", in order.
    """
    retained, capacity = dropping.retained, dropping.capacity
    dropped = dropping.routing_map & ~retained if real is None else dropping.routing_map & ~retained & real[:, None]
    over, unused = dropped.sum(dim=0), (capacity - retained.sum(dim=0)).clip(min=0)
    extra = boost.extra(over, unused, capacity)
    weight = dropping.probs.detach().float() if dropping.policy == "probs" else torch.zeros_like(dropping.probs)
    order = weight.masked_fill(~dropped, -torch.inf).argsort(dim=0, descending=True, stable=True)
    positions = torch.arange(len(order), device=order.device)[:, None].expand_as(order)
    rank = torch.zeros_like(order).scatter(0, order, positions)
    final = retained | (dropped & (rank < extra))
    return dropping.probs * final, final
