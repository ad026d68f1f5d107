"""A reward plugin becomes what scores: with its monitors beside it, and with retries around it."""

from __future__ import annotations

from omni_core.config import PluginChoice
from omni_core.options import RewardConfig
from omni_core.plugins import REWARDS, registry
from omni_core.reward import RewardFunction
from omni_trainer.rewards.monitored import MonitoredReward
from omni_trainer.rewards.scoring import Scorer


def build_reward(name: str, options: RewardConfig) -> RewardFunction:
    """Build the reward plugin *name* (its models are not loaded yet)."""
    built: RewardFunction = registry(REWARDS).get(name).build(options)
    if not options.monitors:
        return built
    monitors = {
        label: build_part(choice, retries=options.retries)
        for label, choice in options.monitors.items()
    }
    return MonitoredReward(built, monitors)


def build_part(choice: PluginChoice, *, retries: int) -> Scorer:
    """Build what scores with a part of a reward; retries are those of the whole."""
    return Scorer(build_reward(choice.name, choice.options), retries=retries)
