"""What operators weigh reaches the policies that go by it, and no others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from moe_ckpt.policies import AnyOf, Dense, Guarded, MoC, MoEtion, MoEvement, PolicyContext, Wrapper
from moe_ckpt.policies.base import Measured
from moe_ckpt.storage import LocalStorage
from tests.support.constants import Unprobed
from tests.unit.builders import experts_in
from tests.unit.engine_parts import MODEL, Life, ThreadRanks, TinyState, manifests, run_threads


@dataclass(frozen=True)
class Watched(Wrapper):
    """A policy that notes what it is told."""

    told: list[PolicyContext] = field(default_factory=list)

    def plan(self, context):
        self.told.append(context)
        return super().plan(context)


def told(root, policy, steps=3, change=None, **settings):
    watched = Watched(policy)
    with Life(LocalStorage(root), policy=watched, **settings) as life:
        if change is not None:
            life.state.change = change
        life.go(steps, settle=True)
    return watched.told


@pytest.mark.parametrize(
    "policy", [MoEtion(), Guarded(MoEtion()), AnyOf([MoC(), MoEtion()])], ids=["alone", "guarded", "any of"]
)
def test_every_operator_weighs_what_its_tensors_do(tmp_path, policy):
    every = sum(tensor.local.nbytes for tensor in TinyState(MODEL).tensors())
    for context in told(tmp_path, policy):
        assert {context.model.sizes[op.id].full for op in MODEL.experts} == {96}  # 4 x 3 floats, and as many of exp_avg
        assert sum(size.full for size in context.model.sizes.values()) == every
        assert context.run.window is None


@pytest.mark.parametrize("policy", [Dense(), MoC(k=1), MoEtion(experts=1)], ids=str)
def test_policies_that_do_not_go_by_sizes_are_not_told(tmp_path, policy):
    assert all(not context.model.sizes for context in told(tmp_path, policy))


def test_experts_are_known_to_be_divided_where_the_framework_shards_the_state(tmp_path):
    def sharded(tensors):
        return [replace(tensor, replicated=False) for tensor in tensors]

    assert all(context.model.placement.experts_whole for context in told(tmp_path / "plain", MoEtion()))
    assert not any(
        context.model.placement.experts_whole for context in told(tmp_path / "fsdp", MoEtion(), change=sharded)
    )


def test_rates_that_a_run_measures_decide_how_many_experts_it_saves(tmp_path):
    """Storage and iterations are what they are here: only a budget far too small and one far too large are certain."""
    for fraction, count in ((1e-12, 2), (1.0, 8)):
        root = tmp_path / str(count)
        measured = []
        for context in told(root, Unprobed(), steps=4, budget_fraction=fraction):
            measured.append(context.measured)
            if fraction == 1.0 and context.measured.persist_bytes_per_sec is not None:
                quick = replace(context, measured=replace(context.measured, recent_iteration_secs=1e3))
                assert len(experts_in(Unprobed().plan(quick).full)) == 8
        assert measured[0] == Measured(update_secs=measured[0].update_secs), "no lap and no commit yet"
        assert measured[-1].persist_bytes_per_sec > 0
        first, *rest = (len(experts_in(tuple(_saved_at(m)))) for m in manifests(root))
        assert first == 8
        if fraction < 1:
            assert rest == [count] * 3


def _saved_at(manifest):
    return [op for op, record in manifest.operators.items() if record.step == manifest.step]


def test_two_ranks_save_the_same_by_their_own_measurements(tmp_path):
    ranks = ThreadRanks(2)

    def body(comm):
        watched = Watched(MoEtion())
        with Life(LocalStorage(tmp_path), policy=watched, comm=comm, budget_fraction=0.5) as life:
            life.go(6, settle=True)
        return [(context.measured, tuple(sorted(context.model.sizes))) for context in watched.told], [
            record.experts_saved for record in life.records
        ]

    first, second = run_threads(ranks, body)
    assert first == second


@pytest.mark.parametrize(
    ("window", "said"),
    [(1, "step 1: all operators are saved in one step, as a dense"), (3, "step 2: a sparse window of 3 steps begins")],
)
def test_a_window_is_announced_by_its_length(tmp_path, caplog, window, said):
    caplog.set_level("INFO", "moe_ckpt")
    with Life(LocalStorage(tmp_path), policy=MoEvement(window)) as life:
        life.go(3, settle=True)
    assert said in caplog.text
    assert "1 steps" not in caplog.text
