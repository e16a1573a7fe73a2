"""``moe_ckpt.torchtitan``: real Trainers, killed and started again, with the bits of an undisturbed run."""

from __future__ import annotations

import copy
import json
import re
import secrets
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan.trainer", exc_type=ImportError)

import datasets
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import moe_ckpt
from moe_ckpt import Memory, newest_step
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.run.options import Options, OptionValues
from moe_ckpt.torchtitan import CheckpointManager
from moe_ckpt.torchtitan.manager import LoaderPosition
from tests.integration import torchtitan_run
from tests.integration.test_plain_loop import require_alike
from tests.integration.torchtitan_run import BATCH, SEQ, STEPS, TOP_K, Run
from tests.support.kills import Kill, drawn, killed
from tests.support.processes import Outcome, run_ranks, start_ranks

WARM = "tests.support.torchtitan_warm"
WINDOWS, LOG, EXPERTS = ("MoEvement", {"window": 3}), ("GradientLog", {}), {"expert_parallel": 2}


def start(root: Path, run: Run, ranks: int = 1, kill: Kill | None = None) -> list[Outcome]:
    root.mkdir(exist_ok=True)
    return start_ranks(torchtitan_run.lived, ranks, str(root), run, kill, preload=WARM, grace=2.0)


def life(root: Path, run: Run, ranks: int = 1, kill_at: int | None = None) -> dict[str, Any]:
    """The end of a life; of one that was killed when a checkpoint was stored, nothing."""
    [first, *_] = start(root, run, ranks, None if kill_at is None else Kill(kill_at, stored=0))
    assert first.exitcode == (0 if kill_at is None else -9), first.error
    return first.value if kill_at is None else {}


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (Run(validate=True, optimizers=2), 1),
        (Run(WINDOWS, accumulate=2), 1),
        (Run(LOG, memory=True, recompute=True), 1),
        (Run(memory=True, workers=2), 1),
        (Run(memory=True, degrees=EXPERTS), 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (Run(memory=True, compiled=True), 1),
                (Run(WINDOWS, memory=True, validate=True), 2),
                (Run(LOG, memory=True, validate=True), 2),
                (Run(LOG, memory=True, degrees=EXPERTS, accumulate=2), 2),
                (Run(memory=True, degrees=EXPERTS, spmd="full_dtensor"), 2),
                (Run(WINDOWS, memory=True, degrees={"context_parallel": 2}), 2),
                (Run(WINDOWS, memory=True, degrees={**EXPERTS, "tensor_parallel": 2}), 4),
                (Run(WINDOWS, memory=True, degrees={**EXPERTS, "data_parallel_replicate": 2}), 4),
            )
        ),
    ],
    ids=[
        *("dense", "windows", "log", "workers", "experts"),
        *("compiled", "windows-fsdp2", "log-fsdp2", "log-experts", "full-dtensor", "context", "tensor", "replicated"),
    ],
)
def test_killed_at_random_it_ends_with_the_same_bits(tmp_path: Path, run: Run, ranks: int):
    """Attention drops out, so random numbers matter; a validation draws some. Two ranks are sharded by FSDP2."""
    undisturbed = life(tmp_path / "whole", run, ranks)
    assert any(bias.any() for bias in undisturbed["bias"]), "which changes before the update"
    counted, routed = undisturbed["routed"]
    assert counted == routed, "torchtitan's own counts"
    assert sum(counted[0]) == STEPS * BATCH * SEQ * run.readers(ranks) * run.accumulate * TOP_K
    kills = drawn(secrets.token_hex(4), 5, STEPS - 4, 5, ranks, 0.2)
    [resumed, *_] = killed(partial(start, tmp_path / "killed", run, ranks), kills)
    assert resumed["restored"], kills
    require_alike(undisturbed, resumed)
    assert resumed["at_end"] == undisturbed["at_end"]
    assert resumed["losses"].items() <= undisturbed["losses"].items()


def test_the_manager_changes_no_bit(tmp_path: Path):
    require_alike(life(tmp_path / "with", Run(validate=True)), life(tmp_path / "without", Run(None, validate=True)))


def test_moc_counts_what_a_kill_loses(tmp_path: Path):
    run = Run(("MoC", {"k": 1}))
    life(tmp_path, run, kill_at=15)
    resumed = life(tmp_path, run)
    assert 0 < resumed["plt"] < 1


def test_an_error_costs_the_step_that_it_came_in(tmp_path: Path):
    """Memory that outlives the process gets the newest step, which the policy does not want."""
    run = Run(("Dense", {"every_n_steps": 1_000}), memory=True)
    outcomes = start(tmp_path, replace(run, raise_at=9))
    assert "the user's mistake" in outcomes[0].error
    assert life(tmp_path, run)["restored"] == 9


