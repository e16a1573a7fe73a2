"""``dcp.load`` straight from a step directory, by real gloo ranks, at another world size and sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moe_ckpt.errors import MoECheckpointError, NoCheckpointError, UserError
from moe_ckpt.interop.dcp import MoEStorageReader
from moe_ckpt.reading.reader import open_step
from tests.support import run_ranks
from tests.support.store_builder import PARAMETERS, STACK, TinyRun, example

STEP = "step_00000003"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[TinyRun]:
    """Written by three ranks: experts dealt out whole, and everything cut by rows as FSDP2 does."""
    made = [example(tmp_path_factory.mktemp("store"), sharded=sharded, world_size=3) for sharded in (False, True)]
    for run in made:
        index = open_step(run.root / STEP)[0].index(run.manifests[STEP])
        assert {stored.file.step for stored in index.tensors[f"model/{STACK}"]} == {1, 2, 3}
    return made


class Moe(nn.Module):
    """Has the parameters of the tiny model under their names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).sum() + self.experts.sum()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([nn.Module()])
        self.blocks[0].moe = Moe()
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0].moe(self.embed(x).float())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_dtensors(path: str, dim: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for fqn, (shape, dtype) in PARAMETERS.items():
        blank = torch.zeros(shape, dtype=dtype)
        state[fqn] = distribute_tensor(blank, mesh, [Shard(dim % len(shape))]) if shape else blank
    dcp.load({"model": state}, storage_reader=MoEStorageReader(path))
    return {f"model/{fqn}": whole(value).clone() for fqn, value in state.items()}


def load_model_and_optimizer(path: str) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Through torch's own state dict helpers; FSDP2 where there are several ranks, plain tensors on one."""
    model = Tiny()
    if dist.is_initialized():
        fully_shard(model.blocks[0].moe)
        fully_shard(model)
        assert isinstance(model.blocks[0].moe.experts, DTensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model_state = get_model_state_dict(model)
    optim_state = {"state": get_optimizer_state_dict(model, optimizer)["state"]}
    model_state["embed.weight"] = model_state["embed.weight"].bfloat16()
    dcp.load({"model": model_state, "optim": optim_state}, storage_reader=MoEStorageReader(path))
    flat = {f"model/{fqn}": whole(value) for fqn, value in model_state.items()}
    for fqn, state in optim_state["state"].items():
        flat |= {f"optim/0/{fqn}/{name}": whole(value) for name, value in state.items()}
    groups = {"optim": {"param_groups": [{"lr": 0.0, "params": []}, {"lr": 0.0, "params": []}]}}
    dcp.load(groups, storage_reader=MoEStorageReader(path))
    return {key: value.clone() for key, value in flat.items()}, groups["optim"]["param_groups"]


def load_and_report(path: str) -> str:
    try:
        dcp.load({"model": {STACK: torch.zeros(4, 3, 2)}}, storage_reader=MoEStorageReader(path))
    except BaseException as error:  # CheckpointException is no Exception
        return str(error)
    return "loaded"


def load_steps_of_their_own(rank, world_size, root):
    return load_and_report(f"{root}/step_0000000{2 + rank}"), load_and_report(root)


def test_ranks_that_opened_different_steps_load_neither(runs):
    said = run_ranks(load_steps_of_their_own, 2, str(runs[0].root))
    for apart, together in said:
        assert "rank 0 opened step_00000002, and rank 1 step_00000003" in apart
        assert together == "loaded"


def everything(rank, world_size, whole_stores, damaged):
    loaded = {
        path: (load_dtensors(path, 0), load_dtensors(path, -1), *load_model_and_optimizer(path))
        for path in whole_stores
    }
    return loaded, load_and_report(damaged)


def damage(run: TinyRun) -> None:
    """Flip a bit in the one expert that the newest checkpoint takes from step 1."""
    index = open_step(run.root / STEP)[0].index(run.manifests[STEP])
    stored = next(s for s in index.tensors[f"model/{STACK}"] if s.file.step == 1)
    raw = bytearray((run.root / stored.path).read_bytes())
    raw[stored.offset] ^= 1
    (run.root / stored.path).write_bytes(raw)


def assert_loaded(run: TinyRun, loaded: dict[str, torch.Tensor]) -> None:
    buffers = {f"model/{name}": value for name, value in run.states[STEP][0]["plain"]["buffers"].items()}
    wanted = buffers | run.views[STEP]
    for key, value in loaded.items():
        assert torch.equal(value, wanted[key]), key


def assert_groups(groups: list[dict]) -> None:
    assert [group["lr"] for group in groups] == [0.1 / 3, 0.5]
    assert groups[1]["params"] == ["blocks.0.moe.gate.weight", STACK]


def test_two_ranks_load_what_three_wrote(runs, tmp_path):
    broken = example(tmp_path)
    damage(broken)
    paths = [str(run.root / STEP) for run in runs]
    for loaded, said in run_ranks(everything, 2, paths, str(tmp_path / STEP)):
        for run, path in zip(runs, paths, strict=True):
            by_rows, by_columns, trained, groups = loaded[path]
            assert set(by_rows) == set(by_columns) == {key for key in run.views[STEP] if key.startswith("model/")}
            assert {f"optim/0/{STACK}/{name}" for name in ("exp_avg", "exp_avg_sq", "step")} < set(trained)
            assert "model/running" in trained
            for found in (by_rows, by_columns, trained):
                assert_loaded(run, found)
            assert_groups(groups)
        # Every rank hears which file it was, also the one that did not read it.
        assert "step_00000001/rank_00001_expert.safetensors, step 1, rank 1" in said
        assert "checksum mismatch" in said


def test_one_process_without_a_group_loads_them_too(runs):
    for run in runs:
        loaded, groups = load_model_and_optimizer(str(run.root / STEP))
        assert_loaded(run, loaded)
        assert_groups(groups)


def test_names_can_be_chosen(tmp_path):
    run = example(tmp_path)
    state = {STACK: torch.zeros(4, 3, 2), "head.weight": torch.zeros(7, 4, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=MoEStorageReader(tmp_path, model=""))
    assert torch.equal(state[STACK], run.views[STEP][f"model/{STACK}"])
    assert torch.equal(state["head.weight"], run.views[STEP]["model/embed.weight"])
    state = {"net": {STACK: torch.zeros(4, 3, 2)}}
    dcp.load(state, checkpoint_id=tmp_path / "step_00000001", storage_reader=MoEStorageReader(model="net"))
    assert torch.equal(state["net"][STACK], run.views["step_00000001"][f"model/{STACK}"])


def test_paths_that_hold_nothing(tmp_path):
    example(tmp_path / "store")
    assert MoEStorageReader.validate_checkpoint_id(tmp_path / "store" / STEP)
    assert not MoEStorageReader.validate_checkpoint_id(tmp_path / "elsewhere")
    with pytest.raises(NoCheckpointError):
        MoEStorageReader(tmp_path / "elsewhere").read_metadata()
    with pytest.raises(UserError, match="no path"):
        MoEStorageReader().read_metadata()
    assert issubclass(UserError, MoECheckpointError)
