"""Places that cannot be written or are not there: what the commands say of them. Nothing half-written stays."""

import os
import resource
import shlex
import subprocess
import sys

import pytest

from moe_ckpt.cli.main import main
from tests.support.store_builder import example


@pytest.fixture
def run(tmp_path):
    return example(tmp_path / "store").root


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a file in it."""
    place = tmp_path / "here"
    place.mkdir()
    (place / "file").touch()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def full():
    """As on a disk that has become full: each file's first hundred bytes can be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def said(capsys, *argv):
    """What a command that fails says on stderr."""
    assert main([str(arg) for arg in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("to", ["dcp", "safetensors", "lightning"])
def test_export_into_a_file_names_the_file(run, here, capsys, to):
    err = said(capsys, "export", run, "--to", to, "-o", "file/inside")
    assert (
        f"the output file/inside cannot be written: {here}/file is a file, not a directory; name another place" in err
    )
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize("to", ["dcp", "safetensors", "lightning"])
def test_an_export_that_finds_no_room_names_its_output_and_leaves_nothing(run, here, capsys, full, to):
    err = said(capsys, "export", run, "--to", to, "-o", "out")
    assert "moe-ckpt export: the output out cannot be written: File too large" in err
    assert [path.name for path in here.iterdir()] == ["file"]


def test_a_full_disk_is_said_with_what_to_do():
    from moe_ckpt.storage.local import why_unwritable

    full = OSError(28, "No space left on device")
    assert why_unwritable("/out", full) == "No space left on device; make room, or name another place"
    assert why_unwritable("/out", PermissionError(13, "Permission denied")).endswith("; name another place")


def test_the_size_of_files_is_called_as_it_was_given(run, here, capsys):
    err = said(capsys, "export", run, "--to", "safetensors", "--max-file-size", "0", "-o", "out")
    assert "--max-file-size='0': must be a number of bytes" in err
    for to in ("dcp", "lightning"):
        err = said(capsys, "export", run, "--to", to, "--max-file-size", "5GB", "-o", "out")
        assert f"--max-file-size 5GB: is for --to safetensors; {to} takes no size" in err


@pytest.mark.parametrize(
    ("plot", "why"),
    [
        ("/nope/x.png", "--plot /nope/x.png: there is no directory /nope"),
        ("file/x.png", "--plot file/x.png: cannot be written: {here}/file is a file, not a directory"),
        ("x.foo", "--plot x.foo: give a name that ends in one of .png, .svg, .pdf"),
        (".", "--plot .: give a name that ends in one of .png, .svg, .pdf"),
    ],
)
def test_a_window_plotted_nowhere_says_so(run, here, capsys, plot, why):
    pytest.importorskip("matplotlib")
    err = said(capsys, "window", run, "--window", 2, "--plot", plot)
    assert err.startswith("moe-ckpt window: " + why.format(here=here))
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "argv", [("memory", "--directory"), ("densify", "{run}", "--directory"), ("verify", "{run}", "--directory")]
)
def test_a_memory_directory_that_is_not_there_is_called_as_it_was_given(run, here, capsys, argv):
    argv = [each.format(run=run) for each in argv]
    what = "give the one that the run had as Memory(directory=...)"
    for path, why in (("/nope", "there is no such directory"), ("file", "is a file, not a directory")):
        with pytest.raises(SystemExit, match="2"):
            main([*argv, path])
        assert f"--directory: {path}: {why}; {what}" in capsys.readouterr().err


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("tpu", "no such choice: 'tpu'; there are cpu, cuda; see moe-ckpt densify --help"),
        ("cuda:x", "no such choice: 'cuda:x'; there are cpu, cuda"),
        ("cuda", "torch finds no CUDA device here; give --device cpu, or leave it out"),
        ("cuda:0", "torch finds no CUDA device here"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device, why):
    command = [sys.executable, "-W", "ignore", "-m", "moe_ckpt.cli.main", "densify", "no_store", "--device", device]
    done = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"moe-ckpt densify: --device{':' if 'choice' in why else f' {device}:'} {why}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize(
    "argv", [("inspect", "{run}"), ("verify", "{run}", "--json"), ("simulate", "setup=tiny", "-q", "--json")]
)
@pytest.mark.quick("argv1")
def test_output_that_nobody_takes_is_one_line(run, argv):
    if argv[0] == "simulate":
        pytest.importorskip("hydra")
    command = [sys.executable, "-W", "ignore", "-m", "moe_ckpt.cli.main", *(each.format(run=run) for each in argv)]
    with open("/dev/full", "w") as nowhere:
        done = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "moe-ckpt: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("bogus", 2)])
def test_closed_streams_are_no_error(argument, code):
    command = f"{shlex.quote(sys.executable)} -m moe_ckpt.cli.main {argument} <&- >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_table_is_ruled_in_characters_that_the_terminal_has(run, encoding):
    command = [sys.executable, "-W", "ignore", "-m", "moe_ckpt.cli.main", "inspect", str(run)]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    said = subprocess.run(command, capture_output=True, encoding=encoding, check=True, env=environment).stdout
    assert "\\u" not in said
    assert ("-" if encoding == "ascii" else "\u2500") * 20 in said
