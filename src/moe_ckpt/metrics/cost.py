"""What checkpointing costs training: bytes and time."""

from __future__ import annotations

from typing import Any

import torch

from moe_ckpt.metrics.base import StepMetric


class CheckpointBytes(StepMetric):
    """Bytes written per iteration, all ranks together: the mean over the updates since ``reset``."""

    higher_is_better = False
    plot_lower_bound = 0.0
    label, scale = "written per iteration (MB)", 1e-6
    bytes_total: torch.Tensor
    bytes_iterations: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("bytes_total", torch.tensor(0), "sum")
        self._state("bytes_iterations", torch.tensor(0), "max")  # the same iterations on every rank

    def update(self, nbytes: Any, iterations: int = 1) -> None:
        """Args:
        nbytes: Of this rank in one iteration; 0 if nothing was saved.
        iterations: In more than one, if ``nbytes`` is their sum.
        """
        self.bytes_total = self.bytes_total + self._tensor(nbytes, torch.int64)
        self.bytes_iterations = self.bytes_iterations + iterations

    def compute(self) -> torch.Tensor:
        return self.bytes_total / self.bytes_iterations.clamp(min=1)


class BytesByFidelity(StepMetric):
    """Bytes written per iteration, all ranks together: ``bytes_full`` and ``bytes_compute``, means since ``reset``.

    In full: weights with optimizer state. At compute fidelity: what the forward and backward pass reads of operators
    that a sparse window saves in full later (MoEvement); 0 under other policies.
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    label, scale = "written per iteration (MB)", 1e-6
    parts = ("bytes_full", "bytes_compute")
    full_total: torch.Tensor
    compute_total: torch.Tensor
    fidelity_iterations: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state("full_total", torch.tensor(0), "sum")
        self._state("compute_total", torch.tensor(0), "sum")
        self._state("fidelity_iterations", torch.tensor(0), "max")

    def update(self, nbytes: Any, frozen_nbytes: Any, iterations: int = 1) -> None:
        """Args:
        nbytes: Of this rank in one iteration.
        frozen_nbytes: Of ``nbytes``, what is saved at compute fidelity.
        iterations: In more than one, if both are sums.
        """
        frozen = self._tensor(frozen_nbytes, torch.int64)
        self.full_total = self.full_total + self._tensor(nbytes, torch.int64) - frozen
        self.compute_total = self.compute_total + frozen
        self.fidelity_iterations = self.fidelity_iterations + iterations

    def compute(self) -> dict[str, torch.Tensor]:
        iterations = self.fidelity_iterations.clamp(min=1)
        return dict(zip(self.parts, (self.full_total / iterations, self.compute_total / iterations), strict=True))


class CheckpointStall(StepMetric):
    """Milliseconds per iteration that checkpointing kept the training thread, since ``reset``.

    ``compute`` gives ``stall_ms_mean`` and ``stall_ms_worst``, over ranks those of the rank that was kept longest: all
    others wait for it in the next gradient reduction.
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    label = "stall per iteration (ms)"
    parts = ("stall_ms_mean", "stall_ms_worst")
    stall_total: torch.Tensor
    stall_worst: torch.Tensor
    stall_iterations: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Whole nanoseconds: a sum of floats would no longer grow after some hours.
        self._state("stall_total", torch.tensor(0), "max")
        self._state("stall_worst", torch.tensor(0), "max")
        self._state("stall_iterations", torch.tensor(0), "max")

    def update(self, stall_secs: Any, iterations: int = 1, worst_stall_secs: Any = None) -> None:
        """Args:
        stall_secs: Of this rank in one iteration.
        iterations: In more than one, if ``stall_secs`` is their sum.
        worst_stall_secs: The longest of them; None for one.
        """
        total, worst = (
            self._tensor(round(float(secs) * 1e9), torch.int64)
            for secs in (stall_secs, stall_secs if worst_stall_secs is None else worst_stall_secs)
        )
        self.stall_total = self.stall_total + total
        self.stall_worst = torch.maximum(self.stall_worst, worst)
        self.stall_iterations = self.stall_iterations + iterations

    def compute(self) -> dict[str, torch.Tensor]:
        mean = self.stall_total / self.stall_iterations.clamp(min=1)
        return {"stall_ms_mean": mean / 1e6, "stall_ms_worst": self.stall_worst / 1e6}
