"""``moe_ckpt.attach``: PyTorch loops of a user's own, killed and started again, with the bits of an undisturbed run."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.data import _update_dataloader
from lightning.fabric.wrappers import _FabricDataLoader
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import moe_ckpt
from moe_ckpt import policies
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.data import RecoverableDistributedSampler
from moe_ckpt.errors import ConfigError, MoECheckpointError, StoreError, UnsupportedError
from moe_ckpt.format.contents import state_contents
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.reading.reader import open_step
from tests.integration import plain_run
from tests.integration.plain_run import STEPS, Loop
from tests.support.kills import Kill, drawn, killed
from tests.support.processes import Outcome, run_ranks, start_ranks

WINDOWS, LOG = ("MoEvement", {"window": 3}), ("GradientLog", {})


def start(root: Path, loop: Loop, ranks: int = 1, kill: Kill | None = None) -> list[Outcome]:
    root.mkdir(exist_ok=True)
    return start_ranks(plain_run.lived, ranks, str(root), loop, kill, grace=2.0)


def life(root: Path, loop: Loop, kill: Kill | None = None, ranks: int = 1) -> dict[str, Any]:
    """The end of a life; of one that was killed, nothing."""
    [first, *_] = start(root, loop, ranks, kill)
    assert first.exitcode == (0 if kill is None else -9), first.error
    return first.value if kill is None else {}


def require_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["tensors"].keys() == other["tensors"].keys()
    differing = [name for name, tensor in one["tensors"].items() if not torch.equal(tensor, other["tensors"][name])]
    assert not differing


@pytest.mark.parametrize(
    ("loop", "ranks"),
    [
        (Loop(), 1),
        (Loop(memory=True, optimizers=2), 1),
        (Loop(("CheckFreq", {}), scaler=True), 1),
        (Loop(WINDOWS, memory=True), 1),
        (Loop(LOG, memory=True), 1),
        (Loop(memory=True, accumulate=2), 1),
        (Loop(WINDOWS, memory=True, prepared="fabric", optimizers=2), 1),
        (Loop(prepared="fabric", sharding="ddp"), 2),
        (Loop(WINDOWS, memory=True, prepared="fabric", sharding="fsdp2", unused=False), 2),
        (Loop(prepared="accelerate", unused=False), 2),
        (Loop(WINDOWS, memory=True, prepared="accelerate", unused=False, accumulate=2), 1),
        (Loop(sharding="ddp"), 2),
        (Loop(WINDOWS, memory=True, sharding="fsdp2", unused=False), 2),
        pytest.param(Loop(LOG, memory=True, sharding="ddp"), 2, marks=pytest.mark.slow),
        pytest.param(Loop(LOG, memory=True, sharding="fsdp2", unused=False), 2, marks=pytest.mark.slow),
        pytest.param(Loop(sharding="ddp", unused=False), 3, marks=pytest.mark.slow),
    ],
    ids=[
        *(
            "dense",
            "two-optimizers",
            "scaler",
            "windows",
            "log",
            "accumulated",
            "fabric",
            "fabric-ddp",
            "fabric-fsdp2",
            "accelerate",
            "accelerate-accumulated",
            "ddp",
            "windows-fsdp2",
        ),
        *("log-ddp", "log-fsdp2", "buckets"),
    ],
)
def test_killed_at_random_it_ends_with_the_same_bits(tmp_path: Path, loop: Loop, ranks: int):
    """Also before the first commit, and where a new epoch draws its order from the run's generator."""
    undisturbed = life(tmp_path / "whole", loop, ranks=ranks)
    epoch = plain_run.SAMPLES // plain_run.BATCH // ranks // loop.accumulate
    kills = drawn(secrets.token_hex(4), 5, STEPS - 4, epoch, ranks, 0.05)
    [resumed, *_] = killed(partial(start, tmp_path / "killed", loop, ranks), kills)
    assert resumed["restored"]
    assert resumed["replayed"] or loop.policy != WINDOWS
    require_alike(undisturbed, resumed)


