"""The engine's worker, sleeping and waking without an accelerator's memory pool."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


class CpuDiffusionWorker(DiffusionWorker):  # type: ignore[misc] # vllm_omni has no types
    """While it sleeps its pipeline holds no weights, so a forward fails at once."""

    _kept: dict[str, Tensor] | None = None

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        del tag
        return nullcontext()

    def sleep(self, level: int = 1) -> int:
        """Detach all weights, keep them aside, and return how many bytes they are.

        Raises:
            ValueError: a level above 1: dropped weights cannot be read again by a worker.
        """
        if level != 1:
            msg = f"sleep level {level}: a worker on CPU knows level 1 alone"
            raise ValueError(msg)
        if self._kept is not None:
            return 0
        kept = {name: p.data for name, p in self._weights()}
        for _, parameter in self._weights():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self._kept = kept
        return sum(value.numel() * value.element_size() for value in kept.values())

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Put the weights back."""
        if self._kept is not None and (tags is None or "weights" in tags):
            for name, parameter in self._weights():
                parameter.data = self._kept[name]
            self._kept = None
        return True

    def _weights(self) -> list[tuple[str, Any]]:
        return list(self.model_runner.pipeline.named_parameters())
