"""Kills training under every host twenty times for each policy: ``kill -9`` of any rank, at moments that a seed draws.

The run must then end as one that nobody killed, bit by bit; under MoC, which loses tokens, those must be lost that a
second count finds, made from what the run itself wrote down of its routers and experts. ``docs/hosts.md`` has a table.

    python -m tests.integration.host_kills --hosts plain fabric --write
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from tests.integration import plain_run, torchtitan_run, transformers_run
from tests.integration.plain_run import Loop
from tests.megatron import bridge_run
from tests.support import kills, processes
from tests.support.kills import Kill
from tests.support.token_journal import recounted

RESULTS = report.RESULTS / "host_kills.json"
KILLS, STEPS, LAST = 20, 48, 8
"""None is drawn in the last steps."""
POLICIES: dict[str, dict[str, Any]] = {
    "Dense": {"policy": ("Dense", {})},
    "MoEvement": {"policy": ("MoEvement", {"window": 3})},
    "GradientLog": {"policy": ("GradientLog", {}), "memory": True},
    "MoC": {"policy": ("MoC", {"k": 1})},
}


@dataclass(frozen=True)
class Trial:
    """One run under one host and policy.

    package: Of the host. lived: One life. run: Its settings. epoch: Steps in one. secs: Longest delay of a kill.
    compared: What must be alike beside tensors.
    """

    package: str
    lived: Callable[..., Any]
    run: Any
    ranks: int
    epoch: int
    steps: int = STEPS
    secs: float = 0.1
    preload: str = processes.WARM
    compared: tuple[str, ...] = ()

    def start(self, root: Path, kill: Kill | None) -> list[processes.Outcome]:
        root.mkdir(exist_ok=True)
        lives = len([*root.glob("life.*")])
        (root / f"life.{lives}").touch()
        run = replace(self.run, journal=f"{root}/tokens.{lives}") if self.run.policy[0] == "MoC" else self.run
        return processes.start_ranks(self.lived, self.ranks, str(root), run, kill, grace=1.0, preload=self.preload)


def loop(package: str, ranks: int, **settings: Any) -> Trial:
    run = Loop(**settings, steps=STEPS)
    epoch = plain_run.SAMPLES // plain_run.BATCH // ranks // run.accumulate
    return Trial(package, plain_run.lived, run, ranks, epoch, secs=0.05)


def trained(ranks: int, **settings: Any) -> Trial:
    run = transformers_run.Run(**settings)
    batches = -(-transformers_run.SAMPLES // (transformers_run.BATCH * ranks))
    epoch = -(-batches // run.accumulate)
    epochs = -(-STEPS // epoch)
    run = replace(run, settings={"num_train_epochs": epochs})
    return Trial("transformers", transformers_run.lived, run, ranks, epoch, epochs * epoch, compared=("at_end",))


def titan(ranks: int, **settings: Any) -> Trial:
    run = torchtitan_run.Run(**settings, steps=STEPS)
    warm = "tests.support.torchtitan_warm"
    return Trial("torchtitan", torchtitan_run.lived, run, ranks, 5, secs=0.2, preload=warm, compared=("at_end",))


def bridge(ranks: int, **settings: Any) -> Trial:
    run = bridge_run.Run(**settings, batch=2 * ranks, steps=STEPS)
    warm = "tests.support.bridge_warm"
    return Trial("megatron-bridge", bridge_run.lived, run, ranks, 5, secs=0.2, preload=warm, compared=("at_end",))


def trials(policy: str) -> Iterator[tuple[str, Trial]]:
    """Of every host: which ranks and settings go with a policy is chosen so that all of them occur."""
    number, settings = [*POLICIES].index(policy), POLICIES[policy]
    sharding = ({"optimizers": 2, "scaler": True}, {"sharding": "fsdp2"}, {"sharding": "ddp"}, {"sharding": "ddp"})
    ranks = (1, 4, 2, 4)[number]
    yield "plain", loop("torch", ranks, **settings, **sharding[number], unused=ranks == 1)
    accumulate = (1, 2, 2, 1)[number]
    yield (
        "accelerate",
        loop("accelerate", 2 - number % 2, **settings, prepared="accelerate", unused=False, accumulate=accumulate),
    )
    ddp, fsdp2 = {"sharding": "ddp"}, {"sharding": "fsdp2", "unused": False}
    beside = (ddp, fsdp2, {"optimizers": 2}, ddp)[number]
    yield "fabric", loop("lightning", (2, 2, 1, 2)[number], **settings, prepared="fabric", **beside)
    beside = ({}, {"fsdp2": True, "accumulate": 2}, {"accumulate": 4}, {})[number]
    yield "transformers", trained((2, 2, 1, 2)[number], **settings, **beside)
    experts = {"degrees": {"expert_parallel": 2}}
    beside = (experts, {"validate": True}, {"recompute": True}, experts)[number]
    yield "torchtitan", titan((2, 2, 1, 2)[number], **settings, **beside)
    beside = ({"experts": 2}, {"sharded": True}, {}, {"experts": 2})[number]
    yield "bridge", bridge((2, 2, 1, 4)[number], **settings, **beside)


def survive(trial: Trial, root: Path, seed: str, count: int) -> dict[str, Any]:
    """What came of it. Raises AssertionError where it did not end as it must."""
    drawn = kills.drawn(seed, count, trial.steps - LAST, trial.epoch, trial.ranks, trial.secs)
    ends = kills.killed(functools.partial(trial.start, root / "killed"), drawn)
    row: dict[str, Any] = {"kills": [[kill.step, kill.rank, round(kill.secs, 3)] for kill in drawn]}
    if trial.run.policy[0] == "MoC":
        counted = recounted(root / "killed", trial.ranks)
        return row | {"faults": len(counted.faults), "routed": counted.routed, "lost": counted.lost}
    undisturbed = kills.killed(functools.partial(trial.start, root / "whole"), [])
    for rank, (whole, end) in enumerate(zip(undisturbed, ends, strict=True)):
        tensors, others = whole["tensors"], end["tensors"]
        assert tensors.keys() == others.keys(), rank
        differing = [name for name, tensor in tensors.items() if not torch.equal(tensor, others[name])]
        assert not differing, (rank, differing)
        assert [whole[name] for name in trial.compared] == [end[name] for name in trial.compared], rank
    return row | {"tensors": sum(len(end["tensors"]) for end in ends)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", nargs="+", default=["plain", "accelerate", "fabric", "transformers", "torchtitan"])
    parser.add_argument("--policies", nargs="+", default=[*POLICIES], choices=[*POLICIES])
    parser.add_argument("--seed", default="0", help="of all kills, with the names of host and policy")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--write", action="store_true", help=f"replace these rows of {RESULTS.name}")
    order = parser.parse_args()
    failed = 0
    for policy in order.policies:
        for host, trial in trials(policy):
            if host not in order.hosts:
                continue
            began, seed = time.monotonic(), f"{host} {policy} {order.seed}"
            root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="host_kills_"))
            row = {"host": host, "version": f"{trial.package} {version(trial.package)}", "policy": policy}
            row |= {"ranks": trial.ranks, "steps": trial.steps, "seed": seed}
            try:
                row |= survive(trial, root, seed, order.kills) | {"wrong": None}
            except AssertionError:
                failed += 1
                row["wrong"] = traceback.format_exc()[-3000:]
            shutil.rmtree(root)
            row["secs"] = round(time.monotonic() - began, 1)
            print(json.dumps(row), flush=True)
            if order.write:
                keep(row)
    return int(failed > 0)


def keep(row: dict[str, Any]) -> None:
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = [old for old in rows if (old["host"], old["policy"]) != (row["host"], row["policy"])] + [row]
    report.write_json(RESULTS, {"machine": report.machine(), "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
