"""``state_from=``: a run that one host began goes on in another, with the bits of a run that the other did alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

import moe_ckpt
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import ConfigError, CoverageError, NoCheckpointError, UnsupportedError
from moe_ckpt.interop.export import export
from moe_ckpt.policies import Dense, MoC, MoEvement
from moe_ckpt.transformers import MoECheckpointCallback
from tests.integration import plain_run, transformers_run
from tests.integration.plain_run import Loop
from tests.support.processes import run_ranks

STEPS, HALF, BATCH = 10, 5, 2
WORDS = [torch.randint(64, (12,), generator=torch.Generator().manual_seed(n)) for n in range(STEPS * BATCH)]
DATA = [{"input_ids": words, "labels": words} for words in WORDS]


def optimizer_and_schedule(model: nn.Module, groups: int = 1) -> tuple[Any, Any]:
    parameters = list(model.parameters())
    divided = [{"params": parameters[at::groups]} for at in range(groups)]
    optimizer = torch.optim.AdamW(divided, lr=1e-2)
    return optimizer, get_linear_schedule_with_warmup(optimizer, 3, STEPS)


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = transformers_run.model()
        self.loss = nn.CrossEntropyLoss(torch.ones(4))  # weights of its own, which the model has not

    def training_step(self, batch, at):
        return self.net(**batch).loss

    def configure_optimizers(self):
        optimizer, schedule = optimizer_and_schedule(self.net)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_lightning(store: Path, begin: int, end: int, **options: Any):
    module = Lit()
    trainer = pl.Trainer(
        max_steps=end,
        callbacks=[MoECheckpoint(dirpath=store, **options)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, StatefulDataLoader(DATA[begin * BATCH :], BATCH))
    return module.net, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler, trainer.global_step


def by_a_loop(store: Path, begin: int, end: int, fail_at: int | None = None, groups: int = 1, **options: Any):
    model = transformers_run.model()
    optimizer, schedule = optimizer_and_schedule(model, groups)
    with moe_ckpt.attach(model, optimizer, dirpath=store, stateful={"lr": schedule}, **options) as ckpt:
        step = ckpt.resume().step
        assert step >= begin
        for batch in DataLoader(DATA[step * BATCH :], BATCH, generator=torch.Generator()):
            if step == fail_at:
                raise ZeroDivisionError
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            ckpt.after_step(step)
            if step == end:
                break
    return model, optimizer, schedule, step


def by_trainer(store: Path, begin: int, end: int, **options: Any):
    model = transformers_run.model()
    arguments = TrainingArguments(
        output_dir=str(store / "hf"),
        max_steps=end,
        per_device_train_batch_size=BATCH,
        train_sampling_strategy="sequential",
        max_grad_norm=0,
        seed=11,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=DATA[begin * BATCH :],
        optimizers=optimizer_and_schedule(model),
        callbacks=[MoECheckpointCallback(dirpath=store, **options)],
    )
    trainer.model_accepts_loss_kwargs = False  # else it divides the loss by the number of tokens otherwise
    trainer.train()
    return model, trainer.optimizer.optimizer, trainer.lr_scheduler, trainer.state.global_step


HOSTS = {"lightning": by_lightning, "loop": by_a_loop, "transformers": by_trainer}


def require_alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    for here, there in zip(one[:3], other[:3], strict=True):
        states = [part.state_dict() for part in (here, there)]
        if "state" in states[0]:
            assert states[0]["param_groups"] == states[1]["param_groups"]
            states = [{f"{n}/{k}": v for n, s in state["state"].items() for k, v in s.items()} for state in states]
        assert states[0].keys() == states[1].keys()
        differing = [name for name, value in states[0].items() if not _same(value, states[1][name])]
        assert not differing
    assert one[3] == other[3]


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.fixture(autouse=True)
def _no_dropout(monkeypatch):
    """Hosts draw random numbers of their own before the first batch."""
    made = transformers_run.model

    def model():
        net = made()
        for layer in net.model.layers:
            layer.self_attn.attention_dropout = 0.0
        return net

    monkeypatch.setattr(transformers_run, "model", model)


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in HOSTS for b in HOSTS if a != b])
def test_a_run_goes_on_in_another_host_with_the_same_bits(tmp_path: Path, first: str, second: str, caplog):
    """Weights, moments, step counts, hyperparameters and the schedule."""
    alone = HOSTS[second](tmp_path / "alone", 0, STEPS, policy=Dense())
    HOSTS[first](tmp_path / "first", 0, HALF, policy=Dense())
    options = {"policy": Dense(), "state_from": tmp_path / "first"}
    require_alike(alone, HOSTS[second](tmp_path / "second", HALF, STEPS, **options))
    assert "Taken: weights, optimizer state, random numbers, 1 learning rate schedule. Not taken" in caplog.text
    assert ("loss.weight" in caplog.text) is (first == "lightning"), "which the model has not"


@pytest.mark.parametrize("policy", [Dense(), MoEvement(window=2), MoC(k=1)], ids=["dense", "windows", "moc"])
def test_it_resumes_from_its_own_checkpoints_then(tmp_path: Path, policy, caplog):
    """A failure before the first checkpoint begins with the other host's state again."""
    exact = not isinstance(policy, MoC)
    alone = by_a_loop(tmp_path / "alone", 0, STEPS, policy=Dense())
    by_lightning(tmp_path / "first", 0, HALF, policy=policy)
    options = {"policy": policy, "state_from": tmp_path / "first"}
    for fail_at in (HALF, HALF + 4, STEPS - 1):
        with pytest.raises(ZeroDivisionError):
            by_a_loop(tmp_path / "second", HALF, STEPS, fail_at, **options)
    assert moe_ckpt.newest_step(tmp_path / "second") > HALF
    second = by_a_loop(tmp_path / "second", HALF, STEPS, **options)
    assert caplog.text.count("the state is that of Lightning") == 2
    if exact:
        require_alike(alone, second)


