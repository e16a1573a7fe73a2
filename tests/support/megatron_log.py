"""Lives of Megatron runs that log, without the library's run_ledger, what a recount needs; body of ``start_ranks``.

Per optimizer step and rank: the tokens that reached each local expert (counted at the experts' own input, not at the
router), and a digest of every local expert and of everything else, found through Megatron's own attributes. Beside it
stands what the library said of the step. Lines are written at once, so they outlive a SIGKILL.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from tests.support import megatron_gpt
from tests.support.constants import policy_of
from tests.support.megatron_gpt import Setup

PER_RANK = ("nbytes", "stall_secs", "agree_secs", "waited", "waits")
"""Fields of a record that differ between ranks."""


@dataclass(frozen=True)
class Case:
    """One run, in as many lives as it takes.

    kills: (rank, iteration) of a SIGKILL while that iteration is computed, one per life; the last life has none.
    faults: iterations at which all ranks fail and go on in the same process, in the first life.
    """

    name: str
    setup: Setup
    policy: tuple[str, dict[str, Any]]
    steps: int = 8
    kills: tuple[tuple[int, int], ...] = ()
    faults: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class Fault(Exception):
    """A failure that leaves the processes alive."""


def lives(rank: int, world_size: int, root: str, todo: tuple[tuple[Case, int], ...]) -> None:
    """The (case, life) given, one after the other; a life that is killed is the last."""
    for case, life in todo:
        seed = 1 + 10 * life
        for number, fault_at in enumerate((*case.faults, None) if life == 0 else (None,)):
            kill = case.kills[life] if life < len(case.kills) and fault_at is None else None
            if number:
                seed += 1
            try:
                _life(rank, os.path.join(root, case.name), case, seed, kill, fault_at)
            except Fault:
                continue


def _life(rank: int, place: str, case: Case, seed: int, kill: tuple[int, int] | None, fault_at: int | None) -> None:
    os.makedirs(place, exist_ok=True)
    random.seed(seed)
    np.random.seed(seed)
    built = megatron_gpt.build(case.setup, seed)
    ckpt = attached(built, case, os.path.join(place, "store"))
    tally = Tally(built)
    with open(os.path.join(place, f"rank_{rank}.jsonl"), "a") as log:
        progress = ckpt.resume()
        built.consumed_samples = progress.consumed_samples
        _write(log, event="begin", step=progress.iteration, digests=digests(built), books=_books(ckpt, 0))
        for iteration in range(progress.iteration + 1, case.steps + 1):
            megatron_gpt.forward_backward(built, iteration - 1)
            if kill == (rank, iteration):
                os.kill(os.getpid(), signal.SIGKILL)
            if iteration == fault_at:
                ckpt.close()
                raise Fault
            ckpt.before_step()
            made, _ = megatron_gpt.update(built)
            record = ckpt.after_step(iteration, consumed_samples=built.consumed_samples, updated=made)
            _write(
                log,
                event="step",
                step=iteration,
                tokens=tally.take(),
                digests=digests(built),
                record=asdict(record),
                books=_books(ckpt, iteration),
            )
        ckpt.finish()
        _write(log, event="end", books=_books(ckpt, case.steps))


def attached(built: megatron_gpt.Built, case: Case, store: str) -> Any:
    from moe_ckpt import megatron
    from moe_ckpt.ledger.retention import RetentionPolicy

    name, arguments = case.policy
    return megatron.attach(
        built.chunks,
        built.optimizer,
        built.scheduler,
        policy=policy_of(name, arguments),
        dirpath=store,
        **{"when_busy": "wait", "timeout_secs": 60.0, "retention": RetentionPolicy(keep_last=10_000), **case.options},
    )


def _write(log: Any, **line: Any) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


def _books(ckpt: Any, step: int) -> dict[str, Any]:
    """What the library says of the experts."""
    run_ledger = ckpt.session.run_ledger
    tokens = run_ledger.tokens
    return {
        "ages": run_ledger.ledger.expert_ages(step).tolist(),
        "committed_step": run_ledger.committed_step,
        "lost": tokens.lost_tokens,
        "routed": tokens.routed_tokens,
        "applied": tokens.applied.tolist(),
        "faults": [[f.restored_step, f.lost_tokens, f.stale_experts] for f in tokens.faults],
        "plt": tokens.plt,
    }


def moe_layers(built: megatron_gpt.Built) -> Iterator[tuple[int, Any, list[int]]]:
    """(number in the model, MoE layer, numbers of its local experts), by what Megatron says and ranks imply."""
    from megatron.core import parallel_state

    for chunk in built.chunks:
        for layer in _inner(chunk).decoder.layers:
            count = built.setup.experts // built.setup.ep
            first = parallel_state.get_expert_model_parallel_rank() * count
            yield layer.layer_number - 1, layer.mlp, list(range(first, first + count))


def _inner(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


class Tally:
    """Tokens that arrive at the local experts, all ranks' together: after dispatch each is at one expert."""

    def __init__(self, built: megatron_gpt.Built) -> None:
        self._counts: dict[str, int] = {}
        for number, moe, experts in moe_layers(built):
            moe.experts.register_forward_pre_hook(self._hook(number, experts))

    def _hook(self, number: int, experts: list[int]) -> Any:
        def count(module: Any, args: tuple[Any, ...]) -> None:
            for expert, tokens in zip(experts, args[1].tolist(), strict=True):
                name = f"{number}/{expert}"
                self._counts[name] = self._counts.get(name, 0) + int(tokens)

        return count

    def take(self) -> dict[str, int]:
        found, self._counts = self._counts, {}
        return found


