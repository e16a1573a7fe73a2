"""``moe-ckpt``: one console command, each subcommand in a module of its own.

A module offers ``add_parser(subparsers)``, which is called for every command line and so imports nothing
heavy, and ``run(args, rest) -> int``, the exit code. ``rest`` holds arguments that the parser does not know: settings,
which only ``simulate`` and ``plan`` take.

Exit codes: 0 done, 1 damage was found, 2 wrong usage or nothing usable there, 130 Ctrl-C, 141 nobody read on.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_ckpt import __version__
from moe_ckpt.errors import CoverageError, DamagedError, MoECheckpointError

_HERE = ("inspect", "verify", "export", "memory", "densify")
_SIMULATOR = ("window", "simulate", "plan")
_TAKE_SETTINGS = ("simulate", "plan")
COMMANDS = {name: f"moe_ckpt.cli.{name}" for name in _HERE} | {
    name: f"moe_ckpt_sim.commands.{name}" for name in _SIMULATOR
}
"""The commands in the order of ``--help``, and their modules."""
_BROKEN_PIPE = 141
"""As of a program that SIGPIPE ended: 128 + 13. Not 0, for what was not printed may have been a damage."""

EPILOG = """\
examples:
  moe-ckpt inspect runs/x                            what is in a store
  moe-ckpt verify runs/x                             are all bytes intact?
  moe-ckpt export runs/x/step_00000120 --to dcp      for other tools
  moe-ckpt memory                                    what runs left in this node's memory
  moe-ckpt densify runs/x                            a dense checkpoint from a gradient log in memory
"""


class Parser(argparse.ArgumentParser):
    """Prints examples as they are, and leaves out the usage lines before an error; those are in ``--help``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Exits with 2 after one line on stderr."""
        print(f"{self.prog}: {message.removeprefix('argument ')}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="moe-ckpt",
        description="Look into, check and convert checkpoints of moe_ckpt; simulate training under failures.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"moe-ckpt {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in COMMANDS.values():
        importlib.import_module(module).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Errors of this package become one line on stderr."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names in a store may be in characters that this terminal lacks
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _watched(sys.stdout)
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()  # its reader (head, less) has gone
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return 130
    except _NotTakenError as error:
        _silence_stdout()
        print(f"moe-ckpt: standard output cannot be written: {error}", file=sys.stderr)
        return 2
    return code


def _open_closed_streams() -> None:
    """Opens standard streams that the caller has closed (``>&-``): no file of ours may get their numbers."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  for good


class _NotTakenError(Exception):
    """Standard output takes no more, as on a full disk. No ``OSError``: that could be of any file."""


class _Stdout(io.FileIO):
    """Says of an error that it is standard output's."""

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _NotTakenError(error.strerror or str(error)) from error


def _watched(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, whose errors can be told from those of other files."""
    raw = io.BufferedWriter(_Stdout(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering)


def _silence_stdout() -> None:
    """So that Python does not complain once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    try:
        args, rest = parser.parse_known_args(argv)
        unknown = [word for word in rest if word.startswith("-") or args.command not in _TAKE_SETTINGS]
        if unknown:
            Parser(prog=f"moe-ckpt {args.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit:
        sys.stdout.flush()  # of --help: here, where a reader that has gone does no harm
        raise
    command = importlib.import_module(COMMANDS[args.command])
    try:
        code: int = command.run(args, rest)
    except BrokenPipeError:
        raise
    except MoECheckpointError as error:
        print(f"moe-ckpt {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, (DamagedError, CoverageError)) else 2
    except OSError as error:
        if args.command in _TAKE_SETTINGS:
            raise
        print(f"moe-ckpt {args.command}: {error}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
