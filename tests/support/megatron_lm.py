"""Lives of Megatron-LM's own ``pretrain_gpt.py``, one line put in front of ``pretrain(...)``; body of ``start_ranks``.

What is compared is taken from Megatron's functions themselves, beneath what the line installs: the losses and gradient
norms that ``train_step`` returns, and every parameter, master weight and moment when ``train`` ends.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ABSENT = (
    "MEGATRON_LM does not name Megatron-LM's training scripts; get them with: git clone --depth 1 --branch "
    "core_v0.16.1 https://github.com/NVIDIA/Megatron-LM, and set MEGATRON_LM to that directory (with megatron-core "
    "0.19: core_v0.19.0, and MEGATRON_LM_NEW)"
)
WARM = "tests.support.megatron_lm_warm"

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 5e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 4 --num-workers 0 --split 90,5,5 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion --disable-bias-linear "
    "--position-embedding-type rope --distributed-backend gloo --log-interval 1 --eval-interval 5 --eval-iters 1 "
    "--untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall "
    "--moe-router-dtype fp32 --attention-dropout 0.1 --hidden-dropout 0.1"
)
"""A tiny GPT-MoE, with dropout, so that random numbers matter."""
PIPELINE_EXPERTS = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"


def require_megatron_lm() -> str:
    """The tree, or the test is skipped, saying how to get it."""
    tree = os.environ.get("MEGATRON_LM", "")
    if not (Path(tree) / "pretrain_gpt.py").is_file():
        pytest.skip(ABSENT)
    pytest.importorskip("six", reason="Megatron-LM's scripts import six: pip install 'moe_ckpt[dev]'")
    return tree


@dataclass(frozen=True)
class Life:
    """One start of the job.

    arguments: of the program. line: what stands between the parentheses of ``megatron.install(...)``; None to leave
    the script as it is. journal: file that each rank writes to, with its number behind it. kill: (rank, iteration,
    where) of a SIGKILL between backward pass and update ("update") or right after the update ("end"), or of a SIGTERM
    right after the update ("term"); or of an error between the update and what the ranks tell each other of it
    ("fails"), when the iteration is logged ("log"), at a validation's end ("validates") or after it ("validated"), or
    when weights are gathered ("gathers"); or of a SIGKILL at a validation's end ("validating"), or when the
    iteration is logged and not counted yet ("logged"). draws: validations draw a random number, as a router with jitter
    does.
    """

    arguments: str
    journal: str
    line: str | None = None
    kill: tuple[int, int, str] | None = None
    draws: bool = False
    program: str = "pretrain_gpt.py"


def live(rank: int, world_size: int, life: Life) -> None:
    """Run the script to its end, or to the SIGKILL."""
    tree = os.environ["MEGATRON_LM"]
    journal = Journal(f"{life.journal}.{rank}")
    _watch(journal, life.kill if life.kill is not None and life.kill[0] == rank else None, life.draws)
    script = Path(tree) / life.program
    source = script.read_text()
    if life.line is not None:
        before, call, after = source.rpartition("    pretrain(\n")
        assert call, f"{life.program} calls pretrain() in another way than it did"
        adopted = "    from moe_ckpt import Memory, megatron; from moe_ckpt.policies import *; "  # what a user adds
        source = f"{before}{adopted}megatron.install({life.line})\n{call}{after}"
    sys.argv = [str(script), *life.arguments.split()]
    code = 0
    try:
        exec(compile(source, str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    journal.note(exit=code)


class Journal:
    """JSON lines of one rank, of all lives; a SIGKILL cannot undo them."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def note(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lives(self) -> list[list[dict[str, Any]]]:
        found: list[list[dict[str, Any]]] = []
        for text in self._path.read_text().splitlines():
            line = json.loads(text)
            if "begin" in line:
                found.append([])
            found[-1].append(line)
        return found


KILLS = ("logged",)
"""Of what ``_watch`` puts before Megatron's functions: a SIGKILL, and no error."""


