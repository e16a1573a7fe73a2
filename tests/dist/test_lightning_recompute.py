"""MoEtion under Lightning with FSDP2, each rank a node; nothing is on peers but what was sent, much of it as gradients
(Algorithm 3).

All ranks are killed, nodes are lost, and each expert comes back as of the last step at which it, or its gradient, was
sent, by ``torch.equal``. Expected are the run's own tensors of that step.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ckpt.core.cadence import BLOCK
from moe_ckpt.policies.moetion import PROBED_CHECKPOINTS
from moe_ckpt.run.meter import COMPARED
from tests.dist.test_memory import lose
from tests.support.processes import run_ranks, start_ranks
from tests.support.recompute import ALL, SENT, experts_by, factor_of, newest, plans, refuse, steady
from tests.support.tiny_moe import TinyMoE

EXPERTS = 4


def fit(
    rank: int,
    world_size: int,
    root: str,
    model: dict[str, Any],
    trainer: dict[str, Any],
    stop: int | None,
    refused: int | None = None,
    probing: bool = False,
    paced: dict[str, Any] | None = None,
) -> Any:
    """stop: the step at which all are killed; None: returns what came back, before the first step. refused: rank 0 has
    no room for copies of this step, and the same experts are sent at each. probing: as ``Steady``. paced: experts are
    MoEtion's own choice, with these arguments."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from moe_ckpt import Memory
    from moe_ckpt.callbacks import MoECheckpoint
    from tests.support.recompute import Paced, Steady
    from tests.support.tiny_moe import Router, TinyMoE, loader

    class Sharded(TinyMoE):
        def configure_model(self) -> None:
            for block in self.blocks:
                fully_shard(block.moe.experts, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    class Watch(pl.Callback):
        history: dict[int, dict[str, torch.Tensor]] = {}  # noqa: RUF012 - of one process
        routed: list[tuple[int, int, list[int]]] = []  # noqa: RUF012
        factors: dict[int, float | None] = {}  # noqa: RUF012
        back: Any = None

        def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            for layer, router in enumerate(each for each in module.modules() if isinstance(each, Router)):
                router.register_forward_hook(
                    lambda _, __, out, layer=layer: self.routed.append(
                        (trainer.global_step + 1, layer, torch.bincount(out[1].flatten(), minlength=experts).tolist())
                    )
                )

        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            self.history[trainer.global_step] = parts(module, trainer.optimizers[0])

        def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            step = trainer.global_step
            if stop is None:
                state, updates = parts(module, trainer.optimizers[0]), checkpoint.recovery_plan.updates
                lost = checkpoint._fit.session.run_ledger.tokens.lost_tokens
                self.back = {"step": step, "state": state, "updates": updates, "lost": lost}
                raise KeyboardInterrupt
            if step:
                self.factors[step] = checkpoint.last.gradient_factor
                checkpoint._fit.driver.session.drain(step)
                while step != refused and checkpoint._fit.driver.session.tier.replicator.lag_steps:
                    pass
            if step == stop:
                torch.save(self.history, f"{root}/history_{rank}.pt")
                torch.save(self.routed, f"{root}/routed_{rank}.pt")
                torch.save(self.factors, f"{root}/factors_{rank}.pt")
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)

    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "NODE_RANK": "0", "GROUP_RANK": "0"}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    if refused is not None:
        logging.getLogger("moe_ckpt").addHandler(logging.FileHandler(f"{root}/said_{rank}"))
        logging.getLogger("moe_ckpt").setLevel(logging.INFO)
        if rank == 0:
            refuse(refused)
    pl.seed_everything(7 if stop else 8, verbose=False)
    node, told = Path(root, f"node_{rank}"), f"{root}/plans_{rank}.jsonl"
    node.mkdir(exist_ok=True)
    watch, experts = Watch(), experts_of(model)
    steady = Steady(told=told, every=3 if refused is None else 1000, probing=probing)
    checkpoint = MoECheckpoint(
        steady if paced is None else Paced(told=told, ranks=world_size, **paced),
        f"{root}/store",
        memory=Memory(directory=node, replicas=1, storage_every=100_000),
        when_busy="wait",
    )
    chosen = ModelParallelStrategy(world_size, 1, process_group_backend="gloo")
    made = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=chosen, max_steps=300, max_epochs=-1, log_every_n_steps=1,
        callbacks=[watch, checkpoint], enable_progress_bar=False, enable_model_summary=False,
        logger=CSVLogger(root, "", "logged" if stop else "back", flush_logs_every_n_steps=1), **trainer,
    )  # fmt: skip
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        made.fit(Sharded(**{"experts": EXPERTS, **model}), loader())
    return watch.back


