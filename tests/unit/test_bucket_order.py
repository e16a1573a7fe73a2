"""What a checkpoint says of the order of DDP's buckets, and where they are left alone."""

from __future__ import annotations

import logging
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_ckpt.modeling import bucket_order
from moe_ckpt.modeling.bucket_order import BucketOrder, decode_order, encode_order


class Crossed(nn.Module):
    """Uses its layers in another order than it has them in, so that buckets are laid out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (3, 0, 4, 2, 1):
            x = torch.tanh(self.layers[index](x))
        return x


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _ddp(module: nn.Module | None = None, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(module or Crossed(), bucket_cap_mb=0.01, **options)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 40)).sum().backward()


@pytest.mark.parametrize("size", [1, 2, 100, 20_000])
def test_an_order_comes_back_from_its_text(size):
    order = list(range(size))
    random.Random(size).shuffle(order)
    assert decode_order(encode_order(order), size) == order


def test_the_text_of_a_deep_model_is_short():
    layers = [index for layer in reversed(range(1000)) for index in (12 * layer + each for each in range(12))]
    assert len(encode_order(layers)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        "AAAA",
        encode_order([0, 1]),
        encode_order([0, 1, 2, 3]),
        encode_order([0, 1, 1]),
        encode_order([0, 1, 3]),
        encode_order([0] * 1_000_000),
    ],
)
def test_what_is_no_order_of_three_parameters_is_told(text):
    assert decode_order(text, 3) is None


def test_another_process_lays_its_buckets_out_alike(group):
    first = _ddp()
    order = BucketOrder(first, 3)
    order.note()
    assert order.recorded is None, "before a backward pass nobody knows"
    _step(first)
    order.note()
    assert order.recorded is not None

    torch.manual_seed(1)
    second = _ddp()
    before = {name: value.clone() for name, value in second.state_dict().items()}
    drawn = torch.get_rng_state()
    other = BucketOrder(second, 3)
    other.recorded = order.recorded
    other.arrange()
    assert all(each.grad is None for each in second.parameters())
    assert all(torch.equal(before[name], value) for name, value in second.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    assert second._has_rebuilt_buckets
    _step(second)
    other.note()
    assert other.recorded == order.recorded
    assert decode_order(order.recorded, 10) != sorted(decode_order(order.recorded, 10), reverse=True), (
        "as it is at first"
    )


def test_gradients_that_are_there_stay(group):
    model = _ddp(gradient_as_bucket_view=True)
    noted = BucketOrder(_first := _ddp(), 3)
    _step(_first)
    noted.note()
    for each in model.parameters():
        each.grad = torch.full_like(each, 3.0)
    other = BucketOrder(model, 3)
    other.recorded = noted.recorded
    other.arrange()
    assert all(torch.equal(each.grad, torch.full_like(each, 3.0)) for each in model.parameters())


def test_a_checkpoint_without_it_is_told_of(group, caplog):
    model = _ddp()
    with caplog.at_level(logging.WARNING, "moe_ckpt"):
        for recorded in (None, encode_order([1, 0])):
            order = BucketOrder(model, 3)
            order.recorded = recorded
            order.arrange()
            assert order.recorded is None, "it is not that of these buckets"
    assert ["10 parameters" in each.message for each in caplog.records] == [False, True]
    assert all("last bits" in each.message for each in caplog.records)
    assert not model._has_rebuilt_buckets


def test_where_torch_does_not_tell_the_order_a_warning_comes_once(group, caplog, monkeypatch):
    monkeypatch.setattr(bucket_order, "_REBUILT", "of another release")
    model = _ddp()
    order = BucketOrder(model, 3)
    with caplog.at_level(logging.WARNING, "moe_ckpt"):
        order.note()
        assert not caplog.records, "nothing was reduced yet"
        for _ in range(3):
            _step(model)
            order.note()
    assert ["does not say how DDP lays out" in each.message for each in caplog.records] == [True]
    assert order.recorded is None


def test_another_layout_than_recorded_is_told(group, caplog):
    model = _ddp()
    order = BucketOrder(model, 3)
    order.recorded = encode_order(list(range(10)))
    order.arrange()
    model.reducer._rebuild_buckets()
    order.recorded = encode_order(list(reversed(range(10))))
    _step(model)
    with caplog.at_level(logging.WARNING, "moe_ckpt"):
        order.note()
    assert "not laid out as they were" in caplog.text


def _hooked(model: DistributedDataParallel) -> None:
    next(model.parameters()).register_hook(lambda grad: grad)


def _fused(model: DistributedDataParallel) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


def _compressed(model: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)


def _static(model: DistributedDataParallel) -> None:
    model._set_static_graph()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_hooked, "hooks on parameters"),
        (_fused, "hooks on parameters"),
        (_compressed, "communication hook"),
        (_static, "static_graph"),
    ],
)
def test_what_zeros_would_change_is_left_alone(change, why, group):
    model = _ddp()
    change(model)
    order = BucketOrder(model, 3)
    assert why in order.why_not
    order.recorded = encode_order(list(range(10)))
    order.arrange()
    order.note()
    assert not model._has_rebuilt_buckets
    assert order.recorded is None
    assert BucketOrder(_ddp(), 3).why_not is None


def test_sparse_gradients_are_left_alone(group):
    model = _ddp(nn.Embedding(4, 4, sparse=True))
    assert BucketOrder(model, 3).why_not == "sparse gradients"


def test_a_module_that_calls_itself_sparse_has_ordinary_gradients(group):
    layer = nn.Linear(4, 4)
    layer.sparse = True
    assert BucketOrder(_ddp(layer), 3).why_not is None


def test_where_the_order_does_not_matter_it_is_carried_on(group):
    """Also for a later start on more ranks."""
    for order in (BucketOrder(_ddp(), 2), BucketOrder(Crossed(), 4), BucketOrder(_ddp(find_unused_parameters=True), 4)):
        assert order.why_not is None
        order.recorded = "as it was"
        order.arrange()
        order.note()
        assert order.recorded == "as it was"
