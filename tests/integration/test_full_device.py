"""A start on a GPU that another process has filled ends with a clear error, and the run goes on later. It is acted."""

from __future__ import annotations

import pytest

from moe_ckpt import Memory
from moe_ckpt.errors import DeviceMemoryError
from moe_ckpt.policies import Dense, GradientLog, MoEvement
from tests.integration.test_no_waits import STEPS, same
from tests.integration.test_no_waits import fit as fit_of
from tests.support.acted_gpu import TOTAL, ActedGPU
from tests.support.tiny_moe import TinyMoE, state_of


@pytest.mark.parametrize(
    "policy", [Dense(every_n_steps=1), MoEvement(window=2), GradientLog(window=3)], ids=["dense", "window", "log"]
)
def test_a_start_without_room_for_the_state_says_so_and_loses_nothing(tmp_path, policy):
    for name in ("cpu", "gpu"):
        (tmp_path / name / "memory").mkdir(parents=True)

    def fit(name: str, gpu: ActedGPU | None = None, stop: int | None = None) -> TinyMoE:
        memory = Memory(tmp_path / name / "memory", storage_every=1000) if policy.needs.gradients else None
        return fit_of(tmp_path / name, policy, gpu, stop=stop, memory=memory)

    undisturbed = fit("cpu")
    with ActedGPU() as gpu, pytest.raises(RuntimeError, match="stopped"):
        fit("gpu", gpu, stop=STEPS - 2)
    with ActedGPU() as gpu:
        gpu.is_full = True
        with pytest.raises(DeviceMemoryError) as caught:
            fit("gpu", gpu)
    moments = 2 * sum(parameter.numel() * 4 for parameter in undisturbed.parameters())
    assert 0 <= caught.value.needed_bytes - moments < 1000, "each parameter has two moments, and a count of steps"
    assert "cuda:0 has 0 bytes free" in str(caught.value)
    assert f"others, with what CUDA itself takes, {TOTAL:,}" in str(caught.value)
    assert "nvidia-smi" in str(caught.value)
    with ActedGPU() as gpu:
        resumed = fit("gpu", gpu)
    assert resumed.losses.keys() < undisturbed.losses.keys()
    assert same(state_of(resumed), state_of(undisturbed))
