"""Checkpointing for ``transformers.Trainer``.

::

    trainer = Trainer(..., callbacks=[MoECheckpointCallback(MoEvement(), dirpath="checkpoints/my_run")])
    trainer.train()                            # start the same script again after a failure
"""

from moe_ckpt.errors import MissingPackageError

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise MissingPackageError(error.name or "transformers", "moe_ckpt.transformers", "transformers") from error

from moe_ckpt.transformers.callback import MoECheckpointCallback

__all__ = ["MoECheckpointCallback"]
