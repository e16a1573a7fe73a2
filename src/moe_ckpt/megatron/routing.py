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

CUDA graphs replay captured kernels and run no hooks, so the hooks add to tables on the device that live as
long as the counter: the additions are captured with the router. What passes must not count is told in two ways:

* While Megatron-Core captures (``is_graph_capturing``), passes before a capture, on samples, run eagerly and count
  nothing. In a capture, nothing is computed.
* Graphs of ``cuda_graph_impl="local"`` are replayed in validation and in recomputation too. A number on the device, by
  which they multiply, is 1 within the forward passes in training of a model chunk, else 0.

Nothing here communicates or waits for the device; each training forward pass of a router gets a few small kernels.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.megatron.compat import Wrapped, look_up, megatron_core, runs_on_samples, version
from moe_ckpt.modeling.routing import Mask, clear, counts_on_host, is_recomputed, soft_on_host, step_tokens
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
        adjust: Returns another result, (probs, map), while ``running``; None for counters.
        running: The boost's router is in its forward pass.
        assigned: The map before dropping of the newest router that dropped, bool [tokens, experts].
    """

    def __init__(self) -> None:
        self.adjust: Callable[[Dropping], tuple[torch.Tensor, torch.Tensor]] | None = None
        self.running = False
        self.assigned: torch.Tensor | None = None


_watches: list[Watch] = []
_wrapped = ExitStack()
"""Removes the wrapper of dropping."""


def attach(watch: Watch) -> None:
    """Shows ``watch`` the arguments of dropping; the first watch wraps the name.

    Raises:
        UnsupportedError: The router's module has no such name.
    """
    look_up(ROUTER, DROPPING)
    if not _watches:
        _wrapped.callback(Wrapped(importlib.import_module(ROUTER), DROPPING, _observed).close)
    _watches.append(watch)


def detach(watch: Watch) -> None:
    """Undoes ``attach``, if ``watch`` is attached. With the last watch the wrapper is removed."""
    if watch in _watches:
        _watches.remove(watch)
    if not _watches:
        _wrapped.close()


def _observed(dropping: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    routing_map = args[1] if len(args) > 1 else kwargs.get("routing_map")
    for watch in _watches:
        watch.assigned = routing_map
    result = dropping(*args, **kwargs)
    for watch in _watches:
        if watch.running and watch.adjust is not None:
            result = watch.adjust(_described(dropping, args, kwargs, result))
    return result


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


class RouterCounter:
    """Tokens that this rank's routers send to each expert of the whole model. Used on the training thread.

    Routers in training mode count, but not in the second forward pass of activation recomputation. Counts of
    micro-batches add up until ``take``. Construct it after any forward hook that replaces a router's result.

    Args:
        routers: (index of the MoE layer in the whole model, its TopKRouter) of this rank's chunks. Rows of other layers
            stay 0.
        layers: L of the whole model.
        experts: E, the largest number of experts of any layer.
        chunks: Those of the model. Routers run within them, except where graphs are captured.
        soft: Add up the gate's weights, too.
        frozen: ``[L, E]`` experts that no update changes: none of their tokens is applied. None: there are none.
        stopwatch: Counts the time that hooks take.

    Raises:
        UnsupportedError: Megatron-Core differs from the facts above, or one CUDA graph is captured of a whole
            iteration. Forward passes raise it where only they can tell.
    """

    def __init__(
        self,
        routers: Sequence[tuple[int, Any]],
        layers: int,
        experts: int,
        *,
        chunks: Sequence[nn.Module] = (),
        soft: bool = False,
        frozen: Mask | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        counted = (stopwatch or Stopwatch()).around
        for _, router in routers:
            _check_router(router)
        self._shape, self._frozen = (layers, experts), frozen
        self._applied = {at: _table(router) for at, router in routers}
        self._dropped = {at: _table(router) for at, router in routers}
        self._soft = {at: _table(router, torch.float64) for at, router in routers} if soft else None
        self._drops = any(_may_drop(router) for _, router in routers)
        self._is_warned = False
        self._watch = Watch()
        if routers:
            attach(self._watch)
        # No hook before a router's forward pass: Megatron-Core replays no graph of a module that has one.
        self._handles: list[RemovableHandle] = [
            router.register_forward_hook(counted(self._after(at)), with_kwargs=True) for at, router in routers
        ]
        # What counts now, in graphs: see the module's docstring.
        self._factor = next(iter(self._applied.values()), torch.ones(0, dtype=torch.int64)).new_ones(())
        if any(router.config.cuda_graph_impl == "local" for _, router in routers):  # replayed in validation, too
            self._factor.zero_()
            for chunk in chunks:
                self._handles.append(chunk.register_forward_pre_hook(counted(self._opens)))
                self._handles.append(chunk.register_forward_hook(counted(self._closes), always_call=True))

    def take(self, iteration: int | None = None) -> Deferred[StepTokens]:
        """Returns the counts since the last ``take`` or ``discard``, without padding, and resets them.

        ``assigned`` is None where no expert is frozen, until a router here has a capacity factor. Only ``result()``
        waits.

        Args:
            iteration: One that made an update: ``result()`` warns, once, if this rank counted nothing. None: no
                warning.
        """
        applied = counts_on_host(self._applied, self._shape)
        dropped = counts_on_host(self._dropped, self._shape) if self._drops else None
        soft = None if self._soft is None else soft_on_host(self._soft, self._shape)
        self.discard()

        def tokens() -> StepTokens:
            arrived, weights = applied.result(), None if soft is None else soft.result()
            assigned = None if dropped is None else arrived + dropped.result()
            if iteration is not None and not (arrived if assigned is None else assigned).any():
                self._warn(iteration)
            return step_tokens(arrived, weights, assigned, self._frozen)

        return Deferred(tokens)

    def _warn(self, iteration: int) -> None:
        """Warns once, on one rank of each pipeline stage, that no tokens were counted."""
        if self._is_warned or not self._applied:
            return
        self._is_warned = True
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
        clear([*self._applied.values(), *self._dropped.values(), *(self._soft or {}).values()])

    def close(self) -> None:
        """Removes every hook, and the wrapper if no other counter needs it. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._factor.zero_()  # captured graphs go on adding
        detach(self._watch)

    def _opens(self, chunk: nn.Module, args: tuple[Any, ...]) -> None:
        self._factor.fill_(int(chunk.training))

    def _closes(self, chunk: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._factor.zero_()

    def _after(self, at: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            assigned, self._watch.assigned = self._watch.assigned, None
            if not router.training or is_recomputed() or runs_on_samples():
                return
            probs, applied = _result(router, output)
            real = _real_tokens(args, kwargs, applied)
            if _may_drop(router):
                self._drops = True
                assigned = _before_dropping(assigned, applied)
                self._add(self._dropped[at], _masked(assigned & ~applied, real))
                applied = assigned & applied
            applied = _masked(applied, real)
            self._add(self._applied[at], applied)
            if self._soft is not None:
                self._add(self._soft[at], probs.detach().masked_fill(~applied, 0))

        return hook

    def _add(self, table: torch.Tensor, entries: torch.Tensor) -> None:
        """Adds the column sums of ``entries`` [tokens, experts] to one layer's table."""
        table[:-1].addcmul_(entries.sum(dim=0, dtype=table.dtype), self._factor)


def _table(router: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Returns zeros for the router's experts, on its device, with an entry more (``counts_on_host``)."""
    table: torch.Tensor = router.weight.new_zeros(router.config.num_moe_experts + 1, dtype=dtype, requires_grad=False)
    return table


def _may_drop(router: Any) -> bool:
    """Returns whether Megatron-Core may drop tokens in the router's next forward pass."""
    return router.config.moe_expert_capacity_factor is not None


def _masked(entries: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    return entries if real is None else entries & real[:, None]


def _result(router: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a router's checked output: gate weights and a bool map, both [tokens, experts]."""
    probs, routing_map = output if isinstance(output, tuple) and len(output) == 2 else (None, None)
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
    """Returns a mask [tokens], False at padding; None without a padding mask."""
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


def graphs_capture_router(config: Any) -> bool:
    """Returns whether CUDA graphs may capture the router.

    In graphs of Megatron-Core's own ("local"), "attn" is the whole layer, except in a ``HybridModel``.
    """
    if config.cuda_graph_impl == "none":
        return False
    without_router = {"mlp", "mamba"} if config.cuda_graph_impl == "local" else {"attn", "mlp", "mamba"}
    return bool(_captured(config) - without_router)


def _captured(config: Any) -> set[str]:
    """Returns the parts that CUDA graphs capture, by name; an empty list means the whole layer."""
    if config.cuda_graph_impl == "full_iteration":  # since 0.18; before, a part
        return {"full_iteration"}
    return {part.name for part in getattr(config, _graphed(config))} or {"layer"}


def _graphed(config: Any) -> str:
    return "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"  # before 0.18


def _check_graphs(config: Any) -> None:
    """Raises ``UnsupportedError`` if CUDA graphs replace Python code that this package has to run."""
    how = config.cuda_graph_impl
    if how != "none" and "full_iteration" in _captured(config):
        raise UnsupportedError(
            f"cuda_graph_impl={how!r} captures a whole iteration in one CUDA graph, whose replay runs no Python "
            "between forward passes: training cannot begin at the first of them, and nothing can be logged or left "
            "out in between. Set cuda_graph_impl to 'transformer_engine' or 'local', with "
            f"{_graphed(config)} such as attn, moe_router and moe_preprocess."
        )
    if how == "local" and config.overlap_moe_expert_parallel_comm and graphs_capture_router(config):
        raise UnsupportedError(
            "cuda_graph_impl='local' with overlap_moe_expert_parallel_comm: graphs that capture the router are "
            "replayed in validation too, and with that schedule no forward pass of a model chunk says which is which, "
            "so its tokens would be counted. Set cuda_graph_impl to 'transformer_engine'."
        )
