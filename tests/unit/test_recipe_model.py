"""The recipe's model: sizes, routing, and that it learns, repeats and is recognised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule

from moe_ckpt.boost.layer import LayerBoost, parts_of
from moe_ckpt.boost.ports import AttributePort, boost_ports
from moe_ckpt.modeling.discover import find_moe_layers
from moe_ckpt.modeling.routing import RoutingCounter
from recipes.gpt_moe_lightning.model import (
    Experts,
    GPTMoE,
    GPTMoEConfig,
    GPTMoELightning,
    MoELayer,
    drop_over_capacity,
    load_balancing_loss,
)

TINY = GPTMoEConfig(vocab_size=17, context=8, layers=2, hidden=8, heads=2, experts=4, top_k=2)
PEC_SMALL = GPTMoEConfig(vocab_size=50257, context=1024, layers=12, hidden=768, heads=12, experts=8, top_k=1)


def parameters(config: GPTMoEConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPTMoE(config).parameters())


def test_gpt2_moe_small_has_the_papers_323_million_parameters():
    h = 768
    norms, attention, mlp = 4 * h, 4 * h * h + 4 * h, 8 * h * h + 5 * h
    by_hand = 50257 * h + 1024 * h + 12 * (norms + attention) + 6 * mlp + 6 * (8 * mlp + 8 * h) + 2 * h
    assert parameters(PEC_SMALL) == by_hand == 322_818_816
    assert round(parameters(PEC_SMALL) / 1e6) == 323


def test_moe_layers_sit_in_every_other_block():
    kinds = [isinstance(block.mlp, MoELayer) for block in GPTMoE(GPTMoEConfig(layers=4)).blocks]
    assert kinds == [False, True, False, True]


def test_experts_equal_a_loop_over_tokens():
    torch.manual_seed(0)
    experts = Experts(TINY)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(5, 8), torch.rand(5, 2)
    index = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 4], [4, 4]])  # 4 = no expert
    expected = torch.zeros(5, 8)
    for t in range(5):
        for s in range(2):
            if (e := int(index[t, s])) < 4:
                up = torch.nn.functional.gelu(experts.up_proj[e] @ x[t] + experts.up_bias[e], approximate="tanh")
                expected[t] += weights[t, s] * (experts.down_proj[e] @ up + experts.down_bias[e])
    torch.testing.assert_close(experts(x, index, weights), expected)
    assert torch.equal(experts(x, index, weights)[4], torch.zeros(8))


def test_balancing_loss_is_one_when_even_and_e_when_all_go_to_one():
    even = torch.tensor([[0, 1], [2, 3]])
    assert load_balancing_loss(torch.full((2, 4), 0.25), even).item() == pytest.approx(1)
    one = torch.zeros(2, 4)
    one[:, 2] = 1
    assert load_balancing_loss(one, torch.tensor([[2], [2]])).item() == pytest.approx(4)


def test_capacity_drops_late_tokens_and_second_choices_first():
    # 4 tokens, k = 2, 4 experts, factor 1: two places per expert. Expert 0 is wanted by three first
    # choices and one second choice: tokens 0 and 1 get in.
    chosen = torch.tensor([[0, 1], [0, 1], [0, 2], [3, 0]])
    kept = drop_over_capacity(chosen, 4, 1.0)
    assert kept.tolist() == [[0, 1], [0, 1], [4, 2], [3, 4]]


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_an_expert_that_is_behind_gets_more_and_the_rest_stays_what_it_was(capacity_factor):
    torch.manual_seed(1)
    layer = MoELayer(replace(TINY, capacity_factor=capacity_factor, init_std=1.0))
    torch.nn.init.normal_(layer.gate.weight)
    model = torch.nn.ModuleDict({"moe": layer})
    found = find_moe_layers(model)
    tokens = torch.randn(2, 64, 8)

    def counts():
        counter = RoutingCounter(model, found)
        layer(tokens)
        counter.close()
        return counter.take().result().applied[0]

    before = counts()
    wanted = torch.bincount(layer.gate(tokens.flatten(0, 1))[1].flatten(), minlength=4)
    behind = int(wanted.argmax() if capacity_factor else wanted.argmin())
    left = torch.tensor([100 if e == behind else 0 for e in range(4)])
    boost = LayerBoost(left, torch.zeros_like(left), parts_of(0.25))
    port = boost_ports(found)[0]
    assert isinstance(port, AttributePort)
    port.attach(boost)
    after = counts()
    boost.commit()
    extra = after[behind] - before[behind]
    within = min(16, 256 - before.sum(), int(wanted[behind]) - 64) if capacity_factor else before[behind] // 4
    assert extra == 100 - boost.backlog[behind] == within
    assert extra > 0
    assert after.sum() == before.sum() + (extra if capacity_factor else 0)
    if capacity_factor:
        assert before[behind] == 64
        assert after.sum() <= 256
    port.detach()
    assert (counts() == before).all()


def test_it_is_causal():
    model = GPTMoE(TINY).eval()
    a = torch.randint(0, 17, (1, 8))
    b = a.clone()
    b[0, 5:] = (b[0, 5:] + 1) % 17
    assert torch.equal(model(a)[0][:, :5], model(b)[0][:, :5])
    assert not torch.equal(model(a)[0][:, 5:], model(b)[0][:, 5:])


def test_it_learns_and_repeats_bit_for_bit():
    def losses() -> list[float]:
        torch.manual_seed(3)
        module = GPTMoELightning(TINY, {"lr": 1e-2, "warmup_steps": 1})
        optimizer = module.configure_optimizers()["optimizer"]
        batch = torch.arange(9).repeat(4, 1)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            out = module.training_step(batch, 0)
            out["loss"].backward()
            optimizer.step()
            found.append(out["language_loss"].item())
        return found

    first, second = losses(), losses()
    assert first == second
    assert first[-1] < 0.6 * first[0]


def test_gate_gets_a_gradient_from_the_loss_with_top_1():
    torch.manual_seed(0)
    config = GPTMoEConfig(vocab_size=17, context=8, layers=1, hidden=8, heads=2, experts=4, top_k=1, moe_every=1)
    module = GPTMoELightning(config)
    module.losses(torch.randint(0, 17, (2, 9)))[0].backward()
    assert module.model.blocks[0].mlp.gate.weight.grad.abs().sum() > 0


def test_every_parameter_gets_a_gradient_and_decay_spares_biases_and_norms():
    module: LightningModule = GPTMoELightning(TINY)
    module.training_step(torch.randint(0, 17, (4, 9)), 0)["loss"].backward()
    assert all(p.grad is not None for p in module.parameters())
    decayed, plain = module.configure_optimizers()["optimizer"].param_groups
    names = {id(p): n for n, p in module.named_parameters()}
    assert {names[id(p)].rsplit(".", 1)[-1] for p in plain["params"]} == {"bias", "up_bias", "down_bias"} | {
        n.rsplit(".", 1)[-1] for n, p in module.named_parameters() if p.ndim == 1
    }
    assert len(decayed["params"]) + len(plain["params"]) == len(list(module.parameters()))


def test_hyperparameters_are_plain_data():
    saved = dict(GPTMoELightning(TINY).hparams)
    assert GPTMoELightning(**saved).config == TINY


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"heads": 3}, "heads=3"), ({"top_k": 9}, "top_k=9"), ({"moe_every": 5}, "moe_every=5")],
)
def test_impossible_sizes_are_refused_by_name(changed, named):
    with pytest.raises(ValueError, match=named):
        GPTMoEConfig(**changed)


def test_the_library_recognises_the_layers_and_their_gates():
    from moe_ckpt.modeling.discover import build_catalog

    catalog = build_catalog(GPTMoELightning(GPTMoEConfig(layers=4)))
    assert [(layer.name, layer.experts, layer.top_k) for layer in catalog.layers] == [
        ("model.blocks.1.mlp", 8, 2),
        ("model.blocks.3.mlp", 8, 2),
    ]
    assert [span.parameter.rsplit(".", 1)[-1] for span in catalog.by_id["expert/1/7"].spans] == [
        "up_proj",
        "up_bias",
        "down_proj",
        "down_bias",
    ]
    assert [span.parameter for span in catalog.by_id["gate/0"].spans] == ["model.blocks.1.mlp.gate.weight"]
