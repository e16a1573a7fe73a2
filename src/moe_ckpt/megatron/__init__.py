"""Checkpointing for Megatron-Core: any mix of parallelism, with or without the distributed optimizer.

Four lines in the training loop::

    ckpt = megatron.attach(model_chunks, optimizer, scheduler, policy=MoC(k=1), dirpath="checkpoints")
    progress = ckpt.resume()
    for iteration in range(progress.iteration, train_iters):
        ...                                    # forward_backward_func(...)
        updated, grad_norm, _ = optimizer.step()
        ...                                    # scheduler.step(...)
        ckpt.after_step(iteration + 1, consumed_samples=consumed, updated=updated)
    ckpt.finish()

Megatron-Core itself is imported by ``attach``, not by this package.
"""

from moe_ckpt.megatron.checkpoint import MegatronCheckpoint, attach
from moe_ckpt.megatron.progress import Progress
from moe_ckpt.megatron.torch_dist import export_torch_dist, import_torch_dist
from moe_ckpt.megatron.weights import load_weights

__all__ = [
    "MegatronCheckpoint",
    "Progress",
    "attach",
    "export_torch_dist",
    "import_torch_dist",
    "load_weights",
]
