"""OCR reward: how much of the wanted text a recognition model reads in the picture.

With both texts lower-cased and freed of white space, and d their edit distance,

    reward = 1                          if the target is part of what was read,
             1 - min(d, n) / n          otherwise; n is the target's length.

Source: the OCR task of Flow-GRPO, arXiv 2505.05470, and its official code. The model is RapidOCR's
PP-OCR recogniser, whose weights ship in its wheel.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from omni_core.reward import RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.options import OCRRewardConfig
from omni_trainer.rewards.pictures import images_of
from omni_trainer.targets import RULES

Picture = NDArray[np.uint8]
"""[H, W, 3], BGR."""

LINE_HEIGHT = 48
"""Pixels that the recogniser scales a line to."""


def comparable(text: str) -> str:
    """Lower-case *text* and take its white space out."""
    return "".join(text.lower().split())


def text_reward(read: str, target: str) -> float:
    """Score what was *read* against *target*, in [0, 1]; see the module's docstring.

    Raises:
        ValueError: nothing is left of the target without white space.
        ModuleNotFoundError: the extra `ocr` is not installed.
    """
    got, wanted = comparable(read), comparable(target)
    if not wanted:
        msg = f"the target {target!r} is blank"
        raise ValueError(msg)
    if wanted in got:
        return 1.0
    distance: int = _levenshtein(got, wanted)
    return 1.0 - min(distance, len(wanted)) / len(wanted)


def is_blank(read: str, target: str) -> bool:
    """Whether nothing *read* is of a kind that *target* is made of: digits, Latin letters, ...

    A recogniser reads something into nearly every picture, into an empty sign often a lone Chinese
    character, so that nothing at all was read is too rare to tell whether there was text.
    """
    return _kinds(comparable(read)).isdisjoint(_kinds(comparable(target)))


def _kinds(text: str) -> set[str]:
    return {
        unicodedata.name(character, "").partition(" ")[0]
        if character.isalpha()
        else unicodedata.category(character)
        for character in text
    }


class OCRReward(RewardFunction):
    """Scores images; details of a sample: `read`, `exact` (1 if that is the target) and `blank` (0 or 1)."""

    name = "ocr"

    def __init__(self, options: OCRRewardConfig) -> None:
        self.options = options
        self._rule = RULES[options.target_rule or "quoted"]
        self._engine: Any = None

    def setup(self) -> None:
        """Load the recogniser, and with `detect` the detector (some 0.3 s and 60 MB).

        Raises:
            ModuleNotFoundError: the extra `ocr` is not installed.
        """
        engine = _rapidocr(self.options)
        blank = np.full((LINE_HEIGHT, LINE_HEIGHT, 3), 255, np.uint8)
        for detect in {False, self.options.detect}:  # a model loads with the first picture
            engine(blank, use_det=detect)
        self._engine = engine

    def target(self, prompt: str) -> str:
        """Return the quoted text.

        Raises:
            ValueError: the prompt has no target by `target_rule`.
        """
        return self._rule(prompt)

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score `media.image`, uint8 [B, H, W, 3], against the inputs' targets.

        Raises:
            ValueError: there are no images, or not one for each input.
            RuntimeError: `setup` was not called.
        """
        texts = self.read(images_of(media, inputs, self.name))
        return [_result(text, each.target) for text, each in zip(texts, inputs, strict=True)]

    def read(self, images: Tensor) -> list[str]:
        """Read uint8 RGB pictures [B, H, W, 3]; a picture in which nothing is found gives ''."""
        if self._engine is None:
            msg = "OCRReward.setup was not called"
            raise RuntimeError(msg)
        pictures: list[Picture] = [
            np.ascontiguousarray(picture) for picture in images.cpu().numpy()[..., ::-1]
        ]
        return self._read_scenes(pictures) if self.options.detect else self._read_lines(pictures)

    def close(self) -> None:
        """Free the models."""
        self._engine = None

    def _read_lines(self, pictures: list[Picture]) -> list[str]:
        """Read each picture as one line, in batches of like widths."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        return list(self._engine.text_rec(TextRecInput(img=pictures)).txts) if pictures else []

    def _read_scenes(self, pictures: list[Picture]) -> list[str]:
        """Find the lines of each picture and join what they read, in reading order."""
        found = [self._engine(picture, use_det=True).txts for picture in pictures]
        return [" ".join(lines or ()) for lines in found]


def _result(read: str, target: str | None) -> RewardResult:
    if target is None:
        return RewardResult.failed("the row has no target text")
    return RewardResult(
        value=text_reward(read, target),
        details={
            "read": read,
            "exact": float(comparable(read) == comparable(target)),
            "blank": float(is_blank(read, target)),
        },
    )


def _rapidocr(options: OCRRewardConfig) -> Any:
    try:
        from rapidocr import RapidOCR
    except ModuleNotFoundError as exc:
        raise _missing(exc) from exc
    return RapidOCR(
        params={
            "Global.log_level": "error",
            "Global.use_cls": False,
            # The least width of a batch: its default, 320, pads a square picture to 7 times its area.
            "Rec.rec_img_shape": [3, LINE_HEIGHT, LINE_HEIGHT],
            "Rec.rec_batch_num": options.batch_size,
            "EngineConfig.onnxruntime.intra_op_num_threads": options.threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


def _levenshtein(first: str, second: str) -> int:
    try:
        from rapidfuzz.distance import Levenshtein
    except ModuleNotFoundError as exc:
        raise _missing(exc) from exc
    return Levenshtein.distance(first, second)


def _missing(cause: ModuleNotFoundError) -> ModuleNotFoundError:
    msg = f"the ocr reward needs {cause.name}: pip install omni-trainer[ocr]"
    return ModuleNotFoundError(msg, name=cause.name)
