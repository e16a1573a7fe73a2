"""The console command: what it prints, its exit codes, and that it starts without heavy imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from moe_ckpt import tables
from moe_ckpt.cli import inspect
from moe_ckpt.cli.main import COMMANDS, main
from moe_ckpt.cli.report import describe
from moe_ckpt.core.operators import expert_id
from moe_ckpt.format.manifest import LayerRecord
from tests.support.store_builder import STACK, Block, StoreBuilder, TinyRun, example

STEP = "step_00000003"


@pytest.fixture
def run(tmp_path) -> TinyRun:
    return example(tmp_path / "store")


def flip(path, at=-1):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def call(capsys, *argv):
    code = main([str(arg) for arg in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect_shows_steps_ages_and_tokens(run, capsys):
    code, out, _ = call(capsys, "inspect", run.root)
    assert code == 0
    assert "run run-a, model ffffffff" in out
    assert "on-disk format 1" in " ".join(out.split())
    lines = out.splitlines()
    [row] = [line for line in lines if line.lstrip().startswith(STEP)]
    # step 3: routed 105 = 30 + 60 + 15, saved 30 + 60 + 3, lost 7 by the one fault
    assert "policy moc on 2 ranks: k=2" in lines
    for cell in (" 2 ", "12", "7", "6.667%", "2023-11-14"):
        assert cell in row
    [ages] = [line for line in lines if "blocks.0.moe" in line]
    assert ages.split()[-5:] == ["0", "1", "1", "0", "2"]
    [head] = [line for line in lines if line.startswith("layer")]
    assert head.split() == ["layer", "expert", "+0", "+1", "+2", "+3"]
    assert len(ages) == len(head)


def test_inspect_of_one_step_and_of_a_large_model(tmp_path, capsys):
    run = TinyRun(tmp_path)
    code, out, _ = call(capsys, "inspect", tmp_path / run.save(1))
    assert code == 0
    assert out.count("step_00000001") >= 2
    assert "on-disk format 1" in " ".join(out.split())
    run = TinyRun(tmp_path / "large")
    run.builder.layers = tuple(LayerRecord(f"blocks.{n}.moe", 256, 8) for n in range(4))
    run.builder.listed = lambda step, operators: (
        operators | {expert_id(layer, expert) for layer in range(4) for expert in range(step - 1, 256, 20)}
    )
    run._tokens = lambda step: {}
    newest = [run.save(step, experts=(0,) if step > 1 else range(4)) for step in range(1, 21)][-1]
    code, out, _ = call(capsys, "inspect", tmp_path / "large" / newest)
    [line] = [line for line in out.splitlines() if "blocks.3.moe" in line]
    assert line.split()[-1].startswith("@%%##***++==---::...")
    assert len(line.split()[-1]) == 64
    [head] = [line for line in out.splitlines() if line.startswith("layer")]
    assert head.split() == ["layer", "expert", *(f"+{at}" for at in range(0, 64, 8))]
    assert line.index("@") == head.index("+0"), "each number stands over its expert"
    assert ". now, @ 19 steps ago" in out


def test_inspect_json_holds_the_facts(run, capsys):
    code, out, _ = call(capsys, "inspect", run.root, "--json")
    facts = json.loads(out)
    assert code == 0
    assert [step["directory"] for step in facts["steps"]] == [STEP, "step_00000002", "step_00000001"]
    newest = facts["steps"][0]
    assert newest["versions"] == [[2, 2, 3, 1]]
    assert newest["ages_steps"] == [[1, 1, 0, 2]]
    assert (newest["unsaved_tokens"], newest["lost_tokens"], newest["routed_tokens"]) == (12, 7, 105)
    assert newest["plt"] == pytest.approx(7 / 105)
    assert newest["plt_if_returned_to"] == pytest.approx(19 / 105)
    for step in facts["steps"]:
        files = (run.root / step["directory"]).iterdir()
        assert step["written_bytes"] == sum(path.stat().st_size for path in files)
    paths = {*run.manifests[STEP].paths, f"{STEP}/MANIFEST.json"}
    assert newest["whole_bytes"] == sum((run.root / path).stat().st_size for path in paths)


def test_inspect_shows_damage_and_goes_on(run, capsys):
    flip(run.root / STEP / "MANIFEST.json", 200)
    code, out, _ = call(capsys, "inspect", run.root)
    assert code == 0
    assert f"damaged: {STEP}/MANIFEST.json, step 3: checksum mismatch" in out
    assert "step_00000002" in out


def test_verify_exit_codes_and_names(run, tmp_path, capsys):
    assert call(capsys, "verify", run.root)[:2] == (0, "3 steps undamaged\n")
    flip(run.root / STEP / "rank_00001_expert.safetensors")
    code, out, _ = call(capsys, "verify", run.root)
    assert code == 1
    assert f"damaged: {STEP}/rank_00001_expert.safetensors, step 3, rank 1: slice" in out
    assert f"needed by {STEP}" in out
    assert "1 damaged place; 2 of 3 steps undamaged; newest undamaged: step_00000002" in out
    code, out, _ = call(capsys, "verify", run.root, "--json")
    facts = json.loads(out)
    assert (code, facts["usable"]) == (1, ["step_00000002", "step_00000001"])
    assert facts["damages"][0]["rank"] == 1
    assert call(capsys, "verify", run.root / "step_00000002")[0] == 0
    assert call(capsys, "verify", run.root / STEP)[0] == 1
    for path in (tmp_path / "nowhere", tmp_path, run.root / "step_00000009"):
        code, out, err = call(capsys, "verify", path)
        assert (code, out) == (2, "")
        assert err.startswith("moe-ckpt verify: ")
        assert str(path) in err


def test_verify_names_a_newer_step_without_a_manifest(run, capsys):
    (run.root / STEP / "MANIFEST.json").unlink()
    code, out, _ = call(capsys, "verify", run.root)
    why = "without MANIFEST.json: being written, left unfinished, or damaged"
    assert (code, out) == (0, f"not checked: {STEP} ({why})\n2 steps undamaged\n")
    assert json.loads(call(capsys, "verify", run.root, "--json")[1])["uncommitted"] == [STEP]
    (run.root / "step_00000001" / "MANIFEST.json").unlink()  # newer steps may need its files
    assert json.loads(call(capsys, "verify", run.root, "--json")[1])["uncommitted"] == [STEP]


def test_export_writes_and_refuses(run, tmp_path, capsys):
    out_path = tmp_path / "out"
    code, out, _ = call(capsys, "export", run.root / STEP, "--to", "safetensors", "--output", out_path)
    assert (code, out) == (0, f"{out_path}\n")
    loaded = safetensors.torch.load_file(out_path / "model.safetensors")
    assert torch.equal(loaded[STACK], run.views[STEP][f"model/{STACK}"])
    code, _, err = call(capsys, "export", run.root / STEP, "--to", "safetensors", "--output", out_path)
    assert code == 2
    assert "exists already" in err


def test_export_names_its_output_itself(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "export", run.root, "--to", "lightning")
    assert (code, out) == (0, f"{STEP}.ckpt\n")
    assert f"step {int(STEP[5:])} ({STEP})" in err, "which of the store's was taken"
    assert torch.load(f"{STEP}.ckpt", weights_only=True)["global_step"] == 3


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["inspect"], ["inspect", "x", "--wrong"], ["export", "x"]])
def test_usage_errors_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"  moe-ckpt {command} " in capsys.readouterr().out


def test_help_starts_without_heavy_imports_and_a_closed_pipe_is_no_error(run):
    code = "import sys; from moe_ckpt.cli.main import build_parser; build_parser(); print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for package in ("torch", "hydra", "lightning"):
        assert f"'{package}'" not in loaded
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "moe_ckpt.cli.main", "inspect", str(run.root), "--json"]
    # Torch warns of pynvml, which the extra inprocess brings.
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning"}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=quiet)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# --- tables ---


def shown(columns, rows, room=100):
    return ["\n".join([*head, *lines]) for head, _, *lines in tables.folded(columns, rows, room)]


def test_tables_align():
    assert shown(("a", "bb"), [("xyz", "1"), ("y", "22")]) == ["a    bb\nxyz   1\ny    22"]


def test_heads_are_broken_only_where_that_makes_a_table_narrower():
    [table] = shown(("", "saves every", "failures.mtbf_secs", "of all"), [("x", "1", "600", "as it is")])
    assert table.splitlines() == [
        "   saves  failures.",
        "   every  mtbf_secs    of all",
        "x      1        600  as it is",
    ]


def test_what_is_too_wide_goes_on_below_with_the_first_column_again():
    tables = shown(("name", "one", "two", "three"), [("x" * 10, "1", "2", "3"), ("y", "4", "5", "6")], room=22)
    assert tables == [
        "name        one  two\nxxxxxxxxxx    1    2\ny             4    5",
        "name        three\nxxxxxxxxxx      3\ny               6",
    ]


# --- errors of the command line ---


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "moe-ckpt: the following arguments are required: command; see moe-ckpt --help"),
        (("inspct", "x"), "moe-ckpt: command: invalid choice: 'inspct' (choose from "),
        (("train",), "moe-ckpt: command: invalid choice: 'train' (choose from "),
        (("inspect",), "moe-ckpt inspect: the following arguments are required: path; see moe-ckpt inspect --help"),
        (("inspect", "a", "--jsn"), "moe-ckpt inspect: unrecognized arguments: --jsn; see moe-ckpt inspect --help"),
        (("inspect", "a", "b", "c"), "moe-ckpt inspect: unrecognized arguments: b c; see moe-ckpt inspect --help"),
        (
            ("export", "x", "--to", "safetensor"),
            "moe-ckpt export: --to: invalid choice: 'safetensor' (choose ",
        ),
        (("export", "x"), "moe-ckpt export: the following arguments are required: --to"),
        (("window", "x", "--iteration-secs", "y"), "moe-ckpt window: --iteration-secs: 'y' is no number above 0"),
        (("simulate", "policy=moc", "--seed", "3"), "moe-ckpt simulate: unrecognized arguments: --seed; see moe-ckpt "),
        (
            ("simulate", "--sedes=3"),
            "moe-ckpt simulate: unrecognized arguments: --sedes=3; see moe-ckpt simulate --help",
        ),
        (("plan", "-m", "setup=tiny"), "moe-ckpt plan: unrecognized arguments: -m; see moe-ckpt plan --help"),
        (("plan", "--plto", "x"), "moe-ckpt plan: unrecognized arguments: --plto; see moe-ckpt plan --help"),
    ],
)
def test_an_error_is_one_line_that_names_what_is_wrong(capsys, argv, said):
    try:
        code = main(argv)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_says_what_each_option_is(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"usage: moe-ckpt {command}" in out
    assert f"  moe-ckpt {command}" in out.partition("examples")[2]


# --- on a terminal ---


def on_a_terminal(command, columns, **environment):
    """What a command writes to a terminal so wide."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    known = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    done = subprocess.Popen(
        [sys.executable, "-m", "moe_ckpt.cli.main", *command],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**known, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the other end is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(ours)
    assert done.wait() == 0, text.decode()
    return text.decode().replace("\r", "")


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.skipif(sys.platform != "linux", reason="pseudo terminals differ")
@pytest.mark.parametrize("columns", [80, 100, 160])
def test_inspect_fits_the_terminal(run, columns):
    text = on_a_terminal(["inspect", str(run.root)], columns, NO_COLOR="1")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert max(len(line) for line in lines if "/" not in line) <= columns
    assert any(line.startswith(STEP) for line in lines)


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.skipif(sys.platform != "linux", reason="pseudo terminals differ")
def test_colours_only_where_they_are_wanted(run):
    command = ["inspect", str(run.root)]
    assert re.search(r"\x1b\[[0-9;]*48;", on_a_terminal(command, 100))
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b[" not in on_a_terminal(command, 100, **plain)


@pytest.mark.usefixtures("warm_programs")
@pytest.mark.skipif(sys.platform != "linux", reason="pseudo terminals differ")
def test_progress_is_one_line_that_goes_away(run):
    text = on_a_terminal(["verify", str(run.root)], 100)
    progress, _, rest = text.rpartition("\x1b[K")
    assert re.search(r"B of .*B \(\d+%\) verifying$", progress.split("\x1b[K")[0])
    assert "\n" not in progress
    assert rest.count("\n") == len(rest.splitlines()) > 0


@pytest.mark.usefixtures("warm_programs")
def test_what_goes_to_a_pipe_does_not_depend_on_the_terminal(run):
    def piped(columns):
        command = [sys.executable, "-m", "moe_ckpt.cli.main", "inspect", str(run.root)]
        environment = {**os.environ, "COLUMNS": columns, "FORCE_COLOR": ""}
        return subprocess.run(command, check=True, capture_output=True, env=environment).stdout

    def widest(columns):  # but for the path, which stays whole
        return max(len(line) for line in piped(columns).decode().splitlines() if not line.startswith("store "))

    assert piped("") == piped("100")
    assert widest("40") < widest("200")


def in_80_columns(capsys, monkeypatch, *argv):
    """The lines of what a command writes with COLUMNS=80, which all fit, but for a path that stays whole."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(capsys, *argv)
    assert code == 0
    lines = out.splitlines()
    assert not [line for line in lines if len(line) > 80 and not line.startswith("store ")], out
    return lines


LONG = "decoder.block_sparse_moe"


def long_names(root):
    """A store whose ids and names are as long as those of real runs."""
    builder = StoreBuilder(root, run_id="a" * 32, layers=(LayerRecord(f"model.layers.0.{LONG}", 64, 2),))
    for step in (100, 1048575):
        operators = [*(expert_id(0, expert) for expert in range(64)), "gate/0", f"non_expert/model.layers.10.{LONG}"]
        blocks = [Block(0, op, f"model/{op}", torch.zeros(999), (0,), (999,)) for op in operators]
        builder.commit(step, blocks, [{}, {}])
    return root


def test_80_columns_are_enough_and_names_stay_whole(tmp_path, capsys, monkeypatch):
    store = long_names(tmp_path / "store")
    lines = in_80_columns(capsys, monkeypatch, "inspect", store)
    assert f"store {store}" in lines
    words = " ".join(lines).replace(",", " ").split()
    assert {"a" * 32, "f" * 32, "step_01048575", "step_00000100"} <= {*words}
    for options in (["--window", 3], ["--iteration-secs", "0.001", "--bandwidth", "90MB/s", "--ranks", 16]):
        lines = in_80_columns(capsys, monkeypatch, "window", store, "--explain", *options)
        assert any(line.startswith("slot 0 anchors ") for line in lines)


def test_a_sparse_window_and_damage_are_said_in_80_columns(run, capsys, monkeypatch):
    facts = describe(run.root)
    facts["steps"][0]["window_steps"] = [118, 119, 120]
    facts["steps"].append({"directory": STEP, "damage": "a file is not what the manifest says of it " * 4})
    monkeypatch.setenv("COLUMNS", "80")
    inspect._show(facts)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith("store ")) <= 80
    assert f"{STEP} is a sparse window: resuming computes steps 119 to 120" in " ".join(lines)
