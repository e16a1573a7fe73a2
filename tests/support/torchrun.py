"""A module under the real torchrun, whose agent starts all ranks again when one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest


def torchrun(
    module: str, argument: str, *, ranks: int, restarts: int, timeout_secs: float, python: str = sys.executable
) -> str:
    """Run ``python -m module argument`` on ``ranks`` ranks. It must end well; returns what it printed.

    python: what the agent starts ranks by; itself it is run by the interpreter. See ``warm.python``.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "-m", "tests.support.started", module, argument]
    environment = {
        **os.environ,
        "PYTHON_EXEC": python,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # With it and --standalone, no restart reads addresses of the dead (docs/torchrun.md).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    # A session of its own: on a timeout the launcher dies with its workers.
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=timeout_secs)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        pytest.fail(f"the job did not end in {timeout_secs} s\n{said[-6000:]}", pytrace=False)
    assert process.returncode == 0, said[-6000:]
    return said
