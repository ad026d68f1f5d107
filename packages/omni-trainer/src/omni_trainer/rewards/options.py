"""What a recipe may say about the rewards that ship here. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import attrs

from omni_core.options import RewardConfig, RewardTerm, positive
from omni_core.reward_parts import Parts, check_parts, parts_with_paths
from omni_trainer.targets import RULES


@attrs.frozen(kw_only=True)
class TargetRuleConfig(RewardConfig):
    """Of rewards whose target may be taken from the prompt by one of our rules."""

    target_rule: str | None = attrs.field(default=None)
    """`quoted`: the one part in double quotes; `first_quoted`: the first of several."""

    @target_rule.validator
    def _known(self, _: Any, value: str | None) -> None:
        if value is not None and value not in RULES:
            msg = f"{value!r} is none of {', '.join(RULES)}"
            raise ValueError(msg)


@attrs.frozen(kw_only=True)
class OCRRewardConfig(TargetRuleConfig):
    """How pictures are read; a target is taken from the prompt by `target_rule` (None: `quoted`)."""

    detect: bool = False
    """Find the lines of text first and read each, for pictures of scenes; without it a picture is
    read as one line, which is right (and several times faster) where the text fills it."""
    batch_size: int = attrs.field(default=32, validator=positive)
    """Lines read together."""
    threads: int = attrs.field(default=1, validator=positive)
    """Threads of one worker's recognition model."""


class Prefer(enum.StrEnum):
    """Which files earn more."""

    SMALL = "small"
    """Pictures that compress well."""
    LARGE = "large"
    """Pictures that do not."""


@attrs.frozen(kw_only=True)
class JPEGRewardConfig(RewardConfig):
    """The size of the picture as a JPEG file, in kilobytes of 1000 bytes."""

    prefer: Prefer = Prefer.SMALL
    """`small`: the score is minus the size; `large`: it is the size."""
    quality: int = attrs.field(
        default=95, validator=[attrs.validators.ge(1), attrs.validators.le(95)]
    )
    """Of Pillow's encoder, 1 to 95."""


@attrs.frozen(kw_only=True)
class PickScoreRewardConfig(RewardConfig):
    """A CLIP model of human preference, from a local directory."""

    path: str
    """Directory of the model (safetensors)."""
    processor: str | None = None
    """Directory of its tokenizer and image preprocessing; None takes `path`. PickScore's are those of
    CLIP-ViT-H-14-laion2B-s32B-b79K."""
    scale: float = attrs.field(default=26.0, validator=positive)
    """What exp(logit_scale) cos(text, image) is divided by: 26 as Flow-GRPO does; 1 leaves it."""
    batch_size: int = attrs.field(default=32, validator=positive)
    """Pictures embedded together."""
    device: str = "cpu"
    """Device type that scores; `auto` takes the best of the machine."""

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Change where the model and its preprocessing are."""
        processor = None if self.processor is None else change(self.processor)
        whole = super().with_paths(change)
        return attrs.evolve(whole, path=change(self.path), processor=processor)


@attrs.frozen(kw_only=True)
class PythonRewardConfig(TargetRuleConfig):
    """A function of your own, in a file of your own."""

    path: str
    """The Python file, relative to the directory that the run is started in (or `package:...`); each
    process that scores reads it, so on several machines it lies on a shared disk."""
    function: str = "score"
    """Its name: `function(images, prompts, metadata)` returns one number for each image."""

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Change where the file is."""
        return attrs.evolve(super().with_paths(change), path=change(self.path))


class ImageFormat(enum.StrEnum):
    """How a picture is sent."""

    PNG = "png"
    """Exact."""
    JPEG = "jpeg"
    """Of quality 95: several times smaller, and not the picture itself."""


@attrs.frozen(kw_only=True)
class HTTPRewardConfig(TargetRuleConfig):
    """A server that scores: `omni_trainer.rewards.http` says what it is sent and answers."""

    url: str = attrs.field()
    """Where batches are posted to: http:// or https://, without credentials."""
    timeout: float = attrs.field(default=60.0, validator=positive)
    """Seconds to connect, and to wait for the answer to one batch."""
    format: ImageFormat = ImageFormat.PNG
    token_variable: str | None = None
    """Environment variable whose value goes along as a bearer token; it is in no config and no log."""

    @url.validator
    def _is_one(self, _: Any, value: str) -> None:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            msg = f"expected http://... or https://..., got {value!r}"
            raise ValueError(msg)
        if parts.username is not None or parts.password is not None:
            msg = "holds credentials, and the config is saved with the run: take reward.token_variable"
            raise ValueError(msg)


@attrs.frozen(kw_only=True)
class WeightedRewardConfig(RewardConfig):
    """Several rewards, summed; each is also reported by itself."""

    terms: Parts = attrs.field(validator=[attrs.validators.min_len(1), check_parts])
    """Name in the metrics -> reward."""
    weights: Mapping[str, float] = attrs.field(factory=dict)
    """Of the terms, by their names; 1 for one that is not named."""

    def __attrs_post_init__(self) -> None:
        unknown = [name for name in self.weights if name not in self.terms]
        if unknown:
            msg = f"weights are for {', '.join(unknown)}; the terms are {', '.join(self.terms)}"
            raise ValueError(msg)

    @property
    def summed(self) -> tuple[RewardTerm, ...]:
        """The terms with their weights."""
        return tuple(
            RewardTerm(name=name, weight=self.weights.get(name, 1.0)) for name in self.terms
        )

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """Change the paths of every term."""
        whole = super().with_paths(change)
        return attrs.evolve(whole, terms=parts_with_paths(self.terms, change))
