"""Checkpointing for torchtitan: one line of its config.

::

    Trainer.Config(..., checkpoint=CheckpointManager.Config(policy=MoEvement()))
"""

from moe_ckpt.errors import MissingPackageError

try:
    import torchtitan.components.checkpointer  # noqa: F401
except ImportError as error:
    raise MissingPackageError(error.name or "torchtitan", "moe_ckpt.torchtitan", "torchtitan") from error

from moe_ckpt.torchtitan.manager import CheckpointManager

__all__ = ["CheckpointManager"]