@pytest.mark.parametrize("kill_at", [0, 1, 2])
def test_the_initial_checkpoint_has_the_loader_before_its_first_batch(tmp_path: Path, kill_at: int):
    """A window is complete after steps: what dies before resumes from step 0, in the same shuffled epoch."""
    undisturbed = life(tmp_path / "whole", Loop(WINDOWS))
    life(tmp_path, Loop(WINDOWS), Kill(kill_at, stored=0))
    resumed = life(tmp_path, Loop(WINDOWS))
    require_alike(undisturbed, resumed)


@pytest.mark.parametrize("often", [(1, 0), (2, 1)], ids=["one-rests", "one-steps-twice"])
def test_an_average_is_repeated_when_optimizers_step_unequally_often(tmp_path: Path, often: tuple[int, int]):
    """``often``: how often the experts' optimizer steps in even and odd steps."""

    def lived(store: str, last: int) -> tuple[bool, dict[str, torch.Tensor]]:
        model, _ = made()
        named = list(model.named_parameters())
        optimizers = [torch.optim.AdamW([p for n, p in named if ("experts" in n) is e], lr=1e-2) for e in (False, True)]
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        options: Any = {"dirpath": tmp_path / store, "stateful": {"average": average}, "when_busy": "wait"}
        ckpt = moe_ckpt.attach(model, optimizers, policy=policies.MoEvement(window=3), **options)
        try:
            begun = ckpt.resume().step
            has_replayed = ckpt.replaying
            for number in range(begun, last):
                torch.manual_seed(number)
                model(torch.randn(4, plain_run.WIDTH)).square().mean().backward()
                for optimizer, times in zip(optimizers, (1, often[number % 2]), strict=True):
                    for _ in range(times):
                        optimizer.step()
                model.zero_grad()
                average.update_parameters(model)
                ckpt.after_step(number + 1)
        finally:
            ckpt.close(10.0)
        return has_replayed, {**model.state_dict(), **{f"average.{n}": v for n, v in average.state_dict().items()}}

    _, undisturbed = lived("whole", 14)
    lived("killed", 9)
    has_replayed, resumed = lived("killed", 14)
    assert has_replayed
    assert not [name for name, value in undisturbed.items() if not torch.equal(value, resumed[name])]


@pytest.mark.parametrize("policy", [("MoC", {"k": 1}), ("MoEtion", {"experts": 1, "capacity_boost": 0.5})])
def test_tokens_that_a_kill_loses_are_counted(tmp_path: Path, policy):
    loop = Loop(policy)
    life(tmp_path, loop, Kill(9, stored=2))
    end = life(tmp_path, loop)
    assert 2 <= end["restored"] < STEPS, "experts take turns, of which the first checkpoint has all"
    assert 0 < end["plt"] < 1
    assert (max(end["owed"]) > min(end["owed"])) == ("capacity_boost" in policy[1]), "stale experts get more"


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain_run.model(Loop())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def attached(tmp_path: Path):
    model, optimizer = made()
    ckpt = moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path / "store")
    yield model, optimizer, ckpt
    ckpt.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, plain_run.WIDTH)).sum().backward()
    optimizer.step()


def test_calls_out_of_order_say_what_to_do(attached):
    model, optimizer, ckpt = attached
    with pytest.raises(ConfigError, match=r"resume\(\) was not called"):
        step(model, optimizer)
    assert ckpt.resume() == moe_ckpt.plain.Position()
    with pytest.raises(ConfigError, match="called twice"):
        ckpt.resume()
    step(model, optimizer)
    with pytest.raises(ConfigError, match=r"after_step\(2\) follows step 0"):
        ckpt.after_step(2)
    with pytest.raises(ConfigError, match=r"after_step\(1\) was not called"):
        ckpt.save()
    ckpt.after_step(1, counters={"epoch": 3})
    with pytest.raises(ConfigError, match=r"after_step\(1\) follows step 1"):
        ckpt.after_step(1)
    assert ckpt.save()
    ckpt.finish()
    ckpt.finish()
    with pytest.raises(ConfigError, match="to train again, attach again"):
        ckpt.after_step(2)


