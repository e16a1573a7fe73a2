"""The order of calls of Megatron-Bridge's ``pretrain`` and ``train`` (0.7, commit 067f987), around a tiny model.

Bridge itself needs packages for GPUs. What is written down here is when it fires its events, moves its counters,
and how it ends; model, optimizer, schedules and the calculator of micro-batches are Megatron-Core's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import describe, draw, heard

SETUP = Setup(ep=2, num_microbatches=2, layers=2, dropout=0.2)
MICRO = SETUP.micro_batch


@dataclass(frozen=True)
class Job:
    """One start.

    kill: (rank, iteration, where): between backward pass and update ("train"), when the iteration is counted by the
        callback and not by the loop ("ended"), in the validation after it ("validation"), or when all is done that
        belongs to it ("counted").
    seed: of the model's initial weights, another one in each life.
    skipped, rampup: ``iterations_to_skip`` and ``rampup_batch_size``.
    fails_at: iteration in which rank 0 raises.
    leaves_at: iteration in which rank 0 alone calls ``sys.exit``.
    stops_at: iteration in which the rerun machine asks to end the job.
    reruns: iterations whose pass the rerun machine makes twice.
    loaded: iteration that Bridge's own checkpoint is at.
    save_interval: of Bridge's own checkpoints, of which only the iterations are noted.
    options: of the callback.
    settings: of Bridge's configuration, by path.
    """

    directory: str
    policy: tuple[str, Mapping[str, Any]] = ("Dense", {"every_n_steps": 1})
    setup: Setup = SETUP
    iterations: int = 14
    kill: tuple[int, int, str] | None = None
    seed: int = 1
    skipped: tuple[int, ...] = ()
    rampup: tuple[int, int, int] | None = None
    exit_interval: int | None = None
    fails_at: int | None = None
    leaves_at: int | None = None
    stops_at: int | None = None
    reruns: tuple[int, ...] = ()
    loaded: int = 0
    save_interval: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def run(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    """A life of ``job``: what must be alike in equal runs, beside what the library said."""
    import moe_ckpt.policies
    from moe_ckpt.megatron.bridge import LOADERS, LOOP, PRETRAIN, MoECheckpointCallback

    sys.modules[PRETRAIN] = sys.modules[LOADERS] = sys.modules[LOOP] = sys.modules[__name__]
    random.seed(job.seed)
    np.random.seed(job.seed)
    name, arguments = job.policy
    policy = getattr(moe_ckpt.policies, name)(**arguments)
    options = {"when_busy": "wait", "timeout_secs": 60.0, **job.options}
    callback = MoECheckpointCallback(policy, dirpath=f"{job.directory}/store", **options)
    with heard() as said:
        found: dict[str, Any] = {"error": None}
        try:
            pretrain(job, rank, callback, found)
        except (SystemExit, RuntimeError) as error:
            found["error"] = repr(error)
    assert sys.modules[__name__].train is TRAIN, "Bridge has its own function again"
    return found | {"said": said, "lifecycle": callback.checkpoint._driver.lifecycle.state.name}


def pretrain(job: Job, rank: int, callback: Any, found: dict[str, Any]) -> None:
    built, state = setup(job, rank, callback)
    found["begun"] = (state.train_state.step, state.train_state.consumed_train_samples)
    try:
        train(job, rank, built, state, callback)  # looked up when it is called, as Bridge does
    finally:
        found["iteration"], found["saves"] = state.train_state.step, state.saved
        found["routed"] = callback.checkpoint.session.run_ledger.tokens.routed_tokens
        found["counters"] = vars(state.train_state)
    built.consumed_samples = state.train_state.consumed_train_samples
    found |= describe(callback.checkpoint, built)


def setup(job: Job, rank: int, callback: Any) -> tuple[megatron_gpt.Built, Any]:
    built = megatron_gpt.build(job.setup, job.seed)
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.rerun_state_machine import RerunMode, destroy_rerun_state_machine, initialize_rerun_state_machine

    whole = MICRO * built.setup.num_microbatches * ranks()
    calculator.init_num_microbatches_calculator(rank, list(job.rampup or ()) or None, whole, MICRO, ranks(), False)
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS if job.reruns else RerunMode.DISABLED)
    counts = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
    position = SimpleNamespace(step=job.loaded, **dict.fromkeys(counts, 0), floating_point_operations_so_far=0)
    position.consumed_train_samples = job.loaded * whole
    position.do_valid = True
    validation = {"eval_interval": 3, "eval_iters": 2, "eval_global_batch_size": whole, "start_eval_at_iter": None}
    settings = SimpleNamespace(
        validation=SimpleNamespace(**validation, skip_train=False),
        train=SimpleNamespace(train_iters=job.iterations, exit_interval=job.exit_interval),
        dataset=SimpleNamespace(dataloader_type="cyclic"),
    )
    for path, value in job.settings.items():
        part, name = path.split(".")
        setattr(getattr(settings, part), name, value)
    state = SimpleNamespace(cfg=settings, train_state=position, saved=[])
    fire(callback, "on_data_init_start", state, built)
    [valid] = build_train_valid_test_data_loaders()
    state.valid_data_iterator = cyclic_iter(valid)
    draw(job.seed)  # making data iterators draws
    return built, state


def build_train_valid_test_data_loaders() -> list[DataLoader[int]]:
    return [DataLoader(range(8))]


def cyclic_iter(loader: DataLoader[int]) -> Iterator[Any]:
    """As Bridge's own, it makes the loader's iterator, which draws a seed, when a validation first asks for a batch."""
    while True:
        yield from loader


def fire(callback: Any, event: str, state: Any, built: megatron_gpt.Built, **more: Any) -> None:
    context = SimpleNamespace(
        state=state, model=built.chunks, optimizer=built.optimizer, scheduler=built.scheduler, user_state={}, **more
    )
    getattr(callback, event)(context)


def ranks() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_world_size()


def train(job: Job, rank: int, built: megatron_gpt.Built, state: Any, callback: Any) -> None:
    from megatron.core import num_microbatches_calculator as calculator

    position, settings = state.train_state, state.cfg
    micro_batches, should_exit = calculator.get_num_microbatches(), False
    while position.step < settings.train.train_iters:
        calculator.update_num_microbatches(position.consumed_train_samples, consistency_check=False)
        if calculator.get_num_microbatches() != micro_batches and position.step != 0:
            assert calculator.get_num_microbatches() > micro_batches
        micro_batches = calculator.get_num_microbatches()
        built.setup = replace(built.setup, num_microbatches=micro_batches)
        if position.step + 1 in job.skipped:
            position.step += 1
            position.consumed_train_samples += ranks() * MICRO * micro_batches
            position.skipped_train_samples += ranks() * MICRO * micro_batches
            continue
        fire(callback, "on_train_step_start", state, built)
        skipped, should_exit = train_step(job, rank, built, state)
        fire(callback, "on_train_step_end", state, built, skipped_iter=skipped)
        if should_exit:
            break
        die(job, rank, position.step + 1, "ended")
        position.step += 1
        position.consumed_train_samples += ranks() * MICRO * micro_batches
        whole, running = calculator.get_current_global_batch_size(), calculator.get_current_running_global_batch_size()
        position.skipped_train_samples += whole - running
        position.floating_point_operations_so_far += 1000 * micro_batches
        if position.do_valid and position.step % settings.validation.eval_interval == 0:
            validate(job, rank, built, state)
        if job.save_interval and position.step % job.save_interval == 0:
            save_checkpoint_and_time(state)  # looked up when it is called, as Bridge does
        interval = settings.train.exit_interval
        should_exit = bool(interval) and position.step % interval == 0
        die(job, rank, position.step, "counted")
        if should_exit:
            break
    if should_exit:
        sys.exit(0)
    fire(callback, "on_train_end", state, built)


TRAIN = train


def save_checkpoint_and_time(state: Any) -> None:
    state.saved.append(state.train_state.step)


def train_step(job: Job, rank: int, built: megatron_gpt.Built, state: Any) -> tuple[bool, bool]:
    """Whether the update was left out, and whether the rerun machine asks to end the job."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    iteration, position = state.train_state.step + 1, state.train_state
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(None):
        loss = megatron_gpt.forward_backward(built, position.consumed_train_samples)
        machine.rerun_requested = machine.continue_requested = iteration in job.reruns
    if iteration == job.stops_at:
        return True, True
    die(job, rank, iteration, "train")
    if rank == 0 and iteration == job.fails_at:
        raise RuntimeError("the user's program fails")
    if rank == 0 and iteration == job.leaves_at:
        sys.exit("this rank alone")
    made, norm = megatron_gpt.update(built)
    note(job, rank, step=iteration, loss=loss and loss.hex(), norm=norm and norm.hex(), made=made)
    return not made, False


def validate(job: Job, rank: int, built: megatron_gpt.Built, state: Any) -> None:
    position, settings = state.train_state, state.cfg.validation
    losses = []
    for chunk in built.chunks:
        chunk.eval()
    for _ in range(settings.eval_iters):
        next(state.valid_data_iterator)
        batches = megatron_gpt._batches(built.setup, 1_000_000 + position.consumed_valid_samples, rank)
        with torch.no_grad():
            losses.append(megatron_gpt._forward_step(batches, built.chunks[0])[0].mean().item().hex())
        position.consumed_valid_samples += settings.eval_global_batch_size
        die(job, rank, position.step, "validation")
    for chunk in built.chunks:
        chunk.train()
    note(job, rank, validated=position.step, losses=losses)


def die(job: Job, rank: int, iteration: int, where: str) -> None:
    if job.kill == (rank, iteration, where):
        os.kill(os.getpid(), signal.SIGKILL)


def note(job: Job, rank: int, **line: Any) -> None:
    with Path(job.directory, f"journal.{rank}").open("a") as file:
        file.write(json.dumps(line) + "\n")
