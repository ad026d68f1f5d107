"""Scaled dot-product attention on CPU: the engine's own has no branch for platforms out of its tree."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):  # type: ignore[misc] # vllm_omni has no types
    """The engine's SDPA, its mask broadcast over queries."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Any:
        """Attend; [B, L, heads, D] each."""
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class CpuSDPABackend(SDPABackend):  # type: ignore[misc]
    """Names the implementation above."""

    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        """Return it."""
        return CpuSDPAImpl
