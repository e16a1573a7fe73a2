"""Turns Hydra's overrides into a sweep: the configs of the group ``simulate`` that a command line asks for.

Comma lists, ``choice``, ``range`` and ``glob`` are Hydra's own grammar. Hydra's multirun would make a job with an
output directory for each combination; here each is only a config, and nothing is written.

Needs Hydra. Every error in an override is a ``ConfigError`` of one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from moe_ckpt.conf import register
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.conf.overrides import Tree, no_such_key, require_choice, require_known_places, without_null
from moe_ckpt_sim.conf.scenarios import CONFIG_DIR

PRIMARY = "simulate"
_TO_ADD = re.compile(r"\s*To append to your (config|default list) use .*")
"""Advice of Hydra that is cut off, since nothing here reads added keys."""
_HYDRAS = (HydraException, OmegaConfBaseException)


@dataclass(frozen=True)
class Combination:
    """One config of a sweep.

    Attributes:
        overrides: All overrides of the config.
        varied: (key, value) of the settings that the sweep varies, in the order of the command line.
        config_dir: Directory with the user's own groups.
    """

    overrides: tuple[str, ...]
    varied: tuple[tuple[str, str], ...] = ()
    config_dir: Path | None = None

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.varied)


def combinations(overrides: Sequence[str], config_dir: Path | None = None) -> list[Combination]:
    """All combinations of ``overrides``, with the last one varying fastest, as in Hydra's multirun.

    Raises:
        ConfigError: an override cannot be parsed, sweeps over an interval or over nothing, or adds a key that nothing
            reads.
    """
    with _hydra():
        loader = GlobalHydra.instance().config_loader()
        parser = OverridesParser.create(config_loader=loader)
        parsed = [_parsed(parser, text) for text in overrides]
        require_known_places(parsed, groups := choices(config_dir))
        chosen_of = [_choices(one, groups) for one in parsed]
    swept = [one.key_or_group for one in parsed if one.is_sweep_override()]
    sweep = []
    for chosen in product(*chosen_of):
        varied = [_value(text) for one, text in zip(parsed, chosen, strict=True) if one.is_sweep_override()]
        sweep.append(Combination(chosen, tuple(zip(swept, varied, strict=True)), config_dir))
    return sweep


def composed(combination: Combination) -> DictConfig:
    """Compose the config; its interpolations are not resolved.

    Raises:
        ConfigError: a choice or a key is unknown (the message lists the known ones), or a value cannot be parsed.
    """
    overrides, config_dir = without_null(combination.overrides), combination.config_dir
    with _hydra():
        try:
            return _compose(overrides, config_dir)
        except MissingConfigException as error:
            if not error.options:
                raise ConfigError(_one_line(error)) from error
            asked = Path(error.missing_cfg_file or "")
            group = asked.parent.as_posix()
            raise ConfigError(f"{group}={asked.name}: no such choice; there are {', '.join(error.options)}") from error
        except _HYDRAS as error:
            raise _unknown(overrides, config_dir) or ConfigError(_one_line(error)) from error


def _compose(overrides: Sequence[str], config_dir: Path | None) -> DictConfig:
    search = [] if config_dir is None else [_search(config_dir)]
    try:
        return compose(PRIMARY, [*search, *overrides])
    except _HYDRAS:
        raise
    except YAMLError as error:
        raise ConfigError(f"no valid YAML: {_one_line(error)}") from error
    except (ValueError, OSError) as error:  # a binary file, or defaults that are no list
        raise ConfigError(f"a config file cannot be read: {_one_line(error)}") from error


def _unknown(overrides: Sequence[str], config_dir: Path | None) -> ConfigError | None:
    """A better message than Hydra's if one of the keys does not exist."""
    groups = choices(config_dir)
    chosen = [one for one in overrides if one.partition("=")[0].lstrip("+") in groups]
    try:
        cfg = _compose(chosen, config_dir)
    except (*_HYDRAS, ConfigError):
        return None
    return no_such_key(overrides, cast(Tree, OmegaConf.to_container(cfg)), groups)


def choices(config_dir: Path | None = None) -> dict[str, dict[str, str]]:
    """The choices of each group: group -> choice -> text of the comment at the top of its file."""
    groups: dict[str, dict[str, str]] = {}
    for directory in (CONFIG_DIR, *([] if config_dir is None else [config_dir])):
        for path in sorted(directory.glob("*/*.yaml")):
            says = [line for line in path.read_text("utf-8", "replace").splitlines() if not line.startswith("# @")]
            comment = takewhile(lambda line: line.startswith("#"), says)
            text = " ".join(line.lstrip("# ") for line in comment)
            groups.setdefault(path.parent.name, {}).setdefault(path.stem, text)
    return groups


def config_directory(path: str | None) -> Path | None:
    """The directory with the user's own groups. Raises ``ConfigError`` if it does not exist."""
    if path is None:
        return None
    directory = Path(path).absolute()
    if not directory.is_dir():
        raise ConfigError(f"--config-dir {path}: no such directory")
    return directory


@contextmanager
def _hydra() -> Iterator[None]:
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        yield


def _parsed(parser: OverridesParser, text: str) -> Override:
    try:
        return parser.parse_overrides([text])[0]  # not parse_override: glob needs what this sets
    except HydraException as error:
        raise ConfigError(f"{text!r} is no setting such as group=choice or key=value: {_one_line(error)}") from error


def _choices(override: Override, groups: Mapping[str, Mapping[str, str]]) -> list[str]:
    line = str(override.input_line)
    if not override.is_sweep_override():
        settings = [line]
    elif not override.is_discrete_sweep():
        raise ConfigError(f"{line}: say which values to try: a comma list, choice(...) or range(...)")
    else:
        settings = [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    if not settings:
        names = groups.get(override.key_or_group)
        raise ConfigError(f"{line}: nothing fits" + (f"; there are {', '.join(names)}" if names else ""))
    for text in settings:
        require_choice(text, groups)
    return settings


def _value(text: str) -> str:
    """The value in ``key=value``, without quotes."""
    return text.partition("=")[2].strip("'\"")


def _search(directory: Path) -> str:
    quoted = f"file://{directory}".replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.searchpath=['{quoted}']"


def _one_line(error: BaseException) -> str:
    """Hydra's message of several lines as one line, followed by the error that caused it."""
    parts = [str(error)]
    cause = str(error.__cause__).partition("\n")[0]
    if cause not in ("None", "") and cause not in parts[0]:
        parts.append(cause)
    return ": ".join(" ".join(_TO_ADD.sub("", part).split()).rstrip(".") for part in parts)
