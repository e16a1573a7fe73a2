"""What checkpointing costs and what a failure would cost, as torchmetrics: update, compute, plot.

``MoECheckpoint.metrics`` holds one of each and feeds them at every step. Each is useful alone as well: ``update``
takes plain numbers or ``[L, E]`` arrays, so they also serve another trainer, or a simulation.

Over ranks each state is reduced so that nothing counts twice: bytes add up, stalls are those of the slowest rank,
and what is the same on every rank (token counts are reduced before they come here) stays as it is.
"""

from moe_ckpt.errors import MissingPackageError

try:
    import torchmetrics  # noqa: F401
except ImportError as error:
    raise MissingPackageError("torchmetrics", "moe_ckpt.metrics", "lightning") from error

from moe_ckpt.metrics.collection import checkpoint_metrics
from moe_ckpt.metrics.cost import BytesByFidelity, CheckpointBytes, CheckpointStall
from moe_ckpt.metrics.experts import ExpertAges, OldestExpertAge, UnsavedTokens
from moe_ckpt.metrics.tokens import (
    ExpertLoadSkewness,
    ExpertsPerLayer,
    MomentaryLostTokens,
    OwedTokens,
    PortionAtRisk,
    PortionOfLostTokens,
)
from moe_ckpt.metrics.windows import WindowAge, WindowPlace

__all__ = [
    "BytesByFidelity",
    "CheckpointBytes",
    "CheckpointStall",
    "ExpertAges",
    "ExpertLoadSkewness",
    "ExpertsPerLayer",
    "MomentaryLostTokens",
    "OldestExpertAge",
    "OwedTokens",
    "PortionAtRisk",
    "PortionOfLostTokens",
    "UnsavedTokens",
    "WindowAge",
    "WindowPlace",
    "checkpoint_metrics",
]
