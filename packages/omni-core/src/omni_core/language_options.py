"""What chooses and tunes a language-policy loss, apart from torch so that configs can hold it.

The formulas are in language_loss.
"""

from __future__ import annotations

from typing import Any

import attrs

from omni_core.choices import Choice
from omni_core.options import optional_positive, positive

_optional_above_one: Any = attrs.validators.optional(attrs.validators.gt(1.0))


class PolicyForm(Choice):
    """Which surrogate `ppo_loss` is; r is the ratio of a token's probabilities, new to old."""

    VANILLA = "vanilla"
    """PPO's clip, with the dual clip for negative advantages (arXiv 1707.06347, 1912.09729)."""
    GSPO = "gspo"
    """PPO's clip on the sequence's geometric-mean ratio (arXiv 2507.18071)."""
    GPG = "gpg"
    """-A log p, without a ratio (arXiv 2504.02546)."""
    GEO_MEAN = "geo_mean"
    """GMPO: the geometric mean of token ratios that were clipped in log space (arXiv 2507.20673)."""
    CISPO = "cispo"
    """-sg(clip(r)) A log p: a clipped token still learns (arXiv 2506.13585)."""


class Aggregation(Choice):
    """How token losses become one number."""

    TOKEN_MEAN = "token-mean"
    """Every token weighs the same."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Every sequence that has a token weighs the same: the mean over sequences of their token means."""


@attrs.frozen(kw_only=True)
class PPOLossOptions:
    """Options of `ppo_loss`."""

    form: PolicyForm = attrs.field(default=PolicyForm.VANILLA, converter=PolicyForm)
    clip_ratio_low: float = attrs.field(default=0.2, validator=positive)
    """r is clipped below at 1 minus this; `geo_mean` clips log r at minus this. `gpg` has no clip."""
    clip_ratio_high: float = attrs.field(default=0.2, validator=positive)
    """r is clipped above at 1 plus this; `geo_mean` clips log r at this. Published: 4e-4 (low 3e-4) for
    `gspo`, 0.4 (both) for `geo_mean`."""
    dual_clip: float | None = attrs.field(default=3.0, validator=_optional_above_one)
    """Of `vanilla` alone: where A < 0, a term is at most -A times this; None for no such bound."""
    aggregation: Aggregation | None = attrs.field(
        default=None, converter=attrs.converters.optional(Aggregation)
    )
    """None takes the form's own: sequence means for `gspo` and `geo_mean`, token means for the rest."""

    def __attrs_post_init__(self) -> None:
        if self.form is PolicyForm.GEO_MEAN and self.aggregation is Aggregation.TOKEN_MEAN:
            msg = (
                f"form '{self.form}' has one term a sequence: aggregation is "
                f"'{Aggregation.SEQ_MEAN_TOKEN_MEAN}', not '{self.aggregation}'"
            )
            raise ValueError(msg)

    @property
    def effective_aggregation(self) -> Aggregation:
        """The one given, or the form's own."""
        if self.aggregation is not None:
            return self.aggregation
        if self.form in (PolicyForm.GSPO, PolicyForm.GEO_MEAN):
            return Aggregation.SEQ_MEAN_TOKEN_MEAN
        return Aggregation.TOKEN_MEAN


@attrs.frozen(kw_only=True)
class ValueLossOptions:
    """Options of `value_loss`."""

    clip_range: float | None = attrs.field(default=0.5, validator=optional_positive)
    """How far a value may move from the old one before the loss stops it; None for no clip."""
    aggregation: Aggregation = attrs.field(default=Aggregation.TOKEN_MEAN, converter=Aggregation)
