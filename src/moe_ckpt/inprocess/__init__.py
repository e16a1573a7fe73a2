"""Restarts training in the surviving processes, with NVIDIA's resiliency extension (``moe_ckpt[inprocess]``).

``restartable`` decorates a train function; see docs/inprocess.md.
"""

from moe_ckpt.inprocess.restarting import Restart, restartable

__all__ = ["Restart", "restartable"]
