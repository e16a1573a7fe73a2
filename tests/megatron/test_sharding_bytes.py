"""Who writes how many bytes of dense state under expert parallelism, by the sizes of the files of real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron.moc_recount import Store, check, partial, run_cases
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Case, lives

SETUP = Setup(ep=2, layers=2, hidden=64, vocab=512, experts=4, num_microbatches=1)
"""The embedding and its moments, 0.4 MB, are more than a rank's share, and are split by rows."""

SHARDINGS = ("none", "equal", "adaptive")


def bytes_of_ranks(store: Store, key: tuple[int, int]) -> list[int]:
    """What each rank wrote of a checkpoint, headers included."""
    found = [0] * 4
    for path, nbytes, _, _, step, rank in store.manifests[key]["files"]:
        if step == key[1]:
            assert f"rank_{rank:05d}_" in path
            found[rank] += nbytes
    return found


def sizes_on_disk(place: Path, store: Store, key: tuple[int, int]) -> list[int]:
    files = place.glob(f"store/step_{key[1]:08d}/rank_*.safetensors")
    found = [0] * 4
    for path in files:
        found[int(path.name.split("_")[1])] += path.stat().st_size
    return found


@pytest.mark.slow
def test_adaptive_sharding_evens_out_experts_and_dense_state(tmp_path: Path):
    """The peak over ranks of each checkpoint: adaptive <= equal <= none; and all three write the same in sum."""
    cases = [
        Case(name, SETUP, ("MoC", {"k": 1, "selector": "load_aware"}), steps=4, options={"sharding": name})
        for name in SHARDINGS
    ]
    run_cases(lives, cases, tmp_path)
    stores = {case.name: Store.read(tmp_path / case.name) for case in cases}
    for case in cases:
        check(case, tmp_path)
    keys = partial(stores["none"], cases[0])
    assert len(keys) == 2
    for key in [min(stores["none"].manifests), *keys]:
        wrote = {name: bytes_of_ranks(stores[name], key) for name in SHARDINGS}
        for name in SHARDINGS:
            assert wrote[name] == sizes_on_disk(tmp_path / name, stores[name], key)
        assert max(wrote["adaptive"]) <= max(wrote["equal"]) <= max(wrote["none"])
        assert max(wrote["adaptive"]) < 0.9 * max(wrote["equal"]), "the embedding is split"
        assert max(wrote["adaptive"]) < 0.5 * max(wrote["none"])
        total = sum(wrote["none"])
        assert all(abs(sum(wrote[name]) - total) < 0.02 * total for name in SHARDINGS), "but for headers"


@pytest.mark.slow
def test_the_distributed_optimizers_own_sharding_is_kept(tmp_path: Path):
    """Each rank writes the ranges that it updates, whatever ``sharding`` says, and all together write them once."""
    setup = replace(SETUP, dist_opt=True, precision="bf16", grouped=True)
    cases = [Case(name, setup, ("MoC", {"k": 1}), steps=3, options={"sharding": name}) for name in ("none", "adaptive")]
    run_cases(lives, cases, tmp_path)
    stores = [Store.read(tmp_path / case.name) for case in cases]
    for key in stores[0].manifests:
        first, second = (bytes_of_ranks(store, key) for store in stores)
        assert first == second
        if key != min(stores[0].manifests):
            continue
        assert max(first) < 1.35 * min(first), "Megatron cuts its buffers evenly"
    # 2 bytes of weights, 4 of masters and of each of two moments, for each parameter, once; headers and side tensors.
    parameters = parameters_of(setup)
    [complete] = [sum(bytes_of_ranks(stores[0], key)) for key in [min(stores[0].manifests)]]
    assert 14 * parameters <= complete < 14 * parameters + 4 * 60_000


def parameters_of(setup: Setup) -> int:
    attention = 4 * setup.hidden**2 + 4 * setup.hidden
    expert = 2 * setup.hidden * setup.ffn
    layer = attention + setup.experts * (expert + setup.hidden)
    return setup.layers * layer + 2 * setup.vocab * setup.hidden + 2 * setup.hidden


def test_copies_that_write_no_expert_deal_like_the_others(tmp_path: Path):
    """EP2 x DP2 with one expert per rank: of two copies one writes it, and the other must know what that weighs."""
    setup = replace(SETUP, experts=2)
    case = Case("few", setup, ("MoC", {"k": 1}), steps=3)
    run_cases(lives, [case], tmp_path)
    check(case, tmp_path)
    store = Store.read(tmp_path / "few")
    assert sorted(step for _, step in store.manifests) == [1, 2, 3, 3]
    assert all(ranks <= {0, 1} for key in store.manifests for ranks in store.writers(key).values())
