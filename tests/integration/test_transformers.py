"""``MoECheckpointCallback``: real Trainers, killed and started again, with the bits of an undisturbed run."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.trainer_callback import ExportableState

import moe_ckpt
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import ConfigError, UnsupportedError
from moe_ckpt.policies import Dense, MoC
from moe_ckpt.transformers import MoECheckpointCallback
from moe_ckpt.transformers.progress import TrainerProgress
from tests.integration import transformers_run
from tests.integration.test_plain_loop import require_alike
from tests.integration.transformers_run import BATCH, SAMPLES, Run
from tests.support.kills import Kill, drawn, killed
from tests.support.processes import Outcome, run_ranks, start_ranks

WINDOWS, LOG = ("MoEvement", {"window": 3}), ("GradientLog", {})


def start(root: Path, run: Run, ranks: int = 1, kill: Kill | None = None) -> list[Outcome]:
    root.mkdir(exist_ok=True)
    return start_ranks(transformers_run.lived, ranks, str(root), run, kill, grace=2.0)


def life(root: Path, run: Run, ranks: int = 1, kill_at: int | None = None) -> dict[str, Any]:
    """The end of a life; of one that was killed when a checkpoint was stored, nothing."""
    [first, *_] = start(root, run, ranks, None if kill_at is None else Kill(kill_at, stored=0))
    assert first.exitcode == (0 if kill_at is None else -9), first.error
    return first.value if kill_at is None else {}


def steps_an_epoch(run: Run, ranks: int = 1) -> int:
    batches = -(-SAMPLES // (BATCH * ranks))
    return -(-batches // run.accumulate)


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (Run(), 1),
        (Run(accumulate=4), 1),
        (Run(WINDOWS), 1),
        (Run(LOG, memory=True), 1),
        (Run(memory=True), 2),
        (Run(WINDOWS, memory=True, accumulate=2, fsdp2=True), 2),
        (Run(settings={"dataloader_num_workers": 1, "dataloader_persistent_workers": True}), 1),
        (Run(settings={"eval_on_start": True, "greater_is_better": True}, patience=6), 1),
        pytest.param(Run(WINDOWS, accumulate=4), 1, marks=pytest.mark.slow),
        pytest.param(Run(LOG, memory=True, accumulate=4), 1, marks=pytest.mark.slow),
        pytest.param(Run(LOG, memory=True, fsdp2=True), 2, marks=pytest.mark.slow),
    ],
    ids=[
        "dense",
        "accumulated",
        "windows",
        "log",
        "ddp",
        "windows-fsdp2",
        "workers",
        "patience",
        "windows-acc",
        "log-acc",
        "log-fsdp2",
    ],
)
def test_killed_at_random_it_ends_with_the_same_bits(tmp_path: Path, run: Run, ranks: int):
    """Also before the first commit and at ends of epochs; an evaluation every five steps draws random numbers."""
    undisturbed = life(tmp_path / "whole", run, ranks)
    last = undisturbed["at_end"][0]  # patience may end it before its last epoch
    kills = drawn(secrets.token_hex(4), 5, last - 4, steps_an_epoch(run, ranks), ranks, 0.1)
    [resumed, *_] = killed(partial(start, tmp_path / "killed", run, ranks), kills)
    assert resumed["restored"], kills
    require_alike(undisturbed, resumed)
    assert resumed["at_end"] == undisturbed["at_end"]
    assert resumed["patience"] == undisturbed["patience"]
    assert resumed["losses"].items() <= undisturbed["losses"].items(), "of all steps since the last log before the kill"


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (Run(lora={"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}), 2),
        (Run(WINDOWS, lora={"target_modules": ["q_proj"], "target_parameters": EXPERTS}), 1),
        (Run(LOG, memory=True, lora={"target_modules": ["q_proj"], "target_parameters": EXPERTS}), 1),
    ],
    ids=["attention", "experts-windows", "experts-log"],
)
def test_lora_of_peft_ends_with_the_same_bits(tmp_path: Path, run: Run, ranks: int):
    pytest.importorskip("peft")
    undisturbed = life(tmp_path / "whole", run, ranks)
    kills = drawn(secrets.token_hex(4), 5, 30, steps_an_epoch(run, ranks), ranks, 0.1)
    [resumed, *_] = killed(partial(start, tmp_path / "killed", run, ranks), kills)
    assert resumed["restored"]
    assert any("lora_A" in name for name in resumed["tensors"])
    require_alike(undisturbed, resumed)


def test_an_order_that_is_drawn_from_the_runs_random_numbers_is_repeated(tmp_path: Path):
    """accelerate's own sampler has a seed an epoch; torch's draws from the generator that dropout draws from."""
    run = Run(settings={"accelerator_config": {"use_seedable_sampler": False}})
    undisturbed = life(tmp_path / "whole", run)
    for kill_at in (9, 21, 30):
        life(tmp_path / "killed", run, kill_at=kill_at)
    require_alike(undisturbed, life(tmp_path / "killed", run))


@pytest.mark.parametrize("seedable", [True, False], ids=["accelerates-sampler", "torchs-sampler"])
def test_a_run_that_stops_with_an_epoch_continues_with_the_next_one(tmp_path: Path, seedable: bool):
    """Nothing has drawn the next order, whether a callback stops training or the run is over and made longer."""
    settings = {"accelerator_config": {"use_seedable_sampler": seedable}, "lr_scheduler_type": "constant"}
    settings["eval_steps"] = 7  # else Trainer evaluates at an end where a longer run does not, and that draws
    undisturbed = life(tmp_path / "whole", Run(settings=settings))
    life(tmp_path / "parts", Run(settings=settings, stop_at=steps_an_epoch(Run())))
    after_one = life(tmp_path / "parts", Run(settings={**settings, "num_train_epochs": 2}))
    assert after_one["begins"][0] == steps_an_epoch(Run())
    after_two = life(tmp_path / "parts", Run(settings=settings))
    assert after_two["begins"][0] == 2 * steps_an_epoch(Run())
    require_alike(undisturbed, after_two)


@pytest.mark.parametrize("masked", [True, False])
def test_batches_that_are_made_with_random_numbers_are_warned_of(tmp_path: Path, masked: bool, capfd):
    life(tmp_path, Run(masked=masked, settings={"max_steps": 3}))
    assert ("batches are made with random numbers" in capfd.readouterr().err) is masked


def test_the_callback_changes_no_bit(tmp_path: Path):
    require_alike(life(tmp_path / "with", Run()), life(tmp_path / "without", Run(None)))


def test_moc_counts_what_a_kill_loses(tmp_path: Path):
    run = Run(("MoC", {"k": 1}))
    life(tmp_path, run, kill_at=20)
    assert 0 < life(tmp_path, run)["plt"] < 1


def test_an_error_costs_the_step_that_it_came_in(tmp_path: Path):
    """Memory that outlives the process gets the newest step, which the policy does not want."""
    run = Run(("Dense", {"every_n_steps": 1_000}), memory=True, raise_at=9)
    outcomes = start(tmp_path, run)
    assert "the user's mistake" in outcomes[0].error
    assert life(tmp_path, Run(run.policy, memory=True))["restored"] == 9


def test_a_finished_run_trains_nothing_and_a_longer_one_continues(tmp_path: Path):
    life(tmp_path, Run(settings={"num_train_epochs": 1}))
    again = life(tmp_path, Run(settings={"num_train_epochs": 1}))
    assert again["begins"] == []
    assert again["at_end"][0] == steps_an_epoch(Run())
    assert life(tmp_path, Run(settings={"num_train_epochs": 2}))["begins"] == [21 + n for n in range(21)]


EARLY = Run(settings={"eval_steps": 3, "max_steps": 30}, patience=2, threshold=100.0)
"""No evaluation after the first is better by as much."""


def test_a_run_that_was_stopped_early_trains_nothing_until_it_is_made_longer(tmp_path: Path, capfd):
    first = life(tmp_path, EARLY)
    assert first["at_end"][0] == 9
    for _ in range(2):
        capfd.readouterr()
        again = life(tmp_path, EARLY)
        assert (again["begins"], again["at_end"], again["patience"]) == ([], first["at_end"], 2)
        require_alike(first, again)
        said = capfd.readouterr().err
        assert "was ended by EarlyStoppingCallback at step 9: nothing is left to train" in said
        assert "The run is finished" in said
    longer = {**EARLY.settings, "max_steps": 31}
    assert life(tmp_path, replace(EARLY, settings=longer))["begins"] == [9, 10, 11], "until the next evaluation"
    assert life(tmp_path, replace(EARLY, settings=longer))["begins"] == []
    assert life(tmp_path, replace(EARLY, settings=longer, resume="extend"))["begins"] == [12, 13, 14]
    assert life(tmp_path, replace(EARLY, settings=longer, patience=5))["begins"] == [15, 16, 17]
    assert "ended by EarlyStoppingCallback" in capfd.readouterr().err


def test_a_job_that_others_continue_is_not_taken_for_stopped_early(tmp_path: Path, capfd):
    """A run that was stopped early is made longer, and stopped by another callback, or killed, before it evaluates."""
    life(tmp_path, EARLY)
    longer = replace(EARLY, settings={**EARLY.settings, "max_steps": 31})
    capfd.readouterr()
    assert life(tmp_path, replace(longer, stop_at=10))["begins"] == [9]
    assert life(tmp_path, longer)["begins"] == [10, 11]
    life(tmp_path / "killed", EARLY)
    life(tmp_path / "killed", longer, kill_at=11)
    assert life(tmp_path / "killed", longer)["begins"] in ([10, 11], [11])
    assert "was ended by EarlyStoppingCallback" not in capfd.readouterr().err


class Counts(TrainerCallback, ExportableState):
    """A callback with a state of its own."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


