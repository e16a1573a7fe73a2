"""What ranks say of what they wrote: put together by joining bytes, it says of all what each said of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_ckpt.format.manifest import FileRecord, Part, StateRecord, encode_part, shard_path, state_path
from moe_ckpt.format.sealed import Fragment
from moe_ckpt.ledger.coverage import PRIME, Box
from moe_ckpt.slices.snapshot import Acknowledgement, acknowledge, decode_boxes, encode_boxes, names_in

DIRECTORY = "step_00000007"


def of_rank(rank, kinds, cover):
    files = [FileRecord(shard_path(DIRECTORY, rank, kind), 10 + rank, 8, "d", 7, rank) for kind in kinds]
    state = StateRecord(state_path(DIRECTORY, rank), 5, "s", rank)
    return files, state, acknowledge(files, state, cover)


def joined(acknowledgements):
    columns = zip(*(each.columns for each in acknowledgements), strict=True)
    return Acknowledgement(*(b"".join(parts) for parts in columns))


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(["expert", "non_expert"])), st.integers(0, PRIME - 1)), min_size=1, max_size=9
    )
)
def test_all_say_together_what_each_said(ranks):
    told = [of_rank(rank, sorted(kinds), cover) for rank, (kinds, cover) in enumerate(ranks)]
    found = joined([each for _, _, each in told])
    assert len(found.freshness) == len(ranks)
    assert found.causes == ()
    assert found.cover == sum(cover for _, cover in ranks) % PRIME
    paths = {f"{DIRECTORY}/{name}" for lines in found.lines.values() for name in names_in(lines)}
    files = tuple(record for records, _, _ in told for record in records)
    states = tuple(state for _, state, _ in told)
    assert paths == {record.path for record in (*files, *states)}
    named, raw = encode_part(
        "r", 7, 0, len(ranks), files=found.file_rows, states=found.state_rows, operators=Fragment([])
    )
    assert Part.decode(raw, named.path) == Part("r", 7, 0, len(ranks), files, states, ())


def test_what_failed_is_told_rank_by_rank():
    _, _, good = of_rank(0, ["expert"], 5)
    found = joined([good, Acknowledgement.failed(1, "disk, full"), Acknowledgement.failed(2, 'he said "no"\n')])
    assert found.causes == ("rank 1: disk, full", 'rank 2: he said "no"\n')
    assert len(found.freshness) == 3
    assert found.lines.keys() == {"expert", "state"}


def test_its_size_does_not_grow_with_the_model():
    assert sum(map(len, of_rank(123, ["expert", "non_expert"], PRIME - 1)[2].columns)) < 400


def test_boxes_come_back_of_all_ranks():
    boxes = [("model/w", Box((0, 1), (2, 3))), ('model/"', Box((), ()))]
    assert decode_boxes(encode_boxes(boxes) + encode_boxes([]) + encode_boxes(boxes)) == boxes * 2
    assert decode_boxes(b"") == []
