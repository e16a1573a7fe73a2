"""A fault that leaves the process alive, under real Lightning: what memory held comes back, recounted independently."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.tiers import host_memory
from tests.integration.crash_run import Run, StopHere, build, loaders
from tests.integration.lives import (
    assert_store_sound,
    place,  # noqa: F401 - a fixture
    placed,
)
from tests.integration.recount import Recount
from tests.support.tensor_reads import tensor_bytes_read

RUN = Run(None, policy=("moc", 1), epochs=2, hashes=True, callback={"when_busy": "wait"})
FAULT_AT = 7


@pytest.fixture(autouse=True)
def no_memory_of_other_tests():
    host_memory.release_host_memory()
    yield
    host_memory.release_host_memory()


def life(run: Run, fault_at: int | None = None) -> list[dict]:
    """One life with a trainer, a module and a callback of its own: what its recorder noted."""
    trainer, module, recorder = build(run)
    original = module.training_step

    def training_step(batch, batch_idx):
        loss = original(batch, batch_idx)
        if trainer.fit_loop.epoch_loop.total_batch_idx == fault_at:
            raise StopHere("in the middle of a step")
        return loss

    module.training_step = training_step
    if fault_at is None:
        trainer.fit(module, *loaders(run))
    else:
        with pytest.raises(StopHere):
            trainer.fit(module, *loaders(run))
    return recorder.lines


def versions_by_hash(begin: dict, recount: Recount) -> dict[tuple[int, int], int]:
    """The step whose state each expert came back in, told by its bytes alone (parameters and both moments)."""
    found = {}
    for layer in range(2):
        for expert in range(4):
            name = f"expert/{layer}/{expert}"
            steps = [step for step, hashes in recount.hashes.items() if hashes[name] == begin["hashes"][name]]
            assert steps, f"{name} came back as it never was"
            found[layer, expert] = max(steps)
    return found


def fault_and_return(run: Run, *, keep: bool) -> tuple[dict[tuple[int, int], int], Recount, list[dict]]:
    """(versions that came back, the recount after it, what the second life noted)."""
    recount = Recount(2, 4)
    for event in life(run, FAULT_AT):
        if event["event"] == "batch":
            recount.batch([event])
    if not keep:
        assert host_memory.release_host_memory() > 0
    events = life(run)
    begin = events[0]
    assert begin["step"] == FAULT_AT
    assert begin["hashes"]["non_expert"] == recount.hashes[FAULT_AT]["non_expert"]
    versions = versions_by_hash(begin, recount)
    recount.resume(FAULT_AT, versions)
    assert begin["faults"] == recount.faults
    assert begin["applied"] == recount.applied
    for event in events:
        if event["event"] == "batch":
            recount.batch([event])
    assert events[-1]["lost"] == recount.lost
    assert events[-1]["faults"] == recount.faults
    assert events[-1]["plt"] == recount.lost / recount.routed
    assert_store_sound(run, ended=True)
    assert host_memory.release_host_memory() == 0, "the run ended well, so its memory is free again"
    return versions, recount, events


@pytest.mark.parametrize(
    ("snapshot_k", "model"), [(4, {}), (2, {}), (4, {"stacked": False})], ids=["all-held", "two-held", "listed"]
)
@pytest.mark.quick("two-held", "listed")
def test_experts_held_in_memory_come_back_newer_than_storage_has_them(snapshot_k, model, place):  # noqa: F811
    run = replace(RUN, options={"snapshot_k": snapshot_k}, model=model)
    with_memory, recount, _ = fault_and_return(placed(run, place), keep=True)
    without, without_memory, events = fault_and_return(placed(run, place, "again"), keep=False)
    stored = events[0]["manifest"]["operators"]
    assert without == {(layer, e): stored[f"expert/{layer}/{e}"][0] for layer in range(2) for e in range(4)}
    assert all(with_memory[expert] >= without[expert] for expert in without)
    newer = {expert for expert in without if with_memory[expert] > without[expert]}
    assert all(with_memory[expert] == FAULT_AT for expert in newer)
    # Of each layer's 4 experts one is as new as the checkpoint in any case, and snapshot_k - 1 are held besides.
    assert len(newer) == 2 * (snapshot_k - 1)
    assert recount.lost < without_memory.lost
    assert (recount.lost == 0) == (snapshot_k == 4)


def test_the_recovered_run_goes_on_as_if_nothing_had_happened(place):  # noqa: F811
    """All experts held: the losses after the fault are, bit for bit, those of the run that never failed."""
    run = replace(RUN, options={"snapshot_k": 4})
    whole = {e["index"]: e["loss"] for e in life(placed(run, place, "whole")) if e["event"] == "batch"}
    _, _, events = fault_and_return(placed(run, place), keep=True)
    after = {e["index"]: e["loss"] for e in events if e["event"] == "batch"}
    assert after == {index: loss for index, loss in whole.items() if index >= FAULT_AT}


@pytest.mark.parametrize("policy", [("dense", 1), ("moc", 4)], ids=["dense", "moc-all"])
def test_a_policy_that_saves_everything_comes_back_without_storage(policy, place, caplog):  # noqa: F811
    """Memory keeps the newest committed snapshot whatever it holds, so that no tensor is read."""
    run = replace(RUN, policy=policy)
    whole = {e["index"]: e["loss"] for e in life(placed(run, place, "whole")) if e["event"] == "batch"}
    run = placed(run, place)
    life(run, FAULT_AT)
    with tensor_bytes_read() as read, caplog.at_level("INFO", "moe_ckpt"):
        events = life(run)
    assert read == []
    [plan] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("recovery plan")]
    assert plan.endswith(f"as of step {FAULT_AT} from memory: this job's processes")
    after = {e["index"]: e["loss"] for e in events if e["event"] == "batch"}
    assert after == {index: loss for index, loss in whole.items() if index >= FAULT_AT}
    assert_store_sound(run, ended=True)
    assert host_memory.release_host_memory() == 0
