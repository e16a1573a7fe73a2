"""The parser of the command line: an error is one line, which names what is wrong and the nearest right name."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

_CHOICE = re.compile(r"argument (?P<argument>.+?): invalid choice: '(?P<given>.*?)' \(choose from .*\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """As its base, without the usage lines before an error; those are in ``--help``."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line on stderr."""
        if found := _CHOICE.fullmatch(message):
            message = self._no_choice(found["argument"], found["given"])
        elif message.startswith("the following arguments are required: "):
            missing = message.partition(": ")[2]
            message = self._no_command() if missing == "command" else f"{missing} must be given"
        print(f"{self.prog}: {with_help(message.removeprefix('argument '), self.prog)}", file=sys.stderr)
        sys.exit(2)

    def refuse(self, command: str, rest: Sequence[str]) -> None:
        """Exit as ``error``, of arguments that ``command`` does not know."""
        parser = self._commands()[command]
        parser.error(unknown(rest, parser))

    def _commands(self) -> dict[str, argparse.ArgumentParser]:
        found: Any = next(each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction))
        return dict(found)

    def _no_command(self) -> str:
        return f"choose what to do: {', '.join(self._commands())}"

    def _no_choice(self, argument: str, given: str) -> str:
        action = next((each for each in self._actions if argument in _names(each)), None)
        choices = [str(each) for each in (action.choices if action is not None and action.choices else ())]
        what = "no such command" if isinstance(action, argparse._SubParsersAction) else f"{argument}: no such choice"
        return f"{what}: {given!r}; {_did_you_mean(given, choices)}there are {', '.join(choices)}"


def commands_of(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Where the commands of ``parser`` are to be added; the name of the one that is given will be ``command``."""
    return parser.add_subparsers(dest="command", required=True, metavar="command")


def unknown(rest: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to say of ``rest``, which ``parser`` does not know."""
    options = [name for action in parser._actions for name in action.option_strings if name.startswith("--")]
    asked = [word.partition("=")[0] for word in rest if word.startswith("-")]
    if not asked:
        return (
            f"{' '.join(rest)} is one argument too many"
            if len(rest) == 1
            else f"{' '.join(rest)} are too many arguments"
        )
    return f"no option {' '.join(asked)}; {_did_you_mean(asked[0], options)}".rstrip("; ")


def with_help(message: str, command: str) -> str:
    """The message, and where to read on."""
    return f"{message}{' ' if message.endswith('?') else '; '}see {command} --help"


def _did_you_mean(given: str, names: Sequence[str]) -> str:
    near = get_close_matches(given, names, 1)
    return f"did you mean {near[0]}? " if near else ""


def _names(action: argparse.Action) -> Iterator[str]:
    """As argparse calls it in its messages."""
    yield "/".join(action.option_strings)
    yield from (str(each) for each in (action.metavar, action.dest) if each)
