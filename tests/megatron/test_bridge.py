"""``megatron.bridge.MoECheckpointCallback``: under Megatron-Bridge's own ``pretrain``, and called as Bridge calls it.

Killed and started again, a run ends with the bits of an undisturbed one.
"""

from __future__ import annotations

import importlib.util
import json
import random
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moe_ckpt import Memory, newest_step
from moe_ckpt.errors import ConfigError, CoverageError
from moe_ckpt.interop.export import export
from moe_ckpt.megatron.bridge import MoECheckpointCallback
from tests.integration.test_plain_loop import require_alike
from tests.megatron import bridge_loop, bridge_run, hub_rank
from tests.megatron.bridge_loop import SETUP, Job
from tests.megatron.bridge_run import Run
from tests.support.kills import Kill, drawn
from tests.support.kills import killed as killed_again_and_again
from tests.support.megatron_run import EXACT
from tests.support.processes import Outcome, RanksFailed, run_ranks, start_ranks

WARM = "tests.support.megatron_warm"
RANKS = 2
RARELY = ("Dense", {"every_n_steps": 1000})
WINDOWS = ("MoEvement", {"window": 3})


needs_bridge = pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="without Megatron-Bridge")


def pretrain(root: Path, run: Run, ranks: int, kill: Kill | None = None) -> list[Outcome]:
    root.mkdir(exist_ok=True)
    bridge = "tests.support.bridge_warm"
    return start_ranks(bridge_run.lived, ranks, str(root), run, kill, preload=bridge, grace=2.0)


@needs_bridge
@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (Run(experts=2), 2),
        pytest.param(Run(WINDOWS, sharded=True), 2, marks=pytest.mark.slow),
        pytest.param(Run(WINDOWS, stages=2), 2, marks=pytest.mark.slow),
        pytest.param(Run(("GradientLog", {}), memory=True), 1, marks=pytest.mark.slow),
    ],
    ids=["experts", "windows-sharded", "windows-stages", "log"],
)
def test_bridges_own_pretrain_ends_with_the_same_bits(tmp_path: Path, run: Run, ranks: int):
    """The model drops out, and a validation every five steps has data of its own."""
    [undisturbed, *_] = killed_again_and_again(partial(pretrain, tmp_path / "whole", run, ranks), [])
    kills = drawn(secrets.token_hex(4), 4, bridge_run.STEPS - 4, 5, ranks, 0.2)
    [resumed, *_] = killed_again_and_again(partial(pretrain, tmp_path / "killed", run, ranks), kills)
    assert resumed["restored"], kills
    require_alike(undisturbed, resumed)
    assert resumed["at_end"] == undisturbed["at_end"]
    assert resumed["losses"].items() <= undisturbed["losses"].items()


