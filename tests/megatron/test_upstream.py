"""Stages of a real Megatron pipeline compute steps again alone, from their neighbours' logs, to the last bit."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.localized.boundary import Boundary, Interception
from moe_ckpt.localized.exchange import Answers, is_for
from moe_ckpt.localized.log_files import SEND, Channel, LogHeader, sealed_logs
from moe_ckpt.localized.recording import UpstreamLog
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Built, Setup
from tests.support.processes import run_ranks

STEPS, BACK_TO = 5, 2
PIPELINE = Setup(pp=4, num_microbatches=6)


@dataclass
class State:
    """All that a step changes on one rank."""

    tensors: list[torch.Tensor]
    scheduler: Any
    scalers: list[Any]
    generators: tuple[torch.Tensor, dict[str, torch.Tensor], Any]
    consumed: int


def tensors_of(built: Built) -> list[torch.Tensor]:
    found = [each for chunk in built.chunks for _, each in (*chunk.named_parameters(), *chunk.named_buffers())]
    for leaf in leaves(built):
        found += [parameter for group in leaf.optimizer.param_groups for parameter in group["params"]]
        values = [value for state in leaf.optimizer.state.values() for value in state.values()]
        found += [value for value in values if torch.is_tensor(value)]
    return found


def leaves(built: Built) -> list[Any]:
    return getattr(built.optimizer, "chained_optimizers", [built.optimizer])


def scalers(built: Built) -> list[Any]:
    return [leaf.grad_scaler for leaf in leaves(built) if getattr(leaf, "grad_scaler", None) is not None]


def take(built: Built) -> State:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    return State(
        [tensor.detach().clone() for tensor in tensors_of(built)],
        deepcopy(built.scheduler.state_dict()),
        [deepcopy(each.state_dict()) for each in scalers(built)],
        (torch.get_rng_state(), tracker, random.getstate()),
        built.consumed_samples,
    )


def put_back(built: Built, state: State) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with torch.no_grad():
        for tensor, before in zip(tensors_of(built), state.tensors, strict=True):
            tensor.copy_(before)
    built.scheduler.num_steps = 0  # it adds what it loads
    built.scheduler.load_state_dict(deepcopy(state.scheduler))
    for scaler, before in zip(scalers(built), state.scalers, strict=True):
        scaler.load_state_dict(deepcopy(before))
    numbers, tracker, python = state.generators
    torch.set_rng_state(numbers)
    get_cuda_rng_tracker().set_states({name: each.clone() for name, each in tracker.items()})
    random.setstate(python)
    built.consumed_samples = state.consumed


def train(
    rank: int, world_size: int, setup: Setup, alone_in_turn: list[list[int]], root: str
) -> tuple[list[int], int, list[list[str]]]:
    """Returns steps in the log, bytes that were sent in them, and of each set of stages that go back: what differs."""
    built = megatron_gpt.build(setup, seed=1)
    stage_of = world_size // setup.pp
    directory = Path(root, f"rank_{rank}")
    directory.mkdir(parents=True)
    log = UpstreamLog(directory, LogHeader("run", "life", 1, 1, rank, world_size, ""), 1 << 24)
    stages = [each // stage_of for each in range(world_size)]
    boundary = Boundary(stages, log)
    interception = Interception(boundary)
    losses, back, sealed = [], None, []
    for step in range(1, STEPS + 1):
        log.step_begins(step)
        losses.append(megatron_gpt.train_step(built, step - 1))
        sealed.append(log.step_ends())
        if step == BACK_TO:
            back = take(built)
    for each in sealed:
        assert each.wait(60)
    steps = sorted(one.step for one in log._sizes)
    interception.close()
    log.close()
    messages = [message for each in sealed_logs(directory) for message in each.header.messages]
    assert log.nbytes == sum(message.nbytes for message in messages)
    sent = sum(message.nbytes for message in messages if message.channel.kind == SEND)
    dist.barrier()
    end, found = take(built), []
    for going in alone_in_turn:
        if stages[rank] in going:
            ranks = [each for each in range(world_size) if stages[each] in going]
            found.append(alone(rank, ranks, built, back, end, losses, Path(root)))
        dist.barrier()
    return steps, sent, found


def by_name(rank: int, world_size: int) -> list[str]:
    """Returns what is seen of calls by a name that another module has imported: while it is replaced, and after."""

    class Seen:
        def __init__(self) -> None:
            self.channels: list[str] = []

        def crosses(self, ranks: tuple[int, ...]) -> bool:
            return True

        def answers(self, channel: Channel, results: Any) -> bool:
            self.channels.append(channel.kind)
            return True

    loop = ModuleType("a_loop_of_a_user")
    sys.modules[loop.__name__] = loop
    exec("from torch.distributed import all_reduce as agree", vars(loop))
    seen = Seen()
    interception = Interception(seen)  # type: ignore[arg-type]
    loop.agree(torch.zeros(1))
    late = ModuleType("which_it_imports_meanwhile")
    sys.modules[late.__name__] = late
    exec("from torch.distributed import all_reduce as agree", vars(late))
    interception.close()
    loop.agree(torch.zeros(1))
    put_back = ["put back" if module.agree is dist.all_reduce else "kept" for module in (loop, late)]
    again = Interception(seen)  # type: ignore[arg-type]
    late.agree(torch.zeros(1))
    again.close()
    return [*seen.channels, *put_back]


def test_functions_that_a_module_has_imported_by_name_are_seen():
    assert run_ranks(by_name, 1) == [["all_reduce", "all_reduce", "put back", "put back"]]


def alone(
    rank: int, ranks: list[int], built: Built, back: State, end: State, losses: list[Any], root: Path
) -> list[str]:
    world_size = dist.get_world_size()
    directories = {writer: root / f"rank_{writer}" for writer in range(world_size) if writer not in ranks}
    logs = {(writer, each.header.step): each for writer, path in directories.items() for each in sealed_logs(path)}
    put_back(built, back)
    boundary = Boundary([each // (world_size // built.setup.pp) for each in range(world_size)], None)
    interception = Interception(boundary)
    again = []
    for step in range(BACK_TO + 1, STEPS + 1):
        received: dict[Channel, list[Any]] = {}
        for writer in directories:
            for message, tensor in logs[writer, step].messages():
                if is_for(message.channel, rank, ranks, writer):
                    received.setdefault(message.channel, []).append((message, tensor))
        answers = Answers(step, received)
        boundary.go_alone(ranks, answers)
        again.append(megatron_gpt.train_step(built, step - 1))
        answers.require_all_given()
    interception.close()
    now = take(built)
    same = {
        "tensors": all(map(torch.equal, now.tensors, end.tensors)),
        "random numbers": torch.equal(now.generators[0], end.generators[0]),
        "dropout": all(torch.equal(each, end.generators[1][name]) for name, each in now.generators[1].items()),
        "scheduler": now.scheduler == end.scheduler,
        "loss scale": [each.state_dict() for each in scalers(built)] == end.scalers,
        "losses and norms": again == losses[BACK_TO:],
    }
    put_back(built, end)
    return [name for name, equal in same.items() if not equal]


CASES = {
    "pp4": (PIPELINE, 4, [[0], [1], [2], [3], [1, 2], [0, 2], [0, 3], [0, 1, 3]]),
    "pp4-tied-clipped": (Setup(pp=4, num_microbatches=4, tied=True), 4, [[0], [3], [1, 2]]),
    "pp2-ep2-sharded": (Setup(pp=2, ep=2, dist_opt=True), 4, [[0], [1]]),
    "pp2-tp2-bias": (Setup(pp=2, tp=2, ep=2, expert_bias=True), 4, [[0], [1]]),
    "pp2-interleaved-overlapped": (Setup(pp=2, vpp=2, ep=2), 4, [[0], [1]]),
    "pp2-fp16-skips": (Setup(pp=2, ep=2, precision="fp16", loss_scale=2.0**32), 4, [[0], [1]]),
}


def sent_bytes(setup: Setup, stage: int) -> int:
    """Of one rank in one step: each micro-batch's activations to the next chunk, and gradients to the one before."""
    one = setup.seq * setup.micro_batch * setup.hidden // setup.tp * setup.dtype.itemsize
    chunks = [stage + setup.pp * each for each in range(setup.vpp or 1)]
    last = setup.pp * (setup.vpp or 1) - 1
    return one * setup.num_microbatches * sum((chunk < last) + (chunk > 0) for chunk in chunks)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("pp4-tied-clipped", "pp2-ep2-sharded", "pp2-interleaved-overlapped")
def test_stages_that_go_back_alone_come_to_the_same_bits(case, tmp_path):
    setup, ranks, alone_in_turn = CASES[case]
    found = run_ranks(train, ranks, setup, alone_in_turn, str(tmp_path), preload="tests.support.megatron_warm")
    for rank, (steps, sent, differing) in enumerate(found):
        assert steps == list(range(1, STEPS + 1))
        assert sent == STEPS * sent_bytes(setup, rank * setup.pp // ranks)
        assert differing
        assert differing == [[]] * len(differing)
