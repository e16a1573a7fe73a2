"""Counts, per MoE layer and expert, the tokens that the routers of this rank's model chunks send in training.

Facts of Megatron-Core 0.16.1 to 0.19.2 on which this rests (paths and lines of 0.16.1, in ``core/transformer/moe``):

* ``TopKRouter.forward`` (router.py:639) returns ``(probs, routing_map)``, both [tokens, experts of the layer], after
  dropping. A forward hook reads them, whatever the token dispatcher and the expert-parallel layout.
* The map before dropping exists only as an argument of ``apply_router_token_dropping`` (router.py:588), so that name of
  the router's module is wrapped as long as a counter watches a router with a capacity factor. The wrapper shows the map
  to the watches of the running router, one of which may change the result (a capacity boost). (A ``router_replay``
  object on the router would miss the choices of sinkhorn and of the fused router.)
* With ``moe_pad_expert_input_to_capacity`` the returned map is the capacity's mask with padding; the tokens sent are
  those in both maps.
* ``padding_mask`` [sequence, batch] is True at padding (moe_utils.py:157, :794); docstrings in router.py say the
  opposite.

Each token is routed on one rank only. With tensor parallelism this is so because ``MoELayer.forward`` raises ValueError
in training without sequence parallelism (moe_layer.py:379), with which the hidden states that reach the router are this
rank's part of the sequence: nothing gathers them before routing (moe_layer.py:252), the dispatchers do afterwards. So
the sum over all ranks that hold a layer (tensor, context and data parallel ones) counts each token once.

Nothing here communicates or waits for the device; each training forward pass of a router gets a few small kernels.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.megatron.compat import look_up, megatron_core, version
from moe_ckpt.modeling.routing import Mask, clear, count_tokens, counts_on_host, soft_on_host
from moe_ckpt.notices import announce
from moe_ckpt.run.agreement import Deferred, StepTokens
from moe_ckpt.stopwatch import Stopwatch

ROUTER = "megatron.core.transformer.moe.router"
DROPPING = "apply_router_token_dropping"


@dataclass(frozen=True, eq=False)
class Dropping:
    """One call of dropping, with the capacity factor of the router.

    Attributes:
        probs: Gate weights before it, [tokens, experts].
        routing_map: Before it, bool [tokens, experts].
        retained: After it, likewise.
        capacity: Of each expert.
        policy: "probs" or "position": whose tokens are kept.
    """

    probs: torch.Tensor
    routing_map: torch.Tensor
    retained: torch.Tensor
    capacity: int
    policy: str


class Watch:
    """One counter's view of dropping, or one router's boost.

    Attributes:
        adjust: Returns another result, (probs, map), for the running router; None for counters.
        running: A router of the counter runs: set in its forward pre-hook, unset in its forward hook.
        assigned: The running router's map before dropping, bool [tokens, experts].
        was_attached: The watch has ever been attached.
    """

    def __init__(self) -> None:
        self.adjust: Callable[[Dropping], tuple[torch.Tensor, torch.Tensor]] | None = None
        self.running = False
        self.assigned: torch.Tensor | None = None
        self.was_attached = False


_watches: list[Watch] = []
_wrapper: Callable[..., Any] | None = None
_unwrapped: Callable[..., Any] | None = None


def attach(watch: Watch) -> None:
    """Shows ``watch`` the arguments of dropping; the first watch wraps the name.

    Raises:
        UnsupportedError: The router's module has no such name.
    """
    global _wrapper, _unwrapped
    dropping = look_up(ROUTER, DROPPING)
    if not _watches and dropping is not _wrapper:
        _wrapper, _unwrapped = _observed(dropping), dropping
        setattr(importlib.import_module(ROUTER), DROPPING, _wrapper)
    watch.was_attached = True
    _watches.append(watch)


def detach(watch: Watch) -> None:
    """Undoes ``attach``, if ``watch`` is attached; the last one removes the wrapper."""
    if watch not in _watches:
        return
    _watches.remove(watch)
    module = importlib.import_module(ROUTER)
    # A wrapper that others have put around ours since stays: without watches ours only calls through.
    if not _watches and getattr(module, DROPPING) is _wrapper:
        setattr(module, DROPPING, _unwrapped)


def _observed(dropping: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dropping)
    def observed(*args: Any, **kwargs: Any) -> Any:
        routing_map = args[1] if len(args) > 1 else kwargs.get("routing_map")
        for watch in _watches:
            if watch.running:
                watch.assigned = routing_map
        result = dropping(*args, **kwargs)
        for watch in _watches:
            if watch.running and watch.adjust is not None:
                result = watch.adjust(_described(dropping, args, kwargs, result))
        return result

    return observed


def _described(dropping: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> Dropping:
    named = inspect.signature(dropping).bind(*args, **kwargs)
    named.apply_defaults()
    arguments = named.arguments
    try:
        probs, factor = arguments["routing_probs"], arguments["capacity_factor"]
        tokens = len(probs) * arguments["router_topk"]
        capacity = look_up("megatron.core.transformer.moe.moe_utils", "get_capacity")(
            num_tokens=tokens, num_experts=probs.shape[1], capacity_factor=factor
        )
        return Dropping(probs, arguments["routing_map"], result[1], capacity, arguments["drop_policy"])
    except KeyError as error:
        raise changed_hook(f"{ROUTER}.{DROPPING}", f"a function with an argument {error}") from None


def changed_hook(name: str, expected: str) -> UnsupportedError:
    """Returns the error for a hook point that has changed."""
    return UnsupportedError(
        f"{name} of megatron-core {version()} is not what the counter of routed tokens expects: {expected}. The "
        "counter was tested with megatron-core 0.16.1 and 0.19.2; install one of them, or a newer moe_ckpt."
    )


_GRAPHS_WITHOUT_ROUTER = frozenset({"attn", "mlp", "mamba"})


class RouterCounter:
    """Tokens that this rank's routers send to each expert of the whole model. Used on the training thread.

    Counts routers in training mode, so neither validation nor the second forward pass of activation recompute. Counts
    of micro-batches add up until ``take``. Construct it after any forward hook that replaces a router's result.

    Args:
        routers: (index of the MoE layer in the whole model, its TopKRouter) of this rank's chunks. Rows of other layers
            stay 0.
        layers: L of the whole model.
        experts: E, the largest number of experts of any layer.
        soft: Add up the gate's weights too.
        frozen: ``[L, E]`` experts that no update changes: none of their tokens is applied. None: there are none.
        stopwatch: Counts what hooks take.

    Raises:
        UnsupportedError: Megatron-Core differs from the facts above, or the routers are captured in CUDA graphs, whose
            replay runs no hooks. Forward passes raise it where only they can tell.
    """

    def __init__(
        self,
        routers: Sequence[tuple[int, nn.Module]],
        layers: int,
        experts: int,
        *,
        soft: bool = False,
        frozen: Mask | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        counted = (stopwatch or Stopwatch()).around
        for _, router in routers:
            _check_router(router)
        self._shape = (layers, experts)
        self._soft_wanted, self._frozen = soft, frozen
        self._applied: dict[int, torch.Tensor] = {}
        self._dropped: dict[int, torch.Tensor] = {}
        self._soft: dict[int, torch.Tensor] = {}
        self._watch = Watch()
        self._routed = self._warned = False  # in training mode, since the last iteration; that none did
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        if any(_may_drop(router) for _, router in routers):
            attach(self._watch)
        for at, router in routers:
            self._handles.append(router.register_forward_pre_hook(counted(self._before)))
            self._handles.append(router.register_forward_hook(counted(self._after(at)), with_kwargs=True))

    def take(self) -> Deferred[StepTokens]:
        """Returns the counts since the last ``take`` or ``discard``, without padding, and resets them.

        ``assigned`` is None where no expert is frozen, until a router here has a capacity factor. Only ``result()``
        waits.
        """
        applied = counts_on_host(self._applied, self._shape)
        dropped = counts_on_host(self._dropped, self._shape) if self._watch.was_attached else None
        soft = soft_on_host(self._soft, self._shape) if self._soft_wanted else None
        self.discard()

        def tokens() -> StepTokens:
            arrived, weights = applied.result(), None if soft is None else soft.result()
            assigned = None if dropped is None else arrived + dropped.result()
            if self._frozen is None:
                return StepTokens(arrived, weights, assigned)
            return StepTokens(np.where(self._frozen, 0, arrived), weights, arrived if assigned is None else assigned)

        return Deferred(tokens)

    def iteration_ends(self, iteration: int, *, updated: bool) -> None:
        """Warns once if an update was made and no router of this rank ran in training mode since the last iteration.

        Waits for nothing: hooks note it on the host. One rank of each pipeline stage speaks.

        Args:
            iteration: Iterations done.
            updated: False where nothing is counted: skipped updates, and iterations that are computed again.
        """
        routed, self._routed = self._routed, False
        if routed or self._warned or not updated or not self._handles:
            return
        self._warned = True
        state = megatron_core().parallel_state
        if state.get_data_parallel_rank(with_context_parallel=True) or state.get_tensor_model_parallel_rank():
            return
        announce(
            "iteration %d updated the weights, but no router of this rank routed a token in training mode, and only "
            "those count: lost tokens stay 0, and policies that choose experts by their tokens cannot. Call "
            "model.train() on every model chunk before training, and again after each evaluation",
            iteration,
            level=logging.WARNING,
        )

    def discard(self) -> None:
        """Resets the counts, which led to no optimizer step."""
        clear([*self._applied.values(), *self._dropped.values(), *self._soft.values()])

    def close(self) -> None:
        """Removes every hook, and the wrapper if no other counter needs it. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        detach(self._watch)

    def _before(self, router: nn.Module, args: tuple[Any, ...]) -> None:
        self._watch.running, self._watch.assigned = router.training, None
        if router.training and not self._watch.was_attached and _may_drop(router):
            attach(self._watch)  # the factor was set after the counter was made: Megatron reads it at every call

    def _after(self, at: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            assigned = self._watch.assigned
            self._watch.running, self._watch.assigned = False, None
            if router.training:
                self._routed = True
                probs, routing_map = _result(router, output)
                real = _real_tokens(args, kwargs, routing_map)
                if _may_drop(router):
                    assigned = _before_dropping(assigned, routing_map)
                    self._add(self._dropped, at, _masked(assigned & ~routing_map, real))
                    routing_map = assigned & routing_map
                self._count(at, probs, _masked(routing_map, real))

        return hook

    def _count(self, at: int, probs: torch.Tensor, applied: torch.Tensor) -> None:
        self._add(self._applied, at, applied)
        if self._soft_wanted:
            self._add(self._soft, at, probs.detach().masked_fill(~applied, 0), torch.float64)

    def _add(
        self, tables: dict[int, torch.Tensor], at: int, entries: torch.Tensor, dtype: torch.dtype = torch.int64
    ) -> None:
        """Adds the column sums of ``entries`` [tokens, experts] to one layer's table, on their device."""
        table = tables.get(at)
        if table is None:
            table = torch.zeros(entries.shape[1] + 1, dtype=dtype, device=entries.device)
        tables[at] = table = table.to(entries.device)
        count_tokens(table, entries.sum(dim=0, dtype=dtype))


def _may_drop(router: Any) -> bool:
    """Returns whether Megatron-Core may drop tokens in the router's next forward pass."""
    return router.config.moe_expert_capacity_factor is not None


def _masked(entries: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    return entries if real is None else entries & real[:, None]


def _result(router: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a router's checked output: gate weights and a bool map, both [tokens, experts]."""
    pair = output if isinstance(output, tuple) and len(output) == 2 else (None, None)
    probs, routing_map = pair
    if (
        not isinstance(probs, torch.Tensor)
        or not isinstance(routing_map, torch.Tensor)
        or routing_map.dtype != torch.bool
        or probs.shape != routing_map.shape
        or routing_map.shape[1:] != (router.config.num_moe_experts,)
    ):
        raise changed_hook(f"{ROUTER}.TopKRouter.forward", "(probs, bool routing_map), both [tokens, num_moe_experts]")
    return probs, routing_map


def _before_dropping(assigned: torch.Tensor | None, routing_map: torch.Tensor) -> torch.Tensor:
    if assigned is None or assigned.shape != routing_map.shape or assigned.dtype != torch.bool:
        raise changed_hook(
            f"{ROUTER}.{DROPPING}",
            "called by the router's forward with the bool map [tokens, experts] before dropping",
        )
    return assigned


def _real_tokens(args: tuple[Any, ...], kwargs: dict[str, Any], routing_map: torch.Tensor) -> torch.Tensor | None:
    """Returns True where a token is no padding, [tokens]; None without a padding mask."""
    padding = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
    if padding is None:
        return None
    if padding.numel() != routing_map.shape[0]:
        raise UnsupportedError(
            f"padding_mask of {tuple(padding.shape)} reaches a router that routes {routing_map.shape[0]} tokens, so "
            "padding and tokens cannot be distinguished. With sequence parallelism Megatron-Core cuts the mask on the "
            "first pipeline stage only: give the later stages this tensor-parallel rank's part of it."
        )
    real: torch.Tensor = ~padding.reshape(-1).bool()
    return real


def _check_router(router: Any) -> None:
    kind: Any = type(router)
    if not issubclass(kind, look_up(ROUTER, "TopKRouter")):
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__qualname__} is no {ROUTER}.TopKRouter (megatron-core {version()}), so what "
            "it routes cannot be counted. Use TopKRouter or a subclass of it."
        )
    if list(inspect.signature(kind.forward).parameters)[:3] != ["self", "input", "padding_mask"]:
        raise changed_hook(f"{kind.__module__}.{kind.__qualname__}.forward", "a method (self, input, padding_mask)")
    _check_graphs(router.config)


def _check_graphs(config: Any) -> None:
    """Raises ``UnsupportedError`` where CUDA graphs capture the router. An empty list means the whole layer."""
    how = getattr(config, "cuda_graph_impl", "none")
    if how == "none":
        return
    option = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"  # before 0.18
    parts: Sequence[Any] = getattr(config, option) if how != "full_iteration" else ()
    captured = {getattr(part, "name", part) for part in parts or ("full",)}
    if captured - _GRAPHS_WITHOUT_ROUTER:
        raise UnsupportedError(
            f"cuda_graph_impl={how!r} with {option} {sorted(captured)} captures the router, and the replay of a CUDA "
            "graph runs no hooks, so no tokens would be counted. Set cuda_graph_impl to 'local' or "
            f"'transformer_engine', and limit {option} to {', '.join(sorted(_GRAPHS_WITHOUT_ROUTER))}."
        )
