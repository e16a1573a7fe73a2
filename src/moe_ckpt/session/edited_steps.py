"""Says which steps do not follow from the gradients of a log, since something else changed what optimizers update."""

from __future__ import annotations

import logging

from moe_ckpt.ports import GradientRecord

log = logging.getLogger("moe_ckpt")

_OF_NO_USE = 3
"""If so many steps in a row are edited, the next ones will be, too."""
_MOST_NAMED = 3


class EditedSteps:
    """Asks at the end of each step. For the training thread only.

    Args:
        gradients: What knows; None where the policy logs no gradients.
        policy: Its name, for messages.
    """

    def __init__(self, gradients: GradientRecord | None, policy: str) -> None:
        self._gradients, self._policy = gradients, policy
        self._in_row = 0
        self._told = self._told_of_use = False

    def end_with(self, step: int) -> bool:
        """Returns whether something else than an optimizer changed what ``step`` should have left."""
        names = () if self._gradients is None else self._gradients.edited()
        self._in_row = self._in_row + 1 if names else 0
        if names and not self._told:
            self._told = True
            shown = ", ".join(sorted(names)[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
            log.warning(
                "step %d does not follow from its gradients: weights, optimizer state, gradients or param groups of %d "
                "parameters (%s) were changed by something other than the optimizer. Such steps are saved in full, not "
                "logged",
                step,
                len(names),
                shown,
            )
        if self._in_row >= _OF_NO_USE and not self._told_of_use:
            self._told_of_use = True
            log.warning(
                "%s saves full state instead of gradients at each step (%d in a row so far), for something other than "
                "the optimizer changes weights or optimizer state at each: clipping or normalising of weights, "
                "QK-clip, averaging. Do that in the optimizer, or take a policy that saves full state: MoEvement, "
                "Dense or MoC",
                self._policy,
                self._in_row,
            )
        return bool(names)
