"""Says whether torch.compile makes what a model runs: other gradients are another program then, rounded otherwise."""

from __future__ import annotations

import sys

from torch import nn

_DYNAMO = "torch._dynamo.utils"


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module of ``model`` is compiled: wrapped, in place (``module.compile()``) or by its forward.

    Functions of other modules that are compiled cannot be told before they are called; see ``has_compiled``.
    """
    return any(
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process so far."""
    dynamo = sys.modules.get(_DYNAMO)
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])
