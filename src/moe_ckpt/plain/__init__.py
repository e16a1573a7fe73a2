"""Checkpointing for PyTorch loops of your own: one process, DDP, FSDP2.

::

    ckpt = moe_ckpt.attach(model, optimizer, policy=MoC(k=1), dirpath="checkpoints", stateful={"lr": scheduler})
    progress = ckpt.resume()                   # before iter(loader)
    for step in range(progress.step, steps):
        ...                                    # forward, backward, optimizer.step(), scheduler.step()
        ckpt.after_step(step + 1)
    ckpt.finish()
"""

from moe_ckpt.plain.checkpoint import PlainCheckpoint, attach
from moe_ckpt.plain.host import Position

__all__ = ["PlainCheckpoint", "Position", "attach"]
