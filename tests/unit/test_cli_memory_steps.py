"""``moe-ckpt inspect``, ``verify`` and ``export`` read what an ended run left in memory, and change nothing there."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from moe_ckpt.cli.main import main
from moe_ckpt.format.manifest import Manifest
from moe_ckpt.format.slot import decode_slot
from moe_ckpt.interop.export import export
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.tiers import host_memory
from tests.support.spoiled import flip
from tests.support.store_builder import values_at
from tests.unit.test_engine_host_tier import come_back
from tests.unit.test_engine_memory import files
from tests.unit.test_engine_memory_only import committed, life, train_and_fail, where  # noqa: F401 - a fixture
from tests.unit.test_memory_return import flip_last


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


def answer(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def step_in(slot: Path) -> int:
    return decode_slot(slot.read_bytes(), str(slot)).step


def remove_slots(memory: Path, chosen: Callable[[int], bool]) -> None:
    for slot in memory.rglob("*.head"):
        if chosen(step_in(slot)):
            slot.unlink()


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1, snapshot_k=4)], ids=["dense", "moc"])
def test_a_step_that_only_memory_has_is_shown_verified_and_exported(where, tmp_path, capsys, policy):  # noqa: F811
    train_and_fail(where, steps=6, policy=policy)
    store, memory = map(str, where)
    before = {path: path.read_bytes() for path in files(where[1])}
    assert committed(where[0]) == ["step_00000001"]
    _, facts = answer(capsys, "inspect", store, "--directory", memory)
    assert (facts["steps"][0]["step"], facts["steps"][0]["in_memory"]) == (6, True)
    returned = [facts["steps"][0][name] for name in ("unsaved_tokens", "plt_if_returned_to", "mlt_if_returned_to")]
    assert returned == [0, 0.0, 0.0], "memory has every expert as of the step"
    assert facts["steps"][0]["routed_tokens"]
    assert facts["steps"][-1]["step"] == 1
    assert not facts["steps"][-1]["in_memory"]
    assert main(["inspect", store, "--directory", memory]) == 0
    assert "in memory" in capsys.readouterr().out
    _, named = answer(capsys, "inspect", f"{store}/step_00000006", "--directory", memory)
    assert [(step["directory"], step["in_memory"]) for step in named["steps"]] == [("step_00000006", True)]
    assert answer(capsys, "verify", store, "--directory", memory) == (
        0,
        {"path": store, "usable": ["step_00000006"], "damages": []},
    )
    target = tmp_path / "weights"
    assert main(["export", store, "--directory", memory, "--to", "safetensors", "-o", str(target)]) == 0
    assert "step 6 (step_00000006):" in capsys.readouterr().err
    weights = safetensors.torch.load_file(target / "model.safetensors")
    assert weights
    for name, values in weights.items():
        assert torch.equal(values, values_at(6, f"model/{name}", values.shape, torch.float32)), name
    after = {path: path.read_bytes() for path in files(where[1])}
    assert after == before, "nothing is changed, and nothing is left behind"
    with life(where, policy) as second:
        assert second.session.tier.left_slots.slots, "a start still goes on from it"


def test_a_window_that_memory_has_is_verified_and_not_exported(where, tmp_path, capsys):  # noqa: F811
    train_and_fail(where, steps=6, policy=MoEvement(window=2))
    store, memory = map(str, where)
    _, facts = answer(capsys, "inspect", store, "--directory", memory)
    newest = facts["steps"][0]
    assert (newest["in_memory"], len(newest["window_steps"])) == (True, 2)
    expected = {"path": store, "usable": [newest["directory"]], "damages": []}
    assert answer(capsys, "verify", store, "--directory", memory) == (0, expected)
    assert main(["verify", f"{store}/{newest['directory']}", "--directory", memory]) == 0
    capsys.readouterr()
    out = str(tmp_path / "out")
    for path in (store, f"{store}/{newest['directory']}"):
        assert main(["export", path, "--directory", memory, "--to", "dcp", "-o", out]) == 2
        assert f"{newest['directory']} is a sparse window" in capsys.readouterr().err
    for path in where[1].rglob("*.head"):
        flip(path, 16)
    assert main(["verify", store, "--directory", memory]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_optimizer_state_comes_along(where, tmp_path):  # noqa: F811
    train_and_fail(where, steps=4)
    target = export(f"{where[0]}/step_00000004", "dcp", tmp_path / "out", memory=[str(where[1])])
    metadata = dcp.FileSystemReader(target).read_metadata().state_dict_metadata
    state = {name: torch.zeros(meta.size) for name, meta in metadata.items() if "exp_avg" in name}
    assert state
    dcp.load(state, checkpoint_id=target, no_dist=True)
    for name, values in state.items():
        _, _, *parts, moment = name.split(".")
        assert torch.equal(values, values_at(4, f"optim/0/{'.'.join(parts)}/{moment}", values.shape, torch.float32))


def test_damage_is_named_and_another_copy_is_taken(where, capsys):  # noqa: F811
    train_and_fail(where, steps=6)
    for path in where[1].rglob("*.head"):
        flip(path, 16)
    code = main(["verify", str(where[0]), "--directory", str(where[1])])
    out = capsys.readouterr().out
    assert code == 1
    assert "damaged: " in out
    assert "because of damage" in out


@pytest.mark.parametrize("file", ["MANIFEST.json", "rank_00000_expert.safetensors"])
def test_a_damaged_file_beneath_memory_is_named_and_the_step_made_as_a_start_makes_it(where, tmp_path, capsys, file):  # noqa: F811
    train_and_fail(where, steps=6, policy=MoC(k=1), every=4)
    store, memory = map(str, where)
    flip_last(where[0] / "step_00000004" / file)
    code, facts = answer(capsys, "verify", store, "--directory", memory)
    assert (code, facts["usable"]) == (1, ["step_00000006"])
    assert [damage for damage in facts["damages"] if damage.startswith(f"step_00000004/{file}")] == facts["damages"]
    assert main(["verify", store, "--directory", memory]) == 1
    out = capsys.readouterr().out
    assert f"damaged: step_00000004/{file}" in out
    assert "step_00000006 can be made of what is undamaged, with 6 experts older than that" in out
    target = tmp_path / "weights"
    assert main(["export", store, "--directory", memory, "--to", "safetensors", "-o", str(target)]) == 0
    assert "step 6 (step_00000006), of which 6 experts are older than that" in capsys.readouterr().err
    exported = json.loads((target / "checkpoint.json").read_text())["expert_versions"]
    with life(where, MoC(k=1)) as second:
        versions = come_back(second)[0].versions
    assert exported == {op: step for op, step in versions.items() if op.startswith("expert/")}


def test_what_memory_has_itself_is_not_missed_on_storage(where, capsys):  # noqa: F811
    train_and_fail(where, steps=2, policy=MoC(k=1))
    flip_last(where[0] / "step_00000001" / "rank_00000_expert.safetensors")
    assert main(["verify", str(where[0]), "--directory", str(where[1])]) == 1
    assert "step_00000002 can be made of what is undamaged, with 6 experts older than that" in capsys.readouterr().out


def test_a_damaged_file_beneath_memory_without_which_nothing_is_whole(where, tmp_path, capsys):  # noqa: F811
    train_and_fail(where, steps=6, policy=MoC(k=1), every=4)
    store, memory = map(str, where)
    remove_slots(where[1], lambda step: step < 6)
    flip_last(where[0] / "step_00000001" / "rank_00000_expert.safetensors")
    code, facts = answer(capsys, "verify", store, "--directory", memory)
    assert (code, facts["usable"]) == (1, [])
    assert [damage.partition(",")[0] for damage in facts["damages"]] == ["step_00000001/rank_00000_expert.safetensors"]
    assert main(["verify", store, "--directory", memory]) == 1
    assert capsys.readouterr().out == f"damaged: {facts['damages'][0]}\n"
    target = tmp_path / "weights"
    assert main(["export", store, "--directory", memory, "--to", "safetensors", "-o", str(target)]) == 1
    assert facts["damages"][0] in capsys.readouterr().err.splitlines()[-1]
    assert not target.exists()


def test_a_damaged_header_of_the_newest_step_is_damage(where, capsys):  # noqa: F811
    train_and_fail(where, steps=6)
    newest = max(where[1].rglob("*.head"), key=step_in)
    flip_last(newest)
    code, facts = answer(capsys, "verify", str(where[0]), "--directory", str(where[1]))
    assert (code, facts["usable"], len(facts["damages"])) == (1, ["step_00000005"], 1)
    assert str(newest) in facts["damages"][0]


def test_a_step_directory_is_the_very_one_that_is_named(where, tmp_path, capsys):  # noqa: F811
    """A start could not read step 4, and went on from step 3: storage has two steps of that number."""
    train_and_fail(where, steps=4, every=1)
    shutil.rmtree(where[1])
    where[1].mkdir()
    shutil.move(where[0] / "step_00000004", tmp_path / "away")
    with life(where, every=1) as second:
        assert come_back(second)[0].manifest.step == 3
        second.go(1, settle=True)
    shutil.move(tmp_path / "away", where[0] / "step_00000004")
    for name in ("step_00000004", "step_00000004_g1"):
        step, memory = str(where[0] / name), str(where[1])
        assert main(["verify", step, "--directory", memory]) == 0
        assert f"{name} is on storage" in capsys.readouterr().err
        target = export(step, "safetensors", tmp_path / f"of {name}", memory=[memory])
        assert json.loads((target / "checkpoint.json").read_text())["checkpoint"] == name
    shutil.rmtree(where[0] / "step_00000004_g1")
    target = export(where[0] / "step_00000004_g1", "safetensors", tmp_path / "of memory", memory=[str(where[1])])
    assert json.loads((target / "checkpoint.json").read_text())["checkpoint"] == "step_00000004_g1"


def test_a_step_on_storage_that_is_not_finite_is_passed_over(where, tmp_path, capsys):  # noqa: F811
    train_and_fail(where, steps=6, every=4)
    store, memory = map(str, where)
    with life(where, every=1) as second:
        come_back(second)
        second.go(1, settle=True)
    path = where[0] / "step_00000007_g1" / "MANIFEST.json"
    manifest = Manifest.decode(path.read_bytes(), str(path))
    path.write_bytes(dataclasses.replace(manifest, not_finite="model/gate").encode())
    remove_slots(where[1], lambda step: step == 7)  # such a step is not kept in memory
    assert answer(capsys, "verify", store, "--directory", memory)[1]["usable"] == ["step_00000006"]
    target = tmp_path / "weights"
    assert main(["export", store, "--directory", memory, "--to", "safetensors", "-o", str(target)]) == 0
    assert "step 6 (step_00000006)" in capsys.readouterr().err


def test_a_run_that_is_at_work_is_left_alone(where, capsys):  # noqa: F811
    with life(where) as only:
        only.go(3, settle=True)
        assert main(["export", str(where[0]), "--directory", str(where[1]), "--to", "dcp"]) == 2
    assert "End it first" in capsys.readouterr().err


def test_what_storage_has_is_exported_from_there(where, capsys):  # noqa: F811
    train_and_fail(where, steps=1)
    assert main(["verify", str(where[0]), "--directory", str(where[1])]) == 0
    assert "step_00000001 is on storage, and verified there" in capsys.readouterr().err
    out = str(where[1].parent / "out")
    assert main(["export", str(where[0]), "--directory", str(where[1]), "--to", "dcp", "-o", out]) == 0
    assert "step 1 (step_00000001)" in capsys.readouterr().err
