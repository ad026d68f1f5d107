"""The scheduler that is put in place of a pipeline's own: it steps by core's `rollout_step` and records.

The state is kept here in float32; the pipeline gets a copy in its own precision, and has to bring that
very copy back. So the one denoising loop is the engine's, and the numbers are core's. Letters: B rows,
T steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from omni_core.reverse_step import Latents
from omni_core.rollout_step import StepRule, rollout_step, rows_inside
from omni_core.seeds import Shapes, initial_noise_batch
from omni_rollout_vllm.families.family import EngineFamily


class PipelineError(RuntimeError):
    """The engine's pipeline does not do what a recorded trajectory supposes."""


@attrs.frozen(kw_only=True, eq=False)
class Recorded:
    """What was stored."""

    latents: Mapping[str, Tensor]
    """Modality -> float32 [B, T+1, ...]."""
    log_probs: Tensor
    """float32 [B, T]: not a number where the step was deterministic."""


class RecordingScheduler:
    """In the form of a diffusers scheduler, for one batch.

    Whatever else a pipeline asks of it is an AttributeError: such a pipeline needs a look first.
    """

    order = 1
    init_noise_sigma = 1.0

    def __init__(
        self,
        rule: StepRule,
        *,
        seeds: Sequence[int],
        windows: Sequence[Sequence[int]],
        shapes: Shapes,
        family: EngineFamily,
        config: Any,
        device: torch.device,
    ) -> None:
        """Start B rows from their own noise.

        Args:
            rule: What holds for all rows.
            seeds: B, of `omni_core.seeds.sample_seed`.
            windows: B: each row's stochastic steps.
            shapes: Modality -> shape of one row's latents.
            family: How the pipeline holds latents.
            config: Of the replaced scheduler: pipelines read options from it.
            device: Where the pipeline computes.
        """
        self.rule = rule
        self.seeds = list(seeds)
        self.windows = [tuple(window) for window in windows]
        self.shapes = dict(shapes)
        self.family = family
        self.config = config
        self.device = device
        self.state: Latents = _moved(initial_noise_batch(self.seeds, self.shapes), device)
        self._states: list[Latents] = [self.state]
        self._log_probs = torch.full((self.rows, rule.schedule.num_steps), torch.nan, device=device)

    @property
    def rows(self) -> int:
        """B."""
        return len(self.seeds)

    @property
    def index(self) -> int:
        """Steps taken."""
        return len(self._states) - 1

    @property
    def sigmas(self) -> Tensor:
        """float32 [T+1]."""
        return self.rule.schedule.sigmas

    @property
    def timesteps(self) -> Tensor:
        """float32 [T]."""
        return self.rule.schedule.timesteps.to(self.device)

    @property
    def timestep(self) -> Tensor:
        """float32 scalar: of the step that comes next."""
        return self.timesteps[self.index]

    def initial(self) -> Any:
        """Noise of all rows, float32, as the pipeline holds latents."""
        return self._held()

    def _held(self) -> Any:
        return self.family.to_engine(self.state)

    # -- what pipelines call -----------------------------------------------------------------------

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        """Keep the schedule that was sent, whatever the pipeline would make of its own.

        Raises:
            PipelineError: it wants another number of steps.
        """
        del device, mu
        given = [sigmas, timesteps]
        wanted = next((len(each) for each in given if each is not None), num_inference_steps)
        if wanted != self.rule.schedule.num_steps:
            msg = f"the pipeline sets {wanted} steps, {self.rule.schedule.num_steps} were asked for"
            raise PipelineError(msg)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Start at the first step.

        Raises:
            PipelineError: anywhere else.
        """
        if begin_index != 0:
            msg = f"the pipeline begins at step {begin_index}; a trajectory begins at 0"
            raise PipelineError(msg)

    def step(
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        *,
        generator: Any = None,
        return_dict: bool = True,
    ) -> tuple[Any]:
        """Take the next step of all rows, and return (latents,) in the pipeline's precision.

        Raises:
            PipelineError: not this step's timestep, latents that are not what was handed out before,
                or more steps than the schedule has.
        """
        del generator, return_dict  # noise belongs to the sample
        index, schedule = self.index, self.rule.schedule
        if index >= schedule.num_steps:
            msg = f"the pipeline takes more steps than the {schedule.num_steps} of its schedule"
            raise PipelineError(msg)
        self._check_timestep(timestep, index)
        self._check_sample(sample, index)
        with torch.autocast(self.device.type, enabled=False):
            velocity = self.family.from_engine(_floats(model_output), self.shapes)
            inside = rows_inside(self.windows, index)
            self.state, scores = rollout_step(
                self.rule,
                self.state,
                velocity,
                index,
                inside=inside,
                seeds=self.seeds,
                shapes=self.shapes,
            )
        if scores is not None:
            self._log_probs[torch.tensor(inside, device=self.device), index] = scores
        self._states.append(self.state)
        return (_copy_like(self._held(), sample),)

    # ----------------------------------------------------------------------------------------------

    def recorded(self) -> Recorded:
        """Return the whole trajectory.

        Raises:
            PipelineError: steps are missing.
        """
        if self.index != self.rule.schedule.num_steps:
            msg = f"the pipeline took {self.index} of {self.rule.schedule.num_steps} steps"
            raise PipelineError(msg)
        latents = {
            name: torch.stack([state[name] for state in self._states], dim=1)
            for name in self.shapes
        }
        return Recorded(latents=latents, log_probs=self._log_probs)

    def _check_timestep(self, timestep: Any, index: int) -> None:
        given = torch.as_tensor(timestep).float().cpu().reshape(-1)
        wanted = self.rule.schedule.timesteps[index]
        if not bool((given == wanted).all()):
            msg = f"step {index}: the pipeline is at timestep {given.tolist()}, not {float(wanted)}"
            raise PipelineError(msg)

    def _check_sample(self, sample: Any, index: int) -> None:
        expected = _copy_like(self._held(), sample)
        for mine, theirs in zip(_tensors(expected), _tensors(sample), strict=True):
            if not torch.equal(mine, theirs):
                change = "" if mine.shape != theirs.shape else f" by {_apart(mine, theirs):.3g}"
                msg = (
                    f"step {index}: the latents were changed between two steps{change} (shape "
                    f"{tuple(theirs.shape)}, {tuple(mine.shape)} was handed out); a recorded "
                    "trajectory would not be what the model saw"
                )
                raise PipelineError(msg)


def _tensors(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _floats(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(each.float() for each in value)
    return value.float()


def _copy_like(value: Any, like: Any) -> Any:
    """A copy in the precision of *like*: the state itself is never handed out."""
    if isinstance(value, tuple):
        return tuple(_copy_like(mine, theirs) for mine, theirs in zip(value, like, strict=True))
    return value.to(like.dtype, copy=True)


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def _moved(latents: Latents, device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in latents.items()}