def digests(built: megatron_gpt.Built) -> dict[str, str]:
    """ "layer/expert" -> digest of this rank's share of it, "rest" -> that of everything else; optimizer state too."""
    hashes: dict[str, Any] = {"rest": hashlib.sha256()}
    expert_names = {}
    for number, moe, experts in moe_layers(built):
        for name, parameter in moe.experts.named_parameters():
            expert_names[parameter] = (number, experts, name)
    for chunk in built.chunks:
        for name, parameter in chunk.named_parameters():
            if parameter not in expert_names:
                for what, flat, _ in _memory(built, parameter):
                    hashes["rest"].update(f"{name} {what}".encode() + _raw(flat))
                continue
            number, experts, inner = expert_names[parameter]
            for expert, low, high in _shares(inner, parameter, experts):
                for what, flat, first in _memory(built, parameter):
                    begin, end = max(low - first, 0), max(min(high - first, flat.numel()), 0)
                    if begin < end:
                        into = hashes.setdefault(f"{number}/{expert}", hashlib.sha256())
                        into.update(f"{inner} {what} {first}".encode() + _raw(flat[begin:end]))
    return {name: found.hexdigest()[:16] for name, found in hashes.items()}


def _shares(name: str, parameter: Any, experts: list[int]) -> Iterator[tuple[int, int, int]]:
    """(expert, first and last element + 1 in the parameter's memory)."""
    if name.startswith("local_experts."):
        yield experts[int(name.split(".")[1])], 0, parameter.numel()
        return
    size = parameter.numel() // len(experts)  # GroupedMLP: one after the other
    for at, expert in enumerate(experts):
        yield expert, at * size, (at + 1) * size


def _memory(built: megatron_gpt.Built, parameter: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(what, flat tensor, element of the parameter that its first one belongs to) of weights and optimizer state."""
    yield "weight", parameter.detach().reshape(-1), 0
    for leaf in getattr(built.optimizer, "chained_optimizers", [built.optimizer]):
        master = getattr(parameter, "main_param", None)
        state = leaf.optimizer.state.get(_stepped(leaf, parameter) if master is None else master)
        if not state:
            continue
        first = leaf._get_model_param_range_map(parameter)["param"].start if built.setup.dist_opt else 0
        if master is not None:
            yield "master", master.detach().reshape(-1), first
        for name in sorted(state):
            if state[name].numel() > 1:
                yield name, state[name].reshape(-1), first


def _stepped(leaf: Any, parameter: Any) -> Any:
    """What a Megatron optimizer steps of a parameter without master weights: the range that this rank has, or all."""
    groups = zip(getattr(leaf, "model_fp32_groups", ()), getattr(leaf, "shard_fp32_groups", ()), strict=True)
    pairs = (pair for models, shards in groups for pair in zip(models, shards, strict=True))
    return next((shard for model, shard in pairs if model is parameter), parameter)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
