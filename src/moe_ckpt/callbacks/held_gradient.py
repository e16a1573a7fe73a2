"""Holds one gradient back until something is done, so that DDP cannot complete the reduction of all of them before.

No rank makes its update before it has each rank's gradients. A backward pass goes on meanwhile: the gradient that is
held is that of the first parameter, which the pass usually comes to last.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils.hooks import RemovableHandle


class HeldGradient:
    """Of one module, for one backward pass at a time.

    Args:
        module: Whose backward passes these are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hook: RemovableHandle | None = None

    def hold(self, until: Callable[[], None]) -> None:
        """In the pass that begins now, the gradient waits.

        Args:
            until: Returns when it has waited enough. Not called if that parameter gets no gradient.
        """
        self.release()
        first = next((each for each in self._module.parameters() if each.requires_grad), None)
        if first is not None:
            self._hook = first.register_hook(lambda _: until())  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """The pass is over. Twice does no harm."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
