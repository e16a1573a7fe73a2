"""A Megatron run that begins with the weights of another, on another layout; body of ``run_ranks``."""

from __future__ import annotations

from typing import Any

import torch

from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.megatron_move import whole_tensors


def train(rank: int, world_size: int, place: str, setup: Setup) -> dict[str, str]:
    """Leaves a store of two steps; tells the whole weights."""
    from moe_ckpt import megatron
    from moe_ckpt.policies import Dense

    built = megatron_gpt.build(setup, seed=1)
    with megatron.attach(
        built.chunks, built.optimizer, built.scheduler, policy=Dense(), dirpath=f"{place}/store", when_busy="wait"
    ) as ckpt:
        ckpt.resume()
        for iteration in range(2):
            megatron_gpt.forward_backward(built, iteration)
            ckpt.before_step()
            megatron_gpt.update(built)
            ckpt.after_step(iteration + 1)
        return _weights(ckpt._host.state)


def begin(rank: int, world_size: int, place: str, setup: Setup, source: str, store: str) -> dict[str, Any]:
    """Two lives of a run with ``weights_from``: how each begins."""
    from moe_ckpt import megatron
    from moe_ckpt.policies import Dense

    found: dict[str, Any] = {}
    for life in range(2):
        built = megatron_gpt.build(setup, seed=10 + life)
        with megatron.attach(
            built.chunks,
            built.optimizer,
            built.scheduler,
            policy=Dense(),
            dirpath=f"{place}/{store}",
            weights_from=f"{place}/{source}",
            when_busy="wait",
        ) as ckpt:
            progress = ckpt.resume()
            found[f"life {life}"] = (progress.iteration, progress.restored)
            if life == 0:
                found["weights"] = _weights(ckpt._host.state)
                found["masters"] = _masters_agree(ckpt._host.state)
                found["state"] = sum(len(slot.state) for slot in ckpt._host.state._slots.values())
            megatron_gpt.forward_backward(built, progress.iteration)
            ckpt.before_step()
            megatron_gpt.update(built)
            ckpt.after_step(progress.iteration + 1)
            if life == 0:
                found["trained"] = _weights(ckpt._host.state)
    return found


def load_alone(rank: int, world_size: int, place: str, setup: Setup, source: str) -> dict[str, str]:
    """``megatron.load_weights`` into a model that has no optimizer: the whole weights after it."""
    from moe_ckpt import megatron
    from moe_ckpt.comm.communicator import make_communicator
    from moe_ckpt.megatron.inventory import take_inventory
    from moe_ckpt.megatron.training_state import MegatronTrainingState

    chunks = megatron_gpt.build(setup, seed=21).chunks
    megatron.load_weights(chunks, f"{place}/{source}")
    comm = make_communicator(60.0)
    state = MegatronTrainingState(take_inventory(chunks), None, comm)
    comm.close()
    return _weights(state)


def _weights(state: Any) -> dict[str, str]:
    return {key: told for key, told in whole_tensors(state).items() if key.startswith("model/")}


def _masters_agree(state: Any) -> bool:
    """Whether every master weight is its model weight."""
    held = {(t.key, t.offsets, tuple(t.local.shape)): t.local for t in state.tensors()}
    masters = [
        (key, ("model/" + key[0].split("/", 2)[2].removesuffix("/fp32_param"), *key[1:]))
        for key in held
        if key[0].endswith("/fp32_param")
    ]
    return bool(masters) and all(torch.equal(held[master], held[weight].float()) for master, weight in masters)
