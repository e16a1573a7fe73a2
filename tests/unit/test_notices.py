"""What the user must know is said, once, whatever was done about logging: in real interpreters, for their stderr."""

from __future__ import annotations

import subprocess
import sys

import pytest

SPEAK = """
import moe_ckpt
from moe_ckpt.notices import announce
log = logging.getLogger("moe_ckpt")
log.warning("%d experts are lost", 3)
log.info("a detail")
announce("resumed at step %d", 7)
"""
WARNED = "moe_ckpt: WARNING: 3 experts are lost\n"
RESUMED = "moe_ckpt: resumed at step 7\n"
BARE = "3 experts are lost\nresumed at step 7\n"


def run(before: str, speak: str = SPEAK) -> tuple[str, str]:
    """(stdout, stderr) of an interpreter that runs ``before`` and then speaks."""
    program = f"import logging, sys\n{before}\n{speak}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("before", "stderr"),
    [
        ("", WARNED + RESUMED),
        ("logging.getLogger().setLevel(logging.ERROR)", RESUMED),
        ("logging.getLogger('another').addHandler(logging.StreamHandler())", WARNED + RESUMED),
        ("logging.basicConfig()", "WARNING:moe_ckpt:3 experts are lost\nINFO:moe_ckpt:resumed at step 7\n"),
        ("logging.basicConfig(level='ERROR')", "INFO:moe_ckpt:resumed at step 7\n"),
        (
            "logging.basicConfig(level='INFO')",
            "WARNING:moe_ckpt:3 experts are lost\nINFO:moe_ckpt:a detail\nINFO:moe_ckpt:resumed at step 7\n",
        ),
        ("logging.getLogger('moe_ckpt').addHandler(logging.StreamHandler())", BARE),
        ("logging.getLogger('moe_ckpt').addHandler(logging.NullHandler())", ""),
        ("logging.getLogger('moe_ckpt').setLevel('WARNING')", WARNED),
        ("logging.disable(logging.WARNING)", ""),
        ("logging.basicConfig(); logging.getLogger('moe_ckpt').propagate = False", WARNED + RESUMED),
        # As logging.config does; before the package's next announcement, warnings are lastResort's.
        ("import moe_ckpt; logging.getLogger('moe_ckpt').handlers.clear()", "3 experts are lost\n" + RESUMED),
        ("import os; sys.stderr = os.fdopen(1, 'w')", ""),
    ],
)  # fmt: skip
def test_said_once(before, stderr):
    assert run(before)[1] == stderr


def test_logging_that_is_set_up_later_takes_over():
    assert run("import moe_ckpt", "logging.basicConfig(stream=sys.stdout)" + SPEAK) == (
        "WARNING:moe_ckpt:3 experts are lost\nINFO:moe_ckpt:resumed at step 7\n",
        "",
    )


def test_an_announcement_names_the_line_that_made_it():
    out, _ = run("logging.basicConfig(stream=sys.stdout, format='%(filename)s:%(lineno)d:%(funcName)s %(message)s')")
    assert out.splitlines()[-1] == "<string>:9:<module> resumed at step 7"


def test_a_closed_stderr_ends_nothing():
    assert run("sys.stderr.close()") == ("", "")
    assert run("sys.stderr = None") == ("", "")


def test_importing_touches_no_other_logger():
    out, _ = run(
        "def state(): return {n: (l.level, l.handlers, l.propagate) for n, l in"
        " [('root', logging.root), *logging.root.manager.loggerDict.items()] if isinstance(l, logging.Logger)}\n"
        "before = state()",
        "import moe_ckpt\nafter = state()\n"
        "print(sorted(n for n in after if after[n] != before.get(n)), after['moe_ckpt'][0], after['moe_ckpt'][2])",
    )
    assert out == "['moe_ckpt'] 0 True\n"


def test_torch_does_not_speak_first_of_a_package_that_another_brought_along():
    warning = "The pynvml package is deprecated. Please install nvidia-ml-py instead."
    program = f"import warnings, moe_ckpt.core.step\nwarnings.warn({warning!r}, FutureWarning)"
    assert run("", program) == ("", "")
    assert "another" in run("", program.replace(warning, "another"))[1]
