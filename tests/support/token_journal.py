"""What routers do and experts are, written down by the run itself at each step, to count lost tokens a second time.

It asks nothing of the library but what it claims. ``tests.integration.recount`` compares.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.integration.recount import Recount, check_history


class TokenJournal:
    """Lines of one rank's life: its beginning, each step, its end.

    Written before the library hears of a step, so that no checkpoint has a step which the journal lacks.

    place: ``<run>/tokens.<life>.<rank>``. model: Without wrappers; its MoE layers have a router and experts.
    """

    def __init__(self, place: str, model: nn.Module) -> None:
        self._file = open(place, "a", buffering=1)  # noqa: SIM115 - until the process is killed
        self._layers = [
            (router, layer, experts)
            for layer in model.modules()
            if (router := _part(layer, "gate", "router")) is not None
            and (experts := _part(layer, "experts", "routed_experts")) is not None
        ]
        assert self._layers
        experts = (len(self._hashes()) - 1) // len(self._layers)
        self._routed = torch.zeros(len(self._layers), experts, dtype=torch.int64)
        for number, (router, *_) in enumerate(self._layers):
            router.register_forward_hook(lambda router, _, out, number=number: self._note(number, router, out))

    def _note(self, layer: int, router: nn.Module, output: Any) -> None:
        if router.training:
            chosen = next(part for part in output if not part.dtype.is_floating_point)
            chosen = chosen.to_local() if hasattr(chosen, "to_local") else chosen
            if chosen.dtype == torch.bool:  # Megatron-Core: [token, expert]
                chosen = chosen.nonzero()[:, 1]
            self._routed[layer] += torch.bincount(chosen.flatten(), minlength=self._routed.shape[1])

    def _hashes(self) -> dict[str, int]:
        """Of each expert, also where a stack is divided among ranks, or experts are."""
        found, divided = {}, False
        for number, (_, layer, experts) in enumerate(self._layers):
            experts = getattr(experts, "local_experts", experts)
            numbers = getattr(layer, "local_expert_indices", None)
            divided = divided or numbers is not None
            if isinstance(experts, nn.ModuleList):
                parts = [list(expert.parameters()) for expert in experts]
            else:
                whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in experts.parameters())
                parts = list(zip(*whole, strict=True))
            for expert, tensors in zip(numbers or range(len(parts)), parts, strict=True):
                together = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
                found[f"expert/{number}/{expert}"] = zlib.crc32(together)
        if divided and dist.get_world_size() > 1:
            of_all: list[dict[str, int]] = [{}] * dist.get_world_size()
            dist.all_gather_object(of_all, found)
            found = {name: value for of_rank in of_all for name, value in of_rank.items()}
        return {**found, "non_expert": 0}

    def _write(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")

    def begin(self, step: int, tokens: Any) -> None:
        """tokens: the library's books."""
        self._write("begin", step=step, hashes=self._hashes(), **_books(tokens))

    def step(self, step: int) -> None:
        """The weights are those of ``step``, and its tokens were routed."""
        self._write("batch", step=step, routed=self._routed.tolist(), hashes=self._hashes())
        self._routed.zero_()

    def end(self, tokens: Any) -> None:
        self._write("end", **_books(tokens))


def _part(layer: nn.Module, *names: str) -> nn.Module | None:
    return next((part for name in names if isinstance(part := getattr(layer, name, None), nn.Module)), None)


def _books(tokens: Any) -> dict[str, Any]:
    return {
        "applied": tokens.applied.tolist(),
        "faults": [[fault.restored_step, fault.lost_tokens, fault.stale_experts] for fault in tokens.faults],
        "lost": tokens.lost_tokens,
        "routed_total": tokens.routed_tokens,
        "plt": tokens.plt,
    }


def recounted(root: Path, ranks: int) -> Recount:
    """What must have been lost in all lives, after comparing every number that the library reported."""
    read: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(dict)
    for path in root.glob("tokens.*"):
        _, life, rank = path.name.split(".")
        lines = path.read_text().splitlines(keepends=True)
        if events := [json.loads(line) for line in lines if line.endswith("\n")]:
            read[int(life)][int(rank)] = events
    of_ranks: list[list[list[dict[str, Any]]]] = [[] for _ in range(ranks)]
    for _, by_rank in sorted(read.items()):
        begin = next(iter(by_rank.values()))[0]
        for rank in range(ranks):
            of_ranks[rank].append(by_rank.get(rank, [begin]))
    first = of_ranks[0][0][0]["applied"]
    recount = Recount(len(first), len(first[0]))
    check_history(recount, of_ranks, every_step_saved=False, in_memory=True)
    return recount
