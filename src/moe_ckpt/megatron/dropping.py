"""The map of routed tokens before dropping, which ``TopKRouter`` of Megatron-Core neither returns nor keeps.

It exists only as an argument of ``apply_router_token_dropping`` (router.py:588), so that name of the router's module is
wrapped as long as a counter watches a router with a capacity factor. The wrapper shows the map to the watches of the
running router, one of which may change the result (a capacity boost). (A ``router_replay`` object on the router would
miss the choices of sinkhorn and of the fused router.)
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.megatron.compat import look_up, version

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