def test_a_callback_gets_its_state_back_beside_others_than_the_run_had(tmp_path: Path, caplog):
    """Patience that was spent does not begin anew because another callback was added or left out."""

    def progress(*callbacks: TrainerCallback) -> TrainerProgress:
        made = transformers_run.trainer(str(tmp_path), Run(), *callbacks)
        made._tr_loss, made._globalstep_last_logged = torch.zeros(()), 0
        return TrainerProgress(made)

    before, patience, counts = EarlyStoppingCallback(3), EarlyStoppingCallback(3), Counts(1)
    before.early_stopping_patience_counter = 2
    saved = progress(before).state_dict()
    progress(counts, patience).load_state_dict(saved)
    assert (patience.early_stopping_patience_counter, counts.seen) == (2, 1)
    assert "callbacks" not in caplog.text
    progress(patience).load_state_dict(progress(Counts(5), before).state_dict())
    assert "the checkpoint holds state of callbacks that this Trainer does not have: Counts" in caplog.text


def test_the_best_model_is_loaded_after_the_last_step_is_saved(tmp_path: Path):
    """The checkpoint of the last step has that step, and not the weights of the best one."""
    steps = {"save_strategy": "steps", "save_steps": 5, "max_steps": 23}
    best = Run(settings={**steps, "load_best_model_at_end": True, "greater_is_better": True})
    last = life(tmp_path / "last", Run(settings=steps))
    first = life(tmp_path / "best", best)["tensors"]
    assert not torch.equal(first["lm_head.weight"], last["tensors"]["lm_head.weight"]), "the best is one before"
    require_alike(life(tmp_path / "best", Run(settings=steps)), last)


