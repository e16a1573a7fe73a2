"""Exports are opened with the other tools' own readers, in a process without our reader where that matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from moe_ckpt.errors import ConfigError, CoverageError, DamagedError, NoCheckpointError
from moe_ckpt.interop.dcp import entries
from moe_ckpt.interop.export import TARGETS, export
from moe_ckpt.interop.weights import FileSource
from moe_ckpt.interop.whole import lightning_dict, open_lightning, open_whole
from moe_ckpt.ports import StateTensor
from moe_ckpt.reading.reader import open_step
from moe_ckpt.storage import LocalStorage
from tests.support.store_builder import STACK, TinyRun, example, megatron_state

STEP = "step_00000003"


@pytest.fixture
def run(tmp_path) -> TinyRun:
    return example(tmp_path / "store")


def model_of(run: TinyRun, directory: str = STEP) -> dict[str, torch.Tensor]:
    """The state_dict that the model had: parameters, tied names, buffers."""
    found = {key[len("model/") :]: value for key, value in run.views[directory].items() if key.startswith("model/")}
    found["head.weight"] = found["embed.weight"]
    return found | run.states[directory][0]["plain"]["buffers"]


def assert_same_tensors(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_safetensors_holds_the_whole_model(run, tmp_path):
    told = []
    out = export(run.root / STEP, "safetensors", tmp_path / "out", lambda done, total: told.append((done, total)))
    assert_same_tensors(safetensors.torch.load_file(out / "model.safetensors"), model_of(run))
    with safetensors.safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    summary = json.loads((out / "checkpoint.json").read_text())
    assert summary["expert_versions"] == {"expert/0/0": 2, "expert/0/1": 2, "expert/0/2": 3, "expert/0/3": 1}
    assert told[-1][0] == told[-1][1] == sum(t.nbytes for t in model_of(run).values())


@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 0, 0), (1, 2, 0), (2, 1, 1)])
def test_of_a_tensor_in_a_file_a_rank_reads_the_block_that_it_holds(offsets, tmp_path):
    """As tensor parallelism divides it: also between rows, and within them."""
    whole = torch.arange(4 * 5 * 3.0).reshape(4, 5, 3)
    safetensors.torch.save_file({"other": torch.ones(7), "w": whole}, tmp_path / "model.safetensors")
    part = StateTensor("model/w", "w", torch.zeros(2, 3, 2), offsets, (4, 5, 3), replicated=False)
    source = FileSource(LocalStorage(tmp_path), ["model.safetensors"], "a file")
    source.copy([("w", part)])
    row, column, depth = offsets
    assert torch.equal(part.local, whole[row : row + 2, column : column + 3, depth : depth + 2])


LOAD_DCP = """
import sys, torch, torch.distributed.checkpoint as dcp
state = torch.load(sys.argv[2], weights_only=True)
dcp.load(state, checkpoint_id=sys.argv[1])
torch.save(state, sys.argv[3])
assert not any(name.startswith("moe_ckpt") for name in sys.modules)
"""


def test_dcp_is_loaded_by_plain_dcp_without_this_package(run, tmp_path):
    out = export(run.root / STEP, "dcp", tmp_path / "out")
    view = run.views[STEP]
    blank = {
        "model": {name: torch.zeros_like(value) for name, value in model_of(run).items()},
        "optim": {"state": {STACK: {"exp_avg": torch.zeros(4, 3, 2), "step": torch.zeros(())}}},
    }
    torch.save(blank, tmp_path / "blank.pt")
    paths = [str(out), str(tmp_path / "blank.pt"), str(tmp_path / "loaded.pt")]
    subprocess.run([sys.executable, "-c", LOAD_DCP, *paths], check=True)
    loaded = torch.load(tmp_path / "loaded.pt", weights_only=True)
    assert_same_tensors(loaded["model"], model_of(run))
    state = loaded["optim"]["state"][STACK]
    assert torch.equal(state["exp_avg"], view[f"optim/0/{STACK}/exp_avg"])
    assert state["step"].item() == 3.0


def test_dcp_export_unflattens_with_torchs_converter(run, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out = export(run.root / STEP, "dcp", tmp_path / "out")
    dcp_to_torch_save(out, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_same_tensors(loaded["model"], model_of(run))
    groups = loaded["optim"]["param_groups"]
    assert groups == run.states[STEP][0]["plain"]["optimizers"][0]["param_groups"]


def test_lightning_ckpt_loads_with_weights_only(run, tmp_path):
    out = export(run.root / STEP, "lightning", tmp_path / "last.ckpt")
    loaded = torch.load(out, weights_only=True)
    assert_same_tensors(loaded["state_dict"], model_of(run))
    assert loaded["global_step"] == 3
    assert loaded["loops"] == run.states[STEP][0]["checkpoint"]["loops"]


def test_optimizer_states_have_torchs_ids(run):
    [state] = lightning_dict(open_lightning(*open_step(run.root / STEP)))["optimizer_states"]
    order = ["embed.weight", "scale", "blocks.0.moe.gate.weight", STACK]
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], [2, 3]]
    assert state["param_groups"][1]["lr"] == 0.5
    for number, name in enumerate(order):
        wanted = {k.rsplit("/", 1)[1]: v for k, v in run.views[STEP].items() if k.startswith(f"optim/0/{name}/")}
        assert_same_tensors(state["state"][number], wanted)


def test_a_real_optimizer_takes_the_exported_state(run):
    checkpoint = lightning_dict(open_lightning(*open_step(run.root / STEP)))
    names = ["embed.weight", "scale", "blocks.0.moe.gate.weight", STACK]
    parameters = [torch.nn.Parameter(checkpoint["state_dict"][name].clone()) for name in names]
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], foreach=False)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    stored = optimizer.state[parameters[3]]["exp_avg"]
    assert torch.equal(stored, run.views[STEP][f"optim/0/{STACK}/exp_avg"])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameters[3]]["step"].item() == 4


def test_marks_metrics_and_extra_state_return_to_their_places(tmp_path):
    run = TinyRun(tmp_path)
    make = run._state

    def state(step, rank):
        made = make(step, rank)
        made["checkpoint"] |= {"state_dict": "moe_ckpt: the model's own state_dict", "copy": "other"}
        ours, other = {"tokens": "moe_ckpt: the tokens of the manifest", "index": 3}, {"tokens": [1]}
        made["checkpoint"]["callbacks"] = {"ours": ours, "other": other}
        made["plain"]["own_state"] = {"metric": {"total": torch.tensor(4.0)}}
        made["plain"]["extra_state"] = {"": {"a": 1}, "blocks.0": [1, 2]}
        made["plain"]["optimizers"][0]["scalars"] = {"scale": {"calls": 7}}
        return made

    run._state = state
    reader, manifest = open_step(tmp_path / run.save(1))
    checkpoint = lightning_dict(open_lightning(reader, manifest))
    assert checkpoint["copy"] == "other"
    assert manifest.tokens["applied"]
    assert checkpoint["callbacks"] == {"ours": {"tokens": manifest.tokens, "index": 3}, "other": {"tokens": [1]}}
    assert checkpoint["state_dict"]["metric.total"].item() == 4
    assert checkpoint["state_dict"]["_extra_state"] == {"a": 1}
    assert checkpoint["state_dict"]["blocks.0._extra_state"] == [1, 2]
    assert checkpoint["optimizer_states"][0]["state"][1]["calls"] == 7
    out = export(tmp_path, "safetensors", tmp_path / "out")
    assert json.loads((out / "checkpoint.json").read_text())["left_out"] == ["_extra_state", "blocks.0._extra_state"]
    out = export(tmp_path, "dcp", tmp_path / "out_dcp")
    blank = {"optim": {"state": {"scale": {"calls": 0}}}, "model": {"blocks.0._extra_state": None}}
    dcp.load(blank, checkpoint_id=out)
    assert blank == {"optim": {"state": {"scale": {"calls": 7}}}, "model": {"blocks.0._extra_state": [1, 2]}}


@pytest.mark.parametrize("to", sorted({*TARGETS} - {"hf"}))  # which is safetensors of some models
def test_outputs_are_never_overwritten_and_failures_leave_nothing(run, tmp_path, to):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        export(run.root / STEP, to, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    before = sorted(os.listdir(tmp_path))
    path = run.root / "step_00000001" / "rank_00001_expert.safetensors"
    raw = bytearray(path.read_bytes())
    stored = open_step(run.root / STEP)[0].index(run.manifests[STEP]).tensors[f"model/{STACK}"]
    raw[next(s.offset for s in stored if s.file.step == 1)] ^= 1
    path.write_bytes(raw)
    # torch's DCP writer reports errors of its threads in an exception of its own
    with pytest.raises((DamagedError, dcp.api.CheckpointException), match="checksum mismatch"):
        export(run.root / STEP, to, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


def test_bad_requests_are_named(run, tmp_path):
    with pytest.raises(ConfigError, match="dcp, safetensors, hf, lightning"):
        export(run.root / STEP, "onnx", tmp_path / "out")
    with pytest.raises(NoCheckpointError):
        export(tmp_path / "nowhere", "dcp", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"s3://bucket/out.*local directories"):
        export(run.root / STEP, "dcp", "s3://bucket/out")
    with pytest.raises(CoverageError, match="rank 5"):
        lightning_dict(open_lightning(*open_step(run.root / STEP), 5))


def test_an_output_that_appears_meanwhile_is_not_overwritten(run, tmp_path):
    target = tmp_path / "out.ckpt"

    def appears(done, total):
        target.write_text("of another export")

    with pytest.raises(ConfigError, match="exists already"):
        export(run.root / STEP, "lightning", target, progress=appears)
    assert target.read_text() == "of another export"
    assert sorted(os.listdir(tmp_path)) == ["out.ckpt", "store"]


def test_another_frameworks_checkpoint_has_no_loops(tmp_path):
    run = TinyRun(tmp_path)
    run._state = lambda step, rank: megatron_state(step, rank, {})
    with pytest.raises(NoCheckpointError, match="megatron"):
        lightning_dict(open_lightning(*open_step(tmp_path / run.save(1))))


def test_megatrons_buffers_come_from_all_ranks_and_its_optimizer_state_comes_along(tmp_path):
    """Each pipeline stage's ranks have the buffers of their own layers, and no param groups told by parameter."""
    run = TinyRun(tmp_path)
    run._state = lambda step, rank: megatron_state(
        step, rank, {f"layers.{rank}.expert_bias": torch.full((2,), float(rank))}
    )
    checkpoint = open_whole(*open_step(tmp_path / run.save(1)))
    assert {name: value.tolist() for name, value in checkpoint.extras.items()} == {
        "layers.0.expert_bias": [0.0, 0.0],
        "layers.1.expert_bias": [1.0, 1.0],
    }
    names = {entry.name for entry in entries(checkpoint)}
    assert f"optim.state.{STACK}.exp_avg" in names


