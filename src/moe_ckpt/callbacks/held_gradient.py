"""Delays one gradient until something is done, so that DDP cannot finish its reduction, and no rank its update, before.

The delayed gradient is that of the first parameter, which the backward pass usually computes last, so the rest of the
pass is not delayed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle


class HeldGradient:
    """Delays a gradient of one module, in one backward pass at a time.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hook: RemovableHandle | None = None

    def hold(self, until: Callable[[], None]) -> None:
        """Delays the gradient in the backward pass that begins now.

        Args:
            until: Blocks as long as the gradient is to wait. Not called if the parameter gets no gradient.
        """
        self.release()
        first = next((each for each in self._module.parameters() if each.requires_grad), None)
        if first is not None:
            self._hook = first.register_hook(lambda _: until())  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """The pass is over. Safe to call twice."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
