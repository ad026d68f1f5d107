"""Finished samples at drawn sigmas: which rows an engine of the forward process predicts, and in what order.

A cell is one unit at one of its draws: what it is noised by and to follows from its samples' seeds
alone, so it is the same on every engine. Cells stand in the order of their units, draws ascending; a
micro-batch leaves every cell whole. Letters: B samples, M rows of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.choices import PredictionGuidance
from omni_core.engine import TrainBatch
from omni_core.forward_needs import ForwardNeeds
from omni_core.forward_process import draw_sigmas, forward_noise, noise_to, unit_seed
from omni_core.model import Denoiser, Guidance, Step
from omni_core.reverse_step import Latents
from omni_core.schedule import FlowMatchSchedule
from omni_core.seeds import Shapes
from omni_core.trajectory import Conditioning


@attrs.frozen
class Row:
    """One sample at one sigma."""

    row: int
    """Of the batch."""
    seed: int
    """Of its noise: the sample's own, or its unit's where a unit shares its draws."""
    draw: int
    """Number of the draw within the update."""
    sigma: float
    """A float32 value in (0, 1]."""
    unit: int
    """The same for the rows of one cell alone."""


def step_of(schedule: FlowMatchSchedule, sigma: float) -> int:
    """Return the step of a schedule that a sigma lies in: the last that starts at or above it, else the first."""
    return max(int((schedule.sigmas[:-1] >= sigma).sum()) - 1, 0)


def noise_of(rows: Sequence[Row], *, update: int, shapes: Shapes) -> dict[str, Tensor]:
    """x1 of every row; a draw of several rows is made once.

    Args:
        rows: M.
        update: `TrainBatch.update`.
        shapes: Modality -> shape of one sample's latents.

    Returns:
        Modality -> float32 [M, ...] on the CPU.
    """
    drawn = {
        key: forward_noise(key[0], update, key[1], shapes)
        for key in dict.fromkeys((row.seed, row.draw) for row in rows)
    }
    each = [drawn[row.seed, row.draw] for row in rows]
    return {name: torch.cat([noise[name] for noise in each]) for name in shapes}


def guidance_of(needs: ForwardNeeds, data: TrainBatch, denoiser: Denoiser) -> Guidance:
    """Return how strongly the prompt is followed in the loss's predictions."""
    sampled = Guidance.of(data.trajectory.effective)
    if needs.guidance is PredictionGuidance.NONE:
        return denoiser.single_branch(sampled)
    return sampled


@attrs.frozen(kw_only=True, eq=False)
class ForwardModelInputs:
    """What the denoiser takes of M rows, and what they are made of, on the denoiser's device."""

    clean: Latents
    """Modality -> [M, ...], x0."""
    noise: Latents
    """Modality -> float32 [M, ...], x1."""
    noised: Latents
    """Modality -> [M, ...], x_sigma."""
    step: Step
    conditioning: Conditioning
    """[M, ...]."""
    guidance: Guidance


def model_inputs(
    rows: Sequence[Row],
    data: TrainBatch,
    needs: ForwardNeeds,
    denoiser: Denoiser,
    *,
    device: torch.device,
) -> ForwardModelInputs:
    """Noise the final samples of M rows, and gather what the denoiser takes beside them."""
    trajectory, schedule = data.trajectory, data.trajectory.effective.schedule()
    samples = torch.tensor([row.row for row in rows])
    sigma = torch.tensor([row.sigma for row in rows], dtype=torch.float32).to(device)
    index = torch.tensor([step_of(schedule, row.sigma) for row in rows])
    clean = {name: value[samples, -1].to(device) for name, value in trajectory.latents.items()}
    shapes = {name: tuple(value.shape[1:]) for name, value in clean.items()}
    drawn = noise_of(rows, update=data.update, shapes=shapes)
    noise = {name: value.to(device) for name, value in drawn.items()}
    return ForwardModelInputs(
        clean=clean,
        noise=noise,
        noised=noise_to(clean, noise, sigma),
        step=Step(index=index.to(device), sigma=sigma),
        conditioning=trajectory.conditioning.select(trajectory.prompt_index[samples]).to(device),
        guidance=guidance_of(needs, data, denoiser),
    )


def _units(data: TrainBatch) -> list[list[int]]:
    """Rows of each unit that count, in the order of their first row."""
    given = range(data.trajectory.rows) if data.units is None else data.units.tolist()
    units: dict[int, list[int]] = {}
    for row, (unit, weight) in enumerate(zip(given, data.weights.tolist(), strict=True)):
        if weight > 0:
            units.setdefault(unit, []).append(row)
    return list(units.values())


def cells_of(
    data: TrainBatch, needs: ForwardNeeds, schedule: FlowMatchSchedule
) -> Iterator[list[Row]]:
    """Yield every cell of a batch.

    Args:
        data: Rows of weight 0 are left out.
        needs: What is drawn.
        schedule: The rollout's.
    """
    draws = needs.draws_of(schedule)
    numbers = itertools.count()
    for rows in _units(data):
        seeds = [data.trajectory.records[row].seed for row in rows]
        if needs.shares_draws and len(rows) > 1:
            seeds = [unit_seed(seeds)] * len(rows)
        sigmas = {
            seed: draw_sigmas(
                needs.sigmas,
                draws,
                seed=seed,
                update=data.update,
                schedule=schedule,
                shift=needs.shift,
            ).tolist()
            for seed in dict.fromkeys(seeds)
        }
        for draw in range(draws):
            unit = next(numbers)
            yield [
                Row(row, seed, draw, sigmas[seed][draw], unit)
                for row, seed in zip(rows, seeds, strict=True)
            ]


def packed(cells: Sequence[list[Row]], size: int) -> list[list[Row]]:
    """Cut cells into micro-batches of at most *size* rows, each cell whole.

    Raises:
        ValueError: a cell has more rows than that.
    """
    found: list[list[Row]] = []
    for cell in cells:
        if len(cell) > size:
            msg = (
                f"a unit of {len(cell)} rows, which the loss has to see together, does not fit into a "
                f"micro-batch: engine.micro_batch_size is {size}, and must be at least {len(cell)}"
            )
            raise ValueError(msg)
        if not found or len(found[-1]) + len(cell) > size:
            found.append([])
        found[-1].extend(cell)
    return found
