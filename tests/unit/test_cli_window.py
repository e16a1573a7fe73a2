"""``moe-ckpt window``: sizes from a checkpoint's headers, the table, JSON and the plot."""

from __future__ import annotations

import argparse
import json
import sys
from math import prod

import pytest
import torch

from moe_ckpt.cli.main import main
from moe_ckpt.core.operators import expert_id, gate_id
from moe_ckpt.core.placement import everywhere
from moe_ckpt.core.window import OperatorBytes, Window, slot_bytes
from moe_ckpt.format.manifest import LayerRecord
from moe_ckpt.policies.moevement import MoEvement, WindowReport
from moe_ckpt.reading.reader import open_step
from moe_ckpt_sim.commands import window as command
from moe_ckpt_sim.commands.window_model import catalog_of, sizes_of
from moe_ckpt_sim.commands.window_plot import COMPUTE, FULL, NOT_SAVED, fidelities, plot_window
from tests.support.store_builder import Block, StoreBuilder, TinyRun, example

STEP = "step_00000003"
SIZES = {
    # fp32 with Adam: 6 weights of 4 bytes and as much for each of two moments. The stack's step count is its gate's.
    **{expert_id(0, expert): OperatorBytes(72, 24) for expert in range(4)},
    gate_id(0): OperatorBytes(3 * 64 + 4 + 4, 64),
    "non_expert/embed": OperatorBytes(56 + 2 * 112 + 4, 56),  # bf16 weights, fp32 moments
    "non_expert/rest": OperatorBytes(3 * 4 + 4, 4),
}


@pytest.fixture
def run(tmp_path) -> TinyRun:
    return example(tmp_path / "store")