def test_trainers_own_checkpoints_keep_their_optimizer_state_when_a_window_is_computed_again(tmp_path: Path):
    run = Run(WINDOWS, settings={"save_strategy": "steps", "save_steps": 1, "max_steps": 13})
    life(tmp_path / "whole", run)
    life(tmp_path / "killed", run, kill_at=11)
    assert life(tmp_path / "killed", run)["begins"][0] < 11
    for step in range(1, 14):
        one, other = (
            torch.load(tmp_path / name / "hf" / f"checkpoint-{step}" / "optimizer.pt")["state"]
            for name in ("whole", "killed")
        )
        differing = [at for at, state in one.items() for key in state if not torch.equal(state[key], other[at][key])]
        files = [tmp_path / name / "hf" / f"checkpoint-{step}" / "model.safetensors" for name in ("whole", "killed")]
        assert not differing, step
        assert files[0].read_bytes() == files[1].read_bytes(), step


def _beside_trainers_own(rank: int, world_size: int, root: str) -> list[int]:
    """Trains 10 steps without us, and goes on from Trainer's own checkpoint with us; then again, from ours."""
    saving = {"save_strategy": "steps", "save_steps": 10, "max_steps": 10}
    transformers_run.trainer(root, Run(None, settings=saving)).train()
    begins = []
    for steps in (25, 30):
        run = Run(settings={"max_steps": steps, "lr_scheduler_type": "constant"})
        ours = transformers_run.callback(root, run)
        trained = transformers_run.trainer(root, run, *ours)
        trained.train(resume_from_checkpoint=f"{root}/hf/checkpoint-10")
        begins.append(trained._initial_global_step)
    return begins


