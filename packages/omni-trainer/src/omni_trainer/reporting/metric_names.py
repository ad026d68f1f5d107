"""What each metric of a run means: the legend of metrics.jsonl.

A name ending in `/*` stands for the numbers that a plugin names itself.
"""

from __future__ import annotations

from collections.abc import Mapping

METRICS: Mapping[str, str] = {
    "reward/mean": "mean reward of the step's scored samples",
    "reward/std": "their standard deviation",
    "reward/min": "the least of them",
    "reward/max": "the greatest of them",
    "reward/unscored": "samples that could not be scored",
    "reward/retries": "batches that were scored again after a failure that may pass",
    "reward/exact": "share of pictures in which exactly the target was read",
    "reward/blank": "share of pictures in which nothing of the target's kind was read",
    "reward/*": "mean over the scored samples of a number that the reward gives beside its score",
    "advantage/zero_std_groups": "prompt groups whose samples all scored alike: they teach nothing",
    "advantage/single_groups": "prompt groups left with one scored sample",
    "advantage/unscored_groups": "prompt groups without a scored sample",
    "advantage/clipped": "samples whose advantage was clipped",
    "advantage/group_std_mean": "mean over groups of the standard deviation of their rewards",
    "actor/loss": "what was minimised, mean over (sample, step)",
    "actor/policy_loss": "the clipped surrogate alone, mean over (sample, step)",
    "actor/ratio": "mean probability ratio of the trained policy to the one that sampled",
    "actor/ratio_min": "the least ratio",
    "actor/ratio_max": "the greatest ratio",
    "actor/clip_fraction": "share of (sample, step) whose ratio was outside the clip range",
    "actor/clip_fraction_higher": "share above it",
    "actor/clip_fraction_lower": "share below it",
    "actor/approx_kl": "mean of log pi_old - log pi, in the ratio's form",
    "actor/kl": "mean KL to the reference, in the configured form",
    "actor/teacher_distance": "how far the student is from its teacher, in the configured form",
    "actor/grad_norm": "L2 norm of the gradient over all ranks, before clipping",
    "actor/lr": "learning rate of the last optimizer step",
    "actor/skipped_steps": "optimizer steps left out for a gradient that was not finite",
    "actor/weight_version": "optimizer steps taken since the run began",
    "actor/*": "mean over (sample, step) of a number that the algorithm's loss gives",
    "canary/exact": "largest |log-prob| difference of a replay in the rollout's own batches; 0 in float32",
    "canary/floor": "largest |ratio - 1| of unchanged weights in training micro-batches",
    "rollout/old_log_probs_recomputed": "1 where old log-probs come from training micro-batches",
    "data/epoch": "epoch of the step's first prompt, counted from 0",
    "heldout/reward_mean": "mean over held-out prompts of the mean reward of their samples",
    "heldout/prompts": "held-out prompts with a score",
    "heldout/unscored": "held-out samples that could not be scored",
    "heldout/exact": "share of held-out pictures in which exactly the target was read",
    "heldout/blank": "share of held-out pictures in which nothing of the target's kind was read",
    "heldout/*": "mean over held-out prompts of a number that the reward gives beside its score",
    "time/step": "seconds of the step, without validation and checkpoint",
    "time/sample": "seconds until the last sample was there",
    "time/reward_wait": "seconds that scores took after that",
    "time/canary": "seconds of the canaries",
    "time/update": "seconds of the optimizer steps",
    "time/compile": "seconds spent compiling since the step before, which are also in the others",
    "time/push": "seconds until the rollout had the new weights",
    "time/validate": "seconds of scoring the held-out prompts",
    "time/save": "seconds of the checkpoint before this step",
    "time/*": "seconds",
}
"""Name -> meaning."""


def describe(name: str) -> str | None:
    """Say what the metric called *name* means; None if that is not known."""
    return METRICS.get(name) or METRICS.get(f"{name.partition('/')[0]}/*")