def test_a_finished_run_trains_nothing_and_a_longer_one_continues(tmp_path: Path):
    undisturbed = life(tmp_path / "whole", Run())
    first = life(tmp_path / "parts", Run(steps=10))
    assert first["begins"] == [*range(10)]
    assert life(tmp_path / "parts", Run(steps=10))["begins"] == []
    longer = life(tmp_path / "parts", Run())
    assert longer["begins"] == [*range(10, STEPS)]
    require_alike(undisturbed, longer)


def test_the_data_may_run_out(tmp_path: Path):
    """torchtitan counts the step that it cancels then; the checkpoint has the one before."""
    ended = life(tmp_path, Run(("Dense", {"every_n_steps": 1_000}), samples=9 * BATCH))
    assert ended["at_end"][0] == 9
    assert newest_step(tmp_path / "store") == 9


def test_data_that_is_divided_otherwise_is_refused(tmp_path: Path):
    life(tmp_path, Run(), kill_at=5)
    outcomes = start(tmp_path, Run(), 2)
    assert "divided its data by 1, and this one by 2" in outcomes[0].error


def test_a_config_can_be_printed_and_copied():
    config = CheckpointManager.Config(policy=MoC(k=2), memory=Memory(), resume="extend")
    shown = json.loads(json.dumps(config.to_dict()))
    assert (shown["policy"], shown["memory"], shown["resume"]) == (repr(MoC(k=2)), repr(Memory()), "extend")
    assert replace(config) == config
    assert config.enable


def test_options_are_those_of_every_adapter():
    assert {*OptionValues.__annotations__, "policy"} <= {field.name for field in fields(CheckpointManager.Config)}
    own = fields(Options)
    defaults = {field.name: field.default for field in own if field.default is not MISSING}
    config = CheckpointManager.Config()
    assert {name: getattr(config, name) for name in OptionValues.__annotations__ if name in defaults} == {
        name: value for name, value in defaults.items() if name in OptionValues.__annotations__
    }


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v3_671b"])
def test_launch_files_are_configs_that_torchtitan_parses(name: str):
    """Options on its command line count, those of checkpoints too."""
    from torchtitan.config import ConfigManager

    words = ["--module", "recipes.launch.titan", "--config", name, "--checkpoint.resume", "never"]
    config = ConfigManager().parse_args(words)
    options = config.checkpoint.options(config.dump_folder)
    assert (options.dirpath, options.resume) == ("runs/titan/checkpoints", "never")
    assert options.memory is not None


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"load_step": 3}, "load_step=3.*weights_from="),
        ({"keep_latest_k": 2}, r"keep_latest_k=2.*RetentionPolicy\(keep_last="),
        ({"initial_load_path": "/weights"}, "initial_load_path='/weights'.*weights_from="),
        ({"last_save_in_hf": True}, "last_save_in_hf=True.*moe-ckpt export"),
        ({"create_seed_checkpoint": True}, "create_seed_checkpoint=True"),
        ({"exclude_from_loading": ["lr_scheduler"]}, "exclude_from_loading="),
        ({"interval": 0}, "interval=0"),
        ({"resume": "maybe"}, "resume='maybe'"),
        ({"policy": "MoC"}, r"policy='MoC' is text"),
        ({"folder": " "}, "dirpath="),
    ],
)
def test_what_has_no_effect_is_refused_where_it_is_written(field: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=f"(?s)CheckpointManager.Config.*{says}"):
        CheckpointManager.Config(**field)


def test_a_misspelt_field_is_named():
    with pytest.raises(ConfigError, match=r"Config\(polcy=...\): no such option; did you mean policy\?"):
        CheckpointManager.Config(polcy=None)


def test_a_loader_without_a_state_is_refused():
    with pytest.raises(ConfigError, match=r"the data loader list lacks state_dict.*ParallelAwareDataloader"):
        build(dataloader=[1])


def build(**parts: Any) -> CheckpointManager:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    given = {"model_parts": [model], "optimizers": [optimizer], "lr_schedulers": schedule}
    return CheckpointManager.Config().build(**{"states": {}, "dataloader": None, **given, **parts})


def test_another_size_of_batches_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from torchtitan.components.dataloader import ParallelAwareDataloader

    for size in (2, 4):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        loader = ParallelAwareDataloader(torchtitan_run.Words(0, None), 0, 1, batch_size=size)
        parts = {"model_parts": [model], "optimizers": [optimizer], "dataloader": loader}
        manager = build(**parts, base_folder=str(tmp_path))
        resumed = manager.load()
        next(iter(loader))
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        manager.save(1 + resumed)
        manager.close()
        changed = "data loader dataloader.batch_size 2 -> 4 (training continues with this script's)"
        assert (changed in caplog.text) == resumed == (size == 4)


class Grown(IterableDataset):
    """Its state is a list that it changes, as in the data sets of torchtitan."""

    def __init__(self) -> None:
        self.words: list[int] = []

    def __iter__(self):
        while True:
            self.words.append(len(self.words))
            yield self.words[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"words": self.words}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.words = state["words"]


