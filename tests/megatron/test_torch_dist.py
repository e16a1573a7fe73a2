"""Megatron's own format: what this job exports, Megatron's loader opens; what is imported trains on bit for bit."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
import types
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from moe_ckpt.megatron import optimizers
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.megatron_lm import MODEL, Journal, Life, require_megatron_lm
from tests.support.megatron_lm import WARM as LM_WARM
from tests.support.megatron_move import whole_tensors
from tests.support.megatron_run import digest
from tests.support.processes import run_ranks

WARM = "tests.support.megatron_warm"
BASE = Setup(hidden=16, ffn=16, vocab=32, seq=8, num_microbatches=2)
STEPS, MORE = 3, 2


def job(setup, seed):
    random.seed(seed)
    np.random.seed(seed)
    return megatron_gpt.build(setup, seed)


def parts(built):
    return built.chunks, built.optimizer, built.scheduler


def train(built, first, last):
    return [megatron_gpt.train_step(built, iteration) for iteration in range(first, last)]


def bits(built):
    """All that training reads: weights, masters, moments, counts, rates, schedule, random numbers."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    leaves = getattr(built.optimizer, "chained_optimizers", [built.optimizer])
    inner = [leaf.optimizer for leaf in leaves]
    groups = [group for optimizer in inner for group in optimizer.param_groups]
    updated = [(o.state[each], each) for o in inner for group in o.param_groups for each in group["params"]]
    generators = [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]
    return {
        "weights": {f"{at} {n}": digest(p) for at, c in enumerate(built.chunks) for n, p in c.named_parameters()},
        "buffers": {f"{at} {n}": digest(p) for at, c in enumerate(built.chunks) for n, p in c.named_buffers()},
        "updated": [digest(each) for _, each in updated],
        "states": [{name: digest(value) for name, value in sorted(state.items())} for state, _ in updated],
        "groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
        "scheduler": built.scheduler.state_dict(),
        "random": [digest(each) for each in generators] + [random.getstate(), np.random.get_state()[1].tolist()],
    }


def exporting(rank, world_size, path, setup):
    from moe_ckpt import megatron

    built = job(setup, 1)
    train(built, 0, STEPS)
    megatron.export_torch_dist(path, *parts(built), iteration=STEPS, consumed_samples=built.consumed_samples)
    before = bits(built)
    return built.consumed_samples, before, train(built, STEPS, STEPS + MORE), bits(built)


def importing(rank, world_size, path, setup):
    from moe_ckpt import megatron

    built = job(setup, 2)
    progress = megatron.import_torch_dist(path, *parts(built))
    assert (progress.iteration, progress.restored) == (STEPS, True)
    after = bits(built)
    return progress.consumed_samples, after, train(built, STEPS, STEPS + MORE), bits(built)


def both(rank, world_size, path, setup):
    return exporting(rank, world_size, path, setup), importing(rank, world_size, path, setup)


def require_same(one, other):
    assert one[0] == other[0]
    for fact in one[1]:
        assert one[1][fact] == other[1][fact], f"{fact}, just after"
    assert one[2] == other[2], "losses"
    for fact in one[3]:
        assert one[3][fact] == other[3][fact], f"{fact}, after training on"


def test_trains_on_exactly(tmp_path):
    setup = replace(BASE, ep=2, dist_opt=True, precision="bf16")
    for exported, imported in run_ranks(both, 2, str(tmp_path / "iter_0000003"), setup, preload=WARM):
        require_same(exported, imported)


def test_a_count_that_megatrons_loader_left_in_a_group_is_not_taken():
    weight = torch.nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight])
    for _ in range(2):
        weight.grad = torch.ones(2)
        adam.step()
    adam.param_groups[0]["step"] = 1
    assert list(optimizers._counts(types.SimpleNamespace(optimizer=adam))) == [2]


LAYOUTS = {
    "fp32": Setup(ep=2),
    "fp32-sharded": Setup(ep=2, dist_opt=True),
    "bf16": Setup(ep=2, precision="bf16", expert_bias=True),
    "bf16-grouped-sharded": Setup(ep=2, precision="bf16", grouped=True, glu=True, dist_opt=True),
    "fp16": Setup(precision="fp16", dist_opt=True),
    "pipeline": Setup(pp=2, vpp=2, tied=True, precision="bf16", dist_opt=True),
    "gathered-later": Setup(precision="bf16", dist_opt=True, overlap_param_gather=True),
}