def test_counters_come_back(tmp_path: Path):
    for steps in (2, 3):
        model, optimizer = made()
        with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path) as ckpt:
            progress = ckpt.resume()
            assert (progress.restored, progress.counters) == ((True, {"epoch": 1}) if steps == 3 else (False, {}))
            for number in np.arange(progress.step, steps):
                step(model, optimizer)
                ckpt.after_step(number + 1, counters={"epoch": 1})
    assert progress.step == 2


def test_a_loop_that_never_counts_its_steps_is_told_so_once(attached, caplog):
    model, optimizer, ckpt = attached
    ckpt.resume()
    for _ in range(15):
        step(model, optimizer)
    assert "after_step" not in caplog.text
    for _ in range(20):
        step(model, optimizer)
    assert caplog.text.count("stepped 16 times since step 0, and after_step(1) was not called: nothing is saved") == 1


@pytest.mark.parametrize("policy", [("Dense", {}), WINDOWS, LOG], ids=["dense", "windows", "log"])
def test_a_copy_of_the_model_is_a_model_by_itself(tmp_path: Path, policy):
    """A teacher's weights, for instance: its tokens are not the model's, nor are its gradients."""
    model, optimizer = made()
    options = {"dirpath": tmp_path / "store", "memory": moe_ckpt.Memory(directory=tmp_path)}
    with moe_ckpt.attach(model, optimizer, policy=getattr(policies, policy[0])(**policy[1]), **options) as ckpt:
        ckpt.resume()
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        copies = [AveragedModel(model), copy.deepcopy(model), torch.load(stored, weights_only=False)]
        for number in range(1, 4):
            model(torch.randn(4, plain_run.WIDTH)).sum().backward()
            for other in copies:
                other(torch.randn(4, plain_run.WIDTH)).sum().backward()
                other.zero_grad()
                assert all(parameter.grad is None for parameter in other.parameters())
            assert any(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
            record = ckpt.after_step(number)
            model.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        assert record.routed_tokens == 3 * 4 * 2 * 2, "steps, rows, layers, experts of each"


def test_tokens_of_a_step_without_an_update_do_not_count(tmp_path: Path):
    """Whether the loop says so, or no optimizer stepped, as after an overflow."""
    model, optimizer = made()
    routed = []
    with moe_ckpt.attach(model, optimizer, policy=MoC(k=1), dirpath=tmp_path / "store") as ckpt:
        ckpt.resume()
        for number, updated in enumerate((True, False, None, True), 1):
            model(torch.randn(4, plain_run.WIDTH)).sum().backward()
            if updated:
                optimizer.step()
            routed.append(ckpt.after_step(number, updated=updated).routed_tokens)
    assert routed == [16, 16, 16, 32], "rows, layers, experts of each"


@pytest.mark.parametrize("fused", [False, True])
def test_tokens_of_a_step_that_a_scaler_skips_do_not_count(tmp_path: Path, fused: bool):
    """A fused optimizer skips the update by itself, and its ``step`` is called all the same."""
    model, _ = made()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with moe_ckpt.attach(model, optimizer, policy=MoC(k=1), dirpath=tmp_path / "store") as ckpt:
        ckpt.resume()
        for number, factor in enumerate((1.0, float("inf"), 1.0), 1):
            scaler.scale(model(torch.randn(4, plain_run.WIDTH)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            record = ckpt.after_step(number)
        assert record.routed_tokens == 2 * 16, "rows, layers, experts of each"


def test_another_size_of_batches_is_told(tmp_path: Path, caplog):
    for size in (2, 2, 4):
        caplog.clear()
        model, optimizer = made()
        loader = StatefulDataLoader(range(24), batch_size=size)
        with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path, stateful={"data": loader}) as ckpt:
            progress = ckpt.resume()
            next(iter(loader))
            step(model, optimizer)
            ckpt.after_step(progress.step + 1)
        changed = "data loader data.batch_size 2 -> 4 (training continues with this script's)"
        assert (changed in caplog.text) == (size == 4)


@pytest.mark.parametrize("workers", [(0, 1), (1, 0), (2, 1)])
def test_another_number_of_workers_is_refused_with_a_message(tmp_path: Path, workers: tuple[int, int]):
    """torchdata's own is an assertion, without a text for fewer workers."""

    def train(number: int) -> None:
        model, optimizer = made()
        loader = StatefulDataLoader(range(24), batch_size=2, num_workers=number)
        with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path, stateful={"data": loader}) as ckpt:
            progress = ckpt.resume()
            next(iter(loader))
            step(model, optimizer)
            ckpt.after_step(progress.step + 1)

    train(workers[0])
    says = r"step_00000001/\S+ holds state of the data loader StatefulDataLoader.*AssertionError.*number of workers"
    with pytest.raises(StoreError, match=says):
        train(workers[1])


@pytest.mark.parametrize("of_epochs", [False, True], ids=["steps-of-batches", "steps-of-epochs"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 3], ids=["run's-generator", "own-generator"])
def test_later_epochs_are_shuffled_alike(tmp_path: Path, seed: int | None, workers: int, of_epochs: bool):
    """After restarts in the middle of an epoch, and at its end, before or after the loader says so."""

    def drawn_until(store: str, last: int) -> list[Any]:
        torch.manual_seed(5)
        model, optimizer = made()
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = StatefulDataLoader(range(8), 2, shuffle=True, num_workers=workers, generator=generator)
        drawn: list[Any] = []
        stateful, dirpath = {"data": loader}, tmp_path / store
        with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=dirpath, stateful=stateful) as ckpt:
            number = ckpt.resume().step
            while number < last:
                for batch in loader:
                    drawn.append((batch.tolist(), torch.rand(()).item()))
                    if not of_epochs:
                        optimizer.step()
                        number += 1
                        ckpt.after_step(number)
                        if number == last:
                            break
                if of_epochs:  # the loader knows by now that its epoch is over
                    optimizer.step()
                    number += 1
                    ckpt.after_step(number)
        return drawn

    ends = (2, 4) if of_epochs else (6, 8, 12)
    assert [drawn for end in ends for drawn in drawn_until("killed", end)] == drawn_until("whole", ends[-1])


