"""Processes that are killed: what a restart takes in parts, and whether it has the bits of a run that nobody killed.

Run as ``python -m benchmarks.gpu.lives`` by its own functions only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_BEGAN = float(os.environ.get("LIFE_BEGAN", time.time()))
POLICIES = ("dense", "windows", "log")
PRECISIONS = ("fp32", "bf16")


def restart(device: str, directory: Path) -> dict[str, Any]:
    """Kills a run that has its newest step in memory, and times the parts of the next start, in seconds.

    Returns:
        Seconds from the start of the process: "imports", "model", "resumed", "first step"; and "step".
    """
    run = ["--device", device, "--directory", str(directory), "--policy", "dense", "--shape", device]
    _start([*run, "--steps", "8", "--kill-after", "3"], expected=-signal.SIGKILL)
    return _start([*run, "--steps", "10"])


def exact(device: str, directory: Path, until: float, say: Any) -> list[dict[str, Any]]:
    """Kills small runs at random, and compares each with one that nobody killed.

    Args:
        until: ``time.monotonic()`` after which no other case begins.

    Returns:
        Per case: its name, the steps of its kills, and how many tensors differ.
    """
    cases: list[dict[str, Any]] = []
    for policy in POLICIES:
        for precision in PRECISIONS:
            name = f"{policy}, {precision}"
            if time.monotonic() > until:
                cases.append({"case": name, "problem": "no time was left"})
                continue
            with tempfile.TemporaryDirectory(dir=directory) as root:
                run = ["--device", device, "--shape", "cpu", "--policy", policy, "--precision", precision]
                kills = sorted(random.sample(range(3, 24), 3))
                whole = _start([*run, "--directory", f"{root}/whole", "--steps", "24"])
                run += ["--directory", f"{root}/killed"]
                for kill_at in kills:
                    _start([*run, "--steps", str(kill_at), "--kill-after", "0"], -signal.SIGKILL)
                killed = _start([*run, "--steps", "24"])
            differing = sum(whole["digests"][key] != killed["digests"][key] for key in whole["digests"])
            cases.append({"case": name, "kills": kills, "resumed": killed["step"], "tensors that differ": differing})
            say(f"{name}: killed at {kills}, {differing} of {len(whole['digests'])} tensors differ")
    return cases


def _start(arguments: list[str], expected: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.lives", *arguments]
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "LIFE_BEGAN": repr(time.time())}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    if done.returncode != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1500:]}")
    lines = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return result


def main(arguments: list[str]) -> int:
    """Lives one life: prints marks and digests as JSON, or kills itself after its last step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.lives", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--shape", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-after", type=float, default=None, help="SIGKILL so many seconds after the last step")
    chosen = parser.parse_args(arguments)
    marks: dict[str, Any] = {}

    import torch

    import moe_ckpt
    from benchmarks.gpu.training import Training
    from moe_ckpt.policies import Dense, GradientLog, MoEvement
    from moe_ckpt.policies.base import Policy

    torch.use_deterministic_algorithms(True, warn_only=True)
    marks["imports"] = time.time() - _BEGAN
    training = Training(chosen.device, chosen.shape, autocast=chosen.precision == "bf16")
    if chosen.device == "cuda":
        torch.cuda.synchronize()
    marks["model"] = time.time() - _BEGAN
    chosen.directory.mkdir(exist_ok=True, parents=True)
    memory = moe_ckpt.Memory(directory=chosen.directory, storage_every=1_000_000)
    policies: dict[str, Policy] = {"dense": Dense(), "windows": MoEvement(window=3), "log": GradientLog()}
    ckpt = moe_ckpt.attach(
        training.model,
        training.optimizer,
        policy=policies[chosen.policy],
        dirpath=chosen.directory / "store",
        memory=memory,
    )
    with ckpt:
        step = ckpt.resume().step
        marks |= {"resumed": time.time() - _BEGAN, "step": step}
        while step < chosen.steps:
            step += 1
            training.step(step)
            ckpt.after_step(step)
            if chosen.device == "cuda" and "first step" not in marks:
                torch.cuda.synchronize()
            marks.setdefault("first step", time.time() - _BEGAN)
        if chosen.kill_after is not None:
            time.sleep(chosen.kill_after)
            os.kill(os.getpid(), signal.SIGKILL)
    marks["digests"] = training.digests()
    print(json.dumps(marks))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