def exported(rank: int, world_size: int, place: str) -> None:
    """Exports in a process where Bridge can be imported."""
    size = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "n_group": 1, "topk_group": 1}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(
        **{**size, **latent, **heads, **experts, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        vocab_size=hub_rank.VOCABULARY,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        architectures=["DeepseekV3ForCausalLM"],
        num_nextn_predict_layers=0,
    )
    config.save_pretrained(f"{place}/config")
    export(f"{place}/store", "hf", f"{place}/out", config=f"{place}/config")
    config.num_hidden_layers = 3
    config.save_pretrained(f"{place}/config")
    with pytest.raises(CoverageError, match=r"numbers in layer 2, and the run has 0"):
        export(f"{place}/store", "hf", f"{place}/more", config=f"{place}/config")


def ordered(rank: int, world_size: int, place: str) -> None:
    from megatron.bridge.training.callbacks import Callback, CallbackManager

    class Average(Callback):
        def on_train_step_end(self, context: Any) -> None:
            """Updates what is in ``stateful``."""

    average: Any = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    for stateful, is_last in ((average, True), (None, False), (average, False)):
        callback = MoECheckpointCallback(dirpath=place, stateful={"average": stateful} if stateful else None)
        manager = CallbackManager()
        manager.add([Average(), callback] if is_last else [callback, Average()])
        if is_last or stateful is None:
            callback._require_last(manager)
        else:
            with pytest.raises(ConfigError, match=r"Average\.on_train_step_end comes behind it.*the last"):
                callback._require_last(manager)


@needs_bridge
def test_what_changes_stateful_objects_comes_before(tmp_path: Path):
    run_ranks(ordered, 1, str(tmp_path), preload="tests.support.bridge_warm")


@needs_bridge
def test_an_export_of_a_family_that_bridge_knows_computes_the_same_logits(tmp_path: Path):
    logits = run_ranks(
        hub_rank.trained, 2, str(tmp_path), "deepseek_v3", {"expert_model_parallel_size": 2}, preload=WARM
    )
    run_ranks(exported, 1, str(tmp_path), preload="tests.support.bridge_warm")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        computed = model.eval()(input_ids=hub_rank.asked()).logits
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.any()
    torch.testing.assert_close(computed, logits[0][..., : hub_rank.VOCABULARY], rtol=1e-4, atol=1e-5)


def live(job: Job, count: int = RANKS) -> list[dict[str, Any]]:
    Path(job.directory).mkdir(exist_ok=True)
    return run_ranks(bridge_loop.run, count, job, preload=WARM)


def killed(job: Job, count: int = RANKS) -> None:
    Path(job.directory).mkdir(exist_ok=True)
    outcomes = start_ranks(bridge_loop.run, count, job, preload=WARM)
    assert outcomes[job.kill[0]].exitcode == -9, [outcome.error for outcome in outcomes]


def journal(job: Job, what: str, rank: int) -> dict[int, set[str]]:
    """What was noted of each iteration, in all lives."""
    found: dict[int, set[str]] = {}
    for text in Path(job.directory, f"journal.{rank}").read_text().splitlines():
        line = json.loads(text)
        if what in line:
            found.setdefault(line[what], set()).add(text)
    return found


def require_exact(whole: Job, broken: Job) -> list[dict[str, Any]]:
    expected, found = live(whole), live(broken)
    for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
        operations = [one["counters"].pop("floating_point_operations_so_far")]
        operations.insert(0, other["counters"].pop("floating_point_operations_so_far"))
        assert operations == sorted(operations), "it is said that some may be missing"
        for what in (*EXACT, "iteration", "counters"):
            assert one[what] == other[what], (rank, what)
        for what in ("step", "validated"):
            alike, mine = journal(whole, what, rank), journal(broken, what, rank)
            assert mine.items() <= alike.items(), (rank, what)
        assert journal(whole, "step", rank).keys() == journal(broken, "step", rank).keys()
    assert found[0]["begun"][0] > 0
    return found


@pytest.mark.parametrize(
    "job",
    [
        Job("", skipped=(4, 13, 14)),
        Job("", WINDOWS, skipped=(5,), rampup=(4, 4, 16)),
        pytest.param(Job("", setup=replace(SETUP, precision="fp16", loss_scale=2.0**32)), marks=pytest.mark.slow),
        pytest.param(Job("", WINDOWS, replace(SETUP, precision="bf16", dist_opt=True)), marks=pytest.mark.slow),
    ],
    ids=["dense", "windows", "fp16", "windows-bf16"],
)
def test_killed_at_random_it_ends_with_the_same_bits(job: Job, tmp_path: Path):
    wheres = ["train", "ended", "validation", "counted"]
    random.shuffle(wheres)
    broken = replace(job, directory=str(tmp_path / "broken"))
    iteration = 1
    for number, where in enumerate(wheres):
        iteration += 3 - iteration % 3 if where == "validation" else random.choice((1, 2))
        iteration += iteration in job.skipped
        killed(replace(broken, kill=(random.randrange(RANKS), iteration, where), seed=1 + number))
    require_exact(replace(job, directory=str(tmp_path / "whole")), replace(broken, seed=9))


def test_a_job_that_bridge_ends_early_leaves_its_newest_iteration(tmp_path: Path):
    """By ``sys.exit``, for an interval, a signal or a time limit; or before an update, by the rerun machine."""
    job = Job(str(tmp_path / "broken"), RARELY, exit_interval=5)
    whole = replace(job, directory=str(tmp_path / "whole"), exit_interval=None)
    for begun, ended in ((0, 5), (5, 10)):
        [first, _] = live(replace(job, seed=1 + begun))
        assert (first["begun"][0], first["iteration"]) == (begun, ended)
        assert (first["error"], first["lifecycle"]) == ("SystemExit(0)", "ENDED")
        assert newest_step(f"{job.directory}/store") == ended
    [first, _] = live(replace(job, stops_at=13, exit_interval=None, seed=5))
    assert (first["error"], newest_step(f"{job.directory}/store")) == ("SystemExit(0)", 12)
    [first, _] = require_exact(whole, replace(job, exit_interval=None, seed=7))
    assert (first["begun"][0], first["error"]) == (12, None)
    [again, _] = live(replace(job, exit_interval=None))
    assert again["begun"][0] == 14
    assert any("The run is finished" in line for line in again["said"])


def test_tokens_of_a_pass_that_is_made_again_count_once(tmp_path: Path):
    once, twice = (live(Job(str(tmp_path / name), reruns=reruns)) for name, reruns in (("1", ()), ("2", (2, 5))))
    assert [one["routed"] for one in once] == [one["routed"] for one in twice]


ALONE = Job("", setup=replace(SETUP, ep=1))


@pytest.mark.parametrize("how", ["fails_at", "leaves_at"])
def test_an_error_or_an_exit_of_one_rank_closes_the_checkpoint(how: str, tmp_path: Path):
    memory = {"memory": Memory(directory=str(tmp_path / "memory"), storage_every=1000)}
    (tmp_path / "memory").mkdir()
    job = replace(ALONE, directory=str(tmp_path), **{how: 6}, options=memory)
    [first] = live(job, 1)
    assert first["lifecycle"] == "CLOSED"
    assert first["error"] is not None
    [second] = live(replace(job, **{how: None}), 1)
    assert (second["begun"][0], second["iteration"]) == (5, 14), "of memory, where it was sealed"


def test_bridges_own_checkpoint_is_where_an_empty_store_begins(tmp_path: Path):
    job = replace(ALONE, directory=str(tmp_path), loaded=5)
    [first] = live(replace(job, iterations=7), 1)
    assert (first["begun"], first["iteration"]) == ((5, 20), 7)
    [second] = live(replace(job, loaded=9), 1)
    assert (second["begun"], second["iteration"]) == ((7, 28), 14)
    assert any("iteration 9 had been loaded, but training continues from iteration 7" in x for x in second["said"])


def test_bridges_own_checkpoint_is_not_written_from_a_part_of_a_window(tmp_path: Path):
    job = replace(ALONE, directory=str(tmp_path), policy=WINDOWS, save_interval=1)
    killed(replace(job, kill=(0, 11, "train")), 1)
    [again] = live(job, 1)
    window = again["begun"][0]
    assert again["saves"] == [*range(window + 2, 15)], "the window's last iteration is complete"
    assert any(f"checkpoint of iteration {window + 1} is not written" in line for line in again["said"])


def test_what_cannot_be_saved_is_said_at_the_start(tmp_path: Path):
    with pytest.raises(ConfigError, match="polcy"):
        MoECheckpointCallback(polcy=None)
    with pytest.raises(ConfigError, match=r"upstream_bytes.*all stages communicate"):
        MoECheckpointCallback(memory=Memory(upstream_bytes="1MB"))
    with pytest.raises(ConfigError, match="fired no on_data_init_start"):
        MoECheckpointCallback().on_train_end(None)
    job = replace(ALONE, directory=str(tmp_path), iterations=1)
    [first] = live(replace(job, settings={"dataset.dataloader_type": "external"}), 1)
    assert any("dataloader_type='external'" in line for line in first["said"])
    with pytest.raises(RanksFailed, match="skip_train"):
        live(replace(job, settings={"validation.skip_train": True}), 1)