@pytest.mark.parametrize("has_position", ["not", "loader", "counters"])
def test_a_loop_without_a_position_in_the_data_is_told_so_once(tmp_path: Path, has_position: str, caplog):
    caplog.set_level("INFO")
    model, optimizer = made()
    stateful = {"lr": torch.optim.lr_scheduler.ConstantLR(optimizer), "scaler": torch.amp.GradScaler("cpu")}
    if has_position == "loader":
        stateful["loader"] = StatefulDataLoader([1, 2, 3], batch_size=1)
    with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path, stateful=stateful) as ckpt:
        ckpt.resume()
        for number in range(1, 4):
            step(model, optimizer)
            ckpt.after_step(number, counters={"batch": number} if has_position == "counters" else None)
    assert caplog.text.count("nothing in stateful= has a position in the data") == (has_position == "not")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (lambda model, optimizer: (model, []), "give the optimizer"),
        (lambda model, optimizer: (model, None), "NoneType is no torch.optim.Optimizer"),
        (lambda model, optimizer: (optimizer, model), "SGD is no torch.nn.Module. Give the model, and then"),
        (lambda model, optimizer: (model, [object()]), "object is no torch.optim.Optimizer"),
        (lambda model, optimizer: (model, made()[1]), "is not among the model's|not .* model"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_the_start(tmp_path: Path, arguments, says: str):
    with pytest.raises((MoECheckpointError, ConfigError), match=says):
        moe_ckpt.attach(*arguments(*made()), policy=Dense(), dirpath=tmp_path).resume()
    assert not any(tmp_path.glob("step_*"))


def test_a_loader_that_cannot_say_where_it_is_is_refused(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"moe_ckpt.attach: loader \(DataLoader\) lacks state_dict.*StatefulDataLoader"
    ):
        moe_ckpt.attach(*made(), dirpath=tmp_path, stateful={"loader": DataLoader([1])})


def test_a_loader_of_accelerate_is_refused(tmp_path: Path):
    """It has loaded a batch more than it gave."""
    loader = pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(StatefulDataLoader([1], batch_size=1))
    with pytest.raises(ConfigError, match="is what accelerate makes of a data loader"):
        moe_ckpt.attach(*made(), dirpath=tmp_path, stateful={"loader": loader})


def test_a_loader_of_fabric_that_cannot_say_where_it_is_is_refused(tmp_path: Path):
    loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader([1]))
    with pytest.raises(ConfigError, match=r"loader \(DataLoader\) lacks state_dict.*StatefulDataLoader"):
        moe_ckpt.attach(*made(), dirpath=tmp_path, stateful={"loader": loader})