def call(capsys, *argv):
    code = main(["window", *(str(arg) for arg in argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def facts(capsys, *argv):
    code, out, _ = call(capsys, *argv, "--json")
    assert code == 0
    return json.loads(out)


def equal_experts(root, experts, numel, world_size=2):
    """One MoE layer of equal experts, fp32 with Adam's two moments."""
    builder = StoreBuilder(root, layers=(LayerRecord("moe", experts, 2),), world_size=world_size)
    blocks = []
    for expert in range(experts):
        for key in (f"model/e{expert}", f"optim/0/e{expert}/exp_avg", f"optim/0/e{expert}/exp_avg_sq"):
            rank = expert % world_size
            blocks.append(Block(rank, expert_id(0, expert), key, torch.zeros(numel), (0,), (numel,)))
    tokens = {"applied": [[10 * (experts - e) for e in range(experts)]], "saved": {}, "faults": [], "mlt": []}
    builder.commit(5, blocks, [{}] * world_size, tokens=tokens)
    return root


@pytest.mark.parametrize("sharded", [False, True])
def test_sizes_are_those_of_the_slices_that_the_checkpoint_counts(tmp_path, sharded):
    run = example(tmp_path, sharded=sharded)
    reader, manifest = open_step(tmp_path)
    assert sizes_of(reader, manifest) == SIZES
    whole = run.views[STEP]
    assert sum(size.full for size in SIZES.values()) == sum(t.numel() * t.element_size() for t in whole.values())
    weights = {key: t for key, t in whole.items() if key.startswith("model/")}
    assert sum(size.compute for size in SIZES.values()) == sum(t.numel() * t.element_size() for t in weights.values())
    halved = sizes_of(reader, manifest, 2)
    assert halved[expert_id(0, 1)] == OperatorBytes(72, 12)
    assert halved["non_expert/embed"] == SIZES["non_expert/embed"]  # bf16 as it is
    assert sizes_of(reader, manifest, 1)["non_expert/embed"] == OperatorBytes(284, 28)
    assert sum(size.compute for size in halved.values()) == sum(2 * prod(t.shape) for t in weights.values())


def test_the_catalog_is_in_an_order_of_its_own():
    class Named:
        model = type("Model", (), {"layers": (LayerRecord("a", 2), LayerRecord("b", 11))})
        operators = dict.fromkeys(
            ["non_expert/h.10.x", "non_expert/h.9.x", "gate/1", "expert/1/10", "expert/1/9", "gate/0", "expert/0/1"]
        )

    found = catalog_of(Named)
    ids = [op.id for op in found.operators]
    assert ids == [
        *["expert/0/1", "gate/0", "expert/1/9", "expert/1/10", "gate/1"],
        *["non_expert/h.9.x", "non_expert/h.10.x"],
    ]
    assert [layer.experts for layer in found.layers] == [2, 11]
    assert len(found.experts) == 3


def test_fp32_with_adam_at_w_3_as_in_the_paper(tmp_path, capsys):
    """Equal operators, equal counts: about 45 % of dense on average, 55 % at most. Balanced: 48 % at most."""
    store = equal_experts(tmp_path, 18, 8)
    reader, manifest = open_step(store)
    sizes = sizes_of(reader, manifest)
    order = list(sizes)
    equal = slot_bytes([order[at : at + 6] for at in (0, 6, 12)], sizes)
    dense = sum(size.full for size in sizes.values())
    assert max(equal) / dense == pytest.approx(0.55, abs=0.01)
    assert sum(equal) / 3 / dense == pytest.approx(0.45, abs=0.01)
    found = facts(capsys, store, "--window", 3)
    assert (found["window"], found["dense_bytes"]) == (3, 18 * 96)
    assert [slot["bytes"] for slot in found["slots"]] == [4 * 96 + 14 * 32, 6 * 96 + 8 * 32, 8 * 96]
    assert found["heaviest_bytes"] / found["dense_bytes"] == pytest.approx(0.48, abs=0.01)
    # bf16 compute weights: each slot is lighter.
    halved = facts(capsys, store, "--window", 3, "--compute-dtype", "bf16")
    assert halved["heaviest_bytes"] < found["heaviest_bytes"]
    assert halved["dense_bytes"] == found["dense_bytes"]


def test_popular_experts_come_last_by_the_tokens_of_the_run(tmp_path, capsys):
    store = equal_experts(tmp_path, 4, 8)
    anchors = [op for slot in facts(capsys, store, "--window", 2)["slots"] for op in slot["anchors"]]
    assert anchors == [expert_id(0, expert) for expert in (3, 2, 1, 0)]
    in_turn = facts(capsys, store, "--window", 2, "--order", "round_robin")
    assert in_turn["policy"]["order"] == "round_robin"
    assert in_turn["slots"][0]["anchors"][0] == expert_id(0, 6 % 4)


def test_the_window_is_sized_by_bandwidth_time_and_ranks(run, capsys, monkeypatch):
    dense = sum(size.full for size in SIZES.values())
    assert facts(capsys, run.root, "--iteration-secs", 1, "--bandwidth", dense, "--ranks", 1)["window"] == 1
    fewer = facts(capsys, run.root, "--iteration-secs", 1, "--bandwidth", dense - 1, "--ranks", 1)
    assert (fewer["window"], fewer["fits"], fewer["limit_bytes"]) == (2, True, dense - 1)
    assert facts(capsys, run.root, "--iteration-secs", 1, "--bandwidth", dense // 2)["ranks"] == 2
    with monkeypatch.context() as patch:
        patch.setattr(MoEvement, "max_window", 2)
        stalling = facts(capsys, run.root, "--iteration-secs", 0.5, "--bandwidth", "1B/s")
    assert (stalling["window"], stalling["fits"]) == (2, False)
    assert stalling["stall_secs"] == pytest.approx(-(-stalling["heaviest_bytes"] // 2) - 0.5)
    half = facts(capsys, run.root, "--iteration-secs", 1, "--bandwidth", dense, "--ranks", 1, "--budget-fraction", 0.5)
    assert half["limit_bytes"] == dense // 2
    assert half["window"] > 1


def test_the_table_says_what_json_does(run, capsys):
    code, out, _ = call(
        capsys, run.root / STEP, "--window", 2, "--explain", "--iteration-secs", 2, "--bandwidth", "1kB/s"
    )
    found = facts(capsys, run.root / STEP, "--window", 2, "--explain")
    assert code == 0
    assert f"{STEP}: 4 experts in 1 MoE layers, 3 other operators; dealt over 2 ranks" in out
    assert "limit per rank and iteration: 2.0 KiB (2 s at 1000 B/s, 2 ranks); every slot fits" in out
    assert "recovery trains 3 iterations again on average, 4 at most (6 s and 8 s)" in out
    for number, slot in enumerate(found["slots"]):
        [line] = [line for line in out.splitlines() if line.startswith(f"slot {number} anchors")]
        assert line == f"slot {number} anchors {', '.join(slot['anchors'])}"
        [row] = [
            line for line in out.splitlines() if line.split()[:1] == [str(number)] and "%" in line and " s" in line
        ]
        assert f"{slot['bytes']} B" in row
    heaviest = found["heaviest_bytes_by_window"]
    assert len(heaviest) == 2 + 3
    assert heaviest[1] == found["heaviest_bytes"]
    assert heaviest == sorted(heaviest, reverse=True)
    for number, nbytes in enumerate(heaviest, start=1):
        start = f"{number} *" if number == 2 else str(number)
        assert [row for row in out.splitlines() if row.strip().startswith(f"{start} ") and f"{nbytes} B" in row]


def test_a_checkpoint_without_optimizer_state_says_so(tmp_path, capsys):
    builder = StoreBuilder(tmp_path, layers=(), world_size=1)
    blocks = [Block(0, f"non_expert/{n}", f"model/{n}", torch.zeros(3), (0,), (3,)) for n in ("layers.9", "layers.10")]
    builder.commit(0, blocks, [{}])
    code, out, _ = call(capsys, tmp_path, "--window", 2)
    assert code == 0
    assert "holds no optimizer state" in out
    # Without MoE layers: from the output to the input, by name.
    anchors = [op for slot in facts(capsys, tmp_path, "--window", 2)["slots"] for op in slot["anchors"]]
    assert anchors == ["non_expert/layers.10", "non_expert/layers.9"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give --iteration-secs and --bandwidth"),
        (["--iteration-secs", "1"], "give --iteration-secs and --bandwidth"),
        (["--window", "99"], "window=99"),
        (["--window", "2", "--order", "soft_count"], "--order soft_count: checkpoints hold token counts only"),
        (
            ["--window", "2", "--order", "popular"],
            "--order popular: no such order; give hard_count, capacity_",
        ),
        (["--window", "2", "--budget-fraction", "2"], "--budget-fraction=2.0"),
        (["--window", "2", "--host-memory", "10B"], "room for 10; no window does: set --host-memory to "),
    ],
)
def test_what_cannot_work_is_said_with_exit_code_2(run, capsys, argv, said):
    code, out, err = call(capsys, run.root, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("moe-ckpt window: ")
    assert said in err


@pytest.mark.parametrize(
    "argv", [["--window", "0"], ["--bandwidth", "fast"], ["--iteration-secs", "-1"], ["--iteration-secs", "soon"]]
)
def test_values_of_another_kind_are_usage_errors(run, capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(["window", str(run.root), *argv])
    assert caught.value.code == 2
    assert argv[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *[("2GB/s", 2 * 10**9), ("2gb", 2 * 10**9), ("1.5 GiB/s", 3 << 29), ("800M", 8 * 10**8), ("4096", 4096)],
        *[("512B/s", 512), (".5k", 500), ("1TiB", 1 << 40)],
    ],
)
def test_quantities(text, nbytes):
    assert command._bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "2 G B", "2iB/s", "-1", "2GB/m", "0", "0.1B", "nan"])
def test_other_quantities_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="byte"):
        command._bytes(text)


def report(order=("a", "b", "c"), ends=(1, 3)):
    slots = tuple(tuple(order[a:b]) for a, b in zip((0, *ends), ends, strict=False))
    return WindowReport(Window(0, slots), {op: OperatorBytes(12, 4) for op in order}, everywhere((), 1))


def test_the_picture_shows_each_fidelity():
    table = fidelities(report(("a", "b", "c", "d"), (1, 3, 4)))
    assert table.tolist() == [
        [FULL, NOT_SAVED, NOT_SAVED],
        [COMPUTE, FULL, NOT_SAVED],
        [COMPUTE, FULL, NOT_SAVED],
        [COMPUTE, COMPUTE, FULL],
    ]


def test_the_plot_is_drawn_on_given_axes_and_into_a_file(run, tmp_path, capsys):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    figure, drawn = plot_window(report(), ax)
    assert drawn is ax
    assert figure is ax.get_figure()
    [image] = ax.get_images()
    assert image.get_array().tolist() == fidelities(report()).tolist()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0\n56%", "1\n67%"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b", "c"]
    path = tmp_path / "window.png"
    assert call(capsys, run.root, "--window", 3, "--plot", path)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    code, _, err = call(capsys, run.root, "--window", 3, "--plot", tmp_path / "window.what")
    assert code == 2
    assert "window.what" in err
    code, _, err = call(capsys, run.root, "--window", 3, "--plot", tmp_path / "no" / "window.png")
    assert code == 2
    plt.close("all")


def test_a_plot_without_matplotlib_names_what_to_install(run, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    code, _, err = call(capsys, run.root, "--window", 3, "--plot", tmp_path / "window.png")
    assert code == 2
    assert "moe_ckpt[plot]" in err
