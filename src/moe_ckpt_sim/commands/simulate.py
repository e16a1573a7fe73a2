"""``moe-ckpt simulate``: simulates training with a checkpointing system under failures."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from moe_ckpt.cli.shared import progress_bar
from moe_ckpt.errors import ConfigError, MissingPackageError
from moe_ckpt.tables import BOLD_RED, PIPED_WIDTH, styled, width, wrapped
from moe_ckpt_sim.commands.outputs import not_written, require_directory, require_file, require_filled

if TYPE_CHECKING:
    from moe_ckpt_sim.commands.sim_runs import Result

EPILOG = """\
examples:
  moe-ckpt simulate                                                one run: where its time went
  moe-ckpt simulate setup=moevement_qwen policy=gemini failures.mtbf_secs=1800 --seeds 3
  moe-ckpt simulate setup=moevement_deepseek policy=gemini,moc_peers,moevement_peers failures.mtbf_secs=600
  moe-ckpt simulate 'failures.mtbf_secs=600,1800,3600' policy=checkfreq,moevement_peers --plot out --json=out.json
  moe-ckpt simulate policy=moevement memory=off,local,replicated failures.process_share=0.7
  moe-ckpt simulate failures=gcp_like_6h duration_secs=21600 policy=moc_peers,moevement_peers --plot out
  moe-ckpt simulate --list                                         what can be chosen
  moe-ckpt simulate --list model                                   choices of one group, described

settings are Hydra overrides: group=choice, key=value. A comma list, choice(...), range(...) or glob(...) makes a sweep,
with a run per combination, whether -m is given or not; nothing but --plot and --json writes a file.
exit codes: 0 done, whatever the results of a sweep; 1 a single run does not advance; 2 bad settings
"""
FORMAT = 1
"""Version of the JSON; raised when a field changes its meaning."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the subcommand. Its unknown arguments are settings: parse with ``parse_known_args``."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate training with a checkpointing system under failures",
        description="Simulate training under failures with the library's own policies. Settings by Hydra overrides.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=_count, default=1, metavar="N", help="simulate with N seeds (default: 1)")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON, to FILE or in place of the table")
    parser.add_argument("--plot", metavar="DIR", help="draw pictures into DIR")
    parser.add_argument("--plot-format", choices=("png", "svg", "pdf"), default="png", help="(default: png)")
    parser.add_argument("--workers", type=_count, default=1, metavar="N", help="processes (default: 1); same results")
    parser.add_argument("--config-dir", metavar="DIR", help="directory with your own config groups")
    parser.add_argument("--list", nargs="?", const="", metavar="GROUP", help="list groups and choices, and exit")
    parser.add_argument("-m", "--multirun", action="store_true", help="as in Hydra; a comma list implies it")
    parser.add_argument("-q", "--quiet", action="store_true", help="no table, no progress bar")
    return parser


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the command. Returns 1 if a single run does not advance, otherwise 0.

    Raises:
        MissingPackageError: Hydra, or for --plot matplotlib, is not installed.
        ConfigError: a setting or an option is wrong, or a file cannot be written.
    """
    try:
        import hydra  # noqa: F401
    except ImportError as error:
        raise MissingPackageError("hydra-core", "moe-ckpt simulate", "hydra") from error
    from moe_ckpt_sim.commands.sim_runs import results_of
    from moe_ckpt_sim.conf.sweeps import config_directory

    require_filled(args, "json", "plot", "config-dir")
    overrides = settings(args, rest)
    directory = config_directory(args.config_dir)
    if args.list is not None:
        _list(args.list, directory)
        return 0
    if args.plot is not None:
        from moe_ckpt_sim.commands.sim_plots import require_matplotlib

        require_matplotlib()
        require_directory("--plot", Path(args.plot))
    if args.json is not None and args.json != "-":
        require_file("--json", Path(args.json))
    with _importable(directory), progress_bar("simulating", "runs", silent=args.quiet) as progress:
        results = results_of(overrides, directory, args.seeds, args.workers, progress)
    if args.json is not None and args.json != "-":
        _write(Path(args.json), _json(results))
    if args.plot is not None:
        _plot(results, Path(args.plot), args.plot_format, args.quiet or args.json == "-")
    if args.json == "-":
        print(_json(results), end="")
    elif not args.quiet:
        _show(results)
    _warn(results)
    alone = len(results) == 1 and not results[0].combination.varied
    return 1 if alone and not results[0].advances else 0


def settings(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The overrides among the arguments. A word with ``=`` after ``--json`` is an override, not a file name."""
    after = None if args.json is None or "=" not in args.json else args.json
    if after is not None:
        args.json = "-"
    return [*rest, *([] if after is None else [after])]


@contextmanager
def _importable(directory: Path | None) -> Iterator[None]:
    """Make code next to the config directory importable, so that a ``_target_`` can name it."""
    path = list(sys.path)
    if directory is not None:
        sys.path.insert(0, str(directory.parent))
    try:
        yield
    finally:
        sys.path[:] = path


# --- output ---


def _json(results: Sequence[Result]) -> str:
    return json.dumps({"format": FORMAT, "runs": [one.to_dict() for one in results]}, indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise not_written("--json", path, error) from error


def _plot(results: Sequence[Result], directory: Path, suffix: str, silent: bool) -> None:
    from moe_ckpt_sim.commands.sim_plots import figures

    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(results).items():
            path = directory / f"{name}.{suffix}"
            figure.savefig(path, dpi=150)
            if not silent:
                print(f"wrote {path}")
    except OSError as error:
        raise not_written("--plot", directory, error) from error


def _show(results: Sequence[Result]) -> None:
    from moe_ckpt.tables import print_table
    from moe_ckpt_sim.commands.sim_table import one_facts, one_table, sweep_table

    if len(results) > 1 or results[0].combination.varied:
        print_table(*sweep_table(results))
        return
    print(wrapped(one_facts(results[0])))
    print()
    print_table(*one_table(results[0], width()))


def _warn(results: Sequence[Result]) -> None:
    """Print verdicts to stderr, in red on a terminal."""
    from moe_ckpt_sim.commands.sim_table import verdicts

    for verdict in verdicts(results):
        print(styled(verdict, BOLD_RED, sys.stderr), file=sys.stderr)


def _list(group: str, directory: Path | None) -> None:
    from moe_ckpt_sim.conf.sweeps import choices

    groups = choices(directory)
    if not group:
        for name, files in groups.items():
            print(_wrapped(f"{name}:", ", ".join(files)))
        return
    if group not in groups:
        raise ConfigError(f"--list {group}: no such group; there are {', '.join(groups)}")
    for name, says in groups[group].items():
        print(_wrapped(name, says))


def _wrapped(name: str, text: str) -> str:
    return f"{name}\n{fill(text, min(width(), PIPED_WIDTH), initial_indent='    ', subsequent_indent='    ')}"
