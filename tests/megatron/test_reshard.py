"""A checkpoint of one parallel layout goes on in another: every whole tensor bit for bit, schedules, books, losses.

Layouts are compared in whole tensors that are gathered from all ranks, and element by element where ranks hold copies.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.support.megatron_gpt import Setup
from tests.support.megatron_move import Stop, journey
from tests.support.processes import run_ranks

BASE = Setup(dropout=0.0, hidden=16, ffn=16, vocab=32, seq=8)
MICRO_BATCHES = 4
"""Of all data-parallel ranks together."""
DENSE = ("Dense", {"every_n_steps": 1})
MOC = ("MoC", {"k": 1})
TIMEOUT = 420
WARM = "tests.support.megatron_warm"


def travel(place, ranks, *stops):
    """What each rank saw at each stop. Whole tensors are gathered, so that rank 0 tells those of all."""
    return run_ranks(journey, ranks, str(place), list(stops), timeout=TIMEOUT, preload=WARM)


def require_alike(found, expected, but=()):
    """found, expected: what ``describe`` told. but: facts that may differ."""
    assert found["tensors"].keys() == expected["tensors"].keys()
    differing = [key for key, told in found["tensors"].items() if told != expected["tensors"][key]]
    assert not differing, f"{len(differing)} of {len(found['tensors'])} differ: {differing[:6]}"
    for fact in expected.keys() - set(but):
        assert found[fact] == expected[fact], fact


def require_verified(views):
    for view in views:
        assert view["reads"]["unverified"] == []
        assert view["reads"]["unread"] == []


def as_committed(view, manifest):
    """The whole tensors that a checkpoint holds: each operator's as they were at its step, which differ under MoC."""
    return {
        key: view["history"][manifest.operators[view["operators"][key]].step][key] for key in view["left"]["tensors"]
    }


def manifest_of(store, step):
    reader = StoreReader(open_storage(str(store)))
    return reader.manifest(next(name for name in reader.directories() if name.startswith(f"step_{step:08d}")))


def check_moves(tmp_path, ranks, start, layouts, *, elsewhere=(), policy=DENSE, steps=2, more=2, rel=1e-4):
    """Train in ``start`` and leave a checkpoint. Go on from it in ``start`` and in each of ``layouts``; let the last
    one save what it loaded, and open that in ``start``. Before that, go on in ``elsewhere`` too: (ranks, layout).

    Returns rank 0's view of the first and the second stop.
    """
    start, *layouts = (_with_batches(setup, ranks) for setup in (start, *layouts))
    train, stay = Stop(start, steps=steps, more=more, policy=policy), Stop(start, more=more, policy=policy)
    away = [Stop(layout, more=more, policy=policy) for layout in layouts]
    back = [Stop(layouts[-1], idle=1), Stop(start)]
    views = travel(tmp_path, ranks, train, stay, *away, *([] if elsewhere else back))
    moved = [[view[number] for view in views] for number in range(2, 2 + len(layouts))]
    for other, layout in elsewhere:
        visit = travel(tmp_path, other, Stop(_with_batches(layout, other), more=more, policy=policy))
        moved.append([view[0] for view in visit])
    ended = (travel(tmp_path, ranks, *back) if elsewhere else [view[-2:] for view in views])[0]

    first, again = views[0][:2]
    held = as_committed(first, manifest_of(tmp_path / "store", steps))
    require_alike(again["came"], first["left"] | {"tensors": held}, but=("tokens", "ages", "lost"))
    unbroken = {step: loss for step, loss in losses_of(views, 1).items() if step > steps}
    if policy is DENSE:
        assert unbroken.items() <= losses_of(views, 0).items()
    for stop in moved:
        require_alike(stop[0]["came"], again["came"])
        close(losses_of(stop), unbroken, rel)
    require_alike(ended[1]["came"], ended[0]["left"])
    require_alike(ended[1]["came"], again["came"], but=("tokens", "ages"))
    require_verified([*(stop for view in views for stop in view[1:]), *(view for stop in moved for view in stop)])
    return first, again


def _with_batches(setup, ranks):
    return replace(setup, num_microbatches=MICRO_BATCHES * setup.tp * setup.pp // ranks)


def losses_of(views, number=None):
    """Of the stop with that number, as the ranks of the last pipeline stage know them."""
    stops = views if number is None else [view[number] for view in views]
    return next(stop["losses"] for stop in stops if None not in stop["losses"].values())


def close(found, expected, rel):
    assert found.keys() == expected.keys()
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=rel), step


def test_other_layouts_of_two_ranks(tmp_path):
    start = replace(BASE, ep=2)
    layouts = [
        replace(BASE, pp=2),
        replace(BASE, dist_opt=True),
        replace(BASE, pp=2, vpp=2),
        replace(BASE, tp=2, etp=None),
        replace(BASE, tp=2, ep=2),
    ]
    check_moves(tmp_path, 2, start, layouts)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_predict_further_tokens_move(tmp_path, tied):
    """With tied embeddings the last of several stages has an output layer that nothing reads."""
    base = replace(BASE, mtp=1, tied=tied)
    check_moves(tmp_path, 2, replace(base, pp=2), [replace(base, pp=2, dist_opt=True), replace(base, ep=2)])


