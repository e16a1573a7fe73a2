"""A rank is killed under the real torchrun: its agent starts all ranks again, and the job ends well by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.megatron.elastic_rank import ended, telling, write_job
from tests.megatron.exactness import Case, differing, require_losses, split_lives, uninterrupted
from tests.support.megatron_gpt import Setup
from tests.support.megatron_run import Journal

CASES = {
    "dense": Case(
        Setup(ep=2, num_microbatches=2, precision="bf16", grouped=True, dist_opt=True),
        ("Dense", {"every_n_steps": 1}),
        ((1, 4, "train"),),
        ranks=2,
        steps=6,
    ),
    "windows": Case(
        Setup(pp=2, ep=2, num_microbatches=2, precision="bf16", dist_opt=True),
        ("MoEvement", {"window": 3}),
        ((1, 8, "train"), (2, 1, "replay"), (0, 8, "manifest")),
        steps=10,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_agent_starts_all_ranks_again(name, tmp_path):
    case = CASES[name]
    expected = uninterrupted(case.setup, case.ranks, case.steps)
    write_job(case, tmp_path)
    said = torchrun(case, tmp_path)
    lives = split_lives(Journal(str(tmp_path / "journal"), case.ranks - 1).lines())
    assert len(lives) == len(case.kills) + 1, said[-6000:]
    assert said.count("exitcode: -9") >= len(case.kills), said[-6000:]
    assert "Warning" not in said, said
    for rank, (one, other) in enumerate(zip(expected, ended(tmp_path, case.ranks), strict=True)):
        for what, value in telling(one).items():
            assert differing(value, other[what]) == [], f"rank {rank}: {what}"
    require_losses(expected[-1]["losses"], lives, case.steps)


def torchrun(case, directory, timeout_secs=280.0):
    """What the job said. It must end well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
    command += [f"--max-restarts={len(case.kills)}", "-m", "tests.megatron.elastic_rank", str(directory)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Without it gloo reads addresses of the dead from the rendezvous store (pytorch issue 135712).
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