def test_experts_that_are_older_come_over_with_their_lost_tokens(tmp_path: Path, caplog):
    by_lightning(tmp_path / "first", 0, HALF, policy=MoC(k=1), save_last=False)
    _, optimizer, *_ = by_a_loop(tmp_path / "second", HALF, HALF + 1, policy=Dense(), state_from=tmp_path / "first")
    assert "experts are older than that" in caplog.text
    assert {state["step"].item() for state in optimizer.state.values()} == {HALF + 1.0}


def test_groups_that_are_divided_otherwise_keep_this_scripts_hyperparameters(tmp_path: Path, caplog):
    by_trainer(tmp_path / "first", 0, HALF, policy=Dense())
    one = by_a_loop(tmp_path / "one", HALF, HALF + 1, policy=Dense(), state_from=tmp_path / "first")
    two = by_a_loop(tmp_path / "two", HALF, HALF + 1, groups=2, policy=Dense(), state_from=tmp_path / "first")
    assert "hyperparameters, as param groups are divided otherwise" in caplog.text
    assert "learning rate schedules, which have a rate" in caplog.text
    assert one[1].param_groups[0]["lr"] != two[1].param_groups[0]["lr"] == pytest.approx(1e-2 / 3), "its first step"
    moments = [{id(p): s["exp_avg"] for p, s in optimizer.state.items()} for _, optimizer, *_ in (one, two)]
    for here, there in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(moments[0][id(here)], moments[1][id(there)]), "of the same gradients"


def other_hyperparameters(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.8, 0.9))


def test_the_other_runs_hyperparameters_count_and_a_warning_says_so(tmp_path: Path, caplog):
    by_lightning(tmp_path / "first", 0, HALF, policy=Dense())
    model = transformers_run.model()
    optimizer = other_hyperparameters(model)
    with moe_ckpt.attach(model, optimizer, dirpath=tmp_path / "second", state_from=tmp_path / "first") as ckpt:
        ckpt.resume()
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert "betas" in caplog.text
    assert "learning rate schedules (1 there, 0 here" in caplog.text


class Renamed(nn.Module):
    """The same tensors, of which one has another name."""

    def __init__(self) -> None:
        super().__init__()
        net = transformers_run.model()
        self.body, self.head = net.model, net.lm_head


def refusals() -> dict[str, tuple[Any, type[Exception], str]]:
    net = transformers_run.model
    adam = torch.optim.AdamW
    halves = lambda model: [adam(list(model.parameters())[at::2]) for at in (0, 1)]  # noqa: E731
    return {
        "names": (
            Renamed,
            lambda m: adam(m.parameters()),
            CoverageError,
            "model/head.weight of.*net.lm_head.weight of",
        ),
        "optimizer": (net, lambda m: torch.optim.SGD(m.parameters(), 0.1), ConfigError, "AdamW.*SGD"),
        "optimizers": (net, halves, ConfigError, "holds 1 optimizers, this run has 2"),
        "parameters": (net, lambda m: adam(list(m.parameters())[1:]), ConfigError, "embed_tokens"),
    }


