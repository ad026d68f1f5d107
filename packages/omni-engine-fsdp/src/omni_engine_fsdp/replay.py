"""Exact replay repeats a rollout's own forwards: its batches, their dummies, one step at a time.

A forward of other shapes differs in the last bits, so rows are put back into the batches that they
were denoised in (`Trajectory.places`). Letters: B rows, W steps of a row.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core.model import Denoiser
from omni_core.trajectory import Trajectory
from omni_engine_fsdp.call_plan import Call, CallPlan, agree, common_counts
from omni_engine_fsdp.micro_batch import routes
from omni_engine_fsdp.model_inputs import gather, score


@attrs.frozen(kw_only=True, eq=False)
class ReplayCall:
    """One forward: a whole batch at one step."""

    rows: Tensor
    """int64 [size]: rows of the trajectory, dummies included."""
    step: int
    own: Tensor
    """int64 [n]: places of the rows that have this step in their window."""
    columns: Tensor
    """int64 [n]: where it stands there."""


def batches(trajectory: Trajectory) -> list[Tensor]:
    """Put rows back into their batches: int64 [size] each, dummies being the row at place 0.

    Raises:
        ValueError: a place is taken twice, or a row before the batch's last known one is missing.
    """
    found: dict[str, dict[int, int]] = {}
    sizes: dict[str, int] = {}
    for row, place in enumerate(trajectory.places):
        taken = found.setdefault(place.batch, {})
        if place.place in taken or sizes.setdefault(place.batch, place.size) != place.size:
            msg = f"replay: batch {place.batch!r} has place {place.place} twice, or two sizes"
            raise ValueError(msg)
        taken[place.place] = row
    whole = []
    for name, taken in found.items():
        if sorted(taken) != list(range(len(taken))):
            missing = sorted(set(range(max(taken))) - set(taken))
            msg = f"replay: batch {name!r} lacks the rows at places {missing}; pass whole batches"
            raise ValueError(msg)
        whole.append(torch.tensor([taken.get(i, taken[0]) for i in range(sizes[name])]))
    return whole


def calls(trajectory: Trajectory, denoiser: Denoiser) -> dict[str, list[ReplayCall]]:
    """List the forwards of each expert that together score every trained step."""
    expert_of = routes(denoiser, trajectory.effective.schedule())
    listed: dict[str, list[ReplayCall]] = {name: [] for name in denoiser.experts}
    indices = trajectory.step_indices.cpu()
    for rows in batches(trajectory):
        windows = indices[rows]
        for step in sorted(set(windows.flatten().tolist())):
            own, columns = (windows == step).nonzero(as_tuple=True)
            listed[expert_of[step]].append(
                ReplayCall(rows=rows, step=step, own=own, columns=columns)
            )
    return listed


@torch.no_grad()
def replay(
    trajectory: Trajectory,
    denoiser: Denoiser,
    *,
    device: torch.device,
    group: Any | None,
    with_graph: bool = False,
) -> Tensor:
    """Score every trained step in the rollout's own forwards. A collective.

    Args:
        trajectory: At least one row, whole batches.
        denoiser: In evaluation mode, with the adapter that sampled.
        device: Where it computes.
        group: All ranks (`RankMesh.group`).
        with_graph: Predict with gradients on, as the rollout did: a compiled denoiser is another
            function then.

    Returns:
        float32 [B, W] on the CPU.

    Raises:
        ValueError: rows are missing, or (on every rank) a rank has nothing to replay.
        CallPlanError: ranks are about to make different calls.
    """
    listed = calls(trajectory, denoiser)
    if common_counts([-sum(map(len, listed.values()))], group)[0] == 0:
        msg = f"replay: every rank needs a stochastic step; this one has {trajectory.rows} rows"
        raise ValueError(msg)
    counts = common_counts([len(found) for found in listed.values()], group)
    plan = [Call(name, (), n) for name, n in zip(listed, counts, strict=True) if n]
    agree(CallPlan(phase="replay", calls=tuple(plan)), group)
    schedule = trajectory.effective.schedule()
    expert_of = routes(denoiser, schedule)
    scores = torch.full(trajectory.step_indices.shape, torch.nan)
    for (name, found), count in zip(listed.items(), counts, strict=True):
        for place in range(count):
            dummy = place >= len(found)
            call = _filler(expert_of.index(name)) if dummy else found[place]
            steps = torch.full_like(call.rows, call.step)
            inputs = gather(trajectory, schedule, call.rows, steps, device)
            with torch.set_grad_enabled(with_graph):
                velocity = denoiser.velocity(
                    inputs.latents, inputs.step, inputs.conditioning, inputs.guidance
                )
            if not dummy:
                log_probs = score(inputs, velocity).require_log_prob().detach().float().cpu()
                scores[call.rows[call.own], call.columns] = log_probs[call.own]
    return scores


def _filler(step: int) -> ReplayCall:
    nothing = torch.empty(0, dtype=torch.int64)
    return ReplayCall(rows=torch.tensor([0]), step=step, own=nothing, columns=nothing)
