"""Words of torch's tensors: every move of memory and every writing is seen, and nothing is read where it may not be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from moe_ckpt.format import tensor_words
from moe_ckpt.format.gathering import WORD, Words
from moe_ckpt.format.tensor_words import counters, counts, gradients_of, lying, requiring
from moe_ckpt.modeling.trainable import Frozen, Gradients


def some():
    """Of all kinds that a model and its optimizers hold."""
    torch.manual_seed(0)
    flat = torch.randn(64)
    return [
        nn.Parameter(torch.randn(4, 4)),
        nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False),
        torch.tensor(3.0),
        flat[8:24].view(4, 4),
        nn.Parameter(flat[24:40]),
        torch.from_numpy(np.arange(6.0)),
        torch.randn(4, 4).t(),
        nn.Parameter(torch.randn(8)).detach(),
    ]


def its_data_is_another(tensor):
    tensor.data = tensor.data.clone()


def its_data_begins_elsewhere(tensor):
    tensor.data = tensor.new_empty(100)[10:].as_strided(tensor.shape, tensor.stride())


def its_data_is_shifted_within_the_storage(tensor):
    tensor.data = tensor.as_strided((1,), (1,), tensor.storage_offset() + (tensor.numel() > 1)).data


def it_is_set(tensor):
    with torch.no_grad():
        tensor.set_(torch.empty_like(tensor).untyped_storage(), 0, tensor.shape)


def its_storage_is_made_larger(tensor):
    tensor.untyped_storage().resize_(1 << 20)


def it_is_swapped(tensor):
    torch.utils.swap_tensors(tensor, type(tensor)(tensor.detach().clone()))


MOVES = [its_data_is_another, its_data_begins_elsewhere, it_is_set, it_is_swapped]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("at", [0, 2])
def test_each_move_is_seen_where_it_is_looked_for(move, at):
    tensors = some()
    found = lying(tensors)
    assert found is not None
    assert found.same()
    assert found.same(np.arange(len(tensors)))
    assert found.same(np.array([], dtype=np.int64))
    move(tensors[at])
    assert not found.same()
    assert not found.same(np.array([1, at]))
    assert found.same(np.array([each for each in range(len(tensors)) if each != at]))
    again = lying(tensors)
    assert again is not None
    assert again.same()


@pytest.mark.parametrize(
    "move", [its_storage_is_made_larger, its_data_is_shifted_within_the_storage], ids=lambda move: move.__name__
)
def test_a_move_that_leaves_the_storage_the_same_is_seen(move):
    tensor = nn.Parameter(torch.randn(4))
    found = lying([tensor])
    move(tensor)
    assert found is not None
    assert not found.same()


def test_writing_moves_nothing():
    tensors = some()
    found = lying(tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1)
            tensor.grad = None
    assert found is not None
    assert found.same()


def test_counts_are_versions():
    tensors = some()
    addresses = counters(tensors)
    assert addresses.all()
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            for _ in range(number):
                tensor.mul_(2)
    expected = [tensor._version for tensor in tensors]
    assert counts(addresses).tolist() == expected
    assert len(set(expected)) > 4


def test_writing_to_a_view_or_to_what_it_is_of_counts_for_both():
    base = nn.Parameter(torch.randn(4, 4))
    block = base.detach()
    [address] = counters([block])
    with torch.no_grad():
        base[1:].zero_()
        torch._foreach_add_([base], 1.0)
    assert counts(np.array([address])).tolist() == [2] == [block._version]


def test_tensors_without_a_counter_have_no_address():
    with torch.inference_mode():
        uncounted = torch.zeros(3)
    assert counters([torch.zeros(2), uncounted])[1] == 0
    assert counters([]).tolist() == []


@pytest.mark.parametrize("field", ["tensor", "storage", "offset", "data"])
def test_nothing_is_read_where_it_is_not_what_torch_says(field, monkeypatch):
    known = tensor_words._layout()
    assert known is not None
    monkeypatch.setattr(tensor_words, "_layout", lambda: replace(known, **{field: getattr(known, field) + 8}))
    assert lying(some()) is None


def test_no_count_is_read_where_it_is_not_what_torch_says(monkeypatch):
    monkeypatch.setattr(tensor_words, "_COUNT_AT", 8)
    assert not counters(some()).any()
    tensor_words._layout.cache_clear()
    assert tensor_words._layout() is None, "no place of the counts shows"
    tensor_words._layout.cache_clear()


@pytest.mark.parametrize("without", ["meta", "sparse"])
def test_tensors_that_lie_nowhere(without):
    odd = torch.zeros(3, device="meta") if without == "meta" else torch.eye(3).to_sparse()
    found = lying([torch.zeros(3), odd])
    assert found is None or found.same()


def test_elsewhere_nothing_is_read(monkeypatch):
    monkeypatch.setattr(tensor_words, "_IS_READABLE", False)
    tensor_words._layout.cache_clear()
    try:
        assert lying(some()) is None
        assert not counters(some()).any()
    finally:
        tensor_words._layout.cache_clear()


def test_changed_words_are_found_in_every_part_of_a_long_list():
    """They are read some thousands at a time; the last part is short."""
    memory = np.arange(20_000, dtype=np.uint64)
    places = np.random.default_rng(0).permutation(20_000)
    words = Words([memory], memory.ctypes.data + WORD * places)
    assert words.same()
    for at in (0, 8191, 8192, 19_999):
        memory[places[at]] += np.uint64(7)
        found, values = words.others()
        assert (found.tolist(), values.tolist()) == ([at], [places[at] + 7])
        assert not words.same()
        words.renew(found, values)
        assert words.same()
    memory[places[[3, 9000]]] += np.uint64(1)
    assert words.others()[0].tolist() == [3, 9000]
    assert words.same(np.array([5])), "asked about others only"
    assert not words.same(np.array([9000]))


def test_what_lies_behind_an_object_by_chance_misleads_nobody():
    """Words behind the C++ object are others in each process; here in each round."""
    known = tensor_words._layout()
    between = []
    for count in range(200):
        between.append([torch.zeros(count % 7 + 1, 3) for _ in range(count)][::3])  # the heap gets holes
        tensor_words._layout.cache_clear()
        assert tensor_words._layout() == known


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_whether_a_gradient_is_required_is_seen_each_time(at):
    """Of parameters that were made with one, and without, of a plain tensor, and of a parameter that is a view."""
    tensors = some()
    found = requiring(tensors)
    assert found is not None
    for _ in range(3):
        assert found.same()
        tensors[at].requires_grad_(not tensors[at].requires_grad)
        assert not found.same()
        again = requiring(tensors)
        assert again is not None
        found = again


def test_training_changes_nothing_of_what_is_required():
    tensors = some()
    found = requiring(tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(2)
    sum(each.square().sum() for each in tensors if each.requires_grad).backward()
    assert tensors[0].grad is not None
    tensors[0].grad = None
    assert found is not None
    assert found.same()


@pytest.mark.parametrize(("field", "more"), [("required", -8), ("bit", 1)])
def test_no_gradient_is_looked_for_where_it_is_not_what_torch_says(field, more, monkeypatch):
    known = tensor_words._gradient_layout()
    assert known is not None
    changed = replace(known, **{field: getattr(known, field) + more})
    monkeypatch.setattr(tensor_words, "_gradient_layout", lambda: changed)
    assert requiring(some()) is None


@pytest.mark.parametrize("is_readable", [True, False])
def test_what_is_frozen_and_thawed_is_named(is_readable, monkeypatch):
    if not is_readable:
        monkeypatch.setattr(tensor_words, "requiring", lambda tensors: None)
    parameters = {str(at): nn.Parameter(torch.randn(2), requires_grad=at != 1) for at in range(4)}
    frozen = Frozen()
    first = frozen.names(parameters)
    assert first == ["1"]
    assert frozen.names(parameters) is first
    parameters["1"].requires_grad_(True)
    parameters["3"].requires_grad_(False)
    second = frozen.names(parameters)
    assert second == ["3"]
    for changed in ("2", "2", "0"):
        parameters[changed].requires_grad_(not parameters[changed].requires_grad)
        frozen.names(parameters)
    assert frozen.names(parameters) == ["0", "3"]
    third = frozen.names(parameters)
    (parameters["1"] * 1).sum().backward()
    parameters["2"].register_hook(lambda gradient: gradient)
    assert frozen.names(parameters) is third
    assert frozen.names({"0": parameters["0"]}) == ["0"]


def test_what_autograd_notes_besides_lets_parameters_be_asked_one_by_one():
    parameters = {"a": nn.Parameter(torch.randn(2)), "b": nn.Parameter(torch.randn(2), requires_grad=False)}
    frozen = Frozen()
    names = frozen.names(parameters)
    torch.utils.swap_tensors(parameters["a"], nn.Parameter(torch.randn(2)))  # another object behind the same tensor
    assert frozen.names(parameters) is names
    parameters["a"].requires_grad_(False)
    assert frozen.names(parameters) == ["a", "b"]
    torch.utils.swap_tensors(parameters["a"], nn.Parameter(torch.randn(2)))
    assert frozen.names(parameters) == ["b"]


def asked(tensors):
    return [tensor.grad is None for tensor in tensors]


def test_whether_there_is_a_gradient_is_seen_each_time():
    tensors = [tensor.requires_grad_(tensor.dtype.is_floating_point) for tensor in some() if tensor.is_leaf]
    tensors.append(nn.Parameter(torch.randn(2), requires_grad=False))
    found = gradients_of(tensors)
    assert found is not None
    chosen = np.random.default_rng(0)
    for _ in range(20):
        assert found.absent().tolist() == asked(tensors)
        those = [tensor for tensor in tensors if tensor.requires_grad and chosen.random() < 0.5]
        if those:
            torch.stack([(tensor * 2).sum().double() for tensor in those]).sum().backward()
        for tensor in tensors:
            if tensor.grad is not None and chosen.random() < 0.3:
                tensor.grad = None
    assert not all(asked(tensors))


def test_nothing_is_said_of_gradients_of_tensors_that_were_swapped_or_noted_since():
    tensors = [nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2), requires_grad=False)]
    for change in (lambda: tensors[1].requires_grad_(True), lambda: its_note_is_another(tensors[0])):
        found = gradients_of(tensors)
        assert found is not None
        assert found.absent() is not None
        change()
        assert found.absent() is None


def its_note_is_another(tensor):
    torch.utils.swap_tensors(tensor, nn.Parameter(tensor.detach().clone()))


@pytest.mark.parametrize(("field", "more"), [("gradient", 8), ("nothing", 8)])
def test_gradients_are_not_looked_for_where_they_are_not_what_torch_says(field, more, monkeypatch):
    known = tensor_words._gradient_layout()
    assert known is not None
    changed = replace(known, **{field: getattr(known, field) + more})
    monkeypatch.setattr(tensor_words, "_gradient_layout", lambda: changed)
    tensors = [nn.Parameter(torch.randn(2)) for _ in range(3)]
    tensors[1].sum().backward()
    assert gradients_of(tensors) is None


@pytest.mark.parametrize("is_readable", [True, False])
def test_trained_parameters_without_a_gradient_are_named(is_readable, monkeypatch):
    made = []
    read = tensor_words.gradients_of
    answer = read if is_readable else lambda those: None
    monkeypatch.setattr(tensor_words, "gradients_of", lambda those: made.append(1) or answer(those))
    parameters = {str(at): nn.Parameter(torch.randn(2), requires_grad=at != 1) for at in range(4)}
    gradients = Gradients()
    for _ in range(2):
        assert gradients.missing(parameters) == ["0", "2", "3"]
    (parameters["0"] * parameters["3"]).sum().backward()
    assert gradients.missing(parameters) == ["2"]
    parameters["1"].requires_grad_(True)
    parameters["2"].requires_grad_(False)
    for _ in range(2):
        assert gradients.missing(parameters) == ["1"]
    assert gradients.missing({"2": parameters["2"], "1": parameters["1"]}) == ["1"]
    assert len(made) == (3 if is_readable else 2)


def test_parameters_that_are_swapped_at_every_step_are_asked_one_by_one(monkeypatch):
    made = []
    read = tensor_words.gradients_of
    monkeypatch.setattr(tensor_words, "gradients_of", lambda those: made.append(1) or read(those))
    parameters = {"a": nn.Parameter(torch.randn(2)), "b": nn.Parameter(torch.randn(2))}
    gradients = Gradients()
    for _ in range(5):
        parameters["a"].grad = torch.zeros(2)
        assert gradients.missing(parameters) == ["b"]
        parameters["a"].grad = None  # what is swapped must have none
        its_note_is_another(parameters["a"])
    assert len(made) == 1
