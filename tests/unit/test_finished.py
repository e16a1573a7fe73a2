"""finished.json: what is written comes back, what is large or cannot be held is left out, edited ones are refused."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch

from moe_ckpt.comm.communicator import SoloCommunicator
from moe_ckpt.errors import DamagedError, FormatVersionError
from moe_ckpt.format.run_records import FINISHED_NAME, Finished
from moe_ckpt.format.sealed import seal, unseal
from moe_ckpt.reading.reader import StoreReader
from moe_ckpt.run.documents import read_finished, write_finished
from moe_ckpt.storage import LocalStorage
from tests.support.store_builder import TinyRun

STATES = {
    "best": {"score": torch.tensor(0.25), "none": torch.empty(0), "paths": {"a.ckpt": torch.tensor([1, 2])}},
    "a/b": {"array": np.arange(3), "pair": (1, float("inf"))},
    "large": {"weights": torch.zeros(1 << 15, dtype=torch.float64)},
    "unknown": {"object": object()},
}
WHOLE = Finished("ab12", 7, 2, "max_steps=7", {"max_steps": 7, "max_epochs": -1}, STATES)


def test_what_is_written_comes_back():
    found = Finished.decode(WHOLE.encode(), "f")
    assert (found.run_id, found.step, found.generation, found.reason) == ("ab12", 7, 2, "max_steps=7")
    assert found.limits == {"max_steps": 7, "max_epochs": -1}
    assert found.callbacks.keys() == {"best", "a/b"}
    assert torch.equal(found.callbacks["best"]["score"], torch.tensor(0.25))
    assert found.callbacks["best"]["none"].shape == (0,)
    assert torch.equal(found.callbacks["best"]["paths"]["a.ckpt"], torch.tensor([1, 2]))
    assert np.array_equal(found.callbacks["a/b"]["array"], np.arange(3))
    assert found.callbacks["a/b"]["pair"] == (1, float("inf"))


WRONG = [None, True, 1.5, -3, 1 << 70, "x", [], [None], {}, {"$": "tensor", "v": "no"}, {"$": "x"}, {"0/score": 1}]


@pytest.mark.parametrize("name", ["run_id", "step", "generation", "limits", "callbacks", "tensors", "kind"])
def test_edited_ones_raise_the_typed_error_or_are_taken(name):
    body = unseal(WHOLE.encode(), "f")
    for value in (*WRONG, "missing"):
        edited = copy.deepcopy(body)
        edited[name] = value
        if value == "missing":
            del edited[name]
        try:
            Finished.decode(seal(edited), "f")
        except (DamagedError, FormatVersionError):
            continue
        assert name not in ("step", "generation", "kind") or isinstance(value, int)


def test_a_tensor_that_is_not_what_it_says_is_refused():
    body = unseal(WHOLE.encode(), "f")
    for row in (["F32", [2], "AAAA"], ["F32", [1], "####"], ["X", [], ""], ["F32", [-1], "AAAAAA=="], [], "x"):
        with pytest.raises(DamagedError):
            Finished.decode(seal(body | {"tensors": {**body["tensors"], "0/score": row}}), "f")


@pytest.fixture
def run(tmp_path):
    run = TinyRun(tmp_path)
    run.save(1)
    run.save(2)
    return LocalStorage(tmp_path), StoreReader(LocalStorage(tmp_path))


def test_it_is_about_the_checkpoint_that_it_names(run):
    storage, reader = run
    comm = SoloCommunicator()
    second, first = (reader.manifest(directory) for directory in reader.directories())
    assert read_finished(storage, comm, second) is None
    write_finished(storage, second.directory, "max_steps=1", {}, {})
    write_finished(storage, second.directory, "max_steps=2", {"max_steps": 2}, {})
    assert read_finished(storage, comm, second).reason == "max_steps=2"
    assert read_finished(storage, comm, first) is None


def test_a_damaged_one_is_told_and_passed_over(run, tmp_path, caplog):
    storage, reader = run
    second = reader.manifest(reader.directories()[0])
    write_finished(storage, second.directory, "max_steps=2", {}, {})
    path = tmp_path / FINISHED_NAME
    path.write_bytes(path.read_bytes()[:-3])
    assert read_finished(storage, SoloCommunicator(), second) is None
    assert "finished.json" in caplog.text
    assert "The run is treated as unfinished" in caplog.text


def test_one_that_cannot_be_written_ends_nothing(run, caplog):
    storage, _ = run
    with caplog.at_level(logging.WARNING, "moe_ckpt"):
        write_finished(storage, "step_00000009", "max_steps=9", {}, {})
    assert f"cannot record in {storage.root} that this run is finished: " in caplog.text
    assert not storage.exists(FINISHED_NAME)
