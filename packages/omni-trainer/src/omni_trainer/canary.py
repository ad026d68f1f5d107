"""Two numbers say whether training sees the steps that were sampled; if not, the run stops.

`exact`: a rollout's batch replayed in its own composition and shapes. For unchanged weights in float32
the log-probs are the stored ones, bit for bit. `floor`: the same rows, and as many more as
fill one, through training micro-batches of the size that training has. A batch of another size moves float32 log-probs by some 3e-8 and bf16 ones by some 3e-5, which a clip
of 1e-5 mistakes for a change of the policy: so the floor is held against the clip, per sampling step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.options import DType
from omni_core.schedule import FlowMatchSchedule
from omni_core.trajectory import SamplingSpec, Trajectory, TrajectoryInfo

FLOAT32_BOUND = 1e-6
"""Largest |ratio - 1| that float32 micro-batches may show."""
OTHER_KERNELS_BOUND = 1e-5
"""The same, and the largest |dlogp| of a replay, where another engine sampled."""
CLIP_PARTS = 10
"""Old log-probs are the rollout's own while the floor is below this part of the clip."""


class CanaryError(RuntimeError):
    """Training does not see what was sampled; the message holds both sides as tables."""


@attrs.frozen(kw_only=True)
class CanaryReport:
    """One rank's measurements."""

    rank: int
    rows: int
    effective: SamplingSpec
    """What the rollout says it used."""
    exact: Mapping[int, float]
    """Sampling step -> largest |log-prob replayed - stored|."""
    floor: Mapping[int, float]
    """Sampling step -> largest |ratio - 1| through training micro-batches."""
    same_kernels: bool = True
    """`BaseRollout.replays_exactly` of what sampled."""


@attrs.frozen(kw_only=True)
class CanaryVerdict:
    """What all ranks showed."""

    exact: float
    floor: float
    recompute: bool
    """The floor is too near the clip: old log-probs come from training micro-batches."""
    floors: Mapping[int, float] = attrs.field(factory=dict)
    """Sampling step -> floor."""


def measure(
    batch: Trajectory,
    rows: Trajectory,
    *,
    replayed: Tensor,
    trained: Tensor,
    rank: int,
    same_kernels: bool = True,
) -> CanaryReport:
    """Compare two scorings with what is stored.

    Args:
        batch: A rollout's own batch.
        rows: What was scored as in training: those of *batch*, and as many more as fill a micro-batch.
        replayed: float32 [batch, W], in the rollout's own batches.
        trained: float32 [rows, W], through training micro-batches.
        rank: Whose rows they are.
        same_kernels: Whether the rollout samples with the training engine's own kernels.
    """
    exact = replayed.double() - batch.log_probs.double()
    floor = torch.expm1(trained.double() - rows.log_probs.double())
    return CanaryReport(
        rank=rank,
        rows=rows.rows,
        effective=rows.effective,
        exact=_largest(batch.step_indices, exact.abs()),
        floor=_largest(rows.step_indices, floor.abs()),
        same_kernels=same_kernels,
    )


def _largest(steps: Tensor, values: Tensor) -> dict[int, float]:
    """Largest value at each step; what is not finite counts as infinite."""
    values = torch.where(values.isfinite(), values, math.inf)
    return {
        step: float(values[steps == step].max()) for step in sorted(set(steps.flatten().tolist()))
    }


