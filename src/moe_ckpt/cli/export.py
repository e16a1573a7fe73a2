"""``moe-ckpt export``: writes one checkpoint in a format that other tools open."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moe_ckpt.cli.shared import add_memory, progress_bar

EPILOG = """\
examples:
  moe-ckpt export runs/x/step_00000120 --to dcp --output out         torch.distributed.checkpoint, with optimizer
  moe-ckpt export runs/x/step_00000120 --to safetensors -o weights   the model's weights
  moe-ckpt export runs/x --to hf -o model                            the same for from_pretrained, or an error
  moe-ckpt export runs/x --to hf --config Qwen3-30B-A3B -o model     the same of a Megatron run
  moe-ckpt export runs/x --to lightning -o last.ckpt                 newest step of a store, for fit(ckpt_path=)
  moe-ckpt export runs/x --directory /dev/shm --to safetensors       newest step that an ended run left in memory

an existing output is never overwritten; exit code: 0 written, 1 the checkpoint is damaged, 2 not written
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="convert a checkpoint for other tools",
        description="Write one checkpoint, whole and verified, in a format that other libraries open.",
        epilog=EPILOG,
    )
    parser.add_argument("path", help="step directory (or store: its newest good dense step), or a URL of one")
    parser.add_argument(
        "--to", required=True, choices=("dcp", "safetensors", "hf", "lightning"), help="format to write"
    )
    add_memory(parser)
    parser.add_argument("--output", "-o", help="file or directory to create (default: named after the step, here)")
    parser.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        help="safetensors: prefix to remove from names, such as 'net.' (default: that of a transformers model inside "
        "the module, else none; '' for none)",
    )
    parser.add_argument(
        "--max-file-size", metavar="SIZE", help="safetensors, hf: larger models are split (default: 50GB)"
    )
    parser.add_argument(
        "--config", metavar="PATH", help="hf, of a Megatron run: directory of the config.json of the model on the hub"
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """0 when the output was written. Says on stderr which step it is of, for a store leaves that open."""
    from moe_ckpt.core.user_text import parse_bytes
    from moe_ckpt.errors import ConfigError
    from moe_ckpt.format.manifest import Manifest
    from moe_ckpt.interop.export import export

    size = None if args.max_file_size is None else parse_bytes(args.max_file_size, "--max-file-size")
    if size is not None and args.to not in ("safetensors", "hf"):
        raise ConfigError(f"--max-file-size {args.max_file_size}: is for --to safetensors; {args.to} takes no size")
    taken: list[Manifest] = []
    with progress_bar("exporting") as progress:
        target = export(
            args.path,
            args.to,
            args.output,
            progress,
            strip_prefix=args.strip_prefix,
            max_file_bytes=size,
            config=args.config,
            chosen=taken.append,
            memory=args.directory,
        )
    manifest = taken[-1]
    stale = manifest.stale_experts
    older = f", of which {stale} experts are older than that" if stale else ""
    print(f"step {manifest.step} ({manifest.directory}){older}:", file=sys.stderr)
    print(target)
    return 0
