"""An algorithm says what it learns from, what it needs predicted, and its loss; one file each.

It never meets a model family: what cannot be combined is data (`unsupported`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor

from omni_core.advantages import GroupAdvantages
from omni_core.choices import Policy as Policy
from omni_core.choices import PredictionGuidance as PredictionGuidance
from omni_core.engine import LossTerms
from omni_core.forward_needs import ForwardNeeds
from omni_core.model import ModelFamily, TextLayout
from omni_core.options import AlgorithmConfig
from omni_core.schedule import FlowMatchSchedule


class Timesteps(enum.StrEnum):
    """At which points of the schedule."""

    REPLAY = "replay"
    """The rollout's own stochastic steps."""
    DRAWN = "drawn"
    """Drawn anew, on noised final samples."""


@attrs.frozen(kw_only=True)
class Prediction:
    """One forward that an algorithm's loss needs."""

    policy: Policy = Policy.CURRENT
    guidance: PredictionGuidance = PredictionGuidance.AS_ROLLOUT
    timesteps: Timesteps = Timesteps.REPLAY


@attrs.frozen(kw_only=True)
class ModelFacts:
    """What `unsupported` may look at."""

    family: str
    """Name of its class."""
    masked_text: bool
    has_adapter: bool
    experts: tuple[str, ...]
    keeps_copies: bool = False
    """The engine keeps other policies as copies of every weight where there is no adapter."""
    inputs: tuple[str, ...] = ("text",)
    """What a sample is made from: see `ModelFamily.inputs`."""

    @property
    def keeps_policies(self) -> bool:
        """Policies beside the trained one are kept: adapters, or copies of every weight."""
        return self.has_adapter or self.keeps_copies

    @classmethod
    def of(
        cls, family: ModelFamily, *, has_adapter: bool, keeps_copies: bool = False
    ) -> ModelFacts:
        """Take what a family declares; nothing is loaded.

        Args:
            family: Of the model.
            has_adapter: A LoRA is trained.
            keeps_copies: The engine keeps other policies without LoRA too.
        """
        return cls(
            keeps_copies=keeps_copies,
            family=type(family).__name__,
            masked_text=family.text_layout is TextLayout.MASKED,
            has_adapter=has_adapter,
            experts=family.expert_names,
            inputs=family.inputs,
        )


class AdapterOperations(Protocol):
    """What an algorithm may do to named policy adapters after an update."""

    def copy_adapter(self, source: str, target: str) -> None:
        """Make *target* equal to *source*."""

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """target <- decay * target + (1 - decay) * source."""


class Algorithm(ABC):
    """Built as `Algorithm(options)`; stateless but for what `state` returns."""

    def __init__(self, options: Any) -> None:
        self.options: AlgorithmConfig = options

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Every forward that the loss needs; the first is the trained one."""
        return (Prediction(),)

    @property
    def needs_noise(self) -> bool:
        """Whether the loss looks at the noise of the rollout's own steps (`LossInputs.noise`)."""
        return False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Named policy adapters that must exist; all start equal to `default`."""
        return ("default",)

    @property
    def teachers(self) -> Mapping[str, str]:
        """Name -> directory of the frozen adapters that the loss compares with, in order."""
        return {}

    def teacher_of(self, columns: Mapping[str, object]) -> int | None:
        """Say which of `teachers` a prompt's samples are held to.

        Args:
            columns: Of the prompt's data row, beside the prompt.

        Returns:
            Its place in `teachers`; None where there is none to choose.

        Raises:
            ValueError: the row names none of them.
        """
        del columns
        return None

    @abstractmethod
    def window(self, schedule: FlowMatchSchedule, *, seed: int, iteration: int) -> tuple[int, ...]:
        """Choose the stochastic (and trained) steps of one prompt group.

        Args:
            schedule: The rollout's.
            seed: The group's own: the same on every rank.
            iteration: Trained steps so far, for window schedules.

        Returns:
            Ascending step indices, never the last step; empty for ode.
        """

    @abstractmethod
    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Turn rewards [B] into advantages [B]; *valid* [B] is false where a row has no score."""

    @property
    def shares_draws(self) -> bool:
        """Whether all rows of a unit are noised by the same noise to the same sigmas (drawn timesteps)."""
        return False

    @property
    def forward_needs(self) -> ForwardNeeds | None:
        """What is drawn and predicted for the loss; None where it learns from the rollout's own steps."""
        return None

    def units(
        self, advantages: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> tuple[tuple[int, ...], ...]:
        """Say which rows a loss has to see together: a unit is never cut by a micro-batch.

        Args:
            advantages: [B], as `advantages` returned them.
            group_ids: One for each row.
            valid: bool [B], False where a row has no score.

        Returns:
            Rows of each unit. A row that is in none is not trained. By default every scored row is a
            unit of its own.
        """
        del advantages, group_ids
        return tuple((row,) for row, ok in enumerate(valid.tolist()) if ok)

    @abstractmethod
    def loss(self, inputs: Any) -> LossTerms:
        """Return one term for each row.

        Args:
            inputs: `LossInputs`, (sample, step) rows, for `model_type` diffusion;
                `forward_process.ForwardLossInputs`, (sample, sigma) rows, for diffusion_forward.
        """

    def after_update(self, adapters: AdapterOperations, *, optimizer_step: int) -> None:
        """Do what follows an optimizer step: copies and moving averages of adapters.

        Not called for a step that was skipped for a gradient that is not finite.

        Args:
            adapters: What can be done.
            optimizer_step: Optimizer steps taken so far.
        """
        del adapters, optimizer_step

    def after_rollout(self, adapters: AdapterOperations, *, optimizer_step: int) -> None:
        """Do what follows the last optimizer step that a rollout is cut into; see `after_update`."""
        del adapters, optimizer_step

    def unsupported(self, model: ModelFacts) -> str | None:
        """Say why this cannot train *model*, or None."""
        del model
        return None

    def state(self) -> dict[str, Any]:
        """Plain data to be saved with a checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        del state
