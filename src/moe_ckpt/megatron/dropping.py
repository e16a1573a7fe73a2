"""The map of routed tokens before dropping, which ``TopKRouter`` of Megatron-Core 0.16.1 neither returns nor keeps.

It exists only as an argument of ``apply_router_token_dropping`` (router.py:588), so that name of the router's module is
wrapped while somebody needs it, and only where a router has a capacity factor. The wrapper hands the map on to whoever
said that a router of theirs is running, and passes everything through. A ``router_replay`` object on the router would
see the choice without a wrapper, but neither with sinkhorn nor with the fused router.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from moe_ckpt.errors import UnsupportedError
from moe_ckpt.megatron.compat import look_up

ROUTER = "megatron.core.transformer.moe.router"
DROPPING = "apply_router_token_dropping"


class Watch:
    """What one counter learns: the map before dropping of the router that is running, bool [tokens, experts].

    running: set by the owner in the router's forward pre-hook, unset in its forward hook, which takes ``assigned``.
    was_attached: whether the maps have ever been asked for.
    """

    def __init__(self) -> None:
        self.running = False
        self.assigned: torch.Tensor | None = None
        self.was_attached = False


_watches: list[Watch] = []
_wrapper: Callable[..., Any] | None = None
_unwrapped: Callable[..., Any] | None = None


def attach(watch: Watch) -> None:
    """Show ``watch`` what goes into dropping; the first one wraps the name.

    Raises:
        UnsupportedError: the router's module has no such name.
    """
    global _wrapper, _unwrapped
    found = look_up(ROUTER, DROPPING, version())
    if not _watches and found is not _wrapper:
        _wrapper, _unwrapped = _observed(found), found
        setattr(importlib.import_module(ROUTER), DROPPING, _wrapper)
    watch.was_attached = True
    _watches.append(watch)


def detach(watch: Watch) -> None:
    """Undo ``attach``; nothing for a watch that is not attached. The last one puts back what the name was."""
    if watch not in _watches:
        return
    _watches.remove(watch)
    module = importlib.import_module(ROUTER)
    # Where somebody has wrapped the wrapper since, theirs stays: with nobody watching, ours only passes on.
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


def version() -> str:
    """Of the megatron-core that is imported."""
    return str(getattr(importlib.import_module("megatron.core"), "__version__", "of unknown version"))


def moved(name: str, expected: str) -> UnsupportedError:
    """The error for a hook point that is not what it was."""
    return UnsupportedError(
        f"{name} of megatron-core {version()} is not what the counter of routed tokens hooks into: {expected}. It was "
        "written against megatron-core 0.16.1; install that release, or a newer moe_ckpt."
    )