def test_a_loader_with_a_sampler_of_fabrics_is_refused(tmp_path: Path):
    loader = StatefulDataLoader(list(range(8)), batch_size=2, shuffle=True)
    divided = _update_dataloader(loader, Fabric._get_distributed_sampler(loader, num_replicas=2, rank=0))
    with pytest.raises(ConfigError, match=r"the loader data among the ranks .* use_distributed_sampler=False"):
        moe_ckpt.attach(*made(), dirpath=tmp_path, stateful={"data": _FabricDataLoader(divided)})


def test_a_loader_whose_sampler_has_a_position_of_its_own_is_refused(tmp_path: Path):
    loader = StatefulDataLoader([1, 2], sampler=RecoverableDistributedSampler([1, 2], 1, 0))
    with pytest.raises(ConfigError, match=r"data \(StatefulDataLoader\) has a RecoverableDistributedSampler"):
        moe_ckpt.attach(*made(), dirpath=tmp_path, stateful={"data": loader})


@pytest.mark.parametrize("batched", [False, True])
def test_a_loader_whose_order_nobody_can_restore_is_refused(tmp_path: Path, batched: bool):
    sampler = RandomSampler([1, 2])
    how: dict[str, Any] = {"batch_sampler": BatchSampler(sampler, 1, False)} if batched else {"sampler": sampler}
    with pytest.raises(ConfigError, match=r"the RandomSampler in data \(StatefulDataLoader\) draws a new .*shuffle"):
        moe_ckpt.attach(*made(), dirpath=tmp_path, stateful={"data": StatefulDataLoader([1, 2], **how)})


def test_a_loader_that_is_being_iterated_is_refused(tmp_path: Path):
    loader = StatefulDataLoader(list(range(8)), batch_size=2)
    for _ in range(2):  # of a new run and of a restart
        model, optimizer = made()
        with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path, stateful={"data": loader}) as ckpt:
            batches = iter(loader)
            with pytest.raises(ConfigError, match=r"'data': \.\.\.} is being iterated.*before iter\(loader\)"):
                ckpt.resume()
            del batches
            begun = ckpt.resume().step
            for _ in loader:
                step(model, optimizer)
                ckpt.after_step(begun + 1)
                break
    assert begun == 1


def test_a_lightning_callback_of_fabric_is_refused(tmp_path: Path):
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[MoECheckpoint(dirpath=tmp_path)])
    with pytest.raises(ConfigError, match=r"Fabric calls none of its hooks.*moe_ckpt\.attach"):
        fabric.setup(*made())


def on_a_mesh_of_one(rank: int, world_size: int, root: str) -> str:
    model, _ = made()
    mesh = DeviceMesh("cpu", [0])
    distribute_module(model[0].moe.experts, mesh)
    with pytest.raises(UnsupportedError) as error:
        moe_ckpt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), dirpath=f"{root}/store")
    return str(error.value)


def test_a_mesh_without_some_ranks_is_refused_on_all(tmp_path: Path):
    for message in run_ranks(on_a_mesh_of_one, 2, str(tmp_path)):
        assert re.search(r"'0\.moe\.experts\.\w+' lies on DeviceMesh.*not all of the 2 ranks", message)


def test_objects_without_names_are_refused(tmp_path: Path):
    model, optimizer = made()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ConfigError, match=r"give the objects by name, as in stateful=\{'lr': scheduler\}"):
        moe_ckpt.attach(model, optimizer, dirpath=tmp_path, stateful=[schedule])  # type: ignore[arg-type]


def test_a_model_without_moe_layers_is_refused_by_a_policy_of_experts(tmp_path: Path):
    model = nn.Linear(2, 2)
    with pytest.raises(MoECheckpointError, match=r"register_moe"):
        moe_ckpt.attach(model, torch.optim.SGD(model.parameters(), 0.1), policy=MoC(k=1), dirpath=tmp_path)


