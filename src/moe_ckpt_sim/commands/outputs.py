"""Checks the files and directories that a command is to write, before anything else is done."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from moe_ckpt.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def require_filled(args: argparse.Namespace, *names: str) -> None:
    """Refuse ``--plot=``: an empty path would be the current directory. Raises ``ConfigError``."""
    for name in names:
        if getattr(args, name.replace("-", "_")) == "":
            raise ConfigError(f"--{name}= is empty: say which file or directory, or leave --{name} out")


def require_directory(option: str, directory: Path, named: Path | None = None) -> None:
    """See that files can be written into ``directory``, also where it is still to be made; nothing stays behind.

    Args:
        named: With the option, where that is not the directory itself.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    made: list[Path] = []
    try:
        made += [parent for parent in (directory, *directory.parents) if not parent.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):  # access rights alone do not tell: /proc, file systems that are read-only
            pass
    except OSError as error:
        raise not_written(option, named or directory, error) from error
    finally:
        for parent in made:
            with suppress(OSError):
                parent.rmdir()


def require_file(option: str, path: Path) -> None:
    """Checks that one file can be written, as ``require_directory`` does for a directory."""
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a directory; name a file in it")
    if not path.exists():
        require_directory(option, path.parent, path)
    elif not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written: no permission")


def not_written(option: str, path: Path, error: OSError) -> ConfigError:
    """Returns the error for a path that was named with ``option`` and cannot be written."""
    from moe_ckpt.storage.local import why_unwritable

    return ConfigError(f"{option} {path}: cannot be written: {why_unwritable(path, error)}")


def require_picture(option: str, path: str) -> None:
    """See that a picture can be written at ``path``, before it is drawn.

    Raises:
        ConfigError: the suffix is none of ``PICTURES``, or nothing can be written there.
    """
    picture = Path(path)
    if picture.suffix not in PICTURES:
        raise ConfigError(f"{option} {path}: give a name that ends in one of {', '.join(PICTURES)}")
    if not picture.absolute().parent.exists():
        raise ConfigError(f"{option} {path}: there is no directory {picture.parent}")
    require_file(option, picture)
