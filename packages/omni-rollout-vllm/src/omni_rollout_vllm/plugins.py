"""What this package offers by name. Imports no torch and no vLLM."""

from __future__ import annotations

from omni_core.plugins import Plugin
from omni_rollout_vllm.options import VllmOmniRolloutConfig

vllm_omni = Plugin(
    api=1,
    options=VllmOmniRolloutConfig,
    target="omni_rollout_vllm.rollout:VllmOmniRollout",
    summary="samples in vLLM-Omni engines, in processes of their own",
    standalone=True,
)
