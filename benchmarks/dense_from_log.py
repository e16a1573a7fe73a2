"""What a dense checkpoint on storage costs under a gradient log: copied by training, or made from the log beside it.

Bytes, and CPU time of each thread, are counted in a real Lightning run on the CPU; wall time is not. Each case is a
process of its own. docs/gradient_log.md has the table of results/dense_from_log.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

import lightning.pytorch as pl
import torch

from benchmarks.report import MIB, RESULTS, machine, write_json
from benchmarks.windowed import batches, trainer, workload
from benchmarks.workload import SIZES
from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.engine.session import CheckpointSession
from moe_ckpt.gradients.replay import OptimizerReplay
from moe_ckpt.gradients.replayed_share import RankShare
from moe_ckpt.policies import GradientLog

_EXAMPLE = "example: python benchmarks/dense_from_log.py --size small --json dense_from_log.json"
KEPT = RESULTS / "dense_from_log.json"
"""What docs/gradient_log.md tells of."""
WINDOW, EVERY, STEPS = 5, 10, 61
_THREADS = {"MainThread": "training", "moe_ckpt-persist": "persist", "moe_ckpt-seal": "seal"}


class _Counts(pl.Callback):
    """What this process did, step by step.

    Attributes:
        due: Of steps that go to storage, bytes and CPU seconds of the training thread in ``after_update``.
        logged: Of the others.
        held: Most bytes that the pool of buffers held.
        replayed: Most bytes of optimizers that a replay held at once.
    """

    def __init__(self) -> None:
        self.due: list[tuple[int, float]] = []
        self.logged: list[tuple[int, float]] = []
        self.held = self.replayed = 0
        self.cpu: dict[str, float] = defaultdict(float)
        after, replayed = CheckpointSession.after_update, RankShare.replayed

        def counted(session: CheckpointSession, *args: Any, **options: Any) -> Any:
            began = time.thread_time()
            record = after(session, *args, **options)
            if record.begun and record.step > EVERY:
                (self.due if record.to_storage else self.logged).append((record.nbytes, time.thread_time() - began))
            self.held = max(self.held, session._resources.pipeline._pool.held_bytes)
            return record

        def weighed(share: RankShare, *args: Any) -> OptimizerReplay:
            found = replayed(share, *args)
            weights = [tensor.detach() for tensor in found.tensors.values()]
            state = [v for o in found.optimizers for s in o.state.values() for v in s.values() if torch.is_tensor(v)]
            self.replayed = max(self.replayed, sum(each.nbytes for each in (*weights, *weights, *state)))
            return found

        session_class: Any = CheckpointSession
        share_class: Any = RankShare
        session_class.after_update, share_class.replayed = counted, weighed

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for thread in threading.enumerate():
            if thread.name in _THREADS and thread.native_id is not None:
                nanoseconds = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
                self.cpu[_THREADS[thread.name]] = int(nanoseconds) / 1e9


def one(size: str, dense_from: str) -> dict[str, Any]:
    """Returns the counts of one run."""
    torch.set_num_threads(1)
    config, batch = SIZES[size]
    counts = _Counts()
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        ours = MoECheckpoint(
            GradientLog(window=WINDOW, dense_from=dense_from),
            f"{home}/store",
            save_last=False,
            when_busy="wait",
            memory=Memory(directory=memory, storage_every_n_steps=EVERY),
        )
        module = workload(config)
        trainer(STEPS, Path(home), counts, ours).fit(module, batches(config, batch))
    parameters = sum(each.numel() for each in module.parameters())
    return {
        "parameters": parameters,
        "tensors": sum(1 for _ in module.parameters()),
        "due": len(counts.due),
        **{f"due {name}": median(each[at] for each in counts.due) for at, name in enumerate(("bytes", "cpu"))},
        **{f"logged {name}": median(each[at] for each in counts.logged) for at, name in enumerate(("bytes", "cpu"))},
        "held": counts.held,
        "replayed": counts.replayed,
        "cpu": counts.cpu,
    }


def writing_secs(found: Mapping[str, Any]) -> float:
    """CPU seconds of the persist thread per checkpoint; the first and the last one are beside those that are due."""
    secs: float = found["cpu"]["persist"] / (found["due"] + 2)
    return secs


def more_secs(found: Mapping[str, Mapping[str, Any]]) -> float:
    """CPU seconds that training and writing take more together, for each checkpoint that is made from the log."""
    secs = {name: float(found[name]["due cpu"]) + writing_secs(found[name]) for name in ("training", "log")}
    return secs["log"] - secs["training"]


def rows(found: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The table of docs/gradient_log.md."""
    training, log = found["training"], found["log"]

    def per_parameter(name: str) -> list[str]:
        return [f"{each[name] / each['parameters']:.1f}" for each in (training, log)]

    def milliseconds(secs: Callable[[Mapping[str, Any]], float]) -> list[str]:
        return [f"{1e3 * secs(each):.0f} ms" for each in (training, log)]

    return [
        ["", '`dense_from="training"`', '`dense_from="log"`'],
        ["---", "--:", "--:"],
        ["copied at a due step, bytes per parameter", *per_parameter("due bytes")],
        ["CPU of the training thread there", *milliseconds(lambda each: each["due cpu"])],
        ["the same at other steps", *milliseconds(lambda each: each["logged cpu"])],
        ["CPU of the thread that writes, per checkpoint", *milliseconds(writing_secs)],
        ["most that buffers held, bytes per parameter", *per_parameter("held")],
        ["optimizers of the replay beside them", "none", f"{log['replayed'] / MIB:.0f} MiB"],
    ]


def markdown(told: Mapping[str, Any]) -> str:
    """The lines of that table."""
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows(told["found"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=_EXAMPLE)
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--json", type=Path, default=None, help="keep what was counted in this file")
    parser.add_argument("--one", choices=("training", "log"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.one is not None:
        print(json.dumps(one(chosen.size, chosen.one)))
        return 0
    told: dict[str, Any] = {"machine": machine(), "size": chosen.size, "found": {}}
    for dense_from in ("training", "log"):
        command = [sys.executable, __file__, "--size", chosen.size, "--one", dense_from]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        told["found"][dense_from] = json.loads(done.stdout.splitlines()[-1])
    if chosen.json:
        write_json(chosen.json, told)
    log = told["found"]["log"]
    print(f"{markdown(told)}\n\n{chosen.size}: {log['parameters']:,} parameters, {log['tensors']} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
