"""Why a run stopped or did not learn: its directory is held against the symptoms, the weightiest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

import attrs

from omni_trainer.run_record import RunRecord, Series
from omni_trainer.run_status import RunState
from omni_trainer.symptoms import SYMPTOMS, Symptom, Weight

FULL_DISK = 64 * 2**20
"""Free bytes below which a run that ended without a word had no room to say so."""
ALIKE = 0.5
"""Share of groups without spread from which a reward counts as one that tells nothing apart."""
SLOW_RATE = 1e-7
"""Learning rate that moves no weight in any number of steps that people wait for."""
MOSTLY = 0.5
"""Share of clipped terms above which more is thrown away than learned."""
BLANK = 0.9
"""Share of pictures without anything readable."""
GROWN = 100.0
"""Times that the gradient norm may grow."""
ENOUGH_STEPS = 20
"""Below this a missing gain says nothing."""
ENOUGH_FOR_MEMORY = 40


@attrs.frozen(kw_only=True)
class Diagnosis:
    """One symptom that a run shows."""

    symptom: Symptom
    evidence: str
    """Numbers and steps, or the error's own words."""


Check = Callable[[RunRecord], Iterator[tuple[str, str]]]
"""Yields (key of the symptom, evidence)."""


def diagnose(record: RunRecord) -> list[Diagnosis]:
    """Find every symptom that a run shows, in order of weight; a run that is well has none."""
    found = [
        Diagnosis(symptom=SYMPTOMS[key], evidence=evidence)
        for check in CHECKS
        for key, evidence in check(record)
    ]
    return sorted(found, key=lambda one: -one.symptom.weight)


def explains(found: list[Diagnosis]) -> bool:
    """Whether anything stands between the run and learning: more than notes."""
    return any(one.symptom.weight > Weight.NOTE for one in found)


# -- how it ended -----------------------------------------------------------------------------------

_BY_ERROR = {
    "CanaryError": "canary",
    "UnscoredError": "reward_failed",
    "NonFiniteGradientsError": "non_finite",
}


