"""What full state and consumed gradients weigh per parameter, counted in a real optimizer's own tensors.

A model of stacked experts is trained for a few steps on the CPU. Nothing is timed. The paper (MoEtion, arXiv 2412.15411
version 1, Algorithm 3) states that up to five times fewer bytes are sent. docs/gradient_log.md has the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from moe_ckpt.gradient_log.capture import ConsumedGradients, GradientCapture
from moe_ckpt.gradient_log.units import whole_unit

_EXAMPLE = "example: python benchmarks/gradient_bytes.py --markdown"
EXPERTS, WIDTH, HIDDEN, ROUND = 8, 64, 96, 5


def bytes_per_parameter(window: int, gradient: float, full: float = 12.0) -> float:
    """Returns the bytes that each step saves per parameter, with rounds of ``window`` steps."""
    return full / window + gradient * (window - 1) / window


@dataclass(frozen=True)
class Kind:
    """How a run trains. masters: fp32 copies of the weights are updated, and are what is saved."""

    name: str
    make: Callable[[list[nn.Parameter]], Optimizer]
    dtype: torch.dtype = torch.float32
    masters: bool = False


KINDS = (
    Kind("AdamW, fp32 or autocast", lambda those: torch.optim.AdamW(those)),
    Kind("AdamW, bf16 with fp32 masters (Megatron)", lambda those: torch.optim.AdamW(those), torch.bfloat16, True),
    Kind("AdamW, bf16 throughout", lambda those: torch.optim.AdamW(those), torch.bfloat16),
    Kind("AdamW with amsgrad, fp32", lambda those: torch.optim.AdamW(those, amsgrad=True)),
    Kind("SGD with momentum, fp32", lambda those: torch.optim.SGD(those, momentum=0.9)),
    Kind("Adafactor, fp32", lambda those: torch.optim.Adafactor(those)),
)


@dataclass(frozen=True)
class Weighed:
    """Bytes per parameter."""

    name: str
    full: float
    gradient: float


class _Last:
    """Keeps what was consumed last, as live tensors."""

    def __init__(self) -> None:
        self.gradients: ConsumedGradients | None = None

    def consume(self, gradients: ConsumedGradients) -> None:
        self.gradients = gradients

    def release(self, *, dropped: bool = False) -> None:
        """Nothing is read later."""


def weigh(kind: Kind) -> Weighed:
    """Trains for two steps, and counts an anchor's bytes and a gradient's."""
    torch.manual_seed(1)
    model = [nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH).to(kind.dtype))]
    model += [nn.Parameter(torch.randn(EXPERTS, WIDTH).to(kind.dtype)), nn.Parameter(torch.ones(WIDTH).to(kind.dtype))]
    updated = [nn.Parameter(each.detach().float()) if kind.masters else each for each in model]
    optimizer, last = kind.make(updated), _Last()
    names = {id(each): f"p{at}" for at, each in enumerate(updated)}
    describe = lambda number, group, each: whole_unit(names[id(each)], number, group, each)  # noqa: E731
    GradientCapture([optimizer], describe, last)
    for _ in range(2):
        for each in updated:
            each.grad = torch.randn_like(each)
        optimizer.step()
    parameters = sum(each.numel() for each in updated)
    if last.gradients is None:
        raise RuntimeError("the optimizer consumed nothing")
    state = [value for of_one in optimizer.state.values() for value in of_one.values() if value is not None]
    full = _bytes([*updated, *state])
    return Weighed(kind.name, full / parameters, _bytes(last.gradients.gradients) / parameters)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def table(found: Sequence[Weighed]) -> list[tuple[str, ...]]:
    """Returns the rows of the table in docs/gradient_log.md."""
    return [
        (
            each.name,
            f"{each.full:.1f}",
            f"{each.gradient:.1f}",
            f"{each.full / each.gradient:.1f}",
            f"{bytes_per_parameter(ROUND, each.gradient, each.full):.1f}",
        )
        for each in found
    ]


HEADINGS = ("", "full state", "gradient", "times fewer", f"rolling, W = {ROUND}")


def main(argv: Sequence[str]) -> int:
    """Prints the table; with ``--markdown`` as it stands in the docs."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--markdown", action="store_true", help="as a table for the docs")
    options = parser.parse_args(argv)
    rows = table([weigh(kind) for kind in KINDS])
    if options.markdown:
        for row in (HEADINGS, ("---",) * len(HEADINGS), *rows):
            print(f"| {' | '.join(row)} |")
        return 0
    shown = Table(*HEADINGS, title="Bytes per parameter")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