def _watch(journal: Journal, kill: tuple[int, int, str] | None, draws: bool) -> None:
    """Put the journal into Megatron's functions, before anything else is put around them."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.training import get_args, training

    train, step, evaluate = training.train, training.train_step, training.evaluate

    def die(iteration: int, where: str) -> None:
        if kill is not None and kill[1:] == (iteration, where):
            os.kill(os.getpid(), signal.SIGTERM if where == "term" else signal.SIGKILL)

    @functools.wraps(step)
    def watched_step(*args: Any, **kwargs: Any) -> Any:
        *rest, forward_backward = args
        iteration = kwargs["iteration"] + 1

        def passes(*args: Any, **kwargs: Any) -> Any:
            result = forward_backward(*args, **kwargs)
            die(iteration, "update")
            return result

        result = step(*rest, passes, **kwargs)
        losses, skipped, norm = result[0], result[1], result[5]
        journal.note(
            step=iteration,
            losses={name: float(value).hex() for name, value in losses.items()},
            norm=None if norm is None else float(norm).hex(),
            skipped=int(skipped),
        )
        die(iteration, "end")
        die(iteration, "term")
        return result

    @functools.wraps(evaluate)
    def watched_evaluation(*args: Any, **kwargs: Any) -> Any:
        if draws:
            torch.rand(())
        result = evaluate(*args, **kwargs)
        fail("validates")
        die(getattr(get_args(), "curr_iteration", -1) + 1, "validating")
        losses = {name: float(value).hex() for name, value in (result[0] or {}).items()}
        journal.note(validated=getattr(get_args(), "curr_iteration", -1) + 1, losses=losses)
        return result

    @functools.wraps(train)
    def watched_train(*args: Any, **kwargs: Any) -> Any:
        settings = get_args()
        journal.note(begin=settings.iteration, counted=_counted(settings))
        try:
            return train(*args, **kwargs)
        finally:
            chunks, optimizer = args[1], args[2]
            journal.note(end=dict(_digests(chunks, optimizer)), counted=_counted(settings))

    def fail(where: str) -> None:
        if kill is not None and kill[1:] == (getattr(get_args(), "curr_iteration", -1) + 1, where):
            raise RuntimeError("the user's program fails")

    def failing(owner: Any, name: str, where: str) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def fails(*args: Any, **kwargs: Any) -> Any:
            if where in KILLS:
                die(getattr(get_args(), "curr_iteration", -1) + 1, where)
            else:
                fail(where)
            return real(*args, **kwargs)

        setattr(owner, name, fails)

    failing(training, "logical_and_across_model_parallel_group", "fails")
    if kill is not None and kill[2] == "log":
        failing(training, "training_log", "log")
    if kill is not None and kill[2] in ("validated", "logged"):
        failing(training, "post_training_step_callbacks", kill[2])
    if kill is not None and kill[2] == "gathers":
        part = "start_param_sync_for_bucket_group_subset"  # since 0.19 each optimizer gathers what it has updated
        if hasattr(DistributedOptimizer, part):
            failing(DistributedOptimizer, part, "gathers")
        else:
            failing(DistributedDataParallel, "start_param_sync", "gathers")
    training.train, training.train_step, training.evaluate = watched_train, watched_step, watched_evaluation


def _counted(settings: Any) -> list[int]:
    return [settings.consumed_train_samples, settings.consumed_valid_samples, settings.skipped_train_samples]


def _digests(chunks: Any, optimizer: Any) -> Iterator[tuple[str, str]]:
    """Of every parameter, and of everything that the optimizers keep of each."""
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield f"{number}/{name}", _digest(parameter)
    for number, leaf in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        parameters = [parameter for group in leaf.optimizer.param_groups for parameter in group["params"]]
        for at, parameter in enumerate(parameters):
            yield f"optimizer {number}/{at}/updated", _digest(parameter)
            for name, value in leaf.optimizer.state.get(parameter, {}).items():
                yield f"optimizer {number}/{at}/{name}", _digest(torch.as_tensor(value))


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]
