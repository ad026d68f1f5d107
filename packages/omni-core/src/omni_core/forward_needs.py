"""What a loss of the forward process wants done to finished samples before it sees them.

An engine of model type diffusion_forward reads it from the loss (`forward_needs`), so that it draws,
predicts and packs without knowing the algorithm.
"""

from __future__ import annotations

import attrs

from omni_core.choices import Policy, PredictionGuidance, SigmaDraw
from omni_core.engine import LossFunction
from omni_core.schedule import FlowMatchSchedule


@attrs.frozen(kw_only=True)
class ForwardNeeds:
    """Draws and predictions."""

    others: tuple[Policy, ...] = ()
    """Whose predictions are made beside the trained policy's, without a graph."""
    guidance: PredictionGuidance = PredictionGuidance.NONE
    """Of all predictions."""
    draws: int | None = None
    """Sigmas that each sample is noised to in an update; None is one for each step of the schedule."""
    sigmas: SigmaDraw = SigmaDraw.SCHEDULE
    shift: float = 1.0
    """See `forward_process.draw_sigmas`."""
    shares_draws: bool = False
    """All rows of a unit are noised by the same noise to the same sigmas."""

    def draws_of(self, schedule: FlowMatchSchedule) -> int:
        """Sigmas of a sample in an update."""
        return schedule.num_steps if self.draws is None else self.draws


def forward_needs(loss: LossFunction) -> ForwardNeeds:
    """Read what *loss* says by an attribute `forward_needs`; without one it takes the defaults."""
    found = getattr(loss, "forward_needs", None)
    return found if isinstance(found, ForwardNeeds) else ForwardNeeds()
