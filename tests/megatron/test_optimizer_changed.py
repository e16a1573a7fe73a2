"""A Megatron run that comes back with another kind of optimizer is refused, on the same layout and on another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_ckpt.errors import ConfigError
from moe_ckpt.megatron import optimizers
from tests.support.megatron_gpt import Setup
from tests.support.megatron_move import Stop, journey
from tests.support.processes import run_ranks

ADAM = Setup(dropout=0.0, hidden=16, ffn=16, vocab=32, seq=8, layers=2, num_microbatches=2)
SGD = replace(ADAM, optimizer="sgd")
WINDOW = ("MoEvement", {"window": 2})
WARM = "tests.support.megatron_warm"


@pytest.mark.parametrize("policy", [("Dense", {"every_n_steps": 1}), WINDOW], ids=["dense", "window"])
def test_sgd_does_not_go_on_from_adam(tmp_path: Path, policy):
    stops = [
        Stop(replace(ADAM, ep=2), steps=5, policy=policy),
        Stop(replace(SGD, ep=2), policy=policy, resumes=False),
        Stop(SGD, policy=policy, resumes=False),
        Stop(replace(ADAM, ep=2), policy=policy, steps=1),
    ]
    if policy is WINDOW:  # another layout cannot open the window at all
        del stops[2]
    for view in run_ranks(journey, 2, str(tmp_path), stops, preload=WARM):
        for refused in view[1:-1]:
            assert refused["error"] == "ConfigError"
            assert refused["untouched"]
            for part in ("torch.optim.AdamW", "torch.optim.SGD", "weights_from="):
                assert part in refused["said"]
        assert view[-1]["progress"].restored


class FusedAdam(torch.optim.AdamW):
    adam_w_mode = 1


class L2Adam(torch.optim.AdamW):
    adam_w_mode = 0


L2Adam.__name__ = L2Adam.__qualname__ = "FusedAdam"


def plain_of(monkeypatch, kind: type[torch.optim.Optimizer]) -> tuple[object, dict]:
    monkeypatch.setattr(optimizers, "leaves", lambda optimizer: optimizer)
    inner = kind([torch.zeros(1)])
    found = [SimpleNamespace(optimizer=inner)]
    return found, {"optimizer_classes": optimizers.read_classes(found)}


TORCH = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def test_builds_of_one_optimizer_are_alike_and_kinds_are_not(monkeypatch):
    alike = {(FusedAdam, torch.optim.AdamW), (L2Adam, torch.optim.Adam)}
    for there in (*TORCH, FusedAdam, L2Adam):
        for here in (*TORCH, FusedAdam, L2Adam):
            stored, running = plain_of(monkeypatch, there)[1], plain_of(monkeypatch, here)[0]
            if there is here or {(there, here), (here, there)} & alike:
                optimizers.require_same_kind(running, stored)
            else:
                with pytest.raises(ConfigError, match=r"SGD|Adam"):
                    optimizers.require_same_kind(running, stored)


def test_ranks_without_an_optimizer_refuse_nothing(monkeypatch):
    _, stored = plain_of(monkeypatch, torch.optim.SGD)
    optimizers.require_same_kind([], stored)
    optimizers.require_same_kind(plain_of(monkeypatch, torch.optim.Adam)[0], {"optimizer_classes": []})
