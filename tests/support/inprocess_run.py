"""One process of a Megatron run that restarts within its processes; ``python -m tests.support.inprocess_run JSON``.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as a launcher sets them. The journal ``<journal>.<first rank>`` has a line
for every call and every iteration, each with the process id.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_ckpt import inprocess
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import EXACT, describe, draw

FAST = {
    "monitor_thread_interval": timedelta(seconds=0.2),
    "monitor_process_interval": timedelta(seconds=0.2),
    "heartbeat_interval": timedelta(seconds=0.2),
    "progress_watchdog_interval": timedelta(seconds=0.2),
    "last_call_wait": timedelta(seconds=0.2),
}


def main(told: dict[str, Any]) -> None:
    first_rank = os.environ["RANK"]
    journal = Path(f"{told['journal']}.{first_rank}")

    def note(**line: Any) -> None:
        with journal.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **line}) + "\n")

    @inprocess.restartable(told["ranks"], **FAST)
    def train(restart: inprocess.Restart) -> dict[str, Any]:
        from moe_ckpt import Memory, megatron, policies

        note(started=restart.iteration)
        random.seed(1 + restart.iteration)
        np.random.seed(1 + restart.iteration)
        restart.init_process_group("gloo", timeout=timedelta(seconds=60))
        # What is right comes from memory. On gloo a rank that waits for one that lives comes back by timeout only.
        built = megatron_gpt.build(Setup(**told["setup"]), 1 + restart.iteration, timeout_minutes=0.2)
        ckpt = megatron.attach(
            built.chunks,
            built.optimizer,
            built.scheduler,
            policy=getattr(policies, told["policy"])(**told["arguments"]),
            dirpath=told["store"],
            memory=Memory(directory=told["memory"], storage_every=1000),
            when_busy="wait",
            timeout_secs=12.0,
        )
        with restart.keeping(ckpt):
            progress = ckpt.resume()
            plan = ckpt.recovery_plan
            note(
                call=restart.iteration,
                rank=int(os.environ["RANK"]),
                resumed=progress.iteration,
                remade=plan and plan.updates,
            )
            draw(3 if progress.restored else 1)
            built.consumed_samples = progress.consumed_samples
            for iteration in range(progress.iteration, told["steps"]):
                if [int(first_rank), iteration + 1, restart.iteration] in told["kills"]:
                    time.sleep(told["delay"])
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = megatron_gpt.forward_backward(built, iteration)
                note(iteration=iteration + 1, loss=None if loss is None else loss.hex())
                made, _ = megatron_gpt.update(built)
                ckpt.after_step(iteration + 1, consumed_samples=built.consumed_samples, updated=made)
            return describe(ckpt, built) | {"rank": int(os.environ["RANK"])}

    found = train()
    if found is not None:
        torch.save({key: found[key] for key in (*EXACT, "rank")}, told["out"] + first_rank)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
