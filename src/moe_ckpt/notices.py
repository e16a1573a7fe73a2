"""How this package speaks to its user: through ``logging`` where that is set up, on stderr where it is not.

All modules log to the logger ``moe_ckpt``. Python sends warnings of a program that has set up no logging to
``logging.lastResort``, which prints the bare message, and drops everything below a warning. So the logger has a
handler of its own, which writes ``moe_ckpt: WARNING: ...`` to stderr, but only while no handler of the user's would
receive the record: nothing is printed twice, and what the user has set up decides.

Importing this module touches no logger but ``moe_ckpt``.
"""

from __future__ import annotations

import logging
import sys

LOGGER_NAME = "moe_ckpt"


class _StderrHandler(logging.Handler):
    """Writes to the stderr of the moment, so that redirection and capture work, unless the user has handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr
        if stream is None or stream.closed or _user_receives(record):
            return
        try:
            stream.write(self.format(record) + "\n")
            stream.flush()
        except Exception:  # logging's own rule: a record that cannot be written never ends the program
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        return f"{LOGGER_NAME}: {level}{super().format(record)}"


def _user_receives(record: logging.LogRecord) -> bool:
    """True if the record's logger, or one that it propagates to, has a handler that is not ours."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if any(not isinstance(handler, _StderrHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def install() -> None:
    """Give the logger ``moe_ckpt`` the handler that writes to stderr, once. Importing ``moe_ckpt`` calls this."""
    logger = logging.getLogger(LOGGER_NAME)
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())


def announce(message: str, *args: object, level: int = logging.INFO) -> None:
    """Say what the user must know: where training goes on from, that a run is finished, what was lost.

    Unlike ``logger.info`` it does not need the level of the root logger, which is WARNING unless set, to be lower. It
    is silent only where somebody asked for that: by a level of the logger ``moe_ckpt`` itself, ``logging.disable``,
    a filter, or the level of each handler.

    The caller decides which rank speaks: usually rank 0 alone. Any thread may call it.

    Args:
        message: A format string, as for ``logging``.
        *args: Its arguments.
        level: Level of the record.
    """
    install()  # logging.config may have removed it
    logger = logging.getLogger(LOGGER_NAME)
    if level < logger.level or logger.manager.disable >= level:
        return
    caller = sys._getframe(1)
    code = caller.f_code
    logger.handle(
        logger.makeRecord(logger.name, level, code.co_filename, caller.f_lineno, message, args, None, code.co_name)
    )


install()
