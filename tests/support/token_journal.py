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
            (router, layer.experts)
            for layer in model.modules()
            if isinstance(router := getattr(layer, "gate", getattr(layer, "router", None)), nn.Module)
            and isinstance(getattr(layer, "experts", None), nn.Module)
        ]
        assert self._layers
        self._routed = [torch.zeros(len(hashes), dtype=torch.int64) for hashes in self._hashes()]
        for number, (router, _) in enumerate(self._layers):
            router.register_forward_hook(lambda router, _, out, number=number: self._note(number, router, out))

    def _note(self, layer: int, router: nn.Module, output: Any) -> None:
        if router.training:
            chosen = next(part for part in output if not part.dtype.is_floating_point)
            chosen = chosen.to_local() if hasattr(chosen, "to_local") else chosen
            self._routed[layer] += torch.bincount(chosen.flatten(), minlength=len(self._routed[layer]))

    def _hashes(self) -> list[list[int]]:
        """Of each layer's experts: of all of a stack, also where it is divided among ranks."""
        found = []
        for _, experts in self._layers:
            whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in experts.parameters()]
            if isinstance(experts, nn.ModuleList):
                parts = [list(expert.parameters()) for expert in experts]
            else:
                parts = list(zip(*whole, strict=True))
            found.append([zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in each)) for each in parts])
        return found

    def _write(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")

    def _named(self) -> dict[str, Any]:
        of_all = {
            f"expert/{layer}/{number}": value
            for layer, hashes in enumerate(self._hashes())
            for number, value in enumerate(hashes)
        }
        return {**of_all, "non_expert": 0}

    def begin(self, step: int, tokens: Any) -> None:
        """tokens: the library's books."""
        self._write("begin", step=step, hashes=self._named(), **_books(tokens))

    def step(self, step: int) -> None:
        """The weights are those of ``step``, and its tokens were routed."""
        self._write("batch", step=step, routed=[row.tolist() for row in self._routed], hashes=self._named())
        for row in self._routed:
            row.zero_()

    def end(self, tokens: Any) -> None:
        self._write("end", **_books(tokens))


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
