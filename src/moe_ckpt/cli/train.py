"""``moe-ckpt train``: compose a run config with Hydra and call what its ``entry`` names.

The wheel ships config groups only; run configs and recipes live in the repository. So this command wants
a config directory: ``./conf`` of a clone, or the one given by ``--config-dir``. The directory above it is
put on the import path, so that ``entry`` and every ``_target_`` can name code that lies beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from moe_ckpt.cli.arguments import Parser, commands_of, unknown, with_help
from moe_ckpt.errors import ConfigError, MissingPackageError

EPILOG = """\
examples, from a clone of the repository:
  moe-ckpt train                                             tiny GPT-MoE on the CPU, MoC with k=1
  moe-ckpt train moe_ckpt/policy=moc moe_ckpt.policy.k=2     another setting
  moe-ckpt train -m moe_ckpt/policy=dense,moc                several runs, one after the other
  moe-ckpt train --cfg job                                   print the composed config, do not train
  TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 --no-python \\
    moe-ckpt train                                           two processes; dead ones are restarted (docs/torchrun.md)

everything but the options above goes to Hydra: overrides, -m, --cfg, --info, --config-name, --resolve
"""


_OWN = "give your own directory with a {} whose 'entry' is the function to call with the composed config"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the subcommand. Arguments that it does not know are Hydra's: parse with ``parse_known_args``."""
    parser = subparsers.add_parser(
        "train",
        help="train a recipe; settings by Hydra overrides",
        description="Train a recipe. Settings are Hydra overrides: group=choice, key=value.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config-dir", help="directory of run configs (default: ./conf)")
    return parser


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the app; 0 when it ended well. Hydra itself exits with 1 after printing a configuration error.

    Raises:
        MissingPackageError: Hydra is not installed.
        ConfigError: there is no config directory, or the config has no usable ``entry``.
    """
    try:
        import hydra
    except ImportError as error:
        raise MissingPackageError("hydra-core", "moe-ckpt train", "recipes") from error
    from moe_ckpt.conf import register

    register()
    require_hydras(rest)
    directory = config_directory(args.config_dir)
    require_config(str(directory) if args.config_dir is None else f"--config-dir {args.config_dir}", directory, rest)
    command, path = list(sys.argv), list(sys.path)

    def app(cfg: Any) -> Any:
        sys.argv = command  # Lightning starts further processes by repeating the command line
        return entry_point(cfg, directory)(cfg)

    sys.path.insert(0, str(directory.parent))
    sys.argv = [command[0], *_per_rank(), *rest]
    try:
        hydra.main(version_base="1.3", config_path=str(directory), config_name="train")(app)()
    except SystemExit as stopped:  # Hydra has said what is wrong, but not where a key has moved to
        if stopped.code and (hint := moved_key(rest, directory)):
            print(f"moe-ckpt train: {hint}", file=sys.stderr)
        raise
    finally:
        sys.argv, sys.path[:] = command, path
    return 0


def require_hydras(rest: Sequence[str]) -> None:
    """Refuse options that Hydra does not know either, without its usage lines. Raises ``ConfigError``."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(with_help(message.removeprefix("argument "), "moe-ckpt train"))

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    _, unread = parser.parse_known_args([*rest])
    if words := [word for word in unread if word.startswith("-")]:
        mine = add_parser(commands_of(Parser()))
        for action in parser._actions:
            if "--config-dir" not in action.option_strings and "--help" not in action.option_strings:
                mine._add_action(action)
        raise ConfigError(with_help(unknown(words, mine), "moe-ckpt train"))


def moved_key(overrides: Sequence[str], directory: Path) -> str:
    """Of settings that the run config does not have, the nearest that it has; empty where there is none to tell."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from moe_ckpt.conf.overrides import nearest_key

    settings = [word for word in overrides if "=" in word and not word.startswith("-")]
    choices = [word for word in settings if "." not in word.partition("=")[0]]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(directory), version_base="1.3"):
            cfg = compose("train", [word for word in choices if "/" in word or not word.startswith("+")])
            tree = cast("dict[str, Any]", OmegaConf.to_container(cfg))
    except (HydraException, OSError, ValueError):
        return ""
    return nearest_key(settings, tree)


def config_directory(given: str | None) -> Path:
    """The directory of run configs, absolute. Raises ``ConfigError`` when it is not there."""
    directory = Path(given if given is not None else "conf").absolute()
    if directory.is_dir():
        return directory
    if given is not None:
        raise ConfigError(f"--config-dir {given}: no such directory")
    raise ConfigError(
        f"no run configs: {directory} does not exist, and no --config-dir was given. The installed package holds "
        f"config groups only; run this in a clone of the repository, or {_OWN.format('train.yaml')}."
    )


def require_config(given: str, directory: Path, rest: Sequence[str]) -> None:
    """See that the directory holds the run config. Hydra's words for that name its search path instead.

    Args:
        given: The directory, as the user wrote it, with its option.
        directory: The same, absolute.
        rest: Options of Hydra, which may name another run config than ``train``.

    Raises:
        ConfigError: It does not.
    """
    from hydra._internal.utils import get_args_parser

    asked, _ = get_args_parser().parse_known_args([*rest])
    name = str(asked.config_name or "train").removesuffix(".yaml") + ".yaml"
    if asked.config_path is None and not (directory / name).is_file():
        raise ConfigError(f"{given}: there is no {name} in it; {_OWN.format(name)}.")


def entry_point(cfg: Any, directory: Path) -> Any:
    """The function that the config's ``entry`` names."""
    from hydra.utils import get_method

    name = cfg.get("entry")
    if not name:
        raise ConfigError(
            f"the config composed from {directory} has no 'entry': set it to the dotted name of the function that "
            "trains, e.g. entry: my_package.train.main"
        )
    try:
        return get_method(str(name))
    except Exception as error:  # Hydra wraps whatever the import raised in one of several types
        raise ConfigError(
            f"entry: {name} cannot be imported (looked in {directory.parent} and the environment): {error}"
        ) from error


def _per_rank() -> list[str]:
    """Under a launcher only rank 0 records the config; the others would write the same files at once."""
    return ["hydra.output_subdir=null"] if os.environ.get("RANK", "0") != "0" else []


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m moe_ckpt.cli.train``: the subcommand alone, for launchers that want a module."""
    parser = Parser(prog="moe-ckpt")
    add_parser(commands_of(parser))
    args, rest = parser.parse_known_args(["train", *(sys.argv[1:] if argv is None else argv)])
    return run(args, rest)


if __name__ == "__main__":
    sys.exit(main())
