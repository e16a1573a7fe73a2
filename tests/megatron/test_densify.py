"""Dense checkpoints made from the log of a killed Megatron job, opened by a new one, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ckpt.cli.main import main
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.megatron.exactness import finish, kill, require_exact
from tests.megatron.test_exact import BF16, GROUPED, SHARDED
from tests.megatron.test_gradient_log import CASES, COPIES, logged
from tests.support.deleting import delete_tree
from tests.support.megatron_gpt import Setup

NODES = ("node_0", "node_1")


def densify(place, *nodes: str) -> int:
    there = [place / "memory" / node for node in nodes if (place / "memory" / node).exists()]
    memory = [word for path in there for word in ("--directory", str(path))]
    return main(["densify", str(place / "store"), *memory])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "ep2-dp2-sharded")) for name in CASES]
)
def test_a_job_goes_on_from_what_was_made(name, tmp_path):
    case = CASES[name]
    kill(case, tmp_path)
    assert densify(tmp_path, *NODES) == 0
    delete_tree(tmp_path / "memory")
    ended = finish(case, tmp_path)
    _, at, phase = case.kills[-1]
    assert ended.resumed[-1] >= at - 1 - (phase != "train"), "all that was sealed on every rank"
    assert all(result["remade"] is None for result in ended.results), "from storage"
    require_exact(case, tmp_path, ended)


@pytest.mark.slow
@pytest.mark.parametrize("left", NODES)
def test_one_node_is_enough_with_copies_on_peers(left, tmp_path):
    case = replace(CASES["ep2-dp2-sharded"], copies=COPIES)
    kill(case, tmp_path)
    [lost] = set(NODES) - {left}
    delete_tree(tmp_path / "memory" / lost)
    assert densify(tmp_path, left) == 0
    delete_tree(tmp_path / "memory" / left)
    ended = finish(case, tmp_path)
    assert ended.resumed[-1] >= 5
    require_exact(case, tmp_path, ended)


@pytest.mark.slow
def test_another_layout_opens_what_was_made(tmp_path):
    case = CASES["ep2-dp2-sharded"]
    kill(case, tmp_path)
    assert densify(tmp_path, *NODES) == 0
    reader = StoreReader(open_storage(str(tmp_path / "store")))
    made = reader.manifest(reader.directories()[0])
    dense = ("Dense", {"every_n_steps": 1})
    other = replace(case, policy=dense, setup=replace(case.setup, dist_opt=False, ep=4), kills=(), memory=False)
    ended = finish(other, tmp_path)
    assert ended.lives[-1][0]["resumed"] == made.step


@pytest.mark.slow
def test_another_layout_goes_on_from_a_log_by_itself(tmp_path):
    case = CASES["ep2-dp2-sharded"]
    kill(case, tmp_path)
    other = replace(case, setup=replace(case.setup, dist_opt=False, ep=4), kills=())
    ended = finish(other, tmp_path)
    assert ended.lives[-1][0]["resumed"] >= 6
    reader = StoreReader(open_storage(str(tmp_path / "store")))
    assert any(each.step == ended.lives[-1][0]["resumed"] for each in map(reader.manifest, reader.directories()))


@pytest.mark.slow
def test_fewer_ranks_go_on_from_a_log_by_themselves(tmp_path):
    """Expert parallelism over two ranks, with a distributed optimizer; then one rank has all experts."""
    setup = {**GROUPED, **BF16, **SHARDED}
    case = logged({**setup, "ep": 2}, kills=((1, 7, "train"),), ranks=2)
    kill(case, tmp_path)
    assert densify(tmp_path, *NODES) == 0
    reader = StoreReader(open_storage(str(tmp_path / "store")))
    expected = tensors_of(reader)
    delete_tree(tmp_path / "store" / reader.directories()[0])
    ended = finish(replace(case, setup=Setup(**setup), kills=(), ranks=1), tmp_path)
    made = StoreReader(open_storage(str(tmp_path / "store")))
    assert ended.lives[-1][0]["resumed"] == expected.pop("step")
    found = tensors_of(made, ended.lives[-1][0]["resumed"])
    assert found.pop("step") == ended.lives[-1][0]["resumed"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def tensors_of(reader: StoreReader, step: int | None = None) -> dict:
    """Whole tensors of a checkpoint, the newest without ``step``, by key; and its step."""
    manifests = [reader.manifest(directory) for directory in reader.directories()]
    manifest = next(each for each in manifests if step in (None, each.step))
    keys = reader.index(manifest).tensors
    return {"step": manifest.step, **{key: reader.tensor(manifest, key) for key in keys}}
