"""PyTorch Lightning: ``Trainer(callbacks=[MoECheckpoint(policy=MoC(k=1), dirpath=...)])``."""

from moe_ckpt.errors import MissingPackageError

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise MissingPackageError("lightning", "moe_ckpt.callbacks", "lightning") from error

from moe_ckpt.callbacks.checkpoint_io import MoECheckpointIO
from moe_ckpt.callbacks.module_loading import load_from_checkpoint
from moe_ckpt.callbacks.moe_checkpoint import MoECheckpoint

__all__ = ["MoECheckpoint", "MoECheckpointIO", "load_from_checkpoint"]
