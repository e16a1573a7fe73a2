"""What is killed, and simulated: policies, where their checkpoints lie, and the loops that they are in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.policies.base import Policy

_LATER = 100_000
"""Steps: of checkpoints in memory only the first goes to storage."""


@dataclass(frozen=True)
class Loop:
    """A loop of Megatron-Core, of a small GPT-MoE on an accelerator that is acted by sleeping.

    Attributes:
        stages: Of the pipeline, one rank each; with 1, experts are split over all ranks.
        microbatches: Of an iteration, all ranks.
        tokens: Of a micro-batch (``bubbles_rank.run_config``).
        log_bytes: ``Memory(upstream_bytes=...)``; None: no log, and all ranks go back.
        in_place: A spare takes a killed process's place, and the others restart within themselves; else all start anew.
    """

    stages: int
    microbatches: int = 8
    tokens: int = 32
    log_bytes: int | None = None
    in_place: bool = False
    act_secs: float = 0.01
    width: int = 128
    experts: int = 8


@dataclass(frozen=True)
class Contestant:
    """A policy, for the real run and as the object that the simulator asks.

    Attributes:
        overrides: Of Hydra, for the recipe; where ``loop`` is given, that is what runs.
        memory: What the simulator is told of checkpoints in memory, as in ``System``; empty where they are on storage.
        ranks: Processes.
        nodes: Each with a memory directory of its own, and as many ranks as the others.
        witness: The rank that is never killed where there are several, and whose diary counts.
    """

    name: str
    title: str
    policy: Policy
    overrides: tuple[str, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    nodes: int = 1
    witness: int = 0
    loop: Loop | None = None

    @property
    def loses_nodes(self) -> bool:
        """Whether some kills take a node's memory along."""
        return bool(self.memory) and self.loop is None and self.nodes == self.ranks

    @property
    def in_place(self) -> bool:
        """Whether the processes that live on stay."""
        return self.loop is not None and self.loop.in_place

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks of which one is killed at a time."""
        return tuple(rank for rank in range(self.ranks) if rank != self.witness or self.ranks == 1)


_DENSE = ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=10")
_STORED = "moe_ckpt.memory.storage_every"
CONTESTANTS = (
    Contestant("dense", "Dense every 10", Dense(10), _DENSE),
    Contestant(
        "memory",
        "Dense every 10 in memory",
        Dense(10),
        (*_DENSE, "moe_ckpt/memory=local", f"{_STORED}=50"),
        {"durable": "node", "storage_every": 50},
    ),
    Contestant(
        "survivors",
        "Dense every 200, DDP, one of 2 ranks killed",
        Dense(200),
        (
            *("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=200"),
            *("moe_ckpt/memory=local", f"{_STORED}=200"),
        ),
        {"durable": "node", "storage_every": 200, "survivors": True},
        ranks=2,
    ),
    Contestant(
        "peers",
        "Dense every 10, DDP, copies on the other of 2 nodes",
        Dense(10),
        (*_DENSE, "moe_ckpt/memory=replicated", f"{_STORED}={_LATER}"),
        {"durable": "peers", "replicas": 1, "storage_every": _LATER, "survivors": True},
        ranks=2,
        nodes=2,
    ),
    Contestant(
        "moc",
        "MoC K=1 every 10",
        MoC(k=1, every_n_steps=10),
        ("moe_ckpt/policy=moc", "moe_ckpt.policy.k=1", "moe_ckpt.policy.every_n_steps=10"),
    ),
    Contestant(
        "moevement", "MoEvement W=3", MoEvement(window=3), ("moe_ckpt/policy=moevement", "moe_ckpt.policy.window=3")
    ),
    *(
        Contestant(
            name,
            f"MoEvement W=4, PP4, {who}",
            MoEvement(window=4),
            # The acted accelerator takes as long for frozen operators as for others.
            memory={"durable": "node", "storage_every": _LATER, "survivors": True, "freeze": False, **more},
            ranks=4,
            nodes=4,
            witness=3,
            loop=Loop(4, log_bytes=log_bytes),
        )
        for name, who, log_bytes, more in (
            ("localized", "one stage goes back", 1 << 28, {"rollback": "localized"}),
            ("global", "all go back", None, {}),
        )
    ),
    Contestant(
        "in_place",
        "Dense every step, EP2, restarts in place",
        Dense(1),
        memory={"durable": "node", "storage_every": _LATER, "survivors": True},
        ranks=2,
        loop=Loop(1, in_place=True),
    ),
)
NO_CHECKPOINTS = Contestant(
    "calibration", "no checkpoints", Dense(10**6), ("moe_ckpt/policy=dense", "moe_ckpt.policy.every_n_steps=1000000")
)