def test_arrays_that_need_pickle_are_announced(tmp_path, caplog):
    run = TinyRun(tmp_path)
    make = run._state

    def state(step, rank):
        made = make(step, rank)
        made["checkpoint"]["callbacks"] = {"mine": {"history": np.arange(3)}}
        return made

    run._state = state
    export(tmp_path / run.save(1), "lightning", tmp_path / "x.ckpt")
    assert "/callbacks/mine/history" in caplog.text


@pytest.mark.parametrize("to", sorted({*TARGETS} - {"hf"}))  # which is safetensors of some models
def test_what_a_killed_export_left_is_removed_by_the_next(run, tmp_path, to):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    host, target = os.uname().nodename, tmp_path / "out" / "model"
    names = {
        "killed": f".model.{host}.{dead.pid}.0123abcd.tmp",
        "alive": f".model.{host}.{os.getpid()}.0123abcd.tmp",
        "elsewhere": f".model.another.{dead.pid}.0123abcd.tmp",
        "another's": f".models.{host}.{dead.pid}.0123abcd.tmp",
    }
    for name in names.values():
        (target.parent / name).mkdir(parents=True)
    (target.parent / names["killed"] / "half").write_text("of it")
    export(run.root / STEP, to, target)
    assert sorted(os.listdir(target.parent)) == sorted({*names.values(), "model"} - {names["killed"]})
