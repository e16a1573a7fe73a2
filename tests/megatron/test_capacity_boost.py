"""The capacity boost on the real Megatron-Core: which tokens experts get more, in one pass and over a failure."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.test_routing import ONE, WARM, built_with, moe_layers
from tests.support import megatron_gpt
from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import Case, attached
from tests.support.processes import run_ranks, start_ranks

HALF = 500_000
"""Of ``parts_of``: 50 % more."""
BEHIND = 1000

PASSES: dict[str, tuple[Setup, dict[str, Any]]] = {
    "by probability": (ONE, {"moe_expert_capacity_factor": 1.0}),
    "by position": (ONE, {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}),
    "no room": (ONE, {"moe_expert_capacity_factor": 0.5}),
    "dropless": (ONE, {}),
    "probabilities first": (ONE, {"moe_router_pre_softmax": True}),
    "expert bias": (Setup(layers=2, num_microbatches=2, expert_bias=True), {}),
    "groups": (
        Setup(layers=2, num_microbatches=2, experts=8, expert_bias=True),
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
}


def boost_of(left: list[int]) -> Any:
    from moe_ckpt.boost.layer import LayerBoost

    rows = torch.tensor(left)
    return LayerBoost(rows, torch.zeros_like(rows), HALF)


def one_pass(setup: Setup, options: dict[str, Any], padded: int = 0) -> dict[str, Any]:
    """The first router, alone, with uneven weights: its result without a boost, with one, and with one used up."""
    from moe_ckpt.boost.megatron import RouterPort

    built = built_with(setup, **options)
    router = moe_layers(built)[0][1].router
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(0.3, -0.3, setup.experts))
    hidden = torch.randn(setup.seq, setup.micro_batch, setup.hidden, generator=generator)
    hidden[:, :, 0] += 0.5
    mask = None
    if padded:
        mask = torch.zeros(setup.seq, setup.micro_batch, dtype=torch.bool)
        mask[-padded:] = True
    found: dict[str, Any] = {}

    def passed(name: str) -> None:
        with torch.no_grad():
            found[name] = router(hidden) if mask is None else router(hidden, mask)

    passed("before")
    logits = torch.nn.functional.linear(hidden, router.weight).reshape(-1, setup.experts)
    wanted = torch.bincount(logits.argsort(dim=-1, descending=True)[:, :2].flatten())
    chosen = found["before"][1].sum(dim=0)
    busiest = int(wanted.argmax()) if "moe_expert_capacity_factor" in options else int(chosen.argsort()[1])
    boost = boost_of([BEHIND if e == busiest else 0 for e in range(setup.experts)])
    port = RouterPort("first", router)
    assert port.refusal() is None
    port.attach(boost)
    passed("boosted")
    boost.commit()
    router.eval()
    passed("evaluating")
    router.train()
    port.detach()
    used_up = RouterPort("first", router)
    used_up.attach(boost_of([0] * setup.experts))
    passed("used up")
    used_up.detach()
    passed("after")
    left = int(boost.backlog[busiest])
    return {"found": found, "logits": logits, "expert": busiest, "left": left, "mask": mask}


def in_training(setup: Setup, left: list[int] | None, **options: Any) -> dict[str, Any]:
    """Three steps, a boost in every layer; left: None without. Losses, fingerprint and what is left."""
    from moe_ckpt.boost.megatron import RouterPort

    built = built_with(setup, **options)
    boosts, ports = [], []
    for at, layer in moe_layers(built) if left is not None else ():
        boosts.append(boost_of(left))
        ports.append(RouterPort(str(at), layer.router))
        ports[-1].attach(boosts[-1])
    losses = []
    for step in range(3):
        losses.append(megatron_gpt.train_step(built, step)[0])
        for boost in boosts:
            boost.commit()
    for port in ports:
        port.detach()
    left_now = [boost.backlog.tolist() for boost in boosts]
    return {"losses": losses, "print": megatron_gpt.fingerprint(built), "left": left_now}


def refusals() -> dict[str, str | None]:
    from megatron.core.transformer.moe import router as module

    from moe_ckpt.boost.megatron import RouterPort

    router = moe_layers(built_with(ONE, moe_expert_capacity_factor=0.5))[0][1].router
    told = {"capacity": RouterPort("x", router).refusal()}
    router.config.moe_pad_expert_input_to_capacity = True
    told["padded"] = RouterPort("x", router).refusal()
    router.config.moe_expert_capacity_factor = None
    told["dropless"] = RouterPort("x", router).refusal()
    router.config.moe_router_fusion = True
    told["fused"] = RouterPort("x", router).refusal()
    router.config.moe_router_fusion, router.routing_type = False, "sinkhorn"
    told["sinkhorn"] = RouterPort("x", router).refusal()
    router.routing_type = "none"
    del router.router_replay
    told["older"] = RouterPort("x", router).refusal()
    told["replaced"] = str(module.apply_router_token_dropping.__module__)
    return told


RECOMPUTED = {
    "full": ({"recompute": True}, {}),
    "selective": ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
}


def one_rank(rank: int, world_size: int) -> dict[str, Any]:
    seen: dict[str, Any] = {name: one_pass(*case) for name, case in PASSES.items()}
    seen["padding"] = one_pass(ONE, {}, padded=6)
    seen["padding, capacity"] = one_pass(ONE, {"moe_expert_capacity_factor": 1.0}, padded=6)
    seen["refusals"] = refusals()
    for dropping in ({}, {"moe_expert_capacity_factor": 1.0}):
        of = "capacity" if dropping else "dropless"
        seen[of, "without"] = in_training(ONE, None, **dropping)
        seen[of, "used up"] = in_training(ONE, [0] * 4, **dropping)
        seen[of, "boosted"] = in_training(ONE, [9, 60, 0, 0], **dropping)
        for name, (changed, options) in RECOMPUTED.items():
            setup = Setup(**{**vars(ONE), **changed})
            seen[of, name] = in_training(setup, [9, 60, 0, 0], **dropping, **options)
    return seen


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    [result] = run_ranks(one_rank, 1, preload=WARM)
    return result


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", ["by probability", "by position", "no room", "padding, capacity"])
def test_dropped_tokens_are_put_back_within_what_others_leave(seen, case):
    result = seen[case]
    expert, mask = result["expert"], result["mask"]
    (probs, before), (weights, after) = result["found"]["before"], result["found"]["boosted"]
    factor = PASSES[case][1]["moe_expert_capacity_factor"] if case in PASSES else 1.0
    capacity = -(-int(ONE.seq * ONE.micro_batch * 2 * factor) // 4)
    assert int(before[:, expert].sum()) == capacity, "it is full"
    extra = int(after[:, expert].sum()) - capacity
    unused = int((capacity - before.sum(dim=0)).clamp(min=0).sum())
    order = result["logits"].argsort(dim=-1, descending=True)[:, :2]
    chose = (order == expert).any(dim=-1)
    dropped = chose & ~before[:, expert]
    if mask is not None:
        dropped &= ~mask.reshape(-1)
    assert extra == min(capacity // 2, unused, int(dropped.sum()))
    assert (extra > 0) == (case != "no room")
    assert BEHIND - result["left"] == extra
    others = [e for e in range(4) if e != expert]
    assert torch.equal(after[:, others], before[:, others])
    assert int(after.sum()) <= 4 * capacity
    added = (after & ~before)[:, expert]
    assert not (added & ~dropped).any()
    full = result["logits"].gather(1, order).softmax(dim=-1)
    share = torch.zeros_like(probs).scatter(1, order, full)
    assert torch.allclose(weights, share * after, atol=1e-6), "the weights are the router's own"
    left_out = dropped & ~added
    if case == "by position" and left_out.any():
        assert added.nonzero().max() < left_out.nonzero().min()
    elif left_out.any() and added.any():
        assert share[added, expert].min() >= share[left_out, expert].max()


@pytest.mark.parametrize("case", ["dropless", "probabilities first", "expert bias", "groups", "padding"])
def test_without_dropping_the_nearest_tokens_choose_it_too(seen, case):
    result = seen[case]
    expert = result["expert"]
    (_, before), (weights, after) = result["found"]["before"], result["found"]["boosted"]
    real = torch.ones(len(before), dtype=torch.bool) if result["mask"] is None else ~result["mask"].reshape(-1)
    count = int(before[real][:, expert].sum())
    added = (after & ~before)[:, expert]
    assert int(added.sum()) == count // 2 == BEHIND - result["left"] > 0
    assert not added[~real].any()
    assert (after.sum(dim=1) == before.sum(dim=1)).all(), "each token has as many experts"
    assert not (before & ~after)[:, expert].any()
    if case in ("dropless", "padding"):
        shown = result["logits"].masked_fill(~after, -torch.inf).softmax(dim=-1)
        assert torch.allclose(weights, shown, atol=1e-6), "no bias in the weights"
        margin = result["logits"].masked_fill(~before, torch.inf).min(dim=-1).values - result["logits"][:, expert]
        rest = real & ~before[:, expert] & ~added
        assert margin[added].max() <= margin[rest].min()
    if case == "groups":
        groups = after.reshape(-1, 4, 2).any(dim=-1).sum(dim=-1)
        assert (groups <= 2).all(), "no token is sent to more groups than the router allows"


@pytest.mark.parametrize("case", [*PASSES, "padding", "padding, capacity"])
def test_a_router_is_as_it_was_afterwards_and_in_evaluation(seen, case):
    found = seen[case]["found"]
    assert same(found["boosted"], found["before"]) == (case == "no room")
    for name in ("evaluating", "used up", "after"):
        assert same(found[name], found["before"]), name


@pytest.mark.parametrize("of", ["capacity", "dropless"])
def test_training_repeats_the_choice_in_recompute_and_a_used_up_boost_changes_no_bit(seen, of):
    assert seen[of, "without"]["losses"] == seen[of, "used up"]["losses"]
    assert seen[of, "without"]["print"] == seen[of, "used up"]["print"]
    assert seen[of, "boosted"]["losses"] != seen[of, "without"]["losses"]
    assert seen[of, "boosted"]["left"] != [[9, 60, 0, 0]] * 2
    for name in RECOMPUTED:
        assert seen[of, name] == seen[of, "boosted"], name


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("padded", "moe_pad_expert_input_to_capacity gives each expert the same number of rows"),
        ("fused", "Train without moe_router_fusion"),
        ("sinkhorn", "Choose another moe_router_load_balancing_type"),
        ("older", "it has no router_replay"),
        ("capacity", None),
        ("dropless", None),
    ],
)
def test_a_router_that_cannot_says_what_would_make_it_work(seen, case, said):
    assert seen["refusals"][case] is None if said is None else said in seen["refusals"][case]


# --- over failures, EP2 x DP2 ---

EXPERT_DATA = Setup(ep=2, layers=2, num_microbatches=2)
CASES = {
    "capacity": Setup(**{**vars(EXPERT_DATA), "capacity_factor": 1.0}),
    "dropless": EXPERT_DATA,
}


class Watched:
    """Tokens beyond each expert's ordinary share, recounted from what a router is given and what it returns."""

    def __init__(self, built: megatron_gpt.Built) -> None:
        self.extra = torch.zeros(built.setup.layers, built.setup.experts, dtype=torch.int64)
        self._factor = built.setup.capacity_factor
        for at, layer in moe_layers(built):
            layer.router.register_forward_hook(lambda m, x, out, at=at: self._note(at, m, x[0], out[1]))

    def _note(self, at: int, router: Any, hidden: torch.Tensor, routing_map: torch.Tensor) -> None:
        counts = routing_map.sum(dim=0)
        if self._factor is not None:
            self.extra[at] += (counts - -(-int(routing_map.shape[0] * 2 * self._factor) // 4)).clamp(min=0)
            return
        logits = torch.nn.functional.linear(hidden.detach(), router.weight.detach()).reshape(len(routing_map), -1)
        best = logits.argsort(dim=-1, descending=True)[:, :2]
        # Below 0 where an expert gave tokens to another: one that lost none, or has made up for them on this rank.
        self.extra[at] += (counts - torch.bincount(best.flatten(), minlength=4)).clamp(min=0)

    def take(self) -> list[list[int]]:
        found, self.extra = self.extra.tolist(), torch.zeros_like(self.extra)
        return found


def life(rank: int, world_size: int, root: str, case: Case, seed: int, kill: int | None) -> None:
    """Train, and write down each iteration; kill: iteration in which rank 1 is killed."""
    built = megatron_gpt.build(case.setup, seed)
    ckpt = attached(built, case, os.path.join(root, "store"))
    with open(os.path.join(root, f"rank_{rank}.jsonl"), "a") as log:
        progress = ckpt.resume()
        fault = ckpt.session.run_ledger.tokens.faults[-1:]
        lacking = fault[0].lacking.tolist() if fault and fault[0].lacking is not None else None
        log.write(json.dumps({"begin": progress.iteration, "lacking": lacking}) + "\n")
        built.consumed_samples = progress.consumed_samples
        watched = Watched(built)
        for iteration in range(progress.iteration + 1, case.steps + 1):
            loss = megatron_gpt.forward_backward(built, iteration - 1)
            if (rank, iteration) == (1, kill):
                os.kill(os.getpid(), signal.SIGKILL)
            made, _ = megatron_gpt.update(built)
            record = ckpt.after_step(iteration, consumed_samples=built.consumed_samples, updated=made)
            line = {"step": iteration, "loss": loss and loss.hex(), "owed": record.owed_tokens, "extra": watched.take()}
            log.write(json.dumps(line) + "\n")
            log.flush()
        ckpt.finish()
        log.write(json.dumps({"end": ckpt.last.owed_tokens}) + "\n")


def lives_of(root: Path, rank: int) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    for line in (root / f"rank_{rank}.jsonl").read_text().splitlines():
        told = json.loads(line)
        if "begin" in told:
            found.append([])
        found[-1].append(told)
    return found


@pytest.mark.parametrize("of", list(CASES))
@pytest.mark.quick("capacity")
def test_four_ranks_make_up_what_was_lost_and_repeat_it_after_a_kill(tmp_path: Path, of: str):
    """The first kill leaves experts stale, the second comes in the middle of the boost; then the same, undisturbed."""
    boost = {"capacity_boost": 0.2}
    stale = Case("stale", CASES[of], ("MoEtion", {"experts": 1, **boost}), steps=14)
    exact = Case("exact", CASES[of], ("MoEtion", {"experts": 4, **boost}), steps=14)
    for case, seed, kill in ((stale, 1, 6), (exact, 11, 9), (exact, 21, None)):
        ended = start_ranks(life, 4, str(tmp_path), case, seed, kill, preload=WARM)
        killed = [outcome.rank for outcome in ended if outcome.exitcode == -signal.SIGKILL]
        assert 1 in killed if kill else all(outcome.ok for outcome in ended), ended
    ranks = [lives_of(tmp_path, rank) for rank in range(4)]
    lacking = torch.tensor(ranks[0][1][0]["lacking"])
    assert lacking.sum() > 0
    assert not any(map(any, ranks[0][2][0]["lacking"])), "what came back the second time was exact"
    extra = torch.zeros_like(lacking)
    steps = sorted({line["step"] for line in ranks[0][1] + ranks[0][2] if "step" in line})
    owed_after = {ranks[0][1][0]["begin"]: int(lacking.sum())}
    for step in steps:
        for rank in range(4):
            told = [line for part in ranks[rank][1:] for line in part if line.get("step") == step]
            assert all((line["loss"], line["extra"]) == (told[0]["loss"], told[0]["extra"]) for line in told)
            extra += torch.tensor(told[0]["extra"])
        assert (extra <= lacking).all(), "nobody makes up more than it lost"
        owed_after[step] = int((lacking - extra).sum())
    assert extra.sum() > 0
    for part in ranks[0][1:]:
        for line in part[2:]:
            if "step" in line:  # agreed on a step later
                assert line["owed"] == owed_after[line["step"] - 1]
    assert {lives[2][-1]["end"] for lives in ranks} == {owed_after[14]}, "alike on all ranks"
