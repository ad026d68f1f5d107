"""How well a picture fits its prompt by a CLIP model of human preference: PickScore.

    reward = exp(logit_scale) * cos(text, image) / scale

with the embeddings of a CLIP model in a local directory. Source: PickScore, arXiv 2305.01569; Flow-GRPO
divides by 26, which brings usual scores near 1. Any CLIP model of that layout serves: with plain CLIP it is the
CLIP score.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from omni_core import device as devices
from omni_core.resources import resolve
from omni_core.reward import RewardFunction, RewardInput, RewardResult
from omni_core.trajectory import Media
from omni_trainer.rewards.options import PickScoreRewardConfig
from omni_trainer.rewards.pictures import images_of, pillow_images


class PickScoreReward(RewardFunction):
    """Needs no target: it looks at picture and prompt."""

    name = "pickscore"

    def __init__(self, options: PickScoreRewardConfig) -> None:
        """Check that the directories hold a model and its preprocessing.

        Raises:
            FileNotFoundError: one does not; names it.
        """
        self.options = options
        self._root = _directory(options.path, "config.json")
        processor = options.path if options.processor is None else options.processor
        self._processor_root = _directory(processor, "preprocessor_config.json")
        self._model: Any = None
        self._images: Any = None
        self._tokens: Any = None
        self._device = torch.device("cpu")

    def setup(self) -> None:
        """Load the model in float32.

        Raises:
            ImportError: transformers is not installed; says how.
        """
        try:
            from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer
            from transformers.utils import logging
        except ImportError as exc:
            msg = "reward 'pickscore' needs transformers: pip install 'omni-trainer[pickscore]'"
            raise ImportError(msg) from exc
        logging.disable_progress_bar()  # type: ignore[no-untyped-call] # a run shows its own
        self._device = devices.resolve(self.options.device)
        local: dict[str, Any] = {"local_files_only": True}
        model: Any = CLIPModel.from_pretrained(
            self._root, use_safetensors=True, dtype=torch.float32, **local
        )
        self._model = model.eval().to(self._device)
        self._images = CLIPImageProcessor.from_pretrained(self._processor_root, **local)
        self._tokens = CLIPTokenizer.from_pretrained(self._processor_root, **local)

    def score(self, media: Media, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """Score `media.image`, uint8 [B, H, W, 3], against the prompts.

        Raises:
            ValueError: there are no images, or not one for each input.
        """
        pictures = pillow_images(images_of(media, inputs, self.name))
        prompts = [given.prompt for given in inputs]
        size, found = self.options.batch_size, []
        for start in range(0, len(pictures), size):
            part = slice(start, start + size)
            found += self._score(pictures[part], prompts[part]).tolist()
        return [RewardResult(value=value) for value in found]

    @torch.no_grad()
    def _score(self, pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        """Scores [B], float64."""
        pixels = self._images(images=pictures, return_tensors="pt")
        limit = self._model.config.text_config.max_position_embeddings
        # Every row is as long as the model allows: a score does not depend on the prompts beside it.
        tokens = self._tokens(
            prompts, padding="max_length", truncation=True, max_length=limit, return_tensors="pt"
        )
        said = self._model(
            input_ids=tokens["input_ids"].to(self._device),
            attention_mask=tokens["attention_mask"].to(self._device),
            pixel_values=pixels["pixel_values"].to(self._device),
        )
        image, text = (
            functional.normalize(embeds.double(), dim=-1)
            for embeds in (said.image_embeds, said.text_embeds)
        )
        scale = self._model.logit_scale.double().exp() / self.options.scale
        scores: Tensor = scale * (image * text).sum(-1)
        return scores.cpu()

    def close(self) -> None:
        """Let the model go."""
        self._model = self._images = self._tokens = None


def _directory(path: str, file: str) -> Path:
    root = resolve(path)
    if not (root / file).is_file():
        msg = (
            f"reward 'pickscore': {path!r} holds no {file} (looked in {root.absolute()}); a CLIP model and "
            "its preprocessing, as transformers saves them, are expected"
        )
        raise FileNotFoundError(msg)
    return root