def judge(
    reports: Sequence[CanaryReport],
    *,
    asked: SamplingSpec,
    dtype: DType,
    bound: float | None,
    clip: float | None,
) -> CanaryVerdict:
    """Decide whether the run may go on.

    Args:
        reports: Of every rank.
        asked: What was requested.
        dtype: The engine's computation.
        bound: Largest floor; None is 1e-6 for float32 and float64 (1e-5 where another engine than the
            training engine sampled, which holds for the replay too), and no bound below.
        clip: Of the loss's ratio; None if it looks at no ratio.

    Raises:
        CanaryError: the replay is not exact in float32, or the floor is above the bound.
    """
    exact = max((value for report in reports for value in report.exact.values()), default=0.0)
    floor = max((value for report in reports for value in report.floor.values()), default=0.0)
    full = dtype is not DType.BFLOAT16
    same = all(report.same_kernels for report in reports)
    if bound is None and full:
        bound = FLOAT32_BOUND if same else OTHER_KERNELS_BOUND
    most = 0.0 if same or bound is None else bound
    if full and not exact <= most:
        msg = (
            f"the exact canary is {exact:.3g}, not {most:.3g}: the engine does not score what the rollout "
            "sampled, in the rollout's own batches and with unchanged weights"
        )
        raise CanaryError("\n".join([msg, _table(reports, asked)]))
    if bound is not None and not floor <= bound:
        msg = (
            f"training micro-batches move |ratio - 1| by {floor:.3g}, above trainer.canary_bound "
            f"{bound:.3g}, with unchanged weights"
        )
        raise CanaryError("\n".join([msg, _table(reports, asked)]))
    recompute = clip is not None and not floor < clip / CLIP_PARTS
    floors: dict[int, float] = {}
    for report in reports:
        for step, value in report.floor.items():
            floors[step] = max(floors.get(step, 0.0), value)
    return CanaryVerdict(exact=exact, floor=floor, recompute=recompute, floors=floors)


def _table(reports: Sequence[CanaryReport], asked: SamplingSpec) -> str:
    lines = ["  rank  step  sigma         max |dlogp|   max |ratio - 1|"]
    for report in reports:
        for step in sorted({*report.exact, *report.floor}):
            sigma = report.effective.sigmas[step]
            exact, floor = (_cell(found.get(step)) for found in (report.exact, report.floor))
            lines.append(f"  {report.rank:>4}  {step:>4}  {sigma:<12.9g}  {exact:<12}  {floor}")
    used = reports[0].effective.schedule()
    return "\n".join([*lines, both_schedules(asked.schedule(), used)])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def both_schedules(asked: FlowMatchSchedule, used: FlowMatchSchedule) -> str:
    """Write both schedules side by side."""
    differs = asked.difference(used)
    if differs is not None:
        return differs.replace("this", "asked", 1).replace("other", "used", 1)
    values = ", ".join(f"{value:.9g}" for value in asked.values())
    return f"schedule asked and used ({asked.num_steps} steps): {values}"


def check_echo(
    infos: Iterable[TrajectoryInfo],
    *,
    asked: SamplingSpec,
    seeds: Mapping[tuple[str, int], int],
    adapter: str,
    weight_version: int | None,
) -> None:
    """Check that what came back is what was asked for: every sample once, sampled as requested.

    Raises:
        CanaryError: another schedule (both are shown), parameter, seed, adapter or policy version,
            or samples that are missing, twice there, or that nobody asked for.
    """
    open_keys = set(seeds)
    for info in infos:
        _check_spec(info, asked)
        other_version = weight_version is not None and info.weight_version != weight_version
        if info.adapter != adapter or other_version:
            msg = (
                f"group {info.records[0].group_id!r}: asked adapter {adapter!r} version "
                f"{weight_version}, used {info.adapter!r} version {info.weight_version}"
            )
            raise CanaryError(msg)
        for record in info.records:
            key = (record.group_id, record.k)
            if key not in open_keys or record.seed != seeds[key]:
                msg = f"sample {record.k} of group {record.group_id!r} came twice, or was not asked for"
                raise CanaryError(msg)
            open_keys.remove(key)
    if open_keys:
        some = ", ".join(f"{group}:{k}" for group, k in sorted(open_keys)[:5])
        msg = f"{len(open_keys)} samples of {len(seeds)} never came: {some}"
        raise CanaryError(msg)


def _check_spec(info: TrajectoryInfo, asked: SamplingSpec) -> None:
    differs = asked.difference(info.effective)
    if differs is None:
        return
    lines = [f"group {info.records[0].group_id!r} was not sampled as asked:"]
    if asked.sigmas != info.effective.sigmas:
        lines.append(both_schedules(asked.schedule(), info.effective.schedule()))
        differs = asked.difference(attrs.evolve(info.effective, sigmas=asked.sigmas))
    raise CanaryError("\n".join([*lines, *([differs] if differs else [])]))
