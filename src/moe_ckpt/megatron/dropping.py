"""The map of routed tokens before dropping, which ``TopKRouter`` of Megatron-Core 0.16.1 neither returns nor keeps.

It exists only as an argument of ``apply_router_token_dropping`` (router.py:588), so that name of the router's module is
wrapped as long as a counter watches a router with a capacity factor. The wrapper shows the map to the watch of the
running router. (A ``router_replay`` object on the router would miss the choices of sinkhorn and of the fused router.)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.megatron.compat import look_up, version

ROUTER = "megatron.core.transformer.moe.router"
DROPPING = "apply_router_token_dropping"


class Watch:
    """What one counter sees of dropping.

    Attributes:
        running: A router of the counter runs: set in its forward pre-hook, unset in its forward hook.
        assigned: The running router's map before dropping, bool [tokens, experts].
        was_attached: The watch has ever been attached.
    """

    def __init__(self) -> None:
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
    found = look_up(ROUTER, DROPPING)
    if not _watches and found is not _wrapper:
        _wrapper, _unwrapped = _observed(found), found
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
        return dropping(*args, **kwargs)

    return observed


def moved(name: str, expected: str) -> UnsupportedError:
    """Returns the error for a hook point that has changed."""
    return UnsupportedError(
        f"{name} of megatron-core {version()} is not what the counter of routed tokens hooks into: {expected}. It was "
        "written against megatron-core 0.16.1; install that release, or a newer moe_ckpt."
    )