def test_a_model_without_moe_layers_is_told_of_by_other_policies(tmp_path: Path, caplog):
    model = nn.Linear(2, 2)
    moe_ckpt.attach(model, torch.optim.SGD(model.parameters(), 0.1), policy=Dense(), dirpath=tmp_path).close()
    assert "no MoE layer was found (tell of one by moe_ckpt.register_moe" in caplog.text


def test_other_stateful_objects_than_the_checkpoints_are_named(tmp_path: Path):
    for stateful in ({}, {"lr": torch.optim.lr_scheduler.ConstantLR}):
        model, optimizer = made()
        objects = {name: kind(optimizer) for name, kind in stateful.items()}
        with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path, stateful=objects) as ckpt:
            if stateful:
                with pytest.raises(ConfigError, match=r"holds the state of \[\], and this run gives \['lr'\] to moe_"):
                    ckpt.resume()
                ckpt.close()
                break
            ckpt.resume()
            step(model, optimizer)
            ckpt.after_step(1)


@pytest.mark.parametrize("policy", [MoEvement(window=2), Dense()])
@pytest.mark.parametrize("how", ["again", "lbfgs", "read"])
def test_passes_after_an_update_of_the_same_step_need_a_policy_without_windows(tmp_path: Path, how: str, policy: Any):
    """A window that is computed again has the other weights at its end only."""
    model, optimizer = made()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2) if how == "lbfgs" else optimizer

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.ones(4, plain_run.WIDTH)).square().mean()
        value.backward()
        return value

    refused = how != "read" and isinstance(policy, MoEvement)
    expected = pytest.raises(ConfigError, match=r"sparse window.*passes") if refused else contextlib.nullcontext()
    with expected, moe_ckpt.attach(model, optimizer, policy=policy, dirpath=tmp_path / "store") as ckpt:
        ckpt.resume()
        for number in range(1, 4):
            loss()
            optimizer.step(loss if how == "lbfgs" else None)
            if how == "again":
                loss()
                optimizer.step()
            if how == "read":  # as for an average, or a validation
                with torch.no_grad():
                    model(torch.ones(4, plain_run.WIDTH))
                model.eval()
                model(torch.ones(4, plain_run.WIDTH))
                model.train()
            assert ckpt.after_step(number).step == number


