"""Train a tiny GPT-MoE with Megatron-Bridge, kill it, start it again, and compare it with one that nobody killed."""

import os
from signal import raise_signal
from typing import Any

import bridge_on_cpu  # noqa: F401 - leave this out where there are GPUs
import torch
from lives import ALONE, compare
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

from moe_ckpt.megatron.bridge import MoECheckpointCallback
from moe_ckpt.policies import Dense


class Watch:
    def __init__(self, kill_at: int | None, weights: str) -> None:
        self.kill_at, self.weights = kill_at, weights

    def on_train_step_start(self, context: Any) -> None:
        if context.state.train_state.step == self.kill_at:
            raise_signal(9)

    def on_train_end(self, context: Any) -> None:
        torch.save(dict(context.model[0].named_parameters()), self.weights)


def tiny() -> config.ConfigContainer:
    size = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "num_moe_experts": 4}
    fusions = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion")
    off = dict.fromkeys((*fusions, "persist_layer_norm", "cross_entropy_loss_fusion", "add_bias_linear"), False)
    spec = lambda model, **stage: get_gpt_decoder_block_spec(model, use_transformer_engine=False, **stage)  # noqa: E731
    data = {"random_seed": 7, "reset_attention_mask": False, "reset_position_ids": False, "eod_mask_loss": False}
    return config.ConfigContainer(
        model=GPTModelProvider(**size, **off, transformer_layer_spec=spec, make_vocab_size_divisible_by=4),
        train=config.TrainingConfig(train_iters=40, global_batch_size=4, micro_batch_size=2),
        validation=config.ValidationConfig(eval_iters=0),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4),
        scheduler=config.SchedulerConfig(lr_warmup_iters=2, start_weight_decay=0.01, end_weight_decay=0.01),
        ddp=config.DistributedDataParallelConfig(),
        dist=config.DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
        dataset=config.MockGPTDatasetConfig(seq_length=16, dataloader_type="single", num_workers=0, **data),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=63),
        logger=config.LoggerConfig(log_interval=1000, tensorboard_dir=None),
        checkpoint=config.CheckpointConfig(save=None, load=None),
    )


def train(root: str, name: str, kill_at: int | None) -> None:
    os.environ |= ALONE
    ours = MoECheckpointCallback(Dense(), dirpath=f"{root}/{name}")
    pretrain(tiny(), forward_step, callbacks=[Watch(kill_at, f"{root}/{name}.pt"), ours])


if __name__ == "__main__":
    compare(train, 15, 25)