def small(setup):
    return replace(setup, hidden=16, ffn=16, vocab=32, seq=8, num_microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_on_exactly(tmp_path, name):
    for exported, imported in run_ranks(both, 2, str(tmp_path / "iter_0000003"), small(LAYOUTS[name]), preload=WARM):
        require_same(exported, imported)


def both_in_form(rank, world_size, path, setup, form):
    from moe_ckpt.megatron import torch_dist

    torch_dist._METADATA["distrib_optim_sharding_type"] = form
    exported = exporting(rank, world_size, path, setup)
    torch_dist._METADATA["distrib_optim_sharding_type"] = "unknown"  # the checkpoint says how it was saved
    return exported, importing(rank, world_size, path, setup)


@pytest.mark.slow
def test_the_form_that_megatrons_script_saves_by_default(tmp_path):
    setup, form = replace(BASE, ep=2, dist_opt=True, precision="bf16"), "dp_reshardable"
    for exported, imported in run_ranks(both_in_form, 2, str(tmp_path / "iter_0000003"), setup, form, preload=WARM):
        require_same(exported, imported)


@pytest.mark.slow
def test_trains_on_exactly_in_a_new_job(tmp_path):
    path, setup = str(tmp_path / "iter_0000003"), small(Setup(pp=2, ep=2, dist_opt=True))
    exported = run_ranks(exporting, 4, path, setup, preload=WARM)
    imported = run_ranks(importing, 4, path, setup, preload=WARM)
    for one, other in zip(exported, imported, strict=True):
        require_same(one, other)


def attached(built, store):
    from moe_ckpt import megatron
    from moe_ckpt.policies import Dense

    return megatron.attach(*parts(built), policy=Dense(), dirpath=store, resume="never", timeout_secs=60.0)


def wholes(built, store):
    with attached(built, store) as ckpt:
        return whole_tensors(ckpt._host.state)


def carrying(rank, world_size, place, setup, others, weights_only):
    """(whole tensors before, in each of the other layouts, and as Megatron's own loader by itself has the weights)."""
    from moe_ckpt import megatron

    path = f"{place}/iter_0000003"
    built = job(setup, 1)
    train(built, 0, STEPS)
    megatron.export_torch_dist(path, *parts(built), iteration=STEPS)
    before, found = wholes(built, f"{place}/from"), []
    for number, other in enumerate(others):
        built = job(other, 2 + number)
        megatron.import_torch_dist(path, *parts(built), weights_only=weights_only)
        found.append(wholes(built, f"{place}/to_{number}"))
        train(built, STEPS, STEPS + 1)
    built = job(others[-1], 9)
    from megatron.core import dist_checkpointing

    inner = [chunk.module.module if setup.precision != "fp32" else chunk.module for chunk in built.chunks]
    assert len(inner) == 1
    loaded = dist_checkpointing.load({"model": inner[0].sharded_state_dict()}, path)
    inner[0].load_state_dict(loaded["model"])
    return before, found, wholes(built, f"{place}/plain")


def weights_of(told):
    return {key: value for key, value in told.items() if key.startswith("model/")}


@pytest.mark.slow
@pytest.mark.parametrize("dist_opt", [False, True], ids=["whole", "sharded"])
def test_opens_in_another_layout(tmp_path, dist_opt):
    base = replace(small(Setup(glu=True)), precision="bf16", dist_opt=dist_opt)
    others = [replace(base, tp=2, ep=2, num_microbatches=4), replace(base, pp=2, ep=2, num_microbatches=4)]
    for before, found, plain in run_ranks(carrying, 4, str(tmp_path), replace(base, ep=2), others, False, preload=WARM):
        for told in found:
            assert told == before
        assert weights_of(plain) == weights_of(before)


@pytest.mark.slow
def test_weights_alone_open_across_expert_parallelism(tmp_path):
    base = replace(small(Setup()), precision="bf16", dist_opt=True)
    others = [base, replace(base, pp=2, dist_opt=False, num_microbatches=4)]
    for before, found, plain in run_ranks(carrying, 2, str(tmp_path), replace(base, ep=2), others, True, preload=WARM):
        for told in [*found, plain]:
            assert weights_of(told) == weights_of(before)


def beginning(rank, world_size, place, setup, policy):
    """Lives of a run that begins from an imported checkpoint."""
    import moe_ckpt.policies
    from moe_ckpt import megatron

    path, told = f"{place}/iter_0000003", []
    built = job(setup, 1)
    train(built, 0, STEPS)
    megatron.export_torch_dist(path, *parts(built), iteration=STEPS, consumed_samples=built.consumed_samples)
    train(built, STEPS, STEPS + 4)
    expected = bits(built)
    for life, until in enumerate((STEPS + 3, STEPS + 4)):
        built = job(setup, 5 + life)
        name, arguments = policy
        options = {"policy": getattr(moe_ckpt.policies, name)(**arguments), "when_busy": "wait", "timeout_secs": 60.0}
        ckpt = megatron.attach(*parts(built), dirpath=f"{place}/store", save_last=False, **options)
        progress = ckpt.resume(partial(megatron.import_torch_dist, path, *parts(built)))
        told.append((progress.iteration, progress.consumed_samples, ckpt.restored_step))
        built.consumed_samples = progress.consumed_samples
        for iteration in range(progress.iteration, until):
            megatron_gpt.forward_backward(built, iteration)
            ckpt.before_step()
            made, _ = megatron_gpt.update(built)
            ckpt.after_step(iteration + 1, consumed_samples=built.consumed_samples, updated=made)
        ckpt.finish()
        ckpt.close()
    return told, bits(built) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "second"),
    [(("Dense", {"every_n_steps": 1}), (6, 6)), (("MoEvement", {"window": 2}), (4, 5))],
    ids=["dense", "moevement"],
)
def test_a_run_begins_from_it(tmp_path, policy, second):
    setup = replace(BASE, ep=2, dist_opt=True, precision="bf16")
    samples = 2 * 2 * 2  # of an iteration: ranks, micro-batches, and samples in each
    for told, same in run_ranks(beginning, 2, str(tmp_path), setup, policy, preload=WARM):
        assert told == [(STEPS, STEPS * samples, None), (second[0], second[0] * samples, second[1])]
        assert same