def experts_of(model: dict[str, Any]) -> int:
    """Of each layer."""
    return int(model.get("experts", EXPERTS))


def parts(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of what this rank has of parameters and optimizer state."""
    found = {}
    for name, parameter in module.named_parameters():
        state = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
        for key, value in {"": parameter.detach(), **state}.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name}/{key}"] = local.clone()
    return found


CASES = {
    "clipped": (2, (1,), {}, {"gradient_clip_val": 0.3}, 12),
    "fused": (2, (0,), {"optimizer": "fused"}, {"gradient_clip_val": 0.3}, 13),
    "forloop": (2, (), {"optimizer": "forloop"}, {}, 11),
    "bf16": (2, (1,), {}, {"precision": "bf16-true", "gradient_clip_val": 0.3}, 12),
    "four": (4, (2,), {}, {"gradient_clip_val": 0.3}, 14),
    "probed": (2, (1,), {}, {"gradient_clip_val": 0.3}, PROBED_CHECKPOINTS + 7),
    "long": (2, (1,), {"optimizer": "fused"}, {"gradient_clip_val": 0.3}, 200),
    "long-foreach": (2, (0,), {"optimizer": "foreach"}, {"gradient_clip_val": 0.3}, 200),
    "long-bf16": (2, (1,), {"optimizer": "foreach"}, {"precision": "bf16-true", "gradient_clip_val": 0.3}, 200),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "clipped")) for name in CASES])
def test_every_expert_is_as_new_as_what_was_sent_of_it(name: str, tmp_path: Path):
    ranks, lost, model, trainer, stop = CASES[name]
    probing = name == "probed"
    ended = start_ranks(fit, ranks, str(tmp_path), model, trainer, stop, None, probing)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * ranks, [each.error for each in ended]
    planned = plans(tmp_path / "plans_0.jsonl")
    lose(tmp_path, *lost)
    told = run_ranks(fit, ranks, str(tmp_path), model, trainer, None, None, probing)
    if probing:
        first = min(at for at, plan in planned.items() if plan["gradients"])
        assert BLOCK * COMPARED < first <= PROBED_CHECKPOINTS + 1, "when it is known what saving costs, or given up"
    [step] = {rank["step"] for rank in told}
    assert step >= stop - 1
    assert planned[step]["gradients"], "else nothing is shown"
    if trainer.get("precision") is None:
        require_factors(tmp_path, planned, ranks)
    assert all(rank["updates"] is not None for rank in told)
    require_versions(tmp_path, told, planned, lost, experts_of(model))


PACED = {
    "two-sets": (4, (0,), {"experts": 8}, {}),
    "two-sets-none": (4, (), {"experts": 8}, {}),
    "gradients": (4, (0,), {"experts": 8}, {"recompute": True}),
    "two-ranks": (2, (0,), {"experts": 8, "optimizer": "fused"}, {"recompute": True}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "two-sets")) for name in PACED]
)
def test_every_expert_is_as_new_as_algorithm_1_left_it(name: str, tmp_path: Path):
    """What peers get and what stays on a node is the policy's own choice, from the tokens of this run."""
    ranks, lost, model, paced = PACED[name]
    stop = 12
    ended = start_ranks(fit, ranks, str(tmp_path), model, {}, stop, None, False, paced)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * ranks, [each.error for each in ended]
    planned = plans(tmp_path / "plans_0.jsonl")
    assert all(plans(tmp_path / f"plans_{rank}.jsonl") == planned for rank in range(ranks))
    lose(tmp_path, *lost)
    told = run_ranks(fit, ranks, str(tmp_path), model, {}, None, None, False, paced)
    last = min(rank["step"] for rank in told)
    assert last >= stop - 1
    rows = experts_of(model) // ranks
    owned = [f"expert/{at}/{rows * rank + row}" for at in range(2) for rank in lost for row in range(rows)]
    here, sent = ([newest(planned, last, each, from_peers=way) for each in owned] for way in (False, True))
    assert (here != sent) == bool(lost), "of what is lost, peers have something as of an earlier step"
    for step in range(2, stop):
        sent, here = (len(experts_by(planned[step], ways)) for ways in (SENT, ALL))
        assert 0 < sent < here < 2 * experts_of(model), "each budget leaves experts out"
    assert any(planned[step]["gradients"] for step in planned) == paced.get("recompute", False)
    assert require_versions(tmp_path, told, planned, lost, experts_of(model)) > 0


def require_versions(
    root: Path, told: list[dict[str, Any]], planned: dict[int, Any], lost: Collection[int], experts: int
) -> int:
    """All is as of the newest step, but each expert as of its newest version. Returns the tokens lost for it."""
    [step] = {rank["step"] for rank in told}
    rows, versions = -(-experts // len(told)), dict[tuple[int, int], int]()
    for rank, found in enumerate(told):
        history = torch.load(root / f"history_{rank}.pt", weights_only=True)
        assert found["state"].keys() == history[step].keys()
        for key, value in found["state"].items():
            if "experts." not in key or not value.ndim:
                assert torch.equal(value, history[step][key]), (rank, key)
                continue
            layer = int(key.split(".")[1])
            for row in range(len(value)):
                at = layer, rows * rank + row
                version = newest(planned, step, f"expert/{at[0]}/{at[1]}", from_peers=rank in lost)
                versions[at] = version
                assert torch.equal(value[row], history[version][key][row]), (rank, key, at, version)
    assert len(set(versions.values())) > 1
    routed = [line for rank in range(len(told)) for line in torch.load(root / f"routed_{rank}.pt", weights_only=True)]
    lost_tokens = sum(
        tokens
        for at, layer, counts in routed
        for expert, tokens in enumerate(counts)
        if versions[layer, expert] < at <= step
    )
    assert {found["lost"] for found in told} == {lost_tokens}
    return lost_tokens


def require_factors(root: Path, planned: dict[int, dict[str, list[str]]], ranks: int) -> None:
    """Records of all ranks, and what rank 0 logs, say how many times more bytes a step would have in full."""
    model = TinyMoE(experts=EXPERTS)
    elements = {name: each.numel() for name, each in model.named_parameters()}
    of_experts = sum(count for name, count in elements.items() if "experts." in name)
    counts = sum(elements.values()) - of_experts, of_experts // (EXPERTS * len(model.blocks))
    expected = {step: factor_of(plan, *counts, full_bytes=12) for step, plan in planned.items()}
    for rank in range(ranks):
        factors = torch.load(root / f"factors_{rank}.pt", weights_only=True)
        assert len(factors) == len(planned) - (max(planned) not in factors)
        for step, factor in factors.items():
            assert factor == (None if expected[step] is None else pytest.approx(expected[step], rel=0.02)), step
    lines = logged(root)
    assert {step: line["moe_ckpt/gradient_factor"] for step, line in lines.items()}.items() >= {
        step: str(factor) for step, factor in factors.items() if factor is not None
    }.items()


def logged(root: Path) -> dict[int, dict[str, str]]:
    """Step -> metrics, as Lightning's CSVLogger wrote them."""
    with open(root / "logged" / "metrics.csv", newline="") as file:
        return {int(line["step"]): line for line in csv.DictReader(file)}


def test_a_replica_that_missed_a_gradient_gets_full_state(tmp_path: Path):
    """Rank 1's copy of step 4 is not taken. Its experts were anchored at step 1, and would be at 10 again."""
    missed, stop = 4, 8
    ended = start_ranks(fit, 2, str(tmp_path), {}, {}, stop, missed)
    assert [each.exitcode for each in ended] == [-signal.SIGKILL] * 2, [each.error for each in ended]
    planned = plans(tmp_path / "plans_0.jsonl")
    chosen = {f"expert/{layer}/{expert}" for layer, expert in steady(1, 2, EXPERTS, 1000)}
    sent_in_full = [step for step, plan in planned.items() if chosen <= set(plan["full"])]
    assert sent_in_full[0] == 1
    assert len(sent_in_full) == 2
    assert missed < sent_in_full[1] <= missed + 3, "as soon as all ranks know"
    assert all(set(plan["gradients"]) == chosen for step, plan in planned.items() if step not in sent_in_full)
    said = "".join((tmp_path / f"said_{rank}").read_text() for rank in range(2))
    assert f"rank 0 has no room for the copy of step {missed} of rank 1" in said
    assert "a peer lacks the copy of a step" in said
    lose(tmp_path, 1)
    told = run_ranks(fit, 2, str(tmp_path), {}, {}, None)
    for rank, found in enumerate(told):
        history = torch.load(tmp_path / f"history_{rank}.pt", weights_only=True)
        assert found["step"] >= stop - 1
        for key in (key for key, value in found["state"].items() if "experts." in key and value.ndim):
            for row in range(len(found["state"][key])):
                expert = f"expert/{key.split('.')[1]}/{2 * rank + row}"
                if expert in chosen:
                    assert torch.equal(found["state"][key][row], history[found["step"]][key][row]), (rank, key, expert)


def alike(rank: int, world_size: int, root: str, optimizer: str) -> list[str]:
    """Plain DDP, three steps; what is said of gradients that are not sent, or why the start was refused."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from moe_ckpt import Memory
    from moe_ckpt.callbacks import MoECheckpoint
    from moe_ckpt.errors import UnsupportedError
    from moe_ckpt.policies import MoEtion
    from tests.support.tiny_moe import TinyMoE, loader

    class Through(pl.Callback):
        """Copies are on peers before the next step begins."""

        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step:
                session = checkpoint._fit.driver.session
                session.drain(trainer.global_step)
                while session.tier.replicator.lag_steps:
                    pass

    class Shampoo(torch.optim.SGD):
        """By its name."""

    class Model(TinyMoE):
        def configure_optimizers(self) -> Any:
            return Shampoo(self.parameters(), lr=0.1) if optimizer == "shampoo" else super().configure_optimizers()

    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "NODE_RANK": "0", "GROUP_RANK": "0"}
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    said: list[str] = []
    heard = logging.Handler(logging.WARNING)
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_ckpt").addHandler(heard)
    node = Path(root, f"node_{rank}")
    node.mkdir()
    memory = Memory(directory=node, replicas=1, storage_every=1000)
    checkpoint = MoECheckpoint(MoEtion(recompute=True), f"{root}/store", memory=memory)
    made = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy="ddp", max_steps=3, max_epochs=-1, log_every_n_steps=1,
        callbacks=[Through(), checkpoint], enable_progress_bar=False, enable_model_summary=False,
        logger=CSVLogger(root, "", "logged", flush_logs_every_n_steps=1),
    )  # fmt: skip
    try:
        made.fit(Model(optimizer="sgd" if optimizer == "shampoo" else optimizer), loader())
    except UnsupportedError as error:
        return [str(error)]
    return [text for text in said if "sends no gradients" in text]


def test_peers_that_have_all_experts_are_told_of_once(tmp_path: Path):
    one, other = run_ranks(alike, 2, str(tmp_path), "adamw")
    [said] = one
    assert said.startswith("MoEtion(recompute=True) sends no gradients: the peers that hold copies train the same exp")
    assert other == [], "rank 0 speaks"
    dense = 12 * sum(each.numel() for each in TinyMoE(experts=EXPERTS).parameters())
    sent, saved = (float(logged(tmp_path)[3][f"moe_ckpt/replica_{what}_bytes"]) for what in ("sent", "saved"))
    assert saved > 0.4 * dense, "loggers get what was not sent: rank 0's half of the first copy, and more"
    assert sent > 0, "headers and random numbers"


def test_an_optimizer_that_couples_parameters_is_refused_with_the_policy(tmp_path: Path):
    for said in run_ranks(alike, 2, str(tmp_path), "shampoo"):
        assert len(said) == 1
        assert "Shampoo cannot be stepped again from gradients, as MoEtion(recompute=True)" in said[0]
