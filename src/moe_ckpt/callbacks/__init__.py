"""PyTorch Lightning: ``Trainer(callbacks=[MoECheckpoint(policy=MoC(k=1), dirpath=...)])``."""

from moe_ckpt.errors import MissingPackageError, UnsupportedError

try:
    import lightning.pytorch
except ImportError as error:
    raise MissingPackageError("lightning", "moe_ckpt.callbacks", "lightning") from error
if tuple(map(int, lightning.__version__.split(".")[:2])) < (2, 6):
    raise UnsupportedError(
        f"moe_ckpt.callbacks needs Lightning 2.6 or newer, and {lightning.__version__} is installed: "
        'pip install --upgrade "lightning>=2.6"'
    )

from moe_ckpt.callbacks.checkpoint_io import MoECheckpointIO, load_from_checkpoint
from moe_ckpt.callbacks.moe_checkpoint import MoECheckpoint

__all__ = ["MoECheckpoint", "MoECheckpointIO", "load_from_checkpoint"]
