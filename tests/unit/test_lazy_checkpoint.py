"""The dict that hooks see: a dict in all that can be asked of it, made in full only if it is asked."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from moe_ckpt.callbacks.lightning_state import LazyCheckpoint

STATE = {"weight": 1}
WHOLE = {"epoch": 3, "state_dict": STATE}


class Counted:
    def __init__(self):
        self.times = 0
        self.checkpoint = LazyCheckpoint({"epoch": 3}, self.make)

    def make(self):
        self.times += 1
        return STATE


def saved(c):
    buffer = io.BytesIO()
    torch.save(c, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


READS = {
    "[]": lambda c: {**WHOLE, "state_dict": c["state_dict"]},
    "get": lambda c: {**WHOLE, "state_dict": c.get("state_dict")},
    "pop": lambda c: {**WHOLE, "state_dict": c.pop("state_dict")},
    "setdefault": lambda c: {**WHOLE, "state_dict": c.setdefault("state_dict", 0)},
    "popitem": lambda c: dict([c.popitem(), c.popitem()]),
    "items": lambda c: dict(c.items()),
    "values": lambda c: dict(zip(c, c.values(), strict=True)),
    "dict()": dict,
    "**": lambda c: {**c},
    "update": lambda c: (new := {}, new.update(c))[0],
    "copy": lambda c: c.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "torch.save": saved,
    "|": lambda c: c | {},
    "| behind": lambda c: {} | c,
    "repr": lambda c: eval(repr(c)),
    "==": lambda c: WHOLE if c == WHOLE else None,
    "== behind": lambda c: WHOLE if WHOLE == c else None,  # noqa: SIM300
    "!=": lambda c: None if c != WHOLE else WHOLE,
}


@pytest.mark.parametrize("read", READS)
def test_whoever_looks_sees_a_whole_dict(read):
    counted = Counted()
    found = READS[read](counted.checkpoint)
    assert found == WHOLE
    assert counted.times == 1
    assert not isinstance(found, LazyCheckpoint)


def test_nothing_is_made_for_those_who_do_not_look():
    counted = Counted()
    checkpoint = counted.checkpoint
    checkpoint["mine"] = 4
    checkpoint.update(other=5)
    assert checkpoint["epoch"] == checkpoint.get("epoch") == 3
    assert checkpoint.pop("other") == checkpoint.setdefault("more", 5)
    assert list(checkpoint) == list(checkpoint.keys()) == ["epoch", "state_dict", "mine", "more"]
    assert "state_dict" in checkpoint
    assert len(checkpoint) == 4
    assert checkpoint.marked("mark") == {"epoch": 3, "state_dict": "mark", "mine": 4, "more": 5}
    assert counted.times == 0


def test_the_models_state_is_marked_wherever_a_hook_has_put_it():
    checkpoint = Counted().checkpoint
    checkpoint["current"] = checkpoint["state_dict"]
    checkpoint["state_dict"] = {"averaged": 2}
    assert checkpoint["state_dict"] == {"averaged": 2}
    assert checkpoint.marked("mark") == {"epoch": 3, "state_dict": {"averaged": 2}, "current": "mark"}


def test_what_a_hook_took_out_stays_out():
    checkpoint = Counted().checkpoint
    del checkpoint["state_dict"]
    assert checkpoint.marked("mark") == {"epoch": 3}
    assert checkpoint.get("state_dict") is None
    with pytest.raises(KeyError):
        checkpoint["state_dict"]