@pytest.mark.parametrize(
    "sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "distributed optimizer"]
)
def test_data_parallel_peers_read_once_what_they_hold_alike(tmp_path, sharded):
    setup = _with_batches(replace(BASE, ep=2, dist_opt=sharded), 4)
    views = travel(tmp_path, 4, Stop(setup, steps=2), Stop(setup))
    require_alike(views[0][1]["came"], views[0][0]["left"], but=("tokens", "ages"))
    require_verified([view[1] for view in views])
    manifest = manifest_of(tmp_path / "store", 2)
    reader = StoreReader(open_storage(str(tmp_path / "store")))
    read = [view[1]["reads"]["nbytes"] for view in views]
    assert sum(read) == sum(stored.nbytes for stored in reader.index(reader.manifest(manifest.directory)).live)
    assert max(read) < 1.5 * min(read)


@pytest.mark.slow
def test_what_does_not_fit_is_refused(tmp_path):
    """With the names of both culprits, and with nothing in memory changed."""
    start = replace(BASE, ep=2, precision="bf16")
    others = {
        "vocab": replace(start, vocab=BASE.vocab + 16),
        "experts": replace(start, experts=8),
        "hidden": replace(start, hidden=32),
        "precision": replace(start, precision="fp32"),
        "layers": replace(start, layers=2),
    }
    stops = [Stop(other, resumes=False) for other in others.values()]
    views = travel(tmp_path, 2, Stop(start, steps=1), *stops)
    refused = dict(zip(others, views[0][1:], strict=True))
    for name, view in refused.items():
        assert view["untouched"], name
    for name, difference in {
        "vocab": "embedding.word_embeddings.weight has shape [48, 16] in the model, [32, 16] in the checkpoint",
        "experts": "decoder.layers.0.mlp.router.weight has shape [8, 16] in the model, [4, 16] in the checkpoint",
        "hidden": "decoder.final_layernorm.bias has shape [32] in the model, [16] in the checkpoint",
        "layers": "decoder.layers.2.input_layernorm.bias of the checkpoint is not in the model",
    }.items():
        assert refused[name]["error"] == "StoreError"
        assert difference in refused[name]["said"]
    assert refused["precision"]["error"] == "ConfigError"
    assert "is torch.float32 in the model, but BF16 in checkpoint step_00000001" in refused["precision"]["said"]


def test_a_window_of_another_layout_gives_way_to_the_newest_dense_checkpoint(tmp_path):
    start, window = replace(BASE, ep=2, precision="bf16"), ("MoEvement", {"window": 2, "dense_overhead": 0.25})
    [first, second], _ = travel(tmp_path, 2, Stop(start, steps=7, policy=window), Stop(replace(start, ep=1), steps=1))
    dense = second["progress"].iteration
    assert 4 <= dense < 7, "a dense checkpoint between windows"
    assert second["came"]["tensors"] == first["history"][dense]


@pytest.mark.slow
def test_stale_experts(tmp_path):
    """What the newest checkpoint holds in older versions arrives in those versions, with their ages."""
    start = replace(BASE, pp=2, ep=2)
    layouts = [replace(BASE, ep=4), replace(BASE, tp=2, ep=2), replace(BASE, pp=4), replace(BASE, pp=2, vpp=2, ep=2)]
    first, again = check_moves(tmp_path, 4, start, layouts, policy=MOC, steps=3)
    stale = [key for key, told in first["left"]["tensors"].items() if told != again["came"]["tensors"][key]]
    assert stale
    assert all(".experts." in key for key in stale)
    assert any(age for row in again["came"]["ages"] for age in row)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [DENSE, MOC], ids=["dense", "moc"])
def test_other_numbers_of_ranks(tmp_path, policy):
    start = replace(BASE, pp=2, ep=2)
    elsewhere = [(2, replace(BASE, ep=2)), (1, BASE), (2, replace(BASE, dist_opt=True))]
    check_moves(tmp_path, 4, start, [replace(BASE, dist_opt=True)], elsewhere=elsewhere, policy=policy, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [DENSE, MOC], ids=["dense", "moc"])
def test_optimizer_and_experts_laid_out_otherwise(tmp_path, policy):
    """bf16 with master weights: sharded or not, GroupedMLP or SequentialMLP."""
    base = replace(BASE, precision="bf16", glu=True)
    start = replace(base, ep=2, dist_opt=True, grouped=True)
    layouts = [
        replace(base, ep=2),
        replace(base, ep=2, grouped=True),
        replace(base, dist_opt=True, overlap_param_gather=True),
        replace(base, pp=2, dist_opt=True),
        replace(base, tp=2, etp=None, dist_opt=True),
        replace(base, tp=2, etp=None, grouped=True),
    ]
    check_moves(tmp_path, 2, start, layouts, policy=policy, steps=3, rel=2e-2)


@pytest.mark.slow
def test_tensor_parallel_gated_units_and_tied_embeddings(tmp_path):
    base = replace(BASE, glu=True, tied=True, shared_experts=True, dense_first=True)
    layouts = [
        replace(base, pp=2, ep=2),
        replace(base, tp=2, pp=2, etp=None),
        replace(base, tp=2, ep=2, dist_opt=True),
        replace(base, ep=4),
    ]
    check_moves(tmp_path, 4, replace(base, tp=2, ep=2, etp=2, dist_opt=True), layouts)


@pytest.mark.slow
def test_latent_attention_and_expert_bias(tmp_path):
    """The router's bias buffers of a layer are in the state files of ranks that have another stage now."""
    base = replace(BASE, mla=True, expert_bias=True)
    first, again = check_moves(tmp_path, 2, replace(base, pp=2), [replace(base, ep=2), replace(base, dist_opt=True)])
    assert len([name for name in again["came"]["buffers"] if name.endswith("expert_bias")]) == BASE.layers
    assert first["left"]["buffers"] == again["came"]["buffers"]