@pytest.mark.parametrize("case", ["names", "optimizer", "optimizers", "parameters"])
def test_another_model_or_optimizer_is_refused_and_nothing_is_changed(tmp_path: Path, case: str):
    build, optimize, error, text = refusals()[case]
    by_lightning(tmp_path / "first", 0, 2, policy=Dense())
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ckpt = moe_ckpt.attach(model, optimize(model), dirpath=tmp_path / "second", state_from=tmp_path / "first")
    with pytest.raises(error, match=text):
        ckpt.resume()
    ckpt.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_moe_layers_are_refused(tmp_path: Path):
    by_lightning(tmp_path / "first", 0, 2, policy=Dense())
    model = plain_run.model(Loop())
    optimizer = torch.optim.AdamW(model.parameters())
    model.append(transformers_run.model())
    ckpt = moe_ckpt.attach(model, optimizer, dirpath=tmp_path / "second", state_from=tmp_path / "first")
    with pytest.raises(ConfigError, match=r"MoE layers of \[4, 4\] experts, and this one of \[4, 4, 4, 4\]"):
        ckpt.resume()
    ckpt.close()


def test_what_cannot_be_a_source(tmp_path: Path):
    by_lightning(tmp_path / "first", 0, 2, policy=Dense())
    export(tmp_path / "first", "safetensors", tmp_path / "weights")
    cases = [
        (tmp_path / "weights", UnsupportedError, "weights alone.*weights_from="),
        (tmp_path / "nothing", NoCheckpointError, "state_from=.*neither a store"),
    ]
    for source, error, text in cases:
        with pytest.raises(error, match=text):
            by_a_loop(tmp_path / "second", 0, 1, state_from=source)
    for options, text in (
        ({"state_from": tmp_path / "second" / "step_00000002"}, "state_from=.*lies in dirpath="),
        ({"state_from": tmp_path / "first", "weights_from": tmp_path / "first"}, "contradict each other"),
    ):
        with pytest.raises(ConfigError, match=text):
            by_a_loop(tmp_path / "second", 0, 1, **options)


def taken_over(rank: int, world_size: int, root: str) -> dict[str, torch.Tensor]:
    model = transformers_run.model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer, schedule = optimizer_and_schedule(model)
    options = {"state_from": f"{root}/first", "stateful": {"lr": schedule}}
    with moe_ckpt.attach(model, optimizer, dirpath=f"{root}/second", **options) as ckpt:
        assert ckpt.resume().step == HALF
    return {
        f"{name}/{kind}": tensor.full_tensor()
        for name, parameter in model.named_parameters()
        for kind, tensor in {"weight": parameter.detach(), "moment": optimizer.state[parameter]["exp_avg"]}.items()
    }


def test_it_goes_on_sharded_over_other_ranks(tmp_path: Path):
    net, optimizer, *_ = by_lightning(tmp_path / "first", 0, HALF, policy=Dense())
    expected = {
        f"{name}/{kind}": tensor
        for name, parameter in net.named_parameters()
        for kind, tensor in {"weight": parameter.detach(), "moment": optimizer.state[parameter]["exp_avg"]}.items()
    }
    for tensors in run_ranks(taken_over, 2, str(tmp_path)):
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], moment) for name, moment in expected.items())


class WithAnotherHead(Lit):
    """Beside the model it has a frozen head, whose name is that of the model's without what names begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(*reversed(self.net.lm_head.weight.shape), bias=False).requires_grad_(False)


def test_two_tensors_that_would_have_one_name_are_refused(tmp_path: Path):
    trainer = pl.Trainer(
        max_steps=2,
        callbacks=[MoECheckpoint(Dense(), tmp_path / "a")],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(WithAnotherHead(), StatefulDataLoader(DATA, BATCH))
    model = transformers_run.model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer, _ = optimizer_and_schedule(model)
    attached = moe_ckpt.attach(model, optimizer, policy=Dense(), dirpath=tmp_path / "b", state_from=tmp_path / "a")
    with attached as ckpt, pytest.raises(ConfigError, match=r"lm_head\.weight.*would both be model/lm_head\.weight"):
        ckpt.resume()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert model.lm_head.weight.requires_grad
