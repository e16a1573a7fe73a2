"""What a user gives ``moe-ckpt densify --import``."""

from moe_ckpt.gradient_log.optimizers import Coupling, register
from tests.support.fused_adam import FusedAdam

register(FusedAdam, Coupling.ELEMENTS)
