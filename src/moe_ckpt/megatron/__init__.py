"""Checkpointing for Megatron-Core: any mix of parallelism, with or without the distributed optimizer.

One line before ``pretrain(...)`` of Megatron-LM's own script::

    megatron.install(policy=MoC(k=1), dirpath="checkpoints")

Four in a training loop of your own::

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

from moe_ckpt.megatron.checkpoint import MegatronCheckpoint, attach, load_weights
from moe_ckpt.megatron.host import Progress
from moe_ckpt.megatron.megatron_lm import MegatronLM, install
from moe_ckpt.megatron.torch_dist import export_torch_dist, import_torch_dist

__all__ = [
    "MegatronCheckpoint",
    "MegatronLM",
    "Progress",
    "attach",
    "export_torch_dist",
    "import_torch_dist",
    "install",
    "load_weights",
]
