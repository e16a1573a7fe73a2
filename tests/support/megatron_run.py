"""One life of a Megatron run with checkpoints, for tests that kill it and start it again; body of ``run_ranks``."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup


@dataclass(frozen=True)
class Life:
    """What one start of the job does.

    policy: as ``moe_ckpt.policies`` names it, with its arguments.
    seed: of the model's initial weights. Lives of one run get different ones: what is right must come from the store.
    kill: (rank, iteration, phase) of a SIGKILL: while training that iteration ("train"), or when the engine is in that
        phase (see ``on_phase``) for the first time from that iteration on.
    """

    store: str
    steps: int
    setup: Setup = field(default_factory=Setup)
    policy: tuple[str, dict[str, Any]] = ("MoC", {"k": 1})
    seed: int = 1
    kill: tuple[int, int, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def live(rank: int, world_size: int, life: Life) -> dict[str, Any]:
    """Train to ``life.steps``. What is returned tells everything that must be alike in two equal runs."""
    random.seed(life.seed)
    np.random.seed(life.seed)
    built = megatron_gpt.build(life.setup, life.seed)
    import moe_ckpt.policies
    from moe_ckpt import megatron

    name, arguments = life.policy
    at = {"iteration": 0}

    def on_phase(phase: str) -> None:
        if life.kill is not None and (rank, phase) == (life.kill[0], life.kill[2]) and at["iteration"] >= life.kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    ckpt = megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=getattr(moe_ckpt.policies, name)(**arguments),
        dirpath=life.store,
        on_phase=on_phase,
        **{"when_busy": "wait", "timeout_secs": 60.0, **life.options},
    )
    progress = ckpt.resume()
    built.consumed_samples = progress.consumed_samples
    losses, records = {}, {}
    for iteration in range(progress.iteration, life.steps):
        at["iteration"] = iteration + 1
        losses[iteration + 1] = megatron_gpt.forward_backward(built, iteration)
        on_phase("train")
        ckpt.before_step()
        made, _ = megatron_gpt.update(built)
        records[iteration + 1] = ckpt.after_step(iteration + 1, consumed_samples=built.consumed_samples, updated=made)
    told = describe(ckpt, built)
    ckpt.finish()
    return told | {"losses": losses, "records": records, "progress": progress, "restored_step": ckpt.restored_step}


def describe(ckpt: Any, built: megatron_gpt.Built) -> dict[str, Any]:
    """Digests of every tensor of this rank's state, and of random numbers and schedules."""
    state = ckpt._state
    books = ckpt.session.books
    tensors: dict[str, str] = {}
    for tensor in state.tensors():
        tensors[f"{tensor.key}@{list(tensor.offsets)}{list(tensor.local.shape)}"] = digest(tensor.local)
    generators = [torch.get_rng_state(), *_tracker_states()]
    return {
        "tensors": tensors,
        "steps": state.plain()["optimizer"]["step"],
        "groups": [(group["lr"], group["weight_decay"]) for group in state.plain()["optimizer"]["groups"]],
        "buffers": {name: digest(buffer) for name, buffer in state.plain()["buffers"].items()},
        "rng": [digest(each) for each in generators] + [random.getrandbits(64), int(np.random.randint(1 << 60))],
        "scheduler": built.scheduler.state_dict(),
        "consumed": built.consumed_samples,
        "saved": books.tokens.to_dict(),
        "ages": books.expert_ages(ckpt.session.books.last_step or 0).tolist(),
        "lost": books.tokens.lost_tokens,
        "routed": books.tokens.routed_tokens,
        "plt": books.tokens.plt,
    }


def _tracker_states() -> list[torch.Tensor]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return list(get_cuda_rng_tracker().get_states().values())


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


EXACT = ("tensors", "steps", "groups", "buffers", "rng", "scheduler", "consumed")
"""What two equal runs have alike on every rank."""
