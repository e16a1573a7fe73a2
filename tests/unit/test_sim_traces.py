"""Recorded failures: read as written, or refused with file, line and field."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from benchmarks import failure_trace
from moe_ckpt.errors import ConfigError
from moe_ckpt_sim.failures.failures import FailureEvent
from moe_ckpt_sim.failures.traces import Trace

HEADER = "time,event,node\n"
RNG = np.random.Generator(np.random.PCG64(0))


@pytest.fixture
def written(tmp_path):
    def write(text, **options):
        path = tmp_path / "trace.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return Trace(str(path), **options)

    return write


def events(trace, nodes=12, most=1000):
    return list(islice(trace.events(RNG, nodes), most))


def test_a_trace_is_read_as_written(written):
    trace = written(HEADER + "412.5,remove,7\n1030,add,7\n1030,remove,0\n2e3,remove,7\n")
    expected = [
        FailureEvent(412.5, 7),
        FailureEvent(1030.0, 7, joins=True),
        FailureEvent(1030.0, 0),
        FailureEvent(2000.0, 7),
    ]
    assert events(trace) == events(trace) == expected
    assert trace.mean_secs is None
    assert events(Trace(recorded=tuple(expected))) == expected


def test_spreadsheets_comments_blanks_and_spaces(written):
    text = '\ufeff# made by hand\r\n\r\ntime, event, node\r\n1, remove, 3\r\n # later\r\n\r\n2,"add",3\r\n'
    assert events(written(text)) == [FailureEvent(1.0, 3), FailureEvent(2.0, 3, joins=True)]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", None, "empty; the first row must be time,event,node"),
        ("# nothing\n\n", None, "empty"),
        (HEADER, None, "no event in it"),
        ("1,remove,3\n", 1, "the first row must be time,event,node, not '1,remove,3'"),
        ("time,node,event\n", 1, "the first row must be"),
        (HEADER + "1,remove\n", 2, "2 fields; there must be 3"),
        (HEADER + "1,remove,3,4\n", 2, "4 fields"),
        (HEADER + "5,remove,3\n4,add,3\n", 3, "time 4.0 is before 5.0 of an earlier row"),
        (HEADER + "-1,remove,3\n", 2, "time must be a finite number of at least 0"),
        (HEADER + "1e999,remove,3\n", 2, "time must be a finite number"),
        (HEADER + "nan,remove,3\n", 2, "time 'nan' is not a number of seconds"),
        (HEADER + "00:15,remove,3\n", 2, "time '00:15' is not a number"),
        (HEADER + "1_0,remove,3\n", 2, "time '1_0' is not a number"),
        (HEADER + "1,fail,3\n", 2, "event 'fail' must be 'remove', 'add' or 'kill'"),
        (HEADER + "1,remove,three\n", 2, "node 'three' is not a whole number"),
        (HEADER + "1,remove,-3\n", 2, "node '-3' is not a whole number from 0 on"),
        (HEADER + "1,remove,3.0\n", 2, "node '3.0' is not a whole number"),
        (HEADER + "1,remove,3\n\n# x\n2,remove,3\n", 5, "node 3 is removed, but is away already"),
        (HEADER + "1,remove,3\n2,add,4\n", 3, "node 4 is added, but is there"),
        (HEADER + "1,remove,3\n2,add,3\n3,add,3\n", 4, "node 3 is added, but is there"),
    ],
)
def test_bad_rows_are_refused_when_the_trace_is_made(written, text, line, said):
    with pytest.raises(ConfigError) as caught:
        written(text)
    assert said in str(caught.value)
    assert "trace.csv" in str(caught.value)
    assert line is None or f"trace.csv, line {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((FailureEvent(5.0, 1), FailureEvent(4.0, 2)), "event 2 of the trace given: time 4.0 is before 5.0"),
        ((FailureEvent(-1.0, 1),), r"event 1 of the trace given\(time=-1.0\)"),
        ((FailureEvent(float("nan"), 1),), r"event 1 of the trace given\(time=nan\)"),
        ((FailureEvent(1.0, -1),), r"event 1 of the trace given\(node=-1\)"),
        ((FailureEvent(1.0, 1, joins=True),), "node 1 is added, but is there"),
    ],
)
def test_bad_events_are_refused_too(given, said):
    with pytest.raises(ConfigError, match=said):
        Trace(recorded=given)


def test_a_node_that_training_does_not_have_is_named_before_the_first_event(written):
    trace = written(HEADER + "1,remove,3\n2,remove,12\n3,remove,15\n4,add,15\n")
    with pytest.raises(ConfigError, match=r"trace.csv, line 4: node 15, but training runs on 12 nodes \(0 to 11\)"):
        trace.events(RNG, 12)
    with pytest.raises(ConfigError, match="node 15, but training runs on 15 nodes"):
        trace.events(RNG, 15)
    assert len(events(trace, nodes=16)) == 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Trace, "give one of both"),
        (lambda: Trace("a.csv", (FailureEvent(1.0, 1),)), "give one of both"),
        (lambda: Trace("nowhere/a.csv"), "nowhere/a.csv.*cannot be read"),
        (lambda: Trace("package:other.csv"), "'package:other.csv'.*this package has gcp_like_6h.csv"),
        (lambda: Trace("package:../failures/gcp_like_6h.csv"), "this package has"),
        (
            lambda: Trace(recorded=(FailureEvent(9.0, 1),), period_secs=8),
            "until 9.0 s; period_secs must not be below that",
        ),
        (lambda: Trace(recorded=(FailureEvent(9.0, 1),), period_secs=0), r"Trace\(period_secs=0\)"),
        (lambda: Trace(recorded=(FailureEvent(0.0, 1),), repeat=True), "without end; give period_secs"),
    ],
)
def test_bad_settings_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_what_is_no_text_is_refused(written):
    with pytest.raises(ConfigError, match="cannot be read as CSV"):
        written(b"\x80\x02\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read as CSV"):
        written("time,event,node\n" + "x" * 200_000)


def test_a_file_that_changed_meanwhile_is_refused(written):
    trace = written(HEADER + "1,remove,3\n")
    with pytest.raises(ConfigError):
        written(HEADER + "1,remove,3\n2,remove,3\n")
    with pytest.raises(ConfigError, match="line 3: node 3 is removed, but is away already"):
        events(trace)


def test_it_repeats_with_all_nodes_back(written):
    text = HEADER + "1,remove,3\n2,remove,5\n4,add,3\n"
    again = events(written(text, repeat=True), most=8)
    assert again == [
        FailureEvent(1.0, 3), FailureEvent(2.0, 5), FailureEvent(4.0, 3, joins=True), FailureEvent(4.0, 5, joins=True),
        FailureEvent(5.0, 3), FailureEvent(6.0, 5), FailureEvent(8.0, 3, joins=True), FailureEvent(8.0, 5, joins=True),
    ]  # fmt: skip
    spaced = events(written(text, repeat=True, period_secs=100), most=5)
    assert spaced[3:] == [FailureEvent(100.0, 5, joins=True), FailureEvent(101.0, 3)]
    assert len(events(written(text, period_secs=100))) == 3


# The trace that comes with the package


def test_the_shipped_trace():
    found = events(Trace("package:gcp_like_6h.csv", period_secs=6 * 3600))
    removed = [event for event in found if not event.joins]
    assert len(removed) == 24
    assert 0 < removed[0].at_secs < found[-1].at_secs < 6 * 3600
    mean = np.diff([event.at_secs for event in removed]).mean()
    assert mean == pytest.approx(15 * 60, rel=0.05)
    away = {}
    for event in found:
        if event.joins:
            assert 180 <= event.at_secs - away[event.node] <= 900
        away[event.node] = event.at_secs


def test_the_shipped_trace_is_what_its_script_makes():
    assert failure_trace.PATH.read_text() == failure_trace.text()
    assert failure_trace.text().startswith("# Synthetic")


def test_its_config():
    hydra = pytest.importorskip("hydra")
    from hydra.utils import instantiate
    from omegaconf.errors import MissingMandatoryValue

    with hydra.initialize_config_dir(str(failure_trace.PATH.parent), version_base="1.3"):
        shipped = instantiate(hydra.compose("gcp_like_6h"))
        other = instantiate(hydra.compose("trace", [f"path={failure_trace.PATH}"]))
        with pytest.raises(MissingMandatoryValue):
            _ = hydra.compose("trace").path
    assert events(shipped) == events(other)
    assert len(events(shipped)) == 48
