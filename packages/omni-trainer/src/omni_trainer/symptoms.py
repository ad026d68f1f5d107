"""Symptoms of runs that stopped or did not learn: what each means and what to do, in one place.

`omni doctor RUN`, the report and docs/troubleshooting.md take their texts from here; omni_trainer.diagnosis
says which of them a run shows. Imports nothing of the run.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

import attrs


class Weight(enum.IntEnum):
    """How much a symptom explains."""

    NOTE = 1
    """Worth knowing; the run may be well."""
    LEARNING = 2
    """The run goes on, and learns nothing or the wrong thing."""
    STOPPED = 3
    """It ended the run."""


@attrs.frozen(kw_only=True)
class Symptom:
    """One kind of trouble."""

    key: str
    weight: Weight
    title: str
    means: str
    todo: str


def _stopped(key: str, title: str, means: str, todo: str) -> Symptom:
    return Symptom(key=key, weight=Weight.STOPPED, title=title, means=means, todo=todo)


def _learning(key: str, title: str, means: str, todo: str) -> Symptom:
    return Symptom(key=key, weight=Weight.LEARNING, title=title, means=means, todo=todo)


def _note(key: str, title: str, means: str, todo: str) -> Symptom:
    return Symptom(key=key, weight=Weight.NOTE, title=title, means=means, todo=todo)


_ALL = (
    _stopped(
        "disk_full",
        "The disk is full",
        "A file of the run could not be written. The last complete checkpoint is whole: it is written aside and renamed.",
        "Make room (`checkpoint.keep` sets how many checkpoints stay), then `omni resume RUN`.",
    ),
    _stopped(
        "canary",
        "Training does not see what was sampled",
        "Replaying the rollout's own samples gives other log-probs than the rollout stored, with unchanged weights. "
        "A run that went on would divide by the probability of something else than what was drawn.",
        "Read the table in the error: it shows both schedules and the steps that differ. A rollout or family that changes "
        "the schedule, the text length, the guidance or the stored precision is the usual cause. Do not raise "
        "`trainer.canary_bound` before the cause is known.",
    ),
    _stopped(
        "non_finite",
        "Gradients were not finite",
        "Optimizer steps were left out because a gradient was infinite or NaN; after `optimizer.max_nonfinite_steps` in a row the run ends.",
        "Lower `optimizer.lr` first; then look at `actor/grad_norm` and `actor/ratio_max` in the steps before. "
        "The last checkpoint is of a finite state: `omni resume RUN` goes on from it with a changed config.yaml.",
    ),
    _stopped(
        "reward_failed",
        "Samples could not be scored",
        "The reward failed, and `reward.on_error: raise` ends a run rather than learn from a guess.",
        "Read the error: it is the scorer's own. Failures that pass are retried (`reward.retries`); `reward.on_error: "
        "drop_group` or `mask` goes on without the samples that have no score.",
    ),
    _stopped(
        "killed",
        "The process ended without a word",
        "The run did not finish, nothing works on it, and no error was recorded: it was killed (the system's memory "
        "ran out, a scheduler's limit, `kill -9`) or the machine stopped.",
        "Look for the out-of-memory killer in the system's log (`dmesg`), at `memory/*_rss` in the last steps, and at the "
        "scheduler's limits. Then `omni resume RUN`.",
    ),
    _stopped(
        "worker_died",
        "A worker's process died",
        "A rank or a scorer was gone, without an exception of its own: most often its memory ran out.",
        "Smaller `engine.micro_batch_size`, `rollout.batch_size` or `evaluation.batch_size`; then `omni resume RUN`. "
        "`trainer.max_restarts` above 0 rebuilds lost workers by itself.",
    ),
    _stopped(
        "never_started",
        "The run never came up",
        "It ended before all ranks had their model: the model, the config or the machine does not fit.",
        "Read the error; `omni config validate` and `omni doctor` say more. The next `omni train` may take the same name.",
    ),
    _stopped(
        "failed",
        "The run ended by an error",
        "A worker or the driver raised what is shown.",
        "Read its first line: it names role, rank and error. `omni resume RUN` goes on from the last checkpoint.",
    ),
    _stopped(
        "interrupted",
        "The run was interrupted",
        "Ctrl-C or SIGTERM ended it before its last step.",
        "It was saved where it stopped, unless a second signal came: `omni resume RUN` goes on from the last checkpoint.",
    ),
    _learning(
        "constant_reward",
        "The reward does not tell the samples of a prompt apart",
        "All samples of most groups have the same score, so their advantages are exactly 0 and nothing is learned from them.",
        "Look at the pictures and at `reward/min` and `reward/max`. A constant reward is a scorer that does not see the picture, or "
        "prompts that are too easy or too hard; more noise (`algorithm.noise_level`) or more samples "
        "(`rollout.samples_per_prompt`) make samples differ.",
    ),
    _learning(
        "no_learning_rate",
        "The learning rate is next to nothing",
        "AdamW moves a weight by about the learning rate a step, so the weights are where they were.",
        "Raise `optimizer.lr` (LoRA: 1e-4 to 3e-3) and look at `optimizer.schedule` and its warm-up.",
    ),
    _learning(
        "no_gradient",
        "There is no gradient",
        "`actor/grad_norm` is 0: no trained weight has an effect on the loss, or every advantage is 0.",
        "With a reward that differs within groups, look at what is trained: `model.lora.targets`, and whether the adapter "
        "that samples is the one that is trained.",
    ),
    _learning(
        "unscored",
        "Samples without a score",
        "`reward.on_error` lets the run go on, and what could not be scored is in no mean and teaches nothing. What fails "
        "is rarely random: the run learns from what the scorer finds easy.",
        "Run with `reward.on_error=raise` for one step to see the error.",
    ),
    _learning(
        "clipped",
        "Most ratios are outside the clip range",
        "The policy moves so far within one step's updates that most terms are clipped and carry no gradient.",
        "Lower `optimizer.lr` or `algorithm.updates_per_rollout`; widen `algorithm.clip_ratio` only if the published one "
        "belongs to another form of log-prob. A `canary/floor` near the clip has the same look: see that first.",
    ),
    _learning(
        "unstable",
        "The gradient norm grew out of all proportion",
        "The last steps' norms are a hundred times those of the first and more: the policy left the region where it samples well.",
        "Lower `optimizer.lr`, set `optimizer.max_grad_norm`, add a KL (`algorithm.kl_coef`), and start from a checkpoint before it.",
    ),
    _learning(
        "skipped_steps",
        "Optimizer steps were left out",
        "A gradient was not finite, so no rank stepped; the run went on because it did not happen too often in a row.",
        "Lower `optimizer.lr`, or compute in a wider `model.dtype`; look at the steps named.",
    ),
    _learning(
        "blank",
        "Nearly nothing can be read in the pictures",
        "In most pictures nothing of the target's kind was read, so most scores are the same low one.",
        "Look at the grids. The starting model may be too weak for the reward, or the picture size, guidance or text length is "
        "not the model's own (`model.pipeline`).",
    ),
    _learning(
        "heldout_fell",
        "The held-out reward fell",
        "It is lower than before training, and its 95% interval lies below 0.",
        "If the training reward rose, the run learned its prompts or the scorer's weaknesses: compare before and after in the report, "
        "add a KL (`algorithm.kl_coef`) or NormGuard, more prompts, fewer steps.",
    ),
    _learning(
        "no_gain",
        "The held-out reward did not rise",
        "After enough steps to judge, the 95% interval of its change contains 0.",
        "See the other findings first. With none, train longer, raise `optimizer.lr`, or evaluate more prompts: a wide "
        "interval is no proof of no gain.",
    ),
    _note(
        "retries",
        "The scorer is retried often",
        "Batches failed and were scored again in many steps: the run waits for a service that is overloaded.",
        "Look at `time/reward_wait`; fewer `reward.workers`, or a service with more room.",
    ),
    _note(
        "recomputed",
        "Old log-probs are computed again",
        "The noise floor of training micro-batches is too near the clip (usual in bf16), so each step pays another forward.",
        "Nothing, or float32; the ratios are right either way.",
    ),
    _note(
        "memory_grows",
        "A process's memory grows with the steps",
        "The resident memory at the end is twice that of the early steps and more.",
        "A reward or tracker of your own that keeps what it is given is the usual cause.",
    ),
)

SYMPTOMS: Mapping[str, Symptom] = {symptom.key: symptom for symptom in _ALL}
"""Key -> symptom, those that end a run first."""


def page_of_symptoms() -> Iterator[str]:
    """Yield the symptoms as lines of Markdown: a section for each."""
    headings = {
        Weight.STOPPED: "Runs that stopped",
        Weight.LEARNING: "Runs that do not learn",
        Weight.NOTE: "Worth knowing",
    }
    for weight, heading in headings.items():
        yield from (f"## {heading}", "")
        for symptom in _ALL:
            if symptom.weight is weight:
                yield from (f"### {symptom.title}", "", symptom.means, "", symptom.todo, "")
