"""What a user may get wrong with the Megatron adapter: refused with what to do about it, and nothing half-written."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from moe_ckpt.megatron.compat import HOOK_POINTS
from tests.megatron import bad_input, megatron_lm_refusals
from tests.support import run_ranks
from tests.support.megatron_gpt import Setup
from tests.support.plain_store import read_body

WARM = "tests.support.megatron_warm"
VERSION = f"megatron-core {version('megatron-core')}"


def only(function, tmp_path: Path, *args):
    [found] = run_ranks(function, 1, str(tmp_path), *args, preload=WARM)
    return found


def assert_refused(found: dict, expected: dict[str, tuple[str, ...]]) -> None:
    """expected: case -> class of the error, and what it must say."""
    for case, (kind, *parts) in expected.items():
        assert found[case][0] == kind, f"{case}: {found[case]}"
        for part in parts:
            assert part in found[case][1], f"{case}: {found[case][1]}"


def test_process_groups_that_are_not_set_up(tmp_path: Path):
    expected = {
        "no torch groups": ("ConfigError", "torch.distributed is not initialized", "init_process_group"),
        "no Megatron groups": ("ConfigError", "process groups do not exist", "initialize_model_parallel"),
    }
    assert_refused(only(bad_input.without_groups, tmp_path), expected)
    assert not list(tmp_path.iterdir())


def test_another_megatron_core_than_is_known(tmp_path: Path):
    found = only(bad_input.installation, tmp_path)
    assert len(found) == 1 + len(HOOK_POINTS)
    expected = {f"{module}.{name}": ("UnsupportedError", VERSION, f"{module}.{name}") for module, name in HOOK_POINTS}
    expected["not installed"] = ("MissingPackageError", "'megatron-core'", "pip install 'moe_ckpt[megatron]'")
    assert_refused(found, expected)
    assert not list(tmp_path.iterdir())


def test_optimizers_whose_state_is_elsewhere(tmp_path: Path):
    adam, maker = "set optimizer='adam' or 'sgd'", "get_megatron_optimizer(config, model_chunks)"
    expected = {
        "LayerWiseDistributedOptimizer": ("UnsupportedError", "LayerWiseDistributedOptimizer", VERSION, adam),
        "SomeOptimizer": ("UnsupportedError", "SomeOptimizer", adam),
        "SubclassOfFP32Optimizer": ("UnsupportedError", "SubclassOfFP32Optimizer", adam),
        "muon": ("UnsupportedError", "FP32Optimizer with TensorParallelMuon", adam),
        "torch's own": ("ConfigError", "torch.optim.adam.Adam", maker, "model_chunks, optimizer, scheduler"),
        "none": ("ConfigError", "the optimizer is None", maker),
        "a scheduler": ("ConfigError", "OptimizerParamScheduler", maker, "model_chunks, optimizer, scheduler"),
        "swapped": ("ConfigError", "model_chunks is of class ChainedOptimizer", "give the model first"),
        "a list of two kinds": ("ConfigError", "model_chunks is a list of DistributedDataParallel, int"),
        "use_precision_aware_optimizer": ("UnsupportedError", "use_precision_aware_optimizer", "Set it to False"),
        "optimizer_cpu_offload": ("UnsupportedError", "optimizer_cpu_offload divides", "Set it to False"),
        "optimizer_cuda_graph": ("UnsupportedError", "optimizer_cuda_graph replays", "Set it to False"),
        "gathers in step": ("UnsupportedError", "overlap_param_gather_with_optimizer_step", "Set it to False"),
        "other chunks": ("ConfigError", "none of the model chunks", "give the chunks that it was made from"),
    }
    found = only(bad_input.optimizers, tmp_path)
    assert_refused(found, expected)
    assert found.keys() == expected.keys()
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_taken_apart(tmp_path: Path):
    moe = "decoder.layers.1.mlp"
    expected = {
        "container": ("UnsupportedError", f"{moe}.experts.packed: PackedExperts", "SequentialMLP", "TEGroupedMLP"),
        "unnumbered": ("UnsupportedError", f"{moe} holds weights of a local expert 2", "[0, 1]"),
        "doubled": ("CoverageError", f"expert 3 of {moe} is on no rank"),
        "no experts": ("CoverageError", *(f"expert {e} of {moe} is on no rank" for e in range(4))),
        "shared expert": (
            "UnsupportedError",
            "experts.local_experts.1.linear_fc1.weight of MoE layer decoder.layers.0.mlp is",
            f"experts.local_experts.0.linear_fc1.weight of MoE layer {moe}, too",
            "use one whole MoE layer in both places",
        ),
        "shared experts": ("UnsupportedError", "of MoE layer decoder.layers.0.mlp is experts", f"MoE layer {moe}, too"),
        "no MoE layers": ("ConfigError", "MoC saves some experts", "num_moe_experts", "Dense, CheckFreq"),
        "gtp_weight_remat_size": ("UnsupportedError", "tensor_parallel_num_weight_shards divides", "Train without it"),
        "moe_single_grouped_weight": ("UnsupportedError", "moe_single_grouped_weight keeps", "Train without it"),
        "fp8 delayed": ("UnsupportedError", "fp8='hybrid'", "fp8_recipe='delayed'", "'tensorwise'"),
        "fp8 enum": ("UnsupportedError", "fp8_recipe='delayed'"),
        "fp8 tensorwise": ("",),
        "fp8 attention": ("UnsupportedError", "fp8_dot_product_attention with fp8_recipe='tensorwise'", "Turn it off"),
        "fp8 attention mxfp8": ("",),
        "fp8 custom": ("UnsupportedError", "fp8_recipe='custom' may scale", "'mxfp8'"),
        "transposed": ("UnsupportedError", "parameter odd is not contiguous", ".contiguous()"),
        "without elements": ("UnsupportedError", "parameter odd has no elements"),
        "parameter of complex128": ("UnsupportedError", "parameter odd: tensors of torch.complex128", "one of these"),
        "buffer of uint16": ("UnsupportedError", "buffer odd: tensors of torch.uint16", "persistent=False"),
        "extra state": ("UnsupportedError", "histories (tests.megatron.bad_input.Histories)", "get_extra_state"),
    }
    found = only(bad_input.models, tmp_path)
    assert_refused(found, expected)
    assert (found["hooks"][0], found["threads"][0]) == ("0", ""), "what is refused leaves nothing behind"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attention mxfp8", "tensorwise"]


def test_settings_and_calls_that_contradict(tmp_path: Path):
    expected = {
        "k": ("ConfigError", "MoC(k=5)", "decoder.layers.0.mlp", "only 4 experts"),
        "class": ("ConfigError", "create a policy from it: policy=MoC()"),
        "resume": ("ConfigError", "resume='maybe'", "choose from 'auto', 'extend', 'never'"),
        "guard": ("ConfigError", "guard=", "Guarded(policy, budget, mlt_budget)"),
        "stateful": ("ConfigError", "loader (object)", "state_dict"),
        "one stage": ("ConfigError", "upstream_bytes=1000000", "one stage", "pipeline_model_parallel_size above 1"),
        bad_input.RING: ("UnsupportedError", "upstream_bytes=1000", bad_input.RING, "Leave one of them"),
        bad_input.OVERLAP: ("UnsupportedError", "upstream_bytes=1000", bad_input.OVERLAP, "the same bits"),
        "two schedulers": ("ConfigError", "stateful={'scheduler': ...}", "another name"),
        "no peers": ("ConfigError", "MoEtion(", "recompute=True", "keeps copies on 0", "replicas=1"),
        "each to storage": ("ConfigError", "recompute=True", "each step goes there", "storage_every=100"),
        "resume twice": ("ConfigError", "resume() was called twice", "before the first step"),
        "too late to resume": ("ConfigError", "resume() was called twice"),
        "resume forgotten": ("ConfigError", "resume() was not called", "resume='never'"),
        "wrong iteration": ("ConfigError", "after_step(2) follows iteration 0"),
        "same iteration": ("ConfigError", "after_step(1) follows iteration 1"),
        "no optimizer step": ("ConfigError", "neither optimizer.step()", "since iteration 1", "call skip()"),
        "in use": ("StoreInUseError", "in use by another run", "own dirpath"),
        "two updates": ("ConfigError", "MoEvement needs one optimizer.step()", "made 2", "use Dense or MoC"),
        "after finish": ("ConfigError", "nothing after finish() or close()"),
    }
    found = only(bad_input.arguments, tmp_path)
    assert_refused(found, expected)
    assert found["made"] == ("", ""), "what is refused makes no store"
    steps = {path.parent.name for path in tmp_path.glob("store/step_*/MANIFEST.json")}
    assert steps == {path.name for path in tmp_path.glob("store/step_*")}, "what is there is committed"


def test_recomputation_that_sends_no_gradient_says_why(tmp_path: Path):
    """Without a distributed optimizer data-parallel peers have each expert anyway; with one they do not."""
    for name, sharded, says in (("alike", False, True), ("apart", True, False)):
        root = tmp_path / name
        root.mkdir()
        setup = Setup(layers=2, num_microbatches=2, dist_opt=sharded)
        one, other = run_ranks(bad_input.recomputes, 2, str(root), setup, preload=WARM)
        heard = [text for text in one if "sends no gradients" in text]
        assert len(heard) == says, (name, one)
        assert all("peers that hold copies train the same experts" in text for text in heard)
        assert not any("sends no gradients" in text for text in other), "rank 0 speaks"


@pytest.mark.parametrize(
    "changes",
    [{"precision": "fp16", "loss_scale": 2.0**22}, {"precision": "fp16", "loss_scale": 2.0**22, "dist_opt": True}],
    ids=["replicated", "distributed"],
)
def test_an_optimizer_that_never_stepped(tmp_path: Path, changes: dict):
    """The first update overflows, so a checkpoint is made without optimizer state; later ones have it."""
    setup = Setup(layers=2, num_microbatches=1, **changes)
    told = only(bad_input.never_stepped, tmp_path, setup)
    assert told["end 0"][0] == [False]
    assert told["begin 1"] == (1, *told["end 0"][1:3]), "weights, masters and loss scale, and no moments"
    made, at_end, scale, routed, _ = told["end 1"]
    assert made[0] is False
    assert made[-1] is True
    assert told["end 0"][3] == 0, "tokens of steps that were not made do not count"
    assert routed > 0
    assert told["begin 2"] == (14, at_end, scale)
    first = made.index(True) + 2
    body = read_body(next(tmp_path.glob(f"store/step_{first:08d}*/MANIFEST.json")))
    assert {record[0] for record in body["operators"].values()} == {first}, "moments came into being: all is saved anew"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["shard of rank 1", "state of rank 1", "manifest"])
def test_a_damaged_newest_checkpoint_sends_all_ranks_to_the_one_before(tmp_path: Path, damage: str):
    before = run_ranks(bad_input.train, 2, str(tmp_path), 3, preload=WARM)
    [newest] = tmp_path.glob("store/step_00000003")
    name = {
        "shard of rank 1": "rank_00001_expert.safetensors",
        "state of rank 1": "rank_00001_state.json",
        "manifest": "MANIFEST.json",
    }[damage]
    raw = bytearray((newest / name).read_bytes())
    raw[-40] ^= 1
    (newest / name).write_bytes(raw)
    after = run_ranks(bad_input.train, 2, str(tmp_path), 0, preload=WARM)
    assert [told["began"] for told in after] == [2, 2]
    for one, other in zip(before, after, strict=True):
        assert other["at"] == one["steps"][2]
    assert any("step_00000003" in line for told in after for line in told["heard"])


@pytest.mark.slow
def test_stores_of_the_other_adapter(tmp_path: Path):
    from moe_ckpt.errors import StoreError
    from tests.integration.crash_run import Run, build, loaders

    run = Run(str(tmp_path / "lightning" / "store"), policy=("moc", 1), samples=8, epochs=1)
    trainer, module, _ = build(run)
    trainer.fit(module, *loaders(run))
    files = snapshot(tmp_path)
    assert any(name.endswith("MANIFEST.json") for name in files)
    kind, text = only(bad_input.open_store, tmp_path / "lightning")
    assert kind == "StoreError"
    assert "lightning/store" in text
    assert "dirpath" in text
    assert snapshot(tmp_path) == files

    only(bad_input.leave_store, tmp_path / "megatron")
    files = snapshot(tmp_path)
    trainer, module, _ = build(replace(run, store=str(tmp_path / "megatron" / "store")))
    with pytest.raises(StoreError, match=r"megatron/store.*dirpath"):
        trainer.fit(module, *loaders(run))
    assert snapshot(tmp_path) == files


def snapshot(root: Path) -> dict[str, bytes]:
    found = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_install_without_megatron_lm(tmp_path: Path):
    expected = {"absent": ("ConfigError", "megatron.training.training", "source tree", "PYTHONPATH", "megatron.attach")}
    assert_refused(only(megatron_lm_refusals.without_megatron_lm, tmp_path), expected)
    assert not list(tmp_path.iterdir())
