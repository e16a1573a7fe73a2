"""Gradients that a real Trainer's optimizers consumed, replayed in another process: bits after every step."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from moe_ckpt import Memory
from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.errors import UnsupportedError
from moe_ckpt.gradient_log.recording import capture_gradients
from moe_ckpt.modeling.discover import build_catalog, find_moe_layers
from moe_ckpt.policies import GradientLog
from tests.support.gradient_log import Copier, Recorder, differing, require_exact
from tests.support.processes import run_ranks
from tests.support.tiny_moe import TinyMoE, loader

BATCHES = 12


class Model(TinyMoE):
    def __init__(self, make, stacked=True):
        super().__init__(layers=1, stacked=stacked)
        self.make = make

    def configure_model(self):
        if self.device_mesh is not None:
            for block in self.blocks:
                fully_shard(block.moe.experts, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        optimizer = MAKE[self.make](self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByHand(TinyMoE):
    """Two optimizers, one of which steps at every other batch and by a closure."""

    def __init__(self):
        super().__init__(layers=1)
        self.automatic_optimization = False

    def configure_optimizers(self):
        experts = [p for name, p in self.named_parameters() if "experts" in name]
        others = [p for name, p in self.named_parameters() if "experts" not in name]
        return torch.optim.AdamW(experts, lr=1e-2), torch.optim.SGD(others, lr=1e-2, momentum=0.9)

    def _loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad(set_to_none=False)
        self.manual_backward(self._loss(batch))
        self.clip_gradients(first, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        first.step()
        if batch_idx % 2:

            def closure():
                second.zero_grad(set_to_none=False)
                self.manual_backward(self._loss(batch))

            second.step(closure=closure)


MAKE = {
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True, weight_decay=0.1),
    "loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
}


def half(growth=2):
    """fp16 with a loss scale that overflows now and then."""
    scaler = torch.amp.GradScaler("cpu", 2.0**18, growth_interval=growth)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


CASES = {
    "fused-clipped-accumulated": ("fused", {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2}),
    "foreach-clipped-by-value": ("foreach", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16": ("loop", {"precision": "bf16-true", "gradient_clip_val": 0.2}),
    "bf16-mixed": ("sgd", {"precision": "bf16-mixed"}),
    "fp16": ("loop", {"gradient_clip_val": 0.2, "half": True}),
    "fp16-fused": ("fused", {"half": True}),
    "listed-experts": ("foreach", {"stacked": False}),
    "by-hand": (None, {}),
    "ddp": ("fused", {"gradient_clip_val": 0.2, "ddp": True}),
    "fsdp2": ("foreach", {"gradient_clip_val": 0.2, "fsdp2": True}),
}


class Watch(pl.Callback):
    """Records steps; unclipped: sees gradients before Lightning clips them, as a hook of a callback does."""

    def __init__(self, unclipped=False):
        self.unclipped = unclipped
        self.recorder = None

    def on_fit_start(self, trainer, pl_module):
        catalog = build_catalog(pl_module, find_moe_layers(pl_module))
        spans = {operator.id: operator.spans for operator in catalog.operators}
        attach = lambda consumer: capture_gradients(trainer, pl_module, consumer)  # noqa: E731
        self.recorder = Recorder(trainer.optimizers, spans, attach)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.unclipped:
            self.early = [p.grad.clone() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.recorder.step()


def train(rank, world_size, case, unclipped=False):
    make, options = CASES[case]
    options = dict(options)
    stacked = options.pop("stacked", True)
    if options.pop("half", False):
        options |= half()
    if options.pop("fsdp2", False):
        options |= {"strategy": ModelParallelStrategy(world_size, 1), "devices": world_size}
    if options.pop("ddp", False):
        options |= {"strategy": DDPStrategy(gradient_as_bucket_view=True), "devices": world_size}
    torch.manual_seed(3)
    model = ByHand() if make is None else Model(make, stacked)
    watch = Watch(unclipped)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=BATCHES,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, loader(samples=BATCHES * 4 * world_size))
    recorder = watch.recorder
    if unclipped:
        _, units, _ = recorder.copier.take()[-1]
        return {unit.name: early for unit, early in zip(units, watch.early, strict=True)}
    return *recorder.finish(), recorder.copier.releases


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick("fused-clipped-accumulated", "bf16-mixed", "fp16", "by-hand", "ddp", "fsdp2")
def test_every_step_comes_out_again_in_another_process(case):
    for log, states, releases in run_ranks(train, 2 if case in ("ddp", "fsdp2") else 1, case):
        # A fused optimizer unscales in place, so nothing of it may be left for later.
        assert (releases == 0) == (case == "fp16-fused"), "copies are made when something is about to be overwritten"
        require_exact(log, states)
        made = [len(log.made[at]) for at in range(1, BATCHES + 1)]
        if case == "fused-clipped-accumulated":
            assert made == [0, 1] * 6
        elif case == "by-hand":
            assert made == [1, 2] * 6
        elif case == "fp16":
            assert set(made) == {0, 1}
        elif case == "fp16-fused":
            overflows = {bool(update.found_inf) for updates in log.made.values() for update in updates}
            assert overflows == {True, False}
        else:
            assert made == [1] * BATCHES


def test_what_a_callback_sees_before_clipping_is_not_what_was_consumed():
    [early] = run_ranks(train, 1, "foreach-clipped-by-value", True)
    [(log, states, _)] = run_ranks(train, 1, "foreach-clipped-by-value")
    for key, blocks in log.consumed.items():
        if key[1] == BATCHES:
            for at, block in enumerate(blocks):
                whole = early[block.parameter]
                rows = whole[block.box.offsets[0] : block.box.offsets[0] + block.box.shape[0]] if whole.ndim else whole
                blocks[at] = type(block)(block.optimizer, block.parameter, block.kind, block.box, rows)
    assert differing(states[-2], log.replayed(BATCHES - 1)) == []
    assert differing(states[-1], log.replayed(BATCHES)) != []


def test_a_parameter_that_is_not_the_models_is_refused_by_shape():
    class Odd(TinyMoE):
        def configure_optimizers(self):
            return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.ones(3, 2))], lr=0.1)

    class Attach(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            capture_gradients(trainer, pl_module, Copier()).units()

    trainer = pl.Trainer(accelerator="cpu", max_steps=1, callbacks=[Attach()], logger=False, enable_checkpointing=False)
    with pytest.raises(UnsupportedError, match=r"optimizer 0 updates a parameter of shape \(3, 2\)"):
        trainer.fit(Odd(), loader())


class Zeroing(TinyMoE):
    """Gradients are zeroed in place, by the optimizer or the module, before the backward pass or after the step."""

    def __init__(self, owner: str, when: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.owner, self.when = owner, when

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        owner = self if self.owner == "module" else optimizer
        if self.when == "before":
            owner.zero_grad(set_to_none=False)
        self.manual_backward(TinyMoE.training_step(self, batch, batch_idx))
        optimizer.step()
        if self.when == "after":
            owner.zero_grad(set_to_none=False)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_log_waits_for_whoever_zeroes_gradients(tmp_path, when):
    saved: dict[str, list[int | None]] = {"optimizer": [], "module": []}
    for owner, sizes in saved.items():
        (tmp_path / owner).mkdir()
        checkpoint = MoECheckpoint(
            GradientLog(window=3),
            tmp_path / owner / "store",
            when_busy="wait",
            memory=Memory(directory=tmp_path / owner, storage_every=1000),
        )

        class Seen(pl.Callback):
            def on_train_batch_end(self, *_, checkpoint=checkpoint, sizes=sizes):
                sizes.append(checkpoint.last and checkpoint.last.nbytes)

        trainer = pl.Trainer(
            max_steps=8,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Seen(), checkpoint],
        )
        trainer.fit(Zeroing(owner, when), loader())
    for first, full, *later in saved.values():
        assert first is None
        assert max(later) < 0.8 * full, "gradients, and a third of the state"
