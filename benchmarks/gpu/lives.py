"""Processes that are killed: what a restart takes in parts, and whether it has the bits of a run that nobody killed.

Run as ``python -m benchmarks.gpu.lives`` by its own functions only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

_BEGAN = float(os.environ.get("LIFE_BEGAN", time.time()))
POLICIES = ("dense", "windows", "log")
PRECISIONS = ("fp32", "bf16")
SOURCES = ("own memory", "storage", "a peer's memory")
FAMILIES = ("olmoe", "gpt_oss", "deepseek_v3", "qwen3")
GRAPHS = "megatron with CUDA graphs"
MODELS = ("gpt", *FAMILIES, "megatron", GRAPHS)
_NEEDS = {**dict.fromkeys(FAMILIES, "transformers"), "megatron": "megatron.core", GRAPHS: "megatron.core"}
"""Model -> the package that has it."""
_AT_ONCE = {"cuda": 4, "cpu": 1}
"""Cases of exactness that run at the same time: nobody times them."""
_STEPS, _KILLS = 24, 3
_LIFE_SECS = 240


def restart(device: str, directory: Path, source: str) -> dict[str, Any]:
    """Ends a run that has its newest step in ``source``, and times the parts of the next start, in seconds.

    From memory it is killed. What is read from storage lies in the page cache. A peer is a second rank, on the same
    device, whose copies the first one needs because its own memory was emptied.

    Returns:
        Seconds from the start of the process: "imports", "model", "resumed", "first step"; and "step".
    """
    run = ["--device", device, "--directory", str(directory), "--policy", "dense", "--shape", device]
    ranks, steps = (2, 3) if source == "a peer's memory" else (1, 8)
    if source == "storage":
        _start([*run, "--no-memory", "--steps", "2"])
        return _start([*run, "--no-memory", "--steps", "4"])
    secs = {"cuda": 15, "cpu": 3}[device] if ranks > 1 else 3
    _start([*run, "--steps", str(steps), "--kill-after", str(secs)], -signal.SIGKILL, ranks)
    if ranks > 1:
        shutil.rmtree(directory / "node_0")
    return _start([*run, "--steps", str(steps + 2)], ranks=ranks)


def cases() -> Iterator[tuple[str, str, str]]:
    """Yields (model, policy, precision) of every run that is to come out exact, the most telling first."""
    for policy in POLICIES:
        for precision in PRECISIONS:
            yield "gpt", policy, precision
    yield "megatron", "dense", "fp32"
    yield GRAPHS, "dense", "fp32"
    for number, family in enumerate(FAMILIES):
        yield family, POLICIES[number % len(POLICIES)], "fp32"


def exact(device: str, directory: Path, until: float, note: Callable[[dict[str, Any], str], None]) -> None:
    """Kills small runs at random, and compares each with one that nobody killed.

    Args:
        until: ``time.monotonic()`` after which no other case begins.
        note: Takes of each case its name, the steps of its kills, and how many tensors differ, or what went wrong; and
            the same as text. With CUDA graphs also, of how many experts the tokens differ from those without graphs.
    """
    with ThreadPoolExecutor(_AT_ONCE[device]) as pool:
        for result in pool.map(partial(_case, device, directory, until), cases()):
            differing = result.get("tensors that differ")
            text = result.get("problem") or f"killed at {result['kills']}, {differing} of {result['tensors']} differ"
            if (counts := result.get("token counts that differ")) is not None:
                text += f", and the tokens of {counts} experts from those without graphs"
            note(result, f"{result['case']}: {text}")


def _case(device: str, directory: Path, until: float, case: tuple[str, str, str]) -> dict[str, Any]:
    model, policy, precision = case
    result: dict[str, Any] = {"case": ", ".join(case)}
    package = _NEEDS.get(model, "torch")
    if not _is_installed(package):
        return {**result, "problem": f"{package} is not installed"}
    if model == GRAPHS and (problem := _no_graphs(device)):
        return {**result, "problem": problem}
    if time.monotonic() > until:
        return {**result, "problem": "no time was left"}
    try:
        with tempfile.TemporaryDirectory(dir=directory) as root:
            run = ["--device", device, "--shape", "cpu", "--policy", policy, "--precision", precision]
            if model == GRAPHS:
                plain = _start([*run, "--model", "megatron", "--directory", f"{root}/plain", "--steps", str(_STEPS)])
            run += ["--model", model]
            kills = sorted(random.sample(range(3, _STEPS), _KILLS))
            whole = _start([*run, "--directory", f"{root}/whole", "--steps", str(_STEPS)])
            run += ["--directory", f"{root}/killed"]
            for kill_at in kills:
                _start([*run, "--steps", str(kill_at), "--kill-after", "0"], -signal.SIGKILL)
            killed = _start([*run, "--steps", str(_STEPS)])
    except Exception as error:  # the next case may go well
        return {**result, "problem": f"{type(error).__name__}: {error}"[-600:]}
    keys = whole["digests"].keys() | killed["digests"].keys()
    differing = sum(whole["digests"].get(key) != killed["digests"].get(key) for key in keys)
    resumed = {"kills": kills, "resumed": killed["step"], "tensors": len(keys), "tensors that differ": differing}
    if model == GRAPHS:
        if not (whole["has_captured"] and killed["has_captured"]):
            return {**result, "problem": "no graph was captured"}
        pairs = zip(*(chain.from_iterable(run["tokens"]) for run in (whole, plain)), strict=True)
        resumed["token counts that differ"] = sum(graphs != without for graphs, without in pairs)
    return {**result, **resumed}


def _no_graphs(device: str) -> str:
    """Returns why there are no CUDA graphs here; nothing if there are."""
    if device == "cpu":
        return "not on a CPU: CUDA captures graphs"
    installed = version("megatron-core")
    if tuple(map(int, installed.split(".")[:2])) < (0, 18):
        return f"megatron-core {installed} has no cuda_graph_modules, which 0.18 has"
    return ""


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def _start(arguments: Sequence[str], expected: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Lives one life, and returns what its first rank prints."""
    command = [sys.executable, "-m", "benchmarks.gpu.lives", *arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environ = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "LIFE_BEGAN": repr(time.time())}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as outputs:
        processes = []
        for rank in range(ranks):
            with open(f"{outputs}/stdout_{rank}", "w") as out, open(f"{outputs}/stderr_{rank}", "w") as errors:
                environ_of_rank = {**environ, "RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=environ_of_rank, stdout=out, stderr=errors))
        try:
            codes = [process.wait(_LIFE_SECS) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, code in enumerate(codes):
            if code != expected:
                said = Path(f"{outputs}/stderr_{rank}").read_text()
                raise RuntimeError(f"{' '.join(arguments)} ended with {code}: {said[-1500:]}")
        lines = Path(f"{outputs}/stdout_0").read_text().splitlines()
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return result


def main(arguments: list[str]) -> int:
    """Lives one life: prints marks and digests as JSON, or kills itself after its last step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.lives", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--shape", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--no-memory", action="store_true", help="checkpoints go to storage alone")
    parser.add_argument("--kill-after", type=float, default=None, help="SIGKILL so many seconds after the last step")
    chosen = parser.parse_args(arguments)
    marks: dict[str, Any] = {}

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import moe_ckpt
    from benchmarks.gpu import megatron_run
    from benchmarks.gpu.training import Training
    from moe_ckpt.policies import Dense, GradientLog, MoEvement
    from moe_ckpt.policies.base import Policy
    from moe_ckpt.reading.reader import StoreReader
    from moe_ckpt.storage import LocalStorage

    torch.use_deterministic_algorithms(True, warn_only=True)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    is_megatron = chosen.model.startswith("megatron")
    if ranks > 1 or is_megatron:
        dist.init_process_group("gloo")
    marks["imports"] = time.time() - _BEGAN
    policies: dict[str, Policy] = {"dense": Dense(), "windows": MoEvement(window=3), "log": GradientLog()}
    chosen.directory.mkdir(exist_ok=True, parents=True)
    node = chosen.directory if ranks == 1 else chosen.directory / f"node_{rank}"
    node.mkdir(exist_ok=True)
    memory = moe_ckpt.Memory(directory=node, storage_every=1_000_000, replicas=ranks - 1)
    options: dict[str, Any] = {"policy": policies[chosen.policy], "dirpath": chosen.directory / "store"}
    options |= {"memory": None if chosen.no_memory else memory, "when_busy": "wait"}
    training: Any
    if is_megatron:
        training = megatron_run.MegatronTraining(chosen.device, graphs=chosen.model == GRAPHS)
        ckpt = training.attach(**options)
    else:
        training = Training(chosen.device, chosen.shape, chosen.model, autocast=chosen.precision == "bf16")
        if ranks > 1:
            training.model = DistributedDataParallel(training.model)
        ckpt = moe_ckpt.attach(training.model, training.optimizer, **options)
    if chosen.device == "cuda":
        torch.cuda.synchronize()
    marks["model"] = time.time() - _BEGAN
    with ckpt:
        step = ckpt.resume().iteration if is_megatron else ckpt.resume().step
        marks |= {"resumed": time.time() - _BEGAN, "step": step}
        while step < chosen.steps:
            step += 1
            ckpt.after_step(step, **(training.step(step) or {}))
            if chosen.device == "cuda" and "first step" not in marks:
                torch.cuda.synchronize()
            marks.setdefault("first step", time.time() - _BEGAN)
        if chosen.kill_after is not None:
            time.sleep(chosen.kill_after)
            os.kill(os.getpid(), signal.SIGKILL)
    marks["digests"] = training.digests()
    if is_megatron:
        reader = StoreReader(LocalStorage(chosen.directory / "store"))
        marks["tokens"] = reader.manifest(reader.directories()[0]).tokens["applied"]
        marks["has_captured"] = training.has_captured
    print(json.dumps(marks))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
