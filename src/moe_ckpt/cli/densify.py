"""``moe-ckpt densify``: makes a dense checkpoint from the gradient log that a run left in memory."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence

from moe_ckpt.cli.shared import DEFAULT_MEMORY, add_memory, memory_directory, progress_bar

EPILOG = """\
examples:
  moe-ckpt densify runs/x                              the newest step that can be made from this node's memory
  moe-ckpt densify runs/x --step 1234                  another step of the log
  moe-ckpt densify runs/x --list                       which steps can be made
  moe-ckpt densify runs/x --directory /mnt/node0 --directory /mnt/node1
                                                       directories of several nodes, copied to this machine

the result is an ordinary checkpoint of the store, equal in every bit to what the run had: start any number of ranks, in
any layout, and they resume from it. On another kind of device than the one that trained, last bits may differ, which
is said.

exit code: 0 written, 1 what is needed is damaged, 2 not written (the reason is on stderr)
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "densify",
        help="make a dense checkpoint of any step of a gradient log",
        description="Make a dense checkpoint from what a run left in memory: anchors, and the gradients that its "
        "optimizers consumed since (policy GradientLog). No process of the run may be alive. Memory is not changed.",
        epilog=EPILOG,
    )
    parser.add_argument("store", help="store of the run: a directory or URL; the checkpoint is written there")
    add_memory(parser, f"memory to read, by default {DEFAULT_MEMORY}: ")
    parser.add_argument("--step", type=int, help="step to make; default: the newest that can be made")
    parser.add_argument("--list", action="store_true", help="print the steps that can be made, and write nothing")
    parser.add_argument(
        "--device", type=_device, help="cpu or cuda; default: the kind that trained, if this machine has it"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module first, which registers an optimizer's class (moe_ckpt.gradient_log.optimizers.register)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """0 when the checkpoint was written, or the steps were listed."""
    from moe_ckpt.errors import ConfigError
    from moe_ckpt.format.manifest import STORE_NAME
    from moe_ckpt.gradient_log.densify import densify, steps_in_memory
    from moe_ckpt.reading.reader import locate, open_store
    from moe_ckpt.storage import LocalStorage
    from moe_ckpt.storage.local import access_of

    _require_device(args.device)
    storage, directory = locate(args.store)
    if directory is not None:
        raise ConfigError(f"{args.store} is a step directory: give its store, and --step")
    open_store(args.store)
    if isinstance(storage, LocalStorage):  # whoever may read the run's files may read what is added to them
        storage = LocalStorage(storage.root, access=access_of(f"{storage.root}/{STORE_NAME}"))
    roots = args.directory or [memory_directory(DEFAULT_MEMORY)]
    sys.path[:0] = [os.getcwd()] if args.imports else []  # where a user's own modules are, as for ``python -m``
    for module in args.imports:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"--import {module}: {error}") from error
    if args.list:
        steps = steps_in_memory(storage, roots)
        print(json.dumps({"steps": steps}) if args.json else "\n".join(map(str, steps)))
        return 0
    with progress_bar("densifying") as progress:
        done = densify(storage, roots, args.step, args.device, progress)
    where = f"{storage.root}/{done.manifest.directory}"
    if done.inexact:
        print(f"moe-ckpt densify: last bits may differ from the run's: {done.inexact}", file=sys.stderr)
    if args.json:
        result = {"path": where, "step": done.manifest.step, "updates": done.updates, "nbytes": done.nbytes}
        print(json.dumps({**result, "exact": not done.inexact, "device": str(done.device)}, indent=2))
        return 0
    print(f"{summary(done.manifest.step, done.nbytes, done.updates, str(done.device))}:", file=sys.stderr)
    print(where)
    return 0


def _device(text: str) -> str:
    """The value of ``--device``. Others that torch knows have no kernels to repeat updates with."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"no such choice: {text!r}; there are cpu, cuda")
    return text


def _require_device(device: str | None) -> None:
    """See that this machine has what ``--device`` names. Raises ``ConfigError``."""
    if device is None or device == "cpu":
        return
    import torch

    from moe_ckpt.errors import ConfigError

    devices, number = torch.cuda.device_count(), int(device.partition(":")[2] or 0)
    if number >= devices:
        what = f"there are {devices}, counted from 0" if devices else "torch finds no CUDA device here"
        raise ConfigError(f"--device {device}: {what}; give --device cpu, or leave it out")


def summary(step: int, nbytes: int, updates: int, device: str) -> str:
    """Returns what is printed above the path of a checkpoint."""
    from moe_ckpt.core.user_text import human_bytes

    return f"step {step}, {human_bytes(nbytes)}, {updates} update{'s' * (updates != 1)} repeated on {device}"
