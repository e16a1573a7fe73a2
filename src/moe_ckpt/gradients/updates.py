"""Records of what one update of an optimizer consumed, and blocks of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from moe_ckpt.core.coverage import Box
from moe_ckpt.gradients.units import Unit

WEIGHT = ""
"""Kind of a block of what is updated: master weights, or weights where there are none."""
GRADIENT = "gradient"


@dataclass(frozen=True, eq=False)
class TensorBlock:
    """Values of a block of one of the model's tensors.

    Attributes:
        optimizer: Number of the optimizer.
        parameter: Name of the tensor.
        kind: ``WEIGHT``, ``GRADIENT`` or the name of optimizer state.
        box: Where the block lies in the whole tensor; None for state that is not of the parameter's shape (a step
            count, factors), which belongs to the parameter as a whole.
        values: Of the block.
        on_device: Whether they lived on the parameter's device; torch counts steps on the CPU.
    """

    optimizer: int
    parameter: str
    kind: str
    box: Box | None
    values: torch.Tensor
    on_device: bool = True


@dataclass(frozen=True)
class Update:
    """One update by one optimizer: all that it depended on, beside state and gradients. Plain data.

    Attributes:
        optimizer: Number of the optimizer.
        groups: Hyperparameters of each param group, as they were before the update.
        parameters: Names of the model's tensors that had a gradient; others stayed as they were.
        grad_scale: By which the optimizer divides the gradients; None if they are not scaled.
        found_inf: Nonzero if the optimizer is to leave the update out; None if it need not look.
    """

    optimizer: int
    groups: tuple[Mapping[str, Any], ...]
    parameters: tuple[str, ...]
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class ConsumedGradients:
    """Gradients that an optimizer is about to consume, as live tensors: after reduction, unscaling and clipping.

    Attributes:
        update: What else the update depends on. Its tensors are copies.
        units: Those that have a gradient.
        gradients: One of each of ``units``; views of live memory.
        stay: The update leaves gradients as they are, so that they may be read until ``GradientConsumer.release``. A
            fused optimizer that is given the loss scale writes the unscaled gradients back.
        apart: They are copies, see ``copied``.
    """

    update: Update
    units: Sequence[Unit]
    gradients: Sequence[torch.Tensor]
    stay: bool
    apart: bool = False
    _changed_before: tuple[str, ...] = ()
    _versions: Sequence[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", [gradient._version for gradient in self.gradients])

    def changed(self) -> tuple[str, ...]:
        """Returns names of units whose gradients were written to since, as far as torch counts that.

        What was read of them is not what the optimizer consumed: drop it, which leaves a gap. Not seen are writes by
        kernels that torch does not know of, and those of a fused optimizer (see ``stay``).
        """
        versions = zip(self.units, self.gradients, self._versions, strict=True)
        return (
            *self._changed_before,
            *(unit.name for unit, gradient, version in versions if gradient._version != version),
        )

    def copied(self) -> ConsumedGradients:
        """Returns the gradients in memory of their own on the same device, which is queued there before whatever comes
        next."""
        if self.apart:
            return self
        copies = [gradient.clone() for gradient in self.gradients]
        return replace(self, gradients=copies, apart=True, _changed_before=self.changed())


class GradientConsumer(Protocol):
    """Takes what optimizers consume. All methods are called on the training thread, and must not wait for a device."""

    def consume(self, gradients: ConsumedGradients) -> None:
        """An optimizer is about to make an update.

        No copy was made. Whoever keeps the tensors keeps their memory, too: at most one set of gradients beyond what
        training holds, if all is read before the next update.
        """
        ...

    def release(self) -> None:
        """Releases gradients, for what was consumed is about to be overwritten or freed: all reading must end, or be
        queued before that."""
        ...