def how_it_ended(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The one reason why a run is not at its end."""
    status = record.status
    where = f"after {record.trained} of {record.planned} steps"
    if record.killed:
        key = "disk_full" if record.free_disk < FULL_DISK else "killed"
        yield (
            key,
            f"{where}: status.json says running, and no process has the run; {_saved(record)}",
        )
    elif status is not None and status.state is RunState.INTERRUPTED:
        yield "interrupted", f"{where}; {_saved(record)}"
    elif status is not None and status.state is RunState.FAILED:
        yield _kind(record), f"{where}: {_first_lines(status.error, status.said)}"


def _kind(record: RunRecord) -> str:
    status = record.status
    assert status is not None
    if status.disk_full or "No space left on device" in status.said:
        return "disk_full"
    first, _, _ = status.said.partition("\n")
    for error, key in _BY_ERROR.items():
        if status.error == error or f"{error}: " in first:
            return key
    if status.died:
        return "worker_died"
    if not record.ranks:
        return "never_started"
    return "reward_failed" if status.said.startswith("reward rank") else "failed"


def _first_lines(error: str, said: str) -> str:
    lines = said.splitlines() or [""]
    return f"{error}: {lines[0]}" if error not in lines[0] else lines[0]


def _saved(record: RunRecord) -> str:
    if not record.checkpoints:
        return "there is no checkpoint"
    return f"the last checkpoint is of step {record.checkpoints[-1]}"


# -- what its metrics show --------------------------------------------------------------------------


def rewards(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Scores that tell nothing, or are missing."""
    groups = int(record.setting("data.prompts_per_step", 0))
    alike = record.series("advantage/zero_std_groups")
    learns = record.setting("algorithm.name") != "distillation"  # whose reward is only watched
    if alike and groups and learns:
        shares = [value / groups for _, value in alike]
        if median(shares) >= ALIKE:
            yield (
                "constant_reward",
                f"{_share(median(shares))} of groups, {_steps(alike)}; {_range(record)}",
            )
    yield from _unscored(record)
    for name in ("reward/blank", "heldout/blank"):
        blank = record.series(name)
        if blank and median(value for _, value in blank) >= BLANK:
            yield (
                "blank",
                f"{name} is {blank[-1][1]:.2f} at step {blank[-1][0]}, and was {blank[0][1]:.2f}",
            )
            return


def _unscored(record: RunRecord) -> Iterator[tuple[str, str]]:
    missing = [(step, value) for step, value in record.series("reward/unscored") if value > 0]
    if missing:
        rows = record.setting("data.prompts_per_step", 0) * record.setting(
            "rollout.samples_per_prompt", 0
        )
        total = sum(value for _, value in missing)
        of = f" of {rows} a step" if rows else ""
        policy = record.setting("reward.on_error")
        yield (
            "unscored",
            f"{total:.0f} samples in {len(missing)} steps{of}, first at step {missing[0][0]}; "
            f"reward.on_error is {policy}",
        )
    tried = [step for step, value in record.series("reward/retries") if value > 0]
    if len(tried) * 2 > max(record.trained, 1):
        yield "retries", f"in {len(tried)} of {record.trained} steps"


def _range(record: RunRecord) -> str:
    low, high = record.series("reward/min"), record.series("reward/max")
    if not low or not high:
        return "no sample has a score"
    least, most = min(value for _, value in low), max(value for _, value in high)
    return f"scores lie between {least:.4g} and {most:.4g}"


def optimisation(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Rates, gradients and ratios."""
    rates = record.series("actor/lr")
    if rates and max(value for _, value in rates) < SLOW_RATE:
        yield "no_learning_rate", f"at most {max(value for _, value in rates):.3g}, {_steps(rates)}"
    skipped = [(step, value) for step, value in record.series("actor/skipped_steps") if value > 0]
    if skipped:
        total = sum(value for _, value in skipped)
        named = ", ".join(str(step) for step, _ in skipped[:5])
        yield "skipped_steps", f"{total:.0f} of them; at steps {named}"
    norms = record.series("actor/grad_norm")
    if norms and not any(value for _, value in norms):
        yield "no_gradient", f"actor/grad_norm is 0, {_steps(norms)}"
    yield from _unstable(norms)
    late = record.series("actor/clip_fraction")
    late = late[len(late) // 2 :]
    if late and median(value for _, value in late) > MOSTLY:
        clip = record.setting("algorithm.clip_ratio")
        yield (
            "clipped",
            f"{_share(median(value for _, value in late))} of terms, {_steps(late)}; clip {clip}",
        )
    if any(value for _, value in record.series("rollout/old_log_probs_recomputed")):
        floor = max((value for _, value in record.series("canary/floor")), default=0.0)
        yield "recomputed", f"canary/floor {floor:.3g}"


def _unstable(norms: Series) -> Iterator[tuple[str, str]]:
    third = len(norms) // 3
    if third < 1:
        return
    early, late = (median(value for _, value in part) for part in (norms[:third], norms[-third:]))
    if early > 0 and late > GROWN * early:
        yield "unstable", f"from {early:.3g} to {late:.3g}, {_steps(norms)}"


def heldout(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Whether the held-out prompts gained, where there are steps enough to tell."""
    found = record.gain
    if found is None:
        return
    steps = record.evaluations[-1].step - record.evaluations[0].step
    said = f"{found.change} over {steps} steps (95 %, {len(record.evaluations[0].prompts)} prompts)"
    if found.change.high < 0:
        yield "heldout_fell", said
    elif steps >= ENOUGH_STEPS and found.change.low <= 0:
        yield "no_gain", said


def memory(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Processes that grow."""
    for name in record.names:
        values = record.series(name) if name.startswith("memory/") else []
        part = len(values) // 5
        if len(values) < ENOUGH_FOR_MEMORY:
            continue
        # The first steps load and warm up what stays.
        early, late = (
            median(value for _, value in each) for each in (values[part : 2 * part], values[-part:])
        )
        if late > 2 * early:
            yield "memory_grows", f"{name} from {early:.2f} to {late:.2f} GiB, {_steps(values)}"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _steps(series: Series) -> str:
    first, last = series[0][0], series[-1][0]
    return f"steps {first} to {last}" if last > first else f"step {first}"


CHECKS: tuple[Check, ...] = (how_it_ended, rewards, optimisation, heldout, memory)
