"""Checkpoint Mixture-of-Experts training every iteration, and recover it exactly or with counted loss.

PyTorch Lightning users need ``moe_ckpt.callbacks.MoECheckpoint`` and a policy from ``moe_ckpt.policies``;
a model whose MoE layers are not recognised by themselves needs one call of ``register_moe``.
"""

from typing import TYPE_CHECKING, Any

from moe_ckpt import notices as notices  # says warnings where no logging is set up

if TYPE_CHECKING:
    from moe_ckpt.modeling.registry import register_moe

__version__ = "0.1.0"
__all__ = ["__version__", "register_moe"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that the pure parts (policies, simulator, CLI help) load without torch."""
    if name == "register_moe":
        from moe_ckpt.modeling.registry import register_moe

        return register_moe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