def test_a_worker_may_change_a_list_in_its_state():
    from torchtitan.components.dataloader import ParallelAwareDataloader

    first, second = (ParallelAwareDataloader(Grown(), 0, 1, batch_size=2, num_workers=1) for _ in range(2))
    position, batches = LoaderPosition(first), iter(first)
    for _ in range(3):
        next(batches)
    LoaderPosition(second).load_state_dict(position.state_dict())
    assert next(iter(second)).tolist() == next(batches).tolist() == [6, 7]


def test_a_streamed_data_set_goes_on_after_restarts_in_a_row(tmp_path: Path):
    """In the second one a worker has made no batch since the first; it told the data set's beginning then."""
    stream = datasets.Dataset.from_dict({"number": range(64)}).to_iterable_dataset(num_shards=2)

    def train(store: str, last: int) -> list[list[int]]:
        model, trained = nn.Linear(2, 2), []
        optimizer = torch.optim.SGD(model.parameters())
        loader = StatefulDataLoader(copy.deepcopy(stream), batch_size=4, num_workers=2)
        parts = {"policy": Dense(), "dirpath": tmp_path / store, "stateful": {"data": loader}}
        with moe_ckpt.attach(model, optimizer, **parts) as ckpt:
            done, batches = ckpt.resume().step, iter(loader)
            for step in range(done + 1, last + 1):
                trained.append(next(batches)["number"].tolist())
                optimizer.step()
                ckpt.after_step(step)
        return trained

    assert [batch for last in (3, 4, 8) for batch in train("restarted", last)] == train("whole", 8)


def test_pipeline_stages_are_refused():
    with pytest.raises(UnsupportedError, match="pipeline stages"):
        build(model_parts=[nn.Linear(2, 2), nn.Linear(2, 2)])
    trainer = SimpleNamespace(parallel_dims=SimpleNamespace(pp_enabled=True))
    with pytest.raises(UnsupportedError, match="pipeline_parallel_degree=1"):
        build(states={"train_state": trainer})


def of_defaults() -> SimpleNamespace:
    """A trainer with torchtitan's defaults."""
    from torchtitan.config import ParallelismConfig, TrainingConfig

    return SimpleNamespace(config=SimpleNamespace(training=TrainingConfig(), parallelism=ParallelismConfig()))


def test_cuda_graphs_are_refused(monkeypatch: pytest.MonkeyPatch):
    """torchtitan itself leaves them out where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match=r"Set training\.disable_cuda_graphs=True"):
        build(states={"train_state": of_defaults()})


def on_two_ranks_by_default(rank: int, world_size: int) -> str:
    with pytest.raises(UnsupportedError) as error:
        build(states={"train_state": of_defaults()})
    return str(error.value)


def test_the_default_backend_is_refused_on_several_ranks():
    """torch 2.13 refuses it before; a later one does not."""
    for message in run_ranks(on_two_ranks_by_default, 2, preload=WARM):
        assert re.search("spmd_backend='spmd_types'.*each of the 2 ranks.*'partial_dtensor'", message)


def on_a_mesh_of_one(rank: int, world_size: int) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_module

    with pytest.raises(UnsupportedError) as error:
        build(model_parts=[distribute_module(nn.Linear(2, 2), DeviceMesh("cpu", [0]))])
    return str(error.value)


def test_parameters_on_a_part_of_the_ranks_are_refused():
    for message in run_ranks(on_a_mesh_of_one, 2, preload=WARM):
        assert re.search(r"parameter 'weight' lies on DeviceMesh.*spmd_backend='partial_dtensor'", message)


def test_a_folder_of_torchtitans_own_manager_is_refused(tmp_path: Path):
    (tmp_path / "checkpoint" / "step-500").mkdir(parents=True)
    with pytest.raises(ConfigError, match="step-500, which cannot be resumed from here"):
        build(base_folder=str(tmp_path))


def test_one_that_trained_nothing_can_be_closed(tmp_path: Path):
    manager = build(base_folder=str(tmp_path))
    manager.close()
    manager.close()


def test_it_can_be_switched_off():
    manager = CheckpointManager.Config(enable=False).build(
        model_parts=[], states={}, dataloader=None, lr_schedulers=None, optimizers=[]
    )
    assert not manager.load()
    assert not manager.save(1, last_step=True)
    manager.maybe_wait_for_staging()
    manager.close()


def test_a_run_goes_on_in_a_loop_and_from_there_in_torchtitan(tmp_path: Path):
    half = STEPS // 2
    alone = life(tmp_path / "alone", Run())
    life(tmp_path / "first", Run(steps=half))
    stores = str(tmp_path / "first" / "store"), str(tmp_path / "loop")
    assert run_ranks(torchtitan_run.carried, 1, str(tmp_path), *stores, preload=WARM) == [half]
    second = life(tmp_path / "second", Run(first=half * BATCH, options={"state_from": stores[1]}))
    require_alike(alone, second)
    assert (second["at_end"][0], second["at_end"][2]) == (alone["at_end"][0], alone["at_end"][2])