def test_it_continues_trainers_own_checkpoint_and_then_its_own(tmp_path: Path):
    assert run_ranks(_beside_trainers_own, 1, str(tmp_path)) == [[10, 25]]


def _own_is_older(rank: int, world_size: int, root: str) -> int:
    """Trainer's own checkpoint is of step 10, and the store has step 4 only, as a kill leaves it behind a slow disk."""
    life = Run(settings={"save_strategy": "steps", "save_steps": 10, "max_steps": 4})
    transformers_run.trainer(root, life, *transformers_run.callback(root, life)).train()
    transformers_run.trainer(root, Run(None, settings={**life.settings, "max_steps": 10})).train()
    both = Run(settings={"max_steps": 12})
    trained = transformers_run.trainer(root, both, *transformers_run.callback(root, both))
    trained.train(resume_from_checkpoint=True)
    return trained._initial_global_step


def test_a_script_that_always_resumes_from_trainers_own_checkpoint_restarts(tmp_path: Path, capfd):
    assert run_ranks(_own_is_older, 1, str(tmp_path)) == [4]
    assert "step 10 had been loaded, but training continues from step 4 of the checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*other batches"),
        ({"ignore_data_skip": True}, "ignore_data_skip=True.*other batches"),
    ],
)
def test_settings_that_change_the_data_are_refused(tmp_path: Path, settings: dict[str, Any], says: str):
    trained = transformers_run.trainer(
        str(tmp_path), Run(settings=settings), *transformers_run.callback(str(tmp_path), Run())
    )
    with pytest.raises(ConfigError, match=says):
        trained.train()


def test_two_of_them_are_refused(tmp_path: Path):
    ours = [*transformers_run.callback(str(tmp_path), Run()), *transformers_run.callback(str(tmp_path), Run())]
    with pytest.raises(ConfigError, match="2 MoECheckpointCallbacks"):
        transformers_run.trainer(str(tmp_path), Run(), *ours).train()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (Run(accumulate=4), "gradient_accumulation_steps 1 -> 4"),
        (Run(settings={"per_device_train_batch_size": 1}), "per_device_train_batch_size 2 -> 1"),
        (Run(settings={"seed": 4}), "seed 3 -> 4"),
    ],
    ids=["accumulation", "batch", "seed"],
)
def test_other_data_within_an_epoch_are_refused(tmp_path: Path, changed: Run, says: str):
    life(tmp_path, Run(), kill_at=5)
    outcomes = start(tmp_path, changed)
    assert says in outcomes[0].error


