"""Online distillation: the student is held to a teacher on its own trajectories, without a reward.

On every stochastic step that the student sampled, either

    kl:        KL(student || teacher) = mean_D (mu - mu_teacher)^2 / (2 s^2), exact,
    velocity:  mean_D (v - v_teacher)^2.

A row has one teacher: with several, a column of the data names each row's. Teachers share the family,
codec and conditioner of the student. Source: Flow-OPD, arXiv 2605.08063.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from omni_core.advantages import GroupAdvantages, group_advantages
from omni_core.algorithm import ModelFacts, Policy, Prediction
from omni_core.algorithms.base import ReverseAlgorithm
from omni_core.algorithms.distillation_options import WITHOUT_ADAPTER, DistillationOptions
from omni_core.choices import AdvantageStd, DistillationForm, KLForm
from omni_core.engine import LossInputs, LossTerms, StepPrediction
from omni_core.forward_process import velocity_error
from omni_core.kl import gaussian_kl


def distillation_terms(
    form: DistillationForm, student: StepPrediction, teacher: StepPrediction
) -> Tensor:
    """How far M rows are from their teacher: [M], differentiable in the student."""
    match DistillationForm.parse(form):
        case DistillationForm.KL:
            return gaussian_kl(student.mean, teacher.mean, student.std, form=KLForm.EXACT)
        case DistillationForm.VELOCITY:
            return velocity_error(student.velocity, teacher.velocity)


class Distillation(ReverseAlgorithm):
    """See the module's docstring."""

    options: DistillationOptions

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Also of the teacher."""
        return (*super().predictions, Prediction(policy=Policy.TEACHER))

    @property
    def teachers(self) -> Mapping[str, str]:
        """Those of the options, in their order."""
        return {teacher.name: teacher.path for teacher in self.options.teachers}

    def teacher_of(self, columns: Mapping[str, object]) -> int | None:
        """The one that the row's column names; without such a column, the only one there is.

        Raises:
            ValueError: no such column, or none of the teachers in it.
        """
        if self.options.route is None:
            return None
        names = list(self.teachers)
        said = columns.get(self.options.route)
        if said not in names:
            held = "is missing" if said is None else f"is {said!r}"
            msg = f"column {self.options.route!r} {held}; expected a teacher: {', '.join(names)}"
            raise ValueError(msg)
        return names.index(str(said))

    def unsupported(self, model: ModelFacts) -> str | None:
        """Teachers are adapters beside the trained one."""
        if not model.has_adapter:
            return WITHOUT_ADAPTER
        return super().unsupported(model)

    def advantages(
        self, rewards: Tensor, group_ids: Sequence[str], valid: Tensor
    ) -> GroupAdvantages:
        """Zero: a reward, if there is one, is only watched."""
        found = group_advantages(rewards, group_ids, valid=valid, std=AdvantageStd.NONE, clip=None)
        return attrs.evolve(found, advantages=torch.zeros_like(found.advantages))

    def loss(self, inputs: LossInputs) -> LossTerms:
        """Distance from the teacher; with several, each one's own is reported beside the mean."""
        if inputs.teacher is None:
            msg = "the loss needs the teacher's prediction, and the engine gave none"
            raise ValueError(msg)
        terms = distillation_terms(self.options.form, inputs.current, inputs.teacher)
        names = ["teacher_distance"]
        if len(self.teachers) > 1:
            names.append(f"teacher_distance/{list(self.teachers)[inputs.teacher_place]}")
        return self.finish(inputs, terms, dict.fromkeys(names, terms.detach()))
