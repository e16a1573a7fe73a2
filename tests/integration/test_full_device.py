"""A start on a GPU that another process has filled ends with a clear error, and the run goes on later. It is acted."""

from __future__ import annotations

import pytest

from moe_ckpt.errors import DeviceMemoryError
from moe_ckpt.policies import Dense, MoEvement
from tests.integration.test_no_waits import STEPS, fit, same
from tests.support.acted_gpu import TOTAL, ActedGPU
from tests.support.tiny_moe import state_of


@pytest.mark.parametrize("policy", [Dense(every_n_steps=1), MoEvement(window=2)], ids=["dense", "window"])
def test_a_start_without_room_for_the_state_says_so_and_loses_nothing(tmp_path, policy):
    undisturbed = fit(tmp_path / "cpu", policy)
    with ActedGPU() as gpu, pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path / "gpu", policy, gpu, stop=STEPS - 2)
    with ActedGPU() as gpu:
        gpu.is_full = True
        with pytest.raises(DeviceMemoryError) as caught:
            fit(tmp_path / "gpu", policy, gpu)
    moments = 2 * sum(parameter.numel() * 4 for parameter in undisturbed.parameters())
    assert 0 <= caught.value.needed_bytes - moments < 1000, "each parameter has two moments, and a count of steps"
    assert "cuda:0 has 0 bytes free" in str(caught.value)
    assert f"others, with what CUDA itself takes, {TOTAL:,}" in str(caught.value)
    assert "nvidia-smi" in str(caught.value)
    with ActedGPU() as gpu:
        resumed = fit(tmp_path / "gpu", policy, gpu)
    assert resumed.losses.keys() < undisturbed.losses.keys()
    assert same(state_of(resumed), state_of(undisturbed))
