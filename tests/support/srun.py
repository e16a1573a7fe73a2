"""``python -m tests.support.srun OPTIONS PROGRAM ARGUMENTS``: what SLURM does to a job of two nodes, on this machine.

One task per node, each with all processes that it starts. When one is gone the job is over, as after the loss of a
node: every other process gets SIGTERM, and SIGKILL ``KILL_WAIT_SECS`` later. Whoever requeues the job starts it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

NODES = 2
KILL_WAIT_SECS = 30.0


def processes_of(task: int) -> list[psutil.Process]:
    """A task and all that it started, as a cgroup knows them."""
    first = psutil.Process(task)
    return [first, *first.children(recursive=True)]


def main(words: list[str]) -> int:
    """Returns the exit code of the first task that fails. The tasks' process ids go to the file ``SRUN_TASKS``."""
    command = words[next(at for at, word in enumerate(words) if not word.startswith("--")) :]
    environments = ({**os.environ, "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)} for node in range(NODES))
    tasks = [subprocess.Popen(command, env=environment) for environment in environments]
    Path(os.environ["SRUN_TASKS"]).write_text("\n".join(str(task.pid) for task in tasks))
    while all(task.poll() in (None, 0) for task in tasks):
        if all(task.poll() == 0 for task in tasks):
            return 0
        time.sleep(0.05)
    left = [each for task in tasks if task.poll() is None for each in processes_of(task.pid)]
    for each in left:
        each.terminate()
    _, still = psutil.wait_procs(left, KILL_WAIT_SECS)
    for each in still:
        each.kill()
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
