"""Optimizer state is given back to its own class of optimizer only, in checkpoints old and new."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from moe_ckpt.errors import ConfigError
from moe_ckpt.modeling.optimizer_class import class_name
from moe_ckpt.modeling.training_state import TorchTrainingState

NAMES = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SGD"),
)
ALIKE = {("Adam", "RAdam"), ("NAdam", "RAdam")}
"""(stored, running) that nothing but the class tells apart: the same state, and group keys that RAdam does not use."""


def trained(name: str, **options) -> tuple[torch.optim.Optimizer, TorchTrainingState]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer, TorchTrainingState(model, [optimizer])


def stored(name: str, *, old: bool = False, **options) -> tuple[dict, list[str]]:
    _, state = trained(name, **options)
    plain = copy.deepcopy(state.plain())
    if old:
        del plain["optimizers"][0]["class"]
    return plain, [tensor.key for tensor in state.tensors()]


def fresh(name: str, **options) -> TorchTrainingState:
    model = nn.Linear(3, 2, bias=False)
    return TorchTrainingState(model, [getattr(torch.optim, name)(model.parameters(), **options)])


@pytest.mark.parametrize("old", [False, True], ids=["class recorded", "old store"])
def test_every_other_class_of_torch_is_refused_by_name_and_its_own_is_taken(old):
    for there, here in itertools.product(NAMES, NAMES):
        plain, keys = stored(there, old=old)
        if there == here:
            fresh(here).require_loadable(plain, keys)
            continue
        if old and (there, here) in ALIKE:
            continue
        with pytest.raises(ConfigError, match=rf"optimizer 0: .*torch\.optim\.{here}") as caught:
            fresh(here).require_loadable(plain, keys)
        assert old or f"was written with torch.optim.{there}, but" in str(caught.value)


def test_a_refusal_changes_nothing_and_says_what_to_do():
    optimizer, state = trained("SGD", momentum=0.9)
    before = copy.deepcopy(optimizer.state_dict())
    plain, keys = stored("AdamW")
    for ask in (lambda: state.require_loadable(plain, keys), lambda: state.load_plain(plain)):
        with pytest.raises(ConfigError, match=r"torch\.optim\.AdamW.*torch\.optim\.SGD.*weights_from="):
            ask()
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["momentum_buffer"], before["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("old", [False, True], ids=["class recorded", "old store"])
def test_settings_of_one_class_are_no_other_class(old):
    plain, keys = stored("AdamW", old=old, foreach=False, amsgrad=True)
    group = plain["optimizers"][0]["param_groups"][0]
    for added in ("maximize", "capturable", "decoupled_weight_decay"):
        del group[added]  # as an older torch wrote it
    group["initial_lr"] = group["max_lr"] = 0.1  # a scheduler's
    state = fresh("AdamW", fused=True)
    state.require_loadable(plain, keys)
    state.load_plain(plain)
    [kept] = state._optimizers[0].param_groups
    assert kept["fused"] is True
    assert kept["amsgrad"] is True
    assert kept["decoupled_weight_decay"] is True
    assert kept["maximize"] is False
    never_stepped = fresh("AdamW")
    fresh("AdamW").require_loadable(never_stepped.plain(), ["model/weight"])
    plain, keys = stored("SGD", old=old)
    fresh("SGD", momentum=0.9).require_loadable(plain, keys)


def _own(module: str, state_name: str) -> type[torch.optim.Optimizer]:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "gain": 1.0})
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter][state_name] = torch.zeros_like(parameter)

        def step(self, closure=None):
            pass

    Lion.__module__, Lion.__qualname__ = module, "Lion"
    return Lion


def test_a_class_that_only_moved_is_the_same_class():
    model = nn.Linear(3, 2, bias=False)
    before = TorchTrainingState(model, [_own("__main__", "moment")(model.parameters())])
    plain, keys = before.plain(), [tensor.key for tensor in before.tensors()]
    assert plain["optimizers"][0]["class"] == "__main__.Lion"
    TorchTrainingState(model, [_own("pkg.train", "moment")(model.parameters())]).require_loadable(plain, keys)
    with pytest.raises(ConfigError, match=r"__main__\.Lion with state \['moment'\].*pkg\.train\.Lion"):
        TorchTrainingState(model, [_own("pkg.train", "ema")(model.parameters())]).require_loadable(plain, keys)
    AdamW = type("AdamW", (_own("other", "state1"),), {"__module__": "other"})
    optimizer = AdamW(model.parameters())
    assert class_name(optimizer) == "other.AdamW"
    with pytest.raises(ConfigError, match=r"torch\.optim\.AdamW.*other\.AdamW"):
        TorchTrainingState(model, [optimizer]).require_loadable(*stored("AdamW"))
