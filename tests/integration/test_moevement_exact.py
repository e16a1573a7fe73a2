"""MoEvement under kill -9: the run that comes back by computing a window again ends like the one that never failed.

Equal means to the last bit: parameters, buffers, optimizer state, schedulers, random numbers, and the loss of every
batch, those of replayed steps included.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.storage import open_storage
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    assert_promises_kept,
    assert_same_run,
    assert_store_sound,
    live,
    output,
    place,  # noqa: F401 - a fixture
    placed,
)

BASE = Run(None, policy=("moevement", 3), epochs=3, callback={"when_busy": "wait"})


@pytest.mark.parametrize("step", [1, 2, 5, 9, 14])
@pytest.mark.quick("2", "9")
def test_killed_while_computing(place, step):  # noqa: F811
    run = placed(BASE, place)
    assert live(replace(run, crash=("compute", step))) == KILLED
    assert live(run) == 0, output(run)
    assert_store_sound(run, ended=True)
    assert_promises_kept(run)
    assert_same_run(run)


FROZEN = replace(BASE, policy=("moevement", 5), model={"stacked": False}, trainer={"gradient_clip_val": 0.3})


@pytest.mark.parametrize("stacked", [True, False])
def test_what_is_left_out_while_replaying_changes_nothing(place, stacked):  # noqa: F811
    """Gradients of whole experts, updates of all that is not anchored yet, and so the norm that clipping goes by."""
    run = placed(replace(FROZEN, model={"stacked": stacked}), place)
    assert live(replace(run, crash=("compute", 14))) == KILLED
    assert live(run) == 0, output(run)
    assert_same_run(run)


@pytest.mark.parametrize("kind", ["shrinking", "shrinking-silently"])
def test_weights_that_change_at_a_batchs_end_are_put_back_after_that(place, kind):  # noqa: F811
    run = placed(replace(BASE, kind=kind), place)
    assert live(replace(run, crash=("compute", 14))) == KILLED
    assert live(run) == 0, output(run)
    assert_same_run(run)


@pytest.mark.parametrize("stacked", [True, False])
def test_compute_weights_are_saved_as_kernels_read_them(place, stacked):  # noqa: F811
    """Under bf16 autocast: linear layers in 2 bytes, norms in 4, and still equal to the last bit."""
    run = placed(replace(BASE, model={"stacked": stacked}, trainer={"precision": "bf16-mixed"}), place)
    assert live(replace(run, crash=("compute", 20))) == KILLED
    reader = StoreReader(open_storage(run.store))
    newest = reader.manifest(reader.directories()[0])
    types = {}
    for groups in reader.index(newest).replay.values():
        types |= {key: group[0].entry.dtype for key, group in groups.items() if key.startswith("model/")}
    assert {key: dtype for key, dtype in types.items() if ".norm." in key}
    assert all(dtype == ("F32" if ".norm." in key else "BF16") for key, dtype in types.items()), types
    assert live(run) == 0, output(run)
    assert_same_run(run)


MIXED = replace(BASE, model={"stacked": False}, trainer={"precision": "bf16-mixed"})


@pytest.mark.parametrize("run", [replace(MIXED, beside=("own average",)), replace(MIXED, kind="target-at-end")])
def test_who_reads_weights_beside_the_kernels_reads_them_whole(place, run):  # noqa: F811
    """An average of one's own, in a callback and in the module: under bf16 autocast too it is of the fp32 weights."""
    run = placed(run, place)
    assert live(replace(run, crash=("compute", 14))) == KILLED
    assert live(run) == 0, output(run)
    assert "is saved in full precision" in output(run)
    assert_same_run(run)
