"""What a session tells its observers, and that it goes on alike whether and however somebody listens."""

from __future__ import annotations

import pytest

from moe_ckpt.policies import Dense
from moe_ckpt.run.events import (
    Closed,
    Joined,
    Opened,
    Resumed,
    SnapshotBegan,
    SnapshotEnded,
    StepEnded,
    TrainingBegins,
    TrainingEnded,
)
from moe_ckpt.storage import LocalStorage, StoreLock
from tests.unit.engine_parts import Life, failing, manifests


def test_the_events_of_a_life_come_in_order_to_every_observer(tmp_path):
    one, both = [], []
    observers = (one.append, lambda event: both.append(("first", event)), lambda event: both.append(("second", event)))
    with Life(LocalStorage(tmp_path), policy=Dense(every_n_steps=2), observers=observers) as life:
        life.session.training_begins()
        life.go(3, settle=True)
        last = life.session.catch_up(life.records[-1])
        life.finish(save_last=False)
    assert [type(event) for event in one] == [
        *(Opened, TrainingBegins),
        *(Joined, StepEnded),
        *(Joined, SnapshotBegan, StepEnded),
        *(Joined, SnapshotEnded, StepEnded),
        *(TrainingEnded, Closed, Closed),
    ]
    assert both == [(name, event) for event in one for name in ("first", "second")]
    opened = one[0]
    assert (opened.run.catalog, opened.generation) == (life.model, 0)
    assert [event.record for event in one if isinstance(event, StepEnded)] == life.records
    assert [event.record for event in one if isinstance(event, TrainingEnded)] == [last]
    assert [event.nbytes for event in one if isinstance(event, SnapshotBegan)] == [
        record.nbytes for record in life.records if record.begun
    ]
    assert [event.finished for event in one if isinstance(event, Closed)] == [True, False]  # the first one counts


def test_a_failed_snapshot_and_an_adopted_step_are_told(tmp_path):
    events = []
    with Life(failing(tmp_path, 1), policy=Dense(), observers=[events.append]) as life:
        life.go(3, settle=True)
    assert [event.committed for event in events if isinstance(event, SnapshotEnded)] == [False, True]
    with Life(LocalStorage(tmp_path), policy=Dense(), observers=[events.append]) as life:
        life.session.resume_from(manifests(tmp_path)[-1])
    assert events[-2:] == [Resumed(3), Closed(finished=False)]


def test_an_observer_that_fails_at_the_end_does_not_keep_the_store(tmp_path):
    def fail(event):
        if isinstance(event, Closed):
            raise RuntimeError("observer")

    life = Life(LocalStorage(tmp_path), policy=Dense(), observers=[fail])
    life.session.open()
    life.go(1)
    with pytest.raises(RuntimeError, match="observer"):
        life.session.close()
    assert not life.session.is_open
    with StoreLock(LocalStorage(tmp_path), "the next one"):
        pass