class LossSeen:
    """The newest and the mean loss, which are NaN once a loss was: as numbers of Python, torch and numpy."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"newest": 0.0, "mean": torch.zeros(()), "all": np.zeros(2)}

    def update(self, loss: float) -> None:
        self.seen = {"newest": loss, "mean": self.seen["mean"] + loss, "all": self.seen["all"] + loss}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_a_window_is_computed_again_also_where_an_object_holds_nan(tmp_path: Path):
    """NaN is unequal to itself: the step would seem to differ from what was recorded, at each start."""
    for last in (9, 11):
        model, _ = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = LossSeen()
        policy, options = MoEvement(window=3), {"dirpath": tmp_path, "stateful": {"loss": seen}, "when_busy": "wait"}
        ckpt = moe_ckpt.attach(model, optimizer, policy=policy, **options)
        begun = ckpt.resume().step
        assert ckpt.replaying == (last == 11)
        for number in range(begun + 1, last + 1):
            model(torch.randn(4, plain_run.WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.update(float("nan"))
            ckpt.after_step(number)
        ckpt.close()
        assert not ckpt.replaying


@pytest.mark.parametrize("policy", [Dense(), MoEvement(window=3)])
def test_a_group_that_a_loop_has_added_to_its_optimizer_comes_back(tmp_path: Path, policy: Any):
    """As under Lightning. The loop cannot add it before ``resume``, which tells the step."""

    def lived(store: str, last: int) -> dict[str, torch.Tensor]:
        model, _ = made()
        late = model[1].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        ckpt = moe_ckpt.attach(model, optimizer, policy=policy, dirpath=tmp_path / store, when_busy="wait")
        begun = ckpt.resume().step
        for number in range(begun + 1, last + 1):
            if number == 4:
                late.requires_grad_(True)
                optimizer.add_param_group({"params": list(late.parameters()), "lr": 5e-3})
            step(model, optimizer)
            optimizer.zero_grad()
            ckpt.after_step(number)
        ckpt.close()
        assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 5e-3]
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole = lived("whole", 12)
    for last in (6, 9, 12):
        again = lived("stopped", last)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    ("zeroed", "policy"),
    [("to none", Dense()), ("after the update", Dense()), ("before the pass", MoEvement(window=3))],
)
def test_an_expert_without_tokens_is_updated_as_in_a_run_that_nobody_stopped(tmp_path: Path, zeroed: str, policy: Any):
    """Where gradients are set to zero, its momentum goes on; in a new process it would have no gradient at first."""

    def lived(store: str, last: int) -> dict[str, torch.Tensor]:
        model = made()[0].eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ckpt = moe_ckpt.attach(model, optimizer, policy=policy, dirpath=tmp_path / store, when_busy="wait")
        begun = ckpt.resume().step
        for number in range(begun + 1, last + 1):
            if zeroed == "before the pass":
                optimizer.zero_grad(set_to_none=False)
            torch.manual_seed(number)
            model(torch.randn(1, plain_run.WIDTH)).square().mean().backward()
            optimizer.step()
            if zeroed != "before the pass":
                optimizer.zero_grad(set_to_none=zeroed == "to none")
            ckpt.after_step(number)
        ckpt.close()
        return {name: value.clone() for name, value in model.state_dict().items()}

    whole = lived("whole", 11)
    for last in (5, 9, 11):
        again = lived("stopped", last)
    assert not [name for name, value in whole.items() if not torch.equal(value, again[name])]


def test_flags_of_parameters_that_the_checkpoint_overrules_are_said(tmp_path: Path, caplog):
    for frozen in (False, False, True):
        caplog.clear()
        model, optimizer = made()
        model[1].requires_grad_(not frozen)
        with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path) as ckpt:
            number = ckpt.resume().step + 1
            step(model, optimizer)
            ckpt.after_step(number)
        said = r"requires_grad of 1\.\S+ and \d+ more True -> False \(training continues with the checkpoint's\)"
        assert (re.search(said, caplog.text) is not None) == frozen


def test_a_state_without_one_of_its_fields_is_no_state_of_a_loop(tmp_path: Path):
    """It is refused as one of Lightning's or Megatron's, before anything is loaded, and not by a ``KeyError``."""
    model, optimizer = made()
    loader = StatefulDataLoader(range(8), 2, shuffle=True, generator=torch.Generator())
    with moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path, stateful={"data": loader}) as ckpt:
        ckpt.resume()
        step(model, optimizer)
        ckpt.after_step(1, counters={"epoch": 1})
    reader, manifest = open_step(tmp_path)
    state = reader.state(manifest, 0)
    assert state_contents(state) == ""
    for name in state.keys() - {"framework", "stepped"}:
        assert name in state_contents({key: value for key, value in state.items() if key != name})
        assert name in state_contents({**state, name: 1.5})


def with_static_graph(rank: int, world_size: int, root: str) -> tuple[str, str]:
    """The error with windows, and what is said without."""
    model, _ = made()
    ddp = nn.parallel.DistributedDataParallel(model, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as error:
        moe_ckpt.attach(ddp, optimizer, policy=MoEvement(window=3), dirpath=f"{root}/windows")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(handler)
    ckpt = moe_ckpt.attach(ddp, optimizer, policy=Dense(), dirpath=f"{root}/dense")
    ckpt.resume()
    ckpt.close()
    return str(error.value), "\n".join(said)


def test_buckets_of_ddp_that_cannot_be_laid_out_in_advance_are_told_of(tmp_path: Path):
    """As under Lightning: gradients of the first step would be added in another order."""
    [(refused, said), *others] = run_ranks(with_static_graph, 3, str(tmp_path))
    assert re.search(r"sparse window.*static_graph=True.*find_unused_parameters=True", refused)
    assert re.search(r"will not be exact: DDP adds up the gradients of 3 ranks.*static_graph=True", said)
    assert all(other == refused and "static_graph" not in silent for other, silent in others)
