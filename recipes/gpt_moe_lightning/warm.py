"""Start the demo's runs as forks of one process that has imported torch and Lightning, for their import takes most of a
start on a small machine.

Everything else is as on the command line: torchrun's own agent starts the processes of a run, and again after a kill.
One line of JSON on standard input starts one run: the words of ``torchrun``'s command, and the file for its output.
Its exit code is the answer, on standard output.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that it runs as a script, from any directory

import hydra  # noqa: E402, F401
from torch.distributed.launcher.api import elastic_launch  # noqa: E402
from torch.distributed.run import config_from_args, get_args_parser  # noqa: E402

from recipes.demonstrating import stopped_by_sigterm  # noqa: E402
from recipes.gpt_moe_lightning import train  # noqa: E402

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that torchrun's agent handles, and that its workers must not handle in its way."""


def worker(arguments: Sequence[str]) -> None:
    """Train on one rank, with signals as in a process that was started afresh."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["train", *arguments]
    try:
        train.command()
    except SystemExit as ended:
        if ended.code:
            raise
    except Exception:
        traceback.print_exc()  # the agent would only name the file that it is in
        raise


def agent(words: Sequence[str], output: str) -> None:
    """Run torchrun's agent until its workers have finished, or have died too often."""
    with open(output, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    arguments = get_args_parser().parse_args(words)
    arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"  # what torchrun makes of --standalone
    config, _, _ = config_from_args(arguments)
    config.start_method = "fork"
    elastic_launch(config, worker)(arguments.training_script_args)


def main() -> None:
    for line in sys.stdin:
        process = multiprocessing.get_context("fork").Process(target=agent, args=json.loads(line))
        process.start()
        try:
            process.join()
        finally:
            process.terminate()  # nothing where it has ended; the agent passes it on to the workers
            process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    with stopped_by_sigterm():
        main()
