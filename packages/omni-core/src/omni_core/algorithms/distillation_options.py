"""What a recipe may say about online distillation. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import attrs

from omni_core.algorithms.base_options import StochasticOptions
from omni_core.choices import DistillationForm
from omni_core.options import RunFacts
from omni_core.plugins import Plugin

WITHOUT_ADAPTER = "its teachers are adapters beside the trained one, and every weight is trained here: set model.lora"


@attrs.frozen(kw_only=True)
class TeacherConfig:
    """One teacher, of the student's own family."""

    name: str = attrs.field(
        default="teacher", validator=attrs.validators.matches_re(r"[A-Za-z0-9_-]+")
    )
    """What a data row calls it: letters, digits, `_` and `-`."""
    path: str
    """Directory of an exported adapter on the student's base."""


@attrs.frozen(kw_only=True)
class DistillationOptions(StochasticOptions):
    """Online distillation from one or several teachers."""

    title: ClassVar[str] = "distillation"

    form: DistillationForm = DistillationForm.KL
    teachers: tuple[TeacherConfig, ...] = ()
    """At least one."""
    route: str | None = None
    """Column of a data row that names its teacher; with one teacher it may be left out."""

    @property
    def needs_reward(self) -> bool:
        """A reward is only watched."""
        return False

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Change where the teachers are."""
        teachers = tuple(attrs.evolve(one, path=change(one.path)) for one in self.teachers)
        return attrs.evolve(self, teachers=teachers)

    def mistakes(self, facts: RunFacts) -> Mapping[str, str]:
        """Check kind, window and teachers against the run."""
        found = dict(super().mistakes(facts))
        if not facts.has_adapter:
            found["name"] = WITHOUT_ADAPTER
        names = [teacher.name for teacher in self.teachers]
        if not names:
            found["teachers"] = "expected at least one teacher, got none"
        elif len(set(names)) != len(names):
            found["teachers"] = f"expected names that differ, got {', '.join(names)}"
        if len(names) > 1 and self.route is None:
            found["route"] = (
                f"with {len(names)} teachers a data row has to say which is its own: expected the name "
                "of a column"
            )
        return found


plugin = Plugin(
    api=1,
    options=DistillationOptions,
    target="omni_core.algorithms.distillation:Distillation",
    summary="a student held to its teachers on its own trajectories",
)
