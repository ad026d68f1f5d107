"""The one dictionary of metrics: what each name of metrics.jsonl means, in which unit, and what is healthy.

`omni metrics` and docs/metrics.md print it. A new metric is one more line here, in the place of its
group; a test walks real runs and fails on a metric that has no line, and on a line that nothing emits.
A name ending in `/*` stands for the numbers that a plugin names itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs


@attrs.frozen
class Metric:
    """One line of the dictionary."""

    name: str
    unit: str
    means: str
    healthy: str = ""
    """What a run that learns shows; empty where the number is there to be known."""
    when: str = ""
    """What it takes for the metric to be there; empty: every step has it."""

    @property
    def group(self) -> str:
        """What stands before the slash."""
        return self.name.partition("/")[0]


_REWARD, _HELDOUT = "with a reward", "with held-out prompts"
_RATIO, _KL = "algorithms that look at a ratio", "with algorithm.kl_coef above 0"
_CANARY, _CORRECTED = "where a canary is due", "with algorithm.rollout_correction"
_ENGINES = "rollout vllm_omni"
_RAY = "with trainer.backend: ray"

# fmt: off
_LINES = (
    Metric("reward/mean", "reward", "mean reward of the step's scored samples", "rises over tens of steps, unevenly", _REWARD),
    Metric("reward/std", "reward", "their standard deviation", "well above 0; near 0 there is nothing to tell samples apart by", _REWARD),
    Metric("reward/min", "reward", "the least of them", "", _REWARD),
    Metric("reward/max", "reward", "the greatest of them", "", _REWARD),
    Metric("reward/unscored", "samples", "samples that could not be scored", "0", _REWARD),
    Metric("reward/retries", "batches", "batches that were scored again after a failure that may pass", "0, or rare", _REWARD),
    Metric("reward/exact", "share", "pictures in which exactly the target was read", "rises", "reward ocr"),
    Metric("reward/blank", "share", "pictures in which nothing of the target's kind was read", "falls", "reward ocr"),
    Metric("reward/*", "as the reward says", "mean over the scored samples of a number that the reward gives beside its score"),
    Metric("advantage/zero_std_groups", "groups", "prompt groups whose samples all scored alike: they teach nothing", "a small part of data.prompts_per_step", _REWARD),
    Metric("advantage/single_groups", "groups", "prompt groups left with one scored sample", "0", _REWARD),
    Metric("advantage/unscored_groups", "groups", "prompt groups without a scored sample", "0", _REWARD),
    Metric("advantage/clipped", "samples", "samples whose advantage was clipped", "few", _REWARD),
    Metric("advantage/group_std_mean", "reward", "mean over groups of the standard deviation of their rewards", "above 0; it shrinks as a policy settles", _REWARD),
    Metric("actor/loss", "loss", "what was minimised, mean over (sample, step)", "small and around 0 where advantages are centred: it is no measure of learning"),
    Metric("actor/policy_loss", "loss", "the policy's own term alone, without regularisers", "as actor/loss", "all algorithms but distillation and diffusion_dpo"),
    Metric("actor/ratio", "ratio", "mean probability ratio of the trained policy to the one that sampled", "1 within the clip range", _RATIO),
    Metric("actor/ratio_min", "ratio", "the least ratio", "", _RATIO),
    Metric("actor/ratio_max", "ratio", "the greatest ratio", "", _RATIO),
    Metric("actor/clip_fraction", "share", "(sample, step) whose ratio was outside the clip range", "below 0.3; 0 with one update a step, whose ratio is exactly 1", _RATIO),
    Metric("actor/clip_fraction_higher", "share", "those above it", "", _RATIO),
    Metric("actor/clip_fraction_lower", "share", "those below it", "", _RATIO),
    Metric("actor/approx_kl", "nats a value", "mean of log pi_old - log pi, in the ratio's form", "near 0", _RATIO),
    Metric("actor/kl", "nats a value, or squared velocity", "mean KL to the reference, in the configured form", "grows slowly and levels off", _KL),
    Metric("actor/kl_old", "nats a value", "mean KL to the policy that sampled", "below algorithm.delta", "flow_dppo"),
    Metric("actor/mean_shift", "latent units", "how far the mean of a step moved, root mean square", "small against the step's noise", "grpo_guard"),
    Metric("actor/norm_growth", "share", "growth of the velocity's norm over the reference's", "below norm_guard.margin", "with algorithm.norm_guard"),
    Metric("actor/norm_guard", "share", "the part of that growth that is penalised", "near 0", "with algorithm.norm_guard"),
    Metric("actor/teacher_distance", "as configured", "how far the student is from its teacher", "falls", "distillation"),
    Metric("actor/teacher_distance/*", "as configured", "the same, of the rows of the teacher that is named", "falls", "distillation from several teachers"),
    Metric("actor/denoising_error", "squared velocity", "how far the policy's velocity is from the one that leads to its sample", "falls slowly", "awm, dgpo, diffusion_dpo"),
    Metric("actor/ema_deviation", "squared velocity", "distance from the moving average of the policy", "small", "awm"),
    Metric("actor/group_weight", "weight", "mean weight of a row by its group", "between 0 and 1", "dgpo"),
    Metric("actor/implicit_accuracy", "share", "pairs that the implicit reward orders as the scores do", "rises above 0.5", "diffusion_dpo"),
    Metric("actor/implicit_margin", "nats", "implicit reward of the better sample less that of the worse one", "rises", "diffusion_dpo"),
    Metric("actor/positive_loss", "loss", "error of the policy that is drawn to the sample", "", "diffusion_nft"),
    Metric("actor/negative_loss", "loss", "error of the policy that is pushed from it", "", "diffusion_nft"),
    Metric("actor/reward_probability", "share", "mean of what rewards became, 0 to 1", "around 0.5", "diffusion_nft"),
    Metric("actor/old_deviation", "squared velocity", "distance from the policy that samples", "small", "diffusion_nft"),
    Metric("actor/elbo", "squared error", "the bound that stands for the log-probability", "", "elbo"),
    Metric("actor/elbo_gain", "squared error", "its gain over the policy that samples", "small", "elbo"),
    Metric("actor/reference_deviation", "squared velocity", "distance from the reference", "grows slowly and levels off", "ram"),
    Metric("actor/rollout_weight", "weight", "mean weight that corrects for the rollout's own log-probs", "1", _CORRECTED),
    Metric("actor/rollout_rejected", "share", "steps that the correction rejected", "near 0", _CORRECTED),
    Metric("actor/rollout_log_ratio", "nats a value", "mean |log-prob of training less that of the rollout|", "the noise floor", _CORRECTED),
    Metric("actor/grad_norm", "norm", "L2 norm of the gradient over all ranks, before clipping", "steady; neither 0 nor exploding", "where an optimizer step was taken"),
    Metric("actor/lr", "1", "learning rate of the last optimizer step", "above 0"),
    Metric("actor/skipped_steps", "optimizer steps", "optimizer steps left out for a gradient that was not finite", "0"),
    Metric("actor/weight_version", "optimizer steps", "optimizer steps taken since the run began", "grows with every step"),
    Metric("actor/*", "as the algorithm says", "mean over (sample, step) of a number that the algorithm's loss gives"),
    Metric("canary/exact", "nats a value", "largest |log-prob| difference of a replay in the rollout's own batches", "0 in float32 (1e-5 where another engine sampled)", _CANARY),
    Metric("canary/floor", "ratio", "largest |ratio - 1| of unchanged weights in training micro-batches", "below a tenth of the clip", _CANARY),
    Metric("rollout/old_log_probs_recomputed", "0 or 1", "1 where old log-probs come from training micro-batches", "0 in float32", "with stochastic steps"),
    Metric("rollout/cut_prompts", "prompts", "prompts of the step that are longer than the model reads", "0; `omni data check` lists them", "where the model can tell"),
    Metric("rollout/images_per_second", "samples/s", "throughput of one rank's (or one server's) engines, while they sample", "steady", _ENGINES),
    Metric("rollout/queue", "batches", "most batches that waited for an engine at once", "above 0: no engine is idle", _ENGINES),
    Metric("rollout/restarts", "engines", "engines that were lost and started again", "0", _ENGINES),
    Metric("rollout/pushed_bytes", "bytes", "weights that were pushed to one rank's (or one server's) engines", "", _ENGINES),
    Metric("rollout/push_pause_seconds", "s", "of the pushes, waiting for running batches", "0 where nothing is sampled during an update", _ENGINES),
    Metric("rollout/push_send_seconds", "s", "of the pushes, handing the weights to the engines", "", _ENGINES),
    Metric("rollout/push_verify_seconds", "s", "of the pushes, binding the weights, and the probe", "", _ENGINES),
    Metric("rollout/*", "as the rollout says", "mean over ranks (or servers) of a number that the rollout gives"),
    Metric("data/epoch", "epochs", "epoch of the step's first prompt, counted from 0"),
    Metric("heldout/reward_mean", "reward", "mean over held-out prompts of the mean reward of their samples", "rises; this is what a run is judged by", _HELDOUT),
    Metric("heldout/prompts", "prompts", "held-out prompts with a score", "all of them", _HELDOUT),
    Metric("heldout/unscored", "samples", "held-out samples that could not be scored", "0", _HELDOUT),
    Metric("heldout/retries", "batches", "held-out batches that were scored again after a failure that may pass", "0, or rare", _HELDOUT),
    Metric("heldout/exact", "share", "held-out pictures in which exactly the target was read", "rises", "reward ocr"),
    Metric("heldout/blank", "share", "held-out pictures in which nothing of the target's kind was read", "falls", "reward ocr"),
    Metric("heldout/*", "as the reward says", "mean over held-out prompts of a number that the reward gives beside its score"),
    Metric("time/step", "s", "the step, without validation and checkpoint", "steady"),
    Metric("time/sample", "s", "until the last sample was there, decoding included"),
    Metric("time/decode", "s", "of that, turning latents into pictures, on the slowest rank", "", "where the rollout tells it apart"),
    Metric("time/reward", "s", "spent scoring, of all scorers together", "hidden behind time/sample", _REWARD),
    Metric("time/reward_wait", "s", "that scores took after the last sample", "small against time/sample", _REWARD),
    Metric("time/advantages", "s", "from scores to advantages", "negligible"),
    Metric("time/canary", "s", "the canaries", "", _CANARY),
    Metric("time/update", "s", "the optimizer steps"),
    Metric("time/compile", "s", "compiling, which is also in the phase that waited for it", "0 after the first steps", "with engine.compile"),
    Metric("time/push", "s", "until the rollout had the new weights", "small against time/step"),
    Metric("time/push_share", "share", "the part of the step that pushing weights took", "small"),
    Metric("time/validate", "s", "scoring the held-out prompts", "", _HELDOUT),
    Metric("time/save", "s", "the checkpoint before this step", "", "after a checkpoint"),
    Metric("memory/driver_rss", "GiB", "resident memory of the driver's process", "steady; it does not grow with the samples"),
    Metric("memory/actor_rss", "GiB", "of the largest rank's process", "steady", _RAY),
    Metric("memory/reward_rss", "GiB", "of the largest scorer's process", "steady", _RAY + " and a reward"),
    Metric("memory/engine_rss", "GiB", "of the largest of the rollout's engines, with its workers", "steady", _ENGINES),
    Metric("memory/server_rss", "GiB", "of the largest rollout server's process", "steady", "with rollout.servers"),
)
# fmt: on

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _LINES}
"""Name -> its line, in the order in which people read them."""


def describe(name: str) -> Metric | None:
    """Find the line of the metric called *name*: its own, or the nearest `/*`; None if there is none."""
    parts = name.split("/")
    patterns = ("/".join([*parts[:count], "*"]) for count in range(len(parts) - 1, 0, -1))
    return next((METRICS[one] for one in (name, *patterns) if one in METRICS), None)


def table_of_metrics() -> Iterator[str]:
    """Yield the dictionary as lines of Markdown: a section for each group."""
    group = None
    for metric in _LINES:
        if metric.group != group:
            group = metric.group
            yield from (
                "",
                f"## `{group}/`",
                "",
                "| metric | unit | what it is | healthy | present |",
            )
            yield "|---|---|---|---|---|"
        cells = (metric.unit, metric.means, metric.healthy, metric.when or "always")
        escaped = (cell.replace("|", r"\|") for cell in cells)
        yield f"| `{metric.name}` | {' | '.join(escaped)} |"
