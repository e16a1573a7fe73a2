"""A dense step in memory opens on another number of ranks, and gives what the same step on storage gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.ledger.retention import RetentionPolicy
from tests.integration.crash_run import Run
from tests.integration.lives import (
    KILLED,
    differences,
    events,
    live_ranks,
    load,
    output,
    place,  # noqa: F401 - a fixture
    placed,
    shards_read,
    split_lives,
)
from tests.integration.test_memory_kills import in_memory, left
from tests.integration.test_memory_layouts import DDP, FSDP2
from tests.integration.test_memory_rarely_stored import RARELY, restored, stored
from tests.support.deleting import delete_tree

MOVES = {
    "ddp 2 to 1": (DDP, 1),
    "ddp 2 to 4": (DDP, 4),
    "fsdp2 2 to 4": (FSDP2, 4),
    "fsdp2 4 to 2": (replace(FSDP2, ranks=4), 2),
}
FAST = ("ddp 2 to 1",)


def moved(run: Run, ranks: int) -> Run:
    """The run on so many ranks, each a node: those that there were before keep their memory, others have none."""
    if ranks > 1:
        return replace(run, ranks=ranks)
    return replace(run, ranks=1, memory=run.memory and str(Path(run.memory, "node_0")), replicas=0)


def same_step_on_storage(run: Run, step: int, place: Path) -> Run:  # noqa: F811
    """The run as a kill leaves it that has written each step to storage, up to ``step``, and has no memory."""
    kept = {**run.callback, "retention": RetentionPolicy(keep_every_n_steps=1)}
    twin = replace(placed(run, place, "twin"), memory=None, replicas=0, to_storage=1, watched=False, callback=kept)
    assert KILLED in live_ranks(replace(twin, crash=("compute", step + 3))), output(twin)
    for newer in Path(twin.store).glob("step_*"):
        if int(newer.name.split("_")[1]) > step:
            delete_tree(newer)
    assert stored(twin) == step
    return twin


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in MOVES])
def test_another_number_of_ranks_gets_from_memory_what_storage_would_give(name, place):  # noqa: F811
    """On one rank, the other node is lost with its memory, too."""
    layout, ranks = MOVES[name]
    run = replace(layout, to_storage=RARELY, watched=True, sampler="recoverable", samples=32 * layout.ranks)
    run = in_memory(run, place)
    assert KILLED in live_ranks(replace(run, crash=("compute", 6))), output(run)
    before = stored(run)
    after = moved(run, ranks)
    assert live_ranks(after) == [0] * ranks, output(run)
    step = restored(run)
    assert step > before, "storage has only what the first life began with"
    assert shards_read(after) == [[]] * ranks, "of all lives"
    twin = same_step_on_storage(run, step, place)
    twice = moved(twin, ranks)
    assert live_ranks(twice) == [0] * ranks, output(twin)
    assert restored(twin) == step
    for rank in range(ranks):
        assert list(differences(load(after, rank), load(twice, rank))) == [], rank
        assert losses(after, rank) == losses(twice, rank), rank
    assert len(losses(after, 0)) > 2
    gone = {f"node_{node}" for node in range(ranks, layout.ranks)}
    assert [path for path in left(after) if not gone & set(path.parts)] == [], "but for nodes that have no rank now"


def losses(run: Run, rank: int) -> list[tuple[int, str]]:
    """(step, loss) of the batches of the last life."""
    life = split_lives(events(run, rank))[-1]
    return [(line["step"], line["loss"]) for line in life if line["event"] == "batch"]