def refusing(rank, world_size, place, setup):
    from moe_ckpt import megatron
    from moe_ckpt.errors import ConfigError, MissingPackageError

    path, said = f"{place}/iter_0000003", []

    def told(kind, function, *arguments, **options):
        with pytest.raises(kind) as caught:
            function(*arguments, **options)
        said.append(str(caught.value))

    built = job(setup, 1)
    told(ConfigError, megatron.export_torch_dist, path, *parts(built))
    told(ConfigError, megatron.import_torch_dist, path, *parts(built))
    train(built, 0, 1)
    found, torch_dist = importlib.util.find_spec, sys.modules["moe_ckpt.megatron.torch_dist"]
    torch_dist.importlib.util.find_spec = lambda name: None if name == "psutil" else found(name)
    told(MissingPackageError, megatron.export_torch_dist, path, *parts(built))
    torch_dist.importlib.util.find_spec = found
    assert not os.path.exists(path)
    told(ConfigError, megatron.export_torch_dist, f"{place}/a_file/iter_0000003", *parts(built))
    megatron.export_torch_dist(path, built.chunks)
    told(ConfigError, megatron.export_torch_dist, path, *parts(built))
    told(ConfigError, megatron.import_torch_dist, path, *parts(built))
    megatron.export_torch_dist(path + "_whole", *parts(built), iteration=1)
    other = job(replace(setup, ep=1), 2)
    told(ConfigError, megatron.import_torch_dist, path + "_whole", *parts(other))
    other = job(replace(setup, dist_opt=False), 2)
    before = bits(other)
    told(ConfigError, megatron.import_torch_dist, path + "_whole", *parts(other))
    assert bits(other) == before
    return said


@pytest.mark.slow
def test_what_is_refused(tmp_path):
    (tmp_path / "a_file").touch()
    said = run_ranks(refusing, 2, str(tmp_path), replace(BASE, ep=2, dist_opt=True, precision="bf16"), preload=WARM)
    assert said[0] == said[1]
    for text, part in zip(
        said[0],
        (
            "has made no step",
            "has no metadata.json",
            "needs the package 'psutil'",
            "cannot be made: Not a directory",
            "is not empty",
            "holds no optimizer",
            "holds 2 optimizers, and this run has 1",
            "was saved with the distributed optimizer, and this run is without it",
        ),
        strict=True,
    ):
        assert part in text


def training(rank: int, world_size: int, life: Any, export: str) -> None:
    """Megatron-LM's script, which at its end writes its state. export: the directory; empty to write none."""
    from megatron.training import get_args
    from megatron.training import training as script

    from moe_ckpt import megatron
    from tests.support import megatron_lm

    train = script.train

    @functools.wraps(train)
    def exporting(step: Any, chunks: Any, optimizer: Any, scheduler: Any, *more: Any, **options: Any) -> Any:
        ended = train(step, chunks, optimizer, scheduler, *more, **options)
        samples = get_args().consumed_train_samples
        megatron.export_torch_dist(export, chunks, optimizer, scheduler, iteration=ended[0], consumed_samples=samples)
        return ended

    if export:
        script.train = exporting
    megatron_lm.live(rank, world_size, life)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["", "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--rampup-batch-size 2 2 8"],
    ids=["dp", "ep", "pp", "samples"],
)
def test_megatrons_script_goes_on_from_what_it_exported(layout, tmp_path):
    """By its own --load, bit for bit as from what it saves itself."""
    require_megatron_lm()
    by_samples = layout.startswith("--rampup")
    script = f"{MODEL} {layout} --ckpt-format torch_dist --override-opt_param-scheduler --lr-decay-style linear "
    script += "--lr-decay-samples 60" if by_samples else "--lr-decay-iters 20"
    long, short = "--train-samples 22", "--train-samples 12"
    if not by_samples:
        long, short = "--train-iters 5", "--train-iters 3"
    saved, exported = tmp_path / "saved", tmp_path / "exported"
    exported.mkdir()

    def lives(name: str, arguments: str, export: str = "") -> list[dict[str, Any]]:
        life = Life(f"{script} {arguments}", str(tmp_path / name), None, None)
        run_ranks(training, 2, life, export, timeout=200.0, preload=LM_WARM)
        return [line for line in Journal(f"{life.journal}.1").lives()[-1] if "step" in line]

    iteration = len(lives("first", f"{short} --save {saved} --save-interval 1000", str(exported / "made")))
    (exported / "made").rename(exported / f"iter_{iteration:07d}")
    (exported / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    own, ours = (lives(path.name + "_on", f"{long} --load {path}") for path in (saved, exported))
    assert own
    assert [line["step"] for line in own] == [iteration + 1 + at for at in range(len(own))]
    assert ours == own
