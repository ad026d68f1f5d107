"""A conditioner that is a stock pipeline's own `encode_prompt`, over frozen encoders and nothing else."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from omni_core.model import Conditioner


class StockConditioner(Conditioner):
    """A family derives from it and writes `encode`, with `torch.no_grad`."""

    encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)
    """Components of the pipeline that encode; those that a folder may lack included."""

    def __init__(self, pipeline: Any, *, max_sequence_length: int) -> None:
        self.pipeline = pipeline
        """As `FolderFamily.load_text_pipeline` reads it."""
        self.max_sequence_length = max_sequence_length
        self.device = torch.device("cpu")
        for encoder in self._modules():
            encoder.eval().requires_grad_(False)

    def _modules(self) -> list[nn.Module]:
        found = [getattr(self.pipeline, name) for name in self.encoders]
        return [encoder for encoder in found if encoder is not None]

    def to(self, device: torch.device | str) -> None:
        """Move the encoders."""
        self.device = torch.device(device)
        for encoder in self._modules():
            encoder.to(self.device)