def test_another_schedule_is_said_which_its_state_does_not_show(tmp_path: Path, capfd):
    life(tmp_path, Run(settings={"max_steps": 2}))
    life(tmp_path, Run(settings={"max_steps": 3, "lr_scheduler_type": "cosine"}))
    linear, cosine = (f"_get_{kind}_schedule_with_warmup_lr_lambda" for kind in ("linear", "cosine"))
    said = f"schedule lr ['LambdaLR({linear})'] -> ['LambdaLR({cosine})'] (training continues with this script's)"
    assert said in capfd.readouterr().err


def test_options_are_checked_where_they_are_written(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"MoECheckpointCallback\(every=...\): no such option"):
        MoECheckpointCallback(dirpath=tmp_path, every=3)


class _Lightning(pl.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


def test_another_models_optimizer_is_refused(tmp_path: Path):
    trainer = transformers_run.trainer(str(tmp_path), Run(), MoECheckpointCallback(dirpath=tmp_path / "store"))
    trainer.optimizer = torch.optim.AdamW(transformers_run.model().parameters())
    with pytest.raises(UnsupportedError, match="is not among the model's"):
        trainer.train()


def test_a_model_without_moe_layers_is_refused_or_told_of(tmp_path: Path, caplog):
    size = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, **size))
    for policy in (MoC(k=1), Dense()):
        callback = MoECheckpointCallback(policy, dirpath=tmp_path / type(policy).__name__)
        trainer = transformers_run.trainer(str(tmp_path), Run(settings={"max_steps": 1}), callback)
        trainer.model = trainer.model_wrapped = dense
        if isinstance(policy, Dense):
            trainer.train()
            assert "no MoE layer was found (tell of one by moe_ckpt.register_moe" in caplog.text
        else:
            with pytest.raises(ConfigError, match=r"(?s)MoC.*no MoE layer.*register_moe"):
                trainer.train()


def test_weights_go_from_host_to_host(tmp_path: Path):
    """From Trainer to a loop of one's own, to Lightning, and back: whatever each calls the tensors."""
    life(tmp_path, Run(settings={"max_steps": 2}))
    loaded = []

    def model() -> torch.nn.Module:
        loaded.append(transformers_run.model())
        torch.nn.init.zeros_(loaded[-1].lm_head.weight)
        return loaded[-1]

    words = {"input_ids": torch.ones(1, 4, dtype=torch.long), "labels": torch.ones(1, 4, dtype=torch.long)}
    looped = model()
    optimizer = torch.optim.AdamW(looped.parameters(), lr=0.0, weight_decay=0.0)
    with moe_ckpt.attach(
        looped, optimizer, policy=Dense(), dirpath=tmp_path / "loop", weights_from=tmp_path / "store"
    ) as ckpt:
        ckpt.resume()
        looped(**words).loss.backward()
        optimizer.step()
        ckpt.after_step(1)
    ours = MoECheckpoint(Dense(), dirpath=tmp_path / "lightning", weights_from=tmp_path / "loop")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_steps=1, callbacks=[ours], default_root_dir=tmp_path, **quiet)
    trainer.fit(_Lightning(model()), DataLoader([words], batch_size=None))
    back = transformers_run.trainer(
        str(tmp_path),
        Run(settings={"max_steps": 1, "learning_rate": 0.0}),
        MoECheckpointCallback(Dense(), dirpath=tmp_path / "back", weights_from=tmp_path / "lightning"),
    )
    back.model = back.model_wrapped = model()
    back.train()
    weights = [{f"weights/{name}": tensor for name, tensor in one.state_dict().items()} for one in loaded]
    assert loaded[0].lm_head.weight.count_nonzero()
    for others in weights[1:]:
        require_alike({"tensors": weights[0]}, {"tensors": others})
