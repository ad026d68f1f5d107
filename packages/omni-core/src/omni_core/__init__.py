"""Contracts that engines, rollouts, trainers and forks share. Importing this imports nothing heavy.

The names below are the public API; each is loaded from its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from omni_core._version import __version__

_HOMES = {
    "omni_core.advantages": ("GroupAdvantages", "group_advantages"),
    "omni_core.algorithm": (
        "AdapterOperations",
        "Algorithm",
        "ModelFacts",
        "Policy",
        "Prediction",
        "PredictionGuidance",
        "Timesteps",
    ),
    "omni_core.choices": ("AdvantageStd", "KLForm", "StepKind"),
    "omni_core.config": ("ConfigError", "PluginChoice"),
    "omni_core.engine": (
        "BaseEngine",
        "BatchOutput",
        "CheckpointError",
        "LossFunction",
        "LossInputs",
        "LossTerms",
        "NonFiniteGradientsError",
        "OptimizerReport",
        "StepPrediction",
        "TrainBatch",
    ),
    "omni_core.forward_process": (
        "ForwardLossInputs",
        "adaptive_error",
        "clean_estimate",
        "denoising_error",
        "noise_to",
        "velocity_error",
    ),
    "omni_core.input_image": ("InputImage",),
    "omni_core.kl": ("gaussian_kl", "velocity_kl"),
    "omni_core.language_advantages": (
        "OutcomeAdvantages",
        "TokenAdvantages",
        "gae_advantages",
        "outcome_advantages",
    ),
    "omni_core.language_loss": (
        "LanguageLoss",
        "loss_denominator",
        "ppo_loss",
        "sft_loss",
        "value_loss",
    ),
    "omni_core.language_options": (
        "Aggregation",
        "PPOLossOptions",
        "PolicyForm",
        "ValueLossOptions",
    ),
    "omni_core.losses": ("ConfiguredLoss", "diffusion_loss"),
    "omni_core.metrics": ("Moments",),
    "omni_core.model": (
        "Codec",
        "Conditioner",
        "Denoiser",
        "EditConditioner",
        "Guidance",
        "ModelFamily",
        "Step",
        "TextLayout",
    ),
    "omni_core.options": (
        "AlgorithmConfig",
        "CheckpointConfig",
        "DiffusionActorConfig",
        "DiffusionLossConfig",
        "DiffusionModelConfig",
        "DiffusionPipelineConfig",
        "DiffusionRolloutAlgoConfig",
        "DiffusionRolloutConfig",
        "DiffusionSamplingConfig",
        "EngineConfig",
        "LoRAConfig",
        "OptimizerConfig",
        "RewardConfig",
        "RunFacts",
    ),
    "omni_core.padding": ("embeds_padding_2_no_padding", "no_padding_2_padding"),
    "omni_core.plugins": (
        "EngineRegistry",
        "Plugin",
        "PluginError",
        "PluginNotFoundError",
        "Registry",
        "registry",
    ),
    "omni_core.policy_loss": ("clipped_surrogate",),
    "omni_core.recipe": ("NoOptions", "Recipe", "Standing"),
    "omni_core.reverse_step": ("Latents", "ReverseStep", "old_mean", "transition_std"),
    "omni_core.reward": (
        "RetryableRewardError",
        "RewardFunction",
        "RewardInput",
        "RewardResult",
    ),
    "omni_core.reward_sum": ("weighted_reward_sum",),
    "omni_core.rollout": (
        "BaseRollout",
        "RolloutHandle",
        "RolloutState",
        "RolloutStateError",
        "RolloutTimeoutError",
        "UpdateReport",
        "WeightMismatchError",
        "WeightUpdate",
    ),
    "omni_core.rollout_correction": ("RolloutWeights",),
    "omni_core.rollout_correction_options": ("RolloutCorrectionOptions",),
    "omni_core.schedule": ("FlowMatchSchedule",),
    "omni_core.seeds": ("derive_seed", "initial_noise", "sample_seed", "step_noise"),
    "omni_core.tracking": ("Tracker",),
    "omni_core.trajectory": (
        "Conditioning",
        "Media",
        "RolloutRequest",
        "SampleRecord",
        "SamplingSpec",
        "Trajectory",
    ),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]  # noqa: PLE0604 -- built from the table


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        msg = f"module 'omni_core' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
