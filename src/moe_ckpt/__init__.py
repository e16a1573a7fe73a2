"""Checkpoint Mixture-of-Experts training every iteration, and recover it exactly or with counted loss.

PyTorch Lightning users need ``moe_ckpt.callbacks.MoECheckpoint`` and a policy from ``moe_ckpt.policies``; Megatron-Core
users need ``moe_ckpt.megatron``, and loops of your own ``moe_ckpt.attach``. A model whose MoE layers are not recognised
by themselves needs one call of ``register_moe``.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_ckpt import notices as notices  # says warnings where no logging is set up

if TYPE_CHECKING:
    from moe_ckpt.callbacks.checkpoint_io import load_from_checkpoint
    from moe_ckpt.ledger.retention import RetentionPolicy
    from moe_ckpt.memory.options import Memory
    from moe_ckpt.modeling.registry import register_moe
    from moe_ckpt.plain.checkpoint import attach
    from moe_ckpt.reading.reader import newest_step
    from moe_ckpt.tiers.host_memory import release_host_memory

# torch imports pynvml wherever some package has brought it along, and would print this above our first sentence.
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)

__version__ = "0.1.0"
__all__ = [
    "Memory",
    "RetentionPolicy",
    "__version__",
    "attach",
    "load_from_checkpoint",
    "newest_step",
    "register_moe",
    "release_host_memory",
]

_HOMES = {
    "Memory": "moe_ckpt.memory.options",
    "RetentionPolicy": "moe_ckpt.ledger.retention",
    "attach": "moe_ckpt.plain.checkpoint",
    "load_from_checkpoint": "moe_ckpt.callbacks",
    "newest_step": "moe_ckpt.reading.reader",
    "register_moe": "moe_ckpt.modeling.registry",
    "release_host_memory": "moe_ckpt.tiers.host_memory",
}
"""Imported on first use, so that the pure parts (policies, simulator, CLI help) load without torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
