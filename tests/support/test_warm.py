"""Programs and functions in forks of a warm server: as processes of their own, in all that tests ask of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.waiting import retry_until

PRELOAD = "tests.support.moe_models"
"""Quickly imported, and by no program below."""


def run(*arguments, **options):
    command = [warm.python(PRELOAD), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)


def test_a_program_finds_what_it_would_in_a_fresh_interpreter(tmp_path):
    (tmp_path / "tool.py").write_text("import sys; print(__name__, sys.argv, sys.path[0], sys.stdin.read())")
    environment = {**os.environ, "PYTHONPATH": str(warm.ROOT), "SEEN": "1"}
    words = ["one", "-m", "two words"]
    options = {"cwd": tmp_path, "env": environment, "input": "typed"}
    for how, first, place in (
        (["tool.py"], "tool.py", str(tmp_path)),
        (["-u", "-m", "tool"], str(tmp_path / "tool.py"), str(tmp_path)),
        (["-W", "ignore", "-c", (tmp_path / "tool.py").read_text()], "-c", ""),
    ):
        done = run(*how, *words, **options)
        assert done.stdout == f"__main__ {[first, *words]} {place} typed\n", done.stderr
        fresh = subprocess.run([sys.executable, *how, *words], capture_output=True, text=True, check=True, **options)
        assert done.stdout == fresh.stdout
    told = "import os, sys; print(os.getcwd(), os.environ['SEEN'], sys.executable, 'tests.support.moe_models' in %s)"
    done = run("-c", told % "sys.modules", **options)
    assert done.stdout == f"{tmp_path} 1 {warm.python(PRELOAD)} True\n"


@pytest.mark.parametrize(
    ("code", "exitcode", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('so')", 1, "so\n"),
        ("import atexit; atexit.register(lambda: print('end')); print('begin')", 0, "begin\nend\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import threading; threading.Timer(0.1, print, ['late']).start()", 0, "late\n"),
    ],
)
def test_a_program_ends_as_it_would(code, exitcode, said):
    done = run("-c", code)
    assert (done.returncode, done.stdout + done.stderr) == (exitcode, said)


def test_an_error_is_told_as_the_interpreter_tells_it():
    done = run("-c", "def f():\n    1 / 0\nf()")
    assert done.returncode == 1
    first, *_, last = done.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "ZeroDivisionError: division by zero"
    assert "warm_server" not in done.stderr


def test_options_that_only_the_interpreter_knows_are_left_to_it():
    assert run("-c", "import sys; print(sys.flags.no_site)").stdout == "0\n"
    assert run("-S", "-c", "import sys; print(sys.flags.no_site)").stdout == "1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_a_program_ends_what_runs_it(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    with subprocess.Popen([warm.python(PRELOAD), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(300) == -number
    assert pid != process.pid
    assert retry_until(lambda: not Path(f"/proc/{pid}").exists())


def _write(path):
    Path(path).write_text(str(os.getppid()))


def test_a_function_runs_to_its_end_or_is_killed(tmp_path):
    process = warm.start(PRELOAD, _write, str(tmp_path / "parent"))
    process.join(300)
    assert process.exitcode == 0
    assert not process.is_alive()
    assert int((tmp_path / "parent").read_text()) != os.getpid()
    process.close()
    process = warm.start(PRELOAD, time.sleep, 300)
    assert process.is_alive()
    assert process.exitcode is None
    process.kill()
    assert retry_until(lambda: process.exitcode is not None), "told without waiting for it"
    assert process.exitcode == -signal.SIGKILL
    process.close()


def test_a_function_whose_starter_has_gone_is_killed():
    process = warm.start(PRELOAD, time.sleep, 300)
    process.close()
    assert retry_until(lambda: not Path(f"/proc/{process.pid}").exists())


def test_servers_end_with_the_last_who_was_there(tmp_path):
    """Started by a process of its own, as by a run of pytest."""
    code = f"from tests.support import warm; print(warm.python({PRELOAD!r}))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_XDIST_TESTRUNUID"}
    environment |= {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(warm.ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    assert done.stdout.startswith(str(tmp_path / "moe_ckpt_warm_"))
    assert retry_until(lambda: not list(tmp_path.glob("moe_ckpt_warm_*")))


def test_a_server_that_cannot_start_is_no_wait():
    with pytest.raises(AssertionError, match=r"the server of tests.support.nowhere did not start"):
        warm.start("tests.support.nowhere", print)
    Path(warm._directory(), "nowhere.lock").unlink()
