"""Train a tiny GPT-MoE of Megatron-Core on the CPU, kill it, and start it again: the four lines of a training loop."""

import tempfile
import warnings
from multiprocessing import get_context
from signal import raise_signal

import torch
import torch.distributed as dist

from moe_ckpt import megatron
from moe_ckpt.policies import Dense
from moe_ckpt.testing import megatron_cpu


def train(dirpath: str, kill_at: int | None = None) -> None:
    warnings.simplefilter("ignore")  # of packages for GPUs that are not installed here
    megatron_cpu.install()  # leave this out where there are GPUs
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    size = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_moe_experts": 4, "moe_router_topk": 2}
    config = TransformerConfig(**size, add_bias_linear=False)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=16)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])

    ckpt = megatron.attach(model, optimizer, policy=Dense(every_n_steps=5), dirpath=dirpath)  # 1
    progress = ckpt.resume()  # 2
    positions, later = torch.arange(16).expand(4, -1), torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    for iteration in range(progress.iteration, 40):
        tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(iteration))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], positions, later, labels=tokens[:, 1:]).mean()
        loss.backward()
        model.finish_grad_sync()
        if iteration == kill_at:
            raise_signal(9)
        updated, _, _ = optimizer.step()
        ckpt.after_step(iteration + 1, consumed_samples=4 * (iteration + 1), updated=updated)  # 3
    ckpt.finish()  # 4
    print(f"trained from iteration {progress.iteration} to 40; the last loss was {loss.item():.9f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        for name, kill_at in (("whole", None), ("killed", 25), ("killed", None)):
            process = get_context("fork").Process(target=train, args=(f"{root}/{name}", kill_at))
            process.start()
            process.join()
            print("exit code", process.exitcode)
