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
    """The embedding alone is more than a rank's share, and no rank writes half of a checkpoint."""
    case = Case("adaptive", SETUP, ("MoC", {"k": 1, "selector": "load_aware"}), steps=4)
    run_cases(lives, [case], tmp_path)
    store = Store.read(tmp_path / case.name)
    check(case, tmp_path)
    keys = partial(store, case)
    assert len(keys) == 2
    for key in [min(store.manifests), *keys]:
        wrote = bytes_of_ranks(store, key)
        assert wrote == sizes_on_disk(tmp_path / case.name, store, key)
        assert max(wrote) < 0.5 * sum(wrote)


@pytest.mark.slow
def test_the_distributed_optimizers_own_sharding_is_kept(tmp_path: Path):
    """Each rank writes the ranges that it updates, and all together write them once."""
    setup = replace(SETUP, dist_opt=True, precision="bf16", grouped=True)
    case = Case("own", setup, ("MoC", {"k": 1}), steps=3)
    run_cases(lives, [case], tmp_path)
    store = Store.read(tmp_path / case.name)
    wrote = bytes_of_ranks(store, min(store.manifests))
    assert max(wrote) < 1.35 * min(wrote), "Megatron cuts its buffers evenly"
    # 2 bytes of weights, 4 of masters and of each of two moments, for each parameter, once; headers and side tensors.
    parameters = parameters_of(setup)
    assert 14 * parameters <= sum(wrote) < 14 * parameters + 4 * 60_000


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
