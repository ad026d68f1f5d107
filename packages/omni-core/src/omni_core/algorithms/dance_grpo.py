"""DanceGRPO: FlowGRPO's loss on reverse steps of constant diffusion, advantages within each group.

The steps are `dance_sde`: the mean of Flow-SDE with g = eta, and s = eta sqrt(-dt). A = (R - group mean)
/ (group std + eps). Source: DanceGRPO, arXiv 2505.07818, and its official code (FLUX: eta 0.3, 16
steps, groups of 12, shift 3, learning rate 1e-5).
"""

from __future__ import annotations

from omni_core.algorithms.dance_grpo_options import DanceGRPOOptions
from omni_core.algorithms.flow_grpo import FlowGRPO


class DanceGRPO(FlowGRPO):
    """See the module's docstring."""

    options: DanceGRPOOptions
