"""What a recipe may say about policy gradients on the evidence lower bound. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

import attrs

from omni_core.algorithms.base_options import OldPolicyForwardOptions
from omni_core.choices import AdvantageStd, ElboForm
from omni_core.options import optional_positive, positive
from omni_core.plugins import Plugin


@attrs.frozen(kw_only=True)
class ElboOptions(OldPolicyForwardOptions):
    """EPG, PEPG (the default) or PAR."""

    title: ClassVar[str] = "elbo"

    form: ElboForm = ElboForm.PEPG
    adv_scale: float = attrs.field(default=0.1, validator=positive)
    """Advantages are multiplied by this."""
    std: AdvantageStd = AdvantageStd.NONE
    adv_clip: float | None = attrs.field(default=None, validator=optional_positive)
    """Bound on |advantage| before it is scaled; None for no bound."""


plugin = Plugin(
    api=1,
    options=ElboOptions,
    target="omni_core.algorithms.elbo:Elbo",
    summary="policy gradients on the evidence lower bound: EPG, PEPG, PAR",
)
